"""The cases that mutants of the kernels are judged by.

Few and small, because every mutant is compiled anew for each variant that they take: each is here
for an edge that some change would otherwise survive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np

from cupyconv import ConvProblem
from cupyconv.gpu import sources
from cupyconv.planning import cost, plan_pass
from tests import agreement
from tests.agreement import fits
from tests.configurations import (
    CASES,
    FAMILY_CASES,
    in_formats,
    integer_data,
    keywords,
    random_data,
)

from . import SCHEDULES, conv_backprop_bias, conv_forward, settings

_PROBLEMS = {case.name: case.problem for case in (*CASES, *FAMILY_CASES)}

# (case, data format, filter format, dtype) by family; the schedules go round.
_GENERIC = (
    ("volume_everything_differs", "NDHWC", "DHWIO", "float32"),
    ("channels_beyond_one_tile", "NCHW", "OIHW", "float32"),
    ("stride_and_dilation_coprime", "NWC", "OWI", "float32"),
    ("padding_beyond_the_filter_on_one_side", "NCHW", "HWIO", "float32"),
    ("depthwise_multiplier", "NHWC", "HWIO", "float16"),
)
_GATHER = (
    ("pieces_of_8_everything_differs", "NHWC", "HWIO", "float16"),
    ("ring_wraps", "NHWC", "OHWI", "float16"),
    ("odd_channels", "NCHW", "OIHW", "float16"),
    ("grouped_pieces", "NHWC", "HWIO", "bfloat16"),
    ("several_tiles", "NCHW", "OIHW", "float16"),
    ("volume_phases", "NDHWC", "ODHWI", "float16"),
    ("pieces_of_4", "NHWC", "HWIO", "float16"),
    ("filter_beyond_input_fits_with_padding", "NHWC", "OHWI", "float16"),
)
_DIRECT = (
    ("volume_everything_differs", "NDHWC", "DHWIO", "float32"),
    ("depthwise_padding_beyond_stride", "NHWC", "HWIO", "float16"),
    ("deeper_than_high", "NCDHW", "OIDHW", "float32"),
    ("groups_of_4", "NHWC", "HWIO", "float16"),
    ("first_layer", "NHWC", "OHWI", "float32"),
    ("depthwise_stride_3", "NHWC", "HWIO", "float32"),
    ("depthwise_multiplied", "NCHW", "OIHW", "float16"),
    ("depthwise_dilated", "NHWC", "OHWI", "float16"),
    ("depthwise_chunks", "NHWC", "HWIO", "float32"),
    ("volume_depthwise", "NDHWC", "DHWIO", "float32"),
)
_CASES = {"cuda-generic": _GENERIC, "cuda-gather": _GATHER, "cuda-direct": _DIRECT}

_KERNELS = {
    "conv_forward.cu": ("cuda-generic", "forward"),
    "conv_backprop_input.cu": ("cuda-generic", "backprop_input"),
    "conv_backprop_filter.cu": ("cuda-generic", "backprop_filter"),
    "conv_gather.cu": ("cuda-gather", None),
    "conv_direct.cu": ("cuda-direct", None),
    "conv_backprop_bias.cu": ("bias", None),
}


def mutation_cases(file: str) -> list[tuple[str, Callable[[], None]]]:
    """The cases for a kernel file, or for all kernels that reach a header."""
    cases = []
    for kernel, (impl, pass_) in _KERNELS.items():
        reached = {kernel, *(name for name, _ in sources.load(kernel).headers)}
        if file in reached:
            cases += list(_cases_of(impl, pass_))
    return cases


def _cases_of(impl: str, only: str | None):
    if impl == "bias":
        for dtype in ("float32", "bfloat16"):
            yield f"bias {dtype}", partial(_bias, dtype)
        return
    for number, (name, data_format, filter_format, dtype) in enumerate(_CASES[impl]):
        problem = in_formats(_PROBLEMS[name], data_format, filter_format).replace(dtype=dtype)
        for pass_ in fits(problem, impl, "sm_80"):
            if only in (None, pass_):
                label = f"{impl} {pass_} {name}"
                yield label, partial(_exact, problem, impl, pass_, SCHEDULES[number % 3])
    if impl == "cuda-gather":
        problem = _PROBLEMS["pieces_of_8"].replace(dtype="float16")
        yield "cuda-gather split", partial(_split, problem)
        yield "cuda-gather 7.5", partial(_exact, problem, impl, "forward", SCHEDULES[0], "sm_75")
    if only in (None, "forward"):
        yield f"{impl} activation", partial(_activation, impl)


def _exact(problem: ConvProblem, impl: str, pass_: str, schedule, arch: str = "sm_80") -> None:
    from tests import emulator

    with settings(schedule):
        agreement.require_exact(emulator, problem, impl=impl, arch=arch, passes=(pass_,))


def _split(problem: ConvProblem) -> None:
    """All passes with gemm_k in three parts."""
    with mock.patch.object(cost, "_splits", return_value=3):
        plan_pass.cache_clear()
        for pass_ in fits(problem, "cuda-gather", "sm_80"):
            _exact(problem, "cuda-gather", pass_, SCHEDULES[2])
    plan_pass.cache_clear()


def _bias(dtype: str) -> None:
    problem = _PROBLEMS["pixels_beyond_one_tile"].replace(dtype=dtype)
    dy = integer_data(problem).dy
    got = conv_backprop_bias(dy, data_format=problem.data_format)
    exact = dy.astype(np.float64).sum(axis=(0, 2, 3))
    assert (got.astype(np.float64) == exact).all()


def _activation(impl: str) -> None:
    """Bias and every activation against NumPy, on data of both signs."""
    import cupyconv

    problem = _PROBLEMS["depthwise_pieces"].replace(dtype="float16")
    data = random_data(problem)
    for activation in ("relu", "silu", "gelu"):
        arguments = {**keywords(problem), "activation": activation}
        got = conv_forward(data.x, data.w, data.bias, impl=impl, **arguments)
        expected = cupyconv.conv_forward(data.x, data.w, data.bias, impl="reference", **arguments)
        difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        assert difference.max() < 4e-3
