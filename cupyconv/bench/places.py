"""Places to run on: the CPU or the current GPU, with arrays, free memory and a clock."""

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
from cupyconv.kernels.device import CPU, Device
from cupyconv.kernels.parameters import parameters_type

DEVICES = ("cpu", "gpu")

_LAUNCH_SECONDS = 0.1  # s to spend on measuring the launch time
_IDLE_KERNEL = """
struct Parameters { long long fields[%d]; };
extern "C" __global__ void idle(const void*, const void*, void*, const void*, Parameters) {}
"""
_FEWEST_SWEEP_BYTES = 256 << 20  # on a GPU, so that a sweep hides the host time of a call
_MOST_SWEEP_BYTES = 128 << 20  # on a CPU
_CACHE_BYTES = 32 << 20  # assumed CPU cache if the system does not report one
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Place(Protocol):
    """Interface of the processor that runs a benchmark."""

    name: str
    xp: Any
    """numpy or cupy."""

    device: Device
    most_sets: int
    """Largest number of operand sets; consecutive calls use different sets."""

    @property
    def clock(self) -> Clock: ...

    def synchronize(self) -> None:
        """Wait until all calls have finished."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes of memory available to tensors."""
        ...

    def release(self) -> None:
        """Free memory that is cached for later tensors."""
        ...

    def put(self, array: np.ndarray) -> Any:
        """Return a NumPy array as an array of this place."""
        ...

    def get(self, array: Any) -> np.ndarray:
        """Return the array as a NumPy array."""
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
        """Do nothing: NumPy calls are synchronous."""

    def free_bytes(self) -> int:
        with suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        with suppress(AttributeError, ValueError, OSError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return 4 << 30

    def release(self) -> None:
        """Do nothing: NumPy caches no memory."""

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def get(self, array: np.ndarray) -> np.ndarray:
        return array


class GpuPlace:
    """CuPy arrays on the current GPU.

    Raises:
        DeviceError: there is no GPU.
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
        """Measure the host time for creating an array and launching a kernel, as in every call.

        The launched kernel has the parameters of a convolution kernel and does nothing.
        """
        struct = np.zeros(1, parameters_type())
        kernel = self.xp.RawModule(code=_IDLE_KERNEL % (struct.nbytes // 8)).get_function("idle")
        operand, null = self.xp.empty((1,), "float16"), np.uint64(0)

        def call(_: int) -> None:
            result = self.xp.ndarray((1,), operand.dtype)
            kernel((1,), (1,), (operand, operand, result, null, struct), shared_mem=0)

        return host_seconds(call, 1, self.clock, _LAUNCH_SECONDS)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def free_bytes(self) -> int:
        self.release()
        return self.xp.cuda.runtime.memGetInfo()[0]

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def put(self, array: np.ndarray) -> Any:
        return self.xp.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)


def of(word: str | None) -> Place:
    """Return the place named "cpu" or "gpu"; None chooses the GPU if there is one.

    Raises:
        ConvError: the name is unknown.
        DeviceError: there is no GPU.
    """
    if word is None:
        word = "gpu" if arrays.device_count() else "cpu"
    if word not in DEVICES:
        raise unknown_word("device", word, DEVICES)
    return CpuPlace() if word == "cpu" else GpuPlace()


def last_level_cache_bytes() -> int:
    """Return the size of the CPU's largest cache; _CACHE_BYTES if it is unknown."""
    sizes = [_CACHE_BYTES // 1024]
    with suppress(OSError, ValueError):
        texts = [path.read_text().strip() for path in _CPU_CACHES.glob("index*/size")]
        sizes = [int(text.removesuffix("K")) for text in texts] or sizes
    return max(sizes) * 1024
