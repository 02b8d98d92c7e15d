"""Loops in what a compiler made: of blocks or statements, by what may come after what."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def reached(follows: Sequence[Collection[int]], start: int) -> set[int]:
    """What comes after a node, sooner or later."""
    seen: set[int] = set()
    pending = [*follows[start]]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += follows[node]
    return seen


def innermost(follows: Sequence[Collection[int]], wanted: Collection[int]) -> set[int]:
    """The nodes of the innermost loops that have one of those wanted.

    Args:
        follows: for each node, in the order of the text, those that may come next.
        wanted: nodes.
    """
    before: list[list[int]] = [[] for _ in follows]
    for node, after in enumerate(follows):
        for one in after:
            before[one].append(node)
    loops: dict[int, set[int]] = {}  # by where they begin
    for node, after in enumerate(follows):
        for first in after:
            # Back to what may come before: whoever gets there without passing the beginning.
            if first <= node:
                body, pending = {first}, [node]
                while pending:
                    one = pending.pop()
                    if one not in body:
                        body.add(one)
                        pending += before[one]
                if first == 0 or 0 not in body:
                    loops.setdefault(first, set()).update(body)
    found = [one for one in loops.values() if not one.isdisjoint(wanted)]
    inner = [one for one in found if not any(other < one for other in found)]
    return set().union(*inner)
