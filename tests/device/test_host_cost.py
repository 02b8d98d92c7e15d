"""What a repeated call costs the host, and what it refuses each time, with CuPy's own launches.

Functions of the library that are entered are counted; time is measured on a GPU, by
tests/gpu/test_cupy.py.
"""

from __future__ import annotations

import cupy
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError, backends, operations
from cupyconv.gpu import launch
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device.test_order import on_device, split_layer
from tests.test_host_cost import FAST, FEW, entered

CHECKS_OF_OUT = 8
"""Functions that a call enters which is given an ``out``, beside those of any call."""

FORMATS = {"data_format": "NHWC", "filter_format": "OHWI"}


def hopper_layer():
    return in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")


def calls(problem, impl):
    """Each operation on a layer, by name."""
    given = on_device(integer_data(problem))
    x, w, dy, bias = given.x, given.w, given.dy, given.bias
    rules = {**problem.keywords, "impl": impl}
    pairs = {**rules, "padding": problem.padding, "stride": (1, 1)}
    out = cupy.empty_like(dy)
    return {
        "forward": lambda: cupyconv.conv_forward(x, w, **rules),
        "bias": lambda: cupyconv.conv_forward(x, w, bias, activation="relu", **rules),
        "pairs": lambda: cupyconv.conv_forward(x, w, **pairs),
        "out": lambda: cupyconv.conv_forward(x, w, out=out, **rules),
        "backprop_input": lambda: cupyconv.conv_backprop_input(x.shape, w, dy, **rules),
        "backprop_filter": lambda: cupyconv.conv_backprop_filter(x, w.shape, dy, **rules),
        "transpose": lambda: cupyconv.conv_transpose(dy, w, **rules),
        "bias gradient": lambda: cupyconv.conv_backprop_bias(dy, data_format="NHWC"),
    }


@pytest.mark.parametrize(
    ("ordinal", "problem", "impl"),
    [(0, hopper_layer(), "cuda-hopper"), (0, split_layer(), "auto"), (1, split_layer(), "auto")],
    ids=["hopper", "sm_90a", "sm_80"],
)
def test_a_repeated_call_enters_few_functions(ordinal, problem, impl):
    with cupy.cuda.Device(ordinal):
        for name, call in calls(problem, impl).items():
            call()
            found = entered(call)
            assert {file for file, _ in found} <= FAST, name
            assert len(found) <= FEW + (CHECKS_OF_OUT if name == "out" else 0), (name, found)


def layer():
    """x, w and dy of a small layer whose channels are last."""
    shapes = (2, 9, 9, 8), (8, 3, 3, 8), (2, 7, 7, 8)
    return [cupy.ones(shape, "float16") for shape in shapes]


def test_equal_calls_that_are_written_differently_are_not_mistaken():
    x, w, dy = layer()
    for good, bad in ((1, 1.0), ((1, 1), (1, 1.0))):
        cupyconv.conv_forward(x, w, stride=good, **FORMATS)
        with pytest.raises(ConvTypeError, match="must be made of integers"):
            cupyconv.conv_forward(x, w, stride=bad, **FORMATS)
    cupyconv.conv_backprop_input((2, 9, 9, 8), w, dy, **FORMATS)
    with pytest.raises(ConvTypeError, match="must be made of integers"):
        cupyconv.conv_backprop_input((2, 9, 9.0, 8), w, dy, **FORMATS)


def test_arrays_of_another_device_are_refused_at_every_call(launched):
    x, w, dy = layer()
    here = [x, w, cupy.ones(8, "float16")]
    with cupy.cuda.Device(1):
        there = [cupy.ones_like(one) for one in here]
        out = cupy.ones_like(dy)
    for turn in range(2):
        cupyconv.conv_forward(*here, **FORMATS)
        for position, name in enumerate(("x", "w", "bias")):
            given = list(here)
            given[position] = there[position]
            with pytest.raises(ConvTypeError, match=rf"{name} is on device 1, current is 0\. "):
                cupyconv.conv_forward(*given, **FORMATS)
        with pytest.raises(ConvTypeError, match="out is on device 1, current is 0"):
            cupyconv.conv_forward(*here, out=out, **FORMATS)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backprop_bias(out)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backward(here[0], here[1], out, needs=(), **FORMATS)
        assert len(launched) == turn + 1


def test_an_out_whose_elements_overlap_is_refused_and_others_are_not(launched):
    x, w, _ = layer()
    room = cupy.empty((4, 7, 7, 16), "float16")
    for out in (room[::2, :, :, ::2], room[::-1][:2, ::-1, ::-1, 8:]):
        cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(launched) == 2
    for strides in ((0, 112, 16, 2), (784, 112, 16, 1), (98, 14, 2, 2)):
        out = cupy.ndarray((2, 7, 7, 8), room.dtype, room.data, strides=strides)
        for _ in range(2):
            with pytest.raises(ConvError, match="out must have memory of its own"):
                cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("offset", "alignment"), [(0, 16), (2, 2), (8, 8), (24, 8), (32, 16), (36, 4)]
)
def test_a_plan_is_made_for_the_alignment_of_the_addresses(offset, alignment):
    backend = backends._gpu(0)
    whole = cupy.empty(64, "uint8")
    assert backend.alignment((whole,)) == 16
    assert backend.alignment((whole, whole[offset:])) == alignment
    assert backend.alignment((whole[offset:], whole)) == alignment


@pytest.mark.parametrize("needs", [("input", "filter", "bias"), ("input", "filter")], ids=len)
def test_a_backward_pass_has_all_its_kernels_loaded_at_once(needs, launched, monkeypatch):
    """So that those of three calls are compiled side by side."""
    loaded, load = [], launch.CupyRuntime.load

    def watched(self, launches):
        loaded.append([one.entry for one in launches])
        load(self, launches)

    monkeypatch.setattr(launch.CupyRuntime, "load", watched)
    operations._ready_bias.cache_clear()
    problem = hopper_layer()
    given = on_device(integer_data(problem))
    for _ in range(2):
        launched.clear()
        cupyconv.conv_backward(given.x, given.w, given.dy, needs=needs, **problem.keywords)
    together, *singly = loaded
    assert len(singly) == len(needs), "each finds its own there, and only once"
    assert together == [entry for entries in singly for entry in entries]
    assert len(launched) == len(together)
