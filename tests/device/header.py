"""Constants and function types of cuda.h for ctypes."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_ENUM = re.compile(r"\benum\s+\w+\s*\{([^}]*)\}")
_CONSTANT = re.compile(r"\s*(\w+)\s*(?:=\s*(0x[0-9a-fA-F]+|\d+)\s*)?")
_FUNCTION = re.compile(r"\bCUresult\s+CUDAAPI\s+(\w+)\(([^;]*?)\);")

_NUMBERS = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned short": ctypes.c_ushort,
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "cuuint32_t": ctypes.c_uint32,
    "cuuint64_t": ctypes.c_uint64,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
}
_HANDLES = {
    "CUcontext",
    "CUmodule",
    "CUfunction",
    "CUstream",
    "CUevent",
    "CUgraph",
    "CUgraphExec",
    "CUhostFn",
    "CUmemoryPool",
    "CUoccupancyB2DSize",
}


class HeaderError(RuntimeError):
    """CUDA's headers are missing or have unexpected content."""


@dataclass(frozen=True)
class Function:
    """A function of the driver.

    Attributes:
        name: its name, without the version suffix of the symbol.
        declaration: its parameters in C.
        parameters: names and ctypes types of its parameters.
    """

    name: str
    declaration: str
    parameters: tuple[tuple[str, Any], ...]


def folder() -> Path:
    """Return the folder with cuda.h and the headers that it includes."""
    include = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "include")
    for name, package in (("cuda.h", "runtime"), ("crt/host_defines.h", "crt")):
        if not (include / name).is_file():
            raise HeaderError(f"{name} of CUDA 13 is missing: pip install nvidia-cuda-{package}")
    return include


@cache
def text(name: str = "cuda.h") -> str:
    """Return the text of a header without its comments."""
    return _COMMENT.sub(" ", (folder() / name).read_text())


@cache
def constants() -> dict[str, int]:
    """Return the enumerators of cuda.h, without their "CU" or "CUDA" prefix."""
    values: dict[str, int] = {}
    for body in _ENUM.findall(text()):
        following = 0
        for entry in body.split(","):
            match = _CONSTANT.fullmatch(entry)
            if match is None:  # an expression, which no caller needs
                continue
            value = int(match[2], 0) if match[2] else following
            following = value + 1
            values.setdefault(re.sub(r"^(CUDA|CU)_", "", match[1]), value)
    return values


def statuses(name: str = "cuda.h", pattern: str = r"CUDA_(?:SUCCESS|ERROR_\w+)") -> dict[int, str]:
    """Return the name of each status of a header."""
    names: dict[int, str] = {}
    for word, value in re.findall(rf"^\s*({pattern})\s*=\s*(\d+)", text(name), re.M):
        names.setdefault(int(value), word)
    return names


@cache
def version() -> int:
    """Return CUDA's version, such as 13000."""
    match = re.search(r"#define CUDA_VERSION (\d+)", text())
    assert match is not None
    return int(match[1])


@cache
def _declarations() -> dict[str, str]:
    declarations: dict[str, str] = {}
    for name, declaration in _FUNCTION.findall(text()):
        declarations.setdefault(
            name, " ".join(declaration.split())
        )  # the first is the newest version
    return declarations


def functions(names: Sequence[str]) -> dict[str, Function]:
    """Return the functions with these names.

    Raises:
        HeaderError: a function is not declared, or has a parameter of an unknown type.
    """
    missing = sorted(set(names) - set(_declarations()))
    if missing:
        raise HeaderError(f"cuda.h of version {version()} does not declare {', '.join(missing)}")
    return {name: _function(name, _declarations()[name]) for name in names}


def _function(name: str, declaration: str) -> Function:
    parameters = []
    for parameter in declaration.split(",") if declaration != "void" else ():
        match = re.fullmatch(r"\s*(?:const\s+)?(.*?)(\w+)\s*", parameter)
        assert match is not None
        parameters.append((match[2], _type(match[1].strip(), f"{name}({declaration})")))
    return Function(name, declaration, tuple(parameters))


def _type(words: str, where: str) -> Any:
    if words.endswith("*") or words in _HANDLES:
        return ctypes.c_void_p
    if words in _NUMBERS:
        return _NUMBERS[words]
    if re.search(rf"\btypedef\s+enum\s+\w+\s*\{{[^}}]*\}}\s*{words}\s*;", text()) or re.search(
        rf"\b{words}_enum\b", text()
    ):
        return ctypes.c_int
    raise HeaderError(f"unknown type {words} in {where}")
