"""Matrix products of filters and pixels, scattered to the result (col2im), for few filters.

Every pixel of the source is multiplied with the taps, and each tap's products are added where its
windows are.  Of few filters there are fewer products to add than pixels that would have to be
gathered, and the matrix products have taps times filters for rows instead of filters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from cupyconv.cpu.correlation import ALL, Correlation, clamp, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import copy_uncached, operand


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for chunk in _chunks(whole, 8 * block_bytes):
        _correlate(chunk, scratch, block_bytes)


def _correlate(chunk: Correlation, scratch: Scratch, block_bytes: int) -> None:
    filters = np.moveaxis(chunk.filters, (1, 2), (-2, -1))  # (G, *taps, K, C)
    matrices = scratch.array("filters", filters.shape)
    matrices[...] = filters
    if chunk.conjugate:
        np.conjugate(matrices, out=matrices)

    def scatter(block: Correlation, memory: Scratch) -> None:
        sums = memory.array("sums", block.result.swapaxes(0, 1).shape)
        sums[...] = 0
        for some in parts(block.axes[0].taps, _taps_at_once(block, block_bytes)):
            _add(sums, block, matrices, some, memory)
        block.finish(sums.swapaxes(0, 1))

    each(scatter, _blocks(chunk, block_bytes), scratch, blocks=6)


def _add(
    sums: np.ndarray, block: Correlation, matrices: np.ndarray, some: slice, scratch: Scratch
) -> None:
    """Add the products with some taps of the first axis to the sums."""
    row, *others = block.axes
    row = row.with_taps(some)
    _, under = row.pixels().inside(0)
    if under.start == under.stop:
        return
    lines = block.source[:, :, :, under]
    pixels = _pixels(lines, block, scratch)
    matrix = matrices[:, some].reshape(block.groups, 1, -1, block.channels)
    shape = (*pixels.shape[:2], matrix.shape[2], pixels.shape[-1])
    products = np.matmul(matrix, pixels, out=scratch.array("products", shape))
    taps = (row.taps, *matrices.shape[2:-2])
    by_tap = products.reshape(*shape[:2], *taps, block.filter_count, *lines.shape[3:])
    for tap in np.ndindex(*taps):
        inside = [axis.inside(t) for axis, t in zip((row, *others), tap, strict=True)]
        to, (read, *columns) = zip(*inside, strict=True)
        if read.start == read.stop:
            continue
        read = slice(read.start - under.start, read.stop - under.start, read.step)
        total = sums[(ALL, ALL, ALL, *to)]
        np.add(total, by_tap[(ALL, ALL, *tap, ALL, read, *columns)], out=total)


def _pixels(lines: np.ndarray, block: Correlation, scratch: Scratch) -> np.ndarray:
    """Lines of the source, (N, G, C, rows, others), as (G, N, C, pixels)."""
    lines = lines.swapaxes(0, 1)
    view = operand(lines, 3, block.accumulator)
    if view is not None:
        return view
    turned = scratch.array("source", lines.shape)
    copy_uncached(turned, lines)
    return turned.reshape(*lines.shape[:3], -1)


def _chunks(whole: Correlation, chunk_bytes: int) -> Iterator[Correlation]:
    """The groups and filters in parts that fit."""
    one = prod(whole.filters.shape[2:]) * whole.accumulator.itemsize
    filters = clamp(chunk_bytes // one, whole.filter_count)
    for group in parts(whole.groups, clamp(chunk_bytes // (one * filters), whole.groups)):
        for some in parts(whole.filter_count, filters):
            yield whole.part(groups=group, filters=some)


def _blocks(whole: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images and rows in parts whose pixels, sums, and products with a row of taps, fit."""
    row, *others = whole.axes
    sizes, outputs = prod(axis.size for axis in others), prod(axis.outputs for axis in others)
    taps = prod(axis.taps for axis in others)
    line = max(whole.filter_count * taps, whole.channels) * sizes
    line = max(line * row.stride, whole.filter_count * outputs)
    line *= whole.groups * whole.accumulator.itemsize
    rows = clamp(block_bytes // line, row.outputs)
    for some in parts(whole.images, clamp(block_bytes // (line * rows), whole.images)):
        for lines in parts(row.outputs, rows):
            yield whole.part(images=some, outputs=(lines,))


def _taps_at_once(block: Correlation, block_bytes: int) -> int:
    """Taps of the first axis whose products fit."""
    row, *others = block.axes
    columns = prod(axis.taps * axis.size for axis in others) * row.pixels().outputs
    tap = block.images * block.groups * block.filter_count * columns * block.accumulator.itemsize
    return clamp(2 * block_bytes // tap, row.taps)
