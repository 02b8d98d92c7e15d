"""Stands in for ``cupy.RawModule`` and ``cupy.RawKernel``: the same calls, run on the CPU."""

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
from .ptx.counting import Counted
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
from .work import Work, counted_work

_POINTER, _INTEGER, _FLOAT, _STRUCT = range(4)
_KIND_NAMES = ("a pointer", "an integer", "a float", "a struct")
LARGEST_CHIP = (9, 0)  # of the most shared memory, and with all instructions of the twin


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
    """What a launch reports: findings, counts, and what the settings asked for besides."""

    kernel: str
    reports: list[Report]
    switches: int
    accesses: int
    blocks: int
    bank_conflicts: list[BankConflicts] = field(default_factory=list)
    work: Work | None = None


class EmulatedModule:
    """The kernels of one ``.cu`` file, compiled for the CPU.

    Args:
        path: The source file, unchanged.
        defines: Macros, name to text, as for the real compiler.
        include_directories: Folders of quoted includes.
        checked: False for a fast build without the checker.
        chip: The chip to stand for, with its limits.
        resources: What the kernels' cubins take (tests/cubins.py).  Without, what the source
            declares: registers and static shared memory count as nothing then.
        cubin: That of the kernels, for those who look at it.
        variant: What distinguishes the module, for messages.
    """

    def __init__(
        self,
        path: str | Path,
        defines: Mapping[str, str] | None = None,
        include_directories: Sequence[str | Path] = (INCLUDE_DIRECTORY,),
        checked: bool = True,
        chip: Chip = CHIPS[LARGEST_CHIP],
        resources: Mapping[str, Resources] | None = None,
        cubin: bytes | None = None,
        variant: str = "",
    ) -> None:
        folders = [Path(directory) for directory in include_directories]
        self.library_path = build_kernel(Path(path), defines, folders, checked)
        self.checked = checked
        library()  # the kernels' undefined symbols are the runtime's
        # DEEPBIND: the compiler's calls mean our runtime, also where TensorFlow has loaded libgcc
        # for the whole process, whose __emutls_get_address would else be found first.
        mode = os.RTLD_LOCAL | os.RTLD_DEEPBIND
        self._library = ctypes.CDLL(str(self.library_path), mode=mode)
        self.chip = chip
        self.resources = resources
        self.cubin = cubin
        self.variant = variant
        self.counters: Mapping[str, list[Counted]] = {}
        self.ptx = ""

    @classmethod
    def from_ptx(
        cls,
        text: str,
        name: str = "kernel",
        source_directories: Sequence[Path] = (),
        cluster: tuple[int, ...] | None = None,
        counted: bool = False,
        **rest: Any,
    ) -> EmulatedModule:
        """The kernels of a PTX text.

        Args:
            text: PTX; reports name the lines of its ``.loc`` directives, or else its own.
            name: Of what is kept of it.
            source_directories: Where the files of ``.loc`` are, if the text has bare names.
            cluster: Blocks of a cluster, where a launch gives them and the text does not.
            counted: Count the instructions that are executed (``settings(work=True)``).
            rest: As for a source file: ``checked``, ``chip``, ``resources``, ``cubin`` and
                ``variant``.

        Raises:
            PtxError: The text has something that is not known; with its line.
        """
        stem = cache_directory() / f"{name}-{digest(text, cluster, counted)}"
        listing, unit = stem.with_suffix(".ptx"), stem.with_suffix(".cu")
        translation = ptx.translate(text, str(listing), source_directories, cluster, counted)
        put(listing, text)
        put(unit, translation.text)
        module = cls(unit, {}, [MACHINE_DIRECTORY], **rest)
        module.counters, module.ptx = translation.counters, text
        return module

    def get_function(self, name: str) -> EmulatedKernel:
        """The kernel of that name; ValueError if the module has none."""
        try:
            entry = EntryRecord.in_dll(self._library, f"emulator_entry_{name}")
        except ValueError:
            raise ValueError(f"{self.library_path.name} exports no kernel {name}") from None
        return EmulatedKernel(self, name, entry)


class EmulatedKernel(Function):
    """A callable with the interface of ``cupy.RawKernel``.

    Attributes:
        may_overlap: Whether it is launched with programmatic stream serialization, so that it may
            begin before the launches before it have ended.
    """

    def __init__(self, module: EmulatedModule, name: str, entry: EntryRecord) -> None:
        takes = module.resources[name] if module.resources else _declared(entry)
        super().__init__(f"{name} {module.variant}".rstrip(), module.chip, takes)
        self.name = name
        self.resources = takes
        self.last_outcome: Outcome | None = None
        self.may_overlap = False
        self._module = module
        self._entry = entry

    @property
    def chip(self) -> Chip:
        """What the kernel runs on."""
        return self._module.chip

    @property
    def cubin(self) -> bytes | None:
        """That of its module, if it was given."""
        return self._module.cubin

    @property
    def counters(self) -> Sequence[Counted]:
        """What one execution of each of its counters stands for; none if it is not counted."""
        return self._module.counters.get(self.name, ())

    @property
    def ptx(self) -> str:
        """The text that its module is from; empty if it is from a source file."""
        return self._module.ptx

    @property
    def parameter_sizes(self) -> list[int]:
        """Bytes of each parameter, as the source declares it."""
        return [self._entry.parameters[at].size for at in range(self._entry.parameter_count)]

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
        grid_extents, block_extents = three(grid), three(block)
        self.require_launchable(grid_extents, block_extents, shared_mem)
        holders = self._convert(args)
        self.require_arguments([holder.nbytes for holder in holders], args)
        pointers = (ctypes.c_void_p * max(len(holders), 1))(
            *[holder.ctypes.data for holder in holders]
        )
        for value in args:
            if isinstance(value, np.ndarray) and not value.dtype.names:
                memory.note_kernel(value, self)
        outcome = self.run(grid_extents, block_extents, pointers, shared_mem, self.may_overlap)
        if outcome.reports and chosen.raise_reports:
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
        """Runs the kernel as cuLaunchKernel is told to, which has been found to be permitted.

        Args:
            grid, block: Three extents each.
            pointers: A ctypes array with the address of each parameter's value.
            shared_mem: Bytes of dynamic shared memory.
            may_overlap: With programmatic stream serialization.
        """
        chosen = current_settings()
        if not self._module.checked:
            chosen = replace(chosen, check=False)
        blocks = np.asarray(chosen.blocks if chosen.blocks is not None else [], np.uint32)
        apply_settings(chosen)
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
        self.last_outcome = self._outcome(chosen)
        if chosen.on_outcome is not None:
            chosen.on_outcome(self.last_outcome)
        return self.last_outcome

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

    def _outcome(self, chosen: Settings) -> Outcome:
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
            self._bank_conflicts() if chosen.bank_conflicts or chosen.work else [],
            counted_work(self.counters or None) if chosen.work else None,
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
    """What a kernel's source says of its launch."""
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
