"""The flow of a kernel's statements: which of them are in its main loop."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests import loops

from .syntax import Scope, Statement


def main_loop(body: Scope, is_wanted: Callable[[Statement], bool]) -> list[bool]:
    """Of each instruction, in order, whether it is in an innermost loop around a wanted one."""
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
                    branches.extend((number, one, known) for one in targets[item.operands[1]])

    walk(body, [])
    for number, label, known in branches:
        follows[number].add(next(labels[label] for labels in known if label in labels))
    follows.append(set())  # where the text ends
    wanted = {number for number, one in enumerate(instructions) if is_wanted(one)}
    found = loops.innermost(follows, wanted)
    return [number in found for number in range(len(instructions))]
