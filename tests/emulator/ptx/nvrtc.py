"""NVRTC's PTX of the shipped kernels, kept by content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cupyconv import arrays
from cupyconv.gpu import compiler, sources

from ..build import cache_directory, digest

OPTIONS = (*(one for one in compiler.OPTIONS if "ptxas" not in one), "-lineinfo")
"""Those of the shipped cubins, with line tables."""


@cache
def ptx_of(source: str, defines: tuple[tuple[str, str | int], ...], architecture: str) -> str:
    """The PTX of one variant.

    Args:
        source: name of a shipped kernel file.
        defines: macros of the variant.
        architecture: such as "sm_80".
    """
    loaded = sources.load(source)
    flags = [
        f"-arch={architecture.replace('sm_', 'compute_')}",
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in defines),
    ]
    key = digest(compiler.nvrtc_version(), flags, loaded.text, *loaded.headers)
    path = cache_directory() / f"{Path(source).stem}-{key}.ptx"
    if not path.exists():
        put(path, compile_ptx(loaded.text, loaded.name, dict(loaded.headers), flags))
    return path.read_text()


def compile_ptx(text: str, name: str, headers: Mapping[str, str], flags: list[str]) -> str:
    """NVRTC's PTX of a CUDA text.

    Raises:
        ValueError: it does not compile; the message is the compiler's log.
    """
    nvrtc = arrays.cupy().cuda.nvrtc
    program = nvrtc.createProgram(
        text, name, [one.encode() for one in headers.values()], [one.encode() for one in headers]
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
    """Writes a file of the cache, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
