"""The GPU run on emulated devices: its steps in small form, and its reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv.bench.results import Row
from cupyconv.checking import pass_function
from cupyconv.kernels.cost import Demand
from cupyconv.problem import PASSES
from tests import speed_table
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


ABOUT = {"gpu": "H", "architecture": "sm_90a", "device": "gpu", "date": "2026-01-01"}


def row(pass_, name, time, precision="ieee", dtype="float16"):
    host = 60.0 if name.startswith("cuda") else 40.0
    return asdict(Row("a-1", "a", "dense", pass_, dtype, precision, name, "kernel", "channels_last",
                      time, time, time, 3, host, None, 9, 9, 0.0, 0.01, 1.0))  # fmt: skip


@pytest.fixture
def measured(tmp_path):
    """Write results: cuDNN takes 30 us, the planned kernel 20 us, other kernels less or more."""
    lines = [{"step": "smoke", "event": "begin", "about": ABOUT}]
    times = {"cudnn": ("torch", 30.0), "0": ("cuda-hopper", 20.0), "1": ("cuda-hopper", 10.0)}
    old = "a-1 forward float16 ieee channels_last"  # a case in the form of earlier runs
    for label, (name, time) in times.items():
        lines.append({"step": "contenders", "case": f"{old} {label}",
                      "state": "passed", "seconds": 1, "row": row("forward", name, time),
                      "modelled": None if label == "cudnn" else time})  # fmt: skip
    times |= {"2": ("cuda-gather", 40.0), "deterministic": ("torch", 60.0)}
    for words in ("float16 ieee", "float32 bf16x6"):
        dtype, precision = words.split()
        timings = [
            {"candidate": label, "row": row("backprop_input", name, time, precision, dtype),
             "modelled": None if name == "torch" else time}
            for label, (name, time) in times.items()
        ]  # fmt: skip
        lines.append({"step": "contenders", "case": f"a-1 backprop_input {words} channels_last",
                      "state": "passed", "seconds": 1, "timings": timings})  # fmt: skip
    lines.append({"step": "loop", "case": "float16", "state": "passed", "seconds": 1,
                  "microseconds": {"cupyconv": 9.0, "PyTorch": 21.0}})  # fmt: skip
    hang = {"step": "tests", "state": "hang", "detail": "30 s"}
    lines += [hang | {"case": f"t.py::test_a[{words}]"} for words in ("b c", "d")]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": "broken'
    folder = tmp_path / "gpu" / "results"
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text(text)
    (folder / "runs.toml").write_text(
        "[[runs]]\ngpu = 'H'\ndate = '2026-01-01'\nsummary = '{tests[hang]} hang'\n"
        "details = []\nlimits = ['Free clocks.']\n"
        "[[runs.reasons]]\nstep = 'tests'\ntext = '30 s'\nreason = 'It is slow.'\n"
    )
    return folder


def test_report_has_tables_calibration_and_failures(measured, monkeypatch):
    def candidate_of(record, architecture):
        modelled = record["modelled"]
        demand = Demand(launches=1, multiplying=modelled or 0)
        return modelled and SimpleNamespace(microseconds=modelled, demand=demand)

    monkeypatch.setattr(contenders, "candidate_of", candidate_of)
    assert report.main(measured) == 0
    text = (measured / "report.md").read_text()
    for expected in (
        "On an H (2026-01-01), 2 hang.",
        "| float16 | dense (1) | 1.50× (1 / 0 / 0) | 1.50× (1 / 0 / 0) | 1.50× (2 / 0 / 0) | 1.50× "
        "| 3.00× (1 / 0 / 0) | 60 / 40 | 0.67× |",
        "| float32, bf16x6; TF32 forbidden in PyTorch | dense (1) | – | 1.50× (1 / 0 / 0) |",
        "In 3 of 3 passes, a call takes the host longer",
        "- Free clocks.",
        "| float16 | 9.0 | 21.0 |",
        "- 3 of 13 timed results, against float64",
        "| float16 ieee channels_last | backprop_input | 2.000 (1) | a-1 2.00 |",
        "- tests: t.py::test_a[b c] and 1 more: hang: 30 s\n  It is slow.\n"
        "  `python -m tests.gpu tests --only 't.py::test_a[b c]'`",
    ):
        assert expected in text, expected
    for expected in ("| forward | 2.000", "Float32 by bf16x6", "cuDNN's deterministic"):
        assert expected not in text, expected
    bench = speed_table.newest(measured.parents[1], "gpu")
    names = ["torch", "auto", "torch", "auto", speed_table.DETERMINISTIC]
    assert [entry.implementation for entry in bench.rows][:5] == names
    assert [entry.checked for entry in bench.rows][:5] == [0, 0, 1, 1, 1]
    calibration = json.loads((measured / "calibration.json").read_text())
    assert calibration["chip"] == "sm_90a"
    *_, forward = calibration["prices"]
    assert (forward["pass"], forward["dtypes"], forward["count"]) == ("forward", "16-bit", 2)
    assert forward["prices"]["multiplying"] > 0


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
