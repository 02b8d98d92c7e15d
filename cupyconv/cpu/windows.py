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


def correlate(whole: Correlation, _scratch: Scratch, _block_bytes: int) -> None:
    """Compute the result."""
    windows = _windows(whole)
    filters = np.conjugate(whole.filters) if whole.conjugate else whole.filters
    matrix = filters.reshape(*filters.shape[:2], -1).astype(whole.accumulator, copy=False)
    sums = np.matmul(matrix, windows.reshape(len(windows), matrix.shape[2], -1))
    images, groups, count, *outputs = whole.result.shape
    whole.finish(np.moveaxis(sums.reshape(groups, count, images, *outputs), 2, 0))


def filter_gradient(whole: Correlation, _scratch: Scratch, _block_bytes: int) -> None:
    """Compute the filters' gradient."""
    windows = _windows(whole)
    groups, count = whole.filters.shape[:2]
    gradients = whole.result.transpose(1, 2, 0, *range(3, whole.result.ndim))
    if whole.conjugate:
        gradients = np.conjugate(gradients)
    matrix = gradients.reshape(groups, count, -1).astype(whole.accumulator, copy=False)
    columns = windows.reshape(groups, prod(whole.filters.shape[2:]), -1)
    whole.filters[...] = np.matmul(matrix, columns.swapaxes(1, 2)).reshape(whole.filters.shape)


def _windows(whole: Correlation) -> np.ndarray:
    """(G, C, taps, N, outputs): the windows, which overlap in a copy of the source."""
    rules = _rules(whole.axes, whole.source.shape[:3], whole.accumulator)
    padded = np.zeros(rules[0], whole.accumulator)
    padded[rules[1]] = whole.source[rules[2]]
    return np.ndarray(rules[3], whole.accumulator, padded, 0, rules[4])


_Index = tuple[slice, ...]


@lru_cache(maxsize=4096)
def _rules(
    axes: tuple[Axis, ...], corner: tuple[int, int, int], dtype: np.dtype
) -> tuple[tuple[int, ...], _Index, _Index, tuple[int, ...], tuple[int, ...]]:
    """The padded source's shape, where it has the source and what of it; the windows in it."""
    to, origin = zip(*(axis.pixels().inside(0) for axis in axes), strict=True)
    padded = (*corner, *(axis.span for axis in axes))
    image, group, channel, *steps = np.empty(padded, dtype).strides
    images, groups, channels = corner
    taps = tuple(axis.dilation * step for axis, step in zip(axes, steps, strict=True))
    outputs = tuple(axis.stride * step for axis, step in zip(axes, steps, strict=True))
    shape = (groups, channels, *(a.taps for a in axes), images, *(a.outputs for a in axes))
    strides = (group, channel, *taps, image, *outputs)
    return padded, (ALL, ALL, ALL, *to), (ALL, ALL, ALL, *origin), shape, strides
