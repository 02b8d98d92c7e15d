"""Matrix products of filters and pixels, scattered to the result (col2im), for few filters.

Every source pixel is multiplied with all taps, and each tap's products are added to the results
whose windows contain the pixel.  With few filters, this method adds up fewer elements than im2col
gathers.  Its filter matrix has taps * filters rows, while that of im2col has one row per filter.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from cupyconv.cpu.axis import clamp, split_evenly
from cupyconv.cpu.correlation import ALL, Correlation
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import copy, matmul


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute ``whole.result`` in blocks, whose size is proportional to ``block_bytes``."""
    for chunk in whole.chunks(8 * block_bytes):
        filters = np.moveaxis(chunk.filters, (1, 2), (-2, -1))  # (G, *taps, K, C)
        matrices = pool.array("shared", filters.shape)
        copy(matrices, filters, chunk.conjugate)
        most = _block_extents(chunk, block_bytes)
        taps, size = _taps_at_once(chunk, *most, block_bytes)
        each(partial(_scatter, matrices, taps), chunk.boxes(chunk.groups, *most), pool, size)


def _scatter(matrices: np.ndarray, taps: int, block: Correlation, scratch: Scratch) -> None:
    sums = scratch.array("sums", block.result.shape)
    sums[...] = 0
    for part in split_evenly(block.axes[0].taps, taps):
        _add(sums, block, matrices, part, scratch.rest())
    block.finish(sums)


def _add(
    sums: np.ndarray, block: Correlation, matrices: np.ndarray, part: slice, scratch: Scratch
) -> None:
    """Add the products of some rows of taps to the sums.

    Args:
        part: slice of the taps of the first axis.
    """
    row, *others = block.axes
    row = row.with_taps(part)
    _, reached = row.pixels().inside(0)
    if reached.start == reached.stop:
        return
    lines = block.source[:, :, :, reached]
    pixels = scratch.matrices("source", lines)
    matrix = matrices[:, part].reshape(block.groups, -1, block.channels)
    taps = (row.taps, *matrices.shape[2:-2])
    by_tap = scratch.array("products", (block.groups, *taps, block.filter_count, *lines.shape[2:]))
    products = by_tap.reshape(block.groups, -1, pixels.shape[2])
    matmul(matrix, pixels, products, scratch.sums)
    for tap in np.ndindex(*taps):
        inside = [axis.inside(t) for axis, t in zip((row, *others), tap, strict=True)]
        to, (read, *columns) = zip(*inside, strict=True)
        if read.start == read.stop:
            continue
        read = slice(read.start - reached.start, read.stop - reached.start, read.step)
        total = sums[(ALL, ALL, ALL, *to)]
        np.add(total, by_tap[(ALL, *tap, ALL, ALL, read, *columns)], out=total)


def _block_extents(whole: Correlation, block_bytes: int) -> tuple[int, int]:
    """Return the number of images of a block, and of outputs along the first spatial axis.

    The sums of the block fit ``block_bytes``, and so do its products with one row of taps, which
    are the taps with the same index on the first axis.
    """
    row, *others = whole.axes
    sizes, outputs = prod(axis.size for axis in others), prod(axis.outputs for axis in others)
    taps = prod(axis.taps for axis in others)
    line = max(whole.filter_count * taps, whole.channels) * sizes
    line = max(line * row.stride, whole.filter_count * outputs)
    line *= whole.groups * whole.accumulator.itemsize
    rows = clamp(block_bytes // line, row.outputs)
    return clamp(block_bytes // (line * rows), whole.images), rows


def _taps_at_once(whole: Correlation, images: int, rows: int, block_bytes: int) -> tuple[int, int]:
    """Return how many taps of the first axis to multiply at once, and a block's scratch elements.

    The products of these taps, and a copy of the pixels that they read, fit in ``2 * block_bytes``.
    """
    row, *others = whole.axes[0].narrow(slice(0, rows)), *whole.axes[1:]
    line = images * whole.groups * prod(axis.size for axis in others)
    products = whole.filter_count * prod(axis.taps for axis in others)
    most = 2 * block_bytes // (line * whole.accumulator.itemsize)
    taps = clamp(most // (products * row.span), row.taps)
    while taps > 1 and row.with_taps(slice(0, taps)).span * whole.channels > most:
        taps = -(-taps // 2)
    read = line * min(row.with_taps(slice(0, taps)).span, row.size)
    sums = whole.groups * whole.filter_count * images * rows * prod(a.outputs for a in others)
    return taps, read * (whole.channels + 2 * products * taps) + sums
