"""Translation of PTX text to a ``.cu`` text with the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .counting import Counted, Counters
from .kernels import KernelWriter, variable_declaration
from .syntax import Statement, parse

MACHINE_DIRECTORY = Path(__file__).resolve().parent
"""Folder of machine.h, which the generated text includes."""


@dataclass(frozen=True)
class Translation:
    """Translated kernels.

    Attributes:
        text: the C++ of all kernels.
        counters: instructions of each counter, by kernel; empty if not counted.
    """

    text: str
    counters: dict[str, list[Counted]]


def translate(
    text: str,
    name: str,
    source_directories: Sequence[Path] = (),
    cluster: tuple[int, ...] | None = None,
    counted: bool = False,
) -> Translation:
    """Return the kernels of a PTX text in C++.

    Args:
        text: PTX with one or more kernels.
        name: File that reports name if the text has no ``.loc`` lines.
        source_directories: Folders of the files of ``.loc`` lines, if the text has bare names.
        cluster: Blocks per cluster, if the launch defines them and the text does not.
        counted: Add counters of executed instructions.

    Raises:
        PtxError: an unsupported opcode, modifier, type or directive; with its line.
    """
    module = parse(text)

    def line_of(statement: Statement) -> tuple[str, int]:
        file, line = statement.place or (name, statement.line)
        for directory in source_directories if statement.place else ():
            if (directory / Path(file).name).is_file():
                return str(directory / Path(file).name), line
        return file, line

    shared, others = {}, {}
    for statement in module.variables:
        space, variable, declaration = variable_declaration(statement)
        (shared if space == "shared" else others)[variable] = declaration
    functions, declarations, counters = [], {}, {}
    for entry in module.entries:
        entry_counters = Counters(entry) if counted else None
        writer = KernelWriter(entry, shared, others, line_of, cluster, entry_counters)
        functions.append(writer.function())
        declarations |= writer.shared | {used: others[used] for used in sorted(writer.used_globals)}
        if entry_counters is not None:
            counters[entry.name] = entry_counters.blocks
    header = ['#include "machine.h"', "using namespace ptx_machine;"]
    return Translation("\n".join([*header, *declarations.values(), *functions]), counters)
