"""Giving a stream work, which is run or recorded into a graph, and the functions of graphs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from .api import CU, Refused, function, handles, put, require
from .machine import Stream, Work, stream_of


@dataclass(eq=False)
class Node:
    """A piece of recorded work."""

    act: Callable[[], None]
    after: frozenset[Node]


@dataclass(eq=False)
class Graph:
    """Recorded work, each piece after those that it depends on."""

    nodes: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Capture:
    """A graph that is being recorded.

    Attributes:
        origin: the stream that it was begun on.
        mode: what else is permitted meanwhile.
        tails: of each stream that records into it, what its next work depends on.
        valid: nothing was tried that cannot be recorded.
    """

    origin: Stream
    mode: int
    thread: int
    graph: Graph = field(default_factory=Graph)
    tails: dict[Stream, frozenset[Node]] = field(default_factory=dict)
    valid: bool = True


@dataclass(eq=False)
class Executable:
    """A graph that can be launched; not beside itself."""

    graph: Graph
    last: Work | None = None


_captures: list[Capture] = []


def submit(stream: Stream, act: Callable[[], None]) -> Work | None:
    """Give a stream work; None if it was recorded."""
    capture = stream.capture
    if isinstance(capture, Capture):
        require(capture.valid, "the capture has failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
        node = Node(act, capture.tails[stream])
        capture.graph.nodes.append(node)
        capture.tails[stream] = frozenset([node])
        return None
    if stream.is_legacy:
        for one in _captures:
            if one.origin.device is stream.device and one.origin.blocks:
                one.valid = False
                raise Refused(
                    CU.ERROR_STREAM_CAPTURE_IMPLICIT,
                    "the legacy stream would wait for one that captures",
                )
    return stream.device.submit(stream, act)


def capturing(stream: Stream | None, what: str) -> None:
    """Refuse what waits for a stream (None: for all) while it captures; the capture fails."""
    for one in _captures:
        if stream is None or stream in one.tails or (stream.is_legacy and one.origin.blocks):
            one.valid = False
            raise Refused(CU.ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while a stream captures")


def refuse_while_capturing(what: str) -> None:
    """Refuse what a capture forbids unless it was begun in relaxed mode."""
    for one in _captures:
        everywhere = one.mode == CU.STREAM_CAPTURE_MODE_GLOBAL
        here = one.mode == CU.STREAM_CAPTURE_MODE_THREAD_LOCAL
        if everywhere or (here and one.thread == threading.get_ident()):
            one.valid = False
            raise Refused(CU.ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while a stream captures")


@function
def cuStreamBeginCapture(stream, mode):
    target = stream_of(stream)
    require(not target.is_legacy, "the legacy stream cannot", CU.ERROR_STREAM_CAPTURE_UNSUPPORTED)
    require(target.capture is None, "it captures already", CU.ERROR_ILLEGAL_STATE)
    made = Capture(target, mode, threading.get_ident())
    made.tails[target] = frozenset()
    target.capture = made
    _captures.append(made)


@function
def cuStreamEndCapture(stream, graph):
    target = stream_of(stream)
    capture = target.capture
    if not isinstance(capture, Capture):
        raise Refused(CU.ERROR_ILLEGAL_STATE, "it does not capture")
    require(capture.origin is target, "another began", CU.ERROR_STREAM_CAPTURE_UNMATCHED)
    for one in capture.tails:
        one.capture = None
    _captures.remove(capture)
    put(graph, ctypes.c_void_p, None)
    require(capture.valid, "something failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
    seen: set[Node] = set()
    unseen = list(capture.tails[target])
    while unseen:
        node = unseen.pop()
        if node not in seen:
            seen.add(node)
            unseen += node.after
    joined = all(tails <= seen for tails in capture.tails.values())
    require(joined, "a stream has not come back", CU.ERROR_STREAM_CAPTURE_UNJOINED)
    put(graph, ctypes.c_void_p, handles.give(capture.graph))


@function
def cuStreamIsCapturing(stream, status):
    target = stream_of(stream)
    capture = target.capture
    if target.is_legacy and any(
        one.origin.device is target.device and one.origin.blocks for one in _captures
    ):
        raise Refused(CU.ERROR_STREAM_CAPTURE_IMPLICIT)
    found = CU.STREAM_CAPTURE_STATUS_NONE
    if isinstance(capture, Capture):
        found = (
            CU.STREAM_CAPTURE_STATUS_ACTIVE
            if capture.valid
            else CU.STREAM_CAPTURE_STATUS_INVALIDATED
        )
    put(status, ctypes.c_int, found)


@function
def cuGraphInstantiate(made, graph, flags):
    put(made, ctypes.c_void_p, handles.give(Executable(handles.get(graph, Graph))))


@function
def cuGraphLaunch(graph, stream):
    executable = handles.get(graph, Executable)
    target = stream_of(stream)
    require(target.capture is None, "graphs in graphs", CU.ERROR_NOT_SUPPORTED)
    device = target.device
    first = device.submit(target, None, executable.last)
    works: dict[Node, Work] = {}
    for node in executable.graph.nodes:
        works[node] = Work(device, node.act, [first, *(works[one] for one in node.after)])
    executable.last = device.submit(target, None, *works.values())


@function
def cuGraphUpload(graph, stream):
    handles.get(graph, Executable)


@function(always=True)
def cuGraphDestroy(graph):
    handles.drop(graph, Graph)


@function(always=True)
def cuGraphExecDestroy(graph):
    handles.drop(graph, Executable)
