"""What a launch did, as figures: executed instructions by kind and warp, sectors of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .runtime import library

LANES = 32


@dataclass(frozen=True)
class Executions:
    """Of one kind of instruction by one warp of the blocks.

    Attributes:
        by_warp: Executions by the warp, of all blocks that ran.
        by_lanes: Those of its threads; 32 times as many where none of them parted.
    """

    by_warp: int
    by_lanes: int


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
        sectors: By array and direction.
    """

    instructions: dict[int, dict[str, Executions]] | None
    sectors: list[Sectors]

    def of_kind(self, kind: str) -> Executions:
        """Of all warps together."""
        found = [one[kind] for one in (self.instructions or {}).values() if kind in one]
        return Executions(sum(one.by_warp for one in found), sum(one.by_lanes for one in found))


def counted_work(counters: Sequence[Counter[str]] | None) -> Work:
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
    return Work(None if counters is None else _instructions(counters), sectors)


def _instructions(counters: Sequence[Counter[str]]) -> dict[int, dict[str, Executions]]:
    runtime = library()
    by_warp: dict[int, Counter[str]] = {}
    by_lanes: dict[int, Counter[str]] = {}
    for index in range(runtime.emulator_execution_count()):
        record = runtime.emulator_execution_record(index).contents
        for kind, count in counters[record.counter].items():
            by_warp.setdefault(record.warp, Counter())[kind] += count * record.by_warp
            by_lanes.setdefault(record.warp, Counter())[kind] += count * record.by_lanes
    return {
        warp: {kind: Executions(count, by_lanes[warp][kind]) for kind, count in kinds.items()}
        for warp, kinds in sorted(by_warp.items())
    }
