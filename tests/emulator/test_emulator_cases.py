"""The emulator's cases of every kernel family, and all of its tiles, are exact."""

from __future__ import annotations

import pytest

from cupyconv.planning.families import FAMILIES
from tests import emulator
from tests.emulator import cases

pytestmark = [pytest.mark.costly, pytest.mark.thorough]

ON_GPU = [name for name, family in FAMILIES.items() if family.on_gpu]
CASES = [
    pytest.param(run, id=f"{impl} {name}") for impl in ON_GPU for name, run in cases.cases_of(impl)
]
TILES = [
    pytest.param(passes, run, id=f"{impl} {name}")
    for impl in ON_GPU
    for name, passes, run in cases.every_tile(impl)
]


@pytest.mark.parametrize("run", CASES)
def test_every_case_is_exact(run):
    run()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("passes", "run"), TILES)
def test_every_tile_is_exact(passes, run, splits):
    for number, pass_ in enumerate(passes):
        run(pass_=pass_, schedule=emulator.SCHEDULES[number], splits=splits)
