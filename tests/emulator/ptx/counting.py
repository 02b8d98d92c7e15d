"""Counters of executed instructions: one per basic block and per guarded instruction."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .flow import flow
from .syntax import Entry

PRODUCTS = "tensor core"
"""Kind of the products that define the main loop, if the kernel has any."""

_PRODUCT = re.compile(r"mma\.sync|wgmma\.mma_async")
_PLAIN_PRODUCT = re.compile(r"fma\.rn\.f(32|64)")


@dataclass
class Counted:
    """Instructions counted by one counter.

    Attributes:
        kinds: Number of instructions of each kind per execution of the counter.
        in_main_loop: Whether they are in an innermost loop around tensor-core products (or plain
            products, if the kernel has no others).
    """

    in_main_loop: bool
    kinds: Counter[str] = field(default_factory=Counter)


class Counters:
    """Counters of one kernel, assigned while its C++ is written, instruction by instruction.

    Attributes:
        blocks: Instructions of each counter.
        around: Index of the parent of each loop; -1 without a parent.
    """

    def __init__(self, entry: Entry) -> None:
        self.blocks: list[Counted] = []
        self._current: int | None = None
        self._next = 0  # index of the next instruction
        entry_flow = flow(entry.body)
        for product in (_PRODUCT, _PLAIN_PRODUCT):
            is_product = lambda statement, product=product: bool(product.match(statement.opcode))  # noqa: E731
            self._in_main_loop = entry_flow.main_loop(is_product)
            if any(self._in_main_loop):
                break
        loops = entry_flow.loops()
        self._beginnings = {}
        for number, (entries, _) in enumerate(loops):
            if len(entries) > 1:  # iterations cannot be identified
                raise ValueError(f"{entry.name} has a loop with several entries")
            self._beginnings[min(entries)] = number
        self._innermost = [
            max((number for number, loop in enumerate(loops) if node in loop.nodes), default=-1)
            for node in range(len(entry_flow.instructions))
        ]
        self.around = [
            max((outer for outer in range(number) if loops[outer].nodes > loop.nodes), default=-1)
            for number, loop in enumerate(loops)
        ]

    def begun_loop(self) -> int | None:
        """Return the loop whose iterations begin with the next instruction, or None."""
        return self._beginnings.get(self._next)

    def innermost_loop(self) -> int:
        """Return the innermost loop of the next instruction; -1 outside loops."""
        return self._innermost[self._next]

    def executed(self, kind: str) -> int | None:
        """Add an instruction to the current block; return the counter if it begins the block."""
        begins = self._current is None
        if self._current is None:
            self._current = self._begin()
        self.blocks[self._current].kinds[kind] += 1
        self._next += 1
        return self._current if begins else None

    def guarded(self, kind: str) -> int:
        """Return a new counter for an instruction that executes only if its guard holds."""
        number = self._begin()
        self.blocks[number].kinds[kind] += 1
        self._next += 1
        return number

    def end_block(self) -> None:
        """End the current basic block."""
        self._current = None

    def _begin(self) -> int:
        self.blocks.append(Counted(self._in_main_loop[self._next]))
        return len(self.blocks) - 1
