"""The Hopper kernels on the CPU, under the checker: exact on integers, in three schedules.

Data formats are mostly channels last, and filters in both formats that need no copy; tiles,
clusters, splits and schedules go round the cases, so that each meets many.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, formats
from cupyconv.backends import Tensors
from cupyconv.errors import ConvError
from cupyconv.gpu import compiler, hopper, sources, tensormaps
from cupyconv.gpu.launch import Part
from cupyconv.planning import Device, PassPlan, Plan, Request, plan, plan_pass
from cupyconv.planning.copies import ROLES_OF, copy_bytes, shape_of
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.families.hopper import (
    has_taps,
    is_planar,
    is_pointwise,
    layout_of,
    layouts,
    matrices,
    split_elements,
    takes_turns,
    walks,
)
from cupyconv.planning.strides import Strides, element_strides
from cupyconv.problem import ITEMSIZE, PASSES
from tests import agreement, emulator
from tests.agreement import compute, fits, planned
from tests.configurations import (
    HOPPER_CASES,
    Data,
    all_formats,
    in_formats,
    integer_data,
    random_data,
    random_problems,
)
from tests.cubins import disassemble, instructions, no_spills
from tests.views import BY_NAME, KINDS, named
from tests.views import require_exact as require_exact_on_views

ARCH = "sm_90"
FAMILY = FAMILIES["cuda-hopper"]
PLANAR = [tile for tile in FAMILY.tiles if tile.defines["PLANAR"]]  # for 16-bit types
WIDE = [tile for tile in FAMILY.tiles if tile.itemsize == 2 and tile not in PLANAR]
SINGLE = [tile for tile in FAMILY.tiles if tile.itemsize == 4]
PLANES = FAMILIES["cuda-hopper-bf16x6"]
BY_PLANES = {"impl": PLANES.name, "arch": ARCH, "precision": "bf16x6"}


def last_axes(problem: ConvProblem) -> list[ConvProblem]:
    """The problem with channels-last data, with its filters' channels last and filters last."""
    rank = problem.spatial_rank
    data = formats.data_formats(rank)[1]
    return [in_formats(problem, data, filters) for filters in formats.filter_formats(rank)[1:]]


def require_exact(
    problem: ConvProblem, impl: str = "cuda-hopper", precision: str = "ieee"
) -> tuple[str, ...]:
    """The passes that the family takes agree with the reference; which they were."""
    passes = fits(problem, impl, ARCH, precision)
    agreement.require_exact(
        emulator, problem, impl=impl, arch=ARCH, passes=passes, precision=precision
    )
    return passes


def run_case(number: int, turn: int) -> tuple[str, ...]:
    problem = last_axes(HOPPER_CASES[number].problem)[turn]
    with (
        planned("cuda-hopper", 2 * number + turn, splits=1 + 2 * (number % 2)),
        emulator.settings(emulator.SCHEDULES[(number + turn) % 3]),
    ):
        dtype = "bfloat16" if number % 4 == 3 else "float16"
        return require_exact(problem.replace(dtype=dtype))


@pytest.mark.parametrize("number", range(len(HOPPER_CASES)), ids=[c.name for c in HOPPER_CASES])
def test_on_its_edges(number):
    assert run_case(number, turn=number % 2) == PASSES


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HOPPER_CASES)), ids=[c.name for c in HOPPER_CASES])
def test_on_its_edges_in_the_other_filter_format(number):
    assert run_case(number, turn=1 - number % 2) == PASSES


@pytest.mark.slow
@pytest.mark.parametrize("tile", range(len(WIDE)))
@pytest.mark.parametrize("splits", [1, 3])
def test_with_every_tile_and_split(tile, splits):
    for name in ("several_tiles", "phases_of_one_two_and_four_taps", "groups"):
        case = next(case for case in HOPPER_CASES if case.name == name)
        for number, problem in enumerate(last_axes(case.problem)):
            with (
                planned("cuda-hopper", tile, splits),
                emulator.settings(emulator.SCHEDULES[number]),
            ):
                require_exact(problem.replace(dtype="float16"))


# -- float32 ---------------------------------------------------------------------------------------

FLOAT_CASES = ("one_tile", "everything_differs", "a_volume_with_phases", "groups", "ring_wraps")


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_tf32(name):
    """wgmma takes operands contiguous along k; there are copies of those that are not."""
    number = [case.name for case in HOPPER_CASES].index(name)
    schedule = emulator.SCHEDULES[number % 3]
    problem = last_axes(HOPPER_CASES[number].problem)[number % 2]
    with planned("cuda-hopper", number, splits=1 + 2 * (number % 2)), emulator.settings(schedule):
        assert require_exact(problem, precision="tf32") == ("forward", "backprop_input")


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_planes_on_the_edges(name):
    number = [case.name for case in HOPPER_CASES].index(name)
    problem = last_axes(HOPPER_CASES[number].problem)[number % 2]
    schedule = emulator.SCHEDULES[number % 3]
    with planned(PLANES.name, number, splits=1 + 2 * (number % 2)), emulator.settings(schedule):
        assert require_exact(problem, PLANES.name, "bf16x6") == PASSES


def test_planes_hold_all_bits_of_float32():
    """Integers of 20 bits times -1, 0 and 1, either way round: every plane is needed."""
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


def test_planes_err_no_more_than_plain_float32():
    """Against float64, in units of the sum of the terms' magnitudes, over 576 terms each."""
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


def test_planes_at_the_ends_of_the_range():
    """What the header of conv_planes.cu promises of overflow, subnormals, infinity and NaN."""
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


def test_planes_are_not_chosen_unasked():
    """Their accuracy has not been measured on a GPU; and they are not "ieee"."""
    problem, device = last_axes(HOPPER_CASES[0].problem)[0], Device.of(ARCH)
    for pass_ in PASSES:
        for precision in ("ieee", "tf32"):
            planned = plan_pass(problem, pass_, device, precision=precision)
            assert planned.implementation != PLANES.name
            with pytest.raises(ConvError, match="which precision='bf16x6' permits"):
                plan_pass(problem, pass_, device, PLANES.name, precision)
        asked = Request(problem, pass_, device, "bf16x6")
        assert PLANES.refuses(asked) is None
        assert "workspace" in PLANES.refuses(replace(asked, workspace_limit=1000))


def test_a_plan_of_planes_is_carried_out_only_where_they_are_permitted():
    problem, device = last_axes(HOPPER_CASES[0].problem)[0], Device.of(ARCH)
    kept = Plan.from_json(plan(problem, device, PLANES.name, "bf16x6").to_json())
    request = Request(problem, "forward", device)
    assert kept.replay(replace(request, precision="bf16x6")).implementation == PLANES.name
    for precision in ("ieee", "tf32"):
        with pytest.raises(ConvError, match="Pass precision='bf16x6'"):
            kept.replay(replace(request, precision=precision))
    unsaid = kept.to_json().replace('"precision": "bf16x6"', '"precision": "ieee"')
    with pytest.raises(ConvError, match="which precision='bf16x6' permits"):
        Plan.from_json(unsaid)


def random_lines(count: int, seed: int) -> list[ConvProblem]:
    """Random problems with channels last, of 8 times, 5 times or just as many of them."""
    found: list[ConvProblem] = []
    for problem in random_problems(count, seed=seed):
        if problem.groups == 1 and 0 not in problem.input_shape:
            first = in_formats(problem, *(f(problem.spatial_rank)[0] for f in FORMATS))
            x, w = list(first.input_shape), list(first.filter_shape)
            more = (8, 5, 1)[len(found) % 3]
            x[1], w[0], w[1] = x[1] * more, w[0] * more, w[1] * more
            wide = first.replace(input_shape=x, filter_shape=w, dtype="float16")
            found.append(last_axes(wide)[len(found) % 2])
    return found


FORMATS = (formats.data_formats, formats.filter_formats)


@pytest.mark.thorough
def test_random_configurations():
    """One variant each of three ranks would be compiled anew: only as many as time allows."""
    ran = 0
    for number, problem in enumerate(random_lines(32, seed=3)):
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            ran += len(require_exact(problem))
    assert ran >= 20


@pytest.mark.slow
def test_more_random_configurations():
    for number, problem in enumerate(random_lines(200, seed=4)):
        with planned("cuda-hopper", number), emulator.settings(emulator.SCHEDULES[number % 3]):
            require_exact(problem)


OTHER_TYPES = {
    "bfloat16": ("cuda-hopper", "bfloat16", "ieee"),
    "tf32": ("cuda-hopper", "float32", "tf32"),
    "planes": (PLANES.name, "float32", "bf16x6"),
}
"""Family, dtype and precision."""


def long_integers(problem: ConvProblem, pass_: str, share: int) -> Data:
    """Integers whose sums float32 holds, and of which every plane of bfloat16 has a part.

    The bits that the number of terms leaves go to the first operand (``share`` 0), to the second
    (1), or half to each (2), so that all six products of planes are needed.
    """
    taps = math.prod(problem.filter_sizes)
    terms = {
        "forward": taps * (problem.C // problem.groups),
        "backprop_input": taps * (problem.K // problem.groups),
        "backprop_filter": problem.N * math.prod(problem.output_sizes),
    }[pass_]
    bits = 22 - max(terms, 1).bit_length()  # sums of parts that were rounded up, and the bias
    first = (bits, 0, bits // 2)[share]
    generator = np.random.default_rng(share)

    def integers(shape: tuple[int, ...], bits: int) -> np.ndarray:
        return generator.integers(-(2**bits), 2**bits + 1, shape).astype(np.float32)

    dy_bits = first if pass_ == "backprop_input" else bits - first
    return Data(
        integers(problem.input_shape, first),
        integers(problem.filter_shape, bits - first),
        integers(problem.output_shape, dy_bits),
        integers(problem.bias_shape, 3),
    )


def require_random(kind: str, count: int, seed: int) -> int:
    """Random problems of a type agree with the reference in all passes; how many runs it were."""
    impl, dtype, precision = OTHER_TYPES[kind]
    ran = 0
    for number, random in enumerate(random_lines(8 * count, seed=seed)[:count]):
        problem = random.replace(dtype=dtype)
        with (
            planned(impl, number, splits=1 + 2 * (number % 2)),
            emulator.settings(emulator.SCHEDULES[number % 3]),
        ):
            passes = require_exact(problem, impl, precision)
            for pass_ in passes if kind == "planes" else ():
                data = long_integers(problem, pass_, (number + PASSES.index(pass_)) % 3)
                got = compute(emulator, pass_, problem, data, **BY_PLANES)
                expected = compute(cupyconv, pass_, problem, data, impl="reference")
                assert np.array_equal(got, expected), f"{pass_} of {problem}"
        ran += len(passes)
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_random_configurations_of_other_types(kind):
    """Few, because each needs kernels of its own."""
    assert require_random(kind, 3, seed=7) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_more_random_configurations_of_other_types(kind):
    assert require_random(kind, 60, seed=8) >= 80


def test_activation_and_bias_are_fused():
    problem = last_axes(HOPPER_CASES[0].problem.replace(dtype="float16"))[0]
    data = random_data(problem)
    for activation in ("relu", "silu", "gelu"):
        arguments = {**problem.keywords, "activation": activation}
        got = emulator.conv_forward(
            data.x, data.w, data.bias, impl="cuda-hopper", arch=ARCH, **arguments
        )
        expected = cupyconv.conv_forward(data.x, data.w, data.bias, impl="reference", **arguments)
        np.testing.assert_allclose(
            got.astype(np.float64), expected.astype(np.float64), rtol=2e-3, atol=2e-3
        )


def test_tensors_with_gaps_between_pixels():
    """x and y are channels of wider tensors, so that C is not stored by TMA's boxes."""
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


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("offset", [2, 4, 8])
def test_results_that_begin_anywhere(data_format, offset):
    """Only runs that are aligned are stored at once."""
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


# -- groups ----------------------------------------------------------------------------------------

# By number of groups, channels and filters of each: the passes that sum over whole lines, or over
# pixels.
PARTS_OF_LINES = {
    (2, 40, 36): ("backprop_filter",),
    (3, 32, 72): ("backprop_filter",),
    (2, 64, 40): ("forward", "backprop_filter"),
    (2, 72, 64): ("backprop_input", "backprop_filter"),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", PARTS_OF_LINES, ids=lambda one: "-".join(map(str, one)))
def test_groups_that_fill_no_lines(groups, every):
    """A line has something of the next group where no product sums over it: it is dropped."""
    count, channels, filters = groups
    turn = list(PARTS_OF_LINES).index(groups)
    layer = ConvProblem(
        (2, count * channels, 5, 56), (count * filters, channels, 3, 3), padding=1, groups=count,
        dtype="float16",
    )  # fmt: skip
    orders = [*last_axes(layer), layer]
    for number, problem in enumerate(orders if every else orders[turn % 3 :][:1]):
        with (
            planned("cuda-hopper", 2 * (number + turn), splits=1 + 2 * (number % 2)),
            emulator.settings(emulator.SCHEDULES[(number + turn) % 3]),
        ):
            assert require_exact(problem) == PARTS_OF_LINES[groups]


def test_groups_that_fill_no_lines_keep_to_themselves():
    """Not a number in one group is in no result of another, and no box hangs over into the next."""
    layer = ConvProblem((1, 128, 4, 8), (80, 64, 1, 1), groups=2, dtype="float16")
    problem = in_formats(layer, "NHWC", "OHWI")
    data = integer_data(problem)
    x, dy = data.x.astype("float16"), data.dy.astype("float16")
    x[0, 1, 2, 70] = dy[0, 1, 2, 50] = np.nan
    how = {"impl": "cuda-hopper", "arch": ARCH, **problem.keywords}
    y = emulator.conv_forward(x, data.w, **how)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 1, 2, k] for k in range(40, 80)]
    dw = emulator.conv_backprop_filter(x, problem.filter_shape, dy, **how)
    reached = np.zeros((80, 64), bool)
    reached[40:, 70 - 64] = reached[50] = True
    assert (np.isnan(dw[:, 0, 0]) == reached).all()


@pytest.mark.parametrize("operands", ["float16", "bf16x6"])
def test_what_is_summed_over_is_of_whole_lines(operands):
    layer = last_axes(ConvProblem((2, 96, 5, 6), (128, 48, 3, 3), padding=1, groups=2))[0]
    family, problem, precision = (
        (FAMILY, layer.replace(dtype="float16"), "ieee")
        if operands == "float16"
        else (PLANES, layer, "bf16x6")
    )
    assert fits(problem, family.name, ARCH, precision) == PASSES[1:]
    refusal = family.refuses(Request(problem, "forward", Device.of(ARCH), precision))
    assert refusal == "the lines that TMA loads hold 64 channels of one group, and groups have 48"
    narrow = ConvProblem((2, 62, 5, 6), (128, 31, 3, 3), padding=1, groups=2)
    narrow = in_formats(narrow, "NHWC", "OHWI").replace(dtype=problem.dtype)
    for pass_ in PASSES:
        refusal = family.refuses(Request(narrow, pass_, Device.of(ARCH), precision))
        assert refusal.endswith("most would be of other groups: groups have 31 and 64")


# -- copies ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", IN_OTHER_ORDERS)
def test_other_memory_orders(name):
    """Copies, rows where they lie, and results stored as they are wanted."""
    number = [case.name for case in HOPPER_CASES].index(name)
    first, *others = all_formats(HOPPER_CASES[number].problem.replace(dtype="float16"))
    for turn, problem in enumerate((first, others[number % 3])):
        with (
            planned("cuda-hopper", 2 * (number + turn), splits=1 + 2 * (number % 2)),
            emulator.settings(emulator.SCHEDULES[(number + turn) % 3]),
        ):
            assert require_exact(problem) == PASSES


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in HOPPER_CASES])
def test_every_memory_order(name):
    number = [case.name for case in HOPPER_CASES].index(name)
    for turn, problem in enumerate(all_formats(HOPPER_CASES[number].problem)):
        schedule = emulator.SCHEDULES[(number + turn) % 3]
        for dtype, precision in (("bfloat16", "ieee"), ("float32", "tf32")):
            with planned("cuda-hopper", number + turn), emulator.settings(schedule):
                require_exact(problem.replace(dtype=dtype), precision=precision)


def layout(problem, pass_, strides, operands="float16"):
    """With images as they lie, if they can be read so."""
    last, *rows = layouts(problem, pass_, strides, operands)
    assert not is_planar(last.problem)
    assert all(is_planar(found.problem) for found in rows)
    return (rows or [last])[0]


def planar(problem, pass_, operands="float16", **changes):
    strides = replace(Strides.contiguous(problem), **changes)
    return is_planar(layout(problem, pass_, strides, operands).problem)


def test_images_with_channels_first_are_read_where_they_lie():
    """If nothing is gathered under taps, and not much more than their pixels is computed."""
    read = {(28, 28): True, (8, 16): True, (10, 20): False, (16, 20): True, (9, 8): False}
    for (height, width), reads in read.items():
        problem = ConvProblem((2, 64, height, width), (64, 64, 1, 1), dtype="float16")
        for pass_ in PASSES:
            seen = layout(problem, pass_, Strides.contiguous(problem))
            assert (seen.copied == ()) == reads or pass_ != "backprop_filter"
            assert ({"x", "y"} & set(seen.copied) == set()) == reads
            assert planar(problem, pass_) == reads
            assert not planar(problem, pass_, "tf32")
            assert not planar(problem, pass_, alignment=8)
    column = problem.replace(input_shape=(2, 64, 320, 1))
    assert planar(column, "forward")
    # One column of wider images: pixels are no neighbours, though the last axis has a stride of 1.
    of_wider = replace(Strides.contiguous(column), x=(64 * 320 * 8, 320 * 8, 8, 1))
    assert layout(column, "forward", of_wider).copied == ("x",)
    # Of larger images, rows: they are as good as the images if they are as long as lines.
    for width, reads in ((64, True), (32, False)):
        crop = problem.replace(input_shape=(2, 64, 16, width))
        step = 2 * width
        within = (64 * 16 * step, 16 * step, step, 1)
        for changes in ({"x": within}, {"y": within}):
            assert planar(crop, "forward", **changes) == reads


def test_a_plan_says_what_is_done_to_operands_before():
    rows = ConvProblem((32, 64, 56, 56), (64, 64, 3, 3), padding=1, dtype="float16")
    short = rows.replace(input_shape=(32, 64, 28, 28))
    for problem, precision, said in (
        (rows, "ieee", ("w copied with channels last", "w copied with channels last", "")),
        (
            short,
            "ieee",
            tuple(
                f"{roles} copied with channels last"
                for roles in ("x and w", "dy and w", "x and dy")
            ),
        ),
        (
            in_formats(short.replace(dtype="float32"), "NHWC", "OHWI"),
            "bf16x6",
            tuple(f"{roles} split into planes" for roles in ("x and w", "dy and w", "x and dy")),
        ),
    ):
        family = FAMILY if precision == "ieee" else PLANES
        planned_passes = plan(problem, "sm_90a", family.name, precision)
        for one, words in zip(planned_passes, said, strict=True):
            assert one.reason.endswith(f"; before it, {words}" if words else family.summary)


def test_rows_with_channels_first_are_read_where_they_lie():
    """If windows are neighbours along them, and not much more than their pixels is computed."""
    rows = ConvProblem((2, 64, 4, 56), (64, 64, 3, 3), padding=1, dtype="float16")
    halves = {"forward": False, "backprop_input": True, "backprop_filter": False}
    for problem, reads in (
        (rows, dict.fromkeys(PASSES, True)),
        (rows.replace(stride=(2, 1), dilation=(1, 3), padding=(1, 3)), dict.fromkeys(PASSES, True)),
        (rows.replace(input_shape=(2, 64, 4, 48)), dict.fromkeys(PASSES, False)),  # 64 / 48
        (rows.replace(input_shape=(2, 64, 4, 60)), dict.fromkeys(PASSES, False)),  # 120 bytes
        (rows.replace(input_shape=(2, 64, 4, 112), stride=2), halves),
        (rows.replace(padding=(1, 0)), {**halves, "forward": True, "backprop_input": False}),
    ):
        for pass_ in PASSES:
            assert planar(problem, pass_) == reads[pass_], (problem, pass_)
            assert not planar(problem, pass_, "tf32")
    volume = ConvProblem((1, 64, 4, 4, 64), (64, 64, 3, 3, 3), padding=1, dtype="float16")
    assert not any(planar(volume, pass_) for pass_ in PASSES)
    # Maps for each tap along the row, of which each has something to read.
    row = ConvProblem((1, 8, 120), (8, 8, 15), padding=7, dtype="float16")
    assert all(planar(row, pass_) for pass_ in PASSES)
    longer = row.replace(filter_shape=(8, 8, 17), padding=8)
    assert [planar(longer, pass_) for pass_ in PASSES] == [True, True, False]
    beyond = row.replace(filter_shape=(8, 8, 3), padding=120, dilation=120)
    assert [planar(beyond, pass_) for pass_ in PASSES] == [True, True, False]


@pytest.mark.parametrize("of_result", ["inside", "transposed"])
def test_rows_of_larger_images_are_read_where_they_lie(of_result):
    """What lies around them is not read, and the result goes where it is wanted."""
    number = [case.name for case in HOPPER_CASES].index("rows_of_filled_lines")
    problem = HOPPER_CASES[number].problem.replace(dtype="float16")
    for turn, pass_ in enumerate(PASSES):
        kinds = {**named(problem, pass_, "inside"), "out": BY_NAME[of_result]}
        with planned("cuda-hopper", PLANAR[turn]), emulator.settings(emulator.SCHEDULES[turn]):
            require_exact_on_views(emulator, problem, pass_, kinds, impl="cuda-hopper", arch=ARCH)


@pytest.mark.parametrize("name", ["rows_of_filled_lines", "rows_of_two_lines"])
def test_pixels_that_fill_up_a_line_meet_nothing(name):
    """A filter gradient has a NaN of x only under the taps that read it."""
    number = [case.name for case in HOPPER_CASES].index(name)
    problem = HOPPER_CASES[number].problem.replace(dtype="float16")
    data = integer_data(problem)
    x, dy = data.x.astype("float16"), data.dy.astype("float16")
    x[0, 1, 1, -1] = np.nan
    arguments = (x, problem.filter_shape, dy)
    with planned("cuda-hopper", PLANAR[0]):
        got = emulator.conv_backprop_filter(
            *arguments, impl="cuda-hopper", arch=ARCH, **problem.keywords
        )
    expected = cupyconv.conv_backprop_filter(*arguments, impl="reference", **problem.keywords)
    np.testing.assert_array_equal(got, expected)
    assert 0 < np.isnan(got[:, 1]).sum() < got[:, 1].size


@pytest.mark.parametrize(
    "change", [lambda x: x[..., ::2], lambda x: x[:, :, ::-1, ::2]], ids=["gaps", "backwards"]
)
def test_memory_that_tma_cannot_read_goes_through_a_copy(change):
    problem = last_axes(HOPPER_CASES[2].problem.replace(dtype="float16"))[0]
    data = integer_data(problem)
    x = change(np.repeat(data.x, 2, axis=3))
    arguments = problem.keywords
    got = emulator.conv_forward(x, data.w, impl="cuda-hopper", arch=ARCH, **arguments)
    assert (got == cupyconv.conv_forward(x, data.w, impl="reference", **arguments)).all()


def test_only_what_cannot_be_reached_is_copied():
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
    # A channels-first array whose memory is channels last, as PyTorch has them.
    strides = Strides.contiguous(in_formats(problem, "NHWC", "OHWI"))
    x, w, y = ((s[0], s[3], s[1], s[2]) for s in (strides.x, strides.w, strides.y))
    for pass_ in PASSES:
        assert layout(problem, pass_, Strides(x, w, y)).copied == ()
        unaligned = Strides(x, w, y, alignment=8)
        assert layout(problem, pass_, unaligned).copied == ROLES_OF[pass_][:-1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_views_that_tma_does_not_walk_over_are_copied(kind):
    """Those with strides that are negative or 0, and with elements that share memory."""
    problem = in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")
    contiguous = Strides.contiguous(problem)
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    for role, shape in shapes.items():
        axes = problem.filter_axes if role == "w" else problem.data_axes
        view = kind.of(np.zeros(shape, np.float16), axes)
        strides = replace(contiguous, **{role: element_strides(view)})
        for pass_ in PASSES:
            copied = layout(problem, pass_, strides).copied
            if role == ROLES_OF[pass_][-1]:
                assert copied == ()
            elif kind.shares or kind.name.startswith("reversed"):
                assert copied == (role,)
            elif kind.name == "inside" and role == "x":  # the others may have to be matrices
                assert copied == ()


def test_copies_of_16_bits_meet_no_bank_conflict():
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")  # channels first
    outcomes = []
    with emulator.settings(bank_conflicts=True, on_outcome=outcomes.append):
        assert require_exact(problem) == PASSES
    traffic = [one for outcome in outcomes for one in outcome.bank_conflicts]
    of_copies = [one for one in traffic if one.file.endswith("conv_arrange.cu")]
    assert len({one.line for one in of_copies}) >= 3
    assert [one for one in of_copies if one.wavefronts > one.ideal] == []


def test_copies_keep_to_the_workspace_limit():
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")
    for pass_ in PASSES:
        request = Request(problem, pass_, Device.of(ARCH))
        needed = layout_of(request, WIDE[0]).copied_bytes
        assert FAMILY.refuses(replace(request, workspace_limit=needed)) is None
        assert "workspace" in FAMILY.refuses(replace(request, workspace_limit=needed - 1))


def test_images_are_copied_where_that_is_faster():
    """Rows that fill up lines cost products; a copy costs memory, and has to be afforded."""
    device = Device.of(ARCH)
    deep = ConvProblem((32, 256, 28, 56), (16, 256, 7, 7), padding=3, dtype="float16")
    few = deep.replace(filter_shape=(256, 256, 1, 3), padding=(0, 1))
    for problem, is_copied in ((deep, True), (few, False)):
        planned = plan_pass(problem, "backprop_input", device, "cuda-hopper")
        assert planned.tile in (WIDE if is_copied else PLANAR)
    request = Request(deep, "backprop_input", device)
    of_filter = layout_of(request, PLANAR[0]).copied_bytes
    planned = plan_pass(deep, "backprop_input", device, "cuda-hopper", "ieee", of_filter)
    assert planned.tile in PLANAR
    assert planned.workspace_bytes == of_filter


def test_a_workspace_is_as_large_as_what_lies_in_it():
    rows = all_formats(ConvProblem((2, 64, 4, 56), (24, 64, 3, 3), padding=1, dtype="float16"))
    one_channel = ConvProblem((1, 1, 16, 60), (1, 1, 7, 7), padding=3)
    for problem, family, precision in (
        *((problem, FAMILY, "ieee") for problem in rows),
        (one_channel, FAMILY, "tf32"),
        (one_channel, PLANES, "bf16x6"),
    ):
        for pass_ in fits(problem, family.name, ARCH, precision):
            request = Request(problem, pass_, Device.of(ARCH), precision)
            for one in family.candidates(request):
                planned = PassPlan(
                    pass_, family.name, "", one.tile, one.blocks, one.splits, one.workspace_bytes
                )
                require_workspace(hopper.stage(planned, problem, request.memory), planned)


def require_workspace(made: hopper.Staged, planned_: PassPlan) -> None:
    """The sums of splits lie in it, and behind them one copy after the other."""
    size, planes, end = made.other.itemsize, made.other.planes, 0
    if planned_.splits > 1:
        sums = split_elements(made.problem, planned_.pass_, planned_.tile)
        end = planned_.splits * sums * 4
    for role, offset in made.made:
        assert offset == end
        end += planes * copy_bytes(shape_of(made.problem, role), size)
    assert end == planned_.workspace_bytes, planned_


def test_the_last_tile_of_tensors_beyond_32_bits():
    """Only the pages that one tile touches exist."""
    problem = ConvProblem(
        (1, 32_000, 33_000, 8), (8, 3, 3, 8), data_format="NHWC", filter_format="OHWI",
        dtype="float16",
    )  # fmt: skip
    assert problem.needs_64bit_indexing
    corner = 40
    values, w = (
        np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float16)
        for seed, shape in enumerate(((1, corner, corner, 8), problem.filter_shape))
    )
    arguments = {"data_format": "NHWC", "filter_format": "OHWI", "impl": "reference"}
    expected = cupyconv.conv_forward(values, w, **arguments)
    x = emulator.memory.lazy(problem.input_shape, np.float16, "x")
    y = emulator.memory.lazy(problem.output_shape, np.float16, "y")
    x[:, -corner:, -corner:] = values
    backend = emulator.convolutions.backend(ARCH)
    backend.device = replace(backend.device, multiprocessors=2**30)  # a block for each tile
    pass_plan = plan_pass(problem, "forward", backend.device, "cuda-hopper")
    tensors = Tensors(x, emulator.memory.array(w, "w"), y)
    with emulator.settings(blocks=[pass_plan.blocks // pass_plan.tile.defines["CLUSTER"] - 1]):
        backend.prepare(pass_plan, problem, Strides.contiguous(problem))(tensors)
    assert (y[0, -1, -4:] == expected[0, -1, -4:]).all()
    assert not y[0, : 1 << 8, 0].any()


def test_tiles_are_taken_in_bands():
    """Eight rows of tiles, one column of them after the other: operands are still in L2."""
    problem = ConvProblem(
        (1, 32, 40, 8), (128, 1, 1, 8), data_format="NHWC", filter_format="OHWI", dtype="float16"
    )  # fmt: skip
    data = integer_data(problem)
    expected = cupyconv.conv_forward(data.x, data.w, impl="reference", **problem.keywords)
    backend = emulator.convolutions.backend(ARCH)
    backend.device = replace(backend.device, multiprocessors=2**30)  # a block for each tile
    (tile,) = (t for t in WIDE if (t.block_m, t.block_n) == (128, 64))
    with planned("cuda-hopper", tile):
        pass_plan = plan_pass(problem, "forward", backend.device, "cuda-hopper")
    assert pass_plan.tile == tile
    met = []
    for block in range(pass_plan.blocks):
        y = emulator.memory.empty(problem.output_shape, np.float16, "y")
        tensors = Tensors(*(emulator.memory.array(a) for a in (data.x, data.w)), y)
        with emulator.settings(blocks=[block]):
            backend.prepare(pass_plan, problem, Strides.contiguous(problem))(tensors)
        written = np.argwhere(~np.isnan(y.reshape(-1, 128)))
        row, column = written[0]
        assert len(written) == 128 * 64
        met.append((int(row) // 128, int(column) // 64))
        flat = (slice(row, row + 128), slice(column, column + 64))
        assert (y.reshape(-1, 128)[flat] == expected.reshape(-1, 128)[flat]).all()
    bands = (range(8), range(8, 10))
    assert met == [(row, column) for band in bands for column in range(2) for row in band]


# -- maps and walks --------------------------------------------------------------------------------


def test_a_map_belongs_to_its_address_and_its_shape():
    made = []

    def encode(one, address):
        made.append((one, address))
        return bytes(tensormaps.MAP_BYTES)

    one = tensormaps.TiledMap("x", 2, (64, 100), (128,), (64, 64))
    other = replace(one, extents=(64, 50))
    first, second = (tensormaps.TensorMaps((each, each)) for each in (one, other))
    for maps, address in (
        (first, 4096), (first, 4096), (second, 4096), (first, 8192), (second, 4096),
    ):  # fmt: skip
        struct = tensormaps.encoded(maps, (address,) * 2, encode)
        assert struct.shape == (1,)
        assert struct.nbytes == 2 * tensormaps.MAP_BYTES
    assert made == [(one, 4096)] * 2 + [(other, 4096)] * 2 + [(one, 8192)] * 2


COLUMN = ConvProblem((1, 64, 40, 1), (64, 64, 1, 1))
"""Whose pixels follow each other along an axis that is not the innermost."""

GROUPS_WITHIN_A_PIECE = ConvProblem((1, 384, 4, 8), (216, 64, 1, 1), groups=6)
ROWS_WITHIN_A_PIECE = ConvProblem((1, 8, 6, 64), (8, 8, 3, 3))
"""Whose images, and not their rows, are of whole pieces of 16 bytes."""

MAPPED = (("cuda-hopper", "bfloat16", "ieee"), ("cuda-hopper", "float32", "tf32"))
MAPPED += ((PLANES.name, "float32", "bf16x6"),)
"""Families with a dtype and a precision of each kind of operands."""


@pytest.mark.parametrize("kind", MAPPED, ids=lambda kind: kind[-1])
def test_products_are_told_where_every_element_lies(kind):
    """By maps of the tensors or of their copies, in boxes that the ring has room for; and results
    are stored in pieces as large as they may be."""
    seen = set()
    for request, chosen in planned_on_views(*kind):
        problem, pass_, strides = request.problem, request.pass_, request.memory
        device, made = request.device, hopper.stage(chosen, problem, strides)
        launches = hopper.prepare(chosen, problem, strides, None, device)
        product = next(one for one in launches if one.entry == "conv_hopper")
        require_tiles(product, made.problem, chosen, device)
        require_sums_added_up(launches, made, chosen)
        require_workspace(made, chosen)
        require_copies(made, problem, strides)
        require_form(chosen, made, problem, strides)
        gathered, other, result = ROLES_OF[pass_]
        for one in product.arguments[3].maps:
            emulator.tensormap.encode(one, 4096)
        *of_gathered, of_other, of_result = product.arguments[3].maps
        require_macros(dict(product.defines), made.problem, chosen, len(of_gathered))
        for one in of_gathered:
            require_map(one, made.problem, gathered, made.gathered)
        require_map(of_other, made.problem, other, made.other)
        line, rows = chosen.tile.block_k, chosen.tile.block_m
        if other == "w":
            require_box(of_other, made.problem, pass_, chosen.tile)
            require_pixels(of_gathered, made.problem, pass_, line, rows)
        else:
            require_pixels(of_gathered, made.problem, pass_, line, line)
            assert of_other.box == box_of_pixels(made.problem, line, line)
        how = stored(made.problem, made.strides, pass_, chosen.splits)
        assert tuple(dict(product.defines)[name] for name in ("STORE", "RUN")) == how, request
        if how[0] == hopper.STORE_BOXES:
            written = hopper.Operand(result, ITEMSIZE[problem.dtype], made.strides)
            require_map(of_result, made.problem, result, written)
            assert of_result.box == (64, 64)
        seen.add(how)
    assert len(seen) >= (2 if problem.dtype == "float32" else 8)


def stored(problem: ConvProblem, strides: Strides, pass_: str, splits: int) -> tuple[int, int]:
    """How a result is stored and in what pieces, by the addresses of its elements."""
    role = ROLES_OF[pass_][-1]
    steps, shape = getattr(strides, role), shape_of(problem, role)
    channel = len(shape) - 1 if role == "w" else problem.data_axes[1]
    is_grouped = role != "w" or problem.filter_axes[0] == channel
    of_group = shape[channel] // (problem.groups if is_grouped else 1)
    run = longest_run(problem, strides, role, (channel,), of_group)
    if problem.dtype == "float32":
        return hopper.STORE_FLOAT, min(run, 2)
    if role == "w" or splits > 1:
        return hopper.STORE_ROWS, run
    is_one = len(walks(problem, pass_)) == 1
    if steps[channel] != 1:
        row = problem.data_axes[-1:] if is_planar(problem) else problem.data_axes[2:]
        pixels = math.prod(shape[axis] for axis in row)
        return hopper.STORE_COLUMNS, longest_run(problem, strides, role, row, pixels, is_one)
    pixels = 2 * sum_of_products(shape[:-1], steps[:-1]).ravel() if not is_planar(problem) else []
    gaps = set(np.diff(pixels)) or {16 * shape[-1]}
    is_matrix = len(gaps) == 1 and not min(gaps) % 16 and min(gaps) >= 2 * shape[-1]
    # A box may not hang over into the next group.
    is_matrix &= problem.groups == 1 or of_group % 64 == 0
    by_tma = is_one and not is_planar(problem) and is_matrix and strides.alignment == 16
    return hopper.STORE_BOXES if by_tma else hopper.STORE_ROWS, run


def longest_run(problem, strides, role, axes, of_group, is_one=True) -> int:
    """The most elements along axes, of those that belong together, that are always one piece."""
    shape, itemsize = shape_of(problem, role), ITEMSIZE[problem.dtype]
    lies = strides.alignment % 16 + itemsize * sum_of_products(shape, getattr(strides, role))
    last = range(-len(axes), 0)
    lies = np.moveaxis(np.broadcast_to(lies, shape), axes, tuple(last)).reshape(-1, of_group)
    for run in (16 // itemsize, 8 // itemsize, 4 // itemsize, 1):
        if is_one and not of_group % run:
            pieces = lies.reshape(-1, run)
            are_one = (np.diff(pieces) == itemsize).all()
            if are_one and not (pieces[:, 0] % (run * itemsize)).any():
                return run
    return 1


def planned_on_views(impl: str, dtype: str, precision: str):
    """Passes of all cases on contiguous tensors and on views, with many tiles and some splits."""
    family = FAMILIES[impl]
    layers = (ROWS_WITHIN_A_PIECE, COLUMN, GROUPS_WITHIN_A_PIECE)
    for number, layer in enumerate((*layers, *(case.problem for case in HOPPER_CASES))):
        formatted = all_formats(layer.replace(dtype=dtype))
        of_both = formatted[0], formatted[1 + number % 2], formatted[3 + number % 3]
        for turn, problem in enumerate(of_both, number):
            device = replace(Device.of(ARCH), multiprocessors=(132, 1, 3)[turn % 3])
            for gap, pass_ in itertools.product((0, 1 + turn % 3), PASSES):
                alignment = (16, 16, 8, 16, 2)[(turn + gap) % 5]
                strides = replace(inside_larger_ones(problem, gap), alignment=alignment)
                request = Request(problem, pass_, device, precision, strides=strides).reduced
                if family.refuses(request) is None:
                    for tile in tiles_of_layouts(family, request, turn):
                        with planned(impl, tile, splits=(1, 2, 1, 3)[(turn + gap) % 4]):
                            yield (
                                request,
                                plan_pass(problem, pass_, device, impl, precision, strides=strides),
                            )


def tiles_of_layouts(family, request: Request, number: int):
    """Some tile for each of the ways in which the tensors can be met."""
    fitting: dict[int, list] = {}
    for one in family.candidates(request):
        fitting.setdefault(one.tile.defines["PLANAR"], []).append(one.tile)
    return [tiles[number % len(tiles)] for tiles in fitting.values()]


def inside_larger_ones(problem: ConvProblem, gap: int) -> Strides:
    """Strides of parts of larger tensors, of whose other pixels and taps every second is read."""
    steps = []
    for shape in (problem.input_shape, problem.filter_shape, problem.output_shape):
        *outer, inner = (size + 8 * bool(gap) for size in shape)
        whole = np.empty((*(size * max(gap, 1) for size in outer), inner), np.int8)
        part = whole[tuple(slice(0, size * max(gap, 1), max(gap, 1)) for size in shape[:-1])]
        steps.append(element_strides(part[..., : shape[-1]]))
    return Strides(*steps)


def require_map(one: tensormaps.TensorMap, problem: ConvProblem, role: str, operand) -> None:
    """A map leads to every element, plane after plane."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    lies = operand.offset + operand.itemsize * sum_of_products(shape, steps)
    planes = np.arange(operand.planes) * copy_bytes(shape, operand.itemsize)
    expected = lies + planes.reshape(-1, *(1 for _ in shape))
    if is_planar(problem) and role != "w":  # rows may end before what no tap reads
        expected = expected[..., : one.extents[0]]
    outwards = one.extents[::-1]
    found = one.offset + sum_of_products(outwards, (*one.strides[::-1], one.itemsize))
    assert (one.role, one.itemsize) == (operand.role, operand.itemsize)
    assert (found == expected.reshape(outwards)).all()


def sum_of_products(shape, steps) -> np.ndarray:
    """Of each index with the steps of its axes."""
    indices = np.indices(shape, sparse=True)
    return sum((at * step for at, step in zip(indices, steps, strict=True)), start=np.int64(0))


def require_copies(made: hopper.Staged, asked: ConvProblem, strides: Strides) -> None:
    """The launch before reads every element that it copies, in the order of the copy."""
    assert len(made.before) == bool(made.made)
    for launch in made.before:
        *operands, (records,) = launch.arguments
        given = [one for role, offset in made.made for one in (role, Part("workspace", offset))]
        assert operands == [*given, *[0] * (4 - len(given))]
        assert launch.entry == ("conv_planes" if made.gathered.planes > 1 else "conv_arrange")
        (first, second), blocks = records["of"], 0
        for (role, _), record in zip(made.made, (first, second), strict=False):
            axes_of = "filter_axes" if role == "w" else "data_axes"
            source = sum_of_products(shape_of(asked, role), getattr(strides, role))
            axes, shape = getattr(made.problem, axes_of), shape_of(made.problem, role)
            named_ = source.transpose(getattr(asked, axes_of))
            expected = named_.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
            outer, rows = tuple(record["extent"]), math.prod(shape[:-1])
            if launch.entry == "conv_arrange":
                inner, step = record["channels"], record["channel_stride"]
                assert record["tiles"] == math.ceil(rows / 64) * math.ceil(shape[-1] / 64)
                blocks += record["tiles"]
            else:
                inner, step = record["inner"], 1
                assert record["blocks"] == math.ceil(rows * math.ceil(shape[-1] / 8) / 256)
                blocks += record["blocks"]
            found = sum_of_products((*outer, inner), (*record["stride"], step))
            assert (found.reshape(shape) == expected).all()
        assert (launch.grid, launch.block, launch.shared_bytes) == ((blocks,), (256,), 0)


def require_form(planned_: PassPlan, made: hopper.Staged, asked: ConvProblem, strides) -> None:
    """A filter that is copied has a form, its copy alone, which is read where it is given."""
    form = hopper.filter_form(planned_, asked, strides)
    assert (form is not None) == ("w" in dict(made.made))
    if form is None:
        return
    orders, planes = formats.filter_formats(asked.spatial_rank), made.other.planes
    order = orders[1 + (made.problem.filter_axes[0] == 0)]
    assert form.name == order + f" in {planes} planes of bfloat16" * (planes > 1)
    assert form.bytes == planes * copy_bytes(made.problem.filter_shape, made.other.itemsize)
    require_copies(replace(made, before=(form.launch,), made=(("w", 0),)), asked, strides)
    held = hopper.stage(planned_, asked, replace(strides, w_arranged=True))
    assert held.other == replace(made.other, role="w", offset=0)
    assert held.made == tuple(one for one in made.made if one[0] != "w")
    require_copies(held, asked, strides)


def require_tiles(product, problem: ConvProblem, planned_: PassPlan, device: Device) -> None:
    """All tiles of all splits are walked over, in their steps, by as many blocks as stay."""
    (walk,), cluster = product.arguments[4], planned_.tile.defines["CLUSTER"]
    tiles = planned_.blocks * planned_.splits
    steps = max(found[2] for found in matrices(problem, planned_.pass_, planned_.tile, 1))
    assert walk["tiles"] * cluster == tiles
    of_group = walk["tile_columns"] * walk["phase"]["tile_rows"].sum()
    assert of_group * problem.groups * planned_.splits == walk["tiles"]
    assert walk["steps_of_split"] == math.ceil(steps / planned_.splits)
    for phase, axes in zip(walk["phase"], walks(problem, planned_.pass_), strict=True):
        for name in ("pixels", "taps"):
            assert phase[name].prod() == math.prod(getattr(axis, name) for axis in axes)
    assert product.grid == (min(tiles, max(device.multiprocessors // cluster, 1) * cluster),)


def require_macros(macros, problem: ConvProblem, planned_: PassPlan, maps: int) -> None:
    """What the kernel is made for; rows of a filter gradient are of windows or of filters."""
    pass_ = planned_.pass_
    told = {
        "SPLIT": planned_.splits > 1,
        "SPATIAL": problem.spatial_rank,
        "PHASES": len(walks(problem, pass_)),
        "MAPS": maps,
        "POINTWISE": is_pointwise(problem) and not is_planar(problem),
    }
    assert told.items() <= macros.items()
    if pass_ == "backprop_filter":
        ((rows, columns, _),) = matrices(problem, pass_, planned_.tile, planned_.splits)
        assert (rows, columns)[macros["WINDOW_ROWS"]] == problem.K // problem.groups
    else:
        assert not macros["WINDOW_ROWS"]


def require_sums_added_up(launches, made: hopper.Staged, planned_: PassPlan) -> None:
    """Those of several splits, by a thread for each piece."""
    *_, last = launches
    assert (last.entry == "conv_hopper_reduce") == (planned_.splits > 1)
    if planned_.splits > 1:
        sums = split_elements(made.problem, planned_.pass_, planned_.tile)
        assert (last.grid, last.shared_bytes) == ((math.ceil(sums / 8 / 64),), 0)


def require_pixels(maps, problem: ConvProblem, pass_: str, line: int, pixels: int) -> None:
    """Of the tensor under the taps: each of its walks has a map that goes over its pixels."""
    if is_planar(problem) or is_pointwise(problem):
        assert {one.box for one in maps} == {box_of_pixels(problem, line, pixels)}
        return
    for one, walk in zip(maps, walks(problem, pass_), strict=True):
        assert (one.channels, one.pixels) == (line, pixels)
        corners = one.lower, one.extents[1:-1], one.upper, one.element_strides
        for axis, first, size, last, step in zip(reversed(walk), *corners, strict=True):
            end = axis.base + axis.pixels * axis.stride
            if has_taps(walk):  # else nothing is loaded
                assert range(first, size + last, step) == range(axis.base, end, axis.stride)


def box_of_pixels(problem: ConvProblem, line: int, pixels: int) -> tuple[int, ...]:
    """A line of channels of so many pixels; of rows, a line of pixels and as many channels."""
    if is_planar(problem):
        return (line, *(1 for _ in problem.data_axes[3:]), line, 1)
    return (line, pixels, 1)


def require_box(one: tensormaps.TiledMap, problem: ConvProblem, pass_: str, tile) -> None:
    """Of w: a line of what is contiguous, of one tap, and a line of k or the block's columns."""
    line = tile.block_k
    filters_inner = problem.filter_axes[0] == len(problem.filter_shape) - 1
    inner = "filters" if filters_inner else "channels"
    summed = "filters" if pass_ == "backprop_input" else "channels"
    columns = tile.block_n // tile.defines["CLUSTER"]
    others = columns if inner == summed else line
    assert one.box == ((line, others, 1, 1) if filters_inner else (line, 1, others, 1))


def test_nothing_is_planned_that_the_driver_would_refuse():
    """The stand-in encoders hold every map to the driver's documented rules."""
    device = Device.of(ARCH)
    taken = refused = 0
    # A stride phase without taps has a corner that is beyond what a map may have.
    corner = ConvProblem(
        (1, 4, 1, 8), (200, 1, 8, 8), stride=(2, 1), dilation=(2, 1), padding=((267, 250), (0, 0)),
        data_format="NHWC", filter_format="HWIO", dtype="float16",
    )  # fmt: skip
    stretched = (
        problem.replace(padding=tuple((before * 9, after) for before, after in problem.padding))
        for problem in random_lines(2500, seed=5)
    )
    for problem in (corner, *stretched):
        for pass_ in PASSES:
            request = Request(problem, pass_, device)
            if FAMILY.refuses(request) is not None:
                refused += 1
                continue
            pass_plan = plan_pass(problem, pass_, device, "cuda-hopper")
            strides = Strides.contiguous(problem)
            launches = hopper.prepare(pass_plan, problem, strides, None, device)
            product = next(one for one in launches if one.entry == "conv_hopper")
            for argument in product.arguments:
                if isinstance(argument, tensormaps.TensorMaps):
                    for one in argument.maps:
                        emulator.tensormap.encode(one, 4096)
                    taken += 1
    assert taken > 1500
    assert refused > 100


def test_every_contribution_is_walked_over_once():
    """The walks of backprop-input meet each (input, tap, output) of the definition, once."""
    for problem in random_lines(300, seed=6):
        for axis, extent in enumerate(problem.input_sizes):
            rule = problem.axes[axis]
            expected = sorted(
                (output * rule.stride - rule.pad_before + tap * rule.dilation, tap, output)
                for output in range(rule.output)
                for tap in range(rule.filter)
            )
            phases = {walk[axis] for walk in walks(problem, "backprop_input") if walk[axis].taps}
            met = sorted(
                (
                    walk.place_first + pixel * walk.place_step,
                    walk.filter_first + tap * walk.filter_step,
                    walk.base + pixel * walk.stride + tap * walk.spacing,
                )
                for walk in phases
                for pixel in range(walk.pixels)
                for tap in range(walk.taps)
            )
            inside = [one for one in expected if 0 <= one[0] < extent]
            assert [one for one in met if 0 <= one[2] < rule.output] == inside


# -- compile evidence ------------------------------------------------------------------------------


def variants():
    """Tiles and launches: every tile, pass and filter format, with phases and splits."""
    device = Device.of(ARCH)
    layer = ConvProblem(
        (32, 56, 56, 256), (256, 3, 3, 256), padding=1, data_format="NHWC", filter_format="OHWI",
        dtype="float16",
    )  # fmt: skip
    filters_last = in_formats(layer, "NHWC", "HWIO").replace(dtype="bfloat16")
    volume = ConvProblem(
        (2, 8, 28, 28, 64), (64, 3, 3, 3, 64), stride=(1, 2, 2), padding=1, data_format="NDHWC",
        filter_format="ODHWI", dtype="float16",
    )  # fmt: skip
    wanted = [(layer, "forward", tile, 1) for tile in WIDE[::2]]
    widest = WIDE[0]
    wanted += [
        (filters_last, "forward", widest, 1),
        (layer, "backprop_input", widest, 1),
        (filters_last.replace(stride=2), "backprop_input", WIDE[2], 1),
        (volume, "backprop_input", widest, 1),
        (layer, "backprop_filter", widest, 1),
        (layer, "backprop_filter", WIDE[2], 3),
        (filters_last, "backprop_filter", widest, 3),
    ]
    rows, rows_last = (in_formats(layer, "NCHW", filters) for filters in ("OIHW", "HWIO"))
    wanted += [
        (rows, "forward", PLANAR[0], 1),
        (rows, "backprop_filter", PLANAR[0], 1),
        (rows, "backprop_filter", PLANAR[2], 3),
        (rows_last, "backprop_filter", PLANAR[2], 1),
    ]
    single, single_last = (problem.replace(dtype="float32") for problem in (layer, filters_last))
    wanted += [(single, "forward", tile, 1) for tile in SINGLE[::4]]
    wanted += [(single_last, "backprop_input", SINGLE[0], 1)]
    wanted += [(single, "forward", tile, 1) for tile in PLANES.tiles[::3]]
    wanted += [(single_last, "backprop_filter", PLANES.tiles[1], 3)]
    for problem, pass_, tile, splits in wanted:
        pass_plan = PassPlan(pass_, "cuda-hopper", "", tile, 1, splits, 1)
        strides = Strides.contiguous(problem)
        launches = hopper.prepare(pass_plan, problem, strides, None, device)
        yield tile, next(launch for launch in launches if launch.entry == "conv_hopper")


@pytest.mark.thorough
def test_compiles_without_spills_and_with_the_instructions_it_is_for():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    for tile, prepared in variants():
        defines = dict(prepared.defines)
        source = sources.load(prepared.source)
        cubin, log = compiler.compile_cubin(source, defines, "sm_90a")
        assert no_spills(log), f"{defines}: {log}"
        listing = disassemble(cubin)
        found = instructions(listing)
        assert ("MULTICAST" in listing) == (defines["CLUSTER"] > 1)
        # All products of a step, and none that waits for the one before (a wait for each would
        # be more than these three).
        rows = tile.block_m // (1 if takes_turns(tile) else 2)
        assert found["HGMMA"] == rows // 64 * 4
        assert found["WARPGROUP"] == 3
        assert found["USETMAXREG"] == 2
        assert found["UTMALDG"] >= 2
        assert bool(found["UTMASTG"]) == (defines["STORE"] == 1)
        assert bool(found["STSM"]) == (not defines["SPLIT"] and defines["STORE"] != 2)
        assert found["LDL"] + found["STL"] == 0, "an array went to local memory"


def test_planes_compile_without_spills():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    _, log = compiler.compile_cubin(sources.load("conv_planes.cu"), {}, "sm_90a")
    assert no_spills(log), log
