"""The emulated devices, with the contexts, faults, streams and work that all driver parts share.

Submitted work waits for the work that it depends on.  The order decides when it runs: at once, when
a caller waits for it, or at any time between.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tests.emulator.driver import CHIPS, Chip

from .api import CU, Refused, guard, handles, require


class DeviceFault(Exception):
    """A failure on a device, which invalidates its context."""

    def __init__(self, text: str, status: int = CU.ERROR_LAUNCH_FAILED) -> None:
        super().__init__(text)
        self.status = status


# -- work ------------------------------------------------------------------------------------------
class Work:
    """An operation of a device."""

    __slots__ = ("act", "after", "device", "done")

    def __init__(
        self, device: Device, act: Callable[[], None] | None, after: Iterable[Work | None]
    ) -> None:
        """
        Args:
            device: the device that runs it.
            act: the operation; None for work that only orders other work.
            after: work that has to be done before; None counts as done.
        """
        self.device = device
        self.act = act
        self.after = [work for work in after if work is not None and not work.done]
        self.done = False
        pending[self] = None

    def is_ready(self) -> bool:
        return all(work.done for work in self.after)

    def run(self) -> None:
        """Run the operation; a fault stops the device and drops the pending work of the device."""
        self.done = True
        self.after = []
        del pending[self]
        try:
            if self.act is not None:
                self.act()
        except DeviceFault as fault:
            self.device.fail(fault)


pending: dict[Work, None] = {}
"""Work that is not done yet, in the order of submission."""


class Order(Protocol):
    """Policy that decides when work runs, and in which of the permitted orders."""

    def submitted(self) -> None:
        """Handle a submission."""
        ...

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        """Return the work to run next for a caller that waits for ``needed``."""
        ...


class AtOnce:
    """Run work when it is submitted."""

    def submitted(self) -> None:
        while pending:
            next(work for work in pending if work.is_ready()).run()

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return needed[0]


class Late:
    """Run work only when a caller waits for it, the last submitted first."""

    def submitted(self) -> None:
        pass

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return needed[-1]


class Random:
    """Run any ready work at any time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def submitted(self) -> None:
        while self._random.random() < 0.4:
            ready = [work for work in pending if work.is_ready()]
            if not ready:
                return
            self._random.choice(ready).run()

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return self._random.choice(ready)


def named(words: str) -> Order:
    """Return an order by name: "late" or "random 3"; "" runs work at once."""
    kind, _, seed = words.partition(" ")
    return {"": AtOnce, "late": Late, "random": lambda: Random(int(seed or 0))}[kind]()


_order: Order = named(os.environ.get("CUPYCONV_DEVICE_ORDER", ""))


@contextmanager
def order(chosen: Order) -> Iterator[None]:
    """Use another order inside the context; run the remaining work at its end."""
    global _order
    before, _order = _order, chosen
    try:
        yield
        wait(list(pending))
    finally:
        for work in list(pending):
            work.done = True
        pending.clear()
        _order = before


def wait(targets: Iterable[Work | None]) -> None:
    """Run work until all targets are done."""
    awaited = [work for work in targets if work is not None]
    while any(not work.done for work in awaited):
        needed: dict[Work, None] = {}
        unseen = [work for work in awaited if not work.done]
        while unseen:
            work = unseen.pop()
            needed[work] = None
            unseen += [before for before in work.after if not before.done and before not in needed]
        ready = [work for work in pending if work.is_ready()]
        _order.choose([work for work in ready if work in needed], ready).run()


def afterwards(works: Iterable[Work | None], act: Callable[[], None]) -> None:
    """Call ``act`` once all the work is done; at once if it is done already."""
    unfinished = [work for work in works if work is not None and not work.done]
    if unfinished:
        Work(unfinished[0].device, act, unfinished)
    else:
        act()


def look() -> None:
    """Run the oldest ready work because a caller polls, so that polling ends.

    Any order is permitted here, because a poll promises no order.
    """
    for work in pending:
        if work.is_ready():
            work.run()
            return


# -- devices ---------------------------------------------------------------------------------------
CHIP_VARIABLE = "CUPYCONV_DEVICE_CHIP"
"""Environment variable: compute capability and SM count of the first device, such as "9.0 132"."""

_capability, _, _multiprocessors = os.environ.get(CHIP_VARIABLE, "9.0 4").partition(" ")
_major, _minor = map(int, _capability.split("."))
MULTIPROCESSORS = int(_multiprocessors)
MEMORY = 8 << 30


@dataclass(eq=False)
class Stream:
    """A stream.

    Attributes:
        device: its device.
        flags, priority: as given at creation.
        last: the work submitted last.
        capture: the capture that records its work (graphs.py), or None.
    """

    device: Device
    flags: int = 0
    priority: int = 0
    last: Work | None = None
    capture: object = None

    @property
    def is_legacy(self) -> bool:
        return self is self.device.legacy

    @property
    def blocks(self) -> bool:
        """Whether this stream and the legacy stream wait for each other."""
        return not self.flags & CU.STREAM_NON_BLOCKING


@dataclass(eq=False)
class Device:
    """A device with its primary context.

    Attributes:
        ordinal: its number.
        name: the card's name.
        chip: its hardware limits.
        fault: its first failure; every later call is refused with it.
        allocated: allocated bytes of its memory.
        streams: the created streams, without the legacy one.
    """

    ordinal: int
    name: str
    chip: Chip
    fault: DeviceFault | None = None
    allocated: int = 0
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.legacy = Stream(self)
        self.of_threads: dict[int, Stream] = {}
        self.context = handles.give(self)

    def fail(self, fault: DeviceFault) -> None:
        self.fault = self.fault or fault
        faults.append(str(fault))
        for dropped in [work for work in pending if work.device is self]:
            dropped.done = True
            del pending[dropped]

    def work(self) -> list[Work]:
        return [work for work in pending if work.device is self]

    def submit(self, stream: Stream, act: Callable[[], None] | None, *more: Work | None) -> Work:
        """Submit work that follows its stream's last work and that of ordered streams."""
        after = [stream.last, *more]
        if stream.is_legacy:
            after += [other.last for other in self.streams if other.blocks]
        elif stream.blocks:
            after.append(self.legacy.last)
        stream.last = Work(self, act, after)
        _order.submitted()
        self.raise_fault()
        return stream.last

    def raise_fault(self) -> None:
        """Refuse the call if the device has failed."""
        if self.fault is not None:
            raise Refused(self.fault.status, str(self.fault))


DEVICES = [
    Device(0, f"emulated sm_{_major}{_minor}", CHIPS[_major, _minor]),
    # Another chip: code that mixes up the devices then fails.
    Device(1, "emulated sm_80", CHIPS[8, 0]),
]

faults: list[str] = []
"""Failures of all devices so far."""


def revive() -> list[str]:
    """Make failed devices work again, as only a new process could; return their failures."""
    for device in DEVICES:
        device.fault = None
    failures = faults.copy()
    faults.clear()
    return failures


_current = threading.local()


def current() -> Device:
    """Return the device whose context is current in the calling thread."""
    device: Device | None = getattr(_current, "device", None)
    if device is None:
        raise Refused(CU.ERROR_INVALID_CONTEXT, "the thread has no context")
    return device


def make_current(device: Device | None) -> Device | None:
    """Set the calling thread's context (None: no context); return the previous device."""
    before = getattr(_current, "device", None)
    _current.device = device
    return before


@guard
def _works() -> None:
    current().raise_fault()


def device_of(ordinal: int) -> Device:
    require(0 <= ordinal < len(DEVICES), f"no device {ordinal}", CU.ERROR_INVALID_DEVICE)
    return DEVICES[ordinal]


def stream_of(handle: int | None) -> Stream:
    """Return the stream of a handle; 0, 1 and 2 are the current device's built-in streams."""
    if (handle or 0) <= CU.STREAM_LEGACY_HANDLE:
        return current().legacy
    if handle == CU.STREAM_PER_THREAD_HANDLE:
        device = current()
        thread = threading.get_ident()
        if thread not in device.of_threads:
            device.of_threads[thread] = Stream(device)
            device.streams.append(device.of_threads[thread])
        return device.of_threads[thread]
    stream: Stream = handles.get(handle, Stream)
    return stream
