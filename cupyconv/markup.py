"""Text and HTML out of the same few pieces: paragraphs, tables and verbatim lines.

Knows nothing of convolutions, so that the lowest rooms can describe themselves in Jupyter.
Whatever is put into a piece, no character comes out that steers a terminal or that XML does not
have.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

WIDTH = 100

UNBOUND = 1 << 30
"""The width of what nobody wraps."""

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
"""Takes its colours from the page around it, so that it reads in light and in dark.

What is marked as important is what notebooks set otherwise.
"""


_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tabs and new lines, DEL, C1
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # lines, and the direction of writing
    r"\ud800-\udfff\ufeff\ufffe\uffff]"  # no characters of Unicode, or none of a text's own
)


def visible(text: str) -> str:
    """A text whose control characters are written out, as ``\\x1b``; new lines and tabs stay."""
    return _STEERING.sub(lambda found: _written_out(found[0]), text)


def in_line(text: str) -> str:
    """A name from outside: its control characters are written out, and so are its new lines."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def escape(text: str) -> str:
    """A text as XML and HTML have it, between tags and in attributes."""
    return html.escape(visible(text))


def _written_out(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Piece:
    """A dataclass whose texts are visible ones."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # each piece is a dataclass
            object.__setattr__(self, field.name, _visible(getattr(self, field.name)))


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    return tuple(map(_visible, value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Paragraph(_Piece):
    """A sentence or several, wrapped to the width there is."""

    text: str

    def lines(self, width: int) -> Iterator[str]:
        yield from textwrap.wrap(self.text, width, break_on_hyphens=False) or [""]

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Verbatim(_Piece):
    """Lines that are not wrapped: formulas, drawings, programs.

    Attributes:
        coloured: the lines have a terminal's colours, and nothing from outside.
        indent: spaces before each line of a text.
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
class Table(_Piece):
    """Rows under headings; a cell may have several lines, and what is too wide is wrapped.

    Attributes:
        columns: headings; none is drawn if all are empty.
        right: headings of columns that are aligned to the right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()

    def lines(
        self, width: int, strong: Callable[[str], str] = str, paint: Callable[[str], str] = str
    ) -> Iterator[str]:
        """The table in lines of at most ``width`` characters, where that can be.

        Args:
            strong: marks headings.
            paint: marks a cell, which is given with the spaces around it.
        """
        named = any(self.columns)
        every = [self.columns, *self.rows] if named else list(self.rows)
        room = self._widths(every, width)
        cells = [[_wrapped(*cell) for cell in zip(row, room, strict=True)] for row in every]
        widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(room))]
        for number, row in enumerate(cells):
            is_head = named and number == 0
            for line in range(max(map(len, row))):
                texts = [cell[line] if line < len(cell) else "" for cell in row]
                while texts and not texts[-1]:
                    texts.pop()
                padded = [
                    text.rjust(wide) if column in self.right else text.ljust(wide)
                    for text, wide, column in zip(texts, widths, self.columns, strict=False)
                ]
                if padded:
                    padded[-1] = padded[-1].rstrip()
                yield (" " * _GUTTER).join(map(strong if is_head else paint, padded))
            if is_head:
                yield "─" * (sum(room) + _GUTTER * (len(room) - 1))

    def _widths(self, every: list[tuple[str, ...]], width: int) -> list[int]:
        """How wide the columns are.

        The last gives way first, then whichever is the widest, and the first, which the eye looks
        up, after all others.
        """
        found = [
            max(len(line) for row in every for line in (row[column].split("\n") or [""]))
            for column in range(len(self.columns))
        ]
        over = sum(found) + _GUTTER * (len(found) - 1) - width
        if over > 0:
            least = max(min(_NARROWEST, found[-1]), found[-1] - over)
            over, found[-1] = over - (found[-1] - least), least
        while over > 0 and max(found) > _NARROWEST // 2:
            begin = int(max(found[1:], default=0) > _NARROWEST // 2)
            found[found.index(max(found[begin:]), begin)] -= 1
            over -= 1
        return found

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
"""Spaces between columns."""

_NARROWEST = 24
"""Characters that the last column is not made narrower than; the others, half as many."""


def _wrapped(text: str, width: int) -> list[str]:
    return [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(part, max(width, 1), break_on_hyphens=False) or [""]
    ]


Block = Paragraph | Verbatim | Table


@dataclass(frozen=True)
class Section(_Piece):
    """A heading with what stands under it."""

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
class Document(_Piece):
    """Sections under a title."""

    title: str
    sections: tuple[Section, ...]

    def text(self, width: int = WIDTH, strong: Callable[[str], str] = str) -> str:
        """Everything as lines of at most ``width`` characters; ``strong`` marks headings."""
        parts = ["\n".join(section.lines(width, strong)) for section in self.sections]
        title = [strong(line) for line in textwrap.wrap(self.title, width)]
        head = "\n".join(title) if self.title else ""
        return "\n\n".join(part for part in (head, *parts) if part)

    def html(self) -> str:
        """Everything as a piece of a page, with its style."""
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        body = "".join(section.html() for section in self.sections)
        return f'<div class="cupyconv"><style>{STYLE}</style>{title}{body}</div>'
