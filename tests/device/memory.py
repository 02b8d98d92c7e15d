"""The driver's functions for memory: the emulator's, so that kernels are watched on it.

Memory that is given back is filled with poison and kept for a while: what still uses it computes
with NaN, a watched kernel is reported, and a copy fails.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.emulator.runtime import library

from . import machine
from .api import CU, Refused, function, handles, put, require
from .graphs import capturing, refuse_while_capturing, submit
from .machine import MEMORY, Device, DeviceFault, Stream, current, device_of, stream_of

POISON = 0xFF  # NaN, as floats of any size
_MOST_POISONED = 16 << 20  # bytes of an allocation; the pages of a larger one stay untouched
_QUARANTINE = 256 << 20  # bytes that are kept after they were given back


@dataclass(eq=False)
class Allocation:
    """A piece of memory.

    Attributes:
        base: its address.
        size: in bytes.
        device: whose memory it is; None for the host's.
        live: whether the device has it, which with stream-ordered memory is so at some point of
            the stream only.
        region: of the checker, while it is live.
    """

    base: int
    size: int
    device: Device | None
    live: bool = False
    region: int | None = None

    def begin(self) -> None:
        self.live = True
        if self.device is not None:
            name = f"memory of {self.size} bytes on device {self.device.ordinal}"
            self.region = library().emulator_register(
                name.encode(), self.base, self.size, 2, False, False
            )

    def end(self) -> None:
        self.live = False
        if self.region is not None:
            library().emulator_unregister(self.region)
            self.region = None
        if self.device is not None:
            self.device.allocated -= self.size
            _poison(self)
        _quarantine.append(self)
        while sum(one.size for one in _quarantine) > _QUARANTINE:
            oldest = _quarantine.popleft()
            library().emulator_free(oldest.base, oldest.size)


_bases: list[int] = []
_allocations: dict[int, Allocation] = {}
_quarantine: deque[Allocation] = deque()
_left: list[int] = []  # allocations that may still be made, innermost last


@contextmanager
def allocations_left(count: int) -> Iterator[None]:
    """Lets so many allocations of device memory be made, and refuses those after."""
    _left.append(count)
    try:
        yield
    finally:
        _left.pop()


def find(address: int | None, size: int = 1) -> Allocation | None:
    """What an address and so many bytes from there lie in."""
    place = bisect_right(_bases, address or 0) - 1
    if place < 0:
        return None
    found = _allocations[_bases[place]]
    return found if (address or 0) + size <= found.base + found.size else None


def _poison(one: Allocation) -> None:
    ctypes.memset(one.base, POISON, min(one.size, _MOST_POISONED))


def _keep(one: Allocation) -> None:
    insort(_bases, one.base)
    _allocations[one.base] = one


def _forget(base: int | None, on_device: bool) -> Allocation:
    one = _allocations.get(base or 0)
    require(one is not None and (one.device is not None) == on_device, f"{base}: not allocated")
    assert one is not None
    del _allocations[one.base]
    _bases.remove(one.base)
    return one


def _allocate(size: int) -> Allocation:
    require(size > 0, "memory has a size")
    device = current()
    full = device.allocated + size > MEMORY or (_left and _left[-1] <= 0)
    address = None if full else library().emulator_allocate(size)
    if address is None:
        raise Refused(CU.ERROR_OUT_OF_MEMORY, f"{size} bytes")
    if _left:
        _left[-1] -= 1
    made = Allocation(address, size, device)
    device.allocated += size
    _poison(made)
    _keep(made)
    return made


@function
def cuMemGetInfo(available, total):
    put(available, ctypes.c_size_t, MEMORY - current().allocated)
    put(total, ctypes.c_size_t, MEMORY)


@function
def cuMemAlloc(pointer, size):
    refuse_while_capturing("memory is allocated")
    made = _allocate(size)
    made.begin()
    put(pointer, ctypes.c_uint64, made.base)


@function
def cuMemAllocManaged(pointer, size, flags):
    raise Refused(CU.ERROR_NOT_SUPPORTED, "managed memory, which the host has too")


@function
def cuMemFree(pointer):
    if pointer:
        refuse_while_capturing("memory is freed")
        one = _forget(pointer, on_device=True)
        assert one.device is not None
        machine.wait(one.device.work())  # as the driver does with memory of this kind
        one.end()


@function
def cuMemAllocAsync(pointer, size, stream):
    target = stream_of(stream)
    require(target.capture is None, "graphs with memory of their own", CU.ERROR_NOT_SUPPORTED)
    made = _allocate(size)
    submit(target, made.begin)
    put(pointer, ctypes.c_uint64, made.base)


@function
def cuMemFreeAsync(pointer, stream):
    target = stream_of(stream)
    require(target.capture is None, "graphs with memory of their own", CU.ERROR_NOT_SUPPORTED)
    submit(target, _forget(pointer, on_device=True).end)


# -- pools: the one that each device has -----------------------------------------------------------
@dataclass(eq=False)
class Pool:
    """A device's pool of stream-ordered memory, which keeps nothing for later.

    Attributes:
        device: whose it is.
        handle: of it.
        threshold: bytes that it may keep, as it is told.
    """

    device: Device
    handle: int = 0
    threshold: int = 0


_pools: dict[Device, Pool] = {}


def _pool_of(ordinal: int) -> int:
    device = device_of(ordinal)
    if device not in _pools:
        _pools[device] = Pool(device)
        _pools[device].handle = handles.give(_pools[device])
    return _pools[device].handle


@function(always=True)
def cuDeviceGetDefaultMemPool(pool, device):
    put(pool, ctypes.c_void_p, _pool_of(device))


@function(always=True)
def cuDeviceGetMemPool(pool, device):
    put(pool, ctypes.c_void_p, _pool_of(device))


@function(always=True)
def cuDeviceSetMemPool(device, pool):
    require(pool == _pool_of(device), "pools of one's own", CU.ERROR_NOT_SUPPORTED)


@function
def cuMemPoolTrimTo(pool, size):
    handles.get(pool, Pool)


@function
def cuMemPoolSetAttribute(pool, attribute, value):
    one = handles.get(pool, Pool)
    if attribute == CU.MEMPOOL_ATTR_RELEASE_THRESHOLD:
        one.threshold = ctypes.c_uint64.from_address(value).value


@function
def cuMemPoolGetAttribute(pool, attribute, value):
    one = handles.get(pool, Pool)
    if attribute <= CU.MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        put(value, ctypes.c_int, 1)
    elif attribute == CU.MEMPOOL_ATTR_RELEASE_THRESHOLD:
        put(value, ctypes.c_uint64, one.threshold)
    else:
        put(value, ctypes.c_uint64, one.device.allocated)


# -- the host's ------------------------------------------------------------------------------------
@function
def cuMemHostAlloc(pointer, size, flags):
    refuse_while_capturing("memory is allocated")
    address = library().emulator_allocate(size)
    require(address, f"{size} bytes", CU.ERROR_OUT_OF_MEMORY)
    made = Allocation(address, size, None, live=True)
    _keep(made)
    put(pointer, ctypes.c_void_p, made.base)


@function
def cuMemFreeHost(pointer):
    refuse_while_capturing("memory is freed")
    one = _forget(pointer, on_device=False)
    machine.wait(list(machine.pending))
    one.end()


@function
def cuPointerGetAttribute(data, attribute, pointer):
    one = find(pointer)
    require(one is not None, f"{pointer:#x} is not of this driver")
    assert one is not None
    on_device = one.device is not None
    kinds = {
        CU.POINTER_ATTRIBUTE_MEMORY_TYPE: (
            ctypes.c_uint,
            CU.MEMORYTYPE_DEVICE if on_device else CU.MEMORYTYPE_HOST,
        ),
        CU.POINTER_ATTRIBUTE_DEVICE_ORDINAL: (
            ctypes.c_int,
            one.device.ordinal if one.device else 0,
        ),
        CU.POINTER_ATTRIBUTE_DEVICE_POINTER: (ctypes.c_uint64, pointer),
        CU.POINTER_ATTRIBUTE_RANGE_START_ADDR: (ctypes.c_uint64, one.base),
        CU.POINTER_ATTRIBUTE_RANGE_SIZE: (ctypes.c_size_t, one.size),
    }
    require(attribute in kinds, f"attribute {attribute}", CU.ERROR_NOT_SUPPORTED)
    put(data, *kinds[attribute])


# -- copies ----------------------------------------------------------------------------------------
def _ours(address: int, size: int) -> Allocation:
    """The device memory that so many bytes lie in."""
    one = find(address, size)
    right = one is not None and one.device is not None
    require(right, f"{size} bytes at {address:#x} are not in one piece of device memory")
    assert one is not None
    return one


def _require_live(*allocations: Allocation) -> None:
    """Check, when it is used, that memory is there and has not been given back."""
    for one in allocations:
        if not one.live:
            raise DeviceFault(
                f"{one.size} bytes at {one.base:#x} are used where the stream that they are of "
                "does not have them yet, or not any more",
                CU.ERROR_ILLEGAL_ADDRESS,
            )


def _copier(to: int, source: int, size: int, *ours: Allocation) -> Callable[[], None]:
    def act() -> None:
        _require_live(*ours)
        ctypes.memmove(to, source, size)

    return act


def _is_pinned(address: int, size: int) -> bool:
    return find(address, size) is not None


def _to_device(to: int, source: int, size: int, stream: Stream) -> None:
    ours = _ours(to, size)
    if _is_pinned(source, size):
        submit(stream, _copier(to, source, size, ours))
        return
    capturing(stream, "a copy has its own memory to wait for")
    content = ctypes.string_at(source, size)  # pageable memory is read before the call returns

    def act() -> None:
        _require_live(ours)
        ctypes.memmove(to, content, size)

    submit(stream, act)


def _to_host(to: int, source: int, size: int, stream: Stream) -> None:
    ours = _ours(source, size)
    pinned = _is_pinned(to, size)
    if not pinned:
        capturing(stream, "a copy has its own memory to wait for")
    work = submit(stream, _copier(to, source, size, ours))
    if not pinned:  # pageable memory is written before the call returns
        machine.wait([work])
        stream.device.raise_fault()


def _within(to: int, source: int, size: int, stream: Stream) -> None:
    submit(stream, _copier(to, source, size, _ours(to, size), _ours(source, size)))


def _anywhere(to: int, source: int, size: int, stream: Stream) -> None:
    here, there = (find(address, size) for address in (to, source))
    to_device = here is not None and here.device is not None
    from_device = there is not None and there.device is not None
    if to_device and from_device:
        _within(to, source, size, stream)
    elif to_device:
        _to_device(to, source, size, stream)
    else:
        require(from_device, "neither end of a copy is on a device")
        _to_host(to, source, size, stream)


def _synchronously(copy: Callable[..., None], to: int, source: int, size: int) -> None:
    stream = current().legacy
    capturing(stream, "the host waits")
    copy(to, source, size, stream)
    machine.wait([stream.last])
    stream.device.raise_fault()


@function
def cuMemcpyHtoD(to, source, size):
    if size:
        _synchronously(_to_device, to, source, size)


@function
def cuMemcpyDtoH(to, source, size):
    if size:
        _synchronously(_to_host, to, source, size)


@function
def cuMemcpyDtoD(to, source, size):
    if size:
        _within(to, source, size, current().legacy)


@function
def cuMemcpy(to, source, size):
    if size:
        _synchronously(_anywhere, to, source, size)


@function
def cuMemcpyHtoDAsync(to, source, size, stream):
    if size:
        _to_device(to, source, size, stream_of(stream))


@function
def cuMemcpyDtoHAsync(to, source, size, stream):
    if size:
        _to_host(to, source, size, stream_of(stream))


@function
def cuMemcpyDtoDAsync(to, source, size, stream):
    if size:
        _within(to, source, size, stream_of(stream))


@function
def cuMemcpyAsync(to, source, size, stream):
    if size:
        _anywhere(to, source, size, stream_of(stream))


def _fill(to: int, value: int, size: int, stream: Stream) -> None:
    if not size:
        return
    ours = _ours(to, size)

    def act() -> None:
        _require_live(ours)
        ctypes.memset(to, value, size)

    submit(stream, act)


@function
def cuMemsetD8(to, value, count):
    _fill(to, value, count, current().legacy)


@function
def cuMemsetD8Async(to, value, count, stream):
    _fill(to, value, count, stream_of(stream))
