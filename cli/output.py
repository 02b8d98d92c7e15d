"""Output of commands: results to standard output, errors and progress to standard error.

Control characters are escaped in every text.  ``markup.in_line`` keeps names from files on one
line, so that they cannot look like output of the program.

rich draws progress bars and spinners, and is imported only for them.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from cupyconv.markup import WIDTH, Block, Paragraph, Section, Table, Verbatim, visible

LONGEST_ERROR = 2000
"""Most characters of an error message; a longer message is shortened in the middle (hand-set)."""

MOST_EXAMPLES = 3
"""Largest number of examples in a summary, such as commands that show a failure (hand-set)."""

# This option is eager, because the callback of --list-presets must know whether to print JSON.
json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, help="Print one JSON object."
)


def write(text: str) -> None:
    """Write plain text to standard output, with control characters made visible."""
    _deliver(visible(text))


def write_paged(text: str) -> None:
    """Write text through the pager if it is longer than the terminal.

    The text may contain colour codes, so control characters in it must be escaped already.
    """
    if is_terminal(sys.stdout) and text.count("\n") >= shutil.get_terminal_size().lines:
        click.echo_via_pager(_within_encoding(text))
    else:
        _deliver(text)


def write_json(content: dict[str, Any]) -> None:
    """Write one JSON object to standard output; numbers without a JSON form become null."""
    write(json_text(content))


def json_text(content: dict[str, Any]) -> str:
    """Return an object as lines of JSON; numbers without a JSON form become null."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    return text.replace("\x7f", "\\u007f") + "\n"  # json.dumps escapes all other control characters


def _deliver(text: str) -> None:
    """Write text to standard output; it is no error if the reader stops early, as in ``| head``."""
    stream = standard_output()
    try:
        with _discard_if_closed(stream):
            stream.write(_within_encoding(text))
            stream.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        error.filename = "standard output"
        raise


@contextmanager
def _discard_if_closed(stream: TextIO) -> Iterator[None]:
    """Discard a stream's buffered output if writing fails, for example to a closed pipe.

    Otherwise the interpreter would write the output again at exit, fail, and change the exit code.
    """
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def deliver(content: bytes) -> None:
    """Write bytes, such as a picture or an array, to standard output unchanged."""
    stream = standard_output()
    stream.flush()
    stream.buffer.write(content)
    stream.buffer.flush()


def standard_output() -> TextIO:
    """Return standard output as a text stream.

    Raises:
        OSError: standard output was closed before the program started.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard output")
    return sys.stdout


_PLAINER = str.maketrans(
    {"─": "-", "–": "-", "→": ">", "×": "x", "·": ".", "±": "~", "µ": "u", "…": "~"}
    | dict(zip("░▒▓█", ".+#@", strict=True))
)
"""Replacements of single characters that an encoding may lack."""


def _within_encoding(text: str) -> str:
    """Replace the characters of a text that the encoding of standard output lacks."""
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


def draw(*parts: Table | Section | str) -> None:
    """Write the parts to standard output, with an empty line between them."""
    standard_output()  # raises if it is closed
    columns, texts = width(), []
    for part in parts:
        if isinstance(part, str):
            part = heading("", *part.split("\n"))
        if isinstance(part, Table):
            texts.append("\n".join(part.lines(columns, strong, _painted)))
        else:
            texts.append("\n".join(part.lines(columns, strong)))
    _deliver("\n\n".join(texts) + "\n")


def coloured() -> bool:
    """Return whether text on standard output may have colours."""
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def width() -> int:
    """Return the number of characters per line of standard output, at least 40."""
    fixed = is_terminal(sys.stdout) or os.environ.get("COLUMNS", "").isdigit()
    return max(shutil.get_terminal_size().columns if fixed else WIDTH, 40)


def strong(text: str) -> str:
    """Return a text in bold if standard output is coloured."""
    return click.style(text, bold=True) if coloured() else text


def _painted(cell: str) -> str:
    colour = {"pass": "green", "FAIL": "red"}.get(cell.strip())
    return click.style(cell, fg=colour, bold=colour == "red") if colour and coloured() else cell


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()
) -> Table:
    """Return a table with these headings; columns in ``right`` are aligned to the right."""
    return Table(tuple(columns), tuple(map(tuple, rows)), tuple(right))


def heading(text: str, *lines: str, wrap: bool = True) -> Section:
    """Return a title with plain lines below it.

    Args:
        wrap: whether to break long lines; False suits commands that users copy.
    """
    blocks: tuple[Block, ...] = tuple(map(Paragraph, lines))
    return Section(text, blocks if wrap else (Verbatim("\n".join(lines), indent=0),))


def verdict(passed: bool | None) -> str:
    """Return "pass", "FAIL", or "-" for None, which means that nothing could be checked."""
    return "-" if passed is None else "pass" if passed else "FAIL"


def option(name: str, value: Any) -> str:
    """Return an argument of the library as an option: ``--data-format NHWC``, ``--stride 2x1``."""
    words = {"input_shape": "input", "filter_shape": "filter", "output_shape": "dy"}
    text = str(value)
    if isinstance(value, tuple):
        pairs = any(isinstance(entry, tuple) for entry in value)
        entries = [":".join(map(str, entry)) if pairs else str(entry) for entry in value]
        text = ("," if pairs else "x").join(entries)
    return f"--{words.get(name, name).replace('_', '-')} {text}"


def error(message: str, below: str = "") -> None:
    """Write a message as one line to standard error, then ``below``, such as a compiler's log."""
    line = " ".join(message.split())
    if len(line) > LONGEST_ERROR:
        line = f"{line[: LONGEST_ERROR // 2]} ... {line[-LONGEST_ERROR // 2 :]}"
    # If standard error is closed, the exit code still reports the error.
    with suppress(OSError), _discard_if_closed(sys.stderr):
        click.echo(f"cupyconv: error: {visible(line)}", err=True)
        if below:
            click.echo(visible(below.rstrip("\n")), err=True)


PATIENCE = 2.0
"""Seconds before a command shows a progress bar (hand-set)."""


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show percent and remaining time of a long task on a terminal's standard error.

    Yields a function to call after each of the ``total`` steps.
    """
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    bar = Progress(console=console, transient=True)
    task = bar.add_task(text, total=total)
    begin = threading.Timer(PATIENCE, bar.start)
    begin.daemon = True
    begin.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        begin.cancel()
        begin.join()
        bar.stop()


def scaled(number: float, unit: str) -> str:
    """Return a number with a metric prefix: ``23.0 MFLOP``."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number * 1000.0**6:.3g} {unit}"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False for None, which stands for a closed stream."""
    return stream is not None and stream.isatty()
