"""Allocation of memory and loading of kernels while the current stream captures a CUDA graph.

The graph runs captured work long after the call that captured it has returned.  Therefore the graph
owns the memory that the call allocates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cupyconv import arrays
from cupyconv.errors import DeviceError
from cupyconv.gpu import driver


def is_active() -> bool:
    """Return whether the current stream captures a graph."""
    cuda = arrays.cupy().cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))


class LastingAllocator:
    """CuPy allocator that gets memory from another library, which keeps it as long as the graph.

    An example is PyTorch's allocator, which has a memory pool for each graph.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        """
        Args:
            allocate: function that takes a number of bytes and returns an owner of that memory on
                the current device, such as a tensor; the owner's ``data_ptr()`` is the address.
        """
        self._allocate = allocate

    def __call__(self, size: int) -> Any:
        """Allocate ``size`` bytes and return them as CuPy's MemoryPointer."""
        cuda, owner = arrays.cupy().cuda, self._allocate(size)
        device = cuda.runtime.getDevice()
        return cuda.MemoryPointer(cuda.UnownedMemory(owner.data_ptr(), size, owner, device), 0)


def allocate(size: int, cuda: Any) -> Any:
    """Allocate memory for the current stream and return it as CuPy's MemoryPointer.

    CuPy's allocator is used outside a capture, and also during a capture if it is a
    LastingAllocator.  Otherwise allocation and release become nodes of the graph, and the host must
    release the memory before the capture ends.

    Args:
        size: number of bytes.
        cuda: module ``cupy.cuda``.

    Raises:
        DeviceError: the stream captures, and the device has no memory pools for graphs.
    """
    allocator, runtime = cuda.get_allocator(), cuda.runtime
    if type(allocator) is LastingAllocator or not runtime.streamIsCapturing(
        cuda.get_current_stream().ptr
    ):
        return allocator(size)
    device = runtime.getDevice()
    if not runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryPoolsSupported, device):
        raise DeviceError(
            "a captured call needs memory that the graph owns: device "
            f"{device} has no memory pools (cudaDevAttrMemoryPoolsSupported is 0). "
            "Set cupyconv.workspace_limit = 0 to plan kernels without a workspace"
        )
    return cuda.malloc_async(size)


@contextmanager
def relaxed() -> Iterator[None]:
    """Allow this thread to load kernels while a stream captures, in any capture mode.

    Loading kernels adds nothing to the graph.  Work on a capturing stream is still recorded.
    """
    exchange = driver.function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)
    mode = ctypes.c_int(driver.RELAXED)
    exchange(ctypes.addressof(mode))  # the call replaces the mode by the previous one
    try:
        yield
    finally:
        exchange(ctypes.addressof(mode))
