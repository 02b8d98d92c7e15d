"""Launches through the driver: shared memory, arguments, overlap and tensor maps."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from unittest import mock

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import backends
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import runtime, sources, tensormaps
from cupyconv.gpu.runtime import CupyRuntime, Series
from cupyconv.launch import ROLES, Launch, Part, TensorMaps, TiledMap
from tests.agreement import plan_with
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device import machine
from tests.device.test_memory import one_by_one
from tests.device.test_order import split_layer
from tests.emulator.driver import CHIPS
from tests.gpu.test_cupy import require_exact

TILED = TiledMap("x", 2, (64, 8), (128,), (64, 8))


def test_shared_memory_limit_never_decreases(own_cache, monkeypatch):
    source = sources.KernelSource("one.cu", 'extern "C" __global__ void nothing() {}', ())
    monkeypatch.setattr(sources, "load", lambda _: source)
    loader = CupyRuntime("sm_90a")
    most = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for size in (100_000, 60_000):
        one = Launch("one.cu", "nothing", (), (1,), (32,), size, ())
        loader.load([one])
        launcher, _ = loader.launcher(one)
        assert cupy.cuda.driver.funcGetAttribute(most, launcher.args[0]) == 100_000


BOUND = r"""
using Word = unsigned long long;
struct alignas(64) Maps { Word word[32]; };
extern "C" __global__ void bound(const void* y, const void* bias, const int number,
                                 const Word part, const __grid_constant__ Maps maps, Word* x,
                                 const void* workspace) {
  *x++ = reinterpret_cast<Word>(y);
  *x++ = reinterpret_cast<Word>(bias);
  *x++ = number;
  *x++ = part;
  *x++ = reinterpret_cast<Word>(workspace);
  for (int i = 0; i < 32; ++i) *x++ = maps.word[i];
}
extern "C" __global__ void missing(Word* y, const void* workspace) {
  *y = reinterpret_cast<Word>(workspace);
}
"""


@pytest.mark.parametrize("may_overlap", [False, True], ids=["plain", "overlapping"])
def test_arguments_are_bound_at_each_run(may_overlap, own_cache, encoded, monkeypatch):
    """The kernel writes the arguments that it receives."""
    source = sources.KernelSource("bound.cu", BOUND, ())
    monkeypatch.setattr(sources, "load", lambda _: source)
    loader = CupyRuntime("sm_90a")
    maps = [
        TiledMap(role, 2, (64, 100), (128,), (64, 64), offset)
        for role, offset in (("w", 0), ("y", 32))
    ]
    tensor_maps = TensorMaps(tuple(maps))
    arguments = ("y", "bias", np.int32(7), Part("workspace", 48), tensor_maps, "x", "workspace")
    empty = Launch("bound.cu", "no such kernel", (), (0,), (1,), 0, ("x",))
    bound = Launch("bound.cu", "bound", (), (1,), (1,), 0, arguments, may_overlap)
    series, arrays = Series((empty, bound), loader, ROLES), []
    loader.load((bound,))
    assert (loader.launcher(bound)[1] is not None) == may_overlap
    for _ in range(2):
        x, w, y, bias, add, workspace = (cupy.zeros(2048, np.uint64) for _ in ROLES)
        arrays.append((x, w, y, bias, add, workspace))  # keeps their addresses in use
        pointers = w.data.ptr, y.data.ptr + 32
        words = b"".join(map(encoded_map, maps, pointers))
        for b in (bias, None, bias):
            given = (x, w, y, b, add, workspace)
            series(tuple(0 if one is None else one.data.ptr for one in given))
            values = (y.data.ptr, 0 if b is None else b.data.ptr, 7, workspace.data.ptr + 48)
            expected = [*values, workspace.data.ptr, *np.frombuffer(words, np.uint64).tolist()]
            assert cupy.asnumpy(x[: len(expected)]).tolist() == expected
        assert encoded[-2:] == list(zip(("w", "y"), pointers, strict=True))
    assert len(encoded) == 4, "once for each pair of addresses"
    y.fill(9)
    missing = replace(bound, entry="missing", arguments=("y", "workspace"))
    Series((missing,), loader)((0, 0, y.data.ptr, bias.data.ptr, 0))
    assert int(y[0]) == 0


@pytest.mark.parametrize("splits", [1, 9])  # a cluster cannot add 9
def test_dependent_launches_may_overlap(splits, launched):
    # It is copied, since it is in channels-first order.
    problem = HOPPER_CASES[0].problem.replace(input_shape=(12, 64, 9, 7), dtype="float16")
    plan = plan_with(problem, "cuda-hopper", backends.current_device(), splits=splits)
    with cupy.cuda.Stream(non_blocking=True):
        require_exact(problem, passes=("backprop_filter",), impl=plan)
    overlap = [item.may_overlap for item, _ in launched]
    assert overlap == [False, True, True][: 2 + (splits > 1)]


def encoded_map(tensor_map: TiledMap, address: int) -> bytes:
    structure = runtime._Struct(tensormaps.MAP_BYTES)
    tensormaps.encoder(tensor_map)(address, structure.address)
    return ctypes.string_at(structure.address, tensormaps.MAP_BYTES)


def run_code(code: str, name: str, one: Launch, addresses: tuple[int, ...]) -> None:
    """Run a launch of a kernel in ``code`` on the current device."""
    loader = CupyRuntime("sm_90a")
    loader.load = lambda launches: None
    kernel = cupy.RawModule(code=code).get_function(name)
    with mock.patch.object(runtime, "variant_of", return_value=name):
        loader._kernels[name, one.entry] = kernel
        Series((one,), loader)(addresses)


def test_overlapping_launch_obeys_limits():
    code = 'extern "C" __global__ void nothing() {}'
    for device, block, status in ((0, (2048,), "INVALID_VALUE"), (1, (32,), "NOT_SUPPORTED")):
        with cupy.cuda.Device(device):
            one = Launch("", "nothing", (), (1,), block, 0, (), may_overlap=True)
            with pytest.raises(cupy.cuda.driver.CUDADriverError, match=status):
                run_code(code, "nothing", one, (0,) * 5)
            run_code(code, "nothing", replace(one, block=(32,), may_overlap=device == 0), (0,) * 5)
            cupy.cuda.Device().synchronize()


EXTENTS = r"""
struct Pair { long long first, second; };
extern "C" __global__ void extents(long long* y, const int number, const long long* x,
                                const Pair pair, const unsigned long long wide) {
  extern __shared__ long long shared[];
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x + threadIdx.y + threadIdx.z) return;
  shared[511] = *x;
  const long long found[] = {gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z,
                             number, shared[511], pair.first, pair.second, (long long)wide};
  for (int i = 0; i < 11; ++i) y[i] = found[i];
}
"""


@pytest.mark.parametrize("extents", [((2,), (32,)), ((2, 3), (4, 5)), ((2, 3, 4), (5, 6, 2))])
def test_overlapping_launch_passes_same_arguments(extents):
    x, results = cupy.arange(5, 7), []
    pair = np.array([(-8, 9)], np.dtype("i8, i8"))
    arguments = ("y", np.int32(7), "x", pair, np.uint64(1 << 40))
    for may_overlap in (False, True):
        one = Launch("", "extents", (), *extents, 4096, arguments, may_overlap)
        with cupy.cuda.Stream(non_blocking=True):
            y = cupy.zeros(11, np.int64)
            run_code(EXTENTS, "extents", one, (x.data.ptr, 0, y.data.ptr, 0, 0))
            results.append(y.get().tolist())
    assert results[1] == results[0]
    assert results[0][6:] == [7, 5, -8, 9, 1 << 40]


def test_compile_error_does_not_block_other_kernels(own_cache):
    good = Launch("conv_arrange.cu", "conv_arrange", (("STORAGE", "float"),), (1,), (256,), 0, ())
    broken = replace(good, defines=(("STORAGE", "no_such_type"),))
    for launches in ((broken, good), (good, broken)):
        loader = CupyRuntime("sm_90a")
        with pytest.raises(KernelCompileError, match="no_such_type"):
            loader.load(launches)
        assert loader.launcher(good)


def test_call_allocates_only_result_and_workspace():
    problem, sizes = split_layer(), []
    data = integer_data(problem)
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)

    def allocate(size):
        sizes.append(size)
        return one_by_one(size)

    with cupy.cuda.using_allocator(allocate):
        y = cupyconv.conv_forward(x, w, **problem.keywords)
        planned = cupyconv.plan(problem)["forward"]
        assert sorted(sizes) == sorted([y.nbytes, planned.workspace_bytes])
        sizes.clear()
        small = cupyconv.conv_forward(x[:, :, :, :8], w[:, :, :, :8], **problem.keywords)
        assert sizes == [small.nbytes]


def test_planned_tile_is_launched(launched):
    """The tile of a plan is launched although the same call ran with another tile before."""
    problem = in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")
    defines = []
    for tile in (0, 2):
        plan = plan_with(problem, "cuda-hopper", backends.current_device(), tile=tile)
        require_exact(problem, impl=plan, passes=("forward",))
        defines.append([item.defines for item, _ in launched])
        launched.clear()
    require_exact(problem, impl="cuda-hopper", passes=("forward",))
    defines.append([item.defines for item, _ in launched])
    assert all(defines)
    assert defines[0] != defines[1], "the second call reused the first tile"
    assert defines[2] != defines[1], "the third call reused the second tile"


@pytest.mark.parametrize(("ordinal", "architecture"), [(0, "sm_90a"), (1, "sm_80")])
def test_current_device_matches_driver_properties(ordinal, architecture):
    backends._gpu.cache_clear()
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    with cupy.cuda.Device(ordinal):
        device = backends.current_device()
    assert device.architecture == architecture
    assert device.name == properties["name"].decode()
    assert device.multiprocessors == properties["multiProcessorCount"]
    assert device.has_tensor_maps is True


def test_refused_tensor_map_raises():
    x = cupy.zeros((8, 64), "float16")
    assert encoded_map(TILED, x.data.ptr)
    with pytest.raises(RuntimeError, match="the driver refuses the tensor map"):
        encoded_map(TILED, x.data.ptr + 8)


def test_unknown_chip_runs_cubins_of_an_older_one(own_cache, nothing_loaded, monkeypatch):
    monkeypatch.setattr(machine.DEVICES[1], "chip", CHIPS[8, 6])
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (75, 80, 90))
    with cupy.cuda.Device(1):
        device = backends.current_device()
        assert (device.architecture, device.target) == ("sm_86", "sm_80")
        require_exact(split_layer())
    names = [path.name for path in own_cache.glob("*.cubin")]
    assert names
    assert all("-sm_80-" in name for name in names)


def test_log_has_plans_kernels_and_launches(own_cache, nothing_loaded, caplog):
    with caplog.at_level("DEBUG", "cupyconv"):
        for _ in range(2):
            cupyconv.conv_forward(*cupy.ones((2, 1, 1, 4, 4), "float32"), impl="cuda-generic")
    events = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert events == ["plan", "compiled", "loaded", "launch", "launch"]
