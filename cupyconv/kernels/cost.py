"""The cost model that the families share: a roofline with whole waves of thread blocks.

    time of a launch = max(cycles / clock, bytes / bandwidth) + LAUNCH_OVERHEAD
    cycles = max(most * busy * slower, ceil(most / together) * (busy + (1 + waits) * LATENCY))

The busiest multiprocessor computes ``most = ceil(blocks / multiprocessors)`` blocks, and
``together`` blocks are resident at a time.  ``busy`` is the number of cycles of a block's busiest
unit: the multipliers, L1 with shared memory, or the schedulers.  ``waits`` is the number of
consecutive waits of a block for device memory, after its first.  Warps run while other warps wait:
``slower = 1 + HALF_RATE_WARPS / warps``, where ``warps`` counts the warps of all resident blocks.
Bytes count each tensor once.  Launches that copy operands or add up splits are timed separately.

Rates are taken from data sheets.  LATENCY and HALF_RATE_WARPS fit the times of an H200 in
tests/gpu/results.  The planner also multiplies an estimate by the measured factor of the
family in ``planning/measured``, if any.

The estimates that choose plans depend on the nominal chip of an architecture, never on the card.
Therefore every card of an architecture runs the same kernels and returns the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cupyconv.kernels.device import Chip
from cupyconv.kernels.request import Request
from cupyconv.problem import REAL_PART

LEAST_SPLIT_STEPS = 8
"""Smallest number of BLOCK_K steps per split (hand-set).  Fewer steps do not repay the time to fill
the ring of shared-memory stages."""

ADDING_THREADS = 64
"""Threads per block of the reduction kernels (cuda/include/parts.cuh)."""

PARTS_AT_ONCE = 16
"""Loads in flight per thread of the reduction kernels (cuda/include/parts.cuh)."""

LAUNCH_OVERHEAD = 2.0
"""Microseconds per launch (modelled)."""

LATENCY = 1000
"""Cycles per wait for device memory; each block waits at least once (fitted)."""

HALF_RATE_WARPS = 2
"""Number of resident warps that reach half of a multiprocessor's rate (fitted)."""

ACCESS_INSTRUCTIONS = 8
"""Instructions per access of a warp to device memory, including address and bounds checks
(counted)."""

RESULT_WAVEFRONTS = 2
"""Wavefronts of shared memory per 32 results of a tile: one to store them and one to load them
(modelled)."""

ISSUED = 4
"""Warp instructions that a multiprocessor issues per cycle (hardware)."""

REGISTERS = 1 << 16
"""32-bit registers per multiprocessor (hardware)."""

WAVEFRONT_BYTES = 128
"""Bytes per cycle of L1 and shared memory (hardware)."""


@dataclass(frozen=True)
class Work:
    """Work of a thread block.

    Attributes:
        multiplying: cycles of the tensor cores, or of the multiply-add units.
        wavefronts: accesses of up to 128 bytes to L1 or shared memory, one per cycle.
        instructions: instructions of all warps; 0 for kernels that are never limited by instruction
            issue.
        waits: number of consecutive waits for loads from device memory, after the first wait.
    """

    multiplying: float
    wavefronts: float
    instructions: float = 0.0
    waits: float = 0.0

    def times(self, count: float) -> Work:
        """Return the work multiplied by ``count``."""
        return Work(
            count * self.multiplying,
            count * self.wavefronts,
            count * self.instructions,
            count * self.waits,
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.multiplying + other.multiplying,
            self.wavefronts + other.wavefronts,
            self.instructions + other.instructions,
            self.waits + other.waits,
        )

    @property
    def cycles(self) -> float:
        """Cycles of the busiest unit."""
        return max(self.multiplying, self.wavefronts, self.instructions / ISSUED)


@dataclass(frozen=True)
class Kernel:
    """Thread blocks of a launch, with the work per block.

    Attributes:
        blocks: blocks of the grid.
        resident: largest number of resident blocks per multiprocessor.
        warps: warps per block.
        work: work per block.
    """

    blocks: int
    resident: int
    warps: int
    work: Work

    def computing(self, chip: Chip) -> float:
        """Return the time of the busiest multiprocessor without memory traffic, in microseconds."""
        if not self.blocks:
            return 0.0
        most = ceil(self.blocks / chip.multiprocessors)
        together = min(most, self.resident)
        slower = 1 + HALF_RATE_WARPS / (together * self.warps)
        alone = self.work.cycles + (1 + self.work.waits) * LATENCY
        cycles = max(most * self.work.cycles * slower, ceil(most / together) * alone)
        return cycles / (chip.clock * 1e3)

    def microseconds(self, chip: Chip, moved: float) -> float:
        """Return the time in microseconds of a launch that reads and writes ``moved`` bytes."""
        return max(self.computing(chip), moving(chip, moved)) + LAUNCH_OVERHEAD


def duration(microseconds: float) -> str:
    """Return a time as text with three digits.

    >>> duration(4.449), duration(12_000), duration(3_456_000)
    ('4.45 us', '12.0 ms', '3.46 s')
    """
    value, unit = microseconds, "us"
    for larger in ("ms", "s"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    text = f"{value:#.3g}" if value < 999.5 else f"{value:,.0f}"
    return f"{text.rstrip('.')} {unit}"


def moving(chip: Chip, size: float) -> float:
    """Return the time of moving ``size`` bytes from or to device memory, in microseconds."""
    return size / (chip.bandwidth * 1e3)


def of_copy(chip: Chip, moved: float) -> float:
    """Return the time in microseconds of a launch that reads and writes ``moved`` bytes."""
    return moving(chip, moved) + LAUNCH_OVERHEAD


def of_reduction(chip: Chip, parts: int, moved: float) -> float:
    """Return the time of a launch that adds up partial sums, in microseconds.

    Args:
        chip: the chip.
        parts: partial sums per result.
        moved: bytes read and written.
    """
    waiting = ceil(parts / PARTS_AT_ONCE) * LATENCY / (chip.clock * 1e3)
    return max(waiting, moving(chip, moved)) + LAUNCH_OVERHEAD


def wavefronts(size: float, apart: float = 0) -> float:
    """Return the wavefronts of a warp's access with vectors of ``size`` bytes.

    Args:
        size: bytes per lane.
        apart: bytes between the starts of adjacent lanes' vectors; 0 if the vectors are adjacent.
            Vectors at least 32 bytes apart take separate sectors of 32 bytes.
    """
    return max(32 * max(size, min(apart, 32)) / WAVEFRONT_BYTES, 1)


def tensor_rate(request: Request) -> float:
    """Return the TFLOP/s of mma.sync for a request's operands."""
    chip = request.chip
    rates = {"tf32": chip.tensor_rate / 2, "float64": chip.double_tensor_rate}
    return rates.get(request.operands, chip.tensor_rate)


def plain_rate(request: Request) -> float:
    """Return the TFLOP/s of the multiply-add units for a request's operands."""
    chip, dtype = request.chip, request.problem.dtype
    part = REAL_PART.get(dtype, dtype)
    return chip.double_rate if part == "float64" else chip.float_rate


def per_cycle(chip: Chip, rate: float) -> float:
    """Return the flops per cycle of a multiprocessor if the chip's rate is ``rate`` TFLOP/s."""
    return rate * 1e3 / chip.clock / chip.multiprocessors
