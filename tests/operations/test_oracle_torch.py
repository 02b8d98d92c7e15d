"""PyTorch as an oracle: its own samples for convolutions, its error samples, and its autograd.

The installed PyTorch generates the samples; without PyTorch, these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, arrays
from cupyconv.errors import CupyconvError
from tests.activations import ACTIVATIONS
from tests.configurations import (
    CASES,
    DTYPES,
    Data,
    integer_data,
    problems,
    three_passes,
)

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

CONVOLUTIONS = tuple(f"conv{rank}d" for rank in (1, 2, 3))
TRANSPOSED = tuple(f"conv_transpose{rank}d" for rank in (1, 2, 3))

COMPLEX = {"complex64", "complex128"}
"""Dtypes that tests/kernels/test_complex.py covers."""

NOT_TAKEN = {"int64"}
"""Dtypes of PyTorch's samples that the library refuses by contract."""

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(scope="module")
def torch():
    return one_threaded_torch()


@cache
def one_threaded_torch() -> Any:
    """Return PyTorch; the problems are too small to share between threads."""
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module")
def operators(torch):
    """Return PyTorch's descriptions of its convolutions, keyed by name."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            # PyTorch takes only the base class of its test cases from there; samples do not use it.
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        # The import freezes flags of the whole process, which other tests set.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_methods_invocations import op_db

    prefix = "nn.functional."
    found = {op.name.removeprefix(prefix): op for op in op_db if op.name.startswith(prefix)}
    return {name: found[name] for name in (*CONVOLUTIONS, *TRANSPOSED)}


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor's values; bfloat16 is converted bitwise, since NumPy lacks it."""
    detached = tensor.detach()
    if str(detached.dtype) == "torch.bfloat16":
        import torch

        return detached.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return detached.numpy()


@dataclass
class Sample:
    """One of PyTorch's samples as a batched call, for PyTorch and cupyconv.

    Attributes:
        x, w, bias: operands, with a batch axis; the bias may be None.
        keywords: keyword arguments of the call.
        unbatched: whether PyTorch's sample has no batch axis.
    """

    x: Any
    w: Any
    bias: Any
    keywords: dict[str, Any]
    unbatched: bool


def read_sample(sample: Any, rank: int) -> Sample:
    """Return a sample with named arguments, and with a batch axis added if it has none."""
    x, (w, bias) = sample.input.detach(), (*sample.args, None)[:2]
    unbatched = x.ndim == rank + 1
    if unbatched:
        x = x.unsqueeze(0)
    bias = None if bias is None else bias.detach()
    return Sample(x, w.detach(), bias, dict(sample.kwargs), unbatched)


def assert_close(ours: np.ndarray, theirs: Any, dtype: str) -> None:
    expected = to_numpy(theirs)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    largest = np.abs(expected.astype(np.float64)).max(initial=1)
    np.testing.assert_allclose(
        ours.astype(np.float64),
        expected.astype(np.float64),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype] * largest,
    )


# -- PyTorch's own samples -------------------------------------------------------------------------


@pytest.mark.costly
# PyTorch warns that some of its samples need copies, which does not matter here.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_samples_of_convolutions(torch, operators, name, dtype):
    rank = int(name[-2])
    counts: Counter[str] = Counter()
    for given_sample in operators[name].sample_inputs("cpu", getattr(torch, dtype)):
        sample = read_sample(given_sample, rank)
        leaves = [t.clone().requires_grad_() for t in (sample.x, sample.w)]
        theirs = getattr(torch.nn.functional, name)(*leaves, sample.bias, **sample.keywords)
        dy = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(theirs.dtype)
        dx, dw = torch.autograd.grad(theirs, leaves, dy)
        x, w, g = (to_numpy(t) for t in (sample.x, sample.w, dy))
        bias = None if sample.bias is None else to_numpy(sample.bias)
        keywords = sample.keywords
        for impl in ("reference", "numpy"):
            ours = cupyconv.conv_forward(x, w, bias, impl=impl, **keywords)
            assert_close(ours, theirs, dtype)
            ours_dx = cupyconv.conv_backprop_input(x.shape, w, g, impl=impl, **keywords)
            assert_close(ours_dx, dx, dtype)
            ours_dw = cupyconv.conv_backprop_filter(x, w.shape, g, impl=impl, **keywords)
            assert_close(ours_dw, dw, dtype)
        counts["unbatched, given a batch" if sample.unbatched else "as they are"] += 1
    print(f"{name} {dtype}: {dict(counts)}")
    assert counts["as they are"] >= 5
    assert counts.total() == len(list(operators[name].sample_inputs("cpu", torch.float64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_samples_of_transposed_convolutions(torch, operators, name, dtype):
    rank = int(name[-2])
    counts: Counter[str] = Counter()
    for given_sample in operators[name].sample_inputs("cpu", getattr(torch, dtype)):
        sample = read_sample(given_sample, rank)
        leaves = [t.clone().requires_grad_() for t in (sample.x, sample.w)]
        theirs = getattr(torch.nn.functional, name)(*leaves, None, **sample.keywords)
        g = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(theirs.dtype)
        dx, dw = torch.autograd.grad(theirs, leaves, g)
        x, w, dy = (to_numpy(t) for t in (sample.x, sample.w, g))
        for impl in ("reference", "numpy"):
            assert_close(cupyconv.conv_transpose(x, w, impl=impl, **sample.keywords), theirs, dtype)
            # The gradients of the transposed layer are passes of the convolution that it reverses.
            # If output_padding is at least the stride, the convolution has windows beyond x.
            rest = {k: v for k, v in sample.keywords.items() if k != "output_padding"}
            whole = cupyconv.conv_forward(dy, w, impl=impl, **rest)
            assert_close(whole[tuple(map(slice, x.shape))], dx, dtype)
            more = [(0, n - size) for n, size in zip(whole.shape, x.shape, strict=True)]
            ours_dw = cupyconv.conv_backprop_filter(dy, w.shape, np.pad(x, more), impl=impl, **rest)
            assert_close(ours_dw, dw, dtype)
        counts["unbatched, given a batch" if sample.unbatched else "as they are"] += 1
        counts["of these, output_padding from the stride on"] += whole.shape != x.shape
    from_stride = counts.pop("of these, output_padding from the stride on")
    print(f"{name} {dtype}: {dict(counts)}, output_padding from the stride on in {from_stride}")
    assert counts["as they are"] >= 5
    assert from_stride == {1: 0, 2: 2, 3: 2}[rank]
    assert counts.total() == len(list(operators[name].sample_inputs("cpu", torch.float64)))


@pytest.mark.parametrize("name", CONVOLUTIONS + TRANSPOSED)
def test_dtypes_that_are_not_taken_are_these_and_are_refused(torch, operators, name):
    offered = {str(dtype).removeprefix("torch.") for dtype in operators[name].dtypes}
    assert set(DTYPES) <= offered
    refused = offered - set(DTYPES) - COMPLEX
    assert refused <= NOT_TAKEN
    for dtype in sorted(refused):
        sample = next(iter(operators[name].sample_inputs("cpu", getattr(torch, dtype))))
        x, w = to_numpy(sample.input), to_numpy(sample.args[0])
        with pytest.raises(ConvTypeError, match=f"got {dtype}"):
            cupyconv.conv_forward(x, w)
    print(f"{name}: refused by contract: {sorted(refused)}")


TAKEN_HERE = "padding='same' is not supported for strided convolutions"


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_error_samples(operators, name):
    rank = int(name[-2])
    raised: Counter[str] = Counter()
    for error_input in operators[name].error_inputs("cpu"):
        sample = error_input.sample_input
        x, (w, bias) = sample.input, sample.args
        if x.ndim == rank + 1 and w.ndim == rank + 2:
            x = x.unsqueeze(0)
        given_arrays = [to_numpy(t) for t in (x, w, bias)]
        if TAKEN_HERE in error_input.error_regex:
            y = cupyconv.conv_forward(*given_arrays, **sample.kwargs)
            assert y.shape[2:] == tuple(-(-size // 2) for size in x.shape[2:])
            raised["taken here"] += 1
            continue
        with pytest.raises(CupyconvError) as caught:
            cupyconv.conv_forward(*given_arrays, **sample.kwargs)
        assert isinstance(caught.value, (ConvError, ConvTypeError))
        raised[type(caught.value).__name__] += 1
    print(f"{name}: {dict(raised)}")
    assert raised["ConvError"] >= 7
    assert raised["ConvTypeError"] == 2
    assert raised["taken here"] == (rank == 3)


# -- PyTorch's autograd over our configurations ----------------------------------------------------


def torch_passes(problem: ConvProblem, data: Data) -> dict[str, np.ndarray]:
    """Return the passes by PyTorch in float64, in the problem's memory order.

    PyTorch pads both sides equally, so a separate differentiable operation pads the input first.
    """
    torch = one_threaded_torch()
    x, dy = (
        torch.from_numpy(a.astype(np.float64).transpose(problem.data_axes).copy())
        for a in (data.x, data.dy)
    )
    w = torch.from_numpy(data.w.astype(np.float64).transpose(problem.filter_axes).copy())
    bias = torch.from_numpy(data.bias.astype(np.float64))
    x.requires_grad_()
    w.requires_grad_()
    padded = torch.nn.functional.pad(
        x, [side for pair in reversed(problem.padding) for side in pair]
    )
    convolve = getattr(torch.nn.functional, f"conv{problem.spatial_rank}d")
    y = convolve(
        padded,
        w,
        bias,
        stride=problem.stride,
        dilation=problem.dilation,
        groups=problem.groups,
    )
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    back, back_w = np.argsort(problem.data_axes), np.argsort(problem.filter_axes)
    return {
        "y": y.detach().numpy().transpose(back),
        "dx": dx.numpy().transpose(back),
        "dw": dw.numpy().transpose(back_w),
    }


def assert_exact(problem: ConvProblem, data: Data, expected: dict[str, np.ndarray]) -> None:
    for impl in ("reference", "numpy"):
        for name, value in three_passes(problem, data, impl).items():
            assert value.shape == expected[name].shape
            assert np.array_equal(value.astype(np.float64), expected[name]), (problem, impl, name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_curated_cases_agree_exactly(case, dtype):
    problem = case.problem.replace(dtype=dtype)
    data = integer_data(problem, seed=5)
    assert_exact(problem, data, torch_passes(problem, data))


@settings(max_examples=150)
@given(problems(dtypes=DTYPES))
def test_random_configurations_agree_exactly(problem):
    data = integer_data(problem)
    assert_exact(problem, data, torch_passes(problem, data))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activations(torch, activation, dtype):
    numbers = np.random.default_rng(0)
    wide = [numbers.standard_normal(shape) for shape in ((2, 4, 6, 5), (6, 2, 3, 3), (6,))]
    x, w, bias = (a.astype(arrays.numpy_dtype(dtype)) for a in wide)
    exact = [torch.from_numpy(a.astype(np.float64)) for a in (x, w, bias)]
    theirs = torch.nn.functional.conv2d(*exact, padding=1, groups=2)
    theirs = getattr(torch.nn.functional, activation)(theirs).numpy()
    for impl in ("reference", "numpy"):
        ours = cupyconv.conv_forward(
            x, w, bias, padding=1, groups=2, activation=activation, impl=impl
        )
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "output_padding"),
    [
        *((1, 0, 1, 0), (2, 1, 1, 0), (2, 1, 1, 1), (3, 0, 2, 2), (3, 4, 1, 1)),
        # At least the stride, and less than the dilation: within the padding, partly, and beyond.
        *((1, 2, 2, 1), (2, 2, 5, 4), (1, 1, 4, 3), (2, 0, 3, 2)),
    ],
)
def test_transposed(torch, rank, groups, stride, padding, dilation, output_padding):
    numbers = np.random.default_rng(1)
    x = numbers.integers(-3, 4, (2, 4, *[5] * rank)).astype(np.float32)
    w = numbers.integers(-3, 4, (4, 3, *[3] * rank)).astype(np.float32)
    keywords = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "output_padding": output_padding,
        "groups": groups,
    }
    transpose = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    theirs = transpose(torch.from_numpy(x), torch.from_numpy(w), **keywords).numpy()
    np.testing.assert_array_equal(cupyconv.conv_transpose(x, w, **keywords), theirs)
