"""SVG picture of a run: for each dtype a roofline per pass, and speed ratios to another library.

The other library is PyTorch.  Lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from cupyconv.bench import environment, report
from cupyconv.bench.results import TORCH, Ceiling, Comparison, Results, Row, best, comparisons
from cupyconv.bench.suites import KINDS
from cupyconv.problem import PASSES
from cupyconv.svg import Canvas

WIDTH = 1200
MARGIN = 24
LABELS = 172  # width of the layer names, left of the panels
GAP = 40  # between panels
PANEL_WIDTH = (WIDTH - 2 * MARGIN - LABELS - 2 * GAP) / 3
ROOFLINE_HEIGHT = 250
BAR_HEIGHT = 15

INK, SOFT, GRID, PAPER = "#1f2933", "#5f6b7a", "#e3e7ec", "#ffffff"
OURS, OTHER, SLOWER = "#1f6fb2", "#c8761d", "#b5443c"
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"

PEERS = {TORCH: "PyTorch"}
_TITLES = {
    "forward": "Forward",
    "backprop_input": "Gradient with respect to the input",
    "backprop_filter": "Gradient with respect to the filter",
}
_LONGEST_NAME = 24  # characters


@dataclass(frozen=True)
class Scale:
    """Logarithmic axis that maps ``low`` to ``high`` onto pixels ``first`` to ``last``."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        clamped = min(max(value, self.low), self.high)
        share = log10(clamped / self.low) / log10(self.high / self.low)
        return self.first + share * (self.last - self.first)


def svg(results: Results) -> str:
    """Draw a run."""
    canvas = Canvas()
    top = float(MARGIN)
    top = _head(canvas, results, top)
    dtypes = dict.fromkeys(row.dtype for row in results.rows)
    for dtype in dtypes:
        top = _dtype(canvas, results, dtype, top)
    if not dtypes:
        _text(canvas, MARGIN, top + 20, "Nothing was measured.", 14)
        top += 40
    title = f"cupyconv bench on {environment.title(results.environment)}"
    return canvas.document(title, size=(WIDTH, ceil(top + MARGIN)), font_family=FONT)


def _head(canvas: Canvas, results: Results, top: float) -> float:
    about = results.environment
    versions = [
        f"{label} {about[key]}"
        for key, label in (
            ("cupyconv", "cupyconv"),
            ("torch", "PyTorch"),
            ("cudnn", "cuDNN"),
            ("cupy", "CuPy"),
            ("numpy", "NumPy"),
        )
        if about.get(key)
    ]
    _text(canvas, MARGIN, top + 18, "Convolutions: speed of every pass", 22, weight="bold")
    subtitle = f"{environment.title(about)}.  {', '.join(versions)}"
    _text(canvas, MARGIN, top + 42, subtitle, 13, color=SOFT)
    return top + 60


def _dtype(canvas: Canvas, results: Results, dtype: str, top: float) -> float:
    """Draw the rooflines and the ratios of a dtype; return their lower edge."""
    fastest = [row for row in best(results.rows).values() if row.dtype == dtype]
    names = dict.fromkeys(row.implementation for row in fastest)
    ours = next((name for name in names if name not in PEERS), None)
    peer = next((name for name in PEERS if name in names), None)
    shown = [row for row in fastest if row.implementation in (ours, peer)]
    passes = [pass_ for pass_ in PASSES if any(row.pass_ == pass_ for row in shown)]
    _text(canvas, MARGIN, top + 22, dtype, 18, weight="bold")
    ceiling = results.ceilings.get(dtype)
    if ceiling is not None:
        top = _rooflines(canvas, ceiling, shown, passes, top + 34)
    pairs = [
        pair
        for pair in (comparisons(results) if peer else [])
        if (pair.row.dtype, pair.row.implementation) == (dtype, ours)
    ]
    if pairs:
        return _bars(canvas, pairs, passes, top + 34)
    _text(canvas, MARGIN, top + 40, "No ratios: no other library was measured.", 13, color=SOFT)
    return top + 60


def _panel(number: int) -> tuple[float, float]:
    """Return the left and right edge of a panel."""
    left = MARGIN + LABELS + number * (PANEL_WIDTH + GAP)
    return left, left + PANEL_WIDTH


# -- roofline --------------------------------------------------------------------------------------


def _rooflines(
    canvas: Canvas, ceiling: Ceiling, rows: Sequence[Row], passes: Sequence[str], top: float
) -> float:
    """Draw one panel per pass: FLOP/s (y) over FLOPs per byte (x), and the ceilings as lines."""
    rows = [row for row in rows if row.useful_flops]  # a logarithmic scale cannot show 0
    unit, name = (1e12, "TFLOP/s") if ceiling.flops_per_second > 2e12 else (1e9, "GFLOP/s")
    peak, slope = ceiling.flops_per_second / unit, ceiling.bytes_per_second / unit
    intensities = [row.useful_flops / row.bytes for row in rows]
    rates = [row.tflops * 1e12 / unit for row in rows]
    x_low, x_high = _decades([*intensities, peak / slope])
    y_low, y_high = _decades([*rates, peak])
    bottom = top + 20 + ROOFLINE_HEIGHT
    y = Scale(y_low, y_high, bottom, top + 20)
    for number, pass_ in enumerate(passes):
        left, right = _panel(number)
        x = Scale(x_low, x_high, left, right)
        _text(canvas, left, top + 8, _TITLES[pass_], 13, weight="bold")
        for value in _powers(x_low, x_high):
            _line(canvas, x(value), top + 20, x(value), bottom, GRID)
            _text(canvas, x(value), bottom + 15, _power(value), 11, "middle", SOFT)
        for value in _powers(y_low, y_high):
            _line(canvas, left, y(value), right, y(value), GRID)
            if number == 0:
                _text(canvas, left - 6, y(value) + 4, _power(value), 11, "end", SOFT)
        corner = peak / slope
        start = max(x_low, y_low / slope)
        points = [(start, start * slope), (corner, peak), (x_high, peak)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        canvas.shape(
            "polyline",
            points=path,
            fill="none",
            stroke=INK,
            stroke_width=1.5,
            stroke_linejoin="round",
        )
        for row in rows:
            if row.pass_ == pass_:
                _point(canvas, row, x, y, unit)
        middle = (left + right) / 2
        _text(canvas, middle, bottom + 32, "FLOP per byte, each tensor once", 12, "middle", SOFT)
    label = (MARGIN, top + 32)
    _text(canvas, *label, name, 12, color=SOFT)
    ceilings = (f"{report.number(peak)} {name}", f"{report.number(slope * unit / 1e9)} GB/s")
    _legend(canvas, rows, ceilings, top + 60)
    return bottom + 40


def _point(canvas: Canvas, row: Row, x: Scale, y: Scale, unit: float) -> None:
    ours = row.implementation not in PEERS
    name = PEERS.get(row.implementation, "cupyconv")
    rate = row.tflops * 1e12 / unit
    text = f"{row.layer}, {name}: {rate:.3g}, {row.microseconds:,.1f} µs"
    _dot(canvas, x(row.useful_flops / row.bytes), y(rate), ours=ours, title=text, fill_opacity=0.8)


def _dot(
    canvas: Canvas, x: float, y: float, *, ours: bool, title: str = "", fill_opacity: float = 1
) -> None:
    """Draw a filled point for cupyconv, or a ring for the peer."""
    style: dict[str, str | float] = {"r": 4, "fill": "none", "stroke": OTHER, "stroke_width": 1.4}
    if ours:
        style = {"r": 3.4, "fill": OURS, "fill_opacity": fill_opacity}
    canvas.shape("circle", title, cx=x, cy=y, **style)


def _legend(canvas: Canvas, rows: Sequence[Row], ceilings: tuple[str, str], top: float) -> None:
    left = MARGIN
    names = {row.implementation for row in rows}
    for name in dict.fromkeys(PEERS.get(name, "cupyconv") for name in sorted(names)):
        _dot(canvas, left + 5, top, ours=name == "cupyconv")
        _text(canvas, left + 16, top + 4, name, 12)
        top += 20
    _line(canvas, left - 1, top, left + 11, top, INK, 1.5)
    _text(canvas, left + 16, top + 4, "measured ceilings:", 12)
    for number, text in enumerate(ceilings, 1):
        _text(canvas, left + 16, top + 4 + 16 * number, text, 12, color=SOFT)


# -- ratios ----------------------------------------------------------------------------------------


def _bars(canvas: Canvas, pairs: Sequence[Comparison], passes: Sequence[str], top: float) -> float:
    """Draw a line per layer, sorted by kind, with a bar per pass on a base-2 logarithmic scale."""
    kinds = [kind for kind in KINDS if any(pair.row.kind == kind for pair in pairs)]
    ratios = [pair.ratio for pair in pairs]
    low = 2.0 ** min(floor(log2(min(ratios))), -1)
    high = 2.0 ** max(ceil(log2(max(ratios))), 1)
    peer = PEERS[pairs[0].other.implementation]
    title = f"Time of {peer} over time of cupyconv: right of 1, cupyconv is faster"
    _text(canvas, MARGIN, top, title, 13, weight="bold")
    lines: list[tuple[str, str]] = []
    for kind in kinds:
        layers = dict.fromkeys(pair.row.layer for pair in pairs if pair.row.kind == kind)
        lines += [("kind", kind), *(("layer", layer) for layer in layers)]
    first = top + 34
    bottom = first + len(lines) * BAR_HEIGHT
    scales = [Scale(low, high, *_panel(number)) for number in range(len(passes))]
    for scale, pass_ in zip(scales, passes, strict=True):
        _text(canvas, scale.first, top + 18, _TITLES[pass_], 12, color=SOFT)
        for value in _doublings(low, high):
            edge = scale(value)
            at_one = value == 1
            _line(canvas, edge, first - 4, edge, bottom, INK if at_one else GRID)
            _text(canvas, edge, bottom + 14, _ratio(value), 11, "middle", SOFT)
    pair_of = {(pair.row.layer, pair.row.pass_): pair for pair in pairs}
    for number, (type_, name) in enumerate(lines):
        y = first + number * BAR_HEIGHT
        if type_ == "kind":
            _text(canvas, MARGIN, y + 11, name, 12, weight="bold")
            continue
        _text(canvas, MARGIN + 8, y + 11, _short(name), 11)
        for scale, pass_ in zip(scales, passes, strict=True):
            pair = pair_of.get((name, pass_))
            if pair is not None:
                _bar(canvas, pair, scale, y)
    return bottom + 26


def _bar(canvas: Canvas, pair: Comparison, scale: Scale, y: float) -> None:
    one, edge = scale(1), scale(pair.ratio)
    left, width = min(one, edge), max(abs(edge - one), 0.8)
    color = OURS if pair.ratio >= 1 else SLOWER
    text = (
        f"{pair.row.layer}: {pair.row.microseconds:,.1f} µs, "
        f"{PEERS[pair.other.implementation]} {pair.other.microseconds:,.1f} µs"
    )
    canvas.rect(left, y + 2, width, BAR_HEIGHT - 4, title=text, fill=color)
    # The label is at the bar's end, or inside the bar if it would leave the panel.
    grows_right = pair.ratio >= 1
    outside = edge + 28 <= scale.last if grows_right else edge - 28 >= scale.first
    anchor = "start" if grows_right == outside else "end"
    shift = 3 if anchor == "start" else -3
    shade = SOFT if outside else PAPER
    _text(canvas, edge + shift, y + 11, f"{pair.ratio:.2f}", 10, anchor, shade)


# -- shapes ----------------------------------------------------------------------------------------


def _text(
    canvas: Canvas,
    x: float,
    y: float,
    text: str,
    size: int,
    anchor: str = "start",
    color: str = INK,
    weight: str = "normal",
) -> None:
    canvas.text(x, y, text, font_size=size, text_anchor=anchor, fill=color, font_weight=weight)


def _line(
    canvas: Canvas, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1
) -> None:
    canvas.line(x1, y1, x2, y2, stroke=color, stroke_width=width)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return powers of ten that enclose all values."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(round(log10(low)), round(log10(high)) + 1)]


def _power(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _doublings(low: float, high: float) -> list[float]:
    """Return powers of two, few enough that their labels do not overlap."""
    first, last = round(log2(low)), round(log2(high))
    step = ceil((last - first) / 8)
    return [2.0**power for power in range(first, last + 1) if power % step == 0]


def _ratio(value: float) -> str:
    return f"{value:g}×" if value >= 1 else f"1/{1 / value:g}×"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
