"""Measured corrections of modelled times: which factors apply, and whether they help."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev

import pytest

from cupyconv import ConvProblem, plan
from cupyconv.planning import Device, Request, calibration
from tests.gpu import contenders, report

PROBLEM = ConvProblem((32, 64, 56, 56), (64, 64, 3, 3), dtype="float16", padding=1)
RESULTS = Path(report.__file__).with_name("results")


RECORDS = report.load(RESULTS)


def request(arch: str = "sm_90a", dtype: str = "float16") -> Request:
    return Request(PROBLEM.replace(dtype=dtype), "forward", Device.of(arch))


def test_only_measured_chips_are_scaled():
    assert calibration.factor(request(), "cuda-hopper") == pytest.approx(1.33, abs=0.01)
    assert calibration.factor(request(dtype="bfloat16"), "cuda-toeplitz") > 1
    assert calibration.factor(request(dtype="float32"), "cuda-gather") > 1
    assert calibration.factor(request(dtype="float64"), "cuda-gather") == 1
    assert calibration.factor(request(arch="sm_80"), "cuda-gather") == 1
    assert calibration.measured_gpu(request()) == "NVIDIA H100 80GB HBM3"
    assert calibration.measured_gpu(request(arch="sm_80")) is None


def test_an_unmeasured_family_gets_the_mean_of_the_others():
    names = (
        "cuda-columns",
        "cuda-direct",
        "cuda-gather",
        "cuda-generic",
        "cuda-hopper",
        "cuda-patch",
    )
    factors = [calibration.factor(request(), name) for name in (*names, "cuda-toeplitz")]
    mean = exp(sum(map(log, factors)) / len(factors))
    assert calibration.factor(request(), "cuda-new") == pytest.approx(mean)


def test_a_plan_says_which_gpu_scales_its_estimates():
    assert str(plan(PROBLEM, "sm_90a")).endswith(
        "times of other layers on an NVIDIA H100 80GB HBM3."
    )
    assert str(plan(PROBLEM, "sm_80")).endswith("Estimates are modelled; nothing was measured.")


def test_the_planner_reads_the_factors_of_the_gpu_run():
    """The factors are the run's measured times divided by the estimates of today's cost model."""
    measured = (calibration.MEASURED / "sm_90a.json").read_text()
    assert measured == (RESULTS / "calibration.json").read_text()
    assert json.loads(measured) == report.calibration(RECORDS)


def test_estimates_are_near_measured_times():
    """The test compares all estimates with times, and first choices with each pass's fastest."""
    errors, losses = [], []
    for (dtype, precision, _, _, pass_), labels in report.by_pass(RECORDS).items():
        problem = PROBLEM.replace(dtype=dtype)
        asked = Request(problem, pass_, Device.of("sm_90a"), precision)
        found = []
        for one in labels.values():
            candidate = contenders.candidate_of(one, "sm_90a")
            if candidate is not None:
                factor = calibration.factor(asked, one["implementation"])
                order = factor * candidate.microseconds, candidate.computing
                found.append((order, one["microseconds"]))
                errors.append(log(order[0] / one["microseconds"]))
        if found:
            losses.append(log(min(found)[1] / min(measured for _, measured in found)))
    assert (len(errors), len(losses)) == (1491, 1070)
    assert stdev(errors) < 0.26
    assert exp(fmean(losses)) < 1.02
