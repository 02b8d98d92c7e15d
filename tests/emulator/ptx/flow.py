"""Control flow of a kernel's statements and the loops in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests import loops
from tests.loops import Loop

from .syntax import Scope, Statement


@dataclass
class Flow:
    """Instructions of a kernel in order, and the possible successors of each."""

    instructions: list[Statement]
    follows: list[set[int]]

    def main_loop(self, is_wanted: Callable[[Statement], bool]) -> list[bool]:
        """Return, per instruction, whether it is in an innermost loop with a wanted instruction."""
        targets = {
            number for number, statement in enumerate(self.instructions) if is_wanted(statement)
        }
        members = loops.innermost(self.follows, targets)
        return [number in members for number in range(len(self.instructions))]

    def loops(self) -> list[Loop]:
        """Return the loops, outer ones before inner ones."""
        return list(loops.nest(self.follows))


def flow(body: Scope) -> Flow:
    """Return the control flow of a kernel's statements."""
    instructions: list[Statement] = []
    follows: list[set[int]] = []
    branches: list[tuple[int, str, list[dict[str, int]]]] = []
    targets: dict[str, list[str]] = {}

    def walk(scope: Scope, outer: list[dict[str, int]]) -> None:
        labels: dict[str, int] = {}
        targets.update(scope.targets)
        known = [labels, *outer]
        for item in scope.items:
            if isinstance(item, Scope):
                walk(item, known)
            elif isinstance(item, str):
                labels[item] = len(instructions)
            elif not item.is_directive:
                number = len(instructions)
                instructions.append(item)
                ends = re.match(r"bra\b|brx\b|ret\b|exit\b|trap\b", item.opcode)
                follows.append(set() if ends and not item.guard else {number + 1})
                if item.opcode.startswith("bra"):
                    branches.append((number, item.operands[0], known))
                elif item.opcode.startswith("brx"):
                    branches.extend((number, label, known) for label in targets[item.operands[1]])

    walk(body, [])
    for number, label, known in branches:
        follows[number].add(next(labels[label] for labels in known if label in labels))
    follows.append(set())  # end of the text
    return Flow(instructions, follows)
