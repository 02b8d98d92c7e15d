"""The driver's functions for streams and events."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

from . import machine
from .api import CU, Refused, function, handles, put, require
from .graphs import Capture, Node, capturing, submit
from .machine import Device, Stream, Work, current, stream_of


@dataclass(eq=False)
class Event:
    """A point of a stream.

    Attributes:
        device: the device of its context.
        flags: creation flags.
        work: the work that completes the event; None if it was never recorded.
        captured: the last capture that recorded it, and the nodes before it there.
        seconds: time of completion.
    """

    device: Device
    flags: int
    work: Work | None = None
    captured: tuple[Capture, frozenset[Node]] | None = None
    seconds: float | None = None


@function
def cuStreamCreateWithPriority(stream, flags, priority):
    device = current()
    target = Stream(device, flags, priority)
    device.streams.append(target)
    put(stream, ctypes.c_void_p, handles.give(target))


@function
def cuStreamCreate(stream, flags):
    cuStreamCreateWithPriority(stream, flags, 0)


@function(always=True)
def cuStreamDestroy(stream):
    target = handles.drop(stream, Stream)
    if target.last is None or target.last.done:
        target.device.streams.remove(target)  # otherwise the legacy stream still waits for its work


@function
def cuStreamGetFlags(stream, flags):
    put(flags, ctypes.c_uint, stream_of(stream).flags)


@function
def cuStreamGetPriority(stream, priority):
    put(priority, ctypes.c_int, stream_of(stream).priority)


@function
def cuStreamGetCtx(stream, context):
    put(context, ctypes.c_void_p, stream_of(stream).device.context)


@function
def cuStreamSynchronize(stream):
    target = stream_of(stream)
    capturing(target, "the host waits")
    machine.wait(_last_work(target))
    target.device.raise_fault()


def _last_work(stream: Stream) -> list[Work | None]:
    """Return the last work of a stream; for the legacy stream also that of the blocking streams."""
    if not stream.is_legacy:
        return [stream.last]
    return [stream.last, *(other.last for other in stream.device.streams if other.blocks)]


@function
def cuStreamQuery(stream):
    target = stream_of(stream)
    capturing(target, "a stream is queried")
    machine.look()
    target.device.raise_fault()
    done = all(work is None or work.done for work in _last_work(target))
    require(done, "not ready", CU.ERROR_NOT_READY)


@function
def cuCtxSynchronize():
    capturing(None, "the host waits")
    machine.wait(current().work())
    current().raise_fault()


@function
def cuStreamWaitEvent(stream, event, flags):
    target, point = stream_of(stream), handles.get(event, Event)
    if point.captured is not None:
        capture, nodes = point.captured
        require(capture.valid, "the capture has failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
        require(
            target.capture in (None, capture),
            "the event belongs to another capture",
            CU.ERROR_STREAM_CAPTURE_MERGE,
        )
        target.capture = capture
        capture.tails[target] = capture.tails.get(target, frozenset()) | nodes
        return
    if isinstance(target.capture, Capture):
        require(
            point.work is None,
            "the event was recorded outside the capture",
            CU.ERROR_STREAM_CAPTURE_ISOLATION,
        )
        return
    if point.work is not None and not point.work.done:
        target.device.submit(target, None, point.work)


@function
def cuLaunchHostFunc(stream, callback, argument):
    act = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback)
    submit(stream_of(stream), lambda: act(argument))


@function
def cuEventCreate(event, flags):
    put(event, ctypes.c_void_p, handles.give(Event(current(), flags)))


@function(always=True)
def cuEventDestroy(event):
    handles.drop(event, Event)


@function
def cuEventRecord(event, stream):
    point, target = handles.get(event, Event), stream_of(stream)
    require(
        point.device is target.device,
        "the event belongs to another device",
        CU.ERROR_INVALID_HANDLE,
    )
    capture = target.capture
    if isinstance(capture, Capture):
        point.captured = capture, capture.tails[target]
        return
    point.captured = None
    point.seconds = None

    def act() -> None:
        point.seconds = time.perf_counter()

    point.work = submit(target, act)


@function
def cuEventQuery(event):
    point = _uncaptured_event(event)
    machine.look()
    point.device.raise_fault()
    require(point.work is None or point.work.done, "not ready", CU.ERROR_NOT_READY)


@function
def cuEventSynchronize(event):
    point = _uncaptured_event(event)
    machine.wait([point.work])
    point.device.raise_fault()


def _uncaptured_event(event: int | None) -> Event:
    point: Event = handles.get(event, Event)
    if point.captured is not None:
        point.captured[0].valid = False
        raise Refused(CU.ERROR_CAPTURED_EVENT)
    return point


@function
def cuEventElapsedTime(milliseconds, start, stop):
    ends = [handles.get(event, Event) for event in (start, stop)]
    for event in ends:
        usable = event.work is not None and not event.flags & CU.EVENT_DISABLE_TIMING
        require(usable, "an event without a time", CU.ERROR_INVALID_HANDLE)
    require(all(event.work.done for event in ends), "not ready", CU.ERROR_NOT_READY)
    put(milliseconds, ctypes.c_float, (ends[1].seconds - ends[0].seconds) * 1e3)
