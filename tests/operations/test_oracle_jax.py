"""JAX as an oracle: exact agreement with conv_general_dilated and its vjp, on integers.

Padding modes that JAX knows are passed by name, so that the amounts of padding are compared too.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from tests.configurations import Data, cases, integer_data, random_problems, three_passes

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed", allow_module_level=True)

ORACLE_WORDS = {"same": "SAME", "same_lower": "SAME_LOWER", "valid": "VALID"}


@cache
def compiled(problem: ConvProblem) -> Any:
    """Return the three passes of a problem as one function of (x, w, dy)."""
    import jax

    layouts = (problem.data_format, problem.filter_format, problem.data_format)

    # If the padding is at least as large as the filter, JAX's gradient crops.  XLA on a CPU then
    # reads outside its memory (seen in 0.10.2), so a separate operation pads such inputs.
    beyond = any(
        max(pair) >= axis.effective_filter
        for pair, axis in zip(problem.padding, problem.axes, strict=True)
    )
    before = [(0, 0)] * len(problem.input_shape)
    if beyond:
        for position, pair in zip(problem.data_axes[2:], problem.padding, strict=True):
            before[position] = pair

    def forward(x: Any, w: Any) -> Any:
        words = ORACLE_WORDS.get(problem.padding_mode, problem.padding)
        return jax.lax.conv_general_dilated(
            jax.numpy.pad(x, before) if beyond else x,
            w,
            window_strides=problem.stride,
            padding="VALID" if beyond else words,
            rhs_dilation=problem.dilation,
            dimension_numbers=layouts,
            feature_group_count=problem.groups,
            precision=jax.lax.Precision.HIGHEST,
        )

    def passes(x: Any, w: Any, dy: Any) -> Any:
        y, backward = jax.vjp(forward, x, w)
        return (y, *backward(dy))

    return jax.jit(passes)


def jax_passes(problem: ConvProblem, data: Data) -> dict[str, np.ndarray]:
    """Return JAX's results of the passes, without the bias."""
    results = compiled(problem)(data.x, data.w, data.dy)
    return dict(zip(("y", "dx", "dw"), map(np.asarray, results), strict=True))


def no_bias(data: Data) -> Data:
    """Return the same data with a bias of zeros, which JAX's convolutions do not have."""
    return Data(data.x, data.w, data.dy, np.zeros_like(data.bias))


def assert_exact(problem: ConvProblem, data: Data) -> None:
    theirs = jax_passes(problem, data)
    for impl in ("reference", "numpy"):
        for name, value in three_passes(problem, no_bias(data), impl).items():
            assert value.dtype == theirs[name].dtype
            assert value.shape == theirs[name].shape
            np.testing.assert_array_equal(value, theirs[name], err_msg=f"{problem} {impl} {name}")


@pytest.mark.parametrize("case", cases(60_000), ids=lambda case: case.name)
def test_curated_cases_agree_exactly(case):
    assert_exact(case.problem, integer_data(case.problem, seed=7))


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_agree_exactly(seed):
    for problem in random_problems(6, seed=100 + seed):
        assert_exact(problem, integer_data(problem, seed))


def test_random_configurations_agree_exactly_in_float64():
    import jax

    with jax.enable_x64(True):
        for problem in random_problems(8, seed=42, dtypes=("float64",)):
            assert_exact(problem, integer_data(problem))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("stride", "taps"), [(1, 3), (2, 3), (2, 2), (3, 2), (2, 5)])
def test_transposed(padding, stride, taps):
    import jax

    numbers = np.random.default_rng(0)
    x = numbers.integers(-3, 4, (2, 6, 5)).astype(np.float32)
    w = numbers.integers(-3, 4, (taps, 4, 5)).astype(np.float32)  # spatial, out, in
    theirs = jax.lax.conv_transpose(
        x, w, (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC"), transpose_kernel=True
    )
    # With VALID, JAX's result is at least stride times as large as x, like Keras's.
    added = {"SAME": None, "VALID": max(stride - taps, 0)}[padding]
    ours = cupyconv.conv_transpose(
        x, w, stride=stride, padding=padding, output_padding=added, data_format="NWC"
    )
    np.testing.assert_array_equal(ours, np.asarray(theirs))


def test_dlpack_arrays_come_in_without_a_copy():
    import jax.numpy as jnp

    x, w = jnp.ones((1, 2, 6)), jnp.ones((3, 2, 3))
    taken, home = cupyconv.arrays.take("x", x)
    assert home is cupyconv.arrays.Home.CPU
    assert taken.ctypes.data == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(cupyconv.conv_forward(x, w), np.full((1, 3, 4), 6))
