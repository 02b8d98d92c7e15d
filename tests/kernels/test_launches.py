"""Launches: macros, grids, arguments and the driver's rules.

Each rule is tested separately, and every planned launch satisfies all rules.
"""

import itertools
from collections import Counter
from dataclasses import replace
from math import ceil, gcd, log2, prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, binding
from cupyconv.gpu import compiler, sources
from cupyconv.gpu.runtime import Series
from cupyconv.kernels import bias, direct, frames, gather, patch, toeplitz
from cupyconv.kernels.device import CHIPS as PLANNED_CHIPS
from cupyconv.kernels.family import Choices
from cupyconv.kernels.limits import LARGEST_EXTENT
from cupyconv.kernels.strides import Strides, contiguous_strides
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders, plan_of
from cupyconv.problem import ITEMSIZE, PASSES
from tests import emulator, launches
from tests.agreement import fits
from tests.configurations import (
    DIRECT_CASES,
    PATCH_CASES,
    all_formats,
    in_formats,
    integer_data,
    random_problems,
)
from tests.cubins import Parameter, Resources, resources
from tests.emulator import driver, tensormap
from tests.emulator.driver import CHIPS, CheckedFunction, Refusal
from tests.kernels.test_kernel_compile import ARCHITECTURES
from tests.launches import prepare

KERNELS = r"""
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void __launch_bounds__(96) bounded(float* y) { *y = 1.0f; }
extern "C" __global__ void tables(float* y) {
  __shared__ float table[384];
  extern __shared__ float ring[];
  ring[threadIdx.x] = table[threadIdx.x] = *y;
  __syncthreads();
  *y = table[(threadIdx.x + 1) % 384] + ring[(threadIdx.x + 1) % 384];
}
extern "C" __global__ void greedy(float* y) {
  float sums[120];
#pragma unroll
  for (int i = 0; i < 120; ++i) sums[i] = y[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 120; ++i) y[i * 2 + threadIdx.x] = sums[i];
}
extern "C" __global__ void mapped(float* y, const __grid_constant__ Map map, short count) {
  *y = map.bytes[count];
}
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) paired(float* y) { *y = 1.0f; }
extern "C" __global__ void __cluster_dims__(16, 1, 1) crowded(float* y) { *y = 1.0f; }
#endif
"""


@pytest.fixture(scope="module")
def kernels():
    """Resources of the kernels above on two chips, as the compiler reports them."""
    pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")
    found = {}
    for architecture in ("sm_86", "sm_90a"):
        source = sources.KernelSource("kernels.cu", KERNELS, ())
        cubin, log = compiler.compile_cubin(source, {}, architecture)
        found[architecture] = resources(cubin, log)
    return found


def test_resources_match_the_kernels(kernels):
    for of_chip in kernels.values():
        assert of_chip["bounded"].launch_bounds == 96
        assert of_chip["tables"].static_shared == 384 * 4
        assert of_chip["greedy"].registers > 120
        assert [one.size for one in of_chip["mapped"].parameters] == [8, 128, 2]
        assert of_chip["mapped"].parameters[1].address % 64 == 0
    assert kernels["sm_90a"]["paired"].cluster == (2, 1, 1)
    assert kernels["sm_86"]["bounded"].cluster is None


# Kernel, architecture, grid, block, bytes of dynamic shared memory, bytes allowed by the kernel's
# attribute (None: default), and the expected error (None: a valid launch).
LAUNCHES = [
    ("bounded", "sm_86", (7, 1, 1), (96,), 0, None, None),
    ("bounded", "sm_86", (7,), (97,), 0, None, "takes 1 to 96 threads a block: got 97"),
    ("bounded", "sm_86", (0,), (96,), 0, None, "a grid has 1 to"),
    ("bounded", "sm_86", (2**31 - 1,), (96,), 0, None, None),
    ("bounded", "sm_86", (2**31,), (96,), 0, None, "a grid has 1 to"),
    ("bounded", "sm_86", (1, 2**16), (96,), 0, None, "a grid has 1 to"),
    ("bounded", "sm_86", (1, 1, 2**16), (96,), 0, None, "a grid has 1 to"),
    ("bounded", "sm_86", (1,), (1, 1, 65), 0, None, "a block has 1 to"),
    ("tables", "sm_86", (1,), (1025,), 0, None, "a block has 1 to"),
    ("tables", "sm_86", (1,), (32, 33), 0, None, "takes 1 to 1024 threads a block: got 1056"),
    # Static and dynamic shared memory count together, on every chip.
    ("tables", "sm_86", (1,), (384,), 49152 - 1536, None, None),
    ("tables", "sm_86", (1,), (384,), 49152, None, "49152 bytes of dynamic .* beside 1536 static"),
    ("tables", "sm_90a", (1,), (384,), 49152, None, "beside 1536 static ones, 47616 are allowed"),
    ("tables", "sm_86", (1,), (384,), 49152, 49152, None),
    ("tables", "sm_86", (1,), (384,), 49153, 49152, "49152 are allowed"),
    ("tables", "sm_86", (1,), (384,), 0, (99 << 10) - 1536, None),
    ("tables", "sm_86", (1,), (384,), 0, (99 << 10) - 1535, "more than the 101376 that a block"),
    ("tables", "sm_90a", (1,), (384,), (227 << 10) - 1536, (227 << 10) - 1536, None),
    ("tables", "sm_90a", (1,), (384,), 0, (227 << 10) - 1535, "more than the 232448 that a block"),
    # Registers limit the block: a multiprocessor has 65,536.
    ("greedy", "sm_86", (1,), (256,), 0, None, None),
    ("greedy", "sm_86", (1,), (1024,), 0, None, "does not fit a multiprocessor: too much of reg"),
    ("paired", "sm_90a", (4,), (32,), 0, None, None),
    ("paired", "sm_90a", (3,), (32,), 0, None, r"clusters of \(2, 1, 1\): a grid of \(3, 1, 1\)"),
    ("crowded", "sm_90a", (16,), (32,), 0, None, "more than the 8 blocks"),
]


@pytest.mark.parametrize("case", LAUNCHES, ids=lambda case: f"{case[0]}-{case[-1] or 'right'}"[:50])
def test_launches_follow_the_drivers_rules(kernels, case):
    name, architecture, grid, block, dynamic, allowed, wrong = case
    function = CheckedFunction(name, driver.chip_of(architecture), kernels[architecture][name])

    def launch():
        if allowed is not None:
            function.max_dynamic_shared_size_bytes = allowed
        function(grid, block, (np.uint64(0),), shared_mem=dynamic)

    if wrong is None:
        launch()
        return
    with pytest.raises(Refusal, match=wrong) as refused:
        launch()
    assert str(refused.value).startswith(f"{name} on compute capability ")


def test_clusters_need_compute_capability_9_0(kernels):
    function = CheckedFunction("paired", CHIPS[8, 6], kernels["sm_90a"]["paired"])
    with pytest.raises(Refusal, match=r"clusters need compute capability 9\.0"):
        function((2,), (32,), (np.uint64(0),))


def test_arguments_match_the_kernels_parameters(kernels):
    takes = kernels["sm_90a"]["mapped"]
    maps = np.zeros(1, np.dtype([("maps", "u8", 16)]))
    right = (np.uint64(0), maps, np.int16(1))
    CheckedFunction("mapped", CHIPS[9, 0], takes)((1,), (32,), right)
    for wrong in (right[:2], (*right[:2], np.int32(1)), (right[0], maps[:0], right[2])):
        with pytest.raises(Refusal, match=r"takes arguments of \[8, 128, 2\] bytes: got"):
            CheckedFunction("mapped", CHIPS[9, 0], takes)((1,), (32,), wrong)
    shifted = Resources(8, 0, None, None, (Parameter(528, 8), Parameter(544, 128)))
    with pytest.raises(Refusal, match=r"tensor maps at 544 .* no multiple of 64"):
        CheckedFunction("mapped", CHIPS[9, 0], shifted)((1,), (32,), right[:2])
    gap = Resources(8, 0, None, None, (Parameter(528, 8), Parameter(576, 4052)))
    with pytest.raises(Refusal, match="4100 bytes of arguments, 4096 fit"):
        CheckedFunction("large", CHIPS[9, 0], gap)(
            (1,), (32,), (np.uint64(0), np.zeros(4052, "u1"))
        )


# -- tensor maps -----------------------------------------------------------------------------------

TILED = {
    "address": 1 << 20,
    "element_size": 2,
    "extents": (64, 10, 6),
    "strides": (128, 1280),
    "box": (64, 8, 2),
    "swizzle": 128,
}
IM2COL = {
    "address": 1 << 20,
    "element_size": 2,
    "extents": (64, 10, 12, 6),
    "strides": (128, 1280, 15360),
    "lower": (-1, -1),
    "upper": (-1, -1),
    "channels_per_pixel": 64,
    "pixels_per_column": 128,
    "swizzle": 128,
}
REFUSED_TILED = [
    ({"address": (1 << 20) + 8}, "multiple of 16"),
    ({"extents": (64, 0, 6)}, "extents are 1 to 2"),
    ({"extents": (64, 2**32 + 1, 1), "strides": (128, 2**40)}, "2.40"),
    ({"strides": (136, 1360)}, "multiples of 16"),
    ({"strides": (128, 2**40)}, "below 2.40"),
    ({"strides": (0, 1280)}, "below 2.40"),
    ({"strides": (-128, 1280)}, "below 2.40"),
    ({"strides": (112, 1280)}, "steps over less than the 64 elements"),
    ({"strides": (128, 1200)}, "no multiple of the one before"),
    ({"strides": (128, 1152)}, "steps over less than the 10 elements"),
    ({"strides": (1280, 128)}, "no multiple of the one before"),
    ({"strides": (128,)}, "2 strides for rank 3"),
    ({"box": (64, 257, 1)}, "box extents are 1 to 256"),
    ({"box": (64, 0, 1)}, "box extents are 1 to 256"),
    ({"box": (60, 8, 2), "swizzle": 0}, "multiple of 16 bytes"),
    ({"box": (128, 8, 2)}, "fills 128 bytes"),
    ({"element_strides": (1, 9, 1)}, "from 1 to 8"),
    ({"element_strides": (1, 0, 1)}, "from 1 to 8"),
    ({"swizzle": 256}, "swizzle is one of"),
]
REFUSED_IM2COL = [
    ({"extents": (64, 10), "strides": (128,), "lower": (), "upper": ()}, "rank 3 to 5"),
    ({"lower": (-129, 0)}, r"corners in \[-128, 127\]"),
    ({"upper": (0, 128)}, r"corners in \[-128, 127\]"),
    ({"lower": (-1,)}, "2 corners"),
    ({"lower": (5, 0), "upper": (-5, 0)}, "no pixels"),
    ({"channels_per_pixel": 512, "swizzle": 0}, "1 to 256"),
    ({"pixels_per_column": 1025}, "1 to 1024"),
    ({"channels_per_pixel": 128}, "fills 128 bytes"),
    ({"element_strides": (1, 2, 9, 1)}, "from 1 to 8"),
]


@pytest.mark.parametrize(("change", "wrong"), REFUSED_TILED)
def test_invalid_tiled_maps_are_rejected(change, wrong):
    tensormap.encode_tiled(**TILED)
    with pytest.raises(ValueError, match=wrong):
        tensormap.encode_tiled(**{**TILED, **change})


@pytest.mark.parametrize(("change", "wrong"), REFUSED_IM2COL)
def test_invalid_im2col_maps_are_rejected(change, wrong):
    tensormap.encode_im2col(**IM2COL)
    with pytest.raises(ValueError, match=wrong):
        tensormap.encode_im2col(**{**IM2COL, **change})


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


def test_kernels_are_allowed_their_dynamic_shared_memory(kernels):
    """The attribute is set at 48 KB of dynamic memory already, since static memory counts too."""
    function = CheckedFunction("tables", CHIPS[8, 6], kernels["sm_86"]["tables"])

    runtime = driver.DriverRuntime("sm_86")
    one = Launch("kernels.cu", "tables", (), (1,), (384,), 48 << 10, ("x",))
    runtime._functions[one.source, one.defines, one.entry] = function
    Series([one], runtime)((0,) * 5)
    assert function.max_dynamic_shared_size_bytes == 48 << 10
    less = replace(one, shared_bytes=1 << 10)
    Series([one, less], runtime)((0,) * 5)  # both launches use one function


@pytest.mark.parametrize(("filters", "blocks"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_chunk_sums_have_a_thread_per_filter_element(filters, blocks):
    problem, device = ConvProblem((1, 1, 1), (filters, 1, 1)), Device.of("sm_80")
    planned = plan_pass(Request(problem, "backprop_filter", device), "cuda-direct")
    product, made = prepare(planned, problem, Strides.contiguous(problem), device)
    assert (made.entry, made.defines) == ("conv_direct_reduce", product.defines)
    assert (made.grid, made.block, made.shared_bytes) == ((blocks,), (64,), 0)
    assert made.arguments == ("workspace", "w", planned.splits, product.arguments[-1])


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_cuda_toeplitz_uses_the_widest_possible_vectors(alignment, pass_):
    """Vectors run along contiguous channels, else along columns; x and y may differ."""
    device, seen = Device.of("sm_80"), set()
    sizes = itertools.product((1, 2, 16, 17), (8, 9, 12), (0, 1, 2, 3), (1, 2))
    for channels, width, before, rank in sizes:
        shape, taps = (2, channels, 6, width)[: 2 + rank], (channels, 1, 2, 3)[: 2 + rank]
        shape, taps = (*shape[:-1], width), (*taps[:-1], 3)
        padding = ((0, 0), (before, 4))[-rank:]
        first = ConvProblem(shape, taps, padding=padding, groups=channels, dtype="float16")
        for problem in all_formats(first)[::2]:
            strides = replace(Strides.contiguous(problem), alignment=alignment)
            planned = plan_pass(Request(problem, pass_, device, strides=strides), "cuda-toeplitz")
            launch, *_ = prepare(planned, problem, strides, device)
            macros = dict(launch.defines)
            x = piece_of(strides.x, problem.input_shape, problem, alignment)
            y = piece_of(strides.y, problem.output_shape, problem, alignment)
            source, result = (y, x) if pass_ == "backprop_input" else (x, y)
            assert (macros["SOURCE_LAST"], macros["SOURCE_VECTOR"]) == source
            assert (macros["RESULT_LAST"], macros["RESULT_VECTOR"]) == result
            # backprop_input mirrors the filter: its first tap reads where the last tap would.
            column = before - 2 if pass_ == "backprop_input" else -before
            assert macros["SOURCE_SHIFT"] == (0 if source[0] else column % source[1])
            assert (macros["FILTER_R"], macros["FILTER_S"]) == ((2, 3) if rank == 2 else (1, 3))
            assert launch.grid[1] == -(-channels // toeplitz.CHANNELS)
            seen.add((source, result))
    assert len(seen) >= (1 if alignment == 2 else 6)


def piece_of(steps, shape, problem, alignment):
    """Return whether vectors run along channels, and their length in 16-bit elements."""
    channels, columns = problem.data_axes[1], problem.data_axes[-1]
    of_channels = steps[channels] == 1 and shape[channels] > 1
    axis = channels if of_channels else columns
    others = [step for number, step in enumerate(steps) if number != axis]
    fitting = [
        piece
        for piece in (2, 4, 8)
        if steps[axis] == 1 and not any(one % piece for one in (shape[axis], *others))
    ]
    return of_channels, max((one for one in fitting if one * 2 <= alignment), default=1)


def test_stride_phases_cover_all_pixels_and_taps():
    """Phases are computed as in cuda/include/gather.cuh; those with the most taps come first."""
    device, seen = Device.of("sm_80"), Counter()
    for problem in random_problems(120, seed=5, dtypes=("float16",)):
        if "backprop_input" not in fits(problem, "cuda-gather", device):
            continue
        planned = plan_pass(Request(problem, "backprop_input", device), "cuda-gather")
        strides = Strides.contiguous(problem)
        made = prepare(planned, problem, strides, device)
        met, taps_of = {}, []
        parts = frames.parts(problem, "backprop_input", planned.divides_frames)
        for launch in (one for one in made if one.entry == "conv_gather"):
            (told,), (phases,) = launch.arguments[-2:]
            end, here = 0, len(taps_of)
            for phase in phases["phase"]:
                axes = [axis_of_phase(told, phases, phase, axis) for axis in range(3)]
                found = dict(map(pixels_and_taps, itertools.product(*axes)))
                if not found:  # short axes and padding to a power of two leave empty phases
                    assert phase["end"] == end
                    continue
                assert not met.keys() & found.keys()
                met |= found
                taps_of.append(int(phase["taps"].prod()))
                tile, columns = planned.tile, problem.C // problem.groups
                end += -(-problem.N * len(found) // tile.block_m) * -(-columns // tile.block_n)
                assert phase["end"] == end
            assert launch.grid == (end * problem.groups, planned.splits)
            count = dict(launch.defines)["PHASES"]
            assert len(taps_of) - here <= count == len(phases["phase"]) <= gather.MAX_PHASES
            assert count < 2 * prod(map(len, parts))
        expected = itertools.product(*(pixels_of_axis(told, axis) for axis in range(3)))
        expected = dict(map(pixels_and_taps, expected))
        if planned.divides_frames:  # no tap reads padding frames
            for pixel, taps in expected.items():
                inside = {tap: at for tap, at in taps.items() if 0 <= at[0] < told["output"][0]}
                expected[pixel] = inside
            seen["divided"] += 1
        assert met == expected
        assert taps_of == sorted(taps_of, reverse=True)
        seen[len(taps_of)] += 1
        planned = plan_pass(Request(problem, "forward", device), "cuda-gather")
        *_, product = prepare(replace(planned, splits=1), problem, strides, device)
        assert dict(product.defines)["PHASES"] == 1
    assert len(seen) >= 5
    assert seen["divided"] > 1


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


def axis_of_phase(told, phases, phase, axis):
    """Yield each pixel of an axis in a stride phase, with a map from tap to coordinate read."""
    for i in range(phase["pixels"][axis]):
        pixel = int(phase["first_pixel"][axis] + i * told["stride"][axis])
        taps, first = int(phase["taps"][axis]), int(i + phase["base"][axis])
        yield (
            pixel,
            {
                int(phase["first_tap"][axis] + j * phases["step"][axis]): int(
                    first + (taps - 1 - j) * phases["axis"]["spacing"][axis]
                )
                for j in range(taps)
            },
        )


def pixels_of_axis(told, axis):
    """Yield each pixel of an axis with a map from tap to coordinate read, by definition."""
    stride, pad, dilation = (int(told[name][axis]) for name in ("stride", "pad", "dilation"))
    for pixel in range(told["input"][axis]):
        read = {tap: pixel + pad - tap * dilation for tap in range(told["filter"][axis])}
        yield pixel, {tap: at // stride for tap, at in read.items() if at % stride == 0}


def pixels_and_taps(axes):
    """Combine three axes into a pixel and a map from tap to pixel read."""
    pixel, taps = zip(*axes, strict=True)
    read = itertools.product(*(of_axis.items() for of_axis in taps))
    return pixel, {tuple(tap for tap, _ in one): tuple(at for _, at in one) for one in read}


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
            else:
                require_schedule(launch, "output" if pass_ == "forward" else "input", made, each)
            seen.add(min(each, 3))
    assert seen == {1, 2, 3}


def require_schedule(launch, tiled, made, rounds):
    """Require cuda-direct's arguments to advance each block by one tile per strip."""
    (told,), (layer,) = launch.arguments[-2:]
    assert told["rounds"] == rounds
    slices, images = layer[tiled][0], layer["batch"]
    assert tuple(told["tiles"]) == (made.across.tiles, made.down.tiles, slices, images)
    weights = np.cumprod([1, *told["tiles"][:3]])
    assert (told["step"] * weights).sum() == made.tiling.strips
    assert (told["step"][:3] < told["tiles"][:3]).all()


def test_filter_gradient_chunks_have_equal_rounds():
    device, seen = Device.of("sm_80"), set()
    for problem in STAYING["cuda-direct"][1]:
        planned = plan_pass(Request(problem, "backprop_filter", device), "cuda-direct")
        strides = Strides.contiguous(problem)
        product, _ = prepare(planned, problem, strides, device)
        request = Request(problem, "backprop_filter", device, strides=strides)
        made = direct.geometry(request, planned.tiling)
        assert product.grid[0] == planned.splits
        require_schedule(product, "output", made, -(-made.work_tiles // planned.splits))
        seen.add(planned.splits > 1)
    assert seen == {False, True}


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


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_bias_gradient_channels_use_all_lanes(dtype):
    """Lanes run along contiguous channels, or along pixels if there is one channel."""
    widest = 16 // ITEMSIZE[dtype]
    for channels in (1, 2, 3, 4, 8, 17, 32, 64, 129, 256, 257, 1000):
        (product, *_), _ = bias_launches((32, 64, 64, channels), "NHWC", dtype)
        macros = dict(product.defines)
        vector, lanes = macros["VECTOR"], macros["CHANNEL_LANES"]
        assert vector == (widest if channels == 1 else gcd(widest, channels))
        assert macros["CHANNELS_LAST"] == (channels > 1)
        pieces = -(-channels // vector) if channels > 1 else 1
        assert lanes == min(32, 1 << ceil(log2(pieces)))
        blocks, chunks = product.grid
        assert blocks == -(-pieces // lanes)
        turn, pixels = 256 // lanes * (vector if channels == 1 else 1), 32 * 64 * 64
        most = min(-(-4 * 108 // blocks), pixels // turn // 16)
        taken = product.arguments[3]
        assert taken == turn * -(-pixels // turn // most)
        assert taken * (chunks - 1) < pixels <= taken * chunks
        assert chunks > 1


@pytest.mark.parametrize("channels", [1, 64, 65])
def test_bias_gradient_chunks_are_summed_by_a_thread_per_channel(channels):
    (product, reduction), _ = bias_launches((4, channels, 256, 256), "NCHW", "float32")
    assert reduction.entry == "conv_backprop_bias_reduce"
    assert (reduction.grid, reduction.block) == ((-(-channels // 64),), (64,))
    assert reduction.arguments[:3] == ("workspace", "bias", product.grid[1])


def test_bias_gradient_has_at_most_1024_chunks(monkeypatch):
    """One thread adds up the chunks of a channel, so even a large chip has no more."""
    large = replace(PLANNED_CHIPS[9, 0], multiprocessors=1000)
    monkeypatch.setitem(PLANNED_CHIPS, (9, 0), large)
    device = Device("large", "sm_90a")
    (product, _), _ = bias_launches((1, 1, 1024 * 1024 * 1025), None, "float32", device)
    assert product.grid == (1, 1024)
    assert product.arguments[3] == 1024 * 1025


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
