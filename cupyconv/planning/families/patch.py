"""cuda-patch (cuda/conv_patch.cu): how a layer of few channels is cut, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.device import CHIPS, RESERVED_SHARED
from cupyconv.planning.families.family import accumulator_bytes, mma_refuses, spatial
from cupyconv.planning.families.streaming import Streaming
from cupyconv.planning.reach import Count
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem

WARPS = 4
MAX_CHANNELS = 8
"""From so many channels on, pieces of 16 bytes feed the gather kernels as well."""

_PIXELS = (128, 64)
_COLUMNS = (128, 64, 32, 16, 8)
_FILTERS = (128, 96, 64, 32, 16)
_ROW_TILES = (4, 2)
_SUMS = 144  # registers of a thread's sums and offsets in backprop_filter
_BANKS = 32
_LARGEST_SHARED = max(chip.block_shared for chip in CHIPS.values()) << 10
_EFFICIENCY = 0.67  # share of the rates, of whole multiprocessors: modelled

_PIECE_INSTRUCTIONS = 20  # of a thread that copies a piece; counted in the source, not measured
_RESULT_INSTRUCTIONS = 6  # of a thread, to round, stage and store a result; counted, not measured

# Of blocks that are too few to fill each other's waits: counted.
_EXECUTED = 2.1  # instructions for each of those for copies and results,
_OF_FRAGMENTS = 2  # and for each product
_OF_BLOCK = 1200  # of a warp, before the first tile and after the last
_STAGING_WAITS = 3  # of a warp of the forward pass, for the filter
_Y_WAITS = 1 / 3  # for each piece of dy that is copied through registers; x has one for each


@dataclass(frozen=True)
class Access:
    """How x is copied and y, or dy, moved.

    Attributes:
        x_last: whether a line of the patch has all channels, else one.
        x_vector: elements of x copied at once.
        shift: elements from an aligned one to a tile's first window.
        y_last: whether channels are contiguous in y.
        y_vector: elements of it moved at once.
    """

    x_last: bool
    x_vector: int
    shift: int
    y_last: bool
    y_vector: int


@dataclass(frozen=True)
class Rows:
    """The flattened rows of the filter, in words: what a register of a fragment holds.

    Attributes:
        word: elements of a word.
        classes: of pixels, whose windows begin in the first or in the second element of a word.
        run: elements that follow each other in a line of the patch.
        run_words: words that a run takes.
        words: all of them, rounded up to whole steps of 8.
        conflicts: wavefronts of an access to the patch.
        residue: elements from a line to the next, modulo the banks'; None for any.
    """

    word: int
    classes: int
    run: int
    run_words: int
    words: int
    conflicts: float
    residue: int | None


@dataclass(frozen=True)
class Cut:
    """What a block takes, and what all of them do.

    Attributes:
        tile_p, tile_q: neighbouring pixels of the output.
        filters: of a block.
        line_pitch: elements from a line of the patch to the next.
        warps_n, warps_k: of backprop_filter, along words and pixels.
        warp_words: blocks of 8 words of a warp of backprop_filter.
        share_words: words of a block of backprop_filter.
        shares: parts of the words, in backprop_filter.
        tiles: that cover the output.
        pieces: of x that are copied for a tile.
        shared_bytes: of shared memory.
        resident: blocks that a multiprocessor has room for.
        products: of fragments.
        wavefronts: of loads from shared memory.
        instructions: of threads, for copies and results.
    """

    tile_p: int
    tile_q: int
    filters: int
    line_pitch: int
    warps_n: int
    warps_k: int
    warp_words: int
    share_words: int
    shares: int
    tiles: int
    pieces: int
    shared_bytes: int
    resident: int
    products: int
    wavefronts: float
    instructions: int


def access_of(request: Request) -> Access:
    """How a request's tensors are read and written."""
    return _access_of(request.problem, request.memory)


@lru_cache(maxsize=4096)
def _access_of(problem: ConvProblem, memory: Strides) -> Access:
    itemsize, channel, column = ITEMSIZE[problem.dtype], problem.data_axes[1], problem.data_axes[-1]
    x, width = memory.x, problem.input_sizes[-1]
    x_last = problem.C > 1 and abs(x[channel]) < abs(x[column])
    if x_last:  # a row is W * C elements that follow each other, or it is copied one by one
        others = tuple(x[axis] for axis in problem.data_axes[:1] + problem.data_axes[2:-1])
        follows = 1 if x[channel] == 1 and x[column] == problem.C else 0
        flat, axis, extent = (*others, follows), len(others), width * problem.C
        x_vector = neighbours(flat, axis, extent, memory.alignment, itemsize)
    else:
        x_vector = neighbours(x, column, width, memory.alignment, itemsize)
    before = problem.padding[-1][0] * (problem.C if x_last else 1)
    y_last = memory.y[channel] == 1 and problem.K > 1
    axis, extent = (channel, problem.K) if y_last else (column, problem.output_sizes[-1])
    y_vector = neighbours(memory.y, axis, extent, memory.alignment, itemsize)
    return Access(x_last, x_vector, -before % x_vector, y_last, y_vector)


def rows_of(request: Request) -> Rows:
    """The flattened rows of a request's filter."""
    return _rows_of(request.problem, access_of(request), request.pass_ == "forward")


@lru_cache(maxsize=4096)
def _rows_of(problem: ConvProblem, access: Access, forward: bool) -> Rows:
    word = 2 if ITEMSIZE[problem.dtype] == 2 else 1
    step = problem.C if access.x_last else 1
    taps, gap = problem.filter_sizes[-1], problem.dilation[-1]
    run = step if gap > 1 else taps * step
    classes = 2 if word == 2 and problem.stride[-1] * step % 2 else 1
    largest_lead = 1 if classes == 2 else access.shift % word
    run_words = -(-(run + largest_lead) // word)
    runs = problem.C * prod(problem.filter_sizes) // run
    words = -(-runs * run_words // 8) * 8
    rows = Rows(word, classes, run, run_words, words, 1.0, None)
    if words * min(_FILTERS) * 4 > _LARGEST_SHARED:
        return rows  # which no block has room for
    conflicts, residue = _conflicts(problem, access, rows, forward)
    return replace(rows, conflicts=conflicts, residue=residue)


def _conflicts(
    problem: ConvProblem, access: Access, rows: Rows, forward: bool
) -> tuple[float, int | None]:
    """Fewest wavefronts, on average, of a warp's access to the patch, and the residue they need.

    Lanes read words of 8 pixels and 4 places of the filter, or of 4 pixels and 8 places.
    """
    itemsize = ITEMSIZE[problem.dtype]
    pixels, places = (8, 4) if forward else (4, 8)
    of_pixel = rows.classes * problem.stride[-1] * (problem.C if access.x_last else 1)
    if not forward:
        of_pixel *= rows.word
    words = list(_words(problem, access, rows))
    words += words[-1:] * (rows.words - len(words))
    patterns: Counter[tuple[tuple[int, int], ...]] = Counter()
    for at in range(0, len(words), places):
        first_line, first_column = words[at]
        group = words[at : at + places]
        patterns[tuple((line - first_line, column - first_column) for line, column in group)] += 1

    def wavefronts(pitch: int) -> int:
        total = 0
        for pattern, count in patterns.items():
            addresses = {
                (pixel * of_pixel + line * pitch + column) * itemsize // 4
                for pixel in range(pixels)
                for line, column in pattern
            }
            total += count * max(Counter(address % _BANKS for address in addresses).values())
        return total

    period = _BANKS * 4 // itemsize
    # Whole rounds of the banks more, so that no line reaches the next.
    apart = period * (1 + max(column for _, column in words) + pixels * of_pixel)
    unit = max(access.x_vector, rows.word, period // 8)
    found = {residue: wavefronts(apart + residue) for residue in range(0, period, unit)}
    best = min(found, key=lambda residue: found[residue])
    free = max(found.values()) == found[best]
    return found[best] / sum(patterns.values()), None if free else best


def _words(problem: ConvProblem, access: Access, rows: Rows) -> Iterator[tuple[int, int]]:
    """Line and first element of each word, as if the planes of a volume followed each other."""
    step, line_channels = (problem.C, 1) if access.x_last else (1, problem.C)
    depth, height, _ = spatial(problem.filter_sizes)
    gap_h, gap_w = spatial(problem.dilation)[1:]
    columns = problem.filter_sizes[-1] if gap_w > 1 else 1
    for row, channel, s in product(range(depth * height), range(line_channels), range(columns)):
        for word in range(rows.run_words):
            yield row * gap_h * line_channels + channel, s * gap_w * step + word * rows.word


@lru_cache(maxsize=4096)
def cut(request: Request) -> Cut | None:
    """The cheapest cut; None if none fits into shared memory and registers."""
    rows = rows_of(request)
    limit = request.device.chip.block_shared << 10
    least = 8 * rows.classes  # neighbours of a class
    patches = [
        _patch(request, rows, pixels // tile_q, tile_q)
        for pixels in _PIXELS
        for tile_q in _COLUMNS
        if least <= tile_q <= pixels
    ]
    ways = _forward_ways if request.pass_ == "forward" else _filter_ways
    found = (way for one in patches for way in ways(request, rows, one))
    fitting = (way for way in found if way.shared_bytes <= limit)
    return min(fitting, key=_cycles, default=None)


def _cycles(made: Cut) -> float:
    """Of a multiprocessor of 8.0, were it alone: what cuts are compared by."""
    alone = 1.3 if made.resident == 1 else 1.0  # no other block hides its latencies
    return alone * (max(made.products * 8 / WARPS, made.wavefronts) + made.instructions / 128)


@dataclass(frozen=True)
class _Patch:
    """A tile of tile_p x tile_q outputs, and the input under it."""

    tile_p: int
    tile_q: int
    tiles: int
    pieces: int
    line_pitch: int
    size: int  # bytes

    @property
    def pixels(self) -> int:
        return self.tile_p * self.tile_q


def _patch(request: Request, rows: Rows, tile_p: int, tile_q: int) -> _Patch:
    problem, access = request.problem, access_of(request)
    itemsize = ITEMSIZE[problem.dtype]
    step, line_channels = (problem.C, 1) if access.x_last else (1, problem.C)
    taps_t, taps_r, taps_s = spatial(problem.filter_sizes)
    _, stride_h, stride_w = spatial(problem.stride)
    _, gap_h, gap_w = spatial(problem.dilation)
    lines = taps_t * ((tile_p - 1) * stride_h + (taps_r - 1) * gap_h + 1) * line_channels
    columns = (tile_q - 1) * stride_w + (taps_s - 1) * gap_w + 1
    unit = max(access.x_vector, rows.word)
    line = -(-(access.shift + columns * step) // unit) * unit
    pitch = line
    if rows.residue is not None:
        pitch += (rows.residue - line) % (_BANKS * 4 // itemsize)
    depth, height, width = spatial(problem.output_sizes)
    return _Patch(
        tile_p,
        tile_q,
        problem.N * depth * -(-height // tile_p) * -(-width // tile_q),
        lines * (line // access.x_vector),
        pitch,
        lines * pitch * itemsize,
    )


def _forward_ways(request: Request, rows: Rows, patch: _Patch) -> Iterator[Cut]:
    problem, access = request.problem, access_of(request)
    itemsize, steps = ITEMSIZE[problem.dtype], rows.words // 8
    accumulator = accumulator_bytes(problem)
    for filters in _FILTERS:
        enough = any(problem.K <= fewer < filters for fewer in _FILTERS)
        if enough or (itemsize == 8 and filters > 64):
            continue
        weights = rows.classes * rows.words * filters * accumulator
        lines, line = (patch.pixels, filters) if access.y_last else (filters, patch.pixels)
        output = lines * (line + (8 if itemsize == 2 else 4)) * itemsize
        tables = rows.classes * rows.words * 8 + filters * accumulator
        shared = weights + -(-2 * patch.size // 16) * 16 + output + tables
        tiles = patch.tiles * -(-problem.K // filters)
        yield Cut(
            patch.tile_p,
            patch.tile_q,
            filters,
            patch.line_pitch,
            warps_n=0,
            warps_k=0,
            warp_words=0,
            share_words=0,
            shares=1,
            tiles=patch.tiles,
            pieces=patch.pieces,
            shared_bytes=-(-shared // 16) * 16,
            resident=_resident(request, shared, patch.pixels * filters * accumulator // 512),
            products=tiles * steps * (patch.pixels // 16) * (filters // 8),
            wavefronts=tiles
            * steps
            * (patch.pixels // 4 * rows.conflicts + WARPS * (filters // 4 + 2)),
            instructions=tiles
            * (_PIECE_INSTRUCTIONS * patch.pieces + _RESULT_INSTRUCTIONS * patch.pixels * filters),
        )


def _filter_ways(request: Request, rows: Rows, patch: _Patch) -> Iterator[Cut]:
    problem, access = request.problem, access_of(request)
    itemsize, pixels = ITEMSIZE[problem.dtype], patch.pixels
    registers = 4 * rows.word * (2 if itemsize == 8 else 1)  # of a block of words and 16 filters
    rounded = 4 if itemsize == 4 else 0  # registers of operands on the way to TF32
    steps = pixels // (8 * rows.word)  # of all warps along pixels
    for row_tiles, warps_k in product(_ROW_TILES, (1, 2, 4)):
        if not rows.classes <= warps_k <= steps:
            continue
        filters, warps_n = 16 * row_tiles, WARPS // warps_k
        most = _SUMS // (registers * row_tiles + 1)  # and a register for an offset
        whole = rows.run_words if rows.classes == 2 else 8  # taps of both classes are of one share
        units = -(-rows.words // whole)
        if 8 * warps_n * most < whole:
            continue
        shares = -(-units // (8 * warps_n * most // whole))
        share_words = -(-units // shares) * whole
        warp_words = -(-share_words // (8 * warps_n))
        lines, line = (pixels, filters) if access.y_last else (filters, pixels)
        padding = 32 if access.y_last and itemsize > 2 else 0  # RingTile::PADDING
        stage = lines * (line * itemsize + padding) + patch.size
        # The warps along pixels exchange sums in the place of the stages.
        sums = (share_words * rows.word + rows.word - 1) * (filters + 4 // rows.word)
        exchange = sums * accumulator_bytes(problem) if warps_k > 1 else 0
        shared = max(2 * (-(-stage // 128) * 128), -(-exchange // 128) * 128)
        tiles = patch.tiles * -(-problem.K // filters) * shares
        loads = row_tiles * 4 + warp_words * 2 * rows.word * rows.conflicts
        copied = patch.pieces + filters * pixels // access.y_vector
        yield Cut(
            patch.tile_p,
            patch.tile_q,
            filters,
            patch.line_pitch,
            warps_n,
            warps_k,
            warp_words,
            share_words,
            shares,
            tiles=patch.tiles,
            pieces=patch.pieces,
            shared_bytes=shared,
            resident=_resident(request, shared, registers * row_tiles * warp_words + rounded),
            products=tiles * steps * warps_n * row_tiles * warp_words * rows.word,
            wavefronts=tiles * steps * warps_n * loads,
            instructions=tiles * _PIECE_INSTRUCTIONS * copied,
        )


def _resident(request: Request, shared_bytes: int, sums: int) -> int:
    """Blocks of a multiprocessor, by shared memory and by the registers of a thread's sums."""
    room = request.device.chip.shared << 10
    by_registers = 4 if sums <= 32 else 3 if sums <= 64 else 2
    return max(min(room // (shared_bytes + RESERVED_SHARED), by_registers), 1)


def _operations(request: Request, made: Cut) -> int:
    """Multiplications and additions of all products, those with padding included."""
    return made.products * 2 * 16 * 8 * 8 * rows_of(request).word


def _waiting(request: Request, made: Cut, blocks: int, tiles: int) -> float:
    """Microseconds of so many blocks of so many tiles each, which wait one after the other."""
    chip, access, forward = request.device.chip, access_of(request), request.pass_ == "forward"
    itemsize, threads = ITEMSIZE[request.problem.dtype], 32 * WARPS
    # cp.async copies 4 bytes and more.
    synchronous = 16 if request.device.capability < (8, 0) else 2
    waits = 0.0
    if access.x_vector * itemsize <= synchronous:
        waits += made.pieces / threads
    if not forward and access.y_vector * itemsize <= synchronous:
        of_y = made.filters * made.tile_p * made.tile_q // access.y_vector
        waits += _Y_WAITS * of_y / threads
    executed = _EXECUTED * made.instructions / 32 + _OF_FRAGMENTS * made.products
    longest = executed / (blocks * tiles * WARPS)
    turns = -(-blocks // (chip.multiprocessors * made.resident))
    cycles = turns * tiles * (longest * cost.PACE + waits * cost.LATENCY)
    cycles += _OF_BLOCK * cost.PACE + (1 + _STAGING_WAITS * forward) * cost.LATENCY
    return cycles / (chip.clock * 1e3)


class Patch(Streaming):
    name = "cuda-patch"
    summary = (
        "few channels: the input under a tile copied once, rows of the filter as gemm_k, on the "
        "tensor cores"
    )
    kernels = "patch"

    def refuses_layer(self, request: Request) -> str | None:
        refusal, problem = mma_refuses(request), request.problem
        if refusal is not None:
            return refusal
        if request.pass_ == "backprop_input":
            return "cuda-patch computes forward and backprop_filter"
        if problem.groups > 1:
            return f"cuda-patch takes one group, not {problem.groups}"
        if problem.C > MAX_CHANNELS:
            return f"cuda-patch takes up to {MAX_CHANNELS} channels, not {problem.C}"
        if -(-problem.K // min(_FILTERS)) >= 2**16:
            return "the filters are more than a launch has blocks for"
        if cut(request) is None:
            return "the input under a tile and the filter do not fit into a block"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        made, problem = cut(request), request.problem
        assert made is not None
        lines = spatial(problem.stride)[1] * (1 if access_of(request).x_last else problem.C)
        yield Count("elements of lines from window to window", lines * made.line_pitch, 2**31 - 1)

    def shared_out(self, request: Request) -> tuple[int, int]:
        made = cut(request)
        assert made is not None
        return made.tiles, -(-request.problem.K // made.filters) * made.shares

    def computing(self, request: Request, chunks: int) -> float:
        made, chip = cut(request), request.device.chip
        assert made is not None
        if made.tiles == 0:
            return 0.0
        _, others = self.shared_out(request)
        # Of the busiest multiprocessor, over its share of the tiles.
        busiest = -(-others * chunks // chip.multiprocessors) * -(-made.tiles // chunks)
        uneven = busiest * chip.multiprocessors / (others * made.tiles)
        busy = cost.computing(
            chip,
            cost.tensor_rate(request),
            _operations(request, made),
            made.wavefronts,
            made.instructions,
        )
        waiting = _waiting(request, made, others * chunks, -(-made.tiles // chunks))
        return max(uneven * busy / _EFFICIENCY, waiting)


CUDA_PATCH = Patch()
