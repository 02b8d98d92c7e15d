"""Captured graphs under CuPy: their memory and capture rules match CUDA's documentation."""

import gc
import threading
from functools import cache

import cupy
import numpy as np
import pytest
from cuda.bindings import driver as bindings
from cupy.cuda import runtime

from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource
from tests.device import api, machine, memory
from tests.device.test_driver import kernel, refused

MODES = {
    "global": runtime.streamCaptureModeGlobal,
    "thread_local": runtime.streamCaptureModeThreadLocal,
    "relaxed": runtime.streamCaptureModeRelaxed,
}

UNSUPPORTED = api.CU.ERROR_STREAM_CAPTURE_UNSUPPORTED
INVALID = api.CU.ERROR_INVALID_VALUE

ADD_ONE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] += 1; }'


@pytest.fixture
def stream():
    with cupy.cuda.Stream(non_blocking=True) as created:
        yield created


def array_of_a_graph(count=4):
    return cupy.ndarray((count,), np.float32, cupy.cuda.malloc_async(4 * count))


def test_graph_memory_lives_within_each_launch(stream):
    x = cupy.zeros(4, np.float32)
    stream.synchronize()
    before = machine.DEVICES[0].allocated
    stream.begin_capture()
    temporary = array_of_a_graph()
    allocation = memory.find(temporary.data.ptr)
    cupy.copyto(temporary, x)
    temporary += 1
    cupy.copyto(x, temporary)
    del temporary
    graph = stream.end_capture()
    assert not allocation.live, "nothing was launched"
    for turn in range(1, 4):
        graph.launch(stream)
        assert cupy.asnumpy(x, stream=stream).tolist() == [turn] * 4
        assert not allocation.live
    assert machine.DEVICES[0].allocated == before + 16
    del graph
    assert machine.DEVICES[0].allocated == before
    assert memory.find(allocation.base) is None


def test_graph_memory_is_invalid_outside_the_graph(stream):
    f = kernel(ADD_ONE)
    stream.begin_capture()
    temporary = array_of_a_graph()
    address = temporary.data.ptr
    f((1,), (4,), (temporary,))
    del temporary
    graph = stream.end_capture()
    graph.launch(stream)
    with refused(api.CU.ERROR_ILLEGAL_ADDRESS):
        f((1,), (4,), (np.uint64(address),))
    assert "or after they were freed" in machine.revive()[0]


def test_graph_memory_is_poisoned_at_each_launch(stream):
    out = cupy.zeros(4, np.float32)
    stream.begin_capture()
    temporary = array_of_a_graph()
    cupy.copyto(out, temporary)
    temporary.fill(1)
    del temporary
    graph = stream.end_capture()
    for _ in range(2):
        graph.launch(stream)
        assert np.isnan(cupy.asnumpy(out, stream=stream)).all()


def test_captured_free_takes_only_graph_memory(stream):
    outside = runtime.mallocAsync(64, stream.ptr)
    stream.begin_capture()
    with refused(INVALID):
        runtime.freeAsync(outside, stream.ptr)
    inside = runtime.mallocAsync(64, stream.ptr)
    runtime.freeAsync(inside, stream.ptr)
    with refused(INVALID):
        runtime.freeAsync(inside, stream.ptr)
    stream.end_capture()
    runtime.freeAsync(outside, stream.ptr)


def test_unfreed_graph_memory_forbids_next_launch(stream):
    stream.begin_capture()
    address = runtime.mallocAsync(64, stream.ptr)
    graph = stream.end_capture()
    with refused(INVALID):
        runtime.freeAsync(address, stream.ptr)  # nothing was launched
    for free in (lambda: runtime.freeAsync(address, stream.ptr), lambda: runtime.free(address)):
        graph.launch(stream)
        with refused(INVALID):
            graph.launch(stream)
        free()
        with refused(INVALID):
            free()
    graph.launch(stream)


def test_graph_with_memory_has_one_executable(stream):
    x = cupy.zeros(4, np.float32)
    for fill in (x.fill, lambda value: array_of_a_graph().fill(value)):
        stream.begin_capture()
        fill(1)
        graph = stream.end_capture()
        if fill == x.fill:
            runtime.graphExecDestroy(runtime.graphInstantiate(graph.graph))
        else:
            with refused(INVALID):
                runtime.graphInstantiate(graph.graph)


def test_memory_outlives_graph_destroyed_while_running(stream):
    x = cupy.zeros(4, np.float32)
    stream.synchronize()
    before = machine.DEVICES[0].allocated
    with machine.order(machine.Late()):
        stream.begin_capture()
        temporary = array_of_a_graph()
        temporary.fill(3)
        cupy.copyto(x, temporary)
        del temporary
        graph = stream.end_capture()
        graph.launch(stream)
        del graph
        assert machine.DEVICES[0].allocated == before + 16
        assert cupy.asnumpy(x, stream=stream).tolist() == [3] * 4
    assert machine.DEVICES[0].allocated == before


def test_failed_capture_frees_its_memory(stream):
    before = machine.DEVICES[0].allocated
    stream.begin_capture()
    runtime.mallocAsync(64, stream.ptr)
    with refused(UNSUPPORTED):
        stream.synchronize()
    with refused(api.CU.ERROR_STREAM_CAPTURE_INVALIDATED):
        stream.end_capture()
    gc.collect()
    assert machine.DEVICES[0].allocated == before


# -- modes -----------------------------------------------------------------------------------------
def allocate():
    runtime.free(runtime.malloc(64))


def load():
    cupy.cuda.Module().load(cubin())


@cache
def cubin():
    return compiler.compile_cubin(KernelSource("f.cu", ADD_ONE, ()), {}, "sm_90a")[0]


@pytest.mark.parametrize("unsafe", [allocate, load])
@pytest.mark.parametrize("mode", MODES)
def test_capture_mode_restricts_its_thread(mode, unsafe, stream):
    stream.begin_capture(MODES[mode])
    if mode == "relaxed":
        unsafe()
        stream.end_capture()
        return
    with refused(UNSUPPORTED):
        unsafe()
    with refused(api.CU.ERROR_STREAM_CAPTURE_INVALIDATED):
        stream.end_capture()


@pytest.mark.parametrize("mode", MODES)
def test_capture_mode_restricts_other_threads(mode, stream):
    errors = []

    def work():
        try:
            allocate()
        except runtime.CUDARuntimeError as error:
            errors.append(str(error))

    stream.begin_capture(MODES[mode])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == (mode == "global")
    if errors:
        with refused(api.CU.ERROR_STREAM_CAPTURE_INVALIDATED):
            stream.end_capture()
    else:
        stream.end_capture()


@pytest.mark.parametrize("mode", MODES)
def test_relaxed_thread_loads_and_records(mode, stream):
    x = cupy.zeros(4, np.float32)
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    stream.begin_capture(MODES[mode])
    _, before = bindings.cuThreadExchangeStreamCaptureMode(relaxed)
    allocate()
    load()
    x.fill(1)
    _, replaced = bindings.cuThreadExchangeStreamCaptureMode(before)
    assert replaced == relaxed
    graph = stream.end_capture()
    assert (x == 0).all()
    graph.launch(stream)
    assert (cupy.asnumpy(x, stream=stream) == 1).all()
