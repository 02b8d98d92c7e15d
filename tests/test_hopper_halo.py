"""The Hopper kernels that load halos, on the CPU under the checker: exact, in three schedules."""

from __future__ import annotations

import re

import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.gpu import compiler, hopper_halo, sources
from cupyconv.gpu.tensormaps import TensorMaps
from cupyconv.planning import Device, PassPlan, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.families.hopper_halo import MAX_HALO, SQUARE, WHOLE
from cupyconv.planning.strides import Strides
from tests import agreement, emulator
from tests.agreement import fits, planned
from tests.configurations import HALO_CASES, in_formats, random_data, random_problems
from tests.cubins import disassemble, instructions, no_spills

ARCH = "sm_90"
FAMILY = FAMILIES["cuda-hopper-halo"]
TILES = sum(tile.itemsize == 2 for tile in FAMILY.tiles)
BOTH = ("forward", "backprop_input")
FORMATS = (("NHWC", "OHWI"), ("NHWC", "HWIO"))
NAMES = [case.name for case in HALO_CASES]


def require_exact(problem: ConvProblem, precision: str = "ieee") -> tuple[str, ...]:
    """The passes that the family takes agree with the reference; which they were."""
    passes = fits(problem, FAMILY.name, ARCH, precision)
    agreement.require_exact(
        emulator, problem, impl=FAMILY.name, arch=ARCH, passes=passes, precision=precision
    )
    return passes


def problem_of(name: str, turn: int = 0, dtype: str = "float16") -> ConvProblem:
    """A case in one of the two filter formats that need no copy."""
    return in_formats(HALO_CASES[NAMES.index(name)].problem, *FORMATS[turn]).replace(dtype=dtype)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_on_its_edges(number):
    dtype = "bfloat16" if number % 4 == 3 else "float16"
    problem = problem_of(NAMES[number], number // 2 % 2, dtype)
    schedule = emulator.SCHEDULES[number % 3]
    with planned(FAMILY.name, 5 * number), emulator.settings(schedule):
        assert require_exact(problem) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize("tile", range(TILES))
def test_with_every_tile(tile):
    for number, name in enumerate(NAMES):
        problem = problem_of(name, (tile + number) % 2)
        with (
            planned(FAMILY.name, tile),
            emulator.settings(emulator.SCHEDULES[(tile + number) % 3]),
        ):
            require_exact(problem)


@pytest.mark.parametrize(
    "name",
    ["everything_differs_in_rectangles", "groups_with_halos", "blocks_take_several_rectangles"],
)
def test_tf32(name):
    number = NAMES.index(name)
    problem = problem_of(name, number % 2, "float32")
    schedule = emulator.SCHEDULES[number % 3]
    with planned(FAMILY.name, number), emulator.settings(schedule):
        assert require_exact(problem, "tf32") == BOTH


def test_other_memory_orders_go_through_copies():
    problem = HALO_CASES[NAMES.index("everything_differs_in_rectangles")].problem.replace(
        dtype="float16"
    )
    assert require_exact(problem) == BOTH


@pytest.mark.thorough
def test_random_configurations():
    """Filters of several rows and stride 1, with channels in multiples of 8."""
    ran = 0
    for number, random in enumerate(random_problems(400, seed=11)):
        if random.groups > 1 or random.spatial_rank != 2 or 0 in random.input_shape:
            continue
        x, w = (list(shape) for shape in in_formats_shapes(random))
        x[1], w[0], w[1] = x[1] * 8, w[0] * 8, w[1] * 8
        wide = random.replace(
            input_shape=x, filter_shape=w, data_format="NCHW", filter_format="OIHW",
            stride=1, dtype="float16",
        )  # fmt: skip
        problem = in_formats(wide, *FORMATS[number % 2])
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            ran += len(require_exact(problem))
        if ran >= 12:
            return
    raise AssertionError(f"only {ran} passes were taken")


def in_formats_shapes(problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = in_formats(problem, "NCHW", "OIHW")
    return first.input_shape, first.filter_shape


def test_activation_and_bias_are_fused():
    problem = problem_of("whole_squares")
    data = random_data(problem)
    arguments = {**problem.keywords, "activation": "silu"}
    given = (data.x, data.w, data.bias)
    got = emulator.conv_forward(*given, impl=FAMILY.name, arch=ARCH, **arguments)
    expected = cupyconv.conv_forward(*given, impl="reference", **arguments)
    agreement.require_close(got, expected, rtol=2e-3, atol=2e-3)


def test_it_is_not_chosen_unasked():
    """Where it is the faster one has not been measured on a GPU."""
    problem = problem_of("whole_squares")
    for pass_ in BOTH:
        assert FAMILY.refuses(Request(problem, pass_, Device.of(ARCH))) is None
        assert plan_pass(problem, pass_, Device.of(ARCH)).implementation != FAMILY.name


def test_it_says_what_it_does_not_take():
    whole = problem_of("whole_squares")
    device = Device.of(ARCH)
    row = whole.replace(filter_shape=(64, 1, 3, 64))
    tall = whole.replace(dilation=(5, 1), padding=(5, 1))
    line = ConvProblem(
        (1, 64, 64), (64, 3, 64), data_format="NWC", filter_format="OWI", dtype="float16"
    )
    reasons = {
        ("backprop_filter", whole): "has the forward pass and backprop_input",
        ("forward", line): "two spatial axes, not 1",
        ("forward", whole.replace(stride=(2, 1))): r"stride 1, not \(2, 1\)",
        ("forward", row): "a filter of one row has no halo",
        ("forward", tall): f"a halo of {MAX_HALO} rows, not 10",
        ("forward", whole.replace(dtype="float32")): "16-bit types and TF32, not float32",
    }
    for (pass_, problem), reason in reasons.items():
        assert re.search(reason, FAMILY.refuses(Request(problem, pass_, device)) or "")
    column = whole.replace(input_shape=(1, 2**28, 1, 64), padding=(0, 1))
    assert FAMILIES["cuda-hopper"].refuses(Request(column, "forward", device)) is None
    assert "pixels in whole rectangles" in (
        FAMILY.refuses(Request(column, "forward", device)) or ""
    )
    older = Request(whole, "forward", Device.of("sm_80"))
    assert "9.0" in (FAMILY.refuses(older) or "")


# -- shared memory and compile evidence ------------------------------------------------------------


def launches(problem: ConvProblem, pass_: str):
    """The product's launch with each tile."""
    for tile in FAMILY.tiles:
        if tile.itemsize == (2 if problem.dtype == "float16" else 4):
            pass_plan = PassPlan(pass_, FAMILY.name, "", tile, 1, 1, 0)
            strides = Strides.contiguous(problem)
            (one,) = hopper_halo.prepare(pass_plan, problem, strides, None, Device.of(ARCH))
            yield one


def test_every_halo_leaves_stages_enough_for_the_filter():
    for rows in range(2, MAX_HALO + 2):
        problem = problem_of("whole_squares").replace(filter_shape=(64, rows, 3, 64))
        for launch in launches(problem, "forward"):
            defines = dict(launch.defines)
            assert defines["HALO"] == rows - 1
            assert defines["STAGES"] >= (4 if rows <= 3 else 3), defines
            assert launch.shared_bytes <= 227 << 10


def test_every_tile_divides_what_is_counted_as_whole_rectangles():
    images, rows, columns = WHOLE
    for tile in FAMILY.tiles:
        height = tile.defines["ROWS"]
        assert columns == SQUARE
        assert rows % height == images % (tile.block_m // (height * SQUARE)) == 0


@pytest.mark.thorough
def test_compiles_without_spills_and_with_the_instructions_it_is_for():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    whole = problem_of("whole_squares")
    chosen = [
        *list(launches(whole, "forward"))[::3],
        *list(launches(problem_of("whole_squares", 1), "backprop_input"))[:1],
        *list(launches(problem_of("whole_squares", 1), "forward"))[5:6],
        *list(launches(problem_of("whole_squares", 0, "float32"), "forward"))[:1],
    ]
    for prepared in chosen:
        defines = dict(prepared.defines)
        cubin, log = compiler.compile_cubin(sources.load(prepared.source), defines, "sm_90a")
        assert no_spills(log), f"{defines}: {log}"
        listing = disassemble(cubin)
        found = instructions(listing)
        assert ("MULTICAST" in listing) == (defines["CLUSTER"] > 1)
        assert found["HGMMA"] == defines["BLOCK_M"] // 128 * 4
        assert found["WARPGROUP"] <= 3
        assert found["USETMAXREG"] == 2
        assert found["UTMALDG"] >= 2
        assert bool(found["UTMASTG"]) == (defines["STORE"] == 1)
        assert found["LDL"] + found["STL"] == 0, "an array went to local memory"


def test_a_filter_of_three_rows_loads_its_rows_together():
    """For each of its columns, 18 rows of 8 pixels for 16: not three times 16."""
    for launch in launches(problem_of("whole_squares"), "forward"):
        (maps,) = (one for one in launch.arguments if isinstance(one, TensorMaps))
        defines = dict(launch.defines)
        images = defines["BLOCK_M"] // (8 * defines["ROWS"])
        assert maps.maps[0].box == (64, 8, defines["ROWS"] + 2, images)
