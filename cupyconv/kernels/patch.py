"""cuda-patch (cuda/conv_patch.cu): convolution with few input channels.

A block copies the input under a tile of output pixels to shared memory once: the patch.  A line of
the patch is an input row of the tile, with all channels or with one channel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from cupyconv.kernels import cost, parameters, streaming
from cupyconv.kernels.calibration import prices
from cupyconv.kernels.copies import PIECE_BYTES
from cupyconv.kernels.device import CHIPS
from cupyconv.kernels.family import accumulator_bytes, copies_async, mma_refuses, spatial
from cupyconv.kernels.limits import Count
from cupyconv.kernels.request import Epilogue, Request
from cupyconv.kernels.strides import neighbours
from cupyconv.launch import STORAGE
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

WARPS = 4
"""Warps per block."""

THREADS = 32 * WARPS
"""Threads per block."""

MAX_CHANNELS = PIECE_BYTES // min(ITEMSIZE.values())
"""Largest number of input channels: the elements of a 16-byte vector.  With more channels,
cuda-gather can copy such vectors."""

_PIXELS = (128, 64)  # possible numbers of output pixels per tile (hand-set)
_FILTERS = (128, 96, 64, 32, 16)  # possible numbers of filters per block (hand-set)
_ROW_TILES = (4, 2)  # fragments of 16 filters per block in backprop_filter (hand-set)
_SUMS = 144  # most registers per thread for sums and offsets in backprop_filter (hand-set)
_BANKS = 32  # banks of shared memory (hardware)
# Largest shared memory per block of all chips, in bytes.
_LARGEST_SHARED = max(chip.block_shared for chip in CHIPS.values()) << 10


class Access(NamedTuple):
    """Vector accesses to x, and to y or dy.

    Attributes:
        x_last: whether a line of the patch contains all channels; else one channel.
        x_vector: elements per vector of x.
        shift: elements from the last aligned address before a tile's first window to this window.
        y_last: whether channels are contiguous in y.
        y_vector: elements per vector of y.
    """

    x_last: bool
    x_vector: int
    shift: int
    y_last: bool
    y_vector: int


class Rows(NamedTuple):
    """Flattened rows of the filter, divided into words that each fill one register.

    Attributes:
        word: elements per word.
        classes: number of pixel classes: 2 if windows of some pixels begin at the first element of
            a word and windows of other pixels at the second, else 1.
        run: elements per run, the contiguous elements of a line that a filter row reads.
        run_words: words per run.
        words: words of all runs together, rounded up to a multiple of 8.
        conflicts: mean wavefronts per access of a warp to the patch.
        residue: best line pitch (``Geometry``) modulo the elements that span all banks (128 bytes);
            None if every pitch is equally good.
    """

    word: int
    classes: int
    run: int
    run_words: int
    words: int
    conflicts: float
    residue: int | None


@dataclass(frozen=True)
class Tiling:
    """Free choices of a launch of cuda-patch, except the number of chunks or blocks.

    Attributes:
        tile_p, tile_q: rows and columns of output pixels per tile.
        filters: filters per block.
        warps_k: warps along pixels in backprop_filter; else 0.
    """

    tile_p: int
    tile_q: int
    filters: int
    warps_k: int


@dataclass(frozen=True, kw_only=True)
class Geometry(streaming.Geometry):
    """Thread blocks of a tiling for particular tensors, with their work; a work tile is a tile.

    Attributes:
        line_pitch: elements between the beginnings of adjacent lines of the patch.
        warps_n: warps of a block along words, in backprop_filter; else 0.
        warp_words: groups of 8 words per warp, in backprop_filter; else 0.
        share_words: words per block, in backprop_filter; else 0.
    """

    tiling: Tiling
    line_pitch: int
    warps_n: int = 0
    warp_words: int = 0
    share_words: int = 0


@lru_cache(maxsize=4096)
def access_of(request: Request) -> Access:
    """Return the vector accesses to a request's tensors."""
    problem, memory = request.problem, request.memory
    itemsize, channel, column = ITEMSIZE[problem.dtype], problem.data_axes[1], problem.data_axes[-1]
    x, width = memory.x, problem.input_sizes[-1]
    x_last = problem.C > 1 and abs(x[channel]) < abs(x[column])
    if x_last:  # only a row of W * C contiguous elements allows vectors
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


@lru_cache(maxsize=4096)
def rows_of(request: Request) -> Rows:
    """Return the flattened rows of a request's filter."""
    problem, access = request.problem, access_of(request)
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
        return rows  # the words do not fit into any block
    conflicts, residue = _conflicts(request, rows)
    return rows._replace(conflicts=conflicts, residue=residue)


def _conflicts(request: Request, rows: Rows) -> tuple[float, int | None]:
    """Return the attributes ``conflicts`` and ``residue`` of ``Rows``.

    The lanes of a warp cover 8 pixels and 4 filter words in the forward pass, and 4 pixels and 8
    filter words in backprop_filter.
    """
    problem, access, forward = request.problem, access_of(request), request.pass_ == "forward"
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
    # ``apart``, the distance of two lines, is a multiple of 128 bytes; the lines do not overlap.
    apart = period * (1 + max(column for _, column in words) + pixels * of_pixel)
    unit = max(access.x_vector, rows.word, period // 8)
    found = {residue: wavefronts(apart + residue) for residue in range(0, period, unit)}
    best = min(found, key=lambda residue: found[residue])
    free = max(found.values()) == found[best]
    return found[best] / sum(patterns.values()), None if free else best


def _words(problem: ConvProblem, access: Access, rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield (line, first element in the line) of each word.

    The rows of the filter are numbered across all depths.
    """
    step, line_channels = (problem.C, 1) if access.x_last else (1, problem.C)
    depth, height, _ = spatial(problem.filter_sizes)
    gap_h, gap_w = spatial(problem.dilation)[1:]
    columns = problem.filter_sizes[-1] if gap_w > 1 else 1
    for row, channel, s in product(range(depth * height), range(line_channels), range(columns)):
        for word in range(rows.run_words):
            yield row * gap_h * line_channels + channel, s * gap_w * step + word * rows.word


@lru_cache(maxsize=4096)
def ranked_tilings(request: Request) -> tuple[Tiling, ...]:
    """Return the tilings, fastest modelled time first; empty if no tiling fits into a block."""
    chip = request.chip

    def microseconds(geom: Geometry) -> float:
        demand = geom.kernel(geom.blocks(chip.multiprocessors)).demand(chip, 0)
        return demand.microseconds(prices(request, Patch.name))

    geometries = (_construct(request, tiling) for tiling in _tilings(request))
    return tuple(fitting.tiling for fitting in sorted(filter(None, geometries), key=microseconds))


def _tilings(request: Request) -> Iterator[Tiling]:
    """Yield all tilings that the kernels support; some may not fit into a block."""
    least = 8 * rows_of(request).classes  # pixels of one class
    edges = [
        (pixels // tile_q, tile_q)
        for pixels in _PIXELS
        for tile_q in (pixels >> halvings for halvings in range(pixels.bit_length()))
        if least <= tile_q
    ]
    if request.pass_ == "forward":
        numbers = [(filters, 0) for filters in _FILTERS]
    else:
        numbers = [(16 * row_tiles, warps) for row_tiles in _ROW_TILES for warps in (1, 2, 4)]
    return (Tiling(*edge, *number) for edge, number in product(edges, numbers))


@lru_cache(maxsize=4096)
def geometry(request: Request, tiling: Tiling) -> Geometry | None:
    """Return the blocks of a tiling; None if the tiling is illegal on the request's device."""
    return _construct(request, tiling) if tiling in _tilings(request) else None


def _construct(request: Request, tiling: Tiling) -> Geometry | None:
    """Return the blocks of a tiling that the kernels support; None if they do not fit."""
    rows = rows_of(request)
    patch = _patch(request, rows, tiling.tile_p, tiling.tile_q)
    of_pass = _forward_geometry if request.pass_ == "forward" else _filter_geometry
    geom = of_pass(request, rows, patch, tiling)
    limit = request.chip.block_shared << 10
    return geom if geom is not None and geom.shared_bytes <= limit else None


class _Patch(NamedTuple):
    """A tile of output pixels, and the patch: the part of the input that the tile reads.

    Attributes:
        tile_p, tile_q: rows and columns of output pixels.
        tiles: number of tiles that cover the output.
        pieces: number of vectors in a patch.
        line_pitch: elements between the beginnings of adjacent lines of the patch.
        size: bytes of the patch.
    """

    tile_p: int
    tile_q: int
    tiles: int
    pieces: int
    line_pitch: int
    size: int

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


def _forward_geometry(
    request: Request, rows: Rows, patch: _Patch, tiling: Tiling
) -> Geometry | None:
    problem, access, filters = request.problem, access_of(request), tiling.filters
    itemsize = ITEMSIZE[problem.dtype]
    accumulator = accumulator_bytes(problem)
    enough = any(problem.K <= fewer < filters for fewer in _FILTERS)
    if enough or (itemsize == 8 and filters > 64):
        return None
    weights = rows.classes * rows.words * filters * accumulator
    lines, line = (patch.pixels, filters) if access.y_last else (filters, patch.pixels)
    output = lines * (line + (8 if itemsize == 2 else 4)) * itemsize
    tables = rows.classes * rows.words * 8 + filters * accumulator
    shared = weights + -(-2 * patch.size // 16) * 16 + output + tables
    steps, results = rows.words // 8, patch.pixels * filters
    products = steps * (patch.pixels // 16) * (filters // 8)
    loads = steps * (patch.pixels // 4 * rows.conflicts + WARPS * (filters // 4 + 2))
    tile = _work(request, products, loads, patch, results / access.y_vector)
    staged = rows.classes * rows.words * filters / 32
    return Geometry(
        tiling=tiling,
        line_pitch=patch.line_pitch,
        work_tiles=patch.tiles,
        others=(-(-problem.K // filters),),
        threads=THREADS,
        shared_bytes=-(-shared // 16) * 16,
        resident=_resident(request, shared, results * accumulator // 512),
        work=tile + cost.Work(0, cost.RESULT_WAVEFRONTS * results / 32),
        fixed_work=cost.Work(0, 2 * staged, cost.ACCESS_INSTRUCTIONS * staged),
    )


def _work(
    request: Request, products: float, loads: float, patch: _Patch, others: float
) -> cost.Work:
    """Return the work per tile.

    Args:
        request: the pass.
        products: number of products of fragments.
        loads: number of wavefronts that load fragments from shared memory.
        patch: the tile and its patch.
        others: number of vectors of y to store, or of dy to copy.
    """
    chip, access, itemsize = request.chip, access_of(request), ITEMSIZE[request.problem.dtype]
    rate = {2: chip.tensor_rate, 4: chip.tensor_rate / 2, 8: chip.double_tensor_rate}[itemsize]
    flops = 2 * 16 * 8 * 8 * (2 if itemsize == 2 else 1)
    of_x, of_y = (cost.wavefronts(n * itemsize) for n in (access.x_vector, access.y_vector))
    accesses = (patch.pieces + others) / 32
    through_registers = access.x_vector * itemsize < 4 or not copies_async(request.device)
    if through_registers:
        accesses *= cost.REGISTER_COPY
    return cost.Work(
        multiplying=products * flops / cost.per_cycle(chip, rate) if rate else 0.0,
        wavefronts=loads + 2 * (patch.pieces * of_x + others * of_y) / 32,
        instructions=products + loads + cost.ACCESS_INSTRUCTIONS * accesses,
        waits=float(through_registers),
    )


def _filter_geometry(
    request: Request, rows: Rows, patch: _Patch, tiling: Tiling
) -> Geometry | None:
    problem, access = request.problem, access_of(request)
    itemsize, pixels = ITEMSIZE[problem.dtype], patch.pixels
    filters, warps_k = tiling.filters, tiling.warps_k
    row_tiles, warps_n = filters // 16, WARPS // warps_k
    registers = 4 * rows.word * (2 if itemsize == 8 else 1)  # sums of 8 words x 16 filters
    rounded = 4 if itemsize == 4 else 0  # registers for rounding to TF32
    steps = pixels // (8 * rows.word)  # number of steps along pixels
    most = _SUMS // (registers * row_tiles + 1)  # one register for an offset
    whole = rows.run_words if rows.classes == 2 else 8  # with 2 classes, whole runs only
    if not rows.classes <= warps_k <= steps or 8 * warps_n * most < whole:
        return None
    units = -(-rows.words // whole)
    shares = -(-units // (8 * warps_n * most // whole))
    share_words = -(-units // shares) * whole
    warp_words = -(-share_words // (8 * warps_n))
    lines, line = (pixels, filters) if access.y_last else (filters, pixels)
    padding = 32 if access.y_last and itemsize > 2 else 0  # StageTile::PADDING
    stage = lines * (line * itemsize + padding) + patch.size
    # Warps along pixels add up their sums in the shared memory of the stages.
    sums = (share_words * rows.word + rows.word - 1) * (filters + 4 // rows.word)
    exchange = sums * accumulator_bytes(problem) if warps_k > 1 else 0
    shared = max(2 * (-(-stage // 128) * 128), -(-exchange // 128) * 128)
    products = steps * warps_n * warp_words * rows.word * row_tiles
    loads = steps * warps_n * (row_tiles * 4 + warp_words * 2 * rows.word * rows.conflicts)
    # With two pixel classes (``Rows``), adjacent pixels of dy are in different classes and are
    # stored one by one.
    is_split = not access.y_last and rows.classes == 2
    vectors = filters * pixels / (1 if is_split else access.y_vector)
    work = _work(request, products, loads, patch, vectors)
    return Geometry(
        tiling=tiling,
        line_pitch=patch.line_pitch,
        warps_n=warps_n,
        warp_words=warp_words,
        share_words=share_words,
        work_tiles=patch.tiles,
        others=(-(-problem.K // filters), shares),
        threads=THREADS,
        shared_bytes=shared,
        resident=_resident(request, shared, registers * row_tiles * warp_words + rounded),
        work=replace(work, waits=1.0) if is_split else work,
    )


def _resident(request: Request, shared_bytes: int, sums: int) -> int:
    """Return the resident blocks per SM that shared memory and ``sums`` registers allow."""
    by_registers = 4 if sums <= 32 else 3 if sums <= 64 else 2
    return max(min(request.chip.blocks_by_shared(shared_bytes), by_registers), 1)


class Patch(streaming.Streaming[Geometry]):
    name = "cuda-patch"
    summary = (
        "for few channels: copies the input under a tile once and multiplies rows of the filter on "
        "the tensor cores"
    )
    tiling = Tiling
    tilings = staticmethod(ranked_tilings)
    find = staticmethod(geometry)

    def refuses_layer(self, request: Request) -> str | None:
        refusal, problem = mma_refuses(request), request.problem
        if refusal is not None:
            return refusal
        if request.pass_ == "backprop_input":
            return "cuda-patch computes forward and backprop_filter"
        if problem.groups > 1:
            return f"cuda-patch takes a single group, not {problem.groups}"
        if problem.C > MAX_CHANNELS:
            return f"cuda-patch takes up to {MAX_CHANNELS} channels, not {problem.C}"
        if -(-problem.K // min(_FILTERS)) >= 2**16:
            return "the filters need more blocks than a launch can have"
        if not ranked_tilings(request):
            return "the input under a tile and the filter do not fit into a thread block"
        return None

    def counts_of(self, request: Request, geom: Geometry) -> Iterator[Count]:
        lines = 1 if access_of(request).x_last else request.problem.C
        reach = spatial(request.problem.stride)[1] * lines * geom.line_pitch
        yield Count("elements between adjacent rows of windows", reach, 2**31 - 1)

    def defines(self, request: Request, geom: Geometry, epilogue: Epilogue) -> dict[str, str | int]:
        problem, access, tiling = request.problem, access_of(request), geom.tiling
        depth, height, width = spatial(problem.filter_sizes)
        defines: dict[str, str | int] = {
            "PASS": PASSES.index(request.pass_),
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, request.memory),
            "CHANNELS": problem.C,
            "X_LAST": int(access.x_last),
            "FILTER_T": depth,
            "FILTER_R": height,
            "FILTER_S": width,
            "STRIDE_H": spatial(problem.stride)[1],
            "STRIDE_W": problem.stride[-1],
            "DILATION_H": spatial(problem.dilation)[1],
            "DILATION_W": problem.dilation[-1],
            "TILE_P": tiling.tile_p,
            "TILE_Q": tiling.tile_q,
            "LINE_PITCH": geom.line_pitch,
            "X_VECTOR": access.x_vector,
            "SHIFT": access.shift,
            "Y_LAST": int(access.y_last),
            "Y_VECTOR": access.y_vector,
            "ASYNC_COPY": int(copies_async(request.device)),
            "RESIDENT": geom.resident,
            "SHARED_BYTES": geom.shared_bytes,
        }
        if request.pass_ == "backprop_filter":
            defines |= {
                "ROW_TILES": tiling.filters // 16,
                "WARPS_N": geom.warps_n,
                "WARPS_K": tiling.warps_k,
                "WARP_WORDS": geom.warp_words,
                "SHARE_WORDS": geom.share_words,
            }
        else:
            defines |= {"BLOCK_N": tiling.filters, **epilogue.defines}
        return defines


CUDA_PATCH = Patch()
