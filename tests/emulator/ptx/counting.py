"""Counters of executed instructions: one for each basic block, one for each guarded instruction."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .flow import main_loop
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
    """

    def __init__(self, entry: Entry) -> None:
        self.blocks: list[Counted] = []
        self._current: int | None = None
        for product in (_PRODUCT, _PLAIN_PRODUCT):
            is_product = lambda one, product=product: bool(product.match(one.opcode))  # noqa: E731
            in_main_loop = main_loop(entry.body, is_product)
            if any(in_main_loop):
                break
        self._in_main_loop = iter(in_main_loop)

    def executed(self, kind: str) -> int | None:
        """Adds an instruction to the running block; the block's counter where it begins with it."""
        begins = self._current is None
        in_main_loop = next(self._in_main_loop)
        if self._current is None:
            self._current = self._begin(in_main_loop)
        self.blocks[self._current].kinds[kind] += 1
        return self._current if begins else None

    def guarded(self, kind: str) -> int:
        """The counter of an instruction that is executed where its guard holds."""
        number = self._begin(next(self._in_main_loop))
        self.blocks[number].kinds[kind] += 1
        return number

    def end_block(self) -> None:
        """What follows may be executed without what came before, or the other way round."""
        self._current = None

    def _begin(self, in_main_loop: bool) -> int:
        self.blocks.append(Counted(in_main_loop))
        return len(self.blocks) - 1
