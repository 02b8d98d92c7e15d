"""What a launch did, as figures: executed instructions by kind and warp, sectors of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .ptx.counting import PRODUCTS, Counted
from .runtime import library

LANES = 32

FREE = ("move", "load own", "address")
"""Kinds of PTX instructions that become none, or operands of others."""

_PLAIN = "float"
"""The kind of products outside the tensor cores."""


@dataclass(frozen=True)
class Executions:
    """Of one kind of instruction by one warp of the blocks.

    Attributes:
        by_warp: Executions by the warp, of all blocks that ran.
        by_lanes: Those of its threads; 32 times as many where none of them parted.
    """

    by_warp: int
    by_lanes: int


Instructions = dict[int, dict[str, Executions]]
"""By warp of a block, then by kind."""


@dataclass(frozen=True)
class Sectors:
    """Traffic with one array of global memory, in sectors of 32 bytes.

    Attributes:
        tensor: The array's name.
        is_write: Stores and atomics, or loads.
        requests: Of a warp, or rows of a bulk copy.
        sectors: That the requests ask for: what goes over the first cache.
        distinct: Different ones of the whole launch: the least that memory has to give.
    """

    tensor: str
    is_write: bool
    requests: int
    sectors: int
    distinct: int


@dataclass(frozen=True)
class Work:
    """What a launch did.

    Attributes:
        instructions: By warp of a block, then by kind; PTX instructions, of which the GPU's
            compiler makes others.  None for a kernel that is not from PTX.
        main_loop: Those of them in innermost loops around products, those of the tensor cores where
            a kernel has any.
        sectors: By array and direction.
    """

    instructions: Instructions | None
    main_loop: Instructions | None
    sectors: list[Sectors]

    def by_kind(self, in_main_loop: bool = False) -> dict[str, Executions]:
        """Of all warps together, the most frequent kind first."""
        by_warp = (self.main_loop if in_main_loop else self.instructions) or {}
        found: dict[str, list[Executions]] = {}
        for kinds in by_warp.values():
            for kind, one in kinds.items():
                found.setdefault(kind, []).append(one)
        summed = {
            kind: Executions(sum(one.by_warp for one in of), sum(one.by_lanes for one in of))
            for kind, of in found.items()
        }
        return dict(sorted(summed.items(), key=lambda item: -item[1].by_warp))

    def for_a_product(self, in_main_loop: bool = False) -> float | None:
        """Instructions that cost something, for each product of the main loop: of the tensor cores,
        or plain ones where there are none of those; None where there are none of either."""
        of_loop = self.by_kind(in_main_loop=True)
        products = next((kind for kind in (PRODUCTS, _PLAIN) if kind in of_loop), None)
        if products is None:
            return None
        kinds = of_loop if in_main_loop else self.by_kind()
        executed = sum(one.by_warp for kind, one in kinds.items() if kind not in FREE)
        return executed / of_loop[products].by_warp


def counted_work(counters: Sequence[Counted] | None) -> Work:
    """The figures of the launch that just ran.

    Args:
        counters: What one execution of each of the kernel's counters stands for.
    """
    runtime = library()
    records = [
        runtime.emulator_sector_record(index).contents
        for index in range(runtime.emulator_sector_count())
    ]
    sectors = [
        Sectors(
            record.tensor.decode(),
            bool(record.is_write),
            record.requests,
            record.sectors,
            record.distinct,
        )
        for record in records
    ]
    if counters is None:
        return Work(None, None, sectors)
    of_loop = [Counted(True, one.kinds if one.in_main_loop else Counter()) for one in counters]
    return Work(_instructions(counters), _instructions(of_loop), sectors)


def _instructions(counters: Sequence[Counted]) -> Instructions:
    runtime = library()
    by_warp: dict[int, Counter[str]] = {}
    by_lanes: dict[int, Counter[str]] = {}
    for index in range(runtime.emulator_execution_count()):
        record = runtime.emulator_execution_record(index).contents
        for kind, count in counters[record.counter].kinds.items():
            by_warp.setdefault(record.warp, Counter())[kind] += count * record.by_warp
            by_lanes.setdefault(record.warp, Counter())[kind] += count * record.by_lanes
        assert record.by_lanes <= LANES * record.by_warp, "a loop of which no passes were told"
    return {
        warp: {kind: Executions(count, by_lanes[warp][kind]) for kind, count in kinds.items()}
        for warp, kinds in sorted(by_warp.items())
    }
