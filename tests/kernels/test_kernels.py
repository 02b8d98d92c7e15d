"""Kernel families in the emulator: exact on integers, in three schedules."""

from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.bench import suites
from cupyconv.kernels import columns
from cupyconv.kernels.bias import prepare_bias
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, PASSES
from tests import agreement, emulator, launches
from tests.agreement import fits, plan_with_tiling, plan_without_copies, to_tf32
from tests.configurations import (
    CASES,
    DIRECT_CASES,
    DTYPES,
    FAMILY_CASES,
    PATCH_CASES,
    TOEPLITZ_CASES,
    Data,
    all_formats,
    in_formats,
    integer_data,
    random_data,
)
from tests.emulator import convolutions, memory
from tests.emulator.cases import require_activations
from tests.families import FAMILY_LAYERS

pytestmark = pytest.mark.costly

SOME_CASES = (*CASES[::4], *FAMILY_CASES[::3])
SCHEDULES = dict(zip(("first-in", "reverse", "random"), emulator.SCHEDULES, strict=True))


def require_exact(problem, impl, arch="sm_80", precision="tf32", plan=None, **more):
    """Require exact results of the passes that a family supports, and return the passes.

    Without a plan, cuda-gather reads operands in place; test_arranged.py tests copies.
    """
    passes = fits(problem, impl, arch, precision)
    if plan is None and impl == "cuda-gather":
        plan = plan_without_copies(problem, impl, emulator.device(arch), precision=precision)
    how = {"impl": plan or impl, "arch": arch, "precision": precision}
    agreement.require_exact(emulator, problem, passes=passes, **how, **more)
    return passes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_cuda_generic_is_exact_on_every_case(dtype, schedule):
    with emulator.settings(SCHEDULES[schedule]):
        for case in CASES:
            require_exact(case.problem.replace(dtype=dtype), "cuda-generic")


def test_cuda_generic_is_exact_in_every_format():
    for case in CASES[::3]:
        for problem in all_formats(case.problem):
            require_exact(problem, "cuda-generic")


# Family, dtype, step between cases, architecture, precision; further dtypes test fewer cases.
FAMILY_DTYPES = [
    ("cuda-gather", "float16", 1, "sm_80", "ieee"),
    ("cuda-gather", "bfloat16", 4, "sm_80", "ieee"),
    ("cuda-gather", "float32", 6, "sm_80", "tf32"),
    ("cuda-gather", "float32", 2, "sm_80", "ieee"),
    ("cuda-gather", "float64", 9, "sm_80", "ieee"),
    ("cuda-gather", "float64", 8, "sm_86", "ieee"),
    ("cuda-direct", "float16", 1, "sm_80", "ieee"),
    ("cuda-direct", "float32", 3, "sm_80", "ieee"),
]


FAMILY_RUNS = [
    pytest.param(
        impl,
        case.problem.replace(dtype=dtype),
        arch,
        precision,
        id=f"{impl}-{dtype}-{arch}-{precision}-{case.name}",
    )
    for impl, dtype, every, arch, precision in FAMILY_DTYPES
    for case in FAMILY_CASES[::every]
    if fits(case.problem.replace(dtype=dtype), impl, arch, precision)
]


@pytest.mark.parametrize(
    ("number", "impl", "problem", "arch", "precision"),
    [pytest.param(number, *run.values, id=run.id) for number, run in enumerate(FAMILY_RUNS)],
)
def test_families_are_exact_on_edge_cases(number, impl, problem, arch, precision):
    """Each case is run in one of six formats, in turn."""
    require_exact_in_formats(problem, impl, arch, precision, slice(number % 6, None, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "problem", "arch", "precision"), FAMILY_RUNS)
def test_families_are_exact_in_every_format(impl, problem, arch, precision):
    require_exact_in_formats(problem, impl, arch, precision, slice(None))


def require_exact_in_formats(problem, impl, arch, precision, which):
    for number, formatted in enumerate(all_formats(problem)[which]):
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            require_exact(formatted, impl, arch, precision)


@pytest.mark.thorough
@pytest.mark.parametrize("impl", ["cuda-gather", "cuda-direct"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_families_are_exact_on_every_case(impl, schedule):
    ran = 0
    with emulator.settings(SCHEDULES[schedule]):
        for case in CASES:
            ran += len(require_exact(case.problem.replace(dtype="float16"), impl))
    assert ran >= 12


@pytest.mark.parametrize(
    "number", range(len(DIRECT_CASES)), ids=[case.name for case in DIRECT_CASES]
)
def test_cuda_direct_is_exact_with_other_tilings(number):
    """Each case is run in one of six formats, with a tiling that the planner would not choose."""
    problem = DIRECT_CASES[number].problem.replace(dtype=("float32", "float16")[number % 2])
    problem = all_formats(problem)[number % 6]
    plan = plan_with_tiling(problem, "cuda-direct", number // 3 * 5, emulator.device("sm_80"))
    with emulator.settings(emulator.SCHEDULES[number % 3]):
        require_exact(problem, "cuda-direct", plan=plan)


@pytest.mark.parametrize(
    ("input_sizes", "filter_sizes", "rules"),
    [
        ((4, 5), (3, 3), {"padding": ((1, 1), (0, 9))}),
        ((9, 5), (3, 3), {}),
        ((3, 9), (1, 3), {"stride": (1, 2), "padding": ((0, 0), (1, 1))}),
        ((3, 2), (1, 5), {"stride": (1, 2), "padding": ((0, 0), (1, 9))}),
    ],
    ids=["wholly in the padding", "tall", "strided", "short"],
)
def test_cuda_direct_is_exact_beyond_the_source(input_sizes, filter_sizes, rules):
    """Some columns of a tile are in the source for some tiles only."""
    shapes = (2, *input_sizes, 8), (*filter_sizes, 1, 8)
    formats = {"data_format": "NHWC", "filter_format": "HWIO"}
    problem = ConvProblem(*shapes, groups=8, dtype="float16", **rules, **formats)
    assert require_exact(problem, "cuda-direct") == PASSES


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_cuda_direct_is_exact_in_other_dtypes(dtype):
    for case in FAMILY_CASES:
        if case.problem.groups > 1:
            require_exact(case.problem.replace(dtype=dtype), "cuda-direct")


OTHER_CASES = [
    pytest.param(impl, number, case.problem, id=f"{impl}-{case.name}")
    for impl in ("cuda-patch", "cuda-toeplitz")
    for number, case in enumerate(FAMILY_LAYERS[impl].edge_cases)
    if case.name not in {name for name, *_ in FAMILY_LAYERS[impl].emulated}
]
"""Edge cases that tests/emulator/cases.py lacks."""


@pytest.mark.parametrize(("impl", "number", "problem"), OTHER_CASES)
def test_other_edge_cases_are_exact(impl, number, problem):
    """Each case is run in one of six formats and one of two dtypes."""
    formats = all_formats(problem.replace(dtype=("float16", "bfloat16")[number % 2]))
    with emulator.settings(emulator.SCHEDULES[number % 3]):
        passes = require_exact(formats[number * 5 % len(formats)], impl)
    assert passes == FAMILY_LAYERS[impl].passes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["cuda-patch", "cuda-toeplitz"])
def test_any_case_is_exact_in_every_format(impl, dtype):
    for case in (*CASES, *FAMILY_CASES, *FAMILY_LAYERS[impl].edge_cases):
        for problem in all_formats(case.problem.replace(dtype=dtype)):
            require_exact(problem, impl)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "cases"),
    [
        ("cuda-gather", FAMILY_CASES[:8]),
        ("cuda-patch", PATCH_CASES[1:2]),
        ("cuda-toeplitz", TOEPLITZ_CASES[:1]),
    ],
)
def test_families_are_exact_without_asynchronous_copies(impl, cases):
    for case in cases:
        for problem in all_formats(case.problem.replace(dtype="float16"))[::3]:
            assert require_exact(problem, impl, arch="sm_75")


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["one term", "four terms"])
@pytest.mark.parametrize(
    ("input_shape", "filter_shape", "rules"),
    [
        ((2, 3, 9, 11), (16, 3, 3, 7), {"padding": 3}),
        ((1, 5, 8, 17), (8, 5, 2, 6), {"padding": 4, "dilation": 2}),
        ((1, 1, 7, 30), (12, 1, 5, 9), {"stride": (1, 2), "padding": 2}),
    ],
    ids=["dense", "dilated", "strided"],
)
def test_cuda_columns_is_exact_with_terms_loaded_together(
    input_shape, filter_shape, rules, few, monkeypatch
):
    monkeypatch.setattr(columns, "FEW_BLOCKS", few)
    problem = ConvProblem(input_shape, filter_shape, dtype="float16", **rules)
    assert require_exact(problem, "cuda-columns") == PASSES[:2]


LAST = {"data_format": "NHWC", "filter_format": "OHWI", "padding": 1}
DEPTHWISE = ConvProblem((2, 12, 12, 32), (32, 7, 7, 1), groups=32, **LAST)
ADDED = {
    "cuda-gather": ConvProblem((1, 8, 8, 16), (16, 3, 3, 16), dtype="float16", **LAST),
    "cuda-direct": DEPTHWISE,
    "cuda-toeplitz": DEPTHWISE.replace(dtype="float16"),
    "cuda-patch": ConvProblem((2, 20, 20, 3), (32, 3, 3, 3), dtype="bfloat16", stride=2, **LAST),
}


@pytest.mark.parametrize("impl", ADDED)
def test_reduction_adds_parts_in_order(impl):
    """Sums are bitwise equal to sequential sums, although each addition rounds."""
    problem, device, rng = ADDED[impl], Device.of("sm_80"), np.random.default_rng(0)
    strides = Strides.contiguous(problem)
    chosen = plan_pass(Request(problem, "backprop_filter", device, strides=strides), impl)
    for parts in (2, 15, 16, 17, 40):
        split = replace(chosen, splits=parts, view="", copies=())
        *_, last = launches.prepare(split, problem, strides, device)
        given = rng.standard_normal((parts, prod(problem.filter_shape))).astype("float32")
        dw = memory.empty(problem.filter_shape, arrays.numpy_dtype(problem.dtype), "w")
        named = {"workspace": memory.array(given, "workspace"), "w": dw}
        arguments = [
            named.get(one, np.uint64(0)) if isinstance(one, str) else one for one in last.arguments
        ]
        kernel = convolutions.EmulatorRuntime("sm_80").kernel(last)
        kernel(last.grid, last.block, arguments)
        expected = reduce(np.add, given).astype(dw.dtype)
        assert sorted(dw.ravel().tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("formats", [("NHWC", "OHWI"), ("NCHW", "OIHW")], ids="-".join)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float16", "ieee"), ("float32", "tf32"), ("float32", "ieee"), ("float64", "ieee")],
)
def test_cuda_gather_stages_have_no_bank_conflicts(dtype, precision, formats):
    """Stores to the stages and loads from them have no conflicts, as cuda/include/multistage.cuh
    states."""
    problem = ConvProblem((1, 32, 6, 6), (64, 32, 3, 3), padding=1, dtype=dtype)
    outcomes = []
    with emulator.settings(bank_conflicts=True, on_outcome=outcomes.append):
        require_exact(in_formats(problem, *formats), "cuda-gather", precision=precision)
    traffic = [one for outcome in outcomes for one in outcome.bank_conflicts]
    of_stages = [one for one in traffic if one.file.endswith("multistage.cuh")]
    assert len(of_stages) >= 6
    assert [one for one in of_stages if one.wavefronts > one.ideal] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "problem", "bound"),
    [
        ("cuda-gather", ConvProblem((2, 24, 6, 7), (16, 24, 3, 3), padding=1), 1e-4),
        ("cuda-patch", in_formats(PATCH_CASES[1].problem, "NHWC", "HWIO"), 2e-4),
    ],
    ids=["cuda-gather", "cuda-patch"],
)
def test_float32_is_rounded_to_tf32_only_where_permitted(impl, problem, bound):
    """Operands are rounded to 10 bits of fraction, ties away from zero; sums are not rounded."""
    data = random_data(problem)
    tie = np.float32(1 + 2**-11)  # halfway between two tf32 numbers
    np.moveaxis(data.x, problem.data_axes[1], 1)[0, :, 0, 0] = tie
    np.moveaxis(data.w, problem.filter_axes[:2], (0, 1))[3, :, 1, 1] = -tie
    rounded = Data(*(to_tf32(array) for array in (data.x, data.w, data.dy)), data.bias)
    for pass_ in fits(problem, impl, "sm_80", "tf32"):
        got = agreement.compute(emulator, pass_, problem, data, impl=impl, precision="tf32")
        expected = agreement.compute(cupyconv, pass_, problem, rounded, impl="reference")
        assert np.abs(got - expected).max() < bound
        exact = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
        assert np.abs(got - exact).max() > 1e-3
        if impl == "cuda-patch":
            continue  # refuses float32 without this permission
        for device in ("sm_80", "sm_90a"):
            tile = plan_pass(Request(problem, pass_, Device.of(device))).tile
            assert tile is None or not tile.defines.get("TENSOR_CORES")
        plain = agreement.compute(emulator, pass_, problem, data, impl="cuda-gather")
        assert np.abs(plain - exact).max() < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_planned_kernels_are_exact(arch, dtype):
    for case in FAMILY_CASES[DTYPES.index(dtype) :: 4]:
        agreement.require_exact(emulator, case.problem.replace(dtype=dtype), arch=arch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "cases"),
    [
        *((f"cuda-{name}", SOME_CASES) for name in ("generic", "gather", "direct")),
        ("cuda-patch", PATCH_CASES[1:2]),
        ("cuda-toeplitz", TOEPLITZ_CASES[:1]),
    ],
)
def test_64_bit_indices_are_exact(impl, cases, monkeypatch):
    monkeypatch.setattr("cupyconv.kernels.parameters.index_type", lambda *_: "long long")
    assert sum(len(require_exact(case.problem.replace(dtype="float16"), impl)) for case in cases)


@pytest.mark.parametrize("impl", [family for family in FAMILIES if family.startswith("cuda")])
def test_bias_and_activations_are_fused(impl):
    require_activations(impl)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient_is_exact(dtype):
    for case in CASES:
        problem = case.problem.replace(dtype=dtype)
        dy = integer_data(problem).dy
        got = emulator.conv_backprop_bias(dy, data_format=problem.data_format)
        expected = cupyconv.conv_backprop_bias(dy, data_format=problem.data_format)
        assert (got == expected).all()


# One or several chunks; vectors of channels or pixels, or single elements.
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((4, 2, 100, 100), "NCHW"),
        ((3, 2, 5, 151), "NCHW"),
        ((40, 33, 30, 24), "NHWC"),
        ((2, 9, 11, 5), "NHWC"),
        ((2, 3, 4, 5, 40), "NDHWC"),
    ],
)
def test_bias_gradient_is_exact_in_vectors_and_chunks(shape, layout, dtype):
    dy = np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)
    axes = tuple(axis for axis, letter in enumerate(layout) if letter != "C")
    expected = dy.astype(np.float64).sum(axis=axes)
    assert (emulator.conv_backprop_bias(dy, data_format=layout) == expected).all()
    out = np.zeros(expected.shape, dtype)[::-1]
    emulator.conv_backprop_bias(np.flip(dy), data_format=layout, out=out)
    assert (out == expected[::-1]).all()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_bias_gradient_moves_little_more_than_dy(architecture, data_format):
    """The sums of chunks, which are written and read once, add at most 30% of traffic."""
    for layer in suites.listed():
        if layer.problem.spatial_rank != 2:
            continue
        dy_shape = in_formats(layer.problem, data_format, "OIHW").output_shape
        channels = layer.problem.K
        problem = ConvProblem(
            dy_shape, (channels, 1, 1, 1), groups=channels, data_format=data_format,
            filter_format="OIHW",
        )  # fmt: skip
        _, workspace = prepare_bias(problem, Strides.contiguous(problem), Device.of(architecture))
        assert 2 * workspace <= 0.3 * prod(dy_shape) * 4, layer


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("impl", ["cuda-generic", "cuda-gather", "cuda-direct", "cuda-toeplitz"])
def test_nan_in_the_last_pixel_reaches_only_the_last_tap(impl, data_format):
    """Tiles that extend beyond the output's last row and column read the NaN for other taps."""
    problem = ConvProblem((1, 4, 13, 13), (4, 1, 3, 3), groups=4, dtype="float16")
    problem = in_formats(problem, data_format, "OIHW")
    data = integer_data(problem)
    pixels = data.x if data_format == "NCHW" else data.x.transpose(0, 3, 1, 2)
    pixels[:, :, -1, -1] = np.nan
    if impl == "cuda-direct":
        impl = plan_with_tiling(problem, "cuda-direct", 0, emulator.device("sm_80"))
    got = agreement.compute(emulator, "backprop_filter", problem, data, impl=impl)
    expected = agreement.compute(cupyconv, "backprop_filter", problem, data, impl="reference")
    assert np.isnan(expected).sum() < expected.size
    assert np.array_equal(got, expected, equal_nan=True)


FAR = ConvProblem((1, 1, 65_600, 65_600), (1, 1, 3, 3), dtype="float16")
FAR_LAST = ConvProblem((1, 32_000, 33_000, 8), (8, 3, 3, 8), data_format="NHWC",
                       filter_format="OHWI", dtype="float16")  # fmt: skip


@pytest.mark.parametrize(
    ("impl", "problem", "arch"),
    [
        *((f"cuda-{name}", FAR, "sm_80") for name in ("generic", "gather", "direct", "toeplitz")),
        ("cuda-patch", FAR, "sm_80"),
        ("cuda-hopper", FAR_LAST, "sm_90"),
    ],
    ids=lambda one: one if str(one).startswith("cuda") else "",
)
def test_last_block_of_a_tensor_beyond_32_bits(impl, problem, arch):
    """x and y have more than 2^32 elements."""
    assert problem.needs_64bit_indexing
    launches.require_last_block(problem, impl, arch)
