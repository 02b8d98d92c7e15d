"""The CuPy that all of this is made for.  Imports nothing that needs CUDA's headers or CuPy."""

from __future__ import annotations

import importlib.metadata

PACKAGE = "cupy-cuda13x"

RELEASE = "14.2.0"
"""The CuPy whose source this is made for."""

SOURCE_DIGEST = "cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c"
"""SHA-256 of that release's source archive."""

CYTHON = "3.2.4"
"""The Cython that this release's wheels are made with, so that modules know each other's types."""


class DeviceBuildError(RuntimeError):
    """What CuPy is to be run on cannot be built here."""


def require_release() -> None:
    """Check that the packages are those that this is made for.

    Raises:
        DeviceBuildError: one is not; with what is there instead, and what to install.
    """
    for package, wanted, others in (
        (PACKAGE, RELEASE, ("cupy-cuda12x", "cupy")),
        ("Cython", CYTHON, ()),
    ):
        found = _installed(package)
        if found != wanted:
            there = [f"{one} {_installed(one)}" for one in others if _installed(one)]
            there = [f"{package} {found}"] if found else there
            raise DeviceBuildError(
                f"tests/device is made for {package} {wanted}: "
                f"{' and '.join(there) or 'none'} is installed. In an environment of its own, "
                f"pip install '{package}=={wanted}', or read «Another CuPy» in "
                "tests/device/README.md"
            )


def _installed(package: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
