"""Filters that are arranged once: their arranging is gone, and nothing else changes."""

from __future__ import annotations

import gc
import weakref
from math import prod

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

import cupyconv
from cupyconv import ConvProblem, arrays, backends, measuring
from cupyconv.errors import ConvError, ConvTypeError
from tests.configurations import HOPPER_CASES, in_formats, random_data
from tests.device import machine
from tests.device.test_memory import POOLS, require_recovers
from tests.device.test_order import ORDERS, in_disorder
from tests.test_host_cost import entered

BY_NAME = {case.name: case.problem for case in HOPPER_CASES}
CASES = {
    "channels first": ("phases_of_one_two_and_four_taps", "NCHW", "float16", "ieee", "cuda-hopper"),
    "gathered": ("one_tile", "NCHW", "float16", "ieee", "cuda-gather"),
    "planes": ("one_tile", "NHWC", "float32", "bf16x6", "cuda-hopper-bf16x6"),
    "tf32": ("few_channels", "NCHW", "float32", "tf32", "cuda-hopper"),
}
"""A problem, its format, dtype and precision, and the family that computes it."""

COPYING = {"conv_arrange", "conv_planes"}


def reads(arguments, array):
    """Whether an array itself is among a launch's arguments."""
    return any(one is array for one in arguments)


def layer(case):
    """The arrays of a layer, its rules, and how its passes are computed."""
    name, data_format, dtype, precision, impl = CASES[case]
    filters = "OIHW" if data_format == "NCHW" else "OHWI"
    problem = in_formats(BY_NAME[name], data_format, filters).replace(dtype=dtype)
    data = random_data(problem)
    how = {"precision": precision, "impl": impl}
    return problem, *map(cupy.asarray, (data.x, data.w, data.dy, data.bias)), how


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_without_arranging(case, launched):
    problem, x, w, dy, bias, how = layer(case)
    rules = {**problem.keywords, **how}

    def calls(w):
        yield "forward", cupyconv.conv_forward(x, w, bias, activation="relu", **rules)
        yield "backprop_input", cupyconv.conv_backprop_input(x.shape, w, dy, **rules)
        yield "transpose", cupyconv.conv_transpose(dy, w, output_shape=x.shape, **rules)

    def seen(w):
        for name, result in calls(w):
            yield name, result, list(launched)
            launched.clear()

    before = list(seen(w))
    prepared = cupyconv.prepare(w, problem, **how)
    arranged = [one.entry for one, _ in launched]
    assert arranged == ["conv_planes" if case == "planes" else "conv_arrange"] * len(arranged)
    assert len(arranged) == len(prepared.forms) >= 1
    launched.clear()
    for (name, expected, then), (_, got, now) in zip(before, seen(prepared), strict=True):
        assert (got.view("u1") == expected.view("u1")).all(), name
        arranging = [one.entry for one, arguments in then if reads(arguments, w)]
        assert arranging == arranged[:1], name
        assert not any(reads(arguments, w) for _, arguments in now), name
        products = [
            [(one.entry, one.defines) for one, _ in run if one.entry not in COPYING]
            for run in (then, now)
        ]
        assert products[0] == products[1], name


def computed_layer():
    """A layer whose filter is arranged, with its forward pass, and nothing under way any more."""
    problem, x, w, _, _, how = layer("channels first")
    rules = {**problem.keywords, **how}
    expected = cupy.asnumpy(cupyconv.conv_forward(x, w, **rules))
    cupy.cuda.get_current_stream().synchronize()
    return problem, x, w, how, rules, expected


@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order_of_the_streams_work(order):
    problem, x, w, how, rules, expected = computed_layer()
    with in_disorder(order):
        prepared = cupyconv.prepare(w, problem, passes="forward", **how)
        got = [cupyconv.conv_forward(x, prepared, **rules) for _ in range(2)]
        assert all((cupy.asnumpy(one) == expected).all() for one in got)


@pytest.mark.parametrize("order", ORDERS)
def test_on_another_stream_once_that_has_waited(order):
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
def test_in_memory_of_every_pool(pool, order, allocator):
    """A filter that is dropped at once keeps its memory until the kernels have read it."""
    problem, x, w, dy, _, how = layer("channels first")
    rules = {**problem.keywords, **how}
    expected = cupyconv.conv_backprop_input(x.shape, w, dy, **rules)
    allocator(POOLS[pool]())
    with machine.order(machine.named(order)):
        got = [
            cupyconv.conv_backprop_input(x.shape, cupyconv.prepare(w, problem, **how), dy, **rules)
            for _ in range(2)
        ]
        assert all((cupy.asnumpy(one) == cupy.asnumpy(expected)).all() for one in got)


@pytest.mark.parametrize("case", CASES)
def test_running_out_of_memory(case):
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
    taken = [require_recovers(forward(one), exact, "forward") for one in (w, prepared)]
    # A workspace that has nothing else in it is not taken any more.
    assert taken[0] >= taken[1] >= 1


def test_a_captured_call_arranges_nothing():
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
        w.fill(0)  # nobody reads it
        graph.launch(stream)
        stream.synchronize()
    assert (cupy.asnumpy(out) == expected).all()


def test_on_the_other_device_it_is_refused(launched):
    problem, _, w, _, _, how = layer("channels first")
    prepared = cupyconv.prepare(w, problem, **how)
    launched.clear()
    assert repr(prepared).startswith(f"PreparedFilter({'x'.join(map(str, w.shape))} OIHW float16")
    assert runtime.getDeviceCount() == 2
    with cupy.cuda.Device(1):
        x = cupy.zeros(problem.input_shape, "float16")
        with pytest.raises(ConvTypeError, match="w is on device 0, current is 1"):
            cupyconv.conv_forward(x, prepared, **problem.keywords)
        with pytest.raises(ConvTypeError, match="w is on device 0, current is 1"):
            cupyconv.prepare(w, problem)
        assert launched == []
        other = cupyconv.prepare(cupy.asarray(cupy.asnumpy(w)), problem)
        # Its kernels read w in the same order.
        assert list(other.forms) == list(prepared.forms) == ["OHWI"]
        assert other.forms["OHWI"].tobytes() == prepared.forms["OHWI"].tobytes()
        cupyconv.conv_forward(x, other, **problem.keywords)
    moved = cupyconv.PreparedFilter(
        w, prepared.forms, problem, other.device, prepared.passes, prepared.precision
    )
    with pytest.raises(ConvError, match=r"prepared on emulated sm_80 \(sm_80\), the call is on"):
        cupyconv.conv_forward(cupy.zeros(problem.input_shape, "float16"), moved, **problem.keywords)


# -- what calls launch, with kernels that do nothing -----------------------------------------------

LAYER = ConvProblem((32, 256, 28, 28), (256, 256, 3, 3), padding=1, dtype="float16")
"""For which "auto" takes cuda-hopper."""
LAST = in_formats(LAYER, "NHWC", "OHWI")

HELD = {
    "channels first": (LAYER, "ieee", "auto", ["OHWI"]),
    "only the filter": (in_formats(LAYER, "NHWC", "OIHW"), "ieee", "auto", ["OHWI"]),
    "tf32": (LAYER.replace(dtype="float32"), "tf32", "auto", ["OHWI", "HWIO"]),
    "planes": (
        LAST.replace(dtype="float32"),
        "bf16x6",
        "cuda-hopper-bf16x6",
        ["OHWI in 3 planes of bfloat16"],
    ),
}
"""A layer with its precision and implementation, and the forms that its filter is held in."""


def array(shape, dtype="float16"):
    return cupy.empty(shape, arrays.numpy_dtype(dtype))


class Calls:
    """The passes of a layer that read its filter, on arrays that nothing reads."""

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


@pytest.mark.parametrize("case", HELD)
def test_a_call_arranges_no_prepared_filter(empty_kernels, launched, encoded, case):
    problem, precision, impl, forms = HELD[case]
    calls = Calls(problem, precision, impl)

    def launched_by(call, w):
        launched.clear()
        encoded.clear()
        call(w)
        return list(launched)

    for call in (calls.forward, calls.backprop_input):
        before = launched_by(call, calls.w)
        (arranging,) = (one.entry for one, given in before if reads(given, calls.w))
        assert arranging in COPYING
        launched.clear()
        prepared = calls.prepare()
        assert [one.entry for one, _ in launched] == [arranging] * len(forms)
        assert list(prepared.forms) == forms
        after = launched_by(call, prepared)
        products = [
            [one.entry for one, _ in run if one.entry not in COPYING] for run in (before, after)
        ]
        assert products[0] == products[1]
        assert not any(reads(given, calls.w) for _, given in after)
        read_now = {address for role, address in encoded if role == "w"}
        (form,) = (one for one in prepared.forms.values() if one.data.ptr in read_now)
        assert read_now == {form.data.ptr}
        assert prepared.nbytes == sum(one.nbytes for one in prepared.forms.values())
        planes = 3 if case == "planes" else 1
        size = 2 if case == "planes" else calls.w.itemsize
        assert form.nbytes == planes * calls.w.size * size


def test_a_workspace_has_no_room_for_what_is_prepared(empty_kernels, monkeypatch):
    calls = Calls(in_formats(LAYER, "NHWC", "OIHW"))
    sizes, empty = [], backends.GpuBackend.empty
    monkeypatch.setattr(
        backends.GpuBackend,
        "empty",
        lambda self, shape, dtype: (sizes.append(shape), empty(self, shape, dtype))[1],
    )
    calls.forward(calls.w)
    assert sizes == [LAST.output_shape, (calls.w.nbytes // 4,)]
    prepared = calls.prepare()
    sizes.clear()
    calls.forward(prepared)
    assert sizes == [LAST.output_shape]


def test_a_repeated_call_enters_few_functions(empty_kernels):
    calls = Calls(LAYER)
    prepared = calls.prepare()
    calls.forward(prepared)
    calls.forward(calls.w)
    plain = len(entered(lambda: calls.forward(calls.w)))
    assert len(entered(lambda: calls.forward(prepared))) <= plain + 3


def test_where_nothing_is_arranged_nothing_is_held(empty_kernels):
    for problem in (LAST, LAYER.replace(dtype="float64"), LAYER.replace(dtype="complex64")):
        calls = Calls(problem, impl="auto")
        prepared = calls.prepare()
        assert prepared.forms == {}
        assert prepared.nbytes == 0
        assert prepared.array is calls.w
        assert repr(prepared).endswith("for forward and backprop_input: as it is)")
        calls.forward(prepared)
        calls.backprop_input(prepared)


def test_every_function_that_reads_a_filter_takes_it(empty_kernels, launched):
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
    arranging = [given for _, given in launched if reads(given, calls.w)]
    assert len(arranging) == 1, "by the second prepare"


def test_other_batches_and_sizes_are_taken(empty_kernels, launched):
    """Where their kernels want another form, they make it as they do without."""
    prepared = Calls(LAYER).prepare()
    for shape in ((1, 256, 28, 28), (3, 256, 9, 20)):
        for padding in (((1, 1), (1, 1)), "same"):  # the same in other words
            launched.clear()
            cupyconv.conv_forward(array(shape), prepared, padding=padding)
            assert launched
    planes, precision, impl, _ = HELD["planes"]
    calls = Calls(planes, precision, impl)
    held = calls.prepare(passes="forward")
    assert list(held.forms)
    room = array((prod(planes.input_shape) + 1,), "float32")
    misaligned = room[1:].reshape(planes.input_shape)
    launched.clear()
    cupyconv.conv_forward(misaligned, held, **calls.how)
    assert [one.entry for one, _ in launched] == ["conv_planes", "conv_hopper"]


def test_measuring_takes_it(empty_kernels, launched, monkeypatch):
    monkeypatch.setattr(measuring, "seconds", lambda call, count: (call(), 1e-3)[1])
    monkeypatch.setattr(cupyconv, "benchmark", True)
    calls = Calls(LAYER, impl="auto")
    prepared = cupyconv.prepare(calls.w, LAYER, impl="cuda-hopper")
    launched.clear()
    calls.forward(prepared)
    found = [(one.entry, reads(given, calls.w)) for one, given in launched]
    assert {"conv_hopper", "conv_arrange"} <= {entry for entry, _ in found}
    assert ("conv_arrange", True) not in found


# -- what it says ----------------------------------------------------------------------------------


def test_it_says_what_it_holds(empty_kernels):
    calls = Calls(LAYER)
    assert repr(calls.prepare(passes=["forward"])) == (
        "PreparedFilter(256x256x3x3 OIHW float16 on emulated sm_90 (sm_90a), for forward: "
        "held as OHWI, 1.1 MiB)"
    )
    prepared = calls.prepare()
    assert (prepared.shape, prepared.dtype, prepared.ndim) == ((256, 256, 3, 3), "float16", 4)


REFUSED = {
    "stride": ({"stride": 2}, "it was prepared with stride (1, 1), the call has stride (2, 2)"),
    "padding": (
        {"padding": "valid"},
        "it was prepared with padding ((1, 1), (1, 1)), the call has padding valid",
    ),
    "precision": (
        {"precision": "tf32"},
        "it was prepared with precision 'ieee', the call has 'tf32'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_another_layer(empty_kernels, launched, case):
    calls = Calls(LAYER)
    prepared = calls.prepare()
    launched.clear()
    words, said = REFUSED[case]
    with pytest.raises(ConvError) as error:
        cupyconv.conv_forward(calls.x, prepared, **{"padding": 1, **words})
    assert error.value.rule.startswith("a prepared filter must be used in the layer")
    assert error.value.values == said
    assert "cupyconv.prepare(w, problem, ...)" in error.value.remedy
    assert launched == []


def test_it_is_refused_where_w_has_changed_its_shape(empty_kernels, launched):
    """An array may be given another one in its place, and the forms are of the first."""
    calls = Calls(LAYER)
    prepared = calls.prepare()
    calls.w.shape = (256, 256, 9, 1)
    launched.clear()
    with pytest.raises(ConvError, match=r"filter_shape \(256, 256, 3, 3\), the call has filter_sh"):
        cupyconv.conv_forward(calls.x, prepared, padding=1)
    assert launched == []


def test_it_is_refused_in_another_pass(empty_kernels):
    calls = Calls(LAYER)
    prepared = calls.prepare(passes="forward")
    said = "it was prepared for forward, the call is backprop_input"
    with pytest.raises(ConvError, match=said):
        calls.backprop_input(prepared)
    with pytest.raises(ConvError, match=said):
        cupyconv.conv_transpose(calls.y, prepared, output_shape=calls.x.shape, **calls.how)


def test_it_is_refused_with_another_dtype(empty_kernels):
    prepared = Calls(LAYER).prepare()
    with pytest.raises(ConvTypeError, match="x is float32, w is float16"):
        cupyconv.conv_forward(array(LAYER.input_shape, "float32"), prepared, padding=1)


def test_it_is_refused_with_arrays_of_another_home(empty_kernels):
    prepared = Calls(LAYER).prepare()
    with pytest.raises(ConvTypeError, match="x is a NumPy array, w is a CuPy array"):
        cupyconv.conv_forward(np.ones(LAYER.input_shape, "float16"), prepared, padding=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"passes": "backprop_filter"}, "unknown pass that reads a filter: 'backprop_filter'"),
        ({"precision": "fp8"}, "unknown precision: 'fp8'"),
        ({"impl": "cuda-patch"}, "the implementation must fit the problem"),
        ({"problem": LAYER.replace(dtype="bfloat16")}, "the problem's is 256x256x3x3 bfloat16"),
        ({"problem": in_formats(LAYER, "NHWC", "OHWI")}, "w is 256x256x3x3 float16, the problem's"),
    ],
    ids=["pass", "precision", "implementation", "dtype", "formats"],
)
def test_what_cannot_be_prepared(empty_kernels, launched, words, said):
    w = array(LAYER.filter_shape)
    with pytest.raises(ConvError) as error:
        cupyconv.prepare(w, **{"problem": LAYER, **words})
    assert said in str(error.value)
    assert launched == []


def test_objects_that_no_function_here_reads_say_so(empty_kernels):
    prepared = Calls(LAYER).prepare()
    with pytest.raises(ConvTypeError, match=r"pass filter\.array here"):
        cupyconv.raw_ops.Conv2D(
            input=array((1, 8, 8, 256)), filter=prepared, strides=[1] * 4, padding="SAME"
        )


def test_a_prepared_filter_is_not_kept_by_calls(empty_kernels):
    """What calls come to is remembered, and holds no memory."""
    calls = Calls(LAYER)
    prepared = calls.prepare()
    calls.forward(prepared)
    gone = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert gone() is None
