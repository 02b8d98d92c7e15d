"""`cupyconv explain`: output, files and errors."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.cli import output
from tests import command

SMALL = ("--input", "1x3x8x8", "--filter", "4x3x3x3")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "device_count", lambda: 0)


run, said, refused = (
    partial(function, "explain") for function in (command.run, command.said, command.refused)
)


def test_values_match_those_of_grads(tmp_path):
    path = tmp_path / "tensors.npz"
    arguments = ["grads", *SMALL, "--seed", "3", "--no-check", "--save", str(path)]
    assert command.run(*arguments).exit_code == 0
    with np.load(path) as file:
        saved = dict(file)
    result = json.loads(
        said(*SMALL, "--seed", "3", "--element", "dF[1,2,0,1]", "--element", "O[0,1,2,3]", "--json")
    )
    (layer,) = result["layers"]
    dw, y = layer["elements"]
    assert dw["sum"] == pytest.approx(saved["dw"][1, 2, 0, 1], rel=1e-5)
    assert dw["computed"] == saved["dw"][1, 2, 0, 1]
    assert y["sum"] == pytest.approx(saved["y"][0, 1, 2, 3], rel=1e-5)
    assert y["terms"][0]["values"] == [saved["x"][0, 0, 2, 3], saved["w"][1, 0, 0, 0]]


def test_integers_match_those_of_grads(tmp_path):
    path = tmp_path / "tensors.npz"
    arguments = ["grads", *SMALL, "--values", "integers", "--save", str(path)]
    assert command.run(*arguments).exit_code == 0
    with np.load(path) as file:
        saved = dict(file)
    text = said(*SMALL, "--values", "integers", "--element", "dw[1,2,0,1]")
    assert f"sum of 36 products = {saved['dw'][1, 2, 0, 1]:.0f}\n" in text
    assert "random integers from seed 0" in text
    assert np.abs(saved["x"]).max() == 3
    assert "Did you mean 'integers'?" in refused(*SMALL, "--values", "integer")
    config = tmp_path / "layer.toml"
    config.write_text('input = "1x3x8x8"\nfilter = "4x3x3x3"\nvalues = "integers"\n')
    assert said("--config", str(config), "--element", "dw[1,2,0,1]") == text


def test_small_layer_prints_all_values():
    text = said("--preset", "by-hand").partition("All values")[2].partition("How can")[0]
    printed = [int(word) for word in text.split() if re.fullmatch(r"-?\d+", word)]
    data = cupyconv.explain(ConvProblem((1, 2, 4, 4), (3, 2, 2, 2)), values="integers").data
    assert sorted(printed) == sorted(np.concatenate([data[t].ravel() for t in data]).tolist())
    assert "All values" not in said(*SMALL)


def test_values_are_read_from_files(tmp_path):
    x, dy = np.arange(12.0).reshape(1, 1, 12), np.ones((1, 1, 10))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "dy.npy", dy)
    files = ("--x", str(tmp_path / "x.npy"), "--dy", str(tmp_path / "dy.npy"))
    text = said("--filter", "1x1x3", *files, "--element", "dF[0,0,2]")
    assert "sum of 10 products = 65" in text
    assert "x from" in text
    assert "random data from seed 0" in " ".join(text.split())  # w
    assert "dy must have the output size" in refused(
        "--filter", "1x1x4", *files, "--element", "dF[0,0,0]"
    )


def test_json_has_every_section():
    (layer,) = json.loads(said("--preset", "same-stride", "--map", "dx", "--json"))["layers"]
    assert layer["name"] == "same-stride"
    assert layer["shapes"]["dx"] == [1, 5, 5, 3]
    assert layer["axes"][0]["valid_input_sizes"] == {"first": 5, "last": 6}
    assert layer["axes"][0]["input_gradient"]["padding"] == [1, 1]
    assert layer["map"]["axes"]["H"] == [1, 2, 1, 2, 1]
    assert layer["example"]["element"] == "dw[2,1,1,1]"
    assert {entry["framework"] for entry in layer["frameworks"]} == {
        "TensorFlow",
        "PyTorch",
        "JAX",
        "ONNX",
    }
    assert any("outer product" in text for text in layer["answers"]["channels"])


def test_all_option_lists_every_term():
    text = said("--preset", "multi-channel", "--element", "O[0,0,0,0]", "--all")
    assert text.count("x[0,") == 125
    assert "more" not in text


def test_written_files_are_named_in_the_output(tmp_path):
    svg, html = tmp_path / "layer.svg", tmp_path / "layer.html"
    text = said("--preset", "same-stride", "--svg", str(svg), "--html", str(html))
    assert text == f"saved to {svg} and {html}\n"
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!doctype html>")
    said("--preset", "same-stride", "--map", "dx", "--svg", str(svg))
    assert "number of terms for each of the 4 filters" in svg.read_text()
    volume = ("--input", "1x2x6x6x6", "--filter", "2x2x3x3x3", "--svg", str(svg))
    assert said(*volume) == f"saved to {svg}, with a separate drawing of each spatial axis\n"
    assert said(*volume, "--map", "dx").endswith(f"saved to {svg}\n")
    assert "slice D = 3" in svg.read_text()
    assert "there is no folder" in refused(
        "--preset", "same-stride", "--svg", str(tmp_path / "no" / "a")
    )
    assert "axis W" in refused("--input", "1x1x9000000", "--filter", "1x1x3", "--svg", str(svg))


def test_huge_layer_is_explained_without_values():
    text = said("--input", "1x64x3000x3000", "--filter", "64x64x3x3", "--element", "dF[0,0,0,0]")
    assert "Values are left out" in text
    assert "8,988,004 terms" in text


def test_large_option_computes_large_layers(monkeypatch):
    monkeypatch.setattr("cupyconv.explaining.values.MOST_FLOPS", 1)
    element = (*SMALL, "--element", "dF[0,0,0,0]")
    assert "pass --large" in said(*element)
    assert "conv_backprop_filter gives" in said(*element, "--large")
    huge = ("--input", "1x1x999999999999999999", "--filter", "1x1x3", "--large")
    assert "must fit into main memory for --large" in refused(*huge)


@pytest.mark.parametrize(
    ("args", "said_"),
    [
        (("--element", "dF[10,0,0,0]"), "Use k from 0 to 3"),
        (("--element", "dF"), "an element must be a tensor's name and its indices"),
        (("--map", "dz"), "unknown map"),
        (("--code", "caffe"), "unknown framework"),
        (("--preset", "same"), "unknown preset"),
    ],
)
def test_invalid_options_get_one_line(args, said_):
    assert said_ in refused(*SMALL, *args)


def test_several_layers_are_explained(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(
        '[[layer]]\ninput = "1x1x4"\nfilter = "1x1x2"\n\n'
        '[[layer]]\ninput = "1x1x5"\nfilter = "1x1x2"\n'
    )
    assert said("--config", str(path)).count("The same layer in other frameworks") == 2
    assert "must be used with a single layer" in refused(
        "--config", str(path), "--svg", str(tmp_path / "a.svg")
    )
    said("--config", str(path), "--html", str(tmp_path / "a.html"))
    page = (tmp_path / "a.html").read_text()
    assert re.findall("<summary><b>(.*?)</b> (.*?)<", page) == [
        ("layer 1", "1x1x4 * 1x1x2 -&gt; 1x1x3"), ("layer 2", "1x1x5 * 1x1x2 -&gt; 1x1x4"),
    ]  # fmt: skip
    assert page.count("The same layer in other frameworks") == 2


@pytest.mark.parametrize(("terminal", "lines", "paged"), [(1, 9, 1), (1, 10, 0), (0, 9, 0)])
def test_long_output_uses_the_pager(monkeypatch, capsys, terminal, lines, paged):
    shown: list[str] = []
    monkeypatch.setattr("click.echo_via_pager", shown.append)
    monkeypatch.setattr("sys.stdout.isatty", lambda: bool(terminal))
    monkeypatch.setenv("LINES", str(lines))
    text = "line\n" * 9
    output.write_paged(text)
    assert shown == [text] * paged
    assert capsys.readouterr().out == text * (1 - paged)
