"""What the families' cost models share: no measuring, and nothing but problem and chip.

    time = max(operations / rate / (share of the last wave that is busy), bytes / bandwidth)
           + launches * overhead

with the operations of whole tiles, those beyond the matrix's edge included, and the bytes of each
tensor once plus the workspace's twice.  Where loads from shared memory, or the instructions that
copy an operand's pieces, are counted and take longer than the operations, they take their place.
It depends on an architecture's nominal chip, never on the card at hand, so that every card of an
architecture takes the same kernel and gives the same bits.
"""

from __future__ import annotations

from cupyconv.planning.device import Chip
from cupyconv.planning.request import Request
from cupyconv.problem import REAL_PART

MOST_SPLITS = 64
"""Parts that a kernel cuts gemm_k into."""

LEAST_SPLIT_STEPS = 8
"""Steps of BLOCK_K that each split keeps at least, so that filling the ring pays."""

LAUNCH_OVERHEAD = 2.0
"""Microseconds of each launch, those before and after the product included."""

ISSUED_BY_WARPS = 4
"""Instructions of warps that a multiprocessor begins in a cycle."""

ISSUED = 32 * ISSUED_BY_WARPS
"""Instructions of threads that a multiprocessor begins in a cycle."""


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
