"""Views and copies of tensors that are independent of the memory order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.kernels.strides import element_strides
from cupyconv.problem import ConvProblem

SHORT_ROW = 16
"""Smallest number of elements per row that NumPy copies efficiently (hand-set)."""

LINE = 64
"""Bytes of a cache line."""

L1_BYTES = 1 << 15
"""Bytes of a core's L1 data cache: 32 KiB, as few processors have less (hand-set)."""

L2_ELEMENTS = 1 << 16
"""Elements that stay in a core's L2 cache until loops read them again (hand-set)."""

PIECE_BYTES = 1 << 16
"""Largest number of bytes transposed per NumPy call, so that they fit the cache (hand-set)."""

MOST_LINES = L1_BYTES // 2 // LINE
"""Cache lines that fill half the L1 cache: more are evicted before they are read again."""

MOST_TERMS = 288
"""Terms of a matrix product that BLAS adds one after another; fewer if that costs little
(hand-set)."""

FEW_SUMS = 1200
"""Results of a small matrix product up to which OpenBLAS adds terms that are neighbours in memory
in the lanes of a vector (measured)."""

SMALL_PRODUCTS = 100**3
"""Products of a matrix product up to which OpenBLAS needs no copies of the operands."""


@cache
def accumulator_of(dtype: str) -> np.dtype:
    """Return the dtype in which values of this dtype are summed."""
    return np.dtype("float32" if dtype in ("float16", "bfloat16") else dtype)


def data_view(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """Return x, y or their gradient as a view (N, G, channels per group, *spatial)."""
    ordered = array.transpose(problem.data_axes)
    groups = problem.groups
    return ordered.reshape(len(ordered), groups, ordered.shape[1] // groups, *ordered.shape[2:])


def filter_view(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """Return w or its gradient as a view (G, K/G, C/G, *spatial)."""
    ordered = array.transpose(problem.filter_axes)
    groups = problem.groups
    return ordered.reshape(groups, len(ordered) // groups, *ordered.shape[1:])


def taps(problem: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple, tuple]]:
    """Yield every tap, the outputs for which it is inside the input, and the inputs it reads.

    Yields:
        (tap, outputs, inputs): the tap's index, and slices of the spatial axes of y and of x that
        correspond element by element.
    """
    for tap in product(*(range(axis.filter) for axis in problem.axes)):
        pairs = list(zip(problem.axes, tap, strict=True))
        outputs = tuple(_slice(axis.outputs_of_tap(t)) for axis, t in pairs)
        inputs = tuple(_slice(axis.inputs_of_tap(t)) for axis, t in pairs)
        yield tap, outputs, inputs


def merged(array: np.ndarray, first: int) -> np.ndarray:
    """Return a view with the axes from ``first`` on merged into one.

    Raises:
        ValueError: merging needs a copy.
    """
    if not _is_mergeable(array, first):
        raise ValueError(f"axes from {first} on with strides {array.strides} cannot be merged")
    return _flat(array, first)


def operand(array: np.ndarray, first: int, dtype: np.dtype) -> np.ndarray | None:
    """Return the view of ``merged`` if BLAS accepts it as matrices without a copy, else None."""
    if array.dtype != dtype or not array.flags.aligned or not _is_mergeable(array, first):
        return None
    flat = _flat(array, first)
    if min(flat.strides) < 0 or min(flat.strides[-2:]) != flat.itemsize:
        return None
    return flat


def _flat(array: np.ndarray, first: int) -> np.ndarray:
    return array.reshape(*array.shape[:first], prod(array.shape[first:]))


def matmul(
    a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, allocate: Callable = np.empty
) -> np.ndarray:
    """Return ``numpy.matmul(a, b, out)``, with smaller rounding errors.

    The products are divided into parts of few terms, whose sums are then added up.

    Args:
        allocate: returns an uninitialised array of a shape and dtype, for the sums of a part.
    """
    rows, (depth, columns) = a.shape[-2], b.shape[-2:]
    if depth <= MOST_TERMS // 2:
        return np.matmul(a, b, out=out)
    # Write sums in the order of ``out``, and let BLAS not transpose both operands, which is slow.
    like = a if out is None else out
    if like.strides[-2] < like.strides[-1] and b.strides[-2] < b.strides[-1]:
        other = None if out is None else out.swapaxes(-2, -1)
        return matmul(b.swapaxes(-2, -1), a.swapaxes(-2, -1), other, allocate).swapaxes(-2, -1)
    size = rows * depth * columns
    are_neighbours = a.strides[-1] == b.strides[-2] == b.itemsize
    if are_neighbours and rows * columns <= FEW_SUMS and size <= SMALL_PRODUCTS:
        return np.matmul(a, b, out=out)
    parts = -(-depth // MOST_TERMS)
    if rows * columns * MOST_TERMS <= 2 * SMALL_PRODUCTS:
        parts = max(parts + 1, -(-size // SMALL_PRODUCTS))
    step = _terms_of_part(depth, parts)
    if size <= SMALL_PRODUCTS:
        end = depth - depth % step
        first, second = (a, b) if end == depth else (a[..., :end], b[..., :end, :])
        first = first.reshape(*a.shape[:-1], -1, step).swapaxes(-3, -2)
        second = second.reshape(*b.shape[:-2], -1, step, columns)
        total = np.add.reduce(np.matmul(first, second), axis=-3, out=out)
        if end < depth:
            total += np.matmul(a[..., end:], b[..., end:, :])
        return total
    total = np.matmul(a[..., :step], b[..., :step, :], out=out)
    more = allocate(total.shape, total.dtype) if step < depth else total
    for start in range(step, depth, step):
        part = slice(start, start + step)
        total += np.matmul(a[..., part], b[..., part, :], out=more)
    return total


@cache
def _terms_of_part(depth: int, parts: int) -> int:
    """Return the terms per part, for at least ``split_evenly`` parts; if possible, all have as
    many."""
    exact = (depth // count for count in range(parts, 2 * parts) if depth % count == 0)
    return next(exact, -(-depth // parts))


def channels_are_last(array: np.ndarray) -> bool:
    """Return whether the channels of (G, channels, N, ...) are contiguous."""
    return abs(array.strides[1]) == array.itemsize


def has_whole_steps(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether compiled loops can use an array without a copy.

    Its dtype must be ``dtype``, and its strides must be whole and not negative.
    """
    strides = array.strides
    if array.dtype != dtype or not array.flags.aligned or min(strides) < 0:
        return False
    # Complex arrays may be aligned to half an element, and a stride may include half an element.
    return gcd(*strides) % array.itemsize == 0


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the memory as a 1-D view; strides must be whole and not negative.

    The view is writable even if the array is not, so that loops are compiled once for both.
    """
    if array.flags.c_contiguous and array.flags.writeable:
        return array.reshape(-1)
    span = 0
    if array.size:
        pairs = zip(array.shape, element_strides(array), strict=True)
        span = sum((extent - 1) * step for extent, step in pairs) + 1
    return np.asarray(_Memory(array, 0, (span,), None))


class _Memory:
    """Object with NumPy's array interface, for a view of an array's memory.

    Args:
        start: position of the view's first element, in bytes.
    """

    def __init__(
        self, array: np.ndarray, start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> None:
        self._array = array
        interface = array.__array_interface__
        place = {"data": (interface["data"][0] + start, False), "shape": shape, "strides": strides}
        self.__array_interface__ = {**interface, **place}


class Layout(NamedTuple):
    """Geometry of an array, without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    is_aligned: bool


def dense(shape: tuple[int, ...], dtype: np.dtype) -> Layout:
    """Return the layout of an array in C order."""
    strides = tuple(prod(shape[at + 1 :]) * dtype.itemsize for at in range(len(shape)))
    return Layout(shape, strides, dtype, True)


def without_memory(layout: Layout) -> np.ndarray:
    """Return an array whose elements must not be accessed, to find views of such arrays."""
    address = np.empty(1, layout.dtype)
    if not layout.is_aligned:
        address = np.empty(layout.dtype.itemsize + 1, np.uint8)[1:].view(layout.dtype)
    return as_strided(address, layout.shape, layout.strides)


def offset(view: np.ndarray, array: np.ndarray) -> int:
    """Return the distance in elements from the array's first element to the view's."""
    first, start = (of.__array_interface__["data"][0] for of in (array, view))
    return (start - first) // array.itemsize


def same_view(view: np.ndarray, of: np.ndarray, array: np.ndarray, shift: int = 0) -> np.ndarray:
    """Return the view of ``array`` that corresponds to a view of an array with the same layout.

    Args:
        shift: distance in elements from that view to the returned one.
    """
    start = (offset(view, of) + shift) * array.itemsize
    memory = _Memory(array, start, view.shape, view.strides)
    return np.asarray(memory).view(array.dtype)


def copy(
    target: np.ndarray, source: np.ndarray, conjugate: bool = False, is_cached: bool = False
) -> None:
    """Copy ``source``, broadcast to ``target``, in an order that suits the cache.

    Args:
        conjugate: whether to conjugate the copy.
        is_cached: whether the source is in the cache, so that the order does not matter.
    """
    if target.nbytes > L1_BYTES:
        items, sources = _as_items(target, source)
        step = items.strides[min(_long_axes(items), key=lambda axis: abs(sources.strides[axis]))]
        between = (n for n, other in zip(items.shape, items.strides, strict=True) if other < step)
        if prod(between) > MOST_LINES and not is_cached:
            _transpose(items, sources)
        else:
            items[...] = sources
    else:
        target[...] = source
    if conjugate:
        np.conjugate(target, out=target)


def _transpose(target: np.ndarray, source: np.ndarray) -> None:
    """Copy in parts of at most PIECE_BYTES, so that the cache lines that are read stay cached."""
    if target.nbytes <= PIECE_BYTES:
        target[...] = source
        return
    # Divide the axis with the largest strides in both arrays: neighbours in memory stay together.
    steps = (tuple(map(abs, array.strides)) for array in (target, source))
    nearest = [min(pair) for pair in zip(*steps, strict=True)]
    axis = max(_long_axes(target), key=nearest.__getitem__)
    step = max(len(source.swapaxes(0, axis)) * PIECE_BYTES // target.nbytes, 1)
    target, source = target.swapaxes(0, axis), source.swapaxes(0, axis)
    for start in range(0, len(source), step):
        part = slice(start, start + step)
        _transpose(target[part], source[part])


def _as_items(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of both arrays with equal shapes, where a short contiguous row is one item.

    Without this view, NumPy would run an inner loop for each short row.
    """
    if source.shape != target.shape:
        source = np.broadcast_to(source, target.shape)
    if target.dtype == source.dtype:
        size = target.itemsize
        for axis, extent in enumerate(target.shape):
            if target.strides[axis] == source.strides[axis] == size and 1 < extent < SHORT_ROW:
                item = np.dtype((np.void, extent * size))
                order = [other for other in range(target.ndim) if other != axis] + [axis]
                return target.transpose(order).view(item), source.transpose(order).view(item)
    return target, source


def _long_axes(array: np.ndarray) -> list[int]:
    """Return the axes with more than one item."""
    return [axis for axis, extent in enumerate(array.shape) if extent > 1]


def _is_mergeable(array: np.ndarray, first: int) -> bool:
    """Return whether the axes from ``first`` on can be merged without a copy."""
    expected = None
    for extent, step in zip(
        array.shape[: first - 1 : -1], array.strides[: first - 1 : -1], strict=True
    ):
        if extent != 1:
            if expected not in (None, step):
                return array.size == 0
            expected = extent * step
    return True


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step) if indices else slice(0, 0)
