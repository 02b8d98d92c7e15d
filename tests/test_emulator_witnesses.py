"""CUTLASS's kernels on the emulator: right to the last bit, and nothing reported."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.problem import PASSES
from tests import emulator
from tests.emulator import Outcome, account, memory, settings, witnesses
from tests.emulator.witnesses import cutlass, cutlass_sm90

pytestmark = pytest.mark.slow

SCHEDULES = pytest.mark.parametrize(
    "schedule", emulator.SCHEDULES, ids=lambda one: f"{one.policy}-{one.timing}"
)


@pytest.fixture(autouse=True)
def _needs_packages() -> None:
    try:
        cutlass.gemm_kernel()
    except witnesses.MissingError as error:
        pytest.skip(str(error))


def whole_numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-2, 3, shape).astype(np.float16)


def product(size: tuple[int, int, int], schedule: emulator.Settings) -> Outcome:
    """Runs the GEMM and holds it to NumPy's result."""
    m, n, k = size
    a, b = whole_numbers(m, k), whole_numbers(n, k)
    c = memory.empty((m, n), np.float16, "c")
    arguments = (memory.array(a, "a"), memory.array(b, "b"), c, *map(np.int32, size))
    kernel = cutlass.gemm_kernel()
    with settings(schedule, raise_reports=False):
        outcome = kernel(
            cutlass.gemm_grid(m, n), (cutlass.THREADS,), arguments, cutlass.SHARED_BYTES
        )
    memory.check_written(c)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(c, exact.astype(np.float16))
    return outcome


@SCHEDULES
@pytest.mark.parametrize("size", [(64, 64, 32), (128, 64, 96), (64, 192, 160)])
def test_gemm_of_sm_80(size: tuple[int, int, int], schedule: emulator.Settings) -> None:
    assert product(size, schedule).reports == []


@SCHEDULES
@pytest.mark.parametrize("size", [(64, 192, 40), (136, 72, 160)])
def test_gemm_that_loads_what_it_does_not_use(
    size: tuple[int, int, int], schedule: emulator.Settings
) -> None:
    """CUTLASS leaves shared memory as it is where a tile is past the matrix.

    It multiplies rows and columns that are never stored, and at the end loads the fragments of a
    step that does not come.  That nothing of them gets elsewhere, the numbers show: shared memory
    that nothing has written holds NaN here.
    """
    reports = product(size, schedule).reports
    assert reports
    for one in reports:
        assert one.kind == "uninitialised-read"
        assert one.file.endswith("cutlass/arch/memory_sm75.h")  # ldmatrix


# N, H, W, C; K, R = S; padding, stride, dilation.
LAYERS = {
    "3x3": ((1, 9, 8, 32), (64, 3), (1, 1, 1)),
    "1x1": ((2, 8, 8, 64), (64, 1), (0, 1, 1)),
    "3x3-stride-2": ((1, 11, 10, 32), (64, 3), (1, 2, 1)),
    "3x3-dilation-2": ((1, 10, 9, 32), (64, 3), (2, 1, 2)),
    "ragged": ((1, 7, 9, 40), (72, 3), (1, 1, 1)),
    "no-padding": ((1, 9, 9, 32), (64, 3), (0, 1, 1)),
}
CASES = [
    (layer, pass_)
    for layer, (_, _, (_, stride, _)) in LAYERS.items()
    for pass_ in PASSES
    if stride == 1 or pass_ != "backprop_input"  # which is an instance of its own
]


@SCHEDULES
@pytest.mark.parametrize(("layer", "pass_"), CASES)
def test_convolution_of_sm_80(layer: str, pass_: str, schedule: emulator.Settings) -> None:
    shape, (k, side), (padding, stride, dilation) = LAYERS[layer]
    rules = {
        "padding": padding,
        "stride": stride,
        "dilation": dilation,
        "data_format": "NHWC",
        "filter_format": "OHWI",
    }
    problem = ConvProblem(shape, (k, side, side, shape[-1]), dtype="float16", **rules)
    x, w = whole_numbers(*shape), whole_numbers(*problem.filter_shape)
    dy = whole_numbers(*problem.output_shape)
    given, wanted = {
        "forward": lambda: ({"x": x, "w": w}, cupyconv.conv_forward(x, w, **rules)),
        "backprop_input": lambda: (
            {"y": dy, "w": w},
            cupyconv.conv_backprop_input(shape, w, dy, **rules),
        ),
        "backprop_filter": lambda: (
            {"y": dy, "x": x},
            cupyconv.conv_backprop_filter(x, w.shape, dy, **rules),
        ),
    }[pass_]()
    launch = cutlass.convolution(problem, pass_)
    *operands, _ = launch.roles
    result = memory.empty(wanted.shape, np.float16, "result")
    arrays = [memory.array(given[role], role) for role in operands]
    kernel = cutlass.convolution_kernel(pass_)
    with settings(schedule):
        arguments = (*arrays, result, *launch.numbers)
        kernel(launch.grid, (cutlass.THREADS,), arguments, launch.shared_bytes)
    memory.check_written(result)
    np.testing.assert_array_equal(result, wanted)


# N, H, W, C, K, R, S, padding, stride, dilation.
SIZES_OF_SM_90 = [
    (1, 8, 8, 64, 128, 3, 3, 1, 1, 1),
    (2, 9, 10, 64, 64, 3, 3, 1, 1, 1),
    (1, 11, 12, 128, 128, 3, 3, 1, 2, 1),
    (1, 10, 10, 64, 128, 3, 3, 2, 1, 2),
]
# Kind, and the files of the two accesses: CUTLASS relies on what the checker does not grant.
ARGUED = {
    # A stage is handed back, and at the end reused, by one thread that has waited for its own
    # warp's products; of the other warps' nothing tells it.  So the chip ends a product of the
    # warpgroup for all of its warps at once.
    ("race", "copy_sm90_tma.hpp", "mma_sm90_gmma.hpp"),
    ("race", "copy_sm90.hpp", "mma_sm90_gmma.hpp"),
    # All lanes of a warp store the same box: the same bytes to the same place.
    ("race", "copy_sm90_tma.hpp", "copy_sm90_tma.hpp"),
}


@SCHEDULES
@pytest.mark.parametrize(
    ("pass_", "sizes"),
    [
        (pass_, sizes)
        for pass_ in cutlass_sm90.PASSES
        for sizes in SIZES_OF_SM_90
        if pass_ == "forward" or sizes[-2] == 1  # it has no strided input gradient
    ],
    ids=lambda one: one if isinstance(one, str) else "x".join(map(str, one)),
)
def test_convolution_of_sm_90(
    pass_: str, sizes: tuple[int, ...], schedule: emulator.Settings
) -> None:
    n, h, w, c, k, r, s, padding, stride, dilation = sizes
    rules = {
        "padding": padding,
        "stride": stride,
        "dilation": dilation,
        "data_format": "NHWC",
        "filter_format": "OHWI",
    }
    x, filters = whole_numbers(n, h, w, c), whole_numbers(k, r, s, c)
    first, wanted = x, cupyconv.conv_forward(x, filters, **rules)
    if pass_ == "backprop_input":
        first = whole_numbers(*wanted.shape)
        wanted = cupyconv.conv_backprop_input(x.shape, filters, first, **rules)
    result = memory.empty(wanted.shape, np.float16, "result")
    operands = (memory.array(first, "a"), memory.array(filters, "b"))
    with settings(schedule, raise_reports=False):
        outcome = cutlass_sm90.Convolution(pass_).run(sizes, *operands, result)
    memory.check_written(result)
    np.testing.assert_array_equal(result, wanted)
    for one in outcome.reports:
        other = re.search(r" at (\S+):\d+, with no order", one.text)
        assert other is not None, one
        assert (one.kind, Path(one.file).name, other[1]) in ARGUED, one


def test_account_of_a_witness() -> None:
    rules = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": "float16"}
    problem = ConvProblem((1, 8, 8, 64), (64, 3, 3, 64), padding=1, **rules)
    one = account.account_of_witness(problem, "forward", blocks=None)
    assert (one.blocks, one.reports) == (1, 0)
    assert one.work.by_kind()["tensor core"].by_warp == 64 * 64 * 9 * 64 // (16 * 8 * 16)
    sectors = {row.tensor: row.distinct for row in one.work.sectors}
    assert sectors == {"x": 256, "w": 2304, "y": 256}
