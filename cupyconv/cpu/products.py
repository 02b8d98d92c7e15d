"""Matrix products of filters and gathered pixels (im2col), for every configuration.

The im2col matrix has a column per pixel of the result and a row per tap and channel.  It is
gathered block by block; each block stays in the cache of the core that multiplies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.axis import box_of, boxes, clamp, split_evenly
from cupyconv.cpu.choice import LEAST_PIXELS, SUMS
from cupyconv.cpu.correlation import ALL, Correlation, gather
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy, matmul, merged, operand

MANY_IMAGES = 16
"""Images share a channels-first block if they are small, or if more than these fit (hand-set)."""


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute ``whole.result`` in blocks, whose size is proportional to ``block_bytes``."""
    for piece in whole.pieces():
        for chunk in piece.chunks(8 * block_bytes, _least_filters(piece)):
            channels = split_evenly(chunk.channels, _channels_at_once(chunk, block_bytes))
            terms = _terms(chunk, list(channels), pool)
            window, results, most = _columns(chunk, block_bytes)
            size = _pixels(chunk, most) * (2 * window + min(len(terms) + 1, 3) * results)
            each(partial(_multiply, terms), _blocks(chunk, block_bytes), pool, size)


def _multiply(
    terms: Sequence[tuple[slice, np.ndarray]], block: Correlation, scratch: Scratch
) -> None:
    """Compute a block's result, the sum of a matrix product per slice of the channels.

    Args:
        terms: slice of the channels and filter matrix of each product.
    """
    is_direct = operand(block.result, 2, block.accumulator) is not None
    sums = block.result if is_direct else scratch.like("sums", block.result)
    flat = merged(sums, 2)
    for channels, matrix in terms:
        windows = _windows(block.narrow(channels=channels), scratch)
        if channels.start == 0:
            matmul(matrix, windows, flat, scratch.sums)
        else:
            flat += matmul(matrix, windows, scratch.array("more", flat.shape), scratch.sums)
    block.finish(sums)


def filter_gradient(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Write the filter gradient to ``whole.filters``; ``whole.result`` is dy."""
    for chunk in whole.chunks(4 * block_bytes, _least_filters(whole)):
        _filter_gradient(chunk, pool, block_bytes)


def _contract(block: Correlation, scratch: Scratch, total: np.ndarray) -> None:
    gradients = scratch.matrices("sums", block.result, block.conjugate)
    columns = _windows(block, scratch).swapaxes(1, 2)
    matmul(gradients, columns, merged(_like_pixels(total, block), 2), scratch.sums)


def _filter_gradient(chunk: Correlation, pool: Pool, block_bytes: int) -> None:
    weights = list(weights_of_sums(chunk, block_bytes))
    count = SUMS // len(weights)
    terms = [(part, term) for part in weights for term in part.divided(count)]
    [shared] = pool.divided("shared", sum(term.filters.size for _, term in terms))
    totals = [_like_filters(term, shared, f"{number}") for number, (_, term) in enumerate(terms)]
    window, results, most = _columns(terms[0][1], block_bytes)
    # A piece may have fewer taps.  Its blocks then have more pixels, in about the same memory.
    size = 3 * _pixels(terms[0][1], most + 1) * max(window, results) + 2 * totals[0].size

    def add(number: int, memory: Scratch) -> None:
        total, is_begun = totals[number], False
        for piece in terms[number][1]._replace(filters=total).pieces():
            for block in _blocks(piece, block_bytes):
                scratch = memory.rest()
                if not is_begun and piece.filters is total:
                    _contract(block, scratch, total)
                else:
                    if not is_begun:
                        total[...] = 0
                    term = _like_filters(piece, scratch, "term")
                    _contract(block, scratch, term)
                    np.add(piece.filters, term, out=piece.filters)
                is_begun = True

    each(add, range(len(terms)), pool, size)
    for part in weights:
        first, *more = (total for (of, _), total in zip(terms, totals, strict=True) if of is part)
        for total in more:
            first += total
        copy(part.filters, first)


def _least_filters(piece: Correlation) -> int:
    """Return the argument ``least_filters`` of ``Correlation.chunks``; smaller for few pixels."""
    return 4 * clamp(prod(piece.result.shape[2:]), LEAST_PIXELS)


# -- parts -----------------------------------------------------------------------------------------


def _channels_at_once(piece: Correlation, block_bytes: int) -> int:
    """Return the channels per matrix product; LEAST_PIXELS windows of them fit 2 * block_bytes."""
    window = piece.groups * prod(axis.taps for axis in piece.axes) * piece.accumulator.itemsize
    return clamp(2 * block_bytes // max(window * LEAST_PIXELS, 1), piece.channels)


def weights_of_sums(chunk: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """Divide channels and taps into parts whose filter gradient fits the cache."""
    weight = chunk.groups * max(chunk.filter_count, LEAST_PIXELS) * chunk.accumulator.itemsize
    extents = chunk.filters.shape[2:]
    for channels, *taps in boxes(extents, box_of(extents, max(block_bytes // weight, 1))):
        yield chunk.narrow(channels=channels, taps=taps)


def _columns(piece: Correlation, block_bytes: int) -> tuple[int, int, int]:
    """Return elements per pixel, of the windows and the result, and the most pixels per block."""
    taps = prod(axis.taps for axis in piece.axes)
    window = piece.groups * _channels_at_once(piece, block_bytes) * taps
    results = piece.groups * piece.filter_count
    column = max(window, results, 1) * piece.accumulator.itemsize
    few = clamp(2 * block_bytes // column, LEAST_PIXELS)
    return window, results, max(block_bytes // column, few)


def _pixels(piece: Correlation, most: int) -> int:
    """Return the pixels per block: at most ``most``, and at most half of a large piece."""
    return min(most, max(prod(piece.result.shape[2:]) // 2, LEAST_PIXELS // 2))


def _blocks(piece: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """Divide a piece into blocks with enough pixels for a fast product, which fit the cache."""
    extents = [axis.outputs for axis in piece.axes]
    image = prod(extents)
    *_, most = _columns(piece, block_bytes)
    pixels, images = _pixels(piece, most), 1
    if image < max(LEAST_PIXELS, most // MANY_IMAGES) or channels_are_last(piece.result):
        images = clamp(pixels // image, piece.images)
    return piece.boxes(piece.groups, images, *box_of(extents, max(pixels // images, 1)))


# -- operands --------------------------------------------------------------------------------------


def _terms(
    chunk: Correlation, channels: Sequence[slice], pool: Pool
) -> list[tuple[slice, np.ndarray]]:
    """Return each part of the channels with its filter matrix (G, K, channels * taps)."""
    filters = [_like_pixels(chunk.filters[:, :, part], chunk) for part in channels]
    are_views = [operand(part, 2, chunk.accumulator) is not None for part in filters]
    size = 0 if all(are_views) and not chunk.conjugate else chunk.filters.size
    [shared] = pool.divided("shared", size)
    matrices = (shared.matrices(f"{n}", part, chunk.conjugate) for n, part in enumerate(filters))
    return list(zip(channels, matrices, strict=True))


def _like_filters(piece: Correlation, scratch: Scratch, name: str) -> np.ndarray:
    """Return a scratch array (G, K, C, *taps); in memory, C is last if the source has it last."""
    memory = scratch.array(name, _like_pixels(piece.filters, piece).shape)
    return np.moveaxis(memory, -1, 2) if channels_are_last(piece.source) else memory


def _like_pixels(filters: np.ndarray, piece: Correlation) -> np.ndarray:
    """Transpose (G, K, C, *taps) to (G, K, *taps, C) if the source has its channels last."""
    return np.moveaxis(filters, 2, -1) if channels_are_last(piece.source) else filters


def _windows(block: Correlation, scratch: Scratch) -> np.ndarray:
    """Return the windows (G, channels * taps, pixels), as a view if BLAS accepts one."""
    taps, outputs = [axis.taps for axis in block.axes], [axis.outputs for axis in block.axes]
    groups, channels, images, rank = block.groups, block.channels, block.images, len(taps)
    shape = (groups, channels, *taps, images, *outputs)
    source = _padded(block, prod(shape), scratch)
    if source is not None:
        group, channel, image, *steps = source.strides
        taps_by = (axis.dilation * step for axis, step in zip(block.axes, steps, strict=True))
        outputs_by = (axis.stride * step for axis, step in zip(block.axes, steps, strict=True))
        strides = (group, channel, *taps_by, image, *outputs_by)
        windows = as_strided(source, shape, strides)
        view = operand(windows, 2, block.accumulator) if prod(taps) == 1 else None
        if view is not None:
            return view
    depth, pixels = channels * prod(taps), images * prod(outputs)
    if channels_are_last(block.source):
        memory = scratch.array("windows", (groups, images, *outputs, *taps, channels))
        gathered = memory.transpose(0, -1, *range(2 + rank, 2 + 2 * rank), *range(1, 2 + rank))
        flat = memory.reshape(groups, pixels, depth).swapaxes(1, 2)
    else:
        gathered = scratch.array("windows", shape)
        flat = gathered.reshape(groups, depth, pixels)
    if source is None:
        _gather_taps(gathered, block)
    elif strides[1 + rank] == channels * channel:
        gathered[...] = windows  # contiguous rows of taps and channels
    else:
        copy(gathered, windows, is_cached=True)
    return flat


def _gather_taps(gathered: np.ndarray, block: Correlation) -> None:
    """Fill (G, C, *taps, N, *outputs) tap by tap."""
    for tap in np.ndindex(*(axis.taps for axis in block.axes)):
        taps = zip(block.axes, tap, strict=True)
        single = [axis.with_taps(slice(t, t + 1)) for axis, t in taps]
        gather(gathered[(ALL, ALL, *tap)], block.source, single, 3)


def _padded(block: Correlation, most: int, scratch: Scratch) -> np.ndarray | None:
    """Return the padded source (G, C, N, *pixels) in the accumulator's dtype.

    The source is not copied if a view is possible.  Return None if a copy would have more than
    ``most`` elements, as for windows that are far apart.
    """
    axes, corner = [axis.pixels() for axis in block.axes], block.source.shape[:3]
    inside, read = zip(*(axis.inside(0) for axis in axes), strict=True)
    sizes = [axis.outputs for axis in axes]
    if block.source.dtype == block.accumulator and inside == tuple(slice(0, n) for n in sizes):
        return block.source[(ALL, ALL, ALL, *read)]
    if prod(corner) * prod(sizes) > most:
        return None
    if channels_are_last(block.source):
        memory = scratch.array("padded", (corner[2], *sizes, *corner[:2]))
        padded = memory.transpose(-2, -1, *range(memory.ndim - 2))
    else:
        padded = scratch.array("padded", (*corner, *sizes))
    gather(padded, block.source, axes, 3)
    return padded
