"""cuda-patch: its results in the emulator, and the layers that it is planned for."""

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels import parameters, patch
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from tests import agreement, emulator, launches
from tests.configurations import in_formats, integer_data, random_data

pytestmark = pytest.mark.costly

IMPL = "cuda-patch"
TAKEN = ("forward", "backprop_filter")


def test_all_bits_of_x_reach_the_filter_gradient():
    """dy is 1 for filter k at pixel k only, so that dw of filter k equals the window there."""
    problem = ConvProblem((1, 3, 8, 16), (8, 3, 3, 3), stride=(6, 2), dtype="float16")
    data = random_data(problem)
    data.dy[...] = 0
    pixels = np.arange(problem.output_sizes[1])
    data.dy[0, pixels, 0, pixels] = 1
    got = agreement.compute(emulator, "backprop_filter", problem, data, impl=IMPL)
    for k in pixels:
        assert (got[k] == data.x[0, :, :3, 2 * k : 2 * k + 3]).all()


# Layers in which the padding of gemm_k reads elements of x: next to the run in a word of either
# class, between taps, in words beyond the last run, and in pixels beyond the output.
SPECIAL_LAYERS = {
    "odd_run": ("NHWC", (1, 3, 13, 21), (5, 3, 3, 3), {"stride": 2}),
    "odd_runs_of_a_whole_step": ("NHWC", (1, 3, 13, 21), (5, 3, 4, 1), {"stride": 2}),
    "two_classes": ("NHWC", (1, 3, 12, 20), (5, 3, 3, 3), {"padding": 1}),
    "gaps": ("NCHW", (1, 1, 9, 30), (5, 1, 2, 3), {"dilation": 3}),
    "even_run_of_two_classes": ("NCHW", (1, 2, 14, 22), (5, 2, 2, 4), {"stride": (2, 3)}),
}


@pytest.mark.parametrize(
    ("pass_", "layer", "dtype"),
    [
        *(("forward", layer, "float16") for layer in SPECIAL_LAYERS),
        ("forward", "gaps", "float64"),
        ("backprop_filter", "two_classes", "float16"),
        ("backprop_filter", "two_classes", "float32"),
    ],
)
def test_nan_reaches_only_the_windows_that_read_it(pass_, layer, dtype):
    data_format, x_shape, w_shape, rules = SPECIAL_LAYERS[layer]
    problem = ConvProblem(x_shape, w_shape, dtype=dtype, **rules)
    problem = in_formats(problem, data_format, "OIHW")
    data = random_data(problem)
    # Few or no windows contain the corner.  Inner elements would reach all of dw.
    specials = {(-1, -1): np.nan}
    if pass_ == "forward":
        specials |= {(5, 9): np.nan, (3, -3): np.inf}
    for (h, w), special in specials.items():
        data.x[(0, 0, h, w) if data_format == "NCHW" else (0, h, w, 0)] = special
    got = agreement.compute(emulator, pass_, problem, data, impl=IMPL, precision="tf32")
    expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
    assert np.isfinite(expected).any()
    agreement.require_close(got, expected, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("pass_", TAKEN)
def test_patch_loads_have_the_planned_bank_conflicts(pass_):
    problem = ConvProblem((1, 3, 12, 32), (64, 3, 3, 3), padding=1, dtype="float16")
    device = emulator.convolutions.backend("sm_80").device
    rows = patch.rows_of(Request(problem, pass_, device))
    outcomes = []
    with emulator.settings(bank_conflicts=True, on_outcome=outcomes.append):
        agreement.require_exact(emulator, problem, impl=IMPL, passes=(pass_,))
    text = (emulator.build.KERNEL_DIRECTORY / "conv_patch.cu").read_text().split("\n")
    loads = [
        one
        for one in outcomes[0].bank_conflicts
        if one.file.endswith("conv_patch.cu")
        and "reinterpret_cast<const unsigned*>(at)" in text[one.line - 1]
    ]
    requests = sum(one.requests for one in loads)
    assert requests > 0
    assert sum(one.wavefronts for one in loads) == rows.conflicts * requests


def test_indices_beyond_32_bits_under_a_whole_tile(monkeypatch):
    """The output has one row, in a tile of eight rows; the last row would be beyond 2^31."""
    problem = ConvProblem((1, 1, 3, 45_000_000), (1, 1, 3, 3), stride=(30, 1), dtype="float16")
    monkeypatch.setattr(patch, "_tilings", lambda _: [patch.Tiling(8, 16, filters=16, warps_k=0)])
    assert parameters.index_type(problem, Strides.contiguous(problem)) == "int"
    launches.require_last_block(problem, IMPL)


def test_offsets_of_missing_filters_do_not_overflow():
    """A tile of 16 filters reaches beyond 3 filters that are far apart in memory."""
    problem = ConvProblem((1, 3, 8, 8), (3, 3, 3, 3), padding=1, dtype="float16")
    data, step = integer_data(problem), 2**28
    out = emulator.memory.lazy((problem.K * step,), np.float16, "y")
    y = np.lib.stride_tricks.as_strided(out, problem.output_shape, (0, 2 * step, 16, 2))
    x, w = emulator.memory.array(data.x, "x"), emulator.memory.array(data.w, "w")
    with emulator.convolutions.installed(emulator.convolutions.backend()):
        cupyconv.conv_forward(x, w, out=y, impl="cuda-patch", **problem.keywords)
    assert (y == cupyconv.conv_forward(data.x, data.w, impl="reference", **problem.keywords)).all()


def test_planner_uses_cuda_patch_only_for_first_layers():
    first = ConvProblem(
        (32, 224, 224, 3),
        (7, 7, 3, 64),
        stride=2,
        padding=3,
        data_format="NHWC",
        dtype="float16",
    )
    wider = first.replace(input_shape=(32, 112, 112, 64), filter_shape=(3, 3, 64, 64), stride=1)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a"):
        for data_format, filter_format in (("NHWC", "HWIO"), ("NCHW", "OIHW")):
            for problem, taken in ((first, True), (wider, False)):
                laid_out = in_formats(problem, data_format, filter_format)
                for pass_ in TAKEN:
                    planned = plan_pass(Request(laid_out, pass_, Device.of(arch))).implementation
                    assert (planned == IMPL) == taken, f"{pass_} of {laid_out} on {arch}: {planned}"
