"""Depthwise correlations: one channel and one filter in each group.

There are no sums over channels that would make them matrix products.  Two ways are left:

- By taps: each tap's pixels times its weights are added to the result, in rows of pixels with
  their channels last, so that NumPy's einsum works on long stretches of memory.
- By bands: a few rows of a channel's result are the rows of the source under them times a band
  matrix, T[(h, w), (p, q)] = w[h - p * stride, w - q * stride], or zero where there is no such tap.
  Most of the products are with these zeros, but BLAS does them many at a time.

A band matrix multiplies by zero what a window does not read, and makes it NaN if it is not finite.
Operands that are not finite are therefore given up; of others, only sums of what a window reads
overflow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import SUMS, Correlation, boxes, clamp, gather, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import are_finite, copy_uncached, operand
from cupyconv.planning.cpu import band_rows

# -- by taps ---------------------------------------------------------------------------------------


def correlate_by_taps(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""
    for channels in _channel_chunks(_with_planes(whole), block_bytes):
        for chunk in _column_chunks(channels, block_bytes):
            _correlate_by_taps(chunk, scratch, block_bytes)


def _correlate_by_taps(chunk: Correlation, scratch: Scratch, block_bytes: int) -> None:
    weights = _repeated_weights(chunk, scratch)

    def add(block: Correlation, memory: Scratch) -> None:
        in_place = _is_by_pixel(block.result, block)
        sums = _by_pixel(block.result)
        if not in_place:
            sums = memory.array("sums", sums.shape)
        np.einsum(
            "ndhtrsqc,trsqc->ndhqc",
            _windows(block, memory),
            _in_stretches(weights, block),
            out=_in_stretches(sums, block),
        )
        block.finish(block.result if in_place else sums.transpose(0, 4, 1, 2, 3)[:, :, None])

    each(add, _row_blocks(chunk, block_bytes), scratch, blocks=3)


def filter_gradient_by_taps(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the filters' gradient."""
    for channels in _channel_chunks(_with_planes(whole), block_bytes):
        _filter_gradient_by_taps(channels, scratch, block_bytes)


def _filter_gradient_by_taps(channels: Correlation, scratch: Scratch, block_bytes: int) -> None:
    pixels = list(channels.divided(SUMS // 2))
    taps = [axis.taps for axis in channels.axes]
    totals = scratch.array("totals", (len(pixels), *taps, channels.groups))

    def add(number: int, memory: Scratch) -> None:
        totals[number] = 0
        for chunk in _column_chunks(pixels[number], block_bytes):
            totals[number] += _sums_by_taps(chunk, memory, block_bytes)

    each(add, range(len(pixels)), scratch, blocks=4)
    channels.filters[:, 0, 0] = np.moveaxis(totals.sum(axis=0), -1, 0)


def _sums_by_taps(chunk: Correlation, scratch: Scratch, block_bytes: int) -> np.ndarray:
    """(taps, channels): the filters' gradient of some columns."""
    taps = [axis.taps for axis in chunk.axes]
    # Every column's own sums, so that a row of them goes with a row of the gradients.
    total = scratch.array("total", (*taps, chunk.axes[2].outputs, chunk.groups))
    total[...] = 0
    term = scratch.array("term", total.shape)
    for block in _row_blocks(chunk, block_bytes):
        gradients = _by_pixel(block.result)
        if block.conjugate or not _is_by_pixel(block.result, block):
            gradients = scratch.array("gradients", gradients.shape)
            copy_uncached(gradients, _by_pixel(block.result))
        if block.conjugate:
            np.conjugate(gradients, out=gradients)
        np.einsum(
            "ndhtrsqc,ndhqc->trsqc",
            _windows(block, scratch),
            _in_stretches(gradients, block),
            out=_in_stretches(term, block),
        )
        total += term
    return total.sum(axis=3)


def _with_planes(whole: Correlation) -> Correlation:
    """With planes, rows and columns; the pixels of a signal are rows of one column."""
    if len(whole.axes) == 1:
        whole = whole.with_axis(1)
    return whole if len(whole.axes) == 3 else whole.with_axis(0)


def _channel_chunks(whole: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The channels in parts of which ``_column_chunks`` have all columns, or else one has some."""
    channels = _fitting(whole, whole.axes[2].outputs, block_bytes)
    for some in parts(whole.groups, clamp(channels, whole.groups)):
        yield whole.part(groups=some)


def _column_chunks(chunk: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The columns in parts that fit."""
    depth, height, width = chunk.axes
    # Those that fit are the fewer, the more there are: a bisection.
    columns = bisect_left(
        range(1, width.outputs), True, key=lambda n: _fitting(chunk, n + 1, block_bytes) < 1
    )
    for some in parts(width.outputs, columns + 1):
        yield chunk.part(outputs=(slice(0, depth.outputs), slice(0, height.outputs), some))


def _fitting(chunk: Correlation, columns: int, block_bytes: int) -> int:
    """Channels of so many columns whose weights, repeated for each pixel of a row, fit.

    And the source under such a row.
    """
    weights = prod(axis.taps for axis in chunk.axes) * columns
    *outer, width = chunk.axes
    source = prod(axis.window for axis in outer)
    source *= width.part(slice(0, columns)).span
    return 2 * block_bytes // (max(2 * weights, source) * chunk.accumulator.itemsize)


def _row_blocks(chunk: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images, planes and rows in parts whose source fits."""
    depth, height, width = chunk.axes
    line = width.span * chunk.groups * chunk.accumulator.itemsize
    window = line * height.window
    planes = clamp((block_bytes // window - depth.window) // depth.stride + 1, depth.outputs)
    line *= depth.part(slice(0, planes)).span
    rows = clamp(block_bytes // line // height.stride, height.outputs)
    images = 1
    if planes == depth.outputs:
        images = clamp(block_bytes // (line * height.span), chunk.images)
    for some in parts(chunk.images, images):
        for outputs in boxes([depth.outputs, height.outputs], [planes, rows]):
            yield chunk.part(images=some, outputs=outputs)


def _repeated_weights(chunk: Correlation, scratch: Scratch) -> np.ndarray:
    """(taps, columns, channels): the weights, again for each pixel of a row."""
    weights = np.moveaxis(chunk.filters[:, 0, 0], 0, -1)[..., None, :]
    *taps, _, channels = weights.shape
    rows = scratch.array("weights", (*taps, chunk.axes[2].outputs, channels))
    rows[...] = weights
    return np.conjugate(rows, out=rows) if chunk.conjugate else rows


def _by_pixel(array: np.ndarray) -> np.ndarray:
    """(N, channels, 1, planes, rows, columns) as (N, planes, rows, columns, channels)."""
    return array[:, :, 0].transpose(0, 2, 3, 4, 1)


def _is_by_pixel(array: np.ndarray, block: Correlation) -> bool:
    """Whether a row of pixels with their channels is one stretch of memory to work on."""
    rows = operand(_by_pixel(array), 3, block.accumulator)
    return rows is not None and rows.strides[3] == rows.itemsize


def _in_stretches(rows: np.ndarray, block: Correlation) -> np.ndarray:
    """Rows of columns of channels; if there is no stride, as one column that has them all."""
    if block.axes[2].stride > 1:
        return rows
    return rows.reshape(*rows.shape[:3], 1, -1)


def _windows(block: Correlation, scratch: Scratch) -> np.ndarray:
    """(N, planes, rows, taps, columns, channels): the windows of the pixels, ``_in_stretches``."""
    depth, height, width = block.axes
    axes = [axis.pixels() for axis in block.axes]
    padded = scratch.array("padded", (block.images, *(a.outputs for a in axes), block.groups))
    gather(padded, _by_pixel(block.source), dict(enumerate(axes, 1)))
    image, plane, line, pixel, channel = padded.strides
    stretch = (
        (width.outputs, block.groups) if width.stride > 1 else (1, width.outputs * block.groups)
    )
    return as_strided(
        padded,
        (
            *(block.images, depth.outputs, height.outputs),
            *(depth.taps, height.taps, width.taps),
            *stretch,
        ),
        (
            *(image, plane * depth.stride, line * height.stride),
            *(plane * depth.dilation, line * height.dilation, pixel * width.dilation),
            *(pixel * width.stride, channel),
        ),
    )


# -- by bands --------------------------------------------------------------------------------------


def correlate_by_bands(whole: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    """Compute the result of a correlation of two axes; False if its operands are not finite."""
    return _until_not_finite(
        _correlate_by_bands, _band_chunks(whole, block_bytes), scratch, block_bytes
    )


def _correlate_by_bands(chunk: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    bands = _bands(chunk, scratch)
    for block in _band_blocks(chunk, block_bytes):
        source, matrices = _source_and_bands(block, bands, scratch)
        sums = operand(_by_channel(block.result), 2, block.accumulator)
        in_place = sums is not None
        if sums is None:
            sums = scratch.array("sums", _flat_shape(_by_channel(block.result)))
        np.matmul(source, matrices, out=sums)
        if not np.isfinite(sums.sum()) and not are_finite(source, matrices):
            return False
        if in_place:
            block.finish(block.result)
        else:
            values = sums.reshape(*sums.shape[:2], *block.result.shape[3:])
            block.finish(values.swapaxes(0, 1)[:, :, None])
    return True


def filter_gradient_by_bands(whole: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    """Compute the filters' gradient, summed along the bands; False if operands are not finite."""
    return _until_not_finite(_sum_by_bands, _band_chunks(whole, block_bytes), scratch, block_bytes)


def _sum_by_bands(chunk: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    total = scratch.array("bands", _band_shape(chunk))
    total[...] = 0
    for block in _band_blocks(chunk, block_bytes):
        source, sums = _source_and_bands(block, total, scratch)
        gradients = _flat(_by_channel(block.result), block, scratch, "gradients")
        if block.conjugate:
            gradients = _conjugated(gradients, scratch)
        term = scratch.array("term", sums.shape)
        np.matmul(source.swapaxes(1, 2), gradients, out=term)
        sums += term
    if not np.isfinite(total.sum()):
        for block in _band_blocks(chunk, block_bytes):
            source, _ = _source_and_bands(block, total, scratch)
            if not are_finite(source, block.result):
                return False
    height, width = chunk.axes
    for row, column in product(range(height.taps), range(width.taps)):
        band = _band_of(total, chunk, row, column)
        chunk.filters[:, 0, 0, row, column] = band.sum(axis=(1, 2))
    return True


def _until_not_finite(
    compute: Callable[[Correlation, Scratch, int], bool],
    chunks: Iterable[Correlation],
    scratch: Scratch,
    block_bytes: int,
) -> bool:
    """Compute chunks, and whether their operands are finite; after one that is not, no other."""
    found: list[Correlation] = []

    def work(chunk: Correlation, memory: Scratch) -> None:
        if not found and not compute(chunk, memory, block_bytes):
            found.append(chunk)

    each(work, chunks, scratch, blocks=6)
    return not found


def _band_shape(chunk: Correlation) -> tuple[int, int, int, int, int]:
    """(channels, source rows, source columns, rows, columns) of the band matrices."""
    height, width = chunk.axes
    rows = band_rows(height.outputs, width.outputs)
    high = height.part(slice(0, rows)).pixels().outputs
    return chunk.groups, high, width.size, rows, width.outputs


def _band_chunks(whole: Correlation, chunk_bytes: int) -> Iterator[Correlation]:
    """The channels in parts whose band matrices fit, and several of them."""
    one = prod(_band_shape(whole)[1:]) * whole.accumulator.itemsize
    several = clamp(-(-whole.groups // SUMS), whole.groups)
    for some in parts(whole.groups, clamp(chunk_bytes // one, several)):
        yield whole.part(groups=some)


def _band_blocks(chunk: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The images and rows in parts as high as a band."""
    _, high, wide, rows, columns = _band_shape(chunk)
    image = max(high * wide, rows * columns) * chunk.groups * chunk.accumulator.itemsize
    height = chunk.axes[0].outputs
    for some in parts(chunk.images, clamp(block_bytes // image, chunk.images)):
        for start in range(0, height, rows):
            lines = slice(start, min(start + rows, height))
            yield chunk.part(images=some, outputs=(lines,))


def _bands(chunk: Correlation, scratch: Scratch) -> np.ndarray:
    """The band matrices, T[c, h, w, p, q]."""
    height, width = chunk.axes
    shape = _band_shape(chunk)
    channels, high, wide, rows, columns = shape
    # Each filter with zeros between its dilated taps and all around, on which T is a view.
    up, left = (rows - 1) * height.stride, (columns - 1) * width.stride
    spread = scratch.array("spread", (channels, high + up, wide + left))
    spread[...] = 0
    for column in range(width.taps):
        at = left + width.offset + column * width.dilation
        if 0 <= at < wide + left:
            down = slice(up, up + height.taps * height.dilation, height.dilation)
            spread[:, down, at] = chunk.filters[:, 0, 0, :, column]
    if chunk.conjugate:
        np.conjugate(spread, out=spread)
    corner = spread[:, up:, left:]
    channel, row, pixel = corner.strides
    strides = (channel, row, pixel, -height.stride * row, -width.stride * pixel)
    bands = scratch.array("bands", shape)
    bands[...] = as_strided(corner, shape, strides)
    return bands


def _band_of(bands: np.ndarray, chunk: Correlation, row: int, column: int) -> np.ndarray:
    """(channels, rows, columns): where the band matrices have a tap's weight."""
    height, width = chunk.axes
    outputs, pixels = width.inside(column)
    part = bands[:, row * height.dilation :, pixels, :, outputs]
    channel, down, right, line, pixel = part.strides
    shape = (part.shape[0], part.shape[3], part.shape[4])
    return as_strided(part, shape, (channel, height.stride * down + line, right + pixel))


def _source_and_bands(
    block: Correlation, bands: np.ndarray, scratch: Scratch
) -> tuple[np.ndarray, np.ndarray]:
    """A block's source (channels, N, pixels), and of the band matrices what belongs to it."""
    inside, rows = block.axes[0].pixels().inside(0)
    source = _flat(_by_channel(block.source[:, :, :, rows]), block, scratch, "source")
    some = bands[:, inside, :, : block.axes[0].outputs]
    return source, some.reshape(len(some), source.shape[2], prod(some.shape[3:]))


def _by_channel(array: np.ndarray) -> np.ndarray:
    """(N, channels, 1, rows, columns) as (channels, N, rows, columns)."""
    return array[:, :, 0].swapaxes(0, 1)


def _flat(array: np.ndarray, block: Correlation, scratch: Scratch, name: str) -> np.ndarray:
    """(channels, N, rows, columns) as (channels, N, pixels)."""
    view = operand(array, 2, block.accumulator)
    if view is None:
        view = scratch.array(name, _flat_shape(array))
        copy_uncached(view.reshape(array.shape), array)
    return view


def _conjugated(array: np.ndarray, scratch: Scratch) -> np.ndarray:
    return np.conjugate(array, out=scratch.array("conjugated", array.shape))


def _flat_shape(array: np.ndarray) -> tuple[int, int, int]:
    return array.shape[0], array.shape[1], prod(array.shape[2:])
