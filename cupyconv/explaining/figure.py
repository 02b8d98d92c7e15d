"""A picture of a layer: what each output reads, and what flows back to each input and each tap.

Two spatial axes are drawn as grids, one as strips with a line for every product.  Three are drawn
axis by axis, which loses nothing: a window is the product of its extents along the axes.  Of long
axes both ends are drawn, the first as far as the window that is shown.  Lengths are in pixels.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from cupyconv.errors import ConvError
from cupyconv.explaining import adjoints, maps, shapes, terms
from cupyconv.explaining.maps import TermMap
from cupyconv.explaining.shapes import counted
from cupyconv.explaining.terms import LETTERS
from cupyconv.markup import escape, visible
from cupyconv.problem import ConvAxis, ConvProblem, shape_text

CELL = 22
MARGIN = 28
GAP = 46

MOST_CELLS = 13
"""Cells of a grid along an axis; longer ones are drawn at both ends."""

MOST_IN_STRIP = 30

MOST_FOR_WINDOW = 24
"""Cells that are drawn at the beginning of an axis if a window needs them, twice that in strips."""

PROSE = 104
"""Characters of a line of text."""

MOST_DRAWN = 100_000
"""Positions of an axis beyond which there is no picture: even its ends would not be typical."""

STYLE = """
.paper{fill:#fff}.ink{fill:#1f2933}.soft{fill:#5f6b7a}
text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}
.title{font-size:17px;font-weight:bold}.head{font-size:14px;font-weight:bold}
.small{font-size:10px}.tiny{font-size:8px}.rule{font-size:9px}
.in{text-anchor:middle}.end{text-anchor:end}
.cell{fill:#f4f6f8;stroke:#9aa5b1;stroke-width:1}
.pad{fill:#fff;stroke:#9aa5b1;stroke-width:1;stroke-dasharray:3 2}
.zero{fill:url(#hatch);stroke:#9aa5b1;stroke-width:1}
.a{fill:#8ec5ec;stroke:#14598f;stroke-width:1.5}.b{fill:#f5c184;stroke:#9a5710;stroke-width:1.5}
.c{fill:#a9d8a5;stroke:#2e6b2a;stroke-width:1.5}
.ap{fill:#dceefb;stroke:#14598f;stroke-width:1.5;stroke-dasharray:3 2}
.link{stroke:#9aa5b1;stroke-width:1;fill:none}.on{stroke:#14598f;stroke-width:1.6;fill:none}
.hatch{stroke:#9aa5b1;stroke-width:1}.light{fill:#fff}
@media (prefers-color-scheme:dark){
.paper{fill:#14181d}.ink{fill:#e8ecf1}.soft{fill:#a9b4c0}
.cell{fill:#242b33;stroke:#66717e}.pad{fill:#14181d;stroke:#66717e}.zero{stroke:#66717e}
.a{fill:#1d5f92;stroke:#9dd0f5}.b{fill:#8a5216;stroke:#f5c184}.c{fill:#2f6a2b;stroke:#a9d8a5}
.ap{fill:#173147;stroke:#9dd0f5}.link,.hatch{stroke:#66717e}.on{stroke:#9dd0f5}}
""".strip()

_CLASS = "cupyconv-figure"

# Inside a page, such as a notebook, the style must reach no other element.
_SCOPED = re.sub(r"(?m)(\.[a-z]+|^text)(?=[,{])", rf".{_CLASS} \1", STYLE)

Position = int | None
"""A place along an axis; None for what is left out."""


@dataclass
class Canvas:
    """What has been drawn, and how far it reaches."""

    parts: list[str] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def text(self, x: float, y: float, text: str, kind: str = "ink") -> None:
        text = visible(text)  # as long as it is drawn
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')
        if not {"in", "end"} & set(kind.split()):
            size = 9.6 if "title" in kind else 7.8 if "head" in kind else 6.3
            self._reach(x + size * len(text), y + 4)

    def cell(self, x: float, y: float, kind: str, text: str = "", style: str = "") -> None:
        attribute = f' style="{style}"' if style else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" class="{kind}"{attribute}/>'
        )
        if text:
            # Letters stay dark on the shades of a map, which are light in both schemes.
            ink = ' style="fill:#1f2933"' if style else ""
            self.parts.append(
                f'<text x="{x + CELL / 2:g}" y="{y + CELL / 2 + 3.5:g}" '
                f'class="ink {"small" if len(text) < 4 else "tiny"} in"{ink}>'
                f"{escape(text)}</text>"
            )
        self._reach(x + CELL, y + CELL)

    def prose(self, x: float, y: float, text: str) -> float:
        """A text in as many lines as it needs; where the next one stands."""
        for line in textwrap.wrap(text, PROSE):
            self.text(x, y, line, "soft")
            y += 17
        return y

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "link") -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" class="{kind}"/>'
        )


_MARKS = ("a", "ap", "c")

RULE = 12
"""Height of the line of numbers above a grid."""

Ruler = Callable[[int], str]
"""What stands beside a row or column."""

Look = tuple[str, str, str]
"""Class, text and style of a cell."""


def svg(problem: ConvProblem, title: str = "") -> str:
    """The picture as one SVG document.

    Raises:
        ConvError: the layer is too large for its ends to say anything.
    """
    for axis in problem.axes:
        if max(axis.input, axis.filter, axis.output) > MOST_DRAWN:
            raise ConvError(
                f"a layer that is drawn must have at most {MOST_DRAWN:,} positions on an axis",
                f"it has {max(axis.input, axis.filter):,}",
                "Draw a smaller layer of the same stride and taps",
                axis=axis.name,
            )
    canvas = Canvas()
    head = (
        f"{shape_text(problem.input_shape)} * {shape_text(problem.filter_shape)} -> "
        f"{shape_text(problem.output_shape)}"
    )
    canvas.text(MARGIN, MARGIN + 12, title or head, "ink title")
    top = MARGIN + 34.0
    if title:
        canvas.text(MARGIN, top, head, "soft")
        top += 18
    canvas.text(MARGIN, top, shapes.settings(problem), "soft")
    if problem.spatial_rank == 2:
        _grids(canvas, problem, top + 34)
    else:
        if problem.spatial_rank == 3:
            top += 20
            text = (
                "Three axes, drawn one by one: a window is the product of its extents along them."
            )
            canvas.text(MARGIN, top, text, "ink")
        for axis, *letters in zip(problem.axes, *_letters(problem), strict=True):
            _strips(canvas, axis, (letters[0], letters[1], letters[2]), top + 34)
            top = canvas.height
    if max(problem.C, problem.K) > problem.groups:
        _channel_panel(canvas, problem, canvas.height + GAP)
    return _document(canvas, f"The convolution {head}, and what flows back through it")


def map_svg(drawn: TermMap) -> str:
    """The picture of how many terms reach each position; of the middle slice in 3-D."""
    *outer, last = [counts for _, counts in drawn.axes]
    share = prod(counts[len(counts) // 2] for counts in outer[:-1])
    above = outer[-1] if outer else (1,)
    most = max(above) * max(last) * share
    canvas = Canvas()
    canvas.text(MARGIN, MARGIN + 12, drawn.legend, "ink head")

    def look(i: int, j: int) -> Look:
        count = above[i] * last[j] * share
        text = str(count) if most < 1000 else ""
        return ("cell", text, _shade(count, most)) if count else ("zero", "", "")

    rows, columns = _drawn(0, len(above), MOST_IN_STRIP), _drawn(0, len(last), MOST_IN_STRIP)
    ruled = (str if outer else _unruled, str)
    _, bottom = _grid(canvas, MARGIN, MARGIN + 30, rows, columns, look, ruled)
    canvas.prose(MARGIN, bottom + 18, f"{drawn.verdict}.")
    return _document(canvas, f"{drawn.legend}: {drawn.verdict}")


def _document(canvas: Canvas, label: str) -> str:
    """What was drawn as an SVG document."""
    width, height, told = canvas.width + MARGIN, canvas.height + MARGIN, escape(label)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label="{told}" '
            f'class="{_CLASS}">',
            f"<title>{told}</title><style>{_SCOPED}</style>",
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path d="M0 6L6 0" class="hatch"/></pattern></defs>',
            f'<rect width="{width:g}" height="{height:g}" class="paper"/>',
            *canvas.parts,
            "</svg>",
            "",
        ]
    )


def _letters(problem: ConvProblem) -> tuple[str, str, str]:
    rank = problem.spatial_rank
    return LETTERS["input"][rank], LETTERS["filter"][rank], LETTERS["output"][rank]


def _drawn(start: int, size: int, room: int, needed: int = 0) -> list[Position]:
    """The positions of an axis from ``start`` on that are drawn."""
    return [None if at is None else at + start for at in maps.visible(size, room, needed)]


def _shade(count: int, most: int) -> str:
    """A fill that deepens with the count; of a colour that marks nothing else."""
    share = count / most if most else 0
    red, green, blue = (round(245 + (to - 245) * share) for to in (172, 152, 214))
    return f"fill:rgb({red},{green},{blue})"


# -- two axes --------------------------------------------------------------------------------------


def _grid(
    canvas: Canvas,
    left: float,
    top: float,
    rows: Sequence[Position],
    columns: Sequence[Position],
    look: Callable[[int, int], Look],
    ruled: tuple[Ruler, Ruler] = (str, str),
) -> tuple[float, float]:
    """Cells between the numbers of rows and columns, with a dot where some are left out.

    Returns:
        its right and its bottom end.
    """
    marked = []  # drawn last, so that their borders are whole
    top += RULE
    for i, row in enumerate(rows):
        if row is not None:
            canvas.text(left - 4, top + i * CELL + CELL / 2 + 3, ruled[0](row), "soft rule end")
    for j, column in enumerate(columns):
        if column is not None:
            canvas.text(left + j * CELL + CELL / 2, top - 4, ruled[1](column), "soft rule in")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            x, y = left + j * CELL, top + i * CELL
            if row is None or column is None:
                canvas.text(x + CELL / 2, y + CELL / 2 + 3, "·", "soft in")
                continue
            kind, text, style = look(row, column)
            if kind in _MARKS:
                marked.append((x, y, kind, text, style))
            else:
                canvas.cell(x, y, kind, text, style)
    for cell in marked:
        canvas.cell(*cell)
    return left + len(columns) * CELL, top + len(rows) * CELL


def _unruled(position: int) -> str:
    return ""


def _inside(axis: ConvAxis) -> Ruler:
    """Numbers the inputs, and not the padding around them."""
    return lambda place: str(place) if 0 <= place < axis.input else ""


def _operator(canvas: Canvas, left: float, top: float, sign: str) -> None:
    """A sign before a grid."""
    canvas.text(left - GAP / 2 - 8, top + RULE + 8 + CELL * 0.7, sign, "ink head")


def _padded(axis: ConvAxis) -> list[Position]:
    """The inputs of an axis with its padding, the window of the typical output among them."""
    window = _typical(axis) * axis.stride + axis.effective_filter
    needed = window if window <= MOST_FOR_WINDOW else 0
    return _drawn(-axis.pad_before, axis.padded_input, MOST_CELLS, needed)


def _grids(canvas: Canvas, problem: ConvProblem, top: float) -> None:
    rows, columns = problem.axes
    p, q = (_typical(axis) for axis in problem.axes)
    top = _forward_panel(canvas, rows, columns, (p, q), top) + GAP
    top = _input_panel(canvas, problem, top) + GAP
    _filter_panel(canvas, rows, columns, top)


def _typical(axis: ConvAxis) -> int:
    """An output near the border whose window is drawn: the second, if there is one."""
    return min(1, axis.output - 1)


def _forward_panel(
    canvas: Canvas, rows: ConvAxis, columns: ConvAxis, chosen: tuple[int, int], top: float
) -> float:
    p, q = chosen
    window = [
        [at * axis.stride - axis.pad_before + tap * axis.dilation for tap in range(axis.filter)]
        for axis, at in ((rows, p), (columns, q))
    ]
    canvas.text(MARGIN, top, "Forward: each output reads one window of x", "ink head")
    text = (
        f"Blue: y[{p},{q}] is the sum, over {rows.filter * columns.filter} taps and every channel, "
        "of the blue inputs times the taps of w."
    )
    top = canvas.prose(MARGIN, top + 18, text) + 9

    def input_look(h: int, w: int) -> Look:
        inside = 0 <= h < rows.input and 0 <= w < columns.input
        under = h in window[0] and w in window[1]
        return ("a" if inside else "ap") if under else ("cell" if inside else "pad"), "", ""

    ruled = _inside(rows), _inside(columns)
    end, bottom = _grid(canvas, MARGIN, top + 8, _padded(rows), _padded(columns), input_look, ruled)
    _caption(canvas, MARGIN, top, rows, columns)
    left = end + GAP
    canvas.text(left, top, f"w {rows.filter}x{columns.filter}", "ink")
    _operator(canvas, left, top, "*")
    end, lower = _whole(canvas, left, top, (rows.filter, columns.filter), lambda r, s: "b")
    bottom = max(bottom, lower)
    left = end + GAP
    _operator(canvas, left, top, "→")
    canvas.text(left, top, f"y {rows.output}x{columns.output}", "ink")
    _, lower = _whole(
        canvas,
        left,
        top,
        (rows.output, columns.output),
        lambda i, j: "a" if (i, j) == (p, q) else "cell",
    )
    return max(bottom, lower)


def _whole(
    canvas: Canvas,
    left: float,
    top: float,
    sizes: tuple[int, int],
    look: Callable[[int, int], str | Look],
) -> tuple[float, float]:
    """The grid of a tensor without padding under its caption."""

    def full(i: int, j: int) -> Look:
        found = look(i, j)
        return (found, "", "") if isinstance(found, str) else found

    rows, columns = (_drawn(0, size, MOST_CELLS) for size in sizes)
    return _grid(canvas, left, top + 8, rows, columns, full)


def _caption(canvas: Canvas, left: float, top: float, rows: ConvAxis, columns: ConvAxis) -> None:
    padded = rows.pad_before + rows.pad_after + columns.pad_before + columns.pad_after
    text = f"x {rows.input}x{columns.input}{', padding dashed' if padded else ''}"
    canvas.text(left, top, text, "ink")


def _input_panel(canvas: Canvas, problem: ConvProblem, top: float) -> float:
    rows, columns = problem.axes
    told = adjoints.input_gradient_axes(problem)
    counts = [maps.input_counts(axis) for axis in problem.axes]
    most = max(counts[0]) * max(counts[1])
    # Of the inputs that are drawn near the border, the one that most comes back to.
    h, w = (max(range(min(len(c), MOST_CELLS // 2)), key=c.__getitem__) for c in counts)
    canvas.text(
        MARGIN, top, "Back to x: each input collects from every window that read it", "ink head"
    )
    spread = max(problem.stride) > 1
    text = "dy spread by the stride, zeros hatched" if spread else "dy"
    text = (
        f"{text}, padded and correlated with the flipped w, gives dx: as many numbers as x has. "
        f"Blue: dx[{h},{w}], the dy it is made of and the taps that these meet."
    )
    top = canvas.prose(MARGIN, top + 18, text) + 9
    meet = [
        terms.input_terms(axis, at, ("h", "r", "p"))
        for axis, at in zip(problem.axes, (h, w), strict=True)
    ]

    def place(number: int, axis: int) -> int | None:
        """Which output stands at a place of the spread dy; None at zeros and in the padding."""
        size, step = told[axis].rule.input, told[axis].spread
        return number // step if 0 <= number < size and number % step == 0 else None

    def spread_look(i: int, j: int) -> Look:
        inside = 0 <= i < told[0].rule.input and 0 <= j < told[1].rule.input
        if not inside:
            return "pad", "", ""
        p, q = place(i, 0), place(j, 1)
        if p is None or q is None:
            return "zero", "", ""
        return "a" if p in meet[0].first and q in meet[1].first else "cell", "", ""

    def drawn(axis: int, chosen: int) -> list[Position]:
        before, after = told[axis].padding
        window = chosen + problem.axes[axis].effective_filter
        needed = window if window <= MOST_FOR_WINDOW else 0
        return _drawn(-before, told[axis].rule.input + before + after, MOST_CELLS, needed)

    def numbered(axis: int) -> Ruler:
        return lambda number: "" if (at := place(number, axis)) is None else str(at)

    canvas.text(
        MARGIN, top, f"dy {rows.output}x{columns.output}{', spread' if spread else ''}", "ink"
    )
    ruled = numbered(0), numbered(1)
    end, bottom = _grid(canvas, MARGIN, top + 8, drawn(0, h), drawn(1, w), spread_look, ruled)
    left = end + GAP
    _operator(canvas, left, top, "*")
    canvas.text(left, top, "w flipped", "ink")

    def tap_look(i: int, j: int) -> Look:
        r, s = rows.filter - 1 - i, columns.filter - 1 - j
        return "a" if r in meet[0].second and s in meet[1].second else "b", "", ""

    end, lower = _grid(
        canvas,
        left,
        top + 8,
        _drawn(0, rows.filter, MOST_CELLS),
        _drawn(0, columns.filter, MOST_CELLS),
        tap_look,
        (lambda i: str(rows.filter - 1 - i), lambda j: str(columns.filter - 1 - j)),
    )
    bottom = max(bottom, lower)
    left = max(end, left + 60) + GAP
    _operator(canvas, left, top, "→")

    def gradient_look(i: int, j: int) -> Look:
        count = counts[0][i] * counts[1][j]
        if (i, j) == (h, w):
            return "a", str(count), ""
        return ("cell", str(count), _shade(count, most)) if count else ("zero", "", "")

    name = f"dx {rows.input}x{columns.input}: how many dy reach each, per filter"
    canvas.text(left, top, name, "ink")
    _, lower = _whole(canvas, left, top, (rows.input, columns.input), gradient_look)
    if not all(map(all, counts)):
        text = "Hatched inputs are under no window: their gradient is zero."
        canvas.text(left, lower + 16, text, "soft")
        lower += 20
    return max(bottom, lower)


def _filter_panel(canvas: Canvas, rows: ConvAxis, columns: ConvAxis, top: float) -> None:
    r, s = rows.filter // 2, columns.filter // 2
    meet = [terms.tap_terms(axis, tap, ("h", "r", "p")) for axis, tap in ((rows, r), (columns, s))]
    counts = [maps.tap_counts(axis) for axis in (rows, columns)]
    least, most = (edge(counts[0]) * edge(counts[1]) for edge in (min, max))
    canvas.text(
        MARGIN, top, "Back to w: each tap pairs every output with the input it read", "ink head"
    )
    count = counts[0][r] * counts[1][s]
    text = (
        f"Green: dw[{r},{s}] is the sum of {terms.counted_large(count, 'product')}, each a green x "
        "times the green dy whose window it lies in; the same for every pair of a channel of x "
        "and one of dy."
    )
    top = canvas.prose(MARGIN, top + 18, text) + 9

    def input_look(h: int, w: int) -> Look:
        inside = 0 <= h < rows.input and 0 <= w < columns.input
        read = h in meet[0].second and w in meet[1].second
        return "c" if read else "cell" if inside else "pad", "", ""

    _caption(canvas, MARGIN, top, rows, columns)
    ruled = _inside(rows), _inside(columns)
    end, _ = _grid(canvas, MARGIN, top + 8, _padded(rows), _padded(columns), input_look, ruled)
    left = end + GAP
    _operator(canvas, left, top, "*")
    canvas.text(left, top, f"dy {rows.output}x{columns.output}", "ink")
    end, _ = _whole(
        canvas,
        left,
        top,
        (rows.output, columns.output),
        lambda i, j: "c" if i in meet[0].first and j in meet[1].first else "cell",
    )
    left = max(end, left + 60) + GAP
    _operator(canvas, left, top, "→")

    def tap_look(i: int, j: int) -> Look:
        number = counts[0][i] * counts[1][j]
        text = str(number) if most < 1000 else ""
        if (i, j) == (r, s):
            return "c", text, ""
        return ("cell", text, _shade(number, most)) if number else ("zero", "", "")

    span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    what = f"sums of {span} product{'' if most == 1 else 's'}"
    canvas.text(left, top, f"dw {rows.filter}x{columns.filter}: {what}", "ink")
    _whole(canvas, left, top, (rows.filter, columns.filter), tap_look)


# -- channels --------------------------------------------------------------------------------------


def _channel_panel(canvas: Canvas, problem: ConvProblem, top: float) -> None:
    """Which channels of x and dy make which part of dw: an outer product."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    k, c = min(2, filters - 1), min(1, channels - 1)
    canvas.text(MARGIN, top, "Channels: one of x and one of dy make each part of dw", "ink head")
    taps = shape_text(problem.filter_sizes)
    text = (
        f"Green: the {taps} numbers of dw[{k},{c}] come from channel {c} of x and channel {k} of "
        f"dy, and from no other. {counted(filters, 'channel')} of dy times {channels} of x are "
        f"{terms.counted_large(filters * channels, 'such part')}: nothing is tiled, broadcast or "
        "averaged."
    )
    if problem.groups > 1:
        text += f" This is the first of {problem.groups} groups, which never mix."
    top = canvas.prose(MARGIN, top + 18, text) + 12
    down, across = _drawn(0, filters, MOST_CELLS), _drawn(0, channels, MOST_CELLS)
    left, below = MARGIN + 64.0, top + CELL + 14 - RULE
    for j, channel in enumerate(across):
        if channel is not None:
            kind = "c" if channel == c else "cell"
            canvas.cell(left + j * CELL, top, kind, str(channel))
    for i, channel in enumerate(down):
        if channel is not None:
            kind = "c" if channel == k else "cell"
            canvas.cell(left - CELL - 14, below + RULE + i * CELL, kind, str(channel))
    end, bottom = _grid(
        canvas,
        left,
        below,
        down,
        across,
        lambda i, j: ("c" if (i, j) == (k, c) else "cell", f"{i},{j}", ""),
        (_unruled, _unruled),
    )
    canvas.text(end + 12, top + 15, "channels of x", "ink")
    canvas.text(end + 12, below + RULE + 15, "dw[k,c]", "ink")
    canvas.text(MARGIN, bottom + 16, "channels of dy", "ink")


# -- one axis --------------------------------------------------------------------------------------


def _strips(canvas: Canvas, axis: ConvAxis, letters: tuple[str, str, str], top: float) -> None:
    """x above y with a line for each product, dx below as what comes back along them."""
    h, r, p = letters
    chosen = _typical(axis)
    window = chosen * axis.stride + axis.effective_filter
    needed = window if window <= 2 * MOST_FOR_WINDOW else 0
    places = _drawn(-axis.pad_before, axis.padded_input, MOST_IN_STRIP, needed)
    at = {place: MARGIN + 60 + i * CELL for i, place in enumerate(places) if place is not None}
    counts = maps.input_counts(axis)
    most = max(counts)
    canvas.text(
        MARGIN,
        top,
        f"Axis {axis.name}: {axis.input} inputs, {counted(axis.filter, 'tap')}, "
        f"{counted(axis.output, 'output')}; {terms.position_text(axis, h, r, p)}",
        "ink head",
    )
    x_top, y_top, dx_top = top + 20, top + 20 + 4 * CELL, top + 20 + 8 * CELL
    under = {
        chosen * axis.stride - axis.pad_before + tap * axis.dilation for tap in range(axis.filter)
    }
    for label, strip in ((f"x[{h}]", x_top), (f"y, dy[{p}]", y_top), (f"dx[{h}]", dx_top)):
        canvas.text(MARGIN, strip + 15, label, "ink")
    for index, place in enumerate(places):
        x = MARGIN + 60 + index * CELL
        if place is None:
            for strip in (x_top, dx_top):
                canvas.text(x + CELL / 2, strip + 15, "·", "soft in")
            continue
        inside = 0 <= place < axis.input
        kind = ("a" if inside else "ap") if place in under else ("cell" if inside else "pad")
        fits = place < 10_000 or place == axis.input - 1
        canvas.cell(x, x_top, kind, str(place) if inside and fits else "")
        if not inside:
            continue
        count = counts[place]
        if count:
            canvas.cell(x, dx_top, "cell", str(count), _shade(count, most))
        else:
            canvas.cell(x, dx_top, "zero")
    whole = 0
    for output in range(axis.output):
        first = output * axis.stride - axis.pad_before
        end = first + axis.effective_filter - 1
        if first not in at or end not in at or at[end] - at[first] != CELL * (end - first):
            continue  # its window reaches into what is left out
        whole += 1
        taps = [first + tap * axis.dilation for tap in range(axis.filter)]
        middle = (at[first] + at[end]) / 2
        for place in taps:
            inside = 0 <= place < axis.input
            kind = "on" if output == chosen and inside else "link"
            center = at[place] + CELL / 2
            if inside:
                canvas.line(center, x_top + CELL, middle + CELL / 2, y_top, kind)
                canvas.line(middle + CELL / 2, y_top + CELL, center, dx_top, kind)
        canvas.cell(middle, y_top, "a" if output == chosen else "cell", str(output))
    text = f"dx has {counted(axis.input, 'number')}, as x has; in each, how many lines reach it"
    if not all(counts):
        text += ". Hatched: no window reads it, so its gradient is zero"
    bottom = canvas.prose(MARGIN, dx_top + CELL + 18, f"{text}.")
    if not whole:
        text = f"A window spans {axis.effective_filter:,} inputs: none fits whole into the picture."
        bottom = canvas.prose(MARGIN, bottom, text)
    sizes = axis.valid_input_sizes
    if len(sizes) > 1:
        text = f"Inputs of {sizes[0]} to {sizes[-1]} all give {counted(axis.output, 'output')}."
        canvas.text(MARGIN, bottom, text, "soft")
