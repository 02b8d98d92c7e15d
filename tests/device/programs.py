"""From what NVRTC has compiled to kernels that run on the CPU.

native/nvrtc.cpp puts behind each cubin what it was compiled from, so that a cubin out of anybody's
cache is understood; one that was compiled elsewhere is not, and is refused.
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
    """A binary that cannot be run here, and why."""


@dataclass(frozen=True)
class Program:
    """What a cubin was compiled from.

    Attributes:
        cubin: as NVIDIA's compiler made it.
        log: of the compiler.
        name, source: of the file.
        headers: texts by name.
        options: of the compiler.
    """

    cubin: bytes
    log: str
    name: str
    source: str
    headers: dict[str, str]
    options: tuple[str, ...]


def elf_size(head: bytes) -> int:
    """The length of an ELF file, which ends with one of its two tables."""
    program_headers, section_headers = struct.unpack_from("<QQ", head, 0x20)
    sizes = struct.unpack_from("<4H", head, 0x36)
    return int(max(program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3]))


def read(address: int) -> Program:
    """The program of a binary in memory.

    Raises:
        UnknownProgramError: it is no cubin, or one that was compiled without this NVRTC.
    """
    if ctypes.string_at(address, 4) != b"\x7fELF":
        raise UnknownProgramError("only cubins can be loaded: no PTX, and no fat binaries")
    size = elf_size(ctypes.string_at(address, 64))
    if ctypes.string_at(address + size, len(MARK)) != MARK:
        raise UnknownProgramError("a cubin that was not compiled here has no known source")

    def texts() -> Iterator[str]:
        place = address + size
        while True:
            text = ctypes.string_at(place)
            place += len(text) + 1
            yield text.decode()

    parts = texts()
    next(parts)
    log, name, source = next(parts), next(parts), next(parts)
    headers = {next(parts): next(parts) for _ in range(int(next(parts)))}
    options = tuple(next(parts) for _ in range(int(next(parts))))
    return Program(ctypes.string_at(address, size), log, name, source, headers, options)


def emulated(program: Program, chip: Chip) -> EmulatedModule:
    """A program's kernels on the CPU: the shipped ones under the checker, others without.

    Raises:
        UnknownProgramError: what it needs cannot be had here.
        tests.emulator.build.BuildError: the CPU's compiler does not take it.
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
    kept = _written(program)
    # Stand-ins for CUDA's own headers come before CuPy's, and instead of NVIDIA's.
    folders = [one for one in folders if not {"_cccl", "nvidia"} & set(one.parts)]
    folders = [build.NATIVE / "cuda", kept, *folders]
    defines["__CUDACC_VER_MAJOR__"] = "13"
    return EmulatedModule(kept / "kernel.cu", defines, folders, False, chip)


def _is_shipped(program: Program) -> bool:
    if not (sources.directory() / program.name).is_file() or not program.name.endswith(".cu"):
        return False
    shipped = sources.load(program.name)
    return shipped.text == program.source and dict(shipped.headers) == program.headers


def _written(program: Program) -> Path:
    """A folder with a program's texts."""
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
