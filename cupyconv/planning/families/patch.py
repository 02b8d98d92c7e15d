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

_THREADS = 32 * WARPS

# Of a warp, where nothing else is said: counted.  First in the forward pass:
_FORWARD_TILE = 237  # instructions for a tile,
_FORWARD_PRODUCT = 3.9  # for a product of fragments, with their loads,
_FORWARD_PIECE = 50  # for a piece of x that each thread copies,
_FORWARD_STORE = 33  # for a piece of y that it stores,
_FORWARD_RESULT = 0.5  # for an element of it,
_FORWARD_WEIGHT = 58  # for an element of the filter that it stages,
_FORWARD_BLOCK = 453  # and besides
_FORWARD_OTHERS = 100  # instructions that all but the most busy warp have less
_RESULT_WAVES = 2  # wavefronts for an element of y,
_WEIGHT_WAVES = 3.5  # for one of the filter,
_FORWARD_WAVES = 6  # and for a tile besides
_WEIGHT_WAITS = 1 / 3  # for an element of the filter
_FORWARD_WAITS = 0.28  # for a piece of x that goes through registers

# In backprop_filter:
_FILTER_PRODUCT = 0.9  # instructions for a product of fragments,
_FILTER_WORDS = 10.6  # for words of x that are multiplied by all filters of a block,
_FILTER_PIECE = 45  # for a piece of x that each thread copies,
_GRADIENT_PIECE = 42  # for a piece of dy,
_GRADIENT_SPLIT = 4.9  # for an element of it that goes to the pixels of its class,
_FILTER_SUMS = 76  # for 8 words and 16 filters of sums,
_FILTER_BLOCK = 309  # and besides
_FILTER_OTHERS = 40
_SPLIT_WAVES = 2.5  # wavefronts for an element of dy that goes to the pixels of its class,
_SUMS_WAVES = 3.7  # for 8 words and 16 filters of sums,
_FILTER_WAVES = 15  # and for a tile besides
_FILTER_WAITS = 0.48  # for a piece of x that goes through registers
_GRADIENT_WAITS = 0.36  # for one of dy, or
_SPLIT_WAITS = 1  # where its elements go to the pixels of their classes
# Where operands are rounded to TF32:
_ROUNDED_PRODUCT = 2.9  # instructions more for a product of backprop_filter,
_ROUNDED_FRAGMENT = 11.6  # for a fragment of x in the forward pass, for 8 filters at a time,
_ROUNDED_WAVES = 2.4  # and wavefronts
_COPY_WAVES = 1.5  # for a piece of x; in either pass, like those of the next
_Y_WAVES = 0.5  # for a piece of y or dy


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
        shared_bytes: of shared memory.
        resident: blocks that a multiprocessor has room for.
        tile: what a block does for each.
        block: what it does besides.
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
    shared_bytes: int
    resident: int
    tile: cost.Work
    block: cost.Work


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
    return min(fitting, key=lambda made: _microseconds(request, made), default=None)


def _microseconds(request: Request, made: Cut) -> float:
    """Of all tiles, shared out evenly: what cuts are compared by."""
    chip, others = request.device.chip, _others(request, made)
    at_once = max(chip.multiprocessors * made.resident // others, 1)  # as blocks that stay are
    each = max(-(-made.tiles // at_once), 1)
    return _of_blocks(request, made, -(-made.tiles // each), each)


def _of_blocks(request: Request, made: Cut, chunks: int, each: int) -> float:
    """Microseconds of blocks that take so many chunks of as many tiles each."""
    work = made.tile.times(each) + made.block
    blocks = chunks * _others(request, made)
    return cost.of_blocks(request.device.chip, blocks, made.resident, work)


def _others(request: Request, made: Cut) -> int:
    """Blocks that take the same tiles."""
    return -(-request.problem.K // made.filters) * made.shares


def _multiplying(request: Request, products: float) -> float:
    """Cycles of a multiprocessor for products of fragments: of float32, as TF32."""
    chip, itemsize = request.device.chip, ITEMSIZE[request.problem.dtype]
    rate = {2: chip.tensor_rate, 4: chip.tensor_rate / 2, 8: chip.double_tensor_rate}[itemsize]
    flops = 2 * 16 * 8 * 8 * (2 if itemsize == 2 else 1)
    if not rate:  # the chip has no such products
        return 0.0
    return products * flops * chip.multiprocessors * chip.clock / (rate * 1e3)


def _is_rounded(request: Request) -> bool:
    """Whether operands are rounded to TF32."""
    return ITEMSIZE[request.problem.dtype] == 4


def _is_synchronous(request: Request, vector: int) -> bool:
    """Whether pieces go through registers: cp.async copies 4 bytes and more, from 8.0 on."""
    least = 32 if request.device.capability < (8, 0) else 4
    return vector * ITEMSIZE[request.problem.dtype] < least


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
    itemsize = ITEMSIZE[problem.dtype]
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
        tile, block = _forward_work(request, rows, patch, filters)
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
            shared_bytes=-(-shared // 16) * 16,
            resident=_resident(request, shared, patch.pixels * filters * accumulator // 512),
            tile=tile,
            block=block,
        )


def _forward_work(
    request: Request, rows: Rows, patch: _Patch, filters: int
) -> tuple[cost.Work, cost.Work]:
    """Of a block for a tile, and besides."""
    access, steps = access_of(request), rows.words // 8
    copied, results = patch.pieces / _THREADS, patch.pixels * filters / _THREADS
    stored, staged = results / access.y_vector, rows.classes * rows.words * filters / _THREADS
    products = steps * (patch.pixels // 16) * (filters // 8)
    loads = steps * (patch.pixels // 4 * rows.conflicts + WARPS * (filters // 4 + 2))
    waves = _FORWARD_WAVES + _RESULT_WAVES * results + _COPY_WAVES * copied + _Y_WAVES * stored
    fragments = products / (filters // 8) if _is_rounded(request) else 0
    waves += _ROUNDED_WAVES * fragments / WARPS
    of_tile = (
        _FORWARD_TILE
        + (_FORWARD_PRODUCT * products + _ROUNDED_FRAGMENT * fragments) / WARPS
        + _FORWARD_PIECE * copied
        + _FORWARD_STORE * stored
        + _FORWARD_RESULT * results
    )
    of_block = _FORWARD_BLOCK + _FORWARD_WEIGHT * staged
    is_synchronous = _is_synchronous(request, access.x_vector)
    tile = cost.Work(
        multiplying=_multiplying(request, products),
        wavefronts=loads + WARPS * waves,
        instructions=WARPS * of_tile,
        longest=of_tile,
        waits=_FORWARD_WAITS * copied if is_synchronous else 0,
    )
    block = cost.Work(
        multiplying=0,
        wavefronts=WARPS * _WEIGHT_WAVES * staged,
        instructions=WARPS * (of_block - _FORWARD_OTHERS),
        longest=of_block,
        waits=_WEIGHT_WAITS * staged,
    )
    return tile, block


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
        tile, block = _filter_work(request, rows, patch, row_tiles, warps_n, warp_words)
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
            shared_bytes=shared,
            resident=_resident(request, shared, registers * row_tiles * warp_words + rounded),
            tile=tile,
            block=block,
        )


def _filter_work(
    request: Request, rows: Rows, patch: _Patch, row_tiles: int, warps_n: int, warp_words: int
) -> tuple[cost.Work, cost.Work]:
    """Of a block for a tile, and besides."""
    access, steps = access_of(request), patch.pixels // (8 * rows.word)
    copied, gradients = patch.pieces / _THREADS, 16 * row_tiles * patch.pixels / _THREADS
    brought = gradients / access.y_vector
    words = steps * warps_n * warp_words * rows.word
    products = words * row_tiles
    loads = steps * warps_n * (row_tiles * 4 + warp_words * 2 * rows.word * rows.conflicts)
    is_split = not access.y_last and rows.classes == 2  # a row's neighbours are of both classes
    split = gradients if is_split else 0
    waves = _FILTER_WAVES + _COPY_WAVES * copied + _Y_WAVES * brought + _SPLIT_WAVES * split
    of_tile = (
        (_FILTER_PRODUCT + _ROUNDED_PRODUCT * _is_rounded(request)) * products / WARPS
        + _FILTER_WORDS * words / WARPS
        + _FILTER_PIECE * copied
        + _GRADIENT_PIECE * brought
        + _GRADIENT_SPLIT * split
    )
    sums = warp_words * row_tiles
    of_block = _FILTER_BLOCK + _FILTER_SUMS * sums
    waits = _FILTER_WAITS * copied if _is_synchronous(request, access.x_vector) else 0
    if is_split:
        waits += _SPLIT_WAITS * brought
    elif _is_synchronous(request, access.y_vector):
        waits += _GRADIENT_WAITS * brought
    tile = cost.Work(
        multiplying=_multiplying(request, products),
        wavefronts=loads + WARPS * waves,
        instructions=WARPS * of_tile,
        longest=of_tile,
        waits=waits,
    )
    block = cost.Work(
        multiplying=0,
        wavefronts=WARPS * _SUMS_WAVES * sums * rows.word,
        instructions=WARPS * (of_block - _FILTER_OTHERS),
        longest=of_block,
        waits=0,
    )
    return tile, block


def _resident(request: Request, shared_bytes: int, sums: int) -> int:
    """Blocks of a multiprocessor, by shared memory and by the registers of a thread's sums."""
    room = request.device.chip.shared << 10
    by_registers = 4 if sums <= 32 else 3 if sums <= 64 else 2
    return max(min(room // (shared_bytes + RESERVED_SHARED), by_registers), 1)


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
        return made.tiles, _others(request, made)

    def computing(self, request: Request, chunks: int) -> float:
        made = cut(request)
        assert made is not None
        if request.pass_ == "forward":  # whose blocks stay
            return _microseconds(request, made)
        return _of_blocks(request, made, chunks, -(-made.tiles // chunks))


CUDA_PATCH = Patch()
