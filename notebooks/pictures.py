"""Pictures of the kernels' thread blocks, drawn from the launches prepared for a GPU.

All sizes come from the macros of the launch, so a picture follows every change of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyconv.kernels.hopper import consumers, takes_turns
from cupyconv.kernels.strides import Strides
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.problem import ConvProblem
from cupyconv.svg import Canvas, themed

__all__ = ["EXAMPLES", "Drawn", "Example", "launched"]


@dataclass(frozen=True)
class Example:
    """A pass of a layer that a family's page shows."""

    problem: ConvProblem
    device: str = "sm_90a"
    pass_: str = "forward"
    precision: str = "ieee"


def _layer(x: tuple[int, ...], w: tuple[int, ...], dtype: str, **rules: Any) -> ConvProblem:
    """Return a layer with channels last and filters in the order O, spatial axes, I."""
    rank = len(x) - 2
    data, filters = f"N{'DHW'[-rank:]}C", f"O{'DHW'[-rank:]}I"
    return ConvProblem(x, w, data_format=data, filter_format=filters, dtype=dtype, **rules)


_DENSE = ((32, 28, 28, 256), (256, 3, 3, 256))

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "cuda-generic": (
        Example(_layer(*_DENSE, "float32", padding=1)),
        Example(_layer((8, 32, 32, 3), (8, 3, 3, 3), "float32", padding=1)),
    ),
    "cuda-gather": (
        Example(_layer(*_DENSE, "float16", padding=1), "sm_80"),
        Example(_layer(*_DENSE, "float64", padding=1), "sm_80"),
    ),
    "cuda-hopper": (
        Example(_layer(*_DENSE, "float16", padding=1)),
        Example(_layer(*_DENSE, "float16", padding=1), pass_="backprop_filter"),
    ),
    "cuda-hopper-bf16x6": (Example(_layer(*_DENSE, "float32", padding=1), precision="bf16x6"),),
    "cuda-direct": (
        Example(_layer((32, 56, 56, 128), (128, 3, 3, 1), "float16", padding=1, groups=128)),
    ),
    "cuda-patch": (
        Example(_layer((32, 224, 224, 3), (64, 7, 7, 3), "float16", padding=3, stride=2)),
    ),
    "cuda-columns": (
        Example(
            _layer((8, 224, 224, 3), (768, 16, 16, 3), "float16", stride=16),
            "sm_80",
            "backprop_input",
        ),
    ),
    "cuda-toeplitz": (
        Example(_layer((32, 56, 56, 96), (96, 7, 7, 1), "float16", padding=3, groups=96)),
    ),
}
"""Examples that the page of a GPU kernel family shows, keyed by family."""


@dataclass(frozen=True)
class Drawn:
    """A picture of a launch with its caption, and facts about the launch, keyed by their labels."""

    svg: str
    caption: str
    facts: dict[str, str]


def launched(family: str, example: Example) -> Drawn:
    """Draw the kernel launch with which a family computes an example."""
    problem, device = example.problem, Device.of(example.device)
    planned = plan_pass(Request(problem, example.pass_, device, example.precision), family)
    strides = Strides.contiguous(problem)
    request = Request(problem, planned.pass_, device, strides=strides).reduced
    made = planned.family.launches(request, planned)
    copies = ("conv_arrange.cu", "conv_fold.cu", "conv_planes.cu")
    launch = next(one for one in made if one.source not in copies)
    macros = dict(launch.defines)
    canvas = Canvas()
    _PAINTERS[family](canvas, lambda name: int(macros[name]), launch, planned.tile)
    blocks = " x ".join(map(str, launch.grid))
    caption = f"{example.pass_} of {problem!r}, as {family} launches it on {device.architecture}"
    facts = {
        "kernel": f"{launch.entry} of cuda/{launch.source}",
        "blocks": f"{blocks}, {launch.block[0]} threads each",
        "shared memory": f"{launch.shared_bytes:,} bytes, requested at launch",
        "macros": " ".join(f"{name}={value}" for name, value in launch.defines),
        "other launches": ", ".join(one.entry for one in made if one is not launch) or "none",
    }
    document = canvas.document(caption, margin=8, style=_STYLE, kind=_KIND)
    return Drawn(document, caption, facts)


# -- painting --------------------------------------------------------------------------------------

_A, _B, _C, _MARK, _LINE = "a", "b", "c", "mark", "line"
"""CSS classes of boxes and lines."""

_KIND = "cupyconv-kernel"
_ORANGE = "#e3602b", "#d9541f"
_STROKE = themed("stroke", "#667", "#99a")
_STYLE = "".join(
    f".{_KIND} {selector}{{{rule}}}"
    for selector, rule in {
        "text": f"font:12px system-ui,sans-serif;{themed('fill', '#222', '#e8ecf1')}",
        ".paper": themed("fill", "#fff", "#14181d"),
        f".{_A}": f"{themed('fill', '#cfe3f7', '#1f4568')};{_STROKE}",
        f".{_B}": f"{themed('fill', '#fbe3c0', '#6b4a17')};{_STROKE}",
        f".{_C}": f"{themed('fill', '#dcefdc', '#2c4f31')};{_STROKE}",
        f".{_MARK}": f"{themed('fill', *_ORANGE)};{themed('stroke', *_ORANGE)}",
        f".{_LINE}": _STROKE,
    }.items()
)
"""CSS rules of the pictures; they follow the colour scheme of the page."""

_SIDE = 260.0
"""Length of the longer side of a tile, in pixels (hand-set)."""

Number = Callable[[str], int]
"""Function that returns the value of a macro of the launch."""


def _grid(
    canvas: Canvas, x: float, y: float, width: float, height: float, columns: int, rows: int
) -> None:
    """Draw lines that divide a rectangle into cells."""
    for column in range(1, columns):
        at = x + width * column / columns
        canvas.line(at, y, at, y + height, _LINE, stroke_width=0.5)
    for row in range(1, rows):
        at = y + height * row / rows
        canvas.line(x, at, x + width, at, _LINE, stroke_width=0.5)


def _product(
    canvas: Canvas, m: int, n: int, k: int, stages: int, words: tuple[str, str, str]
) -> tuple[float, float, float]:
    """Draw the tiles of A, B and C = A B; return the left and top of C, and pixels per element.

    Args:
        canvas: the picture to draw on.
        m, n, k: extents of the block's tile: A is m x k, B is k x n, C is m x n.
        stages: number of stages of the pipeline that holds the tiles of A and B.
        words: descriptions of A, B and C.
    """
    scale = _SIDE / max(m, n)
    wide, high = n * scale, m * scale
    deep = max(k * scale, 22)
    left, top = 30 + deep + 5 * stages + 120, 24 + deep + 5 * stages + 46
    for stage in reversed(range(stages)):
        back = 5.0 * stage
        canvas.rect(left - 30 - deep - back, top + back, deep, high, _A, f"A, stage {stage}")
        canvas.rect(left + back, top - 30 - deep - back, wide, deep, _B, f"B, stage {stage}")
    canvas.rect(left, top, wide, high, _C, "C")
    staging = f", {stages} stages" if stages > 1 else ""
    canvas.text(8, 20, f"A: {words[0]}, {m} x {k}{staging}")
    canvas.text(8, 38, f"B: {words[1]}, {k} x {n}{staging}")
    canvas.text(left, top + high + 5 * stages + 18, f"C: {words[2]}, {m} x {n}, in registers")
    return left, top, scale


_WORDS = {
    0: ("input under the windows", "filter", "output"),
    1: ("gradient of the output", "filter", "gradient of the input"),
    2: ("gradient of the output", "input under the windows", "gradient of the filter"),
}
"""Descriptions of A, B and C, keyed by the macro PASS: forward, backprop_input, backprop_filter."""


def _generic(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    m, n, k = (number(f"BLOCK_{letter}") for letter in "MNK")
    of_m, of_n = number("THREAD_M"), number("THREAD_N")
    left, top, scale = _product(canvas, m, n, k, 1, _WORDS[0])
    _grid(canvas, left, top, n * scale, m * scale, n // of_n, m // of_m)
    canvas.rect(left, top, of_n * scale, of_m * scale, _MARK, "thread 0")
    canvas.text(
        left,
        top + m * scale + 41,
        f"{launch.block[0]} threads, {of_m} x {of_n} sums each; marked: thread 0",
    )


def _gather(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    m, n, k = (number(f"BLOCK_{letter}") for letter in "MNK")
    warps_m, warps_n = number("WARPS_M"), number("WARPS_N")
    stages = number("STAGES")
    left, top, scale = _product(canvas, m, n, k, stages, _WORDS[number("PASS")])
    _grid(canvas, left, top, n * scale, m * scale, warps_n, warps_m)
    warp_m, warp_n = m // warps_m, n // warps_n
    canvas.rect(left, top, 8 * scale, 16 * scale, _MARK, "one product of mma.sync")
    for warp in range(warps_m * warps_n):
        across, down = warp % warps_n, warp // warps_n
        canvas.text(
            left + (across + 0.5) * warp_n * scale,
            top + (down + 0.5) * warp_m * scale + 4,
            f"warp {warp}",
            "in",
            text_anchor="middle",
        )
    canvas.text(
        left,
        top + m * scale + 5 * stages + 36,
        f"{warps_m * warps_n} warps of {warp_m} x {warp_n}; marked: 16 x 8, one mma.sync",
    )


def _hopper(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    cluster, stages = number("CLUSTER"), number("STAGES")
    pass_ = number("PASS")
    left, top, scale = _product(canvas, m, n, k, stages, _WORDS[pass_])
    groups = 1 if takes_turns(tile, number("CLUSTER_SPLITS")) else consumers(tile.block_m)
    for group in range(groups):
        rows = m // groups
        _grid(
            canvas, left, top + group * rows * scale, n * scale, rows * scale, 1, max(rows // 64, 1)
        )
        canvas.text(
            left + n * scale / 2,
            top + (group + 0.5) * rows * scale + 4,
            f"{'either warpgroup' if groups == 1 else f'warpgroup {group + 1}'}: "
            f"products of 64 x {n}",
            "in",
            text_anchor="middle",
        )
    for group in range(1, groups):
        edge = top + m * scale * group / groups
        canvas.line(left, edge, left + n * scale, edge, _MARK)
    below = top + m * scale + 5 * stages + 36
    canvas.text(
        left,
        below,
        f"{launch.block[0]} threads: {consumers(tile.block_m)} warpgroups multiply"
        f"{', whole tiles in turn' if groups == 1 else ''}; one loads by TMA",
    )
    if cluster > 1:
        canvas.text(left, below + 18, f"clusters of {cluster} stacked blocks share the tile of B")


def _direct(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    down, across = number("TILE_ROWS"), number("TILE_COLUMNS")
    vector = number("VECTOR")
    lanes, strips = number("LANES"), number("STRIPS")
    r, s = number("FILTER_R"), number("FILTER_S")
    rows = (down - 1) * number("STRIDE_H") + (r - 1) * number("DILATION_H") + 1
    columns = (across - 1) * number("STRIDE_W") + (s - 1) * number("DILATION_W")
    columns += 1
    cell, left, top = 26.0, 30.0, 50.0
    canvas.text(8, 20, "The output tile of a thread, and the input that it reads")
    canvas.text(left, top - 6, f"input: {rows} rows of {columns} columns, {vector} channels")
    canvas.rect(left, top, columns * cell, rows * cell, _A)
    _grid(canvas, left, top, columns * cell, rows * cell, columns, rows)
    canvas.rect(left, top, s * cell, r * cell, _MARK, "the window of the first output")
    side = left + columns * cell + 40
    canvas.text(side, top - 6, f"output: {down} x {across} pixels")
    canvas.rect(side, top, across * cell, down * cell, _C, "the tile")
    _grid(canvas, side, top, across * cell, down * cell, across, down)
    canvas.rect(side, top, cell, cell, _MARK, "its output")
    canvas.text(side, top + down * cell + 18, "each input row is used for all")
    canvas.text(side, top + down * cell + 36, "output rows that need it;")
    canvas.text(side, top + down * cell + 54, f"marked: a window of {r} x {s} taps")
    block = top + max(rows * cell, down * cell + 54) + 30
    canvas.text(8, block, f"A block: {strips} tiles x {lanes} threads of {vector} channels")
    wide, high = 300.0, 110.0
    canvas.rect(left, block + 12, wide, high, _C, "a block")
    _grid(canvas, left, block + 12, wide, high, lanes, strips)
    canvas.rect(left, block + 12, wide / lanes, high / strips, _MARK, "thread 0")
    canvas.text(
        left,
        block + high + 30,
        f"across: {lanes * vector} channels; down: {strips} tiles, repeated in rounds",
    )


def _patch(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    p, q = number("TILE_P"), number("TILE_Q")
    r, s = number("FILTER_R"), number("FILTER_S")
    down, across = number("STRIDE_H"), number("STRIDE_W")
    rows = (p - 1) * down + (r - 1) * number("DILATION_H") + 1
    columns = (q - 1) * across + (s - 1) * number("DILATION_W") + 1
    cell = 420.0 / columns
    left, top = 30.0, 44.0
    channels = number("CHANNELS")
    canvas.text(8, 20, f"The patch: {rows} x {columns} pixels of {channels} channels, copied once")
    canvas.rect(left, top, columns * cell, rows * cell, _A, "the patch")
    _grid(canvas, left, top, columns * cell, rows * cell, columns, rows)
    canvas.rect(left, top, s * cell, r * cell, _MARK, "the window of the first output")
    below = top + rows * cell + 40
    canvas.text(8, below - 10, f"The tile: {p} x {q} outputs of {number('BLOCK_N')} filters")
    size = min(2 * cell, 420.0 / q)
    canvas.rect(left, below, q * size, p * size, _C, "the tile of the output")
    _grid(canvas, left, below, q * size, p * size, q, p)
    canvas.rect(left, below, size, size, _MARK, "its output")
    canvas.text(
        left, below + p * size + 18, f"{launch.block[0] // 32} warps, {r} x {s} taps marked"
    )


def _toeplitz(canvas: Canvas, number: Number, launch: Launch, tile: Any) -> None:
    taps, strips = number("FILTER_S"), number("STRIPS")
    rows = 16 * number("ROW_TILES")
    warps = launch.block[0] // 32
    cell, left, top = 13.0, 30.0, 44.0
    deep = 8 * ((taps + 14) // 8)
    canvas.text(8, 20, f"A row of the filter as a matrix of {deep} x 8: {taps} taps per column")
    canvas.rect(left, top, 8 * cell, deep * cell, "paper", "T_r")
    for column in range(8):
        canvas.rect(left + column * cell, top + column * cell, cell, taps * cell, _B)
    _grid(canvas, left, top, 8 * cell, deep * cell, 8, deep)
    side = left + 8 * cell + 60
    canvas.text(side, top + 12, f"A block: {warps} channels, a warp each,")
    canvas.text(side, top + 30, f"{rows} rows x {strips} strips of 8 columns")
    for channel in reversed(range(warps)):
        x, y = side + 6 * channel, top + 50 + 6 * channel
        canvas.rect(x, y, 8 * strips * 5, rows * 5, _C, f"channel {channel}")
    _grid(canvas, side, top + 50, 8 * strips * 5, rows * 5, strips, rows // 16)
    canvas.rect(side, top + 50, 40, 80, _MARK, "one product: 16 rows, 8 columns")
    canvas.text(side, top + 50 + rows * 5 + 6 * warps + 18, "marked: 16 x 8, one mma.sync")


_PAINTERS: dict[str, Callable[[Canvas, Number, Launch, Any], None]] = {
    "cuda-generic": _generic,
    "cuda-gather": _gather,
    "cuda-hopper": _hopper,
    "cuda-hopper-bf16x6": _hopper,
    "cuda-direct": _direct,
    "cuda-patch": _patch,
    "cuda-columns": _gather,
    "cuda-toeplitz": _toeplitz,
}
