"""The driver's functions for memory, on top of the emulator's checked memory.

Freed memory is filled with NaN and kept for a while.  A kernel that still uses the memory computes
NaN, and the checker reports the access of a checked kernel.  A copy of freed memory fails.
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
from .graphs import Capture, Graph, capturing, refuse_while_capturing, submit
from .machine import MEMORY, Device, DeviceFault, Stream, current, device_of, stream_of

POISON = 0xFF  # byte that makes a float of any size NaN
_MOST_POISONED = 16 << 20  # bytes per allocation; pages beyond them stay untouched
_QUARANTINE = 256 << 20  # bytes of freed memory that are kept


@dataclass(eq=False)
class Allocation:
    """An allocation of device or pinned host memory.

    Attributes:
        base: its address.
        size: its bytes.
        device: its device; None for host memory.
        live: whether the device may use it; stream-ordered memory is live only between two points
            of the stream.
        region: its region in the checker while it is live.
        graph: the graph whose node allocated it, if any.
        freed: whether that graph has a node that frees it.
        left: whether a launch of that graph allocated it and nothing has freed it since.
    """

    base: int
    size: int
    device: Device | None
    live: bool = False
    region: int | None = None
    graph: Graph | None = None
    freed: bool = False
    left: bool = False

    def begin(self) -> None:
        self.live = True
        if self.device is not None:
            name = f"memory of {self.size} bytes on device {self.device.ordinal}"
            self.region = library().emulator_register(
                name.encode(), self.base, self.size, 2, False, False
            )

    def withdraw(self) -> None:
        """Withdraw the memory from the device; the address range stays reserved."""
        self.live = False
        if self.region is not None:
            library().emulator_unregister(self.region)
            self.region = None
        if self.device is not None:
            _poison(self)

    def end(self) -> None:
        """Withdraw the memory from the device and release the address range."""
        self.withdraw()
        if self.graph is not None:
            _forget(self.base, on_device=True)
        if self.device is not None:
            self.device.allocated -= self.size
        _quarantine.append(self)
        while sum(entry.size for entry in _quarantine) > _QUARANTINE:
            oldest = _quarantine.popleft()
            library().emulator_free(oldest.base, oldest.size)


_bases: list[int] = []
_allocations: dict[int, Allocation] = {}
_quarantine: deque[Allocation] = deque()
_left: list[int] = []  # remaining allocations per ``allocations_left``, innermost last


@contextmanager
def allocations_left(count: int) -> Iterator[None]:
    """Let ``count`` allocations of device memory succeed and refuse later ones."""
    _left.append(count)
    try:
        yield
    finally:
        _left.pop()


def find(address: int | None, size: int = 1) -> Allocation | None:
    """Return the allocation that contains ``size`` bytes from an address, or None."""
    index = bisect_right(_bases, address or 0) - 1
    if index < 0:
        return None
    allocation = _allocations[_bases[index]]
    return allocation if (address or 0) + size <= allocation.base + allocation.size else None


def _poison(allocation: Allocation) -> None:
    ctypes.memset(allocation.base, POISON, min(allocation.size, _MOST_POISONED))


def _record(allocation: Allocation) -> None:
    insort(_bases, allocation.base)
    _allocations[allocation.base] = allocation


def _at(base: int | None, on_device: bool) -> Allocation:
    allocation = _allocations.get(base or 0)
    require(
        allocation is not None and (allocation.device is not None) == on_device,
        f"{base}: not allocated",
    )
    assert allocation is not None
    return allocation


def _device_allocation(base: int | None) -> Allocation:
    return _at(base, on_device=True)


def _forget(base: int | None, on_device: bool) -> Allocation:
    allocation = _at(base, on_device)
    del _allocations[allocation.base]
    _bases.remove(allocation.base)
    return allocation


def _allocate(size: int) -> Allocation:
    require(size > 0, "a size is positive")
    device = current()
    full = device.allocated + size > MEMORY or (_left and _left[-1] <= 0)
    address = None if full else library().emulator_allocate(size)
    if address is None:
        raise Refused(CU.ERROR_OUT_OF_MEMORY, f"{size} bytes")
    if _left:
        _left[-1] -= 1
    allocation = Allocation(address, size, device)
    device.allocated += size
    _poison(allocation)
    _record(allocation)
    return allocation


@function
def cuMemGetInfo(available, total):
    put(available, ctypes.c_size_t, MEMORY - current().allocated)
    put(total, ctypes.c_size_t, MEMORY)


@function
def cuMemAlloc(pointer, size):
    refuse_while_capturing("memory is allocated")
    allocation = _allocate(size)
    allocation.begin()
    put(pointer, ctypes.c_uint64, allocation.base)


@function
def cuMemAllocManaged(pointer, size, flags):
    raise Refused(CU.ERROR_NOT_SUPPORTED, "managed memory")


@function
def cuMemFree(pointer):
    if pointer:
        refuse_while_capturing("memory is freed")
        allocation = _device_allocation(pointer)
        assert allocation.device is not None
        machine.wait(allocation.device.work())  # cuMemFree synchronizes
        _free(allocation)()


@function
def cuMemAllocAsync(pointer, size, stream):
    target = stream_of(stream)
    allocation = _allocate(size)
    if isinstance(target.capture, Capture):
        allocation.graph = target.capture.graph
        allocation.graph.memory.append(allocation)
    submit(target, allocation.begin)
    put(pointer, ctypes.c_uint64, allocation.base)


@function
def cuMemFreeAsync(pointer, stream):
    target, allocation = stream_of(stream), _device_allocation(pointer)
    if isinstance(target.capture, Capture):
        require(allocation.graph is target.capture.graph, "not memory of the captured graph")
        require(not allocation.freed, "the graph frees it already")
        allocation.freed = True
        submit(target, allocation.withdraw)
    else:
        submit(target, _free(allocation))


def _free(allocation: Allocation) -> Callable[[], None]:
    """Check that memory may be freed outside its graph; return the function that frees it."""
    if allocation.graph is None:
        _forget(allocation.base, on_device=True)
        return allocation.end
    require(allocation.left, "its graph frees it or was not launched")
    allocation.left = False
    return allocation.withdraw


# -- the memory pool of each device ----------------------------------------------------------------
@dataclass(eq=False)
class Pool:
    """A device's pool of stream-ordered memory, which caches nothing.

    Attributes:
        device: its device.
        handle: its handle.
        threshold: the release threshold that was set, in bytes.
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
    require(pool == _pool_of(device), "created pools", CU.ERROR_NOT_SUPPORTED)


@function
def cuMemPoolTrimTo(pool, size):
    handles.get(pool, Pool)


@function
def cuMemPoolSetAttribute(pool, attribute, value):
    refuse_while_capturing("a pool is queried")
    target = handles.get(pool, Pool)
    if attribute == CU.MEMPOOL_ATTR_RELEASE_THRESHOLD:
        target.threshold = ctypes.c_uint64.from_address(value).value


@function
def cuMemPoolGetAttribute(pool, attribute, value):
    refuse_while_capturing("a pool is queried")
    target = handles.get(pool, Pool)
    if attribute <= CU.MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        put(value, ctypes.c_int, 1)
    elif attribute == CU.MEMPOOL_ATTR_RELEASE_THRESHOLD:
        put(value, ctypes.c_uint64, target.threshold)
    else:
        put(value, ctypes.c_uint64, target.device.allocated)


# -- host memory -----------------------------------------------------------------------------------
@function
def cuMemHostAlloc(pointer, size, flags):
    refuse_while_capturing("memory is allocated")
    address = library().emulator_allocate(size)
    require(address, f"{size} bytes", CU.ERROR_OUT_OF_MEMORY)
    allocation = Allocation(address, size, None, live=True)
    _record(allocation)
    put(pointer, ctypes.c_void_p, allocation.base)


@function
def cuMemFreeHost(pointer):
    refuse_while_capturing("memory is freed")
    allocation = _forget(pointer, on_device=False)
    machine.wait(list(machine.pending))
    allocation.end()


@function
def cuPointerGetAttribute(data, attribute, pointer):
    allocation = find(pointer)
    require(allocation is not None, f"{pointer:#x} was not allocated by this driver")
    assert allocation is not None
    on_device = allocation.device is not None
    kinds = {
        CU.POINTER_ATTRIBUTE_MEMORY_TYPE: (
            ctypes.c_uint,
            CU.MEMORYTYPE_DEVICE if on_device else CU.MEMORYTYPE_HOST,
        ),
        CU.POINTER_ATTRIBUTE_DEVICE_ORDINAL: (
            ctypes.c_int,
            allocation.device.ordinal if allocation.device else 0,
        ),
        CU.POINTER_ATTRIBUTE_DEVICE_POINTER: (ctypes.c_uint64, pointer),
        CU.POINTER_ATTRIBUTE_RANGE_START_ADDR: (ctypes.c_uint64, allocation.base),
        CU.POINTER_ATTRIBUTE_RANGE_SIZE: (ctypes.c_size_t, allocation.size),
    }
    require(attribute in kinds, f"attribute {attribute}", CU.ERROR_NOT_SUPPORTED)
    put(data, *kinds[attribute])


# -- copies ----------------------------------------------------------------------------------------
def _device_memory(address: int, size: int) -> Allocation:
    """Return the device allocation that contains these bytes; refuse other addresses."""
    allocation = find(address, size)
    on_device = allocation is not None and allocation.device is not None
    require(on_device, f"{size} bytes at {address:#x} are not inside one device allocation")
    assert allocation is not None
    return allocation


def require_live(*allocations: Allocation) -> None:
    """Raise DeviceFault unless the device may use these allocations now."""
    for allocation in allocations:
        if not allocation.live:
            raise DeviceFault(
                f"{allocation.size} bytes at {allocation.base:#x} are used before their allocation "
                "on the stream or after they were freed",
                CU.ERROR_ILLEGAL_ADDRESS,
            )


def _copier(to: int, source: int, size: int, *allocations: Allocation) -> Callable[[], None]:
    def act() -> None:
        require_live(*allocations)
        ctypes.memmove(to, source, size)

    return act


def _is_pinned(address: int, size: int) -> bool:
    return find(address, size) is not None


def _to_device(to: int, source: int, size: int, stream: Stream) -> None:
    target = _device_memory(to, size)
    if _is_pinned(source, size):
        submit(stream, _copier(to, source, size, target))
        return
    capturing(stream, "a copy waits for pageable memory")
    content = ctypes.string_at(source, size)  # pageable memory is read before the call returns

    def act() -> None:
        require_live(target)
        ctypes.memmove(to, content, size)

    submit(stream, act)


def _to_host(to: int, source: int, size: int, stream: Stream) -> None:
    allocation = _device_memory(source, size)
    pinned = _is_pinned(to, size)
    if not pinned:
        capturing(stream, "a copy waits for pageable memory")
    work = submit(stream, _copier(to, source, size, allocation))
    if not pinned:  # pageable memory is written before the call returns
        machine.wait([work])
        stream.device.raise_fault()


def _within(to: int, source: int, size: int, stream: Stream) -> None:
    submit(
        stream, _copier(to, source, size, _device_memory(to, size), _device_memory(source, size))
    )


def _anywhere(to: int, source: int, size: int, stream: Stream) -> None:
    target, origin = (find(address, size) for address in (to, source))
    to_device = target is not None and target.device is not None
    from_device = origin is not None and origin.device is not None
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
    allocation = _device_memory(to, size)

    def act() -> None:
        require_live(allocation)
        ctypes.memset(to, value, size)

    submit(stream, act)


@function
def cuMemsetD8(to, value, count):
    _fill(to, value, count, current().legacy)


@function
def cuMemsetD8Async(to, value, count, stream):
    _fill(to, value, count, stream_of(stream))
