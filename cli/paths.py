"""Paths among the options: what they have to be before anything is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyconv import ConvError, files


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


def require_writable(option: str, path: Path) -> None:
    """Check, before anything is computed, that a file can be written.

    Raises:
        ConvError: its folder does not exist or cannot be written, or it is a folder itself.
    """
    wrong = files.unwritable(path)
    if wrong:
        raise ConvError(f"{option} must be a file that can be written", wrong, "Choose another")
