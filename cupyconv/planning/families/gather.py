"""cuda-gather (cuda/conv_gather.cu): how it is cut, and takes its matrices from memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.families.family import Tile, mma_refuses
from cupyconv.planning.families.tiled import Tiled
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, followers, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem, GemmView

MAX_PHASES = 32
"""Stride phases that a launch's parameters have room for."""

MOST_TAP_BITS = 255
"""T + R + S of a filter whose taps are still told apart by bits."""

LONGEST_AXIS = 1 << 30
"""Batch, channels or pixels of an axis that the kernel still counts in 32 bits."""

PIECE_INSTRUCTIONS = 7
"""Of a warp that copies a piece of an operand for each thread: counted in SASS."""

STEP_INSTRUCTIONS = 10
"""Of a warp in a step of k, beside copies and products: counted in SASS."""

COUNTING_INSTRUCTIONS = 60
"""Of the one warp that works out the addresses of a step of k: counted in SASS."""

WAITED_FOR = 8
"""Pieces under way of a thread that has to wait for them: COPIES_AT_ONCE of the kernel."""

LATENCY = 600
"""Cycles until a load from device memory is there: modelled."""

BLOCK_INSTRUCTIONS = 1_000
"""Of a warp before and after its main loop: counted in SASS, within a factor of two."""

EFFICIENCY = 0.85
"""Share of a multiprocessor's cycles that find work, if it has blocks enough: modelled."""

ENOUGH_WARPS = 8
"""On a multiprocessor, for that; half as many find work in three quarters of those: modelled."""


@dataclass(frozen=True)
class Access:
    """How the elements of one matrix are taken from memory.

    Attributes:
        along_first: whether neighbours in memory are neighbours in the first of the matrix's two
            directions (k for A and B, n for C), else in the second.
        vector: elements of a piece.
    """

    along_first: bool
    vector: int


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
    alignment, itemsize = strides.alignment, ITEMSIZE[problem.dtype]

    def along_channels_or_pixels(
        layout: tuple[int, ...], extent: int, sizes: tuple[int, ...], pixels_follow: bool
    ) -> Access:
        channel = problem.data_axes[1]
        if layout[channel] == 1:
            return Access(True, neighbours(layout, channel, extent, alignment, itemsize))
        pixels = problem.data_axes[2:]
        run = followers(layout, pixels, sizes, alignment, itemsize) if pixels_follow else 1
        return Access(False, run)

    # Pixels that follow each other in the matrix do so in memory where they are visited in the
    # order of their numbers, and under a tap only if it is the only one, and each has its own.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    x = along_channels_or_pixels(strides.x, channels, problem.input_sizes, x_in_order[pass_])
    y = along_channels_or_pixels(strides.y, filters, problem.output_sizes, y_in_order)

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
        run = followers(strides.w, order, sizes, alignment, itemsize) if in_order else 1
        w = Access(True, run)
    else:
        along_filters = neighbours(strides.w, w_filter, filters, alignment, itemsize)
        along_channels = neighbours(strides.w, w_channel, channels, alignment, itemsize)
        # Where neither has neighbours, along what is nearer; views have strides of any sign, and 0.
        nearer = abs(strides.w[w_filter]) < abs(strides.w[w_channel])
        filters_last = (along_filters, nearer) > (along_channels, not nearer)
        along_k = filters_last == (pass_ == "backprop_input")
        w = Access(along_k, max(along_filters, along_channels))
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
    )

    def refuses(self, request: Request) -> str | None:
        problem = request.problem
        if not self.fitting_tiles(request):
            return mma_refuses(request)
        if request.pass_ == "backprop_input" and prod(problem.stride) > MAX_PHASES:
            return f"{prod(problem.stride)} stride phases are more than {MAX_PHASES}"
        if (bits := tap_bits(problem)) > MOST_TAP_BITS:
            return f"the sizes of the filter add up to {bits}, more than {MOST_TAP_BITS}"
        if max(*problem.input_shape, *problem.filter_shape, *problem.output_shape) > LONGEST_AXIS:
            return f"an axis is longer than {LONGEST_AXIS:,}"
        return None

    def fitting_tiles(self, request: Request) -> list[Tile]:
        """Those whose products the operands can have."""
        if request.problem.is_complex:
            return []
        on_tensor_cores = mma_refuses(request) is None
        kinds = {int(on_tensor_cores), 0} if request.operands == "tf32" else {int(on_tensor_cores)}
        tiles = super().fitting_tiles(request)
        return [tile for tile in tiles if tile.defines["TENSOR_CORES"] in kinds]

    def gemms(self, request: Request) -> tuple[GemmView, ...]:
        if request.pass_ == "backprop_input":
            return request.problem.phase_gemms
        return super().gemms(request)

    def most_splits(self, request: Request) -> int:
        return cost.MOST_SPLITS if len(self.gemms(request)) == 1 else 1

    def wanted_splits(self, request: Request, tile: Tile) -> int:
        gemm = request.problem.gemm(request.pass_)
        blocks = tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups
        if not blocks:
            return 1
        affordable = -(-gemm.gemm_k // tile.block_k) // cost.LEAST_SPLIT_STEPS
        filling = request.device.chip.multiprocessors * tile.defines["RESIDENT"]
        wanted = min(-(-filling // blocks), affordable, self.most_splits(request))
        return max(request.most_within_limit(wanted, self.split_bytes(request)), 1)

    def computing(self, request: Request, tile: Tile, depth: int, blocks: int) -> float:
        chip = request.device.chip
        warps = tile.threads // 32
        most = -(-blocks // chip.multiprocessors)  # on one multiprocessor, one after the other
        steps = depth / tile.block_k / blocks
        cycles = most * (
            steps * step_cycles(request, tile) + BLOCK_INSTRUCTIONS * warps / cost.ISSUED_BY_WARPS
        )
        resident = min(most, tile.defines["RESIDENT"]) * warps
        efficiency = EFFICIENCY * (1 + min(resident / ENOUGH_WARPS, 1)) / 2
        return cycles / efficiency / (chip.clock * 1e3)


def step_cycles(request: Request, tile: Tile) -> float:
    """Cycles of a multiprocessor for a block's step of BLOCK_K, by what takes longest.

    That is its tensor cores or multipliers, the instructions it begins, shared memory, which has a
    line of 128 bytes a cycle, or the wait for what cp.async does not copy.
    """
    chip, itemsize = request.device.chip, ITEMSIZE[request.problem.dtype]
    found = accesses(request.pass_, request.problem, request.memory)
    macros, warps = tile.defines, tile.threads // 32
    warp_m, warp_n = tile.block_m // macros["WARPS_M"], tile.block_n // macros["WARPS_N"]
    products = tile.block_m * tile.block_n * tile.block_k
    if macros["TENSOR_CORES"]:
        rate, depth = cost.tensor_rate(request), 8 if itemsize == 8 else 32 // itemsize
        multiplying = products / (16 * 8 * depth) * (4 if itemsize == 8 else 1)

        def loads(
            extent: int, along_k: bool
        ) -> float:  # of 16 positions, by one instruction or four
            by_matrix = itemsize == 2 or (itemsize == 4 and along_k)
            return extent / 16 * tile.block_k / depth * (1 if by_matrix else 4)

        fragments = loads(warp_m, found.a.along_first) + loads(warp_n, found.b.along_first)
        rounding = 4 * (warp_m + warp_n) / 16 * tile.block_k / depth if itemsize == 4 else 0
    else:
        rate, multiplying, rounding = cost.plain_rate(request), products / 32, 0
        fragments = (warp_m / 8 + warp_n / 4) * tile.block_k * itemsize / 16
    pieces = tile.block_k * (tile.block_m / found.a.vector + tile.block_n / found.b.vector) / 32
    instructions = (
        multiplying
        + warps * (fragments + rounding + STEP_INSTRUCTIONS)
        + pieces * PIECE_INSTRUCTIONS
        + COUNTING_INSTRUCTIONS
    )
    waits = 0
    for access in (found.a, found.b):
        extent = tile.block_m if access is found.a else tile.block_n
        if request.device.capability < (8, 0) or access.vector * itemsize < 4:
            waits += -(-extent * tile.block_k // (access.vector * tile.threads * WAITED_FOR))
    loaded = warps * fragments * 4 if itemsize < 8 or not macros["TENSOR_CORES"] else fragments * 2
    stored = tile.block_k * (tile.block_m + tile.block_n) * itemsize / 128
    rate_of_one = rate * 1e3 / chip.clock / chip.multiprocessors
    return max(
        products * request.problem.flops_of_product / rate_of_one,
        instructions / cost.ISSUED_BY_WARPS,
        loaded + stored,
        waits * LATENCY / macros["RESIDENT"],
    )


def tap_bits(problem: ConvProblem) -> int:
    """Bits that tell the taps of a filter apart on each of three axes."""
    return sum(problem.filter_sizes) + 3 - len(problem.filter_sizes)


CUDA_GATHER = Gather()
