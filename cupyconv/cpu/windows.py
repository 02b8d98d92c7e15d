"""Small correlations: filters times all windows of the source, in one matrix product.

What depends on shapes alone is worked out once: a repeated call copies the source with zeros around
it, copies its windows as the columns of a matrix, and multiplies.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from cupyconv.cpu.correlation import ALL, Axis, Correlation
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.views import channels_are_last, copy, in_order, merged, operand


def correlate(whole: Correlation, scratch: Scratch, _block_bytes: int) -> None:
    """Compute the result."""
    is_direct = operand(whole.result, 2, whole.accumulator) is not None
    sums = whole.result if is_direct else scratch.like("sums", whole.result)
    matrix = _matrix(in_order(whole.filters, whole.source), whole)
    np.matmul(matrix, _columns(whole, scratch), out=merged(sums, 2))
    whole.finish(sums)


def filter_gradient(whole: Correlation, scratch: Scratch, _block_bytes: int) -> None:
    """Compute the filters' gradient."""
    total = np.matmul(_matrix(whole.result, whole), _columns(whole, scratch).swapaxes(1, 2))
    filters = in_order(whole.filters, whole.source)
    filters[...] = total.reshape(filters.shape)


def _matrix(rows: np.ndarray, whole: Correlation) -> np.ndarray:
    """(G, K, ...) as (G, K, columns)."""
    if whole.conjugate:
        rows = np.conjugate(rows)
    groups, count, *others = rows.shape
    return rows.reshape(groups, count, prod(others)).astype(whole.accumulator, copy=False)


def _columns(whole: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, depth, pixels): the windows, which overlap in a copy of the source."""
    are_last = channels_are_last(whole.source)
    extents, order, to, origin, shape, strides = _rules(
        whole.axes, whole.source.shape[:3], whole.accumulator, are_last
    )
    memory = scratch.array("padded", extents)
    padded = memory.transpose(order)
    padded[...] = 0
    copy(padded[to], whole.source[origin], is_cached=True)
    windows = scratch.array("windows", shape)
    copy(windows, np.ndarray(shape, whole.accumulator, memory, 0, strides), is_cached=True)
    depth = prod(whole.filters.shape[2:])
    if are_last:
        return windows.reshape(len(windows), -1, depth).swapaxes(1, 2)
    return windows.reshape(len(windows), depth, -1)


_Index = tuple[slice, ...]
_Extents = tuple[int, ...]


@lru_cache(maxsize=4096)
def _rules(
    axes: tuple[Axis, ...], corner: tuple[int, int, int], dtype: np.dtype, are_last: bool
) -> tuple[_Extents, _Extents, _Index, _Index, _Extents, _Extents]:
    """The padded source's extents in memory, and the order of its axes there; where it has the
    source and what of it; the shape and strides of the windows in it."""
    groups, channels, images = corner
    spans, taps, outputs = zip(*((a.span, a.taps, a.outputs) for a in axes), strict=True)
    to, origin = zip(*(axis.pixels().inside(0) for axis in axes), strict=True)
    rank = len(axes)
    if are_last:
        extents, order = (groups, images, *spans, channels), (0, 2 + rank, 1, *range(2, 2 + rank))
        shape = (groups, images, *outputs, *taps, channels)
    else:
        extents, order = (*corner, *spans), tuple(range(3 + rank))
        shape = (groups, channels, *taps, images, *outputs)
    group, channel, image, *steps = np.empty(extents, dtype).transpose(order).strides
    by_tap = tuple(axis.dilation * step for axis, step in zip(axes, steps, strict=True))
    by_output = tuple(axis.stride * step for axis, step in zip(axes, steps, strict=True))
    if are_last:
        strides = (group, image, *by_output, *by_tap, channel)
    else:
        strides = (group, channel, *by_tap, image, *by_output)
    return extents, order, (ALL, ALL, ALL, *to), (ALL, ALL, ALL, *origin), shape, strides
