"""PTX text to a ``.cu`` text with the same kernels, which the emulator builds like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .counting import Counted, Counters
from .kernels import KernelWriter, variable_declaration
from .syntax import Statement, parse

MACHINE_DIRECTORY = Path(__file__).resolve().parent
"""Where the generated text finds machine.h."""


@dataclass(frozen=True)
class Translation:
    """Attributes:
    text: the C++ of all kernels.
    counters: by kernel, what one execution of each counter stands for; empty if not counted.
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
    """The kernels of a PTX text in C++.

    Args:
        text: PTX, one or more kernels.
        name: The file that reports name where the text has no ``.loc`` lines.
        source_directories: Where the files of those lines are, if the text has bare names.
        cluster: Blocks of a cluster, where a launch gives them and the text does not.
        counted: With counters of executed instructions.

    Raises:
        PtxError: an opcode, a modifier, a type or a directive that is not known; with its line.
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
    functions, declared, counters = [], {}, {}
    for entry in module.entries:
        own = Counters(entry) if counted else None
        writer = KernelWriter(entry, shared, others, line_of, cluster, own)
        functions.append(writer.function())
        declared |= writer.shared | {one: others[one] for one in sorted(writer.used_globals)}
        if own is not None:
            counters[entry.name] = own.blocks
    header = ['#include "machine.h"', "using namespace ptx_machine;"]
    return Translation("\n".join([*header, *declared.values(), *functions]), counters)
