"""Supported CuPy release.  Imports nothing that needs CUDA's headers or CuPy."""

from __future__ import annotations

import importlib.metadata

PACKAGE = "cupy-cuda13x"

RELEASE = "14.2.0"
"""CuPy release whose source is built."""

SOURCE_DIGEST = "cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c"
"""SHA-256 of that release's source archive."""

CYTHON = "3.2.4"
"""Cython version of that release's wheels; extension modules share types only if it is equal."""


class DeviceBuildError(RuntimeError):
    """The emulated devices cannot be built in this environment."""


def require_release() -> None:
    """Check that the supported releases of CuPy and Cython are installed.

    Raises:
        DeviceBuildError: a release differs; the message says what to install.
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
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
