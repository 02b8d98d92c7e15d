"""The driver's functions for modules, kernels, their launches and tensor maps."""

from __future__ import annotations

import ctypes
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.emulator import EmulatedKernel, EmulatedModule, tensormap
from tests.emulator.driver import Refusal, resident_blocks

from . import machine, programs
from .api import CU, Refused, function, handles, put, require
from .graphs import submit
from .machine import MULTIPROCESSORS, Device, DeviceFault, Stream, current, stream_of
from .memory import find

_ALIGNMENT = 64  # of a parameter, as any struct may ask for


@dataclass(eq=False)
class Module:
    """Loaded kernels, which belong to a device."""

    device: Device
    emulated: EmulatedModule


@dataclass(eq=False)
class Kernel:
    """A kernel of a loaded module."""

    device: Device
    emulated: EmulatedKernel


def _load(module: int | None, address: int) -> None:
    device = current()
    try:
        emulated = programs.emulated(programs.read(address), device.chip)
    except programs.UnknownProgramError as error:
        raise Refused(CU.ERROR_INVALID_IMAGE, str(error)) from None
    except Exception as error:
        traceback.print_exc()
        raise Refused(CU.ERROR_INVALID_IMAGE, str(error)) from None
    put(module, ctypes.c_void_p, handles.give(Module(device, emulated)))


@function
def cuModuleLoadData(module, image):
    require(image, "no image")
    _load(module, image)


@function
def cuModuleLoad(module, path):
    try:
        image = Path(os.fsdecode(ctypes.string_at(path))).read_bytes()
    except OSError as error:
        raise Refused(CU.ERROR_FILE_NOT_FOUND, str(error)) from None
    kept = ctypes.create_string_buffer(image + bytes(64))
    _load(module, ctypes.addressof(kept))


@function(always=True)
def cuModuleUnload(module):
    one = handles.drop(module, Module)
    machine.wait(one.device.work())


@function
def cuModuleGetFunction(kernel, module, name):
    one = handles.get(module, Module)
    wanted = ctypes.string_at(name).decode()
    try:
        found = one.emulated.get_function(wanted)
    except ValueError as error:
        raise Refused(CU.ERROR_NOT_FOUND, str(error)) from None
    put(kernel, ctypes.c_void_p, handles.give(Kernel(one.device, found)))


@function
def cuFuncGetAttribute(value, attribute, kernel):
    one = handles.get(kernel, Kernel).emulated
    takes = one.resources
    known = {
        CU.FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: takes.launch_bounds or 1024,
        CU.FUNC_ATTRIBUTE_NUM_REGS: takes.registers,
        CU.FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: takes.static_shared,
        CU.FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: one.max_dynamic_shared_size_bytes,
    }
    put(value, ctypes.c_int, known.get(attribute, 0))


@function
def cuFuncSetAttribute(kernel, attribute, value):
    one = handles.get(kernel, Kernel).emulated
    if attribute == CU.FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        try:
            one.max_dynamic_shared_size_bytes = value
        except Refusal as refusal:
            raise Refused(CU.ERROR_INVALID_VALUE, str(refusal)) from None


@function
def cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared):
    one = handles.get(kernel, Kernel)
    found, _ = resident_blocks(
        one.device.chip,
        one.emulated.resources,
        threads,
        shared,
        one.emulated.max_dynamic_shared_size_bytes,
    )
    put(blocks, ctypes.c_int, found)


@function
def cuOccupancyMaxPotentialBlockSize(grid, block, kernel, shared_of, shared, limit):
    handles.get(kernel, Kernel)
    put(block, ctypes.c_int, limit or 128)
    put(grid, ctypes.c_int, MULTIPROCESSORS)


# -- launches --------------------------------------------------------------------------------------
class _Parameters:
    """A launch's parameters by value, as they were when it was submitted."""

    def __init__(self, kernel: EmulatedKernel, given: int | None) -> None:
        sizes = kernel.parameter_sizes
        addresses = (ctypes.c_void_p * len(sizes)).from_address(given) if given else ()
        require(len(addresses) == len(sizes), f"{kernel.name} takes {len(sizes)} parameters")
        self.values = [
            ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)
        ]
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._room = ctypes.create_string_buffer(places[-1] + _ALIGNMENT)
        base = -(-ctypes.addressof(self._room) // _ALIGNMENT) * _ALIGNMENT
        self.pointers = (ctypes.c_void_p * max(len(sizes), 1))()
        for index, value in enumerate(self.values):
            self.pointers[index] = base + places[index]
            ctypes.memmove(base + places[index], value, len(value))

    def words(self) -> set[int]:
        """All that could be an address."""
        found = set()
        for value in self.values:
            for offset in range(0, len(value) - 7, 8):
                found.add(int.from_bytes(value[offset : offset + 8], "little"))
        return found


def _launch(
    one: Kernel,
    grid: list[int],
    block: list[int],
    shared: int,
    given: int | None,
    stream: Stream,
    may_overlap: bool = False,
) -> None:
    require(one.device is stream.device, "of another device", CU.ERROR_INVALID_HANDLE)
    try:
        one.emulated.require_launchable(grid, block, shared)
    except Refusal as refusal:
        raise Refused(CU.ERROR_INVALID_VALUE, str(refusal)) from None
    parameters = _Parameters(one.emulated, given)

    def act() -> None:
        for word in parameters.words():
            there = find(word)
            if there is not None and there.device not in (None, one.device):
                raise DeviceFault(
                    f"{one.emulated.name} on device {one.device.ordinal} is given memory of "
                    f"device {there.device.ordinal}",
                    CU.ERROR_ILLEGAL_ADDRESS,
                )
        outcome = one.emulated.run(grid, block, parameters.pointers, shared, may_overlap)
        if outcome.reports:
            raise DeviceFault("\n".join(map(str, outcome.reports)))

    submit(stream, act)


@function
def cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
    require(not extra, "parameters in one buffer", CU.ERROR_NOT_SUPPORTED)
    one = handles.get(kernel, Kernel)
    _launch(one, [gx, gy, gz], [bx, by, bz], shared, parameters, stream_of(stream))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is a number."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


@function
def cuLaunchKernelEx(config, kernel, parameters, extra):
    require(config, "no configuration")
    require(not extra, "parameters in one buffer", CU.ERROR_NOT_SUPPORTED)
    asked = _Config.from_address(config)
    one = handles.get(kernel, Kernel)
    may_overlap = False
    for attribute in (_Attribute * asked.count).from_address(asked.attributes or 0):
        known = attribute.id == CU.LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        require(known, f"launch attribute {attribute.id}", CU.ERROR_NOT_SUPPORTED)
        may_overlap = attribute.value != 0
    overlaps = one.device.chip.capability >= (9, 0)
    require(overlaps or not may_overlap, "launches overlap from 9.0 on", CU.ERROR_NOT_SUPPORTED)
    _launch(
        *(one, list(asked.grid), list(asked.block), asked.shared, parameters),
        *(stream_of(asked.stream), may_overlap),
    )


# -- tensor maps -----------------------------------------------------------------------------------
_ELEMENT_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4}
_TF32 = 11
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


def _numbers(kind: Any, address: int | None, count: int) -> list[int]:
    return list((kind * count).from_address(address)) if address and count > 0 else []


def _tensor(kind: int, rank: int, address: int, extents: int, strides: int) -> tuple[Any, ...]:
    require(kind in _ELEMENT_SIZES, f"data type {kind}", CU.ERROR_NOT_SUPPORTED)
    return (
        address or 0,
        _ELEMENT_SIZES[kind],
        _numbers(ctypes.c_uint64, extents, rank),
        _numbers(ctypes.c_uint64, strides, rank - 1),
    )


def _encode(made: int, interleave: int, swizzle: int, encoder: Any, *arguments: Any, **rules: Any):
    require(interleave == 0, "interleaved layouts", CU.ERROR_NOT_SUPPORTED)
    require(swizzle in _SWIZZLES, f"swizzle {swizzle}", CU.ERROR_NOT_SUPPORTED)
    try:
        encoded = encoder(*arguments, swizzle=_SWIZZLES[swizzle], **rules)
    except ValueError as error:
        raise Refused(CU.ERROR_INVALID_VALUE, str(error)) from None
    ctypes.memmove(made, encoded.tobytes(), tensormap.MAP_BYTES)


@function(always=True)
def cuTensorMapEncodeTiled(
    made, kind, rank, address, extents, strides, box, steps, interleave, swizzle, promotion, fill
):
    _encode(
        *(made, interleave, swizzle, tensormap.encode_tiled),
        *_tensor(kind, rank, address, extents, strides),
        _numbers(ctypes.c_uint32, box, rank),
        element_strides=_numbers(ctypes.c_uint32, steps, rank),
        to_tf32=kind == _TF32,
    )


@function(always=True)
def cuTensorMapEncodeIm2col(
    made,
    kind,
    rank,
    address,
    extents,
    strides,
    lower,
    upper,
    channels,
    pixels,
    steps,
    interleave,
    swizzle,
    promotion,
    fill,
):
    _encode(
        *(made, interleave, swizzle, tensormap.encode_im2col),
        *_tensor(kind, rank, address, extents, strides),
        _numbers(ctypes.c_int, lower, rank - 2),
        _numbers(ctypes.c_int, upper, rank - 2),
        channels,
        pixels,
        element_strides=_numbers(ctypes.c_uint32, steps, rank),
        to_tf32=kind == _TF32,
    )
