"""The library gives streams no more freedom than they may have: work is done as late as the API
allows, or in a drawn order, on memory that is gone as soon as it may be.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

import cupyconv
from cupyconv import arrays
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
    """A stream of its own, on which work is done in an order, with memory of single arrays."""
    with ExitStack() as stack:
        stack.enter_context(machine.order(named(order)))
        stream = cupy.cuda.Stream(non_blocking=True)
        stack.enter_context(stream)
        stack.enter_context(cupy.cuda.using_allocator(allocator))
        yield stream


def on_device(data):
    return Data(*map(cupy.asarray, (data.x, data.w, data.dy, data.bias)))


def calls(problem, data):
    """The passes of a problem on the current stream, each with what it has to give."""
    given = on_device(data)

    def pair(pass_):
        exact = compute(cupyconv, pass_, problem, data, impl="reference")
        return lambda: compute(cupyconv, pass_, problem, given), exact

    return {
        **{pass_: pair(pass_) for pass_ in PASSES},
        "bias": (
            lambda: cupyconv.conv_backprop_bias(given.dy, data_format=problem.data_format),
            cupyconv.conv_backprop_bias(data.dy, data_format=problem.data_format),
        ),
    }


def require_right(problem, data):
    found = {name: (call(), exact) for name, (call, exact) in calls(problem, data).items()}
    for name, (got, exact) in found.items():
        require_equal(cupy.asnumpy(got), exact, name)


def split_layer(dtype="float16"):
    """A problem whose sums are split, with workspaces."""
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    problem = cupyconv.ConvProblem((2, 4, 4, 256), (8, 3, 3, 256), dtype=dtype, **words)
    assert cupyconv.plan(problem)["forward"].workspace_bytes
    return problem


@pytest.mark.parametrize("order", ORDERS)
def test_passes_that_keep_partial_sums_meanwhile(order):
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
        on_gpu.agreement.require_exact(
            cupyconv,
            problem,
            passes=on_gpu.fits(problem, "cuda-hopper", "sm_90a"),
            to_device=cupy.asarray,
            to_host=cupy.asnumpy,
            impl="cuda-hopper",
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "test",
    [
        lambda: ways.test_functions(2, True, "float16"),
        lambda: ways.test_functions(2, False, "complex64"),
        lambda: ways.test_a_transposed_convolution_beyond_its_windows("bfloat16"),
        lambda: ways.test_cudnn("backward_data", "complex64"),
        lambda: ways.test_results_are_written_where_they_are_wanted("float32"),
        lambda: ways.test_objects_that_export_their_memory_are_taken_without_a_copy(
            ways.ByDlpack, "float32"
        ),
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
def test_a_call_runs_on_the_stream_that_is_current_whatever_ran_before(order):
    """The same layer on two streams by turns: what is prepared once belongs to neither."""
    problem = split_layer()
    data = integer_data(problem)
    expected = compute(cupyconv, "forward", problem, data)
    with in_disorder(order) as first:
        second = cupy.cuda.Stream(non_blocking=True)
        for stream in (first, second, first, second):
            with stream:
                got = compute(cupyconv, "forward", problem, on_device(data))
                # Waits for this stream only.
                require_equal(cupy.asnumpy(got, stream=stream), expected, "forward")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by", ["dlpack", "interface"])
def test_what_another_stream_still_writes_is_waited_for(by, order):
    """DLPack and version 3 of __cuda_array_interface__ say whose stream an array is of."""
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


def test_a_missing_wait_is_seen():
    """What these tests rely on: without the wait, the same is wrong in some order."""
    _, data, words = ways.layer()
    expected = cupyconv.conv_forward(data.x, data.w, **words)
    right = []
    for order in ORDERS:
        with in_disorder(order, cupy.get_default_memory_pool().malloc):
            w, x = cupy.asarray(data.w), cupy.zeros(data.x.shape, np.float32)
            cupy.cuda.get_current_stream().synchronize()
            with cupy.cuda.Stream(non_blocking=True):
                x += cupy.asarray(data.x)
            got = cupyconv.conv_forward(x, w, **words)
            right.append(bool((cupy.asnumpy(got) == expected).all()))
    assert not all(right)


@pytest.mark.parametrize("order", ORDERS)
def test_memory_is_not_given_back_before_the_kernels_that_use_it(order):
    """Operands are dropped as soon as the call returns."""
    problem = split_layer()
    data = integer_data(problem)
    with in_disorder(order):
        for _ in range(3):
            results = {
                name: (call(), exact) for name, (call, exact) in calls(problem, data).items()
            }
            for name, (got, exact) in results.items():
                require_equal(cupy.asnumpy(got), exact, name)


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
def test_two_devices_by_turns(order):
    problem = split_layer()
    data = integer_data(problem)
    with machine.order(named(order)):
        for ordinal in (0, 1, 0, 1):
            with cupy.cuda.Device(ordinal):
                for name, (call, exact) in calls(problem, data).items():
                    got = call()
                    assert got.device.id == ordinal
                    require_equal(cupy.asnumpy(got), exact, name)


def test_threads_with_devices_of_their_own():
    problem = split_layer()
    data = integer_data(problem)
    wrong = []

    def work(ordinal):
        try:
            with cupy.cuda.Device(ordinal), cupy.cuda.Stream(non_blocking=True):
                for _ in range(3):
                    require_right(problem, data)
        except BaseException as error:
            wrong.append(error)

    with machine.order(Random(5)):
        threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_thread_that_begins_with_a_loaded_kernel():
    """A thread has no context until CUDA's runtime has been called in it."""
    problem = split_layer()
    data = integer_data(problem)
    made = calls(problem, data)
    cupy.asnumpy(made["forward"][0]())
    found = []
    thread = threading.Thread(target=lambda: found.append(made["forward"][0]()))
    thread.start()
    thread.join()
    require_equal(cupy.asnumpy(found[0]), made["forward"][1], "forward")


@pytest.mark.parametrize("order", ORDERS)
def test_streams_of_threads(order):
    _, data, words = ways.layer()
    expected = cupyconv.conv_forward(data.x, data.w, **words)
    with machine.order(named(order)), cupy.cuda.Stream.ptds:
        got = cupyconv.conv_forward(cupy.asarray(data.x), cupy.asarray(data.w), **words)
        require_equal(cupy.asnumpy(got), expected, "forward")


def test_a_home_is_told_by_the_type_alone():
    """No call of the driver is needed to see where an array is."""
    x = cupy.zeros(1)
    before = runtime.getDevice()
    assert arrays.take("x", x)[1] is arrays.Home.GPU
    assert runtime.getDevice() == before
