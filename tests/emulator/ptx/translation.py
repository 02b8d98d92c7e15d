"""Translation of PTX text to a ``.cu`` text with the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .kernels import KernelWriter, variable_declaration
from .syntax import Statement, parse

MACHINE_DIRECTORY = Path(__file__).resolve().parent
"""Folder of machine.h, which the generated text includes."""


def translate(
    text: str,
    name: str,
    source_directories: Sequence[Path] = (),
    cluster: tuple[int, ...] | None = None,
) -> str:
    """Return the kernels of a PTX text in C++.

    Args:
        text: PTX with one or more kernels.
        name: File that reports name if the text has no ``.loc`` lines.
        source_directories: Folders of the files of ``.loc`` lines, if the text has bare names.
        cluster: Blocks per cluster, if the launch defines them and the text does not.

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
    functions, declarations = [], {}
    for entry in module.entries:
        writer = KernelWriter(entry, shared, others, line_of, cluster)
        functions.append(writer.function())
        declarations |= writer.shared | {used: others[used] for used in sorted(writer.used_globals)}
    header = ['#include "machine.h"', "using namespace ptx_machine;"]
    return "\n".join([*header, *declarations.values(), *functions])
