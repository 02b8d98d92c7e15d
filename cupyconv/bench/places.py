"""Places that a benchmark runs on, the CPU or a GPU: their arrays, free memory and timers.

A sample times consecutive calls.  Before them, a sweep reads a large array to evict the operands
from the cache.  The module ``timing`` describes the method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from cupyconv import arrays, backends, measuring
from cupyconv.errors import require_word
from cupyconv.kernels.device import CPU, Device

DEVICES = ("cpu", "gpu")

PAUSE = 0.15  # s before another implementation is timed; idle BLAS threads spin for 0.1 s


class Place:
    """The CPU, with NumPy arrays; GpuPlace is the GPU.

    Attributes:
        xp: numpy or cupy.
        most_sets: largest number of operand sets; consecutive calls use different sets.
        sweep_bytes: size of the array that a sweep reads, larger than most caches (hand-set).
    """

    name = "cpu"
    xp: Any = np
    device: Device = CPU
    most_sets = 4
    sweep_bytes = 128 << 20

    def free_bytes(self) -> int:
        """Return the bytes of memory available to tensors; 4 GiB on a CPU if unknown."""
        return arrays.available_memory() or 4 << 30

    def release(self) -> None:
        """Free memory that is cached for later tensors; NumPy caches none."""

    def synchronize(self) -> None:
        """Wait until all calls have finished; a NumPy call has finished when it returns."""

    def settle(self) -> None:
        """Wait until the previous implementation no longer occupies the processor."""
        time.sleep(PAUSE)

    def seconds(self, call: Callable[[], Any], count: int, lead: float = 0.0) -> float:
        """Return the mean seconds per call of ``count`` consecutive calls.

        Args:
            lead: seconds that a GPU waits before the calls, while the host queues them.
        """
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    def sample(self, call: Callable[[], Any], count: int, lead: float = 0.0) -> float:
        """Sweep the cache, and return the mean seconds per call of ``count`` consecutive calls."""
        self.sweep()
        return self.seconds(call, count, lead)

    def sweep(self) -> None:
        """Evict the operands from the cache."""
        # Only read: dirty cache lines would be written back during the next call.
        scratch, total = self._scratch
        scratch.sum(out=total)

    @cached_property
    def _scratch(self) -> tuple[Any, Any]:
        return self.xp.ones(self.sweep_bytes // 4, "float32"), self.xp.empty((), "float32")

    @cached_property
    def sweep_seconds(self) -> float:
        """Seconds that one sweep takes."""
        self.sweep()  # the first sweep is slower: the system maps the pages, or CuPy compiles
        return max(self.seconds(self.sweep, 1), 1e-6)


class GpuPlace(Place):
    """The current GPU, with CuPy arrays, timed by CUDA events.

    Raises:
        DeviceError: there is no GPU.
    """

    name = "gpu"
    most_sets = 8
    sweep_bytes = 256 << 20

    def __init__(self) -> None:
        self.xp = arrays.require_gpu()
        self.device = backends.current_device()

    def free_bytes(self) -> int:
        self.release()
        return self.xp.cuda.runtime.memGetInfo()[0]

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def settle(self) -> None:
        self.synchronize()

    def seconds(self, call: Callable[[], Any], count: int, lead: float = 0.0) -> float:
        return measuring.timed(call, count, lead).device


def of(word: str | None) -> Place:
    """Return the place named "cpu" or "gpu"; None chooses the GPU if there is one.

    Raises:
        ConvError: the name is unknown.
        DeviceError: there is no GPU.
    """
    if word is None:
        word = "gpu" if arrays.device_count() else "cpu"
    require_word("device", word, DEVICES)
    return Place() if word == "cpu" else GpuPlace()
