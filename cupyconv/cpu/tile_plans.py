"""Preparation of passes of the method ``tiles``, for cupyconv/cpu/tiles.py.

A prepared pass has everything that depends only on the layer and on the strides of its arrays.  Its
blocks are rows of integers, which the compiled loops in cupyconv/cpu/tiles_numba.py read.  The
correlations that describe the blocks have arrays without memory; see ``views.without_memory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain, groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu.axis import Axis, LoopBlocks, box_of, boxes, clamp, parts
from cupyconv.cpu.choice import (
    PART_PRODUCTS,
    SUMS,
    channel_blocks,
    is_by_channel,
    tile_blocks,
    tile_pieces,
)
from cupyconv.cpu.correlation import (
    Correlation,
    correlation,
    input_gradient,
    phases_of,
    with_three_axes,
)
from cupyconv.cpu.products import PartialSums, weights_of_sums
from cupyconv.cpu.scratch import LINE
from cupyconv.cpu.views import (
    Layout,
    channels_are_last,
    dense,
    has_whole_steps,
    offset,
    without_memory,
)
from cupyconv.problem import ConvAxis, ConvProblem
from cupyconv.signals import import_whole

LEAST_PACKED = 1 << 18
"""Smallest number of weights that a thread packs (hand-set)."""

MANY_CHANNELS = 128
"""Number of channels of planes from which all taps of a channel are summed first (hand-set)."""

SLOWER = 16
"""Time of a product by channel, whose pixels are not in the cache, relative to a product in a tile
(rough)."""

PRODUCTS_PER_BYTE = 6
"""Products in a tile that take as long as reading or writing a byte that is not in the cache
(rough)."""

LEAST_ROWS = 96
"""Smallest number of weights per filter in a part of a filter gradient (hand-set)."""

MANY_PRODUCTS = 1 << 26
"""Products per part of a filter gradient that is divided into more than two parts (hand-set)."""

MOST_PARTS = 8
"""Largest number of parts into which blocks are divided (hand-set)."""

MOST_PREPARED = 128
"""Number of prepared passes that are kept (hand-set)."""

Box = tuple[slice, ...]
"""Groups, images and outputs along each axis of a block."""


class Geometry(NamedTuple):
    """Layer, strides and options on which a prepared pass depends.

    Attributes:
        pass_: forward, backprop_input, backprop_filter, or "exchanged", which is backprop_filter
            with the correlations of backprop_input.
        x, w, y: layouts of the arrays, or of their gradients.
        add: layout of the addend; None for no addend.
        has_bias: whether there is a bias.
        keeps_blocks: whether ``Stage.blocks`` are needed, for an epilogue or a conversion.
        columns: columns of a tile, two vectors.
        block_bytes: bytes of a thread's buffer, from which the size of blocks follows.
    """

    problem: ConvProblem
    pass_: str
    x: Layout
    w: Layout
    y: Layout
    add: Layout | None
    has_bias: bool
    keeps_blocks: bool
    columns: int
    block_bytes: int

    def without_memory(self) -> tuple[Correlation, tuple[ConvAxis, ...]]:
        """Return the arguments of ``phases_of``, with arrays without memory."""
        problem = self.problem
        x, w, y = map(without_memory, (self.x, self.w, self.y))
        add = None if self.add is None else without_memory(self.add)
        is_forward = self.pass_ in ("forward", "backprop_filter")
        bias = np.zeros(problem.K if is_forward else problem.C) if self.has_bias else None
        if is_forward:
            return correlation(problem, x, w, y, bias, add), ()
        return input_gradient(problem, w, y, x, bias, add), problem.axes


class Block(NamedTuple):
    """Block that a compiled loop computes at once.

    Attributes:
        of: correlation that contains the block.
        box: groups, images and outputs of the block.
        position: position in the shared memory of the packed filters, or of the sums; these are
            ``of.filters``.
        channels_first: whether the axes of a term begin with the channel.
    """

    of: Correlation
    box: Box
    position: int
    channels_first: bool


class Part(NamedTuple):
    """Blocks that a thread computes one after another.

    Attributes:
        blocks: range of the blocks.
        sums: range of the shared memory that has the sums of a filter gradient.
    """

    blocks: slice
    sums: slice = slice(0, 0)


class Sums(NamedTuple):
    """Sums of a filter gradient, which are added up and copied to the filters.

    Attributes:
        filters: filters (G, K, C, *taps).
        positions: positions in the shared memory of the arrays to add.
        shape: shape of these arrays.
    """

    filters: np.ndarray
    positions: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Stage:
    """Blocks whose packed filters, or sums, are in the shared memory at the same time.

    Attributes:
        shared, size: number of elements of the shared memory, and of scratch memory per thread.
        packed: correlations with filters to pack, and positions in the shared memory; empty if
            loops can read the filters.
        blocks: blocks; empty if only their rows are needed.
        packs, rows: rows of ``packed`` and of ``blocks``; see cupyconv/cpu/tiles_numba.py.
    """

    shared: int = 0
    size: int = 0
    packed: list[tuple[Correlation, int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    packs: np.ndarray = field(default_factory=lambda: np.empty(0))
    rows: np.ndarray = field(default_factory=lambda: np.empty(0))


class Prepared(NamedTuple):
    """Everything about a pass that depends only on its geometry.

    Attributes:
        whole: first argument of ``phases_of``, with arrays without memory.
        empty: parts of the result whose sums have no terms.
        is_partial: whether some filters have no products.
        is_by_channel: whether tiles are computed by channel.
        is_direct: whether loops can read and write the source and the result, without conversion.
        packs_directly: whether loops can read the filters.
    """

    whole: Correlation
    stages: tuple[Stage, ...]
    empty: tuple[Correlation, ...]
    is_partial: bool
    is_by_channel: bool
    is_direct: bool
    packs_directly: bool


@lru_cache(maxsize=MOST_PREPARED)
def prepared_correlation(geometry: Geometry) -> Prepared:
    """Prepare forward or backprop_input."""
    whole, axes = geometry.without_memory()
    block_bytes = geometry.block_bytes
    stages, empty = [Stage()], []
    has_unread = any(axis.unread_inputs for axis in axes)
    if has_unread:
        empty.append(whole)
    for phase in phases_of(whole, axes):
        if not has_unread:
            empty += phase.unused()
        inner = phase.without_unused()
        if not inner.axes[0].outputs:
            continue
        for chunk in _chunks(inner, 4 * block_bytes):
            shape = _packed_shape(chunk)
            stage = _with_room(stages, prod(shape), chunk, block_bytes)
            packed = _packed_filters(without_memory(dense(shape, chunk.accumulator)), chunk)
            stage.packed.append((chunk, stage.shared))
            _add_blocks(stage, chunk._replace(filters=packed), _channels_first(chunk), block_bytes)
            stage.shared += _aligned(prod(shape), chunk)
    for stage in stages:
        rows = (pack_rows(chunk, whole.filters, position) for chunk, position in stage.packed)
        stage.packs = np.array([*chain.from_iterable(rows)])
        stage.parts = [Part(blocks) for blocks in _shares(stage.blocks)]
    return _prepared(geometry, whole, stages, empty)


@lru_cache(maxsize=MOST_PREPARED)
def prepared_gradient(geometry: Geometry) -> Prepared:
    """Prepare backprop_filter, or "exchanged"."""
    whole, axes = geometry.without_memory()
    block_bytes = geometry.block_bytes
    stages, is_partial = [Stage()], False
    for phase in phases_of(whole, axes):
        inner = phase.without_unused()
        is_partial |= inner.filters.size < phase.filters.size
        if inner.axes[0].outputs:
            for chunk in _chunks(inner, 4 * block_bytes):
                _add_sums(stages, chunk, block_bytes)
    return _prepared(geometry, whole, stages, is_partial=is_partial)


def _add_sums(stages: list[Stage], chunk: Correlation, block_bytes: int) -> None:
    """Add the blocks of a filter gradient, and its sums."""
    if multiplies_channels(chunk):
        terms = [(chunk, term) for term in chunk.divided(SUMS, SLOWER)]
    else:
        terms = _terms(chunk, block_bytes)
    sizes = [_aligned(prod(_sums_shape(term)), term) for _, term in terms]
    stage = _with_room(stages, sum(sizes), chunk, block_bytes)
    pairs = zip(terms, sizes, strict=True)
    for _, of_part in groupby(pairs, key=lambda pair: id(pair[0][0])):
        positions = []
        for (part, term), size in of_part:  # noqa: B007
            position, shape = stage.shared, _sums_shape(term)
            positions.append(position)
            sums = _as_filters(without_memory(dense(shape, term.accumulator)), term)
            first = len(stage.blocks)
            _add_blocks(
                stage, term._replace(filters=sums), _channels_first(term), block_bytes, True
            )
            of_sums = slice(position, position + prod(shape))
            stage.parts.append(Part(slice(first, len(stage.blocks)), of_sums))
            stage.shared += size
        stage.sums.append(Sums(part.filters, tuple(positions), shape))


def _add_blocks(
    stage: Stage,
    whole: Correlation,
    channels_first: bool,
    block_bytes: int,
    is_gradient: bool = False,
) -> None:
    """Add the blocks of a correlation, whose filters begin at ``stage.shared``."""
    for piece in _pieces(whole, is_gradient):
        position = stage.shared + offset(piece.filters, whole.filters)
        blocks = _blocks(piece, block_bytes, is_gradient)
        for box in _boxes(piece, blocks.most):
            stage.blocks.append(Block(piece, box, position, channels_first))
        stage.size = max(stage.size, blocks.places + (width(whole) if is_gradient else 0))


def _terms(chunk: Correlation, block_bytes: int) -> PartialSums:
    """Divide a filter gradient into weights, and into outputs if these are many.

    Sums of different outputs must be added up, but every part of the weights reads all outputs.
    """
    weights = list(weights_of_sums(chunk, block_bytes))
    products, rows = (
        chunk.result.size * prod(chunk.filters.shape[2:]),
        prod(chunk.filters.shape[2:]),
    )
    count = clamp(products // MANY_PRODUCTS, SUMS)
    slower = 2 if count == 1 else 1
    terms = [
        (part, term)
        for part in weights
        for term in part.divided(max(count, 2) // len(weights), slower)
    ]
    if len(terms) > 1 or products < 2 * PART_PRODUCTS or rows < 2 * LEAST_ROWS:
        return terms
    most = -(-rows // clamp(min(products // PART_PRODUCTS, rows // LEAST_ROWS), SUMS // 2))
    extents = chunk.filters.shape[2:]
    for channels, *taps in boxes(extents, box_of(extents, most)):
        part = chunk.part(channels=channels, taps=taps)
        terms.append((part, part))
    return terms[1:]


def _sums_shape(term: Correlation) -> tuple[int, ...]:
    """Return the shape of the sums: (G, *taps, C, K), or (*taps, channels) in whole tiles."""
    taps = term.filters.shape[3:]
    if multiplies_channels(term):
        columns = _columns(term)
        return *taps, -(-term.channels // columns) * columns
    return term.groups, *taps, term.channels, width(term)


def _as_filters(sums: np.ndarray, term: Correlation) -> np.ndarray:
    """Return a view of sums like the filters, (G, K, C, *taps)."""
    if multiplies_channels(term):
        return sums.transpose(3, 0, 1, 2)[None, :, None]
    return sums[..., : term.filter_count].transpose(0, 5, 4, 1, 2, 3)


def _prepared(
    geometry: Geometry,
    whole: Correlation,
    stages: list[Stage],
    empty: Sequence[Correlation] = (),
    is_partial: bool = False,
) -> Prepared:
    both, itemsize = (whole.source, whole.result), whole.accumulator.itemsize
    by_channel = is_by_channel(whole.groups, whole.channels, whole.filter_count, itemsize)
    is_direct, packs_directly = (
        all(has_whole_steps(array, whole.accumulator) for array in arrays)
        for arrays in (both, [whole.filters])
    )
    if by_channel:
        is_direct &= all(array.strides[0] == itemsize for array in both)
    used = tuple(stage for stage in stages if stage.blocks)
    for stage in used:
        stage.rows = np.array([row_of(*block, whole) for block in stage.blocks])
        if is_direct and not geometry.keeps_blocks:
            stage.blocks.clear()
        if packs_directly:
            stage.packed.clear()
    return Prepared(whole, used, tuple(empty), is_partial, by_channel, is_direct, packs_directly)


def _with_room(stages: list[Stage], size: int, chunk: Correlation, block_bytes: int) -> Stage:
    """Return the last stage, or a new one if the last has no room for ``size`` elements."""
    most = 4 * block_bytes // chunk.accumulator.itemsize
    if stages[-1].shared and stages[-1].shared + size > most:
        stages.append(Stage())
    return stages[-1]


def _aligned(size: int, chunk: Correlation) -> int:
    """Return the number of elements, extended to whole cache lines."""
    line = LINE // chunk.accumulator.itemsize
    return -(-size // line) * line


def _shares(blocks: Sequence[Block]) -> Iterator[slice]:
    """Divide blocks into parts with enough work for a thread."""
    works = [_work(block) for block in blocks]
    least = max(sum(works) // MOST_PARTS, PART_PRODUCTS)
    first, total = 0, 0
    for number, of_block in enumerate(works, 1):
        total += of_block
        if total >= least or number == len(blocks):
            yield slice(first, number)
            first, total = number, 0


def _work(block: Block) -> int:
    """Return the time of a block, in products in a tile."""
    groups, images, *outputs = (part.stop - part.start for part in block.box)
    pixels, filters, itemsize = prod(outputs), width(block.of), block.of.accumulator.itemsize
    read = prod(map(_read, block.of.axes, outputs)) * block.of.channels
    products = pixels * filters * prod(block.of.filters.shape[2:])
    moved = (read + pixels * filters) * itemsize
    return groups * images * (products + PRODUCTS_PER_BYTE * moved)


def _read(axis: Axis, outputs: int) -> int:
    """Return the number of positions that some consecutive outputs read along an axis."""
    return (outputs - 1) * axis.stride + max(axis.taps - 1, 0) * axis.dilation + 1


def row_of(
    block: Correlation,
    box: Box,
    position: int,
    channels_first: bool,
    whole: Correlation | None = None,
) -> list[int]:
    """Return the row of a block; see cupyconv/cpu/tiles_numba.py.

    Args:
        block, box, position, channels_first: attributes of a ``Block``.
        whole: correlation whose arrays the loops get; by default ``block``.
    """
    whole = whole or block
    axes = with_three_axes(block).axes
    return [
        offset(block.source, whole.source),
        offset(block.result, whole.result),
        position,
        *steps(block.source),
        *steps(block.result),
        *steps(block.filters),
        *chain.from_iterable((a.stride, a.dilation, a.offset, a.taps, a.size) for a in axes),
        block.channels,
        block.filter_count,
        channels_first,
        *chain.from_iterable((part.start, part.stop) for part in box),
        _columns(block),
    ]


def pack_rows(chunk: Correlation, filters: np.ndarray, position: int) -> Iterator[list[int]]:
    """Yield rows that pack the filters of a correlation, divided for several threads.

    Args:
        filters: array that contains the filters.
        position: position in the shared memory.
    """
    by_channel = multiplies_channels(chunk)
    order = (0, 1, 2, 3, 4, 5) if _channels_first(chunk) else (0, 1, 3, 4, 5, 2)
    weights = chunk.filters.transpose(order)
    groups, count, *terms = weights.shape
    columns = count if by_channel else loops().width(chunk.accumulator.itemsize)
    panels, depth = -(-count // columns), prod(terms)
    at_once = max(LEAST_PACKED // max(groups * depth * columns, 1), 1)
    for some in parts(panels, at_once):
        yield [
            offset(weights, filters),
            *steps(weights),
            *terms,
            groups,
            count,
            position,
            groups,
            panels,
            depth,
            columns,
            some.start,
            some.stop,
        ]


def _packed_shape(chunk: Correlation) -> tuple[int, ...]:
    """Return the shape of packed filters: (G, panels, *term, K of a panel), or (*taps, K)."""
    groups, filters, channels, *taps = chunk.filters.shape
    if multiplies_channels(chunk):
        return *taps, filters
    term = (channels, *taps) if _channels_first(chunk) else (*taps, channels)
    columns = _columns(chunk)
    return groups, width(chunk) // columns, *term, columns


def _packed_filters(packed: np.ndarray, chunk: Correlation) -> np.ndarray:
    """Return a view of packed filters (G, panels, C, *taps), or (1, K, 1, *taps)."""
    if multiplies_channels(chunk):
        return packed.transpose(3, 0, 1, 2)[None, :, None]
    firsts = packed[..., 0]
    return firsts if _channels_first(chunk) else np.moveaxis(firsts, -1, 2)


# -- parts -----------------------------------------------------------------------------------------


def _pieces(whole: Correlation, is_gradient: bool = False) -> Iterator[Correlation]:
    """Divide the outputs and trim each part's taps; see ``choice.tile_pieces``."""
    counts = whole.groups, whole.channels, whole.filter_count
    if multiplies_channels(whole):
        counts = whole.channels, 1, 1
    itemsize = whole.accumulator.itemsize
    return whole.pieces(tile_pieces(whole.axes, whole.images, *counts, itemsize, is_gradient).cuts)


def _chunks(piece: Correlation, most_bytes: int) -> Iterator[Correlation]:
    """Divide groups and filters into whole tiles whose weights take at most ``most_bytes``.

    A depthwise correlation is not divided; its channels become those of one group.
    """
    whole = with_three_axes(piece)
    itemsize = whole.accumulator.itemsize
    if is_by_channel(whole.groups, whole.channels, whole.filter_count, itemsize):
        yield _channels_as_one_group(whole)
        return
    columns = loops().width(itemsize)
    tile_bytes = max(prod(whole.filters.shape[2:]), 1) * columns * itemsize
    filters = clamp(most_bytes // tile_bytes, width(whole) // columns) * columns
    groups = clamp(most_bytes * columns // (tile_bytes * filters), whole.groups)
    for group in parts(whole.groups, groups):
        for first in range(0, whole.filter_count, filters):
            of_filters = slice(first, min(first + filters, whole.filter_count))
            yield whole.part(groups=group, filters=of_filters)


def _blocks(chunk: Correlation, block_bytes: int, is_gradient: bool = False) -> LoopBlocks:
    """Divide groups, images and outputs into blocks; see ``choice.tile_blocks``."""
    itemsize = chunk.accumulator.itemsize
    if multiplies_channels(chunk):
        return channel_blocks(chunk.axes, chunk.images, chunk.channels, itemsize, block_bytes)
    counts = chunk.images, chunk.groups, chunk.channels, width(chunk)
    return tile_blocks(chunk.axes, *counts, itemsize, block_bytes, is_gradient)


def _columns(chunk: Correlation) -> int:
    """Return the columns of a tile."""
    itemsize = chunk.accumulator.itemsize
    if multiplies_channels(chunk):
        return columns_by_channel(chunk.channels, itemsize)
    return loops().width(itemsize)


def columns_by_channel(channels: int, itemsize: int) -> int:
    """Return the columns of a tile by channel: two vectors if there are as many channels."""
    columns = loops().width(itemsize)
    return columns if channels >= columns else columns // 2


def width(chunk: Correlation) -> int:
    """Return the number of filters, extended to whole tiles."""
    columns = _columns(chunk)
    return -(-chunk.filter_count // columns) * columns


def whole_box(chunk: Correlation) -> Box:
    extents = (chunk.groups, chunk.images, *(axis.outputs for axis in chunk.axes))
    return tuple(slice(0, extent) for extent in extents)


def _boxes(chunk: Correlation, most: Sequence[int]) -> Iterator[Box]:
    return boxes([part.stop for part in whole_box(chunk)], most)


def part_of(chunk: Correlation, box: Box) -> Correlation:
    groups, images, *outputs = box
    return chunk.part(groups=groups, images=images, outputs=outputs)


def multiplies_channels(chunk: Correlation) -> bool:
    """Return whether a chunk is a depthwise correlation whose channels are those of one group."""
    return chunk.filters.shape[2] != chunk.channels


def _channels_as_one_group(whole: Correlation) -> Correlation:
    """Exchange the axes of groups and of channels, which have a single channel and filter."""
    return whole._replace(
        source=whole.source.swapaxes(0, 1),
        filters=whole.filters.swapaxes(0, 1),
        result=whole.result.swapaxes(0, 1),
        bias=None if whole.bias is None else whole.bias.swapaxes(0, 1),
        addend=None if whole.addend is None else whole.addend.swapaxes(0, 1),
    )


def steps(array: np.ndarray) -> list[int]:
    """Return the strides in elements."""
    return [step // array.itemsize for step in array.strides]


def _channels_first(block: Correlation) -> bool:
    """Return whether a term's last axis is a spatial axis.

    It is one if it is longer, or if there are many channels, because a pixel would then leave the
    cache before the next tap reads it.
    """
    if channels_are_last(block.source) or multiplies_channels(block):
        return False
    taps = block.axes[-1].taps
    return block.channels < taps or (taps > 1 and block.channels >= MANY_CHANNELS)


@cache
def loops() -> Any:
    """Return the module of compiled loops."""
    return import_whole("cupyconv.cpu.tiles_numba")
