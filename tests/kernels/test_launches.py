"""Launches: macros, grids, arguments and the driver's rules."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, binding
from cupyconv.gpu import compiler
from cupyconv.gpu.runtime import Series
from cupyconv.kernels import bias, direct, gather, patch
from cupyconv.kernels.device import CHIPS as PLANNED_CHIPS
from cupyconv.kernels.family import Choices
from cupyconv.kernels.limits import LARGEST_EXTENT
from cupyconv.kernels.strides import Strides, contiguous_strides
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders, plan_of
from cupyconv.problem import PASSES
from tests import emulator, launches
from tests.agreement import fits
from tests.configurations import DIRECT_CASES, PATCH_CASES, in_formats, integer_data
from tests.cubins import Parameter, Resources
from tests.emulator import driver, tensormap
from tests.emulator.driver import CHIPS, CheckedFunction, Refusal
from tests.kernels.test_kernel_compile import ARCHITECTURES
from tests.launches import prepare

NOTHING, TABLE = Resources(8, 0, None, None, ()), Resources(8, 1536, None, None, ())
"""Resources of kernels without parameters."""

LAUNCHES = [
    (NOTHING, (2**31 - 1,), (1024,), 0, None),
    (NOTHING, (2**31,), (96,), 0, "a grid has 1 to"),
    (NOTHING, (0,), (96,), 0, "a grid has 1 to"),
    (NOTHING, (1, 1, 2**16), (96,), 0, "a grid has 1 to"),
    (NOTHING, (1,), (1, 1, 65), 0, "a block has 1 to"),
    (NOTHING, (1,), (32, 33), 0, "takes 1 to 1024 threads a block: got 1056"),
    (replace(NOTHING, launch_bounds=96), (1,), (97,), 0, "takes 1 to 96 threads"),
    (replace(NOTHING, registers=128), (1,), (1024,), 0, "too much of reg"),
    (TABLE, (1,), (32,), (48 << 10) - 1536, None),
    (TABLE, (1,), (32,), (48 << 10) - 1535, "beside 1536 static ones, 47616 are allowed"),
    (replace(NOTHING, cluster=(2, 1, 1)), (3,), (32,), 0, r"a grid of \(3, 1, 1\)"),
    (replace(NOTHING, cluster=(16, 1, 1)), (16,), (32,), 0, "more than the 8 blocks"),
]
"""Resources, grid, block, dynamic shared bytes, and the expected error (None: a valid launch)."""


@pytest.mark.parametrize(("resources", "grid", "block", "dynamic", "wrong"), LAUNCHES)
def test_driver_refuses_invalid_launches(resources, grid, block, dynamic, wrong):
    function = CheckedFunction("f", CHIPS[9, 0], resources)
    with nullcontext() if wrong is None else pytest.raises(Refusal, match=wrong):
        function(grid, block, (), shared_mem=dynamic)


def test_driver_refuses_invalid_arguments():
    maps = np.zeros(1, np.dtype([("maps", "u8", 16)]))
    for parameters, arguments, wrong in (
        ((Parameter(528, 8), Parameter(576, 128)), (np.uint64(0),), "arguments of .8, 128. bytes"),
        ((Parameter(544, 128),), (maps,), "tensor maps at 544 .* no multiple of 64"),
        ((Parameter(528, 4100),), (np.zeros(4100, "u1"),), "4100 bytes of arguments, 4096 fit"),
    ):
        function = CheckedFunction("f", CHIPS[9, 0], replace(NOTHING, parameters=parameters))
        with pytest.raises(Refusal, match=wrong):
            function((1,), (32,), arguments)


# -- tensor maps -----------------------------------------------------------------------------------

TILED = {"address": 1 << 20, "element_size": 2, "extents": (64, 10, 6), "strides": (128, 1280),
         "box": (64, 8, 2), "swizzle": 128}  # fmt: skip
IM2COL = {"address": 1 << 20, "element_size": 2, "extents": (64, 10, 12, 6),
          "strides": (128, 1280, 15360), "lower": (-1, -1), "upper": (-1, -1),
          "channels_per_pixel": 64, "pixels_per_column": 128, "swizzle": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("encode", "valid", "change", "wrong"),
    [
        (tensormap.encode_tiled, TILED, {"address": (1 << 20) + 8}, "multiple of 16"),
        (tensormap.encode_tiled, TILED, {"strides": (136, 1360)}, "multiples of 16"),
        (tensormap.encode_tiled, TILED, {"strides": (0, 1280)}, "below 2.40"),
        (tensormap.encode_tiled, TILED, {"strides": (112, 1280)}, "steps over less than the 64"),
        (tensormap.encode_tiled, TILED, {"strides": (128, 1200)}, "no multiple of the one before"),
        (tensormap.encode_tiled, TILED, {"box": (64, 257, 1)}, "box extents are 1 to 256"),
        (tensormap.encode_tiled, TILED, {"box": (128, 8, 2)}, "fills 128 bytes"),
        (tensormap.encode_tiled, TILED, {"element_strides": (1, 9, 1)}, "from 1 to 8"),
        (tensormap.encode_im2col, IM2COL, {"lower": (-129, 0)}, r"corners in \[-128, 127\]"),
        (tensormap.encode_im2col, IM2COL, {"lower": (5, 0), "upper": (-5, 0)}, "no pixels"),
        (tensormap.encode_im2col, IM2COL, {"pixels_per_column": 1025}, "1 to 1024"),
    ],
)
def test_driver_refuses_invalid_tensor_maps(encode, valid, change, wrong):
    encode(**valid)
    with pytest.raises(ValueError, match=wrong):
        encode(**{**valid, **change})


VIEWS = {
    "rows left out": lambda x: x[:, 1::2],
    "columns of a wider tensor": lambda x: x[:, :9, 1:],
    "reversed": lambda x: x[:, ::-1],
    "height and width exchanged": lambda x: x.swapaxes(1, 2),
    "images inside of rows": lambda x: x.swapaxes(0, 1),
    "one row for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "overlapping rows": lambda x: np.lib.stride_tricks.as_strided(
        x, (2, 6, 4, 64), (x.strides[0], x.strides[2] * 2, *x.strides[2:])
    ),
}


NARROW = {
    # Shapes of x and w with axes of one element, and the padding; only 64 channels are used.
    "one column": ((2, 9, 1, 96), (64, 3, 1, 64), ((1, 1), (0, 0))),
    "one row": ((2, 1, 9, 96), (64, 1, 3, 64), ((0, 0), (1, 1))),
    "one image": ((1, 9, 1, 96), (64, 3, 1, 64), ((1, 1), (0, 0))),
    "one tap": ((2, 9, 8, 96), (64, 1, 1, 96), 0),
    "a volume of one plane": ((2, 1, 5, 1, 96), (64, 1, 3, 1, 64), ((0, 0), (1, 1), (0, 0))),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_maps_give_one_element_axes_valid_strides(name, transposed):
    """Views of wider tensors are passed, so that strides differ from products of extents."""
    x_shape, w_shape, padding = NARROW[name]
    generator = np.random.default_rng(0)
    x, w = (
        generator.integers(-3, 4, shape).astype(np.float16)[..., :64]
        for shape in (x_shape, w_shape)
    )
    last = ("NDHWC", "ODHWI") if x.ndim == 5 else ("NHWC", "OHWI")
    rules = {"padding": padding, "data_format": last[0], "filter_format": last[1]}

    def call(api, **more):
        if transposed:  # x is used as dy
            return api.conv_transpose(x, w, **rules, **more)
        return api.conv_forward(x, w, **rules, **more)

    got = call(emulator, impl="cuda-hopper", arch="sm_90a")
    assert (got == call(cupyconv, impl="reference")).all()


@pytest.mark.parametrize("view", VIEWS)
def test_views_without_a_valid_tensor_map_are_copied(view):
    """The emulator's driver raises for tensor maps that the documentation rules out."""
    whole = np.random.default_rng(0).integers(-3, 4, (2, 15, 10, 64)).astype(np.float16)
    x = VIEWS[view](whole)
    w = np.random.default_rng(1).integers(-3, 4, (64, 3, 3, 64)).astype(np.float16)
    rules = {"padding": 1, "data_format": "NHWC", "filter_format": "OHWI"}
    got = emulator.conv_forward(x, w, impl="cuda-hopper", arch="sm_90a", **rules)
    assert (got == cupyconv.conv_forward(x, w, impl="reference", **rules)).all()


# -- planned launches ------------------------------------------------------------------------------


def test_kernels_are_allowed_their_dynamic_shared_memory():
    """The attribute is set at 48 KB of dynamic memory already, since static memory counts too."""
    function, runtime = CheckedFunction("tables", CHIPS[8, 6], TABLE), driver.DriverRuntime("sm_86")
    one = Launch("kernels.cu", "tables", (), (1,), (384,), 48 << 10, ())
    runtime._functions[one.source, one.defines, one.entry] = function
    Series([one, replace(one, shared_bytes=1 << 10)], runtime)((0,) * 5)  # one function
    assert function.max_dynamic_shared_size_bytes == 48 << 10


@pytest.mark.parametrize(("filters", "blocks"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_chunk_sums_have_a_thread_per_filter_element(filters, blocks):
    problem, device = ConvProblem((1, 1, 1), (filters, 1, 1)), Device.of("sm_80")
    planned = plan_pass(Request(problem, "backprop_filter", device), "cuda-direct")
    product, made = prepare(planned, problem, Strides.contiguous(problem), device)
    assert (made.entry, made.defines) == ("conv_direct_reduce", product.defines)
    assert (made.grid, made.block, made.shared_bytes) == ((blocks,), (64,), 0)
    assert made.arguments == ("workspace", "w", planned.splits, product.arguments[-1])


@pytest.mark.parametrize(
    ("pass_", "channels", "width", "data_format", "alignment", "source", "result"),
    [
        ("forward", 16, 8, "NHWC", 16, (1, 8, 0), (1, 8)),
        ("forward", 16, 8, "NHWC", 4, (1, 2, 0), (1, 2)),
        ("forward", 17, 8, "NHWC", 16, (1, 1, 0), (1, 1)),
        ("forward", 1, 16, "NHWC", 16, (0, 1, 0), (0, 1)),
        ("forward", 16, 16, "NCHW", 16, (0, 8, 7), (0, 2)),
        ("forward", 16, 12, "NCHW", 16, (0, 4, 3), (0, 2)),
        ("forward", 16, 16, "NCHW", 2, (0, 1, 0), (0, 1)),
        # backprop_input mirrors the filter: its first tap reads where the last tap would.
        ("backprop_input", 16, 16, "NCHW", 16, (0, 2, 1), (0, 8)),
        ("backprop_filter", 16, 16, "NCHW", 16, (0, 8, 7), (0, 2)),
    ],
)
def test_cuda_toeplitz_uses_the_widest_possible_vectors(
    pass_, channels, width, data_format, alignment, source, result
):
    """Vectors run along contiguous channels, else along columns; x and y may differ."""
    layer = ConvProblem((2, channels, 6, width), (channels, 1, 2, 3), padding=((0, 0), (1, 3)),
                        groups=channels, dtype="float16")  # fmt: skip
    problem, device = in_formats(layer, data_format, "OIHW"), Device.of("sm_80")
    strides = replace(Strides.contiguous(problem), alignment=alignment)
    planned = plan_pass(Request(problem, pass_, device, strides=strides), "cuda-toeplitz")
    launch, *_ = prepare(planned, problem, strides, device)
    macros = dict(launch.defines)
    assert tuple(macros[f"SOURCE_{name}"] for name in ("LAST", "VECTOR", "SHIFT")) == source
    assert tuple(macros[f"RESULT_{name}"] for name in ("LAST", "VECTOR")) == result


def test_reciprocals_of_tap_spacings_are_exact():
    """The quotients are computed as in TapAxis of cuda/include/gather.cuh."""
    largest = 2**31 - 1
    for spacing in (*range(1, 70), 127, 12345, 2**16 + 1, 2**29 - 1, LARGEST_EXTENT):
        _, reciprocal, shift = gather.tap_axis(spacing)
        assert reciprocal < 2**32
        multiples = {n * spacing for n in (1, 2, 3, 255, largest // spacing)}
        for dividend in {one - below for one in multiples for below in (0, 1)} | {largest}:
            if dividend <= largest:
                assert (2 * dividend * reciprocal >> 32) >> shift == dividend // spacing


FEW_TILES = ConvProblem((4, 8, 3, 2, 2), (8, 1, 2, 1, 1), groups=8)
"""Layer for which a thread block of cuda-direct has more strips than a slice has tiles."""

MANY_TILES = ConvProblem((16, 32, 56, 56), (32, 1, 3, 3), padding=1, groups=32)
"""Layer with more tiles than resident thread blocks."""

MANY_FILTERS = (
    ConvProblem((4, 3, 40, 40), (300, 3, 3, 3)),
    ConvProblem((1, 3, 40, 40), (300, 3, 3, 3), stride=(2, 1), dilation=(3, 2)),
)
"""Layers whose filters need several thread blocks of cuda-patch."""

STAYING = {
    "cuda-direct": (direct, [*(case.problem for case in DIRECT_CASES), FEW_TILES, MANY_TILES]),
    "cuda-patch": (patch, [*(case.problem for case in PATCH_CASES), *MANY_FILTERS]),
}
"""Families with persistent thread blocks: module and problems."""


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("taps", [(3, 3), (2, 40)])  # 2 + 40 bits of a tap need two words
def test_cuda_gather_predicts_the_size_of_its_tables(taps, dtype, architecture):
    """Each tile is compiled for one combination of layout and pass, in turn."""
    device = Device.of(architecture)
    nchw = ConvProblem((4, 64, 16, 48), (64, 64, *taps), padding="same", dtype=dtype)
    problems = [in_formats(nchw, *formats) for formats in (("NCHW", "OIHW"), ("NHWC", "OHWI"))]
    ways = itertools.cycle(itertools.product(problems, PASSES))
    for tile in FAMILIES["cuda-gather"].tiles:
        problem, pass_ = next(ways)
        strides = Strides.contiguous(problem)
        request = Request(problem, pass_, device, "tf32", strides=strides)
        if tile not in FAMILIES["cuda-gather"].fitting_tiles(request):
            continue
        planned = plan_of(request, FAMILIES["cuda-gather"].candidate(request, Choices(tile=tile)))
        launch, *_ = prepare(planned, problem, strides, device)
        compiled = driver.compiled(launch.source, launch.defines, architecture)
        found, words = gather.accesses(pass_, problem, strides), gather.tap_words(problem)
        made = gather.pipeline(tile, found, device, words)
        assert compiled["conv_gather"].static_shared == made.table_bytes, launch.defines


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("impl", ["cuda-direct", "cuda-gather"])
def test_planner_and_compiler_agree_on_resident_blocks(impl, dtype):
    """The planner assumes the resident blocks that NVIDIA's calculator computes, or fewer."""
    family, device = FAMILIES[impl], Device.of("sm_80")
    filters = (64, 3, 3, 1 if impl == "cuda-direct" else 64)
    problem = ConvProblem((8, 28, 28, 64), filters, groups=64 // filters[3], padding=1,
                          data_format="NHWC", filter_format="OHWI", dtype=dtype)  # fmt: skip
    strides = Strides.contiguous(problem)
    request = Request(problem, "forward", device, strides=strides)
    for planned in contenders(request, impl, 1000 if impl == "cuda-gather" else 1):
        launch, *_ = prepare(planned, problem, strides, device)
        resources = driver.compiled(launch.source, launch.defines, "sm_80")[launch.entry]
        shared, chip = launch.shared_bytes, driver.chip_of("sm_80")
        resident, _ = driver.resident_blocks(
            chip, resources, prod(launch.block), shared, shared or None
        )
        if impl == "cuda-gather":
            assert gather.resident(request, planned.tile) == resident, planned
        else:
            assert family.geometry(request, planned.tiling).resident <= resident, planned


def test_planner_and_driver_agree_on_the_chips():
    for capability, planned in PLANNED_CHIPS.items():
        known = CHIPS[capability]
        shared = known.shared_per_block >> 10, known.shared_per_multiprocessor >> 10
        assert (planned.block_shared, planned.shared, planned.threads) == (*shared, known.threads)


@pytest.mark.parametrize("impl", STAYING)
def test_persistent_blocks_have_equal_and_fewest_rounds(impl):
    """Blocks have the fewest rounds that keep all blocks resident at once.

    In cuda-direct, which has many small blocks, the busiest multiprocessor also has nearly the
    least possible work."""
    (family, problems), seen = STAYING[impl], set()
    for any_dtype, multiprocessors in itertools.product(problems, (1, 3, 132)):
        problem = any_dtype.replace(dtype="float16")
        device = replace(Device.of("sm_80"), multiprocessors=multiprocessors)
        strides = Strides.contiguous(problem)
        for pass_ in {"forward", "backprop_input"}.intersection(fits(problem, impl, device)):
            planned = plan_pass(Request(problem, pass_, device), impl)
            (launch,) = prepare(planned, problem, strides, device)
            request = Request(problem, pass_, device, strides=strides)
            made = family.geometry(request, planned.tiling)
            turns = made.work_tiles
            if not turns:  # the batch is empty
                continue
            blocks, beside = launch.grid
            assert launch.shared_bytes == dict(launch.defines).get("SHARED_BYTES", 0)
            held = max(multiprocessors * made.resident // beside, 1)
            each = -(-turns // blocks)
            assert blocks == -(-turns // each) <= held
            if impl == "cuda-direct":

                def busiest(each, turns=turns, beside=beside, count=multiprocessors):
                    return -(-(-(-turns // each) * beside) // count) * (each + 0.25)

                assert busiest(each) <= 1.1 * min(map(busiest, range(1, turns + 1)))
            else:
                assert each == 1 or -(-turns // (each - 1)) > held
            if impl == "cuda-patch":
                (layer,), macros = launch.arguments[-1], dict(launch.defines)
                assert beside == -(-problem.K // made.tiling.filters)
                for name in ("stride", "dilation"):
                    found = [macros[f"{name.upper()}_{letter}"] for letter in "HW"]
                    assert found == layer[name][1:].tolist()
            seen.add(min(each, 3))
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("far", [(1 << 30) - 9, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 33])
def test_large_padding_strides_and_dilations_are_planned(far, architecture, pass_):
    """Every candidate of every family that supports the layer can be launched."""
    device, families = Device.of(architecture), set()
    for problem in reaching(far):
        strides = Strides.contiguous(problem)
        request = Request(problem, pass_, device, "tf32", None, strides)
        for planned in contenders(request, "auto", 99):
            assert prepare(planned, problem, strides, device)
            families.add(planned.implementation)
    assert "cuda-generic" in families


def reaching(far):
    """Yield layers with small tensors and large padding, strides and dilations."""
    for dtype, data_format in itertools.product(("float16", "float32"), ("NCHW", "NHWC")):
        for shapes, rules in (
            (((4, 64, 9, 9), (64, 64, 1, 1)), {"dilation": far}),
            (((4, 64, 9, 9), (64, 64, 1, 1)), {"dilation": far, "stride": 2, "padding": 1}),
            (((4, 64, 9, 9), (64, 64, 1, 1)), {"stride": far}),
            (((4, 64, 9, 9), (64, 64, 1, 1)), {"stride": far, "padding": far}),
            (((4, 64, 9, 9), (64, 64, 3, 1)), {"dilation": far, "padding": ((far, far), (0, 0))}),
            (((4, 64, 9, 9), (64, 1, 1, 1)), {"groups": 64, "dilation": far}),
            (((4, 3, 9, 9), (64, 3, 1, 1)), {"dilation": far}),
        ):
            yield in_formats(ConvProblem(*shapes, dtype=dtype, **rules), data_format, "OIHW")


def bias_launches(shape, layout, dtype, device="sm_80", limit=None):
    """Return the launches of a bias gradient of contiguous dy, and their bytes of workspace."""
    problem = binding.bias_problem("dy", shape, layout, dtype)
    strides = Strides.of_sum(contiguous_strides(shape), 1, 16)
    return bias.prepare_bias(problem, strides, Device.of(device), limit)


# A block step covers 1,024 float32 pixels: 256 threads with vectors of 4.  sm_80 has 108
# multiprocessors, so 54 blocks for each of 8 channels are four blocks per multiprocessor.
@pytest.mark.parametrize(
    ("steps", "chunks", "steps_of_chunk"),
    [(0, 1, 1), (31, 1, 31), (32, 2, 16), (33, 2, 17), (864, 54, 16), (5400, 54, 100)],
)
def test_bias_gradient_chunks_fill_the_chip(steps, chunks, steps_of_chunk):
    shape = (1, 8, 1024 * steps) if steps else (0, 8, 1024)
    (product, *reduction), workspace_bytes = bias_launches(shape, None, "float32")
    assert product.grid == (8, chunks)
    assert product.arguments[3] == 1024 * steps_of_chunk
    assert product.shared_bytes == 0
    assert [one.grid for one in reduction] == ([(1,)] if chunks > 1 else [])
    assert workspace_bytes == (4 * 8 * chunks if chunks > 1 else 0)


@pytest.mark.parametrize(
    ("limit", "chunks"), [(0, 1), (63, 1), (64, 2), (95, 2), (54 * 32, 54), (None, 54)]
)
def test_bias_gradient_chunks_respect_the_workspace_limit(limit, chunks):
    """A layer of 8 channels has 32 bytes of sums per chunk."""
    launched, size = bias_launches((1, 8, 1024 * 5400), None, "float32", limit=limit)
    assert launched[0].grid == (8, chunks)
    assert len(launched) == (2 if chunks > 1 else 1)
    assert size == (32 * chunks if chunks > 1 else 0)


def test_conv_backprop_bias_respects_the_workspace_limit(monkeypatch):
    dy = integer_data(ConvProblem((8, 1, 64, 64), (3, 1, 1, 1))).dy
    taken, prepare_bias = [], bias.prepare_bias
    monkeypatch.setattr(
        bias, "prepare_bias", lambda *a: taken.append(prepare_bias(*a)) or taken[-1]
    )
    for limit in (None, 0):
        monkeypatch.setattr(cupyconv, "workspace_limit", limit)
        db = emulator.conv_backprop_bias(dy)
        assert (db == dy.sum(axis=(0, 2, 3))).all()
    (_, free), (_, bound) = taken
    assert free > 0
    assert bound == 0
    monkeypatch.setattr(cupyconv, "workspace_limit", -1)
    with pytest.raises(ConvError, match="a non-negative integer, in bytes: got -1"):
        emulator.conv_backprop_bias(dy)


def test_bias_gradient_of_a_huge_tensor_raises_memory_error():
    problem = binding.bias_problem("dy", (2**40, 2, 2**31), None, "float32")
    strides = Strides.of_sum(contiguous_strides(problem.output_shape), 1, 16)
    with pytest.raises(MemoryError, match="an array of 1099511627776x2x2147483648 float32 takes"):
        emulator.convolutions.backend().prepare_bias(problem, strides, None)


def test_bias_gradient_has_at_most_one_grid_of_channels():
    (product,), _ = bias_launches((1, 2**31 - 1, 2), None, "float16")
    assert product.grid == (2**31 - 1, 1)
    with pytest.raises(ConvError, match="dy has 2,147,483,648 channels, a block sums 1"):
        bias_launches((1, 2**31, 2), None, "float16")


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_most_demanding_launches_are_valid(architecture):
    planned = launches.planned(architecture)
    for made in planned.values():
        declared = dict(made.launch.defines).get("SHARED_BYTES", 0)
        is_product = not made.launch.entry.endswith("_reduce")
        assert made.launch.shared_bytes == (declared if is_product else 0)
    found = launches.most_demanding(planned)
    assert len(found) >= 9
    for made in found:
        launches.launch(made, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
def test_planned_launches_are_all_valid(architecture, record_property):
    found = launches.planned(architecture)
    for made in found.values():
        launches.launch(made, architecture)
    record_property("launches", len(found))


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_emulator_checks_launches_against_compiled_kernels(architecture):
    """Checking launches against the compiled kernels' resources changes no result."""
    problem = ConvProblem((1, 32, 8, 8), (64, 32, 3, 3), padding=1, dtype="float16")
    problem = in_formats(problem, "NHWC", "OHWI")
    data = integer_data(problem)
    with emulator.settings(compiled=True):
        got = emulator.conv_forward(data.x, data.w, arch=architecture, **problem.keywords)
    expected = emulator.conv_forward(data.x, data.w, arch=architecture, **problem.keywords)
    assert (got == expected).all()
