"""The log of plans, which a program or an environment variable enables."""

import logging
import subprocess
import sys

import numpy as np
import pytest

import cupyconv
from cupyconv import calls, log

PROGRAM = """
import numpy as np, cupyconv
for _ in range(2):
    cupyconv.conv_forward(np.ones((1, 2, 5)), np.ones((3, 2, 3)))
"""


@pytest.mark.parametrize(("level", "lines"), [(None, 0), ("info", 1), ("warning", 0)])
def test_variable_prints_each_plan_once(level, lines, monkeypatch):
    monkeypatch.delenv(log.VARIABLE, raising=False)
    if level:
        monkeypatch.setenv(log.VARIABLE, level)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stderr.splitlines()
    assert len(printed) == lines
    assert all(line.startswith("cupyconv: plan of forward of ConvProblem(") for line in printed)


def test_program_gets_the_plans(caplog):
    calls.forget()
    x, w = np.ones((1, 2, 5)), np.ones((3, 2, 3))
    with caplog.at_level(logging.INFO, "cupyconv"):
        dw = cupyconv.conv_backprop_filter(x, w.shape, cupyconv.conv_forward(x, w))
    passes = [record.getMessage().split()[2] for record in caplog.records]
    assert passes == ["forward", "backprop_filter"]
    assert dw.shape == w.shape
