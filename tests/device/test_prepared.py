"""Prepared filters: calls no longer arrange them, and results do not change."""

from __future__ import annotations

import gc
import re
import weakref
from math import prod

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

import cupyconv
from cupyconv import ConvProblem, arrays, measuring
from cupyconv.errors import ConvError, ConvTypeError
from cupyconv.gpu.runtime import CupyRuntime
from tests.configurations import HOPPER_CASES, in_formats, random_data
from tests.device import machine
from tests.device.test_memory import POOLS, require_recovers
from tests.device.test_order import ORDERS, in_disorder
from tests.operations.test_host_cost import entered

BY_NAME = {case.name: case.problem for case in HOPPER_CASES}
CASES = {
    "channels first": ("phases_of_one_two_and_four_taps", "NCHW", "float16", "ieee", "cuda-hopper"),
    "gathered": ("one_tile", "NCHW", "float16", "ieee", "cuda-gather"),
    "planes": ("one_tile", "NHWC", "float32", "bf16x6", "cuda-hopper-bf16x6"),
    "tf32": ("few_channels", "NCHW", "float32", "tf32", "cuda-hopper"),
}
"""Problem, data format, dtype, precision and implementation of each case."""

COPYING = {"conv_arrange", "conv_planes"}


def reads(arguments, array):
    """Return whether the array's address is an argument of a launch."""
    return any(isinstance(one, np.uint64) and int(one) == array.data.ptr for one in arguments)


def layer(case):
    """Return a case's problem, operands on the device and call options."""
    name, data_format, dtype, precision, impl = CASES[case]
    filters = "OIHW" if data_format == "NCHW" else "OHWI"
    problem = in_formats(BY_NAME[name], data_format, filters).replace(dtype=dtype)
    data = random_data(problem)
    how = {"precision": precision, "impl": impl}
    return problem, *map(cupy.asarray, (data.x, data.w, data.dy, data.bias)), how


@pytest.mark.parametrize("case", CASES)
def test_prepared_filter_gives_same_bits(case, launched):
    problem, x, w, dy, bias, how = layer(case)
    rules = {**problem.keywords, **how}

    def calls(w):
        yield "forward", cupyconv.conv_forward(x, w, bias, activation="relu", **rules)
        yield "backprop_input", cupyconv.conv_backprop_input(x.shape, w, dy, **rules)
        yield "transpose", cupyconv.conv_transpose(dy, w, output_shape=x.shape, **rules)

    def runs(w):
        for name, result in calls(w):
            yield name, result, list(launched)
            launched.clear()

    before = list(runs(w))
    prepared = cupyconv.prepare(w, problem, **how)
    arranged = [item.entry for item, _ in launched]
    assert arranged == ["conv_planes" if case == "planes" else "conv_arrange"] * len(arranged)
    assert len(arranged) == len(prepared.forms) >= 1
    launched.clear()
    for (name, expected, old), (_, result, new) in zip(before, runs(prepared), strict=True):
        assert (result.view("u1") == expected.view("u1")).all(), name
        arranging = [item.entry for item, arguments in old if reads(arguments, w)]
        assert arranging == arranged[:1], name
        assert not any(reads(arguments, w) for _, arguments in new), name
        products = [
            [(item.entry, item.defines) for item, _ in run if item.entry not in COPYING]
            for run in (old, new)
        ]
        assert products[0] == products[1], name


def computed_layer():
    """Return a layer whose filter is arranged, with its forward result; no work is pending."""
    problem, x, w, _, _, how = layer("channels first")
    rules = {**problem.keywords, **how}
    expected = cupy.asnumpy(cupyconv.conv_forward(x, w, **rules))
    cupy.cuda.get_current_stream().synchronize()
    return problem, x, w, how, rules, expected


@pytest.mark.parametrize("order", ORDERS)
def test_prepared_filter_on_another_stream(order):
    problem, x, w, how, rules, expected = computed_layer()
    with in_disorder(order) as stream:
        prepared = cupyconv.prepare(w, problem, passes="forward", **how)
        other = cupy.cuda.Stream(non_blocking=True)
        other.wait_event(stream.record())
        with other:
            got = cupy.asnumpy(cupyconv.conv_forward(x, prepared, **rules), stream=other)
        assert (got == expected).all()


@pytest.mark.parametrize("order", ["", "late"])
@pytest.mark.parametrize("pool", POOLS)
def test_prepared_filter_in_every_pool(pool, order, allocator):
    """A dropped filter keeps its memory until the kernels have read it."""
    problem, x, w, dy, _, how = layer("channels first")
    rules = {**problem.keywords, **how}
    expected = cupyconv.conv_backprop_input(x.shape, w, dy, **rules)
    allocator(POOLS[pool]())
    with machine.order(machine.named(order)):
        results = [
            cupyconv.conv_backprop_input(x.shape, cupyconv.prepare(w, problem, **how), dy, **rules)
            for _ in range(2)
        ]
        assert all((cupy.asnumpy(result) == cupy.asnumpy(expected)).all() for result in results)


@pytest.mark.parametrize("case", CASES)
def test_prepare_recovers_from_exhausted_memory(case):
    problem, x, w, _, _, how = layer(case)
    rules = {**problem.keywords, **how}
    prepared = cupyconv.prepare(w, problem, **how)
    for name, form in prepared.forms.items():

        def call(name=name):
            return cupyconv.prepare(w, problem, **how).forms[name].view("u1")

        assert require_recovers(call, cupy.asnumpy(form).view("u1"), name) == len(prepared.forms)

    def forward(w):
        return lambda: cupyconv.conv_forward(x, w, **rules).view("u1")

    exact = cupy.asnumpy(forward(w)())
    counts = [require_recovers(forward(item), exact, "forward") for item in (w, prepared)]
    # No workspace is allocated if it only held the arranged filter.
    assert counts[0] >= counts[1] >= 1


def test_captured_call_arranges_nothing():
    problem, x, w, _, _, how = layer("channels first")
    rules = {**problem.keywords, **how}
    prepared = cupyconv.prepare(w, problem, passes="forward", **how)
    expected = cupy.asnumpy(cupyconv.conv_forward(x, prepared, **rules))
    out = cupy.empty_like(expected)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        cupyconv.conv_forward(x, prepared, out=out, **rules)
        graph = stream.end_capture()
        w.fill(0)  # the graph does not read it
        graph.launch(stream)
        stream.synchronize()
    assert (cupy.asnumpy(out) == expected).all()


def test_prepared_filter_is_refused_on_other_device(launched):
    problem, _, w, _, _, how = layer("channels first")
    prepared = cupyconv.prepare(w, problem, **how)
    launched.clear()
    assert repr(prepared).startswith(f"PreparedFilter({'x'.join(map(str, w.shape))} OIHW float16")
    assert runtime.getDeviceCount() == 2
    with cupy.cuda.Device(1):
        x = cupy.zeros(problem.input_shape, "float16")
        with pytest.raises(ConvTypeError, match="w is on device 0, the current device is 1"):
            cupyconv.conv_forward(x, prepared, **problem.keywords)
        with pytest.raises(ConvTypeError, match="w is on device 0, the current device is 1"):
            cupyconv.prepare(w, problem)
        assert launched == []
        other = cupyconv.prepare(cupy.asarray(cupy.asnumpy(w)), problem)
        # The kernels of both devices read w in the same format.
        assert list(other.forms) == list(prepared.forms) == ["OHWI"]
        assert other.forms["OHWI"].tobytes() == prepared.forms["OHWI"].tobytes()
        cupyconv.conv_forward(x, other, **problem.keywords)
    moved = cupyconv.PreparedFilter(
        w, prepared.forms, problem, other.device, prepared.passes, prepared.precision
    )
    with pytest.raises(ConvError, match=r"prepared on emulated sm_80 \(sm_80\), the call is on"):
        cupyconv.conv_forward(cupy.zeros(problem.input_shape, "float16"), moved, **problem.keywords)


# -- launches with empty kernels -------------------------------------------------------------------

LAYER = ConvProblem((32, 256, 28, 28), (256, 256, 3, 3), padding=1, dtype="float16")
"""A layer that the planner computes with cuda-hopper."""
LAST = in_formats(LAYER, "NHWC", "OHWI")


def array(shape, dtype="float16"):
    return cupy.empty(shape, arrays.numpy_dtype(dtype))


class Calls:
    """The passes of a layer that read its filter, on uninitialized arrays."""

    def __init__(self, problem, precision="ieee", impl="auto"):
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        self.x, self.w, self.y = (array(shape, problem.dtype) for shape in shapes)
        self.problem, self.words = problem, {"precision": precision, "impl": impl}
        self.how = {**problem.keywords, **self.words}

    def prepare(self, **more):
        return cupyconv.prepare(self.w, self.problem, **self.words, **more)

    def forward(self, w):
        return cupyconv.conv_forward(self.x, w, **self.how)

    def backprop_input(self, w):
        return cupyconv.conv_backprop_input(self.x.shape, w, self.y, **self.how)


def test_workspace_excludes_prepared_forms(empty_kernels, monkeypatch):
    calls = Calls(in_formats(LAYER, "NHWC", "OIHW"))
    sizes, scratch = [], CupyRuntime.scratch
    monkeypatch.setattr(
        CupyRuntime,
        "scratch",
        lambda self, size: (sizes.append(size), scratch(self, size))[1],
    )
    calls.forward(calls.w)
    assert sizes == [calls.w.nbytes]
    prepared = calls.prepare()
    sizes.clear()
    calls.forward(prepared)
    assert not sizes


def test_repeated_call_enters_few_functions(empty_kernels):
    calls = Calls(LAYER)
    prepared = calls.prepare()
    plain = len(entered(lambda: calls.forward(calls.w), before=2))
    assert len(entered(lambda: calls.forward(prepared), before=2)) <= plain + 3


def test_unarranged_filter_has_no_forms(empty_kernels):
    for dtype in ("float16", "float64", "complex64"):
        calls = Calls(LAYER.replace(dtype=dtype), impl="cuda-generic")
        prepared = calls.prepare()
        assert prepared.forms == {}
        assert prepared.nbytes == 0
        assert prepared.array is calls.w
        assert repr(prepared).endswith("for forward and backprop_input: not copied)")
        calls.forward(prepared)
        calls.backprop_input(prepared)


def test_functions_accept_prepared_filter(empty_kernels, launched):
    calls = Calls(LAYER)
    prepared = calls.prepare()
    x, y, rules = calls.x, calls.y, LAYER.keywords
    launched.clear()
    cupyconv.conv_transpose(y, prepared, output_shape=x.shape, activation="relu", **rules)
    grads = cupyconv.conv_backward(x, prepared, y, **rules)
    assert grads.dw.shape == LAYER.filter_shape
    cupyconv.onnx.conv(x, prepared, pads=[1, 1, 1, 1])
    cupyconv.onnx.conv_transpose(y, prepared, pads=[1, 1, 1, 1])
    layout = {"auto_tune": False, "tensor_core": "auto"}
    cupyconv.cudnn.convolution_forward(x, prepared, None, y, (1, 1), (1, 1), (1, 1), 1, **layout)
    plan = cupyconv.plan(LAYER)
    cupyconv.conv_forward(x, prepared, impl=plan, **rules)
    cupyconv.conv_forward(x, cupyconv.prepare(calls.w, LAYER, impl=plan), **rules)
    arranging = [arguments for _, arguments in launched if reads(arguments, calls.w)]
    assert len(arranging) == 1, "by the second prepare"


def test_prepared_filter_takes_other_input_sizes(empty_kernels, launched):
    """A kernel that needs another form arranges the filter as usual."""
    prepared = Calls(LAYER).prepare()
    for shape in ((1, 256, 28, 28), (3, 256, 9, 20)):
        for padding in (((1, 1), (1, 1)), "same"):  # two spellings of the same padding
            launched.clear()
            cupyconv.conv_forward(array(shape), prepared, padding=padding)
            assert launched
    planes = LAST.replace(dtype="float32")
    calls = Calls(planes, "bf16x6", "cuda-hopper-bf16x6")
    partial = calls.prepare(passes="forward")
    assert list(partial.forms)
    buffer = array((prod(planes.input_shape) + 1,), "float32")
    misaligned = buffer[1:].reshape(planes.input_shape)
    launched.clear()
    cupyconv.conv_forward(misaligned, partial, **calls.how)
    assert [item.entry for item, _ in launched] == ["conv_planes", "conv_hopper"]


def test_measuring_accepts_prepared_filter(empty_kernels, launched, monkeypatch):
    monkeypatch.setattr(
        measuring, "timed", lambda call, *_: (call(), measuring.Timed(1e-3, 1e-5))[1]
    )
    monkeypatch.setattr(cupyconv, "benchmark", True)
    calls = Calls(LAYER, impl="auto")
    prepared = cupyconv.prepare(calls.w, LAYER, impl="cuda-hopper")
    launched.clear()
    calls.forward(prepared)
    entries = [(item.entry, reads(arguments, calls.w)) for item, arguments in launched]
    assert {"conv_hopper", "conv_arrange"} <= {entry for entry, _ in entries}
    assert ("conv_arrange", True) not in entries


# -- representation and errors ---------------------------------------------------------------------


def test_prepared_filter_repr(empty_kernels):
    calls = Calls(LAYER)
    assert repr(calls.prepare(passes=["forward"])) == (
        "PreparedFilter(256x256x3x3 OIHW float16 on emulated sm_90 (sm_90a), for forward: "
        "copied as OHWI, 1.1 MiB)"
    )
    prepared = calls.prepare()
    assert (prepared.shape, prepared.dtype, prepared.ndim) == ((256, 256, 3, 3), "float16", 4)


REFUSED = {
    "stride": (lambda calls: {"stride": 2}, "with stride (1, 1), the call has stride (2, 2)"),
    "padding": (lambda calls: {"padding": "valid"}, "the call has padding valid"),
    "precision": (lambda calls: {"precision": "tf32"}, "with precision 'ieee', the call has"),
    "dtype": (lambda calls: {"x": array(calls.x.shape, "float32")}, "x is float32, w is float16"),
    "NumPy": (lambda calls: {"x": np.ones(calls.x.shape, "float16")}, "x is a NumPy array, w is a"),
    # The shape of an array can change in place; the forms belong to the original shape.
    "shape": (
        lambda calls: setattr(calls.w, "shape", (256, 256, 9, 1)) or {},
        "the call has filter_",
    ),
}
"""Change of a call, and its error."""


@pytest.mark.parametrize("case", REFUSED)
def test_prepared_filter_is_refused_in_another_layer(empty_kernels, launched, case):
    calls, (change, message) = Calls(LAYER), REFUSED[case]
    prepared = calls.prepare()
    launched.clear()
    with pytest.raises((ConvError, ConvTypeError), match=re.escape(message)):
        cupyconv.conv_forward(w=prepared, **{"x": calls.x, "padding": 1, **change(calls)})
    assert launched == []


def test_prepared_filter_is_refused_in_another_pass(empty_kernels):
    calls = Calls(LAYER)
    prepared = calls.prepare(passes="forward")
    message = "the filter was prepared for forward, the call is backprop_input"
    with pytest.raises(ConvError, match=message):
        calls.backprop_input(prepared)
    with pytest.raises(ConvError, match=message):
        cupyconv.conv_transpose(calls.y, prepared, output_shape=calls.x.shape, **calls.how)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passes": "backprop_filter"}, "unknown pass that reads a filter: 'backprop_filter'"),
        ({"precision": "fp8"}, "unknown precision: 'fp8'"),
        ({"impl": "cuda-patch"}, "the implementation must support the problem"),
        (
            {"problem": LAYER.replace(dtype="bfloat16")},
            "the problem's filter is 256x256x3x3 bfloat16",
        ),
        ({"problem": in_formats(LAYER, "NHWC", "OHWI")}, "w is 256x256x3x3 float16, the problem's"),
    ],
    ids=["pass", "precision", "implementation", "dtype", "formats"],
)
def test_prepare_rejects_invalid_arguments(empty_kernels, launched, change, message):
    w = array(LAYER.filter_shape)
    with pytest.raises(ConvError) as error:
        cupyconv.prepare(w, **{"problem": LAYER, **change})
    assert message in str(error.value)
    assert launched == []


def test_raw_ops_rejects_prepared_filter(empty_kernels):
    prepared = Calls(LAYER).prepare()
    with pytest.raises(ConvTypeError, match=r"pass filter\.array here"):
        cupyconv.raw_ops.Conv2D(
            input=array((1, 8, 8, 256)), filter=prepared, strides=[1] * 4, padding="SAME"
        )


def test_calls_do_not_keep_prepared_filter(empty_kernels):
    """Prepared calls are cached but hold no arrays."""
    calls = Calls(LAYER)
    prepared = calls.prepare()
    calls.forward(prepared)
    reference = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert reference() is None
