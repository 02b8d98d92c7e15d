"""Writes real output into the README, and what was counted into its page, between their markers.

Run as `python -m tests.readme`; a test holds both to it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import speed_table
from tests.emulator import suite

README = Path(__file__).parent.parent / "README.md"
COUNTED = README.parent / "notebooks" / "explanation" / "counted.md"
BEFORE = suite.RESULTS.with_name("suite-9e64671.json")
"""Counts of a commit with which those of now are compared."""

COMMANDS = {
    "picture": (["explain", "--preset", "multi-channel"], "How can x", "Nothing is tiled"),
    "demo": (["grads", "--preset", "multi-channel"], "compared with", "how to read"),
    "error": (
        ["shapes", "--input", "1x5x7x7", "--filter", "4x5x5x5", "--dilation", "2"],
        "",
        "",
    ),
}
"""The commands whose output is shown, from a line that begins with some words to before another."""


def output(arguments: list[str], first: str = "", beyond: str = "") -> str:
    """What `cupyconv ARGUMENTS` prints to a pipe, errors included.

    Args:
        first: the beginning of the first line that is shown, if not all are.
        beyond: that of the first line that is not.
    """
    # As where `make demo` has just set everything up, without the extras.
    environment = {**os.environ, "COLUMNS": "100", "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "cupyconv.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    if first:
        lines = ["...", *lines[_place(lines, first) :]]
    if beyond:
        lines = [*"\n".join(lines[: _place(lines, beyond)]).rstrip().splitlines(), "..."]
    return "\n".join([f"$ cupyconv {' '.join(arguments)}", *lines])


def _place(lines: list[str], words: str) -> int:
    """Of the line that begins with these words."""
    return next(place for place, line in enumerate(lines) if line.startswith(words))


def filled(text: str) -> str:
    """The README's text with every marked block replaced by real output."""
    for name, (arguments, first, beyond) in COMMANDS.items():
        text = put_into(text, name, f"```console\n{output(arguments, first, beyond)}\n```")
    for device in speed_table.NOTHING:
        text = put_into(
            text, f"speed, {device}", speed_table.table(README.parent / "tests", device)
        )
    return text


def counted(text: str) -> str:
    """The page's text with a table for each kind of numbers and memory order that was counted."""
    found, before = (json.loads(path.read_text()) for path in (suite.RESULTS, BEFORE))
    for numbers, order in sorted({(row["numbers"], row["order"]) for row in found}):
        lines = suite.summary(found, before, numbers, order)
        text = put_into(text, f"{numbers}, {order}", "\n".join(("", *lines, "")))
    return text


def put_into(text: str, name: str, content: str) -> str:
    """A text with the content between the two comment lines of a block."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = re.compile(f"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    text, count = pattern.subn(lambda _: block, text)
    if count != 1:
        raise SystemExit(f"the text must have one block {name!r}, has {count}")
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
    COUNTED.write_text(counted(COUNTED.read_text()))
