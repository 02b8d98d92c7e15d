"""Submission of work to a stream, stream capture, and the driver's functions for graphs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import machine
from .api import CU, Refused, function, handles, put, require
from .machine import Stream, Work, stream_of


@dataclass(eq=False)
class Node:
    """A recorded operation of a graph."""

    act: Callable[[], None]
    after: frozenset[Node]


class Owned(Protocol):
    """Memory of a graph's allocation node, which the graph owns.

    Attributes:
        freed: whether the graph has a node that frees it.
        left: whether a launch has allocated it and nothing has freed it since.
    """

    freed: bool
    left: bool

    def end(self) -> None:
        """Release the address range."""
        ...


@dataclass(eq=False)
class Graph:
    """Recorded operations in dependency order.

    Attributes:
        nodes: the operations, in the order of recording.
        memory: allocations of its nodes; they live until the last holder is destroyed.
        holders: handles that keep it alive: its own and those of its executables.
        launches: the last launch of each destroyed executable.
    """

    nodes: list[Node] = field(default_factory=list)
    memory: list[Owned] = field(default_factory=list)
    holders: int = 1
    launches: list[Work | None] = field(default_factory=list)

    def release(self, last: Work | None = None) -> None:
        """Drop one handle; after the last one, free the memory once no launch uses it."""
        self.holders -= 1
        self.launches.append(last)
        if not self.holders:
            machine.afterwards(self.launches, self._end)

    def _end(self) -> None:
        for allocation in self.memory:
            allocation.end()


@dataclass(eq=False)
class Capture:
    """A graph that is being recorded.

    Attributes:
        origin: the stream that the capture was begun on.
        mode: the capture mode, which decides what other calls are permitted meanwhile.
        thread: the thread that began the capture.
        tails: for each capturing stream, the nodes that its next node depends on.
        valid: whether no forbidden call has invalidated the capture.
    """

    origin: Stream
    mode: int
    thread: int
    graph: Graph = field(default_factory=Graph)
    tails: dict[Stream, frozenset[Node]] = field(default_factory=dict)
    valid: bool = True


@dataclass(eq=False)
class Executable:
    """An executable graph; its launches never overlap."""

    graph: Graph
    last: Work | None = None


_modes: dict[int, int] = {}
"""Capture modes by thread, as set with cuThreadExchangeStreamCaptureMode."""

_captures: list[Capture] = []


def end_captures() -> None:
    """End the captures that a test left open, and reset the capture modes of all threads."""
    for capture in _captures:
        for stream in capture.tails:
            stream.capture = None
        capture.graph.release()
    _captures.clear()
    _modes.clear()


def submit(stream: Stream, act: Callable[[], None]) -> Work | None:
    """Submit work to a stream; return None if the stream's capture records it."""
    capture = stream.capture
    if isinstance(capture, Capture):
        require(capture.valid, "the capture has failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
        node = Node(act, capture.tails[stream])
        capture.graph.nodes.append(node)
        capture.tails[stream] = frozenset([node])
        return None
    if stream.is_legacy:
        for active in _captures:
            if active.origin.device is stream.device and active.origin.blocks:
                active.valid = False
                raise Refused(
                    CU.ERROR_STREAM_CAPTURE_IMPLICIT,
                    "the legacy stream would wait for a capturing stream",
                )
    return stream.device.submit(stream, act)


def capturing(stream: Stream | None, what: str) -> None:
    """Refuse a call that waits for a capturing stream (None: any); invalidate the capture."""
    for capture in _captures:
        if (
            stream is None
            or stream in capture.tails
            or (stream.is_legacy and capture.origin.blocks)
        ):
            capture.valid = False
            raise Refused(CU.ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while a stream captures")


def refuse_while_capturing(what: str) -> None:
    """Refuse a potentially unsafe call as the modes of the captures and the thread demand."""
    thread = threading.get_ident()
    mode = _modes.get(thread, CU.STREAM_CAPTURE_MODE_GLOBAL)
    if mode == CU.STREAM_CAPTURE_MODE_RELAXED:
        return
    for capture in _captures:
        own_capture = capture.thread == thread and capture.mode != CU.STREAM_CAPTURE_MODE_RELAXED
        global_capture = CU.STREAM_CAPTURE_MODE_GLOBAL == capture.mode == mode
        if own_capture or global_capture:
            capture.valid = False
            raise Refused(CU.ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while a stream captures")


@function(always=True)
def cuThreadExchangeStreamCaptureMode(mode):
    thread, word = threading.get_ident(), ctypes.c_int.from_address(mode)
    before = _modes.get(thread, CU.STREAM_CAPTURE_MODE_GLOBAL)
    require(0 <= word.value <= CU.STREAM_CAPTURE_MODE_RELAXED, f"capture mode {word.value}")
    _modes[thread] = word.value
    word.value = before


@function
def cuStreamBeginCapture(stream, mode):
    target = stream_of(stream)
    require(
        not target.is_legacy,
        "the legacy stream cannot capture",
        CU.ERROR_STREAM_CAPTURE_UNSUPPORTED,
    )
    require(target.capture is None, "the stream is capturing already", CU.ERROR_ILLEGAL_STATE)
    capture = Capture(target, mode, threading.get_ident())
    capture.tails[target] = frozenset()
    target.capture = capture
    _captures.append(capture)


@function
def cuStreamEndCapture(stream, graph):
    target = stream_of(stream)
    capture = target.capture
    if not isinstance(capture, Capture):
        raise Refused(CU.ERROR_ILLEGAL_STATE, "the stream is not capturing")
    require(
        capture.origin is target,
        "another stream began the capture",
        CU.ERROR_STREAM_CAPTURE_UNMATCHED,
    )
    for member in capture.tails:
        member.capture = None
    _captures.remove(capture)
    put(graph, ctypes.c_void_p, None)
    try:
        _require_joined(capture, target)
    except Refused:
        capture.graph.release()
        raise
    put(graph, ctypes.c_void_p, handles.give(capture.graph))


def _require_joined(capture: Capture, target: Stream) -> None:
    """Refuse an invalid capture, or one whose forked streams have not joined its origin."""
    require(capture.valid, "the capture has failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
    seen: set[Node] = set()
    unseen = list(capture.tails[target])
    while unseen:
        node = unseen.pop()
        if node not in seen:
            seen.add(node)
            unseen += node.after
    joined = all(tails <= seen for tails in capture.tails.values())
    require(joined, "a forked stream has not joined", CU.ERROR_STREAM_CAPTURE_UNJOINED)


@function
def cuStreamIsCapturing(stream, status):
    target = stream_of(stream)
    capture = target.capture
    if target.is_legacy and any(
        active.origin.device is target.device and active.origin.blocks for active in _captures
    ):
        raise Refused(CU.ERROR_STREAM_CAPTURE_IMPLICIT)
    value = CU.STREAM_CAPTURE_STATUS_NONE
    if isinstance(capture, Capture):
        value = (
            CU.STREAM_CAPTURE_STATUS_ACTIVE
            if capture.valid
            else CU.STREAM_CAPTURE_STATUS_INVALIDATED
        )
    put(status, ctypes.c_int, value)


@function
def cuGraphInstantiate(executable, graph, flags):
    original = handles.get(graph, Graph)
    # CUDA: a graph with memory nodes has at most one executable at a time.
    require(
        not original.memory or original.holders == 1,
        "a graph with memory has an executable already",
    )
    original.holders += 1
    put(executable, ctypes.c_void_p, handles.give(Executable(original)))


@function
def cuGraphLaunch(graph, stream):
    executable = handles.get(graph, Executable)
    target = stream_of(stream)
    require(target.capture is None, "graphs in graphs", CU.ERROR_NOT_SUPPORTED)
    memory = executable.graph.memory
    require(
        not any(allocation.left for allocation in memory),
        "memory of the last launch is not freed yet",
    )
    device = target.device
    first = device.submit(target, None, executable.last)
    works: dict[Node, Work] = {}
    for node in executable.graph.nodes:
        works[node] = Work(device, node.act, [first, *(works[before] for before in node.after)])
    for allocation in memory:
        allocation.left = not allocation.freed
    executable.last = device.submit(target, None, *works.values())


@function
def cuGraphUpload(graph, stream):
    handles.get(graph, Executable)


@function(always=True)
def cuGraphDestroy(graph):
    handles.drop(graph, Graph).release()


@function(always=True)
def cuGraphExecDestroy(graph):
    executable = handles.drop(graph, Executable)
    executable.graph.release(executable.last)
