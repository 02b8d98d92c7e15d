"""PyTorch's own tests of its convolutions, run on cupyconv.

    PYTORCH_TEST_CONVOLUTION=test_convolution.py pytest -m slow tests/torch/test_pytorch_suite.py

The file is test/nn/test_convolution.py of PyTorch's sources at the tag of the installed release;
PyTorch's packages do not contain it.  It runs twice on the CPU: unchanged, and with each test
inside ``ct.patch()``.  A test must have the same outcome inside as outside.  Needs PyTorch and the
requirements of PyTorch's own tests, expecttest and hypothesis.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPORT = "CUPYCONV_SUITE_REPORT"
PATCHED = "CUPYCONV_SUITE_PATCHED"

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 3600  # s per run


@dataclass
class Run:
    """Outcomes of the tests of a file.

    Attributes:
        outcomes: "passed", "failed" or "skipped", by test.
        taken: convolution calls that cupyconv computed.
        left: calls that PyTorch computed, by function and operands.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    taken: int = 0
    left: Counter[str] = field(default_factory=Counter)


def run(file: Path, *, patched: bool) -> Run:
    """Run a file's tests in a separate process.

    Args:
        file: the test file.
        patched: whether each test runs inside ``ct.patch()``.

    Raises:
        RuntimeError: the run did not finish; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {**os.environ, REPORT: str(report), PATCHED: str(int(patched))}
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.studies.pytorch_suite"]
        command += ["-p", "no:cacheprovider", "--rootdir", str(file.parent), str(file)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=folder
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"{file}: {(done.stdout + done.stderr)[-2000:]}")
        found = json.loads(report.read_text())
    return Run(**{**found, "left": Counter(found["left"])})


def different(outside: Run, inside: Run) -> list[str]:
    """Return the tests whose outcome differs inside the patch."""
    tests = dict.fromkeys([*outside.outcomes, *inside.outcomes])
    return [test for test in tests if outside.outcomes.get(test) != inside.outcomes.get(test)]


# -- as a plugin of pytest's -----------------------------------------------------------------------

_found = Run()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if os.environ.get(PATCHED) != "1":
        yield
        return
    import cupyconv.torch as ct

    # ct.patch handles a call first; calls that it leaves reach the other mode.
    with _left_calls(), ct.patch() as report:
        yield
    _found.taken += sum(count for (_, _, why), count in report.calls.items() if why is None)


def _left_calls() -> Any:
    """Return a PyTorch mode that counts the convolutions that PyTorch computes."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    from cupyconv.torch.patching import REPLACED

    class Left(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in REPLACED:
                given = [
                    f"{one.dtype} {tuple(one.shape)} {str(one.layout).removeprefix('torch.')}"
                    for one in args
                    if isinstance(one, Tensor)
                ]
                _found.left[f"{REPLACED[func].__name__}: {', '.join(given)}"] += 1
            return result

    return Left()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _found.outcomes[report.nodeid.partition("::")[2]] = report.outcome


def pytest_unconfigure() -> None:
    if REPORT in os.environ:
        Path(os.environ[REPORT]).write_text(json.dumps(vars(_found)))
