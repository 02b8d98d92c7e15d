"""The full result of dx along an axis, and the part of it that is dx for each possible size.

The full result is the gradient of the padded input, up to the end of the last window.  It is the
same for all input sizes with the same output size.  dx is the part of it after the padding before
the input, followed by zeros where the input is longer.
"""

from __future__ import annotations

from cupyconv.explaining.counts import visible, with_gaps
from cupyconv.explaining.shapes import listed, merged
from cupyconv.markup import Block, Paragraph, Verbatim
from cupyconv.problem import ConvAxis, ConvProblem

_WIDTH = 64
"""Largest number of characters in the cells of a line (hand-set)."""


def full_size(axis: ConvAxis) -> int:
    """Return the size of the full result, the number of padded inputs that all windows span."""
    return (axis.output - 1) * axis.stride + axis.effective_filter


def longest(axis: ConvAxis) -> int:
    """Return the last position after the full result's start that dx of any possible size has."""
    largest = axis.of_input(axis.valid_input_sizes[-1])  # the end of dx increases with its size
    return max(largest.pad_before + largest.input, full_size(axis))


def blocks(problem: ConvProblem, is_transposed: bool = False) -> tuple[Block, ...]:
    """Return text and a picture of the full result and its crops; nothing if there is one size.

    Args:
        problem: the layer.
        is_transposed: whether the result is y of the transposed layer that reverses the problem.
    """
    wide = [axis for axis in problem.axes if len(axis.valid_input_sizes) > 1]
    if not wide:
        return ()
    name, last = "dx", "window"
    full = "the gradient of the padded x, up to the end of the last window"
    if is_transposed:
        name, last, full = "y", "copy", "the sum of all copies of the filter, without the bias"
    zeros = f", and continues with zeros, in brackets, after the last {last}"
    if all(longest(axis) == full_size(axis) for axis in wide):
        zeros = ""
    text = (
        f"All possible sizes of {name} have the same full result: {full}. {name} is a part of it, "
        f"which begins after the padding{zeros}. The numbers are indices:"
    )
    pictures = []
    for names, (drawn,) in merged(problem, lambda axis: (_picture(axis, name),)):
        if drawn and problem.spatial_rank > 1:
            drawn = f"along {listed(names)}\n{drawn}"
        pictures.append(drawn)
    return Paragraph(text), Verbatim("\n\n".join(filter(None, pictures)))


def _picture(axis: ConvAxis, name: str) -> str:
    """Return the full result and its crops as lines of indices, below each other.

    The result is empty if there is only one size.
    """
    full, sizes = full_size(axis), axis.valid_input_sizes
    if len(sizes) == 1:
        return ""
    shown = sorted({*sizes[:2], axis.input, *sizes[-2:]})
    starts = [axis.of_input(size).pad_before for size in shown]
    cell = len(str(longest(axis))) + 2
    places = visible(longest(axis), max(_WIDTH // (cell + 1), 5))
    if None in places:
        ends = (start + size - 1 for start, size in zip(starts, shown, strict=True))
        needed = {0, 1, full - 1, *starts, *(start + 1 for start in starts), *ends}
        places = list(with_gaps(needed))
    rows = [("full result", 0, full)]
    for place, (start, size) in enumerate(zip(starts, shown, strict=True)):
        if place and size > shown[place - 1] + 1:
            rows.append(("...", 0, 0))
        rows.append((f"{name} of size {size}", start, size))
    head = max(len(label) for label, _, _ in rows)
    lines = []
    for label, start, size in rows:
        cells = (_cell(place, start, size, full) if size else "" for place in places)
        lines.append(f"{label.ljust(head)} {' '.join(text.rjust(cell) for text in cells)}".rstrip())
    return "\n".join(lines)


def _cell(place: int | None, start: int, size: int, full: int) -> str:
    if place is None:
        return "..."
    if not start <= place < start + size:
        return ""
    return str(place - start) if place < full else f"({place - start})"
