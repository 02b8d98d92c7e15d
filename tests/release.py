"""Install and try the sdist and the wheel in clean environments of every Python found.

    python -m tests.matrix --out dist [--whole] [--extra NAME ...] [--python PATH ...]

Both distributions are tried without extras, then the wheel with each extra.  In each environment a
program runs that uses nothing of the checkout: it computes, plans, explains, reads the kernels'
source, and runs the README's example and the command line.  With an extra, it also uses what the
extra adds.  Extras that need gigabytes are resolved but not installed, which shows whether an index
has them for that Python; --whole installs them too.  --built uses the distributions of an earlier
run, for a Python without build tools, as in a container.

Prints a table; exits with 1 if anything available failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = 11, 15
"""Oldest and newest minor version of Python 3 to look for."""

PLAIN = """
import importlib.metadata, re, subprocess, sys
import numpy as np
import cupyconv
from cupyconv.gpu import sources
assert "site-packages" in cupyconv.__file__, cupyconv.__file__
assert dict(sources.load("conv_forward.cu").headers)["maps.cuh"]
x, w = np.ones((1, 2, 4, 4), "float32"), np.ones((3, 2, 3, 3), "float32")
y = cupyconv.conv_forward(x, w, padding="same", activation="relu")
assert y.shape == (1, 3, 4, 4) and y[0, 0, 1, 1] == 18
gradients = cupyconv.conv_backward(x, w, y, padding="same")
assert gradients.dw.shape == w.shape
problem = cupyconv.ConvProblem(x.shape, w.shape, padding="same")
assert cupyconv.plan(problem, "sm_90a")["forward"].implementation.startswith("cuda-")
assert "<svg" in cupyconv.explain(problem, values="integers").svg()
assert "<html" in cupyconv.explain(problem).page()
for words, said in ((["grads", "--preset", "by-hand"], "0 failed"), (["env"], "kernel sources")):
    command = [sys.executable, "-m", "cupyconv", *words]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and said in run.stdout, run.stdout + run.stderr
readme = importlib.metadata.metadata("cupyconv").get_payload()
example = re.search("```python\\n(.*?)```", readme, re.S)[1]
found = {}
exec(example.replace("import cupy as cp", "import numpy as cp"), found)
assert found["dw"].shape == found["w"].shape and found["dx"].shape == found["x"].shape
"""

PROGRAMS = {
    "": "",
    "onnx": """
import onnx
from onnx import TensorProto, helper
value = helper.make_tensor_value_info
weights = helper.make_tensor("w", TensorProto.FLOAT, w.shape, w.tobytes(), raw=True)
node = helper.make_node("Conv", ["x", "w"], ["y"])
graph = helper.make_graph(
    [node], "g", [value("x", 1, x.shape)], [value("y", 1, None)], [weights]
)
onnx.save(helper.make_model(graph), "model.onnx")
command = [sys.executable, "-m", "cupyconv", "model", "model.onnx"]
run = subprocess.run(command, capture_output=True, text=True)
assert run.returncode == 0 and "3x2x3x3" in run.stdout, run.stdout + run.stderr
""",
    "dask": """
import dask.array as da
import cupyconv.dask as cd
(found,) = cd.compute(cd.conv_forward(da.from_array(x, chunks=(1, 1, 2, 3)), w, padding="same"))
assert (found == y).all()
""",
    "numba": """
import numba
shape = (2, 8, 9, 9)
xs, ws = np.ones(shape, "float32"), np.ones((8, 1, 3, 3), "float32")
grouped = cupyconv.ConvProblem(shape, ws.shape, padding="same", groups=8)
assert cupyconv.plan(grouped, "cpu")["forward"].method in ("loops", "windows")
found = cupyconv.conv_forward(xs, ws, padding="same", groups=8)
assert (found[:, :, 1, 1] == 9).all() and (found[:, :, 0, 0] == 4).all()
""",
    "cuda12": "import cupy, cuda.bindings\n",
    "cuda13": "import cupy, cuda.bindings\n",
    "compilers": "import importlib.metadata as m\nassert m.version('nvidia-cuda-nvrtc') >= '13'\n",
    "types": """
import pathlib
pathlib.Path("typed.py").write_text("import cupyconv\\nreveal_type(cupyconv.conv_forward)\\n")
command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "typed.py"]
run = subprocess.run(command, capture_output=True, text=True)
assert "Overload[" in run.stdout, run.stdout + run.stderr
""",
    "docs": "import sphinx, myst_nb, furo\n",
    "fuzz": "import torch\n",
    "test": "import pytest, hypothesis, jax\n",
    "witnesses": "",
}
"""Program that tries each extra, to run in an environment with the extra."""

LARGE = ("compilers", "cuda12", "cuda13", "fuzz", "test", "witnesses")
"""Extras that are only resolved, unless ``--whole`` is given."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    python: str
    distribution: str
    extra: str
    what: str
    good: bool


def extras() -> list[str]:
    """Return the names of the extras that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def pythons() -> dict[str, Path]:
    """Return the newest interpreter of each minor version, on the path or in pyenv, by version."""
    found: dict[tuple[int, ...], Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for minor in range(OLDEST, NEWEST + 1):
        name = f"python3.{minor}"
        places = [*pyenv.glob(f"versions/*/bin/{name}"), Path(shutil.which(name) or name)]
        for place in (Path(sys.executable), *places):
            version = version_of(place)
            if version and version[1] == minor:
                found.setdefault(version, place)
    newest = {version[:2]: (version, place) for version, place in sorted(found.items())}
    return {".".join(map(str, version)): place for version, place in newest.values()}


def version_of(python: Path) -> tuple[int, ...] | None:
    """Return an interpreter's version; None if it does not run or cannot create environments."""
    program = "import ensurepip, sys, venv; print(*sys.version_info[:3])"
    try:
        run = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    return tuple(map(int, run.stdout.split())) if run.returncode == 0 else None


def build(out: Path) -> tuple[Path, Path]:
    """Build an sdist, and a wheel from it, so that a file missing in the sdist is noticed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--outdir", folder, str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        out.mkdir(parents=True, exist_ok=True)
        # The paths must be absolute: pip runs in other folders.
        made = [Path(shutil.copy(path, out.resolve())) for path in Path(folder).iterdir()]
    return distributions(made)


def distributions(files: Iterable[Path]) -> tuple[Path, Path]:
    """Return the sdist and the wheel among files.

    Raises:
        SystemExit: there is not exactly one of each.
    """
    of_kinds = [
        [path for path in files if path.name.endswith(ending)] for ending in (".tar.gz", ".whl")
    ]
    if [len(kind) for kind in of_kinds] != [1, 1]:
        raise SystemExit(f"there must be one sdist and one wheel, got {list(map(str, files))}")
    (sdist,), (wheel,) = of_kinds
    return sdist, wheel


def tried(version: str, python: Path, distribution: Path, extra: str, whole: bool) -> Outcome:
    """Install a distribution with an extra, and run the program that tries the extra."""
    kind = "sdist" if distribution.name.endswith(".tar.gz") else "wheel"
    wanted = f"{distribution}[{extra}]" if extra else str(distribution)
    resolving = extra in LARGE and not whole
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", f"{folder}/venv"], check=True)
        inside = f"{folder}/venv/bin/python"
        options = ["--dry-run"] if resolving else []
        pip = [inside, "-I", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        run = subprocess.run([*pip, *options, wanted], cwd=folder, capture_output=True, text=True)
        if run.returncode:
            lacking = re.findall(r"No matching distribution found for (\S+)", run.stderr)
            said = f"no index here has {lacking[0]}" if lacking else _last(run.stderr)
            return Outcome(version, kind, extra, said, bool(lacking) and resolving)
        if resolving:
            return Outcome(version, kind, extra, "resolved, not installed", True)
        program = PLAIN + PROGRAMS[extra]
        run = subprocess.run(
            [inside, "-I", "-c", program], cwd=folder, capture_output=True, text=True
        )
        said = "installed, works" if run.returncode == 0 else _last(run.stderr)
        return Outcome(version, kind, extra, said, run.returncode == 0)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:200]


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """Build the distributions, and try each combination in order."""
    if options.built:
        sdist, wheel = distributions(sorted(options.built.resolve().glob("cupyconv-*")))
    else:
        sdist, wheel = build(options.out)
    here = pythons()
    if options.python:
        versions = {path: version_of(path) or ("does not run",) for path in options.python}
        here = {".".join(map(str, version)): path for path, version in versions.items()}
    for version, python in here.items():
        yield tried(version, python, sdist, "", options.whole)
        for extra in ("", *(options.extra or extras())):
            yield tried(version, python, wheel, extra, options.whole)


def main() -> int:
    """Try all combinations, and print the outcome of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to")
    parser.add_argument("--built", type=Path, help="use the distributions in this folder")
    parser.add_argument("--whole", action="store_true", help="install extras of gigabytes too")
    parser.add_argument("--extra", action="append", choices=extras(), help="try only this one")
    parser.add_argument("--python", action="append", type=Path, help="try only this one")
    options = parser.parse_args()
    if not options.python:
        minors = {version.split(".")[1] for version in pythons()}
        lacking = [f"3.{n}" for n in range(OLDEST, NEWEST) if str(n) not in minors]
        print(f"not found: Python {', '.join(lacking) or 'none'}")
    good = True
    for one in outcomes(options):
        what = f"{one.distribution}{f'[{one.extra}]' if one.extra else ''}"
        mark = "" if one.good else "   FAILED"
        print(f"{one.python:10} {what:18} {one.what}{mark}", flush=True)
        good = good and one.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
