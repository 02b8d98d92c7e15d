"""How far numbers of the kernels go: what a family refuses whose numbers a layer leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, LARGEST, ConvProblem

LONGEST_REACH = 1 << 30
"""Two of which still add up in 32 bits."""

MOST_BLOCKS = 2**31 - 1
"""Of a launch, along the first axis of its grid."""

_WINDOWS = 8
"""Of a tile along an axis, that are as far from each other as strides make them."""

MARGIN = 2**16
"""More than any tile."""


class Count(NamedTuple):
    """How many there are of something that kernels number, and up to how many they can."""

    what: str
    value: int
    most: int

    def __str__(self) -> str:
        return f"counts up to {self.most:,} {self.what}, not {self.value:,}"


def largest_index(problem: ConvProblem, strides: Strides) -> int:
    """What no index and no offset of the kernels reaches.

    Windows that hang over into the padding are counted, and a tile beyond the end of a GEMM.
    """
    reach = [axis.padded_input + axis.effective_filter + axis.stride for axis in problem.axes]
    sizes = [
        ((problem.N, problem.C, *reach), problem.data_axes, strides.x),
        (
            (problem.K, problem.C // problem.groups, *problem.filter_sizes),
            problem.filter_axes,
            strides.w,
        ),
        ((problem.N, problem.K, *reach), problem.data_axes, strides.y),
        ((max(problem.C, problem.K),), (0,), (strides.bias,)),
    ]
    spans = [
        sum(extent * abs(stride[axis]) for extent, axis in zip(extents, axes, strict=True))
        for extents, axes, stride in sizes
    ]
    products = [max(problem.gemm(pass_)[:3]) for pass_ in ("forward", "backprop_input")]
    return max(*spans, *products, *(size * 2 for size in reach)) + MARGIN


def offset_counts(problem: ConvProblem, strides: Strides) -> Iterator[Count]:
    """What all kernels number in 64 bits where 32 are not enough."""
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    # Of larger tensors there are none: who makes them says so.
    if max(map(prod, shapes)) * ITEMSIZE[problem.dtype] <= LARGEST:
        index = largest_index(problem, strides)
        yield Count("elements that windows and padding reach over", index, LARGEST)


def window_count(problem: ConvProblem) -> Count:
    """What macros and constants of 32 bits hold: where taps and windows of a tile lie."""
    reach = (
        axis.effective_filter + axis.dilation + _WINDOWS * axis.stride for axis in problem.axes
    )
    what = f"rows or columns under a filter, a dilation and {_WINDOWS} strides"
    return Count(what, max(reach), LONGEST_REACH)


def reach_counts(problem: ConvProblem) -> Iterator[Count]:
    """What coordinates of 32 bits hold."""
    extents = (*problem.input_shape, *problem.filter_shape, *problem.output_shape)
    yield Count("elements of an axis", max(extents), LONGEST_REACH)
    yield Count("elements of padding", max(chain(*problem.padding)), LONGEST_REACH)
    yield window_count(problem)
