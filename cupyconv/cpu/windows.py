"""Small correlations: filters times all windows of the source, in one matrix product.

The shapes and strides are computed once per layer.  A call copies the source into a zero-padded
array, copies the windows to the columns of a matrix, and multiplies by the filters.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from cupyconv.cpu.axis import Axis
from cupyconv.cpu.correlation import ALL, Correlation
from cupyconv.cpu.scratch import Pool
from cupyconv.cpu.views import SMALL_BYTES, channels_are_last, matmul, operand


def correlate(whole: Correlation, _pool: Pool, _block_bytes: int) -> None:
    """Compute ``whole.result``."""
    columns, filters = _columns(whole)
    is_small = columns.nbytes <= SMALL_BYTES
    flat = None if is_small else operand(whole.result, 2, whole.accumulator)
    sums = matmul(_matrix(filters, whole), columns, out=flat)
    if whole.bias is None and whole.addend is None and whole.activation is None:
        if flat is None:
            whole.result[...] = sums.reshape(whole.result.shape)
        return
    whole.finish(sums.reshape(whole.result.shape) if flat is None else whole.result)


def filter_gradient(whole: Correlation, _pool: Pool, _block_bytes: int) -> None:
    """Write the filter gradient to ``whole.filters``; ``whole.result`` is dy."""
    columns, filters = _columns(whole)
    total = matmul(_matrix(whole.result, whole), columns.swapaxes(1, 2))
    if filters.size < whole.filters.size:
        whole.filters[...] = 0
    filters[...] = total.reshape(filters.shape)


def _matrix(rows: np.ndarray, whole: Correlation) -> np.ndarray:
    """Reshape (G, K, ...) to (G, K, columns) in the accumulator's dtype."""
    if whole.conjugate:
        rows = np.conjugate(rows)
    groups, count, *others = rows.shape
    return rows.reshape(groups, count, prod(others)).astype(whole.accumulator, copy=False)


def _columns(whole: Correlation) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows (G, depth, pixels) and a view (G, K, ...) of the filters.

    Depth is the merged axis of channels and taps, in the order of these axes in the view of the
    filters.  Taps that read only padding are omitted.
    """
    are_last = channels_are_last(whole.source)
    dtype = whole.accumulator
    taps, extents, order, to, origin, shape, strides = _memory_layout(
        whole.axes, whole.source.shape[:3], dtype, are_last
    )
    memory = np.zeros(extents, dtype)
    memory.transpose(order)[to] = whole.source[origin]
    windows = np.empty(shape, dtype)
    windows[...] = np.ndarray(shape, dtype, memory, 0, strides)
    filters = whole.filters[taps]
    depth, pixels = prod(filters.shape[2:]), prod(whole.result.shape[2:])
    if are_last:
        columns = windows.reshape(len(windows), pixels, depth).swapaxes(1, 2)
        return columns, np.moveaxis(filters, 2, -1)
    return windows.reshape(len(windows), depth, pixels), filters


_Index = tuple[slice, ...]
_Extents = tuple[int, ...]


@lru_cache(maxsize=4096)
def _memory_layout(
    axes: tuple[Axis, ...], corner: tuple[int, int, int], dtype: np.dtype, are_last: bool
) -> tuple[_Index, _Extents, _Extents, _Index, _Index, _Extents, _Extents]:
    """Return the memory layout of the padded source and of the windows.

    Returns:
        (taps, extents, order, to, origin, shape, strides): index of the taps that read a pixel;
        extents of the padded array, and its transposition to (G, C, N, *spatial); index to which
        the source is copied, and index of the copied part of the source; shape and strides of the
        windows in the padded array.
    """
    groups, channels, images = corner
    reached = [axis.reached() for axis in axes]
    axes = tuple(map(Axis.with_taps, axes, reached))
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
    used, to, origin = ((ALL, ALL, ALL, *slices) for slices in (reached, to, origin))
    return used, extents, order, to, origin, shape, strides
