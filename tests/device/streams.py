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
        device: whose it is.
        flags: as it was made with.
        work: which is done when the event has come; None if it was never recorded.
        captured: the capture that it was recorded in last, and what comes before it there.
        seconds: when it came.
    """

    device: Device
    flags: int
    work: Work | None = None
    captured: tuple[Capture, frozenset[Node]] | None = None
    seconds: float | None = None


@function
def cuStreamCreateWithPriority(stream, flags, priority):
    device = current()
    made = Stream(device, flags, priority)
    device.streams.append(made)
    put(stream, ctypes.c_void_p, handles.give(made))


@function
def cuStreamCreate(stream, flags):
    cuStreamCreateWithPriority(stream, flags, 0)


@function(always=True)
def cuStreamDestroy(stream):
    one = handles.drop(stream, Stream)
    if one.last is None or one.last.done:
        one.device.streams.remove(one)  # else the legacy stream still waits for what it has


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
    one = stream_of(stream)
    capturing(one, "the host waits")
    machine.wait(_all_of(one))
    one.device.raise_fault()


def _all_of(stream: Stream) -> list[Work | None]:
    """What a stream has been given; the legacy one waits for the blocking ones too."""
    if not stream.is_legacy:
        return [stream.last]
    return [stream.last, *(one.last for one in stream.device.streams if one.blocks)]


@function
def cuStreamQuery(stream):
    one = stream_of(stream)
    capturing(one, "a stream is asked")
    machine.look()
    one.device.raise_fault()
    done = all(work is None or work.done for work in _all_of(one))
    require(done, "not ready", CU.ERROR_NOT_READY)


@function
def cuCtxSynchronize():
    capturing(None, "the host waits")
    machine.wait(current().work())
    current().raise_fault()


@function
def cuStreamWaitEvent(stream, event, flags):
    target, one = stream_of(stream), handles.get(event, Event)
    if one.captured is not None:
        capture, nodes = one.captured
        require(capture.valid, "the capture has failed", CU.ERROR_STREAM_CAPTURE_INVALIDATED)
        require(
            target.capture in (None, capture), "of another capture", CU.ERROR_STREAM_CAPTURE_MERGE
        )
        target.capture = capture
        capture.tails[target] = capture.tails.get(target, frozenset()) | nodes
        return
    if isinstance(target.capture, Capture):
        require(one.work is None, "recorded outside", CU.ERROR_STREAM_CAPTURE_ISOLATION)
        return
    if one.work is not None and not one.work.done:
        target.device.submit(target, None, one.work)


@function
def cuLaunchHostFunc(stream, called, argument):
    act = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called)
    submit(stream_of(stream), lambda: act(argument))


@function
def cuEventCreate(event, flags):
    put(event, ctypes.c_void_p, handles.give(Event(current(), flags)))


@function(always=True)
def cuEventDestroy(event):
    handles.drop(event, Event)


@function
def cuEventRecord(event, stream):
    one, target = handles.get(event, Event), stream_of(stream)
    require(one.device is target.device, "of another device", CU.ERROR_INVALID_HANDLE)
    capture = target.capture
    if isinstance(capture, Capture):
        one.captured = capture, capture.tails[target]
        return
    one.captured = None
    one.seconds = None

    def act() -> None:
        one.seconds = time.perf_counter()

    one.work = submit(target, act)


@function
def cuEventQuery(event):
    one = _outside(event)
    machine.look()
    one.device.raise_fault()
    require(one.work is None or one.work.done, "not ready", CU.ERROR_NOT_READY)


@function
def cuEventSynchronize(event):
    one = _outside(event)
    machine.wait([one.work])
    one.device.raise_fault()


def _outside(event: int | None) -> Event:
    one: Event = handles.get(event, Event)
    if one.captured is not None:
        one.captured[0].valid = False
        raise Refused(CU.ERROR_CAPTURED_EVENT)
    return one


@function
def cuEventElapsedTime(milliseconds, start, stop):
    ends = [handles.get(one, Event) for one in (start, stop)]
    for one in ends:
        usable = one.work is not None and not one.flags & CU.EVENT_DISABLE_TIMING
        require(usable, "an event without a time", CU.ERROR_INVALID_HANDLE)
    require(all(one.work.done for one in ends), "not ready", CU.ERROR_NOT_READY)
    put(milliseconds, ctypes.c_float, (ends[1].seconds - ends[0].seconds) * 1e3)
