"""NVRTC's PTX of the shipped kernels, cached by content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cupyconv import arrays
from cupyconv.gpu import compiler, sources

from ..build import cache_directory, digest

OPTIONS = (*(option for option in compiler.OPTIONS if "ptxas" not in option), "-lineinfo")
"""Compiler options of the shipped cubins, plus line tables."""


@cache
def ptx_of(source: str, defines: tuple[tuple[str, str | int], ...], architecture: str) -> str:
    """Return the PTX of one variant.

    Args:
        source: name of a shipped kernel file.
        defines: macros of the variant.
        architecture: target, such as "sm_80".
    """
    kernel_source = sources.load(source)
    flags = [
        f"-arch={architecture.replace('sm_', 'compute_')}",
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in defines),
    ]
    key = digest(compiler.nvrtc_version(), flags, kernel_source.text, *kernel_source.headers)
    path = cache_directory() / f"{Path(source).stem}-{key}.ptx"
    if not path.exists():
        put(
            path,
            compile_ptx(kernel_source.text, kernel_source.name, dict(kernel_source.headers), flags),
        )
    return path.read_text()


def compile_ptx(text: str, name: str, headers: Mapping[str, str], flags: list[str]) -> str:
    """Compile a CUDA text to PTX with NVRTC.

    Raises:
        ValueError: it does not compile; the message is the compiler's log.
    """
    nvrtc = arrays.cupy().cuda.nvrtc
    program = nvrtc.createProgram(
        text,
        name,
        [item.encode() for item in headers.values()],
        [item.encode() for item in headers],
    )
    try:
        nvrtc.compileProgram(program, flags)
        ptx = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise ValueError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return (ptx if isinstance(ptx, str) else ptx.decode()).rstrip("\0")


def put(path: Path, text: str) -> None:
    """Write a file of the cache atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
