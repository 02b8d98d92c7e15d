"""Transposed convolutions with bias and activation: on the CPU, in kernels and with Dask."""

import re

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from tests import emulator
from tests.activations import ACTIVATIONS, activated
from tests.configurations import CASES, integer_data, random_data, random_problems

IMPLEMENTATIONS = ("reference", "numpy")


def biases(problem):
    """Return a nonzero integer for each channel of dx."""
    return (np.arange(problem.C) % 7 - 3.5).round().astype(integer_data(problem).x.dtype)


def expected_of(problem, data, bias, activation=None):
    """Compute activation(dx + bias) in float64 from the reference's dx."""
    dx = cupyconv.conv_backprop_input(
        problem.input_shape,
        data.w.astype(np.float64),
        data.dy.astype(np.float64),
        impl="reference",
        **problem.keywords,
    )
    shape = [-1 if axis == problem.data_axes[1] else 1 for axis in range(dx.ndim)]
    return activated(dx + bias.astype(np.float64).reshape(shape), activation)


def transposed(api, problem, data, bias, **more):
    return api.conv_transpose(
        data.dy, data.w, bias, output_shape=problem.input_shape, **problem.keywords, **more
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_results_are_rounded_once(dtype):
    problem = ConvProblem((3, 4, 9, 8), (6, 4, 3, 3), padding=1, dtype=dtype)
    data = random_data(problem)
    bias = random_data(problem, seed=1).x[0, :, 0, 0]
    for activation in (None, *ACTIVATIONS):
        expected = expected_of(problem, data, bias, activation)
        nearest = expected.astype(bias.dtype)
        for impl in IMPLEMENTATIONS:
            got = transposed(cupyconv, problem, data, bias, activation=activation, impl=impl)
            # Float32 sums are nearly exact, so few round to another number.
            assert (got != nearest).mean() < 0.01
            again = np.abs(got.astype(np.float64) - expected)
            ulp = np.finfo(np.float16).eps if dtype == "float16" else 2.0**-7
            assert (again <= 0.51 * ulp * np.maximum(np.abs(expected), 2.0**-14)).mean() > 0.99


def test_results_outside_all_windows_equal_the_bias():
    x, w = np.ones((1, 1, 2), np.float32), np.ones((1, 2, 1), np.float32)
    bias = np.array([-1, 5], np.float32)
    y = cupyconv.conv_transpose(x, w, bias, stride=3, output_padding=2, activation="relu")
    np.testing.assert_array_equal(y, [[[0, 0, 0, 0, 0, 0], [6, 5, 5, 6, 5, 5]]])


# Stride, padding, dilation and an output_padding of at least the stride.
BEYOND = [(1, 0, 2, 1), (1, 1, 4, 3), (2, (0, 3), 5, 4), (1, 2, 3, 2)]


def beyond(problem_format, stride, padding, dilation, extra, dtype="float32"):
    """Return a 1-D call, and the same call with x padded by its missing windows."""
    data = integer_data(ConvProblem((2, 6, 5), (4, 3, 2), groups=2, dtype=dtype))
    x, w, bias = data.x[:, :4], data.w, biases(ConvProblem((1, 6, 5), (4, 3, 2), groups=2))
    longer = np.pad(x, ((0, 0), (0, 0), (0, extra // stride)))
    if problem_format == "NWC":
        x, longer = x.transpose(0, 2, 1), longer.transpose(0, 2, 1)
    rules = {
        "stride": stride,
        "padding": (padding,),
        "dilation": dilation,
        "groups": 2,
        "data_format": problem_format,
        "filter_format": "OIW",
    }
    more = {"output_padding": extra, **rules}
    same = {"output_padding": extra % stride, **rules}
    return (x, w, bias.astype(x.dtype), more), (longer, w, bias.astype(x.dtype), same)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NCW", "NWC"])
def test_output_padding_may_reach_the_stride(layout, dtype, impl):
    for rules in BEYOND:
        (x, w, bias, more), (longer, _, _, same) = beyond(layout, *rules, dtype)
        expected = cupyconv.conv_transpose(longer, w, bias, activation="relu", impl=impl, **same)
        out = np.full_like(expected, 9)
        for given in (x, x[::-1][::-1], np.asfortranarray(x)):
            got = cupyconv.conv_transpose(
                given, w, bias, activation="relu", impl=impl, out=out, **more
            )
            assert got is out
            np.testing.assert_array_equal(got, expected)


def test_kernels_accept_output_padding_of_the_stride():
    for rules in BEYOND:
        (x, w, bias, more), (longer, _, _, same) = beyond("NCW", *rules)
        expected = cupyconv.conv_transpose(longer, w, bias, **same)
        got = emulator.conv_transpose(x, w, bias, impl="cuda-generic", **more)
        np.testing.assert_array_equal(got, expected)


def test_wrong_bias_and_activation_are_rejected():
    x, w = np.ones((1, 3, 4), np.float32), np.ones((3, 2, 2), np.float32)
    with pytest.raises(ConvError, match=r"bias has shape \(3,\), the result has 2.*shape \(2,\)"):
        cupyconv.conv_transpose(x, w, np.ones(3, np.float32))
    with pytest.raises(ConvError, match="unknown activation"):
        cupyconv.conv_transpose(x, w, activation="tan")


def test_errors_name_x_and_the_result():
    x, w = np.ones((1, 4, 5), np.float32), np.ones((4, 2, 3), np.float32)
    for given, words in (
        ((x[0], w, {}), "x must have a batch axis"),
        ((x[:, 0, 0], w, {}), "x must have a batch axis"),
        ((x, w[0], {}), "w|the filter must have as many axes as x"),
        ((x, w, {"groups": 3}), "groups must divide x's channels: x has 4"),
        ((x[:, :3], w, {}), "one channel for each filter: x has 3"),
        ((x, w, {"output_shape": (1, 3, 7)}), "must be the result's channels divided by groups"),
        ((x, w, {"output_shape": (1, 2)}), "the result must have a batch axis"),
        ((x, w, {"output_shape": (1, 2, 1)}), "must fit into the padded result"),
        (
            (x[..., :1], w, {"padding": 2}),
            "the result of a transposed convolution must have a size of at least 1.*removes 4",
        ),
    ):
        for transpose in (cupyconv.conv_transpose, emulator.conv_transpose):
            with pytest.raises(ConvError) as caught:
                transpose(*given[:2], **given[2])
            said = str(caught.value)
            assert re.search(words, said), said
            assert "input " not in said.replace("the filter's input channels", "")


# -- Dask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_dask_matches_numpy(dtype):
    da = pytest.importorskip("dask.array")
    cd = pytest.importorskip("cupyconv.dask", exc_type=ImportError)
    for problem in (*(case.problem for case in CASES[:6]), *random_problems(6, seed=2)):
        data, bias = integer_data(problem.replace(dtype="float32")), biases(problem)
        x, w, b = (array.astype(dtype) for array in (data.dy, data.w, bias))
        if dtype == "float16":
            x, w = np.sign(x), np.sign(w)
        if dtype == "complex64":
            x, w = x * np.complex64(1 + 2j), w * np.complex64(2 - 1j)
        chunks = tuple(max(size - 1, 1) for size in x.shape)
        given = {"output_shape": problem.input_shape, **problem.keywords}
        for shift in (None, b):
            lazy = cd.conv_transpose(da.from_array(x, chunks=chunks), w, shift, **given)
            expected = cupyconv.conv_transpose(x, w, shift, **given)
            got = lazy.compute(scheduler="synchronous")
            assert got.dtype == lazy.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
    with pytest.raises(ConvError, match=r"bias has shape \(9,\), the result has"):
        cd.conv_transpose(da.from_array(x), w, np.ones(9, dtype), **given)


def test_dask_accepts_output_padding_of_the_stride():
    da = pytest.importorskip("dask.array")
    cd = pytest.importorskip("cupyconv.dask", exc_type=ImportError)
    for rules in BEYOND:
        (x, w, bias, more), _ = beyond("NWC", *rules)
        lazy = cd.conv_transpose(da.from_array(x, chunks=(1, 2, 2)), w, bias, **more)
        expected = cupyconv.conv_transpose(x, w, bias, **more)
        np.testing.assert_array_equal(lazy.compute(scheduler="synchronous"), expected)
