"""Every implementation on every kind of view: results on integers are exact.

An implementation reads a view in place or copies it."""

from itertools import product

import numpy as np
import pytest

from cupyconv import ConvError
from cupyconv.problem import PASSES
from tests import emulator
from tests.agreement import fits, plan_without_copies
from tests.configurations import (
    FAMILY_CASES,
    PATCH_CASES,
    TOEPLITZ_CASES,
    in_formats,
    integer_data,
)
from tests.views import BY_NAME, KINDS, assignments, named, require_exact, strides_of

_PROBLEMS = {case.name: case.problem for case in (*FAMILY_CASES, *TOEPLITZ_CASES, *PATCH_CASES)}

# Every family, with each of its ways to access memory: (family, chip, case, formats, dtype).
_LAYERS = (
    ("cuda-generic", "sm_80", "pieces_of_8", "NCHW", "OIHW", "float32"),
    ("cuda-gather", "sm_80", "pieces_of_8", "NHWC", "OHWI", "float16"),
    ("cuda-gather", "sm_80", "pieces_of_8_stride_2", "NHWC", "HWIO", "bfloat16"),
    ("cuda-gather", "sm_80", "pixels_follow", "NCHW", "OIHW", "float16"),
    ("cuda-gather", "sm_80", "pieces_of_8", "NHWC", "OHWI", "float32"),
    ("cuda-gather", "sm_80", "pixels_follow", "NCHW", "OIHW", "float64"),
    ("cuda-gather", "sm_75", "pieces_of_8", "NHWC", "OHWI", "float16"),
    ("cuda-direct", "sm_80", "depthwise_pieces", "NHWC", "HWIO", "float16"),
    ("cuda-direct", "sm_80", "groups_of_4", "NCHW", "OIHW", "float32"),
    ("cuda-patch", "sm_80", "windows_begin_odd_and_even", "NCHW", "OIHW", "float16"),
    ("cuda-patch", "sm_80", "seven_by_seven_of_three", "NHWC", "HWIO", "float16"),
    ("cuda-toeplitz", "sm_80", "seven_by_seven", "NHWC", "HWIO", "float16"),
    ("cuda-toeplitz", "sm_80", "seven_by_seven", "NCHW", "OIHW", "bfloat16"),
    ("cuda-hopper", "sm_90", "pieces_of_8", "NHWC", "OHWI", "float16"),
    ("cuda-hopper", "sm_90", "pieces_of_8_stride_2", "NHWC", "HWIO", "bfloat16"),
    ("cuda-hopper", "sm_90", "pieces_of_8", "NHWC", "OHWI", "float32"),
    ("cuda-hopper-bf16x6", "sm_90", "pieces_of_8", "NHWC", "OHWI", "float32"),
)


def _precision(impl):
    return "ieee" if impl == "cuda-hopper-bf16x6" else "tf32"


def _runs():
    for impl, arch, case, *formats, dtype in _LAYERS:
        problem = in_formats(_PROBLEMS[case], *formats).replace(dtype=dtype)
        for pass_ in fits(problem, impl, arch, _precision(impl)):
            name = "-".join((impl, arch, dtype, case, formats[0], pass_))
            yield name, impl, arch, problem, pass_


RUNS = [pytest.param(number, *run, id=name) for number, (name, *run) in enumerate(_runs())]


def require_exact_on(kinds, number, impl, arch, problem, pass_):
    """Return whether the family supports these views; require exact results if it does."""
    how = {"impl": impl, "arch": arch, "precision": _precision(impl)}
    if impl == "cuda-gather":  # tests/kernels/test_arranged.py tests copies of views
        how["impl"] = plan_without_copies(
            problem,
            impl,
            emulator.device(arch),
            passes=(pass_,),
            precision=_precision(impl),
            strides=strides_of(problem, pass_, kinds),
        )
    try:
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            require_exact(emulator, problem, pass_, kinds, **how)
    except ConvError as error:
        if impl == "cuda-hopper-bf16x6" and "takes tensors with channels" in str(error):
            return False  # all other families copy views that they cannot read
        raise
    return True


@pytest.mark.parametrize(("number", "impl", "arch", "problem", "pass_"), RUNS)
def test_families(number, impl, arch, problem, pass_):
    """Reversed windows, which most kernels read without a copy, and one other kind are tested."""
    for name in ("reversed window", KINDS[5 * number % len(KINDS)].name):
        kinds = named(problem, pass_, name)
        require_exact_on(kinds, number, impl, arch, problem, pass_)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "impl", "arch", "problem", "pass_"), RUNS)
def test_families_on_every_kind_of_view(number, impl, arch, problem, pass_):
    chosen = list(assignments(problem, pass_))
    taken = [one for one in chosen if require_exact_on(one, number, impl, arch, problem, pass_)]
    assert taken == chosen or (impl == "cuda-hopper-bf16x6" and taken)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("pass_", PASSES)
def test_whatever_the_planner_picks(pass_, arch):
    """Reversed views, such as a flipped filter, work with whichever kernel the planner chooses."""
    problem = in_formats(_PROBLEMS["pieces_of_8"], "NHWC", "OHWI").replace(dtype="float16")
    kinds = dict.fromkeys(("x", "w", "dy"), BY_NAME["reversed window"])
    require_exact(emulator, problem, pass_, kinds, arch=arch)


BIAS_KINDS = [kind for kind in KINDS if kind.rank == 1 and not kind.shares]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_gradient(dtype):
    problem = _PROBLEMS["pieces_of_8"].replace(dtype=dtype)
    dy = integer_data(problem).dy
    for kind, of_out in product(KINDS, BIAS_KINDS):
        view = kind.of(dy, problem.data_axes)
        out = of_out.of(np.zeros(problem.bias_shape, dy.dtype), (0,))
        emulator.conv_backprop_bias(view, out=out)
        exact = view.astype(np.float64).sum(axis=(0, 2, 3))
        assert (out.astype(np.float64) == exact).all(), f"{kind.name}, {of_out.name}"
