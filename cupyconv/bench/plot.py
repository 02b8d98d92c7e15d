"""SVG picture of a run: cupyconv's time, PyTorch's time and the roofline of every pass.

Each row is a layer, and each panel is a pass.  The time axis is logarithmic, so that equal
distances are equal ratios.  Lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log10

from cupyconv.bench import environment
from cupyconv.bench.results import TORCH, Results, Row
from cupyconv.bench.suites import KINDS
from cupyconv.svg import Canvas

WIDTH, MARGIN, LINE_HEIGHT = 1200, 24, 16
LABELS, RATIOS, GAP = 172, 44, 16  # widths: layer names, ratios right of a panel, panel gaps
PANEL_WIDTH = (WIDTH - 2 * MARGIN - LABELS - 2 * GAP) / 3 - RATIOS

INK, SOFT, GRID = "#1f2933", "#5f6b7a", "#e3e7ec"
OURS, OTHER, SLOWER = "#1f6fb2", "#c8761d", "#b5443c"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"

_TITLES = {
    "forward": "Forward",
    "backprop_input": "Gradient with respect to the input",
    "backprop_filter": "Gradient with respect to the filter",
}


def svg(results: Results) -> str:
    """Return an SVG document that shows the results of a run."""
    canvas, about = Canvas(), results.environment
    _text(canvas, MARGIN, 42, "Convolutions: time of every pass", 22, font_weight="bold")
    subtitle = f"{environment.title(about)}.  {', '.join(environment.versions(about))}"
    _text(canvas, MARGIN, 66, subtitle, 13, fill=SOFT)
    top = 84.0
    for dtype in dict.fromkeys(row.dtype for row in results.rows):
        top = _dtype(canvas, results, dtype, top)
    if not results.rows:
        _text(canvas, MARGIN, top + 20, "Nothing was measured.", 14)
        top += 40
    title = f"cupyconv bench on {environment.title(about)}"
    return canvas.document(title, size=(WIDTH, ceil(top + MARGIN)), font_family=FONT)


def _dtype(canvas: Canvas, results: Results, dtype: str, top: float) -> float:
    """Draw the panels of a dtype below ``top``; return the y of their lower edge."""
    rows = [row for row in results.rows if row.dtype == dtype]
    # Fastest rows, keyed by (layer, pass), and then by whether the row is cupyconv's.
    pairs: dict[tuple[str, str], dict[bool, Row]] = {}
    limits: dict[tuple[str, str], float] = {}  # roofline times in µs, by (layer, pass)
    for row in sorted(rows, key=lambda row: -row.microseconds):
        key = row.layer, row.pass_
        pairs.setdefault(key, {})[row.implementation != TORCH] = row
        if share := results.roofline_share(row):
            limits[key] = share * row.microseconds
    times = [row.microseconds for row in rows] + list(limits.values())
    low = floor(log10(min(times)))
    high = max(ceil(log10(max(times))), low + 1)

    lines: list[tuple[str, str]] = []  # (kind, layer); the layer is "" in the heading of a kind
    for kind in KINDS:
        names = dict.fromkeys(row.layer for row in rows if row.kind == kind)
        lines += [(kind, ""), *((kind, name) for name in names)] if names else []
    first = top + 66
    bottom = first + len(lines) * LINE_HEIGHT
    _legend(canvas, dtype, top + 22, has_roofline=bool(limits))
    for number, (kind, layer) in enumerate(lines):
        y = first + number * LINE_HEIGHT + 11
        name = layer if len(layer) <= 24 else f"{layer[:23]}…"
        _text(canvas, MARGIN + 8, y, name, 11)
        if not layer:
            _text(canvas, MARGIN, y, kind, 12, font_weight="bold")
    for panel, (pass_, title) in enumerate(_TITLES.items()):
        left = MARGIN + LABELS + panel * (PANEL_WIDTH + RATIOS + GAP)

        def x(time: float, left: float = left) -> float:
            return left + PANEL_WIDTH * (log10(time) - low) / (high - low)

        _text(canvas, left, first - 12, title, 12, fill=SOFT)
        for power in range(low, high + 1):
            _line(canvas, x(10.0**power), first - 4, x(10.0**power), bottom, GRID)
            label = {"text_anchor": "middle", "fill": SOFT}
            _text(canvas, x(10.0**power), bottom + 14, _time(power), 11, **label)
        for number, (_, layer) in enumerate(lines):
            if pair := pairs.get((layer, pass_)):
                y = first + number * LINE_HEIGHT + 7
                _pass(canvas, pair, limits.get((layer, pass_)), x, left + PANEL_WIDTH + 6, y)
    return bottom + 26


def _pass(
    canvas: Canvas,
    pair: dict[bool, Row],
    limit: float | None,
    x: Callable[[float], float],
    right: float,
    y: float,
) -> None:
    """Draw the times of a pass; right of its panel, print PyTorch's time / cupyconv's time."""
    if limit:
        _line(canvas, x(limit), y - 5, x(limit), y + 5, INK, 1.5)
    if len(pair) == 2:
        ours, torch = pair[True].microseconds, pair[False].microseconds
        color = OURS if torch >= ours else SLOWER
        _line(canvas, x(ours), y, x(torch), y, color, 2)
        _text(canvas, right, y + 4, f"{torch / ours:.2f}×", 11, fill=color)
    for is_ours, row in sorted(pair.items()):
        share = f", {limit / row.microseconds:.0%} of the roofline" if limit else ""
        name = "cupyconv" if is_ours else "PyTorch"
        title = f"{row.layer}, {name}: {row.microseconds:,.1f} µs{share}"
        _mark(canvas, x(row.microseconds), y, title, is_ours=is_ours)


def _legend(canvas: Canvas, dtype: str, y: float, *, has_roofline: bool) -> None:
    _text(canvas, MARGIN, y, dtype, 18, font_weight="bold")
    x = MARGIN + LABELS + 4
    _mark(canvas, x, y - 4, is_ours=True)
    _text(canvas, x + 10, y, "cupyconv", 12)
    _mark(canvas, x + 90, y - 4, is_ours=False)
    _text(canvas, x + 100, y, "PyTorch; at the right, its time over cupyconv's", 12)
    if has_roofline:
        _line(canvas, x + 372, y - 9, x + 372, y + 1, INK, 1.5)
        _text(canvas, x + 380, y, "roofline, from measured ceilings", 12)


def _time(power: int) -> str:
    for unit, digits in (("s", 6), ("ms", 3), ("µs", 0)):
        if power >= digits:
            return f"{10 ** (power - digits):,} {unit}"
    return f"{10.0**power:g} µs"


def _mark(canvas: Canvas, x: float, y: float, title: str = "", *, is_ours: bool) -> None:
    style = {"fill": OURS} if is_ours else {"fill": "#fff", "stroke": OTHER}
    canvas.shape("circle", title, cx=x, cy=y, r=4, stroke_width=1.6, **style)


def _text(
    canvas: Canvas, x: float, y: float, text: str, size: int, fill: str = INK, **style: str
) -> None:
    anchor = style.pop("text_anchor", "start")
    canvas.text(x, y, text, font_size=size, fill=fill, text_anchor=anchor, **style)


def _line(
    canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1
) -> None:
    canvas.line(x1, y1, x2, y2, stroke=color, stroke_width=width)
