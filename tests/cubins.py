"""Instructions and resources of a cubin, as CUDA's binary tools print them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import loops


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin."""
    return _run("nvdisasm", "-c", cubin)


def mnemonic(instruction: str) -> str:
    """Return the name of a SASS instruction, without its guard and modifiers."""
    return re.sub(r"^@\S+\s+", "", instruction).split()[0].partition(".")[0]


def instructions(listing: str) -> Counter:
    """Count each instruction of a SASS listing, ignoring modifiers."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", listing, re.M))


@dataclass
class Block:
    """A basic block of SASS.

    Attributes:
        instructions: instructions with their guards and modifiers.
        follows: indices of the blocks that may run next.
        calls: indices of the blocks that this block calls.
    """

    instructions: list[str] = field(default_factory=list)
    follows: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)


_LABEL = r"(?:\.L_x_\d+|\$[\w$]+)"
_LINE = re.compile(
    rf"^(?P<label>{_LABEL}):|^\s*/\*[0-9a-f]+\*/\s+(?P<instruction>.*?)\s*;[^\n]*", re.M
)
# Jumps: the next instruction is never reached, unless the jump has a guard or a condition.
_JUMP = re.compile(r"(?P<guard>@\S+\s+)?(BRA\S*\s+(?P<condition>[^`]*)`|BRX|EXIT|RET|JMP)")


def kernels(listing: str) -> dict[str, str]:
    """Return the code of each kernel of a SASS listing."""
    parts = re.split(r"^\s*\.section\s+\.text\.([\w$]+)", listing, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(code: str) -> list[Block]:
    """Return the basic blocks of one kernel's SASS, in the order of the text."""
    found, numbers, targets = [Block()], {}, []
    for line in _LINE.finditer(code):
        if line["label"]:
            if found[-1].instructions:
                found[-1].follows.add(len(found))
                found.append(Block())
            numbers[line["label"]] = len(found) - 1
            continue
        instruction = line["instruction"]
        found[-1].instructions.append(instruction)
        is_call = re.search(r"\bCALL\b|CALL\.", instruction)
        targets.append((found[-1].calls if is_call else found[-1].follows, line[0]))
        if jump := _JUMP.match(instruction):
            if jump["guard"] or jump["condition"]:
                found[-1].follows.add(len(found))
            found.append(Block())
    for edges, text in targets:
        edges.update(numbers[label] for label in re.findall(_LABEL, text) if label in numbers)
    return found


def main_loop(code: str, pattern: str) -> list[str]:
    """Return the instructions of the innermost loops that contain a match of ``pattern``."""
    every = blocks(code)
    wanted = {
        number
        for number, block in enumerate(every)
        if any(re.search(pattern, line) for line in block.instructions)
    }
    chosen = loops.innermost([block.follows for block in every], wanted)
    return [line for number in sorted(chosen) for line in every[number].instructions]


def loads_and_waits(lines: Iterable[str]) -> tuple[int, int]:
    """Count the loads from global memory in lines of SASS, and the waits for them.

    A wait is the first instruction that reads the result of a load.  All loads before it are in
    flight together, so that later instructions do not wait for them again.
    """
    loads = waits = 0
    loading: set[int] = set()
    for line in lines:
        if line.startswith("@!PT"):  # never executed; found next to asynchronous copies
            continue
        if not loading.isdisjoint(int(one) for one in re.findall(r"\bR(\d+)", line)):
            waits += 1
            loading.clear()
        if load := re.search(r"\bLDG\.(\S*)\s+R(\d+)", line):
            loads += 1
            size = re.search(r"\b(64|128)\b", load[1])
            first = int(load[2])
            loading.update(range(first, first + int(size[1] if size else 32) // 32))
    return loads, waits


def no_spills(log: str) -> bool:
    """Return whether the compiler's log reports spills, all of them of zero bytes."""
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    return bool(spilled) and not any(spilled)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        address: byte address in constant memory, which shows the alignment.
        size: size in bytes.
    """

    address: int
    size: int


@dataclass(frozen=True)
class Resources:
    """Resources and limits of a kernel.

    Attributes:
        registers: registers per thread.
        static_shared: bytes of statically declared shared memory.
        launch_bounds: maximum number of threads per block; None if not declared.
        cluster: thread blocks per cluster along each axis; None if not declared.
        parameters: parameters in order.
        spilled: bytes of spill stores plus bytes of spill loads, per thread.
    """

    registers: int
    static_shared: int
    launch_bounds: int | None
    cluster: tuple[int, ...] | None
    parameters: tuple[Parameter, ...]
    spilled: int = 0


def resources(cubin: bytes, log: str) -> dict[str, Resources]:
    """Return the resources of a cubin's kernels by name.

    Args:
        cubin: a cubin compiled by NVRTC.
        log: the compiler's log, written with ``--ptxas-options=-v``.  The static shared memory is
            read from it, because the cubin's section includes the system's reserved bytes.
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
    """Return what one of CUDA's binary tools prints for a cubin."""
    bundled = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin", tool)
    found = str(bundled) if bundled.exists() else shutil.which(tool)
    if found is None:
        pytest.skip(f"reading a cubin needs {tool}: pip install nvidia-cuda-{tool}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [found, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
