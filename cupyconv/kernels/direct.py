"""cuda-direct (cuda/conv_direct.cu): direct convolution for groups of few channels.

The source is the tensor under the taps: x, or dy in backprop_input.  The result is y or dx.  In
backprop_filter, dy takes the place of the result, since threads iterate over its pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, inf, prod
from typing import TYPE_CHECKING, NamedTuple

from cupyconv.kernels import cost, parameters, streaming
from cupyconv.kernels.calibration import prices
from cupyconv.kernels.copies import PIECE_BYTES
from cupyconv.kernels.family import accumulator_bytes, spatial
from cupyconv.kernels.limits import LARGEST_EDGE, Count, window_count
from cupyconv.kernels.request import Epilogue, Request
from cupyconv.kernels.strides import neighbours
from cupyconv.launch import STORAGE
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

if TYPE_CHECKING:
    import numpy as np

MAX_SOURCES = 16
"""Largest number of source channels per group; a thread holds all source channels of a pixel
(hand-set)."""

MAX_UNROLLED = 64
"""Largest number of unrolled products of a filter row: its taps times the source channels
(hand-set)."""

MAX_COLUMNS = 96
"""Largest number of source columns that a pixel's taps span; the loop is unrolled (hand-set)."""

MOST_PASSED = 1 << 16
"""Largest number of source rows that the loop of a tile steps over, including rows without a tap
(hand-set)."""

_WARP = 32
"""Threads per warp (hardware), the most threads of a block along the channels: the channels of more
threads would not be in one access."""

_THREADS = _WARP * cost.ISSUED
"""Largest number of threads per block: a warp for each scheduler of a multiprocessor."""

_EVEN_LANES = tuple(
    lanes
    for lanes in range(_WARP // 2, 0, -1)
    if _WARP % lanes == 0 and 4 * lanes % cost.SECTOR_BYTES == 0
)
"""Numbers of threads along the channels that divide a warp and load whole sectors of float32."""

_STAGED_BYTES = 32 << 10
"""Largest shared memory for the filter, or for sums of threads, in bytes per block (hand-set)."""

_MOST_VECTOR = PIECE_BYTES // 4
"""Largest number of channels per thread: the float32 values of a vector access, in which a thread
loads its part of the filter from shared memory."""

_MOST_SUMS = _STAGED_BYTES // (4 * _THREADS)
"""Largest number of registers per thread for sums: a block adds them up in shared memory."""

_STREAMED = 32
"""Largest number of registers per thread for the part of a filter row that is loaded at once
(hand-set)."""

_REGISTERS = {4: 116, 2: 220}
"""Largest number of live registers per thread, keyed by the resident blocks per SM (hand-set)."""

_ALLOCATED_REGISTERS = {False: (18, 0.9), True: (30, 0.85)}
"""Allocated registers per thread, as (constant, factor per live register), keyed by whether the
pass is backprop_filter (counted)."""

_RAGGED_INSTRUCTIONS = 10
"""Instructions of backprop_filter per pixel and filter row, if tiles reach past the ends of axes
(fitted)."""

_BALANCE = 1.1  # largest accepted time of the busiest SM, relative to the best case (hand-set)
_STAGING = 0.25  # time to stage the filter, relative to a round of tiles (modelled)


class Axis(NamedTuple):
    """Source positions that a tile's pixels read along an axis (Axis in cuda/conv_direct.cu).

    Attributes:
        extent: pixels of the tile.
        tiles: tiles along the axis.
        ragged: whether the last tile extends past the end of the axis.
        first: first source position that the tile reads, relative to the position that its first
            pixel reads under the first tap.
        span: number of positions from the first to the last that the tile reads.
        met: number of source positions that the tile reads.
        passed: number of iterations of the loop over source rows, including rows without a tap.
        pairs: number of (pixel, tap) pairs of the tile that read a source position.
    """

    extent: int
    tiles: int
    ragged: bool
    first: int
    span: int
    met: int
    passed: int
    pairs: int


@dataclass(frozen=True)
class Tiling:
    """Free choices of a launch of cuda-direct, except the number of chunks or blocks.

    Attributes:
        vector: channels per thread.
        lanes: threads of a block along the channels.
        rows, columns: pixels of a thread's tile along the last two axes.
        tap_rows: filter rows that a block of backprop_filter computes; all rows in other passes.
        sources: source channels for which a block of backprop_filter computes dw; all in other
            passes.
    """

    vector: int
    lanes: int
    rows: int
    columns: int
    tap_rows: int
    sources: int

    @property
    def strips(self) -> int:
        """Number of threads of a block that compute different tiles of the same channels."""
        return _THREADS // self.lanes

    @property
    def warps(self) -> int:
        """Warps per block."""
        return -(-self.lanes * self.strips // 32)


@dataclass(frozen=True, kw_only=True)
class Geometry(streaming.Geometry):
    """Thread blocks of a tiling for particular tensors, with their work.

    A strip is the threads of a block that compute the same tile for different channels.  A work
    tile is a round of tiles, in which each strip computes one tile.

    Attributes:
        down, across: a thread's tile along the height and along the width.
        of_source, of_result: extent of a vector access to the source and to the result, as
            (channels, columns); at least one of the two numbers is 1.
        least_resident: resident blocks per SM that the kernel is compiled for.
    """

    tiling: Tiling
    down: Axis
    across: Axis
    of_source: tuple[int, int]
    of_result: tuple[int, int]
    least_resident: int

    def blocks(self, multiprocessors: int) -> int:
        """Return the number of persistent blocks among which the rounds of tiles are divided.

        Each block stages the filter once and computes many tiles.  All blocks are resident at once,
        and the busiest SM has nearly the least possible work.
        """
        (others,) = self.others
        busiest: dict[int, float] = {}  # time of the busiest SM, keyed by rounds per block
        for number in range(1, self.resident + 1):
            share = max(multiprocessors * number // others, 1)
            rounds = max(-(-self.work_tiles // share), 1)
            blocks = -(-self.work_tiles // rounds) * others
            busiest[rounds] = -(-blocks // multiprocessors) * (rounds + _STAGING)
        most = _BALANCE * min(busiest.values())
        rounds = min([rounds for rounds, time in busiest.items() if time <= most])
        return max(-(-self.work_tiles // rounds), 1)


def channels_of(problem: ConvProblem, pass_: str) -> tuple[int, int]:
    """Return the numbers of result channels and of source channels per group.

    In backprop_filter, filters count as result channels.
    """
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    return (channels, filters) if pass_ == "backprop_input" else (filters, channels)


@lru_cache(maxsize=4096)
def ranked_tilings(request: Request) -> tuple[Tiling, ...]:
    """Return the tilings, fastest modelled time first; of equal times, the widest loads first.

    The result is empty if every tiling needs more registers than a thread has.  If every tiling
    steps over more than MOST_PASSED rows, only the tiling with the fewest rows is returned.
    """
    chip = request.chip

    def time(tiling: Tiling, geom: Geometry) -> tuple[float, int]:
        if request.pass_ == "backprop_filter":
            blocks = streaming.chunk_counts(
                geom.work_tiles, prod(geom.others), chip.multiprocessors
            )[-1]
        else:
            blocks = geom.blocks(chip.multiprocessors)
        demand = geom.kernel(blocks).demand(chip, request.problem.bytes)
        return demand.microseconds(prices(request, Direct.name)), -tiling.vector

    every = geometries(request)
    few = [pair for pair in every if pair[1].down.passed <= MOST_PASSED]
    few = few or sorted(every, key=lambda pair: pair[1].down.passed)[:1]
    return tuple(tiling for tiling, _ in sorted(few, key=lambda pair: time(*pair)))


@lru_cache(maxsize=4096)
def geometry(request: Request, tiling: Tiling) -> Geometry | None:
    """Return the geometry of a tiling; None if the tiling is illegal."""
    return _construct(request, tiling) if _is_legal(request, tiling) else None


@lru_cache(maxsize=1024)
def geometries(request: Request) -> tuple[tuple[Tiling, Geometry], ...]:
    """Return the tilings to estimate, with their geometries."""
    constructed = ((tiling, _construct(request, tiling)) for tiling in _tilings(request))
    return tuple((tiling, geom) for tiling, geom in constructed if geom is not None)


def _is_legal(request: Request, tiling: Tiling) -> bool:
    """Return whether a tiling is legal; ``_construct`` checks its registers."""
    problem, pass_ = request.problem, request.pass_
    outs, ins = channels_of(problem, pass_)
    channels = problem.groups if outs == ins == 1 else outs
    if not 1 <= tiling.vector <= _MOST_VECTOR or channels % tiling.vector:
        return False
    most_lanes = _WARP
    if pass_ != "backprop_filter":
        most_lanes = min(most_lanes, _STAGED_BYTES // filter_bytes(problem, pass_, tiling.vector))
    return (
        1 <= tiling.lanes <= most_lanes
        and tiling.rows in _extents(problem, pass_, 1)
        and tiling.columns in _extents(problem, pass_, 2)
        and (tiling.tap_rows, tiling.sources) in _shares(problem, pass_, tiling.vector)
    )


def _tilings(request: Request) -> Iterator[Tiling]:
    """Yield the legal tilings to estimate; some may need more registers than a thread has."""
    problem, pass_ = request.problem, request.pass_
    edges = list(product(_extents(problem, pass_, 2), _extents(problem, pass_, 1)))
    for vector in _vectors(request):
        shares = _shares(problem, pass_, vector)
        for lanes, share, (columns, rows) in product(_lane_counts(request, vector), shares, edges):
            yield Tiling(vector, lanes, rows, columns, *share)


def _vectors(request: Request) -> list[int]:
    """Return the possible numbers of channels per thread.

    In a depthwise layer, a thread's channels are contiguous in both tensors.  In other layers, a
    thread's channels belong to one group.
    """
    outs, ins = channels_of(request.problem, request.pass_)
    most = outs
    if outs == ins == 1:
        most = min(_neighbours(request, role, 1, request.problem.groups) for role in ("x", "y"))
    return [n for n in range(1, _MOST_VECTOR + 1) if most % n == 0]


def _lane_counts(request: Request, vector: int) -> Iterator[int]:
    """Yield the best numbers of threads along the channels.

    The first number needs the fewest blocks; the second, if any, leaves fewer lanes idle.  Both are
    limited by shared memory, which holds the filter of each lane.
    """
    problem, pass_, memory = request.problem, request.pass_, request.memory
    channel = problem.data_axes[1]
    # Adjacent threads access adjacent elements: channels if they are contiguous, else pixels.
    most = _WARP if 1 in (memory.x[channel], memory.y[channel]) else 1
    if pass_ != "backprop_filter":
        most = min(most, _STAGED_BYTES // filter_bytes(problem, pass_, vector))
    if most == 0:
        return
    outs, _ = channels_of(problem, pass_)
    pieces = -(-problem.groups * outs // vector)
    fewest = -(-pieces // -(-pieces // most))

    def occupied(lanes: int) -> float:
        """Return the threads of all warps, divided by the threads that have channels."""
        tiling = Tiling(vector, lanes, 1, 1, 1, 1)
        return 32 * tiling.warps * -(-pieces // lanes) / (pieces * tiling.strips)

    yield fewest
    others = [lanes for lanes in _EVEN_LANES if lanes <= most]
    best = min(others, key=occupied, default=fewest)
    if occupied(best) < occupied(fewest):
        yield best


def filter_bytes(problem: ConvProblem, pass_: str, vector: int) -> int:
    """Return the shared memory for the filter of a thread's channels, in bytes.

    A row has an odd number of 16-byte chunks, so that threads read without bank conflicts.
    """
    _, ins = channels_of(problem, pass_)
    row = problem.filter_sizes[-1] * ins * vector * accumulator_bytes(problem)
    return prod(problem.filter_sizes[:-1]) * (-(-row // 16) | 1) * 16


def _shares(problem: ConvProblem, pass_: str, vector: int) -> list[tuple[int, int]]:
    """Return the possible pairs (``Tiling.tap_rows``, ``Tiling.sources``).

    Registers for sums limit both numbers in backprop_filter; other passes take all rows and
    channels.
    """
    outs, ins = channels_of(problem, pass_)
    _, rows, taps = spatial(problem.filter_sizes)
    if pass_ != "backprop_filter":
        return [(rows, ins)]
    most = _MOST_SUMS // _words(problem)
    found = []
    for sources in (n for n in range(1, ins + 1) if ins % n == 0):
        sums = taps * (1 if outs == ins == 1 else sources) * vector
        if sums <= most:
            found.append((-(-rows // -(-rows // (most // sums))), sources))
    return found


def _words(problem: ConvProblem) -> int:
    """Return the 32-bit registers per element."""
    return max(ITEMSIZE[problem.dtype] // 4, 1)


def _extents(problem: ConvProblem, pass_: str, number: int) -> list[int]:
    """Return the possible extents of a thread's tile along axis 1 (height) or 2 (width)."""
    is_input = pass_ == "backprop_input"
    unit = spatial(problem.stride)[number] if is_input else 1
    size = spatial(problem.input_sizes if is_input else problem.output_sizes)[number]
    largest = min(LARGEST_EDGE, -(-size // unit) * unit)
    units = range(1, largest // unit + 1)
    return [n * unit for n in units if n & (n - 1) == 0 or size % (n * unit) == 0]


@lru_cache(maxsize=4096)
def axis(problem: ConvProblem, pass_: str, number: int, extent: int, taps: int) -> Axis:
    """Return the source positions that a thread's tile reads along one axis.

    Args:
        problem, pass_: the problem and the pass.
        number: axis: 0 for depth, 1 for height, 2 for width.
        extent: pixels of the tile along the axis.
        taps: filter taps along the axis.
    """
    is_input = pass_ == "backprop_input"
    size = spatial(problem.input_sizes if is_input else problem.output_sizes)[number]
    stride, dilation = spatial(problem.stride)[number], spatial(problem.dilation)[number]
    pairs = product(range(extent), range(taps))
    if is_input:
        phase = spatial(tuple(before for before, _ in problem.padding), 0)[number] % stride
        scaled = [i + phase - tap * dilation for i, tap in pairs]
        positions = [position // stride for position in scaled if position % stride == 0]
    else:
        positions = [i * stride + tap * dilation for i, tap in pairs]
    first, last, met = min(positions), max(positions), len(set(positions))
    passed = (last - first) // max(gcd(*(position - first for position in positions)), 1) + 1
    ragged, tiles = size % extent > 0, -(-size // extent)
    return Axis(extent, tiles, ragged, first, last - first + 1, met, passed, len(positions))


def _neighbours(request: Request, role: str, number: int, extent: int) -> int:
    """Return the elements per vector access to x or y along an axis.

    Args:
        request: the pass.
        role: "x" or "y".
        number: axis: 0 is the batch, 1 the channels, and the spatial axes follow.
        extent: number of elements along the axis; no vector crosses the end of these elements.
    """
    problem, memory = request.problem, request.memory
    layout = memory.x if role == "x" else memory.y
    itemsize = ITEMSIZE[problem.dtype]
    return neighbours(layout, problem.data_axes[number], extent, memory.alignment, itemsize)


def _vector(request: Request, role: str, channels: int, columns: int) -> tuple[int, int]:
    """Return the widest vector access to x or y, as (channels, columns); at least one of them is 1.

    Args:
        request: the pass.
        role: "x" or "y".
        channels, columns: extents of the accessed elements.
    """
    along_channels = _neighbours(request, role, 1, channels)
    if along_channels > 1:
        return along_channels, 1
    problem = request.problem
    width = (problem.input_sizes if role == "x" else problem.output_sizes)[-1]
    return 1, _neighbours(request, role, -1, gcd(columns, width))


def _construct(request: Request, tiling: Tiling) -> Geometry | None:
    """Return the geometry of a legal tiling; None if it needs too many registers."""
    problem, pass_ = request.problem, request.pass_
    outs, ins = channels_of(problem, pass_)
    depthwise, is_filter = outs == ins == 1, pass_ == "backprop_filter"
    words, vector, tap_rows, sources = (
        _words(problem), tiling.vector, tiling.tap_rows, tiling.sources,
    )  # fmt: skip
    depth, taps_down, taps = spatial(problem.filter_sizes)
    across = axis(problem, pass_, 2, tiling.columns, taps)
    down = axis(problem, pass_, 1, tiling.rows, tap_rows)
    loaded = vector if depthwise else sources
    step, extent = problem.stride[-1], across.extent
    source, result, under = "x", "y", extent * step  # source columns under a tile
    if pass_ == "backprop_input":
        source, result, under = "y", "x", extent // step
    of_source = _vector(request, source, loaded, under)
    of_result = _vector(request, result, vector, extent)
    of_taps = taps * (1 if depthwise else sources) * vector  # per filter row
    tile, row = down.extent * across.extent * vector, across.met * loaded
    multipliers = of_taps * tap_rows if is_filter else min(of_taps, _STREAMED)
    offsets = across.met // of_source[1]  # the same registers serve all rows
    live = (tile + row + multipliers) * words + offsets
    least_resident = next((n for n, most in _REGISTERS.items() if live <= most), 0)
    if tile * words > _MOST_SUMS or not least_resident:
        return None
    unpacking = int(ITEMSIZE[problem.dtype] == 2)
    tiled = spatial(problem.input_sizes if pass_ == "backprop_input" else problem.output_sizes)
    slices, parts, tap_parts = float(depth), 1, -(-taps_down // tap_rows)
    if is_filter:
        slices, parts = 1.0, depth * tap_parts * (ins // sources)
    # A warp skips source rows that are outside the tensor for all of its tiles.
    if problem.spatial_rank == 3:
        slices *= problem.axes[0].pairs / (tiled[0] * depth)
    loaded_slices = slices * min(problem.axes[-1].pairs / (across.tiles * across.pairs), 1)
    if problem.spatial_rank > 1:
        rows = min(problem.axes[-2].pairs / (tap_parts * down.tiles * down.pairs), 1)
        loaded_slices *= rows
        if down.tiles == 1 or tiling.lanes * across.tiles >= 32:
            slices *= rows

    loads = loaded // of_source[0] * across.met  # per source row
    if of_source[1] > 1:
        loads = loaded * (across.span // of_source[1] + 1)
    stores = extent * vector // prod(of_result)  # per result row
    products = across.pairs * (1 if depthwise else sources) * vector
    of_filter = 0  # 16-byte loads from shared memory
    if not is_filter:
        of_filter = -(-of_taps * accumulator_bytes(problem) // 16)
    # Loads of the filter, which take 2 instead of 4 wavefronts if a block has 1 or 2 lanes.
    from_shared = slices * down.pairs * of_filter
    accessed = slices * down.passed * loads + down.extent * stores
    unpacked = unpacking * (slices * down.passed * across.met * loaded + tile)
    instructions = (
        slices * down.pairs * products
        + unpacked
        + from_shared
        + cost.ACCESS_INSTRUCTIONS * accessed
    )
    if is_filter and (down.ragged or across.ragged):
        instructions += _RAGGED_INSTRUCTIONS * down.pairs * across.extent
    channel_vectors = -(-problem.groups * outs // vector)
    blocks = -(-channel_vectors // tiling.lanes)
    read = (tiling.lanes, blocks, min(across.tiles, 32))
    of_load = _wavefronts(request, source, *read, under, prod(of_source))
    of_store = _wavefronts(request, result, *read, extent, prod(of_result))
    accesses = loaded_slices * down.passed * loads * of_load + down.extent * stores * of_store
    wavefronts = from_shared * (2 if tiling.lanes <= 2 else 4) + accesses

    chip, warps = request.chip, tiling.warps
    lanes = cost.per_cycle(chip, cost.plain_rate(request)) / 2
    multiplied = slices * down.pairs * products
    of_round = cost.Work(32 * multiplied / lanes, wavefronts, instructions).times(warps)
    shared_bytes, reducing = tiling.lanes * filter_bytes(problem, pass_, vector), streaming.NO_WORK
    if is_filter:
        # Each level of the block's reduction tree halves the number of threads with sums.
        sums = tap_rows * of_taps
        reducing = cost.Work(0, 2 * sums, 3 * sums).times(warps)
        shared_bytes = of_taps * tiling.lanes * tiling.strips * accumulator_bytes(problem)
    of_thread, of_live = _ALLOCATED_REGISTERS[is_filter]
    registers = -(-(of_thread + of_live * live) // 8) * 8
    by_registers = max(int(cost.REGISTERS / (32 * warps * registers)), least_resident)
    by_shared = chip.blocks_by_shared(shared_bytes)
    tiles = problem.N * tiled[0] * down.tiles * across.tiles
    return Geometry(
        tiling=tiling,
        down=down,
        across=across,
        of_source=of_source,
        of_result=of_result,
        least_resident=least_resident,
        work_tiles=-(-tiles // tiling.strips),
        others=(blocks, parts) if is_filter else (blocks,),
        threads=tiling.lanes * tiling.strips,
        shared_bytes=0,  # shared memory is static
        resident=max(min(chip.threads // (32 * warps), by_registers, by_shared), 1),
        work=replace(of_round, waits=down.passed),
        fixed_work=reducing,
    )


def _wavefronts(
    request: Request, role: str, lanes: int, blocks: int, tiles: int, columns: int, of_piece: int
) -> float:
    """Return the wavefronts of a warp's access to x or y.

    Args:
        request: the pass.
        role: "x" or "y".
        lanes, blocks: threads of a block along the channels, and blocks along the channels.
        tiles: number of adjacent tiles in a row that a warp accesses.
        columns: columns of the tensor between the starts of adjacent tiles.
        of_piece: elements per vector.
    """
    problem, memory = request.problem, request.memory
    layout, channels = (memory.x, problem.C) if role == "x" else (memory.y, problem.K)
    itemsize = ITEMSIZE[problem.dtype]
    if lanes > 1:
        apart = channels / (lanes * blocks) if layout[problem.data_axes[1]] == 1 else inf
        return cost.wavefronts(of_piece * itemsize, apart * itemsize, least=0)
    # The tiles of a row are contiguous; the first tile may begin anywhere in a sector.
    apart = max(columns * layout[problem.data_axes[-1]], of_piece) * itemsize
    spread = (apart * (tiles - 1) + cost.SECTOR_BYTES) / tiles
    return cost.wavefronts(0, spread, least=0)


TILE_SCHEDULE = (("tiles", "i8", 4), ("step", "i8", 4), ("rounds", "i8"))
"""Fields of the struct ``TileSchedule`` in cuda/conv_direct.cu, in NumPy's notation."""


class Direct(streaming.Streaming[Geometry]):
    name = "cuda-direct"
    summary = "tiles of neighbouring pixels and channels, for groups of few channels"
    tiling = Tiling
    tilings = staticmethod(ranked_tilings)
    find = staticmethod(geometry)

    def refuses_layer(self, request: Request) -> str | None:
        problem, pass_ = request.problem, request.pass_
        outs, ins = channels_of(problem, pass_)
        if problem.is_complex:
            return "cuda-direct multiplies only real numbers"
        if ins > MAX_SOURCES:
            return f"cuda-direct takes up to {MAX_SOURCES} source channels per group, not {ins}"
        taps, stride = problem.filter_sizes[-1], problem.stride
        if pass_ == "backprop_input" and max(stride[-2:]) > LARGEST_EDGE:
            return (
                f"cuda-direct takes strides up to {LARGEST_EDGE} in backprop_input, "
                f"not {max(stride[-2:])}"
            )
        if taps * ins > MAX_UNROLLED:
            return (
                f"cuda-direct unrolls up to {MAX_UNROLLED} products of a filter row, not {taps} "
                f"taps x {ins} source channels"
            )
        columns = axis(problem, pass_, 2, stride[-1] if pass_ == "backprop_input" else 1, taps).span
        if columns > MAX_COLUMNS:
            return f"cuda-direct takes up to {MAX_COLUMNS} source columns per pixel, not {columns}"
        if prod(problem.filter_sizes[:-1]) * ins >= 2**16 or problem.groups * outs >= 2**16:
            return "the filter's rows or the channels need more blocks than a launch can have"
        staged = filter_bytes(problem, pass_, 1)
        if pass_ != "backprop_filter" and staged > _STAGED_BYTES:
            return (
                f"cuda-direct stages up to {_STAGED_BYTES} bytes of filter per channel, "
                f"not {staged}"
            )
        if not ranked_tilings(request):
            return f"a thread has too few registers for {taps} taps of {problem.dtype}"
        return None

    def counts_of(self, request: Request, geom: Geometry) -> Iterator[Count]:
        yield window_count(request.problem)
        yield Count("input rows under a tile", geom.down.passed, MOST_PASSED)

    def schedule(self, request: Request, geom: Geometry, each: int) -> tuple[np.ndarray]:
        """Return the struct TileSchedule for blocks that compute ``each`` rounds of tiles."""
        import numpy as np

        problem = request.problem
        is_input = request.pass_ == "backprop_input"
        tiled = problem.input_sizes if is_input else problem.output_sizes
        tiles = (geom.across.tiles, geom.down.tiles, spatial(tiled)[0], problem.N)
        record = np.zeros(1, list(TILE_SCHEDULE))
        rest, step = geom.tiling.strips, record[0]["step"]
        for number, size in enumerate(tiles[:-1]):
            rest, step[number] = divmod(rest, size)
        step[-1] = rest
        record[0]["tiles"], record[0]["rounds"] = tiles, each
        return (record,)

    def defines(self, request: Request, geom: Geometry, epilogue: Epilogue) -> dict[str, str | int]:
        problem, pass_ = request.problem, request.pass_
        outs, ins = channels_of(problem, pass_)
        depth, height, width = spatial(problem.filter_sizes)
        stride_d, stride_h, stride_w = spatial(problem.stride)
        _, dilation_h, dilation_w = spatial(problem.dilation)
        _, pad_h, pad_w = spatial(tuple(before for before, _ in problem.padding), 0)
        tiling, down, across = geom.tiling, geom.down, geom.across
        # ``begin`` and ``last`` are the first source columns of the first and of the last tile.
        begin, step = across.first - pad_w, across.extent * stride_w
        width_under = problem.input_sizes[-1]
        if pass_ == "backprop_input":
            begin, step = across.first + pad_w // stride_w, across.extent // stride_w
            width_under = problem.output_sizes[-1]
        shift = begin % geom.of_source[1]
        last = begin + (across.tiles - 1) * step
        return {
            "PASS": PASSES.index(pass_),
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, request.memory),
            "OUTS": outs,
            "INS": ins,
            "VECTOR": tiling.vector,
            "TILE_ROWS": down.extent,
            "TILE_COLUMNS": across.extent,
            "LANES": tiling.lanes,
            "STRIPS": tiling.strips,
            "RESIDENT": geom.least_resident,
            "RESULT_CHANNELS": geom.of_result[0],
            "RESULT_COLUMNS": geom.of_result[1],
            "SOURCE_CHANNELS": geom.of_source[0],
            "SOURCE_COLUMNS": geom.of_source[1],
            "SHIFT": shift,
            "INSIDE_FROM": max(shift - begin, 0),
            "INSIDE_TO": max(width_under - last + shift, 0),
            "FILTER_T": depth,
            "FILTER_R": height,
            "FILTER_S": width,
            "STRIDE_D": stride_d,
            "STRIDE_H": stride_h,
            "STRIDE_W": stride_w,
            "DILATION_H": dilation_h,
            "DILATION_W": dilation_w,
            "PHASE_H": pad_h % stride_h,
            "PHASE_W": pad_w % stride_w,
            "TAP_ROWS": tiling.tap_rows,
            "SHARE": tiling.sources,
            "RAGGED": int(down.ragged or across.ragged),
            **epilogue.defines,
        }


CUDA_DIRECT = Direct()
