"""The written-down cost model that ranks kernels: no measuring, and nothing but problem and chip.

    time = max(operations / rate / (share of the last wave that is busy), bytes / bandwidth)
           + launches * overhead

with the operations of whole tiles, those beyond the matrix's edge included, and the bytes of each
tensor once plus the workspace's twice.  Where loads from shared memory, or the instructions that
copy an operand's pieces, are counted and take longer than the operations, they take their place.
It depends on an architecture's nominal chip, never on the card at hand, so that every card of an
architecture takes the same kernel and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from cupyconv.planning import gather, hopper, patch, toeplitz
from cupyconv.planning.device import Device
from cupyconv.planning.families import Family, Tile, accumulator_bytes, chunk_bytes
from cupyconv.planning.request import Request
from cupyconv.problem import ITEMSIZE, REAL_PART, ConvProblem, GemmView


@dataclass(frozen=True)
class Chip:
    """An architecture's nominal chip, from its data sheet.

    Attributes:
        multiprocessors: how many.
        tensor_rate: TFLOP/s of 16-bit products summed in float32 through mma.sync; TF32 has half.
        group_tensor_rate: the same for products of a warpgroup (wgmma); 0 where there are none.
        float_rate: TFLOP/s of float32 outside the tensor cores.
        double_rate: TFLOP/s of float64 outside the tensor cores.
        double_tensor_rate: TFLOP/s of float64 on the tensor cores; 0 where they have none.
        bandwidth: of device memory, in GB/s.
        clock: of the multiprocessors, in GHz.
    """

    multiprocessors: int
    tensor_rate: float
    group_tensor_rate: float
    float_rate: float
    double_rate: float
    double_tensor_rate: float
    bandwidth: float
    clock: float


CHIPS = {
    (7, 5): Chip(40, 65, 0, 8.1, 0.25, 0, 320, 1.59),
    (8, 0): Chip(108, 312, 0, 19.5, 9.7, 19.5, 1555, 1.41),
    (8, 6): Chip(84, 150, 0, 37.4, 0.6, 0, 696, 1.74),
    (8, 9): Chip(142, 362, 0, 91.1, 1.4, 0, 864, 2.52),
    # Through mma.sync, about 60 % of the wgmma rate.
    (9, 0): Chip(132, 620, 989, 67.0, 33.5, 67.0, 4800, 1.98),
    (10, 0): Chip(148, 620, 0, 75.0, 37.0, 37.0, 8000, 1.98),
    (12, 0): Chip(170, 420, 0, 104.0, 1.6, 0, 1790, 2.41),
}
"""By compute capability; one between takes the newest that is older."""

# What the kernels reach of these rates; to be replaced by measurements.
_EFFICIENCY = {
    "cuda-generic": 0.25,
    "cuda-gather": 0.5,
    "cuda-direct": 0.3,
    "cuda-toeplitz": 0.3,
    "cuda-patch": 0.5,
    "cuda-hopper": 0.75,
    "cuda-hopper-bf16x6": 0.75,
    "cuda-hopper-halo": 0.75,
}

SPLIT_TARGET_BLOCKS = 256
"""Blocks below which gemm_k is shared out: two for each multiprocessor of the larger chips."""

SPLIT_MINIMUM_STEPS = 8
"""Steps of BLOCK_K that each split keeps at least, so that filling the ring pays."""

MAX_SPLITS = 64

STREAMING_TARGET_BLOCKS = 1024
"""Blocks that a streaming kernel wants: several for each multiprocessor, to cover latency."""

STREAMING_MINIMUM_PIXELS = 1024
"""Output pixels that each chunk keeps at least."""

MAX_CHUNKS = 256


WIDTH_EFFICIENCY = {256: 1.0, 192: 0.97, 128: 0.9, 64: 0.6}
"""Share of the rate that products of a warpgroup reach by their width: narrow ones wait for A."""

TILE_OVERHEAD = 0.7
"""Microseconds of a tile that no product covers: its first loads, rounding and stores."""

LAUNCH_OVERHEAD = 2.0
"""Microseconds of each launch, those before and after the product included."""

ISSUED = 128
"""Instructions of threads that a multiprocessor begins in a cycle."""

PLANE_PRODUCTS = 6
"""Products of bfloat16 planes for each product of float32."""

STAYING_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Candidate:
    """One way to compute a pass, with what it is expected to take.

    Attributes:
        blocks: thread blocks of one split.
        splits: into how many parts gemm_k, or the pixels, are cut.
        workspace_bytes: for the splits' partial sums.
        microseconds: the model's estimate.
    """

    family: Family
    tile: Tile | None
    blocks: int
    splits: int
    workspace_bytes: int
    microseconds: float


def chip_of(device: Device) -> Chip:
    """The nominal chip of a device's architecture."""
    return _chip(device.capability)


@cache
def _chip(capability: tuple[int, int]) -> Chip:
    return CHIPS[max(known for known in CHIPS if known <= capability)]


def candidates(request: Request, family: Family) -> list[Candidate]:
    """The ways a family has to compute what is asked for within the workspace limit, costed."""
    if family.streams:
        return [_streaming(request, family, _chunks(request, family))]
    if family.stays:
        return [
            _staying(request, family, tile, splits)
            for tile in _tiles(request, family)
            for splits in _staying_splits(request, family, tile)
        ]
    return [
        _tiled(request, family, tile, _splits_within(request, family, tile))
        for tile in _tiles(request, family)
    ]


def candidate(request: Request, family: Family, tile: Tile | None, splits: int) -> Candidate | None:
    """One choice of tile and splits, costed; None if the family does not have it."""
    if family.streams:
        fits = tile is None and (splits == 1 or request.pass_ == "backprop_filter")
        return _streaming(request, family, splits) if fits and 1 <= splits <= MAX_CHUNKS else None
    if tile is None or tile not in _tiles(request, family):
        return None
    if family.stays:
        offered = _staying_splits(request, family, tile)
        return _staying(request, family, tile, splits) if splits in offered else None
    most = MAX_SPLITS if _may_split(request, family) else 1
    return _tiled(request, family, tile, splits) if 1 <= splits <= most else None


def _tiles(request: Request, family: Family) -> list[Tile]:
    itemsize, capability = ITEMSIZE[request.problem.dtype], request.device.capability
    return [t for t in family.tiles if t.since <= capability and t.is_for(itemsize)]


def _streaming(request: Request, family: Family, chunks: int) -> Candidate:
    """A family without tiles, whose splits are chunks of pixels in backprop_filter."""
    problem, chip = request.problem, chip_of(request.device)
    workspace = 0
    if request.pass_ == "backprop_filter":
        workspace = chunks * chunk_bytes(problem)
    if family.uses_tensor_cores:
        flow = _FLOWS[family.name](request)
        compute = _compute(flow, _tensor_rate(request, chip), chip, family)
    else:
        flow = _Flow(problem.flops)
        compute = _compute(flow, _plain_rate(problem, chip), chip, family)
    memory = (problem.bytes + 2 * workspace + flow.halo_bytes / 2) / (chip.bandwidth * 1e3)
    launches = 2 if request.pass_ == "backprop_filter" else 1
    microseconds = max(compute, memory) + launches * LAUNCH_OVERHEAD
    return Candidate(family, None, 0, chunks, workspace, microseconds)


def _chunks(request: Request, family: Family) -> int:
    if request.pass_ != "backprop_filter":
        return 1
    problem = request.problem
    if family.uses_tensor_cores:
        chunks = _FLOWS[family.name](request).chunks
        return max(request.most_within_limit(chunks, chunk_bytes(problem)), 1)
    channels_and_rows = -(-problem.K // 64) * prod(problem.filter_sizes[:-1])
    pixels = problem.N * prod(problem.output_sizes)
    wanted = -(-STREAMING_TARGET_BLOCKS // channels_and_rows)
    chunks = min(wanted, pixels // STREAMING_MINIMUM_PIXELS, MAX_CHUNKS)
    return max(request.most_within_limit(chunks, chunk_bytes(problem)), 1)


def _tiled(request: Request, family: Family, tile: Tile, splits: int) -> Candidate:
    """A GEMM family's kernel with one tile."""
    problem, chip = request.problem, chip_of(request.device)
    gemms = _gemms(problem, request.pass_, family)
    per_gemm = [tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups for gemm in gemms]
    blocks = sum(per_gemm)
    workspace = splits * _split_bytes(problem, gemms[0]) if splits > 1 else 0

    depth = [-(-gemm.gemm_k // tile.block_k) * tile.block_k for gemm in gemms]
    padded = sum(n * k for n, k in zip(per_gemm, depth, strict=True))
    operations = problem.flops_of_product * padded * tile.block_m * tile.block_n
    instructions = 0.0
    if family.uses_tensor_cores:
        rate = _tensor_rate(request, chip)
        instructions = _copying(request, tile, padded)
    else:
        rate = _plain_rate(problem, chip)
    compute = _compute(_Flow(operations, instructions=instructions), rate, chip, family)
    memory = (problem.bytes + 2 * workspace) / (chip.bandwidth * 1e3)
    launched = blocks * splits
    waves = -(-launched // chip.multiprocessors)
    busy = launched / (waves * chip.multiprocessors) if launched else 1.0
    launches = 1 if splits == 1 else 2
    microseconds = max(compute / busy, memory) + launches * LAUNCH_OVERHEAD
    return Candidate(family, tile, blocks, splits, workspace, microseconds)


def _staying(request: Request, family: Family, tile: Tile, splits: int) -> Candidate:
    """A family whose blocks stay and take whole tiles in turn.

    time = max(rounds of tiles * (steps * time of a step + overhead), bytes / bandwidth)
           + time of copies, planes and the sum of splits
    """
    problem, chip = request.problem, chip_of(request.device)
    matrices = _matrices(request, tile)
    cluster_rows = tile.block_m * tile.defines["CLUSTER"]
    tiles = products = 0  # products: tiles times their steps
    for rows, columns, steps in matrices:
        here = -(-rows // cluster_rows) * tile.defines["CLUSTER"] * -(-columns // tile.block_n)
        tiles += here * problem.groups
        products += here * problem.groups * -(-steps // splits)
    planes, layout = _plane_bytes(request, tile), hopper.layout_of(request)
    sums = splits * _staying_split_bytes(request, tile) if splits > 1 else 0

    operations = 2 * tile.block_m * tile.block_n * tile.block_k
    slower = PLANE_PRODUCTS if planes else 2 if request.operands == "tf32" else 1
    rate = chip.group_tensor_rate / slower
    rate *= WIDTH_EFFICIENCY[tile.block_n] * _EFFICIENCY[family.name]
    step = operations / (rate * 1e6 / chip.multiprocessors)
    rounds = -(-tiles * splits // chip.multiprocessors)
    compute = rounds * (products / tiles * step + TILE_OVERHEAD)
    bandwidth = chip.bandwidth * 1e3
    memory = (problem.bytes + sums) / bandwidth
    # Before and after the product: float32 read for its planes, copies, the splits' sums read.
    around = (planes * 5 / 3 + 2 * layout.copied_bytes + sums) / bandwidth
    launches = 1 + (splits > 1) + 2 * bool(planes) + len(layout.copied)
    microseconds = max(compute, memory) + around + launches * LAUNCH_OVERHEAD
    workspace = planes + layout.copied_bytes + sums
    return Candidate(family, tile, tiles, splits, workspace, microseconds)


def _staying_splits(request: Request, family: Family, tile: Tile) -> list[int]:
    """The splits worth a thought: those that leave steps enough, within the workspace limit."""
    matrices = _matrices(request, tile)
    if len(matrices) > 1 or not family.splits:
        return [1]
    most = min(matrices[0][2] // SPLIT_MINIMUM_STEPS, MAX_SPLITS)
    least = _plane_bytes(request, tile) + hopper.layout_of(request).copied_bytes
    each = _staying_split_bytes(request, tile)
    return [
        splits
        for splits in (1, *STAYING_SPLITS)
        if splits == 1 or (splits <= most and request.affords(least + splits * each))
    ]


def _staying_split_bytes(request: Request, tile: Tile) -> int:
    rows, columns, _ = _matrices(request, tile)[0]
    return rows * columns * request.problem.groups * 4


def _plane_bytes(request: Request, tile: Tile) -> int:
    if tile.defines.get("PLANES", 1) == 1:
        return 0
    return hopper.plane_bytes(request.problem, request.pass_)


def _matrices(request: Request, tile: Tile) -> list[tuple[int, int, int]]:
    return hopper.matrices(hopper.layout_of(request).problem, request.pass_, tile)


def _copying(request: Request, tile: Tile, depth: int) -> float:
    """Instructions that copy the operands' pieces, for tiles of that depth altogether."""
    a, b, _ = gather.accesses(request.pass_, request.problem, request.memory)
    return depth * (tile.block_m / a.vector + tile.block_n / b.vector) * gather.PIECE_INSTRUCTIONS


def _may_split(request: Request, family: Family) -> bool:
    return family.splits and len(_gemms(request.problem, request.pass_, family)) == 1


def _splits_within(request: Request, family: Family, tile: Tile) -> int:
    if not _may_split(request, family):
        return 1
    gemm = request.problem.gemm(request.pass_)
    blocks = tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups
    wanted = _splits(blocks, gemm.gemm_k, tile)
    return max(request.most_within_limit(wanted, _split_bytes(request.problem, gemm)), 1)


def _split_bytes(problem: ConvProblem, gemm: GemmView) -> int:
    return gemm.gemm_m * gemm.gemm_n * gemm.groups * accumulator_bytes(problem)


@dataclass(frozen=True)
class _Flow:
    """What a kernel does besides moving each tensor's bytes once.

    Attributes:
        operations: of products, those with padding included.
        wavefronts: of loads from shared memory, where these may be what binds.
        instructions: of threads outside the products, where these may be what binds.
        halo_bytes: of the input that neighbouring blocks load again.
        chunks: that the filter gradient's pixels are cut into.
    """

    operations: float
    wavefronts: float = 0
    instructions: float = 0
    halo_bytes: int = 0
    chunks: int = 1


def _compute(flow: _Flow, rate: float, chip: Chip, family: Family) -> float:
    """Microseconds of the slowest of these, at the share of its rate that a family reaches."""
    cycles = max(flow.wavefronts, flow.instructions / ISSUED) / chip.multiprocessors
    full_rate = max(flow.operations / (rate * 1e6), cycles / (chip.clock * 1e3))
    return full_rate / _EFFICIENCY[family.name]


def _toeplitz_flow(request: Request) -> _Flow:
    cut = toeplitz.cut(request)
    assert cut is not None
    return _Flow(
        toeplitz.operations(request, cut),
        halo_bytes=toeplitz.halo_bytes(request, cut),
        chunks=toeplitz.chunks(request, cut),
    )


def _patch_flow(request: Request) -> _Flow:
    cut = patch.cut(request)
    assert cut is not None
    return _Flow(
        patch.operations(request, cut),
        cut.wavefronts,
        cut.instructions,
        patch.halo_bytes(request, cut),
        patch.chunks(request, cut),
    )


# Of the families that stream through the tensor cores.
_FLOWS = {"cuda-toeplitz": _toeplitz_flow, "cuda-patch": _patch_flow}


def _tensor_rate(request: Request, chip: Chip) -> float:
    rates = {"tf32": chip.tensor_rate / 2, "float64": chip.double_tensor_rate}
    return rates.get(request.operands, chip.tensor_rate)


def _plain_rate(problem: ConvProblem, chip: Chip) -> float:
    part = REAL_PART.get(problem.dtype, problem.dtype)
    return chip.double_rate if part == "float64" else chip.float_rate


def _gemms(problem: ConvProblem, pass_: str, family: Family) -> tuple[GemmView, ...]:
    if pass_ == "backprop_input" and family.has_phases:
        return problem.phase_gemms
    return (problem.gemm(pass_),)


def _splits(blocks: int, gemm_k: int, tile: Tile) -> int:
    if not blocks:
        return 1
    wanted = -(-SPLIT_TARGET_BLOCKS // blocks)
    affordable = -(-gemm_k // tile.block_k) // SPLIT_MINIMUM_STEPS
    return max(min(wanted, affordable, MAX_SPLITS), 1)
