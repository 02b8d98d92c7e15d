"""The emulated driver under CuPy: its refusals and its order of work match CUDA's documentation."""

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


def test_exhausted_memory_raises_cupy_error():
    cupy.get_default_memory_pool().free_all_blocks()
    with memory.allocations_left(1):
        block = cupy.cuda.alloc(1 << 20)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.cuda.alloc(3 << 20)
    assert cupy.cuda.alloc(3 << 20).mem.size >= 3 << 20
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.cuda.alloc(machine.MEMORY)
    assert block.mem.size >= 1 << 20


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


def test_pageable_copies_finish_before_return():
    with machine.order(Late()):
        stream = cupy.cuda.Stream(non_blocking=True)
        source = np.arange(4, dtype=np.float32)
        x = cupy.empty(4, np.float32)
        x.data.copy_from_host_async(source.ctypes.data, 16, stream)
        source[:] = -1
        target = np.zeros(4, np.float32)
        x.data.copy_to_host_async(target.ctypes.data, 16, stream)
        assert (target == [0, 1, 2, 3]).all()


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


# -- modules and launches --------------------------------------------------------------------------
def kernel(source, name="f"):
    return cupy.RawModule(code=source, backend="nvrtc").get_function(name)


def test_launch_beyond_limits_is_refused():
    f = kernel('extern "C" __global__ void f(float* x) { x[0] = 1; }')
    x = cupy.zeros(1, np.float32)
    f((1,), (1,), (x,))
    assert float(x[0]) == 1
    for grid, block, shared in (
        ((1, 2**16), (1,), 0),
        ((1,), (1025,), 0),
        ((1,), (1, 1, 65), 0),
        ((1,), (1,), 49 << 10),
    ):
        with refused(api.CU.ERROR_INVALID_VALUE):
            f(grid, block, (x,), shared_mem=shared)
    f.max_dynamic_shared_size_bytes = 227 << 10
    f((1,), (1,), (x,), shared_mem=227 << 10)
    with refused(api.CU.ERROR_INVALID_VALUE):
        f.max_dynamic_shared_size_bytes = 228 << 10


def test_launch_with_another_device_is_refused():
    f = kernel('extern "C" __global__ void f(float* x) { x[0] = 1; }')
    with cupy.cuda.Device(1):
        other, stream = cupy.zeros(1, np.float32), cupy.cuda.Stream()
    with refused(api.CU.ERROR_INVALID_HANDLE):
        f((1,), (1,), (cupy.zeros(1, np.float32),), stream=stream)
    with refused(api.CU.ERROR_ILLEGAL_ADDRESS):
        f((1,), (1,), (other,))
    assert "given memory of device 1" in machine.revive()[0]


def test_failed_device_refuses_calls_until_revived():
    x = cupy.zeros(4, np.float32)
    machine.DEVICES[0].fail(machine.DeviceFault("emulated fault"))
    with refused(api.CU.ERROR_LAUNCH_FAILED):
        x.fill(1)
    with pytest.raises(runtime.CUDARuntimeError, match="emulated fault"):
        cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Device(1):
        assert cupy.zeros(1).sum() == 0
    assert machine.revive() == ["emulated fault"]
    x.fill(1)
