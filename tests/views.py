"""Views: the memory layouts of tensors that every implementation is tested with.

``KINDS`` lists the kinds of views, ``assignments`` assigns kinds to the operands of a pass, and
``require_exact`` runs a pass on them.  A view has the shape of the array that it is made from.  If
its elements share memory, it cannot hold all values of that array; the reference then computes with
the view's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels.strides import Strides, element_strides
from tests.agreement import compute, require_equal
from tests.configurations import EXACT, Data, integer_data

PIECE = 8
"""Largest number of elements per vector access, reached by 16-bit types."""

Axes = Sequence[int]
"""Positions of the batch (or filters), channels and spatial axes of an array."""


@dataclass(frozen=True)
class View:
    """A kind of view.

    Attributes:
        name: name of the kind.
        make: function that makes a view from an array's values and axes.
        shares: whether elements share memory, so that no result can be written to the view.
        rank: lowest rank of an array with such views.
    """

    name: str
    make: Callable[[np.ndarray, Axes], np.ndarray]
    shares: bool = False
    rank: int = 1

    def of(self, numbers: np.ndarray, axes: Axes) -> np.ndarray:
        """Return a view of this kind, with the array's values unless elements share memory."""
        view = self.make(numbers, axes)
        assert view.shape == numbers.shape
        return view


def _reversed(some: slice) -> Callable[[np.ndarray, Axes], np.ndarray]:
    def make(numbers: np.ndarray, axes: Axes) -> np.ndarray:
        chosen = tuple(axes[some])
        return np.flip(np.ascontiguousarray(np.flip(numbers, chosen)), chosen)

    return make


def _broadcast(some: slice) -> Callable[[np.ndarray, Axes], np.ndarray]:
    def make(numbers: np.ndarray, axes: Axes) -> np.ndarray:
        first = [slice(0, 1) if axis in axes[some] else slice(None) for axis in range(len(axes))]
        return np.broadcast_to(np.ascontiguousarray(numbers[tuple(first)]), numbers.shape)

    return make


def _overlapping(numbers: np.ndarray, axes: Axes) -> np.ndarray:
    """Return lines that each begin in the middle of the line before.

    Lines of at least two vectors begin a whole number of vectors apart.
    """
    *outer, lines, line = numbers.shape
    unit = PIECE if line >= 2 * PIECE else 1
    step = max(line // 2 // unit, 1) * unit
    plane = -(-(lines * step + line) // PIECE) * PIECE
    strides = [prod(outer[axis + 1 :]) * plane for axis in range(len(outer))] + [step, 1]
    flat = np.resize(numbers, max(prod(outer) * plane, 1))
    return as_strided(flat, numbers.shape, [stride * numbers.itemsize for stride in strides])


def _transposed(some: slice) -> Callable[[np.ndarray, Axes], np.ndarray]:
    """Return a function that reverses the memory order of some axes."""

    def make(numbers: np.ndarray, axes: Axes) -> np.ndarray:
        moved = sorted(axes[some])
        order = list(range(len(axes)))
        for axis, place in zip(moved, reversed(moved), strict=True):
            order[axis] = place
        return np.ascontiguousarray(numbers.transpose(order)).transpose(np.argsort(order))

    return make


def _inside(numbers: np.ndarray, axes: Axes) -> np.ndarray:
    """Return the inside of a larger array, which keeps the alignment of vector accesses."""
    *outer, line = numbers.shape
    larger = np.zeros((*(n + 2 for n in outer), line + 2 * PIECE), numbers.dtype)
    view = larger[(*(slice(1, -1) for _ in outer), slice(PIECE, -PIECE))]
    view[...] = numbers
    return view


def _with_gaps(numbers: np.ndarray, axes: Axes) -> np.ndarray:
    larger = np.zeros([2 * n + 1 for n in numbers.shape], numbers.dtype)
    view = larger[tuple(slice(1, None, 2) for _ in axes)]
    view[...] = numbers
    return view


def _misaligned(numbers: np.ndarray, axes: Axes) -> np.ndarray:
    view = np.zeros(numbers.size + 1, numbers.dtype)[1:].reshape(numbers.shape)
    view[...] = numbers
    return view


_OUTER, _CHANNELS, _ROWS, _COLUMNS = slice(0, 1), slice(1, 2), slice(2, 3), slice(-1, None)
_WINDOW, _ALL = slice(2, None), slice(None)

KINDS = (
    View("reversed outer", _reversed(_OUTER)),
    View("reversed channels", _reversed(_CHANNELS), rank=3),
    View("reversed rows", _reversed(_ROWS), rank=3),
    View("reversed columns", _reversed(_COLUMNS), rank=3),
    View("reversed window", _reversed(_WINDOW), rank=3),
    View("reversed", _reversed(_ALL)),
    View("broadcast outer", _broadcast(_OUTER), shares=True),
    View("broadcast channels", _broadcast(_CHANNELS), shares=True, rank=3),
    View("broadcast rows", _broadcast(_ROWS), shares=True, rank=3),
    View("broadcast columns", _broadcast(_COLUMNS), shares=True, rank=3),
    View("broadcast", _broadcast(_ALL), shares=True),
    View("overlapping", _overlapping, shares=True, rank=3),
    View("transposed", _transposed(_ALL), rank=3),
    View("transposed window", _transposed(_WINDOW), rank=4),
    View("inside", _inside),
    View("with gaps", _with_gaps),
    View("misaligned", _misaligned),
)
"""All kinds of views; each applies to tensors of any format."""

BY_NAME = {kind.name: kind for kind in KINDS}

Kinds = Mapping[str, View]
"""Kinds of the operands of a pass that are views, keyed by operand: x, w, dy, bias, out."""

OPERANDS = {
    "forward": ("x", "w", "bias", "out"),
    "backprop_input": ("w", "dy", "out"),
    "backprop_filter": ("x", "dy", "out"),
}


def axes_of(problem: ConvProblem, pass_: str, operand: str) -> tuple[int, ...]:
    """Return the axes of an operand, as ``View.of`` takes them."""
    if operand == "bias":
        return (0,)
    is_filter = operand == "w" or (operand == "out" and pass_ == "backprop_filter")
    return problem.filter_axes if is_filter else problem.data_axes


def suits(problem: ConvProblem, pass_: str, operand: str, kind: View) -> bool:
    """Return whether an operand can be a view of a kind."""
    enough = kind.rank <= len(axes_of(problem, pass_, operand))
    return enough and not (kind.shares and operand == "out")


def assignments(problem: ConvProblem, pass_: str) -> Iterator[dict[str, View]]:
    """Yield, for each kind, each operand alone as such a view, and then all operands together."""
    for kind in KINDS:
        of_kind = {o: kind for o in OPERANDS[pass_] if suits(problem, pass_, o, kind)}
        yield from ({operand: kind} for operand in of_kind)
        yield of_kind


def named(problem: ConvProblem, pass_: str, name: str) -> dict[str, View]:
    """Assign a kind to all operands; operands without such views use the kind "inside"."""
    kind, other = BY_NAME[name], BY_NAME["inside"]
    return {o: kind if suits(problem, pass_, o, kind) else other for o in OPERANDS[pass_]}


def require_exact(
    api: Any,
    problem: ConvProblem,
    pass_: str,
    kinds: Kinds,
    *,
    seed: int = 0,
    to_device: Callable[[np.ndarray], Any] = lambda array: array,
    to_host: Callable[[Any], np.ndarray] = lambda array: array,
    **more: Any,
) -> None:
    """Check that a pass on views gives the reference's integers for contiguous copies.

    Args:
        api: a module or object with the library's functions.
        problem, pass_: the problem and the pass to compute.
        kinds: kinds of the operands that are views.
        seed: seed of the data.
        to_device, to_host: functions that move arrays to the device of ``api``, with the same
            memory layout, and back.
        more: further arguments of the call, such as ``impl``.
    """
    host = integer_data(problem, seed)
    _require_room(problem, pass_, host)
    views, written = _views(problem, pass_, kinds, host)
    out = None if written is None else to_device(written)
    copies = Data(*(np.array(view, order="C") for view in vars(views).values()))
    expected = compute(cupyconv, pass_, problem, copies, impl="reference")
    moved = Data(*map(to_device, vars(views).values()))
    got = compute(api, pass_, problem, moved, out=out, **more)
    assert out is None or got is out
    names = ", ".join(f"{operand} {kind.name}" for operand, kind in kinds.items())
    require_equal(to_host(got), expected, f"{pass_} of {problem} with {names}")


def _views(
    problem: ConvProblem, pass_: str, kinds: Kinds, host: Data
) -> tuple[Data, np.ndarray | None]:
    """Return the operands of a pass as views of these kinds, and ``out`` if it has a kind."""

    def view(operand: str, numbers: np.ndarray) -> np.ndarray:
        if operand not in kinds:
            return numbers
        return kinds[operand].of(numbers, axes_of(problem, pass_, operand))

    operands = Data(*(view(operand, numbers) for operand, numbers in vars(host).items()))
    if "out" not in kinds:
        return operands, None
    like = {"forward": host.dy, "backprop_input": host.x, "backprop_filter": host.w}[pass_]
    return operands, view("out", np.full_like(like, 3))


def strides_of(problem: ConvProblem, pass_: str, kinds: Kinds) -> Strides:
    """Return the strides of a pass's tensors, as ``require_exact`` passes them to the emulator."""
    views, out = _views(problem, pass_, kinds, integer_data(problem))
    tensors = {"x": views.x, "w": views.w, "y": views.dy}
    result = {"forward": "y", "backprop_input": "x", "backprop_filter": "w"}[pass_]
    tensors.pop(result)
    if out is not None:
        tensors[result] = out
    alignment = 16
    for tensor in tensors.values():
        if tensor.size:
            alignment |= tensor.ctypes.data
    strides = {role: element_strides(tensor) for role, tensor in tensors.items()}
    contiguous = Strides.contiguous(problem)
    return replace(contiguous, **strides, alignment=alignment & -alignment)


def _require_room(problem: ConvProblem, pass_: str, data: Data) -> None:
    """Check that every sum is exact in its precision, whichever values a view repeats."""
    channels, taps = problem.C // problem.groups, prod(problem.filter_sizes)
    terms = {
        "forward": taps * channels,
        "backprop_input": taps * (problem.K // problem.groups),
        "backprop_filter": problem.N * prod(problem.output_sizes),
    }[pass_]
    left, right = {
        "forward": (data.x, data.w),
        "backprop_input": (data.w, data.dy),
        "backprop_filter": (data.x, data.dy),
    }[pass_]
    sums = "float64" if problem.dtype == "float64" else "float32"
    sizes = (float(np.abs(array).max(initial=0)) for array in (left, right))
    assert terms * prod(sizes) + 8 <= EXACT[sums]
