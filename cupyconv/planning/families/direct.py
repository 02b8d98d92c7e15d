"""cuda-direct (cuda/conv_direct.cu): what it refuses, and how its threads and blocks are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

from cupyconv.planning import cost
from cupyconv.planning.device import CPU, RESERVED_SHARED, Chip
from cupyconv.planning.families.family import accumulator_bytes, spatial
from cupyconv.planning.families.streaming import Streaming, chunk_counts
from cupyconv.planning.reach import Count, window_count
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem

MAX_SOURCES = 16
"""Source channels of a group, all of which a thread holds for a pixel."""

MAX_UNROLLED = 64
"""Taps of a row times source channels, whose products are unrolled."""

MAX_COLUMNS = 96
"""Columns of the input under a pixel that are still unrolled."""

MOST_PASSED = 1 << 16
"""Rows of the input that a tile passes: where strides and taps do not meet, one after the other."""

LARGEST_EDGE = 8
"""Pixels of a thread's tile along an axis; in backprop_input whole strides."""

_THREADS = 128  # of a block, at most
_MOST_LANES = 32
_SHARES_OF_WARP = (16, 8)  # lanes along channels that leave none of a warp's without a tile
_STAGED_BYTES = 32 << 10  # of shared memory for the filter
_MOST_VECTOR = 4  # channels of a thread
_MOST_SUMS = 64  # registers of a thread for them
_STREAMED = 32  # registers for a row of the filter, used up as it is loaded

# Registers for sums, a row of sources, what these are multiplied by, and offsets;
# by how many blocks a multiprocessor holds.
_REGISTERS = {4: 116, 2: 220}

# Instructions of a thread, in a filter's gradient if True: counted.
_OF_PIECE = {False: 5, True: 3}  # that is loaded or stored
_OF_ROW = {False: 16, True: 2}  # of the source
_OF_TEST = 2  # whether a row of the source and one of the tile meet
_OF_MEETING = {False: 6, True: 4}  # of a row of the source and one of the tile
_OF_RAGGED = {False: 2, True: 3}  # for a piece, and a pixel that meets, where some do not exist
_OF_TILE = 85

_REGISTERS_TAKEN = {False: (18, 0.9), True: (30, 0.85)}  # of a thread, and for each live: counted
# Waits for a row of the source, and for each load of it, by the bytes of an element: counted.
_ROW_WAITS = {2: (0.5, 0.025), 4: (0.38, 0.0145), 8: (0.38, 0.0145)}
_FILTER_ROW_WAITS = 0.9  # for a row, in a filter's gradient: counted
_HALVES_WAITS = 2.5  # times those of wider elements, where some of a tile do not exist: counted
_NEARLY = 1.1  # times the least work of the busiest multiprocessor may be done by more blocks
_STAGING = 0.25  # of a round, that a block takes to stage the filter: modelled

_SECTOR = 32  # bytes of global memory that are moved together
_ENOUGH_THREADS = 12 * 32  # on a multiprocessor: three warps for each scheduler
_ALIKE = 1.05  # times as long as the best cut takes is as good


@dataclass(frozen=True)
class Block:
    """A block's threads, and the channels that they share out.

    Attributes:
        vector: channels of a thread.
        lanes, strips: threads along channels, and along tiles.
        number: blocks along the channels.
    """

    vector: int
    lanes: int
    strips: int
    number: int

    @property
    def warps(self) -> int:
        return -(-self.lanes * self.strips // 32)


@dataclass(frozen=True)
class Axis:
    """How a tile's pixels meet the filter's taps along an axis: Axis of cuda/conv_direct.cu.

    Attributes:
        extent: pixels of the tile.
        tiles: that cover the axis.
        ragged: whether the last of them reaches beyond it.
        first: position of the source that is met first.
        span: positions from there to the last.
        met: how many are met.
        passed: how many there are at whole steps, of which a loop over rows loads each.
        pairs: of a position and a pixel that meet.
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
class Pieces:
    """What is moved at once, of the sources and of the results (or dy in backprop_filter).

    Attributes:
        source_channels, source_columns: of which one is 1.
        result_channels, result_columns: of which one is 1.
    """

    source_channels: int
    source_columns: int
    result_channels: int
    result_columns: int


@dataclass(frozen=True)
class Cut:
    """What a thread and a block take.

    Attributes:
        block: threads and channels.
        down, across: a thread's tile along the last two axes.
        pieces: that are moved at once.
        tap_rows, share: rows of the filter and sources that a block of backprop_filter sums.
        resident: blocks of a multiprocessor that there are registers for, at least.
        shared_bytes: of a block.
        live: registers of a thread for sums, a row of sources, what these are multiplied by, and
            offsets.
        parts: of the filter, that blocks sum.
        rounds: of tiles, one for each strip of a block.
        chunks: that the rounds are cut into.
        sums: of a thread in backprop_filter, which its block adds up in a tree.
        loads: of a thread, of a row of the source.
        instructions, products: of a thread, for a tile.
        sectors: of global memory that it asks for, of 32 bytes, with what neighbours ask for too.
        wavefronts: of shared memory, of a warp that loads the filter for a tile.
        itemsize: bytes of an element.
    """

    block: Block
    down: Axis
    across: Axis
    pieces: Pieces
    tap_rows: int
    share: int
    resident: int
    shared_bytes: int
    live: int
    parts: int
    rounds: int
    chunks: int
    sums: int
    loads: int
    instructions: float
    products: float
    sectors: float
    wavefronts: float
    itemsize: int

    def staying(self, chip: Chip, multiprocessors: int) -> Cut:
        """Cut into as many chunks as so many multiprocessors of a chip hold at a time, or fewer, of
        which the busiest has nearly the least to do.

        Blocks stage the filter, and stay.
        """
        shares = (multiprocessors * n // self.block.number for n in range(1, self.held(chip) + 1))
        each = {max(-(-self.rounds // max(share, 1)), 1) for share in shares}

        def busiest(rounds: int) -> float:
            blocks = -(-self.rounds // rounds) * self.block.number
            return -(-blocks // multiprocessors) * (rounds + _STAGING)

        most = _NEARLY * min(map(busiest, each))
        rounds = min(rounds for rounds in each if busiest(rounds) <= most)
        return replace(self, chunks=max(-(-self.rounds // rounds), 1))

    def microseconds(self, chip: Chip, rate: float) -> float:
        """Of a chip that has so many TFLOP/s of multipliers."""
        return cost.of_blocks(chip, self.blocks, self.held(chip), self.work(chip, rate))

    def work(self, chip: Chip, rate: float) -> cost.Work:
        """Of a block."""
        warps = self.block.warps
        of_cycle = rate * 1e3 / 2 / 32 / chip.multiprocessors / chip.clock
        of_round = cost.Work(
            multiplying=warps * self.products / of_cycle,
            wavefronts=warps * self.wavefronts,
            instructions=warps * self.instructions,
            longest=self.instructions,
            waits=self._waits,
            sectors=warps * 32 * self.sectors,
        )
        besides = cost.Work(
            multiplying=0,
            wavefronts=2 * self.sums * self._givers,
            instructions=3 * self.sums * self._givers,
            longest=3 * self.sums * len(self._levels),
            waits=0 if self.sums else 1,  # for the filter
        )
        return of_round.times(-(-self.rounds // self.chunks)) + besides

    @property
    def _waits(self) -> float:
        """Of a warp in a round, for rows of the source, and for dy."""
        if not self.sums:
            of_row, of_load = _ROW_WAITS[self.itemsize]
            return self.down.passed * (of_row + of_load * self.loads)
        if not (self.down.ragged or self.across.ragged):
            return _FILTER_ROW_WAITS * (self.down.passed + 0.5)  # dy beside the first row
        halves = _HALVES_WAITS if self.itemsize == 2 else 1
        return _FILTER_ROW_WAITS * (self.down.passed + self.down.extent) * halves

    def held(self, chip: Chip) -> int:
        """Blocks that a multiprocessor holds, by its threads, its shared memory, and the registers
        that compilers take: counted."""
        threads = 32 * self.block.warps
        of_thread, of_live = _REGISTERS_TAKEN[self.sums > 0]
        registers = -(-(of_thread + of_live * self.live) // 8) * 8
        by_registers = max(int(cost.REGISTERS / (threads * registers)), self.resident)
        by_shared = (chip.shared << 10) // (self.shared_bytes + RESERVED_SHARED)
        return max(min(chip.threads // threads, by_registers, by_shared), 1)

    @property
    def blocks(self) -> int:
        return self.chunks * self.block.number * self.parts

    @property
    def _levels(self) -> list[int]:
        """Strips that give their sums to as many others, level by level of a block's tree."""
        found, strips = [], self.block.strips if self.sums else 1
        while strips > 1:
            found.append(strips // 2)
            strips -= strips // 2
        return found

    @property
    def _givers(self) -> int:
        """Warps that give sums on all levels; as many take them, and add them up."""
        return sum(-(-strips * self.block.lanes // 32) for strips in self._levels)


def channels_of(problem: ConvProblem, pass_: str) -> tuple[int, int]:
    """Results and sources of a group at a pixel.

    The filter gradient walks the output, so its results are the filters.
    """
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    return (channels, filters) if pass_ == "backprop_input" else (filters, channels)


@lru_cache(maxsize=4096)
def cut(request: Request) -> Cut | None:
    """Of the cheapest, and of those that fill a multiprocessor's schedulers if there are any, that
    of the fewest instructions; None if no thread has registers enough.

    Where each passes more rows than are counted, that which passes the fewest.
    """
    chip, rate = request.device.chip, cost.plain_rate(request)
    least = cost.moving(chip, request.problem.bytes)  # whatever it is cut like

    def spread(made: Cut) -> Cut:
        if request.pass_ != "backprop_filter":
            return made.staying(chip, chip.multiprocessors)
        # Of its chunks the most: which number is best, all costs tell.
        others = made.block.number * made.parts
        return replace(made, chunks=chunk_counts(made.rounds, others, chip.multiprocessors)[-1])

    every = [spread(made) for made in cuts(request)]
    counted = [made for made in every if made.down.passed <= MOST_PASSED]
    counted = counted or sorted(every, key=lambda made: made.down.passed)[:1]
    found = [(max(made.microseconds(chip, rate), least), made) for made in counted]
    most = _ALIKE * min((time for time, _ in found), default=0)
    cheapest = (made for time, made in found if time <= most)

    def order(made: Cut) -> tuple[bool, float]:
        has_few = made.held(chip) * made.block.lanes * made.block.strips < _ENOUGH_THREADS
        return has_few, made.blocks * made.work(chip, rate).instructions

    return min(cheapest, key=order, default=None)


def cuts(request: Request) -> tuple[Cut, ...]:
    """All cuts that a block has shared memory for, and a thread registers, whatever the chip."""
    return _cuts(request.problem, request.pass_, request.memory)


@lru_cache(maxsize=1024)
def _cuts(problem: ConvProblem, pass_: str, memory: Strides) -> tuple[Cut, ...]:
    return tuple(_each_cut(Request(problem, pass_, CPU, strides=memory)))


def _each_cut(request: Request) -> Iterator[Cut]:
    problem, pass_ = request.problem, request.pass_
    outs, ins = channels_of(problem, pass_)
    depthwise, is_filter = outs == ins == 1, pass_ == "backprop_filter"
    words = max(ITEMSIZE[problem.dtype] // 4, 1)
    _, taps_down, taps = spatial(problem.filter_sizes)
    near = _near(request)
    for vector in _vectors(request):
        shares = _shares(problem, vector, _MOST_SUMS // words) if is_filter else [(taps_down, ins)]
        for block, (tap_rows, share) in product(_blocks(request, vector), list(shares)):
            loaded = vector if depthwise else share
            held = taps * (1 if depthwise else share) * vector
            others = held * tap_rows if is_filter else min(held, _STREAMED)
            for across in _axes(problem, pass_, 2, taps):
                pieces = _pieces(request, near, across, vector, loaded)
                offsets = across.met // pieces.source_columns  # kept from row to row
                for down in _axes(problem, pass_, 1, tap_rows):
                    tile, row = down.extent * across.extent * vector, across.met * loaded
                    live = (tile + row + others) * words + offsets
                    resident = next((n for n, most in _REGISTERS.items() if live <= most), 0)
                    if tile * words <= _MOST_SUMS and resident:
                        yield _cut(
                            request, block, down, across, pieces, tap_rows, share, resident, live
                        )


def _vectors(request: Request) -> list[int]:
    """Numbers of channels that a thread may have.

    In a depthwise layer those that are neighbours in memory, of the results and of the sources;
    else any of one group.
    """
    outs, ins = channels_of(request.problem, request.pass_)
    most = outs
    if outs == ins == 1:
        most = min(_neighbours(request, role, 1, request.problem.groups) for role in ("x", "y"))
    return [n for n in range(1, _MOST_VECTOR + 1) if most % n == 0]


def _blocks(request: Request, vector: int) -> Iterator[Block]:
    """The fewest blocks along the channels, and those that leave the fewest lanes of warps idle;
    none if shared memory does not hold a thread's filter."""
    problem, memory = request.problem, request.memory
    outs, _ = channels_of(problem, request.pass_)
    channel = problem.data_axes[1]
    # Neighbouring threads take neighbours in memory: channels, or else pixels.
    most = _MOST_LANES if 1 in (memory.x[channel], memory.y[channel]) else 1
    if request.pass_ != "backprop_filter":
        most = min(most, _STAGED_BYTES // filter_bytes(problem, request.pass_, vector))
    if most == 0:
        return
    pieces = -(-problem.groups * outs // vector)
    fewest = -(-pieces // most)
    shares = (-(-pieces // fewest), *(lanes for lanes in _SHARES_OF_WARP if lanes <= most))
    first, *others = (
        Block(vector, lanes, _THREADS // lanes, -(-pieces // lanes)) for lanes in shares
    )

    def taken(made: Block) -> float:
        """Lanes of warps, for each that has a tile and channels."""
        return 32 * made.warps * made.number / (pieces * made.strips)

    yield first
    best = min(others, key=taken, default=first)
    if taken(best) < taken(first):
        yield best


def filter_bytes(problem: ConvProblem, pass_: str, vector: int) -> int:
    """Shared memory for a thread's filter: an odd number of 16-byte chunks for each row."""
    _, ins = channels_of(problem, pass_)
    row = problem.filter_sizes[-1] * ins * vector * accumulator_bytes(problem)
    return prod(problem.filter_sizes[:-1]) * (-(-row // 16) | 1) * 16


def _shares(problem: ConvProblem, vector: int, most: int) -> Iterator[tuple[int, int]]:
    """Rows of the filter and sources, whose sums a thread of backprop_filter has registers for."""
    outs, ins = channels_of(problem, "backprop_filter")
    _, rows, taps = spatial(problem.filter_sizes)
    for share in (n for n in range(1, ins + 1) if ins % n == 0):
        held = taps * (1 if outs == ins == 1 else share) * vector
        if held <= most:
            yield -(-rows // -(-rows // (most // held))), share


def _axes(problem: ConvProblem, pass_: str, number: int, taps: int) -> Iterator[Axis]:
    """The edges that a thread's tile may have along one of three axes."""
    is_input = pass_ == "backprop_input"
    unit = spatial(problem.stride)[number] if is_input else 1
    size = spatial(problem.input_sizes if is_input else problem.output_sizes)[number]
    for extent in range(unit, LARGEST_EDGE + 1, unit):
        units = extent // unit
        if units & (units - 1) == 0 or size % extent == 0:
            yield axis(problem, pass_, number, extent, taps)
        if extent >= size:
            return


@lru_cache(maxsize=4096)
def axis(problem: ConvProblem, pass_: str, number: int, extent: int, taps: int) -> Axis:
    """The meetings along one of three axes, with some of the filter's taps."""
    is_input = pass_ == "backprop_input"
    size = spatial(problem.input_sizes if is_input else problem.output_sizes)[number]
    stride, dilation = spatial(problem.stride)[number], spatial(problem.dilation)[number]
    pairs = product(range(extent), range(taps))
    if is_input:
        phase = spatial(tuple(before for before, _ in problem.padding), 0)[number] % stride
        scaled = [i + phase - tap * dilation for i, tap in pairs]
        positions = [one // stride for one in scaled if one % stride == 0]
    else:
        positions = [i * stride + tap * dilation for i, tap in pairs]
    first, last, met = min(positions), max(positions), len(set(positions))
    passed = (last - first) // max(gcd(*(one - first for one in positions)), 1) + 1
    ragged, tiles = size % extent > 0, -(-size // extent)
    return Axis(extent, tiles, ragged, first, last - first + 1, met, passed, len(positions))


def _neighbours(request: Request, role: str, number: int, extent: int) -> int:
    """Elements of x or y that are moved at once along an axis of the problem."""
    problem, memory = request.problem, request.memory
    layout = memory.x if role == "x" else memory.y
    itemsize = ITEMSIZE[problem.dtype]
    return neighbours(layout, problem.data_axes[number], extent, memory.alignment, itemsize)


def _near(request: Request) -> dict[str, tuple[int, int]]:
    """Channels, and columns, of x and y that could be moved at once if a thread took so many."""
    problem = request.problem
    sizes = {"x": problem.input_sizes, "y": problem.output_sizes}
    return {
        role: (_neighbours(request, role, 1, 16), _neighbours(request, role, -1, size[-1]))
        for role, size in sizes.items()
    }


def _pieces(
    request: Request, near: dict[str, tuple[int, int]], across: Axis, vector: int, loaded: int
) -> Pieces:
    """Pieces of a tile of so many columns, and of so many channels of either side."""
    step = request.problem.stride[-1]

    def along(role: str, channels: int, columns: int) -> tuple[int, int]:
        of_channels = gcd(channels, near[role][0])
        return (of_channels, 1) if of_channels > 1 else (1, gcd(columns, near[role][1]))

    if request.pass_ == "backprop_input":
        return Pieces(
            *along("y", loaded, across.extent // step), *along("x", vector, across.extent)
        )
    return Pieces(*along("x", loaded, across.extent * step), *along("y", vector, across.extent))


def _cut(
    request: Request,
    block: Block,
    down: Axis,
    across: Axis,
    pieces: Pieces,
    tap_rows: int,
    share: int,
    resident: int,
    live: int,
) -> Cut:
    problem, pass_ = request.problem, request.pass_
    outs, ins = channels_of(problem, pass_)
    depthwise, is_filter = outs == ins == 1, pass_ == "backprop_filter"
    unpacking = int(ITEMSIZE[problem.dtype] == 2)
    depth, taps_down, taps = spatial(problem.filter_sizes)
    walked = spatial(problem.input_sizes if pass_ == "backprop_input" else problem.output_sizes)
    slices, parts, tap_parts = float(depth), 1, -(-taps_down // tap_rows)
    if is_filter:
        slices, parts = 1.0, depth * tap_parts * (ins // share)
    # What does not exist of the source is passed over; but a warp executes rows that exist for any
    # of its tiles.
    if problem.spatial_rank == 3:
        slices *= problem.axes[0].pairs / (walked[0] * depth)
    loaded_slices = slices * min(problem.axes[-1].pairs / (across.tiles * across.pairs), 1)
    if problem.spatial_rank > 1:
        rows = min(problem.axes[-2].pairs / (tap_parts * down.tiles * down.pairs), 1)
        loaded_slices *= rows
        if down.tiles == 1 or block.lanes * across.tiles >= 32:
            slices *= rows
    loaded, vector = block.vector if depthwise else share, block.vector

    of_source = loaded // pieces.source_channels * across.met
    if pieces.source_columns > 1:
        of_source = loaded * (across.span // pieces.source_columns + 1)
    of_result = across.extent * vector // pieces.result_channels // pieces.result_columns
    ragged = down.ragged or across.ragged
    to_load, of_row, of_meeting = _OF_PIECE[is_filter], _OF_ROW[is_filter], _OF_MEETING[is_filter]
    to_store = to_load + _OF_RAGGED[is_filter] * ragged  # or to load dy
    if is_filter:
        of_meeting += _OF_RAGGED[is_filter] * ragged * across.extent
    else:
        of_row += _OF_TEST * down.extent
    products = across.pairs * (1 if depthwise else share) * vector
    of_taps = taps * (1 if depthwise else share) * vector  # of a row of the filter
    of_filter = 0  # loads of 16 bytes
    if not is_filter:
        of_filter = -(-of_taps * accumulator_bytes(problem) // 16)
    of_meeting += of_filter
    # In half as many wavefronts where a warp's neighbours share them.
    wavefronts = slices * down.pairs * of_filter * (2 if block.lanes <= 2 else 4)
    instructions = (
        _OF_TILE
        + down.extent * (of_result * to_store + unpacking * across.extent * vector)
        + slices * down.passed * (of_row + of_source * to_load + unpacking * across.met * loaded)
        + slices * down.pairs * (of_meeting + products)
    )
    tiles = problem.N * walked[0] * down.tiles * across.tiles
    rounds, sums = -(-tiles // block.strips), 0
    shared_bytes = block.lanes * filter_bytes(problem, pass_, vector)
    if is_filter:
        sums = tap_rows * of_taps
        shared_bytes = of_taps * block.lanes * block.strips * accumulator_bytes(problem)
    multiplied = slices * down.pairs * products
    source, result = ("y", "x") if pass_ == "backprop_input" else ("x", "y")
    step = problem.stride[-1]
    under = across.extent / step if pass_ == "backprop_input" else across.extent * step
    of_piece = pieces.source_channels * pieces.source_columns
    of_load = _sectors(request, source, block, min(across.tiles, 32), under, of_piece)
    of_piece = pieces.result_channels * pieces.result_columns
    of_store = _sectors(request, result, block, min(across.tiles, 32), across.extent, of_piece)
    sectors = loaded_slices * down.passed * of_source * of_load + down.extent * of_result * of_store
    return Cut(
        block, down, across, pieces, tap_rows, share, resident, shared_bytes, live, parts, rounds,
        1, sums, of_source, instructions, multiplied, sectors, wavefronts, ITEMSIZE[problem.dtype],
    )  # fmt: skip


def _sectors(
    request: Request, role: str, block: Block, tiles: int, columns: float, of_piece: int
) -> float:
    """Sectors of a thread that moves a piece of x or y, of a row of tiles so many columns apart."""
    problem, memory = request.problem, request.memory
    layout, channels = (memory.x, problem.C) if role == "x" else (memory.y, problem.K)
    itemsize = ITEMSIZE[problem.dtype]
    if block.lanes > 1:
        lanes = block.lanes * block.number
        apart = channels / lanes if layout[problem.data_axes[1]] == 1 else _SECTOR
        return min(max(apart, of_piece) * itemsize, _SECTOR) / _SECTOR
    # Such a row is a run in memory, which begins anywhere in a sector.
    apart = max(columns * layout[problem.data_axes[-1]], of_piece) * itemsize
    return min((apart * (tiles - 1) / _SECTOR + 1) / tiles, 1)


class Direct(Streaming):
    name = "cuda-direct"
    summary = "tiles of neighbouring pixels and channels, for groups of few channels"
    kernels = "direct"

    def refuses_layer(self, request: Request) -> str | None:
        problem, pass_ = request.problem, request.pass_
        outs, ins = channels_of(problem, pass_)
        if problem.is_complex:
            return "cuda-direct multiplies real numbers"
        if ins > MAX_SOURCES:
            return f"cuda-direct takes up to {MAX_SOURCES} source channels a group, not {ins}"
        taps, stride = problem.filter_sizes[-1], problem.stride
        if pass_ == "backprop_input" and max(stride[-2:]) > LARGEST_EDGE:
            return f"{max(stride[-2:])} pixels of a stride are more than {LARGEST_EDGE}"
        if taps * ins > MAX_UNROLLED:
            return (
                f"{taps} taps of {ins} channels are more than the {MAX_UNROLLED} that are unrolled"
            )
        columns = axis(problem, pass_, 2, stride[-1] if pass_ == "backprop_input" else 1, taps).span
        if columns > MAX_COLUMNS:
            return f"{columns} columns under a pixel are more than {MAX_COLUMNS}"
        if prod(problem.filter_sizes[:-1]) * ins >= 2**16 or problem.groups * outs >= 2**16:
            return "the rows of the filter, or the channels, are more than a launch has blocks for"
        staged = filter_bytes(problem, pass_, 1)
        if pass_ != "backprop_filter" and staged > _STAGED_BYTES:
            return f"{staged} bytes of a channel's filter are more than {_STAGED_BYTES}"
        if cut(request) is None:
            return f"a thread has no registers for {taps} taps of {problem.dtype}"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        yield window_count(request.problem)
        made = cut(request)
        assert made is not None
        yield Count("rows that a tile passes", made.down.passed, MOST_PASSED)

    def shared_out(self, request: Request) -> tuple[int, int]:
        made = cut(request)
        assert made is not None
        return made.rounds, made.block.number * made.parts

    def computing(self, request: Request, chunks: int) -> float:
        made, chip = cut(request), request.device.chip
        assert made is not None
        if request.pass_ == "backprop_filter":
            made = replace(made, chunks=chunks)
        return made.microseconds(chip, cost.plain_rate(request))


CUDA_DIRECT = Direct()
