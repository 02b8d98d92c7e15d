"""`cupyconv plan`."""

import json

import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import arrays
from cupyconv.cli.main import main
from cupyconv.planning import Device, Plan

LAYER = ("--input", "8x64x28x28", "--filter", "96x64x3x3", "--padding", "same")
PROBLEM = cupyconv.ConvProblem((8, 64, 28, 28), (96, 64, 3, 3), padding="same")
ON_TWO = ("--device", "sm_80", "--device", "cpu")


def run(*arguments):
    return CliRunner().invoke(main, ("plan", *arguments))


def test_all_that_a_plan_says_is_told_of_each_device():
    found = run(*LAYER, *ON_TWO)
    assert found.exit_code == 0, found.output
    words = " ".join(found.stdout.split())
    for device in ("sm_80", "cpu"):
        planned = cupyconv.plan(PROBLEM, device)
        assert f"on {device}" in words
        for chosen in planned:
            assert chosen.implementation in words
            assert str(chosen.tile or "") in words
    assert words.count("Estimates are modelled; nothing was measured.") == 2


def test_a_planned_layer_as_json_is_what_a_call_takes():
    (layer,) = json.loads(run(*LAYER, *ON_TWO, "--json").stdout)["layers"]
    for device, found in zip(("sm_80", "cpu"), layer["plans"], strict=True):
        assert "nothing was measured" in found["times"]
        assert Plan.from_json(json.dumps(found)) == cupyconv.plan(PROBLEM, device)


def test_a_plan_is_of_what_is_permitted_and_named():
    found = json.loads(run(*LAYER, "--device", "sm_80", "--precision", "tf32", "--json").stdout)
    (planned,) = found["layers"][0]["plans"]
    assert planned["passes"][0]["precision"] == "tf32"
    words = run(*LAYER, "--device", "sm_90a", "--impl", "cuda-generic").stdout
    assert words.count("cuda-generic") == 3


def test_without_a_device_it_is_the_one_that_is_here(monkeypatch):
    monkeypatch.setattr("cupyconv.backends.current_device", lambda: Device.of("sm_86"))
    assert "on sm_86" in run(*LAYER).stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--device", "sm_12"), 2, "compute capability 7.5 or later"),
        (("--device", "gpu"), 2, "device"),
        (("--impl", "cuda-gathr", "--device", "sm_80"), 2, "cuda-gather"),
        (("--precision", "tf16"), 2, "tf32"),
        (("--measure",), 3, "finds no usable GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said_in_a_line(words, code, said, monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    found = run(*LAYER, *words)
    assert found.exit_code == code, found.output
    assert found.stdout == ""
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
