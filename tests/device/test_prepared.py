"""Prepared filters on the emulated devices: their arranging is gone, and nothing else changes."""

from __future__ import annotations

import cupy
import pytest
from cupy.cuda import runtime

import cupyconv
from cupyconv.errors import ConvError, ConvTypeError
from tests.configurations import HOPPER_CASES, in_formats, random_data
from tests.device import machine
from tests.device.test_memory import POOLS, require_recovers
from tests.device.test_order import ORDERS, in_disorder

BY_NAME = {case.name: case.problem for case in HOPPER_CASES}
CASES = {
    "channels first": ("phases_of_one_two_and_four_taps", "NCHW", "float16", "ieee", "cuda-hopper"),
    "gathered": ("one_tile", "NCHW", "float16", "ieee", "cuda-gather"),
    "planes": ("one_tile", "NHWC", "float32", "bf16x6", "cuda-hopper-bf16x6"),
    "tf32": ("few_channels", "NCHW", "float32", "tf32", "cuda-hopper"),
}
"""A problem, its format, dtype and precision, and the family that computes it."""

COPYING = {"conv_arrange", "conv_planes"}


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

    def reads(arguments, array):
        return any(one is array for one in arguments)

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
