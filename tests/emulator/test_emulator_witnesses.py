"""Witnesses on the emulator: results must be exact, and only argued reports are allowed."""

from __future__ import annotations

import contextlib

import pytest

from tests import emulator
from tests.emulator import settings, witnesses
from tests.emulator.module import Outcome
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
