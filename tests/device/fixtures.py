"""What every test on the emulated devices begins and ends with, and what some look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cupyconv import arrays, operations
from cupyconv.gpu import launch
from tests.device import machine


@pytest.fixture(autouse=True)
def working_devices(collected_between_tests: None) -> Iterator[None]:
    """Devices that work, whatever the test before did; one that fails in a test fails it.

    A test that means a device to fail calls ``machine.revive`` itself.
    """
    machine.revive()
    yield
    found = machine.revive()
    assert not found, "\n".join(found)


@pytest.fixture
def allocator() -> Iterator[Callable[..., None]]:
    """Sets CuPy's allocator, until the test ends."""
    cupy = arrays.cupy()
    yield cupy.cuda.set_allocator
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[launch.Launch, tuple]]]:
    """What is launched, with its arguments."""
    found: list[tuple[launch.Launch, tuple]] = []
    kernel = launch.CupyRuntime.kernel

    def watched(self: launch.CupyRuntime, one: launch.Launch) -> Any:
        loaded = kernel(self, one)

        class Kernel:
            ptr = loaded.ptr

            def __call__(self, grid, block, arguments, shared_mem):
                found.append((one, arguments))
                loaded(grid, block, arguments, shared_mem=shared_mem)

        return Kernel()

    monkeypatch.setattr(launch.CupyRuntime, "kernel", watched)
    operations._ready.cache_clear()
    yield found
    operations._ready.cache_clear()
