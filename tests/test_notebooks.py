"""The notebooks: run from beginning to end, and kept with the outputs that they have.

After a change that is meant, run them anew and read the difference:

    CUPYCONV_GOLDEN=write python -m pytest tests/test_notebooks.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import warnings
from itertools import zip_longest
from pathlib import Path

import pytest

import cupyconv
from cupyconv import arrays

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))

LIMIT = 1800  # s: the machine may be busy with other work
"""Seconds that a notebook may take."""

if missing := [m for m in ("nbclient", "nbformat", "ipykernel") if not importlib.util.find_spec(m)]:
    pytest.skip(f"{', '.join(missing)} not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat


def test_all_four_are_here():
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04"]


def texts(notebook) -> list[str]:
    """What the code cells show, without rounding errors and what differs between machines.

    What they print, and what they give: tables, pictures and pages, in every form.
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
        # A float32 sum's last digits are the BLAS's.
        found.append(re.sub(r"(-?\d+\.\d{3})\d+", r"\1", text))
    return found


def first_difference(text: str, expected: str) -> tuple[str | None, str | None] | None:
    """The first line of two long texts that is another, without a comparison of all others."""
    lines = zip_longest(text.splitlines(), expected.splitlines())
    return next((pair for pair in lines if pair[0] != pair[1]), None)


def keep(run, kept) -> None:
    """Put the outputs of a run into the notebook that is kept, without messages to the user."""
    for new, old in zip(run.cells, kept.cells, strict=True):
        if new.cell_type == "code":
            old.execution_count = new.execution_count
            old.outputs = [o for o in new.outputs if o.get("name") != "stderr"]


def read(name: str):
    return nbformat.read(FOLDER / name, as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_kept_and_are_the_projects_own(name):
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
    assert words > 250, "it is to be read as an article"
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|usr)/", (FOLDER / name).read_text())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name, tmp_path):
    kept, notebook = read(name), read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        # As from an installed package; the last reads figures that the repository has.
        resources={"metadata": {"path": str(FOLDER if name.startswith("04") else tmp_path)}},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own libraries
        client.execute()
    if os.environ.get("CUPYCONV_GOLDEN") == "write":
        keep(notebook, kept)
        nbformat.write(kept, FOLDER / name)
    if name.startswith("01") and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed, whose answer the notebook shows: it ran")
    for text, expected in zip(texts(notebook), texts(kept), strict=True):
        if expected.startswith("No GPU here") and arrays.device_count():
            assert re.search(r"equal to the (reference|definition): True", text)
        else:
            assert first_difference(text, expected) is None


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_the_public_library_is_imported(name):
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
                assert first != "tests", "what is not installed"
                assert first != "cupyconv" or not rest or rest[0] in public, found


def test_the_notebook_on_speed_says_what_was_measured_where():
    text = "".join(texts(read("04-speed.ipynb")))
    on_gpu = list((FOLDER.parent / "tests" / "gpu" / "results").glob("bench-*.json"))
    if not on_gpu:
        assert "Nothing was measured on a GPU" in text
        assert "on a CPU, from tests/cpu/results" in text
        # On a CPU the time is the best of the turns, where the spread begins.
        assert re.search(r"microseconds +(\d+), spread \1 to \d+$", text, re.M)
