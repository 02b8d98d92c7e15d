"""Strides and alignment of the tensors of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from typing import Any

from cupyconv.formats import CHANNELS_LAST
from cupyconv.problem import ConvProblem


@dataclass(frozen=True)
class Strides:
    """Strides and alignment of the tensors of a pass, or of their gradients.

    Attributes:
        x, w, y: strides in elements, in the axis order of the tensors' formats.
        bias: stride of the bias in elements.
        alignment: largest power of two in bytes, at most 16, that divides the addresses of x, w
            and y.
        copied: names, such as "x", of tensors that are copies in the workspace; their addresses are
            multiples of 16 bytes.
        fold: for each spatial axis of x, the number of adjacent pixels that are folded into the
            channels, and their stride (views.py); empty if no pixels are folded.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    bias: int = 1
    alignment: int = 16
    copied: tuple[str, ...] = ()
    fold: tuple[tuple[int, int], ...] = ()

    @staticmethod
    @lru_cache(maxsize=4096)
    def contiguous(problem: ConvProblem) -> Strides:
        """Return the strides of C-contiguous tensors in the problem's formats."""
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        x, w, y = map(contiguous_strides, shapes)
        return Strides(x, w, y)

    @staticmethod
    def of(problem: ConvProblem, layout: str) -> Strides:
        """Return the strides of dense tensors with channels first or last in memory.

        The strides are in the axis order of the problem's formats, whatever the order in memory.

        Args:
            problem: the configuration.
            layout: order in memory: "channels_first" is (N, C, spatial) and (O, I, spatial),
                "channels_last" is (N, spatial, C) and (O, spatial, I).
        """

        def ordered(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
            outer, channel, *spatial = axes
            last = layout == CHANNELS_LAST
            order = (outer, *spatial, channel) if last else (outer, channel, *spatial)
            steps = contiguous_strides([shape[axis] for axis in order])
            return tuple(steps[order.index(axis)] for axis in range(len(shape)))

        return Strides(
            ordered(problem.input_shape, problem.data_axes),
            ordered(problem.filter_shape, problem.filter_axes),
            ordered(problem.output_shape, problem.data_axes),
        )

    @staticmethod
    def of_sum(dy: tuple[int, ...], db: int, alignment: int) -> Strides:
        """Return the strides for a bias gradient: dy in place of y, and db in place of the bias.

        Args:
            dy: strides of dy in elements.
            db: stride of db in elements.
            alignment: alignment of dy's address, in bytes.
        """
        return Strides(dy, (1,) * len(dy), dy, db, alignment)

    def canonical(self, problem: ConvProblem) -> Strides:
        """Return the strides with 0 along axes of one element, where any stride is valid."""
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        x, w, y = (
            tuple(0 if size == 1 else step for step, size in zip(strides, shape, strict=True))
            for strides, shape in zip((self.x, self.w, self.y), shapes, strict=True)
        )
        return replace(self, x=x, w=w, y=y)

    def run_of_channels(self, problem: ConvProblem, role: str) -> tuple[int, tuple[int, ...]]:
        """Return the channels per group of x or y that have one stride, and the other strides.

        Args:
            problem: the problem.
            role: "x" or "y".

        Returns:
            The number of channels or filters after which another stride may begin, and the strides
            of the tensor, followed by those of folded pixels.
        """
        steps: tuple[int, ...] = getattr(self.canonical(problem), role)
        count = (problem.C if role == "x" else problem.K) // problem.groups
        if role != "x" or not self.fold:
            return count, steps
        count //= prod(cell for cell, _ in self.fold)
        run = count
        for cell, step in reversed(self.fold):
            if cell == 1:
                continue
            if step != run * steps[problem.data_axes[1]]:
                break
            run *= cell
        return run, (*steps, *(step for _, step in self.fold))

    def alignment_of(self, role: str) -> int:
        """Return the alignment in bytes, at most 16, of the address of x, w or y."""
        return 16 if role in self.copied else self.alignment


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def element_strides(array: Any) -> tuple[int, ...]:
    """Return the strides of a NumPy or CuPy array in elements.

    Raises:
        ValueError: a stride is not a multiple of the element size, as in a field of a record array.
    """
    return _in_elements(array.strides, array.itemsize)


@lru_cache(maxsize=4096)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ValueError("strides are not multiples of the element size")
    return tuple(stride // itemsize for stride in strides)


def neighbours(
    strides: Sequence[int], axis: int, extent: int, alignment: int, itemsize: int
) -> int:
    """Return the elements per vector access along an axis: a power of two, 1 for a strided axis.

    A vector has at most 16 bytes.

    Args:
        strides: strides of the tensor, in elements.
        axis: axis of the vector.
        extent: number of elements along the axis, such as the channels of a group.  No vector
            crosses the end of these elements.
        alignment: alignment of the tensor's address, in bytes.
        itemsize: bytes per element.
    """
    if strides[axis] != 1:
        return 1
    axis %= len(strides)
    others = (*strides[:axis], *strides[axis + 1 :])
    return gcd(16 // itemsize, max(alignment // itemsize, 1), extent, *others)


def followers(
    strides: Sequence[int], axes: Sequence[int], sizes: Sequence[int], alignment: int, itemsize: int
) -> int:
    """Return the elements per vector access along several contiguous axes: a power of two.

    Args:
        strides: strides of the tensor, in elements.
        axes: axes that a vector may extend over, the last axis fastest.
        sizes: sizes of these axes; the first may be the channels of one group.
        alignment: alignment of the tensor's address, in bytes.
        itemsize: bytes per element.
    """
    run, rest = 1, list(strides)
    for axis, size in reversed(list(zip(axes, sizes, strict=True))):
        if size == 1:
            continue  # the stride is arbitrary, as for a group of one channel
        if strides[axis] != run:
            break
        run *= size
        rest[axis] = 0
    return neighbours((*rest, 1), len(rest), run, alignment, itemsize)
