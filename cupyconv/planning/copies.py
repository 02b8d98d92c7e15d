"""Copies of operands in another order, in the workspace: where their elements are."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv import formats
from cupyconv.planning.strides import Strides, contiguous_strides
from cupyconv.problem import ConvProblem

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
