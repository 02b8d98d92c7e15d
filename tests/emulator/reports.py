"""Reports of the checker, with kernel, block, thread and source line."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import HOST_DIRECTORY, REPOSITORY

# Same order as ReportKind in host/checker.h.
KINDS = (
    "out-of-bounds",
    "misaligned",
    "read-only-write",
    "uninitialised-read",
    "race",
    "block-race",
    "launch-race",
    "async-before-wait",
    "async-overwrite",
    "unwaited-copy",
    "missing-proxy-fence",
    "transaction-count",
    "mbarrier",
    "barrier-divergence",
    "warp-divergence",
    "deadlock",
    "integer-overflow",
    "undefined-behaviour",
    "tensor-map",
    "descriptor",
    "wgmma",
    "cluster",
    "trap",
)
UNWRITTEN_OUTPUT = "unwritten-output"  # raised by memory.check_written


@dataclass(frozen=True)
class Report:
    """One finding of the checker.

    Attributes:
        kind: One of ``KINDS``, or ``unwritten-output``.
        kernel: The kernel's name.
        block: blockIdx as (x, y, z).
        thread: threadIdx as (x, y, z).
        file: Source file, relative to the repository if it is inside it.
        line: Line in that file; 0 if unknown.
        text: Description of the fault.
    """

    kind: str
    kernel: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        where = f"block {self.block} thread {self.thread}".replace(" (", "(").replace(", ", ",")
        return f"{self.kind}: {self.kernel} {where} at {self.file}:{self.line}: {self.text}"


class CheckerError(AssertionError):
    """A launch with reports; see ``reports``."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = list(reports)
        shown = "\n".join(f"  {report}" for report in self.reports[:20])
        more = len(self.reports) - 20
        super().__init__(
            f"{len(self.reports)} report(s) by the checker:\n{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
        )


def short_path(path: str) -> str:
    """Return the path relative to the repository, or unchanged if it is outside."""
    try:
        return str(Path(path).resolve().relative_to(REPOSITORY))
    except ValueError:
        return path


# --------------------------------------------------------------------------------------------------
# Conversion of code addresses to source lines, without external tools
# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Inlined:
    low: int
    high: int
    call_file: str
    call_line: int
    depth: int


class Symbols:
    """Source lines and shared variables of a compiled kernel file, from DWARF and symbols."""

    def __init__(self, path: Path) -> None:
        from elftools.elf.elffile import ELFFile

        self._addresses: list[int] = []
        self._places: list[tuple[str, int]] = []
        self._inlined: list[_Inlined] = []
        self._variables: dict[int, str] = {}
        self._functions: dict[str, int] = {}
        with open(path, "rb") as stream:
            elf = ELFFile(stream)
            self._read_variables(elf)
            dwarf = elf.get_dwarf_info()
            rows = []
            for unit in dwarf.iter_CUs():
                files = _file_names(dwarf.line_program_for_CU(unit), unit)
                rows.extend(_line_rows(dwarf.line_program_for_CU(unit), files))
                self._read_inlined(dwarf, unit, files)
        rows.sort()
        self._addresses = [row[0] for row in rows]
        self._places = [(row[1], row[2]) for row in rows]

    def _read_variables(self, elf) -> None:
        table = elf.get_section_by_name(".symtab")
        for symbol in table.iter_symbols() if table else ():
            if symbol.name.startswith("__emutls_v."):
                name = symbol.name.removeprefix("__emutls_v.")
                self._variables[symbol["st_value"]] = _plain_name(name)
            elif symbol["st_info"]["type"] == "STT_FUNC":
                self._functions[symbol.name] = symbol["st_value"]

    def _read_inlined(self, dwarf, unit, files: dict[int, str]) -> None:
        ranges = dwarf.range_lists()
        base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
        unit_base = base.value if base else 0

        def visit(die, depth: int) -> None:
            for child in die.iter_children():
                if child.tag == "DW_TAG_inlined_subroutine":
                    attributes = child.attributes
                    call_file = files.get(attributes["DW_AT_call_file"].value, "?")
                    call_line = attributes["DW_AT_call_line"].value
                    for low, high in _extents(child, ranges, unit_base):
                        self._inlined.append(_Inlined(low, high, call_file, call_line, depth))
                visit(child, depth + 1)

        visit(unit.get_top_DIE(), 0)

    def frames(self, address: int) -> list[tuple[str, int]]:
        """Return (file, line) of the code address, innermost inlined function first."""
        position = bisect.bisect_right(self._addresses, address) - 1
        frames = [self._places[position]] if position >= 0 else []
        callers = [call for call in self._inlined if call.low <= address < call.high]
        callers.sort(key=lambda call: -call.depth)
        return frames + [(call.call_file, call.call_line) for call in callers]

    def place(self, return_address: int) -> tuple[str, int]:
        """Return the innermost line outside the emulator's own code."""
        frames = self.frames(return_address - 1)
        for file, line in frames:
            if line and Path(file).parent != HOST_DIRECTORY:
                return file, line
        return frames[0] if frames else ("?", 0)

    def function(self, name: str) -> tuple[str, int]:
        """Return the file and line of a kernel's declaration."""
        address = self._functions.get(name)
        return ("?", 0) if address is None else self.place(address + 1)

    def variable(self, address: int) -> str:
        """Return the name of the shared variable with this control record."""
        return self._variables.get(address, "variable")


def _plain_name(mangled: str) -> str:
    """Return the variable name of a mangled local name (``_ZZ4kernE4tile`` -> ``tile``)."""
    for match in re.finditer(r"E(?:NK?S\w*_)?(\d+)", mangled):
        digits = match[1]
        for start in range(len(digits)):
            length = int(digits[start:] or 0)
            name = mangled[match.end() : match.end() + length]
            rest = mangled[match.end() + length :]
            if len(name) == length and name.isidentifier() and re.fullmatch(r"(_\d+_?)?", rest):
                return name
    return mangled


def _file_names(program, unit) -> dict[int, str]:
    header = program.header
    directory_of_unit = unit.get_top_DIE().attributes["DW_AT_comp_dir"].value.decode()
    first = 0 if header.version >= 5 else 1
    names = {}
    for index, entry in enumerate(header.file_entry, first):
        directory = directory_of_unit
        if header.version >= 5:
            directory = header.include_directory[entry.dir_index].decode()
        elif entry.dir_index:
            directory = header.include_directory[entry.dir_index - 1].decode()
        names[index] = str(Path(directory_of_unit) / directory / entry.name.decode())
    return names


def _line_rows(program, files: dict[int, str]) -> Iterator[tuple[int, str, int]]:
    for entry in program.get_entries():
        state = entry.state
        if state is not None and not state.end_sequence:
            yield state.address, files.get(state.file, "?"), state.line


def _extents(die, ranges, unit_base: int) -> Iterator[tuple[int, int]]:
    attributes = die.attributes
    if "DW_AT_ranges" in attributes:
        base = unit_base
        for entry in ranges.get_range_list_at_offset(attributes["DW_AT_ranges"].value):
            if hasattr(entry, "base_address"):
                base = entry.base_address
            else:
                yield base + entry.begin_offset, base + entry.end_offset
    elif "DW_AT_low_pc" in attributes:
        low = attributes["DW_AT_low_pc"].value
        high = attributes["DW_AT_high_pc"]
        is_address = high.form == "DW_FORM_addr"
        yield low, high.value if is_address else low + high.value


@functools.lru_cache(maxsize=32)
def symbols_of(path: Path) -> Symbols:
    """Return the symbols of a compiled kernel file; cached."""
    return Symbols(path)


def _resolve_names(text: str, symbols: Symbols) -> str:
    """Replace code addresses in a record's text by lines, and control records by names."""

    def describe(match: re.Match[str]) -> str:
        if match[1] == "variable":
            return symbols.variable(int(match[2], 16))
        file, line = symbols.place(int(match[2]))
        return f"{Path(file).name}:{line}"

    return re.sub(r"\{(line|variable) (\w+)\}", describe, text)


def render(kernel: str, library: Path, records: Sequence[Any]) -> list[Report]:
    """Convert the runtime's records to reports, one per kind and pair of lines."""
    symbols = symbols_of(library)
    reports: list[Report] = []
    seen = set()
    for record in records:
        place = symbols.place(record.pc) if record.pc else (record.file.decode(), record.line)
        other = symbols.place(record.other_pc) if record.other_pc else None
        kind, text = KINDS[record.kind], record.text.decode(errors="replace")
        # The optimiser may duplicate a barrier call.
        same_barrier = kind == "barrier-divergence" and "different lines" in text and place == other
        if same_barrier or (kind, place, other) in seen:
            continue
        seen.add((kind, place, other))
        file, line = place
        reports.append(
            Report(
                kind,
                kernel,
                tuple(record.block),
                tuple(record.thread),
                short_path(file),
                line,
                _resolve_names(text, symbols),
            )
        )
    return reports
