"""Matrix products of filters and gathered pixels (im2col), for every configuration.

The im2col matrix has a column for each pixel of the result and a row for each tap and channel.  It
is made block by block, each small enough to stay in the cache of the core that multiplies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from cupyconv.cpu.views import channels_are_last, copy, copy_uncached, merged, operand
from cupyconv.planning.cpu import LEAST_PIXELS


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for chunk in _chunks(whole, 8 * block_bytes):
        for piece in chunk.pieces():
            _correlate(piece, scratch, block_bytes)


def _correlate(piece: Correlation, scratch: Scratch, block_bytes: int) -> None:
    channels = list(parts(piece.channels, _channels_at_once(piece, block_bytes)))
    matrices = [_matrix(piece.part(channels=some), scratch, some) for some in channels]

    def multiply(block: Correlation, memory: Scratch) -> None:
        sums = _by_channel(block.result)
        direct = operand(sums, 2, block.accumulator) is not None
        if not direct:
            sums = _like_result(block, memory)
        flat = merged(sums, 2)
        for some, matrix in zip(channels, matrices, strict=True):
            windows = _windows(block.part(channels=some), memory)
            if some.start == 0:
                np.matmul(matrix, windows, out=flat)
            else:
                flat += np.matmul(matrix, windows, out=memory.array("more", flat.shape))
        block.finish(block.result if direct else _by_image(sums))

    each(multiply, _blocks(piece, block_bytes), scratch, blocks=4)


def filter_gradient(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the gradient of the filters, into ``filters``, from that of the result."""
    for chunk in _chunks(whole, 4 * block_bytes):
        _filter_gradient(chunk, scratch, block_bytes)


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
                columns = _windows(block, memory).swapaxes(1, 2)
                gradients = _gradients(block, memory)
                if not is_begun and piece.filters is total:
                    np.matmul(gradients, columns, out=_by_depth(total, piece))
                else:
                    if not is_begun:
                        total[...] = 0
                    term = _like_filters(piece, memory, "term")
                    np.matmul(gradients, columns, out=_by_depth(term, piece))
                    np.add(piece.filters, term, out=piece.filters)
                is_begun = True

    each(add, product(range(len(pixels)), range(len(channels))), scratch, blocks=4)
    for at, some in enumerate(of_channels):
        total = totals[0][at]
        for more in totals[1:]:
            total += more[at]
        copy_uncached(some.filters, total)


# -- parts -----------------------------------------------------------------------------------------


def _chunks(whole: Correlation, chunk_bytes: int) -> Iterator[Correlation]:
    """The groups and filters in parts that fit, and windows of a few of their pixels too."""
    window = max(prod(whole.filters.shape[2:]), 1) * whole.accumulator.itemsize
    filters = clamp(chunk_bytes // window, whole.filter_count)
    groups = clamp(chunk_bytes // (4 * window * max(filters // 4, LEAST_PIXELS)), whole.groups)
    for group in parts(whole.groups, groups):
        for some in parts(whole.filter_count, filters):
            yield whole.part(groups=group, filters=some)


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
    pixels = max(block_bytes // max(column, 1), few)
    pixels = min(pixels, max(piece.images * image // 2, LEAST_PIXELS // 2))
    images = 1
    if image < LEAST_PIXELS or channels_are_last(piece.result):
        images = clamp(pixels // image, piece.images)
    for some in parts(piece.images, images):
        for outputs in boxes(extents, box_of(extents, max(pixels // images, 1))):
            yield piece.part(images=some, outputs=outputs)


# -- operands --------------------------------------------------------------------------------------


def _matrix(piece: Correlation, scratch: Scratch, channels: slice) -> np.ndarray:
    """(G, K, depth): the filters, where they are if BLAS takes them there."""
    if not piece.conjugate:
        view = operand(_in_order(piece.filters, piece), 2, piece.accumulator)
        if view is not None:
            return view
    packed = _like_filters(piece, scratch, f"filters {channels.start}")
    copy_uncached(packed, piece.filters)
    if piece.conjugate:
        np.conjugate(packed, out=packed)
    return _by_depth(packed, piece)


def _like_filters(piece: Correlation, scratch: Scratch, name: str) -> np.ndarray:
    """Scratch memory for the filters, (G, K, C, *taps), in the order of the gathered pixels."""
    groups, filters, channels, *taps = piece.filters.shape
    if channels_are_last(piece.source):
        return np.moveaxis(scratch.array(name, (groups, filters, *taps, channels)), -1, 2)
    return scratch.array(name, piece.filters.shape)


def _by_depth(filters: np.ndarray, piece: Correlation) -> np.ndarray:
    """(G, K, C, *taps) as (G, K, depth)."""
    return merged(_in_order(filters, piece), 2)


def _in_order(filters: np.ndarray, piece: Correlation) -> np.ndarray:
    """(G, K, C, *taps) with the channels where they are among gathered pixels."""
    return np.moveaxis(filters, 2, -1) if channels_are_last(piece.source) else filters


def _windows(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, depth, pixels): what is under the windows, where it is if BLAS takes it there."""
    view = _source_view(block)
    if view is not None:
        return view
    groups, channels, images = block.groups, block.channels, block.images
    taps, outputs = [axis.taps for axis in block.axes], [axis.outputs for axis in block.axes]
    depth, pixels = channels * prod(taps), images * prod(outputs)
    if channels_are_last(block.source):
        memory = scratch.array("windows", (groups, images, *outputs, *taps, channels))
        rank = len(taps)
        gathered = memory.transpose(
            0, 2 + 2 * rank, *range(2 + rank, 2 + 2 * rank), *range(1, 2 + rank)
        )
        flat = memory.reshape(groups, pixels, depth).swapaxes(1, 2)
    else:
        gathered = scratch.array("windows", (groups, channels, *taps, images, *outputs))
        flat = gathered.reshape(groups, depth, pixels)
    source = _padded(block, gathered.size, scratch)
    if source is None:
        _gather_taps(gathered, block)
        return flat
    group, channel, image, *steps = source.strides
    taps_by = (axis.dilation * step for axis, step in zip(block.axes, steps, strict=True))
    outputs_by = (axis.stride * step for axis, step in zip(block.axes, steps, strict=True))
    strides = (group, channel, *taps_by, image, *outputs_by)
    windows = as_strided(source, gathered.shape, strides)
    if strides[1 + len(taps)] == channels * channel:
        gathered[...] = windows  # in rows of taps with their channels
    else:
        copy(gathered, windows)
    return flat


def _gather_taps(gathered: np.ndarray, block: Correlation) -> None:
    """Fill (G, C, *taps, N, *outputs) one tap after the other."""
    source = _by_channel(block.source)
    for tap in np.ndindex(*(axis.taps for axis in block.axes)):
        single = [axis.with_taps(slice(t, t + 1)) for axis, t in zip(block.axes, tap, strict=True)]
        gather(gathered[(ALL, ALL, *tap)], source, dict(enumerate(single, 3)))


def _padded(block: Correlation, most: int, scratch: Scratch) -> np.ndarray | None:
    """(G, C, N, *pixels): all under the windows, in the dtype of the sums.

    None if that is no view, and more than so many elements: the windows are far apart.
    """
    axes = [axis.pixels() for axis in block.axes]
    inside = [axis.inside(0) for axis in axes]
    source = _by_channel(block.source)
    whole = all(to == slice(0, axis.outputs) for axis, (to, _) in zip(axes, inside, strict=True))
    if whole and source.dtype == block.accumulator:
        return source[(ALL, ALL, ALL, *(origin for _, origin in inside))]
    sizes = [axis.outputs for axis in axes]
    groups, channels, images = source.shape[:3]
    if groups * channels * images * prod(sizes) > most:
        return None
    if channels_are_last(block.source):
        memory = scratch.array("padded", (images, *sizes, groups, channels))
        padded = memory.transpose(-2, -1, *range(memory.ndim - 2))
    else:
        padded = scratch.array("padded", (groups, channels, images, *sizes))
    gather(padded, source, dict(enumerate(axes, 3)))
    return padded


def _source_view(block: Correlation) -> np.ndarray | None:
    """The windows (G, C, pixels) in the source itself, where each is of one pixel."""
    inside = [axis.inside(0) for axis in block.axes]
    for axis, (outputs, _) in zip(block.axes, inside, strict=True):
        if axis.taps != 1 or outputs != slice(0, axis.outputs):
            return None
    pixels = block.source[(ALL, ALL, ALL, *(origin for _, origin in inside))]
    return operand(_by_channel(pixels), 2, block.accumulator)


def _gradients(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, K, pixels): what is in the place of the result, where it is if BLAS takes it there."""
    if not block.conjugate:
        view = operand(_by_channel(block.result), 2, block.accumulator)
        if view is not None:
            return view
    gradients = _like_result(block, scratch)
    copy_uncached(gradients, _by_channel(block.result))
    if block.conjugate:
        np.conjugate(gradients, out=gradients)
    return merged(gradients, 2)


def _like_result(block: Correlation, scratch: Scratch) -> np.ndarray:
    """Scratch memory (G, K, N, *outputs), with its axes about as in the result."""
    groups, filters, images, *outputs = _by_channel(block.result).shape
    if channels_are_last(block.result):
        return np.moveaxis(scratch.array("sums", (groups, images, *outputs, filters)), -1, 1)
    return scratch.array("sums", (groups, filters, images, *outputs))


def _by_channel(array: np.ndarray) -> np.ndarray:
    """(N, G, channels, ...) as (G, channels, N, ...)."""
    return array.transpose(1, 2, 0, *range(3, array.ndim))


def _by_image(array: np.ndarray) -> np.ndarray:
    """(G, channels, N, ...) as (N, G, channels, ...)."""
    return array.transpose(2, 0, 1, *range(3, array.ndim))
