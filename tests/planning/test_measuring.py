"""Autotuning without a device: candidates and their names."""

import threading
from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, DeviceError, arrays, measuring
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import contenders

PROBLEM = ConvProblem((4, 32, 20, 20), (32, 32, 1, 1), dtype="float16")


def test_candidate_names_are_distinct():
    (planned, *_) = cupyconv.plan(PROBLEM, "sm_80")
    for splits, suffix in ((1, ""), (2, " x 2"), (3, " x 3")):
        named = replace(planned, splits=splits)
        assert measuring._name(named) == f"cuda-gather {planned.tile}{suffix}"
        assert measuring._name(replace(named, tile=None)) == f"cuda-gather{suffix}"
    viewed = measuring._name(replace(planned, view="x and dy exchanged", copies=("y", "x")))
    assert viewed.endswith(" (x and dy exchanged, dy and x copied)")


def test_measuring_requires_a_gpu(monkeypatch):
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


def test_contenders_include_the_best_of_each_family():
    request = Request(PROBLEM, "forward", Device.of("sm_80"))
    chosen = contenders(request, "auto", 5)
    families = {"cuda-gather", "cuda-columns", "cuda-generic"}
    assert {candidate.implementation for candidate in chosen} == families
    assert chosen[0].implementation == "cuda-gather"
    assert len(set(chosen)) == 5
    assert contenders(request, "auto", 1) == chosen[:1]


def test_signal_handler_may_measure_during_a_measurement(monkeypatch):
    request = Request(PROBLEM, "forward", Device.of("sm_80"))
    inner, outer = contenders(request, "auto", 2)
    results = []

    def look_up(*_):
        if not results:
            results.append(None)
            results.append(measuring.fastest(request, "auto", None, None))  # as in a signal handler
            return outer
        return inner

    monkeypatch.setattr(measuring, "_look_up", look_up)
    monkeypatch.setattr(measuring, "_remembered", {})
    thread = threading.Thread(
        target=lambda: results.append(measuring.fastest(request, "auto", None, None)), daemon=True
    )
    thread.start()
    thread.join(30)
    assert results == [None, inner, inner]
