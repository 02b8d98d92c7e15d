"""Build a release, and try it as users install it.

    python -m tests.release [--out dist] [--python 3.12 ...]

The wheel is built from the sdist.  Both are checked, and installed outside the checkout in fresh
environments of each Python that pyproject.toml names, with the newest and with the oldest permitted
packages.  In each environment a program computes, plans, explains, and runs the README's example
and the command line.  With the extras of PROGRAMS, a sample of the tests runs too.  The packages of
other extras are looked up, but not installed; tests/device tries CuPy.

Prints each outcome and the text of a release note; exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cupyconv import __version__
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = list(PROJECT["optional-dependencies"])

PLACEHOLDER = "example.org"
"""Part of every address in pyproject.toml that the owner has not set yet."""

SAMPLE = (
    "tests/problem/test_problem.py",
    "tests/operations/test_operations.py",
    "tests/cpu/test_cpu.py",
    "tests/files/test_damaged_input.py::test_programs_in_zarr_chunks_do_not_run",
    "tests/explaining/test_explain.py",
    "tests/pages/test_doctests.py",
    "tests/pages/test_docs.py::test_code_blocks_run[notebooks/quick-start.md]",
)
"""Tests of the installed wheel; they need pytest, hypothesis and the extras of PROGRAMS."""

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
for words, said in (("grads --preset multi-channel", "0 failed"), ("env", "kernel sources")):
    command = [sys.executable, "-m", "cupyconv", *words.split()]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and said in run.stdout, run.stdout + run.stderr
readme = importlib.metadata.metadata("cupyconv").get_payload()
example = re.search("```python\\n(.*?)```", readme, re.S)[1]
found = {}
exec(example.replace("import cupy as cp", "import numpy as cp"), found)
assert found["dw"].shape == found["w"].shape and found["dx"].shape == found["x"].shape
"""

VERSIONS = """
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "click")))
"""

PROGRAMS = {
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
}
"""Program that tries each extra of users, to run after PLAIN in an environment with all of them."""


def pythons() -> list[str]:
    """Return the versions of Python that the classifiers name."""
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    return re.findall(pattern, "\n".join(PROJECT["classifiers"]))


def run(*words: str | Path, folder: Path = ROOT) -> str:
    """Run a program, and return what it prints.

    Raises:
        CalledProcessError: it failed.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    places = [*map(str, pyenv.glob("versions/*/bin")), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(places), "UV_NO_PROGRESS": "1"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def uv(*words: str | Path, folder: Path = ROOT) -> str:
    """Run uv, which finds Pythons on the path and of pyenv, or downloads them."""
    return run(sys.executable, "-m", "uv", *words, folder=folder)


def build(out: Path) -> tuple[Path, Path]:
    """Build an sdist, and a wheel from it, so that a file missing in the sdist is noticed."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=Path())
        out.mkdir(parents=True, exist_ok=True)
        # The paths must be absolute: uv runs in other folders.
        made = [Path(shutil.copy(path, out.resolve())) for path in Path(folder).iterdir()]
    sdist, wheel = sorted(made, key=lambda path: path.suffix != ".gz")
    return sdist, wheel


def checked(folder: Path, *words: str | Path) -> str:
    """Run a program that checks the metadata or the contents of the distributions."""
    uv("tool", "run", *words, folder=folder)
    return "passed"


def installed(
    folder: Path, python: str, distribution: Path, extras: Sequence[str], oldest: bool
) -> str:
    """Install a distribution, run the programs and a sample of the tests, and return the outcome.

    Args:
        folder: empty folder for the environment.
        python: version of Python.
        distribution: path of the sdist or the wheel.
        extras: names of the extras to install.  With extras, the sample of the tests runs.
        oldest: install the oldest permitted version of each required package.
    """
    inside = folder / "venv" / "bin" / "python"
    options = ["--no-build"] if distribution.suffix == ".whl" else []
    uv("venv", "--python", python, "venv", folder=folder)
    if oldest:
        words = ["--resolution", "lowest-direct", "--no-build", "--python-version", python]
        words += [word for extra in extras for word in ("--extra", extra)]
        (folder / "oldest.txt").write_text(uv("pip", "compile", *words, ROOT / "pyproject.toml"))
        options += ["--constraint", "oldest.txt"]
    install = ("pip", "install", "--python", inside, *options)
    uv(*install, _wanted(distribution, extras), folder=folder)
    program = PLAIN + "".join(PROGRAMS[extra] for extra in extras) + VERSIONS
    packages = run(inside, "-I", "-c", program, folder=folder).splitlines()[-1]
    if not extras:
        return f"{packages}: works"
    for path in ("tests", "notebooks"):
        shutil.copytree(ROOT / path, folder / path)
    for path in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / path, folder)
    uv(*install, "pytest", "hypothesis", folder=folder)
    words = ["-q", "--part", "sample", "-m", "not slow"]
    said = run(inside, "-m", "pytest", *words, *SAMPLE, folder=folder).splitlines()[-1]
    return f"{packages}: works, {said}"


def resolved(folder: Path, python: str, wheel: Path, extra: str) -> str:
    """Look up the packages of an extra without installing them."""
    uv("venv", "--python", python, "venv", folder=folder)
    words = ("pip", "install", "--dry-run", "--python", folder / "venv" / "bin" / "python")
    uv(*words, _wanted(wheel, [extra]))
    return "resolved, not installed"


def _wanted(distribution: Path, extras: Sequence[str]) -> str:
    return f"cupyconv[{','.join(extras)}] @ {distribution.as_uri()}"


def attempts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., str], tuple]]:
    """Build the distributions, and yield each check with its function and arguments."""
    sdist, wheel = build(options.out)
    for words in (
        ("twine", "check", "--strict", sdist, wheel),
        ("check-wheel-contents", "--toplevel", "cupyconv", wheel),
        ("--from=validate-pyproject[all]", "validate-pyproject", ROOT / "pyproject.toml"),
        ("cffconvert", "--validate", "--infile", ROOT / "CITATION.cff"),
    ):
        yield f"{words[0]} {words[1]}", checked, words
    for python in options.python or pythons():
        yield f"Python {python}, sdist", installed, (python, sdist, (), False)
        for extras in ((), tuple(PROGRAMS)):
            for oldest in (False, True):
                what = f"wheel[{','.join(extras)}], {'oldest' if oldest else 'newest'} packages"
                yield f"Python {python}, {what}", installed, (python, wheel, extras, oldest)
        for extra in sorted({*EXTRAS} - {*PROGRAMS}):
            yield f"Python {python}, wheel[{extra}]", resolved, (python, wheel, extra)


def note() -> str:
    """Return the section of CHANGELOG.md about this version."""
    sections = re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    return next(section for section in sections if section.startswith(f"## {__version__} "))


def main() -> int:
    """Try all combinations, and print the outcome of each and the release note."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to")
    parser.add_argument("--python", action="append", help="try only this version, such as 3.14")
    options = parser.parse_args()
    failures = 0
    for what, function, arguments in attempts(options):
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = function(Path(folder), *arguments)
            except subprocess.CalledProcessError as error:
                failures += 1
                said = "\n".join(["FAILED", *(error.stdout + error.stderr).splitlines()[-15:]])
        print(f"{what}: {said}", flush=True)
    if any(PLACEHOLDER in url for url in PROJECT["urls"].values()):
        print("\nBefore you publish, set the addresses in [project.urls] of pyproject.toml.")
    print("\nRelease note:\n", note(), sep="\n")
    for path in sorted(options.out.glob(f"cupyconv-{__version__}*")):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
