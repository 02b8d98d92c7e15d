"""Where a run takes place: the CPU or the current GPU, with its memory and its clock."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays, backends
from cupyconv.bench.timing import Clock, CpuClock, CudaClock, host_seconds
from cupyconv.errors import unknown_word
from cupyconv.gpu.parameters import CONV_PARAMETERS
from cupyconv.planning.device import CPU, Device

DEVICES = ("cpu", "gpu")

_LAUNCH_SECONDS = 0.1
_IDLE_KERNEL = """
struct Parameters { long long fields[%d]; };
extern "C" __global__ void idle(const void*, const void*, void*, const void*, Parameters) {}
"""
_FEWEST_SWEEP_BYTES = 256 << 20  # on a GPU: a sweep should hide what a call costs the host
_MOST_SWEEP_BYTES = 128 << 20  # on the CPU
_CACHE_BYTES = 32 << 20  # of a CPU that does not tell
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Place(Protocol):
    """What a run needs of the processor that it measures."""

    name: str
    xp: Any
    """numpy or cupy."""

    device: Device
    most_sets: int
    """Sets of operands to take turns with."""

    @property
    def clock(self) -> Clock: ...

    def synchronize(self) -> None:
        """Wait until everything that was called is done."""
        ...

    def free_bytes(self) -> int:
        """Memory that tensors can take."""
        ...

    def release(self) -> None:
        """Give back memory that is kept for later tensors."""
        ...

    def to_host(self, array: Any) -> np.ndarray:
        """The array in the host's memory."""
        ...


class CpuPlace:
    """NumPy arrays on the host's processor."""

    name = "cpu"
    xp: Any = np
    device = CPU
    most_sets = 4

    @cached_property
    def clock(self) -> Clock:
        return CpuClock(min(2 * last_level_cache_bytes(), _MOST_SWEEP_BYTES))

    def synchronize(self) -> None:
        """NumPy is done when it returns."""

    def free_bytes(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        with suppress(AttributeError, ValueError, OSError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return 4 << 30

    def release(self) -> None:
        """NumPy keeps none."""

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array


class GpuPlace:
    """CuPy arrays on the current GPU.

    Raises:
        DeviceError: there is none.
    """

    name = "gpu"
    most_sets = 8

    def __init__(self) -> None:
        self.xp: Any = arrays.require_gpu()
        self.device = backends.current_device()

    @cached_property
    def clock(self) -> Clock:
        runtime = self.xp.cuda.runtime
        cache_bytes = runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
        return CudaClock(self.xp, max(2 * cache_bytes, _FEWEST_SWEEP_BYTES))

    def launch_seconds(self) -> float:
        """Time that CuPy takes to make an array and launch a kernel, which every call has to.

        The kernel does nothing, and takes what a convolution's does.
        """
        struct = np.zeros(1, CONV_PARAMETERS)
        kernel = self.xp.RawModule(code=_IDLE_KERNEL % (struct.nbytes // 8)).get_function("idle")
        given, null = self.xp.empty((1,), "float16"), np.uint64(0)

        def call(_: int) -> None:
            result = self.xp.ndarray((1,), given.dtype)
            kernel((1,), (1,), (given, given, result, null, struct), shared_mem=0)

        return host_seconds(call, 1, self.clock, _LAUNCH_SECONDS)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def free_bytes(self) -> int:
        self.release()
        return self.xp.cuda.runtime.memGetInfo()[0]

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def to_host(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)


def of(word: str | None) -> Place:
    """The place that "cpu" or "gpu" stands for; None is the GPU if there is one.

    Raises:
        ConvError: it is neither.
        DeviceError: there is no GPU.
    """
    if word is None:
        word = "gpu" if arrays.device_count() else "cpu"
    if word not in DEVICES:
        raise unknown_word("device", word, DEVICES)
    return CpuPlace() if word == "cpu" else GpuPlace()


def last_level_cache_bytes() -> int:
    """Size of the CPU's largest cache; a guess where the system does not tell."""
    sizes = [_CACHE_BYTES // 1024]
    with suppress(OSError, ValueError):
        texts = [path.read_text().strip() for path in _CPU_CACHES.glob("index*/size")]
        sizes = [int(text.removesuffix("K")) for text in texts] or sizes
    return max(sizes) * 1024
