"""Measured prices of the cost model: which prices apply, and how near the estimates are."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean, pstdev

import pytest

from cupyconv import ConvProblem, plan
from cupyconv.bench import results
from cupyconv.kernels import calibration
from cupyconv.planning import Device, Request, plan_pass
from tests import speed_table
from tests.gpu import fitting, report

PROBLEM = ConvProblem((32, 64, 56, 56), (64, 64, 3, 3), dtype="float16", padding=1)
CONVNEXT = ConvProblem((64, 56, 56, 96), (96, 7, 7, 1), groups=96, data_format="NHWC",
                       filter_format="OHWI", padding=3, dtype="float16")  # fmt: skip
RESULTS = Path(report.__file__).with_name("results")
GPU = "an NVIDIA H100 80GB HBM3"


def prices(family="cuda-gather", arch="sm_90a", dtype="float16", pass_="forward"):
    request = Request(PROBLEM.replace(dtype=dtype), pass_, Device.of(arch))
    return calibration.prices(request, family)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("family", ["cuda-gather", "cuda-toeplitz", "cuda-direct"])
def test_chips_without_measurements_have_the_measured_prices(family, arch):
    assert prices(family, arch) == prices(family) != prices("cuda-new")


def test_unmeasured_dtypes_and_families_have_pooled_prices():
    doubles = {prices(dtype=dtype) for dtype in ("float64", "complex64")}
    doubles |= {prices(dtype="float64", pass_="backprop_filter")}
    assert len(doubles) == 1
    assert len({prices(), prices("cuda-new"), *doubles}) == 3


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120"])
def test_toeplitz_is_not_chosen_where_it_took_longer(arch):
    """cuda-direct took half the time of cuda-toeplitz for this layer on the H100."""
    assert plan_pass(Request(CONVNEXT, "forward", Device.of(arch))).implementation == "cuda-direct"


@pytest.mark.parametrize(
    ("arch", "dtype", "end"),
    [
        ("sm_90a", "float16", f" and scaled by the times of other layers on {GPU}."),
        ("sm_90a", "float64", f"; kernel families compare as on {GPU}, and nothing else was "
                              "measured."),
        ("sm_80", "float16", f"; kernel families compare as on {GPU}, and nothing else was "
                             "measured."),
        ("cpu", "float32", "; nothing was measured."),
    ],
)  # fmt: skip
def test_plan_reports_the_origin_of_its_estimates(arch, dtype, end):
    assert str(plan(PROBLEM.replace(dtype=dtype), arch)).endswith(f"Estimates are modelled{end}")


RECORDS = report.load(RESULTS)


def test_planner_reads_the_prices_of_the_gpu_run():
    """The prices fit the run's times, with the demands of today's cost model."""
    text = (calibration.MEASURED / "sm_90a.json").read_text()
    assert text == (RESULTS / "calibration.json").read_text()
    for kept, fitted in zip(
        json.loads(text)["prices"], report.calibration(RECORDS)["prices"], strict=True
    ):
        assert kept["prices"] == pytest.approx(fitted["prices"], rel=0.05, abs=0.01)


def test_estimates_are_near_measured_times(capsys):
    timed = fitting.timings(report.once(RECORDS), "sm_90a")
    lost = fitting.losses(timed)
    assert (len(timed), len(lost)) == (1417, 391)
    assert pstdev(fitting.errors(timed)) < 0.17
    assert geometric_mean(lost) < 1.015
    assert max(lost) < 1.5
    assert report.replay(RESULTS) == 0
    assert "| all | 1417 | 0.16" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_committed_timings_are_those_of_the_gpu_run(precision):
    path = RESULTS / f"{speed_table.FILES[precision]}sm_90a.json"
    assert report.results(RECORDS, precision, {}).rows == results.load(path).rows
