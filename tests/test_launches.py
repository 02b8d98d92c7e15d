"""What the driver refuses: each rule by itself, and no launch that a plan comes to."""

from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import operations
from cupyconv.gpu import bias, chunks, compiler, sources
from cupyconv.gpu.launch import Launch, Series
from cupyconv.planning import Device
from cupyconv.planning.strides import Strides
from tests import emulator, launches
from tests.configurations import in_formats, integer_data
from tests.cubins import Parameter, Resources, resources
from tests.emulator import driver, tensormap
from tests.emulator.driver import CHIPS, CheckedFunction, Refusal
from tests.test_kernel_compile import ARCHITECTURES

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
    """Resources of the kernels above on two chips, as the compiler states them."""
    pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")
    found = {}
    for architecture in ("sm_86", "sm_90a"):
        source = sources.KernelSource("kernels.cu", KERNELS, ())
        cubin, log = compiler.compile_cubin(source, {}, architecture)
        found[architecture] = resources(cubin, log)
    return found


def test_figures_are_the_compilers(kernels):
    for of_chip in kernels.values():
        assert of_chip["bounded"].launch_bounds == 96
        assert of_chip["tables"].static_shared == 384 * 4
        assert of_chip["greedy"].registers > 120
        assert [one.size for one in of_chip["mapped"].parameters] == [8, 128, 2]
        assert of_chip["mapped"].parameters[1].address % 64 == 0
    assert kernels["sm_90a"]["paired"].cluster == (2, 1, 1)
    assert kernels["sm_86"]["bounded"].cluster is None


# A kernel, its chip, how it is launched, how much dynamic shared memory it was allowed, and what
# is wrong with that; None if nothing is.
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
    # 65,536 registers: 128 threads of 512, or more of fewer.
    ("greedy", "sm_86", (1,), (256,), 0, None, None),
    ("greedy", "sm_86", (1,), (1024,), 0, None, "does not fit a multiprocessor: too much of reg"),
    ("paired", "sm_90a", (4,), (32,), 0, None, None),
    ("paired", "sm_90a", (3,), (32,), 0, None, r"clusters of \(2, 1, 1\): a grid of \(3, 1, 1\)"),
    ("crowded", "sm_90a", (16,), (32,), 0, None, "more than the 8 blocks"),
]


@pytest.mark.parametrize("case", LAUNCHES, ids=lambda case: f"{case[0]}-{case[-1] or 'right'}"[:50])
def test_launches(kernels, case):
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


def test_clusters_need_hopper(kernels):
    function = CheckedFunction("paired", CHIPS[8, 6], kernels["sm_90a"]["paired"])
    with pytest.raises(Refusal, match=r"clusters need compute capability 9\.0"):
        function((2,), (32,), (np.uint64(0),))


def test_arguments(kernels):
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
def test_tiled_maps(change, wrong):
    tensormap.encode_tiled(**TILED)
    with pytest.raises(ValueError, match=wrong):
        tensormap.encode_tiled(**{**TILED, **change})


@pytest.mark.parametrize(("change", "wrong"), REFUSED_IM2COL)
def test_im2col_maps(change, wrong):
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
    # Axes of one element, and a gap after the channels: x, then w, with the layer's padding.
    "one column": ((2, 9, 1, 96), (64, 3, 1, 64), ((1, 1), (0, 0))),
    "one row": ((2, 1, 9, 96), (64, 1, 3, 64), ((0, 0), (1, 1))),
    "one image": ((1, 9, 1, 96), (64, 3, 1, 64), ((1, 1), (0, 0))),
    "one tap": ((2, 9, 8, 96), (64, 1, 1, 96), 0),
    "a volume of one plane": ((2, 1, 5, 1, 96), (64, 1, 3, 1, 64), ((0, 0), (1, 1), (0, 0))),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("transposed", [False, True])
def test_axes_of_one_element_have_strides_that_the_driver_documents(name, transposed):
    """Some of the channels of wider tensors are read, so that no stride is an extent's product."""
    x_shape, w_shape, padding = NARROW[name]
    generator = np.random.default_rng(0)
    x, w = (
        generator.integers(-3, 4, shape).astype(np.float16)[..., :64]
        for shape in (x_shape, w_shape)
    )
    last = ("NDHWC", "ODHWI") if x.ndim == 5 else ("NHWC", "OHWI")
    rules = {"padding": padding, "data_format": last[0], "filter_format": last[1]}

    def call(api, **more):
        if transposed:  # x stands for dy
            return api.conv_transpose(x, w, **rules, **more)
        return api.conv_forward(x, w, **rules, **more)

    got = call(emulator, impl="cuda-hopper", arch="sm_90a")
    assert (got == call(cupyconv, impl="reference")).all()


@pytest.mark.parametrize("view", VIEWS)
def test_maps_are_made_only_of_what_the_driver_documents(view):
    """Views that no map is documented for are copied; the emulator's driver is handed no others."""
    whole = np.random.default_rng(0).integers(-3, 4, (2, 15, 10, 64)).astype(np.float16)
    x = VIEWS[view](whole)
    w = np.random.default_rng(1).integers(-3, 4, (64, 3, 3, 64)).astype(np.float16)
    rules = {"padding": 1, "data_format": "NHWC", "filter_format": "OHWI"}
    got = emulator.conv_forward(x, w, impl="cuda-hopper", arch="sm_90a", **rules)
    assert (got == cupyconv.conv_forward(x, w, impl="reference", **rules)).all()


# -- what plans come to ----------------------------------------------------------------------------


def test_a_kernel_is_allowed_what_it_is_launched_with(kernels):
    """Static memory counts too, so that less than 48 KB of dynamic memory has to be allowed."""
    function = CheckedFunction("tables", CHIPS[8, 6], kernels["sm_86"]["tables"])

    class Runtime:
        def load(self, launches):
            pass

        def kernel(self, launch):
            return function

        def allow(self, kernel, shared_bytes):
            kernel.allow(shared_bytes)

    one = Launch("kernels.cu", "tables", (), (1,), (384,), 48 << 10, ("x",))
    Series([one], Runtime())((np.uint64(0),))
    assert function.max_dynamic_shared_size_bytes == 48 << 10
    less = replace(one, shared_bytes=1 << 10)
    Series([one, less], Runtime())((np.uint64(0),))  # of one function, which both share


@pytest.mark.parametrize(("filters", "blocks"), [(1, 1), (256, 1), (257, 2), (1024, 4)])
def test_a_sum_of_chunks_has_a_thread_for_each_element_of_the_filter(filters, blocks):
    product = Launch("conv_direct.cu", "product", (), (9,), (64,), 1 << 10, ("x", "parameters"))
    made = chunks.reduction(product, cupyconv.ConvProblem((1, 1, 1), (filters, 1, 1)), 3)
    assert (made.entry, made.defines) == ("product_reduce", product.defines)
    assert (made.grid, made.block, made.shared_bytes) == ((blocks,), (256,), 0)
    assert made.arguments == ("workspace", "w", 3, "parameters")


# Of 8 channels of a float32 image, pieces of 4 pixels: 1,024 pixels are a step of a block.  On the
# 108 multiprocessors of sm_80, 54 blocks of each channel are four of each multiprocessor.
@pytest.mark.parametrize(
    ("steps", "chunks", "steps_of_chunk"),
    [(0, 1, 1), (31, 1, 31), (32, 2, 16), (33, 2, 17), (864, 54, 16), (5400, 54, 100)],
)
def test_chunks_of_a_bias_gradient_fill_the_chip_and_are_worth_adding_up(
    steps, chunks, steps_of_chunk
):
    shape = (1, 8, 1024 * steps) if steps else (0, 8, 1024)
    problem = operations.bias_problem("dy", shape, None, "float32")
    steps_of_dy = (8 * shape[2], shape[2], 1)
    strides = Strides(steps_of_dy, (1, 1, 1), steps_of_dy, 1, 16)
    made, workspace_bytes = bias.prepare_bias(problem, strides, Device.of("sm_80"))
    product, *reduction = made
    assert product.grid == (8, chunks)
    assert product.arguments[3] == 1024 * steps_of_chunk
    assert product.shared_bytes == 0
    assert [one.grid for one in reduction] == ([(1,)] if chunks > 1 else [])
    assert workspace_bytes == (4 * 8 * chunks if chunks > 1 else 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_most_demanding_launches_are_taken(architecture):
    found = launches.most_demanding(launches.planned(architecture))
    assert len(found) >= 9
    for made in found:
        launches.launch(made, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
def test_every_launch_that_can_be_planned_is_taken(architecture, record_property):
    found = launches.planned(architecture)
    for made in found.values():
        launches.launch(made, architecture)
    record_property("launches", len(found))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_the_emulator_holds_kernels_to_their_cubins(architecture):
    """As it runs them, too: the tile that needs more than the 48 KB that nobody has to ask for."""
    problem = launches.ConvProblem((1, 32, 8, 8), (64, 32, 3, 3), padding=1, dtype="float16")
    problem = in_formats(problem, "NHWC", "OHWI")
    data = integer_data(problem)
    with emulator.settings(compiled=True):
        got = emulator.conv_forward(data.x, data.w, arch=architecture, **problem.keywords)
    expected = emulator.conv_forward(data.x, data.w, arch=architecture, **problem.keywords)
    assert (got == expected).all()
