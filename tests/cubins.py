"""What the compiler's own tools say of a cubin: its instructions, and what a launch of it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin."""
    return _run("nvdisasm", "-c", cubin)


def instructions(listing: str) -> Counter:
    """How often each instruction occurs in a SASS listing, whatever its modifiers."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", listing, re.M))


def no_spills(log: str) -> bool:
    """Whether the compiler's log speaks of spills, and of none that was needed."""
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    return bool(spilled) and not any(spilled)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        address: its place in constant memory, in bytes, so that its alignment can be seen.
        size: in bytes.
    """

    address: int
    size: int


@dataclass(frozen=True)
class Resources:
    """What the launch of a kernel takes and permits.

    Attributes:
        registers: of a thread.
        static_shared: bytes of shared memory that the kernel declares, without the dynamic ones.
        launch_bounds: the most threads of a block; None if nothing was declared.
        cluster: blocks of a cluster along each axis; None if none was declared.
        parameters: in order.
        spilled: bytes of registers that a thread stores away, and of those it loads again.
    """

    registers: int
    static_shared: int
    launch_bounds: int | None
    cluster: tuple[int, ...] | None
    parameters: tuple[Parameter, ...]
    spilled: int = 0


def resources(cubin: bytes, log: str) -> dict[str, Resources]:
    """The resources of a cubin's kernels by name.

    Args:
        cubin: as NVRTC gives it.
        log: of its compiler, run with ``--ptxas-options=-v``.  It has the static shared memory,
            which the cubin's section has together with what the system keeps for itself.
    """
    listing = _run("cuobjdump", "-elf", cubin)
    titles_and_bodies = re.split(r"^(\.\S+)$", listing, flags=re.M)[1:]
    sections = dict(zip(titles_and_bodies[::2], titles_and_bodies[1::2], strict=True))
    common = sections[".nv.info"]
    registers = re.findall(r"function: (\w+)\(\w+\)\s+register count: (\d+)", common)
    return {
        name: _resources(name, int(count), sections[f".nv.info.{name}"], log)
        for name, count in registers
    }


def _resources(name: str, registers: int, info: str, log: str) -> Resources:
    found: dict[str, list[str]] = {}
    for attribute, value in re.findall(
        r"Attribute:\s+(\w+)\s+Format:\s+\w+\s+Value:([^\n]*)", info
    ):
        found.setdefault(attribute, []).append(value)

    def numbers(attribute: str) -> tuple[int, ...] | None:
        if attribute not in found:
            return None
        return tuple(int(word, 16) for word in found[attribute][0].split())

    bank = numbers("EIATTR_PARAM_CBANK")
    base = bank[1] & 0xFFFF if bank else 0
    parameters = {}
    for value in found.get("EIATTR_KPARAM_INFO", []):
        fields = dict(re.findall(r"(\w+)\s*: (0x[0-9a-f]+)", value))
        ordinal, offset, size = (int(fields[word], 16) for word in ("Ordinal", "Offset", "Size"))
        parameters[ordinal] = Parameter(base + offset, size)
    threads = numbers("EIATTR_MAX_THREADS")
    _, _, of_kernel = log.partition(f"Compiling entry function '{name}'")
    used = re.search(r"Used (\d+) registers[^\n]*", of_kernel)
    assert used is not None, f"the log does not speak of {name}: {log}"
    assert int(used[1]) == registers
    shared = re.search(r"(\d+) bytes smem", used[0])
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", of_kernel)
    return Resources(
        registers,
        int(shared[1]) if shared else 0,
        threads[0] * threads[1] * threads[2] if threads else None,
        numbers("EIATTR_CTA_PER_CLUSTER"),
        tuple(parameters[ordinal] for ordinal in sorted(parameters)),
        sum(map(int, spills.groups())) if spills else 0,
    )


def _run(tool: str, option: str, cubin: bytes) -> str:
    """What one of CUDA's tools prints of a cubin."""
    bundled = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", tool)
    found = str(bundled) if bundled.exists() else shutil.which(tool)
    if found is None:
        pytest.skip(f"reading a cubin needs {tool}: pip install nvidia-cuda-{tool}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [found, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
