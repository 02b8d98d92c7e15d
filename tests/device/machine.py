"""The devices, and what of them all parts of the driver share: contexts, faults, streams, work.

Nothing runs when it is submitted unless the order says so: a piece of work waits for those that it
has to come after, and is done when somebody waits for it or the order takes it earlier.
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
    """What went wrong on a device; its context is lost with it."""

    def __init__(self, text: str, status: int = CU.ERROR_LAUNCH_FAILED) -> None:
        super().__init__(text)
        self.status = status


# -- work ------------------------------------------------------------------------------------------
class Work:
    """Something that a device is to do."""

    __slots__ = ("act", "after", "device", "done")

    def __init__(
        self, device: Device, act: Callable[[], None] | None, after: Iterable[Work | None]
    ) -> None:
        """
        Args:
            device: that does it.
            act: does it; None for what only orders other work.
            after: what has to be done before; None counts as done.
        """
        self.device = device
        self.act = act
        self.after = [one for one in after if one is not None and not one.done]
        self.done = False
        pending[self] = None

    def is_ready(self) -> bool:
        return all(one.done for one in self.after)

    def run(self) -> None:
        """Do it; a fault is the device's, whose other work is dropped."""
        self.done = True
        self.after = []
        del pending[self]
        try:
            if self.act is not None:
                self.act()
        except DeviceFault as fault:
            self.device.fail(fault)


pending: dict[Work, None] = {}
"""What is not done yet, in the order in which it was submitted."""


class Order(Protocol):
    """When work is done, and which first, of what the API leaves open."""

    def submitted(self) -> None:
        """Something was submitted."""
        ...

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        """What to do next while somebody waits: of what he needs, or of all that could be done."""
        ...


class AtOnce:
    """Everything is done when it is submitted."""

    def submitted(self) -> None:
        while pending:
            next(one for one in pending if one.is_ready()).run()

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return needed[0]


class Late:
    """Nothing is done before somebody waits for it, and what was submitted last first."""

    def submitted(self) -> None:
        pass

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return needed[-1]


class Random:
    """Anything at any time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def submitted(self) -> None:
        while self._random.random() < 0.4:
            ready = [one for one in pending if one.is_ready()]
            if not ready:
                return
            self._random.choice(ready).run()

    def choose(self, needed: list[Work], ready: list[Work]) -> Work:
        return self._random.choice(ready)


def named(words: str) -> Order:
    """An order by name: "late", or "random 3"; of "" the one in which all is done at once."""
    kind, _, seed = words.partition(" ")
    return {"": AtOnce, "late": Late, "random": lambda: Random(int(seed or 0))}[kind]()


_order: Order = named(os.environ.get("CUPYCONV_DEVICE_ORDER", ""))


@contextmanager
def order(chosen: Order) -> Iterator[None]:
    """Lets work be done in another order; whatever is left is done at the end."""
    global _order
    before, _order = _order, chosen
    try:
        yield
        wait(list(pending))
    finally:
        for one in list(pending):
            one.done = True
        pending.clear()
        _order = before


def wait(targets: Iterable[Work | None]) -> None:
    """Go on until all of these are done."""
    wanted = [one for one in targets if one is not None]
    while any(not one.done for one in wanted):
        needed: dict[Work, None] = {}
        unseen = [one for one in wanted if not one.done]
        while unseen:
            one = unseen.pop()
            needed[one] = None
            unseen += [other for other in one.after if not other.done and other not in needed]
        ready = [one for one in pending if one.is_ready()]
        _order.choose([one for one in ready if one in needed], ready).run()


def look() -> None:
    """Somebody asks whether something is done: a little more is, so that he need not ask for ever.

    In the order in which it came: whoever asks has no promise of any.
    """
    for one in pending:
        if one.is_ready():
            one.run()
            return


# -- devices ---------------------------------------------------------------------------------------
MULTIPROCESSORS = 4
MEMORY = 8 << 30


@dataclass(eq=False)
class Stream:
    """A stream.

    Attributes:
        device: whose it is.
        flags, priority: as it was made with.
        last: what was submitted last.
        capture: what it records into instead (graphs.py).
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
        """Whether it and the legacy stream wait for each other."""
        return not self.flags & CU.STREAM_NON_BLOCKING


@dataclass(eq=False)
class Device:
    """A device with its primary context.

    Attributes:
        ordinal: its number.
        name: of the card.
        chip: what it has.
        fault: what it failed with; everything is refused then.
        allocated: bytes of its memory.
        streams: those that were made, without the legacy one.
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
        for one in [work for work in pending if work.device is self]:
            one.done = True
            del pending[one]

    def work(self) -> list[Work]:
        return [one for one in pending if one.device is self]

    def submit(self, stream: Stream, act: Callable[[], None] | None, *more: Work | None) -> Work:
        """Put work behind what its stream, and those that it is ordered with, have been given."""
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
        """Refuse, as everything is once the device has failed."""
        if self.fault is not None:
            raise Refused(self.fault.status, str(self.fault))


DEVICES = [
    Device(0, "emulated sm_90", CHIPS[9, 0]),
    # Another chip, so that what belongs to one device cannot pass for the other's.
    Device(1, "emulated sm_80", CHIPS[8, 0]),
]

faults: list[str] = []
"""What devices have failed with so far."""


def revive() -> list[str]:
    """Let devices that have failed go on, as only a new process could; what they failed with."""
    for device in DEVICES:
        device.fault = None
    found = faults.copy()
    faults.clear()
    return found


_current = threading.local()


def current() -> Device:
    """The device whose context is the calling thread's."""
    device: Device | None = getattr(_current, "device", None)
    if device is None:
        raise Refused(CU.ERROR_INVALID_CONTEXT, "the thread has no context")
    return device


def make_current(device: Device | None) -> Device | None:
    """Gives the calling thread another context, or none; the one before."""
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
    """The stream of a handle; those of 0, 1 and 2 are the current device's."""
    if (handle or 0) <= CU.STREAM_LEGACY_HANDLE:
        return current().legacy
    if handle == CU.STREAM_PER_THREAD_HANDLE:
        device = current()
        thread = threading.get_ident()
        if thread not in device.of_threads:
            device.of_threads[thread] = Stream(device)
            device.streams.append(device.of_threads[thread])
        return device.of_threads[thread]
    found: Stream = handles.get(handle, Stream)
    return found
