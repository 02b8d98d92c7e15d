"""The Hopper kernels in the emulator: exact on integers, in three schedules.

Most data is channels last, with filters in both formats that need no copy.  Tiles, clusters,
splits and schedules vary from case to case.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, formats
from cupyconv.backends import Tensors
from cupyconv.errors import ConvError
from cupyconv.gpu import compiler, sources, tensormaps
from cupyconv.kernels import hopper
from cupyconv.kernels.copies import ROLES_OF, copy_bytes, shape_of
from cupyconv.kernels.family import Choices
from cupyconv.kernels.hopper import (
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
from cupyconv.kernels.strides import Strides, element_strides
from cupyconv.launch import Part
from cupyconv.planning import Device, PassPlan, Plan, Request, plan, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.launches import prepare
from cupyconv.planning.plan import plan_of
from cupyconv.problem import ITEMSIZE, PASSES
from tests import agreement, emulator
from tests.agreement import candidate_with, compute, fits, plan_with
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
from tests.views import BY_NAME, KINDS, named, strides_of
from tests.views import require_exact as require_exact_on_views

ARCH = "sm_90"
FAMILY = FAMILIES["cuda-hopper"]
PLANAR = [tile for tile in FAMILY.tiles if tile.defines["PLANAR"]]  # 16-bit types
WIDE = [tile for tile in FAMILY.tiles if tile.itemsize == 2 and tile not in PLANAR]
SINGLE = [tile for tile in FAMILY.tiles if tile.itemsize == 4]
PLANES = FAMILIES["cuda-hopper-bf16x6"]
BY_PLANES = {"impl": PLANES.name, "arch": ARCH, "precision": "bf16x6"}


def last_axes(problem: ConvProblem) -> list[ConvProblem]:
    """Return the problem with channels-last data and each channels-last or filters-last filter."""
    rank = problem.spatial_rank
    data = formats.data_formats(rank)[1]
    return [in_formats(problem, data, filters) for filters in formats.filter_formats(rank)[1:]]


def require_exact(
    problem: ConvProblem, impl: str = "cuda-hopper", precision: str = "ieee", **choices: int
) -> tuple[str, ...]:
    """Require exact results of the passes that a family supports, and return the passes."""
    passes = fits(problem, impl, ARCH, precision)
    how: str | Plan = impl
    if choices:
        how = plan_with(problem, impl, emulator.device(ARCH), precision=precision, **choices)
    agreement.require_exact(
        emulator, problem, impl=how, arch=ARCH, passes=passes, precision=precision
    )
    return passes


def run_case(number: int, turn: int) -> tuple[str, ...]:
    problem = last_axes(HOPPER_CASES[number].problem)[turn]
    problem = problem.replace(dtype="bfloat16" if number % 4 == 3 else "float16")
    with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
        return require_exact(problem, tile=2 * number + turn, splits=1 + 2 * (number % 2))


@pytest.mark.parametrize("number", range(len(HOPPER_CASES)), ids=[c.name for c in HOPPER_CASES])
def test_edge_cases_are_exact(number):
    assert run_case(number, turn=number % 2) == PASSES


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HOPPER_CASES)), ids=[c.name for c in HOPPER_CASES])
def test_edge_cases_are_exact_in_the_other_filter_format(number):
    assert run_case(number, turn=1 - number % 2) == PASSES


@pytest.mark.parametrize("splits", [7, 9])
def test_splits_may_have_one_step_or_none(splits):
    """Nine steps are divided into seven splits, of which two are empty, or into nine splits."""
    problem = ConvProblem((1, 64, 6, 7), (64, 64, 3, 3), padding=1, dtype="float16")
    problem = last_axes(problem)[0]
    request = Request(problem, "forward", Device.of(ARCH))
    for tile in FAMILY.fitting_tiles(request):
        assert FAMILY.candidate(request, Choices(tile=tile, splits=9)).splits == 9
        assert FAMILY.candidate(request, Choices(tile=tile, splits=10)) is None
    assert {one.splits for one in FAMILY.candidates(request)} == {1}
    chosen = plan_with(problem, "cuda-hopper", emulator.device(ARCH), splits=splits)
    assert chosen["forward"].splits == splits
    agreement.require_exact(emulator, problem, impl=chosen, arch=ARCH, passes=("forward",))


# -- float32 ---------------------------------------------------------------------------------------

FLOAT_CASES = ("one_tile", "everything_differs", "a_volume_with_phases", "groups", "ring_wraps")


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_tf32_is_exact_on_integers(name):
    """wgmma needs tf32 operands that are contiguous along k; other operands are copied."""
    number = [case.name for case in HOPPER_CASES].index(name)
    schedule = emulator.SCHEDULES[number % 3]
    problem = last_axes(HOPPER_CASES[number].problem)[number % 2]
    with emulator.settings(schedule):
        passes = require_exact(problem, precision="tf32", tile=number, splits=1 + 2 * (number % 2))
    assert passes == ("forward", "backprop_input")


@pytest.mark.parametrize("name", FLOAT_CASES)
def test_planes_are_exact_on_edge_cases(name):
    number = [case.name for case in HOPPER_CASES].index(name)
    problem = last_axes(HOPPER_CASES[number].problem)[number % 2]
    schedule = emulator.SCHEDULES[number % 3]
    with emulator.settings(schedule):
        passes = require_exact(
            problem, PLANES.name, "bf16x6", tile=number, splits=1 + 2 * (number % 2)
        )
    assert passes == PASSES


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
            planned = plan_pass(problem, pass_, device, precision=precision)
            assert planned.implementation != PLANES.name
            with pytest.raises(ConvError, match="which only precision='bf16x6' permits"):
                plan_pass(problem, pass_, device, PLANES.name, precision)
        asked = Request(problem, pass_, device, "bf16x6")
        assert PLANES.refuses(asked) is None
        assert "workspace" in PLANES.refuses(replace(asked, workspace_limit=1000))


def test_plans_with_planes_are_replayed_only_if_permitted():
    problem, device = last_axes(HOPPER_CASES[0].problem)[0], Device.of(ARCH)
    kept = Plan.from_json(plan(problem, device, PLANES.name, "bf16x6").to_json())
    request = Request(problem, "forward", device)
    assert kept.replay(replace(request, precision="bf16x6")).implementation == PLANES.name
    for precision in ("ieee", "tf32"):
        with pytest.raises(ConvError, match="Pass precision='bf16x6'"):
            kept.replay(replace(request, precision=precision))
    unsaid = kept.to_json().replace('"precision": "bf16x6"', '"precision": "ieee"')
    with pytest.raises(ConvError, match="which only precision='bf16x6' permits"):
        Plan.from_json(unsaid)


def random_lines(count: int, seed: int) -> list[ConvProblem]:
    """Return random channels-last problems with channels multiplied by 8, 5 or 1."""
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
def test_random_layers_are_exact():
    """Few layers are tested, because each rank needs separately compiled kernels."""
    ran = 0
    for number, problem in enumerate(random_lines(32, seed=3)):
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            ran += len(require_exact(problem))
    assert ran >= 20


@pytest.mark.slow
def test_more_random_layers_are_exact():
    for number, problem in enumerate(random_lines(200, seed=4)):
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            require_exact(problem, tile=number)


OTHER_TYPES = {
    "bfloat16": ("cuda-hopper", "bfloat16", "ieee"),
    "tf32": ("cuda-hopper", "float32", "tf32"),
    "planes": (PLANES.name, "float32", "bf16x6"),
}
"""Family, dtype and precision, keyed by kind of operands."""


def long_integers(problem: ConvProblem, pass_: str, share: int) -> Data:
    """Return integers whose sums are exact in float32, and which need every plane of bfloat16.

    The bits of a product are given to the first operand (``share`` 0), to the second (1), or half
    to each (2), so that all six products of planes are needed.
    """
    taps = math.prod(problem.filter_sizes)
    terms = {
        "forward": taps * (problem.C // problem.groups),
        "backprop_input": taps * (problem.K // problem.groups),
        "backprop_filter": problem.N * math.prod(problem.output_sizes),
    }[pass_]
    bits = 22 - max(terms, 1).bit_length()  # leaves room for rounded-up planes and the bias
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
    """Require exact results for random problems, and return the number of passes run."""
    impl, dtype, precision = OTHER_TYPES[kind]
    ran = 0
    for number, random in enumerate(random_lines(8 * count, seed=seed)[:count]):
        problem = random.replace(dtype=dtype)
        choices = {"tile": number, "splits": 1 + 2 * (number % 2)}
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            passes = require_exact(problem, impl, precision, **choices)
            for pass_ in passes if kind == "planes" else ():
                data = long_integers(problem, pass_, (number + PASSES.index(pass_)) % 3)
                chosen = plan_with(
                    *(problem, impl, emulator.device(ARCH)),
                    passes=(pass_,),
                    precision=precision,
                    **choices,
                )
                got = compute(emulator, pass_, problem, data, **{**BY_PLANES, "impl": chosen})
                expected = compute(cupyconv, pass_, problem, data, impl="reference")
                assert np.array_equal(got, expected), f"{pass_} of {problem}"
        ran += len(passes)
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_random_layers_of_other_dtypes_are_exact(kind):
    """Few layers are tested, because each needs separately compiled kernels."""
    assert require_random(kind, 3, seed=7) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_more_random_layers_of_other_dtypes_are_exact(kind):
    assert require_random(kind, 60, seed=8) >= 80


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


# -- groups ----------------------------------------------------------------------------------------

# (groups, channels per group, filters per group): the supported passes, which sum over whole lines
# or over pixels.
PARTS_OF_LINES = {
    (2, 40, 40): ("backprop_filter",),
    (3, 32, 72): ("backprop_filter",),
    (2, 64, 40): ("forward", "backprop_filter"),
    (2, 72, 64): ("backprop_input", "backprop_filter"),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", PARTS_OF_LINES, ids=lambda one: "-".join(map(str, one)))
def test_groups_smaller_than_a_line_are_exact(groups, every):
    """A line extends into the next group; products do not sum over that part, and drop it."""
    count, channels, filters = groups
    turn = list(PARTS_OF_LINES).index(groups)
    layer = ConvProblem(
        (2, count * channels, 5, 56), (count * filters, channels, 3, 3), padding=1, groups=count,
        dtype="float16",
    )  # fmt: skip
    orders = [*last_axes(layer), layer]
    for number, problem in enumerate(orders if every else orders[turn % 3 :][:1]):
        with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
            passes = require_exact(problem, tile=2 * (number + turn), splits=1 + 2 * (number % 2))
        assert passes == PARTS_OF_LINES[groups]


def test_groups_smaller_than_a_line_are_independent():
    """A NaN in one group does not reach results of other groups."""
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
def test_products_must_sum_over_whole_lines(operands):
    layer = last_axes(ConvProblem((2, 96, 5, 6), (128, 48, 3, 3), padding=1, groups=2))[0]
    family, problem, precision = (
        (FAMILY, layer.replace(dtype="float16"), "ieee")
        if operands == "float16"
        else (PLANES, layer, "bf16x6")
    )
    assert fits(problem, family.name, ARCH, precision) == PASSES[1:]
    refusal = family.refuses(Request(problem, "forward", Device.of(ARCH), precision))
    assert refusal == (
        "each group must have a multiple of 64 channels, since TMA loads lines of 64: groups have "
        "48"
    )
    narrow = ConvProblem((2, 62, 5, 6), (128, 31, 3, 3), padding=1, groups=2)
    narrow = in_formats(narrow, "NHWC", "OHWI").replace(dtype=problem.dtype)
    for pass_ in PASSES:
        refusal = family.refuses(Request(narrow, pass_, Device.of(ARCH), precision))
        assert refusal.endswith("half filled by one group: groups have 31 and 64")


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
def test_other_memory_orders_are_exact(name):
    """Operands are copied or read in place, and results are stored in the given order."""
    number = [case.name for case in HOPPER_CASES].index(name)
    first, *others = all_formats(HOPPER_CASES[number].problem.replace(dtype="float16"))
    for turn, problem in enumerate((first, others[number % 3])):
        with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
            passes = require_exact(problem, tile=2 * (number + turn), splits=1 + 2 * (number % 2))
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
    last, *rows = layouts(problem, pass_, strides, operands)
    assert not is_planar(last.problem)
    assert all(is_planar(found.problem) for found in rows)
    return (rows or [last])[0]


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
            assert not planar(problem, pass_, "tf32")
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


def test_plan_reports_copies_of_operands():
    rows = ConvProblem((32, 64, 56, 56), (64, 64, 3, 1), padding=(1, 0), dtype="float16")
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
            assert not planar(problem, pass_, "tf32")
    volume = ConvProblem((1, 64, 4, 4, 64), (64, 64, 3, 3, 3), padding=1, dtype="float16")
    assert not any(planar(volume, pass_) for pass_ in PASSES)
    # A filter gradient needs a map for each tap of a row, and each map must read some pixels.
    row = ConvProblem((1, 8, 120), (8, 8, 15), padding=56, dilation=8, dtype="float16")
    assert all(planar(row, pass_) for pass_ in PASSES)
    longer = row.replace(filter_shape=(8, 8, 17), padding=64)
    assert [planar(longer, pass_) for pass_ in PASSES] == [True, True, False]
    beyond = row.replace(filter_shape=(8, 8, 3), padding=120, dilation=120)
    assert [planar(beyond, pass_) for pass_ in PASSES] == [True, True, False]


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


@pytest.mark.parametrize(
    "change", [lambda x: x[..., ::2], lambda x: x[:, :, ::-1, ::2]], ids=["gaps", "backwards"]
)
def test_memory_that_tma_cannot_read_is_copied(change):
    problem = last_axes(HOPPER_CASES[2].problem.replace(dtype="float16"))[0]
    data = integer_data(problem)
    x = change(np.repeat(data.x, 2, axis=3))
    arguments = problem.keywords
    got = emulator.conv_forward(x, data.w, impl="cuda-hopper", arch=ARCH, **arguments)
    assert (got == cupyconv.conv_forward(x, data.w, impl="reference", **arguments)).all()


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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_views_that_tma_cannot_read_are_copied(kind):
    """Views with negative or zero strides, or overlapping elements, are copied."""
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
            elif kind.name == "inside" and role == "x":  # other operands may need to be matrices
                assert copied == ()


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
        planned = plan_pass(problem, "backprop_input", device, "cuda-hopper")
        assert planned.tile in (WIDE if is_copied else PLANAR)
    request = Request(deep, "backprop_input", device)
    of_filter = layout_of(request, PLANAR[0]).copied_bytes
    planned = plan_pass(deep, "backprop_input", device, "cuda-hopper", "ieee", of_filter)
    assert planned.tile in PLANAR
    assert planned.workspace_bytes == of_filter


def test_workspace_size_equals_its_contents():
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
                choices = {field.name: getattr(one, field.name) for field in fields(Choices)}
                planned = PassPlan(pass_, family.name, "", **choices)
                require_workspace(hopper.stage(request, planned), planned)


def require_workspace(made: hopper.Staged, planned_: PassPlan) -> None:
    """Require a workspace with the sums of splits, followed by the copies."""
    size, planes, end = made.other.itemsize, made.other.planes, 0
    if planned_.splits > 1:
        sums = split_elements(made.problem, planned_.pass_, planned_.tile)
        end = planned_.splits * sums * 4
    for role, offset in made.made:
        assert offset == end
        end += planes * copy_bytes(shape_of(made.problem, role), size)
    assert end == planned_.workspace_bytes, planned_


def test_last_tile_of_tensors_beyond_32_bits():
    """x and y have more than 2^32 elements; only the pages that the tile touches are allocated."""
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


def test_tiles_are_visited_in_bands():
    """A band has eight rows of tiles, visited column by column, so that operands stay in L2."""
    problem = ConvProblem(
        (1, 32, 40, 8), (128, 1, 1, 8), data_format="NHWC", filter_format="OHWI", dtype="float16"
    )  # fmt: skip
    data = integer_data(problem)
    expected = cupyconv.conv_forward(data.x, data.w, impl="reference", **problem.keywords)
    backend = emulator.convolutions.backend(ARCH)
    backend.device = replace(backend.device, multiprocessors=2**30)  # a block for each tile
    (tile,) = (t for t in WIDE if (t.block_m, t.block_n) == (128, 64))
    chosen = plan_with(problem, "cuda-hopper", backend.device, tile=tile, passes=("forward",))
    pass_plan = chosen["forward"]
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


def test_encoded_maps_are_cached_by_address_and_shape():
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
"""Layer whose pixels are contiguous along an axis that is not the innermost."""

GROUPS_WITHIN_A_PIECE = ConvProblem((1, 384, 4, 8), (216, 64, 1, 1), groups=6)
ROWS_WITHIN_A_PIECE = ConvProblem((1, 8, 6, 64), (8, 8, 3, 3))
"""Layer whose images, but not rows, are multiples of 16 bytes."""

MAPPED = (("cuda-hopper", "bfloat16", "ieee"), ("cuda-hopper", "float32", "tf32"))
MAPPED += ((PLANES.name, "float32", "bf16x6"),)
"""Family, dtype and precision for each kind of operands."""


@pytest.mark.parametrize("kind", MAPPED, ids=lambda kind: kind[-1])
def test_tensor_maps_address_every_element(kind):
    """Boxes of tensor maps fit the ring, and results are stored in the widest possible vectors."""
    seen = set()
    for request, chosen in planned_on_views(*kind):
        problem, pass_, strides = request.problem, request.pass_, request.memory
        device, made = request.device, hopper.stage(request, chosen)
        launches = FAMILIES[kind[0]].launches(request, chosen)
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
    """Return the store and the vector of a result, derived from its elements' addresses."""
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
    # A box must not extend into the next group.
    is_matrix &= problem.groups == 1 or of_group % 64 == 0
    by_tma = is_one and not is_planar(problem) and is_matrix and strides.alignment == 16
    return hopper.STORE_BOXES if by_tma else hopper.STORE_ROWS, run


def longest_run(problem, strides, role, axes, of_group, is_one=True) -> int:
    """Return the longest vector along axes that is contiguous and aligned everywhere in a group."""
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
    """Yield requests and plans of all cases, on contiguous tensors and on views, with splits."""
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
                        splits = (1, 2, 1, 3)[(turn + gap) % 4]
                        yield request, plan_of(request, candidate_with(request, impl, tile, splits))


def tiles_of_layouts(family, request: Request, number: int):
    """Return one fitting tile for each layout: channels last, and planar if supported."""
    fitting: dict[int, list] = {}
    for one in family.candidates(request):
        fitting.setdefault(one.tile.defines["PLANAR"], []).append(one.tile)
    return [tiles[number % len(tiles)] for tiles in fitting.values()]


def inside_larger_ones(problem: ConvProblem, gap: int) -> Strides:
    """Return strides of views with a gap between pixels and taps; a gap of 0 is contiguous."""
    steps = []
    for shape in (problem.input_shape, problem.filter_shape, problem.output_shape):
        *outer, inner = (size + 8 * bool(gap) for size in shape)
        whole = np.empty((*(size * max(gap, 1) for size in outer), inner), np.int8)
        part = whole[tuple(slice(0, size * max(gap, 1), max(gap, 1)) for size in shape[:-1])]
        steps.append(element_strides(part[..., : shape[-1]]))
    return Strides(*steps)


def require_map(one: tensormaps.TensorMap, problem: ConvProblem, role: str, operand) -> None:
    """Require a tensor map to address every element of every plane."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    lies = operand.offset + operand.itemsize * sum_of_products(shape, steps)
    planes = np.arange(operand.planes) * copy_bytes(shape, operand.itemsize)
    expected = lies + planes.reshape(-1, *(1 for _ in shape))
    if is_planar(problem) and role != "w":  # a map may omit pixels that no tap reads
        expected = expected[..., : one.extents[0]]
    outwards = one.extents[::-1]
    found = one.offset + sum_of_products(outwards, (*one.strides[::-1], one.itemsize))
    assert (one.role, one.itemsize) == (operand.role, operand.itemsize)
    assert (found == expected.reshape(outwards)).all()


def sum_of_products(shape, steps) -> np.ndarray:
    """Return the sum of products of indices and strides."""
    indices = np.indices(shape, sparse=True)
    return sum((at * step for at, step in zip(indices, steps, strict=True)), start=np.int64(0))


def require_copies(made: hopper.Staged, asked: ConvProblem, strides: Strides) -> None:
    """Require the preceding launch to read every element that it copies, in the copy's order."""
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
    """Require that a copied filter can be prepared, and that the prepared filter is not copied."""
    request = Request(asked, planned_.pass_, Device.of(ARCH), strides=strides)
    form = planned_.family.filter_form(request, planned_)
    assert (form is not None) == ("w" in dict(made.made))
    if form is None:
        return
    orders, planes = formats.filter_formats(asked.spatial_rank), made.other.planes
    order = orders[1 + (made.problem.filter_axes[0] == 0)]
    assert form.name == order + f" in {planes} planes of bfloat16" * (planes > 1)
    assert form.bytes == planes * copy_bytes(made.problem.filter_shape, made.other.itemsize)
    require_copies(replace(made, before=(form.launch,), made=(("w", 0),)), asked, strides)
    held = hopper.stage(replace(request, strides=replace(strides, w_arranged=True)), planned_)
    assert held.other == replace(made.other, role="w", offset=0)
    assert held.made == tuple(one for one in made.made if one[0] != "w")
    require_copies(held, asked, strides)


def require_tiles(product, problem: ConvProblem, planned_: PassPlan, device: Device) -> None:
    """Require the walk to cover all tiles of all splits, with one cluster per resident place."""
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
    """Require the macros of a variant; rows of a filter gradient are windows or filters."""
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
    """Require a thread per vector to add up several splits."""
    *_, last = launches
    assert (last.entry == "conv_hopper_reduce") == (planned_.splits > 1)
    if planned_.splits > 1:
        sums = split_elements(made.problem, planned_.pass_, planned_.tile)
        assert (last.grid, last.shared_bytes) == ((math.ceil(sums / 8 / 64),), 0)


def require_pixels(maps, problem: ConvProblem, pass_: str, line: int, pixels: int) -> None:
    """Require a map of the gathered tensor's pixels for each walk."""
    if is_planar(problem) or is_pointwise(problem):
        assert {one.box for one in maps} == {box_of_pixels(problem, line, pixels)}
        return
    for one, walk in zip(maps, walks(problem, pass_), strict=True):
        assert (one.channels, one.pixels) == (line, pixels)
        corners = one.lower, one.extents[1:-1], one.upper, one.element_strides
        for axis, first, size, last, step in zip(reversed(walk), *corners, strict=True):
            end = axis.base + axis.pixels * axis.stride
            if has_taps(walk):  # without taps nothing is loaded
                assert range(first, size + last, step) == range(axis.base, end, axis.stride)


def box_of_pixels(problem: ConvProblem, line: int, pixels: int) -> tuple[int, ...]:
    """Return the box of one line of channels and ``pixels`` pixels, or of the planar layout."""
    if is_planar(problem):
        return (line, *(1 for _ in problem.data_axes[3:]), line, 1)
    return (line, pixels, 1)


def require_box(one: tensormaps.TiledMap, problem: ConvProblem, pass_: str, tile) -> None:
    """Require the box of w: a contiguous line, one tap, and a line of k or the block's columns."""
    line = tile.block_k
    filters_inner = problem.filter_axes[0] == len(problem.filter_shape) - 1
    inner = "filters" if filters_inner else "channels"
    summed = "filters" if pass_ == "backprop_input" else "channels"
    columns = tile.block_n // tile.defines["CLUSTER"]
    others = columns if inner == summed else line
    assert one.box == ((line, others, 1, 1) if filters_inner else (line, 1, others, 1))


def test_planned_tensor_maps_are_valid():
    """The emulator's encoders check every map against the driver's documented rules."""
    device = Device.of(ARCH)
    taken = refused = 0
    # A stride phase without taps has a corner outside the limits of a map.
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
            launches = prepare(pass_plan, problem, strides, device)
            product = next(one for one in launches if one.entry == "conv_hopper")
            for argument in product.arguments:
                if isinstance(argument, tensormaps.TensorMaps):
                    for one in argument.maps:
                        emulator.tensormap.encode(one, 4096)
                    taken += 1
    assert taken > 1500
    assert refused > 100


def test_backprop_input_walks_visit_every_contribution_once():
    """The walks visit each (input, tap, output) of the definition exactly once."""
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


# -- compiled code ---------------------------------------------------------------------------------


def variants():
    """Yield (tile, launch) for many tiles, passes and filter formats, with phases and splits."""
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
    # TMA reads rows of pixels only from multiples of 16 bytes, so each filter row has one tap.
    column = ConvProblem((32, 256, 56, 56), (256, 256, 3, 1), padding=(1, 0), dtype="float16")
    rows, rows_last = (in_formats(column, "NCHW", filters) for filters in ("OIHW", "HWIO"))
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
        pass_plan = PassPlan(
            pass_, "cuda-hopper", "", tile=tile, blocks=1, splits=splits, workspace_bytes=1
        )
        strides = Strides.contiguous(problem)
        launches = prepare(pass_plan, problem, strides, device)
        yield tile, next(launch for launch in launches if launch.entry == "conv_hopper")


@pytest.mark.thorough
def test_kernels_compile_to_wgmma_without_spills():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    for tile, prepared in variants():
        defines = dict(prepared.defines)
        source = sources.load(prepared.source)
        cubin, log = compiler.compile_cubin(source, defines, "sm_90a")
        assert no_spills(log), f"{defines}: {log}"
        listing = disassemble(cubin)
        found = instructions(listing)
        assert ("MULTICAST" in listing) == (defines["CLUSTER"] > 1)
        # The code has all products of a step and three waits; a wait per product would be more.
        rows = tile.block_m // (1 if takes_turns(tile) else 2)
        assert found["HGMMA"] == rows // 64 * 4
        assert found["WARPGROUP"] == 3
        assert found["USETMAXREG"] == 2
        assert found["UTMALDG"] >= 2
        assert bool(found["UTMASTG"]) == (defines["STORE"] == 1)
        assert bool(found["STSM"]) == (not defines["SPLIT"] and defines["STORE"] != 2)
        assert found["LDL"] + found["STL"] == 0, "an array is in local memory"


def test_planes_compile_without_spills():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    _, log = compiler.compile_cubin(sources.load("conv_planes.cu"), {}, "sm_90a")
    assert no_spills(log), log
