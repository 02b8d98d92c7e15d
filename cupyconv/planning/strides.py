"""How tensors lie in memory, as far as planning and launching care."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cupyconv.problem import ConvProblem


@dataclass(frozen=True)
class Strides:
    """How the tensors of a pass, or their gradients, lie in memory.

    Attributes:
        x, w, y: strides in elements, in the axis order of the tensors' formats.
        bias: stride of the bias in elements.
        alignment: bytes that the addresses of all three are multiples of, 16 at most.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    bias: int = 1
    alignment: int = 16

    @staticmethod
    def contiguous(problem: ConvProblem) -> Strides:
        """Those of C-contiguous tensors in the problem's formats."""
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        x, w, y = map(contiguous_strides, shapes)
        return Strides(x, w, y)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
