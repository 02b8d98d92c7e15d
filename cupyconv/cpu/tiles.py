"""Matrix products in tiles of registers, compiled by Numba, without a copy of the windows.

A tile is a few rows and columns of a matrix product, whose sums stay in vector registers.  An
element of the first matrix is a pixel, whose offset in memory is the sum of an offset for its row
and an offset for its term.  In a correlation, rows are pixels of the result, and terms are the taps
of all channels.  In a filter gradient, rows are the taps of all channels, and terms are the pixels
of dy.  Columns are filters.

cupyconv/cpu/tile_plans.py plans a pass once for all calls with the same geometry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu import tile_plans
from cupyconv.cpu.axis import split_evenly
from cupyconv.cpu.correlation import Correlation, correlation, gather
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.tile_plans import (
    LEAST_PACKED,
    Block,
    Geometry,
    Gradient,
    Shifts,
    Stage,
    Task,
    TilePlan,
    columns_by_channel,
    is_depthwise,
    pack_rows,
    part_of,
    plan_of,
    row_of,
    whole_box,
    width,
)
from cupyconv.cpu.views import (
    Layout,
    accumulator_of,
    channels_are_last,
    copy,
    memory_of,
    same_view,
)
from cupyconv.kernels.strides import element_strides
from cupyconv.problem import ConvProblem

NO_SHIFTS = Shifts()


class _Run(NamedTuple):
    """Pass in progress.

    Attributes:
        plan: plan of the pass.
        loop: compiled loop of the pass.
        memories: memory of the source and of the result; empty if blocks are converted.
        whole: correlation of the operands; None if loops need only their memory.
    """

    plan: TilePlan
    loop: Callable[..., None]
    memories: tuple[np.ndarray, ...]
    whole: Correlation | None

    def compute(self, stage: Stage, shared: np.ndarray, task: Task, scratch: Scratch) -> None:
        """Compute the blocks of a task, whose operands need no conversion."""
        memory, blocks = scratch.array("memory", (stage.scratch_size,)), task.blocks
        self.loop(*self.memories, shared, stage.rows, blocks.start, blocks.stop, memory)

    def with_operands(self, block: Correlation, shifts: Shifts = NO_SHIFTS) -> Correlation:
        """Return a part of ``plan.whole`` with the operands of this call; its filters are kept."""
        planned, whole = self.plan.whole, self.whole
        assert whole is not None, "this pass needs no operands"

        def view(name: str, shift: int = 0) -> Any:
            part = getattr(block, name)
            arrays = getattr(planned, name), getattr(whole, name)
            return None if part is None else same_view(part, *arrays, shift)

        return block._replace(
            source=view("source", shifts.source),
            result=view("result", shifts.result),
            bias=view("bias"),
            addend=view("addend", shifts.addend),
            activation=whole.activation,
        )


def prepare(problem: ConvProblem, pass_: str, activation: str | None) -> Callable[..., None]:
    """Return the function that computes a pass of x, w, y (or their gradients), bias and addend.

    The last argument of the function is the size of a thread's buffer in bytes, from which the size
    of blocks follows.
    """
    is_input, is_gradient = pass_ == "backprop_input", pass_ == "backprop_filter"
    of, accumulator = correlation(problem, pass_, activation), accumulator_of(problem.dtype)

    @lru_cache(maxsize=8)
    def geometry(columns: int, block_bytes: int, has_bias: bool, *layouts: Any) -> Geometry:
        x, w, y, add = (layout and Layout(*layout) for layout in layouts)
        keeps = has_bias or add is not None or activation is not None
        return Geometry(problem, pass_, x, w, y, add, has_bias, keeps, columns, block_bytes)

    def compute(
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        bias: np.ndarray | None,
        add: np.ndarray | None,
        block_bytes: int,
    ) -> None:
        layouts = [
            one if one is None else (one.shape, one.strides, one.dtype, one.flags.aligned)
            for one in (x, w, y, add)
        ]
        compiled = tile_plans.compiled_loops()
        columns = compiled.width(accumulator.itemsize)
        of_arrays = geometry(columns, block_bytes, bias is not None, *layouts)
        plan, whole = plan_of(of_arrays), None
        memories: tuple[np.ndarray, ...] = ()
        if plan.is_direct:
            memories = memory_of(y if is_input else x), memory_of(x if is_input else y)
        if of_arrays.keeps_blocks or plan.empty or not plan.is_direct:
            whole = of(x, w, y, bias, add)
        with Pool(accumulator) as pool:
            run = _Run(plan, getattr(compiled, loops[plan.is_depthwise]), memories, whole)
            (_filter_gradient if is_gradient else _correlations)(run, w, pool)

    loops = ("correlate", "correlate_channels")
    if is_gradient:
        loops = ("add_gradient", "add_channel_gradient")
    return compute


def _correlations(run: _Run, w: np.ndarray, pool: Pool) -> None:
    """Compute forward or backprop_input."""
    for part in run.plan.empty:
        run.with_operands(part).finish_empty()
    for stage in run.plan.stages:
        shared = pool.array("shared", (stage.shared_size,))
        _pack(run, stage, w, shared, pool)
        each(partial(_correlate, run, stage, shared), stage.tasks, pool, stage.scratch_size)


def _correlate(run: _Run, stage: Stage, shared: np.ndarray, task: Task, scratch: Scratch) -> None:
    """Compute the results of a task's blocks."""
    if run.memories:
        run.compute(stage, shared, task, scratch)
        if run.whole is None or not run.whole.has_epilogue:
            return
    for block in stage.blocks[task.blocks]:
        inner = part_of(run.with_operands(block.correlation, block.shifts), block.box)
        if run.memories:
            inner.finish(inner.result)
        else:
            _correlate_converted(run.loop, inner, block, shared, scratch.rest())


def _correlate_converted(
    loop: Callable[..., None],
    inner: Correlation,
    block: Block,
    shared: np.ndarray,
    scratch: Scratch,
) -> None:
    """Compute the results of a block with converted operands.

    Args:
        inner: the block's correlation.
    """
    groups, filters, *spatial = inner.result.shape
    sums = np.moveaxis(scratch.array("sums", (groups, *spatial, filters)), -1, 1)
    converted = _converted(inner, scratch)._replace(result=sums)
    memories, row = map(memory_of, (converted.source, sums)), _converted_row(block, converted)
    loop(*memories, shared, row, 0, 1, scratch.array("unused", (0,)))
    inner.finish(sums)


def _pack(run: _Run, stage: Stage, w: np.ndarray, shared: np.ndarray, pool: Pool) -> None:
    """Copy the filters of a stage to the shared memory as panels."""
    if run.plan.packs_directly:
        _pack_rows(memory_of(w), shared, stage.packs, pool)
        return
    for chunk, position, shift in stage.packed:
        filters = same_view(chunk.filters, run.plan.whole.filters, w, shift)
        filters = filters.astype(shared.dtype, order="C")
        rows = [*pack_rows(chunk._replace(filters=filters), filters, position)]
        _pack_rows(memory_of(filters), shared, np.array(rows, np.int64), pool)


def _pack_rows(filters: np.ndarray, shared: np.ndarray, rows: np.ndarray, pool: Pool) -> None:
    pack = tile_plans.compiled_loops().pack
    if len(shared) <= LEAST_PACKED:
        pack(filters, shared, rows, 0, len(rows))
    else:
        each(
            lambda some, _: pack(filters, shared, rows, some.start, some.stop),
            split_evenly(len(rows), 1),
            pool,
            0,
        )


def _filter_gradient(run: _Run, dw: np.ndarray, pool: Pool) -> None:
    """Compute backprop_filter."""
    if run.plan.is_partial:
        dw[...] = 0
    for stage in run.plan.stages:
        shared = pool.array("shared", (stage.shared_size,))
        each(partial(_add, run, stage, shared), stage.tasks, pool, stage.scratch_size)
        for gradient in stage.gradients:
            filters = same_view(gradient.filters, run.plan.whole.filters, dw)
            _add_up(gradient, filters, shared)


def _add(run: _Run, stage: Stage, shared: np.ndarray, task: Task, scratch: Scratch) -> None:
    """Add the filter gradients of a task's blocks."""
    shared[task.cleared] = 0
    if run.memories:
        run.compute(stage, shared, task, scratch)
        return
    for block in stage.blocks[task.blocks]:
        _add_converted(run, block, shared, scratch.rest())


def _add_converted(run: _Run, block: Block, shared: np.ndarray, scratch: Scratch) -> None:
    """Add the filter gradient of a block with converted operands."""
    inner = part_of(run.with_operands(block.correlation, block.shifts), block.box)
    converted = _converted(inner, scratch, with_result=True)
    size = 0
    if not run.plan.is_depthwise:
        size = width(inner) * inner.groups * prod(inner.result.shape[2:])
    memories = map(memory_of, (converted.source, converted.result))
    memory = scratch.array("memory", (size,))
    run.loop(*memories, shared, _converted_row(block, converted), 0, 1, memory)


def _add_up(gradient: Gradient, filters: np.ndarray, shared: np.ndarray) -> None:
    """Write a filter gradient, the sum of arrays in the shared memory."""
    size = prod(gradient.shape)
    total, *terms = (shared[position : position + size] for position in gradient.positions)
    for term in terms:
        total += term
    sums = total.reshape(gradient.shape)
    if sums.ndim > 4:
        copy(filters, sums[..., : filters.shape[1]].transpose(0, 5, 4, 1, 2, 3))
        return
    by_channel, filters = sums.transpose(3, 0, 1, 2), filters[0, :, 0]
    columns = columns_by_channel(len(filters), shared.itemsize)
    # The last panel also has columns of the one before it.
    before = len(by_channel) - columns
    copy(filters[:before], by_channel[:before])
    copy(filters[len(filters) - columns :], by_channel[before:])


# -- operands --------------------------------------------------------------------------------------


def _converted_row(block: Block, converted: Correlation) -> np.ndarray:
    """Return the row of a block whose operands have been copied, as an array of one row."""
    of_group, *_ = element_strides(block.correlation.filters)
    position = block.position + block.box[0].start * of_group
    row = row_of(converted, whole_box(converted), position, block.begins_with_channel)
    return np.array([row], np.int64)


def _converted(block: Correlation, scratch: Scratch, with_result: bool = False) -> Correlation:
    """Copy the source, with padding, and dy to arrays that the compiled loops can use.

    Args:
        with_result: whether to copy the result, which is dy.
    """
    axes = [axis.pixels() for axis in block.axes]
    source, sizes = block.source, tuple(axis.outputs for axis in axes)
    groups, channels, images = source.shape[:3]
    if channels_are_last(source) or is_depthwise(block):
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
