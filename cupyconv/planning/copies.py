"""Copies of operands in another order, in the workspace: where their elements are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from cupyconv import formats
from cupyconv.planning import cost
from cupyconv.planning.device import RESERVED_SHARED, Chip
from cupyconv.planning.strides import Strides, contiguous_strides
from cupyconv.problem import ITEMSIZE, ConvProblem

PIECE_BYTES = 16
"""Of memory, that rows of copies, and addresses and strides of what TMA reads, are multiples of."""

ROLES_OF = {
    "forward": ("x", "w", "y"),
    "backprop_input": ("y", "w", "x"),
    "backprop_filter": ("x", "y", "w"),
}
"""The tensor gathered under taps, the other operand, and the result, by pass."""


def copy_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides of a copy: C-contiguous, but its last axis is rounded up to ``pitch``."""
    return contiguous_strides((*shape[:-1], pitch(shape[-1], itemsize)))


def pitch(extent: int, itemsize: int) -> int:
    """Elements from a row of ``extent`` to the next, each beginning at a multiple of 16 bytes."""
    piece = PIECE_BYTES // itemsize
    return -(-extent // piece) * piece


def copy_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Size of a copy."""
    return copy_strides((1, *shape), itemsize)[0] * itemsize


def shape_of(problem: ConvProblem, role: str) -> tuple[int, ...]:
    """Shape of x, w or y."""
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    return shapes[role]


def called(roles: Sequence[str]) -> str:
    """Operands as plans name them: "x and w"."""
    return " and ".join("dy" if role == "y" else role for role in roles)


TILE = 64
"""Pixels, and channels, that a block of cuda/conv_arrange.cu copies."""


def arranging(chip: Chip, shapes: Sequence[tuple[int, ...]], itemsize: int) -> float:
    """Microseconds of the launch that copies tensors of these shapes, their channels last.

    What a block does is counted, as that of cuda-gather is.
    """
    work = cost.Work(
        multiplying=0,
        wavefronts=148 + 64 * itemsize,
        instructions=2186 + 200 * itemsize,
        longest=313 + 25 * itemsize,
        waits=1,
    )
    blocks = sum(tiles(shape) for shape in shapes)
    resident = min(6, (chip.shared << 10) // (TILE * (TILE + 1) * itemsize + RESERVED_SHARED))
    size = 2 * sum(copy_bytes(shape, itemsize) for shape in shapes)
    computing = cost.of_blocks(chip, blocks, resident, work) if blocks else 0
    return max(computing, cost.moving(chip, size)) + cost.LAUNCH_OVERHEAD


def tiles(shape: Sequence[int]) -> int:
    """Blocks that copy a tensor of this shape, its channels last."""
    return -(-prod(shape[:-1]) // TILE) * -(-shape[-1] // TILE)


@lru_cache(maxsize=4096)
def arranged(
    problem: ConvProblem, strides: Strides, roles: tuple[str, ...]
) -> tuple[ConvProblem, Strides]:
    """The problem with channels last in every tensor, and its strides where some are copied so.

    Args:
        problem: what is computed.
        strides: of the tensors in the problem's formats.
        roles: of those that are copied.
    """
    batch, channel, *spatial = problem.data_axes
    filter_, of_filter, *taps = problem.filter_axes
    orders = (batch, *spatial, channel), (filter_, *taps, of_filter)
    seen, steps = reordered(problem, strides, *orders)
    for role in roles:
        steps[role] = copy_strides(shape_of(seen, role), ITEMSIZE[problem.dtype])
    return seen, replace(strides, x=steps["x"], w=steps["w"], y=steps["y"], copied=roles)


def reordered(
    problem: ConvProblem, strides: Strides, data_order: Sequence[int], filter_order: Sequence[int]
) -> tuple[ConvProblem, dict[str, tuple[int, ...]]]:
    """The problem and its strides with the axes of its tensors in another order."""
    rank = problem.spatial_rank
    data, filters = formats.data_formats(rank), formats.filter_formats(rank)
    seen = problem.replace(
        input_shape=permuted(problem.input_shape, data_order),
        filter_shape=permuted(problem.filter_shape, filter_order),
        data_format=data[data_order[-1] == problem.data_axes[1]],
        filter_format=filters[1 if filter_order[-1] == problem.filter_axes[0] else 2],
    )
    steps = {
        "x": permuted(strides.x, data_order),
        "w": permuted(strides.w, filter_order),
        "y": permuted(strides.y, data_order),
    }
    return seen, steps


def permuted(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """What belongs to each axis, in another order of the axes."""
    return tuple(values[axis] for axis in order)
