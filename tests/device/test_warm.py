"""On the emulated devices: what was compiled ahead is all that calls load."""

from __future__ import annotations

import threading

import cupy
import pytest

import cupyconv
from cupyconv import backends, operations
from cupyconv.gpu import compiler
from tests.agreement import require_equal
from tests.configurations import HOPPER_CASES, integer_data
from tests.device import machine, memory
from tests.device.test_order import calls, split_layer

PATIENCE = 60
"""Seconds after which a thread that waits for others has waited in vain."""


@pytest.fixture
def nothing_loaded():
    """Kernels are loaded anew, and so are the next test's."""

    def forget():
        for cached in (operations._ready, operations._ready_bias, backends._gpu):
            cached.cache_clear()

    forget()
    yield
    forget()


def test_after_warming_nothing_is_compiled(own_cache, nothing_loaded, monkeypatch):
    problem = split_layer()
    warmed = cupyconv.warm(problem)
    assert warmed.device == backends.current_device()
    assert len(warmed.compiled) == len(warmed.kernels) == len(list(own_cache.glob("*.cubin")))
    monkeypatch.setattr(compiler, "compile_cubin", None)
    for name, (call, exact) in calls(problem, integer_data(problem)).items():
        require_equal(cupy.asnumpy(call()), exact, name)


def test_warming_is_for_the_current_device(own_cache, nothing_loaded, monkeypatch):
    problem, architectures = split_layer(), []
    for ordinal in (0, 1):
        with cupy.cuda.Device(ordinal):
            warmed = cupyconv.warm(problem)
            assert warmed.device == backends.current_device()
            assert len(warmed.compiled) == len(warmed.kernels)
            architectures.append(warmed.device.architecture)
    assert architectures == ["sm_90a", "sm_80"]
    monkeypatch.setattr(compiler, "compile_cubin", None)
    for ordinal in (0, 1):
        with cupy.cuda.Device(ordinal):
            for name, (call, exact) in calls(problem, integer_data(problem)).items():
                require_equal(cupy.asnumpy(call()), exact, name)


def test_warming_asks_nothing_of_the_device_but_what_it_is(own_cache, nothing_loaded):
    """No memory, no work, no waiting; so it may be done while a graph is captured."""
    x = cupy.zeros(4, "float32")
    with (
        machine.order(machine.Late()),
        memory.allocations_left(0),
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        x += 1
        given = list(machine.pending)
        assert given
        cupyconv.warm(split_layer(), passes="forward")
        assert list(machine.pending) == given
        stream.begin_capture()
        cupyconv.warm(split_layer(), passes="backprop_filter")
        graph = stream.end_capture()
        graph.launch(stream)
        assert cupy.asnumpy(x, stream=stream).tolist() == [1] * 4


def test_a_call_compiles_all_that_it_needs_side_by_side(own_cache, nothing_loaded, monkeypatch):
    """A product with channels last, and what arranges tensors around it."""
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")
    together, compile_one = threading.Barrier(2), compiler.compile_cubin

    def compile_cubin(*given):
        together.wait(PATIENCE)
        return compile_one(*given)

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compiler, "cores", lambda: 2)
    data = integer_data(problem)
    arguments = {**problem.keywords, "impl": "cuda-hopper"}
    got = cupyconv.conv_forward(cupy.asarray(data.x), cupy.asarray(data.w), **arguments)
    exact = cupyconv.conv_forward(data.x, data.w, **problem.keywords, impl="reference")
    require_equal(cupy.asnumpy(got), exact, "forward")
    assert {path.name.split("-")[0] for path in own_cache.glob("*.cubin")} == {
        "conv_arrange",
        "conv_hopper",
    }
