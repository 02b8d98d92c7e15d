"""Host cost of calls: a repeated call does only a lookup and its launches.

The tests count all Python functions that a call enters, here with NumPy and with CuPy in
tests/device/test_host_cost.py.  tests/gpu/loop.py measures times on a GPU.
"""

import gc
import sys

import numpy as np
import pytest

import cupyconv
from cupyconv import backends
from cupyconv.cpu import axis
from cupyconv.errors import ConvTypeError
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.problem import PASSES

FUNCTION, BOUND = 8, 4
"""Most Python functions that a repeated call and a bound call enter (chosen)."""

SMALL, SMALL_PHASES, COLD = 20, 42, 220
"""Most functions without NumPy's that a repeated call of a small layer enters (chosen), an input
gradient with several stride phases (reached), and the choice of a method in axis.py (reached)."""


def entered(call, before=0):
    """Return (file, function) for each Python function that a call enters, without the call.

    The functions of an emulated driver are left out.

    Args:
        call: the function to call.
        before: how often to call it first.  Between these calls and the counted call nothing is
            collected: results have the same addresses, for which parameters are not written again.
    """
    found = []

    def is_emulated(frame):
        return frame is not None and (
            frame.f_code.co_filename.endswith("tests/device/api.py") or is_emulated(frame.f_back)
        )

    def profile(frame, event, _):
        if event == "call" and not is_emulated(frame):
            found.append((frame.f_code.co_filename, frame.f_code.co_name))

    gc.collect()
    gc.disable()  # packages may have added callbacks to the garbage collection
    try:
        for _ in range(before):
            call()
        sys.setprofile(profile)
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found[1:]


def test_repeated_call_on_numpy_arrays_enters_few_functions(monkeypatch):
    monkeypatch.setattr(backends.CpuBackend, "run", lambda *_: None)
    x, w = np.ones((1, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    assert len(entered(lambda: cupyconv.conv_forward(x, w, padding=1), before=1)) <= FUNCTION


@pytest.mark.parametrize("rules", [{}, {"stride": 2}, {"data_format": "NHWC"}], ids=str)
def test_small_layer_on_numpy_arrays_enters_few_functions(rules):
    """The count includes the computation, which takes as long as the surrounding Python code."""
    x, w = np.ones((1, 8, 8, 8), np.float32), np.ones((8, 8, 3, 3), np.float32)
    rules = {"padding": 1, "filter_format": "OIHW", **rules}
    y = cupyconv.conv_forward(x, w, **rules)
    for call, most in (
        (lambda: cupyconv.conv_forward(x, w, **rules), SMALL),
        (
            lambda: cupyconv.conv_backprop_input(x.shape, w, y, **rules),
            SMALL_PHASES if "stride" in rules else SMALL,
        ),
        (lambda: cupyconv.conv_backprop_filter(x, w.shape, y, **rules), SMALL),
    ):
        found = [name for file, name in entered(call, before=1) if "numpy" not in file]
        assert len(found) <= most, found


@pytest.mark.parametrize("rules", [{"padding": 1}, {"padding": 8, "dilation": 4}], ids=str)
def test_choice_of_a_method_on_the_cpu_enters_few_functions(rules):
    """Before, the choice for a layer with dilation 4 entered 1,800 functions."""
    problem = cupyconv.ConvProblem((1, 8, 28, 28), (8, 8, 5, 5), **rules)
    for function in vars(axis).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    requests = [Request(problem, pass_, Device.of("cpu")) for pass_ in PASSES]
    for request in requests:
        found = entered(lambda request=request: plan_pass.__wrapped__(request))
        assert sum(file.endswith("cpu/axis.py") for file, _ in found) <= COLD


def test_mutable_numbers_are_read_at_every_call():
    """Cached calls are found by equal arguments, except arguments whose value can change."""

    class Number:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            return self.value

    x, w = np.ones((1, 1, 9), np.float32), np.ones((1, 1, 3), np.float32)
    for number in (Number(1), np.array([1]), np.array(1)):
        sizes = []
        for value in (1, 2):
            if isinstance(number, Number):
                number.value = value
            else:
                number[...] = value
            for stride in (number, (number,)) if np.shape(number) == () else (number,):
                sizes.append(cupyconv.conv_forward(x, w, stride=stride).shape[-1])
        assert sorted(set(sizes), reverse=True) == [7, 4]
        assert sizes == sorted(sizes, reverse=True)
    for one in (np.int64(2), 2, np.int32(2)):
        assert cupyconv.conv_forward(x, w, stride=(one,)).shape == (1, 1, 4)
    for one in (True, np.True_):
        cupyconv.conv_forward(x, w, stride=1)
        with pytest.raises(ConvTypeError, match="stride must be made of integers: got "):
            cupyconv.conv_forward(x, w, stride=one)
