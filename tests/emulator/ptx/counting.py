"""Counters of executed instructions: one for each basic block, one for each guarded instruction."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Those of one kernel, handed out while it is written.

    Attributes:
        blocks: for each counter, the instructions of each kind that one execution stands for.
    """

    def __init__(self) -> None:
        self.blocks: list[Counter[str]] = []
        self._current: int | None = None

    def executed(self, kind: str) -> int | None:
        """Adds an instruction to the running block; the block's counter where it begins with it."""
        begins = self._current is None
        if self._current is None:
            self.blocks.append(Counter())
            self._current = len(self.blocks) - 1
        self.blocks[self._current][kind] += 1
        return self._current if begins else None

    def guarded(self, kind: str) -> int:
        """The counter of an instruction that is executed where its guard holds."""
        self.blocks.append(Counter({kind: 1}))
        return len(self.blocks) - 1

    def end_block(self) -> None:
        """What follows may be executed without what came before, or the other way round."""
        self._current = None
