"""All public interfaces accept CuPy arrays, with the same results as for NumPy arrays.

Without a GPU the whole module is skipped, with one message.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvError, ConvTypeError, arrays, cudnn, measuring
from cupyconv.bench import ceilings, places
from cupyconv.cli.main import main
from cupyconv.formats import data_formats, filter_formats
from cupyconv.problem import REAL_PART
from tests.agreement import require_equal
from tests.configurations import in_formats, integer_data
from tests.gpu.fixtures import as_a_new_process

if arrays.device_count() == 0:
    pytest.skip("no usable GPU: the CuPy path was not run", allow_module_level=True)

cupy = arrays.cupy()
ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float16", "bfloat16", "float32", "float64")
COMPLEX = tuple(REAL_PART)
SHAPES = {
    1: ((2, 4, 9), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    2: ((2, 4, 7, 6), (6, 2, 3, 2), {"stride": (2, 1), "padding": ((1, 0), (0, 1)), "groups": 2}),
    3: ((1, 2, 5, 4, 6), (3, 2, 2, 3, 2), {"dilation": (1, 1, 2), "padding": "same"}),
}


def layer(rank=2, last=False, dtype="float32"):
    """Return a small problem, integer-valued data, and the keywords of its calls."""
    x, w, rules = SHAPES[rank]
    problem = cupyconv.ConvProblem(x, w, dtype=dtype, **rules)
    problem = in_formats(problem, data_formats(rank)[last], filter_formats(rank)[2 * last])
    formats = {"data_format": problem.data_format, "filter_format": problem.filter_format}
    return problem, integer_data(problem), {**rules, **formats}


def same(call, given):
    """Check that a call returns a CuPy array for CuPy arrays, with the values as for NumPy."""
    got, expected = call(*map(cupy.asarray, given)), call(*given)
    assert isinstance(got, cupy.ndarray)
    require_equal(cupy.asnumpy(got), expected, "a call")
    return got


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions(rank, last, dtype):
    problem, data, words = layer(rank, last, dtype)
    same(lambda x, w: cupyconv.conv_forward(x, w, **words), (data.x, data.w))
    fused = {**words, "activation": None if problem.is_complex else "relu"}
    same(lambda x, w, b: cupyconv.conv_forward(x, w, b, **fused), (data.x, data.w, data.bias))
    same(
        lambda w, dy: cupyconv.conv_backprop_input(problem.input_shape, w, dy, **words),
        (data.w, data.dy),
    )
    same(
        lambda x, dy: cupyconv.conv_backprop_filter(x, problem.filter_shape, dy, **words),
        (data.x, data.dy),
    )
    same(lambda dy: cupyconv.conv_backprop_bias(dy, data_format=problem.data_format), (data.dy,))
    for part in ("dx", "dw", "db"):
        same(
            lambda x, w, dy, part=part: getattr(cupyconv.conv_backward(x, w, dy, **words), part),
            (data.x, data.w, data.dy),
        )
    same(
        lambda dy, w: cupyconv.conv_transpose(dy, w, output_shape=problem.input_shape, **words),
        (data.dy, data.w),
    )
    same(
        lambda dy, w, b: cupyconv.conv_transpose(
            dy, w, b, output_shape=problem.input_shape, **fused
        ),
        (data.dy, data.w, np.resize(data.bias, problem.C)),
    )


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_functions_of_complex_numbers(rank, dtype):
    test_functions(rank, rank == 2, dtype)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_views_of_complex_numbers(dtype):
    problem, data, words = layer(dtype=dtype)
    x, w, dy = (array[..., ::-1] for array in (data.x, data.w, data.dy))
    wide = [array[:, ::-1].transpose(1, 0, 3, 2) for array in (x, w, dy)]
    x, w, dy = (array.transpose(1, 0, 3, 2)[:, ::-1] for array in map(cupy.asarray, wide))
    host = [cupy.asnumpy(array) for array in (x, w, dy)]
    room = {}
    for name, shape in (("dx", problem.input_shape), ("dw", problem.filter_shape)):
        room[name] = cupy.full((*shape, 2), 9, dtype)[..., 1]
    out = cupyconv.conv_backprop_input(problem.input_shape, w, dy, out=room["dx"], **words)
    assert out is room["dx"]
    cupyconv.conv_backprop_filter(x, problem.filter_shape, dy, out=room["dw"], **words)
    expected = cupyconv.conv_backward(*host, **words)
    for name, got in room.items():
        require_equal(cupy.asnumpy(got), getattr(expected, name), name)
        assert (got.base[..., 0] == 9).all(), "between the elements of out"


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
def test_a_transposed_convolution_beyond_its_windows(dtype):
    """An output_padding as large as the stride makes the function copy x."""
    data = integer_data(cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype=dtype))
    for stride, dilation, extra in ((1, 2, 1), (2, 5, 4)):
        rules = {"stride": stride, "dilation": dilation, "output_padding": extra}
        same(lambda x, w, r=rules: cupyconv.conv_transpose(x, w, **r), (data.dy[::-1], data.w))


CUDNN = {
    "forward": ("x", "w", "bias", "dy"),
    "backward_filter": ("x", "dy", "w"),
    "backward_data": ("w", "dy", "bias_of_x", "x"),
}
"""Arguments of each function, the result's array last."""


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("function", CUDNN)
def test_cudnn(function, dtype):
    for layout in (cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_TENSOR_NHWC):
        require_cudnn(function, dtype, layout, auto_tune=False)


def test_cudnn_that_tunes_itself(own_cache):
    require_cudnn("forward", "float32", cudnn.CUDNN_TENSOR_NCHW, auto_tune=True)


def require_cudnn(function, dtype, layout, auto_tune):
    last = layout == cudnn.CUDNN_TENSOR_NHWC
    problem = cupyconv.ConvProblem(
        (2, 4, 7, 6), (6, 2, 3, 2), stride=(2, 1), padding=1, groups=2, dtype=dtype
    )
    problem = in_formats(problem, data_formats(2)[last], filter_formats(2)[2 * last])
    data = integer_data(problem)
    tensors = {**vars(data), "bias_of_x": np.resize(data.bias, problem.C)}
    rules = ((1, 1), (2, 1), (1, 1), 2)
    how = {"auto_tune": auto_tune, "tensor_core": "auto", "d_layout": layout, "w_layout": layout}
    if function != "forward":
        how["deterministic"] = False
    *given, result = (tensors[name] for name in CUDNN[function])
    call = getattr(cudnn, f"convolution_{function}")
    expected = np.full_like(result, 7)
    call(*given, expected, *rules, **how)
    room = cupy.full((*result.shape[:-1], 2 * result.shape[-1]), 9, dtype)
    got = room[..., 1::2]
    on_device = [cupy.asarray(array) for array in given]
    assert call(*on_device, got, *rules, **how) is None
    require_equal(cupy.asnumpy(got), expected, f"{function} of {problem}")
    assert (room[..., ::2] == 9).all(), "between the elements of the result"
    result_name = "gW" if function == "backward_filter" else "y"
    with pytest.raises(ConvTypeError, match=f"^{result_name} must be on the inputs' device"):
        call(*on_device, expected, *rules, **how)
    with pytest.raises(ConvTypeError, match="all arrays must be on one device"):
        call(on_device[0], *given[1:], got, *rules, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_written_where_they_are_wanted(dtype):
    problem, data, words = layer(dtype=dtype)
    x, w, dy = map(cupy.asarray, (data.x, data.w, data.dy))
    room = {}
    for name, shape in (("y", data.dy.shape), ("dx", data.x.shape), ("dw", data.w.shape)):
        wide = cupy.full((*shape[:-1], 2 * shape[-1]), 9, data.x.dtype)
        room[name] = wide, wide[..., ::-2]
    calls = {
        "y": lambda out: cupyconv.conv_forward(x, w, out=out, **words),
        "dx": lambda out: cupyconv.conv_backprop_input(data.x.shape, w, dy, out=out, **words),
        "dw": lambda out: cupyconv.conv_backprop_filter(x, data.w.shape, dy, out=out, **words),
    }
    for name, call in calls.items():
        wide, out = room[name]
        assert call(out) is out
        assert (wide[..., ::2] == 9).all(), "between the elements of out"
    expected = cupyconv.conv_forward(data.x, data.w, **words)
    require_equal(cupy.asnumpy(room["y"][1]), expected, f"{problem}")


def test_a_plan_without_a_device_is_for_the_current_one():
    problem, data, words = layer(last=True, dtype="float16")
    for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(ordinal):
            found = cupyconv.plan(problem)
            major, minor = map(int, divmod(int(cupy.cuda.Device().compute_capability), 10))
            assert found.device.capability == (major, minor)
            same(lambda x, w: cupyconv.conv_forward(x, w, **words), (data.x, data.w))


def test_what_is_measured_once_is_remembered(own_cache, monkeypatch):
    _, data, words = layer(last=True)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    same(lambda x, w: cupyconv.conv_forward(x, w, **words), (data.x, data.w))
    (file,) = (own_cache / "measured").glob("*.json")
    entry = json.loads(file.read_text())
    assert entry["pass"] == "forward"
    assert min(entry["seconds"].values()) > 0
    as_a_new_process()
    monkeypatch.setattr(measuring, "_measure", None)  # the file suffices
    same(lambda x, w: cupyconv.conv_forward(x, w, **words), (data.x, data.w))


def test_no_more_memory_is_used_than_permitted(monkeypatch):
    # Few output pixels and a long sum, which the planner splits if a workspace is permitted.
    x, w = np.ones((1, 3, 3, 768), "float16"), np.ones((8, 3, 3, 768), "float16")
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    free = cupyconv.plan(cupyconv.ConvProblem(x.shape, w.shape, dtype="float16", **words))
    assert free["forward"].workspace_bytes > 0
    same(lambda x, w: cupyconv.conv_forward(x, w, **words), (x, w))
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    pool = cupy.cuda.MemoryPool()
    given, out = (cupy.asarray(x), cupy.asarray(w)), cupy.empty((1, 1, 1, 8), "float16")
    with cupy.cuda.using_allocator(pool.malloc):
        assert cupyconv.conv_forward(*given, out=out, **words) is out
    assert pool.total_bytes() == 0
    assert (out == 9 * 768).all()


# -- other libraries' arrays -----------------------------------------------------------------------
class ByInterface:
    """Exporter of an array's memory through __cuda_array_interface__."""

    def __init__(self, array):
        self._array = array

    @property
    def __cuda_array_interface__(self):
        return self._array.__cuda_array_interface__


class ByDlpack:
    """Exporter of an array's memory through DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("exporter", [ByInterface, ByDlpack])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exported_memory_is_used_without_a_copy(exporter, dtype):
    _, data, words = layer(dtype=dtype)
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    turned = x[..., ::-1].copy()[..., ::-1] if exporter is ByInterface else x
    taken, home = arrays.take("x", exporter(turned))
    assert home is arrays.Home.GPU
    assert taken.data.ptr == turned.data.ptr
    got = cupyconv.conv_forward(exporter(turned), exporter(w), **words)
    require_equal(
        cupy.asnumpy(got), cupyconv.conv_forward(data.x, data.w, **words), exporter.__name__
    )
    back = cupyconv.as_kind_of(got, x)
    assert back is got


@pytest.mark.parametrize("kind", [2, 13], ids=["device", "managed"])
def test_device_memory_is_taken_by_dlpack(kind):
    x = cupy.ones((1, 2, 5), "float32")

    class Exporter(ByDlpack):
        def __dlpack_device__(self):
            return (kind, 0)

    taken, home = arrays.take("x", Exporter(x))
    assert home is arrays.Home.GPU
    assert taken.data.ptr == x.data.ptr


class ReadOnlyByDlpack(ByDlpack):
    """Exporter whose capsule has the flag for read-only memory."""

    def __dlpack__(self, **keywords):
        capsule = super().__dlpack__(**keywords)
        address = arrays._capsule_address(capsule, b"dltensor_versioned")
        ctypes.c_uint64.from_address(address + 24).value |= 1
        return capsule


class OldByDlpack(ByDlpack):
    """Exporter for a version of DLPack that has no flags."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__(stream=stream)


def interface_with(array, **changes):
    """Return an object with an array's __cuda_array_interface__, changed as given."""
    interface = {**array.__cuda_array_interface__, **changes}
    return SimpleNamespace(__cuda_array_interface__=interface, kept=array)


def read_only_interface(array):
    return interface_with(array, data=(array.data.ptr, True))


@pytest.mark.parametrize("exporter", [ReadOnlyByDlpack, read_only_interface])
def test_read_only_results_are_refused(exporter):
    _, data, words = layer()
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    expected = cupyconv.conv_forward(x, w, **words)
    room = cupy.full(expected.shape, 7, "float32")
    with pytest.raises(ConvError, match="out must be writeable: it is read-only"):
        cupyconv.conv_forward(x, w, out=exporter(room), **words)
    assert (room == 7).all()
    read = cupyconv.conv_forward(exporter(x), exporter(w), **words)
    assert (read == expected).all()


@pytest.mark.parametrize("exporter", [ByDlpack, OldByDlpack, ByInterface, interface_with])
def test_writeable_results_are_written_in_place(exporter):
    _, data, words = layer()
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    expected = cupyconv.conv_forward(x, w, **words)
    room = cupy.full(expected.shape, 7, "float32")
    out = exporter(room)
    assert cupyconv.conv_forward(x, w, out=out, **words) is out
    assert (room == expected).all()


def test_masks_of_interfaces_are_refused():
    x = cupy.ones((1, 2, 5), "float32")
    with pytest.raises(ConvTypeError, match=r"x has a mask.*masks are not supported"):
        arrays.take("x", interface_with(x, mask=x > 0))


class Named(cupy.ndarray):
    """An array class with an attribute, like the example in CuPy's documentation."""

    def __array_finalize__(self, source):
        self.info = getattr(source, "info", None)


class Scaled(cupy.ndarray):
    """An array class whose values differ from its memory, such as by a factor."""

    def __array_ufunc__(self, *given, **keywords):
        return NotImplemented


def test_classes_of_cupy_arrays():
    x = cupy.ones((1, 2, 5), "float32")
    for _ in range(2):  # the second time, the type is cached
        taken, home = arrays.take("x", x.view(Named))
        assert home is arrays.Home.GPU
        assert type(taken) is cupy.ndarray
        assert taken.data.ptr == x.data.ptr
        with pytest.raises(ConvTypeError, match=r"replaces __array_ufunc__.*view\(cupy\.ndarray\)"):
            arrays.take("x", x.view(Scaled))
    taken, _ = arrays.take("x", x.view(Scaled).view(cupy.ndarray))
    assert type(taken) is cupy.ndarray
    y = cupyconv.conv_forward(x.view(Named), cupy.ones((1, 2, 5), "float32"))
    assert type(y) is cupy.ndarray
    with pytest.raises(ConvTypeError, match="replaces __array_ufunc__"):
        cupyconv.conv_forward(x.view(Scaled), x)


def test_distributed_arrays_are_refused():
    distributed = pytest.importorskip("cupyx.distributed.array").DistributedArray
    empty = cupy.ndarray.__new__(distributed, (0,))
    with pytest.raises(ConvTypeError, match=r"replaces __array_ufunc__.*pass x\.get\(\)"):
        arrays.take("x", empty)


def test_results_are_taken_by_others_without_a_copy():
    _, data, words = layer()
    y = cupyconv.conv_forward(cupy.asarray(data.x), cupy.asarray(data.w), **words)
    for given in (cupy.from_dlpack(ByDlpack(y)), cupy.asarray(ByInterface(y))):
        assert given.data.ptr == y.data.ptr
        assert (given == y).all()


def test_arrays_of_another_device_and_of_the_host_are_told_apart():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("no second GPU")
    _, data, words = layer()
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    with cupy.cuda.Device(1):
        theirs = cupy.asarray(data.w)
        with pytest.raises(ConvTypeError, match="x is on device 0, the current device is 1"):
            cupyconv.conv_forward(x, theirs, **words)
        assert cupyconv.conv_forward(cupy.asarray(data.x), theirs, **words).device.id == 1
    with pytest.raises(ConvTypeError, match="w is on device 1, the current device is 0"):
        cupyconv.conv_forward(x, theirs, **words)
    with pytest.raises(ConvTypeError, match="x is a CuPy array, w is a NumPy array"):
        cupyconv.conv_forward(x, data.w, **words)
    moved = r"x is a NumPy array, w is a CuPy array.*cupy\.asarray\(\.\.\.\) or cupy\.asnumpy"
    with pytest.raises(ConvTypeError, match=moved):
        cupyconv.conv_forward(data.x, w, **words)
    with pytest.raises(
        ConvTypeError, match=r"out is a CuPy array, the inputs are NumPy.*a NumPy array"
    ):
        cupyconv.conv_forward(data.x, data.w, out=x, **words)
    assert cupyconv.conv_forward(x, w, **words).device.id == 0


# -- other modules ---------------------------------------------------------------------------------
def test_raw_ops():
    ops = cupyconv.raw_ops
    numbers = np.random.default_rng(0)
    x = numbers.integers(-2, 3, (2, 6, 5, 4)).astype("float32")
    w = numbers.integers(-2, 3, (3, 3, 4, 6)).astype("float32")
    rules = {"strides": [1, 2, 2, 1], "padding": "SAME"}
    dy = same(lambda x, w: ops.Conv2D(input=x, filter=w, **rules), (x, w))
    host = cupy.asnumpy(dy)
    same(
        lambda w, dy: ops.Conv2DBackpropInput(
            input_sizes=x.shape, filter=w, out_backprop=dy, **rules
        ),
        (w, host),
    )
    same(
        lambda x, dy: ops.Conv2DBackpropFilter(
            input=x, filter_sizes=w.shape, out_backprop=dy, **rules
        ),
        (x, host),
    )
    # TensorFlow reads sizes from a tensor, so sizes on the GPU are read too.
    sizes = cupy.asarray(x.shape)
    got = ops.Conv2DBackpropInput(
        input_sizes=cupy.asnumpy(sizes), filter=cupy.asarray(w), out_backprop=dy, **rules
    )
    assert got.shape == x.shape
    depthwise = w[..., :2]
    same(lambda x, w: ops.DepthwiseConv2dNative(input=x, filter=w, **rules), (x, depthwise))
    same(lambda dy: ops.BiasAddGrad(out_backprop=dy), (host,))


def test_onnx():
    _, data, _ = layer()
    rules = {"strides": [2, 1], "pads": [1, 0, 0, 1], "group": 2}
    y = same(lambda x, w, b: cupyconv.onnx.conv(x, w, b, **rules), (data.x, data.w, data.bias))
    same(lambda y, w: cupyconv.onnx.conv_transpose(y, w, **rules), (cupy.asnumpy(y), data.w))


def test_dask_with_chunks_of_cupy():
    da = pytest.importorskip("dask.array", reason="Dask is not installed")
    import dask

    import cupyconv.dask as cd

    problem, data, words = layer()
    chunks = {"x": (1, 4, 3, 6), "w": (3, 2, 3, 2), "dy": (1, 6, 2, 3)}
    x, w, dy = (
        da.from_array(cupy.asarray(array), chunks=chunks[name], asarray=False)
        for name, array in (("x", data.x), ("w", data.w), ("dy", data.dy))
    )
    with dask.config.set(scheduler="synchronous"):
        y = cd.conv_forward(x, w, **words).compute()
        gradients = dask.compute(
            cd.conv_backprop_input(problem.input_shape, w, dy, **words),
            cd.conv_backprop_filter(x, problem.filter_shape, dy, **words),
            cd.conv_backprop_bias(dy, data_format=problem.data_format),
        )
        longer = {"stride": 1, "dilation": 3, "output_padding": 2, "groups": 2}
        beyond = cd.conv_transpose(dy, w, **longer).compute()
    exact = cupyconv.conv_transpose(data.dy, data.w, **longer)
    require_equal(cupy.asnumpy(beyond), exact, "beyond its windows")
    expected = cupyconv.conv_backward(data.x, data.w, data.dy, **words)
    wanted = (cupyconv.conv_forward(data.x, data.w, **words), expected.dx, expected.dw, expected.db)
    for got, exact in zip((y, *gradients), wanted, strict=True):
        assert isinstance(got, cupy.ndarray)
        require_equal(cupy.asnumpy(got), exact, "dask")


def test_explanations():
    """Texts, numbers and pages are the same as for NumPy arrays."""
    problem, data, words = layer(dtype="float16")
    x, w, dy = data.x, data.w, data.dy
    results = cupyconv.conv_backward(x, w, dy, **words)
    given = {"x": x, "w": w, "dy": dy, "dx": results.dx, "dw": results.dw}
    given["y"] = cupyconv.conv_forward(x, w, **words)
    there = {name: cupy.asarray(array) for name, array in given.items()}
    here, explained = (cupyconv.explain(problem, **tensors) for tensors in (given, there))
    assert str(explained) == str(here)
    assert explained.page() == here.page()
    for name in ("y[1,5,2,3]", "dx[1,3,4,2]", "dw[4,1,2,0]"):
        known, element = here.element(name), explained.element(name)
        assert element.sum == element.computed == known.sum
        assert str(element) == str(known)


def test_notebooks_that_run_kernels():
    """Run the notebooks of the package's tests in a process that sees the same devices."""
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    chosen = "reproduce and (02 or 03)"
    words = ("-q", "-p", "no:cacheprovider", "tests/pages/test_notebooks.py", "-k", chosen)
    done = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout.decode()
    assert b"2 passed" in done.stdout


# -- the command line ------------------------------------------------------------------------------
def run(*words, code=0):
    """Return what the program prints for these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "cupyconv.cli", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def test_env_has_the_gpus():
    found = json.loads(run("env", "--json", "--require-gpu"))
    count = cupy.cuda.runtime.getDeviceCount()
    assert [one["number"] for one in found["gpus"]] == list(range(count))
    assert found["driver"]["cuda"]
    assert found["cupy"]["version"] == cupy.__version__


def test_grads_on_the_gpu():
    words = "grads --input 1x4x6x5 --filter 3x4x3x3 --padding same --device gpu --json"
    (found,) = json.loads(run(*words.split()))["layers"]
    assert found["architecture"].startswith("sm_")
    assert found["passed"]


@pytest.mark.parametrize(
    ("narrowed", "impls"),
    [
        ("--dtype float32 --impl cuda-generic", {"cuda-generic"}),
        pytest.param("", {"cuda-generic", "cuda-gather"}, marks=pytest.mark.thorough),
    ],
    ids=["one", "all"],
)
def test_check_on_the_gpu(narrowed, impls):
    words = "check --input 1x4x6x5 --filter 4x4x3x2 --padding same --device gpu --json"
    found = json.loads(run(*words.split(), *narrowed.split()))
    assert found["passed"]
    assert impls <= {
        one["implementation"] for one in found["implementations"] if one["comparisons"]
    }


LAYERS = """
[[layer]]
input = "1x6x5x8"
filter = "8x3x3x8"
padding = "same"
data_format = "NHWC"
filter_format = "OHWI"
"""


@pytest.mark.thorough
def test_bench_on_the_gpu_says_what_it_cannot_measure(tmp_path, monkeypatch):
    # The ceilings and sweeps take minutes on an emulated device with their usual sizes.
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"gpu": 256})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"gpu": 1 << 16})
    monkeypatch.setattr(places.GpuPlace, "sweep_bytes", 1 << 16)
    layers, target = tmp_path / "layers.toml", tmp_path / "found.json"
    layers.write_text(LAYERS)
    words = f"--config {layers} --device gpu --pass forward --layout channels_last --json {target}"
    words += " --seconds 0.001 --peers none"
    done = CliRunner().invoke(main, ["bench", *words.split()])
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())
    assert [row["pass_"] for row in found["rows"]] == ["forward"]
    assert not found["failed"]
    # Without cuBLAS and PyTorch no matrix product can be measured; the report says so.
    without = [note["what"] for note in found["skipped"]]
    assert bool(found["ceilings"]) != ("the roofline" in without)
    assert json.loads(json.dumps(found["environment"]))["device"] != "cpu"
