"""tests.studies.limits, which divides the time of the NumPy path, on small layers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupyconv import ConvProblem
from cupyconv.bench import places, pytorch
from cupyconv.bench.data import random_sets
from cupyconv.bench.suites import SuiteLayer
from cupyconv.checking import pass_function
from cupyconv.problem import PASSES
from tests.studies import limits

DENSE = SuiteLayer("dense-1", ConvProblem((2, 16, 12, 12), (16, 16, 3, 3), padding=1))
DEPTHWISE = SuiteLayer(
    "depthwise-1", ConvProblem((2, 16, 12, 12), (16, 1, 3, 3), padding=1, groups=16)
)


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.001)
    monkeypatch.setattr(places, "PAUSE", 0.0)
    monkeypatch.setattr(places.Place, "sweep_bytes", 1 << 16)
    found, why_not = pytorch.find(places.of("cpu"))
    if found is None:
        pytest.skip(why_not)
    return found


def test_passes_all_have_a_share_and_a_limit(peer):
    matmul, einsum = np.matmul, np.einsum
    shares = limits.measure([DENSE, DEPTHWISE], places.of("cpu"), peer)
    assert (np.matmul, np.einsum) == (matmul, einsum)
    assert [(share.layer, share.pass_) for share in shares] == [
        (layer.name, pass_) for layer in (DENSE, DEPTHWISE) for pass_ in PASSES
    ]
    for share in shares:
        assert share.computing > 0
        assert share.ratio == share.peer / share.seconds
        # Only operations on padding may be omitted.
        assert share.operations >= share.useful_flops


def test_matmul_and_einsum_operations_are_counted():
    with limits._metered(meter := limits._Meter()):
        np.matmul(np.ones((3, 4, 5)), np.ones((5, 6)))
        assert meter.operations == 2 * 3 * 4 * 5 * 6
        np.einsum("ab,b->a", np.ones((7, 8)), np.ones(8))
        assert meter.operations == 2 * 3 * 4 * 5 * 6 + 2 * 7 * 8
    assert meter.seconds > 0


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("size", [8, 40])
def test_compiled_loops_are_counted(size, pass_, data_format):
    pytest.importorskip("numba", reason="Numba is not installed")
    shape = (2, size, size, 16) if data_format == "NHWC" else (2, 16, size, size)
    layer = {"padding": 1, "groups": 16, "data_format": data_format, "filter_format": "OIHW"}
    problem = ConvProblem(shape, (16, 1, 3, 3), **layer)
    [operands] = random_sets(problem, 1, np)
    with limits._metered(meter := limits._Meter()):
        pass_function(problem, pass_, "numpy")(operands)
    assert meter.operations >= problem.useful_flops


def test_results_are_printed_and_saved_with_their_command(peer, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(limits, "select", lambda *_words: (DENSE,))
    limits.main(["--json", str(tmp_path / "new" / "limits.json")])
    printed = capsys.readouterr().out
    assert "at most" in printed
    assert "all dense" in printed
    kept = json.loads((tmp_path / "new" / "limits.json").read_text())
    assert kept["environment"]["command"].endswith("-m tests.studies.limits --json limits.json")
    assert [share["pass_"] for share in kept["shares"]] == list(PASSES)
