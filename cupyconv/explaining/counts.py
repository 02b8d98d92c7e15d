"""Count products along an axis, and choose which positions of a long axis to draw."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

from cupyconv.problem import ConvAxis

MAPPED = ("dx", "dw", "y")
"""Tensors for which ``maps.term_map`` counts the products that each element sums."""


def input_counts(axis: ConvAxis) -> list[int]:
    """Return, for each input, the number of (output, tap) pairs that read it."""
    starts, lengths, step = _runs(axis, of_taps=axis.filter <= axis.output)
    # Add 1 at the first input of each run, and subtract 1 one step after its last input. The counts
    # are then running sums over every step-th input.
    counts = [0] * axis.input
    for start, length in zip(starts, lengths, strict=True):
        if length:
            counts[start] += 1
            if start + length * step < axis.input:
                counts[start + length * step] -= 1
    for first in range(min(step, axis.input - step)):
        counts[first::step] = accumulate(counts[first::step])
    return counts


def tap_counts(axis: ConvAxis) -> list[int]:
    """Return, for each tap, the number of outputs for which the tap reads no padding."""
    return _runs(axis, of_taps=True)[1]


def output_counts(axis: ConvAxis) -> list[int]:
    """Return, for each output, the number of taps that read no padding."""
    return _runs(axis, of_taps=False)[1]


def _runs(axis: ConvAxis, of_taps: bool) -> tuple[list[int], list[int], int]:
    """Return the inputs that each tap, or each output, reads, as runs of equally spaced inputs.

    Args:
        axis: the axis.
        of_taps: True for one run per tap, False for one run per output.

    Returns:
        the first input of each run, the number of inputs in each run (without padding), and the
        distance between neighbouring inputs of a run, which is the same in all runs.
    """
    outputs, taps = (axis.output, axis.stride), (axis.filter, axis.dilation)
    (count, distance), (length, step) = (taps, outputs) if of_taps else (outputs, taps)
    corners = range(-axis.pad_before, count * distance - axis.pad_before, distance)
    end = axis.input - 1 + step
    skipped = [-(corner // step) if corner < 0 else 0 for corner in corners]
    lengths = [
        max(min((end - corner) // step, length) - first, 0)
        for corner, first in zip(corners, skipped, strict=True)
    ]
    starts = [corner + first * step for corner, first in zip(corners, skipped, strict=True)]
    return starts, lengths, step


def visible(size: int, room: int, needed: int = 0) -> list[int | None]:
    """Return the positions of an axis to draw: all, or both ends with None for the gap.

    Args:
        size: number of positions of the axis.
        room: largest number of cells in the drawing, the gap included.
        needed: number of positions at the beginning that are drawn even if ``room`` is smaller.
    """
    head, tail = max(room // 2, needed), room - room // 2 - 1
    if size <= max(room, head + tail + 1):
        return list(range(size))
    return [*range(head), None, *range(size - tail, size)]


def with_gaps(positions: Iterable[int]) -> tuple[int | None, ...]:
    """Return positions in ascending order, with None in each gap of more than one position."""
    ordered = sorted(set(positions))
    places: list[int | None] = [*ordered[:1]]
    for before, after in pairwise(ordered):
        if after - before == 2:  # the position takes no more room than the sign for a gap
            places.append(before + 1)
        elif after - before > 2:
            places.append(None)
        places.append(after)
    return tuple(places)
