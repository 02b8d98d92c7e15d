"""cuda-gather (cuda/conv_gather.cu): an implicit GEMM that gathers its operands with cp.async.

cp.async fills a pipeline of shared-memory stages ahead of use.  In backprop_input, the input pixels
with equal (pixel + padding) modulo the stride form a stride phase.  The same taps read all pixels
of a phase, so that each phase is one dense product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cupyconv.kernels import cost, frames, parameters
from cupyconv.kernels.copies import (
    PIECE_BYTES,
    ROLES_OF,
    arrange,
    arranged,
    copy_bytes,
    shape_of,
)
from cupyconv.kernels.device import BLOCKS_PER_SM, RESERVED_SHARED, Device
from cupyconv.kernels.family import (
    Candidate,
    Choices,
    Tile,
    copies_async,
    mma_refuses,
    spatial,
)
from cupyconv.kernels.limits import MOST_BLOCKS, Count, extent_counts
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides, followers, neighbours
from cupyconv.kernels.tiled import Tiled
from cupyconv.kernels.views import Viewed
from cupyconv.launch import STORAGE, FilterForm, Launch, Part
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem, GemmView

if TYPE_CHECKING:
    import numpy as np

MAX_PHASES = 32
"""Largest number of stride phases per launch: the largest power of two whose StridePhases fit the
4096 bytes of a kernel's parameters (CUDA's rule)."""

MOST_PHASES = 8 * MAX_PHASES
"""Largest number of stride phases of a pass (hand-set)."""

MOST_TAP_BITS = 255
"""Largest number of tap bits (``tap_bits``); with one spare bit, they fill 8 words (hand-set)."""

MOST_SPLITS = (1 << 16) - 1
"""Largest number of splits, which are blocks along the second axis of the grid (CUDA's rule)."""

BLOCKS = tuple(1 << power for power in range(BLOCKS_PER_SM.bit_length()))
"""Numbers of blocks per SM that the choice of splits aims at: the powers of two that are resident
on every chip."""

MOST_STAGES = 4
"""Largest number of stages of the pipeline (hand-set)."""

STAGE_ALIGNMENT = 128
"""Alignment of the pipeline in bytes."""

BY_REGISTERS = {
    (128, 256, 2): 1,
    (128, 128, 2): 2,
    (128, 64, 2): 3,
    (128, 32, 2): 4,
    (32, 128, 2): 5,
    (64, 64, 2): 4,
    (128, 128, 4): 2,
    (128, 64, 4): 4,
    (32, 128, 4): 5,
    (64, 64, 4): 5,
    (64, 64, 8): 4,
}
"""Largest number of blocks per SM that a tensor-core tile with 32-bit indices gets registers for,
keyed (block_m, block_n, itemsize); other tiles get registers for RESIDENT blocks (counted)."""


class Access(NamedTuple):
    """Vector access to one matrix in memory.

    Attributes:
        along_first: whether vectors extend along k in A and B, and along n in C; else they extend
            along m in A and C, and along n in B.
        vector: elements per vector access.
        apart: stride, in elements, between the elements of adjacent lanes if ``vector`` is 1.
    """

    along_first: bool
    vector: int
    apart: int = 1


class Accesses(NamedTuple):
    """Vector accesses to the three matrices of a pass.

    Attributes:
        a, b, c: access to each matrix.
        taps_fastest: whether the tap varies fastest along gemm_k (in backprop_filter, along
            gemm_n).  If false, the channel varies fastest (in backprop_input, the filter).
    """

    a: Access
    b: Access
    c: Access
    taps_fastest: bool


@lru_cache(maxsize=4096)
def accesses(pass_: str, problem: ConvProblem, strides: Strides, divided: bool = False) -> Accesses:
    """Return the accesses to A, B and C.

    If frames are divided, a vector of C does not extend beyond a frame, since a run of frames may
    begin and end at any frame.
    """
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    itemsize, canonical = ITEMSIZE[problem.dtype], strides.canonical(problem)

    def along_channels_or_pixels(role: str, sizes: tuple[int, ...], pixels_follow: bool) -> Access:
        extent, apart = strides.run_of_channels(problem, role)
        alignment, channel = strides.alignment_of(role), problem.data_axes[1]
        if getattr(strides, role)[channel] == 1:
            return Access(True, neighbours(apart, channel, extent, alignment, itemsize))
        pixels = problem.data_axes[-len(sizes) :]
        run = followers(apart, pixels, sizes, alignment, itemsize) if pixels_follow else 1
        return Access(False, run)

    # Pixels form vectors if adjacent pixels of the matrix are adjacent in memory, also across the
    # ends of rows.  For pixels that are read under taps, this holds only in pointwise layers.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    frame = problem.input_sizes[1:] if divided else problem.input_sizes
    x = along_channels_or_pixels("x", frame, x_in_order[pass_])
    y = along_channels_or_pixels("y", problem.output_sizes, y_in_order)

    alignment, apart = strides.alignment_of("w"), canonical.w
    w_filter, w_channel, *w_taps = problem.filter_axes
    summed_axis, summed = (w_channel, channels)
    if pass_ == "backprop_input":
        summed_axis, summed = (w_filter, filters)
    steps = [abs(strides.w[axis]) for axis in w_taps if problem.filter_shape[axis] > 1]
    nearest = min(abs(strides.w[w_filter]), abs(strides.w[w_channel]))
    gathered = y if pass_ == "backprop_input" else x
    taps_fastest = not gathered.along_first and min(steps, default=nearest) < nearest
    if taps_fastest:
        # Consecutive taps of a stride phase are not adjacent in memory.
        order, sizes = (summed_axis, *w_taps), (summed, *problem.filter_sizes)
        in_order = pass_ != "backprop_input" or unit_stride
        run = followers(apart, order, sizes, alignment, itemsize) if in_order else 1
        w = Access(True, run)
    else:
        along_filters = neighbours(apart, w_filter, filters, alignment, itemsize)
        along_channels = neighbours(apart, w_channel, channels, alignment, itemsize)
        # If neither axis has vectors, k runs along the axis with the smaller stride; strides of
        # views may be negative or 0.
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
    """Return a tile with 64 bytes along k."""
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
    summary = "implicit GEMM fed by asynchronous copies, on tensor cores where the precision allows"
    tiles = (
        # Before compute capability 8.0, copies need registers that larger tiles cannot spare.
        _tile(128, 256, 2, 4, itemsize=2, resident=1),
        _tile(128, 128, 2, 2, itemsize=2),
        _tile(128, 64, 2, 2, itemsize=2),
        _tile(128, 32, 4, 1, itemsize=2),
        # Tiles of few columns compute few products of padding in layers with few channels.
        _tile(64, 16, 2, 1, itemsize=2, resident=8),
        _tile(64, 64, 2, 2, itemsize=2, since=(7, 5)),
        # Tiles of few rows compute few products of padding in filter gradients of few filters.
        _tile(32, 128, 1, 4, itemsize=2),
        _tile(128, 128, 2, 2, itemsize=4),
        _tile(128, 64, 2, 2, itemsize=4),
        _tile(64, 16, 2, 1, itemsize=4, resident=8),
        _tile(64, 64, 2, 2, itemsize=4),
        _tile(32, 128, 1, 4, itemsize=4),
        # A float64 sum takes two registers: 128 x 128 sums do not fit.
        _tile(128, 64, 4, 2, itemsize=8),
        _tile(64, 64, 2, 2, itemsize=8),
        _tile(16, 64, 1, 2, itemsize=8, resident=4),
        _tile(128, 64, 2, 2, itemsize=4, tensor_cores=False, resident=3, since=(7, 5)),
        _tile(64, 64, 2, 2, itemsize=4, tensor_cores=False, resident=4, since=(7, 5)),
        _tile(128, 32, 4, 1, itemsize=4, tensor_cores=False, resident=4, since=(7, 5)),
        _tile(32, 128, 1, 4, itemsize=4, tensor_cores=False, resident=4, since=(7, 5)),
        _tile(64, 64, 2, 2, itemsize=8, tensor_cores=False, resident=3, since=(7, 5)),
        # A small tile computes few products of padding, which take long: on some chips, a float64
        # product takes as long as 32 float32 products.
        _tile(64, 16, 2, 1, itemsize=8, tensor_cores=False, resident=8, since=(7, 5)),
        _tile(16, 64, 1, 2, itemsize=8, tensor_cores=False, resident=8, since=(7, 5)),
    )

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if not self.fitting_tiles(request):
            return mma_refuses(request)
        if request.pass_ == "backprop_input" and prod(problem.stride) > MOST_PHASES:
            phases = prod(problem.stride)
            return f"cuda-gather takes up to {MOST_PHASES} stride phases, not {phases}"
        if (bits := tap_bits(problem)) > MOST_TAP_BITS:
            return f"cuda-gather takes filter sizes with a sum of up to {MOST_TAP_BITS}, not {bits}"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        yield from extent_counts(request.problem)
        gemms, tiles = self.gemms(request, _divides_frames(request)), self.fitting_tiles(request)
        most = max(sum(t.blocks(g.gemm_m, g.gemm_n) * g.groups for g in gemms) for t in tiles)
        yield Count("blocks", most, MOST_BLOCKS)

    def fitting_tiles(self, request: Request) -> list[Tile]:
        """Return the tiles for the request's dtype and precision."""
        if request.problem.is_complex:
            return []
        on_tensor_cores = mma_refuses(request) is None
        kinds = {int(on_tensor_cores), 0} if request.operands == "tf32" else {int(on_tensor_cores)}
        tiles = super().fitting_tiles(request)
        return [tile for tile in tiles if tile.defines["TENSOR_CORES"] in kinds]

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            candidate
            for of_product in worthwhile_products(request)
            for products in (self.products(of_product), self._divided(of_product))
            for candidate in _with_copies(products, of_product, request)
        ]

    def products(self, request: Request) -> list[Candidate]:
        """Return the candidates that copy no operands."""
        return super().candidates(request)

    def _divided(self, request: Request) -> list[Candidate]:
        """Return the candidates that divide the frames and copy no operands."""
        tiles = self.worthwhile_tiles(request) if _divides_frames(request) else []
        return [one for tile in tiles for one in self.costed(request, tile, [1], True)]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        if choices.copies not in COPIES[request.pass_]:
            return None
        of_product = _product_request(request, choices.copies)
        found = super().candidate(of_product, replace(choices, copies=(), divides_frames=False))
        if choices.divides_frames:
            same = (one for one in self._divided(of_product) if one.tile == choices.tile)
            found = next(same, None) if found and choices.splits == 1 else None
        return _with_copies([found], of_product, request)[0] if found else None

    def gemms(self, request: Request, divided: bool = False) -> tuple[GemmView, ...]:
        problem = request.problem
        if request.pass_ != "backprop_input":
            return super().gemms(request)
        if not divided:
            return problem.phase_gemms
        phases = product(*frames.parts(problem, request.pass_, divided))
        return tuple(map(problem.phase_gemm, phases))

    def most_splits(self, request: Request) -> int:
        gemms = self.gemms(request)
        return max(min(gemms[0].gemm_k, MOST_SPLITS), 1) if len(gemms) == 1 else 1

    def splits(self, request: Request, tile: Tile) -> list[int]:
        """Return 1 and the numbers of splits that balance the multiprocessors."""
        gemm = request.problem.gemm(request.pass_)
        steps = -(-gemm.gemm_k // tile.block_k)
        most = min(steps // cost.LEAST_SPLIT_STEPS, self.most_splits(request))
        most = request.most_within_limit(most, self.split_bytes(request))
        tiles = tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups
        if most <= 1 or not tiles:
            return [1]
        places = request.chip.multiprocessors
        wanted = (min(int(count * places) // tiles, most) for count in BLOCKS)
        # All splits have the same number of steps, up to rounding, and no split is empty.
        found = sorted({-(-steps // -(-steps // splits)) for splits in wanted if splits > 1})
        return [1, *found]

    def further_launches(self, request: Request, divided: bool) -> int:
        return phase_launches(request.problem, request.pass_, divided) - 1

    def block(self, request: Request, tile: Tile) -> tuple[int, cost.Work, cost.Work]:
        stored = cost.RESULT_WAVEFRONTS * tile.block_m * tile.block_n / 32
        return resident(request, tile), work(request, tile), cost.Work(0, stored)

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launches: any copy of operands, the product, and any sum of splits."""
        import numpy as np

        pass_, split = request.pass_, choices.splits > 1
        of_product = _product_request(request, choices.copies)
        offset = aligned(choices.splits * self.split_bytes(request)) if split else 0
        before, operands = _operand_copies(request, of_product, offset, copied_w)
        products = [
            product_launch(of_product, choices, operands, epilogue, partial=split, number=number)
            for number in range(phase_launches(request.problem, pass_, choices.divides_frames))
        ]
        if not split:
            return (*before, *products)
        (product,) = products
        vector = int(dict(product.defines)["C_VECTOR"])
        *_, packed, phases = product.arguments
        reduction = Launch(
            source="conv_gather.cu",
            entry="conv_gather_reduce",
            defines=product.defines,
            grid=(-(-self.sums(request) // (cost.ADDING_THREADS * vector)),),
            block=(cost.ADDING_THREADS,),
            shared_bytes=0,
            arguments=(
                *("workspace", "bias", "add", ROLES_OF[pass_][-1], np.int32(choices.splits)),
                *(packed, phases),
            ),
        )
        return (*before, product, reduction)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        of_product = _product_request(request, choices.copies)
        if "w" not in of_product.memory.copied:
            return None
        copied = of_product.problem
        size = copy_bytes(copied.filter_shape, ITEMSIZE[copied.dtype])
        launch = arrange(request.problem, copied, request.memory, [("w", 0)])
        return FilterForm(copied.filter_format, size, launch)


# -- copies ----------------------------------------------------------------------------------------

OPERANDS = {
    "forward": ("x", "w"),
    "backprop_input": ("y", "w"),
    "backprop_filter": ("y", "x"),
}
"""Names of the operands A and B, by pass."""


COPIES = {
    pass_: tuple(roles for count in range(3) for roles in combinations(operands, count))
    for pass_, operands in OPERANDS.items()
}
"""Sets of operands that may be copied with channels last before the product, by pass."""


def copied_bytes(request: Request) -> int:
    """Return the size of the copies that a product's request reads, in bytes."""
    itemsize = ITEMSIZE[request.problem.dtype]
    roles = request.memory.copied
    return sum(copy_bytes(shape_of(request.problem, role), itemsize) for role in roles)


def aligned(size: int) -> int:
    """Return the bytes of partial sums, rounded up to the alignment of the copies after them."""
    return _multiple(size, PIECE_BYTES)


def _product_request(request: Request, roles: tuple[str, ...]) -> Request:
    """Return the request for a product that reads copies of some operands.

    The workspace limit is reduced by the size of the copies.
    """
    if not roles:
        return request
    problem, strides = arranged(request.problem, request.memory, roles)
    product = replace(request, problem=problem, strides=strides)
    limit = request.workspace_limit
    if limit is None:
        return product
    left = max(limit - copied_bytes(product), 0) // PIECE_BYTES * PIECE_BYTES
    return replace(product, workspace_limit=left)


def worthwhile_products(request: Request) -> Iterator[Request]:
    """Yield the requests of products, first without copies, then with copies of some operands.

    The copies fit the workspace limit.  Each allows wider vector loads than its operand.
    """
    pass_, itemsize = request.pass_, ITEMSIZE[request.problem.dtype]
    yield request
    own = accesses(pass_, request.problem, request.memory)
    if own.a.vector == own.b.vector == PIECE_BYTES // itemsize:
        return
    vectors: dict[tuple[str, ...], dict[str, int]] = {}
    for roles in COPIES[pass_]:
        of_product = _product_request(request, roles)
        found = accesses(pass_, of_product.problem, of_product.memory)
        names = OPERANDS[pass_]
        vectors[roles] = dict(zip(names, (found.a.vector, found.b.vector), strict=True))
        others = {role: tuple(other for other in roles if other != role) for role in roles}
        wider = all(vectors[roles][role] > vectors[others[role]][role] for role in roles)
        if roles and wider and request.affords(copied_bytes(of_product)):
            yield of_product


def _with_copies(
    products: Sequence[Candidate], of_product: Request, request: Request
) -> list[Candidate]:
    """Return the candidates of a product, extended by the launch that copies its operands."""
    if of_product is request:
        return list(products)
    size, roles = copied_bytes(of_product), of_product.memory.copied
    copying = cost.further(request.chip, 2 * size)
    return [
        replace(
            candidate.with_demand(request, copying),
            workspace_bytes=aligned(candidate.workspace_bytes) + size,
            copies=roles,
            copied=roles,
            summary="copied with channels last",
        )
        for candidate in products
    ]


# -- blocks ----------------------------------------------------------------------------------------


def tap_words(problem: ConvProblem) -> int:
    """Return the number of 32-bit words for a filter's tap bits and one spare bit."""
    return tap_bits(problem) // 32 + 1


class Pipeline(NamedTuple):
    """Shared memory of a block.

    Attributes:
        stages: number of stages of the pipeline, each with a tile of A and a tile of B.
        shared_bytes: size in bytes of the pipeline, or of the tile of C that later replaces the
            pipeline, whichever is larger.
        table_bytes: size of the address tables and loop counters, in bytes.
    """

    stages: int
    shared_bytes: int
    table_bytes: int


def pipeline(
    tile: Tile, vectors: Accesses, device: Device, words: int, index: str = "int"
) -> Pipeline:
    """Return the pipeline of a tile; shared memory must hold its stages for all resident blocks.

    Args:
        tile: block tile.
        vectors: vector accesses to A, B and C.
        device: device that the pipeline is for.
        words: number of 32-bit words of tap bits (``tap_words``).
        index: C++ type of offsets.
    """
    m, n, k, itemsize = tile.block_m, tile.block_n, tile.block_k, tile.itemsize
    assert itemsize is not None

    def of_operand(extent: int, along_k: bool) -> int:  # bytes of a StageTile, padding included
        is_padded = not along_k and itemsize > 2 and extent * itemsize != 64
        padding = 32 // itemsize if is_padded else 0
        return (extent + padding) * k * itemsize

    stage = of_operand(m, vectors.a.along_first) + of_operand(n, vectors.b.along_first)
    # An address is the sum of two halves.  Per operand, the tables have one half per vector along m
    # or n, and the halves of k of two turns (TURN_K of cuda/conv_gather.cu).  After them come the
    # loop counters of a turn, 8 integers that describe the loops, and the block's tile.
    index_bytes = 4 if index == "int" else 8
    half = _multiple(index_bytes + 4 * words, 8 if words == 1 else index_bytes)
    positions = sum(
        extent // (1 if access.along_first else access.vector)
        for access, extent in ((vectors.a, m), (vectors.b, n))
    )
    turn = k if itemsize == 8 else 32
    tables = (positions + 4 * turn) * half + (4 * turn + 12) * index_bytes
    tables = _multiple(tables, STAGE_ALIGNMENT)
    stages = 2
    if copies_async(device):
        of_block = (device.chip.shared << 10) // tile.defines["RESIDENT"]
        room = of_block - RESERVED_SHARED - tables
        stages = max(2, min(MOST_STAGES, room // stage))
    lines, line = (m, n) if vectors.c.along_first else (n, m)
    output = lines * (line + 8) * itemsize + (m + n) * index_bytes if itemsize == 2 else 0
    return Pipeline(stages, max(stages * stage, _multiple(output, STAGE_ALIGNMENT)), tables)


def _multiple(size: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``size``."""
    return -(-size // of) * of


def resident(request: Request, tile: Tile) -> int:
    """Return the resident blocks per SM that shared memory and registers allow."""
    problem, device = request.problem, request.device
    found = accesses(request.pass_, problem, request.memory)
    block_pipeline = pipeline(tile, found, device, tap_words(problem))
    by_shared = device.chip.blocks_by_shared(
        block_pipeline.shared_bytes + block_pipeline.table_bytes
    )
    by_registers = tile.defines["RESIDENT"]
    if tile.defines["TENSOR_CORES"]:
        sizes = (tile.block_m, tile.block_n, ITEMSIZE[problem.dtype])
        by_registers = BY_REGISTERS.get(sizes, by_registers)
    return min(by_shared, by_registers)


def work(request: Request, tile: Tile) -> cost.Work:
    """Return the work of a thread block per element of k, without storing the results."""
    chip, itemsize, macros = request.chip, ITEMSIZE[request.problem.dtype], tile.defines
    found = accesses(request.pass_, request.problem, request.memory)
    rate = cost.tensor_rate(request) if macros["TENSOR_CORES"] else cost.plain_rate(request)
    flops = tile.block_m * tile.block_n * request.problem.flops_of_product
    wavefronts = instructions = waits = 0.0
    for access, extent, readers in (
        (found.a, tile.block_m, macros["WARPS_N"]),
        (found.b, tile.block_n, macros["WARPS_M"]),
    ):
        size, apart = access.vector * itemsize, access.apart * itemsize
        vectors = extent / access.vector / 32
        wavefronts += vectors * (cost.wavefronts(size, apart) + cost.wavefronts(size))
        wavefronts += readers * extent * itemsize / cost.WAVEFRONT_BYTES
        instructions += vectors * cost.ACCESS_INSTRUCTIONS
        if size < 4 or not copies_async(request.device):  # the copy passes through registers
            instructions += vectors * cost.ACCESS_INSTRUCTIONS * (cost.REGISTER_COPY - 1)
            waits = 1 / tile.block_k
    return cost.Work(
        multiplying=flops / cost.per_cycle(chip, rate),
        wavefronts=wavefronts,
        instructions=instructions,
        waits=waits,
    )


def tap_bits(problem: ConvProblem) -> int:
    """Return the number of tap bits: one per filter position along each of three axes.

    In a pixel's address, a bit is set if the taps at that position read outside the tensor.
    """
    return sum(problem.filter_sizes) + 3 - len(problem.filter_sizes)


# -- launches --------------------------------------------------------------------------------------


def product_launch(
    request: Request,
    choices: Choices,
    operands: Sequence[str | Part],
    epilogue: Epilogue = PLAIN,
    *,
    partial: bool = False,
    number: int = 0,
) -> Launch:
    """Return a launch of the matrix product of a pass.

    Args:
        request: request for the product, whose operands may be copies.
        choices: tile, blocks and splits.
        operands: names of the arrays that contain A and B, or their parts of the workspace.
        epilogue: addition of an array and activation, applied to the results of forward or
            backprop_input.
        partial: whether to write the sums to the workspace, as accumulators; the order is (split,
            group, gemm_m, gemm_n), with the last two axes swapped if C is contiguous along m.
        number: index of the launch in a pass with several launches (``phase_launches``).
    """
    problem, pass_, strides = request.problem, request.pass_, request.memory
    tile = choices.tile
    assert tile is not None
    found = accesses(pass_, problem, strides, choices.divides_frames)
    a, b, c = found.a, found.b, found.c
    # With stride 0 along axes of one element, every offset is a multiple of the vector's length,
    # even outside the tensor.
    strides = strides.canonical(problem)
    index = parameters.index_type(problem, strides)
    phases = _phases(problem, pass_, choices, number)
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": index,
        **tile.defines,
        "A_ALONG_K": int(a.along_first),
        "A_VECTOR": a.vector,
        "B_ALONG_K": int(b.along_first),
        "B_VECTOR": b.vector,
        "C_ALONG_N": int(c.along_first),
        "C_VECTOR": c.vector,
        "TAPS_FASTEST": int(found.taps_fastest),
        "TAP_WORDS": tap_words(problem),
        "PHASES": len(phases["phase"][0]),
        "SPLIT": int(partial),
        "ASYNC_COPY": int(copies_async(request.device)),
        **parameters.fold_defines(problem, strides),
        **({"VIEW": 1} if request.adds_zeros else {}),
        **epilogue.defines,
    }
    if index == "int":  # 64-bit indices leave no registers for more blocks
        defines["RESIDENT"] = max(tile.defines["RESIDENT"], resident(request, tile))
    block_pipeline = pipeline(tile, found, request.device, tap_words(problem), index)
    defines["STAGES"], defines["SHARED_BYTES"] = block_pipeline.stages, block_pipeline.shared_bytes
    packed = parameters.pack(problem, strides)
    return Launch(
        source="conv_gather.cu",
        entry="conv_gather",
        defines=tuple(defines.items()),
        grid=(int(phases["phase"]["end"][0, -1]) * problem.groups, choices.splits),
        block=(tile.threads,),
        shared_bytes=block_pipeline.shared_bytes,
        arguments=(*operands, "bias", "add", ROLES_OF[pass_][-1], "workspace", packed, phases),
    )


def _operand_copies(
    request: Request, product: Request, offset: int, copied_w: bool
) -> tuple[tuple[Launch, ...], list[str | Part]]:
    """Return the launch that copies operands, if any, and the locations of A and B.

    Args:
        request: request for the pass.
        product: request for its product, which reads the copies.
        offset: bytes from the beginning of the workspace to the copies.
        copied_w: as for ``Family.launches``.
    """
    problem, strides, copied = request.problem, request.memory, product.problem
    operands: list[str | Part] = []
    copies: list[tuple[str, int]] = []
    for role in OPERANDS[request.pass_]:
        needs_no_copy = (role == "w" and copied_w) or 0 in shape_of(copied, role)
        if role not in product.memory.copied or needs_no_copy:
            operands.append(role)
            continue
        operands.append(Part("workspace", offset))
        copies.append((role, offset))
        offset += copy_bytes(shape_of(copied, role), ITEMSIZE[problem.dtype])
    return ((arrange(problem, copied, strides, copies),) if copies else ()), operands


# -- stride phases ---------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def phases_type(count: int) -> np.dtype:
    """Return the NumPy dtype of the struct ``StridePhases`` in cuda/include/gather.cuh."""
    import numpy as np

    axes = (np.int32, parameters.SPATIAL)
    names = ("first_pixel", "pixels", "first_tap", "taps", "base")
    phase = np.dtype([*((name, *axes) for name in names), ("end", np.int32)])
    axis = np.dtype([("spacing", np.int32), ("reciprocal", np.uint32), ("shift", np.int32)])
    return np.dtype([("axis", axis, parameters.SPATIAL), ("step", *axes), ("phase", phase, count)])


def _divides_frames(request: Request) -> bool:
    """Return whether divided frames are worthwhile and within the limit of stride phases."""
    problem, pass_ = request.problem, request.pass_
    if pass_ != "backprop_input" or not frames.is_worthwhile(problem, pass_):
        return False
    return prod(map(len, frames.parts(problem, pass_, True))) <= MOST_PHASES


def phase_launches(problem: ConvProblem, pass_: str, divided: bool) -> int:
    """Return the number of launches that compute the stride phases of a pass."""
    if pass_ != "backprop_input":
        return 1
    return -(-prod(map(len, frames.parts(problem, pass_, divided))) // MAX_PHASES)


def _phases(problem: ConvProblem, pass_: str, choices: Choices, number: int = 0) -> np.ndarray:
    """Return the stride phases of a launch as StridePhases, phases with the most taps first.

    In backprop_input, empty phases are appended until the number of phases is a power of two.
    Other passes have a single phase.
    """
    import numpy as np

    tile = choices.tile
    assert tile is not None
    if pass_ != "backprop_input":
        record = np.zeros(1, phases_type(1))
        record["axis"] = [tap_axis(dilation) for dilation in spatial(problem.dilation)]
        record["phase"]["end"] = choices.blocks // problem.groups
        return record
    listed = list(product(*frames.parts(problem, pass_, choices.divides_frames)))
    listed.sort(key=lambda phase: -prod(len(taps) for _, taps in phase))
    listed = listed[MAX_PHASES * number : MAX_PHASES * (number + 1)]
    record = np.zeros(1, phases_type(1 << (len(listed) - 1).bit_length()))
    fields, missing, end = record[0], parameters.SPATIAL - len(problem.axes), 0
    fields["step"], fields["axis"] = 1, tap_axis(1)
    for phase, axes in zip(fields["phase"], listed, strict=False):
        phase["pixels"] = phase["taps"] = 1
        pairs = zip(problem.axes, axes, strict=True)
        for at, (axis, (inputs, taps)) in enumerate(pairs, start=missing):
            phase["first_pixel"][at], phase["pixels"][at] = inputs.start, len(inputs)
            phase["first_tap"][at], phase["taps"][at] = taps.start, len(taps)
            phase["base"][at], spacing = axis.outputs_of_phase(inputs, taps)
            fields["step"][at], fields["axis"][at] = taps.step, tap_axis(spacing)
        pixels = problem.N * int(prod(phase["pixels"].tolist()))
        end += tile.blocks(pixels, problem.C // problem.groups)
        phase["end"] = end
    fields["phase"]["end"][len(listed) :] = end
    return record


def tap_axis(spacing: int) -> tuple[int, int, int]:
    """Return the fields of TapAxis: a spacing, and its reciprocal as a multiplier and a shift."""
    shift = (spacing - 1).bit_length()
    return spacing, -(-(1 << 31 + shift) // spacing), shift


class ViewedGather(Viewed, Gather):
    """cuda-gather with the views of views.py."""

    excludes_zeros = True


CUDA_GATHER = ViewedGather()
