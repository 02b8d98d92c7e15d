"""The emulated devices support one release of CuPy and name it if another is installed."""

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


def test_cupy_for_cuda_12_is_rejected() -> None:
    """The message comes before errors about missing CUDA 13 headers."""
    run = subprocess.run([sys.executable, "-c", CUDA_12], capture_output=True, text=True)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert "is made for cupy-cuda13x 14.2.0: cupy-cuda12x 14.2.0 is installed. " in line
    assert "pip install 'cupy-cuda13x==14.2.0'" in line


@pytest.mark.parametrize("other", ["13.0.0", None])
@pytest.mark.parametrize("package", ["cupy-cuda13x", "Cython"])
def test_unsupported_release_is_named(
    package: str, other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: dict[str, str | None] = {"cupy-cuda13x": release.RELEASE, "Cython": release.CYTHON}

    def version(name: str) -> str:
        number = installed.get(name)
        if number is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return number

    monkeypatch.setattr(importlib.metadata, "version", version)
    release.require_release()
    supported = installed[package]
    installed[package] = other
    description = f"{package} {other}" if other else "none"
    with pytest.raises(release.DeviceBuildError, match=f"{supported}: {description} is installed"):
        release.require_release()
