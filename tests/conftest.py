"""Settings of all tests: hypothesis, the options that select a part, and skips allowed on CI."""

from __future__ import annotations

import os
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.skips import may_be_skipped

settings.register_profile(
    "cupyconv",
    deadline=None,  # the first example pays for imports and BLAS start-up
    derandomize=True,  # a CI run draws the same examples as a local run
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cupyconv")

CASES_OF_A_SAMPLE = 2
"""Most cases per test in the sample, evenly spread (hand-set)."""

CASES_OF_A_QUICK_TEST = 60
"""Most cases in the sample of a test marked quick (hand-set)."""

PASSED = "cupyconv/passed"
"""Key of pytest's cache with the tests that passed in the last run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("all", "sample", "rest"),
        default="all",
        help="sample: a few cases of each test that is not marked thorough; rest: all other cases",
    )
    parser.addoption(
        "--turn",
        type=turn,
        default=(1, 1),
        metavar="K/N",
        help="with --part rest, run every N-th case, beginning with the K-th",
    )
    parser.addoption(
        "--unless-passed",
        action="store_true",
        help="leave out the tests that passed in the last run, before packages were installed",
    )


def turn(word: str) -> tuple[int, int]:
    """Return K and N of an option value such as "2/3"."""
    number, _, count = word.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(word)
    return int(number), int(count)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the options of ``pytest_addoption`` do not select."""
    kept = part_of(items, config.getoption("--part"), *config.getoption("--turn"))
    if config.getoption("--unless-passed"):
        passed = set(config.cache.get(PASSED, []))
        kept = {item for item in kept if item.nodeid not in passed}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def part_of(items: list[pytest.Item], part: str, number: int, count: int) -> set[pytest.Item]:
    """Return the tests that ``--part`` and ``--turn`` select."""
    if part == "all":
        return set(items)
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    sample = {item for of_test in cases.values() for item in sample_of(of_test)}
    rest = [item for item in items if item not in sample][number - 1 :: count]
    return sample if part == "sample" else set(rest)


def sample_of(of_test: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that belong to the sample."""
    if of_test[0].get_closest_marker("costly") is not None:
        first_of_family = {family_of(item): item for item in reversed(of_test)}
        return spread([*reversed(first_of_family.values())], CASES_OF_A_SAMPLE)
    quick = of_test[0].get_closest_marker("quick") is not None
    return spread(of_test, CASES_OF_A_QUICK_TEST if quick else CASES_OF_A_SAMPLE)


def family_of(item: pytest.Item) -> str | None:
    """Return the kernel family that a case takes as ``impl``."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("impl") if callspec else None


def spread(items: list, count: int) -> list:
    """Return at most this many items, evenly spread from the first to the last."""
    if len(items) <= count:
        return items
    return [items[turn * (len(items) - 1) // (count - 1)] for turn in range(count)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the names of passed tests; fail a CI run that skipped one for an unaccepted reason."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a process that runs a share of the tests
        return
    if cache := getattr(session.config, "cache", None):  # absent with -p no:cacheprovider
        cache.set(PASSED, [report.nodeid for report in reporter.stats.get("passed", [])])
    for report in reporter.stats.get("skipped", []) if "CI" in os.environ else ():
        _, _, reason = report.longrepr
        if not may_be_skipped(reason, os.environ):
            reporter.write_line(f"not skipped on CI: {report.nodeid}: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


ORACLES = {
    "torch": "cupyconv.torch, PyTorch as an oracle and the random attack",
    "tensorflow": "TensorFlow as an oracle",
}
"""Packages too large for the tests' requirements, and what is not tested without them."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report what was not run, because a package is missing or only a part was selected."""
    for name, what in ORACLES.items():
        if find_spec(name) is None:
            terminalreporter.write_line(
                f"NOT TESTED: {what}, because {name} is not installed.", red=True
            )
    part, (_, count) = map(terminalreporter.config.getoption, ("--part", "--turn"))
    if part == "rest" and count > 1:
        terminalreporter.write_line(
            f"This was one of {count} parts of the rest; `make test-rest` runs all of them."
        )
    if part == "sample":
        terminalreporter.write_line(
            f"This was a sample: at most {CASES_OF_A_SAMPLE} cases of most tests, and no thorough "
            "tests. `make test-all` runs the others too."
        )


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Return a function that opens a page in a headless browser and returns its final document."""
    import cupyconv
    from tests import browser

    folder = tmp_path_factory.mktemp("pages")

    def opened(
        problem: cupyconv.ConvProblem,
        place: str = "",
        script: str = "",
        width: int = 1280,
        dark: bool = False,
        values: str | None = "normal",
        element: str = "",
        **arrays: Any,
    ) -> str:
        page = cupyconv.explain(problem, values=values, **arrays).page(element)
        path = folder / "page.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
        shown = browser.document(f"{path.as_uri()}{place}", width=width, dark=dark)
        assert 'data-ready="true"' in shown, f"the page's script failed: {shown[-500:]}"
        return shown

    return opened
