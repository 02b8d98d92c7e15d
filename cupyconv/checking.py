"""Comparison of results with a reference, within a bound for rounding.

``Truth`` compares every element of every result.  Every difference is divided by the sum of the
absolute values of the element's terms, because rounding errors grow with the terms even where the
terms cancel; numbers that underflow add ``least_scale``.  The bound is twice the error of plain
summation, one term after another, in the same precision on the same data, plus one unit in the last
place.

``Excerpt`` compares a part of one result of a large layer on random data.  It compares norms
instead of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyconv import arrays, operations
from cupyconv.cpu import naive
from cupyconv.cpu.views import accumulator_of, data_view, filter_view
from cupyconv.planning import Impl, Precision
from cupyconv.problem import PASSES, REAL_PART, RESULT, ConvProblem, DtypeName

LARGE = 1e9
"""FLOPs of a pass above which a planned implementation, not the slow reference, computes
``Truth.magnitudes`` and the losses of finite differences (hand-set)."""

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROUNDOFF |= {name: ROUNDOFF[part] for name, part in REAL_PART.items()}
"""Largest relative error of rounding to nearest, by dtype: half a unit in the last place."""

EXACT_UP_TO = {dtype: round(1 / roundoff) for dtype, roundoff in ROUNDOFF.items()}
"""Largest n for which the dtype represents all integers from -n to n exactly, keyed by dtype."""

SINGLE_ELEMENTS = 3
"""Elements per tensor that finite differences change one at a time (hand-set)."""

_DEVIATIONS = 6
"""Ratio of the permitted difference of a slope to the bound of an element's difference (hand-set).

A slope is a finite difference of the loss.  If a step changes all elements by normally distributed
numbers, the error of the slope is normally distributed, and its standard deviation is the norm of
the elements' errors.  It exceeds 6 standard deviations once in 500 million draws.
"""


class Operands(NamedTuple):
    """Operands of the passes, as NumPy or CuPy arrays."""

    x: Any
    w: Any
    dy: Any


class Results(NamedTuple):
    """Results of the three passes and the bias gradient, on the host."""

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    db: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """Outcome of one check of a result.

    Attributes:
        check: name of the check, such as "finite differences".
        tensor: name of the result, or of several results.
        compared: description of the compared values.
        count: number of compared values.
        difference: largest relative difference; None if infinities or NaN prevent the comparison.
        bound: largest relative difference that rounding explains.
    """

    check: str
    tensor: str
    compared: str
    count: int
    difference: float | None
    bound: float

    @property
    def passed(self) -> bool | None:
        """Whether the difference is at most the bound; None if there is no difference."""
        return None if self.difference is None else self.difference <= self.bound


def pass_function(
    problem: ConvProblem, pass_: str, impl: Impl = "auto", precision: Precision = "ieee"
) -> Callable[[Operands], Any]:
    """Return a function that computes a pass of a problem with the public functions."""
    words: dict[str, Any] = {**problem.keywords, "impl": impl, "precision": precision}
    x_shape, w_shape = problem.input_shape, problem.filter_shape
    functions: dict[str, Callable[[Operands], Any]] = {
        "forward": lambda o: operations.conv_forward(o.x, o.w, **words),
        "backprop_input": lambda o: operations.conv_backprop_input(x_shape, o.w, o.dy, **words),
        "backprop_filter": lambda o: operations.conv_backprop_filter(o.x, w_shape, o.dy, **words),
    }
    return functions[pass_]


def _reversed(tensors: Operands, is_transposed: bool) -> Operands:
    """Return a layer's operands as those of the problem; a transposed layer reverses x and dy."""
    return Operands(tensors.dy, tensors.w, tensors.x) if is_transposed else tensors


def compute(
    problem: ConvProblem,
    operands: Operands,
    impl: Impl,
    passes: Sequence[str] = PASSES,
    *,
    xp: Any = np,
    is_transposed: bool = False,
) -> Results:
    """Compute the three passes and the bias gradient with the public functions.

    Args:
        operands: operands as NumPy arrays.
        impl: implementation that computes the passes in ``passes``.  The planner chooses the
            implementation of the other passes.
        passes: names of passes.
        xp: numpy to compute on the CPU, or cupy to compute on the current GPU.
        is_transposed: whether operands and results are those of the transposed layer that reverses
            the problem.
    """
    there = Operands(*map(xp.asarray, _reversed(operands, is_transposed)))
    by: dict[str, Impl] = {pass_: impl if pass_ in passes else "auto" for pass_ in PASSES}
    y, dx, dw = (pass_function(problem, pass_, by[pass_])(there) for pass_ in PASSES)
    if is_transposed:
        y, dx = dx, y
    dy = there.x if is_transposed else there.dy
    db = operations.conv_backprop_bias(dy, data_format=problem.data_format)
    return Results(*map(arrays.on_host, (y, dx, dw, db)))


@dataclass(eq=False)
class Truth:
    """Expected results of a problem on certain operands, and the permitted differences.

    Finite differences are those of the loss <y, dy>, the inner product of y and dy.  The gradients
    of this loss with respect to x, w and the bias are dx, dw and db.

    Args:
        problem: the layer.
        operands: operands as NumPy arrays.
        forward: implementation that computes the y of these losses; by default, the reference, or
            for a large layer the planned implementation if its y agrees with the reference.
        is_transposed: whether operands and results are those of the transposed layer that reverses
            the problem, which must be real.
    """

    problem: ConvProblem
    operands: Operands
    forward: Impl | None = None
    is_transposed: bool = False

    @cached_property
    def operands64(self) -> Operands:
        return Operands(*(array.astype(self._wide) for array in self.operands))

    @property
    def _wide(self) -> type[np.inexact]:
        """Dtype of expected results: float64, or complex128 for complex problems."""
        return np.complex128 if self.problem.is_complex else np.float64

    @cached_property
    def results(self) -> Results:
        """Results of the reference implementation, in float64 or complex128."""
        return self._computed(self.operands64, "reference")

    @cached_property
    def magnitudes(self) -> Results:
        """Sum of the absolute values of the terms, for each element of each result.

        All terms of these sums are positive and cannot cancel, so every float64 implementation is
        accurate enough.
        """
        impl: Impl = "auto" if self._is_large else "reference"
        return self._computed(Operands(*map(np.abs, self.operands64)), impl)

    def _scale(self, name: str, index: tuple[int, ...] = ()) -> Any:
        """Return the scale of the rounding errors of each element of a result, or of one element.

        Absolute values of terms bound the errors of normal numbers, and ``least_scale`` the others.
        """
        return getattr(self.magnitudes, name)[index] + least_scale(self.problem)

    def _computed(self, operands: Operands, impl: Impl) -> Results:
        return compute(self.problem, operands, impl, is_transposed=self.is_transposed)

    @property
    def _is_large(self) -> bool:
        return self.problem.flops > LARGE

    @cached_property
    def _forward(self) -> Impl:
        """Implementation that computes the losses of finite differences.

        Small layers use the reference.  Large layers use the planned float64 implementation if its
        y agrees with the reference up to float64 rounding; otherwise, they use the reference.
        """
        if self.forward or not self._is_large:
            return self.forward or "reference"
        x, w, _ = self.operands64
        y = self._layer(x, w, impl="auto")
        with np.errstate(all="ignore"):
            apart = np.abs(y - self.results.y)
            same = apart <= 1e-12 * self.magnitudes.y
        return "auto" if bool(same.all()) else "reference"

    def _layer(self, x: np.ndarray, w: np.ndarray, bias: Any = None, *, impl: Impl) -> Any:
        """Return the layer's y for other operands."""
        if not self.is_transposed:
            return operations.conv_forward(x, w, bias, impl=impl, **self.problem.keywords)
        shape = self.operands.dy.shape
        keywords = {**self.problem.keywords, "output_shape": shape, "impl": impl}
        return operations.conv_transpose(x, w, bias, **keywords)

    @cached_property
    def bounds(self) -> Mapping[str, float]:
        """Largest relative difference that rounding can cause, keyed by the result's name."""
        if self.problem.dtype in _NARROWER:
            return self._bounds64
        # Plain summation of a few terms may be exact by chance, so the error is at least roundoff.
        roundoff, plain = ROUNDOFF[self.problem.dtype], self._plain._asdict()
        errors = {name: max(self.difference(name, plain[name]), roundoff) for name in plain}
        return {name: 2 * error + 2 * roundoff for name, error in errors.items()}

    @cached_property
    def _plain(self) -> Results:
        """Results of plain summation in the problem's own dtype."""
        return _naive(self.problem, self.operands, self.is_transposed)

    @property
    def _bounds64(self) -> Mapping[str, float]:
        """Bounds for float64 and complex128.

        Measured bounds would need a reference that is more precise than float64.  The bounds of
        float32 or complex64 are therefore used, and assumed to be the same number of units in the
        last place.
        """
        narrower = _NARROWER[self.problem.dtype]
        with np.errstate(all="ignore"):
            rounded = Operands(*(_to_unit(a).astype(narrower) for a in self.operands))
        less = Truth(self.problem.replace(dtype=narrower), rounded, None, self.is_transposed)
        scale = ROUNDOFF["float64"] / ROUNDOFF["float32"]
        return {name: scale * bound for name, bound in less.bounds.items()}

    def prepared(self) -> Iterator[None]:
        """Compute the values that the comparisons need, and yield after each of three parts.

        The caller can thus show progress.
        """
        with ThreadPoolExecutor(1) as beside:
            if self._is_large and self.problem.dtype != "float64":
                beside.submit(lambda: self._plain)  # computes and caches the property in parallel
            for part in ("results", "magnitudes", "bounds"):
                getattr(self, part)
                yield

    def difference(self, name: str, actual: np.ndarray) -> float:
        """Return the largest relative difference of a result's elements.

        Args:
            name: name of the result: "y", "dx", "dw" or "db".
            actual: the result.
        """
        return float(np.max(self._differences(name, actual), initial=0.0))

    def _differences(self, name: str, actual: np.ndarray) -> np.ndarray:
        """Return the relative difference of each element of a result.

        The relative difference is the distance from the expected value, divided by the scale of
        rounding errors.  If the element or its expected value is not finite, the relative
        difference is zero if both are equal or NaN, and infinite otherwise.  In two cases it is
        zero because implementations differ.  If partial sums may overflow, an element may be
        infinite or NaN.  If an operand is not finite, an element may be NaN, because operands may
        be multiplied by the zeros of the padding, and infinite complex elements may differ.
        """
        expected, magnitude = getattr(self.results, name), getattr(self.magnitudes, name)
        largest = float(ml_dtypes.finfo(accumulator_of(self.problem.dtype)).max)
        with np.errstate(all="ignore"):
            rounded = expected.astype(arrays.numpy_dtype(self.problem.dtype)).astype(self._wide)
            values = actual.astype(self._wide, copy=False)
            same = (values == rounded) | (np.isnan(values) & np.isnan(rounded))
            finite = np.isfinite(values) & np.isfinite(rounded)
            if self._operands_are_finite:
                same |= ~np.isfinite(values) & (largest < magnitude)
            else:
                infinite = ~np.isfinite(values) & ~np.isfinite(rounded)
                same |= np.isnan(values) | (infinite & self.problem.is_complex)
            differences = np.where(finite, np.abs(values - expected), np.where(same, 0.0, np.inf))
            compared = finite & (differences != 0)
            del rounded, values, same, finite
            return np.divide(differences, self._scale(name), differences, where=compared)

    def against_reference(self, results: Results) -> list[Agreement]:
        """Compare each result with the reference, element by element."""
        agreements = []
        for name, array in results._asdict().items():
            count, difference = array.size, self.difference(name, array)
            compared, bound = f"all {count} elements", self.bounds[name]
            agreements.append(
                Agreement("float64 reference", name, compared, count, difference, bound)
            )
        return agreements

    # -- finite differences ---------------------------------------------------------------------

    def against_finite_differences(self, results: Results, seed: int) -> Iterator[Agreement]:
        """Compare dx, dw and db with central differences of the loss <y, dy>, in float64.

        The loss is linear in x, in w and in the bias, so central differences of any step size are
        exact up to rounding.  For each of the three tensors, one step changes all elements
        together, by normally distributed numbers, because errors may cancel if all numbers have
        one size.  Further steps change single elements, SINGLE_ELEMENTS of x and as many of w:
        the elements whose gradients differ most from the reference.
        """
        generator = np.random.default_rng(seed)
        # Rounding error of the loss, a float64 sum of all terms.
        floor = 8 * ROUNDOFF["float64"] * math.sqrt(max(self.problem.flops, 1))
        for name in ("dx", "dw", "db"):
            yield self._finite_difference(name, getattr(results, name), generator, floor)

    def _finite_difference(
        self, name: str, gradient: np.ndarray, generator: np.random.Generator, floor: float
    ) -> Agreement:
        singles = min(SINGLE_ELEMENTS, gradient.size) if name != "db" else 0
        changed = f"all {gradient.size} changed at once"
        if singles:
            changed += f", {singles} singly"
        difference = self._worst_slope(name, gradient.astype(self._wide), singles, generator)
        bound = _DEVIATIONS * self.bounds[name] + floor
        return Agreement("finite differences", name, changed, 1 + singles, difference, bound)

    def _worst_slope(
        self, name: str, gradient: np.ndarray, singles: int, generator: np.random.Generator
    ) -> float | None:
        """Return the largest relative difference between expected and measured slopes of the loss.

        For each step, the expected slope follows from ``gradient``, and the measured slope is a
        central difference.  Return None if a value is not finite.
        """
        indices = self._worst(name, gradient, singles)
        directions = generator.standard_normal(gradient.shape)
        if self.problem.is_complex:
            directions = directions + 1j * generator.standard_normal(gradient.shape)
        if not (self._finite and self._loss_scale < math.inf and np.isfinite(gradient).all()):
            return None
        size = float(np.hypot.reduce(self._scale(name).ravel()))
        slope = self._slope(name, directions, self._step(size))
        slopes = [(_inner(gradient, directions), slope, size)]
        for index in indices:
            part, place = self._around(name, index)
            direction = np.zeros(getattr(part.operands, name[1:]).shape, gradient.dtype)
            direction[place] = unit = directions[index] / abs(directions[index])
            expected = _inner(gradient[index], unit)
            size = float(self._scale(name, index))
            slopes.append((expected, part._slope(name, direction, self._step(size)), size))
        if not all(math.isfinite(slope) for _, slope, _ in slopes):
            return None  # a step or a loss overflowed float64
        return max(_ratio(expected - slope, scale) for expected, slope, scale in slopes)

    def _worst(self, name: str, gradient: np.ndarray, count: int) -> list[tuple[int, ...]]:
        """Return the indices of the elements that differ most from the reference."""
        differences = self._differences(name, gradient)
        numbers = np.argpartition(differences, -count, axis=None)[-count:] if count else ()
        return [tuple(map(int, np.unravel_index(n, gradient.shape))) for n in numbers]

    def _around(self, name: str, index: tuple[int, ...]) -> tuple[Truth, tuple[int, ...]]:
        """Return the part of a large layer that an element affects, and the element's index there.

        An element of x affects only the outputs of its image, and an element of w only the outputs
        of its output channel.  A small layer, and a w with groups, are returned whole.

        Args:
            name: "dx" for an element of x, "dw" for an element of w.
            index: index of the element.
        """
        problem, (x, w, dy) = self.problem, self.operands64
        n, k = problem.data_axes[:2]
        o = problem.filter_axes[1 if self.is_transposed else 0]
        axis = n if name == "dx" else o
        if not self._is_large or (name == "dw" and problem.groups > 1):
            return self, index
        only = slice(index[axis], index[axis] + 1)
        if name == "dx":
            parts = Operands(_part_of_axis(x, n, only), w, _part_of_axis(dy, n, only))
        else:
            parts = Operands(x, _part_of_axis(w, o, only), _part_of_axis(dy, k, only))
        inputs = _reversed(parts, self.is_transposed).x
        shapes = {"input_shape": inputs.shape, "filter_shape": parts.w.shape}
        part = Truth(problem.replace(**shapes), parts, self._forward, self.is_transposed)
        return part, (*index[:axis], 0, *index[axis + 1 :])

    def _step(self, size: float) -> float:
        """Return the step of a finite difference, a power of two.

        The loss is linear, so a larger step only reduces the effect of rounding.  A step that
        changes the loss by about the sum of its absolute terms makes this effect as small as the
        rounding of the loss.  Dividing by a power of two is exact.

        Args:
            size: scale of the slope's rounding error.
        """
        loss = max(self._loss_scale, 2.0**-511)  # so that the changed results are normal numbers
        if loss == math.inf or not 0 < size < math.inf:
            return 1.0
        power = round(math.log2(loss) - math.log2(size))
        return 2.0 ** min(max(power, -1022), 1022)

    @cached_property
    def _loss_scale(self) -> float:
        """Scale of the rounding errors of <y, dy>, <x, dx> and <w, dw>, the largest of the three.

        Apart from ``least_scale``, each is the sum of the absolute values of the loss's terms.
        """
        x, w, dy = self.operands64
        with np.errstate(all="ignore"):
            pairs = {"y": dy, "dx": x, "dw": w}.items()
            return float(max(np.sum(self._scale(name) * np.abs(array)) for name, array in pairs))

    def _slope(self, name: str, direction: np.ndarray, step: float) -> float:
        """Return the central difference (loss(t + h * d) - loss(t - h * d)) / 2h.

        h is ``step``, and d is ``direction``.  t is x, w or a bias of zeros, for ``name`` "dx",
        "dw" or "db".
        """
        x, w, dy = self.operands64
        bias = np.zeros(self.results.db.shape, self._wide)
        operand = {"dx": x, "dw": w, "db": bias}[name]
        outputs = []
        with np.errstate(all="ignore"):
            for signed in (step, -step):
                operands = {"dx": x, "dw": w, "db": bias, name: operand + signed * direction}
                outputs.append(self._layer(*operands.values(), impl=self._forward))
            return _inner(dy, outputs[0] - outputs[1]) / (2 * step)

    # -- the adjoint identity -------------------------------------------------------------------

    def inner_products(self, results: Results) -> dict[str, float]:
        """Return <y, dy>, <x, dx> and <w, dw>, keyed by these texts.

        <a, b> is the sum of a * b over all elements, and for complex dtypes the real part of the
        sum of conj(a) * b.  In exact arithmetic, the three values are equal: each is the sum of all
        terms of the loss.
        """
        x, w, dy = self.operands64
        pairs = {"y,dy": (results.y, dy), "x,dx": (x, results.dx), "w,dw": (w, results.dw)}
        with np.errstate(all="ignore"):
            return {
                f"<{name}>": _inner(a.astype(self._wide), b.astype(self._wide))
                for name, (a, b) in pairs.items()
            }

    def against_adjoint(self, results: Results) -> Agreement:
        """Compare <y, dy>, <x, dx> and <w, dw> with each other, without expected results."""
        bound = sum(sorted(self.bounds[name] for name in ("y", "dx", "dw"))[1:])
        products, scale = self.inner_products(results), self._loss_scale
        return adjoint_agreement(products, scale, bound, is_finite=self._finite)

    @cached_property
    def _operands_are_finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in self.operands64)

    @cached_property
    def _finite(self) -> bool:
        """Whether all operands and expected results are finite."""
        results = (bool(np.isfinite(array).all()) for array in self.results)
        return self._operands_are_finite and all(results)


_NARROWER: dict[str, DtypeName] = {"float64": "float32", "complex128": "complex64"}
"""Single-precision dtype whose bounds are scaled, keyed by double-precision dtype."""


class Excerpt:
    """The last images, groups and channels of a pass's result, compared by their norm.

    These elements have the largest offsets, so an offset that overflows corrupts them first.

    Attributes:
        share: fraction of the pass's multiply-adds that compute this part; 1 is the whole result.
    """

    def __init__(
        self, problem: ConvProblem, pass_: str, operands: Operands, impl: Impl, most_flops: float
    ) -> None:
        """Choose the part and compute its expected values.

        Args:
            operands: random operands, as NumPy or CuPy arrays.
            impl: CPU implementation that computes the expected values in float64 or complex128.
            most_flops: largest number of FLOPs to spend.  The part keeps at least one image, group
                and channel even if their FLOPs exceed this limit.
        """
        self._problem, self._pass = problem, pass_
        extents = {
            "images": max(problem.N, 1),
            "groups": problem.groups,
            "filters": problem.K // problem.groups,
            "channels": problem.C // problem.groups,
        }
        sizes = dict(extents)
        self.share = 1.0
        for axis in _NOT_SUMMED[pass_]:
            if self.share * problem.flops <= most_flops:
                break
            sizes[axis] = max(int(extents[axis] * most_flops / problem.flops / self.share), 1)
            self.share = math.prod(sizes.values()) / math.prod(extents.values())
        images, groups, filters, channels = (
            slice(extents[axis] - size, extents[axis]) for axis, size in sizes.items()
        )
        self._slices = {
            "y": (images, groups, filters),
            "dx": (images, groups, channels),
            "dw": (groups, filters, channels),
        }
        # Row-major copies with separate axes for groups and for the channels of a group.
        x, w, dy = (
            self._part(name, array) for name, array in zip(("dx", "dw", "y"), operands, strict=True)
        )
        x_shape = (len(x), x.shape[1] * x.shape[2], *x.shape[3:])
        w_shape = (w.shape[0] * w.shape[1], *w.shape[2:])
        layer = {key: problem.keywords[key] for key in ("stride", "dilation")}
        layer |= {"padding": problem.padding, "groups": len(w), "dtype": x.dtype.type}
        part = ConvProblem(x_shape, w_shape, **layer)
        shapes = (part.input_shape, part.filter_shape, part.output_shape)
        there = Operands(*(a.reshape(s) for a, s in zip((x, w, dy), shapes, strict=True)))
        compute = pass_function(part, pass_, impl)
        self._expected = expected = compute(there).ravel()
        count = max(expected.size, 1)
        squares = np.vdot(expected, expected).real
        if expected.size < _FEW:  # the terms of a few elements may cancel by chance
            squares = max(squares, compute(Operands(*(np.abs(a) ** 2 for a in there))).real.sum())
        self._scale = math.sqrt(squares / count) or 1.0

    def _part(self, name: str, array: Any) -> np.ndarray:
        """Return this part of a tensor, in float64 or complex128 on the host."""
        view = filter_view if name == "dw" else data_view
        part = arrays.on_host(view(self._problem, array)[self._slices[name]])
        return part.astype(np.complex128 if self._problem.is_complex else np.float64, order="C")

    def judge(self, result: Any, precision: Precision = "ieee") -> Agreement:
        """Compare a result, as a NumPy or CuPy array, with the expected values.

        The relative difference is the ratio of the errors to the RMS of the expected values.  The
        errors count with their RMS, or with the largest error divided by _PEAK if that is larger.
        If the part has fewer than _FEW elements, the divisor is at least the RMS that the elements
        would have if their terms did not cancel: the root of the mean sum of squared terms.
        """
        name, expected = RESULT[self._pass], self._expected
        with np.errstate(all="ignore"):
            error = np.abs(self._part(name, result).ravel() - expected)
            spread = math.sqrt(np.vdot(error, error) / max(expected.size, 1))
            largest = float(np.max(error, initial=0.0))
        size = float(np.maximum(spread, largest / _PEAK))  # NaN if either is NaN
        compared, bound = f"{self.share:.0%} of the multiply-adds", self._bound(precision)
        ratio = size / self._scale
        return Agreement("float64 reference", name, compared, expected.size, ratio, bound)

    def _bound(self, precision: Precision) -> float:
        """Return the largest allowed relative difference: twice the expected error.

        The expected error is the sum of these parts:

        * The result is rounded once to its dtype.
        * A sum is rounded at every addition, in float32 for 16-bit dtypes.  On random data this
          error grows with the square root of the number of terms.  A complex product adds two
          real products to the real part and two to the imaginary part.
        * With "tf32", both float32 operands are rounded to TF32.
        * Tensor cores truncate their sums every 16 terms.  This error grows with the number of
          terms, and is limited to 0.5 %.  It applies to 16-bit dtypes and to "tf32".
        """
        problem = self._problem
        terms = problem.gemm(self._pass).gemm_k * (2 if problem.is_complex else 1)
        dtype = REAL_PART.get(problem.dtype, problem.dtype)
        sum_roundoff = ROUNDOFF["float64" if dtype == "float64" else "float32"]
        expected = ROUNDOFF[dtype] + sum_roundoff * math.sqrt(terms)
        tf32 = problem.dtype == "float32" and precision == "tf32"
        if tf32:
            expected += math.sqrt(2) * _TF32_ROUNDOFF
        if tf32 or dtype in ("float16", "bfloat16"):
            expected += min(sum_roundoff * terms / 16, 5e-3)
        return 2 * expected


_NOT_SUMMED = {
    "forward": ("images", "groups", "filters"),
    "backprop_input": ("images", "groups", "channels"),
    "backprop_filter": ("groups", "filters", "channels"),
}
"""Axes of the result of each pass, which the pass does not sum over, keyed by pass.

"filters" are the output channels of one group, and "channels" are its input channels.
"""

_TF32_ROUNDOFF = 2.0**-11
"""Largest relative error of rounding to TF32, which has 10 bits of mantissa."""

_FEW = 2 * _DEVIATIONS**2
"""Number of elements below which the norm of random sums may be small by chance.

The norm of n random sums has a relative standard deviation of 1 / sqrt(2 n).  From _FEW elements
on, _DEVIATIONS of them are at most half the norm, which the factor 2 of the bound covers.
"""

_PEAK = 16
"""Allowed ratio of the largest error to the RMS of the errors (hand-set).

The ratio reaches about 6 for normally distributed errors.
"""


def least_scale(problem: ConvProblem) -> float:
    """Return the scale of the rounding errors of a result's element whose terms all underflow.

    Rounding errs by at most ROUNDOFF times the larger of the number and the smallest normal number.
    The result is rounded to its dtype, and each product to the accumulator's.
    """
    terms = max(problem.gemm(pass_).gemm_k for pass_ in PASSES)
    dtype, sums = arrays.numpy_dtype(problem.dtype), accumulator_of(problem.dtype)
    smallest, smallest_sum = (float(ml_dtypes.finfo(d).smallest_normal) for d in (dtype, sums))
    return smallest + terms * smallest_sum * ROUNDOFF[sums.name] / ROUNDOFF[problem.dtype]


def adjoint_agreement(
    products: Mapping[str, float], scale: float, bound: float, *, is_finite: bool
) -> Agreement:
    """Return whether inner products agree; their largest difference is divided by ``scale``.

    Args:
        is_finite: whether the multiplied tensors are finite.
    """
    values, difference = list(products.values()), None
    if is_finite and all(map(math.isfinite, values)):
        difference = _ratio(max(values) - min(values), scale)
    return Agreement("adjoint identity", "y, dx, dw", "3 inner products", 3, difference, bound)


def integer_operands(problem: ConvProblem, generator: np.random.Generator) -> Operands:
    """Return integer-valued operands for which every partial sum is exact in the dtype."""
    dtype = arrays.numpy_dtype(problem.dtype)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    largest, density = 8, 1.0

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        parts = [
            generator.integers(-largest, largest, size=shape, endpoint=True)
            * (generator.random(shape) < density)
            for _ in range(2 if problem.is_complex else 1)
        ]
        return parts[0] + 1j * parts[1] if parts[1:] else parts[0]

    while True:
        operands = Operands(*(drawn(shape).astype(dtype) for shape in shapes))
        sums = [np.max(m, initial=0.0) for m in Truth(problem, operands).magnitudes]
        if max(sums) <= EXACT_UP_TO[problem.dtype]:
            return operands
        # First use smaller values.  If values of at most 1 still have too large sums, make more of
        # them zero.
        largest, density = (largest // 2, density) if largest > 1 else (1, density / 2)


def _part_of_axis(array: np.ndarray, axis: int, part: slice) -> np.ndarray:
    return array[(slice(None),) * axis + (part,)]


def _naive(problem: ConvProblem, operands: Operands, is_transposed: bool = False) -> Results:
    x, w, dy = _reversed(operands, is_transposed)
    channels = problem.C if is_transposed else problem.K
    shapes = (dy.shape, x.shape, w.shape, (channels,))
    y, dx, dw, db = (np.empty(shape, x.dtype) for shape in shapes)
    with np.errstate(all="ignore"):
        naive.forward(problem, x, w, None, None, None, y)
        naive.backprop_input(problem, w, dy, None, None, None, dx)
        naive.backprop_filter(problem, x, dy, dw)
        naive.backprop_bias(problem, operands.dy, db)
    return Results(dx, y, dw, db) if is_transposed else Results(y, dx, dw, db)


def _to_unit(array: np.ndarray) -> np.ndarray:
    """Return the array times the power of two that scales its largest magnitude to about 1."""
    largest = float(np.max(np.abs(array), initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return array
    power = -math.frexp(largest)[1]
    if array.dtype.kind == "c":
        return np.ldexp(array.real, power) + 1j * np.ldexp(array.imag, power)
    return np.ldexp(array, power)


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sum of conj(a) * b over all elements; for complex arrays its real part."""
    return float(np.sum(a.conj() * b).real)


def _ratio(difference: Any, scale: Any) -> float:
    """Return |difference| / scale; 0 for a difference of 0, and infinity for a scale of 0."""
    size = abs(float(difference))
    if size == 0 or math.isnan(size):
        return size
    return size / float(scale) if scale else math.inf
