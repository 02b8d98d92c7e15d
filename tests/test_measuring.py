"""Measured plans, as far as they need no device: what is measured, and what it is called."""

from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, DeviceError, arrays, measuring
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import contenders

PROBLEM = ConvProblem((4, 32, 20, 20), (32, 32, 1, 1), dtype="float16")


def test_candidates_are_named_by_what_tells_them_apart():
    (planned, *_) = cupyconv.plan(PROBLEM, "sm_80")
    for splits, words in ((1, ""), (2, " x 2"), (3, " x 3")):
        named = replace(planned, splits=splits)
        assert measuring._name(named) == f"cuda-gather {planned.tile}{words}"
        assert measuring._name(replace(named, tile=None)) == f"cuda-gather{words}"


def test_measuring_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="GPU"):
        cupyconv.plan(PROBLEM, measure=True)


def test_numpy_arrays_are_not_measured(monkeypatch):
    def call():
        x = np.ones(PROBLEM.input_shape, PROBLEM.dtype)
        return cupyconv.conv_forward(x, np.ones(PROBLEM.filter_shape, PROBLEM.dtype))

    expected = call()
    monkeypatch.setattr(cupyconv, "benchmark", True)
    monkeypatch.setattr(measuring, "fastest", None)
    assert (call() == expected).all()


def test_the_best_of_each_family_is_measured():
    request = Request(PROBLEM, "forward", Device.of("sm_80"))
    chosen = contenders(request, "auto", 5)
    assert {one.implementation for one in chosen} == {"cuda-gather", "cuda-generic"}
    assert chosen[0].implementation == "cuda-gather"
    assert len(set(chosen)) == 5
    assert contenders(request, "auto", 1) == chosen[:1]
