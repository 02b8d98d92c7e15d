"""Witnesses: third-party kernels proven on hardware, compiled at test time.

Each file here instantiates kernels of an installed package.  These kernels run correctly on the
chip, so a model of the chip on which they fail is wrong.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.cubins import Resources, resources

from ..build import cache_directory, digest

HERE = Path(__file__).resolve().parent
PACKAGES = ("nvidia-cutlass", "nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-nvvm")
"""Packages of the extra ``witnesses``, in addition to those of the tests."""


class MissingError(RuntimeError):
    """A package or program for compiling the witnesses is not installed."""

    @classmethod
    def of(cls, name: str | None) -> MissingError:
        """Return the error for a package or a program of a package."""
        return cls(f"{name} is missing: pip install 'cupyconv[test,witnesses]'")


@cache
def compiled(name: str, architecture: str, defines: tuple[tuple[str, str], ...] = ()) -> str:
    """Return the PTX that NVIDIA's compiler produces for a file of this folder.

    Args:
        name: file name without ``.cu``.
        architecture: target, such as "sm_80".
        defines: macros.

    Raises:
        MissingError: the packages are not installed, or the compiler finds no host compiler.
    """
    return _built(name, architecture, defines, ("-ptx", "-lineinfo"), ".ptx").read_text()


@cache
def host_library(
    name: str, architecture: str, defines: tuple[tuple[str, str], ...] = ()
) -> ctypes.CDLL:
    """Return the host part of a file, compiled with HOST defined; arguments as for ``compiled``."""
    flags = ("-shared", "-Xcompiler", "-fPIC", f"-L{_site('nvidia', 'cu13', 'lib')}")
    return ctypes.CDLL(str(_built(name, architecture, (*defines, ("HOST", "1")), flags, ".so")))


def _built(
    name: str,
    architecture: str,
    defines: Sequence[tuple[str, str]],
    flags: Sequence[str],
    suffix: str,
) -> Path:
    """Compile a file with NVIDIA's compiler; the product is cached by content."""
    source = HERE / f"{name}.cu"
    arguments = [
        *flags,
        "-std=c++17",
        f"-arch={architecture.replace('sm', 'compute')}",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",
        *(f"-D{macro}={value}" for macro, value in defines),
    ]
    folders = [
        _site("cutlass_library", "source", "include"),
        _site("cutlass_library", "source", "tools", "util", "include"),
        _site("nvidia", "cu13", "include"),
        _site("nvidia", "cu13", "include", "cccl"),
    ]
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    key = digest(_versions(), arguments, source.read_text(), *headers)
    cached = cache_directory() / f"{name}-{key}{suffix}"
    if not cached.exists():
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            product = Path(scratch, f"witness{suffix}")
            includes = [f"-I{folder}" for folder in folders]
            _run([_tool("nvcc"), *arguments, *includes, str(source), "-o", str(product)])
            os.replace(product, cached)
    return cached


@cache
def assembled(text: str, architecture: str) -> tuple[bytes, str]:
    """Return the cubin of a PTX text and the assembler's log."""
    with tempfile.TemporaryDirectory() as scratch:
        source, product = Path(scratch, "witness.ptx"), Path(scratch, "witness.cubin")
        source.write_text(text)
        arguments = [f"-arch={architecture}", "-v", str(source), "-o", str(product)]
        log = _run([_tool("ptxas"), *arguments])
        return product.read_bytes(), log


def well_aligned(text: str) -> str:
    """Align dynamic shared memory in the PTX to 1024 bytes.

    The chip aligns it to 1024 bytes if there is no static shared memory; kernels with swizzled
    tiles rely on this, but declare a smaller alignment.
    """
    return re.sub(r"(\.extern \.shared \.align) \d+", r"\1 1024", text)


def resources_of(text: str, architecture: str) -> Mapping[str, Resources]:
    """Return the resources of a PTX text's kernels, assembled for a chip."""
    return resources(*assembled(text, architecture))


def _site(*parts: str) -> Path:
    return Path(sysconfig.get_paths()["purelib"], *parts)


def _tool(name: str) -> str:
    path = _site("nvidia", "cu13", "bin", name)
    if not path.exists():
        raise MissingError.of(name)
    return str(path)


def _versions() -> list[str]:
    try:
        return [version(name) for name in PACKAGES]
    except PackageNotFoundError as error:
        raise MissingError.of(error.name) from None


def _run(command: list[str]) -> str:
    """Run a tool and return its messages."""
    result = subprocess.run(command, capture_output=True, text=True)
    messages = result.stderr + result.stdout
    if "Failed to preprocess host compiler" in messages or "not found" in messages.lower():
        raise MissingError(f"the CUDA compiler needs a host compiler: {messages.strip()}")
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{messages}")
    return messages
