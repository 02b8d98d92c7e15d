"""Writes real output into the README, and into pages what was counted and measured, between their
markers.

Run as `python -m tests.readme`; a test holds them to it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from cupyconv.bench import environment, report
from tests import speed_table
from tests.emulator import suite
from tests.studies import limits

README = Path(__file__).parent.parent / "README.md"
COUNTED = README.parent / "notebooks" / "explanation" / "counted.md"
BEFORE = suite.RESULTS.with_name("suite-9e64671.json")
"""Counts of a commit with which those of now are compared."""
SPEED = COUNTED.with_name("speed.md")
LIMITS = Path(__file__).parent / "cpu" / "results" / "limits.json"

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
        lines = list(suite.summary(found, before, numbers, order))
        if any("(" in cell for line in lines if "filter" in line for cell in line.split("|")[3:]):
            lines += ["", _ONE_PART]
        text = put_into(text, f"{numbers}, {order}", "\n".join(("", *lines, "")))
    return text


_ONE_PART = (
    "CUTLASS's filter gradient, in brackets, is one part without split-K, which leaves most of a "
    "chip idle where the filter is small: its share is not that of a split one."
)


def limited(text: str) -> str:
    """The page's text with what bounds the dense layers that were measured."""
    kept = json.loads(LIMITS.read_text())
    about = kept["environment"]
    dense = [
        one for one in (limits.Share(**entry) for entry in kept["shares"]) if one.kind == "dense"
    ]
    ratio = report.geometric_mean([one.ratio for one in dense])
    limit = report.geometric_mean([one.limit for one in dense])
    ours = [one.operations / one.computing / 1e9 for one in dense]
    theirs = [one.useful_flops / one.peer / 1e9 for one in dense]
    lines = [
        f"{environment.title(about)}, `{about['command']}`, commit {about['commit']}: the "
        f"{len(dense)} passes of {len({one.layer for one in dense})} dense layers stood at "
        f"{ratio:.2f} and at most at {limit:.2f}, in the geometric mean. OpenBLAS multiplied at "
        f"{min(ours):.0f} to {max(ours):.0f} GFLOP/s, on both cores, and PyTorch's oneDNN did the "
        f"whole at {min(theirs):.0f} to {max(theirs):.0f}, products with padding left out.",
        report.busy(about),
    ]
    return put_into(text, "limits", " ".join(filter(None, lines)))


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
    SPEED.write_text(limited(SPEED.read_text()))
