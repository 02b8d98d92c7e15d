"""PyTorch as an oracle: its convolutions and its autograd; without PyTorch, they are skipped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import cupyconv
from cupyconv import ConvProblem, arrays
from tests.activations import ACTIVATIONS
from tests.configurations import (
    CASES,
    DTYPES,
    Data,
    integer_data,
    problems,
    three_passes,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Use one thread in PyTorch; the problems are too small to share between threads."""
    torch.set_num_threads(1)


def torch_passes(problem: ConvProblem, data: Data) -> dict[str, np.ndarray]:
    """Return the passes by PyTorch in float64, in the problem's memory order.

    PyTorch pads both sides equally, so a separate differentiable operation pads the input first.
    """
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
def test_bias_and_activations(activation, dtype):
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
def test_transposed(rank, groups, stride, padding, dilation, output_padding):
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
