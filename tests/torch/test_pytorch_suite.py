"""PyTorch's convolution tests inside ``ct.patch()``, and the program that runs them."""

from __future__ import annotations

import os
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
def test_run_counts_computed_and_refused_calls(tmp_path, capsys):
    path = tmp_path / "test_some.py"
    path.write_text(PROGRAM)
    inside = pytorch_suite.run(path, patched=True)
    assert inside.taken == 3
    assert (inside.left.total(), inside.refused) == (1, 1)
    assert list(inside.left) == [
        "conv1d: torch.int64 (1, 1, 5) strided, torch.int64 (1, 1, 2) strided"
    ]
    outside = pytorch_suite.run(path, patched=False)
    assert (outside.taken, outside.left.total()) == (0, 0)
    assert pytorch_suite.summary(outside) == "4 passed, 1 failed, 1 skipped"
    assert pytorch_suite.different(outside, inside) == ["Tests::test_otherwise"]
    assert pytorch_suite.main([str(path), "-k", "left or taken"]) == 0
    assert "calls by cupyconv 2, refused by both 0, left to PyTorch 1" in capsys.readouterr().out
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
