"""cuda-toeplitz (cuda/conv_toeplitz.cu): how a depthwise layer is cut, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

from cupyconv.planning import cost
from cupyconv.planning.device import RESERVED_SHARED
from cupyconv.planning.families.streaming import Streaming
from cupyconv.planning.reach import MOST_BLOCKS, Count
from cupyconv.planning.request import Request
from cupyconv.planning.strides import neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem

CHANNELS = 8
"""Channels of a block, a warp each."""

LARGEST_FILTER = 64
"""Taps of a filter row: 9 blocks of 8 columns under a strip, in 5 products."""

_LARGEST_STRIPS = 8
_MOST_SHARED = 99  # KiB: two blocks of a multiprocessor where it has the most
_ALONE = 1.3  # times as long takes a block whose latencies no other hides: modelled

# For a patch, of a block's most busy warp; in a filter's gradient if True: counted.
_OF_PRODUCT = {False: 3.1, True: 3.8}  # with the loads of its fragments
_OF_BAND = 9.3  # for 8 taps of a row, that are loaded as fragments, where it is no such gradient
_OF_SOURCE = {False: 6.5, True: 1.5}  # for 32 elements that are brought
_OF_RESULT = 4.3  # for 32 elements that are brought, in a filter's gradient
_OF_PATCH = {False: 373, True: 326}
_OTHERS = {False: 135, True: 60}  # so many less, of the other warps
_OF_PIECE = {False: 1.8, True: 3.0}  # that is moved beyond one for 8 elements
_OF_BLOCK = 224  # in a filter's gradient, once

_WAITS_OF_TURN = {False: 1.25, True: 0.75}  # of lines of the source: counted

# Wavefronts of a warp, for a patch: counted.
_WAVES_OF_MATRICES = {False: 2.75, True: 5.1}  # two blocks of 16 x 8
_WAVES_OF_ROWS = 3.6  # 16 of the patch under a row of the filter
_WAVES_OF_SOURCE = {False: 1.7, True: 0.9}
_WAVES_OF_FILTER = 5.2  # 32 taps of a row
_WAVES_OF_PATCH = 24  # in a filter's gradient


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


@dataclass(frozen=True)
class Access:
    """How elements of a tensor are moved.

    Attributes:
        is_last: of channels that lie side by side, else of columns.
        vector: so many at once.
        width: columns of a row.
    """

    is_last: bool
    vector: int
    width: int


def access(request: Request, role: str) -> Access:
    """That of x or y."""
    problem, memory = request.problem, request.memory
    layout = memory.x if role == "x" else memory.y
    channel, column = problem.data_axes[1], problem.data_axes[-1]
    last = layout[channel] == 1 and problem.groups > 1
    width = (problem.input_sizes if role == "x" else problem.output_sizes)[-1]
    axis, extent = (channel, problem.groups) if last else (column, width)
    itemsize = ITEMSIZE[problem.dtype]
    vector = neighbours(layout, axis, extent, memory.alignment, itemsize)
    return Access(last, vector, width)


@lru_cache(maxsize=4096)
def cut(request: Request) -> Cut | None:
    """The cheapest cut; None if none fits into shared memory."""
    problem, chip = request.problem, request.device.chip
    limit = min(chip.block_shared, _MOST_SHARED) << 10
    sizes = problem.input_sizes if request.pass_ == "backprop_input" else problem.output_sizes
    rows = problem.N * (sizes[0] if len(sizes) == 2 else 1)
    strips = min(-(-sizes[-1] // 8), _LARGEST_STRIPS)
    taps = problem.filter_sizes[-1]
    # Sums that a thread of backprop_filter has registers for, beside the blocks under long filters.
    sums = 40 if request.device.capability < (8, 0) or products(taps) > 2 else 48
    ways = product((2, 1) if rows > 16 else (1,), (False, True), range(strips, 0, -1))
    cuts = [_cut(problem, request.pass_, sums, *way) for way in ways]

    # Plans are carried out without the layout.
    whole = (Access(False, CHANNELS, sizes[-1]), Access(False, CHANNELS, sizes[-1]))

    def microseconds(made: Cut) -> float:
        blocks = made.patches * made.shares * -(-problem.groups // CHANNELS)
        work = _work(request, made, whole)
        resident = _resident(request, made)
        alone = _ALONE if resident == 1 else 1.0
        return alone * cost.of_blocks(chip, blocks, resident, work)

    fitting = (made for made in cuts if made.shared_bytes <= limit)
    return min(fitting, key=microseconds, default=None)


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


def _turns(lines: int, blocks: int, found: Access) -> int:
    """How often a warp waits for what it brings of so many lines of blocks of 8 columns."""
    at_once = max(32 // blocks, 1) * (CHANNELS if found.is_last else 4)
    return -(-lines // at_once)


def _sectors(lines: int, blocks: int, found: Access) -> float:
    """That a block asks for, of so many lines of blocks of 8 columns."""
    pieces, columns = CHANNELS / found.vector * lines, min(8 * blocks, found.width)
    if found.is_last:
        return pieces * columns
    # Whole rows follow each other; others end within a sector.
    return pieces * CHANNELS * (columns / 16 + (columns < found.width) / 2)


def _resident(request: Request, made: Cut) -> int:
    """Blocks that a multiprocessor holds, by shared memory and registers: the latter counted."""
    is_filter = request.pass_ == "backprop_filter"
    by_registers = 2 if is_filter or made.row_tiles * made.strips > 8 else 3
    each = made.shared_bytes + RESERVED_SHARED
    return max(min((request.device.chip.shared << 10) // each, by_registers), 1)


def _work(request: Request, made: Cut, accesses: tuple[Access, Access]) -> cost.Work:
    """Of a block, for a patch and share of the filter's rows."""
    chip, is_filter = request.device.chip, request.pass_ == "backprop_filter"
    taps, (of_source, of_result) = request.problem.filter_sizes[-1], accesses
    rows, blocks = 16 * made.row_tiles, made.strips + window(taps) - 1
    multiplied = made.tap_rows * made.row_tiles * made.strips * products(taps)
    passed = made.tap_rows * made.row_tiles
    matrices = passed * blocks / 2
    source, result = made.lines * blocks / 4, rows * made.strips / 4  # for each lane
    pieces = sum(
        (CHANNELS / found.vector - 1) * moved / CHANNELS
        for found, moved in zip(accesses, (source, result), strict=True)
    )
    longest = _OF_PATCH[is_filter] + _OF_SOURCE[is_filter] * source + _OF_PIECE[is_filter] * pieces
    longest += _OF_PRODUCT[is_filter] * multiplied
    wavefronts = _WAVES_OF_MATRICES[is_filter] * matrices + _WAVES_OF_SOURCE[is_filter] * source
    waits = _WAITS_OF_TURN[is_filter] * _turns(made.lines, blocks, of_source)
    if is_filter:
        longest += _OF_RESULT * result
        wavefronts += _WAVES_OF_PATCH
        waits += _turns(rows, made.strips, of_result)
    else:
        of_filter = made.tap_rows * -(-8 * (window(taps) + 1) // 32)
        longest += _OF_BAND * made.tap_rows * window(taps)
        wavefronts += _WAVES_OF_ROWS * passed + _WAVES_OF_FILTER * of_filter
        waits += 0.75 + of_filter / 8  # loads that are under way at once
    rate_of_one = cost.tensor_rate(request) * 1e3 / chip.clock / chip.multiprocessors
    return cost.Work(
        multiplying=CHANNELS * multiplied * 2 * 16 * 8 * 16 / rate_of_one,
        wavefronts=CHANNELS * wavefronts,
        instructions=CHANNELS * (longest - _OTHERS[is_filter]),
        longest=longest,
        waits=waits,
        sectors=_sectors(made.lines, blocks, of_source) + _sectors(rows, made.strips, of_result),
    )


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
        made = cut(request)
        assert made is not None
        patches, others = self.shared_out(request)
        roles = ("y", "x") if request.pass_ == "backprop_input" else ("x", "y")
        work = _work(request, made, (access(request, roles[0]), access(request, roles[1])))
        work = work.times(-(-patches // chunks))
        if request.pass_ == "backprop_filter":
            work += cost.Work(0, 0, CHANNELS * _OF_BLOCK, _OF_BLOCK, 0)
        blocks = others * chunks
        return cost.of_blocks(request.device.chip, blocks, _resident(request, made), work)


CUDA_TOEPLITZ = Toeplitz()
