"""cuda-hopper in TF32, and cuda-hopper-bf16x6, whose operands are split into planes of bfloat16."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.errors import ConvError
from cupyconv.kernels.hopper import layouts_of
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.problem import PASSES
from tests import emulator, views
from tests.agreement import compute, plan_with
from tests.configurations import HOPPER_CASES, all_formats, in_formats, integer_data, random_data
from tests.hopper import ARCH, BANDS, BY_PLANES, PLANES, SINGLE, last_axes, require_exact

pytestmark = pytest.mark.costly

BY_TF32 = {"impl": "cuda-hopper", "arch": ARCH, "precision": "tf32"}

FLOAT_CASES = ("one_tile", "everything_differs", "a_volume_with_phases", "groups", "pipeline_wraps")


BAND_CASES = (
    *("groups", "everything_differs", "a_row_stride_3", "rows_of_two_lines", "pipeline_wraps"),
    *("windows_wholly_in_the_padding", "a_matrix_product"),
)


RUNS = (
    ("tf32", SINGLE, PASSES[:2], FLOAT_CASES, last_axes),
    ("tf32", BANDS, PASSES[2:], BAND_CASES, all_formats),
    ("bf16x6", PLANES.tiles, PASSES, FLOAT_CASES, last_axes),
)
"""Precision, tiles in turn, passes, cases, and memory orders in turn.

wgmma needs tf32 operands that are contiguous along k; other operands are copied.  Filter gradients
in tf32 read copies of x and dy with images and bands of rows last.
"""


@pytest.mark.parametrize(
    ("number", "name", "tile", "precision", "passes", "orders"),
    [
        pytest.param(
            *(number, name, tile, precision, passes, orders),
            id=f"{precision}-{'-'.join(passes)}-{name}",
            marks=pytest.mark.thorough if precision == "bf16x6" else (),
        )
        for precision, tiles, passes, names, orders in RUNS
        for number, (name, tile) in enumerate(zip(names, cycle(tiles)))
    ],
)
def test_edge_cases_are_exact(number, name, tile, precision, passes, orders):
    every = orders(next(case.problem for case in HOPPER_CASES if case.name == name))
    impl = PLANES.name if precision == "bf16x6" else "cuda-hopper"
    choices = {"tile": tile, "splits": 1 + 2 * (number % 2)}
    with emulator.settings(emulator.SCHEDULES[number % 3]):
        require_exact(every[number % len(every)], impl, precision, passes, **choices)


@pytest.mark.parametrize(("decades", "splits"), [(0, 1), (4, 3)])
def test_errors_of_tf32_filter_gradients_are_bounded(decades, splits):
    """Operands are rounded to 10 fraction bits, and products are added in float32."""
    problem = ConvProblem((3, 12, 11, 9), (20, 12, 3, 2), padding=1, stride=(2, 1))
    data, numbers = random_data(problem), np.random.default_rng(1)
    x, dy = (
        (one * 10 ** numbers.uniform(-decades, decades, one.shape)).astype(np.float32)
        for one in (data.x, data.dy)
    )

    def gradient(api, x, dy, **how):
        result = api.conv_backprop_filter(x, problem.filter_shape, dy, **problem.keywords, **how)
        return result.astype(np.float64)

    made = plan_with(
        *(problem, "cuda-hopper", emulator.device(ARCH)),
        splits=splits,
        passes=PASSES[2:],
        precision="tf32",
    )
    got = gradient(emulator, x, dy, **{**BY_TF32, "impl": made})

    def rounded(array):
        fraction, exponent = np.frexp(array)
        return np.ldexp(np.rint(fraction * 2.0**11) / 2.0**11, exponent)

    x, dy = x.astype(np.float64), dy.astype(np.float64)
    exact = gradient(cupyconv, x, dy, impl="reference")
    of_rounded = gradient(cupyconv, rounded(x), rounded(dy), impl="reference")
    sizes = gradient(cupyconv, abs(x), abs(dy), impl="reference")
    of_sums = problem.N * prod(problem.output_sizes) * 2.0**-24
    assert (abs(got - of_rounded) <= of_sums * sizes).all()
    assert (abs(got - exact) <= ((1 + 2.0**-11) ** 2 - 1 + of_sums) * sizes).all()


def test_bands_may_contain_only_padding():
    problem = ConvProblem((2, 8, 1, 4), (8, 8, 1, 2), padding=((4, 0), (1, 0)), stride=3)
    require_exact(problem, precision="tf32", passes=PASSES[2:])


@pytest.mark.thorough
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_bands_of_any_view_are_exact(data_format):
    problem = in_formats(ConvProblem((3, 6, 6, 5), (4, 6, 3, 2), padding=1), data_format, "OHWI")
    for kind in views.KINDS:
        kinds = views.named(problem, "backprop_filter", kind.name)
        views.require_exact(emulator, problem, "backprop_filter", kinds, **BY_TF32)


@pytest.mark.parametrize(
    ("problem", "pairs"),
    [
        (ConvProblem((2, 16, 1018), (64, 16, 3), padding=1), 1018),
        (ConvProblem((1, 32, 788), (32, 16, 4), stride=3, groups=2), 131),
        (ConvProblem((8, 5, 12, 9), (10, 5, 3, 3)), 80),
        (ConvProblem((8, 5, 12, 9), (10, 5, 3, 3), stride=(1, 3)), 40),
    ],
    ids=str,
)
def test_bands_fill_lines(problem, pairs):
    """More pairs of an image and a band are copied if tiles then multiply fewer zeros."""
    layout = layouts_of(Request(problem, "backprop_filter", Device.of(ARCH), "tf32"))[1]
    assert layout.problem.input_shape[-1] == pairs
    require_exact(problem, precision="tf32", passes=PASSES[2:])


@pytest.mark.parametrize("rows", [6, 262])
def test_bands_read_no_other_values(rows):
    """A NaN of x or dy reaches only the results that read it, and infinities remain infinite."""
    problem = ConvProblem((3, 8, rows, 5), (40, 8, 3, 2), padding=1, stride=(1, 2))
    data = integer_data(problem)
    x, dy = data.x.astype(np.float32), data.dy.astype(np.float32)
    x[0, 1, 5, 0], x[2, 2, 2, 3], dy[1, 3, 2, 1] = np.nan, np.inf, np.nan
    data = replace(data, x=x, dy=dy)
    got, expected = (
        compute(api, "backprop_filter", problem, data, **how)
        for api, how in ((emulator, BY_TF32), (cupyconv, {"impl": "reference"}))
    )
    np.testing.assert_array_equal(got, expected)
    assert 0 < np.isnan(got).sum() < got.size
    assert np.isinf(got).any()


def test_planes_take_every_tile():
    assert len(FLOAT_CASES) >= len(PLANES.tiles)


def test_planes_keep_all_bits_of_float32():
    """One operand has 20-bit integers, the other -1, 0 and 1, so that every plane is needed."""
    problem = ConvProblem(
        (1, 5, 6, 8), (8, 1, 1, 8), data_format="NHWC", filter_format="OHWI"
    )  # fmt: skip
    generator = np.random.default_rng(0)
    arguments = problem.keywords
    for long, short in (("x", "w"), ("w", "x")):
        shapes = {"x": problem.input_shape, "w": problem.filter_shape}
        tensors = {
            long: generator.integers(-(2**20), 2**20, shapes[long]).astype(np.float32),
            short: generator.integers(-1, 2, shapes[short]).astype(np.float32),
        }
        got = emulator.conv_forward(**tensors, **BY_PLANES, **arguments)
        assert (got == cupyconv.conv_forward(**tensors, impl="reference", **arguments)).all()


def test_planes_have_no_larger_error_than_float32():
    """Errors against float64 are relative to the sum of magnitudes of 576 terms."""
    problem = ConvProblem(
        (1, 9, 9, 64), (64, 3, 3, 64), padding=1, data_format="NHWC", filter_format="OHWI"
    )  # fmt: skip
    data = random_data(problem)
    arguments = problem.keywords

    def forward(api, x, w, **more):
        return api.conv_forward(x, w, **arguments, **more).astype(np.float64)

    wide = (data.x.astype(np.float64), data.w.astype(np.float64))
    exact = forward(cupyconv, *wide, impl="reference")
    scale = forward(cupyconv, *map(np.abs, wide), impl="reference")
    planes = forward(emulator, data.x, data.w, **BY_PLANES)
    plain = forward(emulator, data.x, data.w, impl="cuda-generic", arch=ARCH)
    errors = [np.abs(got - exact) / scale for got in (planes, plain)]
    assert errors[0].max() <= errors[1].max()
    assert np.sqrt((errors[0] ** 2).mean()) <= np.sqrt((errors[1] ** 2).mean())


def test_planes_handle_extreme_values():
    """Huge, subnormal and non-finite values behave as the header of conv_planes.cu states."""
    problem = ConvProblem(
        (1, 1, 8, 8), (8, 1, 1, 8), data_format="NHWC", filter_format="OHWI"
    )  # fmt: skip
    largest, tiny = np.finfo(np.float32).max, np.float32(2.0**-133)
    x = np.zeros(problem.input_shape, np.float32)
    x[0, 0, :4, 0] = largest, -largest, tiny, 2.0**-140
    x[0, 0, 4:7, 0] = np.nan, np.inf, -np.inf
    w = np.zeros(problem.filter_shape, np.float32)
    w[:, 0, 0, 0] = 1
    y = emulator.conv_forward(x, w, **BY_PLANES, **problem.keywords)[0, 0, :, 0]
    assert (y[:3] == (largest, -largest, tiny)).all()
    assert abs(y[3]) <= tiny
    assert np.isnan(y[4])
    assert not np.isfinite(y[5:7]).any()
    assert y[7] == 0


def test_planes_are_planned_only_for_bf16x6():
    """Splitting into planes is not exact, so it needs precision="bf16x6"."""
    problem, device = last_axes(HOPPER_CASES[0].problem)[0], Device.of(ARCH)
    for pass_ in PASSES:
        for precision in ("ieee", "tf32"):
            planned = plan_pass(Request(problem, pass_, device, precision))
            assert planned.implementation != PLANES.name
            with pytest.raises(ConvError, match="which only precision='bf16x6' permits"):
                plan_pass(Request(problem, pass_, device, precision), PLANES.name)
        asked = Request(problem, pass_, device, "bf16x6")
        assert PLANES.refuses(asked) is None
        assert "workspace" in PLANES.refuses(replace(asked, workspace_limit=1000))
