"""tests.studies.ecosystem, which measures Dask, on small layers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

from cupyconv import ConvProblem
from cupyconv.problem import PASSES
from tests.studies import ecosystem


def test_results_are_printed_and_saved_with_their_command(monkeypatch, tmp_path, capsys):
    once = dict.fromkeys(PASSES, 1.0)
    fits = ecosystem.DaskTime("a layer", (1, 2, 3), 2, once, once, dict.fromkeys(PASSES, 0.0))
    large = ecosystem.DaskMemory("a layer", (1, 2, 3), 2, 9, 8, (1, 1), (4, 5), 2.5)
    for name, value in (("dask_time", fits), ("dask_memory", large)):
        monkeypatch.setattr(ecosystem, name, lambda *_, value=value: value)
    path = tmp_path / "new" / "figures.json"
    ecosystem.main(["--json", str(path)])
    kept = json.loads(path.read_text())
    assert kept == json.loads(capsys.readouterr().out)
    assert kept["environment"]["command"].startswith("python -m tests.studies.ecosystem --json")
    assert kept["dask"] == [json.loads(json.dumps(asdict(fits)))] * len(ecosystem.FITS)
    assert kept["dask_memory"]["peaks"] == [4, 5]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
@pytest.mark.filterwarnings("ignore")  # distributed warns about its processes and sockets
def test_dask_time_and_memory_are_measured_on_a_cluster():
    pytest.importorskip("distributed")
    pytest.importorskip("zarr")
    problem = ConvProblem((2, 3, 20, 18), (4, 3, 3, 3), padding=1)
    found = ecosystem.dask_time(problem, (1, 3, 10, 18), 1)
    assert set(found.one_process) == set(found.cluster) == set(found.overhead) == set(PASSES)
    for name in PASSES:
        share = found.cluster[name] / found.one_process[name] - 1
        assert found.overhead[name] == pytest.approx(share)
    volume = ConvProblem((1, 1, 40, 300, 300), (1, 1, 3, 3, 3), padding=1)
    limit = ecosystem.worker_limit()
    memory = ecosystem.dask_memory(volume, limit, workers=1)
    assert memory.bytes == 2 * 4 * 40 * 300 * 300
    (before,), (peak,) = memory.before, memory.peaks
    assert 50e6 < before <= peak < limit
