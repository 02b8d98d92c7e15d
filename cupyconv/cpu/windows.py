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
    sums = np.matmul(_matrix(whole.filters, whole), _columns(whole))
    whole.finish(sums.reshape(whole.result.shape))


def filter_gradient(whole: Correlation, _scratch: Scratch, _block_bytes: int) -> None:
    """Compute the filters' gradient."""
    total = np.matmul(_matrix(whole.result, whole), _columns(whole).swapaxes(1, 2))
    whole.filters[...] = total.reshape(whole.filters.shape)


def _matrix(rows: np.ndarray, whole: Correlation) -> np.ndarray:
    """(G, K, ...) as (G, K, columns)."""
    if whole.conjugate:
        rows = np.conjugate(rows)
    groups, count, *others = rows.shape
    return rows.reshape(groups, count, prod(others)).astype(whole.accumulator, copy=False)


def _columns(whole: Correlation) -> np.ndarray:
    """(G, depth, pixels): the windows, which overlap in a copy of the source."""
    padded, to, origin, shape, strides = _rules(
        whole.axes, whole.source.shape[:3], whole.accumulator
    )
    memory = np.zeros(padded, whole.accumulator)
    memory[to] = whole.source[origin]
    windows = np.ndarray(shape, whole.accumulator, memory, 0, strides)
    return windows.reshape(len(windows), prod(whole.filters.shape[2:]), -1)


_Index = tuple[slice, ...]


@lru_cache(maxsize=4096)
def _rules(
    axes: tuple[Axis, ...], corner: tuple[int, int, int], dtype: np.dtype
) -> tuple[tuple[int, ...], _Index, _Index, tuple[int, ...], tuple[int, ...]]:
    """The padded source's shape, where it has the source and what of it; the windows in it."""
    to, origin = zip(*(axis.pixels().inside(0) for axis in axes), strict=True)
    padded = (*corner, *(axis.span for axis in axes))
    group, channel, image, *steps = np.empty(padded, dtype).strides
    groups, channels, images = corner
    taps = tuple(axis.dilation * step for axis, step in zip(axes, steps, strict=True))
    outputs = tuple(axis.stride * step for axis, step in zip(axes, steps, strict=True))
    shape = (groups, channels, *(a.taps for a in axes), images, *(a.outputs for a in axes))
    strides = (group, channel, *taps, image, *outputs)
    return padded, (ALL, ALL, ALL, *to), (ALL, ALL, ALL, *origin), shape, strides
