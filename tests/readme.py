"""Write real output, measured figures, and the runs on GPUs into the pages.

Run as `python -m tests.readme`; a test checks that the texts between the markers are up to date.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import speed_table
from tests.gpu import report

README = Path(__file__).parent.parent / "README.md"
PAGES = README.parent / "notebooks"
SPEED = PAGES / "explanation" / "speed.md"
BELIEF = PAGES / "explanation" / "belief.md"
STATUS = (README, PAGES / "index.md", PAGES / "faq.md")
RESULTS = README.parent / "tests" / "gpu" / "results"

PICTURE = ["explain", "--preset", "multi-channel"]
"""Command whose output is shown, from the line beginning with FIRST to before that of BEYOND."""

FIRST, BEYOND = "    dw[k,c] = ", "Nothing is tiled"


def picture() -> str:
    """Return the part of the command's output that is shown."""
    # The output is the same as after `make demo`, which installs no extras.
    environment = {**os.environ, "COLUMNS": "100", "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "cupyconv.cli", *PICTURE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    first, beyond = (
        next(place for place, line in enumerate(lines) if line.startswith(words))
        for words in (FIRST, BEYOND)
    )
    shown = "\n".join(lines[first:beyond]).rstrip()
    return "\n".join([f"$ cupyconv {' '.join(PICTURE)}", "...", shown, "..."])


def filled(text: str) -> str:
    """Return the README's text with every marked block replaced by real output."""
    text = put_into(text, "picture", f"```console\n{picture()}\n```")
    return put_into(text, "speed, gpu", speed_table.summary(README.parent / "tests"))


def measured(text: str) -> str:
    """Return the page's text with the table of the newest run on a GPU."""
    return put_into(text, "speed, gpu", speed_table.table(README.parent / "tests", "gpu"))


def with_status(page: str) -> str:
    """Return the page's text with the GPUs that have run the kernels."""
    return put_into(page, "runs", report.status(RESULTS))


def with_runs(text: str) -> str:
    """Return the page's text with the results of each GPU that has run the kernels."""
    return put_into(text, "runs", report.status_details(RESULTS))


def put_into(text: str, name: str, content: str) -> str:
    """Return a text with the content between the two comment lines of a block."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = re.compile(f"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    text, count = pattern.subn(lambda _: block, text)
    if count != 1:
        raise SystemExit(f"the text must have one block {name!r}, has {count}")
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
    for page in STATUS:
        page.write_text(with_status(page.read_text()))
    BELIEF.write_text(with_runs(BELIEF.read_text()))
    SPEED.write_text(measured(SPEED.read_text()))
