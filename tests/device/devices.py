"""The driver's functions for errors, versions, devices and contexts."""

from __future__ import annotations

import ctypes
import threading

from . import header
from .api import CU, FUNCTIONS, Refused, function, handles, put, require
from .machine import DEVICES, MEMORY, MULTIPROCESSORS, Device, current, device_of, make_current

_library: list[ctypes.CDLL] = []
_texts: dict[bytes, ctypes.Array] = {}


def set_library(library: ctypes.CDLL) -> None:
    """Set the library whose functions cuGetProcAddress returns."""
    _library[:] = [library]


def _put_text(address: int | None, text: str) -> None:
    encoded = text.encode()
    buffer = _texts.setdefault(encoded, ctypes.create_string_buffer(encoded))
    put(address, ctypes.c_void_p, ctypes.addressof(buffer))


@function(always=True)
def cuGetErrorName(error, text):
    known = header.statuses()
    require(error in known, f"no status {error}")
    _put_text(text, known[error])


@function(always=True)
def cuGetErrorString(error, text):
    for device in DEVICES:
        if device.fault is not None and device.fault.status == error:
            return _put_text(text, str(device.fault))
    refusal = Refused.last.get(threading.get_ident())
    if refusal is not None and refusal[0] == error and refusal[1]:
        return _put_text(text, refusal[1])
    return cuGetErrorName(error, text)


@function(always=True)
def cuInit(flags):
    require(flags == 0, "flags must be 0")


@function(always=True)
def cuDriverGetVersion(version):
    put(version, ctypes.c_int, header.version())


@function(always=True)
def cuGetExportTable(table, identity):
    # NVIDIA's own libraries ask for tables of undocumented functions, which are not emulated.
    put(table, ctypes.c_void_p, None)
    raise Refused(CU.ERROR_NOT_SUPPORTED)


@function(always=True)
def cuGetProcAddress(symbol, address, version, flags, status):
    name = ctypes.string_at(symbol).decode()
    for suffix in ("_v4", "_v3", "_v2", ""):
        if name in FUNCTIONS and hasattr(_library[0], name + suffix):
            pointer = ctypes.cast(getattr(_library[0], name + suffix), ctypes.c_void_p).value
            put(address, ctypes.c_void_p, pointer)
            if status:
                put(status, ctypes.c_int, CU.GET_PROC_ADDRESS_SUCCESS)
            return
    put(address, ctypes.c_void_p, None)
    if status:
        put(status, ctypes.c_int, CU.GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
    raise Refused(CU.ERROR_NOT_FOUND, name)


# -- devices ---------------------------------------------------------------------------------------
@function(always=True)
def cuDeviceGetCount(count):
    put(count, ctypes.c_int, len(DEVICES))


@function(always=True)
def cuDeviceGet(device, ordinal):
    put(device, ctypes.c_int, device_of(ordinal).ordinal)


@function(always=True)
def cuDeviceGetName(name, room, device):
    ctypes.memmove(name, ctypes.create_string_buffer(device_of(device).name.encode(), room), room)


@function(always=True)
def cuDeviceGetUuid(uuid, device):
    ctypes.memmove(uuid, bytes([device_of(device).ordinal + 1] * 16), 16)


@function(always=True)
def cuDeviceTotalMem(size, device):
    device_of(device)
    put(size, ctypes.c_size_t, MEMORY)


@function(always=True)
def cuDeviceGetPCIBusId(text, room, device):
    bus = f"0000:{device_of(device).ordinal + 1:02x}:00.0"
    require(room > len(bus), "no room for the bus")
    ctypes.memmove(text, ctypes.create_string_buffer(bus.encode()), len(bus) + 1)


@function(always=True)
def cuDeviceGetByPCIBusId(device, text):
    bus = int(ctypes.string_at(text).decode().split(":")[1], 16)
    put(device, ctypes.c_int, device_of(bus - 1).ordinal)


@function(always=True)
def cuDeviceCanAccessPeer(can, device, peer):
    device_of(device), device_of(peer)
    put(can, ctypes.c_int, 0)


def _attributes(device: Device) -> dict[int, int]:
    chip = device.chip
    hopper = chip.capability >= (9, 0)
    named = {
        "COMPUTE_CAPABILITY_MAJOR": chip.capability[0],
        "COMPUTE_CAPABILITY_MINOR": chip.capability[1],
        "MULTIPROCESSOR_COUNT": MULTIPROCESSORS,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_BLOCK_DIM_X": 1024,
        "MAX_BLOCK_DIM_Y": 1024,
        "MAX_BLOCK_DIM_Z": 64,
        "MAX_GRID_DIM_X": 2**31 - 1,
        "MAX_GRID_DIM_Y": 2**16 - 1,
        "MAX_GRID_DIM_Z": 2**16 - 1,
        "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": chip.shared_per_block,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": chip.shared_per_multiprocessor,
        "MAX_REGISTERS_PER_BLOCK": 65536,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
        "MAX_THREADS_PER_MULTIPROCESSOR": chip.threads,
        "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
        "WARP_SIZE": 32,
        "L2_CACHE_SIZE": 50 << 20,
        "CLOCK_RATE": 1_000_000,
        "MEMORY_CLOCK_RATE": 1_000_000,
        "GLOBAL_MEMORY_BUS_WIDTH": 64,
        "UNIFIED_ADDRESSING": 1,
        "CONCURRENT_KERNELS": 1,
        "MEMORY_POOLS_SUPPORTED": 1,
        "TENSOR_MAP_ACCESS_SUPPORTED": hopper,
        "CLUSTER_LAUNCH": hopper,
        "TEXTURE_ALIGNMENT": 512,
    }
    return {getattr(CU, f"DEVICE_ATTRIBUTE_{name}"): int(value) for name, value in named.items()}


@function(always=True)
def cuDeviceGetAttribute(value, attribute, device):
    put(value, ctypes.c_int, _attributes(device_of(device)).get(attribute, 0))


# -- contexts: the primary one of each device ------------------------------------------------------
@function(always=True)
def cuDevicePrimaryCtxRetain(context, device):
    put(context, ctypes.c_void_p, device_of(device).context)


@function(always=True)
def cuDevicePrimaryCtxRelease(device):
    device_of(device)


@function(always=True)
def cuDevicePrimaryCtxGetState(device, flags, active):
    device_of(device)
    put(flags, ctypes.c_uint, 0)
    put(active, ctypes.c_int, 1)


@function(always=True)
def cuCtxGetCurrent(context):
    device = make_current(None)
    make_current(device)
    put(context, ctypes.c_void_p, device.context if device else None)


@function(always=True)
def cuCtxSetCurrent(context):
    make_current(handles.get(context, Device) if context else None)


@function(always=True)
def cuCtxGetDevice(device):
    put(device, ctypes.c_int, current().ordinal)
