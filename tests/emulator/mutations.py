"""Mutants of the kernels: one literal, comparison, stride or synchronisation changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .build import INCLUDE_DIRECTORY, KERNEL_DIRECTORY

NOT_MUTATED = ("ptx.cuh", "parameters.cuh")  # they contain no logic


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        file: Name of the kernel file or header.
        line: Line number, from 1.
        source: The original line, stripped.
        change: ``old -> new``; ``removed`` for a statement.
        text: The whole changed file.
    """

    file: str
    line: int
    source: str
    change: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: [{self.change}] in: {self.source}"


_LITERAL = re.compile(r"(?<![\w.])(\d+)(?=(?:u|ll|ull)?\b)(?![\w.]*\.\d|\.)")
_COMPARISON = re.compile(r"(?<= )(<=|>=|==|!=|<|>)(?= )")
_FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_SYNCHRONISATION = re.compile(
    r"(?:while \(!)?(?:__sync\w+|__threadfence\w*|ptx::(?:cp_async_(?:wait|commit)\w*|fence_\w+"
    r"|mbarrier_\w+|named_barrier_\w+|cluster_(?:arrive|wait)|wgmma_(?:fence|commit|wait)"
    r"|tma_store_(?:commit|wait)\w*|griddepcontrol_wait))(?:<[^;]*?>)?\([^;]*?\);"
    r"|while \(!ptx::mbarrier_\w+\([^;{]*\{\s*\}"
)
# Strides of tensors in memory, not the window's p.stride.
_STRIDE = re.compile(
    r"(?<![\w.])(?:(?:p\.)?\w+_|shape\.)?stride\[\w+\]|(?:p\.bias|shape\.channel)_stride\b"
)
_DECLARATION = re.compile(r"^\s*(?:int|long long) ")
_EXCLUDED = re.compile(r"^\s*#|static_assert|__launch_bounds__|alignas|__align__|^\s*using\b")


def _without_comments(text: str) -> str:
    """Blank out comments; all other characters keep their positions."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def mutations(file: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a source text."""
    code = _without_comments(text)
    lines = code.split("\n")

    def changed(start: int, end: int, new: str, change: str) -> Iterator[Mutant]:
        number = code.count("\n", 0, start)
        if not _EXCLUDED.search(lines[number]):
            source = text.split("\n")[number].strip()
            yield Mutant(file, number + 1, source, change, text[:start] + new + text[end:])

    for match in _LITERAL.finditer(code):
        value = int(match[1])
        for other in {value + 1, max(value - 1, 0)} - {value}:
            yield from changed(*match.span(), str(other), f"{value} -> {other}")
    for match in _COMPARISON.finditer(code):
        new = _FLIPPED[match[1]]
        yield from changed(*match.span(), new, f"{match[1]} -> {new}")
    for match in _STRIDE.finditer(code):
        start = code.rfind("\n", 0, match.start()) + 1
        if not _DECLARATION.match(code[start:].split("\n", 1)[0]):
            old = match[0]
            new = f"({old} < 0 ? -({old}) : {old})"
            yield from changed(*match.span(), new, f"{old} -> |{old}|")
    for match in _SYNCHRONISATION.finditer(code):
        call = re.search(r"(__\w+|ptx::\w+)", match[0])[1]
        yield from changed(*match.span(), ";", f"{call} removed")


def all_mutants(kernel: str | None = None) -> list[Mutant]:
    """Return the mutants of one file, such as ``conv_forward`` or ``tile.cuh``, or of all."""
    mutants = []
    for path in sorted([*KERNEL_DIRECTORY.glob("*.cu"), *INCLUDE_DIRECTORY.glob("*.cuh")]):
        selected = kernel in (None, path.name, path.stem)
        if selected and path.name not in NOT_MUTATED:
            mutants.extend(mutations(path.name, path.read_text()))
    if not mutants:
        raise SystemExit(f"no kernel file or header called {kernel}")
    return mutants
