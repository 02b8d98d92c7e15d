"""Mutants of the host code: what they are and which tests judge them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.device import forked, mutants
from tests.emulator.mutants import equivalent_mutants


def test_arguments_are_about_mutants_that_there_are() -> None:
    existing = {(one.file, one.source, one.change) for one in mutants.all_mutants()}
    assert set(equivalent_mutants(mutants.EQUIVALENT)) <= existing


def test_every_mutant_differs() -> None:
    found = list(mutants.mutations("a.py", "f(x, x, 1)"))
    assert [one.change for one in found] == ["f removed", "x <-> 1", "1 -> 2"]
    assert all(one.text != "f(x, x, 1)" for one in found)


def test_a_mutant_is_in_a_statement() -> None:
    found = mutants.all_mutants("tensormaps")
    statements = [mutants.lines_of_statement(one) for one in found]
    assert all(one.line in lines for one, lines in zip(found, statements, strict=True))
    assert max(map(len, statements)) < 20


def test_tests_that_run_a_mutants_statement_judge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mutant, *_) = mutants.all_mutants("launch")
    line = max(mutants.lines_of_statement(mutant))
    covered = {
        "": {"seconds": 0.0, "lines": {}},
        "slow": {"seconds": 2.0, "lines": {mutant.file: [line]}},
        "quick": {"seconds": 1.0, "lines": {mutant.file: [line]}},
        "elsewhere": {"seconds": 0.5, "lines": {mutant.file: [10**6]}},
    }
    judge = mutants.Judge(tmp_path, seconds=60)
    monkeypatch.setattr(mutants, "files_of", lambda _: [mutants.Tests("tests/a.py", True)])
    monkeypatch.setattr(judge, "covered", lambda _: covered)
    asked = []
    monkeypatch.setattr(judge, "_killer", lambda *given: asked.append(given[2]) or "quick")
    assert judge.judge(mutant) == "killed by quick"
    assert asked == [["quick", "slow"]]
    again = mutants.Judge(tmp_path, seconds=60)  # what was killed is known
    assert again.judge(mutant) == "killed by quick"
    (kept,) = (tmp_path / "killed.jsonl").read_text().splitlines()
    assert json.loads(kept)[1:] == ["quick", mutant.file]


def test_tests_that_have_killed_most_are_run_first_and_long_ones_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = mutants.all_mutants("launch")
    lines = {first.file: list(range(1000))}
    seconds = {"quick": 1.0, "killer": 1.5, "long": 3.0, "longer": 40.0, "too long": 50.0}
    covered = {test: {"seconds": seconds[test], "lines": lines} for test in seconds}
    judge = mutants.Judge(tmp_path, seconds=60)
    monkeypatch.setattr(mutants, "files_of", lambda _: [mutants.Tests("tests/a.py", True)])
    monkeypatch.setattr(judge, "covered", lambda _: covered)
    asked: list[list[str]] = []

    def killer(one: object, command: object, tests: list[str]) -> str:
        asked.append(tests)
        return "killer" if one is first and "killer" in tests else ""

    monkeypatch.setattr(judge, "_killer", killer)
    assert judge.judge(first) == "killed by killer"
    assert judge.judge(second) == "survived"
    assert asked == [["quick", "killer", "long"], ["killer", "quick", "long"], ["longer"]]


SOURCE = """
LIMIT = 3
def above(x):
    return [each > LIMIT for each in x]
class Held:
    def below(self, x):
        return x < LIMIT
"""


def test_functions_that_a_mutant_changes_are_told_from_what_runs_on_import(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    for old, new, name in (("each >", "each <=", "above"), ("x <", "x >=", "Held.below")):
        ((before, after),) = forked.functions_changed(str(file), SOURCE.replace(old, new))
        assert before.co_qualname == after.co_qualname == name
    assert forked.functions_changed(str(file), SOURCE) == []
    with pytest.raises(ValueError, match="import"):
        forked.functions_changed(str(file), SOURCE.replace("= 3", "= 4"))
