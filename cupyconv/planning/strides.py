"""How tensors lie in memory, as far as planning and launching care."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from cupyconv.formats import CHANNELS_LAST
from cupyconv.problem import ConvProblem


@dataclass(frozen=True)
class Strides:
    """How the tensors of a pass, or their gradients, lie in memory.

    Attributes:
        x, w, y: strides in elements, in the axis order of the tensors' formats.
        bias: stride of the bias, of y or of dx, in elements.
        alignment: bytes that the addresses of all three are multiples of, 16 at most.
        w_arranged: whether what is given for w is what the kernels would have made of it first.
        copied: which of "x", "w" and "y" are copies in the workspace, whose addresses are multiples
            of 16 bytes.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    bias: int = 1
    alignment: int = 16
    w_arranged: bool = False
    copied: tuple[str, ...] = ()

    @staticmethod
    @lru_cache(maxsize=4096)
    def contiguous(problem: ConvProblem) -> Strides:
        """Those of C-contiguous tensors in the problem's formats."""
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        x, w, y = map(contiguous_strides, shapes)
        return Strides(x, w, y)

    @staticmethod
    def of(problem: ConvProblem, layout: str) -> Strides:
        """Those of tensors without gaps, with channels first or last whatever their formats say.

        Args:
            problem: the configuration.
            layout: "channels_first", (N, C, spatial) in memory and (O, I, spatial); or
                "channels_last", (N, spatial, C) and (O, spatial, I).
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
        """Those of a bias gradient, which has dy for y and db for the bias."""
        return Strides(dy, (1,) * len(dy), dy, db, alignment)

    def taken(self, problem: ConvProblem) -> Strides:
        """Those that keep elements apart: 0 along axes of a single one."""
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        x, w, y = (
            tuple(0 if size == 1 else step for step, size in zip(strides, shape, strict=True))
            for strides, shape in zip((self.x, self.w, self.y), shapes, strict=True)
        )
        return replace(self, x=x, w=w, y=y)

    def alignment_of(self, role: str) -> int:
        """Bytes that the address of x, w or y is a multiple of, 16 at most."""
        return 16 if role in self.copied else self.alignment


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array in elements.

    Raises:
        ValueError: they are not whole numbers of elements (a field of a record array).
    """
    return _in_elements(array.strides, array.itemsize)


@lru_cache(maxsize=4096)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in strides):
        raise ValueError("strides are not whole numbers of elements")
    return tuple(stride // itemsize for stride in strides)


def neighbours(
    strides: Sequence[int],
    axis: int,
    extent: int,
    alignment: int,
    itemsize: int,
    largest_bytes: int = 16,
) -> int:
    """Elements that can be moved at once along an axis: a power of two, 1 if none are neighbours.

    Args:
        strides: of the tensor, in elements.
        axis: along which the elements would be taken.
        extent: elements that belong together on it, such as the channels of a group.
        alignment: bytes that the tensor's address is a multiple of.
        itemsize: bytes of an element.
        largest_bytes: that can be moved at once.
    """
    others = [stride for number, stride in enumerate(strides) if number != axis]
    vector = largest_bytes // itemsize if strides[axis] == 1 else 1
    while vector > 1:
        fits = alignment % (vector * itemsize) == 0 and extent % vector == 0
        if fits and all(stride % vector == 0 for stride in others):
            return vector
        vector //= 2
    return 1


def followers(
    strides: Sequence[int], axes: Sequence[int], sizes: Sequence[int], alignment: int, itemsize: int
) -> int:
    """Elements that can be moved at once along several axes: a power of two, 1 if none follow.

    Args:
        strides: of the tensor, in elements.
        axes: that the elements are numbered along, the last of them fastest.
        sizes: of these axes; that of the first may be a group's share.
        alignment: bytes that the tensor's address is a multiple of.
        itemsize: bytes of an element.
    """
    run, rest = 1, list(strides)
    for axis, size in reversed(list(zip(axes, sizes, strict=True))):
        if size == 1:
            continue  # no neighbour: it may be one of several groups' shares, which lie anywhere
        if strides[axis] != run:
            break
        run *= size
        rest[axis] = 0
    return neighbours((*rest, 1), len(rest), run, alignment, itemsize)
