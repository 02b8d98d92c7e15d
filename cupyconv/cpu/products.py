"""Matrix products of filters and gathered pixels (im2col), for every configuration.

The im2col matrix has a column for each pixel of the result and a row for each tap and channel.  It
is made block by block, each small enough to stay in the cache of the core that multiplies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import (
    ALL,
    SUMS,
    Correlation,
    box_of,
    boxes,
    clamp,
    gather,
    parts,
)
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy, merged, operand
from cupyconv.planning.cpu import LEAST_PIXELS

LEAST_FILTERS = 4 * LEAST_PIXELS
"""Filters whose weights take what the windows of a few pixels do."""

MANY_IMAGES = 16
"""Images that fit a block from which on it has several, though its result has to be copied."""


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for piece in whole.pieces():
        for chunk in piece.chunks(8 * block_bytes, LEAST_FILTERS):
            channels = parts(chunk.channels, _channels_at_once(chunk, block_bytes))
            terms = [(some, _matrix(chunk, scratch, some)) for some in channels]
            each(partial(_multiply, terms), _blocks(chunk, block_bytes), scratch, blocks=4)


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


def filter_gradient(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the gradient of the filters, into ``filters``, from that of the result."""
    for chunk in whole.chunks(4 * block_bytes, LEAST_FILTERS):
        _filter_gradient(chunk, scratch, block_bytes)


def _contract(block: Correlation, scratch: Scratch, total: np.ndarray) -> None:
    gradients = scratch.matrices("sums", block.result, block.conjugate)
    columns = _windows(block, scratch).swapaxes(1, 2)
    np.matmul(gradients, columns, out=merged(_in_order(total, block), 2))


def _filter_gradient(chunk: Correlation, scratch: Scratch, block_bytes: int) -> None:
    channels = list(parts(chunk.channels, _channels_of_sums(chunk, block_bytes)))
    pixels = list(chunk.divided(-(-SUMS // len(channels))))
    of_channels = [chunk.part(channels=some) for some in channels]
    totals = [
        [
            _like_filters(some, scratch, f"total {number} {at}")
            for at, some in enumerate(of_channels)
        ]
        for number in range(len(pixels))
    ]

    def add(sums: tuple[int, int], memory: Scratch) -> None:
        number, at = sums
        total = totals[number][at]
        is_begun = False
        for piece in replace(pixels[number].part(channels=channels[at]), filters=total).pieces():
            for block in _blocks(piece, block_bytes):
                if not is_begun and piece.filters is total:
                    _contract(block, memory, total)
                else:
                    if not is_begun:
                        total[...] = 0
                    term = _like_filters(piece, memory, "term")
                    _contract(block, memory, term)
                    np.add(piece.filters, term, out=piece.filters)
                is_begun = True

    each(add, product(range(len(pixels)), range(len(channels))), scratch, blocks=4)
    for at, some in enumerate(of_channels):
        total = totals[0][at]
        for more in totals[1:]:
            total += more[at]
        copy(some.filters, total)


# -- parts -----------------------------------------------------------------------------------------


def _channels_at_once(piece: Correlation, block_bytes: int) -> int:
    """Channels of which windows enough for a product fit."""
    window = piece.groups * prod(axis.taps for axis in piece.axes) * piece.accumulator.itemsize
    return clamp(2 * block_bytes // max(window * LEAST_PIXELS, 1), piece.channels)


def _channels_of_sums(chunk: Correlation, block_bytes: int) -> int:
    """Channels whose filters' gradient stays in the cache while it is summed."""
    taps = chunk.groups * prod(axis.taps for axis in chunk.axes) * chunk.accumulator.itemsize
    most = block_bytes // max(taps * max(chunk.filter_count, LEAST_PIXELS), 1)
    return clamp(most, chunk.channels)


def _blocks(piece: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images and pixels in parts whose windows and results fit a block, but enough of them."""
    extents = [axis.outputs for axis in piece.axes]
    image = prod(extents)
    groups, filters, channels, *taps = piece.filters.shape
    channels = min(channels, _channels_at_once(piece, block_bytes))
    column = groups * max(channels * prod(taps), filters) * piece.accumulator.itemsize
    few = clamp(2 * block_bytes // max(column, 1), LEAST_PIXELS)
    most = max(block_bytes // max(column, 1), few)
    pixels = min(most, max(piece.images * image // 2, LEAST_PIXELS // 2))
    images = 1
    if image < max(LEAST_PIXELS, most // MANY_IMAGES) or channels_are_last(piece.result):
        images = clamp(pixels // image, piece.images)
    for some in parts(piece.images, images):
        for outputs in boxes(extents, box_of(extents, max(pixels // images, 1))):
            yield piece.part(images=some, outputs=outputs)


# -- operands --------------------------------------------------------------------------------------


def _matrix(piece: Correlation, scratch: Scratch, channels: slice) -> np.ndarray:
    """(G, K, depth): the filters of some channels."""
    some = piece.part(channels=channels)
    name = f"filters {channels.start}"
    return scratch.matrices(name, _in_order(some.filters, some), some.conjugate)


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
