"""Stream order: calls stay correct in every order of work that the API allows.

Work runs as late as possible or in a random order, and memory is freed as early as possible.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

import cupyconv
from cupyconv import ConvError, ConvTypeError, arrays
from cupyconv.problem import PASSES
from tests.agreement import compute, require_equal
from tests.configurations import FAMILY_CASES, HOPPER_CASES, Data, in_formats, integer_data
from tests.device import machine
from tests.device.machine import Random, named
from tests.gpu import test_cupy as on_gpu
from tests.gpu import test_ways_in as ways

ORDERS = ("late", *(f"random {seed}" for seed in range(3)))


@contextmanager
def in_disorder(order="late", allocator=cupy.cuda.malloc_async):
    """Run work on a new stream in another order, with one allocation per array."""
    with ExitStack() as stack:
        stack.enter_context(machine.order(named(order)))
        stream = cupy.cuda.Stream(non_blocking=True)
        stack.enter_context(stream)
        stack.enter_context(cupy.cuda.using_allocator(allocator))
        yield stream


def on_device(data):
    return Data(*map(cupy.asarray, (data.x, data.w, data.dy, data.bias)))


def calls(problem, data):
    """Return the operations on a problem for the current stream, each with its exact result."""
    operands = on_device(data)

    def pair(pass_):
        exact = compute(cupyconv, pass_, problem, data, impl="reference")
        return lambda: compute(cupyconv, pass_, problem, operands), exact

    return {
        **{pass_: pair(pass_) for pass_ in PASSES},
        "bias": (
            lambda: cupyconv.conv_backprop_bias(operands.dy, data_format=problem.data_format),
            cupyconv.conv_backprop_bias(data.dy, data_format=problem.data_format),
        ),
    }


def require_right(problem, data):
    results = {name: (call(), exact) for name, (call, exact) in calls(problem, data).items()}
    for name, (result, exact) in results.items():
        require_equal(cupy.asnumpy(result), exact, name)


def split_layer(dtype="float16"):
    """Return a problem whose sums are split, so that passes use a workspace."""
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    problem = cupyconv.ConvProblem((2, 4, 4, 768), (8, 3, 3, 768), dtype=dtype, **words)
    assert cupyconv.plan(problem)["forward"].workspace_bytes
    return problem


@pytest.mark.parametrize("order", ORDERS)
def test_passes_with_partial_sums(order):
    problem = split_layer()
    data = integer_data(problem)
    with in_disorder(order):
        require_right(problem, data)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", FAMILY_CASES[::6], ids=lambda case: case.name)
def test_passes_of_every_family(case, order):
    data = integer_data(case.problem)
    with in_disorder(order):
        require_right(case.problem, data)


@pytest.mark.parametrize("order", ORDERS)
def test_passes_with_tensor_maps(order):
    problem = in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")
    with in_disorder(order):
        passes = on_gpu.fits(problem, "cuda-hopper", "sm_90a")
        on_gpu.require_exact(problem, passes=passes, impl="cuda-hopper")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "test",
    [
        lambda: ways.test_functions(2, True, "float16"),
        lambda: ways.test_functions(2, False, "complex64"),
        lambda: ways.test_a_transposed_convolution_beyond_its_windows("bfloat16"),
        lambda: ways.test_cudnn("backward_data", "complex64"),
        lambda: ways.test_results_are_written_where_they_are_wanted("float32"),
        lambda: ways.test_exported_memory_is_used_without_a_copy(ways.ByDlpack, "float32"),
        lambda: ways.test_raw_ops(),
        lambda: ways.test_onnx(),
        lambda: ways.test_dask_with_chunks_of_cupy(),
        lambda: ways.test_explanations(),
        lambda: on_gpu.test_nothing_synchronises_and_calls_can_be_captured(),
    ],
    ids=[
        *("functions", "complex", "beyond", "cudnn"),
        *("out", "dlpack", "raw_ops", "onnx", "dask", "explain", "capture"),
    ],
)
def test_ways_in(test, order):
    with machine.order(named(order)):
        test()


# -- streams ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
def test_call_runs_on_current_stream(order):
    """The same layer alternates between two streams; prepared calls belong to neither."""
    problem = split_layer()
    data = integer_data(problem)
    expected = compute(cupyconv, "forward", problem, data)
    with in_disorder(order) as first:
        second = cupy.cuda.Stream(non_blocking=True)
        for stream in (first, second, first, second):
            with stream:
                got = compute(cupyconv, "forward", problem, on_device(data))
                # Synchronizes this stream only.
                require_equal(cupy.asnumpy(got, stream=stream), expected, "forward")


@pytest.mark.parametrize("seed", range(12))
def test_workspaces_of_two_unordered_streams(seed):
    problem = split_layer()
    data = [integer_data(problem, seed) for seed in range(2)]
    with in_disorder(f"random {seed}") as first:
        second = cupy.cuda.Stream(non_blocking=True)
        ready = []
        for stream, operands in zip((first, second), data, strict=True):
            with stream:
                ready.append((stream, *calls(problem, operands)["forward"]))
            stream.synchronize()
        running = []
        for stream, call, exact in ready:
            with stream:
                running.append((stream, call(), exact))
        for stream, result, exact in running:
            require_equal(cupy.asnumpy(result, stream=stream), exact, "forward")


def test_tensor_maps_follow_the_arrays():
    """The same arrays are used again, after others; all are views into larger arrays."""
    problem = in_formats(HOPPER_CASES[0].problem, "NHWC", "OHWI").replace(dtype="float16")
    data = [integer_data(problem, seed) for seed in range(2)]
    kept = []
    for operands in (*data, data[0]):
        views = [
            cupy.full(one.size + 128, 9, one.dtype)[64 : 64 + one.size].reshape(one.shape)
            for one in (operands.x, operands.w, operands.dy, operands.bias)
        ]
        for view, one in zip(views, (operands.x, operands.w, operands.dy, operands.bias),
                             strict=True):  # fmt: skip
            view[...] = cupy.asarray(one)
        kept.append(Data(*views))
        result = compute(cupyconv, "forward", problem, kept[-1], impl="cuda-hopper")
        exact = compute(cupyconv, "forward", problem, operands, impl="reference")
        require_equal(cupy.asnumpy(result), exact, "forward")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by", ["dlpack", "interface"])
def test_producer_stream_is_waited_for(by, order):
    """DLPack and __cuda_array_interface__ version 3 name the stream that writes the array."""
    _, data, words = ways.layer()
    with in_disorder(order):
        producer = cupy.cuda.Stream(non_blocking=True)
        w = cupy.asarray(data.w)
        with producer:
            x = cupy.zeros(data.x.shape, np.float32)
            x += cupy.asarray(data.x)

        class Exporter:
            if by == "dlpack":

                def __dlpack__(self, **keywords):
                    with producer:
                        return x.__dlpack__(**keywords)

                def __dlpack_device__(self):
                    return x.__dlpack_device__()

            else:
                __cuda_array_interface__ = {
                    **x.__cuda_array_interface__,
                    "version": 3,
                    "stream": producer.ptr,
                }

        got = cupyconv.conv_forward(Exporter(), w, **words)
        require_equal(cupy.asnumpy(got), cupyconv.conv_forward(data.x, data.w, **words), by)


@pytest.mark.parametrize("order", ORDERS)
def test_host_reads_wait_for_the_current_stream(order):
    problem, data, words = ways.layer()
    y = cupyconv.conv_forward(data.x, data.w, **words)
    with in_disorder(order):
        x = cupy.zeros(data.x.shape, np.float32)
        x += cupy.asarray(data.x)
        element = cupyconv.explain(problem, x=x, w=data.w, y=y).element("y[1,5,2,3]")
        assert element.sum == element.computed


@pytest.mark.parametrize("order", ORDERS)
def test_measuring(order, own_cache, monkeypatch):
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem = split_layer()
    data = integer_data(problem)
    with in_disorder(order):
        call, exact = calls(problem, data)["forward"]
        require_equal(cupy.asnumpy(call()), exact, "forward")
        require_equal(cupy.asnumpy(call()), exact, "forward")
    assert list(own_cache.glob("measured/*"))


# -- devices ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [*ORDERS, ""])
def test_two_devices_alternate(order):
    problem = split_layer()
    data = integer_data(problem)
    with machine.order(named(order)):
        for ordinal in (0, 1, 0, 1):
            with cupy.cuda.Device(ordinal):
                for name, (call, exact) in calls(problem, data).items():
                    got = call()
                    assert got.device.id == ordinal
                    require_equal(cupy.asnumpy(got), exact, name)


def test_bound_call_rejects_other_devices():
    _, data, words = ways.layer()
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    call, cpu = (cupyconv.bind("forward", *pair, **words) for pair in ((x, w), (data.x, data.w)))
    expected = cpu(data.x, data.w)
    with cupy.cuda.Device(1):
        others, out = (cupy.asarray(data.x), cupy.asarray(data.w)), cupy.asarray(expected)
        for use in (
            lambda: call(*others),
            lambda: call.with_filter(others[1]),
            call.load,
            call.fastest,
        ):
            with pytest.raises(ConvError, match=r"bound for GPU 0, and is used for GPU 1"):
                use()
    with pytest.raises(ConvError, match="bound for GPU 0, and is used for NumPy"):
        call(data.x, data.w)
    with pytest.raises(ConvError, match="bound for NumPy, and is used for GPU 0"):
        cpu(x, w)
    with pytest.raises(ConvTypeError, match="out is on device 1"):
        call(x, w, out=out)
    require_equal(cupy.asnumpy(call.load()(x, w)), expected, "forward")


def test_threads_with_separate_devices():
    problem = split_layer()
    data = integer_data(problem)
    errors = []

    def work(ordinal):
        try:
            with cupy.cuda.Device(ordinal), cupy.cuda.Stream(non_blocking=True):
                for _ in range(3):
                    require_right(problem, data)
        except BaseException as error:
            errors.append(error)

    with machine.order(Random(5)):
        threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_thread_starts_with_loaded_kernel():
    """A thread has no context until it calls CUDA's runtime."""
    problem = split_layer()
    data = integer_data(problem)
    operations = calls(problem, data)
    cupy.asnumpy(operations["forward"][0]())
    results = []
    thread = threading.Thread(target=lambda: results.append(operations["forward"][0]()))
    thread.start()
    thread.join()
    require_equal(cupy.asnumpy(results[0]), operations["forward"][1], "forward")


@pytest.mark.parametrize("order", ORDERS)
def test_per_thread_stream(order):
    _, data, words = ways.layer()
    expected = cupyconv.conv_forward(data.x, data.w, **words)
    with machine.order(named(order)), cupy.cuda.Stream.ptds:
        got = cupyconv.conv_forward(cupy.asarray(data.x), cupy.asarray(data.w), **words)
        require_equal(cupy.asnumpy(got), expected, "forward")


def test_array_location_follows_type():
    """Finding the location of an array needs no driver call."""
    x = cupy.zeros(1)
    before = runtime.getDevice()
    assert arrays.take("x", x)[1] is arrays.Home.GPU
    assert runtime.getDevice() == before
