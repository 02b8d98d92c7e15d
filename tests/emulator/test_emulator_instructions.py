"""The instruction twin against a GPU's outputs, for every wrapper."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from tests.emulator import SCHEDULES, settings
from tests.emulator.golden_device import EmulatorDevice
from tests.gpu import golden

pytestmark = pytest.mark.costly

BY_MANUAL: dict[str, np.ndarray] = {}
"""Outputs of new cases, computed from the PTX manual until a GPU has recorded them."""


@cache
def recorded() -> dict[str, np.ndarray]:
    """Return the inputs and outputs that a GPU has recorded."""
    (path,) = golden.RESULTS.glob("golden-*.npz")
    with np.load(path) as file:
        return dict(file)


def expected(case: golden.Case) -> np.ndarray:
    """Return the output of a case; its inputs must be those that a GPU has recorded."""
    if case.name in BY_MANUAL:
        return BY_MANUAL[case.name]
    for index, value in enumerate(case.inputs):
        is_float = value.dtype.kind == "f"
        same_input = np.array_equal(
            recorded()[f"{case.name}/input{index}"], value, equal_nan=is_float
        )
        assert same_input, f"{case.name} has other inputs than when its output was recorded"
    return recorded()[f"{case.name}/output"]


def same(case: golden.Case, actual: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether an output is as expected, within the instruction's error."""
    wanted = wanted.reshape(actual.shape)
    if not case.ulps:
        return np.array_equal(actual, wanted, equal_nan=actual.dtype.kind == "f")
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - wanted) <= case.ulps * np.spacing(np.abs(wanted))
    return bool((near | (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))).all())


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_twin_agrees_with_the_gpu(case: golden.Case) -> None:
    for schedule in SCHEDULES[:1] if case.wgmma else SCHEDULES:
        with settings(schedule):
            assert same(case, golden.run(case, EmulatorDevice()), expected(case)), schedule


def test_every_wrapper_has_a_golden_kernel() -> None:
    from tests.emulator import build

    text = golden.SOURCE.read_text()
    wrappers = build.declared_wrappers((build.INCLUDE_DIRECTORY / "ptx.cuh").read_text())
    # golden.cu's macros build these names.
    generated = {f"wgmma_m64_{kind}" for kind in ("f16", "bf16", "tf32")}
    missing = []
    for declaration in wrappers:
        name = re.search(r"(\w+)\(", declaration)[1]
        used = rf"ptx::{name}\b|KERNEL\w*\(\s*{name}\b|BODY\(.*\b{name}\b"
        if name not in generated and not re.search(used, text):
            missing.append(name)
    assert not missing
