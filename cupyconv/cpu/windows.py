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
from cupyconv.cpu.views import L1_BYTES, matmul, operand


def correlate(whole: Correlation, _pool: Pool, _block_bytes: int) -> None:
    """Compute ``whole.result``."""
    columns, filters = _columns(whole)
    if whole.conjugate:
        filters = np.conjugate(filters)
    result = whole.result
    is_small = columns.nbytes <= L1_BYTES
    flat = None if is_small else operand(result, 2, whole.accumulator)
    rows = filters.reshape(*result.shape[:2], columns.shape[1])
    sums = matmul(rows.astype(whole.accumulator, copy=False), columns, out=flat)
    if whole.bias is None and whole.addend is None and whole.activation is None:
        if flat is None:
            result[...] = sums.reshape(result.shape)
        return
    whole.finish(sums.reshape(result.shape) if flat is None else result)


def filter_gradient(whole: Correlation, _pool: Pool, _block_bytes: int) -> None:
    """Write the filter gradient to ``whole.filters``; ``whole.result`` is dy."""
    columns, filters = _columns(whole)
    result = np.conjugate(whole.result) if whole.conjugate else whole.result
    rows = result.reshape(*result.shape[:2], columns.shape[2])
    total = matmul(rows.astype(whole.accumulator, copy=False), columns.swapaxes(1, 2))
    if filters.size < whole.filters.size:
        whole.filters[...] = 0
    filters[...] = total.reshape(filters.shape)


def _columns(whole: Correlation) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows (G, depth, pixels) and a view (G, K, ...) of the filters.

    Depth is the merged axis of channels and taps, in the order of these axes in the view of the
    filters.  Taps that read only padding are omitted.
    """
    source, dtype = whole.source, whole.accumulator
    are_last = abs(source.strides[1]) == source.itemsize
    taps, extents, order, to, origin, shape, strides, merged, filter_order = _memory_layout(
        whole.axes, source.shape[:3], dtype, are_last
    )
    memory = np.zeros(extents, dtype)
    memory.transpose(order)[to] = source[origin]
    windows = np.empty(shape, dtype)
    windows[...] = np.ndarray(shape, dtype, memory, 0, strides)
    columns = windows.reshape(merged)
    filters = whole.filters[taps].transpose(filter_order)
    return columns.swapaxes(1, 2) if are_last else columns, filters


_Index = tuple[slice, ...]
_Extents = tuple[int, ...]


@lru_cache(maxsize=4096)
def _memory_layout(
    axes: tuple[Axis, ...], corner: tuple[int, int, int], dtype: np.dtype, are_last: bool
) -> tuple[
    _Index, _Extents, _Extents, _Index, _Index, _Extents, _Extents, tuple[int, int, int], _Extents
]:
    """Return the memory layout of the padded source and of the windows.

    Returns:
        (taps, extents, order, to, origin, shape, strides, merged, filter_order): index of the taps
        that read a pixel; extents of the padded array, and its transposition to (G, C, N,
        *spatial); index to which the source is copied, and index of the copied part of the source;
        shape and strides of the windows in the padded array; shape of the windows with merged axes;
        axes of the filters, with those of depth in the order of the windows.
    """
    groups, channels, images = corner
    reached = [axis.reached() for axis in axes]
    axes = tuple(map(Axis.with_taps, axes, reached))
    spans, taps, outputs = zip(*((a.span, a.taps, a.outputs) for a in axes), strict=True)
    to, origin = zip(*(axis.pixels().inside(0) for axis in axes), strict=True)
    rank, depth, pixels = len(axes), channels * prod(taps), images * prod(outputs)
    if are_last:
        extents, order = (groups, images, *spans, channels), (0, 2 + rank, 1, *range(2, 2 + rank))
        shape = (groups, images, *outputs, *taps, channels)
        merged, filter_order = (groups, pixels, depth), (0, 1, *range(3, 3 + rank), 2)
    else:
        extents, order = (*corner, *spans), tuple(range(3 + rank))
        shape = (groups, channels, *taps, images, *outputs)
        merged, filter_order = (groups, depth, pixels), order
    group, channel, image, *steps = np.empty(extents, dtype).transpose(order).strides
    by_tap = tuple(axis.dilation * step for axis, step in zip(axes, steps, strict=True))
    by_output = tuple(axis.stride * step for axis, step in zip(axes, steps, strict=True))
    if are_last:
        strides = (group, image, *by_output, *by_tap, channel)
    else:
        strides = (group, channel, *by_tap, image, *by_output)
    used, to, origin = ((ALL, ALL, ALL, *slices) for slices in (reached, to, origin))
    return used, extents, order, to, origin, shape, strides, merged, filter_order
