"""The GPU run on emulated devices: its steps in small form, and its reports."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv.checking import pass_function
from cupyconv.problem import PASSES
from tests.gpu import __main__ as everything
from tests.gpu import contenders, report
from tests.gpu.running import ROOT


def test_every_step_runs_on_emulated_devices(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), "--sample", "1",
               "--minutes", "60"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    records = report.load(tmp_path)
    ends = {record["step"]: record for record in records if record.get("event") == "end"}
    assert list(ends) == [step.name for step in everything.steps()]
    assert all(record["left"] == 0 for record in ends.values())
    assert report.machine(records)["gpu"] == "emulated sm_90"
    assert report.main(tmp_path) == 0
    (golden,) = tmp_path.glob("golden-sm_90.npz")
    with np.load(golden) as file:
        assert file.files


def test_slower_passes_come_first_with_four_candidates(monkeypatch):
    words = ("resnet50-03", "forward", *contenders.ORDERS[1])
    slower = ("vgg16-3", "backprop_filter", *contenders.ORDERS[0])
    monkeypatch.setattr(contenders, "_ratios", lambda: {words: 0.9, slower: 0.5})
    listed = contenders.cases("contenders")
    assert [one["name"] for one in listed] == [" ".join(slower), " ".join(words)]
    assert listed[0]["labels"] == ("cudnn", "0", "1", "2", "3")
    others = contenders.cases("table")
    assert len(others) == 2 * len(PASSES) * len(contenders.ORDERS) - 2


def test_wrong_candidate_is_reported_and_not_timed(monkeypatch):
    contenders.cases("contenders")
    case = contenders._case("vgg16-3", "forward", *contenders.ORDERS[2]) | {"labels": ("0", "1")}
    planned = contenders._planned

    def wrong(case, label, sets):
        one = planned(case, label, sets)
        return one._replace(result=one.result * float("nan")) if label == "1" else one

    monkeypatch.setattr(contenders, "_planned", wrong)
    found = contenders.run(case)
    assert found["state"] == "failed"
    assert [one["candidate"] for one in found["timings"]] == ["0"]
    assert found["timings"][0]["row"]["checked"] > 0
    assert "not all values are finite" in found["detail"]


def test_cudnn_is_timed_in_turns_with_and_without_determinism(monkeypatch):
    torch = pytest.importorskip("torch")
    flags, used = SimpleNamespace(deterministic=False, benchmark_limit=10), set()
    monkeypatch.setattr(torch.backends, "cudnn", flags)

    def call(problem, pass_, sets):
        compute = pass_function(problem, pass_)
        return lambda number: [used.add(flags.deterministic), compute(sets[number])][1]

    peer = SimpleNamespace(
        refuses=lambda problem, pass_: None, call=call, to_array=lambda result, *_: result
    )
    monkeypatch.setattr(contenders, "find_torch", lambda precision: peer)
    listed = contenders.cases("cudnn")
    assert listed[0]["labels"] == ("cudnn", "deterministic", "0")
    found = contenders.run(listed[0])
    assert found["state"] == "passed"
    assert [one["candidate"] for one in found["timings"]] == list(listed[0]["labels"])
    assert (used, flags.benchmark_limit) == ({False, True}, 0)
