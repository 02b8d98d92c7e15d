"""Launches with programmatic stream serialization, which CuPy does not offer.

With this attribute, a kernel may begin before the previous kernel in its stream has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from cupyconv import arrays
from cupyconv.gpu import bindings


class Overlapping:
    """A CuPy function, launched with programmatic stream serialization on CuPy's current stream.

    Attributes:
        ptr: the driver's handle of the function.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # this reference keeps the module of the function loaded
        self.ptr: int = kernel.ptr

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared_mem: int,
    ) -> None:
        """Launch the kernel.

        Args:
            grid, block: extents of the grid and of a thread block.
            arguments: arguments of the kernel: CuPy arrays, non-negative NumPy integers, or NumPy
                arrays of one element, which are structs passed by value.
            shared_mem: dynamic shared memory in bytes.

        Raises:
            cupy.cuda.driver.CUDADriverError: the driver refuses the launch.
        """
        cuda = arrays.cupy().cuda
        kind = _words(len(arguments))
        values, places = kind(), kind()
        first = ctypes.addressof(values)
        for number, argument in enumerate(arguments):
            places[number] = first + 8 * number
            if isinstance(argument, np.ndarray):
                places[number] = argument.ctypes.data
            elif isinstance(argument, np.generic):
                # The 8 bytes are little-endian, so a narrower integer is in the first bytes.
                values[number] = int(argument)
            else:
                values[number] = argument.data.ptr
        config = _config(grid, block, shared_mem, cuda.get_current_stream().ptr)
        (status,) = bindings.driver().cuLaunchKernelEx(
            config, self.ptr, ctypes.addressof(places), 0
        )
        if status:
            raise cuda.driver.CUDADriverError(int(status))


@cache
def _words(count: int) -> type[ctypes.Array[ctypes.c_uint64]]:
    return ctypes.c_uint64 * count


@lru_cache(maxsize=1024)
def _config(grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, stream: int) -> Any:
    """Return a launch configuration; threads share the cached object, which is never modified."""
    driver = bindings.driver()
    serialization = driver.CUlaunchAttribute()
    serialization.id = (
        driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    )
    allowed = driver.CUlaunchAttributeValue()
    allowed.programmaticStreamSerializationAllowed = 1
    serialization.value = allowed
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [serialization], 1
    return config
