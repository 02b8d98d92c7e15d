"""Tests of the CuPy path on a real GPU: the usual cases, and behaviour that needs a GPU.

Without a GPU the whole module is skipped, with one message.
"""

import ctypes
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import cupyconv
from cupyconv import arrays, backends, measuring
from cupyconv.cache_folder import CACHE_VARIABLE
from cupyconv.formats import data_formats, filter_formats
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests import agreement, device, views
from tests.activations import ACTIVATIONS
from tests.agreement import fits, plan_with
from tests.configurations import (
    CASES,
    FAMILY_CASES,
    HOPPER_CASES,
    PATCH_CASES,
    in_formats,
)

if arrays.device_count() == 0:
    pytest.skip("no usable GPU: the CuPy path was not run", allow_module_level=True)

cupy = arrays.cupy()
DTYPES = ("float16", "bfloat16", "float32", "float64")
X = (2, 6, 9, 7)
W = (4, 3, 3, 2)
LAYER = {"stride": (2, 1), "padding": ((1, 0), (0, 1)), "dilation": (1, 2), "groups": 2}


def random(shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(arrays.numpy_dtype(dtype))


def layer(dtype="float32"):
    """Return x, w and dy of a small layer as CuPy arrays, and its problem."""
    problem = cupyconv.ConvProblem(X, W, dtype=dtype, **LAYER)
    x, w, dy = (random(s, dtype, i) for i, s in enumerate((X, W, problem.output_shape)))
    return cupy.asarray(x), cupy.asarray(w), cupy.asarray(dy), problem


def require_exact(problem, **how):
    """Check that the passes of a problem give the same integers as the reference."""
    agreement.require_exact(cupyconv, problem, to_device=cupy.asarray, to_host=cupy.asnumpy, **how)


@pytest.fixture
def torch_with_cuda():
    if device.is_running():
        pytest.skip("PyTorch has no CUDA device where the devices are emulated: they are CuPy's")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    return torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *FAMILY_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("impl", ["auto", "cuda-generic", "cuda-gather", "cuda-direct"])
def test_kernels_agree_exactly_with_the_reference(case, impl, dtype):
    problem = case.problem.replace(dtype=dtype)
    device = backends.current_device()
    passes = PASSES if impl == "auto" else fits(problem, impl, device)
    require_exact(problem, passes=passes, impl=impl)


def as_it_lies(array):
    """Return a copy on the GPU with the strides and alignment of an array."""
    lowest, end = np.lib.array_utils.byte_bounds(array)
    lead = lowest % 16
    memory = cupy.zeros(lead + end - lowest, np.uint8)
    content = (ctypes.c_uint8 * (end - lowest)).from_address(lowest)
    memory[lead:] = cupy.asarray(np.frombuffer(content, np.uint8))
    first = lead + array.__array_interface__["data"][0] - lowest
    return cupy.ndarray(array.shape, array.dtype, memory.data + first, array.strides)


@pytest.mark.parametrize("kind", views.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["pieces_of_8", "pixels_follow", "depthwise_pieces"])
def test_views_agree_exactly_with_the_reference(name, dtype, pass_, kind):
    case = next(case for case in FAMILY_CASES if case.name == name)
    for last in (False, True):
        data, filters = data_formats(2)[last], filter_formats(2)[last]
        problem = in_formats(case.problem, data, filters).replace(dtype=dtype)
        for impl in ("auto", "cuda-generic", "cuda-gather", "cuda-direct", "cuda-toeplitz"):
            if impl == "auto" or pass_ in fits(problem, impl, backends.current_device()):
                views.require_exact(
                    cupyconv,
                    problem,
                    pass_,
                    views.named(problem, pass_, kind.name),
                    to_device=as_it_lies,
                    to_host=cupy.asnumpy,
                    impl=impl,
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PATCH_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
def test_patch_kernels_agree_exactly_with_the_reference(case, last, dtype):
    rank = case.problem.spatial_rank
    data, filters = data_formats(rank)[last], filter_formats(rank)[last]
    problem = in_formats(case.problem, data, filters).replace(dtype=dtype)
    passes = fits(problem, "cuda-patch", backends.current_device(), "tf32")
    require_exact(problem, passes=passes, impl="cuda-patch", precision="tf32")


@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tile", range(len(FAMILIES["cuda-hopper"].tiles) // 4 + 1))
@pytest.mark.parametrize(
    ("impl", "dtype", "precision"),
    [
        ("cuda-hopper", "float16", "ieee"),
        ("cuda-hopper", "bfloat16", "ieee"),
        ("cuda-hopper", "float32", "tf32"),
        ("cuda-hopper-bf16x6", "float32", "bf16x6"),
    ],
)
def test_hopper_kernels_with_every_tile(impl, dtype, precision, tile, case):
    device = backends.current_device()
    filters = filter_formats(case.problem.spatial_rank)[1 + tile % 2]
    data = data_formats(case.problem.spatial_rank)[1]
    problem = in_formats(case.problem, data, filters).replace(dtype=dtype)
    splits = 1 + 2 * (tile % 2)
    require_exact(
        problem,
        passes=fits(problem, impl, device, precision),
        impl=plan_with(problem, impl, device, tile=tile, splits=splits, precision=precision),
        precision=precision,
    )


@pytest.mark.slow
def test_planes_err_no_more_than_plain_float32():
    """Compare largest and mean errors against float64 over 4,608 terms; "auto" relies on it."""
    problem = cupyconv.ConvProblem(
        (4, 14, 14, 512), (512, 3, 3, 512), padding=1, data_format="NHWC", filter_format="OHWI"
    )
    if not fits(problem, "cuda-hopper-bf16x6", backends.current_device(), "bf16x6"):
        pytest.skip("these kernels need compute capability 9.0")
    arguments = {"padding": 1, "data_format": "NHWC", "filter_format": "OHWI"}
    permitted = {**arguments, "precision": "bf16x6"}
    x, w = (cupy.asarray(random(s)) for s in (problem.input_shape, problem.filter_shape))
    exact = cupyconv.conv_forward(x.astype("float64"), w.astype("float64"), **arguments)
    errors = {}
    for impl in ("cuda-hopper-bf16x6", "cuda-generic"):
        error = cupy.abs(cupyconv.conv_forward(x, w, impl=impl, **permitted) - exact)
        errors[impl] = float(error.max()), float(error.mean())
    print(errors)
    assert errors["cuda-hopper-bf16x6"] <= errors["cuda-generic"]


def test_nothing_synchronises_and_calls_can_be_captured():
    x, w, dy, _ = layer()
    outs = [cupy.empty_like(cupyconv.conv_forward(x, w, **LAYER)), cupy.empty_like(x)]
    cupyconv.conv_backprop_input(X, w, dy, out=outs[1], **LAYER)  # compiles before the capture
    filter_gradient = cupyconv.conv_backprop_filter(x, W, dy, **LAYER)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()  # any synchronisation from here to end_capture is an error
        cupyconv.conv_forward(x, w, out=outs[0], **LAYER)
        cupyconv.conv_backprop_input(X, w, dy, out=outs[1], **LAYER)
        cupyconv.conv_backprop_filter(x, W, dy, out=filter_gradient, **LAYER)
        graph = stream.end_capture()
        for out in (*outs, filter_gradient):
            out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    host = [cupy.asnumpy(array) for array in (x, w, dy)]
    expected = [
        cupyconv.conv_forward(host[0], host[1], impl="reference", **LAYER),
        cupyconv.conv_backprop_input(X, host[1], host[2], impl="reference", **LAYER),
        cupyconv.conv_backprop_filter(host[0], W, host[2], impl="reference", **LAYER),
    ]
    for out, reference in zip((*outs, filter_gradient), expected, strict=True):
        np.testing.assert_allclose(cupy.asnumpy(out), reference, rtol=1e-5, atol=1e-5)


def test_results_are_bitwise_the_same_on_every_run():
    x, w, dy, _ = layer()
    runs = {
        tuple(cupy.asnumpy(g).tobytes() for g in cupyconv.conv_backward(x, w, dy, **LAYER))
        for _ in range(10)
    }
    assert len(runs) == 1


@pytest.mark.slow
def test_measured_times_do_not_contain_the_hosts():
    """The host takes 2 ms per call, and the device far less."""
    x = cupy.zeros(1 << 10, "float32")

    def call():
        time.sleep(2e-3)
        x.fill(1)

    found = measuring.timed(call, 4, lead=0.1)
    assert found.host > 2e-3
    assert found.device < 2e-4


FIRST_CALL = """
import time

import cupy
import cupyconv

x, w = cupy.ones((32, 56, 56, 64), "float16"), cupy.ones((64, 3, 3, 64), "float16")
cupy.cuda.get_current_stream().synchronize()
start = time.perf_counter()
cupyconv.conv_forward(x, w, padding=1, data_format="NHWC", filter_format="OHWI")
cupy.cuda.get_current_stream().synchronize()
print(time.perf_counter() - start)
"""
"""Program that prints the seconds of its first call, without imports and the CUDA context."""


@pytest.mark.slow
def test_first_call_takes_less_than_2_s_cold_and_50_ms_warm(tmp_path):
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    cold, warm = (
        float(subprocess.check_output([sys.executable, "-c", FIRST_CALL], env=environment))
        for _ in range(2)
    )
    print(f"first call: {cold * 1e3:.0f} ms with a cold cache, {warm * 1e3:.0f} ms with a warm one")
    assert cold < 2
    assert warm < 0.05


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation_are_fused(activation):
    x, w, _, _ = layer()
    bias = random((4,), seed=9)
    got = cupyconv.conv_forward(x, w, cupy.asarray(bias), activation=activation, **LAYER)
    host = [cupy.asnumpy(array) for array in (x, w)]
    expected = cupyconv.conv_forward(*host, bias, activation=activation, impl="reference", **LAYER)
    np.testing.assert_allclose(cupy.asnumpy(got), expected, rtol=1e-5, atol=1e-5)


def whole(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(-3, 4, shape)
    return values.astype(arrays.numpy_dtype(dtype))


ADDENDS = {
    "contiguous": lambda add: add,
    "transposed": lambda add: cupy.ascontiguousarray(add.T).T,
    "the result": lambda add: add.copy(),
}
"""Memory layouts of an addend."""


@pytest.mark.parametrize("kind", ADDENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_addend_is_added_before_the_activation(kind, dtype):
    problem = cupyconv.ConvProblem(X, W, dtype=dtype, **LAYER)
    x, w, add = (whole(s, dtype, i) for i, s in enumerate((X, W, problem.output_shape)))
    wide = cupyconv.conv_forward(x.astype("float64"), w.astype("float64"), **LAYER)
    expected = np.maximum(wide + add.astype("float64"), 0).astype(x.dtype)
    given = ADDENDS[kind](cupy.asarray(add))
    out = given if kind == "the result" else None
    got = cupyconv.conv_forward(
        *(cupy.asarray(x), cupy.asarray(w)), add=given, activation="relu", out=out, **LAYER
    )
    assert out is None or got is out
    assert (cupy.asnumpy(got) == expected).all()
    assert out is not None or (cupy.asnumpy(given) == add).all()


def test_a_measured_call_adds_the_result_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYCONV_CACHE_DIR", str(tmp_path))
    x, w = (cupy.asarray(whole(shape, "float32")) for shape in (X, W))
    expected = 1 + cupyconv.conv_forward(x, w, **LAYER)
    out = cupy.ones_like(expected)
    measuring.forget()
    monkeypatch.setattr(cupyconv, "benchmark", True)
    cupyconv.conv_forward(x, w, add=out, out=out, **LAYER)
    assert (out == expected).all()


def test_tensors_come_in_without_a_copy(torch_with_cuda):
    _, w, _, _ = layer()
    tensor = torch_with_cuda.ones(X, device="cuda")
    taken, _ = arrays.take("x", tensor)
    assert taken.data.ptr == tensor.data_ptr()
    assert isinstance(cupyconv.conv_forward(tensor, w, **LAYER), cupy.ndarray)


def test_lazily_negated_tensors_count_with_their_sign(torch_with_cuda):
    torch = torch_with_cuda
    tensor = torch.arange(6.0, device="cuda").reshape(1, 1, 6)
    lazy = torch.complex(tensor, tensor).conj().imag
    taken, _ = arrays.take("x", lazy)
    assert (taken == -cupy.from_dlpack(tensor)).all()
    with pytest.raises(cupyconv.ConvTypeError, match="lazily negated"):
        cupyconv.conv_forward(tensor, tensor[..., :1], out=lazy)
    assert (cupy.from_dlpack(tensor) == cupy.arange(6)).all()


def test_arrays_of_two_homes_are_refused():
    x, w, _, _ = layer()
    with pytest.raises(cupyconv.ConvTypeError, match="x is a CuPy array, w is a NumPy array"):
        cupyconv.conv_forward(x, cupy.asnumpy(w), **LAYER)
    with pytest.raises(cupyconv.ConvTypeError, match="out must be on the inputs' device"):
        cupyconv.conv_forward(x, w, out=np.empty(1, "float32"), **LAYER)


def test_an_overlapping_out_is_refused():
    x = cupy.ones((1, 1, 4, 4), "float32")
    w = cupy.ones((1, 1, 1, 1), "float32")
    with pytest.raises(cupyconv.ConvError, match="out must not share memory"):
        cupyconv.conv_forward(x, w, out=x)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    size = 2**31 // (64 * 1024) + 9
    needed = 64 * 1024 * size * 2 * 2
    if cupy.cuda.runtime.memGetInfo()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    x = cupy.zeros((1, 64, size, 1024), "float16")
    x[:, :, -1, -1] = 1
    w = cupy.ones((1, 64, 1, 1), "float16")
    y = cupyconv.conv_forward(x, w)
    assert float(y[0, 0, -1, -1]) == 64
    assert int(cupy.count_nonzero(y)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["contiguous_format", "channels_last"])
def test_tensors_use_pytorchs_stream_and_memory(torch_with_cuda, dtype, order):
    import cupyconv.torch as ct

    torch = torch_with_cuda
    numbers = torch.Generator().manual_seed(0)

    def integers(*shape):
        drawn = torch.randint(-2, 3, shape, generator=numbers).to("cuda", getattr(torch, dtype))
        return drawn.to(memory_format=getattr(torch, order)).requires_grad_()

    leaves = integers(2, 16, 9, 8), integers(8, 8, 3, 2)
    bias = torch.ones(8, device="cuda", dtype=leaves[0].dtype, requires_grad=True)
    window = {"stride": 2, "padding": 1, "groups": 2}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = torch.cuda.memory_allocated()
        y = ct.conv2d(*leaves, bias, **window)
        assert torch.cuda.memory_allocated() - before >= y.numel() * y.element_size()
        ours = [y, *torch.autograd.grad(y, (*leaves, bias), torch.ones_like(y))]
    torch.cuda.current_stream().wait_stream(side)
    exact = [t.detach().double().requires_grad_() for t in (*leaves, bias)]
    expected = torch.nn.functional.conv2d(*exact, **window)
    theirs = [expected, *torch.autograd.grad(expected, exact, torch.ones_like(expected))]
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.is_cuda
        assert torch.equal(mine.double(), their)
    assert y.is_contiguous(memory_format=getattr(torch, order))


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_graph_keeps_the_workspace_of_its_calls(mode):
    """The call splits its sum, so each replay writes partial sums to the workspace."""
    x, w = cupy.ones((2, 4, 4, 768), "float16"), cupy.ones((8, 3, 3, 768), "float16")
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    problem = cupyconv.ConvProblem(x.shape, w.shape, dtype="float16", **words)
    size = cupyconv.plan(problem)["forward"].workspace_bytes
    assert size
    y = cupyconv.conv_forward(x, w, **words)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        cupyconv.conv_forward(x, w, out=y, **words)
        graph = stream.end_capture()
        cupy.get_default_memory_pool().free_all_blocks()
        others = [cupy.full(size, 7, "u1") for _ in range(8)]
        x.fill(0.5)
        for _ in range(3):
            y.fill(0)
            graph.launch(stream)
            assert (cupy.asnumpy(y) == 3456).all()
        assert all((one == 7).all() for one in others)


def test_a_captured_graph_of_pytorch_has_the_kernels(torch_with_cuda):
    import cupyconv.torch as ct

    torch = torch_with_cuda
    x = torch.ones(2, 4, 8, 8, device="cuda")
    w = torch.ones(6, 4, 3, 3, device="cuda")
    ct.conv2d(x, w)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ct.conv2d(x, w)
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 72).all()


def test_a_graph_of_pytorch_keeps_the_workspace_of_its_calls(torch_with_cuda):
    """The call splits its sum; its workspace comes from PyTorch, not from CuPy's pool."""
    import cupyconv.torch as ct

    torch = torch_with_cuda
    x = torch.ones(1, 64, 4, 4, device="cuda", dtype=torch.float16)
    w = torch.ones(8, 64, 3, 3, device="cuda", dtype=torch.float16)
    problem = cupyconv.ConvProblem(tuple(x.shape), tuple(w.shape), dtype="float16")
    size = cupyconv.plan(problem)["forward"].workspace_bytes
    assert size
    pool = cupy.get_default_memory_pool()
    kept = pool.total_bytes()
    ct.conv2d(x, w)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ct.conv2d(x, w)
    assert torch.cuda.max_memory_allocated() - before >= size + y.nbytes
    assert pool.total_bytes() == kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ct.conv2d(x, w)
    others = [torch.full((size,), 7, device="cuda", dtype=torch.uint8) for _ in range(8)]
    x.fill_(2)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert (y == 2 * 64 * 9).all()
    assert all((one == 7).all() for one in others)


def test_gradients_of_tensors_agree_with_differences(torch_with_cuda):
    import cupyconv.torch as ct

    torch = torch_with_cuda
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 4, 3), (4, 1, 3, 2), (4,))
    ]
    assert torch.autograd.gradcheck(lambda *t: ct.conv2d(*t, padding=1, groups=2), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: ct.conv2d(*t, padding=1, groups=2), leaves)


def test_tensors_on_the_host_and_the_device_are_told_apart(torch_with_cuda):
    import cupyconv.torch as ct

    torch = torch_with_cuda
    x, w = torch.ones(1, 2, 5, device="cuda"), torch.ones(3, 2, 3)
    with pytest.raises(cupyconv.ConvTypeError, match=r"input is on cuda:0, weight on cpu"):
        ct.conv1d(x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_go_back_to_the_tensors_library(torch_with_cuda, dtype):
    torch = torch_with_cuda
    x = torch.ones(1, 2, 5, device="cuda", dtype=getattr(torch, dtype))
    y = cupyconv.conv_forward(x, torch.ones(3, 2, 3, device="cuda", dtype=x.dtype))
    back = cupyconv.as_kind_of(y, x)
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.device, back.data_ptr()) == (x.dtype, x.device, y.data.ptr)
