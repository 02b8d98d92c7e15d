"""A CI run fails if it skips tests without an accepted reason, and its parts cover all tests."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.conftest import CASES_OF_A_QUICK_TEST, CASES_OF_A_SAMPLE, turn
from tests.device import RUNNING
from tests.skips import may_be_skipped

NO_GPU = "Skipped: no usable GPU: the CuPy path was not run"


@pytest.mark.parametrize(
    ("reason", "environment", "accepted"),
    [
        (NO_GPU, {}, True),
        (NO_GPU, {RUNNING: "1"}, False),
        ("Skipped: this PyTorch has no CUDA device", {}, True),
        (
            "Skipped: PyTorch has no CUDA device where the devices are emulated",
            {RUNNING: "1"},
            True,
        ),
        ("Skipped: no second GPU", {RUNNING: "1"}, False),
        ("Skipped: no second GPU", {}, False),
        ("Skipped: no tests/gpu/results/golden-*.npz: run `python -m tests.gpu golden`", {}, False),
        ("Skipped: PyTorch is not installed", {}, False),
        ("Skipped: PyTorch is not installed", {"CUPYCONV_CI_LACKS": "torch"}, True),
        ("Skipped: JAX is not installed", {"CUPYCONV_CI_LACKS": "torch"}, False),
        ("Skipped: compiling kernels needs CuPy", {"CUPYCONV_CI_LACKS": "tensorflow keras"}, False),
        ("Skipped: reading a cubin needs nvdisasm", {}, False),
    ],
)
def test_reasons(reason, environment, accepted):
    assert may_be_skipped(reason, environment) is accepted


PARTS = ("sample", "rest --turn 1/3", "rest --turn 2/3", "rest --turn 3/3")
CASES = """
import pytest

@pytest.mark.parametrize("case", range(20))
def test_many(case):
    pass

def test_one():
    pass

@pytest.mark.quick
@pytest.mark.parametrize("case", range(5))
def test_quick(case):
    pass

@pytest.mark.quick
@pytest.mark.parametrize("case", range(65))
def test_quick_of_many_cases(case):
    pass

@pytest.mark.costly
@pytest.mark.parametrize("impl", ["cuda-one", "cuda-two"])
@pytest.mark.parametrize("case", range(2))
def test_families(case, impl):
    pass

@pytest.mark.costly
@pytest.mark.parametrize("case", range(4))
def test_family(case):
    pass

@pytest.mark.thorough
def test_thorough():
    pass
"""


PLUGINS = ("-p", "no:zarr", "-p", "tests.conftest")


@pytest.mark.thorough
def test_parts_and_turns_have_every_case_once(tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)

    def cases(part: str) -> list[str]:
        seen: list[str] = []
        plugin = SimpleNamespace(
            pytest_collection_finish=lambda session: seen.extend(i.nodeid for i in session.items)
        )
        options = ("-q", "--collect-only", *PLUGINS, "--rootdir", str(tmp_path))
        pytest.main([*options, "--part", *part.split(), str(tmp_path)], plugins=[plugin])
        return seen

    sample, *rest = map(cases, PARTS)
    assert len(sample) == CASES_OF_A_SAMPLE + 1 + 5 + CASES_OF_A_QUICK_TEST + 2 + 1
    assert [case.partition("[")[2] for case in sample if "families" in case] == [
        "0-cuda-one]",
        "0-cuda-two]",
    ]
    assert [len(one) for one in rest] == [10, 10, 9]
    assert sorted(sum(rest, sample)) == sorted(cases("all"))
    with pytest.raises(ValueError, match="4/3"):
        turn("4/3")


def test_tests_that_passed_are_left_out_and_others_run(tmp_path):
    package = tmp_path / "package"
    cases = f"def test_one():\n    pass\n\ndef test_two():\n    open({str(package)!r})\n"
    (tmp_path / "test_cases.py").write_text(cases)
    options = ("-q", *PLUGINS, "--rootdir", tmp_path, tmp_path)
    program = [sys.executable, "-m", "pytest", *options]
    assert subprocess.run(program, cwd=ROOT).returncode == 1
    package.touch()
    ran = subprocess.run([*program, "--unless-passed"], cwd=ROOT, capture_output=True, text=True)
    assert "1 passed, 1 deselected" in ran.stdout
