"""Witnesses on the emulator: results must be exact, and only argued reports are allowed."""

from __future__ import annotations

import contextlib

import pytest

from cupyconv import ConvProblem
from cupyconv.problem import PASSES
from tests import emulator
from tests.emulator import account, settings, witnesses
from tests.emulator.module import Outcome
from tests.emulator.ptx.counting import PRODUCTS
from tests.emulator.witnesses import cases, cutlass_sm90

pytestmark = pytest.mark.slow

SCHEDULES = pytest.mark.parametrize(
    "schedule", emulator.SCHEDULES, ids=lambda schedule: f"{schedule.policy}-{schedule.timing}"
)


@SCHEDULES
@pytest.mark.parametrize("name", cases.WITNESSES)
def test_witness(name: str, schedule: emulator.Settings) -> None:
    witness = cases.WITNESSES[name]
    try:
        witness.kernel()
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    with settings(schedule):
        witness.testify()


@SCHEDULES
def test_dependent_launch_without_wait_is_reported(schedule: emulator.Settings) -> None:
    try:
        gemm = cases.dependent_gemm()
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    waits, text = "griddepcontrol.wait;", gemm.kernel.ptx
    assert waits in text
    gemm.kernel = cutlass_sm90.kernel_of(text.replace(waits, ""), "cutlass_gemm_sm90", (2, 1, 1))
    outcomes: list[Outcome] = []
    with (
        settings(schedule, raise_reports=False, on_outcome=outcomes.append),
        contextlib.suppress(AssertionError),  # wrong results of a stopped launch
    ):
        cases.dependent_gemms(gemm)
    first, second = ({report.kind for report in outcome.reports} for outcome in outcomes)
    assert "launch-race" in second - first


def test_account_of_a_witness() -> None:
    rules = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": "float16"}
    problem = ConvProblem((1, 8, 8, 64), (64, 3, 3, 64), padding=1, **rules)
    try:
        result = account.account_of_witness(problem, "forward", blocks=None, tile="64x64")
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    assert (result.blocks, result.reports) == (1, 0)
    assert result.work.by_kind()["tensor core"].by_warp == 64 * 64 * 9 * 64 // (16 * 8 * 16)
    sectors = {row.tensor: row.distinct for row in result.work.sectors}
    assert sectors == {"x": 256, "w": 2304, "y": 256}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    ("dtype", "precision", "tile"),
    [
        ("float32", "ieee", "128x64"),
        ("float32", "tf32", "128x128"),
        ("float16", "ieee", "128x128"),
        ("bfloat16", "ieee", "128x128"),
    ],
)
def test_gather_executes_no_more_than_cutlass(
    dtype: str, precision: str, tile: str, pass_: str
) -> None:
    """Compare instructions per product with CUTLASS's 128x128 kernel, also in the main loop.

    Plain products are compared in total only, since CUTLASS copies operands in its main loop.
    """
    problem = account.layer_problem("resnet50-11", dtype, "channels-last")
    try:
        theirs = account.account_of_witness(problem, pass_, blocks=1, precision=precision)
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    ours, *_ = (
        candidate
        for candidate in account.accounts_of_pass(
            problem, pass_, "cuda-gather", "sm_80", 1, tile, precision
        )
        if candidate.kernel == "conv_gather"
    )
    assert ours.work.for_a_product() <= theirs.work.for_a_product()
    if PRODUCTS in ours.work.by_kind():
        in_loop = ours.work.for_a_product(in_main_loop=True)
        assert in_loop <= theirs.work.for_a_product(in_main_loop=True)
        assert dtype == "float32" or in_loop <= 4
    assert (ours.spilled, theirs.spilled) == (0, 0)
    assert ours.resident >= theirs.resident
