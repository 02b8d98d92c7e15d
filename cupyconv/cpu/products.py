"""Matrix products of filters and gathered pixels (im2col), for every configuration.

The im2col matrix has a column for each pixel of the result and a row for each tap and channel.  It
is made block by block, each small enough to stay in the cache of the core that multiplies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import ALL, SUMS, Correlation, box_of, boxes, clamp, gather, parts
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy, merged, operand
from cupyconv.planning.cpu import LEAST_PIXELS

LEAST_FILTERS = 4 * LEAST_PIXELS
"""Filters whose weights take what the windows of a few pixels do."""

MANY_IMAGES = 16
"""Images that fit a block from which on it has several, though its result has to be copied."""


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute the result."""
    for piece in whole.pieces():
        for chunk in piece.chunks(8 * block_bytes, LEAST_FILTERS):
            channels = parts(chunk.channels, _channels_at_once(chunk, block_bytes))
            terms = _terms(chunk, list(channels), pool)
            window, results, most = _columns(chunk, block_bytes)
            size = _pixels(chunk, most) * (2 * window + min(len(terms), 2) * results)
            each(partial(_multiply, terms), _blocks(chunk, block_bytes), pool, size)


def _multiply(
    terms: Sequence[tuple[slice, np.ndarray]], block: Correlation, scratch: Scratch
) -> None:
    """The result of a block, by the matrices of some channels each."""
    is_direct = operand(block.result, 2, block.accumulator) is not None
    sums = block.result if is_direct else scratch.like("sums", block.result)
    flat = merged(sums, 2)
    for some, matrix in terms:
        windows = _windows(block.part(channels=some), scratch)
        if some.start == 0:
            np.matmul(matrix, windows, out=flat)
        else:
            flat += np.matmul(matrix, windows, out=scratch.array("more", flat.shape))
    block.finish(sums)


def filter_gradient(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute the gradient of the filters, into ``filters``, from that of the result."""
    for chunk in whole.chunks(4 * block_bytes, LEAST_FILTERS):
        _filter_gradient(chunk, pool, block_bytes)


def _contract(block: Correlation, scratch: Scratch, total: np.ndarray) -> None:
    gradients = scratch.matrices("sums", block.result, block.conjugate)
    columns = _windows(block, scratch).swapaxes(1, 2)
    np.matmul(gradients, columns, out=merged(_in_order(total, block), 2))


def _filter_gradient(chunk: Correlation, pool: Pool, block_bytes: int) -> None:
    weights = list(_weights_of_sums(chunk, block_bytes))
    wanted = SUMS // len(weights)
    terms = [(some, one) for some in weights for one in some.divided(wanted)]
    [shared] = pool.divided("shared", sum(one.filters.size for _, one in terms))
    totals = [_like_filters(one, shared, f"{number}") for number, (_, one) in enumerate(terms)]
    window, results, most = _columns(terms[0][1], block_bytes)
    # Of a piece of fewer taps there are more pixels, in about as much memory.
    size = 3 * _pixels(terms[0][1], most + 1) * max(window, results) + totals[0].size

    def add(number: int, memory: Scratch) -> None:
        total, is_begun = totals[number], False
        for piece in replace(terms[number][1], filters=total).pieces():
            for block in _blocks(piece, block_bytes):
                here = memory.rest()
                if not is_begun and piece.filters is total:
                    _contract(block, here, total)
                else:
                    if not is_begun:
                        total[...] = 0
                    term = _like_filters(piece, here, "term")
                    _contract(block, here, term)
                    np.add(piece.filters, term, out=piece.filters)
                is_begun = True

    each(add, range(len(terms)), pool, size)
    for some in weights:
        first, *others = (total for (of, _), total in zip(terms, totals, strict=True) if of is some)
        for more in others:
            first += more
        copy(some.filters, first)


# -- parts -----------------------------------------------------------------------------------------


def _channels_at_once(piece: Correlation, block_bytes: int) -> int:
    """Channels of which windows enough for a product fit."""
    window = piece.groups * prod(axis.taps for axis in piece.axes) * piece.accumulator.itemsize
    return clamp(2 * block_bytes // max(window * LEAST_PIXELS, 1), piece.channels)


def _weights_of_sums(chunk: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The channels and taps in parts whose gradient stays in the cache while it is summed."""
    weight = chunk.groups * max(chunk.filter_count, LEAST_PIXELS) * chunk.accumulator.itemsize
    extents = chunk.filters.shape[2:]
    for channels, *taps in boxes(extents, box_of(extents, max(block_bytes // weight, 1))):
        yield chunk.part(channels=channels, taps=taps)


def _columns(piece: Correlation, block_bytes: int) -> tuple[int, int, int]:
    """Elements of a pixel's window, of the channels at once, and of its results; how many fit."""
    taps = prod(axis.taps for axis in piece.axes)
    window = piece.groups * _channels_at_once(piece, block_bytes) * taps
    results = piece.groups * piece.filter_count
    column = max(window, results, 1) * piece.accumulator.itemsize
    few = clamp(2 * block_bytes // column, LEAST_PIXELS)
    return window, results, max(block_bytes // column, few)


def _pixels(piece: Correlation, most: int) -> int:
    """The pixels of a block, where so many fit: there are at least two, unless they are small."""
    return min(most, max(prod(piece.result.shape[2:]) // 2, LEAST_PIXELS // 2))


def _blocks(piece: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images and pixels in parts whose windows and results fit a block, but enough of them."""
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
    """Of some channels each, the filters (G, K, depth)."""
    filters = [_in_order(chunk.filters[:, :, some], chunk) for some in channels]
    views = [operand(one, 2, chunk.accumulator) is not None for one in filters]
    size = 0 if all(views) and not chunk.conjugate else chunk.filters.size
    [shared] = pool.divided("shared", size)
    matrices = (shared.matrices(f"{n}", one, chunk.conjugate) for n, one in enumerate(filters))
    return list(zip(channels, matrices, strict=True))


def _like_filters(piece: Correlation, scratch: Scratch, name: str) -> np.ndarray:
    """Scratch memory for the filters, (G, K, C, *taps), in the order of the gathered pixels."""
    memory = scratch.array(name, _in_order(piece.filters, piece).shape)
    return np.moveaxis(memory, -1, 2) if channels_are_last(piece.source) else memory


def _in_order(filters: np.ndarray, piece: Correlation) -> np.ndarray:
    """(G, K, C, *taps) with the channels where they are among gathered pixels."""
    return np.moveaxis(filters, 2, -1) if channels_are_last(piece.source) else filters


def _windows(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, depth, pixels): what is under the windows, where it is if BLAS takes it there."""
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
        gathered[...] = windows  # in rows of taps with their channels
    else:
        copy(gathered, windows, is_cached=True)
    return flat


def _gather_taps(gathered: np.ndarray, block: Correlation) -> None:
    """Fill (G, C, *taps, N, *outputs) one tap after the other."""
    for tap in np.ndindex(*(axis.taps for axis in block.axes)):
        taps = zip(block.axes, tap, strict=True)
        single = [axis.with_taps(slice(t, t + 1)) for axis, t in taps]
        gather(gathered[(ALL, ALL, *tap)], block.source, single, 3)


def _padded(block: Correlation, most: int, scratch: Scratch) -> np.ndarray | None:
    """(G, C, N, *pixels): all under the windows, in the dtype of the sums.

    None if that is no view, and more than so many elements: the windows are far apart.
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
