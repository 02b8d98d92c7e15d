"""Settings of every suite, and what a run on CI may leave out."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "cupyconv",
    deadline=None,  # the first example pays for imports and BLAS start-up
    derandomize=True,  # a run on CI says the same as a run at home
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cupyconv")

NEEDS_A_GPU = ("no usable GPU", "golden-*.npz")
"""Words of the reasons for which CI may skip a test: CI never has a GPU.

More of them, such as a program that could not be installed, are in CUPYCONV_CI_LACKS.
"""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """On CI, fail a run that skipped a test for want of something that CI should have."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "CI" not in os.environ or reporter is None:
        return
    accepted = [*NEEDS_A_GPU, *os.environ.get("CUPYCONV_CI_LACKS", "").split()]
    for report in reporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        if not any(word.lower() in reason.lower() for word in accepted):
            reporter.write_line(f"not skipped on CI: {report.nodeid}: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
