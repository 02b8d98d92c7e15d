"""Matrix products of filters and pixels, scattered to the result (col2im), for few filters.

Every pixel of the source is multiplied with the taps, and each tap's products are added where its
windows are.  Of few filters there are fewer products to add than pixels that would have to be
gathered, and the matrix products have taps times filters for rows instead of filters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from cupyconv.cpu.correlation import ALL, Correlation, clamp, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.views import operand


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for chunk in _chunks(whole, 4 * block_bytes):
        _correlate(chunk, scratch, block_bytes)


def _correlate(chunk: Correlation, scratch: Scratch, block_bytes: int) -> None:
    filters = np.moveaxis(chunk.filters, (1, 2), (-2, -1))  # (G, *taps, K, C)
    groups, _, *other_taps, count, channels = filters.shape
    matrices = scratch.array("filters", filters.shape)
    matrices[...] = filters
    for block in _blocks(chunk, block_bytes):
        row, *others = block.axes
        sums = scratch.array("sums", block.result.swapaxes(0, 1).shape)
        sums[...] = 0
        for tap in range(row.taps):
            rows, origin = row.inside(tap)
            if rows.start == rows.stop:
                continue
            lines = _lines(block.source[:, :, :, origin], block, scratch)
            one = [1] * (lines.ndim - 3)
            matrix = matrices[:, tap].reshape(groups, *one, -1, channels)
            shape = (*lines.shape[:-2], matrix.shape[-2], lines.shape[-1])
            products = np.matmul(matrix, lines, out=scratch.array("products", shape))
            by_tap = products.reshape(*lines.shape[:-2], *other_taps, count, -1)
            for taps in product(*map(range, other_taps)):
                inside = [axis.inside(t) for axis, t in zip(others, taps, strict=True)]
                to, read = [to for to, _ in inside], [read for _, read in inside]
                last = (*taps, ALL, read[-1]) if others else ()
                some = by_tap[(ALL, ALL, ALL, *read[:-1], *last)]
                sums[(ALL, ALL, ALL, rows, *to)] += np.moveaxis(some, -2, 2)
        block.finish(sums.swapaxes(0, 1))


def _lines(rows: np.ndarray, block: Correlation, scratch: Scratch) -> np.ndarray:
    """Rows of the source, (N, G, C, rows, others), as (G, N, rows, others but the last, C, last).

    So many pixels at a time are in the cache, and BLAS is fast with so few filters.
    """
    lines = np.moveaxis(rows.swapaxes(0, 1), 2, -2)
    view = operand(lines, lines.ndim - 1, block.accumulator)
    if view is not None:
        return view
    copy = scratch.array("source", lines.shape)
    copy[...] = lines
    return copy


def _chunks(whole: Correlation, chunk_bytes: int) -> Iterator[Correlation]:
    """The groups and filters in parts that fit."""
    one = prod(whole.filters.shape[2:]) * whole.accumulator.itemsize
    filters = clamp(chunk_bytes // one, whole.filter_count)
    for group in parts(whole.groups, clamp(chunk_bytes // (one * filters), whole.groups)):
        for some in parts(whole.filter_count, filters):
            yield whole.part(groups=group, filters=some)


def _blocks(whole: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images and rows in parts whose products fit."""
    row, *others = whole.axes
    taps = prod(axis.taps for axis in others)
    channels = max(whole.filter_count * taps, whole.channels) * whole.groups
    line = channels * prod(axis.size for axis in others) * whole.accumulator.itemsize
    rows = clamp(block_bytes // line, row.outputs)
    for some in parts(whole.images, clamp(block_bytes // (line * rows), whole.images)):
        for lines in parts(row.outputs, rows):
            yield whole.part(images=some, outputs=(lines,))
