"""What the library asks of the driver for a launch: shared memory, tensor maps."""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import backends
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import bindings, launch, sources, tensormaps
from cupyconv.gpu.launch import ROLES, Launch, Part, Series
from cupyconv.gpu.overlapping import Overlapping
from tests.agreement import planned, require_exact
from tests.configurations import HOPPER_CASES, in_formats, integer_data
from tests.device.test_memory import one_by_one
from tests.device.test_order import split_layer

TILED = tensormaps.TiledMap("x", 2, (64, 8), (128,), (64, 8))


def test_what_a_function_may_have_of_shared_memory_is_never_made_less():
    module = cupy.RawModule(code='extern "C" __global__ void nothing() {}')
    function = module.get_function("nothing").kernel
    runtime = launch.CupyRuntime("sm_90a")
    for asked in (100_000, 60_000):
        runtime.allow(function, asked)
    get = cupy.cuda.driver.funcGetAttribute
    assert get(launch._MOST_DYNAMIC_SHARED, function.ptr) == 100_000


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
def test_arguments_are_bound_to_the_arrays_of_each_run(
    may_overlap, own_cache, encoded, monkeypatch
):
    """A kernel writes what it is given."""
    source = sources.KernelSource("bound.cu", BOUND, ())
    monkeypatch.setattr(sources, "load", lambda _: source)
    runtime = launch.CupyRuntime("sm_90a")
    maps = [
        tensormaps.TiledMap(role, 2, (64, 100), (128,), (64, 64), offset)
        for role, offset in (("w", 0), ("y", 32))
    ]
    together = tensormaps.TensorMaps(tuple(maps))
    arguments = ("y", "bias", np.int32(7), Part("workspace", 48), together, "x", "workspace")
    nothing = Launch("bound.cu", "no such kernel", (), (0,), (1,), 0, ("x",))
    one = Launch("bound.cu", "bound", (), (1,), (1,), 0, arguments, may_overlap)
    series, kept = Series((nothing, one), runtime), []
    runtime.load((one,))
    assert isinstance(runtime.kernel(one), Overlapping) == may_overlap
    for _ in range(2):
        x, w, y, bias, workspace = (cupy.zeros(2048, np.uint64) for _ in ROLES)
        kept.append((x, w, y, bias, workspace))  # so that others get other addresses
        pointers = w.data.ptr, y.data.ptr + 32
        words = b"".join(map(tensormaps.encode, maps, pointers))
        for b in (bias, None, bias):
            series((x, w, y, b, workspace))
            ours = (y.data.ptr, 0 if b is None else b.data.ptr, 7, workspace.data.ptr + 48)
            expected = [*ours, workspace.data.ptr, *np.frombuffer(words, np.uint64).tolist()]
            assert cupy.asnumpy(x[: len(expected)]).tolist() == expected
        assert encoded[-2:] == list(zip(("w", "y"), pointers, strict=True))
    assert len(encoded) == 4, "once for each pair of addresses"
    y.fill(9)
    Series((replace(one, entry="missing", arguments=("y", "workspace")),), runtime)(
        (None, None, y, bias)
    )
    assert int(y[0]) == 0


@pytest.mark.parametrize("splits", [1, 2])
def test_what_reads_a_launch_before_it_may_begin_before_that_has_ended(splits, launched):
    problem = HOPPER_CASES[0].problem.replace(dtype="float16")  # with channels first: is copied
    with planned("cuda-hopper", 0, splits), cupy.cuda.Stream(non_blocking=True):
        require_exact(
            *(cupyconv, problem),
            to_device=cupy.asarray,
            to_host=cupy.asnumpy,
            passes=("backprop_filter",),
            impl="cuda-hopper",
        )
    overlap = [one.may_overlap for one, _ in launched]
    assert overlap == [False, True, True][: 2 + (splits > 1)]


def test_launches_that_may_overlap_are_refused_as_others_are():
    code = 'extern "C" __global__ void nothing() {}'
    for device, block, status in ((0, (2048,), "INVALID_VALUE"), (1, (32,), "NOT_SUPPORTED")):
        with cupy.cuda.Device(device):
            function = cupy.RawModule(code=code).get_function("nothing").kernel
            with pytest.raises(cupy.cuda.driver.CUDADriverError, match=status):
                Overlapping(function)((1,), block, (), shared_mem=0)
            function((1,), (32,), ())
            if device == 0:
                Overlapping(function)((1,), (32,), (), shared_mem=0)
            cupy.cuda.Device().synchronize()


TOLD = r"""
struct Pair { long long first, second; };
extern "C" __global__ void told(long long* y, const int number, const long long* x,
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
def test_launches_that_may_overlap_have_the_extents_and_arguments_of_others(extents):
    function = cupy.RawModule(code=TOLD).get_function("told").kernel
    x, found = cupy.arange(5, 7), []
    pair = np.array([(-8, 9)], np.dtype("i8, i8"))
    for launched in (function, Overlapping(function)):
        with cupy.cuda.Stream(non_blocking=True):
            y = cupy.zeros(11, np.int64)
            for _ in range(2):  # what was worked out once, too
                launched(*extents, (y, np.int32(7), x, pair, np.uint64(1 << 40)), shared_mem=4096)
            found.append(y.get().tolist())
    assert found[1] == found[0]
    assert found[0][6:] == [7, 5, -8, 9, 1 << 40]


def test_what_does_not_compile_keeps_nothing_else_from_being_loaded(own_cache):
    good = launch.Launch(
        "conv_arrange.cu", "conv_arrange", (("STORAGE", "float"),), (1,), (256,), 0, ()
    )
    broken = replace(good, defines=(("STORAGE", "no_such_type"),))
    for launches in ((broken, good), (good, broken)):
        runtime = launch.CupyRuntime("sm_90a")
        with pytest.raises(KernelCompileError, match="no_such_type"):
            runtime.load(launches)
        assert runtime.kernel(good).ptr


def test_a_call_takes_memory_for_its_result_and_its_workspace_alone():
    problem, sizes = split_layer(), []
    data = integer_data(problem)
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)

    def counted(size):
        sizes.append(size)
        return one_by_one(size)

    with cupy.cuda.using_allocator(counted):
        y = cupyconv.conv_forward(x, w, **problem.keywords)
        planned = cupyconv.plan(problem)["forward"]
        assert sorted(sizes) == sorted([y.nbytes, planned.workspace_bytes])
        sizes.clear()
        small = cupyconv.conv_forward(x[:, :, :, :8], w[:, :, :, :8], **problem.keywords)
        assert sizes == [small.nbytes]


def test_a_tile_that_a_test_asks_for_is_what_runs(launched):
    """Though the same call ran with another one before."""
    problem = in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")
    how = {"passes": ("forward",), "to_device": cupy.asarray, "to_host": cupy.asnumpy}
    seen = []
    for tile in (0, 2):
        with planned("cuda-hopper", tile):
            require_exact(cupyconv, problem, impl="cuda-hopper", **how)
        seen.append([one.defines for one, _ in launched])
        launched.clear()
    require_exact(cupyconv, problem, impl="cuda-hopper", **how)
    seen.append([one.defines for one, _ in launched])
    assert all(seen)
    assert seen[0] != seen[1], "that of the first call"
    assert seen[2] != seen[1], "that of the call before"


@pytest.mark.parametrize(("ordinal", "architecture"), [(0, "sm_90a"), (1, "sm_80")])
def test_the_current_device_is_what_the_driver_says_of_it(ordinal, architecture):
    backends._gpu.cache_clear()
    found = cupy.cuda.runtime.getDeviceProperties(ordinal)
    with cupy.cuda.Device(ordinal):
        device = backends.current_device()
    assert device.architecture == architecture
    assert device.name == found["name"].decode()
    assert device.multiprocessors == found["multiProcessorCount"]
    assert device.has_tensor_maps is True


def test_a_map_that_the_driver_refuses_is_an_error():
    x = cupy.zeros((8, 64), "float16")
    assert len(tensormaps.encode(TILED, x.data.ptr)) == tensormaps.MAP_BYTES
    with pytest.raises(RuntimeError, match="the driver refuses the tensor map"):
        tensormaps.encode(TILED, x.data.ptr + 8)


def test_without_the_drivers_bindings_there_are_no_maps(monkeypatch):
    def missing():
        raise ImportError("no cuda.bindings")

    assert bindings.available()
    bindings.available.cache_clear()
    monkeypatch.setattr(bindings, "driver", missing)
    assert not bindings.available()
    bindings.available.cache_clear()
