"""Bound calls: results, refusals, and what the look-up of calls distinguishes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, calls
from tests.configurations import CASES, integer_data

RULES = {"padding": 1, "stride": 2}


def arrays(dtype="float32"):
    data = integer_data(ConvProblem((2, 4, 9, 8), (6, 4, 3, 3), dtype=dtype, **RULES))
    return data.x, data.w, data.dy, data.bias


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bound_calls_equal_the_functions(case):
    problem = case.problem
    data, rules = integer_data(problem), problem.keywords
    x, w, dy = data.x, data.w, data.dy
    given = {
        "forward": ((x, w), (x, w), cupyconv.conv_forward),
        "backprop_input": ((x.shape, w, dy), (w, dy), cupyconv.conv_backprop_input),
        "backprop_filter": ((x, w.shape, dy), (x, dy), cupyconv.conv_backprop_filter),
    }
    for operation, (arguments, operands, function) in given.items():
        expected = function(*arguments, **rules)
        call = cupyconv.bind(operation, *arguments, **rules)
        shapes = [getattr(one, "shape", one) for one in arguments]
        of_shapes = cupyconv.bind(operation, *shapes, dtype=problem.dtype, device="cpu", **rules)
        out = np.empty_like(expected)
        assert call(*operands, out=out) is out
        for result in (call(*operands), of_shapes(*operands), out):
            np.testing.assert_array_equal(result, expected)
        assert (call.problem, call.plan.pass_) == (problem, operation)


def test_transposed_call_and_call_of_a_filter():
    x, w, dy, _ = arrays()
    expected = cupyconv.conv_transpose(dy, w, output_shape=x.shape, **RULES)
    call = cupyconv.bind("transpose", dy, w, output_shape=x.shape, **RULES)
    np.testing.assert_array_equal(call(dy, w), expected)
    np.testing.assert_array_equal(call.with_filter(w)(dy), expected)
    y = cupyconv.conv_forward(x, w, np.ones(6, "f4"), add=dy, activation="relu", **RULES)
    b = np.ones(6, "f4")
    forward = cupyconv.bind("forward", x, w, b, add=dy, activation="relu", **RULES).with_filter(w)
    np.testing.assert_array_equal(forward(x, b, add=dy), y)
    dx = cupyconv.bind("backprop_input", x.shape, w, dy, **RULES).with_filter(w)
    np.testing.assert_array_equal(dx(dy), cupyconv.conv_backprop_input(x.shape, w, dy, **RULES))
    db = cupyconv.bind("backprop_bias", dy)
    np.testing.assert_array_equal(db(dy), dy.sum((0, 2, 3)))


REFUSED = {
    "another shape": (lambda x, w, b: (x[:1], w), "x: got 1x4x9x8 float32"),
    "other strides": (lambda x, w, b: (x[::-1], w), "x: got 2x4x9x8 float32 with strides of"),
    "another dtype": (lambda x, w, b: (x.astype("f8"), w.astype("f8")), "x: got 2x4x9x8 float64"),
    "a bias": (lambda x, w, b: (x, w, b), "bias: got 6 float32 .*bound with no bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arrays_are_refused(case):
    x, w, _, b = arrays()
    change, words = REFUSED[case]
    call = cupyconv.bind("forward", x, w, **RULES)
    with pytest.raises(ConvError, match=words):
        call(*change(x, w, b))
    np.testing.assert_array_equal(call(x, w), cupyconv.conv_forward(x, w, **RULES))


def test_out_is_checked_in_every_call():
    x, w, _, _ = arrays()
    call = cupyconv.bind("forward", x, w, padding=1)
    memory = np.zeros(x.size + 6 * 2 * 9 * 8, "f4")
    shared = memory[: x.size].reshape(x.shape)
    out = memory[8 : 8 + 2 * 6 * 9 * 8].reshape(2, 6, 9, 8)
    for _ in range(2):
        with pytest.raises(ConvError, match="out overlaps x"):
            call(shared, w, out=out)
        with pytest.raises(ConvError, match="out: got 2x6x8x9"):
            call(x, w, out=out.swapaxes(2, 3))
    apart = np.zeros_like(out)
    apart.flags.writeable = False
    with pytest.raises(ConvError, match="writeable"):
        call(x, w, out=apart)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("sideways", 1), ConvError, "unknown operation: 'sideways'"),
        (("forward", (1, 2, 3)), ConvTypeError, r"bind\('forward'\) takes x, w, bias: got 1 arg"),
        (("forward", np.ones((1, 2, 3)), (4, 2, 3)), ConvTypeError, "x is an array. Pass its"),
        (("forward", (1, 2, 3), (4, 3, 3)), ConvError, "channels"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        cupyconv.bind(*arguments)


def test_calls_keep_no_array_alive():
    x, w, _, _ = arrays()
    call = cupyconv.bind("forward", x, w, **RULES)
    references = [weakref.ref(one) for one in (x, w, call(x, w))]
    del x, w
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_settings_and_types_are_part_of_the_key(monkeypatch):
    x, w, _, _ = arrays()
    cupyconv.conv_forward(x, w, stride=1)
    with pytest.raises(ConvTypeError, match="integers"):
        cupyconv.conv_forward(x, w, stride=True)
    with pytest.raises(ConvTypeError, match="integers"):
        cupyconv.conv_forward(x, w, stride=(True, 1))
    monkeypatch.setattr(cupyconv, "workspace_limit", True)
    with pytest.raises(ConvError, match="workspace_limit"):
        cupyconv.conv_forward(x, w, stride=1)
    monkeypatch.undo()
    assert cupyconv.workspace_limit is None
    cupyconv.conv_forward(x, w, stride=1)


def test_number_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 5)
    calls.forget()
    for size in range(3, 15):
        x = np.ones((1, 1, size), "f4")
        assert cupyconv.conv_forward(x, np.ones((1, 1, 3), "f4")).shape == (1, 1, size - 2)
    assert 0 < len(calls._calls) <= 5


def test_threads_share_calls():
    x, w, _, _ = arrays()
    calls.forget()
    results = []

    def work():
        for _ in range(20):
            results.append(cupyconv.conv_forward(x, w, **RULES))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = cupyconv.conv_forward(x, w, impl="reference", **RULES)
    assert len(results) == 80
    assert all((result == expected).all() for result in results)


def test_first_call_of_a_process_may_be_bound_by_shapes():
    program = (
        "import numpy as np, cupyconv\n"
        "call = cupyconv.bind('forward', (1, 2, 4), (3, 2, 3), device='cpu')\n"
        "print(call(np.ones((1, 2, 4), 'f'), np.ones((3, 2, 3), 'f')).shape)\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "(1, 3, 2)\n"
