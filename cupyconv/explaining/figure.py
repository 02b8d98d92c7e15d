"""SVG picture of a layer: the grid of channel pairs, and one element of each result as a sum.

The picture draws a Scene; module scene defines its planes and directions.  Layers with one or three
spatial axes also get a strip for each axis, whose lines connect the inputs of each window to its
output.  The sign LEFT_OUT replaces positions that are not drawn, and a line of text gives the drawn
positions and the size of the axis.  Lengths are in pixels.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyconv.explaining import scene, shapes, terms, transposed
from cupyconv.explaining.counts import input_counts, visible
from cupyconv.explaining.scene import PAD, Direction, Scene, cut_text
from cupyconv.explaining.shapes import the
from cupyconv.explaining.terms import Element
from cupyconv.explaining.values import short
from cupyconv.markup import WIDTH
from cupyconv.problem import ConvAxis, ConvProblem, counted
from cupyconv.svg import Canvas, themed

if TYPE_CHECKING:
    from cupyconv.explaining.maps import TermMap

CELL = 28
"""Side of a cell."""

MARGIN = 28

GAP = 46
"""Distance between planes, and between parts of the picture."""

CHARACTER = 6.3
"""Largest width of a character in a plain line."""

LEFT_OUT, UNKNOWN = "…", "?"
"""Signs for left-out positions, and for an unknown value."""

MOST_IN_STRIP = 30
"""Largest number of cells along an axis of a strip or map (hand-set).

Only both ends of a longer axis are drawn.  A strip may have more cells to show its marked window.
"""

MOST_FOR_WINDOW = 48
"""Largest number of cells, from the start of a strip to the end of its marked window, for which all
of these cells are drawn (hand-set)."""

_CLASS = "cupyconv-figure"


@cache
def _style() -> str:
    """Return the CSS of a picture, in which selectors do not match other elements of a page.

    A separate file follows the reader's colour scheme; a picture inside a page follows the page's.
    """
    rules = re.sub(
        r"(\w+):light-dark\((.+?),(.+?)\)",
        lambda place: themed(*place.groups()),
        Path(__file__).with_name("figure.css").read_text(encoding="utf-8"),
    )
    selectors = (f"\n.{_CLASS} {rule}" for rule in rules.splitlines())
    return f".{_CLASS}:root{{color-scheme:light dark}}{''.join(selectors)}"


_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 6L6 0" class="hatch"/></pattern></defs>'
)

_MARKS = ("a", "ap", "b", "r")
"""CSS classes of marked cells: first operand, its padding and zeros, second operand, result."""

RULE = 12
"""Height of the line of column numbers above a plane."""

Position = int | None
"""Position along an axis; None for left-out positions."""

Look = tuple[str, str, str] | None
"""CSS class, text and CSS style of a cell; None for the sign of left-out positions."""


def svg(
    problem: ConvProblem,
    data: Mapping[str, Any],
    title: str = "",
    element: Element | None = None,
    is_transposed: bool = False,
) -> str:
    """Return the picture as one SVG document.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        title: line above the picture.
        element: element to mark; by default, an example element of each result.
        is_transposed: whether the layer is the transposed layer that reverses the problem.

    Raises:
        ConvError: the layer is too large to draw.
    """
    drawn = scene.scene(problem, data, element, is_transposed=is_transposed)
    canvas, head = Canvas(), scene.heading(problem, is_transposed)
    lines = [head] if title else []
    lines.append(shapes.settings(problem))
    if is_transposed:
        extra = shapes.one(tuple(map(transposed.output_padding, problem.axes)))
        lines[-1] += f"; output_padding {extra}, bias of {problem.C}"
        lines.append(scene.equivalent(problem))
    canvas.text(MARGIN, MARGIN + 12, title or head, "ink title")
    top = MARGIN + 34.0
    for line in lines:
        canvas.text(MARGIN, top, line, "soft")
        top += 18
    top += 16
    if max(problem.C, problem.K) > 1:
        top = _channels(canvas, drawn, top) + GAP
    for tensor in dict.fromkeys((drawn.opened, *scene.RESULTS)):
        top = _direction(canvas, drawn, drawn.directions[tensor], top) + GAP
    top -= GAP / 2
    for text in _values(drawn):
        top = _prose(canvas, top, text)
    top += GAP / 2
    if problem.spatial_rank == 3:
        text = (
            "The three axes are drawn separately. A 3-D window covers every combination of the "
            "positions that it covers along each axis."
        )
        canvas.text(MARGIN, top, text, "ink")
        top += 30
    for axis in problem.axes if problem.spatial_rank != 2 else ():
        _strips(canvas, axis, top, drawn)
        top = canvas.height + 34
    kind = "" if is_transposed else "convolution "
    return _document(canvas, f"The {kind}{head}, and its gradients")


def _values(drawn: Scene) -> list[str]:
    """Return sentences on the origin of the values, the drawn image, and any missing values."""
    sentences = [f"Values: {drawn.source}."] if drawn.source else []
    if drawn.problem.N > 1:
        sentences.append(f"The figure shows image {drawn.image} of {drawn.problem.N:,}.")
    reasons: dict[str, list[str]] = {}
    for tensor, reason in drawn.missing.items():
        reasons.setdefault(reason, []).append(drawn.called(tensor))
    for reason, tensors in reasons.items():
        sentences.append(f"{UNKNOWN} marks omitted values of {', '.join(tensors)}. {reason}")
    return sentences


def map_svg(drawn: TermMap) -> str:
    """Return a picture of a map, with the same counts as ``TermMap.lines``.

    Of a 3-D map, the picture shows the middle slice.
    """
    above, last, share = drawn.drawn_slice
    most = max(above) * max(last) * share
    canvas = Canvas()
    canvas.text(MARGIN, MARGIN + 12, drawn.legend, "ink head")

    def look(row: int, column: int, _: object) -> Look:
        count = above[row] * last[column] * share
        text = str(count) if most < 1000 else ""
        return ("cell", text, _shade(count, most)) if count else ("zero", "", "")

    rows, columns = (visible(len(counts), MOST_IN_STRIP) for counts in (above, last))
    labels = [_numbers(rows) if len(drawn.axes) > 1 else [""], _numbers(columns)]
    _, bottom = _grid(canvas, MARGIN, MARGIN + 30, rows, columns, look, labels)
    notes = [cut_text("rows", rows, len(above)), cut_text("columns", columns, len(last))]
    shown = "; ".join(filter(None, notes))
    _prose(canvas, bottom + 18, f"{drawn.verdict}.{f' Drawn: {shown}.' if shown else ''}")
    return _document(canvas, f"{drawn.legend}: {drawn.verdict}")


def _numbers(positions: Sequence[Position]) -> list[str]:
    """Return the labels of rows or columns; padding, zeros and gaps have none."""
    return ["" if at is None or at < 0 else str(at) for at in positions]


def _document(canvas: Canvas, label: str) -> str:
    """Return the drawing as an SVG document."""
    return canvas.document(label, margin=MARGIN, style=_style(), defs=_HATCH, kind=_CLASS)


def _shade(count: int, most: int) -> str:
    """Return the fill colour of a cell: a purple that is deeper for larger counts.

    Args:
        count: number in the cell.
        most: largest number in the picture.
    """
    share = count / most if most else 0
    red, green, blue = (round(245 + (to - 245) * share) for to in (172, 152, 214))
    return f"fill:rgb({red},{green},{blue})"


def _prose(canvas: Canvas, y: float, text: str) -> float:
    """Draw a text in lines; return the base line of the next line."""
    for line in textwrap.wrap(text, WIDTH):
        canvas.text(MARGIN, y, line, "soft")
        y += 17
    return y


# -- planes ----------------------------------------------------------------------------------------


def _cell(canvas: Canvas, x: float, y: float, look: Look) -> None:
    if look is None:
        canvas.text(x + CELL / 2, y + CELL / 2 + 3, LEFT_OUT, "soft in")
        return
    kind, text, style = look
    canvas.rect(x, y, CELL, CELL, kind, style=style)
    if text:
        # Text on the shades of a map is dark, because the shades are light in both schemes.
        ink = "fill:#1f2933" if style else ""
        size = "small" if len(text) < 3 else "tiny" if len(text) < 6 else "least"
        shade = "light" if kind == "r" else "ink"
        middle = x + CELL / 2, y + CELL / 2 + 3.5
        canvas.text(*middle, text, f"{shade} {size} in", style=ink)


def _grid(
    canvas: Canvas,
    left: float,
    top: float,
    rows: Sequence[Position],
    columns: Sequence[Position],
    look: Callable[[int, int, tuple[int, int]], Look],
    labels: Sequence[Sequence[str]],
) -> tuple[float, float]:
    """Draw a grid of cells with labels, and dots for left-out rows and columns.

    Args:
        canvas: the drawing.
        left, top: upper left corner of the grid and its column labels.
        rows, columns: drawn positions of the two axes.
        look: function that returns the look of a cell from its position, and from its row and
            column in the drawing.
        labels: texts beside the rows, and texts above the columns.

    Returns:
        right and bottom edge of the grid.
    """
    marked = []  # draw marked cells last, so that no other cell covers their borders
    top += RULE
    for i, text in enumerate(labels[0]):
        if text:
            canvas.text(left - 4, top + i * CELL + CELL / 2 + 3, text, "soft rule end")
    for j, text in enumerate(labels[1]):
        if text:
            canvas.text(left + j * CELL + CELL / 2, top - 4, text, "soft rule in")
    for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
        drawn = None if row is None or column is None else look(row, column, (i, j))
        cell = left + j * CELL, top + i * CELL, drawn
        if drawn and drawn[0] in _MARKS:
            marked.append(cell)
        else:
            _cell(canvas, *cell)
    for cell in marked:
        _cell(canvas, *cell)
    right, bottom = left + len(columns) * CELL, top + len(rows) * CELL
    canvas.reach(right, bottom)
    return right, bottom


def _direction(canvas: Canvas, drawn: Scene, direction: Direction, top: float) -> float:
    """Draw the planes of the chosen pair of channels, with one element of the result as a sum.

    Returns:
        bottom edge of the drawing.
    """
    k, c, at = drawn.k, drawn.c, direction.at
    index = (*drawn.index(direction.tensor, k, c), *at)
    name = terms.indexed(drawn.called(direction.tensor), index)
    pass_ = direction.pass_
    canvas.text(MARGIN, top, pass_.title, "ink head")
    count = prod(meeting.count for meeting in direction.here)
    first, second = map(drawn.called, pass_.operands)
    each = f" for each of {counted(direction.terms, pass_.noun)}" if direction.terms > 1 else ""
    text = (
        f"{name} (inverted colours) is the sum of {terms.counted_large(count, 'product')}{each}: "
        f"the marked values of {first} and {second} are multiplied pair by pair."
    )
    values = drawn.plane(direction.tensor, k, c)
    if values is not None:
        text += f" cupyconv.{pass_.function} gives {scene.plain(values[at]):.6g}."
    if direction.note:
        text += f" {direction.note}"
    top = _prose(canvas, top + 18, text) + 9
    left, bottom = float(MARGIN), top
    cuts = [
        scene.cuts(drawn.problem, tensor, places)
        for tensor, places in zip(direction.tensors, direction.planes, strict=True)
    ]
    under = top + 14 * max(map(len, cuts))
    for number, sign in enumerate(("", "*", "→")):
        if sign:
            canvas.text(left - GAP / 2 - 8, under + RULE + 8 + CELL * 0.7, sign, "ink head")
        for line, text in enumerate(cuts[number], 1):
            canvas.text(left, top + 14 * line, text, "soft")
        end, lower = _plane(canvas, drawn, direction, number, left, top, under)
        wide = CHARACTER * max(map(len, cuts[number]), default=0)
        left = max(end, left + 90, left + wide) + GAP
        bottom = max(bottom, lower)
    return bottom


def _plane(
    canvas: Canvas,
    drawn: Scene,
    direction: Direction,
    number: int,
    left: float,
    top: float,
    under: float,
) -> tuple[float, float]:
    """Draw a plane of an operand or of the result, and mark the terms of the chosen element.

    Args:
        canvas: the drawing.
        drawn: the scene.
        direction: the result that is drawn, with its operands.
        number: place of the plane: 0 first operand, 1 second operand, 2 result.
        left: left edge of the plane.
        top: base line of the plane's name.
        under: base line of the last line of text above the cells.

    Returns:
        right and bottom edge of the plane.
    """
    places, at = direction.planes[number], direction.at
    tensor, k, c = direction.tensors[number], drawn.k, drawn.c
    here = direction.here
    if number == 2:
        parts = [{place} for place in at]
    else:
        parts = [{pair[number] for pair in meeting.pairs} for meeting in here]
    outer = tuple(min(part, default=0) for part in parts[:-2])  # in 3-D, the slice that is drawn
    rank = min(len(places), 2)  # axes of the drawing
    rows: Sequence[Position] = places[-2] if rank > 1 else (0,)
    columns = places[-1]
    below = [meeting.under for meeting in here[-2:]] if number == 0 else []
    values = drawn.plane(tensor, k, c)
    note = ", flipped" if direction.pass_.flipped and number == 1 else ""
    slices = f" at {','.join(map(str, outer))}" if outer else ""
    name = f"{drawn.called(tensor)}[{drawn.key(tensor, k, c)}]"
    canvas.text(left, top, f"{name}{slices}{note}", "ink")

    def look(row: int, column: int, cell: tuple[int, int]) -> Look:
        window = bool(below) and all(at in u for at, u in zip(cell[-rank:], below, strict=True))
        if row < 0 or column < 0:
            kind = "pad" if PAD in (row, column) else "zero"
            return "ap" if window else kind, "", ""
        position = (row, column)[-rank:]
        marked = all(at in part for at, part in zip(position, parts[-2:], strict=True))
        text = UNKNOWN if values is None else short(scene.plain(values[(*outer, *position)]))
        return ("a", "b", "r")[number] if marked else "cell", text, ""

    labels = [_numbers(rows) if rank > 1 else [""], _numbers(columns)]
    return _grid(canvas, left, under + 8, rows, columns, look, labels)


# -- channels --------------------------------------------------------------------------------------


def _channels(canvas: Canvas, drawn: Scene, top: float) -> float:
    """Draw dw as an outer product of the channels of x and dy; return the bottom edge."""
    problem, k, c = drawn.problem, drawn.k, drawn.c
    x, dy, y, dx = map(drawn.called, ("x", "dy", "y", "dx"))
    title = f"Channels: each slice of dw comes from one channel of {x} and one of {dy}"
    canvas.text(MARGIN, top, title, "ink head")
    own = c % drawn.group_channels
    filters, channels = drawn.group_filters, drawn.group_channels
    values = shapes.sized(problem.filter_sizes, "value")
    pairs = problem.K * channels
    where = " in its group" if problem.groups > 1 else ""
    text = (
        f"dw[{k},{own}] has {values}, which come only from channel {c} of {x} and channel {k} of "
        f"{dy}. {counted(problem.K, 'channel')} of {dy} times {counted(channels, 'channel')} of "
        f"{x} give {terms.counted_large(pairs, 'slice')}: nothing is tiled, broadcast or averaged. "
        f"{y}[k] sums along its row, over {the(channels, 'channel')} of {x}{where}. "
        f"{dx}[c] sums down its column, over {the(filters, 'filter')}{where}."
    )
    if problem.groups > 1:
        text += f" The {problem.groups} groups are separate blocks of the grid."
    top = _prose(canvas, top + 18, text) + 12
    down, across = drawn.filters, drawn.channels
    left, below = MARGIN + 64.0, top + CELL + 14 - RULE

    def look(row: int, column: int, _: object) -> Look:
        if not drawn.meet(row, column):
            return "zero", "", ""
        return "r" if (row, column) == (k, c) else "cell", f"{row},{column % channels}", ""

    def head(channel: Position, chosen: int, mark: str) -> Look:
        if channel is None:
            return None
        return mark if channel == chosen else "cell", str(channel), ""

    for j, channel in enumerate(across):
        _cell(canvas, left + j * CELL, top, head(channel, c, "a"))
    for i, channel in enumerate(down):
        _cell(canvas, left - CELL - 14, below + RULE + i * CELL, head(channel, k, "b"))
    empty = [[""] * len(down), [""] * len(across)]
    end, bottom = _grid(canvas, left, below, down, across, look, empty)
    canvas.text(end + 12, top + 18, f"channels of {x}", "ink")
    canvas.text(end + 12, below + RULE + 18, "dw[k,c]", "ink")
    canvas.text(MARGIN, bottom + 16, f"channels of {dy}", "ink")
    cuts = [cut_text("k", down, problem.K), cut_text(f"c of {x}", across, problem.C)]
    if any(cuts):
        bottom += 16
        canvas.text(MARGIN, bottom + 16, f"Drawn: {'; '.join(filter(None, cuts))}", "soft")
    return bottom + 16


# -- one axis --------------------------------------------------------------------------------------


def _strips(canvas: Canvas, axis: ConvAxis, top: float, drawn: Scene) -> None:
    """Draw strips of x, y and dx along an axis, with a line for each product of a drawn window.

    A line from x to y is a product of the forward pass. A line from y to dx is the same product in
    the backward pass.
    """
    x_, y, dy, dx = map(drawn.called, ("x", "y", "dy", "dx"))
    sizes = (axis.output, axis.input) if drawn.is_transposed else (axis.input, axis.output)
    h, _, p = terms.letters(axis)
    chosen = min(1, axis.output - 1)  # an output near the border
    needed = chosen * axis.stride + axis.effective_filter
    places = [
        None if at is None else at - axis.pad_before
        for at in visible(
            axis.padded_input, MOST_IN_STRIP, needed if needed <= MOST_FOR_WINDOW else 0
        )
    ]
    at = {place: MARGIN + 60 + i * CELL for i, place in enumerate(places) if place is not None}
    title = (
        f"Axis {axis.name}: {counted(sizes[0], 'input')}, {counted(axis.filter, 'tap')}, "
        f"{counted(sizes[1], 'output')}; {terms.position_text(axis)}"
    )
    canvas.text(MARGIN, top, title, "ink head")
    x_top, y_top, dx_top = (top + 20 + row * CELL for row in (0, 4, 8))
    whole = {}  # windows that are drawn whole, by output
    for output in range(axis.output):
        window = scene.window(axis, output)
        first, end = window[0], window[-1]
        if first in at and end in at and at[end] - at[first] == CELL * (end - first):
            whole[output] = window
    for label, strip in ((f"{x_}[{h}]", x_top), (f"{y}, {dy}[{p}]", y_top), (f"{dx}[{h}]", dx_top)):
        canvas.text(MARGIN, strip + 15, label, "ink")
    read, under = input_counts(axis), scene.window(axis, chosen)
    most = max(read)
    for index, place in enumerate(places):
        x = MARGIN + 60 + index * CELL
        if place is None:
            for strip in (x_top, *([y_top] if len(whole) < axis.output else []), dx_top):
                canvas.text(x + CELL / 2, strip + 15, LEFT_OUT, "soft in")
            continue
        inside = 0 <= place < axis.input
        kind = ("a" if inside else "ap") if place in under else ("cell" if inside else "pad")
        fits = place < 10_000 or place == axis.input - 1
        _cell(canvas, x, x_top, (kind, str(place) if inside and fits else "", ""))
        if inside and (count := read[place]):
            _cell(canvas, x, dx_top, ("cell", str(count), _shade(count, most)))
        elif inside:
            _cell(canvas, x, dx_top, ("zero", "", ""))
    for output, window in whole.items():
        middle = (at[window[0]] + at[window[-1]]) / 2
        kind = "on" if output == chosen else "link"
        for place in window:
            if 0 <= place < axis.input:
                center = at[place] + CELL / 2
                canvas.line(center, x_top + CELL, middle + CELL / 2, y_top, kind)
                canvas.line(middle + CELL / 2, y_top + CELL, center, dx_top, kind)
        _cell(canvas, middle, y_top, ("a" if output == chosen else "cell", str(output), ""))
    text = f"{dx} has {counted(axis.input, 'element')}, like {x_}; a cell shows how many lines "
    text += "reach it"
    if not all(read) and drawn.is_transposed:
        text += ". No input reaches the hatched cells, so y is the bias there"
    elif not all(read):
        text += ". No window reads the hatched cells, so their gradient is zero"
    inputs = [place for place in places if place is None or place < axis.input]
    cuts = [cut_text(h, inputs, axis.input), cut_text(p, [*whole], axis.output) if whole else ""]
    if any(cuts):
        text += f". Drawn: {'; '.join(filter(None, cuts))}"
    bottom = _prose(canvas, dx_top + CELL + 18, f"{text}.")
    if not whole:
        text = f"A window spans {axis.effective_filter:,} inputs, which is too wide to draw."
        bottom = _prose(canvas, bottom, text)
    if len(axis.valid_input_sizes) > 1:
        text = shapes.sizes_that_give(axis.valid_input_sizes, axis.output)
        if drawn.is_transposed:
            text = text.replace("input size", "output size").replace("give output", "fit input")
        canvas.text(MARGIN, bottom, f"{text[0].upper()}{text[1:]}.", "soft")
