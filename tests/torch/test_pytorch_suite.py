"""PyTorch's convolution tests inside ``ct.patch()``, and the module that runs them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests.studies import pytorch_suite

VARIABLE = "PYTORCH_TEST_CONVOLUTION"
"""Environment variable with the path of PyTorch's test/nn/test_convolution.py."""

PROGRAM = """
import unittest
import torch

class Tests(unittest.TestCase):
    def test_taken(self):
        torch.nn.Conv1d(1, 2, 3)(torch.ones(1, 1, 5))
        torch.nn.functional.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 2))

    def test_refused(self):
        with self.assertRaises(RuntimeError):
            torch.nn.functional.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 6))

    def test_left(self):
        x = torch.ones(1, 1, 5, dtype=torch.int64)
        self.assertEqual(torch.nn.functional.conv1d(x, x[..., :2]).tolist(), [[[2, 2, 2, 2]]])

    def test_otherwise(self):
        y = torch.nn.functional.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 2))
        self.assertNotIn("patch", str(torch.overrides._get_current_function_mode()).lower())

    def test_wrong(self):
        self.fail()

    @unittest.skip("for no reason")
    def test_skipped(self):
        pass
"""


@pytest.mark.thorough
def test_run_counts_computed_calls(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(PROGRAM)
    inside = pytorch_suite.run(path, patched=True)
    assert inside.taken == 3
    assert inside.left == {
        "conv1d: torch.int64 (1, 1, 5) strided, torch.int64 (1, 1, 2) strided": 1
    }
    outside = pytorch_suite.run(path, patched=False)
    assert (outside.taken, outside.left.total()) == (0, 0)
    assert Counter(outside.outcomes.values()) == {"passed": 4, "failed": 1, "skipped": 1}
    assert pytorch_suite.different(outside, inside) == ["Tests::test_otherwise"]
    path.write_text("no Python")
    with pytest.raises(RuntimeError, match="SyntaxError"):
        pytorch_suite.run(path, patched=True)


@pytest.mark.slow
def test_pytorchs_own_tests_have_the_same_outcome_inside_patch():
    place = os.environ.get(VARIABLE)
    if not place:
        pytest.skip(f"{VARIABLE} does not name PyTorch's test/nn/test_convolution.py")
    outside, inside = (
        pytorch_suite.run(Path(place).resolve(), patched=patched) for patched in (False, True)
    )
    assert pytorch_suite.different(outside, inside) == []
    assert inside.taken > 1000
    # Only tensors in oneDNN's opaque layout are left to PyTorch.
    assert all("_mkldnn" in call for call in inside.left)
