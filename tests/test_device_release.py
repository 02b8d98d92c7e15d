"""The emulated devices are made for one CuPy: another one is named, with the way out."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from tests.device import release

CUDA_12 = """
import importlib.metadata, runpy, sys, sysconfig
real = importlib.metadata.version
def version(name):
    if name == "cupy-cuda13x":
        raise importlib.metadata.PackageNotFoundError(name)
    return "14.2.0" if name == "cupy-cuda12x" else real(name)
importlib.metadata.version = version
sysconfig.get_paths = lambda: {"purelib": "/there/is/nothing/of/cuda/13"}
sys.argv = ["tests.device", "script.py"]
runpy.run_module("tests.device", run_name="__main__")
"""


def test_with_cupy_for_cuda_12_the_one_for_cuda_13_is_asked_for() -> None:
    """And not what else that one lacks."""
    run = subprocess.run([sys.executable, "-c", CUDA_12], capture_output=True, text=True)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert "is made for cupy-cuda13x 14.2.0: cupy-cuda12x 14.2.0 is installed. " in line
    assert "pip install 'cupy-cuda13x==14.2.0'" in line


@pytest.mark.parametrize("there", ["13.0.0", None])
@pytest.mark.parametrize("package", ["cupy-cuda13x", "Cython"])
def test_another_release_is_named(
    package: str, there: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: dict[str, str | None] = {"cupy-cuda13x": release.RELEASE, "Cython": release.CYTHON}

    def version(name: str) -> str:
        found = installed.get(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    release.require_release()
    wanted = installed[package]
    installed[package] = there
    found = f"{package} {there}" if there else "none"
    with pytest.raises(release.DeviceBuildError, match=f"{wanted}: {found} is installed"):
        release.require_release()
