"""The emulator's cases take every dtype and tile of every kernel family, and all are exact."""

from __future__ import annotations

from functools import partial

import pytest

from cupyconv.planning.families import FAMILIES
from tests import emulator
from tests.emulator import cases

ON_GPU = [name for name, family in FAMILIES.items() if family.on_gpu]
TILES = [
    pytest.param(passes, run, id=f"{impl} {name}")
    for impl in ON_GPU
    for name, passes, run in cases.every_tile(impl)
]


@pytest.mark.parametrize("impl", ON_GPU)
def test_cases_take_every_dtype_tile_and_activation(impl, monkeypatch):
    taken, names = set(), []

    def record(problem, plan, pass_, arch, precision):
        assert plan[pass_].implementation == impl
        taken.update({problem.dtype, plan[pass_].tile})

    monkeypatch.setattr(cases, "require_planned", record)
    for file in cases.kernel_files(impl):
        for name, run in cases.mutation_cases(file):
            names.append(name)
            if isinstance(run, partial) and run.func is cases._exact and run.args[1] == impl:
                run()
    dtypes = {dtype for dtype, _, _ in cases.every_dtype(impl)}
    assert taken - {None} >= dtypes | set(FAMILIES[impl].tiles)
    assert f"{impl} activation" in names


@pytest.mark.thorough
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("passes", "run"), TILES)
def test_every_tile_is_exact(passes, run, splits):
    for number, pass_ in enumerate(passes):
        run(pass_=pass_, schedule=emulator.SCHEDULES[number], splits=splits)
