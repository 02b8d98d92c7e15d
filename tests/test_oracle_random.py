"""At least 2,000 random legal configurations: reference, numpy and an oracle agree exactly.

The oracle is PyTorch in float64 where it is installed, which takes a millisecond each, and else
JAX in float32, which compiles each of them.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tests.configurations import DTYPES, Data, integer_data, random_problems, three_passes

CHUNKS, CONFIGURATIONS = 24, 100


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_reference_numpy_and_oracle_agree_exactly(chunk):
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        from tests.test_oracle_torch import torch_passes
    elif importlib.util.find_spec("jax") is not None:
        from tests.test_oracle_jax import jax_passes, no_bias
    else:
        pytest.skip("neither PyTorch nor JAX is installed")
    compared = 0
    # Some of any size, most of them small: edges are cheap to hit.
    limits = {"max_macs": (512, 4096, 4096, 65536)[chunk % 4]}
    for problem in random_problems(CONFIGURATIONS, seed=chunk, dtypes=DTYPES, **limits):
        data = integer_data(problem, seed=chunk)
        if has_torch:
            expected = torch_passes(problem, data)
        else:
            wide = problem.replace(dtype="float32")
            tensors = (data.x, data.w, data.dy, data.bias)
            expected = jax_passes(wide, Data(*(a.astype(np.float32) for a in tensors)))
            data = no_bias(data)
        runs = {impl: three_passes(problem, data, impl) for impl in ("reference", "numpy")}
        for impl, run in runs.items():
            for name, value in run.items():
                assert value.shape == expected[name].shape
                same = np.array_equal(value.astype(np.float64), expected[name])
                assert same, f"{problem}: {name} of {impl}"
        compared += 1
    assert compared == CONFIGURATIONS


def test_the_slow_suite_is_as_large_as_it_says():
    assert CHUNKS * CONFIGURATIONS >= 2000
    drawn = {p for chunk in range(CHUNKS) for p in random_problems(20, seed=chunk)}
    assert len(drawn) > 0.98 * CHUNKS * 20
