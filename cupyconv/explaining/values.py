"""Numbers that an explanation shows: the tensors that were passed, and random operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isfinite, prod
from typing import Any, Literal, get_args

from cupyconv import arrays
from cupyconv.errors import require_word
from cupyconv.problem import REAL_PART, ConvProblem

OPERANDS = ("x", "w", "dy")
RESULTS = ("y", "dx", "dw")

Kind = Literal["normal", "integers"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of random numbers: normally distributed, or integers from -3 to 3 for sums by hand."""

MOST_ELEMENTS = 20_000_000
"""Largest count of numbers in x, w and dy that is drawn at random by default (chosen)."""

MOST_FLOPS = 5e9
"""Largest number of floating-point operations of a pass that is computed by default (chosen)."""


def require_kind(what: str, kind: str) -> str:
    """Return ``kind`` if it is a valid kind of random numbers.

    Raises:
        ConvError: the kind is unknown.
    """
    require_word(what, kind, KINDS)
    return kind


def random(generator: Any, shape: tuple[int, ...], dtype: str, kind: str = "normal") -> Any:
    """Return a NumPy array of random numbers."""
    import numpy as np

    if dtype in REAL_PART:
        real, imaginary = (random(generator, shape, REAL_PART[dtype], kind) for _ in range(2))
        return real + 1j * imaginary
    if kind == "integers":
        return generator.integers(-3, 4, shape).astype(arrays.numpy_dtype(dtype))
    # Draw 16-bit types as float32, which takes half the memory of float64, and round.
    drawn = np.float64 if dtype == "float64" else np.float32
    return generator.standard_normal(shape, dtype=drawn).astype(arrays.numpy_dtype(dtype))


def draw(problem: ConvProblem, seed: int = 0, kind: str = "normal") -> dict[str, Any]:
    """Return random x, w and dy; all three are drawn, so that each depends only on the seed."""
    import numpy as np

    generator = np.random.default_rng(seed)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    return {
        name: random(generator, shape, problem.dtype, kind)
        for name, shape in zip(OPERANDS, shapes, strict=True)
    }


class Values(Mapping[str, Any]):
    """The tensors x, w, dy, y, dx and dw of a layer by name, computed when they are first read.

    Operands that are too large to draw and results that take long to compute have no key;
    ``missing`` returns the reason.  Results are computed on the host.

    Args:
        problem: the layer.
        given: passed tensors by name, in the problem's formats.
        kind: kind of random numbers for operands that were not passed; None for no values.
        seed: seed of the random numbers.
        large: compute the values whatever the size of the layer.
    """

    def __init__(
        self,
        problem: ConvProblem,
        given: Mapping[str, Any] | None = None,
        kind: str | None = "normal",
        seed: int = 0,
        large: bool = False,
    ) -> None:
        self.problem, self.given, self.kind, self.seed = problem, dict(given or {}), kind, seed
        self.large = large
        self._results: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        if name in OPERANDS:
            return self._drawn[name]
        if name not in RESULTS or not self._computable:
            raise KeyError(name)
        if name not in self._results:
            self._results[name] = self.compute(name)
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in (*OPERANDS, *RESULTS) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        if name in self.given:
            return True
        if name in RESULTS:
            return self._computable
        return name in OPERANDS and self.kind is not None and not self.too_many

    @property
    def too_many(self) -> int:
        """Count of numbers in x, w and dy if it is too large to draw them, else 0."""
        problem = self.problem
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        # Count an empty batch as one image: NumPy rejects even an array of 0 by 2^62 numbers.
        count = sum(prod(max(size, 1) for size in shape) for shape in shapes)
        return count if count > MOST_ELEMENTS and not (self.large and problem.N) else 0

    def missing(self, name: str) -> str:
        """Return why a tensor has no values and which option adds them; empty if it has values."""
        if name in self:
            return ""
        if not self.problem.N:
            return "The batch is empty, so there is nothing to compute."
        how = "Pass --large on the command line, or large=True to explain(), for its values."
        if all(operand in self for operand in OPERANDS):
            return (
                f"A pass takes {self.problem.flops:.2g} floating-point operations; an explanation "
                f"computes at most {MOST_FLOPS:.2g}. {how}"
            )
        if self.kind is None:
            return "explain() was called with values=None. Pass values='normal' for random values."
        return (
            f"x, w and dy have {self.too_many:,} numbers; an explanation draws at most "
            f"{MOST_ELEMENTS:,}. {how}"
        )

    @cached_property
    def _drawn(self) -> Mapping[str, Any]:
        if self.kind is None or self.too_many:
            return {}
        return draw(self.problem, self.seed, self.kind)

    @cached_property
    def _computable(self) -> bool:
        known = all(name in self for name in OPERANDS)
        fits = self.large or self.problem.flops <= MOST_FLOPS
        return known and self.problem.N > 0 and fits

    def compute(self, name: str, dtype: str = "") -> Any:
        """Return y, dx or dw as the library computes it.

        Args:
            name: "y", "dx" or "dw".
            dtype: dtype of the computation; the problem's by default.

        Raises:
            KeyError: an operand has no values.
        """
        import numpy as np

        from cupyconv import operations

        problem = self.problem
        kind = arrays.numpy_dtype(dtype or problem.dtype)
        with np.errstate(over="ignore"):  # overflow to infinity, as a layer of this dtype does
            x, w, dy = (
                arrays.on_host(self[operand]).astype(kind, copy=False) for operand in OPERANDS
            )
        if name == "y":
            return operations.conv_forward(x, w, **problem.keywords)
        if name == "dx":
            return operations.conv_backprop_input(problem.input_shape, w, dy, **problem.keywords)
        return operations.conv_backprop_filter(x, problem.filter_shape, dy, **problem.keywords)

    @property
    def source(self) -> str:
        """Origin of the values of x, w and dy, in words."""
        given = [name for name in OPERANDS if name in self.given]
        parts = [f"{', '.join(given)} as passed"] if given else []
        if len(given) < len(OPERANDS) and self.kind is not None:
            what = "random integers" if self.kind == "integers" else "random data"
            parts.append(f"{what} of seed {self.seed}")
        return ", ".join(parts)


def planes(problem: ConvProblem, tensor: str, array: Any, width: int = 92) -> Iterator[str]:
    """Yield lines of text with a tensor's numbers: planes of channels, side by side."""
    import numpy as np

    order = problem.filter_axes if tensor in ("w", "dw") else problem.data_axes
    kind = np.complex128 if problem.is_complex else np.float64
    numbers = arrays.on_host(array).astype(kind).transpose(order)
    texts = np.vectorize(written, otypes=[object])(numbers)
    cell = max(map(len, texts.ravel()))
    flat = 2 if problem.spatial_rank > 1 else 1
    blocks = []
    for place in np.ndindex(texts.shape[:-flat]):
        plane = np.atleast_2d(texts[place])
        rows = ["  ".join(text.rjust(cell) for text in row) for row in plane]
        blocks.append((f"{tensor}[{','.join(map(str, place))}]", rows))
    wide = max(max(len(name), len(rows[0])) for name, rows in blocks) + 4
    beside = max(width // wide, 1)
    if tensor in ("w", "dw"):  # start a new row of planes for each filter
        beside = min(beside, texts.shape[1])
    for first in range(0, len(blocks), beside):
        line = blocks[first : first + beside]
        if first:
            yield ""
        yield "".join(name.ljust(wide) for name, _ in line).rstrip()
        for row in zip(*(rows for _, rows in line), strict=True):
            yield "".join(text.ljust(wide) for text in row).rstrip()


def written(value: float | complex) -> str:
    """Return a number in a few characters; an integer without a decimal point."""
    if isinstance(value, complex):
        imaginary = written(value.imag)
        return f"{written(value.real)}{'' if imaginary.startswith('-') else '+'}{imaginary}j"
    if isfinite(value) and value == int(value):
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.3g}"


def short(value: float) -> str:
    """Return a number in at most five characters for a cell, by the same rules as page.js."""
    if not isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 10_000:
        return f"{value + 0:.0f}"
    if size < 0.995:
        text = f"{value:.2f}"
        return text if float(text) else "0.00"  # not "-0.00"
    if size < 99.5:
        return f"{value:.1f}"
    if size < 9999.5:
        return f"{value:.0f}"
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
