"""cuda-toeplitz: its results in the emulator, and the layers that it is planned for."""

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.problem import PASSES
from tests import agreement, emulator
from tests.agreement import fits
from tests.configurations import in_formats, random_data

pytestmark = pytest.mark.costly

IMPL = "cuda-toeplitz"


def require_exact(problem, arch="sm_80"):
    """Require exact results of every pass, in a schedule that depends on the problem's size."""
    assert fits(problem, IMPL, arch) == PASSES
    with emulator.settings(emulator.SCHEDULES[sum(problem.input_shape) % 3]):
        agreement.require_exact(emulator, problem, impl=IMPL, arch=arch)


@pytest.mark.thorough
@pytest.mark.parametrize("taps", [1, 2, 9, 10, 17, 18, 64])
def test_band_widths_are_exact(taps):
    """The widths need one more block of columns or product per strip; the last is the maximum."""
    require_exact(
        ConvProblem(
            (1, 2, 19, 11), (2, 1, 2, taps), groups=2, padding=(1, taps - 1), dtype="float16"
        )
    )


PLAIN_LAYERS = {
    "several_blocks_of_rows": ((2, 3, 40, 36), (3, 1, 2, 5)),
    "several_blocks_of_columns": ((1, 3, 12, 300), (3, 1, 2, 5)),
    "more_taps_than_lanes": ((1, 3, 12, 80), (3, 1, 2, 64)),
}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("layer", PLAIN_LAYERS)
def test_nan_reaches_only_the_windows_that_read_it(layer, special, pass_):
    """A NaN outside a window meets zeros of the Toeplitz matrix and must not reach the result."""
    problem = ConvProblem(*PLAIN_LAYERS[layer], groups=3, dtype="float16")
    data = random_data(problem)
    data.x[0, 1, 9, 11] = special
    data.x[0, 2, 4, -1] = special  # no window has its first tap here
    data.dy[0, 1, 9, 11] = special
    if pass_ == "backprop_filter":
        data.dy[...] = random_data(problem).dy
    got = agreement.compute(emulator, pass_, problem, data, impl=IMPL)
    expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
    assert 0 < np.isfinite(expected).sum() < expected.size
    agreement.require_close(got, expected, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("column", [8, 15])
@pytest.mark.parametrize("formats", [("NCHW", "OIHW"), ("NHWC", "OHWI")], ids="-".join)
def test_nan_is_propagated_from_every_column_of_a_vector(formats, column):
    """The NaN is in the first or last of eight columns, in a block with two tiles of rows."""
    problem = ConvProblem((1, 8, 20, 24), (8, 1, 3, 5), groups=8, dtype="float16")
    problem = in_formats(problem, *formats)
    data = random_data(problem)
    np.moveaxis(data.x, problem.data_axes[1], 1)[0, 3, 9, column] = np.nan
    got = agreement.compute(emulator, "forward", problem, data, impl=IMPL)
    expected = agreement.compute(cupyconv, "forward", problem, data, impl="reference")
    assert 0 < np.isnan(expected).sum() < expected.size
    agreement.require_close(got, expected, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize(
    ("arch", "size", "taps", "taken"),
    [
        ("sm_90a", 56, 7, False),  # cuda-direct takes half the time on an H200 (measured)
        ("sm_90a", 56, 31, True),
        ("sm_90a", 56, 3, False),
        ("sm_80", 7, 3, False),
        ("sm_90a", 7, 3, False),
    ],
)
def test_planner_uses_cuda_toeplitz_for_large_filters(arch, size, taps, taken):
    """Large depthwise filters are planned for cuda-toeplitz, and small filters are not."""
    channels = 128 if size > 7 else 960
    problem = ConvProblem(
        (32, size, size, channels),
        (taps, taps, 1, channels),
        padding="same",
        groups=channels,
        data_format="NHWC",
        dtype="bfloat16",
    )
    planned = plan_pass(Request(problem, "forward", Device.of(arch))).implementation
    assert (planned == IMPL) == taken, planned
