"""What is written, and where: tables and JSON to standard output, the rest to standard error.

Control characters are written out, wherever a text came from.  Names from outside are put into
sentences and tables by ``markup.in_line``, so that they cannot feign lines of their own either.

rich is imported when something is drawn, so that ``--json`` and ``--help`` do without it.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

from cupyconv.markup import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

PIPED_WIDTH = 100

LONGEST_ERROR = 2000
"""Characters of an error, which may quote what was given; of a longer one both ends are shown."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def write(text: str) -> None:
    """Plain text to standard output, its control characters written out."""
    _deliver(visible(text))


def write_paged(text: str) -> None:
    """Text of which the beginning matters: through the pager if it is longer than the terminal.

    It may have colours, so what is in it must be visible text already.
    """
    if is_terminal(sys.stdout) and text.count("\n") >= shutil.get_terminal_size().lines:
        click.echo_via_pager(_within_encoding(text))
    else:
        _deliver(text)


def write_json(content: dict[str, Any]) -> None:
    """One JSON object to standard output; numbers that JSON does not have become null."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    write(text.replace("\x7f", "\\u007f") + "\n")  # the one control character that it leaves


def _deliver(text: str) -> None:
    """Text to standard output; that nobody reads to the end (``| head``) is no error."""
    stream = standard_output()
    try:
        stream.write(_within_encoding(text))
        stream.flush()
    except OSError as error:
        # The interpreter flushes once more when it exits, which must find something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            error.filename = "standard output"
            raise


def standard_output() -> TextIO:
    """The stream of that name.

    Raises:
        OSError: it was closed before the program began.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard output")
    return sys.stdout


_PLAINER = str.maketrans(
    {"─": "-", "–": "-", "→": ">", "×": "x", "·": ".", "±": "~", "µ": "u", "…": "~"}
    | dict(zip("░▒▓█", ".+#@", strict=True))
)
"""What stands, one for one, where an encoding does not have what we write ourselves."""


def _within_encoding(text: str) -> str:
    """The text in those characters that standard output's encoding has."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, _HANDLER).decode(encoding)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end].translate(_PLAINER)
    return lacking.encode("ascii", "backslashreplace").decode(), error.end


_HANDLER = "cupyconv.plainer"
codecs.register_error(_HANDLER, _plainer)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def draw(*parts: RenderableType) -> None:
    """Tables and lines to standard output, with an empty line between parts."""
    drawn = _Like(standard_output())
    console = _console(drawn)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(_Visible(part), crop=False)
    lines = drawn.getvalue().split("\n")[:-1]
    _deliver("".join(line.rstrip() + "\n" for line in lines))


class _Like(io.StringIO):
    """Text that is drawn as for another stream, but kept."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # which is None of a StringIO
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()


class _Visible:
    """Draws something with its control characters written out, and the colours that it has."""

    def __init__(self, part: RenderableType) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for text, style, control in console.render(self._part, options):
            yield Segment(text if control else visible(text), style, control)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table with these headings; those in ``right`` are aligned to the right."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        drawn.add_column(
            column, justify="right" if column in right else "left", overflow="fold", vertical="top"
        )
    return drawn


def heading(text: str, *lines: str, wrap: bool = True) -> RenderableType:
    """A title with plain lines under it; what is to be copied is better not wrapped."""
    from rich.text import Text

    overflow: Any = None if wrap else "ignore"
    drawn = Text(f"{text}\n", style="bold", no_wrap=not wrap, overflow=overflow)
    return drawn.append("\n".join(lines), style="not bold")


def verdict(passed: bool | None) -> RenderableType:
    """pass, FAIL, or a dash for what could not be judged."""
    from rich.text import Text

    if passed is None:
        return Text("-")
    return Text("pass", style="green") if passed else Text("FAIL", style="bold red")


def error(message: str, below: str = "") -> None:
    """One line to standard error, and under it what a compiler said, if anything."""
    line = " ".join(message.split())
    if len(line) > LONGEST_ERROR:
        line = f"{line[: LONGEST_ERROR // 2]} ... {line[-LONGEST_ERROR // 2 :]}"
    click.echo(f"cupyconv: error: {visible(line)}", err=True)
    if below:
        click.echo(visible(below.rstrip("\n")), err=True)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on standard error while something takes long; nothing where no one watches."""
    if not is_terminal(sys.stderr):
        yield
        return
    with _console(sys.stderr).status(text):
        yield


@contextmanager
def progress(text: str, total: int) -> Iterator[Any]:
    """A progress bar on standard error; yields a function that moves it on by one."""
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def scaled(number: float, unit: str) -> str:
    """A number with a metric prefix: ``23.0 MFLOP``."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number * 1000.0**6:.3g} {unit}"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be watching; a stream that is closed is None."""
    return stream is not None and stream.isatty()


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED_WIDTH
    return Console(file=stream, width=fixed, markup=False, highlight=False, emoji=False)
