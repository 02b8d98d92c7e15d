"""Host cost of a repeated call, and the checks that it repeats, with CuPy's own launches.

The tests count the library's functions that a call enters; tests/gpu/loop.py measures time on
a GPU.
"""

from __future__ import annotations

import subprocess
import sys

import cupy
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError
from cupyconv.gpu import runtime
from tests import ROOT
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device.test_order import on_device, split_layer
from tests.operations.test_host_cost import BOUND, FUNCTION, entered

FORMATS = {"data_format": "NHWC", "filter_format": "OHWI"}


def hopper_layer():
    return in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")


def calls(problem, impl):
    """Return each operation on a layer, by name."""
    operands = on_device(integer_data(problem))
    x, w, dy, bias = operands.x, operands.w, operands.dy, operands.bias
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
def test_repeated_call_enters_few_functions(ordinal, problem, impl, empty_kernels):
    with cupy.cuda.Device(ordinal):
        for name, call in calls(problem, impl).items():
            found = entered(call, before=3)
            assert len(found) <= FUNCTION, (name, found)


FIRST = """
import sys, cupy
x, w = (cupy.ones(shape, "float16") for shape in ((1, 8, 8, 8), (8, 3, 3, 8)))
for _ in range(2):  # the emulator itself imports modules in the first round
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupyconv"]:
        del sys.modules[name]
    import cupyconv
    cupyconv.conv_forward(x, w, padding=1, data_format="NHWC", filter_format="OHWI")
print(*sys.modules)
"""


def test_first_call_imports_nothing_for_the_cpu_and_for_errors():
    command = [sys.executable, "-m", "tests.device", "-c", FIRST]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in found.stdout.split() if name.startswith("cupyconv.")}
    assert rooms.isdisjoint({"cpu", "markup", "measuring", "remedies", "warming"})
    assert "kernels" in rooms


def test_bound_call_enters_few_functions(empty_kernels):
    problem = hopper_layer()
    operands = on_device(integer_data(problem))
    x, w, dy, bias = operands.x, operands.w, operands.dy, operands.bias
    rules = {**problem.keywords, "impl": "cuda-hopper"}
    forward = cupyconv.bind("forward", x, w, bias, activation="relu", **rules)
    gradient = cupyconv.bind("backprop_filter", x, w.shape, dy, **rules)
    own = forward.with_filter(w)
    out = cupy.empty_like(dy)
    for call in (
        lambda: forward(x, w, bias),
        lambda: forward(x, w, bias, out=out),
        lambda: own(x, bias),
        lambda: gradient(x, dy),
    ):
        found = entered(call, before=3)
        assert len(found) <= BOUND, found


def layer():
    """Return x, w and dy of a small channels-last layer."""
    shapes = (2, 9, 9, 8), (8, 3, 3, 8), (2, 7, 7, 8)
    return [cupy.ones(shape, "float16") for shape in shapes]


def test_array_of_another_device_is_always_refused(launched):
    x, w, dy = layer()
    local = [x, w, cupy.ones(8, "float16")]
    with cupy.cuda.Device(1):
        remote = [cupy.ones_like(array) for array in local]
        out = cupy.ones_like(dy)
    for index in range(2):
        cupyconv.conv_forward(*local, **FORMATS)
        for position, name in enumerate(("x", "w", "bias")):
            arguments = list(local)
            arguments[position] = remote[position]
            with pytest.raises(
                ConvTypeError, match=rf"{name} is on device 1, the current device is 0\. "
            ):
                cupyconv.conv_forward(*arguments, **FORMATS)
        with pytest.raises(ConvTypeError, match="out is on device 1, the current device is 0"):
            cupyconv.conv_forward(*local, out=out, **FORMATS)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backprop_bias(out)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backward(local[0], local[1], out, needs=(), **FORMATS)
        assert len(launched) == index + 1


def test_out_with_overlapping_elements_is_refused(launched):
    x, w, _ = layer()
    buffer = cupy.empty((4, 7, 7, 16), "float16")
    for out in (buffer[::2, :, :, ::2], buffer[::-1][:2, ::-1, ::-1, 8:]):
        cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(launched) == 2
    for strides in ((0, 112, 16, 2), (784, 112, 16, 1), (98, 14, 2, 2)):
        out = cupy.ndarray((2, 7, 7, 8), buffer.dtype, buffer.data, strides=strides)
        for _ in range(2):
            with pytest.raises(ConvError, match="elements of out must not overlap"):
                cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(launched) == 2


@pytest.mark.parametrize("needs", [("input", "filter", "bias"), ("input", "filter")], ids=len)
def test_backward_pass_loads_all_kernels_together(needs, launched, monkeypatch):
    """The kernels of three calls are then compiled in parallel."""
    loads, load = [], runtime.CupyRuntime.load

    def record(self, launches):
        loads.append([launch_.entry for launch_ in launches])
        load(self, launches)

    monkeypatch.setattr(runtime.CupyRuntime, "load", record)
    problem = hopper_layer()
    operands = on_device(integer_data(problem))
    for _ in range(2):
        launched.clear()
        cupyconv.conv_backward(operands.x, operands.w, operands.dy, needs=needs, **problem.keywords)
    together, *separate = loads
    assert len(separate) == len(needs), "each pass loads its kernels once"
    assert together == [entry for entries in separate for entry in entries]
    assert len(launched) == len(together)
