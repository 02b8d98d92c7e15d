"""What is written, and where: tables and JSON to standard output, the rest to standard error.

rich is imported when something is drawn, so that ``--json`` and ``--help`` do without it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPED_WIDTH = 100

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def write(text: str) -> None:
    """Text to standard output; that nobody reads to the end (``| head``) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it exits, which must find something open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_paged(text: str) -> None:
    """Text of which the beginning matters: through the pager if it is longer than the terminal."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        click.echo_via_pager(text)
    else:
        write(text)


def write_json(content: dict[str, Any]) -> None:
    """One JSON object to standard output; numbers that JSON does not have become null."""
    write(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


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
    from rich.console import Group

    console = _console(sys.stdout)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            # In a group, because a bare text would lose its own rule for wrapping.
            console.print(Group(part), crop=False)
    lines = captured.get().splitlines()
    write("".join(line.rstrip() + "\n" for line in lines))


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
    click.echo(f"cupyconv: error: {line}", err=True)
    if below:
        click.echo(below.rstrip("\n"), err=True)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on standard error while something takes long; nothing where no one watches."""
    if not sys.stderr.isatty():
        yield
        return
    with _console(sys.stderr).status(text):
        yield


@contextmanager
def progress(text: str, total: int) -> Iterator[Any]:
    """A progress bar on standard error; yields a function that moves it on by one."""
    if not sys.stderr.isatty():
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


def _console(stream: Any) -> Console:
    from rich.console import Console

    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED_WIDTH
    return Console(file=stream, width=fixed, markup=False, highlight=False, emoji=False)
