"""cuda-gather (cuda/conv_gather.cu): how it is cut, and takes its matrices from memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.copies import (
    PIECE_BYTES,
    arranged,
    arranging,
    called,
    copy_bytes,
    shape_of,
)
from cupyconv.planning.device import RESERVED_SHARED, Device
from cupyconv.planning.families.family import (
    Candidate,
    Tile,
    accumulator_bytes,
    copies_async,
    mma_refuses,
)
from cupyconv.planning.families.tiled import Tiled
from cupyconv.planning.reach import MOST_BLOCKS, Count, reach_counts
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, followers, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem, GemmView

MAX_PHASES = 32
"""Stride phases that a launch's parameters have room for."""

MOST_TAP_BITS = 255
"""T + R + S of a filter whose taps are still told apart by bits."""

MOST_SPLITS = (1 << 16) - 1
"""Along the second axis of a grid."""

BLOCKS = (0.5, 1, 2, 3, 4, 6, 8, 12, 16)
"""For each multiprocessor, that splits of a product may come to."""

FILLED = 0.9
"""Share of the blocks that a chip is sure to hold, with which it counts as filled."""

MOST_STAGES = 4
"""Of the ring."""

RING_ALIGNMENT = 128
"""Bytes that its address is a multiple of."""

# What follows is counted: python -m tests.emulator.suite compares it with what kernels execute.

PIECE_INSTRUCTIONS = {16: 8, 8: 8, 4: 10, 2: 10}
"""Of a warp that copies a piece of so many bytes of an operand for each thread."""

KEPT_INSTRUCTIONS = 1
"""Of these, where threads keep their halves of positions."""

TURN_INSTRUCTIONS = 4
"""The same for a piece that cp.async does not take, where a thread's pieces are several turns."""

LINE_LOAD_INSTRUCTIONS = 1.3
"""Of a warp that loads 16 bytes along k for plain products, the place in the line included."""

STEP_INSTRUCTIONS = 30
"""Of a warp in a step of k, beside copies and products."""

COUNTING_INSTRUCTIONS = 75
"""Of the one warp that works out the addresses of a step of k, where that goes over taps."""

PIXEL_INSTRUCTIONS = 85
"""The same where it goes over pixels, beside those for each tap that may miss the input."""

TAP_INSTRUCTIONS = 9
"""For one of these taps."""

COUNTING_WAVEFRONTS = 0.5
"""Of shared memory, of that warp for each place of the step."""

BLOCK_INSTRUCTIONS = 450
"""Of a warp before its main loop, and after it without what each result takes."""

FIRST_WARP_INSTRUCTIONS = 150
"""Of the one that has most to do before the main loop, beside these."""

RESULT_INSTRUCTIONS = {2: 3, 4: 6, 8: 6}
"""Of a warp for a result of each thread, by its size."""

STORE_INSTRUCTIONS = 25
"""Of a warp for a piece of 16-bit results of each thread, which go out by way of shared memory."""

BLOCK_WAVEFRONTS = 230
"""Of shared memory besides the main loop, without those of results."""

RESULT_WAVEFRONTS = 2
"""The same for each of these results."""

BY_REGISTERS = {
    (128, 256, 2): 1,
    (128, 128, 2): 2,
    (128, 64, 2): 3,
    (128, 32, 2): 4,
    (64, 64, 2): 4,
    (128, 128, 4): 2,
    (128, 64, 4): 4,
    (64, 64, 4): 5,
    (64, 64, 8): 4,
}
"""Blocks of a tile on the tensor cores, by its extents and element size, that a multiprocessor has
registers for; of other tiles RESIDENT."""


@dataclass(frozen=True)
class Access:
    """How the elements of one matrix are taken from memory.

    Attributes:
        along_first: whether neighbours in memory are neighbours in the first of the matrix's two
            directions (k for A and B, n for C), else in the second.
        vector: elements of a piece.
        apart: elements from one to the next of single ones, which a warp takes side by side.
    """

    along_first: bool
    vector: int
    apart: int = 1


@dataclass(frozen=True)
class Accesses:
    """How a pass's matrices are taken from memory.

    Attributes:
        a, b, c: of each.
        taps_fastest: whether taps are numbered before the channels (in backprop_input, the filters)
            that they belong to.
    """

    a: Access
    b: Access
    c: Access
    taps_fastest: bool


def accesses(pass_: str, problem: ConvProblem, strides: Strides) -> Accesses:
    """How A, B and C are taken from memory."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    itemsize, taken = ITEMSIZE[problem.dtype], strides.taken(problem)

    def along_channels_or_pixels(
        role: str, extent: int, sizes: tuple[int, ...], pixels_follow: bool
    ) -> Access:
        apart: tuple[int, ...] = getattr(taken, role)
        alignment, channel = strides.alignment_of(role), problem.data_axes[1]
        if getattr(strides, role)[channel] == 1:
            return Access(True, neighbours(apart, channel, extent, alignment, itemsize))
        pixels = problem.data_axes[2:]
        run = followers(apart, pixels, sizes, alignment, itemsize) if pixels_follow else 1
        return Access(False, run)

    # Pixels that follow each other in the matrix do so in memory where they are visited in the
    # order of their numbers, and under a tap only if it is the only one, and each has its own.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    x = along_channels_or_pixels("x", channels, problem.input_sizes, x_in_order[pass_])
    y = along_channels_or_pixels("y", filters, problem.output_sizes, y_in_order)

    alignment, apart = strides.alignment_of("w"), taken.w
    w_filter, w_channel, *w_taps = problem.filter_axes
    summed_axis, summed = (w_channel, channels)
    if pass_ == "backprop_input":
        summed_axis, summed = (w_filter, filters)
    steps = [abs(strides.w[axis]) for axis in w_taps if problem.filter_shape[axis] > 1]
    nearest = min(abs(strides.w[w_filter]), abs(strides.w[w_channel]))
    gathered = y if pass_ == "backprop_input" else x
    taps_fastest = not gathered.along_first and min(steps, default=nearest) < nearest
    if taps_fastest:
        # In a stride phase, taps that are numbered one after the other are not neighbours.
        order, sizes = (summed_axis, *w_taps), (summed, *problem.filter_sizes)
        in_order = pass_ != "backprop_input" or unit_stride
        run = followers(apart, order, sizes, alignment, itemsize) if in_order else 1
        w = Access(True, run)
    else:
        along_filters = neighbours(apart, w_filter, filters, alignment, itemsize)
        along_channels = neighbours(apart, w_channel, channels, alignment, itemsize)
        # Where neither has neighbours, along what is nearer; views have strides of any sign, and 0.
        nearer = abs(strides.w[w_filter]) < abs(strides.w[w_channel])
        filters_last = (along_filters, nearer) > (along_channels, not nearer)
        along_k = filters_last == (pass_ == "backprop_input")
        vector = max(along_filters, along_channels)
        w = Access(along_k, vector, nearest if vector == 1 else 1)
    if pass_ == "forward":
        return Accesses(x, w, y, taps_fastest)
    if pass_ == "backprop_input":
        return Accesses(y, w, x, taps_fastest)
    a, b = Access(not y.along_first, y.vector), Access(not x.along_first, x.vector)
    return Accesses(a, b, w, taps_fastest)


def _tile(
    block_m: int,
    block_n: int,
    warps_m: int,
    warps_n: int,
    itemsize: int,
    tensor_cores: bool = True,
    resident: int = 2,
    since: tuple[int, int] = (8, 0),
) -> Tile:
    """Lines along k are of 64 bytes."""
    macros = (
        ("WARPS_M", warps_m),
        ("WARPS_N", warps_n),
        ("RESIDENT", resident),
        ("TENSOR_CORES", int(tensor_cores)),
    )
    threads = warps_m * warps_n * 32
    return Tile(block_m, block_n, 64 // itemsize, threads, macros, since, itemsize)


class Gather(Tiled):
    name = "cuda-gather"
    summary = "implicit GEMM, on the tensor cores if it may, fed by a ring of asynchronous copies"
    kernels = "gather"
    tiles = (
        # Before 8.0 copies go through registers, which the larger tiles have none left for.
        _tile(128, 256, 2, 4, itemsize=2, resident=1),
        _tile(128, 128, 2, 2, itemsize=2),
        _tile(128, 64, 2, 2, itemsize=2),
        _tile(128, 32, 4, 1, itemsize=2),
        _tile(64, 64, 2, 2, itemsize=2, since=(7, 5)),
        _tile(128, 128, 2, 2, itemsize=4),
        _tile(128, 64, 2, 2, itemsize=4),
        _tile(64, 64, 2, 2, itemsize=4),
        # A sum takes two registers: 128 x 128 of them do not fit.
        _tile(128, 64, 4, 2, itemsize=8),
        _tile(64, 64, 2, 2, itemsize=8),
        _tile(128, 64, 2, 2, itemsize=4, tensor_cores=False, resident=3, since=(7, 5)),
        _tile(64, 64, 2, 2, itemsize=4, tensor_cores=False, resident=4, since=(7, 5)),
        _tile(128, 32, 4, 1, itemsize=4, tensor_cores=False, resident=4, since=(7, 5)),
        _tile(64, 64, 2, 2, itemsize=8, tensor_cores=False, resident=3, since=(7, 5)),
        # Where a product takes 32 times as long as one of float32, none is to be of padding.
        _tile(64, 16, 2, 1, itemsize=8, tensor_cores=False, resident=8, since=(7, 5)),
    )

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if not self.fitting_tiles(request):
            return mma_refuses(request)
        if request.pass_ == "backprop_input" and prod(problem.stride) > MAX_PHASES:
            return f"{prod(problem.stride)} stride phases are more than {MAX_PHASES}"
        if (bits := tap_bits(problem)) > MOST_TAP_BITS:
            return f"the sizes of the filter add up to {bits}, more than {MOST_TAP_BITS}"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        yield from reach_counts(request.problem)
        gemms, tiles = self.gemms(request), self.fitting_tiles(request)
        most = max(sum(t.blocks(g.gemm_m, g.gemm_n) * g.groups for g in gemms) for t in tiles)
        yield Count("blocks", most, MOST_BLOCKS)

    def fitting_tiles(self, request: Request) -> list[Tile]:
        """Those whose products the operands can have."""
        if request.problem.is_complex:
            return []
        on_tensor_cores = mma_refuses(request) is None
        kinds = {int(on_tensor_cores), 0} if request.operands == "tf32" else {int(on_tensor_cores)}
        tiles = super().fitting_tiles(request)
        return [tile for tile in tiles if tile.defines["TENSOR_CORES"] in kinds]

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            _behind_copies(found, request, method)
            for method in worthwhile(request)
            for found in super(Gather, self).candidates(_of_product(request, method))
        ]

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        if method not in METHODS[request.pass_]:
            return None
        found = super().candidate(_of_product(request, method), tile, splits)
        return found and _behind_copies(found, request, method)

    def gemms(self, request: Request) -> tuple[GemmView, ...]:
        if request.pass_ == "backprop_input":
            return request.problem.phase_gemms
        return super().gemms(request)

    def most_splits(self, request: Request) -> int:
        gemms = self.gemms(request)
        return max(min(gemms[0].gemm_k, MOST_SPLITS), 1) if len(gemms) == 1 else 1

    def splits(self, request: Request, tile: Tile) -> list[int]:
        """One; and those with which all multiprocessors have about as many blocks, which of a
        filter's gradient fill the chip."""
        gemm = request.problem.gemm(request.pass_)
        steps = -(-gemm.gemm_k // tile.block_k)
        most = min(steps // cost.LEAST_SPLIT_STEPS, self.most_splits(request))
        most = request.most_within_limit(most, self.split_bytes(request))
        tiles = tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups
        if most <= 1 or not tiles:
            return [1]
        places = request.device.chip.multiprocessors
        wanted = (min(int(count * places) // tiles, most) for count in BLOCKS)
        # Each has as many steps as the others, and none is left without.
        found = sorted({-(-steps // -(-steps // splits)) for splits in wanted if splits > 1})
        if request.pass_ == "backprop_filter":
            filling = FILLED * places * tile.defines["RESIDENT"]
            found = [splits for splits in found if tiles * splits >= filling] or found[-1:]
        return [1, *found]

    def computing(self, request: Request, tile: Tile, depth: int, blocks: int) -> float:
        of_step, besides, at_a_time = _work(request, tile)
        work = of_step.times(depth / tile.block_k / blocks) + besides
        return cost.of_blocks(request.device.chip, blocks, at_a_time, work)

    def adding(self, request: Request, splits: int) -> float:
        size = accumulator_bytes(request.problem)
        run = accesses(request.pass_, request.problem, request.memory).c.vector
        sums = self.split_bytes(request) // size
        return cost.adding(request.device.chip, sums, splits, run, size)


# -- copies ----------------------------------------------------------------------------------------

OPERANDS = {
    "forward": ("x", "w"),
    "backprop_input": ("y", "w"),
    "backprop_filter": ("y", "x"),
}
"""A and B, by pass."""


def _methods(operands: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    subsets = [roles for count in (1, 2) for roles in combinations(operands, count)]
    return {"": (), **{f"{called(roles)} arranged": roles for roles in subsets}}


METHODS = {pass_: _methods(operands) for pass_, operands in OPERANDS.items()}
"""By pass and method, the operands that are copied with channels last for the product to read."""


def product_of(
    pass_: str, method: str, problem: ConvProblem, strides: Strides
) -> tuple[ConvProblem, Strides]:
    """The problem and the strides that the product of a method meets."""
    roles = METHODS[pass_][method]
    return arranged(problem, strides, roles) if roles else (problem, strides)


def copied_bytes(problem: ConvProblem, strides: Strides) -> int:
    """Workspace for the copies that a product reads."""
    itemsize = ITEMSIZE[problem.dtype]
    return sum(copy_bytes(shape_of(problem, role), itemsize) for role in strides.copied)


def aligned(size: int) -> int:
    """Workspace for the sums of splits where copies follow them."""
    return _multiple(size, PIECE_BYTES)


def _of_product(request: Request, method: str) -> Request:
    """What the product of a method is asked for, in the workspace that its copies leave."""
    if not method:
        return request
    problem, strides = product_of(request.pass_, method, request.problem, request.memory)
    limit = request.workspace_limit
    if limit is not None:
        limit = max(limit - copied_bytes(problem, strides), 0) // PIECE_BYTES * PIECE_BYTES
    return replace(request, problem=problem, strides=strides, workspace_limit=limit)


def worthwhile(request: Request) -> Iterator[str]:
    """The methods within the workspace limit, of which each copy is read in larger pieces."""
    methods, asked = METHODS[request.pass_], (request.problem, request.memory)
    pieces = {}
    for method, roles in methods.items():
        found = accesses(request.pass_, *product_of(request.pass_, method, *asked))
        pieces[roles] = dict(
            zip(OPERANDS[request.pass_], (found.a.vector, found.b.vector), strict=True)
        )
    for method, roles in methods.items():
        others = {role: tuple(other for other in roles if other != role) for role in roles}
        size = copied_bytes(*product_of(request.pass_, method, *asked))
        if request.affords(size) and all(
            pieces[roles][role] > pieces[others[role]][role] for role in roles
        ):
            yield method


def _behind_copies(found: Candidate, request: Request, method: str) -> Candidate:
    """A product with the launch before it that copies its operands."""
    if not method:
        return found
    problem, strides = product_of(request.pass_, method, request.problem, request.memory)
    size, itemsize = copied_bytes(problem, strides), ITEMSIZE[problem.dtype]
    shapes = [shape_of(problem, role) for role in strides.copied]
    return replace(
        found,
        microseconds=found.microseconds + arranging(request.device.chip, shapes, itemsize),
        workspace_bytes=aligned(found.workspace_bytes) + size,
        method=method,
        summary=f"{called(strides.copied)} copied with channels last",
    )


# -- blocks ----------------------------------------------------------------------------------------


def tap_words(problem: ConvProblem) -> int:
    """Words for the bits of a filter's taps, and for one that no tap has."""
    return tap_bits(problem) // 32 + 1


@dataclass(frozen=True)
class Ring:
    """The shared memory of a block.

    Attributes:
        stages: tiles of A and B that it has room for.
        shared_bytes: of them, or of the tile of C that takes their place.
        table_bytes: beside them: of halves of addresses, and of loops.
    """

    stages: int
    shared_bytes: int
    table_bytes: int


def ring(
    tile: Tile, found: Accesses, itemsize: int, device: Device, words: int, index: str = "int"
) -> Ring:
    """The ring of a tile: as many stages as its resident blocks have room for.

    Args:
        tile, found: of the variant.
        itemsize: bytes of an element.
        device: with its shared memory.
        words: of a tap's bits.
        index: C++ type of offsets.
    """
    m, n, k = tile.block_m, tile.block_n, tile.block_k

    def of_operand(extent: int, along_k: bool) -> int:  # RingTile, with its PADDING
        padding = 0 if along_k or itemsize == 2 else 32 // itemsize
        return (extent + padding) * k * itemsize

    stage = of_operand(m, found.a.along_first) + of_operand(n, found.b.along_first)
    # Halves of positions and of two steps for each operand; counts of a step, 8 digits of the
    # loops, and the block's tile.
    index_bytes = 4 if index == "int" else 8
    half = _multiple(index_bytes + 4 * words, 8 if words == 1 else index_bytes)
    positions = sum(
        extent // (1 if access.along_first else access.vector)
        for access, extent in ((found.a, m), (found.b, n))
    )
    tables = _multiple((positions + 4 * k) * half + (4 * k + 12) * index_bytes, RING_ALIGNMENT)
    stages = 2  # where a copy is done on return
    if copies_async(device):
        of_block = (device.chip.shared << 10) // tile.defines["RESIDENT"]
        room = of_block - RESERVED_SHARED - tables
        stages = max(2, min(MOST_STAGES, room // stage))
    lines, line = (m, n) if found.c.along_first else (n, m)
    output = lines * (line + 8) * itemsize + (m + n) * index_bytes if itemsize == 2 else 0
    return Ring(stages, max(stages * stage, _multiple(output, RING_ALIGNMENT)), tables)


def _multiple(size: int, of: int) -> int:
    """The least one that is no smaller."""
    return -(-size // of) * of


def resident(request: Request, tile: Tile, found: Accesses) -> int:
    """Blocks that a multiprocessor holds at a time."""
    problem, device = request.problem, request.device
    made = ring(tile, found, ITEMSIZE[problem.dtype], device, tap_words(problem))
    of_block = made.shared_bytes + made.table_bytes + RESERVED_SHARED
    by_registers = tile.defines["RESIDENT"]
    if tile.defines["TENSOR_CORES"]:
        sizes = (tile.block_m, tile.block_n, ITEMSIZE[problem.dtype])
        by_registers = BY_REGISTERS.get(sizes, by_registers)
    return min((device.chip.shared << 10) // of_block, by_registers)


@lru_cache(maxsize=64)
def _work(request: Request, tile: Tile) -> tuple[cost.Work, cost.Work, int]:
    """What a block does in a step, and besides; and blocks that a multiprocessor holds."""
    found = accesses(request.pass_, request.problem, request.memory)
    of_step, besides = work_of_step(request, tile, found), work_besides(request, tile, found)
    return of_step, besides, resident(request, tile, found)


def work_of_step(request: Request, tile: Tile, found: Accesses) -> cost.Work:
    """What a block does in a step of BLOCK_K."""
    warps, counting = tile.threads // 32, COUNTING_INSTRUCTIONS
    if request.pass_ == "backprop_filter":
        counting = PIXEL_INSTRUCTIONS + TAP_INSTRUCTIONS * tap_bits(request.problem)
    rest = STEP_INSTRUCTIONS
    wavefronts = COUNTING_WAVEFRONTS * tile.block_k
    stepping = cost.Work(0, wavefronts, warps * rest + counting, rest + counting, 0)
    return stepping + _products(request, tile, found) + _copies(request, tile, found)


def _products(request: Request, tile: Tile, found: Accesses) -> cost.Work:
    """The products of a step, with the loads of their operands from shared memory."""
    chip, itemsize, macros = request.device.chip, ITEMSIZE[request.problem.dtype], tile.defines
    warps, products = tile.threads // 32, tile.block_m * tile.block_n * tile.block_k
    # With the lanes of a warp along each.
    operands = (
        (found.a, tile.block_m // macros["WARPS_M"], 8),
        (found.b, tile.block_n // macros["WARPS_N"], 4),
    )
    instructions = wavefronts = 0.0  # of a warp
    if macros["TENSOR_CORES"]:
        rate, depth = cost.tensor_rate(request), 8 if itemsize == 8 else 32 // itemsize
        multiplications = products / (16 * 8 * depth) * (4 if itemsize == 8 else 1)
        for access, extent, _ in operands:
            fragments = extent / 16 * tile.block_k / depth
            by_matrix = itemsize == 2 or (itemsize == 4 and access.along_first)
            instructions += fragments * (1 if by_matrix else 4)
            instructions += fragments * (4 if itemsize == 4 else 0)  # rounded to TF32
            wavefronts += fragments * (8 if itemsize == 8 else 4)
    else:
        rate, multiplications = cost.plain_rate(request), products / 32
        for access, extent, lanes in operands:
            chunks = extent / lanes * tile.block_k * itemsize / 16
            instructions += chunks * (LINE_LOAD_INSTRUCTIONS if access.along_first else 1)
            wavefronts += chunks * 2  # each is shared by pairs of lanes
    instructions += multiplications / warps
    rate_of_one = rate * 1e3 / chip.clock / chip.multiprocessors
    return cost.Work(
        multiplying=products * request.problem.flops_of_product / rate_of_one,
        wavefronts=warps * wavefronts,
        instructions=warps * instructions,
        longest=instructions,
        waits=0,
    )


def _copies(request: Request, tile: Tile, found: Accesses) -> cost.Work:
    """The copies of a step: pieces stored, and half an address of 8 bytes loaded for each."""
    itemsize, warps = ITEMSIZE[request.problem.dtype], tile.threads // 32
    instructions = wavefronts = waits = sectors = 0.0
    for access, extent in ((found.a, tile.block_m), (found.b, tile.block_n)):
        size, pieces = access.vector * itemsize, extent * tile.block_k / access.vector / 32
        instructions += pieces * PIECE_INSTRUCTIONS[size]
        sectors += pieces * min(max(size, access.apart * itemsize), 32)
        # One half is the same for all pieces of a thread, and neighbouring lanes share the other.
        wavefronts += pieces * max(size / 4, 1)
        if not keeps_positions(request, tile, size):
            wavefronts += pieces + warps * (4 if access.along_first else 2)
        elif access.along_first:
            instructions -= pieces * KEPT_INSTRUCTIONS
            wavefronts += warps * 2
        else:
            wavefronts += pieces
        if size < 4 or not copies_async(request.device):
            turns = -(-pieces // (warps * (16 if size < 4 else 8)))  # COPIES_AT_ONCE of the kernel
            instructions += pieces * TURN_INSTRUCTIONS if turns > 1 else 0
            waits += turns
    return cost.Work(0, wavefronts, instructions, instructions / warps, waits, sectors)


def keeps_positions(request: Request, tile: Tile, size: int) -> bool:
    """Whether threads keep their halves of positions, of an operand in pieces of so many bytes."""
    is_fast = bool(tile.defines["TENSOR_CORES"]) and ITEMSIZE[request.problem.dtype] == 2
    is_large = tile.block_m * tile.block_n >= 128 * 128
    is_few = size == PIECE_BYTES and tap_words(request.problem) == 1
    return is_fast and is_large and is_few and copies_async(request.device)


def work_besides(request: Request, tile: Tile, found: Accesses) -> cost.Work:
    """What a block does before its steps and after them."""
    itemsize, warps = ITEMSIZE[request.problem.dtype], tile.threads // 32
    results = tile.block_m * tile.block_n / tile.threads  # of a thread
    of_warp, staged = BLOCK_INSTRUCTIONS + results * RESULT_INSTRUCTIONS[itemsize], 0.0
    if itemsize == 2:
        # Sums of splits, which most of a filter's gradients have, go out by themselves.
        piece = 8 if request.pass_ == "backprop_filter" else found.c.vector
        of_warp += results / piece * STORE_INSTRUCTIONS
        staged = results * warps * RESULT_WAVEFRONTS
    return cost.Work(
        multiplying=0,
        wavefronts=BLOCK_WAVEFRONTS + staged,
        instructions=warps * of_warp,
        longest=of_warp + FIRST_WARP_INSTRUCTIONS,
        waits=0,
    )


def tap_bits(problem: ConvProblem) -> int:
    """Bits that tell the taps of a filter apart on each of three axes."""
    return sum(problem.filter_sizes) + 3 - len(problem.filter_sizes)


CUDA_GATHER = Gather()
