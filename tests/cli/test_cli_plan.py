"""`cupyconv plan`."""

import json
from functools import partial

import pytest

import cupyconv
from cupyconv.kernels.cost import duration
from cupyconv.planning import Device, Plan
from cupyconv.planning.estimates import estimate
from cupyconv.problem import PASSES
from tests import command

LAYER = ("--input", "8x64x28x28", "--filter", "96x64x3x3", "--padding", "same")
PROBLEM = cupyconv.ConvProblem((8, 64, 28, 28), (96, 64, 3, 3), padding="same")
ON_TWO = ("--device", "sm_80", "--device", "cpu")


run, said, parsed = (
    partial(function, "plan") for function in (command.run, command.said, command.parsed)
)


def test_plan_prints_every_device():
    words = " ".join(said(*LAYER, *ON_TWO).split())
    for device in ("sm_80", "cpu"):
        planned = cupyconv.plan(PROBLEM, device)
        assert f"on {device}" in words
        for chosen in planned:
            assert chosen.implementation in words
            assert str(chosen.tile or "") in words
    assert words.count("Estimates are modelled; ") == 2


def test_json_plan_equals_the_library_plan():
    (layer,) = parsed(*LAYER, *ON_TWO)["layers"]
    for device, found in zip(("sm_80", "cpu"), layer["plans"], strict=True):
        assert "was measured" in found["times"]
        assert Plan.from_json(json.dumps(found)) == cupyconv.plan(PROBLEM, device)


def test_plan_shows_figures_in_100_columns():
    for device in ("RTX 4090", "cpu"):
        text = run(*LAYER, "--device", device).stdout
        assert max(map(len, text.splitlines())) <= 100
        planned = cupyconv.plan(PROBLEM, device)
        for pass_ in PASSES:
            figures = estimate(planned, pass_)
            row = next(line for line in text.splitlines() if line.startswith(f"{pass_} "))
            assert duration(figures.planned.microseconds) in row
            assert f"{figures.teraflops:#.3g}" in row
            if figures.share is not None:
                assert f"{figures.share:.0%}" in row
                assert figures.bound.split()[0] in row
    assert "e+0" not in run("--input", "64x256x512x512", "--filter", "256x256x3x3").stdout


def test_json_has_every_figure_of_the_tables():
    found = parsed(*LAYER, "--device", "RTX 4090")
    (written,) = found["layers"][0]["plans"]
    for entry in written["estimates"]:
        figures = estimate(cupyconv.plan(PROBLEM, "RTX 4090"), entry["pass"])
        assert entry["microseconds"] == figures.planned.microseconds
        assert entry["teraflops"] == figures.teraflops
        assert entry["roofline_share"] == figures.share
        assert entry["runner_up"]["microseconds"] == figures.runner_up.microseconds
        assert set(entry["instead"]) == {"tf32", "bf16x6", "channels last", "float16"}
    totals = found["totals"][0]["tensors"]
    assert [entry["gives"] for entry in totals] == ["y", "dx", "dw", "y, dx and dw"]
    assert totals[3]["microseconds"] == sum(entry["microseconds"] for entry in totals[:3])


def test_many_layers_get_a_line_each_and_totals(tmp_path):
    layers = [
        f"[[layer]]\nname = 'l{i}'\ninput = '1x{8 * i}x32x32'\nfilter = '16x{8 * i}x3x3'\n"
        for i in range(1, 13)
    ]
    file = tmp_path / "layers.toml"
    file.write_text("\n".join(layers))
    arguments = ("--config", str(file), "--device", "L4")
    lines = run(*arguments).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("l12 ") for line in lines) == 2  # in the listing and the slowest
    plans = [
        cupyconv.plan(cupyconv.ConvProblem((1, 8 * i, 32, 32), (16, 8 * i, 3, 3)), "L4")
        for i in range(1, 13)
    ]
    y, dx, dw = (sum(plan[pass_].microseconds for plan in plans) for pass_ in PASSES)
    for gives, time in {"y": y, "dx": dx, "dw": dw, "y, dx and dw": y + dx + dw}.items():
        row = next(line for line in lines if line.startswith(f"{gives}  "))
        assert duration(time) in row
    slowest = parsed(*arguments)["totals"][0]["slowest"]
    assert len(slowest) == 10
    times = [entry["microseconds"] for entry in slowest]
    assert times == sorted(times, reverse=True)
    every = sorted(sum(one.microseconds for one in plan) for plan in plans)
    assert times == pytest.approx(every[:-11:-1])


def test_plan_respects_precision_and_implementation():
    found = parsed(*LAYER, "--device", "sm_80", "--precision", "tf32")
    (planned,) = found["layers"][0]["plans"]
    assert planned["passes"][0]["precision"] == "tf32"
    words = run(*LAYER, "--device", "sm_90a", "--impl", "cuda-generic").stdout
    assert words.count("cuda-generic") == 3


def test_plan_without_a_device_uses_the_current_device(monkeypatch):
    monkeypatch.setattr("cupyconv.backends.current_device", lambda: Device.of("sm_86"))
    assert "on sm_86" in run(*LAYER).stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--device", "sm_12"), 2, "compute capability 7.5 or later"),
        (("--device", "gpu"), 2, "device"),
        (("--impl", "cuda-gathr", "--device", "sm_80"), 2, "cuda-gather"),
        (("--precision", "tf16"), 2, "tf32"),
        (("--measure",), 3, "finds no usable GPU"),
    ],
)  # fmt: skip
def test_impossible_plans_get_one_line(words, code, message):
    assert message in command.refused("plan", *LAYER, *words, code=code)
