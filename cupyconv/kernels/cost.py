"""The cost model that the families share: counted work times measured prices.

    time of a pass = sum over units of (demand for the unit * price of the unit)

A ``Demand`` says how much of each unit a pass needs: launches, waves of thread blocks, and the
microseconds that the busiest multiprocessor would take at the rates of the data sheet if nothing
else limited it.  Few resident warps reach less than these rates: ``warps`` warps reach the share
``warps / (warps + HALF_RATE_WARPS)``.  ``calibration.py`` has the prices, which are fitted to times
that were measured on a GPU.  A price of 1.3 means that the unit reaches 1 / 1.3 of its data-sheet
rate.

No estimate is shorter than the time of the multiplications or of the memory traffic at the rates of
the data sheet.  Bytes count each tensor once.

The estimates that choose plans depend on the nominal chip of an architecture, never on the card.
Therefore every card of an architecture runs the same kernels and returns the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from operator import mul
from typing import NamedTuple

from cupyconv.kernels.device import Chip
from cupyconv.kernels.request import Request
from cupyconv.problem import REAL_PART

LEAST_SPLIT_STEPS = 8
"""Smallest number of BLOCK_K steps per split (hand-set).  Fewer steps do not repay the time to fill
the pipeline of shared-memory stages."""

ADDING_THREADS = 64
"""Threads per block of the reduction kernels (cuda/include/partial_sums.cuh)."""

LOADS_IN_FLIGHT = 16
"""Loads in flight per thread of the reduction kernels (cuda/include/partial_sums.cuh)."""

ACCESS_INSTRUCTIONS = 8
"""Instructions per access of a warp to device memory, including address and bounds checks
(counted)."""

HALF_RATE_WARPS = 3
"""Number of resident warps that reach half of a multiprocessor's rate (fitted)."""

REGISTER_COPY = 2.5
"""Instructions of a copy to shared memory through registers, relative to cp.async (fitted)."""

RESULT_WAVEFRONTS = 2
"""Wavefronts of shared memory per 32 results of a tile: one to store them and one to load them
(modelled)."""

ISSUED = 4
"""Warp instructions that a multiprocessor issues per cycle (hardware)."""

REGISTERS = 1 << 16
"""32-bit registers per multiprocessor (hardware)."""

SECTOR_BYTES = 32
"""Bytes per sector of device memory and caches (hardware)."""

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


class Kernel(NamedTuple):
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

    def demand(self, chip: Chip, moved: float, places: int | None = None) -> Demand:
        """Return the demand of a pass with this kernel, which reads and writes ``moved`` bytes.

        ``places`` is the number of multiprocessors that its blocks can occupy, by default all.
        """
        # The busiest multiprocessor computes this many blocks.
        most = ceil(self.blocks / (places or chip.multiprocessors))
        waves, work = ceil(most / self.resident), self.work
        warps = max(min(most, self.resident), 1) * self.warps
        microseconds = most / (chip.clock * 1e3) * (1 + HALF_RATE_WARPS / warps)
        return Demand(
            launches=1,
            waves=waves,
            waits=waves * work.waits,
            multiplying=microseconds * work.multiplying,
            wavefronts=microseconds * work.wavefronts,
            instructions=microseconds * work.instructions / ISSUED,
            moved=moving(chip, moved),
        )


class Demand(NamedTuple):
    """Demand of a pass for each unit of the cost model, or the prices of the units.

    The times are microseconds of the busiest multiprocessor at the rates of the data sheet.

    Attributes:
        launches: 1; its price is the fixed time of a pass.
        further: further launches, such as copies of operands and sums of splits.
        waves: waves of resident thread blocks.
        waits: consecutive waits for loads from device memory, of all waves.
        multiplying: time of the tensor cores, or of the multiply-add units.
        wavefronts: time of L1 and shared memory.
        instructions: time of the schedulers.
        moved: time of the device memory in the kernel that multiplies.
        copied: time of the device memory in the further launches.
    """

    launches: float = 0.0
    further: float = 0.0
    waves: float = 0.0
    waits: float = 0.0
    multiplying: float = 0.0
    wavefronts: float = 0.0
    instructions: float = 0.0
    moved: float = 0.0
    copied: float = 0.0

    def microseconds(self, prices: Demand) -> float:
        """Return the estimated time at these prices, at least the data sheet's lower bound."""
        return max(sum(map(mul, self, prices)), self.multiplying, self.moved)


def together(*demands: Demand) -> Demand:
    """Return the demand of several launches."""
    return Demand(*map(sum, zip(*demands, strict=True)))


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


def further(chip: Chip, moved: float, parts: int = 1) -> Demand:
    """Return the demand of a launch that copies operands or adds up partial sums.

    Args:
        chip: the chip.
        moved: bytes read and written.
        parts: elements that a thread reads for each element that it writes.
    """
    return Demand(further=1, waits=ceil(parts / LOADS_IN_FLIGHT), copied=moving(chip, moved))


def wavefronts(size: float, apart: float = 0, least: float = 1) -> float:
    """Return the wavefronts of a warp's access with vectors of ``size`` bytes.

    Args:
        size: bytes per lane.
        apart: bytes between the starts of adjacent lanes' vectors; 0 if the vectors are adjacent.
            Vectors in 32 sectors take a cycle each.
        least: smallest result; 0 for the mean over accesses of which several share a wavefront.
    """
    if apart >= SECTOR_BYTES:
        return 32
    return max(32 * max(size, apart) / WAVEFRONT_BYTES, least)


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
