"""Paths among the options: what they have to be before anything is done with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cupyconv import ConvError, files
from cupyconv.cli import output


class _File(click.ParamType):
    """The path of a file, or of a folder where one is taken."""

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
"""The type of every option that is a path."""


def require_suffix(option: str, path: Path, *suffixes: str) -> None:
    """Check that a file's name does not say that something else is in it.

    Raises:
        ConvError: it ends otherwise, as ``picture.png`` does where SVG is written.
    """
    if str(path) != STANDARD and path.suffix and path.suffix.lower() not in suffixes:
        raise ConvError(
            f"{option} writes {' or '.join(suffixes)} files",
            f"got {path}",
            f"Call it {path.with_suffix(suffixes[0])}",
        )


def require_writable(option: str, path: Path) -> None:
    """Check, before anything is computed, that a file can be written.

    Raises:
        ConvError: its folder does not exist or cannot be written, or it is a folder itself.
    """
    if str(path) == STANDARD:
        return
    wrong = files.unwritable(path)
    if wrong:
        raise ConvError(f"{option} must be a file that can be written", wrong, "Choose another")


STANDARD = "-"
"""The name of standard input or output, wherever a file is taken."""


def require_one_output(*written: str | None, as_json: bool) -> None:
    """Check that at most one thing is for standard output.

    Raises:
        ConvError: several files are, or one beside --json.
    """
    if written.count(STANDARD) + (STANDARD in written and as_json) > 1:
        raise ConvError(
            "standard output takes one thing", "it is asked for two", "Write one to a file"
        )


_READ = "cupyconv.standard_input"


def read(path: Path) -> bytes:
    """Return the content of a file or of standard input.

    Raises:
        ConvError: standard input is closed, or was read before by the same command.
        OSError: the file cannot be read.
    """
    if str(path) != STANDARD:
        return path.read_bytes()
    if sys.stdin is None:
        raise ConvError("- is standard input", "it is closed", "Give a file, or a pipe")
    meta = click.get_current_context().meta
    if meta.get(_READ):
        raise ConvError(
            "standard input is read once", "- is given for two things", "Give one as a file"
        )
    meta[_READ] = True
    return sys.stdin.buffer.read()


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, or to standard output.

    Raises:
        OSError: it cannot be written.
    """
    if str(path) == STANDARD:
        output.deliver(content)
    else:
        files.put(path, content)
