"""Functions that run the command line inside the process of a test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from click.testing import CliRunner, Result

from cupyconv.cli.main import main


def run(*args: object, given: bytes | BinaryIO = b"", **env: str | None) -> Result:
    """Run a command line.

    Args:
        given: content of standard input.
        env: changes of the environment.
    """
    words = [str(arg) for arg in args]
    return CliRunner().invoke(main, words, input=given, env={"COLUMNS": None, **env})


def said(*args: object, given: bytes = b"", **env: str | None) -> str:
    """Return what a command line prints; it must succeed and report no error."""
    result = run(*args, given=given, **env)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def parsed(*args: object) -> dict:
    """Return the JSON object that a command line prints."""
    return json.loads(said(*args, "--json"))


def refused(*args: object, code: int = 2, given: bytes | BinaryIO = b"") -> str:
    """Return the error of a rejected command line, which must print one line and nothing else."""
    result = run(*args, given=given)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("cupyconv: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def require_stored(text: str, path: Path) -> None:
    """Require that a golden file has this text; with CUPYCONV_GOLDEN=write, write it first."""
    if os.environ.get("CUPYCONV_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()
