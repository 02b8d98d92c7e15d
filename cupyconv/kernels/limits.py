"""Ranges of the kernels' integers, and the quantities of a layer that must fit into them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

from cupyconv.kernels.cost import REGISTERS
from cupyconv.kernels.strides import Strides
from cupyconv.problem import ITEMSIZE, LARGEST, ConvProblem

LARGEST_EXTENT = 1 << 30
"""Largest extent of an axis in elements; the sum of two indices below it fits into a signed 32-bit
integer."""

MOST_BLOCKS = 2**31 - 1
"""Largest number of thread blocks along the first axis of a grid (CUDA's rule)."""

LARGEST_EDGE = 8
"""Largest number of pixels, along an axis, of the tile of a thread of cuda-direct (hand-set).  In
backprop_input, the number of pixels is a multiple of the stride."""

MARGIN = REGISTERS
"""Number of elements added to every index range.  No tile has more elements, since the sums of a
tile are in the registers of one multiprocessor."""


class Count(NamedTuple):
    """A size that kernels keep in an integer: its value for a layer, and the largest supported."""

    what: str
    value: int
    most: int

    def __str__(self) -> str:
        return f"counts up to {self.most:,} {self.what}, not {self.value:,}"


def largest_index(problem: ConvProblem, strides: Strides) -> int:
    """Return an upper bound of all indices and offsets of the kernels.

    The bound includes windows that reach into the padding, and a tile beyond the end of a GEMM.
    """
    bounds = [axis.padded_input + axis.effective_filter + axis.stride for axis in problem.axes]
    sizes = [
        ((problem.N, problem.C, *bounds), problem.data_axes, strides.x),
        (
            (problem.K, problem.C // problem.groups, *problem.filter_sizes),
            problem.filter_axes,
            strides.w,
        ),
        ((problem.N, problem.K, *bounds), problem.data_axes, strides.y),
        ((max(problem.C, problem.K),), (0,), (strides.bias,)),
    ]
    spans = [
        sum(extent * abs(stride[axis]) for extent, axis in zip(extents, axes, strict=True))
        for extents, axes, stride in sizes
    ]
    products = [max(problem.gemm(pass_)[:3]) for pass_ in ("forward", "backprop_input")]
    return max(*spans, *products, *(size * 2 for size in bounds)) + MARGIN


def offset_counts(problem: ConvProblem, strides: Strides) -> Iterator[Count]:
    """Yield the largest offset of an element; kernels use 64-bit offsets if it exceeds 32 bits."""
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    # Larger tensors cannot exist; their allocation fails with an error.
    if max(map(prod, shapes)) * ITEMSIZE[problem.dtype] <= LARGEST:
        index = largest_index(problem, strides)
        yield Count("elements that windows and padding span", index, LARGEST)


def window_count(problem: ConvProblem) -> Count:
    """Return an upper bound of the rows or columns that a tile's windows span.

    Kernels count these rows or columns in 32 bits.
    """
    spans = (
        axis.effective_filter + axis.dilation + LARGEST_EDGE * axis.stride for axis in problem.axes
    )
    what = f"rows or columns of a filter plus a dilation plus {LARGEST_EDGE} strides"
    return Count(what, max(spans), LARGEST_EXTENT)


def extent_counts(problem: ConvProblem) -> Iterator[Count]:
    """Yield the extents that must fit into 32 bits in kernels with 32-bit coordinates."""
    extents = (*problem.input_shape, *problem.filter_shape, *problem.output_shape)
    yield Count("elements of an axis", max(extents), LARGEST_EXTENT)
    yield Count("elements of padding", max(chain(*problem.padding)), LARGEST_EXTENT)
    yield window_count(problem)
