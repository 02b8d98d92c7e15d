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
from .graphs import refuse_while_capturing, submit
from .machine import MULTIPROCESSORS, Device, DeviceFault, Stream, current, stream_of
from .memory import find, require_live

_ALIGNMENT = 64  # bytes; no parameter needs more (hand-set)


@dataclass(eq=False)
class Module:
    """A loaded module of a device."""

    device: Device
    emulated: EmulatedModule


@dataclass(eq=False)
class Kernel:
    """A kernel of a loaded module."""

    device: Device
    emulated: EmulatedKernel


def _load(module: int | None, address: int) -> None:
    refuse_while_capturing("a module is loaded")
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
    buffer = ctypes.create_string_buffer(image + bytes(64))
    _load(module, ctypes.addressof(buffer))


@function(always=True)
def cuModuleUnload(module):
    target = handles.drop(module, Module)
    machine.wait(target.device.work())


@function
def cuModuleGetFunction(kernel, module, name):
    owner = handles.get(module, Module)
    kernel_name = ctypes.string_at(name).decode()
    try:
        emulated = owner.emulated.get_function(kernel_name)
    except ValueError as error:
        raise Refused(CU.ERROR_NOT_FOUND, str(error)) from None
    put(kernel, ctypes.c_void_p, handles.give(Kernel(owner.device, emulated)))


@function
def cuFuncGetAttribute(value, attribute, kernel):
    emulated = handles.get(kernel, Kernel).emulated
    resources = emulated.resources
    known = {
        CU.FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: resources.launch_bounds or 1024,
        CU.FUNC_ATTRIBUTE_NUM_REGS: resources.registers,
        CU.FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: resources.static_shared,
        CU.FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: emulated.max_dynamic_shared_size_bytes,
    }
    put(value, ctypes.c_int, known.get(attribute, 0))


@function
def cuFuncSetAttribute(kernel, attribute, value):
    emulated = handles.get(kernel, Kernel).emulated
    if attribute == CU.FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        try:
            emulated.max_dynamic_shared_size_bytes = value
        except Refusal as refusal:
            raise Refused(CU.ERROR_INVALID_VALUE, str(refusal)) from None


@function
def cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared):
    target = handles.get(kernel, Kernel)
    resident, _ = resident_blocks(
        target.device.chip,
        target.emulated.resources,
        threads,
        shared,
        target.emulated.max_dynamic_shared_size_bytes,
    )
    put(blocks, ctypes.c_int, resident)


@function
def cuOccupancyMaxPotentialBlockSize(grid, block, kernel, shared_of, shared, limit):
    handles.get(kernel, Kernel)
    put(block, ctypes.c_int, limit or 128)
    put(grid, ctypes.c_int, MULTIPROCESSORS)


# -- launches --------------------------------------------------------------------------------------
class _Parameters:
    """Copies of a launch's parameters at the time of submission."""

    def __init__(self, kernel: EmulatedKernel, pointers: int | None) -> None:
        sizes = kernel.parameter_sizes
        addresses = (ctypes.c_void_p * len(sizes)).from_address(pointers) if pointers else ()
        require(len(addresses) == len(sizes), f"{kernel.name} takes {len(sizes)} parameters")
        self.values = [
            ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)
        ]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._room = ctypes.create_string_buffer(offsets[-1] + _ALIGNMENT)
        base = -(-ctypes.addressof(self._room) // _ALIGNMENT) * _ALIGNMENT
        self.pointers = (ctypes.c_void_p * max(len(sizes), 1))()
        for index, value in enumerate(self.values):
            self.pointers[index] = base + offsets[index]
            ctypes.memmove(base + offsets[index], value, len(value))

    def words(self) -> set[int]:
        """Return all 8-byte words that could be an address."""
        words = set()
        for value in self.values:
            for offset in range(0, len(value) - 7, 8):
                words.add(int.from_bytes(value[offset : offset + 8], "little"))
        return words


def _launch(
    kernel: Kernel,
    grid: list[int],
    block: list[int],
    shared: int,
    pointers: int | None,
    stream: Stream,
    may_overlap: bool = False,
) -> None:
    require(
        kernel.device is stream.device,
        "the kernel belongs to another device",
        CU.ERROR_INVALID_HANDLE,
    )
    try:
        kernel.emulated.require_launchable(grid, block, shared)
    except Refusal as refusal:
        raise Refused(CU.ERROR_INVALID_VALUE, str(refusal)) from None
    parameters = _Parameters(kernel.emulated, pointers)

    def act() -> None:
        for word in parameters.words():
            allocation = find(word)
            if allocation is None or allocation.device is None:
                continue
            require_live(allocation)
            if allocation.device is not kernel.device:
                raise DeviceFault(
                    f"{kernel.emulated.name} on device {kernel.device.ordinal} is given memory of "
                    f"device {allocation.device.ordinal}",
                    CU.ERROR_ILLEGAL_ADDRESS,
                )
        outcome = kernel.emulated.run(grid, block, parameters.pointers, shared, may_overlap)
        if outcome.reports:
            raise DeviceFault("\n".join(map(str, outcome.reports)))

    submit(stream, act)


@function
def cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
    require(not extra, "parameters in one buffer", CU.ERROR_NOT_SUPPORTED)
    target = handles.get(kernel, Kernel)
    _launch(target, [gx, gy, gz], [bx, by, bz], shared, parameters, stream_of(stream))


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
    """CUlaunchAttribute with an integer value."""

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
    settings = _Config.from_address(config)
    target = handles.get(kernel, Kernel)
    may_overlap = False
    for attribute in (_Attribute * settings.count).from_address(settings.attributes or 0):
        known = attribute.id == CU.LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        require(known, f"launch attribute {attribute.id}", CU.ERROR_NOT_SUPPORTED)
        may_overlap = attribute.value != 0
    overlaps = target.device.chip.capability >= (9, 0)
    require(
        overlaps or not may_overlap,
        "launches overlap from compute capability 9.0",
        CU.ERROR_NOT_SUPPORTED,
    )
    _launch(
        *(target, list(settings.grid), list(settings.block), settings.shared, parameters),
        *(stream_of(settings.stream), may_overlap),
    )


# -- tensor maps -----------------------------------------------------------------------------------
def _numbers(kind: Any, address: int | None, count: int) -> list[int]:
    return list((kind * count).from_address(address)) if address and count > 0 else []


def _tensor(kind: int, rank: int, address: int, extents: int, strides: int) -> tuple[Any, ...]:
    require(kind in tensormap.ELEMENT_BYTES, f"data type {kind}", CU.ERROR_NOT_SUPPORTED)
    return (
        address or 0,
        tensormap.ELEMENT_BYTES[kind],
        _numbers(ctypes.c_uint64, extents, rank),
        _numbers(ctypes.c_uint64, strides, rank - 1),
    )


def _encode(
    result: int, interleave: int, swizzle: int, encoder: Any, *arguments: Any, **rules: Any
):
    require(interleave == 0, "interleaved layouts", CU.ERROR_NOT_SUPPORTED)
    known = 0 <= swizzle < len(tensormap.SWIZZLES)
    require(known, f"swizzle {swizzle}", CU.ERROR_NOT_SUPPORTED)
    try:
        encoded = encoder(*arguments, swizzle=tensormap.SWIZZLES[swizzle], **rules)
    except ValueError as error:
        raise Refused(CU.ERROR_INVALID_VALUE, str(error)) from None
    ctypes.memmove(result, encoded.tobytes(), tensormap.MAP_BYTES)


@function(always=True)
def cuTensorMapEncodeTiled(
    result, kind, rank, address, extents, strides, box, steps, interleave, swizzle, promotion, fill
):
    _encode(
        *(result, interleave, swizzle, tensormap.encode_tiled),
        *_tensor(kind, rank, address, extents, strides),
        _numbers(ctypes.c_uint32, box, rank),
        element_strides=_numbers(ctypes.c_uint32, steps, rank),
        to_tf32=kind == tensormap.TF32,
    )


@function(always=True)
def cuTensorMapEncodeIm2col(
    result,
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
        *(result, interleave, swizzle, tensormap.encode_im2col),
        *_tensor(kind, rank, address, extents, strides),
        _numbers(ctypes.c_int, lower, rank - 2),
        _numbers(ctypes.c_int, upper, rank - 2),
        channels,
        pixels,
        element_strides=_numbers(ctypes.c_uint32, steps, rank),
        to_tf32=kind == tensormap.TF32,
    )
