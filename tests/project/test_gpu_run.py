"""Parts of the GPU run that need no device; tests/device/test_gpu_run.py runs its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from cupyconv import arrays
from cupyconv.problem import PASSES
from tests import ROOT
from tests.gpu import __main__ as everything
from tests.gpu import smoke


@pytest.mark.skipif(arrays.device_count() > 0, reason="there is a GPU")
def test_gpu_run_reports_a_missing_gpu(tmp_path):
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "all", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3
    assert "no usable GPU" in ended.stdout
    assert not out.exists()


def test_gpu_steps_have_modules_and_options():
    steps = everything.steps()
    names = ["doubts", "loop", "profile", "compile", "contenders", "bf16x6", "cudnn", "smoke",
             "golden", "tests", "programs", "table", "memcheck", "racecheck"]  # fmt: skip
    assert [step.name for step in steps] == names
    for step in steps:
        module = import_module(step.module)
        assert module.cases
        assert module.run


def test_smoke_cases_reach_every_family_pass_and_dtype():
    listed = smoke.cases()
    assert len({one["name"] for one in listed}) == len(listed)
    dtypes = {dtype for dtype, _ in smoke.NUMBERS}
    expected = {(impl, pass_, dtype) for impl in ("numpy", "reference") for pass_ in PASSES
                for dtype in dtypes}  # fmt: skip
    assert {(one["impl"], one["pass"], one["problem"]["dtype"]) for one in listed} == expected
    case = json.loads(json.dumps(listed[0]))
    assert smoke.run(case) == {}


def test_plain_checkout_has_the_command_line_and_kernels(tmp_path):
    """A checkout that was never installed imports cupyconv.cli and finds cuda/ in the package."""
    for name in ("cupyconv", "cli", "cuda", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = (
        "import os, subprocess, sys\n"
        "from tests.gpu.__main__ import checkout\n"
        "code = 'import cupyconv.cli.main, cupyconv.cuda; '\n"
        "code += 'from cupyconv.gpu import sources; print(sources.directory().parent.name)'\n"
        "with checkout() as environ:\n"
        "    sys.exit(subprocess.run([*sys.argv[1:], code], env=os.environ | environ).returncode)\n"
    )
    # Without the site's folders, no installation of cupyconv is seen.
    folders = os.pathsep.join(sorted({str(Path(np.__file__).parents[1])}))
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program, sys.executable, "-S", "-c"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": folders},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "cupyconv\n"
    assert everything.ROOT == ROOT
