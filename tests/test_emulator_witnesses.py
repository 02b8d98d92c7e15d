"""Kernels of others on the emulator: right to the last bit, and no report but argued ones."""

from __future__ import annotations

import contextlib

import pytest

from cupyconv import ConvProblem
from tests import emulator
from tests.emulator import account, settings, witnesses
from tests.emulator.module import Outcome
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
