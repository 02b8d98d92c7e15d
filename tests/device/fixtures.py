"""Fixtures of the tests on the emulated devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cupyconv import arrays, backends, calls
from cupyconv.gpu import compiler, runtime, tensormaps
from cupyconv.gpu.sources import KernelSource
from cupyconv.launch import Launch
from tests.device import graphs, machine
from tests.parameters import decoded


@pytest.fixture(autouse=True)
def working_devices(collected_between_tests: None) -> Iterator[None]:
    """Revive both devices before each test, and fail a test in which a device failed.

    A test that makes a device fail on purpose calls ``machine.revive`` itself.
    """
    machine.revive()
    yield
    graphs.end_captures()
    faults = machine.revive()
    assert not faults, "\n".join(faults)


@pytest.fixture
def allocator() -> Iterator[Callable[..., None]]:
    """Yield a function that sets CuPy's allocator for one test."""
    cupy = arrays.cupy()
    yield cupy.cuda.set_allocator
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    """Clear the caches of prepared calls and loaded kernels before and after the test."""

    def forget() -> None:
        calls.forget()
        backends._gpu.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def empty_kernels(own_cache: Path, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the shipped kernels by empty ones; all host code stays unchanged."""
    monkeypatch.setattr(
        compiler, "compile_cubin", lambda source, _, architecture: empty_cubin(source, architecture)
    )


_KERNEL = re.compile(r'extern "C" __global__[^;{]*?\b(conv_\w+)\(')
_compile_cubin = compiler.compile_cubin


@cache
def empty_cubin(source: KernelSource, architecture: str) -> tuple[bytes, str]:
    """Compile a file's kernels without parameters and bodies; return cubin and compiler log."""
    names = dict.fromkeys(_KERNEL.findall(source.text))
    text = "\n".join(f'extern "C" __global__ void {name}() {{}}' for name in names)
    return _compile_cubin(KernelSource(source.name, text, ()), {}, architecture)


def before_each_launch(
    patch: pytest.MonkeyPatch, do: Callable[[Launch, tuple[Any, ...]], None]
) -> None:
    """Call a function before each launch; if it raises, the launch does not happen.

    Args:
        patch: undoes the change after the test.
        do: called with the launch and its arguments.
    """
    launcher = runtime.CupyRuntime.launcher

    def watched(self: runtime.CupyRuntime, one: Launch) -> tuple[Callable[..., Any], Any]:
        launch, config = launcher(self, one)

        def run(*arguments: int) -> Any:
            do(one, decoded(one, arguments[-2]))
            return launch(*arguments)

        return run, config

    patch.setattr(runtime.CupyRuntime, "launcher", watched)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Launch, tuple]]]:
    """Return the list of launches and their arguments, filled as they happen."""
    launches: list[tuple[Launch, tuple]] = []
    before_each_launch(monkeypatch, lambda one, arguments: launches.append((one, arguments)))
    calls.forget()
    yield launches
    calls.forget()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the list of roles and addresses of tensors whose maps are encoded."""
    tensors: list[tuple[str, int]] = []
    encoder = tensormaps.encoder

    def recording_encoder(tensor_map: tensormaps.TensorMap) -> tensormaps.Encoder:
        encode = encoder(tensor_map)

        def record(address: int, destination: int) -> None:
            tensors.append((tensor_map.role, address))
            encode(address, destination)

        return record

    monkeypatch.setattr(runtime.CupyRuntime, "encoder", staticmethod(recording_encoder))
    return tensors
