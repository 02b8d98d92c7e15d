"""Documents of paragraphs, tables and verbatim lines, written as text or as HTML.

The module does not depend on other modules of cupyconv, so that every module can use it to describe
its objects in Jupyter.  The output never contains characters that control a terminal or that XML
does not allow.
"""

from __future__ import annotations

import html
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

WIDTH = 100
"""Width in characters of text whose reader has no terminal (hand-set)."""

MOST_LINES = 16
"""Largest number of lines or rows of a list that is printed in part if it is longer (hand-set)."""

UNBOUND = 1 << 30
"""Width in characters that keeps text unwrapped."""

STYLE = """
.cupyconv{font:14px/1.5 system-ui,sans-serif;max-width:60rem}
.cupyconv h3,.cupyconv h4{margin:1.1em 0 .3em;font-size:1.08em;font-weight:600!important}
.cupyconv h4{font-size:1em}
.cupyconv p{margin:.35em 0;text-align:left}
.cupyconv table{border-collapse:collapse;margin:.4em 0}
.cupyconv th,.cupyconv td{padding:.2em .9em .2em 0;text-align:left!important;vertical-align:top;
border-bottom:1px solid rgba(128,128,128,.35)}
.cupyconv td.r,.cupyconv th.r{text-align:right!important}
.cupyconv td:last-child{white-space:normal}
.cupyconv pre{margin:.4em 0;padding:.4em .7em;overflow-x:auto;
font:.92em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace!important;
border-left:3px solid rgba(128,128,128,.35);background:transparent;color:inherit}
""".strip()
"""CSS of a document.

The text has the page's own colours, so it is legible on dark pages, too.  ``!important`` overrides
the styles of notebooks.
"""


_WRITTEN_OUT = frozenset(("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of characters that are written as escapes, such as control characters."""

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
"""Invisible characters of other Unicode categories."""


def visible(text: str) -> str:
    """Return a text with control and invisible characters written as escapes, such as ``\\x1b``.

    Newlines and tabs are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    escaped = {character for character in set(text) if _is_written_out(character)}
    if not escaped:
        return text
    return text.translate({ord(character): _written_out(character) for character in escaped})


def _is_written_out(character: str) -> bool:
    if unicodedata.category(character) in _WRITTEN_OUT:
        return character not in "\n\t"
    return _INVISIBLE.match(character) is not None


def in_line(text: str) -> str:
    """Return a text as one line, with control characters, newlines and tabs written as escapes."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def spreadsheet_cell(text: str) -> str:
    """Return a text as one line for a CSV cell that spreadsheets do not interpret as a formula.

    Formulas are recognised after leading spaces, too, because some spreadsheets drop the spaces.
    """
    line = in_line(text)
    return f"'{line}" if line.lstrip().startswith(_FORMULAS) else line


_FORMULAS = tuple("=+-@＝＋－＠")
"""First characters of spreadsheet formulas; full-width signs begin formulas in some locales."""


def escape(text: str) -> str:
    """Return a text escaped for XML and HTML, between tags and in attributes."""
    return html.escape(visible(text))


def _written_out(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Element:
    """Base of dataclasses that write invisible characters of their texts as escapes."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            object.__setattr__(self, field.name, _visible(getattr(self, field.name)))


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    return tuple(map(_visible, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Paragraph(_Element):
    """One or more sentences, wrapped to the available width."""

    text: str

    def lines(self, width: int) -> Iterator[str]:
        yield from textwrap.wrap(self.text, width, break_on_hyphens=False) or [""]

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Verbatim(_Element):
    """Lines that are not wrapped: formulas, drawings, programs.

    Attributes:
        coloured: whether the lines contain terminal colour codes.  Their control characters are
            then not escaped, so they must not contain text from files or users.
        indent: number of spaces before each line of the text output.
    """

    text: str
    coloured: bool = False
    indent: int = 4

    def __post_init__(self) -> None:
        if not self.coloured:
            super().__post_init__()

    def lines(self, width: int) -> Iterator[str]:
        for line in self.text.splitlines():
            yield f"{' ' * self.indent}{line}".rstrip()

    def html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True)
class Table(_Element):
    """Rows under headings; a cell may have several lines, and wide cells are wrapped.

    Attributes:
        columns: headings; the table has no heading line if all are empty.
        right: headings of the right-aligned columns.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()

    def lines(
        self, width: int, strong: Callable[[str], str] = str, paint: Callable[[str], str] = str
    ) -> Iterator[str]:
        """Yield the table in lines of at most ``width`` characters, if possible.

        Args:
            strong: function that formats a heading.
            paint: function that formats a cell; its argument is a line of the cell's text, padded
                with spaces to the width of the column.
        """
        named = any(self.columns)
        every = [self.columns, *self.rows] if named else list(self.rows)
        if not every:
            return
        room, gutter = self._widths(every, width)
        cells = [[_wrapped(*cell) for cell in zip(row, room, strict=True)] for row in every]
        widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(room))]
        for number, row in enumerate(cells):
            is_head = named and number == 0
            for texts in zip_longest(*row, fillvalue=""):
                padded = [
                    text.rjust(wide) if column in self.right else text.ljust(wide)
                    for text, wide, column in zip(texts, widths, self.columns, strict=True)
                ]
                while padded and not padded[-1].strip():
                    padded.pop()
                if padded:
                    padded[-1] = padded[-1].rstrip()
                yield (" " * gutter).join(map(strong if is_head else paint, padded))
            if is_head:
                yield "─" * (sum(room) + gutter * (len(room) - 1))

    def _widths(self, rows: list[tuple[str, ...]], width: int) -> tuple[list[int], int]:
        """Return the widths of the columns, and the number of spaces between columns.

        If ``width`` suffices, columns are wide enough for whole words, so that numbers are not
        broken.
        """
        columns = list(zip(*rows, strict=True))
        whole = [
            max(len(line) for text in column for line in text.split("\n")) for column in columns
        ]
        words = [
            max((len(word) for text in column for word in text.split()), default=1)
            for column in columns
        ]
        narrowest = [_NARROWEST // 2] * (len(columns) - 1) + [_NARROWEST]
        capped = [min(word, _NARROWEST) for word in words]
        for gutter, least in (
            (_GUTTER, list(map(max, narrowest, words))),
            (_GUTTER, words),
            (1, words),
            (_GUTTER, list(map(max, narrowest, capped))),
            (1, capped),
        ):
            room = width - gutter * (len(columns) - 1)
            widths = _narrowed(whole, least, room)
            if sum(widths) <= room:
                return widths, gutter
        return _narrowed(whole, [1] * len(columns), room), 1

    def html(self) -> str:
        kind = [' class="r"' if column in self.right else "" for column in self.columns]
        rows = [
            "".join(
                f"<td{k}>{escape(cell).replace(chr(10), '<br/>')}</td>"
                for k, cell in zip(kind, row, strict=True)
            )
            for row in self.rows
        ]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        if any(self.columns):
            cells = zip(kind, self.columns, strict=True)
            head = "".join(f'<th{k} scope="col">{escape(column)}</th>' for k, column in cells)
            body = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f"<table>{body}</table>"


_GUTTER = 3
"""Number of spaces between columns; 1 is used if the table would otherwise be too wide."""

_NARROWEST = 24
"""Smallest width in characters to which the last column is narrowed; half of it for other columns.

Columns are narrowed further only if the table would otherwise be too wide.
"""


def _narrowed(whole: list[int], least: list[int], room: int) -> list[int]:
    """Return column widths whose sum is at most ``room`` characters, if possible.

    The last column is narrowed first, then the widest column, and the first column after all
    others.

    Args:
        whole: widths of the columns without wrapping.
        least: smallest permitted widths.
        room: number of characters for all columns together.
    """
    widths = list(whole)
    widths[-1] = max(min(least[-1], widths[-1]), widths[-1] - max(sum(widths) - room, 0))
    while sum(widths) > room:
        wider = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not wider:
            break
        others = [i for i in wider if i > 0] or wider
        widths[max(others, key=widths.__getitem__)] -= 1
    return widths


def _wrapped(text: str, width: int) -> list[str]:
    return [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(part, max(width, 1), break_on_hyphens=False) or [""]
    ]


Block = Paragraph | Verbatim | Table


@dataclass(frozen=True)
class Section(_Element):
    """A heading and the blocks under it."""

    title: str
    blocks: tuple[Block, ...]

    def lines(self, width: int, strong: Callable[[str], str] = str) -> Iterator[str]:
        if self.title:
            for line in textwrap.wrap(self.title, width):
                yield strong(line)
        previous: Block | None = None
        for block in self.blocks:
            if previous is not None and not (
                isinstance(block, Paragraph) and isinstance(previous, Paragraph)
            ):
                yield ""
            yield from block.lines(width)
            previous = block

    def html(self) -> str:
        title = f"<h4>{escape(self.title)}</h4>" if self.title else ""
        return title + "".join(block.html() for block in self.blocks)


@dataclass(frozen=True)
class Document(_Element):
    """Sections under a title."""

    title: str
    sections: tuple[Section, ...]

    def text(self, width: int = WIDTH, strong: Callable[[str], str] = str) -> str:
        """Return the document as lines of at most ``width`` characters.

        Args:
            strong: function that formats a heading.
        """
        parts = ["\n".join(section.lines(width, strong)) for section in self.sections]
        title = [strong(line) for line in textwrap.wrap(self.title, width)]
        head = "\n".join(title) if self.title else ""
        return "\n\n".join(part for part in (head, *parts) if part)

    def html(self) -> str:
        """Return the document as an HTML fragment, with its style."""
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        body = "".join(section.html() for section in self.sections)
        return f'<div class="cupyconv"><style>{STYLE}</style>{title}{body}</div>'
