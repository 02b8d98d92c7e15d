"""Ahead-of-time compilation on the emulated devices: calls load only warmed kernels."""

from __future__ import annotations

import threading
from itertools import product

import cupy
import pytest

import cupyconv
from cupyconv import ConvProblem, arrays, backends, warming
from cupyconv.calls import forget
from cupyconv.cpu import threads
from cupyconv.gpu import compiler, runtime
from cupyconv.kernels.strides import Strides
from cupyconv.problem import PASSES
from tests.agreement import require_equal
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device import machine, memory
from tests.device.test_order import calls, split_layer

PATIENCE = 60
"""Seconds that a thread waits for others before the test fails (hand-set)."""


def test_warmed_calls_compile_nothing(own_cache, nothing_loaded, monkeypatch):
    problem = split_layer()
    warmed = cupyconv.warm(problem)
    assert warmed.device == backends.current_device()
    assert len(warmed.compiled) == len(warmed.kernels) == len(list(own_cache.glob("*.cubin")))
    monkeypatch.setattr(compiler, "compile_cubin", None)
    for name, (call, exact) in calls(problem, integer_data(problem)).items():
        require_equal(cupy.asnumpy(call()), exact, name)


def test_warm_compiles_for_current_device(own_cache, nothing_loaded, monkeypatch):
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


def test_warm_uses_no_memory_or_stream(own_cache, nothing_loaded):
    """``warm`` allocates, submits and waits for nothing, so it may run during a capture."""
    x = cupy.zeros(4, "float32")
    with (
        machine.order(machine.Late()),
        memory.allocations_left(0),
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        x += 1
        work = list(machine.pending)
        assert work
        cupyconv.warm(split_layer(), passes="forward")
        assert list(machine.pending) == work
        stream.begin_capture()
        cupyconv.warm(split_layer(), passes="backprop_filter")
        graph = stream.end_capture()
        graph.launch(stream)
        assert cupy.asnumpy(x, stream=stream).tolist() == [1] * 4


def test_call_compiles_its_kernels_in_parallel(own_cache, nothing_loaded, monkeypatch):
    """The call needs a channels-last product and kernels that arrange tensors around it."""
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")
    barrier, compile_one = threading.Barrier(2), compiler.compile_cubin

    def compile_cubin(*inputs):
        barrier.wait(PATIENCE)
        return compile_one(*inputs)

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(threads, "cores", lambda: 2)
    data = integer_data(problem)
    arguments = {**problem.keywords, "impl": "cuda-hopper"}
    result = cupyconv.conv_forward(cupy.asarray(data.x), cupy.asarray(data.w), **arguments)
    exact = cupyconv.conv_forward(data.x, data.w, **problem.keywords, impl="reference")
    require_equal(cupy.asnumpy(result), exact, "forward")
    assert {path.name.split("-")[0] for path in own_cache.glob("*.cubin")} == {
        "conv_arrange",
        "conv_hopper",
    }


# -- variants that calls load ----------------------------------------------------------------------

LAYER = ConvProblem((4, 64, 14, 14), (128, 64, 3, 3), stride=2, padding=1)
LAYERS = {
    "first layer": ConvProblem((2, 3, 40, 40), (64, 3, 7, 7), stride=2, padding=3),
    "strided": LAYER,
    "pointwise": ConvProblem((4, 64, 14, 14), (256, 64, 1, 1)),
    "depthwise": ConvProblem((2, 64, 14, 14), (64, 1, 3, 3), padding=1, groups=64),
    "grouped": ConvProblem((2, 96, 9, 9), (96, 3, 3, 3), groups=32),
    "one axis": ConvProblem((2, 32, 50), (48, 32, 5)),
    "volumes": ConvProblem((1, 16, 6, 7, 8), (32, 16, 3, 3, 3)),
}
NUMBERS = (("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))


@pytest.fixture
def loaded(monkeypatch, empty_kernels):
    """Return the set of variants that calls load, filled as they load."""
    variants, load = set(), runtime.CupyRuntime.load

    def record(self, launches):
        variants.update(runtime.variant_of(item, self.target) for item in launches)
        load(self, launches)

    monkeypatch.setattr(runtime.CupyRuntime, "load", record)
    return variants


def strided(shape, strides, dtype):
    """Return an array with these strides, in elements."""
    whole = cupy.empty(shape, arrays.numpy_dtype(dtype))
    return cupy.ndarray(shape, whole.dtype, whole.data, [step * whole.itemsize for step in strides])


def call(problem, strides, operation, **more):
    """Run an operation on tensors with these strides."""
    x, w, y = (
        strided(shape, steps, problem.dtype)
        for shape, steps in (
            (problem.input_shape, strides.x),
            (problem.filter_shape, strides.w),
            (problem.output_shape, strides.y),
        )
    )
    rules = {**problem.keywords, **more}
    if operation == "forward":
        cupyconv.conv_forward(x, w, out=y, **rules)
    elif operation == "backprop_input":
        cupyconv.conv_backprop_input(x.shape, w, y, out=x, **rules)
    elif operation == "transpose":
        cupyconv.conv_transpose(y, w, output_shape=x.shape, out=x, **rules)
    elif operation == "bias":
        cupyconv.conv_backprop_bias(y, data_format=problem.data_format)
    elif operation == "bias of transposed":
        cupyconv.conv_backprop_bias(x, data_format=problem.data_format)
    else:
        cupyconv.conv_backprop_filter(x, w.shape, y, out=w, **rules)


def ahead_of(problem, precision="ieee", **more):
    ahead = warming.Ahead(backends.current_device(), precision=precision)
    ahead.add(problem, **more)
    return set(ahead._uses)


@pytest.mark.parametrize("layout", [None, *warming.LAYOUTS])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_warm_compiles_what_calls_load(loaded, ordinal, layout):
    with cupy.cuda.Device(ordinal):
        for (name, layer), (dtype, precision) in product(LAYERS.items(), NUMBERS):
            problem = layer.replace(dtype=dtype)
            strides = Strides.of(problem, layout) if layout else Strides.contiguous(problem)
            loaded.clear()
            for pass_ in PASSES:
                call(problem, strides, pass_, precision=precision)
            forget()  # the bias gradient has no precision
            call(problem, strides, "bias")
            assert len(loaded) >= 3
            assert loaded == ahead_of(problem, precision, layout=layout), (name, dtype, precision)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_warm_compiles_for_other_formats(loaded, ordinal):
    problem = in_formats(LAYER, "NHWC", "HWIO").replace(dtype="bfloat16")
    with cupy.cuda.Device(ordinal):
        for operation in (*PASSES, "bias"):
            call(problem, Strides.contiguous(problem), operation)
        assert loaded == ahead_of(problem)
        assert loaded == ahead_of(problem, passes=iter(PASSES))


def test_warm_compiles_for_transposed_layer(loaded):
    problem = LAYER.replace(dtype="float16")
    call(problem, Strides.contiguous(problem), "transpose", activation="relu")
    words = {"transposed": True, "activation": "relu"}
    assert loaded == ahead_of(problem, passes="forward", **words)
    for operation in ("forward", "backprop_filter", "bias of transposed"):
        call(problem, Strides.contiguous(problem), operation)
    assert loaded == ahead_of(problem, **words)
