"""Captured graphs under CuPy: their memory and capture rules match CUDA's documentation."""

import threading
from functools import cache

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource
from tests.device import api, machine, memory
from tests.device.test_driver import refused

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
