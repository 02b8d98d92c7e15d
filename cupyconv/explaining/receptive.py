"""Receptive field: the inputs of the first of several layers that one output of the last reads.

It extends from the first to the last of these inputs.  Padding counts as input, so that the border
does not change the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

from cupyconv.explaining.values import MOST_ELEMENTS
from cupyconv.problem import MOST_LISTED, ConvAxis, ConvProblem, counted

Layers = Sequence[tuple[ConvAxis, bool]]
"""Layers along an axis, from the first to the last, each with whether it is transposed."""


class Field(NamedTuple):
    """Receptive field along an axis.

    Attributes:
        size: largest number of inputs from the first to the last input that one output reads.
        step: mean distance between the fields of neighbouring outputs.
    """

    size: int
    step: Fraction


def as_json(fields: Sequence[Field]) -> dict[str, list[float]]:
    """Return receptive fields along each axis as plain data."""
    sizes, steps = zip(*fields, strict=True)
    return {"sizes": [*sizes], "steps": [*map(float, steps)]}


def field(layers: Layers) -> Field | None:
    """Return the receptive field of layers along an axis; None if it is too large to list."""
    forward = prod(axis.stride for axis, is_transposed in layers if not is_transposed)
    period = prod(axis.stride for axis, is_transposed in layers if is_transposed)
    # The fields of outputs that are this far apart have the same size.
    if period > MOST_LISTED:
        return None
    sizes, left = [], MOST_ELEMENTS
    for output in range(period):
        read = {output}
        for axis, is_transposed in reversed(layers):
            count = axis.filter * len(read)
            left -= count
            if count > MOST_LISTED or left < 0:
                return None
            read = set(_inputs(axis, is_transposed, read))
        sizes.append(max(read) - min(read) + 1 if read else 0)
    return Field(max(sizes), Fraction(forward, period))


def stacked(layers: Sequence[tuple[ConvProblem, bool]]) -> tuple[Field, ...] | None:
    """Return the receptive field of layers along each axis; None if it is too large to list.

    Args:
        layers: the layers from the first to the last, each with whether it is transposed.
    """
    problems, kinds = zip(*layers, strict=True)
    along = zip(*(problem.axes for problem in problems), strict=True)
    fields = tuple(field([*zip(axes, kinds, strict=True)]) for axes in along)
    known = tuple(found for found in fields if found)
    return known if len(known) == len(fields) else None


def text(axis: ConvAxis, is_transposed: bool = False) -> str:
    """Return a clause on the receptive field of one layer; "" if it is too large to list."""
    found = (
        field([(axis, True)])
        if is_transposed
        else Field(axis.effective_filter, Fraction(axis.stride))
    )
    if found is None:
        return ""
    most = "at most " if is_transposed and axis.stride > 1 else ""
    return (
        f"{most}{counted(found.size, 'input')} for each output; the fields of neighbouring outputs "
        f"are {found.step} apart"
    )


def _inputs(axis: ConvAxis, is_transposed: bool, outputs: Iterable[int]) -> Iterable[int]:
    """Yield the inputs that outputs read, padding included."""
    for output in outputs:
        for tap in range(axis.filter):
            if not is_transposed:
                yield output * axis.stride - axis.pad_before + tap * axis.dilation
                continue
            place, rest = divmod(output + axis.pad_before - tap * axis.dilation, axis.stride)
            if not rest:
                yield place
