"""The cost model that the families share: a roofline with whole waves of thread blocks.

    time of a launch = max(cycles / clock, bytes / bandwidth) + LAUNCH_OVERHEAD
    cycles = max(most * busy * slower, ceil(most / together) * (busy + (1 + waits) * LATENCY))

The busiest multiprocessor gets ``most = ceil(blocks / multiprocessors)`` blocks, of which
``together`` are resident at a time.  ``busy`` is the cycles of a block's busiest unit: the
multipliers, L1 with shared memory, or the schedulers.  ``slower = 1 + HALF_RATE_WARPS / warps`` is
for the warps of the resident blocks, which take turns while others wait.  Bytes count each tensor
once.  Copies of operands and sums of splits are launches of their own.

The rates are those of data sheets.  LATENCY and HALF_RATE_WARPS fit the times of an H200 in
tests/gpu/results; ``planning/measured`` scales the estimates of each family in addition.

Estimates depend on the nominal chip of an architecture, never on the card, so that every card of an
architecture runs the same kernels and returns the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cupyconv.kernels.device import Chip
from cupyconv.kernels.request import Request
from cupyconv.problem import REAL_PART

LEAST_SPLIT_STEPS = 8
"""Fewest steps of BLOCK_K per split worth ranking, so that filling the ring pays (chosen)."""

ADDING_THREADS = 64
"""Threads per block of the reduction kernels (cuda/include/parts.cuh)."""

PARTS_AT_ONCE = 16
"""Loads in flight per thread of the reduction kernels (cuda/include/parts.cuh)."""

LAUNCH_OVERHEAD = 2.0
"""Microseconds per launch (modelled)."""

LATENCY = 1000
"""Cycles of a wait for device memory, of which each block has one at least (fitted)."""

HALF_RATE_WARPS = 2
"""Resident warps with which a multiprocessor reaches half of its rate (fitted)."""

ACCESS_INSTRUCTIONS = 8
"""Instructions per access of a warp to device memory, with its addresses and bounds (counted)."""

RESULT_WAVEFRONTS = 2
"""Wavefronts per 32 results of a tile, which are written to shared memory and read back."""

ISSUED = 4
"""Instructions of warps issued per cycle of a multiprocessor (hardware)."""

REGISTERS = 1 << 16
"""32-bit registers of a multiprocessor (hardware)."""

WAVEFRONT_BYTES = 128
"""Bytes per cycle of L1 and shared memory (hardware)."""


@dataclass(frozen=True)
class Work:
    """Work of a thread block.

    Attributes:
        multiplying: cycles of the tensor cores, or of the multiply-add units.
        wavefronts: accesses of up to 128 bytes to L1 or shared memory, one per cycle.
        instructions: instructions of all warps, where they may be the bound.
        waits: waits for loads from device memory, one after another.
    """

    multiplying: float
    wavefronts: float
    instructions: float = 0.0
    waits: float = 0.0

    def times(self, count: float) -> Work:
        """Return a multiple of the work."""
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
    """Blocks of a launch.

    Attributes:
        blocks: blocks of the grid.
        resident: most resident blocks per multiprocessor.
        warps: warps per block.
        work: work per block.
    """

    blocks: int
    resident: int
    warps: int
    work: Work

    def computing(self, chip: Chip) -> float:
        """Return the microseconds of the busiest multiprocessor."""
        if not self.blocks:
            return 0.0
        most = ceil(self.blocks / chip.multiprocessors)
        together = min(most, self.resident)
        slower = 1 + HALF_RATE_WARPS / (together * self.warps)
        alone = self.work.cycles + (1 + self.work.waits) * LATENCY
        cycles = max(most * self.work.cycles * slower, ceil(most / together) * alone)
        return cycles / (chip.clock * 1e3)

    def microseconds(self, chip: Chip, moved: float) -> float:
        """Return the time of a launch that moves bytes from and to device memory."""
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
    """Return the microseconds of moving bytes from or to device memory."""
    return size / (chip.bandwidth * 1e3)


def of_copy(chip: Chip, moved: float) -> float:
    """Return the microseconds of a launch that copies tensors."""
    return moving(chip, moved) + LAUNCH_OVERHEAD


def of_reduction(chip: Chip, parts: int, moved: float) -> float:
    """Return the microseconds of the launch that adds up ``parts`` partial sums of each result."""
    waiting = ceil(parts / PARTS_AT_ONCE) * LATENCY / (chip.clock * 1e3)
    return max(waiting, moving(chip, moved)) + LAUNCH_OVERHEAD


def wavefronts(size: float, apart: float = 0) -> float:
    """Return the wavefronts of a warp's access with vectors of ``size`` bytes.

    Args:
        size: bytes per lane.
        apart: bytes from a lane's vector to the next one's, if more; each lane then reads a sector
            of 32 bytes at most.
    """
    return max(32 * max(size, min(apart, 32)) / WAVEFRONT_BYTES, 1)


def tensor_rate(request: Request) -> float:
    """Return the TFLOP/s of a request's operands through mma.sync."""
    chip = request.chip
    rates = {"tf32": chip.tensor_rate / 2, "float64": chip.double_tensor_rate}
    return rates.get(request.operands, chip.tensor_rate)


def plain_rate(request: Request) -> float:
    """Return the TFLOP/s of a request's operands outside the tensor cores."""
    chip, dtype = request.chip, request.problem.dtype
    part = REAL_PART.get(dtype, dtype)
    return chip.double_rate if part == "float64" else chip.float_rate


def per_cycle(chip: Chip, rate: float) -> float:
    """Return the operations per cycle of a multiprocessor at a chip's rate in TFLOP/s."""
    return rate * 1e3 / chip.clock / chip.multiprocessors
