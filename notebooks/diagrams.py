"""Pictures of the channels that give each slice of dw, and of the inputs that windows read.

All sizes, windows and paddings come from a ConvProblem, so a picture follows the library's rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.explaining.scene import window
from cupyconv.problem import ConvAxis, ConvProblem
from cupyconv.svg import Canvas, themed

__all__ = ["pairs", "windows"]

_KIND = "cupyconv-diagram"
_EDGE = themed("stroke", "#9aa5b1", "#66717e")
_ORANGE, _TEAL = ("#9a5710", "#fbd38d"), ("#0f766e", "#7fd6c6")
_INK, _PAPER = ("#1f2933", "#e8ecf1"), ("#fff", "#14181d")
_STYLE = "".join(
    f".{_KIND} {selector}{{{rule}}}"
    for selector, rule in {
        "text": f"font:12px system-ui,sans-serif;{themed('fill', *_INK)}",
        ".paper": themed("fill", *_PAPER),
        ".small": "font-size:10px",
        ".head": "font-weight:bold",
        ".in": "text-anchor:middle",
        ".end": "text-anchor:end",
        ".light": themed("fill", *_PAPER),
        ".cell": f"{themed('fill', '#f4f6f8', '#242b33')};{_EDGE}",
        ".pad": f"fill:none;{_EDGE};stroke-dasharray:3 2",
        ".unread": f"{themed('fill', '#e3342f33', '#e3342f66')};{_EDGE}",
        ".x": f"{themed('fill', '#fbd38d', '#7a4a10')};{themed('stroke', *_ORANGE)}",
        ".dy": f"{themed('fill', '#a7e3d6', '#12564e')};{themed('stroke', *_TEAL)}",
        ".dw": f"{themed('fill', *_INK)};{themed('stroke', *_PAPER)}",
        ".cross": _EDGE,
        ".window": themed("stroke", *_TEAL),
        ".tap": themed("fill", *_TEAL),
    }.items()
)
"""CSS rules with the colours of the library's own figures: x orange, dy green, dw inverted."""


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


# -- channels --------------------------------------------------------------------------------------

_ROWS = 4
"""Largest number of channels of dy that are drawn; dots replace the others (hand-set)."""


def pairs(problem: ConvProblem, k: int = 1, c: int = 2) -> str:
    """Draw which channels of x and dy give each slice of dw, and mark the slice ``dw[k,c]``.

    Args:
        problem: a layer with one group and two spatial axes, channels first.
        k: channel of dy of the marked slice.
        c: channel of x of the marked slice.
    """
    filters, channels = problem.filter_shape[:2]
    taps, pixels, outputs = (
        shape[2:] for shape in (problem.filter_shape, problem.input_shape, problem.output_shape)
    )
    cell, high, left, top = 74.0, 64.0, 128.0, 74.0
    canvas = Canvas()
    canvas.text(left, 18, f"x: {channels} channels of {_sizes(pixels)}", "head")
    canvas.text(8, top - 14, f"dy: {filters} channels", "head")
    canvas.text(8, top + 2, f"of {_sizes(outputs)}", "head")
    for column in range(channels):
        kind = "x" if column == c else "cell"
        canvas.rect(left + column * cell + 14, 28, 36, 36, kind)
        canvas.text(left + column * cell + 32, 50, f"x[{column}]", "small in")
    drawn = [*range(min(filters, _ROWS - 1)), filters - 1] if filters > _ROWS else range(filters)
    y = top
    for place, row in enumerate(drawn):
        if place and row != drawn[place - 1] + 1:
            for at in (left - 30, *(left + column * cell + 32 for column in range(channels))):
                canvas.text(at, y + 14, "...", "in")
            y += 26
        canvas.rect(left - 48, y + 10, 36, 36, "dy" if row == k else "cell")
        canvas.text(left - 30, y + 32, f"dy[{row}]", "small in")
        for column in range(channels):
            _slice(canvas, left + column * cell + 12, y + 8, taps, (row, column) == (k, c))
            canvas.text(left + column * cell + 32, y + 60, f"dw[{row},{column}]", "small in")
        y += high
    canvas.text(
        8,
        y + 26,
        f"dw[{k},{c}] = correlate(x[{c}], dy[{k}]): {_sizes(pixels)} correlated with "
        f"{_sizes(outputs)} gives {_sizes(taps)}.",
    )
    canvas.text(
        8,
        y + 44,
        f"{filters} x {channels} pairs give dw, {_sizes(problem.filter_shape)}. Each slice "
        "depends on one pair only.",
    )
    label = (
        f"Each channel of x is correlated with each channel of dy: {filters} x {channels} slices"
    )
    return canvas.document(label, margin=8, style=_STYLE, kind=_KIND)


def _slice(canvas: Canvas, x: float, y: float, taps: Sequence[int], marked: bool) -> None:
    """Draw a slice of dw, one square per element, in an area of 40 by 40 pixels."""
    rows, columns = taps
    size = 40 / max(taps)
    for row in range(rows):
        for column in range(columns):
            kind = "dw" if marked else "cell"
            canvas.rect(x + column * size, y + row * size, size, size, kind)


# -- sizes -----------------------------------------------------------------------------------------

_CELL = 30.0
"""Width of the cell of one input, in pixels (hand-set)."""


def windows(problems: Sequence[ConvProblem]) -> str:
    """Draw the windows of each layer along its first axis, for its input size and the next size."""
    canvas = Canvas()
    y = 18.0
    for problem in problems:
        axis = problem.axes[0]
        rules = [axis.padding_mode.upper(), f"{axis.filter} taps", f"stride {axis.stride}"]
        if axis.dilation > 1:
            rules.append(f"dilation {axis.dilation}")
        canvas.text(8, y, ", ".join(rules), "head")
        ends = []
        for side, size in enumerate((axis.input, axis.input + 1)):
            ends.append(_axis(canvas, 8 + side * 300, y, axis.of_input(size)))
        y = max(ends) + 30
    label = "Windows of layers along one axis, for two input sizes"
    return canvas.document(label, margin=8, style=_STYLE, kind=_KIND)


def _axis(canvas: Canvas, left: float, top: float, axis: ConvAxis) -> float:
    """Draw the inputs of an axis, and below them the taps of each window; return the bottom y."""
    taps = [window(axis, output) for output in range(axis.output)]
    read = {place for places in taps for place in places}
    y = top + 30
    noun = "value" if axis.output == 1 else "values"
    canvas.text(left, y - 8, f"input size {axis.input}: dy has {axis.output} {noun}")
    first = left + _CELL * axis.pad_before
    for place in range(-axis.pad_before, axis.input + axis.pad_after):
        inside = 0 <= place < axis.input
        kind = ("x" if place in read else "unread") if inside else "pad"
        canvas.rect(first + place * _CELL, y, _CELL, 24, kind)
        if kind == "unread":  # a cross, so that the cell stands out without colours
            canvas.line(first + place * _CELL, y + 24, first + (place + 1) * _CELL, y, "cross")
        canvas.text(
            first + (place + 0.5) * _CELL, y + 16, str(place) if inside else "0", "small in"
        )
    for output, places in enumerate(taps):
        y += 17
        middle = y + 17
        ends = [first + (place + 0.5) * _CELL for place in (places[0], places[-1])]
        canvas.line(ends[0], middle, ends[1], middle, "window", stroke_width=2)
        for place in places:
            canvas.shape("circle", cx=first + (place + 0.5) * _CELL, cy=middle, r=4, kind="tap")
        canvas.text(ends[1] + 12, middle + 4, f"dy[{output}]", "small")
    return y + 24
