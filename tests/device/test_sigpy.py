"""SigPy's convolutions of CuPy arrays, with the lines that a page tells SigPy's users to add."""

from __future__ import annotations

import re

import cupy
import numpy as np
import pytest

from tests import ROOT
from tests.interfaces.test_from_cupy_cudnn import GRID, case

PAGE = ROOT / "notebooks" / "cupy-13-to-14.md"


@pytest.fixture
def sigpy(monkeypatch):
    """Import SigPy, which finds no cuDNN, and run the lines of the page."""
    sigpy = pytest.importorskip("sigpy")
    monkeypatch.setattr(cupy, "cudnn", None, raising=False)
    monkeypatch.setattr(sigpy.config, "cudnn_enabled", False)
    monkeypatch.delitem(vars(sigpy.conv), "cudnn", raising=False)
    ones = cupy.ones((1, 1, 3, 3))
    with pytest.raises(RuntimeError, match="cudnn must be installed"):
        sigpy.convolve(ones, ones)
    (lines,) = re.findall(r"^```{code-block} python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    exec(lines, {})
    return sigpy


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore")  # from packages that SigPy imports
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("one", GRID[::11], ids=str)
def test_sigpys_functions_match_on_a_gpu(sigpy, one, dtype):
    data, filters, keywords, integers = case(*one, dtype)
    expected = sigpy.convolve(data, filters, **keywords)
    output = integers(expected.shape)
    for function, given in (
        (sigpy.convolve, (data, filters)),
        (sigpy.convolve_data_adjoint, (output, filters, data.shape)),
        (sigpy.convolve_filter_adjoint, (output, data, filters.shape)),
    ):
        on_gpu = [cupy.asarray(v) if isinstance(v, np.ndarray) else v for v in given]
        ours = function(*on_gpu, **keywords)
        assert isinstance(ours, cupy.ndarray)
        expected = function(*given, **keywords)
        np.testing.assert_allclose(ours.get(), expected, rtol=1e-5, atol=1e-3)
