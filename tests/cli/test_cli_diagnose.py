"""`cupyconv diagnose`: the convention of values in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyconv
from tests import command

pytestmark = pytest.mark.quick

TENSORS = ("--x", "--w", "--y")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the arrays of a layer with padding 1."""
    path = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((4, 3, 3, 3))
    y = cupyconv.conv_forward(x, w, padding=1)
    np.savez(path / "layer.npz", x=x, w=w, y=y, dy=y, db=y.sum((0, 2, 3)))
    for name, array in {"x": x, "w": w, "y": y, "noise": rng.standard_normal(y.shape)}.items():
        np.save(path / f"{name}.npy", array)
    return path


def words(folder: Path, *args: str) -> list[Any]:
    return ["diagnose", *(folder / arg if arg.endswith((".npy", ".npz")) else arg for arg in args)]


def run(folder: Path, *args: str) -> Any:
    return command.run(*words(folder, *args))


def test_exit_code_says_whether_the_options_give_the_values(folder):
    arrays = [word for name in TENSORS for word in (name, "layer.npz")]
    right, wrong = run(folder, *arrays, "--padding", "1"), run(folder, *arrays)
    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert "Your options give these values of y" in right.stdout
    assert "Another convention gives these values of y: padding 1" in wrong.stdout
    assert "- y = cupyconv" not in wrong.stdout  # the options do not fit the shapes
    assert "F.conv2d(X, W, padding=1" in wrong.stdout
    none = run(folder, "--x", "x.npy", "--w", "w.npy", "--y", "noise.npy", "--padding", "1")
    assert none.exit_code == 1
    assert "No convention that was tried" in none.stdout


def test_lines_show_the_change(folder):
    files = ("--x", "x.npy", "--w", "w.npy", "--y", "y.npy")
    result = run(folder, *files, "--padding", "0:2,0:2")
    assert "  - y = cupyconv.conv_forward(x, w, padding=((0, 2), (0, 2)))" in result.stdout
    assert "  + y = cupyconv.conv_forward(x, w, padding=1)" in result.stdout
    assert "The first element that differs: y[0,0,0,0]" in result.stdout


def test_json_has_every_result(folder):
    files = ("--x", "x.npy", "--w", "w.npy", "--y", "y.npy", "--dy", "layer.npz")
    result = run(folder, *files, "--db", "layer.npz", "--json")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [one["result"] for one in content["results"]] == ["y", "db"]
    assert content["results"][0]["differences"] == {"padding": {"yours": "0", "found": "1"}}
    assert content["results"][0]["lines"]["cupyconv"].endswith("padding=1)")


def test_shapes_alone_list_input_sizes_as_shapes_does():
    options = ["--dy", "1x3x3x4", "--filter", "3x3x3x4", "--stride", "2", "--data-format", "NHWC"]
    assert command.said("diagnose", *options) == command.said("shapes", *options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "got no array"),
        (("--x", "x.npy", "--dy", "1x2x3x3"), "got --dy as a shape"),
        (("--x", "x.npy", "--y", "y.npy"), "w is missing"),
        (("--x", "x.npy", "--w", "w.npy"), "must have a result"),
        (("--y", "nothing.npy"), "No such file"),
        (("--x", "x.npy", "--w", "w.npy", "--y", "y.npy", "--input", "1x1x1"), "--input"),
        (("--y", "y.npy", "--activation", "tanh"), "unknown activation"),
    ],
)
def test_wrong_usage_is_one_line(folder, args, message):
    assert message in command.refused(*words(folder, *args))


def test_arrays_beyond_memory_are_refused(folder, monkeypatch):
    from cupyconv.cli import data

    monkeypatch.setattr(data, "available_memory", lambda: 1000)
    given = words(folder, "--x", "x.npy", "--w", "w.npy", "--y", "y.npy")
    assert "must fit into main memory" in command.refused(*given)
