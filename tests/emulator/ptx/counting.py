"""Counters of executed instructions: one for each basic block, one for each guarded instruction."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .flow import flow
from .syntax import Entry

PRODUCTS = "tensor core"
"""The kind of instruction that a main loop is known by, where a kernel has any."""

_PRODUCT = re.compile(r"mma\.sync|wgmma\.mma_async")
_PLAIN_PRODUCT = re.compile(r"fma\.rn\.f(32|64)")


@dataclass
class Counted:
    """What one execution of a counter stands for.

    Attributes:
        kinds: Instructions of each kind.
        in_main_loop: Whether they are in an innermost loop around products of the tensor cores, or
            around plain ones where a kernel has no others.
    """

    in_main_loop: bool
    kinds: Counter[str] = field(default_factory=Counter)


class Counters:
    """Those of one kernel, handed out while it is written, instruction by instruction.

    Attributes:
        blocks: What each counter stands for.
        around: Of each loop, the number of the next one around it; -1 where there is none.
    """

    def __init__(self, entry: Entry) -> None:
        self.blocks: list[Counted] = []
        self._current: int | None = None
        self._next = 0  # instruction
        of_entry = flow(entry.body)
        for product in (_PRODUCT, _PLAIN_PRODUCT):
            is_product = lambda one, product=product: bool(product.match(one.opcode))  # noqa: E731
            self._in_main_loop = of_entry.main_loop(is_product)
            if any(self._in_main_loop):
                break
        loops = of_entry.loops()
        self._beginnings = {}
        for number, (entries, _) in enumerate(loops):
            if len(entries) > 1:  # nothing tells its passes apart
                raise ValueError(f"{entry.name} has a loop that is entered in several places")
            self._beginnings[min(entries)] = number
        self._innermost = [
            max((number for number, loop in enumerate(loops) if one in loop.nodes), default=-1)
            for one in range(len(of_entry.instructions))
        ]
        self.around = [
            max((one for one in range(number) if loops[one].nodes > loop.nodes), default=-1)
            for number, loop in enumerate(loops)
        ]

    def begun_loop(self) -> int | None:
        """The loop of which each pass begins with the next instruction."""
        return self._beginnings.get(self._next)

    def innermost_loop(self) -> int:
        """That of the next instruction; -1 where it is in none."""
        return self._innermost[self._next]

    def executed(self, kind: str) -> int | None:
        """Adds an instruction to the running block; the block's counter where it begins with it."""
        begins = self._current is None
        if self._current is None:
            self._current = self._begin()
        self.blocks[self._current].kinds[kind] += 1
        self._next += 1
        return self._current if begins else None

    def guarded(self, kind: str) -> int:
        """The counter of an instruction that is executed where its guard holds."""
        number = self._begin()
        self.blocks[number].kinds[kind] += 1
        self._next += 1
        return number

    def end_block(self) -> None:
        """What follows may be executed without what came before, or the other way round."""
        self._current = None

    def _begin(self) -> int:
        self.blocks.append(Counted(self._in_main_loop[self._next]))
        return len(self.blocks) - 1
