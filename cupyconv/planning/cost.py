"""The written-down cost model that ranks kernels: no measuring, and nothing but problem and chip.

    time = max(operations / rate, bytes / bandwidth) / (share of the last wave that is busy)

with the operations of whole tiles, those beyond the matrix's edge included, and the bytes of each
tensor once plus the workspace's twice.  It depends on an architecture's nominal chip, never on the
card at hand, so that every card of an architecture takes the same kernel and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.planning.device import Device
from cupyconv.planning.families import Family, Tile
from cupyconv.problem import ConvProblem, GemmView


@dataclass(frozen=True)
class Chip:
    """An architecture's nominal chip, from its data sheet.

    Attributes:
        multiprocessors: how many.
        tensor_rate: TFLOP/s of 16-bit products summed in float32 through mma.sync.
        float_rate: TFLOP/s of float32 outside the tensor cores.
        double_rate: TFLOP/s of float64 outside the tensor cores.
        bandwidth: of device memory, in GB/s.
    """

    multiprocessors: int
    tensor_rate: float
    float_rate: float
    double_rate: float
    bandwidth: float


CHIPS = {
    (7, 5): Chip(40, 65, 8.1, 0.25, 320),
    (8, 0): Chip(108, 312, 19.5, 9.7, 1555),
    (8, 6): Chip(84, 150, 37.4, 0.6, 696),
    (8, 9): Chip(142, 362, 91.1, 1.4, 864),
    (9, 0): Chip(132, 620, 67.0, 33.5, 4800),  # mma.sync reaches about 60 % of the wgmma rate
    (10, 0): Chip(148, 620, 75.0, 37.0, 8000),
    (12, 0): Chip(170, 420, 104.0, 1.6, 1790),
}
"""By compute capability; one between takes the newest that is older."""

# What the kernels reach of these rates; to be replaced by measurements.
_EFFICIENCY = {"cuda-generic": 0.25, "cuda-gather": 0.5, "cuda-direct": 0.3}

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


@dataclass(frozen=True)
class Candidate:
    """One way to compute a pass, with what it is expected to take.

    Attributes:
        blocks: thread blocks of one split.
        splits: into how many parts gemm_k is cut.
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
    return CHIPS[max(known for known in CHIPS if known <= device.capability)]


def candidates(problem: ConvProblem, pass_: str, device: Device, family: Family) -> list[Candidate]:
    """The ways a family has to compute a pass, costed."""
    chip = chip_of(device)
    if family.streams:
        return [_streaming(problem, pass_, chip, family)]
    tiles = (tile for tile in family.tiles if tile.since <= device.capability)
    return [_tiled(problem, pass_, chip, family, tile) for tile in tiles]


def _streaming(problem: ConvProblem, pass_: str, chip: Chip, family: Family) -> Candidate:
    """A family without tiles, whose splits are chunks of pixels in backprop_filter."""
    chunks = workspace = 0
    if pass_ == "backprop_filter":
        channels_and_rows = -(-problem.K // 64) * prod(problem.filter_sizes[:-1])
        pixels = problem.N * prod(problem.output_sizes)
        wanted = -(-STREAMING_TARGET_BLOCKS // channels_and_rows)
        chunks = max(min(wanted, pixels // STREAMING_MINIMUM_PIXELS, MAX_CHUNKS), 1)
        workspace = chunks * prod(problem.filter_shape) * (8 if problem.dtype == "float64" else 4)
    rate = _plain_rate(problem, chip)
    compute = problem.flops / (rate * 1e6 * _EFFICIENCY[family.name])
    memory = (problem.bytes + 2 * workspace) / (chip.bandwidth * 1e3)
    return Candidate(family, None, 0, max(chunks, 1), workspace, max(compute, memory))


def _tiled(problem: ConvProblem, pass_: str, chip: Chip, family: Family, tile: Tile) -> Candidate:
    """A GEMM family's kernel with one tile."""
    gemms = _gemms(problem, pass_, family)
    per_gemm = [tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups for gemm in gemms]
    blocks = sum(per_gemm)
    splits = _splits(blocks, gemms[0].gemm_k, tile) if family.splits and len(gemms) == 1 else 1
    elements = gemms[0].gemm_m * gemms[0].gemm_n * gemms[0].groups
    workspace = splits * elements * 4 if splits > 1 else 0

    depth = [-(-gemm.gemm_k // tile.block_k) * tile.block_k for gemm in gemms]
    padded = sum(n * k for n, k in zip(per_gemm, depth, strict=True))
    operations = 2 * padded * tile.block_m * tile.block_n
    rate = chip.tensor_rate if family.uses_tensor_cores else _plain_rate(problem, chip)
    compute = operations / (rate * 1e6 * _EFFICIENCY[family.name])
    memory = (problem.bytes + 2 * workspace) / (chip.bandwidth * 1e3)
    launched = blocks * splits
    waves = -(-launched // chip.multiprocessors)
    busy = launched / (waves * chip.multiprocessors) if launched else 1.0
    return Candidate(family, tile, blocks, splits, workspace, max(compute / busy, memory))


def _plain_rate(problem: ConvProblem, chip: Chip) -> float:
    return chip.double_rate if problem.dtype == "float64" else chip.float_rate


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
