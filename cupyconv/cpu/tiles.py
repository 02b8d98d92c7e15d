"""Matrix products in tiles of registers, compiled by Numba, without a copy of the windows.

A tile is a few rows and columns of a matrix product, whose sums stay in vector registers.  An
element of the first matrix is a pixel, whose offset in memory is the sum of an offset for its row
and an offset for its term.  In a correlation, rows are pixels of the result, and terms are the taps
of all channels.  In a filter gradient, rows are the taps of all channels, and terms are the pixels
of dy.  Columns are filters.

cupyconv/cpu/tile_plans.py prepares a pass once for all calls with the same geometry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu import tile_plans
from cupyconv.cpu.axis import parts
from cupyconv.cpu.correlation import Correlation, correlation, gather, input_gradient
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.tile_plans import (
    LEAST_PACKED,
    Block,
    Geometry,
    Part,
    Prepared,
    Stage,
    Sums,
    columns_by_channel,
    multiplies_channels,
    pack_rows,
    part_of,
    prepared_correlation,
    prepared_gradient,
    row_of,
    steps,
    whole_box,
    width,
)
from cupyconv.cpu.views import (
    accumulator_of,
    channels_are_last,
    copy,
    layout_of,
    memory_of,
    same_view,
)
from cupyconv.problem import ConvProblem


class _Pass(NamedTuple):
    """Pass in progress.

    Attributes:
        prepared: the pass without its arrays.
        loop: compiled loop of the pass.
        memories: memory of the source and of the result; empty if blocks are converted.
        whole: all operands; None if no block needs them.
        clears: whether to replace infinite and NaN operands by zeros.
    """

    prepared: Prepared
    loop: Callable[..., None]
    memories: tuple[np.ndarray, ...]
    whole: Correlation | None
    clears: bool = False

    def located(self, block: Correlation) -> Correlation:
        """Return a part of ``prepared.whole`` as a part of ``whole``, except the filters."""
        of, whole = self.prepared.whole, self.whole
        assert whole is not None, "this pass has no operands"

        def view(part: Any, base: Any, array: Any) -> Any:
            return None if part is None else same_view(part, base, array)

        return block._replace(
            source=view(block.source, of.source, whole.source),
            result=view(block.result, of.result, whole.result),
            bias=view(block.bias, of.bias, whole.bias),
            addend=view(block.addend, of.addend, whole.addend),
            activation=whole.activation,
        )

    def run(self, stage: Stage, shared: np.ndarray, part: Part, scratch: Scratch) -> None:
        """Run the compiled loop for all blocks of a part, whose operands need no conversion."""
        memory, blocks = scratch.array("memory", (stage.size,)), part.blocks
        self.loop(*self.memories, shared, stage.rows, blocks.start, blocks.stop, memory)


def correlate(
    problem: ConvProblem,
    pass_: str,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
    block_bytes: int,
) -> None:
    """Compute forward or backprop_input; the arguments are those of the pass.

    Args:
        x, w, y: arrays, or their gradients.
        block_bytes: bytes of a thread's buffer, from which the size of blocks follows.
    """
    source, result = (x, y) if pass_ == "forward" else (y, x)
    has_epilogue = not (bias is add is activation is None)
    prepared = prepared_correlation(
        _geometry(problem, pass_, x, w, y, add, bias is not None, has_epilogue, block_bytes)
    )
    whole = None
    if has_epilogue or prepared.empty or not prepared.is_direct:
        if pass_ == "forward":
            whole = correlation(problem, x, w, y, bias, add, activation)
        else:
            whole = input_gradient(problem, w, y, x, bias, add, activation)
    compiled = tile_plans.loops()
    loop = compiled.correlate_channels if prepared.is_by_channel else compiled.correlate
    running = _Pass(prepared, loop, _memories(prepared, source, result), whole)
    for part in prepared.empty:
        running.located(part).finish_empty()
    with Pool(accumulator_of(problem.dtype)) as pool:
        for stage in prepared.stages:
            shared = pool.array("shared", (stage.shared,))
            _pack(running, stage, w, shared, pool)
            work = partial(_correlate, running, stage, shared)
            each(work, stage.parts, pool, stage.size)


def _correlate(
    running: _Pass, stage: Stage, shared: np.ndarray, part: Part, scratch: Scratch
) -> None:
    if running.memories:
        running.run(stage, shared, part, scratch)
        if running.whole is None or not running.whole.has_epilogue:
            return
    for block in stage.blocks[part.blocks]:
        inner = part_of(running.located(block.of), block.box)
        if running.memories:
            inner.finish(inner.result)
        else:
            _correlate_converted(running.loop, inner, block, shared, scratch.rest())


def _correlate_converted(
    loop: Callable[..., None],
    inner: Correlation,
    block: Block,
    shared: np.ndarray,
    scratch: Scratch,
) -> None:
    """Compute a block with converted operands.

    Args:
        inner: the block's correlation.
    """
    groups, filters, *others = inner.result.shape
    sums = np.moveaxis(scratch.array("sums", (groups, *others, filters)), -1, 1)
    converted = _converted(inner, scratch)._replace(result=sums)
    row = _converted_row(block, converted)
    memories = _flat(converted.source, converted.result)
    loop(*memories, shared, np.array([row]), 0, 1, scratch.array("none", (0,)))
    inner.finish(sums)


def _pack(running: _Pass, stage: Stage, w: np.ndarray, shared: np.ndarray, pool: Pool) -> None:
    """Copy the filters of a stage to the shared memory as panels."""
    prepared, pack, rows = running.prepared, tile_plans.loops().pack, stage.packs
    if prepared.packs_directly:
        filters = memory_of(w)
        if stage.shared <= LEAST_PACKED:
            pack(filters, shared, rows, 0, len(rows))
            return
        work = lambda some, _: pack(filters, shared, rows, some.start, some.stop)  # noqa: E731
        each(work, parts(len(rows), 1), pool, 0)
        return
    for chunk, position in stage.packed:
        of = same_view(chunk.filters, prepared.whole.filters, w)
        weights = of.astype(shared.dtype, order="C")
        rows = np.array([*pack_rows(chunk._replace(filters=weights), weights, position)])
        pack(weights.reshape(-1), shared, rows, 0, len(rows))


def filter_gradient(
    problem: ConvProblem,
    pass_: str,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    block_bytes: int,
    clears: bool = False,
) -> None:
    """Compute backprop_filter, or "exchanged", which does it with exchanged x and dy.

    Args:
        w, y: dw and dy.
        block_bytes: bytes of a thread's buffer, from which the size of blocks follows.
        clears: whether to replace infinite and NaN operands by zeros.
    """
    source, result = (x, y) if pass_ == "backprop_filter" else (y, x)
    prepared = prepared_gradient(
        _geometry(problem, pass_, x, w, y, None, False, clears, block_bytes)
    )
    if prepared.is_partial:
        w[...] = 0
    memories, whole = () if clears else _memories(prepared, source, result), None
    if not memories:
        if pass_ == "backprop_filter":
            whole = correlation(problem, x, w, y)
        else:
            whole = input_gradient(problem, w, y, x)
    compiled = tile_plans.loops()
    loop = compiled.add_channel_gradient if prepared.is_by_channel else compiled.add_gradient
    running = _Pass(prepared, loop, memories, whole, clears)
    with Pool(accumulator_of(problem.dtype)) as pool:
        for stage in prepared.stages:
            shared = pool.array("shared", (stage.shared,))
            each(partial(_add, running, stage, shared), stage.parts, pool, stage.size)
            for sums in stage.sums:
                _add_up(sums, same_view(sums.filters, prepared.whole.filters, w), shared)


def _add(running: _Pass, stage: Stage, shared: np.ndarray, part: Part, scratch: Scratch) -> None:
    shared[part.sums] = 0
    if running.memories:
        running.run(stage, shared, part, scratch)
        return
    for block in stage.blocks[part.blocks]:
        _add_converted(running, block, shared, scratch.rest())


def _add_converted(running: _Pass, block: Block, shared: np.ndarray, scratch: Scratch) -> None:
    """Add the filter gradient of a block with converted operands."""
    inner = part_of(running.located(block.of), block.box)
    converted = _converted(inner, scratch, with_result=True)
    for operand in (converted.source, converted.result) if running.clears else ():
        operand[~np.isfinite(operand)] = 0
    row = _converted_row(block, converted)
    size = 0
    if not running.prepared.is_by_channel:
        size = width(inner) * inner.groups * prod(inner.result.shape[2:])
    memories = _flat(converted.source, converted.result)
    memory = scratch.array("memory", (size,))
    running.loop(*memories, shared, np.array([row]), 0, 1, memory)


def _add_up(sums: Sums, filters: np.ndarray, shared: np.ndarray) -> None:
    """Write a filter gradient, the sum of arrays in the shared memory."""
    size = prod(sums.shape)
    first, *more = (shared[position : position + size] for position in sums.positions)
    for total in more:
        first += total
    total = first.reshape(sums.shape)
    if total.ndim > 4:
        copy(filters, total[..., : filters.shape[1]].transpose(0, 5, 4, 1, 2, 3))
        return
    by_channel, filters = total.transpose(3, 0, 1, 2), filters[0, :, 0]
    columns = columns_by_channel(len(filters), shared.itemsize)
    # The last panel also has columns of the one before it.
    before = len(by_channel) - columns
    copy(filters[:before], by_channel[:before])
    copy(filters[len(filters) - columns :], by_channel[before:])


# -- operands --------------------------------------------------------------------------------------


def _geometry(
    problem: ConvProblem,
    pass_: str,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    add: np.ndarray | None,
    has_bias: bool,
    keeps_blocks: bool,
    block_bytes: int,
) -> Geometry:
    return Geometry(
        problem,
        pass_,
        layout_of(x),
        layout_of(w),
        layout_of(y),
        None if add is None else layout_of(add),
        has_bias,
        keeps_blocks,
        tile_plans.loops().width(accumulator_of(problem.dtype).itemsize),
        block_bytes,
    )


def _memories(prepared: Prepared, source: np.ndarray, result: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the memory of the source and of the result, or nothing if blocks are converted."""
    return _flat(source, result) if prepared.is_direct else ()


def _flat(source: np.ndarray, result: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return memory_of(source), memory_of(result)


def _converted_row(block: Block, converted: Correlation) -> list[int]:
    """Return the row of a block whose operands have been copied."""
    of_group, *_ = steps(block.of.filters)
    position = block.position + block.box[0].start * of_group
    return row_of(converted, whole_box(converted), position, block.channels_first)


def _converted(block: Correlation, scratch: Scratch, with_result: bool = False) -> Correlation:
    """Copy the source, with padding, and dy to arrays that the compiled loops can use.

    Args:
        with_result: whether to copy the result, which is dy.
    """
    axes = [axis.pixels() for axis in block.axes]
    source, sizes = block.source, tuple(axis.outputs for axis in axes)
    groups, channels, images = source.shape[:3]
    if channels_are_last(source) or multiplies_channels(block):
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
