"""How the tensor-core gather kernels (cuda/conv_gather.cu) take their matrices from memory."""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem

PIECE_INSTRUCTIONS = 20
"""Instructions of a thread that copies a piece of an operand, its address included: counted in the
source, not measured."""


@dataclass(frozen=True)
class Access:
    """How the elements of one matrix are taken from memory.

    Attributes:
        along_first: whether neighbours in memory are neighbours in the first of the matrix's two
            directions (k for A and B, n for C), else in the second.
        vector: elements of a piece.
    """

    along_first: bool
    vector: int


def accesses(pass_: str, problem: ConvProblem, strides: Strides) -> tuple[Access, Access, Access]:
    """How A, B and C are taken from memory."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    w_filter, w_channel = problem.filter_axes[:2]
    alignment, itemsize = strides.alignment, ITEMSIZE[problem.dtype]
    along_filters = neighbours(strides.w, w_filter, filters, alignment, itemsize)
    along_channels = neighbours(strides.w, w_channel, channels, alignment, itemsize)
    # Where neither has neighbours, along what is nearer; views have strides of any sign, and 0.
    nearer = abs(strides.w[w_filter]) < abs(strides.w[w_channel])
    filters_last = (along_filters, nearer) > (along_channels, not nearer)
    w = max(along_filters, along_channels)

    def along_channels_or_pixels(
        layout: tuple[int, ...], extent: int, sizes: tuple[int, ...], pixels_follow: bool
    ) -> Access:
        channel = problem.data_axes[1]
        if layout[channel] == 1:
            return Access(True, neighbours(layout, channel, extent, alignment, itemsize))
        follow = pixels_follow and _following_pixels(layout, problem, sizes, alignment)
        return Access(False, follow or 1)

    # Pixels that follow each other in the matrix do so in memory where they are visited in the
    # order of their numbers, and under a tap only if it is the only one, and each has its own.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    x = along_channels_or_pixels(strides.x, channels, problem.input_sizes, x_in_order[pass_])
    y = along_channels_or_pixels(strides.y, filters, problem.output_sizes, y_in_order)
    if pass_ == "forward":
        return x, Access(not filters_last, w), y
    if pass_ == "backprop_input":
        return y, Access(filters_last, w), x
    return (
        Access(not y.along_first, y.vector),
        Access(not x.along_first, x.vector),
        Access(not filters_last, w),
    )


def _following_pixels(
    strides: tuple[int, ...], problem: ConvProblem, sizes: tuple[int, ...], alignment: int
) -> int:
    """Pixels, in the order of their numbers, that can be moved at once: a power of two."""
    run, rest = 1, list(strides)
    for axis, size in reversed(list(zip(problem.data_axes[2:], sizes, strict=True))):
        if size > 1 and strides[axis] != run:
            break
        run *= size
        rest[axis] = 0
    return neighbours((*rest, 1), len(rest), run, alignment, ITEMSIZE[problem.dtype])
