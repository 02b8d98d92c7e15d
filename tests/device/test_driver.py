"""The emulated driver under CuPy: its refusals and its order of work match CUDA's documentation."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import cupy
import numpy as np
import pytest
from cupy.cuda import driver, runtime

from tests.device import api, header, machine, memory
from tests.device.machine import Late, Random


def refused(status):
    """Expect CuPy to raise this status of cuda.h."""
    name = header.statuses()[status]
    words = f"{name}|{name.removeprefix('CUDA_ERROR_').title().replace('_', '')}"
    return pytest.raises((driver.CUDADriverError, runtime.CUDARuntimeError), match=words)


# -- memory ----------------------------------------------------------------------------------------
def test_memory_is_poisoned_before_and_after_use():
    cupy.get_default_memory_pool().free_all_blocks()
    address = runtime.malloc(64)
    allocation = memory.find(address)
    assert np.isnan(np.frombuffer(read(address, 64), np.float32)).all()
    runtime.memset(address, 0, 64)
    runtime.free(address)
    assert memory.find(address) is None
    assert not allocation.live
    with refused(api.CU.ERROR_INVALID_VALUE):
        runtime.memset(address, 0, 64)
    with refused(api.CU.ERROR_INVALID_VALUE):
        runtime.free(address)


def read(address, size):
    content = np.empty(size, np.uint8)
    runtime.memcpy(content.ctypes.data, address, size, runtime.memcpyDeviceToHost)
    return content.tobytes()


def test_copies_stay_inside_their_allocation():
    address = runtime.malloc(64)
    for first, size in ((0, 65), (1, 64), (-1, 4), (64, 1)):
        with refused(api.CU.ERROR_INVALID_VALUE):
            runtime.memset(address + first, 0, size)
    runtime.free(address)


# -- order -----------------------------------------------------------------------------------------
def pinned(values):
    values = np.asarray(values)
    buffer = cupy.cuda.alloc_pinned_memory(values.nbytes)
    array = np.frombuffer(buffer, values.dtype, values.size).reshape(values.shape)
    array[...] = values
    return array


def test_late_order_defers_work_until_wait():
    with machine.order(Late()):
        x = cupy.zeros(4, np.float32)
        target = pinned(np.full(4, 7, np.float32))
        x.data.copy_to_host_async(target.ctypes.data, 16, cupy.cuda.get_current_stream())
        assert (target == 7).all()
        cupy.cuda.get_current_stream().synchronize()
        assert (target == 0).all()


def in_order(ordered, seed):
    """Return whether a stream reads what another one wrote before, with a random order of work."""
    with machine.order(Random(seed)):
        x = cupy.zeros(4, np.float32)
        cupy.cuda.get_current_stream().synchronize()
        writer, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with writer:
            x.fill(5)
        if ordered:
            reader.wait_event(writer.record())
        with reader:
            y = x * 1
        reader.synchronize()
        return bool((cupy.asnumpy(y) == 5).all())


def test_random_order_keeps_only_required_order():
    assert all(in_order(True, seed) for seed in range(20))
    assert 2 < sum(in_order(False, seed) for seed in range(20)) < 18


def test_stream_memory_lives_from_alloc_to_free():
    with machine.order(Late()), cupy.cuda.Stream(non_blocking=True) as stream:
        address = runtime.mallocAsync(64, stream.ptr)
        runtime.memsetAsync(address, 1, 64, stream.ptr)
        assert not memory.find(address).live
        stream.synchronize()
        assert memory.find(address).live
        other = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(address, 2, 64, other.ptr)
        runtime.freeAsync(address, stream.ptr)
        stream.synchronize()
        with refused(api.CU.ERROR_ILLEGAL_ADDRESS):
            other.synchronize()
    assert "or after they were freed" in machine.revive()[0]


def test_capture_forbids_waits_and_unjoined_forks():
    main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x = cupy.zeros(4)
    with main:
        main.begin_capture()
        with refused(api.CU.ERROR_STREAM_CAPTURE_UNSUPPORTED):
            main.synchronize()
        with refused(api.CU.ERROR_STREAM_CAPTURE_INVALIDATED):
            main.end_capture()
        main.begin_capture()
        side.wait_event(main.record())
        with side:
            x.fill(1)
        with refused(api.CU.ERROR_STREAM_CAPTURE_UNJOINED):
            main.end_capture()
    assert (x == 0).all()


def test_launch_with_another_device_is_refused():
    code = 'extern "C" __global__ void f(float* x) { x[0] = 1; }'
    f = cupy.RawModule(code=code, backend="nvrtc").get_function("f")
    with cupy.cuda.Device(1):
        other, stream = cupy.zeros(1, np.float32), cupy.cuda.Stream()
    with refused(api.CU.ERROR_INVALID_HANDLE):
        f((1,), (1,), (cupy.zeros(1, np.float32),), stream=stream)
    with refused(api.CU.ERROR_ILLEGAL_ADDRESS):
        f((1,), (1,), (other,))
    assert "given memory of device 1" in machine.revive()[0]


# -- graphs ----------------------------------------------------------------------------------------

MODES = {
    "global": runtime.streamCaptureModeGlobal,
    "thread_local": runtime.streamCaptureModeThreadLocal,
    "relaxed": runtime.streamCaptureModeRelaxed,
}


def test_graph_memory_lives_within_each_launch():
    """Each launch fills it with NaN, and the graph keeps its address range."""
    x, y = cupy.zeros((2, 4), np.float32)
    cupy.cuda.get_current_stream().synchronize()
    before = machine.DEVICES[0].allocated
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        temporary = cupy.ndarray((4,), np.float32, cupy.cuda.malloc_async(16))
        allocation = memory.find(temporary.data.ptr)
        cupy.copyto(y, temporary)
        cupy.copyto(temporary, x)
        temporary += 1
        cupy.copyto(x, temporary)
        del temporary
        graph = stream.end_capture()
        assert not allocation.live, "nothing was launched"
        for turn in range(1, 4):
            graph.launch(stream)
            assert cupy.asnumpy(x, stream=stream).tolist() == [turn] * 4
            assert np.isnan(cupy.asnumpy(y, stream=stream)).all()
            assert not allocation.live
        assert machine.DEVICES[0].allocated == before + 16
        del graph
        assert machine.DEVICES[0].allocated == before
    assert memory.find(allocation.base) is None


@pytest.mark.parametrize("in_thread", [False, True], ids=["own thread", "other thread"])
@pytest.mark.parametrize("mode", MODES)
def test_capture_mode_restricts_allocations(mode, in_thread):
    with cupy.cuda.Stream(non_blocking=True) as stream, ThreadPoolExecutor(1) as other:
        stream.begin_capture(MODES[mode])
        is_refused = mode == "global" or (mode == "thread_local" and not in_thread)
        with refused(api.CU.ERROR_STREAM_CAPTURE_UNSUPPORTED) if is_refused else nullcontext():
            other.submit(allocate).result() if in_thread else allocate()
        with refused(api.CU.ERROR_STREAM_CAPTURE_INVALIDATED) if is_refused else nullcontext():
            stream.end_capture()


def allocate():
    runtime.free(runtime.malloc(64))
