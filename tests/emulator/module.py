"""Stands in for ``cupy.RawModule`` and ``cupy.RawKernel``: the same calls, run on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import memory
from .build import INCLUDE_DIRECTORY, build_kernel
from .reports import CheckerError, Report, render, short_path, symbols_of
from .runtime import (
    EntryRecord,
    apply_settings,
    current_settings,
    library,
)

_POINTER, _INTEGER, _FLOAT, _STRUCT = range(4)
_KIND_NAMES = ("a pointer", "an integer", "a float", "a struct")
# Shared memory that a launch may ask for without raising the kernel's limit first.
DEFAULT_SHARED_LIMIT = 48 << 10
SHARED_LIMITS = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
MAX_THREADS = 1024


@dataclass(frozen=True)
class BankConflicts:
    """Shared-memory traffic of one source line.

    ``wavefronts / ideal`` is 1.0 where no two lanes of a request want different words of one bank.
    """

    file: str
    line: int
    is_matrix: bool
    requests: int
    ideal: int
    wavefronts: int


@dataclass(frozen=True)
class Outcome:
    """What a launch reports: findings, counts, and bank conflicts if they were asked for."""

    kernel: str
    reports: list[Report]
    switches: int
    accesses: int
    blocks: int
    bank_conflicts: list[BankConflicts] = field(default_factory=list)


class EmulatedModule:
    """The kernels of one ``.cu`` file, compiled for the CPU.

    Args:
        path: The source file, unchanged.
        defines: Macros, name to text, as for the real compiler.
        include_directories: Folders of quoted includes.
        checked: False for a fast build without the checker.
        arch: The chip to stand for (75 ... 120): limits shared memory. None for the largest.
    """

    def __init__(
        self,
        path: str | Path,
        defines: Mapping[str, str] | None = None,
        include_directories: Sequence[str | Path] = (INCLUDE_DIRECTORY,),
        checked: bool = True,
        arch: int | None = None,
    ) -> None:
        folders = [Path(directory) for directory in include_directories]
        self.library_path = build_kernel(Path(path), defines, folders, checked)
        self.checked = checked
        library()  # the kernels' undefined symbols are the runtime's
        # DEEPBIND: the compiler's calls mean our runtime, also where TensorFlow has loaded libgcc
        # for the whole process, whose __emutls_get_address would else be found first.
        mode = os.RTLD_LOCAL | os.RTLD_DEEPBIND
        self._library = ctypes.CDLL(str(self.library_path), mode=mode)
        self.shared_limit = SHARED_LIMITS[arch] if arch else max(SHARED_LIMITS.values())

    def get_function(self, name: str) -> EmulatedKernel:
        """The kernel of that name; ValueError if the module has none."""
        try:
            entry = EntryRecord.in_dll(self._library, f"emulator_entry_{name}")
        except ValueError:
            raise ValueError(f"{self.library_path.name} exports no kernel {name}") from None
        return EmulatedKernel(self, name, entry)


class EmulatedKernel:
    """A callable with the interface of ``cupy.RawKernel``."""

    def __init__(self, module: EmulatedModule, name: str, entry: EntryRecord) -> None:
        self.name = name
        self.max_dynamic_shared_size_bytes = DEFAULT_SHARED_LIMIT
        self.last_outcome: Outcome | None = None
        self._module = module
        self._entry = entry

    @property
    def declared_at(self) -> tuple[str, int]:
        """File and line of the kernel."""
        file, line = symbols_of(self._module.library_path).function(self.name)
        return short_path(file), line

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
    ) -> Outcome:
        """Runs the kernel.

        Args:
            grid, block: Up to three extents.
            args: Arrays of ``memory`` (passed as pointers), NumPy scalars (by value), structured
                scalars or arrays of one structured element (by-value structs), Python ints
                (8 bytes) and floats (a double).
            shared_mem: Bytes of dynamic shared memory.

        Raises:
            CheckerError: The checker has something to report (unless the settings collect).
            TypeError, ValueError: An argument or extent that a GPU launch would get wrong.
        """
        chosen = current_settings()
        if not self._module.checked:
            chosen = replace(chosen, check=False)
        grid_extents, block_extents = _extents(grid), _extents(block)
        self._check_extents(grid_extents, block_extents, shared_mem)
        holders = self._convert(args)
        pointers = (ctypes.c_void_p * max(len(holders), 1))(
            *[holder.ctypes.data for holder in holders]
        )
        blocks = np.asarray(chosen.blocks if chosen.blocks is not None else [], np.uint32)
        apply_settings(chosen)
        runtime = library()
        runtime.emulator_clear_reports()
        runtime.emulator_launch(
            ctypes.addressof(self._entry),
            (ctypes.c_uint32 * 3)(*grid_extents),
            (ctypes.c_uint32 * 3)(*block_extents),
            shared_mem,
            pointers,
            blocks.ctypes.data,
            len(blocks),
        )
        for value in args:
            if isinstance(value, np.ndarray) and not value.dtype.names:
                memory.note_kernel(value, self)
        self.last_outcome = self._outcome(chosen.bank_conflicts)
        if chosen.on_outcome is not None:
            chosen.on_outcome(self.last_outcome)
        if self.last_outcome.reports and chosen.raise_reports:
            raise CheckerError(self.last_outcome.reports)
        return self.last_outcome

    def _check_extents(self, grid: list[int], block: list[int], shared_mem: int) -> None:
        threads = block[0] * block[1] * block[2]
        bound = self._entry.launch_bounds or MAX_THREADS
        if not 0 < threads <= bound:
            raise ValueError(f"{self.name} takes 1 to {bound} threads a block: got {threads}")
        if 0 in grid:
            raise ValueError(f"{self.name}: a grid of {tuple(grid)} has no block to launch")
        for extent, size in zip(grid, self._entry.cluster, strict=True):
            if extent % size:
                raise ValueError(
                    f"{self.name} runs in clusters of {tuple(self._entry.cluster)}:"
                    f" a grid of {tuple(grid)} is no multiple"
                )
        limit = min(self.max_dynamic_shared_size_bytes, self._module.shared_limit)
        if shared_mem > limit:
            raise ValueError(
                f"{self.name} asks for {shared_mem} bytes of dynamic shared memory, the limit is"
                f" {limit} (max_dynamic_shared_size_bytes, and the chip's)"
            )

    def _convert(self, args: Sequence[Any]) -> list[np.ndarray]:
        count = self._entry.parameter_count
        if len(args) != count:
            raise TypeError(f"{self.name} takes {count} arguments: got {len(args)}")
        holders = []
        for index, value in enumerate(args):
            parameter = self._entry.parameters[index]
            holder, kind = _to_parameter(value, f"argument {index} of {self.name}")
            wanted = (parameter.size, parameter.kind)
            # An address may come as uint64.
            is_address = parameter.kind == _POINTER and kind == _INTEGER
            if holder.nbytes != wanted[0] or (kind != wanted[1] and not is_address):
                raise TypeError(
                    f"argument {index} of {self.name} is {_KIND_NAMES[wanted[1]]} of {wanted[0]}"
                    f" bytes: got {_KIND_NAMES[kind]} of {holder.nbytes}"
                )
            holders.append(holder)
        return holders

    def _outcome(self, with_bank_conflicts: bool) -> Outcome:
        runtime = library()
        count = runtime.emulator_report_count()
        records = [runtime.emulator_report(index).contents for index in range(count)]
        reports = render(self.name, self._module.library_path, records) if records else []
        statistics = runtime.emulator_statistics().contents
        return Outcome(
            self.name,
            reports,
            statistics.switches,
            statistics.accesses,
            statistics.blocks,
            self._bank_conflicts() if with_bank_conflicts else [],
        )

    def _bank_conflicts(self) -> list[BankConflicts]:
        runtime = library()
        symbols = symbols_of(self._module.library_path)
        totals: dict[tuple[str, int, bool], list[int]] = {}
        for index in range(runtime.emulator_bank_count()):
            record = runtime.emulator_bank_record(index).contents
            key = (*symbols.place(record.pc), bool(record.is_matrix))
            total = totals.setdefault(key, [0, 0, 0])
            for slot, value in enumerate((record.requests, record.ideal, record.wavefronts)):
                total[slot] += value
        return [
            BankConflicts(short_path(file), line, is_matrix, *total)
            for (file, line, is_matrix), total in sorted(totals.items())
        ]


def _extents(extents: Sequence[int]) -> list[int]:
    values = [int(extent) for extent in extents]
    if not 1 <= len(values) <= 3:
        raise ValueError(f"a grid or block has one to three extents: got {tuple(extents)}")
    return values + [1] * (3 - len(values))


def _to_parameter(value: Any, what: str) -> tuple[np.ndarray, int]:
    """The bytes of one argument as a contiguous array, and their ParameterKind."""
    if isinstance(value, np.ndarray) and value.dtype.names and value.size == 1:
        return _aligned_copy(value), _STRUCT
    if isinstance(value, np.ndarray):
        if not memory.is_emulator_memory(value):
            raise TypeError(f"{what} is an ordinary NumPy array: make it with memory.array()")
        return np.array(value.__array_interface__["data"][0], np.uint64), _POINTER
    if value is None:
        return np.array(0, np.uint64), _POINTER
    if isinstance(value, np.void):
        return _aligned_copy(value), _STRUCT
    if isinstance(value, bool):
        return np.array(value, np.bool_), _INTEGER
    if isinstance(value, int):
        return np.array(value, np.int64), _INTEGER
    if isinstance(value, float):
        return np.array(value, np.float64), _FLOAT
    if isinstance(value, np.generic):
        kind = _FLOAT if value.dtype.kind == "f" else _INTEGER
        return np.array(value), kind
    raise TypeError(f"{what} is a {type(value).__name__}, which no launch takes")


def _aligned_copy(value) -> np.ndarray:
    """The bytes of a struct at an address that suits any parameter (64 bytes)."""
    raw = np.frombuffer(value.tobytes(), np.uint8)
    buffer = np.empty(raw.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    result = buffer[start : start + raw.size]
    result[...] = raw
    return result
