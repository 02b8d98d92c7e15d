"""What the families' cost models share: no measuring, and nothing but problem and chip.

    time = max(computing, bytes / bandwidth) + launches * overhead

for the product, and for what adds up the sums of its parts after it, with the bytes of each tensor
once and the workspace's in both.  Computing takes the multiprocessor
with the most blocks as long as whatever keeps it busy longest: products, those of whole tiles with
what is beyond the matrix's edge, accesses to shared memory, or instructions; or as long as one
block after the other waits, where it holds too few at a time.  How much of each a block has is
counted: tests/emulator/suite.py holds the estimates to what kernels execute.  Families that are not
counted take a share of the full rates.

It depends on an architecture's nominal chip, never on the card at hand, so that every card of an
architecture takes the same kernel and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cupyconv.planning.device import Chip
from cupyconv.planning.request import Request
from cupyconv.problem import REAL_PART

LEAST_SPLIT_STEPS = 8
"""Steps of BLOCK_K that each split keeps at least, so that filling the ring pays."""

ADDING_THREADS = 64
"""Of a block that adds up parts of a result (cuda/include/parts.cuh)."""

PARTS_AT_ONCE = 16
"""Whose loads one of its threads has under way."""

ADDING_INSTRUCTIONS = 80
"""Of one of its warps, without those of parts: counted."""

PART_INSTRUCTIONS = 3
"""For each load of a part: counted."""

LAUNCH_OVERHEAD = 2.0
"""Microseconds of each launch, those before and after the product included."""

ISSUED_BY_WARPS = 4
"""Instructions of warps that a multiprocessor begins in a cycle."""

ISSUED = 32 * ISSUED_BY_WARPS
"""Instructions of threads that a multiprocessor begins in a cycle."""

REGISTERS = 1 << 16
"""Of a multiprocessor."""

SECTORS = 2
"""Of 32 bytes, that a multiprocessor is given in a cycle."""

FILLED = 0.85
"""Share of a multiprocessor's cycles that find work where there is enough of it: modelled."""

PACE = 2
"""Cycles from an instruction of a warp to its next, on average: modelled."""

LATENCY = 600
"""Cycles until a load from device memory is there: modelled."""


@dataclass(frozen=True)
class Work:
    """What a block does.

    Attributes:
        multiplying: cycles of a multiprocessor's tensor cores, or of its multipliers.
        wavefronts: of shared memory.
        instructions: of its warps.
        longest: of the most busy of them.
        waits: of a warp for device memory, which no copy of its own fills.
        sectors: of device memory that are asked for, where these may be what binds.
    """

    multiplying: float
    wavefronts: float
    instructions: float
    longest: float
    waits: float
    sectors: float = 0

    def times(self, count: float) -> Work:
        """So many times the work."""
        return Work(*(count * getattr(self, one.name) for one in fields(self)))

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def of_blocks(chip: Chip, blocks: int, resident: int, work: Work) -> float:
    """Microseconds of so many blocks that do the same.

    A multiprocessor is busy with what takes longest of its blocks, or waits for a warp that has
    nothing to fill its waits with.

    Args:
        chip: that they run on.
        blocks: of all multiprocessors.
        resident: blocks that one of them holds at a time.
        work: of a block.
    """
    if blocks == 0:
        return 0.0
    most = -(-blocks // chip.multiprocessors)
    rounds = -(-most // min(most, resident))
    busy = max(
        work.multiplying,
        work.wavefronts,
        work.instructions / ISSUED_BY_WARPS,
        work.sectors / SECTORS,
    )
    alone = work.longest * PACE + (1 + work.waits) * LATENCY
    return max(most * busy / FILLED, rounds * alone) / (chip.clock * 1e3)


def adding(chip: Chip, sums: int, parts: int, run: int, size: int) -> float:
    """Microseconds of the launch that adds up the parts of sums, besides the bytes that it moves.

    Args:
        chip: that it runs on.
        sums: results.
        parts: of each.
        run: neighbours that a thread adds up.
        size: bytes of a sum.
    """
    piece, waits = run * size, -(-parts // PARTS_AT_ONCE)
    loads = max(piece // 16, 1)  # of a part, which are of up to 16 bytes
    executed = ADDING_INSTRUCTIONS + PART_INSTRUCTIONS * loads * parts
    executed += waits * PARTS_AT_ONCE * (run + 2)
    work = Work(
        multiplying=0,
        wavefronts=0,
        instructions=ADDING_THREADS / 32 * executed,
        longest=executed,
        waits=waits,
        sectors=ADDING_THREADS * parts * piece / 32 * loads,  # each load asks for those of all
    )
    registers = 32 + PARTS_AT_ONCE * piece // 4
    blocks = max(-(-sums // (ADDING_THREADS * run)), 1)
    return of_blocks(chip, blocks, REGISTERS // (ADDING_THREADS * registers), work)


def computing(
    chip: Chip, rate: float, operations: float, wavefronts: float = 0, instructions: float = 0
) -> float:
    """Microseconds of the slowest of these on the whole chip, at their full rates.

    Args:
        operations: of products, those with padding included.
        wavefronts: of loads from shared memory, where these may be what binds.
        instructions: of threads outside the products, where these may be what binds.
    """
    cycles = max(wavefronts, instructions / ISSUED) / chip.multiprocessors
    return max(operations / (rate * 1e6), cycles / (chip.clock * 1e3))


def moving(chip: Chip, size: float) -> float:
    """Microseconds of so many bytes from or to device memory."""
    return size / (chip.bandwidth * 1e3)


def tensor_rate(request: Request) -> float:
    """TFLOP/s of a request's operands through mma.sync."""
    chip = request.device.chip
    rates = {"tf32": chip.tensor_rate / 2, "float64": chip.double_tensor_rate}
    return rates.get(request.operands, chip.tensor_rate)


def plain_rate(request: Request) -> float:
    """TFLOP/s of a request's operands outside the tensor cores."""
    chip, dtype = request.device.chip, request.problem.dtype
    part = REAL_PART.get(dtype, dtype)
    return chip.double_rate if part == "float64" else chip.float_rate
