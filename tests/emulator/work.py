"""Counted work of a launch: executed instructions by kind and warp, sectors of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .ptx.counting import PRODUCTS, Counted
from .runtime import library

LANES = 32

FREE = ("move", "load own", "address")
"""Kinds of PTX instructions that usually become operands, or no machine instruction."""

_PLAIN = "float"
"""Kind of products outside the tensor cores."""


@dataclass(frozen=True)
class Executions:
    """Executions of one kind of instruction by one warp, summed over the blocks that ran.

    Attributes:
        by_warp: Executions by the warp.
        by_lanes: Executions by its threads; 32 times ``by_warp`` without divergence.
    """

    by_warp: int
    by_lanes: int


Instructions = dict[int, dict[str, Executions]]
"""Executions by warp of a block, then by kind."""


@dataclass(frozen=True)
class Sectors:
    """Traffic with one array of global memory, in sectors of 32 bytes.

    Attributes:
        tensor: The array's name.
        is_write: True for stores and atomics, False for loads.
        requests: Warp-level requests, or rows of bulk copies.
        sectors: Sectors that the requests ask for: traffic beyond the L1 cache.
        distinct: Distinct sectors of the whole launch: the minimum traffic of memory.
    """

    tensor: str
    is_write: bool
    requests: int
    sectors: int
    distinct: int


@dataclass(frozen=True)
class Work:
    """Counted work of a launch.

    Attributes:
        instructions: Executed PTX instructions by warp of a block, then by kind; None for a kernel
            that is not from PTX.
        main_loop: The subset in innermost loops around products (tensor-core products if the
            kernel has any).
        sectors: Traffic by array and direction.
    """

    instructions: Instructions | None
    main_loop: Instructions | None
    sectors: list[Sectors]

    def by_kind(self, in_main_loop: bool = False) -> dict[str, Executions]:
        """Return the sums over all warps, most frequent kind first."""
        by_warp = (self.main_loop if in_main_loop else self.instructions) or {}
        groups: dict[str, list[Executions]] = {}
        for kinds in by_warp.values():
            for kind, count in kinds.items():
                groups.setdefault(kind, []).append(count)
        sums = {
            kind: Executions(
                sum(count.by_warp for count in group), sum(count.by_lanes for count in group)
            )
            for kind, group in groups.items()
        }
        return dict(sorted(sums.items(), key=lambda item: -item[1].by_warp))

    def for_a_product(self, in_main_loop: bool = False) -> float | None:
        """Return non-free instructions per product of the main loop; None without products."""
        loop_counts = self.by_kind(in_main_loop=True)
        products = next((kind for kind in (PRODUCTS, _PLAIN) if kind in loop_counts), None)
        if products is None:
            return None
        kinds = loop_counts if in_main_loop else self.by_kind()
        executed = sum(count.by_warp for kind, count in kinds.items() if kind not in FREE)
        return executed / loop_counts[products].by_warp


def counted_work(counters: Sequence[Counted] | None) -> Work:
    """Return the counted work of the latest launch.

    Args:
        counters: Instructions per execution of each of the kernel's counters.
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
    loop_counters = [
        Counted(True, counter.kinds if counter.in_main_loop else Counter()) for counter in counters
    ]
    return Work(_instructions(counters), _instructions(loop_counters), sectors)


def _instructions(counters: Sequence[Counted]) -> Instructions:
    runtime = library()
    by_warp: dict[int, Counter[str]] = {}
    by_lanes: dict[int, Counter[str]] = {}
    for index in range(runtime.emulator_execution_count()):
        record = runtime.emulator_execution_record(index).contents
        for kind, count in counters[record.counter].kinds.items():
            by_warp.setdefault(record.warp, Counter())[kind] += count * record.by_warp
            by_lanes.setdefault(record.warp, Counter())[kind] += count * record.by_lanes
        assert record.by_lanes <= LANES * record.by_warp, "a loop whose iterations were not counted"
    return {
        warp: {kind: Executions(count, by_lanes[warp][kind]) for kind, count in kinds.items()}
        for warp, kinds in sorted(by_warp.items())
    }
