"""Matrix products of filters and gathered pixels (im2col), for every configuration.

The im2col matrix has a column for each pixel of the result and a row for each tap and channel, and
most of it is the same numbers over and over.  It is made block by block, and along the first
spatial axis it is not copied at all: a block's rows of the source are gathered once, for the taps
of the other axes,

    gathered[row][taps of the other axes, channels][pixels of an output row]

and the window of output row o is the gathered rows from o * stride on, as many as there are taps.
Windows of neighbouring rows overlap in memory, and BLAS multiplies them where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import ALL, Correlation, box_of, boxes, clamp, gather, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.views import channels_are_last, copy, copy_uncached, merged, operand
from cupyconv.planning.cpu import LEAST_CHANNELS, overlaps_rows, worthwhile_pixels


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for chunk in _chunks(_with_rows(whole), 4 * block_bytes):
        for piece in chunk.pieces():
            packed = replace(piece, filters=_packed(piece, scratch))
            for block in _blocks(packed, block_bytes):
                sums = _result_view(block)
                if sums is None:
                    sums = _like_result(block, scratch)
                np.matmul(_matrix(block)[:, None], _windows(block, scratch), out=merged(sums, 3))
                block.finish(_by_image(sums))


def filter_gradient(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the gradient of the filters, into ``filters``, from that of the result."""
    for chunk in _chunks(_with_rows(whole), 3 * block_bytes):
        total = _like_filters(chunk, scratch, "total")
        total[...] = 0
        for piece in replace(chunk, filters=total).pieces():
            term = _like_filters(piece, scratch, "term")
            by_tap = merged(np.moveaxis(term, 2, -1), 2)
            for block in _blocks(piece, block_bytes, not piece.conjugate):
                gradients = None if block.conjugate else _result_view(block)
                if gradients is None:
                    gradients = _like_result(block, scratch)
                    copy_uncached(gradients, _by_row(block.result))
                    if block.conjugate:
                        np.conjugate(gradients, out=gradients)
                columns, windows = merged(gradients, 3), _windows(block, scratch)
                for row in range(block.axes[0].outputs):
                    np.matmul(columns[:, row], windows[:, row].swapaxes(1, 2), out=by_tap)
                    np.add(piece.filters, term, out=piece.filters)
        copy_uncached(chunk.filters, total)


# -- parts -----------------------------------------------------------------------------------------


def _with_rows(whole: Correlation) -> Correlation:
    """With a first axis whose windows may overlap, and one or more others, which are gathered.

    Where there is nothing to gain by overlapping, the first axis is an additional one of a single
    pixel.
    """
    row, *others = whole.axes
    pixels = whole.images * prod(axis.outputs for axis in others)
    if others and overlaps_rows(row.taps, row.dilation, pixels, whole.filter_count):
        return whole
    return whole.with_axis(0)


def _chunks(whole: Correlation, chunk_bytes: int) -> Iterator[Correlation]:
    """The groups and filters in parts whose packed filters, and one block, fit."""
    window = prod(whole.filters.shape[2:]) * whole.accumulator.itemsize
    filters = clamp(chunk_bytes // window, whole.filter_count)
    columns = worthwhile_pixels(filters) * whole.axes[0].pixels().outputs
    row = window // whole.axes[0].taps
    groups = clamp(chunk_bytes // max(window * filters, row * columns), whole.groups)
    for group in parts(whole.groups, groups):
        for some in parts(whole.filter_count, filters):
            yield whole.part(groups=group, filters=some)


def _blocks(piece: Correlation, block_bytes: int, in_place: bool = True) -> Iterator[Correlation]:
    """The images and pixels in parts whose gathered rows, and whose results, fit a block."""
    row, *others = piece.axes
    extents = [axis.outputs for axis in others]
    image = prod(extents)
    ready = _images_ready(piece, image) if in_place else 0
    if ready:
        yield from (piece.part(images=some) for some in parts(piece.images, ready))
        return
    groups, filters, channels, row_taps, *taps = piece.filters.shape
    column = max(groups * channels * prod(taps), 1) * piece.accumulator.itemsize  # of a source row
    window = column * max(row_taps, 1)
    result = groups * filters * piece.accumulator.itemsize
    wanted = max(worthwhile_pixels(filters), block_bytes // (window + result))
    most = min(wanted, 4 * block_bytes // window, 2 * block_bytes // result)
    box = box_of(extents, most)
    images = clamp(most // image, piece.images)
    pixels = images * prod(box)
    source_rows = 2 * block_bytes // (column * pixels) - row_taps
    rows = min(source_rows // row.stride + 1, 2 * block_bytes // (result * pixels))
    for some in parts(piece.images, images):
        for outputs in boxes([row.outputs, *extents], [clamp(rows, row.outputs), *box]):
            yield piece.part(images=some, outputs=outputs)


def _images_ready(piece: Correlation, image: int) -> int:
    """How many images can be multiplied where they are, with nothing copied; 0 if none can."""
    for images in (piece.images, 1):
        some = piece.part(images=slice(0, images))
        enough = images == piece.images or image >= worthwhile_pixels(piece.filter_count)
        if enough and _source_view(some) is not None and _result_view(some) is not None:
            return images
    return 0


# -- operands --------------------------------------------------------------------------------------


def _packed(piece: Correlation, scratch: Scratch) -> np.ndarray:
    """A copy of the filters with taps and channels as neighbours in memory."""
    groups, filters, channels, *taps = piece.filters.shape
    if piece.filters.strides[1] < piece.filters.strides[2]:  # so are filters now
        packed = np.moveaxis(scratch.array("filters", (groups, *taps, channels, filters)), -1, 1)
    else:
        packed = scratch.array("filters", (groups, filters, *taps, channels))
    packed = np.moveaxis(packed, -1, 2)
    copy_uncached(packed, piece.filters)
    if piece.conjugate:
        np.conjugate(packed, out=packed)
    return packed


def _like_filters(piece: Correlation, scratch: Scratch, name: str) -> np.ndarray:
    """Scratch memory for the filters, the fewer of which are neighbours: so BLAS is faster.

    Those are filters or, if there are less of them, taps and channels.
    """
    groups, filters, channels, *taps = piece.filters.shape
    if filters <= channels * prod(taps):
        packed = np.moveaxis(scratch.array(name, (groups, *taps, channels, filters)), -1, 1)
    else:
        packed = scratch.array(name, (groups, filters, *taps, channels))
    return np.moveaxis(packed, -1, 2)


def _matrix(block: Correlation) -> np.ndarray:
    """The filters as (G, K, taps * C)."""
    return merged(np.moveaxis(block.filters, 2, -1), 2)


def _windows(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, rows, taps * C, pixels): the windows of each output row, which overlap in memory."""
    view = _source_view(block)
    if view is not None:
        return view
    gathered = _gathered(block, scratch)
    row, *others = block.axes
    group, line, *_ = gathered.strides
    channel, pixel = gathered.strides[2 + len(others)], gathered.strides[-1]
    depth = prod(axis.taps for axis in block.axes) * block.channels
    pixels = block.images * prod(axis.outputs for axis in others)
    return as_strided(
        gathered,
        (block.groups, row.outputs, depth, pixels),
        (group, line * row.stride, channel, pixel),
    )


def _gathered(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(G, source rows, taps of the other axes, C, N, pixels of the other axes)."""
    row, *others = block.axes
    kernel = (row.span, *(axis.taps for axis in others), block.channels)
    pixels = (block.images, *(axis.outputs for axis in others))
    if _gathers_channels(block):
        memory = scratch.array("gathered", (block.groups, *pixels, *kernel))
        gathered = np.moveaxis(memory, range(-len(kernel), 0), range(1, 1 + len(kernel)))
    else:
        gathered = scratch.array("gathered", (block.groups, *kernel, *pixels))
    source = _padded(block, gathered.size, scratch)
    if source is None:
        _gather_taps(gathered, block)
        return gathered
    group, line, channel, image, *steps = source.strides
    taps = (axis.dilation * step for axis, step in zip(others, steps, strict=True))
    outputs = (axis.stride * step for axis, step in zip(others, steps, strict=True))
    windows = (group, line, *taps, channel, image, *outputs)
    copy(gathered, as_strided(source, gathered.shape, windows))
    return gathered


def _gather_taps(gathered: np.ndarray, block: Correlation) -> None:
    """Fill what ``_gathered`` is, one tap after the other."""
    row, *others = block.axes
    source = _by_row(block.source)
    for tap in np.ndindex(*(axis.taps for axis in others)):
        single = [axis.with_taps(slice(t, t + 1)) for axis, t in zip(others, tap, strict=True)]
        axes = dict(zip((1, *range(4, source.ndim)), (row.pixels(), *single), strict=True))
        gather(gathered[(ALL, ALL, *tap)], source, axes)


def _padded(block: Correlation, most: int, scratch: Scratch) -> np.ndarray | None:
    """(G, source rows, C, N, pixels of the other axes): all under the windows, some twice.

    None if that is no view, and more than so many elements: the windows are far apart.
    """
    axes = [axis.pixels() for axis in block.axes]
    source = _by_row(block.source)
    inside = [axis.inside(0) for axis in axes]
    turned = channels_are_last(block.source) and not _gathers_channels(block)
    whole = all(
        outputs == slice(0, axis.outputs) for axis, (outputs, _) in zip(axes, inside, strict=True)
    )
    if whole and not turned:
        first, *others = (origin for _, origin in inside)
        return source[(ALL, first, ALL, ALL, *others)]
    line, *sizes = (axis.outputs for axis in axes)
    if block.groups * block.channels * block.images * line * prod(sizes) > most:
        return None
    if channels_are_last(block.source) and not turned:
        memory = scratch.array("padded", (block.images, line, *sizes, block.groups, block.channels))
        padded = _by_row(np.moveaxis(memory, (-2, -1), (1, 2)))
    else:
        padded = scratch.array("padded", (block.groups, line, block.channels, block.images, *sizes))
    gather(padded, source, dict(zip((1, *range(4, padded.ndim)), axes, strict=True)))
    return padded


def _gathers_channels(block: Correlation) -> bool:
    """Whether the channels of a pixel are neighbours when they are gathered, as in the source."""
    return block.channels >= LEAST_CHANNELS and channels_are_last(block.source)


def _source_view(block: Correlation) -> np.ndarray | None:
    """The windows (G, rows, C, pixels) in the source itself, where each is of one pixel."""
    inside = [axis.inside(0) for axis in block.axes]
    for axis, (outputs, _) in zip(block.axes, inside, strict=True):
        if axis.taps != 1 or outputs != slice(0, axis.outputs):
            return None
    pixels = block.source[(ALL, ALL, ALL, *(origin for _, origin in inside))]
    return operand(_by_row(pixels), 3, block.accumulator)


def _result_view(block: Correlation) -> np.ndarray | None:
    """The result itself as (G, rows, K, N, pixels of a row), where BLAS can work on it."""
    view = _by_row(block.result)
    if block.activation is not None or operand(view, 3, block.accumulator) is None:
        return None
    return view


def _like_result(block: Correlation, scratch: Scratch) -> np.ndarray:
    """Scratch memory (G, rows, K, N, pixels of a row), with its axes about as in the result."""
    groups, rows, filters, *pixels = _by_row(block.result).shape
    if channels_are_last(block.result):
        memory = scratch.array("sums", (groups, rows, *pixels, filters))
        return np.moveaxis(memory, -1, 2)
    return scratch.array("sums", (groups, filters, rows, *pixels)).swapaxes(1, 2)


def _by_row(array: np.ndarray) -> np.ndarray:
    """(N, G, channels, rows, others) as (G, rows, channels, N, others)."""
    return array.transpose(1, 3, 2, 0, *range(4, array.ndim))


def _by_image(array: np.ndarray) -> np.ndarray:
    """(G, rows, channels, N, others) as (N, G, channels, rows, others)."""
    return array.transpose(3, 0, 2, 1, *range(4, array.ndim))
