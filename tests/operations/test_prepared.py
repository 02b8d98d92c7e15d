"""Prepared filters with NumPy; tests/device/test_prepared.py tests them on a GPU."""

from __future__ import annotations

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, PreparedFilter
from tests.configurations import integer_data


def test_prepared_filter_with_numpy_is_the_filter_itself():
    problem = ConvProblem((2, 256, 5, 5), (256, 256, 3, 3), padding=1)
    data = integer_data(problem)
    prepared = cupyconv.prepare(data.w, problem)
    assert isinstance(prepared, PreparedFilter)
    assert prepared.array is data.w
    assert repr(prepared).endswith("on NumPy arrays, for forward and backprop_input: not copied)")
    rules = problem.keywords
    y = cupyconv.conv_forward(data.x, data.w, data.bias, **rules)
    assert (cupyconv.conv_forward(data.x, prepared, data.bias, **rules) == y).all()
    dx = cupyconv.conv_backprop_input(data.x.shape, data.w, data.dy, **rules)
    assert (cupyconv.conv_backprop_input(data.x.shape, prepared, data.dy, **rules) == dx).all()
    grads = cupyconv.conv_backward(data.x, prepared, data.dy, **rules)
    expected = cupyconv.conv_backward(data.x, data.w, data.dy, **rules)
    assert all((one == other).all() for one, other in zip(grads, expected, strict=True))
    with pytest.raises(ConvError, match="the filter was prepared with padding"):
        cupyconv.conv_forward(data.x, prepared)
