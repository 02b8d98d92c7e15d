"""The GPU run on emulated devices: its steps in small form, and its reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv.bench.results import Row
from cupyconv.gpu import compiler
from cupyconv.kernels.cost import Demand
from tests import speed_table
from tests.gpu import __main__ as everything
from tests.gpu import contenders, pack, report, smoke
from tests.gpu.running import ROOT, Options


def test_every_step_runs_on_emulated_devices(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), "--sample", "1",
               "--minutes", "20"]  # fmt: skip
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


@pytest.fixture
def measured(tmp_path):
    """Write results for two passes: cuDNN takes 30 us, the planned kernel 20 us, another 10 us."""
    lines = [{"step": "smoke", "event": "begin", "about": ABOUT}]
    times = {"cudnn": (30.0, None), "0": (20.0, 10.0), "1": (10.0, 20.0)}
    for pass_ in ("forward", "backprop_input"):
        for label, (time, model) in times.items():
            lines.append(
                {"step": "contenders", "case": f"a-1 {pass_} float16 ieee channels_last {label}",
                 "state": "passed", "seconds": 1, "modelled": model,
                 "row": asdict(Row("a-1", "a", "dense", pass_, "float16", "ieee",
                                   "cuda-hopper" if model else "torch", "kernel", "channels_last",
                                   time, time, time, 3, 5.0, None, 9, 9, 0.0, 0.01, 1.0))}
            )  # fmt: skip
    lines.append({"step": "tests", "case": "t.py::test_a[b c]", "state": "hang", "detail": "30 s"})
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": "broken'
    folder = tmp_path / "gpu" / "results"
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text(text)
    return folder


def test_report_has_tables_calibration_and_failures(measured, monkeypatch):
    def candidate_of(record, architecture):
        modelled = record["modelled"]
        demand = Demand(launches=1, multiplying=modelled or 0)
        return modelled and SimpleNamespace(microseconds=modelled, demand=demand)

    monkeypatch.setattr(contenders, "candidate_of", candidate_of)
    assert report.main(measured) == 0
    text = (measured / "report.md").read_text()
    assert "| float16 | dense (1) | 1.50× (1 / 0 / 0) | 1.50× (1 / 0 / 0) | – |" in text
    bench = speed_table.newest(measured.parents[1], "gpu")
    assert [row.implementation for row in bench.rows] == ["torch", "auto"] * 2
    assert "| float16 ieee channels_last | forward | 2.000 (1) | a-1 2.00 |" in text
    assert "`python -m tests.gpu tests --only 't.py::test_a[b c]'`" in text
    calibration = json.loads((measured / "calibration.json").read_text())
    assert calibration["chip"] == "sm_90a"
    *_, forward = calibration["prices"]
    assert (forward["pass"], forward["dtypes"], forward["count"]) == ("forward", "16-bit", 2)
    assert forward["prices"]["launches"] > 0


def test_recorded_variants_are_those_of_a_run(tmp_path, monkeypatch, nothing_loaded):
    name = "cuda-gather forward float16 ieee"
    (step,) = (item for item in everything.steps() if item.name == "smoke")
    monkeypatch.setattr(everything, "steps", lambda: (replace(step, lines=True),))
    entries = pack.recorded(Options(tmp_path, only=name), "sm_90a")
    assert entries
    assert all(item["lines"] for item in entries)
    compiled = []
    compile_missing = compiler.compile_missing

    def record(variants, *arguments):
        compiled.extend(variants)
        return compile_missing(variants, *arguments)

    monkeypatch.setattr(compiler, "compile_missing", record)
    for case in smoke.cases():
        if name in case["name"]:
            smoke.run(case)
    assert set(map(pack.variant_of, entries)) == set(compiled)
