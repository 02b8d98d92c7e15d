"""Conversion of NVRTC's cubins to kernels that run on the CPU.

native/nvrtc.cpp appends its source to each cubin, so a cubin from any cache can be converted.  A
cubin that was compiled elsewhere has no source and is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cupyconv.gpu import sources
from tests import cubins
from tests.emulator import EmulatedModule
from tests.emulator.driver import Chip

from . import build

MARK = b"compiled for tests/device"


class UnknownProgramError(ValueError):
    """A binary that cannot run here, with the reason."""


@dataclass(frozen=True)
class Program:
    """A cubin and the inputs that it was compiled from.

    Attributes:
        cubin: the output of NVIDIA's compiler.
        log: the compiler's log.
        name, source: name and text of the source file.
        headers: header texts by name.
        options: compiler options.
    """

    cubin: bytes
    log: str
    name: str
    source: str
    headers: dict[str, str]
    options: tuple[str, ...]


def elf_size(head: bytes) -> int:
    """Return the length of an ELF file, which ends with one of its two header tables."""
    program_headers, section_headers = struct.unpack_from("<QQ", head, 0x20)
    sizes = struct.unpack_from("<4H", head, 0x36)
    return int(max(program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3]))


def read(address: int) -> Program:
    """Return the program of a binary in memory.

    Raises:
        UnknownProgramError: it is not a cubin, or was compiled without this NVRTC.
    """
    if ctypes.string_at(address, 4) != b"\x7fELF":
        raise UnknownProgramError("only cubins can be loaded: no PTX, and no fat binaries")
    size = elf_size(ctypes.string_at(address, 64))
    if ctypes.string_at(address + size, len(MARK)) != MARK:
        raise UnknownProgramError("a cubin that was not compiled here has no known source")

    def texts() -> Iterator[str]:
        position = address + size
        while True:
            text = ctypes.string_at(position)
            position += len(text) + 1
            yield text.decode()

    parts = texts()
    next(parts)
    log, name, source = next(parts), next(parts), next(parts)
    headers = {next(parts): next(parts) for _ in range(int(next(parts)))}
    options = tuple(next(parts) for _ in range(int(next(parts))))
    return Program(ctypes.string_at(address, size), log, name, source, headers, options)


def emulated(program: Program, chip: Chip) -> EmulatedModule:
    """Return a program's kernels for the CPU; only the shipped ones run under the checker.

    Raises:
        UnknownProgramError: it needs something that is unavailable here.
        tests.emulator.build.BuildError: the CPU's compiler rejects it.
    """
    defines, folders = {}, []
    for option in program.options:
        if option.startswith("-D"):
            name, _, value = option[2:].partition("=")
            defines[name] = value or "1"
        elif option.startswith("-I"):
            folders.append(Path(option[2:]))
    macros = " ".join(f"-D{name}={value}" for name, value in defines.items())
    if _is_shipped(program):
        return EmulatedModule(
            sources.directory() / program.name,
            defines,
            checked=not os.environ.get("CUPYCONV_DEVICE_UNCHECKED"),
            chip=chip,
            resources=cubins.resources(program.cubin, program.log),
            variant=f"({program.name} {macros})",
        )
    program_folder = _write(program)
    # Stand-ins for CUDA's headers come before CuPy's headers and replace NVIDIA's.
    folders = [path for path in folders if not {"_cccl", "nvidia"} & set(path.parts)]
    folders = [build.NATIVE / "cuda", program_folder, *folders]
    defines["__CUDACC_VER_MAJOR__"] = "13"
    return EmulatedModule(program_folder / "kernel.cu", defines, folders, False, chip)


def _is_shipped(program: Program) -> bool:
    if not (sources.directory() / program.name).is_file() or not program.name.endswith(".cu"):
        return False
    shipped = sources.load(program.name)
    return shipped.text == program.source and dict(shipped.headers) == program.headers


def _write(program: Program) -> Path:
    """Write a program's texts to a folder and return it."""
    texts = [program.source, *(text for pair in program.headers.items() for text in pair)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
    folder = build.folder() / "programs" / digest
    for name, text in program.headers.items():
        _put(folder / name, text)
    _put(folder / "kernel.cu", f'#include "prelude.h"\n#line 1\n{program.source}')
    return folder


def _put(path: Path, text: str) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, path)
