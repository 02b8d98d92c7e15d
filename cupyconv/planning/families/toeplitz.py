"""cuda-toeplitz (cuda/conv_toeplitz.cu): how a depthwise layer is cut, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

from cupyconv.planning import cost
from cupyconv.planning.families.streaming import Streaming
from cupyconv.planning.reach import MOST_BLOCKS, Count
from cupyconv.planning.request import Request
from cupyconv.problem import ConvProblem

CHANNELS = 8
"""Channels of a block, a warp each."""

LARGEST_FILTER = 64
"""Taps of a filter row: 9 blocks of 8 columns under a strip, in 5 products."""

_LARGEST_STRIPS = 8
_MOST_SHARED = 99  # KiB: two blocks of a multiprocessor where it has the most
_EFFICIENCY = 0.85  # share of a multiprocessor's cycles that find work: modelled

_RESIDENT = 2  # blocks of a multiprocessor

_WAITS = 2  # of a warp, for a patch: counted

# Instructions of a warp: counted.
_OF_PRODUCT = 4.6  # with the loads of its fragments
_OF_SOURCE = 5  # that are brought: for 32 elements
_OF_RESULT = 9  # that are stored: for 32 elements
_OF_FILTER = 14  # for 32 taps of a row
_OF_PATCH = 100  # for what else a patch takes


@dataclass(frozen=True)
class Cut:
    """What a block takes.

    Attributes:
        row_tiles: tiles of 16 rows of the walked tensor.
        aligned: whether the rows of an image are rounded up to whole blocks, else those of all
            images follow each other.
        rows: of all images together, so numbered.
        strips: strips of 8 columns.
        tap_rows: rows of the filter.
        lines: rows of the source.
        shared_bytes: of shared memory.
        patches: how many patches of rows and columns cover the walked tensor.
        shares: parts of the filter's rows.
    """

    row_tiles: int
    aligned: bool
    rows: int
    strips: int
    tap_rows: int
    lines: int
    shared_bytes: int
    patches: int
    shares: int


@lru_cache(maxsize=4096)
def cut(request: Request) -> Cut | None:
    """The cheapest cut; None if none fits into shared memory."""
    problem, chip = request.problem, request.device.chip
    limit = min(chip.block_shared, _MOST_SHARED) << 10
    half = (80 if chip.shared >= 160 else 48) << 10
    sizes = problem.input_sizes if request.pass_ == "backprop_input" else problem.output_sizes
    rows = problem.N * (sizes[0] if len(sizes) == 2 else 1)
    strips = min(-(-sizes[-1] // 8), _LARGEST_STRIPS)
    taps = problem.filter_sizes[-1]
    # Sums that a thread of backprop_filter has registers for, beside the blocks under long filters.
    sums = 40 if request.device.capability < (8, 0) or products(taps) > 2 else 48
    ways = product((2, 1) if rows > 16 else (1,), (False, True), range(strips, 0, -1))
    cuts = [_cut(problem, request.pass_, sums, *way) for way in ways]

    def cost(made: Cut) -> float:
        alone = 1.0 if made.shared_bytes <= half else 1.3  # no other block hides its latencies
        return alone * _cycles(made, request.pass_, taps)

    fitting = (made for made in cuts if made.shared_bytes <= limit)
    return min(fitting, key=cost, default=None)


def _cut(
    problem: ConvProblem, pass_: str, sums: int, row_tiles: int, aligned: bool, strips: int
) -> Cut:
    height, taps_r = problem.input_sizes[0], problem.filter_sizes[0]
    if pass_ != "backprop_input":
        height = problem.output_sizes[0]
    if problem.spatial_rank == 1:
        height = taps_r = 1
    taps = problem.filter_sizes[-1]
    width = (problem.input_sizes if pass_ == "backprop_input" else problem.output_sizes)[-1]
    shares = 1
    if pass_ == "backprop_filter":
        affordable = max(sums // (4 * products(taps)), 1)
        shares = -(-taps_r // affordable)
    tap_rows = -(-taps_r // shares)
    rows = 16 * row_tiles
    if aligned:
        height = -(-height // rows) * rows
    # Blocks begin at multiples of rows.
    images_begun = 1 + (rows - gcd(rows, height) - 1) // height
    lines = rows + (tap_rows - 1) * (1 + images_begun)
    source = CHANNELS * lines * _line_bytes(strips + window(taps) - 1)
    walked = CHANNELS * rows * _line_bytes(strips)
    where = 8 * (lines + rows)
    if pass_ == "backprop_filter":
        plain_sums = CHANNELS * tap_rows * taps * 4
        diagonals = CHANNELS * 16 * products(taps) * 9 * 4
        shared = max(source + walked + plain_sums + where, diagonals)
    else:
        shared = max(source, walked) + CHANNELS * taps_r * (8 * window(taps) + 8) * 2 + where
    numbered = problem.N * height
    patches = -(-numbered // rows) * -(-width // (8 * strips))
    shared = -(-shared // 16) * 16
    return Cut(row_tiles, aligned, numbered, strips, tap_rows, lines, shared, patches, shares)


def window(taps: int) -> int:
    """Blocks of 8 columns under a strip of 8."""
    return (taps + 14) // 8


def products(taps: int) -> int:
    """Products of 16 columns for a strip and a row of the filter."""
    return (window(taps) + 1) // 2


def _line_bytes(blocks: int) -> int:
    return (blocks | 1) * 16


def _instructions(made: Cut, pass_: str, taps: int) -> float:
    """Of a channel's warp, for one patch and share of the filter's rows."""
    of_products = made.tap_rows * made.row_tiles * made.strips * products(taps) * _OF_PRODUCT
    of_source = made.lines * (made.strips + window(taps) - 1) * 8 / 32 * _OF_SOURCE
    of_result = 16 * made.row_tiles * made.strips * 8 / 32
    of_result *= _OF_SOURCE if pass_ == "backprop_filter" else _OF_RESULT
    of_filter = 0 if pass_ == "backprop_filter" else made.tap_rows * -(-taps // 32) * _OF_FILTER
    return of_products + of_source + of_result + of_filter


def _cycles(made: Cut, pass_: str, taps: int) -> float:
    """Of a multiprocessor's quarter, for a channel's warps."""
    of_products = made.tap_rows * made.row_tiles * made.strips * products(taps) * 8
    of_patch = max(of_products, _instructions(made, pass_, taps))
    return made.patches * made.shares * of_patch


class Toeplitz(Streaming):
    name = "cuda-toeplitz"
    summary = "rows of a channel times the filter's rows as Toeplitz matrices, on the tensor cores"
    kernels = "toeplitz"

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if problem.dtype not in ("float16", "bfloat16"):
            return f"cuda-toeplitz multiplies 16-bit types, not {problem.dtype}"
        if problem.dtype == "bfloat16" and request.device.capability < (8, 0):
            return "bfloat16 on tensor cores needs compute capability 8.0"
        if not problem.C == problem.K == problem.groups:
            return "cuda-toeplitz takes depthwise layers with one filter a channel"
        if problem.spatial_rank == 3:
            return "cuda-toeplitz takes 1-D and 2-D layers"
        if set(problem.stride) != {1} or set(problem.dilation) != {1}:
            return "cuda-toeplitz takes stride 1 and dilation 1"
        if problem.filter_sizes[-1] > LARGEST_FILTER:
            return f"{problem.filter_sizes[-1]} taps of a row are more than {LARGEST_FILTER}"
        if -(-problem.groups // CHANNELS) >= 2**16:
            return "the channels are more than a launch has blocks for"
        if cut(request) is None:
            return "the rows under a block and the filter do not fit into shared memory"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        made = cut(request)
        assert made is not None
        yield Count("blocks", made.patches, MOST_BLOCKS)
        yield Count("parts of the filter's rows", made.shares, 2**16 - 1)

    def shared_out(self, request: Request) -> tuple[int, int]:
        made = cut(request)
        assert made is not None
        return made.patches, -(-request.problem.groups // CHANNELS) * made.shares

    def computing(self, request: Request, chunks: int) -> float:
        made, chip = cut(request), request.device.chip
        assert made is not None
        patches, others = self.shared_out(request)
        blocks, each = others * chunks, -(-patches // chunks)
        # Of whole blocks, the last wave's that are missing included.
        warps = -(-blocks // chip.multiprocessors) * each * chip.multiprocessors * CHANNELS
        taps = request.problem.filter_sizes[-1]
        of_products = made.tap_rows * made.row_tiles * made.strips * products(taps)
        executed = _instructions(made, request.pass_, taps) + _OF_PATCH
        busy = cost.computing(
            chip,
            cost.tensor_rate(request),
            warps * of_products * 2 * 16 * 8 * 16,
            instructions=warps * 32 * executed,
        )
        turns = -(-blocks // (chip.multiprocessors * _RESIDENT))
        waiting = turns * each * (executed * cost.PACE + _WAITS * cost.LATENCY)
        return max(busy / _EFFICIENCY, waiting / (chip.clock * 1e3))


CUDA_TOEPLITZ = Toeplitz()
