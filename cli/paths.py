"""Option values that are paths: checks, reading and writing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click

from cupyconv import ConvError, files
from cupyconv.cli import output


class _File(click.ParamType):
    """Option type: the path of a file or folder."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value or "\0" in value:
            names = [] if param is None else param.opts
            raise ConvError(
                f"{names[0] if names else 'a path'} must be the path of a file",
                "it is empty" if not value else f"got {value!r}",
                "Leave it out, or give a path",
            )
        return value


FILE = _File()
"""Type of every option whose value is a path."""


def file_option(name: str, help: str, metavar: str = "FILE") -> Callable[[Callable], Callable]:
    """Return an option whose value is a path."""
    return click.option(name, type=FILE, metavar=metavar, help=help)


def require_writable(option: str, path: str | Path | None, *suffixes: str) -> None:
    """Check, before anything is computed, that an output file can be written.

    Args:
        path: path of the file; None if the option is absent.
        suffixes: permitted suffixes besides none; without them, all are permitted.

    Raises:
        ConvError: the file has another suffix, such as ``picture.png`` for SVG, the path is a
            folder, or its folder does not exist or is not writable.
    """
    if path is None or str(path) == STANDARD:
        return
    path = Path(path)
    if suffixes and path.suffix and path.suffix.lower() not in suffixes:
        raise ConvError(
            f"{option} must be the path of a {' or '.join(suffixes)} file",
            f"got {path}",
            f"Call it {path.with_suffix(suffixes[0])}",
        )
    if wrong := files.unwritable(path):
        raise ConvError(f"{option} must be a file that can be written", wrong, "Choose another")


STANDARD = "-"
"""Path that stands for standard input or standard output."""


def require_one_output(*written: str | None, as_json: bool) -> None:
    """Check that at most one output goes to standard output, and that no two go to one file.

    Raises:
        ConvError: several files, or a file and --json, go to standard output or to one file.
    """
    if written.count(STANDARD) + (STANDARD in written and as_json) > 1:
        raise ConvError(
            "only one result can go to standard output",
            "got more than one",
            "Write the others to files",
        )
    given = [Path(path).resolve() for path in written if path not in (None, STANDARD)]
    if len(set(given)) < len(given):
        raise ConvError(
            "outputs must go to different files", f"{given[0]} is given twice", "Rename one of them"
        )


_READ = "cupyconv.standard_input"
"""Key in click's context: whether this command has read standard input."""


def read(path: Path, largest: int = files.LARGEST_TEXT) -> bytes:
    """Return the content of a file or of standard input, which has at most ``largest`` bytes.

    Raises:
        ConvError: as for ``opened``.
        OSError: the file cannot be read, or is too large.
    """
    if str(path) != STANDARD:
        return files.read(path, largest)
    return files.read_stream(_standard_input(), "standard input", largest)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yield a file or standard input, to be read.

    Raises:
        ConvError: standard input is closed, or was read before by the same command.
        OSError: the file cannot be read.
    """
    if str(path) == STANDARD:
        yield _standard_input()
        return
    with path.open("rb") as file:
        yield file


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise ConvError("standard input must be open", "it is closed", "Give a file, or a pipe")
    meta = click.get_current_context().meta
    if meta.get(_READ):
        raise ConvError(
            "standard input must be read only once",
            "- is given twice",
            "Give one of them as a file",
        )
    meta[_READ] = True
    return sys.stdin.buffer


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write one JSON object to a file, or to standard output."""
    write(Path(path), output.json_text(content).encode())


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, or write to standard output.

    Raises:
        OSError: the output cannot be written.
    """
    if str(path) == STANDARD:
        output.deliver(content)
    else:
        files.put(path, content)
