"""Replacements of ``cupy.RawModule`` and ``cupy.RawKernel`` that run on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.cubins import Parameter, Resources

from . import memory, ptx
from .build import INCLUDE_DIRECTORY, build_kernel, cache_directory, digest
from .driver import CHIPS, Chip, Function, three
from .ptx.nvrtc import put
from .ptx.translation import MACHINE_DIRECTORY
from .reports import CheckerError, Report, render, short_path, symbols_of
from .runtime import (
    EntryRecord,
    Settings,
    apply_settings,
    current_settings,
    library,
)

_POINTER, _INTEGER, _FLOAT, _STRUCT = range(4)
_KIND_NAMES = ("a pointer", "an integer", "a float", "a struct")
LARGEST_CHIP = (9, 0)  # has the most shared memory and all instructions of the twin


@dataclass(frozen=True)
class BankConflicts:
    """Shared-memory traffic of one source line.

    ``wavefronts / ideal`` is 1.0 without bank conflicts.
    """

    file: str
    line: int
    is_matrix: bool
    requests: int
    ideal: int
    wavefronts: int


@dataclass(frozen=True)
class Outcome:
    """Result of a launch: reports, counts, and the extra figures that the settings request."""

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
        chip: The chip to emulate, with its limits.
        resources: Resources of the kernels' cubins (tests/cubins.py).  Default: what the source
            declares, with no registers and no static shared memory.
        variant: Description of the module's variant, for messages.
    """

    def __init__(
        self,
        path: str | Path,
        defines: Mapping[str, str] | None = None,
        include_directories: Sequence[str | Path] = (INCLUDE_DIRECTORY,),
        checked: bool = True,
        chip: Chip = CHIPS[LARGEST_CHIP],
        resources: Mapping[str, Resources] | None = None,
        variant: str = "",
    ) -> None:
        folders = [Path(directory) for directory in include_directories]
        self.library_path = build_kernel(Path(path), defines, folders, checked)
        self.checked = checked
        library()  # defines the symbols that the kernels need
        # DEEPBIND: __emutls_get_address must be the runtime's, even if TensorFlow has loaded libgcc
        # for the whole process.
        mode = os.RTLD_LOCAL | os.RTLD_DEEPBIND
        self._library = ctypes.CDLL(str(self.library_path), mode=mode)
        self.chip = chip
        self.resources = resources
        self.variant = variant

    @classmethod
    def from_ptx(
        cls,
        text: str,
        name: str = "kernel",
        source_directories: Sequence[Path] = (),
        cluster: tuple[int, ...] | None = None,
        **rest: Any,
    ) -> EmulatedModule:
        """Return the kernels of a PTX text.

        Args:
            text: PTX; reports name the lines of its ``.loc`` directives, or its own lines.
            name: Name of the cached files.
            source_directories: Folders of the files of ``.loc``, if the text has bare names.
            cluster: Blocks per cluster, if the launch defines them and the text does not.
            rest: As for a source file: ``checked``, ``chip``, ``resources`` and ``variant``.

        Raises:
            PtxError: The text has an unsupported construct; with its line.
        """
        stem = cache_directory() / f"{name}-{digest(text, cluster)}"
        listing, unit = stem.with_suffix(".ptx"), stem.with_suffix(".cu")
        translation = ptx.translate(text, str(listing), source_directories, cluster)
        put(listing, text)
        put(unit, translation)
        return cls(unit, {}, [MACHINE_DIRECTORY], **rest)

    def get_function(self, name: str) -> EmulatedKernel:
        """Return the kernel of that name; ValueError if the module has none."""
        try:
            entry = EntryRecord.in_dll(self._library, f"emulator_entry_{name}")
        except ValueError:
            raise ValueError(f"{self.library_path.name} exports no kernel {name}") from None
        return EmulatedKernel(self, name, entry)


class EmulatedKernel(Function):
    """A callable with the interface of ``cupy.RawKernel``.

    Attributes:
        may_overlap: Whether it is launched with programmatic stream serialization, so it may begin
            before earlier launches have ended.
    """

    def __init__(self, module: EmulatedModule, name: str, entry: EntryRecord) -> None:
        resources = module.resources[name] if module.resources else _declared(entry)
        super().__init__(f"{name} {module.variant}".rstrip(), module.chip, resources)
        self.name = name
        self.resources = resources
        self.may_overlap = False
        self._module = module
        self._entry = entry

    @property
    def chip(self) -> Chip:
        """The emulated chip."""
        return self._module.chip

    @property
    def parameter_sizes(self) -> list[int]:
        """Declared bytes of each parameter."""
        return [self._entry.parameters[i].size for i in range(self._entry.parameter_count)]

    @property
    def declared_at(self) -> tuple[str, int]:
        """File and line of the kernel."""
        file, line = symbols_of(self._module.library_path).function(self.name)
        return short_path(file), line

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> Outcome:
        """Run the kernel.

        Args:
            grid, block: Up to three extents.
            args: Arrays of ``memory`` (passed as pointers), NumPy scalars (by value), structured
                scalars or arrays of one structured element (by-value structs), Python ints
                (8 bytes) and floats (a double).
            shared_mem: Bytes of dynamic shared memory.

        Raises:
            CheckerError: The checker reports something (unless the settings collect reports).
            TypeError, ValueError: An argument or extent does not fit the kernel.
        """
        options = current_settings()
        grid_extents, block_extents = three(grid), three(block)
        self.require_launchable(grid_extents, block_extents, shared_mem)
        holders = self._convert(args)
        self.require_arguments([holder.nbytes for holder in holders], args)
        pointers = (ctypes.c_void_p * max(len(holders), 1))(
            *[holder.ctypes.data for holder in holders]
        )
        for index, holder in enumerate(holders):
            if self._entry.parameters[index].kind == _POINTER:
                memory.note_kernel(int(holder), self)
        outcome = self.run(grid_extents, block_extents, pointers, shared_mem, self.may_overlap)
        if outcome.reports and options.raise_reports:
            raise CheckerError(outcome.reports)
        return outcome

    def run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        pointers: Any,
        shared_mem: int,
        may_overlap: bool = False,
    ) -> Outcome:
        """Run the kernel for a launch that has passed the driver's checks.

        Args:
            grid, block: Three extents each.
            pointers: A ctypes array with the address of each parameter's value.
            shared_mem: Bytes of dynamic shared memory.
            may_overlap: Use programmatic stream serialization.
        """
        options = current_settings()
        if not self._module.checked:
            options = replace(options, check=False)
        blocks = np.asarray(options.blocks if options.blocks is not None else [], np.uint32)
        apply_settings(options)
        runtime = library()
        runtime.emulator_clear_reports()
        runtime.emulator_launch(
            ctypes.addressof(self._entry),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block),
            shared_mem,
            pointers,
            blocks.ctypes.data,
            len(blocks),
            may_overlap,
        )
        outcome = self._outcome(options)
        if options.on_outcome is not None:
            options.on_outcome(outcome)
        return outcome

    def _convert(self, args: Sequence[Any]) -> list[np.ndarray]:
        count = self._entry.parameter_count
        if len(args) != count:
            raise TypeError(f"{self.name} takes {count} arguments: got {len(args)}")
        holders = []
        for index, value in enumerate(args):
            parameter = self._entry.parameters[index]
            holder, kind = _to_parameter(value, f"argument {index} of {self.name}")
            formal = (parameter.size, parameter.kind)
            # An address may be passed as uint64.
            is_address = parameter.kind == _POINTER and kind == _INTEGER
            if holder.nbytes != formal[0] or (kind != formal[1] and not is_address):
                raise TypeError(
                    f"argument {index} of {self.name} is {_KIND_NAMES[formal[1]]} of {formal[0]}"
                    f" bytes: got {_KIND_NAMES[kind]} of {holder.nbytes}"
                )
            holders.append(holder)
        return holders

    def _outcome(self, options: Settings) -> Outcome:
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
            self._bank_conflicts() if options.bank_conflicts else [],
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


def _declared(entry: EntryRecord) -> Resources:
    """Return the resources that a kernel's source declares."""
    parameters = [entry.parameters[index] for index in range(entry.parameter_count)]
    cluster = tuple(entry.cluster)
    return Resources(
        registers=0,
        static_shared=0,
        launch_bounds=entry.launch_bounds or None,
        cluster=None if cluster == (1, 1, 1) else cluster,
        parameters=tuple(Parameter(0, parameter.size) for parameter in parameters),
    )


def _to_parameter(value: Any, what: str) -> tuple[np.ndarray, int]:
    """Return an argument's bytes as a contiguous array, and its ParameterKind."""
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
    """Copy a struct's bytes to an address that suits any parameter (64 bytes)."""
    raw = np.frombuffer(value.tobytes(), np.uint8)
    buffer = np.empty(raw.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    result = buffer[start : start + raw.size]
    result[...] = raw
    return result
