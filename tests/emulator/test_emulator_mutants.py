"""Mutation runs detect what they should, on small texts and on a shipped kernel."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests import emulator
from tests.emulator import mutants, mutations, trials
from tests.emulator.build import KERNEL_DIRECTORY

TEXT = """\
#define FOUR 4
// a comment with 7 and i < 8
static_assert(sizeof(int) == 4, "");
extern "C" __global__ void kernel(float* y) {
  for (int i = 0; i < 16; i++) {
    y[i + 2] = 0.5f;  // 3
    __syncthreads();
    ptx::cp_async_wait<1>();
    while (!ptx::mbarrier_try_wait_parity(&full[stage], phase)) {
    }
  }
  y[i * p.y_stride[axis] * p.stride[axis]] = shape.channel_stride;
}
"""


def test_mutations_of_a_text() -> None:
    changes = {(m.line, m.change) for m in mutations.mutations("kernel.cu", TEXT)}
    assert changes == {
        (5, "0 -> 1"),
        (5, "16 -> 15"),
        (5, "16 -> 17"),
        (5, "< -> <="),
        (6, "2 -> 1"),
        (6, "2 -> 3"),
        (7, "__syncthreads removed"),
        (8, "ptx::cp_async_wait removed"),
        (8, "1 -> 0"),
        (8, "1 -> 2"),
        (9, "ptx::mbarrier_try_wait_parity removed"),
        (12, "p.y_stride[axis] -> |p.y_stride[axis]|"),
        (12, "shape.channel_stride -> |shape.channel_stride|"),
    }


def test_removed_statement_keeps_other_text() -> None:
    (mutant,) = [m for m in mutations.mutations("kernel.cu", TEXT) if "parity" in m.change]
    assert "mbarrier" not in mutant.text
    assert mutant.text.count("\n") >= TEXT.count("\n") - 1
    assert str(mutant).startswith(
        "kernel.cu:9: [ptx::mbarrier_try_wait_parity removed] in: while ("
    )


def bias_case() -> None:
    dy = np.arange(-30, 42).reshape(2, 3, 3, 4).astype(np.float32)
    db = emulator.conv_backprop_bias(dy)
    assert np.array_equal(db, dy.sum(axis=(0, 2, 3)))


def bias_cases(file: str) -> list[trials.Case]:
    return [("bias", bias_case)]


def no_cases(file: str) -> list[trials.Case]:
    return []


def mutant_of_bias_kernel(change: str) -> mutations.Mutant:
    text = (KERNEL_DIRECTORY / "conv_backprop_bias.cu").read_text()
    return next(m for m in mutations.mutations("conv_backprop_bias.cu", text) if m.change == change)


@pytest.mark.parametrize(
    ("change", "outcomes"),
    [("__syncthreads removed", {"report"}), ("2 -> 1", {"report", "numbers"})],
)
def test_mutant_of_a_shipped_kernel_is_killed(change: str, outcomes: set[str]) -> None:
    mutant = mutant_of_bias_kernel(change)
    (verdict,) = trials.judge([mutant], bias_cases)
    assert verdict.outcome in outcomes, verdict
    if change == "__syncthreads removed":
        assert "race" in verdict.detail or "uninitialised-read" in verdict.detail
        assert "conv_backprop_bias.cu:" in verdict.detail


def test_unchanged_kernel_survives() -> None:
    unchanged = trials.judge_unchanged("conv_backprop_bias.cu", bias_cases)
    ((variant, _),) = unchanged["bias"].sources.items()
    assert variant[0] == "conv_backprop_bias.cu"


def wrong_cases(file: str) -> list[trials.Case]:
    return [("bias", bias_case), ("wrong", bias_case_of_something_else)]


def bias_case_of_something_else() -> None:
    assert emulator.conv_backprop_bias(np.ones((1, 1, 2), np.float32))[0] == 3


def test_case_failing_on_original_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"fail on the original kernels: wrong"):
        list(trials.judge([mutant_of_bias_kernel("0 -> 1")], wrong_cases))


def two_cases(file: str) -> list[trials.Case]:
    return [("generic", generic_case), ("bias", bias_case)]


def generic_case() -> None:
    x, w = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 2), np.float32)
    assert (emulator.conv_forward(x, w, impl="cuda-generic") == 2).all()


def test_cases_with_unchanged_kernels_are_skipped() -> None:
    mutant = mutant_of_bias_kernel("__syncthreads removed")
    (verdict,) = trials.judge([mutant], two_cases)
    assert verdict.case == "bias"
    unchanged = trials.judge_unchanged(mutant.file, two_cases)
    assert set(unchanged) == {"generic", "bias"}


@pytest.mark.thorough
def test_endless_mutant_is_killed() -> None:
    mutant = mutant_of_bias_kernel("> -> >=")  # half > 0, halved
    (verdict,) = trials.judge([mutant], bias_cases)
    assert (verdict.outcome, verdict.case) == ("timeout", "bias")


def test_cases_with_nearby_kills_come_first() -> None:
    text = (KERNEL_DIRECTORY / "conv_backprop_bias.cu").read_text()
    candidates = list(mutations.mutations("conv_backprop_bias.cu", text))
    kills = trials._Kills()
    assert kills.order(candidates[0], ["a", "b", "c"]) == ["a", "b", "c"]
    kills.add(trials.Verdict(candidates[0], "numbers", "c"))
    kills.add(trials.Verdict(candidates[-1], "report", "b"))
    kills.add(trials.Verdict(candidates[-1], "survived"))
    assert kills.order(candidates[0], ["a", "b", "c"]) == ["c", "b", "a"]
    assert kills.order(candidates[-1], ["a", "b", "c"]) == ["b", "c", "a"]


def broken_cases(file: str) -> list[trials.Case]:
    sys.exit(3)


def test_failing_trial_process_is_no_kill() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(trials.judge([mutant_of_bias_kernel("0 -> 1")], broken_cases))


def test_survivor_is_printed_unless_argued(monkeypatch, tmp_path, capsys) -> None:
    mutant = mutant_of_bias_kernel("__syncthreads removed")
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "list.toml")
    (tmp_path / "list.toml").write_text("")
    assert mutants.survivors([mutant], no_cases) == [mutant]
    assert f"survived   conv_backprop_bias.cu:{mutant.line}" in capsys.readouterr().out
    (tmp_path / "list.toml").write_text(
        f"['{mutant.file}'.'{mutant.source}']\n'other; {mutant.change}' = 'a test'\n"
    )
    assert mutants.survivors([mutant], no_cases) == []


def test_changed_lines_since_revision(tmp_path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    kernel = tmp_path / "conv.cu"
    kernel.write_text("a\nb\nc\nd\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    kernel.write_text("a\nB\nc\nnew\nd\nmore\nlast\n")
    monkeypatch.setattr(mutants, "KERNEL_DIRECTORY", tmp_path)
    assert mutants.changed_lines("HEAD") == {("conv.cu", line) for line in (2, 4, 6, 7)}


def test_listed_equivalents_exist() -> None:
    existing = {(m.file, m.source, m.change) for m in mutations.all_mutants()}
    missing = set(mutants.equivalent_mutants()) - existing
    assert not missing, "entries of equivalent_mutants.toml whose line no longer exists"
