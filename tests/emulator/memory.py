"""NumPy arrays in emulator memory, where the checker observes every access."""

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
    """The part of a kernel that reports show."""

    name: str

    @property
    def declared_at(self) -> tuple[str, int]: ...


class _Allocation:
    """An allocation of emulator memory, ``lead`` bytes into a page, and its checker region."""

    def __init__(
        self, size: int, itemsize: int, name: str, read_only: bool, uninitialised: bool, lead: int
    ) -> None:
        runtime = library()
        self.size, self.name, self._lead = size, name, lead
        # The checker has one cell per element of up to four bytes, several per larger element.
        granule_shift = {1: 0, 2: 1}.get(itemsize, 2)
        pages = runtime.emulator_allocate(max(size, 1) + lead)
        if not pages:
            raise MemoryError(f"cannot map {size} bytes for {name}")
        self.address = pages + lead
        self.region = runtime.emulator_register(
            name.encode(), self.address, size, granule_shift, read_only, uninitialised
        )
        self.uninitialised = uninitialised
        self.last_kernel: Kernel | None = None  # the last kernel with this argument

    def free(self) -> None:
        _regions.pop(self.address, None)
        library().emulator_unregister(self.region)
        library().emulator_free(self.address - self._lead, max(self.size, 1) + self._lead)

    @property
    def granule_shift(self) -> int:
        """Binary logarithm of the bytes per cell; the checker may lower it."""
        return library().emulator_granule_shift(self.region)

    def element_state(self) -> np.ndarray:
        """Return the state byte of each cell of an initially unwritten array (a live view)."""
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
    """Copy ``values`` (C-contiguous) to emulator memory; kernels may not write an input."""
    values = np.asarray(values)
    result = _allocate(values.shape, values.dtype, name, read_only, uninitialised=False)
    result[...] = values
    return result


def empty(shape: Sequence[int], dtype, name: str = "output") -> np.ndarray:
    """Return an array filled with 0xff bytes (NaN, for floats).

    Reading an element before a kernel has written it is reported; ``check_written`` reports the
    elements that no kernel has written.
    """
    result = _allocate(shape, dtype, name, read_only=False, uninitialised=True)
    result.reshape(-1).view(np.uint8)[...] = 0xFF
    return result


def zeros(shape: Sequence[int], dtype, name: str = "zeros") -> np.ndarray:
    """Return a writable array of zeros that count as written."""
    return _allocate(shape, dtype, name, read_only=False, uninitialised=False)


def lazy(shape: Sequence[int], dtype, name: str = "lazy", read_only: bool = False) -> np.ndarray:
    """Return a zero array of any size whose pages are allocated only when touched."""
    return _allocate(shape, dtype, name, read_only, uninitialised=False)


def like(view: np.ndarray, name: str = "view", read_only: bool = True) -> np.ndarray:
    """Copy a strided view with its memory layout; gaps are filled with poison."""
    result = _strided(view, name, read_only, uninitialised=False)
    result[...] = view
    return result


def empty_like(view: np.ndarray, name: str = "output") -> np.ndarray:
    """Return an ``empty`` array with a view's layout; writes between its elements are reported."""
    result = _strided(view, name, read_only=False, uninitialised=True)
    allocation = _allocation_of(result)
    state = allocation.element_state()
    state[:] = _NOT_TO_BE_WRITTEN
    state[_cells(result, allocation)] = 0
    return result


def write(view: np.ndarray, values: np.ndarray) -> None:
    """Write values to an ``empty`` array, as a copy by the host does; they count as written."""
    view[...] = values
    allocation = _allocation_of(view)
    if view.size and allocation.uninitialised:
        allocation.element_state()[_cells(view, allocation)] |= _WRITTEN


_ALIGNMENT = 16  # bytes; the planner considers no larger alignment of a tensor


def _strided(view: np.ndarray, name: str, read_only: bool, uninitialised: bool) -> np.ndarray:
    """Return an array with a view's shape and strides, and its alignment up to 16 bytes."""
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
    raise ValueError("the array is not in emulator memory")


def _cells(view: np.ndarray, allocation: _Allocation) -> np.ndarray:
    """Return the indices of all cells of the view's elements, element-major."""
    start = view.__array_interface__["data"][0] - allocation.address
    offsets = np.full(1, start, np.int64)
    for extent, stride in zip(view.shape, view.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    granule = 1 << allocation.granule_shift
    within = np.arange(0, view.itemsize, granule)
    return (offsets[:, None] + within) >> allocation.granule_shift


def unwritten_elements(output: np.ndarray) -> np.ndarray:
    """Return the indices, shape (count, rank), of unwritten elements of an ``empty`` array."""
    allocation = _allocation_of(output)
    if not allocation.uninitialised:
        raise ValueError(f"{allocation.name} began with values: make it with empty()")
    if output.size == 0:
        return np.empty((0, output.ndim), np.int64)
    state = allocation.element_state()[_cells(output, allocation)]
    missing = ~(state & _WRITTEN).astype(bool).all(axis=1)
    return np.argwhere(missing.reshape(output.shape))


def note_kernel(address: int, kernel: Kernel) -> None:
    """Record that a kernel received an address, for the report of unwritten elements."""
    for allocation in _regions.values():
        if allocation.address <= address < allocation.address + max(allocation.size, 1):
            allocation.last_kernel = kernel


def check_written(output: np.ndarray) -> None:
    """Raise CheckerError unless kernels have written every element of an ``empty`` array."""
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
    """Return whether the array's first element is in registered memory (True if empty)."""
    address = values.__array_interface__["data"][0]
    return values.size == 0 or bool(library().emulator_is_registered(address))
