"""A plugin of pytest's: which lines of the mutated modules each test runs, and how long it takes.

They go to the file that $CUPYCONV_COVERED_TO names, as JSON: by the test's name its ``seconds`` of
a core and its ``lines`` by file.  What runs between tests, such as imports, is under the name "".
Lines that run in processes that a test starts are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "CUPYCONV_COVERED_TO"

_ROOT = Path(__file__).resolve().parents[2]


class _Lines:
    """The lines that run, of the test that is running."""

    def __init__(self, files: set[str]) -> None:
        self._files = {str(_ROOT / file): file for file in files}
        self.of: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.seconds: dict[str, float] = {}
        self._now = self.of[""]

    def begin(self, test: str) -> None:
        self._now = self.of[test]

    def call(self, frame: Any, event: str, _: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None

        def line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                self._now[file].add(frame.f_lineno)
            return line

        return line


_lines: _Lines | None = None


def _seconds() -> float:
    """Of a core, that this process and those that it has started have taken."""
    return sum(os.times()[:4])


def pytest_configure() -> None:
    global _lines
    if VARIABLE in os.environ:
        from tests.device.mutants import NEAREST

        _lines = _Lines(set(NEAREST))
        threading.settrace(_lines.call)
        sys.settrace(_lines.call)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _lines is None:
        yield
        return
    _lines.begin(item.nodeid)
    started = _seconds()
    yield
    _lines.seconds[item.nodeid] = _seconds() - started
    _lines.begin("")


def pytest_unconfigure() -> None:
    if _lines is not None:
        found = {
            test: {
                "seconds": _lines.seconds.get(test, 0.0),
                "lines": {file: sorted(lines) for file, lines in of_files.items()},
            }
            for test, of_files in _lines.of.items()
        }
        Path(os.environ[VARIABLE]).write_text(json.dumps(found))
