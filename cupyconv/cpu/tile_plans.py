"""Plans of the passes that cupyconv/cpu/tiles.py computes.

A plan contains everything that depends only on the layer and on the layouts of its arrays, so that
later calls with the same geometry only run its blocks.  A block is a row of integers, which the
compiled loops in cupyconv/cpu/tiles_numba.py read.  The correlations in a plan have arrays without
memory; see ``views.without_memory``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu.axis import LoopBlocks, box_of, boxes, clamp, split_evenly
from cupyconv.cpu.caching import ByteCache
from cupyconv.cpu.choice import (
    PART_BYTES,
    PART_PRODUCTS,
    SUMS,
    TILE_ROWS,
    channel_blocks,
    is_by_channel,
    tile_blocks,
    tile_pieces,
)
from cupyconv.cpu.correlation import Correlation, correlation, selections, with_three_axes
from cupyconv.cpu.products import weights_of_sums
from cupyconv.cpu.threads import MOST_THREADS
from cupyconv.cpu.views import (
    LINE,
    MOST_LINES,
    Layout,
    channels_are_last,
    dense,
    has_whole_steps,
    offset,
    without_memory,
)
from cupyconv.kernels.strides import element_strides
from cupyconv.problem import ITEMSIZE, ConvProblem
from cupyconv.signals import import_whole

LEAST_PACKED = PART_BYTES // ITEMSIZE["float32"]
"""Number of weights above which several threads pack filters: those of a float32 block of tiles."""

CHANNEL_PRODUCT = 16
"""Time of a product of a depthwise layer whose pixels are not in the cache, in products of a tile
(rough)."""

BYTE = 6
"""Time to read or write a byte that is not in the cache, in products of a tile (rough)."""

OBJECT_BYTES = 2048
"""Bytes of a correlation or of a block in a plan (counted)."""

Box = tuple[slice, ...]
"""Groups, images and outputs along each axis of a block."""


class Geometry(NamedTuple):
    """Layer, layouts and options on which a plan depends.

    Attributes:
        pass_: name of the pass.
        x, w, y: layouts of the arrays, or of their gradients.
        add: layout of the addend; None for no addend.
        has_bias: whether there is a bias.
        keeps_blocks: whether ``Stage.blocks`` are needed, for an epilogue or a conversion.
        columns: columns of a tile, which depend on the processor.
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

    def correlations(self) -> tuple[Correlation, list[Correlation]]:
        """Return the correlation of the pass, and those that compute it, without memory."""
        problem, of = self.problem, correlation(self.problem, self.pass_)
        x, w, y = map(without_memory, (self.x, self.w, self.y))
        add = None if self.add is None else without_memory(self.add)
        is_input = self.pass_ == "backprop_input"
        bias = np.zeros(problem.C if is_input else problem.K) if self.has_bias else None
        whole = of(x, w, y, bias, add)
        found = [of(x, w, y, None, add, one) for one in selections(problem, self.pass_)]
        found = [one._replace(bias=whole.bias) for one in found]  # a view of the same memory
        return whole if is_input else found[0], found


class Shifts(NamedTuple):
    """Distances in elements from the operands of a correlation to those of an equal correlation."""

    source: int = 0
    filters: int = 0
    result: int = 0
    addend: int = 0


class Block(NamedTuple):
    """Block that a compiled loop computes at once.

    Attributes:
        correlation: correlation that contains the block; its filters are a view of the packed
            filters, or of the sums of a filter gradient.
        box: groups, images and outputs of the block.
        position: position of the first of these filters in the shared memory.
        begins_with_channel: whether the axes of a term begin with the channel.
        shifts: distances to the block's operands.
    """

    correlation: Correlation
    box: Box
    position: int
    begins_with_channel: bool
    shifts: Shifts = Shifts()


class Task(NamedTuple):
    """Blocks that a thread computes one after another.

    Attributes:
        blocks: range of the blocks.
        cleared: range of the shared memory that is cleared first; the sums of a filter gradient.
    """

    blocks: slice
    cleared: slice = slice(0, 0)


class Gradient(NamedTuple):
    """Filter gradient, the sum of arrays in the shared memory.

    Attributes:
        filters: view (G, K, C, *taps) of the filters.
        positions: positions of the arrays.
        shape: shape of each array; see ``_gradient_shape``.
    """

    filters: np.ndarray
    positions: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Stage:
    """Blocks whose packed filters, or sums, are in the shared memory at the same time.

    Attributes:
        shared_size, scratch_size: number of elements of the shared memory, and of the scratch
            memory of a thread.
        packed: correlations whose filters are packed, positions of the packed filters, and
            distances to the filters; empty if only ``packs`` are needed.
        packs: rows that pack filters; see ``tiles_numba.pack``.
        blocks: blocks; empty if only ``rows`` are needed.
        rows: rows of the blocks; see ``tiles_numba.correlate``.
        works: time of each block, in products of a tile; empty in a finished plan.
        tasks: division of the blocks among threads.
        gradients: filter gradients that the blocks add up.
    """

    shared_size: int = 0
    scratch_size: int = 0
    packed: list[tuple[Correlation, int, int]] = field(default_factory=list)
    packs: Any = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    rows: Any = field(default_factory=list)
    works: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)


class TilePlan(NamedTuple):
    """Plan of a pass.

    Attributes:
        whole: correlation of the pass; without axes in backprop_input.
        empty: parts of the result whose sums have no terms.
        is_partial: whether some filters have no gradient in ``stages``.
        is_depthwise: whether tiles are computed by channel.
        is_direct: whether loops can use the source and the result without conversion.
        packs_directly: whether loops can read the filters without conversion.
    """

    whole: Correlation
    stages: tuple[Stage, ...]
    empty: tuple[Correlation, ...]
    is_partial: bool
    is_depthwise: bool
    is_direct: bool
    packs_directly: bool

    @property
    def nbytes(self) -> int:
        """Estimated size of the plan in bytes."""
        size = OBJECT_BYTES * (2 + len(self.empty))
        for stage in self.stages:
            objects = len(stage.packed) + len(stage.blocks) + len(stage.tasks)
            objects += len(stage.gradients)
            size += stage.packs.nbytes + stage.rows.nbytes + OBJECT_BYTES * objects
        return size


class _Chunk(NamedTuple):
    """Blocks of a part of a phase, whose filters or sums begin at position 0.

    Attributes:
        correlation: the part, with the filters of the layer.
        size: number of elements of the filters or sums, in whole cache lines.
        stage: packs, blocks, rows, works and scratch size.
    """

    correlation: Correlation
    size: int
    stage: Stage

    def add_to(self, stage: Stage, shifts: Shifts) -> None:
        """Add the blocks of an equal phase to a stage."""
        position, own = stage.shared_size, self.stage
        for chunk, _, _ in own.packed:
            stage.packed.append((chunk, position, shifts.filters))
        for first, *others in own.packs:
            moved = (others[11] + position, *others[12:])
            stage.packs.append((first + shifts.filters, *others[:11], *moved))
        for block in own.blocks:
            stage.blocks.append(block._replace(position=block.position + position, shifts=shifts))
        for source, result, filters, *others in own.rows:
            starts = source + shifts.source, result + shifts.result, filters + position
            stage.rows.append((*starts, *others))
        stage.works += own.works
        stage.shared_size += self.size
        stage.scratch_size = max(stage.scratch_size, own.scratch_size)


def _plan_correlation(geometry: Geometry) -> TilePlan:
    """Plan forward or backprop_input."""
    whole, correlations = geometry.correlations()
    layouts, block_bytes = _Layouts.of(geometry, whole), geometry.block_bytes
    stages, empty = [Stage()], []
    planned: dict[Any, tuple[Correlation, list[_Chunk]]] = {}
    is_input = geometry.pass_ == "backprop_input"
    has_unread = is_input and any(axis.unread_inputs for axis in geometry.problem.axes)
    if has_unread:
        empty.append(whole)
    for phase in correlations:
        if not has_unread:
            empty += phase.unused()
        inner = phase.without_unused()
        if not inner.axes[0].outputs:
            continue
        # Most phases differ only in the positions of their operands.
        operands = inner.source, inner.filters, inner.result
        key = inner.axes, *(operand.strides for operand in operands)
        if key not in planned:
            chunks = [_packed_chunk(layouts, one) for one in _chunks(inner, 4 * block_bytes)]
            planned[key] = inner, chunks
        first, chunks = planned[key]
        pairs = zip(operands, (first.source, first.filters, first.result), strict=True)
        shifts = Shifts(*(offset(*pair) for pair in pairs))
        if inner.addend is not None and first.addend is not None:
            shifts = shifts._replace(addend=offset(inner.addend, first.addend))
        for chunk in chunks:
            chunk.add_to(_with_room(stages, chunk.size, whole, block_bytes), shifts)
    for stage in stages:
        stage.tasks = [Task(blocks) for blocks in _divided(stage.works)]
    return layouts.finished(stages, empty)


def _packed_chunk(layouts: _Layouts, chunk: Correlation) -> _Chunk:
    """Plan the blocks of a part of a phase, and the packing of its filters."""
    shape, stage = _packed_shape(chunk), Stage()
    packed = _packed_filters(without_memory(dense(shape, chunk.accumulator)), chunk)
    if layouts.packs_directly:
        stage.packs += pack_rows(chunk, layouts.whole.filters, 0)
    else:
        stage.packed.append((chunk, 0, 0))
    layouts.add_blocks(stage, chunk._replace(filters=packed), chunk)
    return _Chunk(chunk, _aligned(prod(shape), chunk), stage)


def _plan_gradient(geometry: Geometry) -> TilePlan:
    """Plan backprop_filter."""
    whole, _ = geometry.correlations()
    layouts = _Layouts.of(geometry, whole)
    stages, inner = [Stage()], whole.without_unused()
    if inner.axes[0].outputs:
        for chunk in _chunks(inner, 4 * geometry.block_bytes):
            _add_gradients(layouts, stages, chunk)
    return layouts.finished(stages, is_partial=inner.filters.size < whole.filters.size)


def _plan(geometry: Geometry) -> TilePlan:
    """Plan a pass."""
    is_gradient = geometry.pass_ == "backprop_filter"
    return _plan_gradient(geometry) if is_gradient else _plan_correlation(geometry)


plan_of = ByteCache(_plan)


def _add_gradients(layouts: _Layouts, stages: list[Stage], chunk: Correlation) -> None:
    """Add the blocks of a filter gradient."""
    block_bytes = layouts.geometry.block_bytes
    parts_of = _weights_and_outputs(chunk, block_bytes)
    sizes = (_aligned(prod(_gradient_shape(part)), part) * len(terms) for part, terms in parts_of)
    stage = _with_room(stages, sum(sizes), chunk, block_bytes)
    for part, terms in parts_of:
        shape, positions = _gradient_shape(part), []
        for term in terms:
            position, first = stage.shared_size, len(stage.works)
            sums = _as_filters(without_memory(dense(shape, term.accumulator)), term)
            own = Stage()
            layouts.add_blocks(own, term._replace(filters=sums), term, is_gradient=True)
            _Chunk(term, _aligned(prod(shape), term), own).add_to(stage, Shifts())
            cleared = slice(position, position + prod(shape))
            stage.tasks.append(Task(slice(first, len(stage.works)), cleared))
            positions.append(position)
        stage.gradients.append(Gradient(part.filters, tuple(positions), shape))


def _weights_and_outputs(
    chunk: Correlation, block_bytes: int
) -> list[tuple[Correlation, list[Correlation]]]:
    """Divide a filter gradient into weights, and each part of the weights into outputs.

    The sums of different outputs must be added up.  Each part of the weights reads all outputs, so
    the weights are divided for several threads only if the outputs are few.
    """
    if is_depthwise(chunk):
        return [(chunk, list(chunk.divided(SUMS, CHANNEL_PRODUCT)))]
    weights = list(weights_of_sums(chunk, block_bytes))
    rows = prod(chunk.filters.shape[2:])
    products = chunk.result.size * rows
    # Sums take time to add up: more than two need SUMS times the products of a part each.
    count = clamp(products // (SUMS * PART_PRODUCTS), SUMS) // len(weights)
    how = (count, 1) if count > 1 else (2 // len(weights), 2)
    divided = [(part, list(part.divided(*how))) for part in weights]
    if len(divided) > 1 or len(divided[0][1]) > 1:
        return divided
    count = clamp(min(products // PART_PRODUCTS, rows // TILE_ROWS), SUMS // 2)
    extents = chunk.filters.shape[2:]
    boxes_of = boxes(extents, box_of(extents, -(-rows // count)))
    parts_of = [chunk.narrow(channels=channels, taps=taps) for channels, *taps in boxes_of]
    return [(part, [part]) for part in parts_of]


def _gradient_shape(term: Correlation) -> tuple[int, ...]:
    """Return the shape of the sums: (G, *taps, C, K), or (*taps, channels) in whole tiles."""
    taps = term.filters.shape[3:]
    if is_depthwise(term):
        return *taps, width(term)
    return term.groups, *taps, term.channels, width(term)


def _as_filters(sums: np.ndarray, term: Correlation) -> np.ndarray:
    """Return the sums of a filter gradient as a view (G, K, C, *taps)."""
    if is_depthwise(term):
        return sums.transpose(3, 0, 1, 2)[None, :, None]
    return sums[..., : term.filter_count].transpose(0, 5, 4, 1, 2, 3)


class _Layouts(NamedTuple):
    """Layouts of the operands of a pass, and what follows from them; see ``TilePlan``."""

    geometry: Geometry
    whole: Correlation
    is_depthwise: bool
    is_direct: bool
    packs_directly: bool

    @classmethod
    def of(cls, geometry: Geometry, whole: Correlation) -> _Layouts:
        both, itemsize = (whole.source, whole.result), whole.accumulator.itemsize
        by_channel = is_by_channel(whole.groups, whole.channels, whole.filter_count, itemsize)
        is_direct = all(has_whole_steps(array, whole.accumulator) for array in both)
        if by_channel:
            is_direct &= all(array.strides[0] == itemsize for array in both)
        packs_directly = has_whole_steps(whole.filters, whole.accumulator)
        return cls(geometry, whole, by_channel, is_direct, packs_directly)

    def add_blocks(
        self, stage: Stage, whole: Correlation, original: Correlation, is_gradient: bool = False
    ) -> None:
        """Add the blocks of a correlation, whose filters begin at position 0, to an empty stage.

        Args:
            original: the same correlation, with the filters of the layer.
        """
        begins_with_channel = _begins_with_channel(original)
        for piece in _pieces(whole, is_gradient):
            if is_gradient and not piece.filters.size:
                continue
            position = offset(piece.filters, whole.filters)
            blocks = _blocks(piece, self.geometry.block_bytes, is_gradient)
            for box in _boxes(piece, blocks.most):
                block = Block(piece, box, position, begins_with_channel)
                stage.works.append(0 if is_gradient else _work(block))
                if self.is_direct:
                    stage.rows.append(row_of(piece, box, position, begins_with_channel, self.whole))
                if self.geometry.keeps_blocks or not self.is_direct:
                    stage.blocks.append(block)
            size = blocks.places
            if is_gradient:
                size += width(whole)
            stage.scratch_size = max(stage.scratch_size, size)

    def finished(
        self, stages: list[Stage], empty: Sequence[Correlation] = (), is_partial: bool = False
    ) -> TilePlan:
        """Return the plan of stages that have all blocks."""
        used = tuple(stage for stage in stages if stage.works)
        for stage in used:
            stage.works.clear()
            stage.packs, stage.rows = (
                np.array(rows, np.int64) for rows in (stage.packs, stage.rows)
            )
            if stage.blocks and stage.gradients:
                stage.scratch_size *= 2  # dy is also copied
        return TilePlan(self.whole, used, tuple(empty), is_partial, *self[2:])


def _with_room(stages: list[Stage], size: int, chunk: Correlation, block_bytes: int) -> Stage:
    """Return the last stage, or a new one if the last has no room for ``size`` elements."""
    most = 4 * block_bytes // chunk.accumulator.itemsize
    if stages[-1].shared_size and stages[-1].shared_size + size > most:
        stages.append(Stage())
    return stages[-1]


def _aligned(size: int, chunk: Correlation) -> int:
    """Return the number of elements, extended to whole cache lines."""
    line = LINE // chunk.accumulator.itemsize
    return -(-size // line) * line


def _divided(works: Sequence[int]) -> Iterator[slice]:
    """Divide blocks into ranges with enough work for a thread."""
    least = max(sum(works) // MOST_THREADS, PART_PRODUCTS)
    first, total = 0, 0
    for number, of_block in enumerate(works, 1):
        total += of_block
        if total >= least or number == len(works):
            yield slice(first, number)
            first, total = number, 0


def _work(block: Block) -> int:
    """Return the time of a block, in products of a tile."""
    whole = block.correlation
    groups, images, *outputs = (part.stop - part.start for part in block.box)
    axes = [axis.narrow(slice(0, n)) for axis, n in zip(whole.axes, outputs, strict=True)]
    results = prod(outputs) * width(whole)
    read = prod(axis.span for axis in axes) * whole.channels
    products = results * prod(whole.filters.shape[2:])
    return groups * images * (products + BYTE * (read + results) * whole.accumulator.itemsize)


def row_of(
    block: Correlation,
    box: Box,
    position: int,
    begins_with_channel: bool,
    whole: Correlation | None = None,
) -> list[int]:
    """Return the row of a block; see cupyconv/cpu/tiles_numba.py.

    Args:
        block, box, position, begins_with_channel: attributes of a ``Block``.
        whole: correlation whose arrays the loops get; by default ``block``.
    """
    whole = whole or block
    axes = with_three_axes(block).axes
    return [
        offset(block.source, whole.source),
        offset(block.result, whole.result),
        position,
        *element_strides(block.source),
        *element_strides(block.result),
        *element_strides(block.filters),
        *chain.from_iterable((a.stride, a.dilation, a.offset, a.taps, a.size) for a in axes),
        block.channels,
        block.filter_count,
        begins_with_channel,
        *chain.from_iterable((part.start, part.stop) for part in box),
        _columns(block),
    ]


def pack_rows(chunk: Correlation, filters: np.ndarray, position: int) -> Iterator[list[int]]:
    """Yield rows that pack the filters of a correlation, divided for several threads.

    Args:
        filters: array that contains the filters.
        position: position in the shared memory.
    """
    order = (0, 1, 2, 3, 4, 5) if _begins_with_channel(chunk) else (0, 1, 3, 4, 5, 2)
    weights = chunk.filters.transpose(order)
    groups, count, *terms = weights.shape
    columns = count if is_depthwise(chunk) else _columns(chunk)
    panels, depth = -(-count // columns), prod(terms)
    at_once = max(LEAST_PACKED // max(groups * depth * columns, 1), 1)
    for some in split_evenly(panels, at_once):
        yield [
            offset(weights, filters),
            *element_strides(weights),
            *terms,
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
    if is_depthwise(chunk):
        return *taps, filters
    term = (channels, *taps) if _begins_with_channel(chunk) else (*taps, channels)
    columns = _columns(chunk)
    return groups, width(chunk) // columns, *term, columns


def _packed_filters(packed: np.ndarray, chunk: Correlation) -> np.ndarray:
    """Return a view of packed filters (G, panels, C, *taps), or (1, K, 1, *taps)."""
    if is_depthwise(chunk):
        return packed.transpose(3, 0, 1, 2)[None, :, None]
    firsts = packed[..., 0]
    return firsts if _begins_with_channel(chunk) else np.moveaxis(firsts, -1, 2)


# -- parts -----------------------------------------------------------------------------------------


def _pieces(whole: Correlation, is_gradient: bool = False) -> Iterator[Correlation]:
    """Divide the outputs and trim each part's taps; see ``choice.tile_pieces``."""
    counts = whole.groups, whole.channels, whole.filter_count
    if is_depthwise(whole):
        counts = whole.channels, 1, 1
    itemsize, source = whole.accumulator.itemsize, whole.source
    is_in_place = source.dtype == whole.accumulator and channels_are_last(source)
    extents = whole.images, *counts, itemsize
    return whole.pieces(tile_pieces(whole.axes, *extents, is_gradient, is_in_place).cuts)


def _chunks(piece: Correlation, most_bytes: int) -> Iterator[Correlation]:
    """Divide groups and filters into whole tiles whose weights take at most ``most_bytes``.

    A depthwise correlation is not divided; its channels become those of one group.
    """
    whole = with_three_axes(piece)
    itemsize = whole.accumulator.itemsize
    if is_by_channel(whole.groups, whole.channels, whole.filter_count, itemsize):
        yield _channels_as_one_group(whole)
        return
    columns = compiled_loops().width(itemsize)
    tile_bytes = max(prod(whole.filters.shape[2:]), 1) * columns * itemsize
    filters = clamp(most_bytes // tile_bytes, width(whole) // columns) * columns
    groups = clamp(most_bytes * columns // (tile_bytes * filters), whole.groups)
    for group in split_evenly(whole.groups, groups):
        for first in range(0, whole.filter_count, filters):
            of_filters = slice(first, min(first + filters, whole.filter_count))
            yield whole.narrow(groups=group, filters=of_filters)


def _blocks(chunk: Correlation, block_bytes: int, is_gradient: bool = False) -> LoopBlocks:
    """Divide groups, images and outputs into blocks; see ``choice.tile_blocks``."""
    itemsize = chunk.accumulator.itemsize
    if is_depthwise(chunk):
        return channel_blocks(chunk.axes, chunk.images, chunk.channels, itemsize, block_bytes)
    counts = chunk.images, chunk.groups, chunk.channels, width(chunk)
    return tile_blocks(chunk.axes, *counts, itemsize, block_bytes, is_gradient)


def _columns(chunk: Correlation) -> int:
    """Return the columns of a tile."""
    itemsize = chunk.accumulator.itemsize
    if is_depthwise(chunk):
        return columns_by_channel(chunk.channels, itemsize)
    return compiled_loops().width(itemsize)


def columns_by_channel(channels: int, itemsize: int) -> int:
    """Return the columns of a tile by channel: two vectors if there are as many channels."""
    columns = compiled_loops().width(itemsize)
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
    return chunk.narrow(groups=groups, images=images, outputs=outputs)


def is_depthwise(chunk: Correlation) -> bool:
    """Return whether a correlation comes from ``_channels_as_one_group``."""
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


def _begins_with_channel(block: Correlation) -> bool:
    """Return whether the taps vary fastest in a term.

    In channels-first memory they do if a row has more taps than a group has channels, or if there
    are many channels, because a pixel would otherwise leave the cache before the next tap reads it.
    The pixels of a tile are in one or two cache lines per channel.
    """
    if channels_are_last(block.source) or is_depthwise(block):
        return False
    taps = block.axes[-1].taps
    return block.channels < taps or (taps > 1 and 2 * block.channels >= MOST_LINES)


@cache
def compiled_loops() -> Any:
    """Return the module of compiled loops; tests replace this function."""
    return import_whole("cupyconv.cpu.tiles_numba")
