"""SVG picture of a run: the time of every pass, of PyTorch, and of the roofline.

Each line is a layer, and each panel is a pass.  The scale is logarithmic, so that equal distances
are equal ratios.  Lengths are in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from cupyconv.bench import environment
from cupyconv.bench.results import TORCH, Results, Row
from cupyconv.bench.suites import KINDS
from cupyconv.problem import PASSES
from cupyconv.svg import Canvas

WIDTH = 1200
MARGIN = 24
LABELS = 172  # width of the layer names, left of the panels
RATIOS = 44  # width of the ratios, right of each panel
GAP = 16  # between panels
PANEL_WIDTH = (WIDTH - 2 * MARGIN - LABELS - 2 * GAP) / 3 - RATIOS
LINE_HEIGHT = 16

INK, SOFT, GRID = "#1f2933", "#5f6b7a", "#e3e7ec"
OURS, OTHER, SLOWER = "#1f6fb2", "#c8761d", "#b5443c"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"

_TITLES = {
    "forward": "Forward",
    "backprop_input": "Gradient with respect to the input",
    "backprop_filter": "Gradient with respect to the filter",
}
_LONGEST_NAME = 24  # characters


@dataclass(frozen=True)
class _Scale:
    """Logarithmic axis that maps powers of ten ``low`` and ``high`` to the edges of a panel."""

    low: int
    high: int
    left: float

    def __call__(self, value: float) -> float:
        share = (log10(value) - self.low) / (self.high - self.low)
        return self.left + PANEL_WIDTH * share


def svg(results: Results) -> str:
    """Draw a run."""
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
    """Draw the panels of a dtype; return their lower edge."""
    pairs: dict[tuple[str, str], dict[bool, Row]] = {}  # fastest rows, by whether they are ours
    for row in sorted(results.rows, key=lambda row: -row.microseconds):
        if row.dtype == dtype:
            pairs.setdefault((row.layer, row.pass_), {})[row.implementation != TORCH] = row
    rows = [row for pair in pairs.values() for row in pair.values()]
    limits = {(row.layer, row.pass_): _limit(results, row) for row in rows}
    times = [row.microseconds for row in rows] + [limit for limit in limits.values() if limit]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))
    scales = {
        pass_: _Scale(
            low, max(high, low + 1), MARGIN + LABELS + number * (PANEL_WIDTH + RATIOS + GAP)
        )
        for number, pass_ in enumerate(PASSES)
    }
    _legend(canvas, dtype, top + 22, has_roofline=dtype in results.ceilings)
    lines: list[tuple[str, str]] = []
    layers = dict.fromkeys((row.kind, row.layer) for row in results.rows if row.dtype == dtype)
    for kind in KINDS:
        names = [layer for its_kind, layer in layers if its_kind == kind]
        lines += [(kind, ""), *((kind, name) for name in names)] if names else []
    first = top + 66
    bottom = first + len(lines) * LINE_HEIGHT
    for pass_, scale in scales.items():
        _text(canvas, scale.left, first - 12, _TITLES[pass_], 12, fill=SOFT)
        for power in range(scale.low, scale.high + 1):
            x = scale(10.0**power)
            _line(canvas, x, first - 4, x, bottom, GRID)
            _text(canvas, x, bottom + 14, _time(power), 11, text_anchor="middle", fill=SOFT)
    for number, (kind, layer) in enumerate(lines):
        y = first + number * LINE_HEIGHT + 11
        if not layer:
            _text(canvas, MARGIN, y, kind, 12, font_weight="bold")
            continue
        name = layer if len(layer) <= _LONGEST_NAME else f"{layer[: _LONGEST_NAME - 1]}…"
        _text(canvas, MARGIN + 8, y, name, 11)
        for pass_, scale in scales.items():
            pair = pairs.get((layer, pass_), {})
            _pass(canvas, pair.get(True), pair.get(False), limits.get((layer, pass_)), scale, y - 4)
    return bottom + 26


def _limit(results: Results, row: Row) -> float | None:
    """Return the roofline time of a row's pass in µs; None without a ceiling."""
    share = results.roofline_share(row)
    return share and share * row.microseconds


def _pass(
    canvas: Canvas,
    ours: Row | None,
    torch: Row | None,
    limit: float | None,
    scale: _Scale,
    y: float,
) -> None:
    """Draw the times of a pass, and PyTorch's time over cupyconv's right of the panel."""
    if limit:
        _line(canvas, scale(limit), y - 5, scale(limit), y + 5, INK, 1.5)
    if ours and torch:
        ratio = torch.microseconds / ours.microseconds
        color = OURS if ratio >= 1 else SLOWER
        _line(canvas, scale(ours.microseconds), y, scale(torch.microseconds), y, color, 2)
        right = scale.left + PANEL_WIDTH + 6
        _text(canvas, right, y + 4, f"{ratio:.2f}×", 11, fill=color)
    if torch:
        _ring(canvas, scale(torch.microseconds), y, _title(torch, "PyTorch", limit))
    if ours:
        _dot(canvas, scale(ours.microseconds), y, _title(ours, "cupyconv", limit))


def _title(row: Row, name: str, limit: float | None) -> str:
    share = f", {limit / row.microseconds:.0%} of the roofline" if limit else ""
    return f"{row.layer}, {name}: {row.microseconds:,.1f} µs{share}"


def _legend(canvas: Canvas, dtype: str, y: float, *, has_roofline: bool) -> None:
    _text(canvas, MARGIN, y, dtype, 18, font_weight="bold")
    x = MARGIN + LABELS + 4
    _dot(canvas, x, y - 4)
    _text(canvas, x + 10, y, "cupyconv", 12)
    _ring(canvas, x + 90, y - 4)
    _text(canvas, x + 100, y, "PyTorch; at the right, its time over cupyconv's", 12)
    if has_roofline:
        _line(canvas, x + 372, y - 9, x + 372, y + 1, INK, 1.5)
        _text(canvas, x + 380, y, "roofline, from measured ceilings", 12)


def _time(power: int) -> str:
    for unit, digits in (("s", 6), ("ms", 3), ("µs", 0)):
        if power >= digits:
            return f"{10 ** (power - digits):,} {unit}"
    return f"{10.0**power:g} µs"


def _dot(canvas: Canvas, x: float, y: float, title: str = "") -> None:
    canvas.shape("circle", title, cx=x, cy=y, r=4, fill=OURS)


def _ring(canvas: Canvas, x: float, y: float, title: str = "") -> None:
    canvas.shape("circle", title, cx=x, cy=y, r=4, fill="#fff", stroke=OTHER, stroke_width=1.6)


def _text(
    canvas: Canvas, x: float, y: float, text: str, size: int, fill: str = INK, **style: str
) -> None:
    anchor = style.pop("text_anchor", "start")
    canvas.text(x, y, text, font_size=size, fill=fill, text_anchor=anchor, **style)


def _line(
    canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1
) -> None:
    canvas.line(x1, y1, x2, y2, stroke=color, stroke_width=width)
