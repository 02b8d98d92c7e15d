"""Find loops in compiled code, given which blocks or statements may follow each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import networkx as nx


def reached(follows: Sequence[Collection[int]], start: int) -> set[int]:
    """Return all nodes reachable from a node."""
    seen: set[int] = set()
    pending = [*follows[start]]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += follows[node]
    return seen


class Loop(NamedTuple):
    """A loop of nodes, without nodes that only lead to it or away from it.

    Attributes:
        entries: nodes where the loop can be entered.  A loop of the source code has one entry, the
            first node of each iteration.
        nodes: all nodes of the loop, those of inner loops included.
    """

    entries: set[int]
    nodes: set[int]


def nest(follows: Sequence[Collection[int]]) -> Iterator[Loop]:
    """Yield the loops of a graph, outer loops before inner loops.

    Args:
        follows: for each node, in the order of the text, the nodes that may come next.
    """
    graph = nx.DiGraph((node, one) for node, after in enumerate(follows) for one in after)
    pending = [graph]
    while pending:
        part = pending.pop()
        for nodes in nx.strongly_connected_components(part):
            if len(nodes) > 1 or part.has_edge(*nodes, *nodes):
                entries = {one for one in nodes if one == 0 or graph.pred[one].keys() - nodes}
                entries = entries or {min(nodes)}  # an unreachable loop has no entry
                yield Loop(entries, nodes)
                pending.append(graph.subgraph(nodes - entries))


def innermost(follows: Sequence[Collection[int]], wanted: Collection[int]) -> set[int]:
    """Return the nodes of the innermost loops that contain a wanted node.

    Args:
        follows: for each node, in the order of the text, the nodes that may come next.
        wanted: nodes to look for.
    """
    found = [loop.nodes for loop in nest(follows) if not loop.nodes.isdisjoint(wanted)]
    inner = [one for one in found if not any(other < one for other in found)]
    return set().union(*inner)
