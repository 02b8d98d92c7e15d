"""Steps "tests" and "programs": each test of this folder is a case that a worker runs.

A worker collects the tests once, and then runs the tests that it is asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.device import is_running

FILES = ("tests/gpu/test_cupy.py", "tests/gpu/test_ways_in.py")
PROGRAMS = re.compile(
    r"graph|captur|stream|tensor|synchron|memory|takes_less_than|measured_times|two_to"
)
"""Pattern for the names of tests of graphs, streams and allocators, which run one at a time."""

_items: dict[str, pytest.Item] = {}
_reports: list[pytest.TestReport] = []


def cases(words: str) -> list[dict[str, Any]]:
    """Return the tests of a step, those of the Hopper kernels first."""
    names = [name for name in _items if bool(PROGRAMS.search(name)) == (words == "programs")]
    return [{"name": name} for name in sorted(names, key=lambda name: "hopper" not in name)]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one test, with its fixtures."""
    item = _items[case["name"]]
    _reports.clear()
    # Session fixtures are kept for the next test.
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.session)
    for report in _reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            print(report.longreprtext)
            return {"state": "failed", "detail": str(crash or report.longreprtext)[-2000:]}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            return {"state": "skipped", "detail": str(reason)}
    return {}


def serve(answer: Callable[[], None]) -> None:
    """Collect the tests, and answer questions instead of running pytest's own loop."""

    class Plugin:
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            _items.update((item.nodeid, item) for item in session.items)
            answer()
            return True

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            _reports.append(report)

    # Warnings of newer releases of other libraries must not fail tests.
    options = ["-q", "-s", "-p", "no:cacheprovider", "-W", "default", "--tb=short"]
    if is_running():
        options += ["-m", "not slow"]
    code = pytest.main([*options, *FILES], plugins=[Plugin()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(code))
