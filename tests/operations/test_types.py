"""Results of type checkers for the programs in tests/typed, which are not run."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import get_args

import pytest

import cupyconv
from cupyconv import cudnn, formats, onnx, planning, problem, raw_ops
from cupyconv.planning.families import FAMILIES
from tests import ROOT

FOLDER = ROOT / "tests" / "typed"
NEEDS = {"cupy_arrays.py": "cupy-stubs", "torch_tensors.py": "torch"}


def installed(package: str) -> bool:
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def programs() -> list[str]:
    """Return the programs that can be checked here, because their libraries are installed."""
    names = sorted(path.name for path in FOLDER.glob("*.py"))
    assert set(NEEDS) < set(names)
    return [name for name in names if name not in NEEDS or installed(NEEDS[name])]


def checked(command: list[str]) -> None:
    """Run a type checker; fail with its output if it reports errors."""
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=FOLDER, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.thorough
def test_mypy_rejects_exactly_the_wrong_lines(monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    checked(
        [
            "mypy",
            "--strict",
            "--follow-imports=silent",  # show no errors of the library itself
            "--config-file=",
            f"--cache-dir={ROOT / '.mypy_cache' / 'typed'}",
            *programs(),
        ]
    )


@pytest.mark.thorough
def test_pyright_rejects_exactly_the_wrong_lines(tmp_path):
    checker = next((name for name in ("basedpyright", "pyright") if find_spec(name)), None)
    if checker is None:
        pytest.skip("pyright is not installed; pip install '.[types]' brings it")
    settings = json.loads((FOLDER / "pyrightconfig.json").read_text())
    settings["extraPaths"] = [str(ROOT)]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name in programs():
        shutil.copy(FOLDER / name, tmp_path)
    options = ["--project", str(tmp_path), "--pythonpath", sys.executable, "--level", "error"]
    checked([checker, *options])


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_every_program_is_checked_where_its_types_are(name):
    if name not in programs():
        pytest.skip(f"{NEEDS[name]} is not installed")


RANKS = tuple(formats.SPATIAL_AXES)


@pytest.mark.parametrize(
    ("literal", "words"),
    [
        (formats.DataFormat, {w for rank in RANKS for w in formats.data_formats(rank)}
         | {formats.CHANNELS_FIRST, formats.CHANNELS_LAST}),
        (formats.FilterFormat, {w for rank in RANKS for w in formats.filter_formats(rank)}),
        (problem.PaddingWord, {w for word in problem.PADDING_WORDS for w in (word, word.upper())}),
        (problem.DtypeName, set(problem.ITEMSIZE)),
        (planning.Implementation, set(FAMILIES)),
        (planning.Impl, {"auto", *FAMILIES}),
        (cudnn.TensorCore, set(cudnn._PRECISIONS)),
        (onnx.AutoPad, {"NOTSET", *onnx._PADDING}),
        (raw_ops.Format2D, set(formats.data_formats(2))),
        (raw_ops.Format3D, set(formats.data_formats(3))),
    ],
)  # fmt: skip
def test_type_checkers_know_the_words_that_the_library_takes(literal, words):
    assert set(get_args(literal)) == words


def test_type_checkers_see_only_public_names():
    tree = ast.parse((ROOT / "cupyconv" / "__init__.py").read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = [alias for node in block.body for alias in node.names]
    # Type checkers treat a name as private unless it is imported ``as`` itself.
    assert all(alias.asname == alias.name for alias in seen)
    assert {alias.name for alias in seen} == {*cupyconv._MODULES, *cupyconv._OPTIONAL_MODULES}
