"""On the emulated devices: what was compiled ahead is all that calls load."""

from __future__ import annotations

import threading
from itertools import product

import cupy
import pytest

import cupyconv
from cupyconv import ConvProblem, arrays, backends, operations, warming
from cupyconv.gpu import compiler, launch
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES
from tests.agreement import require_equal
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device import machine, memory
from tests.device.test_order import calls, split_layer

PATIENCE = 60
"""Seconds after which a thread that waits for others has waited in vain."""


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


# -- what calls load -------------------------------------------------------------------------------

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
    """The variants that calls load."""
    found, load = set(), launch.CupyRuntime.load

    def watched(self, launches):
        found.update(launch.variant_of(one, self.architecture) for one in launches)
        load(self, launches)

    monkeypatch.setattr(launch.CupyRuntime, "load", watched)
    return found


def lying(shape, strides, dtype):
    """An array that lies in memory with these strides, of elements."""
    whole = cupy.empty(shape, arrays.numpy_dtype(dtype))
    return cupy.ndarray(shape, whole.dtype, whole.data, [step * whole.itemsize for step in strides])


def call(problem, strides, operation, **more):
    """An operation on tensors that all lie in memory in this way."""
    x, w, y = (
        lying(shape, steps, problem.dtype)
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
    found = warming.Ahead(backends.current_device(), precision=precision)
    found.add(problem, **more)
    return set(found._uses)


@pytest.mark.parametrize("layout", [None, *warming.LAYOUTS])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_what_calls_load_is_compiled(loaded, ordinal, layout):
    with cupy.cuda.Device(ordinal):
        for (name, layer), (dtype, precision) in product(LAYERS.items(), NUMBERS):
            problem = layer.replace(dtype=dtype)
            strides = Strides.of(problem, layout) if layout else Strides.contiguous(problem)
            loaded.clear()
            for pass_ in PASSES:
                call(problem, strides, pass_, precision=precision)
            operations._ready_bias.cache_clear()  # which knows no precisions
            call(problem, strides, "bias")
            assert len(loaded) >= 3
            assert loaded == ahead_of(problem, precision, layout=layout), (name, dtype, precision)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_what_calls_in_other_formats_load_is_compiled(loaded, ordinal):
    problem = in_formats(LAYER, "NHWC", "HWIO").replace(dtype="bfloat16")
    with cupy.cuda.Device(ordinal):
        for operation in (*PASSES, "bias"):
            call(problem, Strides.contiguous(problem), operation)
        assert loaded == ahead_of(problem)
        assert loaded == ahead_of(problem, passes=iter(PASSES))


def test_what_a_transposed_layer_loads_is_compiled(loaded):
    problem = LAYER.replace(dtype="float16")
    call(problem, Strides.contiguous(problem), "transpose", activation="relu")
    words = {"transposed": True, "activation": "relu"}
    assert loaded == ahead_of(problem, passes="forward", **words)
    for operation in ("forward", "backprop_filter", "bias of transposed"):
        call(problem, Strides.contiguous(problem), operation)
    assert loaded == ahead_of(problem, **words)
