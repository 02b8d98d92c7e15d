"""Parser of PTX text: kernels, variables, and statements with guards, opcodes and operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(ValueError):
    """PTX that the emulator does not support; the message quotes the line."""


@dataclass(frozen=True)
class Statement:
    """A directive, or an instruction with its guard and operands.

    Attributes:
        line: line of the PTX text.
        text: the statement's text, without comments and with single spaces.
        place: file and line of the CUDA source, if the text has ``.loc`` lines.
    """

    line: int
    text: str
    place: tuple[str, int] | None = None

    @property
    def guard(self) -> str:
        """The guard, ``%p1`` or ``!%p1``; empty without a guard."""
        match = _GUARD.match(self.text)
        return match[1] + match[2] if match else ""

    @property
    def opcode(self) -> str:
        """The opcode with all modifiers."""
        return self._unguarded.split(None, 1)[0]

    @property
    def operands(self) -> list[str]:
        _, _, rest = self._unguarded.partition(" ")
        return split_at_commas(rest)

    @property
    def is_directive(self) -> bool:
        return self.text.startswith(".")

    @property
    def _unguarded(self) -> str:
        return _GUARD.sub("", self.text)


@dataclass
class Scope:
    """Statements, labels (str) and inner scopes, in order."""

    items: list[Statement | str | Scope] = field(default_factory=list)

    def statements(self) -> Iterator[Statement]:
        """Yield all statements, including those of inner scopes."""
        for item in self.items:
            if isinstance(item, Scope):
                yield from item.statements()
            elif isinstance(item, Statement):
                yield item


@dataclass
class Entry:
    """One kernel: its parameters' declarations, and the directives before its body."""

    name: str
    parameters: list[str]
    directives: str
    body: Scope


@dataclass
class Text:
    """Kernels, and the declarations outside them."""

    entries: list[Entry]
    variables: list[Statement]


_GUARD = re.compile(r"@(!?)\s*(\S+)\s+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(
    r"(?P<space>\s+)|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)"
    r"(?:[^\n]*inlined_at\s+(?P<outer>\d+)\s+(?P<outer_line>\d+))?[^\n]*"
    r"|(?P<header>\.(version|target|address_size|file)\b[^\n]*)"
    r"|(?P<section>\.section\b[^{]*\{[^}]*\})"
    r"|(?:\.(?:visible|weak)\s+)*\.entry\s+(?P<entry>[\w$]+)\s*(?:\((?P<parameters>[^)]*)\))?"
    r"(?P<directives>[^{;]*)\{"
    r"|(?P<label>[\w$]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})|(?P<statement>[^;]+);"
)
_WRAPPERS = "ptx.cuh"  # one instruction each, so the caller's line is reported


def parse(text: str) -> Text:
    """Return the kernels of a PTX text.

    Raises:
        PtxError: it cannot be parsed, or defines functions.
    """
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    files = dict(
        re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)
    )  # listed at the end of the text
    result, place = Text([], []), None
    scopes: list[Scope] = []
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxError(f"line {line}: cannot read {text[position : position + 60]!r}")
        if match["file"]:
            place = _place(match, files)
        elif match["entry"]:
            scopes, place = [Scope()], None
            parameters = split_at_commas(" ".join((match["parameters"] or "").split()))
            result.entries.append(Entry(match["entry"], parameters, match["directives"], scopes[0]))
        elif match["label"]:
            scopes[-1].items.append(match["label"])
        elif match["open"]:
            scopes.append(Scope())
            scopes[-2].items.append(scopes[-1])
        elif match["close"]:
            scopes.pop()
        elif match["statement"]:
            statement = Statement(line, " ".join(match["statement"].split()), place)
            if scopes:
                scopes[-1].items.append(statement)
            elif not statement.text.startswith(".extern .func"):  # calls of it are rejected
                if ".func" in statement.text:
                    raise PtxError(f"line {line}: functions are not supported")
                result.variables.append(statement)
        line += match[0].count("\n")
        position = match.end()
    return result


def _place(match: re.Match[str], files: dict[str, str]) -> tuple[str, int]:
    file, line = files[match["file"]], match["line"]
    if match["outer"] and file.rpartition("/")[2] == _WRAPPERS:
        file, line = files[match["outer"]], match["outer_line"]
    return file, int(line)


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def elements(operand: str) -> list[str]:
    """Return the elements of a vector ``{a, b}``; a single operand is a vector of one."""
    return split_at_commas(operand[1:-1]) if operand.startswith("{") else [operand]
