"""Matrix products in tiles of registers, compiled by Numba, without a copy of the windows.

A tile is a few rows and columns of a matrix product, whose sums stay in vector registers.  An
element of the first matrix is a pixel, whose offset in memory is the sum of an offset for its row
and an offset for its term.  In a correlation, rows are pixels of the result, and terms are the taps
of all channels.  In a filter gradient, rows are the taps of all channels, and terms are the pixels
of dy.  Columns are filters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from cupyconv.cpu.axis import Axis, LoopBlocks, boxes, clamp, parts
from cupyconv.cpu.choice import SUMS, channel_blocks, is_by_channel, tile_blocks
from cupyconv.cpu.correlation import Correlation, gather, with_three_axes
from cupyconv.cpu.products import add_up, partial_sums
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy, flat_memory, has_whole_steps
from cupyconv.signals import import_whole

LEAST_PACKED = 1 << 18
"""Smallest number of weights that a thread packs (hand-set)."""

MANY_CHANNELS = 128
"""Number of channels of planes from which all taps of a channel are summed first (hand-set)."""

SLOWER = 4
"""Time of a product by channel, relative to a product in a tile (rough)."""

_Box = tuple[slice, ...]
"""Groups, images and outputs along each axis of a block."""


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute ``whole.result`` in blocks, whose size is proportional to ``block_bytes``."""
    for piece in whole.pieces():
        if _is_by_channel(whole):
            _correlate_channels(_channels_as_one_group(with_three_axes(piece)), pool, block_bytes)
            continue
        for chunk in _chunks(with_three_axes(piece), 4 * block_bytes):
            panels, blocks = _packed(chunk, pool), _blocks(chunk, block_bytes)
            loop = _loops().correlate
            work = partial(_correlate, loop, panels, chunk, _operands(chunk), blocks.places)
            each(work, _boxes(chunk, blocks.most), pool, blocks.places)


def _correlate_channels(chunk: Correlation, pool: Pool, block_bytes: int) -> None:
    weights = chunk.filters.transpose(0, 2, 3, 4, 5, 1)
    factors = pool.array("shared", (1, weights.size))
    copy(factors.reshape(weights.shape), weights)
    blocks = _channel_blocks(chunk, block_bytes)
    operands = _channel_operands(chunk)
    loop = _loops().correlate_channels
    work = partial(_correlate, loop, factors, chunk, operands, blocks.places)
    each(work, _boxes(chunk, blocks.most), pool, blocks.places)


def _packed(chunk: Correlation, pool: Pool) -> np.ndarray:
    """Return the filters as panels (G, panels, terms, columns of a tile)."""
    order = (0, 1, 2, 3, 4, 5) if _channels_are_first(chunk) else (0, 1, 3, 4, 5, 2)
    filters = chunk.filters.transpose(order)
    groups, count, *terms = filters.shape
    columns = _loops().width(chunk.accumulator.itemsize)
    shape = (groups, -(-count // columns), prod(terms), columns)
    [shared] = pool.divided("shared", prod(shape))
    panels = shared.array("panels", shape)
    start, ascending = 0, filters
    if min(filters.strides) < 0:
        pairs = list(zip(filters.shape, filters.strides, strict=True))
        ascending = filters[tuple(slice(None, None, -1 if step < 0 else 1) for _, step in pairs)]
        start = sum((n - 1) * max(-step, 0) for n, step in pairs) // filters.itemsize
    if not has_whole_steps(ascending, chunk.accumulator):
        start, ascending = 0, filters.astype(chunk.accumulator)
        filters = ascending
    memory, steps = flat_memory(ascending)
    if ascending is not filters:
        steps = tuple(step // filters.itemsize for step in filters.strides)
    pack = partial(_loops().pack, memory, start, steps, tuple(terms), count, panels)
    if panels.size <= LEAST_PACKED:
        pack(0, shape[1])
    else:
        at_once = max(LEAST_PACKED // panels[:, 0].size, 1)
        each(lambda some, _: pack(some.start, some.stop), parts(shape[1], at_once), pool, 0)
    return panels


def _correlate(
    loop: Callable[..., None],
    factors: np.ndarray,
    chunk: Correlation,
    operands: _Operands | None,
    size: int,
    box: _Box,
    scratch: Scratch,
) -> None:
    """Compute a block of the result.

    Args:
        loop, factors: compiled loop, and the filters as it takes them.
        operands: the other operands of the loop; None if they must be converted.
        size: number of scratch elements.
    """
    if operands is not None:
        memory = scratch.array("memory", (size,))
        loop(operands, factors, _bounds(box), memory)
        if chunk.has_epilogue:
            block = _part(chunk, box)
            block.finish(block.result)
        return
    block = _part(chunk, box)
    groups, filters, *others = block.result.shape
    sums = np.moveaxis(scratch.array("sums", (groups, *others, filters)), -1, 1)
    converted = _converted(block, scratch)._replace(result=sums)
    memory = scratch.array("none", (0,))
    loop(_views(converted), factors[box[0]], _bounds(_whole(block)), memory)
    block.finish(sums)


def filter_gradient(whole: Correlation, pool: Pool, block_bytes: int, clears: bool = False) -> None:
    """Write the filter gradient to ``whole.filters``; ``whole.result`` is dy.

    Args:
        clears: whether to replace infinite and NaN operands by zeros; not for depthwise layers.
    """
    if _is_by_channel(whole):
        _channel_gradient(_channels_as_one_group(with_three_axes(whole)), pool, block_bytes)
        return
    for chunk in _chunks(with_three_axes(whole), 4 * block_bytes):
        _filter_gradient(chunk, pool, block_bytes, clears)


def _filter_gradient(chunk: Correlation, pool: Pool, block_bytes: int, clears: bool) -> None:
    terms = partial_sums(chunk, block_bytes)
    width = _width(chunk)
    shapes = [(of.groups, *of.filters.shape[3:], of.channels, width) for _, of in terms]
    [shared] = pool.divided("shared", sum(map(prod, shapes)))
    totals = [shared.array(f"{number}", shape) for number, shape in enumerate(shapes)]
    # Views like the filters, (G, K, C, *taps).
    sums = [total[..., : chunk.filter_count].transpose(0, 5, 4, 1, 2, 3) for total in totals]
    blocks = [_blocks(term, block_bytes, is_gradient=True) for _, term in terms]
    size = max(block.places for block in blocks) + width

    def add(number: int, memory: Scratch) -> None:
        totals[number][...] = 0
        for piece in terms[number][1]._replace(filters=sums[number]).pieces():
            operands = None if clears else _operands(piece)
            for box in _boxes(piece, blocks[number].most):
                _add_gradient(piece, operands, size, box, memory.rest(), clears)

    each(add, range(len(terms)), pool, size)
    add_up(terms, sums)


def _add_gradient(
    piece: Correlation,
    operands: _Operands | None,
    size: int,
    box: _Box,
    scratch: Scratch,
    clears: bool,
) -> None:
    """Add the filter gradient of a block's images and outputs to ``piece.filters``."""
    if operands is None:
        piece = _converted(_part(piece, box), scratch, with_result=True)
        for operand in (piece.source, piece.result) if clears else ():
            operand[~np.isfinite(operand)] = 0
        box, operands = _whole(piece), _views(piece)
        size = _width(piece) * piece.groups * prod(piece.result.shape[2:])
    memory = scratch.array("memory", (size,))
    columns = _loops().width(piece.accumulator.itemsize)
    _loops().add_gradient(operands, *flat_memory(piece.filters), columns, _bounds(box), memory)


def _channel_gradient(chunk: Correlation, pool: Pool, block_bytes: int) -> None:
    terms = list(chunk.divided(SUMS, SLOWER))
    columns = _loops().channel_width(chunk.channels, chunk.accumulator.itemsize)
    panels = -(-chunk.channels // columns)
    totals = pool.array("shared", (len(terms), *chunk.filters.shape[3:], panels * columns))
    blocks = [_channel_blocks(term, block_bytes) for term in terms]
    size = max(block.places for block in blocks)

    def add(number: int, memory: Scratch) -> None:
        totals[number] = 0
        sums = totals[number].transpose(3, 0, 1, 2)[None, :, None]  # (1, columns, 1, *taps)
        for piece in terms[number]._replace(filters=sums).pieces():
            operands = _channel_operands(piece)
            by_tap = flat_memory(piece.filters[0, :, 0].transpose(1, 2, 3, 0))
            for box in _boxes(piece, blocks[number].most):
                scratch, bounds, ready = memory.rest(), _bounds(box), operands
                if ready is None:
                    block = _converted(_part(piece, box), scratch, with_result=True)
                    bounds, ready = _bounds(_whole(block)), _views(block)
                pixels = scratch.array("memory", (size if operands else 0,))
                _loops().add_channel_gradient(ready, *by_tap, bounds, pixels)

    each(add, range(len(terms)), pool, size)
    for total in totals[1:]:
        totals[0] += total
    for number in range(panels):
        start = min(number * columns, chunk.channels - columns)
        sums = totals[0, ..., number * columns : (number + 1) * columns]
        chunk.filters[0, start : start + columns, 0] = np.moveaxis(sums, -1, 0)


# -- parts -----------------------------------------------------------------------------------------


def _chunks(whole: Correlation, most_bytes: int) -> Iterator[Correlation]:
    """Divide groups and filters into whole tiles whose weights take at most ``most_bytes``."""
    itemsize = whole.accumulator.itemsize
    columns = _loops().width(itemsize)
    tile_bytes = max(prod(whole.filters.shape[2:]), 1) * columns * itemsize
    filters = clamp(most_bytes // tile_bytes, _width(whole) // columns) * columns
    groups = clamp(most_bytes * columns // (tile_bytes * filters), whole.groups)
    for group in parts(whole.groups, groups):
        for first in range(0, whole.filter_count, filters):
            of_filters = slice(first, min(first + filters, whole.filter_count))
            yield whole.part(groups=group, filters=of_filters)


def _blocks(chunk: Correlation, block_bytes: int, is_gradient: bool = False) -> LoopBlocks:
    """Divide groups, images and outputs into blocks; see ``choice.tile_blocks``."""
    counts = chunk.images, chunk.groups, chunk.channels, _width(chunk)
    return tile_blocks(chunk.axes, *counts, chunk.accumulator.itemsize, block_bytes, is_gradient)


def _channel_blocks(chunk: Correlation, block_bytes: int) -> LoopBlocks:
    """Divide images and outputs of a depthwise correlation into blocks."""
    return channel_blocks(
        chunk.axes, chunk.images, chunk.channels, chunk.accumulator.itemsize, block_bytes
    )


def _width(chunk: Correlation) -> int:
    """Return the number of filters, extended to whole tiles."""
    columns = _loops().width(chunk.accumulator.itemsize)
    return -(-chunk.filter_count // columns) * columns


def _whole(chunk: Correlation) -> _Box:
    extents = (chunk.groups, chunk.images, *(axis.outputs for axis in chunk.axes))
    return tuple(slice(0, extent) for extent in extents)


def _boxes(chunk: Correlation, most: Sequence[int]) -> Iterator[_Box]:
    return boxes([part.stop for part in _whole(chunk)], most)


def _part(chunk: Correlation, box: _Box) -> Correlation:
    groups, images, *outputs = box
    return chunk.part(groups=groups, images=images, outputs=outputs)


def _bounds(box: _Box) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in box)


# -- operands --------------------------------------------------------------------------------------

_Operands = tuple[Any, ...]
"""Operands of a correlation as the compiled loops take them, except the filters."""


def _operands(chunk: Correlation) -> _Operands | None:
    """Return the operands, or None if they must be converted first."""
    both = chunk.source, chunk.result
    return _views(chunk) if all(has_whole_steps(a, chunk.accumulator) for a in both) else None


def _channel_operands(chunk: Correlation) -> _Operands | None:
    """Return ``_operands(chunk)`` if channels are contiguous, else None."""
    are_last = all(map(channels_are_last, (chunk.source, chunk.result)))
    return _operands(chunk) if are_last else None


def _views(chunk: Correlation) -> _Operands:
    axes, counts = (
        _rules(chunk.axes),
        (chunk.channels, chunk.filter_count, _channels_are_first(chunk)),
    )
    return (*flat_memory(chunk.source), axes, counts, *flat_memory(chunk.result))


@lru_cache(maxsize=4096)
def _rules(axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((a.stride, a.dilation, a.offset, a.taps, a.size) for a in axes)


def _is_by_channel(whole: Correlation) -> bool:
    """Return whether to compute a depthwise correlation in vectors of channels."""
    counts = whole.groups, whole.channels, whole.filter_count
    return is_by_channel(*counts, whole.accumulator.itemsize)


def _channels_as_one_group(whole: Correlation) -> Correlation:
    """Exchange the axes of groups and of channels, which have a single channel and filter."""
    return whole._replace(
        source=whole.source.swapaxes(0, 1),
        filters=whole.filters.swapaxes(0, 1),
        result=whole.result.swapaxes(0, 1),
        bias=None if whole.bias is None else whole.bias.swapaxes(0, 1),
        addend=None if whole.addend is None else whole.addend.swapaxes(0, 1),
    )


def _converted(block: Correlation, scratch: Scratch, with_result: bool = False) -> Correlation:
    """Copy the source, with padding, and dy to arrays that the compiled loops can use.

    Args:
        with_result: whether to copy the result, which is dy.
    """
    axes = [axis.pixels() for axis in block.axes]
    source, sizes = block.source, tuple(axis.outputs for axis in axes)
    groups, channels, images = source.shape[:3]
    is_by_channel = block.filters.shape[2] != channels
    if channels_are_last(source) or is_by_channel:
        pixels = np.moveaxis(scratch.array("pixels", (groups, images, *sizes, channels)), -1, 1)
    else:
        pixels = scratch.array("pixels", (groups, channels, images, *sizes))
    gather(pixels, source, axes, 3)
    inner = (
        axis.changed(size=size, offset=0) for axis, size in zip(block.axes, sizes, strict=True)
    )
    block = block._replace(axes=tuple(inner), source=pixels)
    if with_result:
        groups, filters, *others = block.result.shape
        gradients = np.moveaxis(scratch.array("gradients", (groups, *others, filters)), -1, 1)
        copy(gradients, block.result)
        block = block._replace(result=gradients)
    return block


def _channels_are_first(block: Correlation) -> bool:
    """Return whether a term's last axis is a spatial axis.

    It is one if it is longer, or if there are many channels, because a pixel would then leave the
    cache before the next tap reads it.
    """
    if channels_are_last(block.source):
        return False
    taps = block.axes[-1].taps
    return block.channels < taps or (taps > 1 and block.channels >= MANY_CHANNELS)


@cache
def _loops() -> Any:
    return import_whole("cupyconv.cpu.tiles_numba")
