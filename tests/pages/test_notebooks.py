"""The notebooks: complete runs with the built wheel, compared with the stored outputs.

After an intended change, write the outputs again and review the difference:

    CUPYCONV_GOLDEN=write python -m pytest tests/pages/test_notebooks.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from itertools import zip_longest
from pathlib import Path

import pytest

import cupyconv
from cupyconv import arrays
from tests import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))

LIMIT = 1800
"""Maximum seconds per notebook, even on a busy machine (hand-set)."""

if missing := [m for m in ("nbclient", "nbformat", "ipykernel") if not importlib.util.find_spec(m)]:
    pytest.skip(f"{', '.join(missing)} not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat


def texts(notebook) -> list[str]:
    """Return the outputs of the code cells, without rounding errors and machine-dependent parts.

    Outputs are printed text and displayed values: tables, pictures and pages, in every format.
    """
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        shown: list[str] = []
        for output in cell.outputs:
            if output.get("name") == "stdout":
                shown.append(output.text)
            shown += (text for _, text in sorted(output.get("data", {}).items()))
        text = re.sub(r"\d(\.\d+)?e-\d\d", "#", "".join(shown))
        # The last digits of a float32 sum depend on the BLAS.
        found.append(re.sub(r"(-?\d+\.\d{3})\d+", r"\1", text))
    return found


def first_difference(text: str, expected: str) -> tuple[str | None, str | None] | None:
    """Return the first pair of lines that differ, which prints faster than a complete diff."""
    lines = zip_longest(text.splitlines(), expected.splitlines())
    return next((pair for pair in lines if pair[0] != pair[1]), None)


def keep(run, kept) -> None:
    """Copy the outputs of a run into the stored notebook, except messages on stderr."""
    for new, old in zip(run.cells, kept.cells, strict=True):
        if new.cell_type == "code":
            old.execution_count = new.execution_count
            old.outputs = [o for o in new.outputs if o.get("name") != "stderr"]


def read(name: str):
    return nbformat.read(FOLDER / name, as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_have_outputs_text_and_no_machine_paths(name):
    kept = read(name)
    nbformat.validate(kept)
    assert kept.cells[0].source.startswith("# ")
    outputs = 0
    for cell in kept.cells:
        if cell.cell_type == "code":
            assert cell.execution_count
            outputs += len(cell.outputs)
            assert not [o for o in cell.outputs if o.output_type == "error"]
    assert outputs >= 5
    words = sum(len(c.source.split()) for c in kept.cells if c.cell_type == "markdown")
    assert words > 250, "a notebook must explain its code"
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|usr)/", (FOLDER / name).read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Install the built wheel into an empty folder, and return the folder."""
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    # A build writes into the source folder, so other tests must not build in the same one.
    unused = shutil.ignore_patterns(".*", "build", "dist", "notebooks", "tests", "*.egg-info")
    shutil.copytree(FOLDER.parent, folder / "source", ignore=unused)
    build = ["build", "--wheel", "--outdir", str(folder), str(folder / "source")]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([sys.executable, "-m", *build], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", *install, str(wheel)], check=True)
    return site


def executed(notebook, folder: Path, site: Path):
    """Run a notebook in a folder with the installed wheel, without the checkout; return it."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells.append(nbformat.v4.new_code_cell("__import__('cupyconv').__file__"))
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's libraries warn
        # Emulated devices start by a path, so keep paths that are given.
        paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        client.execute(env={**os.environ, "PYTHONPATH": paths})
    used = ast.literal_eval(notebook.cells.pop().outputs[0].data["text/plain"])
    assert Path(used).is_relative_to(site)
    return notebook


@pytest.mark.costly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_reproduce_their_outputs(site, name, tmp_path):
    kept = read(name)
    # The last notebook reads results from the repository.
    notebook = executed(read(name), FOLDER if name.startswith("04") else tmp_path, site)
    if os.environ.get("CUPYCONV_GOLDEN") == "write":
        keep(notebook, kept)
        nbformat.write(kept, FOLDER / name)
    if name.startswith("01") and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("the notebook ran, but its outputs need tensorflow, which is not installed")
    for text, expected in zip(texts(notebook), texts(kept), strict=True):
        if expected.startswith("No GPU here") and arrays.device_count():
            assert re.search(r"equal to the (reference|definition): True", text)
        else:
            assert first_difference(text, expected) is None


@pytest.mark.thorough
def test_speed_notebook_runs_outside_a_checkout(site, tmp_path):
    first, *rest = texts(executed(read("04-speed.ipynb"), tmp_path, site))
    assert "not in a checkout" in first
    assert re.search(r"^\d+ measurements on ", first, re.M)
    assert all(rest)
    assert "layer         dense" in rest[0]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_import_only_public_modules(name):
    public = {*cupyconv.__all__, "bench"}
    for cell in read(name).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for found in names:
                first, *rest = found.split(".")
                assert first != "tests", "the tests are not installed"
                assert first != "cupyconv" or not rest or rest[0] in public, found


def test_speed_notebook_reports_where_times_were_measured():
    text = "".join(texts(read("04-speed.ipynb")))
    on_gpu = list((FOLDER.parent / "tests" / "gpu" / "results").glob("bench-*.json"))
    if not on_gpu:
        assert "Nothing was measured on a GPU" in text
        assert "on a CPU, from tests/cpu/results" in text
        # On a CPU, the reported time is the fastest round, which is also the lower end.
        assert re.search(r"microseconds +(\d+), spread \1 to \d+$", text, re.M)
