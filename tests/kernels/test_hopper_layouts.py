"""Memory orders of the Hopper kernels: what is read in place, what is copied, and the workspace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels.copies import ROLES_OF
from cupyconv.kernels.hopper import is_planar, layout_of, layouts
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.problem import PASSES
from tests import emulator
from tests.agreement import compute, plan_with
from tests.configurations import HOPPER_CASES, all_formats, in_formats, integer_data
from tests.hopper import (
    ARCH,
    FAMILY,
    PLANAR,
    WIDE,
    last_axes,
    require_exact,
)
from tests.views import BY_NAME, named, strides_of
from tests.views import require_exact as require_exact_on_views

pytestmark = pytest.mark.costly


def test_tensors_with_gaps_between_pixels_are_exact():
    """x and y are some channels of wider tensors, so that TMA cannot store C."""
    problem = last_axes(HOPPER_CASES[0].problem.replace(dtype="float16"))[0]
    data = integer_data(problem)
    wide = np.zeros((*data.x.shape[:2], 2 * data.x.shape[2], data.x.shape[3] + 8), np.float16)
    wide[:, :, ::2, : data.x.shape[3]] = data.x
    x = wide[:, :, ::2, : data.x.shape[3]]
    y = np.zeros((*problem.output_shape[:-1], 2 * problem.output_shape[-1]), np.float16)
    arguments = problem.keywords
    expected = cupyconv.conv_forward(data.x, data.w, impl="reference", **arguments)
    out = y[..., : problem.output_shape[-1]]
    emulator.conv_forward(x, data.w, out=out, impl="cuda-hopper", arch=ARCH, **arguments)
    assert (out == expected).all()
    assert not y[..., problem.output_shape[-1] :].any()


@pytest.mark.thorough
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("offset", [2, 4, 8])
def test_results_may_begin_at_any_address(data_format, offset):
    """Vector stores are used only for aligned runs."""
    problem = in_formats(HOPPER_CASES[0].problem, data_format, "OHWI")
    problem = problem.replace(dtype="float16")
    data = integer_data(problem)
    for pass_, shape in (
        ("forward", problem.output_shape),
        ("backprop_input", problem.input_shape),
        ("backprop_filter", problem.filter_shape),
    ):
        room = emulator.memory.array(np.zeros(math.prod(shape) * 2 + 16, np.uint8), "out")
        out = room[offset : offset + math.prod(shape) * 2].view(np.float16).reshape(shape)
        compute(emulator, pass_, problem, data, impl="cuda-hopper", arch=ARCH, out=out)
        assert (out == compute(cupyconv, pass_, problem, data, impl="reference")).all()
        assert not room[:offset].any()
        assert not room[offset + math.prod(shape) * 2 :].any()


IN_OTHER_ORDERS = (
    *("one_tile", "everything_differs", "a_volume_with_phases", "pairs_of_channels", "one_channel"),
    *("images_of_whole_lines", "images_of_filled_lines", "volumes_of_filled_lines"),
    *(
        "planes_of_one_channel",
        "one_plane",
        "groups_of_planes",
        "a_matrix_product",
        "phases_without_taps",
    ),
    *("rows_of_filled_lines", "rows_of_whole_lines", "rows_that_end_within_a_piece"),
    *("rows_of_two_lines", "rows_of_phases", "groups_of_rows", "a_row_of_two_lines"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_OTHER_ORDERS)
def test_other_memory_orders_are_exact(name):
    """Operands are copied or read in place, and results are stored in the given order."""
    number = [case.name for case in HOPPER_CASES].index(name)
    first, *others = all_formats(HOPPER_CASES[number].problem.replace(dtype="float16"))
    for turn, problem in enumerate((first, others[number % 3])):
        with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
            passes = require_exact(problem, tile=number + turn, splits=1 + 2 * (number % 2))
        assert passes == PASSES


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in HOPPER_CASES])
def test_every_memory_order_is_exact(name):
    number = [case.name for case in HOPPER_CASES].index(name)
    for turn, problem in enumerate(all_formats(HOPPER_CASES[number].problem)):
        schedule = emulator.SCHEDULES[(number + turn) % 3]
        for dtype, precision in (("bfloat16", "ieee"), ("float32", "tf32")):
            with emulator.settings(schedule):
                typed = problem.replace(dtype=dtype)
                require_exact(typed, precision=precision, tile=number + turn)


def layout(problem, pass_, strides, operands="float16"):
    """Return the planar layout of a problem, if it has one."""
    found = layouts(problem, pass_, strides, operands)
    assert all(is_planar(one.problem) == kind for kind, one in found.items())
    return found[max(found)]


def planar(problem, pass_, operands="float16", **changes):
    strides = replace(Strides.contiguous(problem), **changes)
    return is_planar(layout(problem, pass_, strides, operands).problem)


def test_channels_first_images_are_read_in_place():
    """Images are read in place if the filter has one tap and lines waste few pixels."""
    read = {(28, 28): True, (8, 16): True, (10, 20): False, (16, 20): True, (9, 8): False}
    for (height, width), reads in read.items():
        problem = ConvProblem((2, 64, height, width), (64, 64, 1, 1), dtype="float16")
        for pass_ in PASSES:
            seen = layout(problem, pass_, Strides.contiguous(problem))
            assert (seen.copied == ()) == reads or pass_ != "backprop_filter"
            assert ({"x", "y"} & set(seen.copied) == set()) == reads
            assert planar(problem, pass_) == reads
            assert planar(problem, pass_, "tf32") == (pass_ == "backprop_filter")
            assert not planar(problem, pass_, alignment=8)
    column = problem.replace(input_shape=(2, 64, 320, 1))
    assert planar(column, "forward")
    # In a column of wider images pixels are not contiguous, though the last axis has stride 1.
    of_wider = replace(Strides.contiguous(column), x=(64 * 320 * 8, 320 * 8, 8, 1))
    assert layout(column, "forward", of_wider).copied == ("x",)
    # Rows of larger images are read in place if they are as long as lines.
    for width, reads in ((64, True), (32, False)):
        crop = problem.replace(input_shape=(2, 64, 16, width))
        step = 2 * width
        within = (64 * 16 * step, 16 * step, step, 1)
        for changes in ({"x": within}, {"y": within}):
            assert planar(crop, "forward", **changes) == reads


def test_channels_first_rows_are_read_in_place():
    """Rows are read in place if taps are aligned to 16 bytes and lines waste few pixels."""
    rows = ConvProblem((2, 64, 4, 56), (64, 64, 3, 1), padding=(1, 0), dtype="float16")
    windows = rows.replace(filter_shape=(64, 64, 3, 3), padding=1)
    halves = {"forward": False, "backprop_input": True, "backprop_filter": False}
    for problem, reads in (
        (rows, dict.fromkeys(PASSES, True)),
        (windows, dict.fromkeys(PASSES, False)),  # taps are at -2 and 2 bytes
        (windows.replace(padding=(1, 8), dilation=(1, 8)), dict.fromkeys(PASSES, True)),
        (windows.replace(padding=(1, 4), dilation=(1, 4)), dict.fromkeys(PASSES, False)),
        (rows.replace(stride=(2, 1), padding=(3, 0), dilation=(3, 1)), dict.fromkeys(PASSES, True)),
        # 48 pixels would be computed as 64, and rows of 60 pixels have 120 bytes.
        (rows.replace(input_shape=(2, 64, 4, 48)), dict.fromkeys(PASSES, False)),
        (rows.replace(input_shape=(2, 64, 4, 60)), dict.fromkeys(PASSES, False)),
        (rows.replace(input_shape=(2, 64, 4, 112), stride=2), halves),
    ):
        for pass_ in PASSES:
            assert planar(problem, pass_) == reads[pass_], (problem, pass_)
            assert planar(problem, pass_, "tf32") == (pass_ == "backprop_filter")
    volume = ConvProblem((1, 64, 4, 4, 64), (64, 64, 3, 3, 3), padding=1, dtype="float16")
    assert not any(planar(volume, pass_) for pass_ in PASSES)
    # A filter gradient needs a map for each tap of a row, and each map must read some pixels.
    row = ConvProblem((1, 8, 120), (8, 8, 15), padding=56, dilation=8, dtype="float16")
    assert all(planar(row, pass_) for pass_ in PASSES)
    longer = row.replace(filter_shape=(8, 8, 17), padding=64)
    assert [planar(longer, pass_) for pass_ in PASSES] == [True, True, False]
    beyond = row.replace(filter_shape=(8, 8, 3), padding=120, dilation=120)
    assert [planar(beyond, pass_) for pass_ in PASSES] == [True, True, False]


@pytest.mark.thorough
@pytest.mark.parametrize("of_result", ["inside", "transposed"])
def test_rows_of_larger_images_are_read_in_place(of_result):
    """Memory around the rows is not read, and the result is written in place."""
    number = [case.name for case in HOPPER_CASES].index("rows_of_filled_lines")
    problem = HOPPER_CASES[number].problem.replace(dtype="float16")
    problem = problem.replace(dilation=(1, 8), padding=(1, 8))  # taps are aligned to 16 bytes
    for turn, pass_ in enumerate(PASSES):
        kinds = {**named(problem, pass_, "inside"), "out": BY_NAME[of_result]}
        chosen = plan_with(
            *(problem, "cuda-hopper", emulator.device(ARCH)),
            tile=PLANAR[turn],
            passes=(pass_,),
            strides=strides_of(problem, pass_, kinds),
        )
        with emulator.settings(emulator.SCHEDULES[turn]):
            require_exact_on_views(emulator, problem, pass_, kinds, impl=chosen, arch=ARCH)


@pytest.mark.parametrize("name", ["rows_of_filled_lines", "rows_of_two_lines"])
def test_padding_pixels_of_a_line_do_not_contribute(name):
    """A NaN of x reaches the filter gradient only at taps that read it."""
    number = [case.name for case in HOPPER_CASES].index(name)
    problem = HOPPER_CASES[number].problem.replace(dtype="float16")
    rows = problem.dilation[0], problem.padding[0]
    problem = problem.replace(dilation=(rows[0], 8), padding=(rows[1], (8, 8)))
    data = integer_data(problem)
    x, dy = data.x.astype("float16"), data.dy.astype("float16")
    x[0, 1, 1, -1] = np.nan
    arguments = (x, problem.filter_shape, dy)
    chosen = plan_with(
        *(problem, "cuda-hopper", emulator.device(ARCH)),
        tile=PLANAR[0],
        passes=("backprop_filter",),
    )
    got = emulator.conv_backprop_filter(*arguments, impl=chosen, arch=ARCH, **problem.keywords)
    expected = cupyconv.conv_backprop_filter(*arguments, impl="reference", **problem.keywords)
    np.testing.assert_array_equal(got, expected)
    assert 0 < np.isnan(got[:, 1]).sum() < got[:, 1].size


def test_only_unreadable_operands_are_copied():
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")
    wanted = {
        ("NHWC", "OHWI"): set(),
        ("NHWC", "HWIO"): set(),
        ("NHWC", "OIHW"): {"w"},
        ("NCHW", "OHWI"): {"x", "y"},
        ("NCHW", "OIHW"): {"x", "w", "y"},
    }
    for in_memory, unreached in wanted.items():
        given = in_formats(problem, *in_memory)
        for pass_ in PASSES:
            operands = set(ROLES_OF[pass_][:-1])
            seen = layout(given, pass_, Strides.contiguous(given))
            assert set(seen.copied) == unreached & operands
            assert seen.problem.data_format == "NHWC"
    # A channels-first array whose memory is channels last, as in PyTorch.
    strides = Strides.contiguous(in_formats(problem, "NHWC", "OHWI"))
    x, w, y = ((s[0], s[3], s[1], s[2]) for s in (strides.x, strides.w, strides.y))
    for pass_ in PASSES:
        assert layout(problem, pass_, Strides(x, w, y)).copied == ()
        unaligned = Strides(x, w, y, alignment=8)
        assert layout(problem, pass_, unaligned).copied == ROLES_OF[pass_][:-1]


def test_copies_of_16_bit_types_have_no_bank_conflicts():
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")  # NCHW
    outcomes = []
    with emulator.settings(bank_conflicts=True, on_outcome=outcomes.append):
        assert require_exact(problem) == PASSES
    traffic = [one for outcome in outcomes for one in outcome.bank_conflicts]
    of_copies = [one for one in traffic if one.file.endswith("conv_arrange.cu")]
    assert len({one.line for one in of_copies}) >= 3
    assert [one for one in of_copies if one.wavefronts > one.ideal] == []


def test_copies_respect_the_workspace_limit():
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")
    for pass_ in PASSES:
        request = Request(problem, pass_, Device.of(ARCH))
        needed = layout_of(request, WIDE[0]).copied_bytes
        assert FAMILY.refuses(replace(request, workspace_limit=needed)) is None
        assert "workspace" in FAMILY.refuses(replace(request, workspace_limit=needed - 1))


def test_images_are_copied_only_if_that_is_faster():
    """Padding rows to lines costs products; a copy costs time and workspace."""
    device = Device.of(ARCH)
    deep = ConvProblem((32, 256, 28, 56), (16, 256, 49, 1), padding=(24, 0), dtype="float16")
    few = deep.replace(filter_shape=(256, 256, 3, 1), padding=(1, 0))
    for problem, is_copied in ((deep, True), (few, False)):
        planned = plan_pass(Request(problem, "backprop_input", device), "cuda-hopper")
        assert planned.tile in (WIDE if is_copied else PLANAR)
    request = Request(deep, "backprop_input", device)
    of_filter = layout_of(request, PLANAR[0]).copied_bytes
    planned = plan_pass(Request(deep, "backprop_input", device, "ieee", of_filter), "cuda-hopper")
    assert planned.tile in PLANAR
    assert planned.workspace_bytes == of_filter
