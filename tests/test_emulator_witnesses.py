"""Kernels of others on the emulator: right to the last bit, and no report but argued ones."""

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
    "schedule", emulator.SCHEDULES, ids=lambda one: f"{one.policy}-{one.timing}"
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
def test_a_dependent_launch_that_does_not_wait_is_reported(schedule: emulator.Settings) -> None:
    try:
        gemm = cases.dependent_gemm()
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    waits, text = "griddepcontrol.wait;", gemm.kernel.ptx
    assert waits in text
    gemm.kernel = cutlass_sm90.kernel_of(text.replace(waits, ""), "cutlass_gemm_sm90", (2, 1, 1))
    found: list[Outcome] = []
    with (
        settings(schedule, raise_reports=False, on_outcome=found.append),
        contextlib.suppress(AssertionError),  # wrong numbers, where the launch was stopped
    ):
        cases.dependent_gemms(gemm)
    first, second = ({report.kind for report in one.reports} for one in found)
    assert "launch-race" in second - first


def test_account_of_a_witness() -> None:
    rules = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": "float16"}
    problem = ConvProblem((1, 8, 8, 64), (64, 3, 3, 64), padding=1, **rules)
    try:
        one = account.account_of_witness(problem, "forward", blocks=None, tile="64x64")
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    assert (one.blocks, one.reports) == (1, 0)
    assert one.work.by_kind()["tensor core"].by_warp == 64 * 64 * 9 * 64 // (16 * 8 * 16)
    sectors = {row.tensor: row.distinct for row in one.work.sectors}
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
    """For a product, in the whole kernel and in the main loop, beside CUTLASS's kernel of 128x128;
    of plain products, whose copies CUTLASS has in its main loop, in the whole kernel."""
    problem = account.layer_problem("resnet50-11", dtype, "channels-last")
    try:
        theirs = account.account_of_witness(problem, pass_, blocks=1, precision=precision)
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    ours, *_ = (
        one
        for one in account.accounts_of_pass(
            problem, pass_, "cuda-gather", "sm_80", 1, tile, precision
        )
        if one.kernel == "conv_gather"
    )
    assert ours.work.for_a_product() <= theirs.work.for_a_product()
    if PRODUCTS in ours.work.by_kind():
        of_loop = ours.work.for_a_product(in_main_loop=True)
        assert of_loop <= theirs.work.for_a_product(in_main_loop=True)
        assert dtype == "float32" or of_loop <= 4
    assert (ours.spilled, theirs.spilled) == (0, 0)
    assert ours.resident >= theirs.resident
