"""NumPy arrays in memory that the checker knows: named, guarded, with every access looked at."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .reports import UNWRITTEN_OUTPUT, CheckerError, Report
from .runtime import library

_WRITTEN, _NOT_TO_BE_WRITTEN = 1, 2
_regions: dict[int, _Allocation] = {}


class Kernel(Protocol):
    """What a report says of a kernel."""

    name: str

    @property
    def declared_at(self) -> tuple[str, int]: ...


class _Allocation:
    """One piece of emulator memory, ``lead`` bytes into a page, and its region in the checker."""

    def __init__(
        self, size: int, itemsize: int, name: str, read_only: bool, uninitialised: bool, lead: int
    ) -> None:
        runtime = library()
        self.size, self.name, self._lead = size, name, lead
        # One cell of the checker for each element of up to four bytes, several for a larger one.
        granule_shift = {1: 0, 2: 1}.get(itemsize, 2)
        pages = runtime.emulator_allocate(max(size, 1) + lead)
        if not pages:
            raise MemoryError(f"cannot map {size} bytes for {name}")
        self.address = pages + lead
        self.region = runtime.emulator_register(
            name.encode(), self.address, size, granule_shift, read_only, uninitialised
        )
        self.uninitialised = uninitialised
        self.last_kernel: Kernel | None = None  # the last one that was given this array

    def free(self) -> None:
        _regions.pop(self.address, None)
        library().emulator_unregister(self.region)
        library().emulator_free(self.address - self._lead, max(self.size, 1) + self._lead)

    @property
    def granule_shift(self) -> int:
        """Bytes per cell as a power of two; the checker refines it where it has to."""
        return library().emulator_granule_shift(self.region)

    def element_state(self) -> np.ndarray:
        """A byte per cell of an array that began without values; the kernel side writes it."""
        address = library().emulator_element_state(self.region)
        cells = (self.size >> self.granule_shift) + 1
        return np.ctypeslib.as_array((ctypes.c_uint8 * cells).from_address(address))


def _allocate(
    shape: Sequence[int], dtype, name: str, read_only: bool, uninitialised: bool, lead: int = 0
) -> np.ndarray:
    dtype = np.dtype(dtype)
    shape = tuple(int(extent) for extent in shape)
    size = math.prod(shape) * dtype.itemsize
    allocation = _Allocation(size, dtype.itemsize, name, read_only, uninitialised, lead)
    buffer = (ctypes.c_uint8 * max(size, 1)).from_address(allocation.address)
    weakref.finalize(buffer, allocation.free)
    _regions[allocation.address] = allocation
    flat = np.frombuffer(buffer, np.uint8, count=size)
    return flat.view(dtype).reshape(shape)


def array(values, name: str = "array", read_only: bool = True) -> np.ndarray:
    """A copy of ``values`` (C-contiguous) in emulator memory; kernels may not write an input."""
    values = np.asarray(values)
    result = _allocate(values.shape, values.dtype, name, read_only, uninitialised=False)
    result[...] = values
    return result


def empty(shape: Sequence[int], dtype, name: str = "output") -> np.ndarray:
    """An array full of 0xff bytes (NaN, for floats).

    Reading an element before a kernel wrote it is reported; ``check_written`` tells which
    elements no kernel wrote.
    """
    result = _allocate(shape, dtype, name, read_only=False, uninitialised=True)
    result.reshape(-1).view(np.uint8)[...] = 0xFF
    return result


def zeros(shape: Sequence[int], dtype, name: str = "zeros") -> np.ndarray:
    """A writable array of zeros, which count as values."""
    return _allocate(shape, dtype, name, read_only=False, uninitialised=False)


def lazy(shape: Sequence[int], dtype, name: str = "lazy", read_only: bool = False) -> np.ndarray:
    """An array of any size, zero, whose pages exist only once they are touched."""
    return _allocate(shape, dtype, name, read_only, uninitialised=False)


def like(view: np.ndarray, name: str = "view", read_only: bool = True) -> np.ndarray:
    """A copy of a strided view as it lies in memory, its gaps filled with poison."""
    result = _strided(view, name, read_only, uninitialised=False)
    result[...] = view
    return result


def empty_like(view: np.ndarray, name: str = "output") -> np.ndarray:
    """As ``empty``, as a strided view lies in memory; a write between the elements is reported."""
    result = _strided(view, name, read_only=False, uninitialised=True)
    allocation = _allocation_of(result)
    state = allocation.element_state()
    state[:] = _NOT_TO_BE_WRITTEN
    state[_cells(result, allocation)] = 0
    return result


_ALIGNMENT = 16  # bytes; of more of a tensor's address the planner is not told


def _strided(view: np.ndarray, name: str, read_only: bool, uninitialised: bool) -> np.ndarray:
    """An array with a view's shape, strides and alignment, and no better aligned than to 16."""
    lowest, end = np.lib.array_utils.byte_bounds(view)
    lead = _ALIGNMENT + lowest % _ALIGNMENT if view.size else 0
    count = -(-(end - lowest) // view.itemsize) if view.size else 0
    flat = _allocate((count,), view.dtype, name, read_only, uninitialised, lead)
    flat.view(np.uint8)[...] = 0xFF
    first = view.__array_interface__["data"][0] - lowest if view.size else 0
    return np.ndarray(view.shape, view.dtype, flat, first, view.strides)


def _allocation_of(view: np.ndarray) -> _Allocation:
    address = view.__array_interface__["data"][0]
    for allocation in _regions.values():
        if allocation.address <= address < allocation.address + max(allocation.size, 1):
            return allocation
    raise ValueError("the array does not lie in emulator memory")


def _cells(view: np.ndarray, allocation: _Allocation) -> np.ndarray:
    """Indices of all cells that hold the view's elements, element-major."""
    start = view.__array_interface__["data"][0] - allocation.address
    offsets = np.full(1, start, np.int64)
    for extent, stride in zip(view.shape, view.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    granule = 1 << allocation.granule_shift
    within = np.arange(0, view.itemsize, granule)
    return (offsets[:, None] + within) >> allocation.granule_shift


def unwritten_elements(output: np.ndarray) -> np.ndarray:
    """Indices, shape (count, rank), of the elements of an ``empty`` array no kernel wrote."""
    allocation = _allocation_of(output)
    if not allocation.uninitialised:
        raise ValueError(f"{allocation.name} began with values: make it with empty()")
    if output.size == 0:
        return np.empty((0, output.ndim), np.int64)
    state = allocation.element_state()[_cells(output, allocation)]
    missing = ~(state & _WRITTEN).astype(bool).all(axis=1)
    return np.argwhere(missing.reshape(output.shape))


def note_kernel(view: np.ndarray, kernel: Kernel) -> None:
    """Remembers which kernel was given an array, for the report of what it left unwritten."""
    if view.size:
        _allocation_of(view).last_kernel = kernel


def name_of(view: np.ndarray) -> str:
    """What an array in emulator memory is called."""
    return _allocation_of(view).name if view.size else ""


def check_written(output: np.ndarray) -> None:
    """CheckerError unless every element of an ``empty`` array was written by a kernel."""
    missing = unwritten_elements(output)
    if len(missing):
        last = _allocation_of(output).last_kernel
        kernel, (file, line) = (last.name, last.declared_at) if last else ("?", ("", 0))
        first = tuple(int(index) for index in missing[0])
        text = (
            f"{len(missing)} of {output.size} elements of {_allocation_of(output).name} of shape"
            f" {output.shape} were never written, the first at {first}"
        )
        nowhere = (0, 0, 0)
        raise CheckerError([Report(UNWRITTEN_OUTPUT, kernel, nowhere, nowhere, file, line, text)])


def is_emulator_memory(values: np.ndarray) -> bool:
    """Whether the array's first element lies in registered memory (an empty one always does)."""
    address = values.__array_interface__["data"][0]
    return values.size == 0 or bool(library().emulator_is_registered(address))
