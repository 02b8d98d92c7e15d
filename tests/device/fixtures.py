"""What every test on the emulated devices begins and ends with, and what some look at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cupyconv import arrays, backends, operations
from cupyconv.gpu import compiler, launch, tensormaps
from cupyconv.gpu.sources import KernelSource
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
def nothing_loaded() -> Iterator[None]:
    """Calls are worked out and kernels loaded anew, and so are the next test's."""

    def forget() -> None:
        for cached in (
            operations._ready,
            operations._ready_bias,
            backends._gpu,
            tensormaps.encoded,
        ):
            cached.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def empty_kernels(own_cache: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do nothing, and take no time to compile: all that is around them is as it is."""
    monkeypatch.setattr(
        compiler, "compile_cubin", lambda source, _, architecture: _empty(source, architecture)
    )


_KERNEL = re.compile(r'extern "C" __global__[^;{]*?\b(conv_\w+)\(')
_compile_cubin = compiler.compile_cubin


@cache
def _empty(source: KernelSource, architecture: str) -> tuple[bytes, str]:
    """The cubin of a file's kernels without parameters and bodies, and the compiler's log."""
    names = dict.fromkeys(_KERNEL.findall(source.text))
    text = "\n".join(f'extern "C" __global__ void {name}() {{}}' for name in names)
    return _compile_cubin(KernelSource(source.name, text, ()), {}, architecture)


def before_each_launch(
    patch: pytest.MonkeyPatch, do: Callable[[launch.Launch, tuple[Any, ...]], None]
) -> None:
    """Has something done before each launch, which is not made if that raises.

    Args:
        patch: undoes it.
        do: is given the launch and its arguments.
    """
    kernel = launch.CupyRuntime.kernel

    def watched(self: launch.CupyRuntime, one: launch.Launch) -> Any:
        loaded = kernel(self, one)

        class Kernel:
            ptr = loaded.ptr

            def __call__(self, grid, block, arguments, shared_mem):
                do(one, arguments)
                loaded(grid, block, arguments, shared_mem=shared_mem)

        return Kernel()

    patch.setattr(launch.CupyRuntime, "kernel", watched)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[launch.Launch, tuple]]]:
    """What is launched, with its arguments."""
    found: list[tuple[launch.Launch, tuple]] = []
    before_each_launch(monkeypatch, lambda one, arguments: found.append((one, arguments)))
    operations._ready.cache_clear()
    yield found
    operations._ready.cache_clear()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The roles and addresses of tensors whose maps are encoded."""
    found: list[tuple[str, int]] = []
    encode = tensormaps.encode

    def watched(one: tensormaps.TensorMap, address: int) -> bytes:
        found.append((one.role, address))
        return encode(one, address)

    monkeypatch.setattr(launch.CupyRuntime, "encode", staticmethod(watched))
    return found
