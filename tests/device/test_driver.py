"""The emulated driver under CuPy: its refusals and its order of work match CUDA's documentation."""

import threading

import cupy
import numpy as np
import pytest
from cupy.cuda import driver, runtime

from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource
from tests.device import api, header, machine, memory, programs
from tests.device.machine import AtOnce, Late, Random

SEEDS = range(4)


def refused(status):
    """Expect CuPy to raise this status of cuda.h."""
    name = header.statuses()[status]
    words = f"{name}|{name.removeprefix('CUDA_ERROR_').title().replace('_', '')}"
    return pytest.raises((driver.CUDADriverError, runtime.CUDARuntimeError), match=words)


def test_driver_functions_are_declared_in_header():
    functions = header.functions(list(api.FUNCTIONS))
    assert [name for name, _ in functions["cuLaunchKernel"].parameters][:2] == ["f", "gridDimX"]
    with pytest.raises(header.HeaderError, match="does not declare cuNothing"):
        header.functions(["cuNothing"])
    assert api.CU.ERROR_OUT_OF_MEMORY == 2
    assert header.statuses()[700] == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_devices_differ():
    assert runtime.getDeviceCount() == 2
    properties = [runtime.getDeviceProperties(ordinal) for ordinal in range(2)]
    assert [(device["major"], device["minor"]) for device in properties] == [(9, 0), (8, 0)]
    assert properties[0]["name"] != properties[1]["name"]
    bus = cupy.cuda.Device(1).pci_bus_id
    assert runtime.deviceGetByPCIBusId(bus) == 1


def test_thread_without_context_is_refused():
    answers = []

    def query():
        answers.append(driver.ctxGetCurrent())
        try:
            driver.ctxGetDevice()
        except driver.CUDADriverError as error:
            answers.append(str(error))
        cupy.zeros(1)  # calls the runtime, which makes the first device's context current
        answers.append(driver.ctxGetDevice())

    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    assert answers[0] == 0
    assert "CUDA_ERROR_INVALID_CONTEXT" in answers[1]
    assert answers[2] == 0


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


def test_managed_memory_is_refused():
    with refused(api.CU.ERROR_NOT_SUPPORTED):
        cupy.cuda.malloc_managed(64)


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


@pytest.mark.parametrize("seed", SEEDS)
def test_legacy_and_blocking_streams_are_ordered(seed):
    with machine.order(Random(seed)):
        x, blocking = cupy.zeros(4, np.float32), cupy.cuda.Stream()
        with blocking:
            x += 1
        x *= 4
        with blocking:
            x -= 3
            result = x.copy()
        assert (cupy.asnumpy(result) == 1).all()


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


def test_event_completes_after_preceding_work():
    with machine.order(Late()):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        x = cupy.zeros(4)
        stop.record()
        assert not stop.done
        with refused(api.CU.ERROR_NOT_READY):
            cupy.cuda.get_elapsed_time(start, stop)
        stop.synchronize()
        assert stop.done
        assert cupy.cuda.get_elapsed_time(start, stop) > 0
        assert x.size == 4


def test_garbage_collection_does_not_synchronize():
    """The device waits when the program frees memory, but not when garbage collection does."""
    with machine.order(Late()), cupy.cuda.using_allocator(None):
        cycle = [cupy.zeros(4)]
        cycle.append(cycle)
        del cycle
        event = cupy.cuda.Event()
        event.record()
        objects = [[number] for number in range(100_000)]  # would trigger a collection
        assert not event.done
        assert len(objects) == 100_000


@pytest.mark.parametrize("order", [AtOnce(), Late(), Random(0)], ids=["at once", "late", "random"])
def test_graph_replays_forked_streams(order):
    with machine.order(order):
        x = cupy.ones(4, np.float32)
        y, z = cupy.empty_like(x), cupy.empty_like(x)
        cupy.multiply(x, 2, out=y)  # compiles before the capture
        cupy.add(x, y, out=z)
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        cupy.cuda.get_current_stream().synchronize()
        with main:
            main.begin_capture()
            side.wait_event(main.record())
            with side:
                cupy.multiply(x, 2, out=y)
                joined = side.record()
            cupy.multiply(x, 2, out=x)
            main.wait_event(joined)
            cupy.add(x, y, out=z)
            graph = main.end_capture()
            for _ in range(2):
                graph.launch(main)
            main.synchronize()
        # The caller's race: the fork reads x before or after it is doubled.
        assert cupy.asnumpy(x).tolist() == [4] * 4
        assert cupy.asnumpy(z)[0] in (4 + 4, 4 + 8)


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
    x = cupy.zeros(1, np.float32)
    f((1,), (1,), (x,))
    with cupy.cuda.Device(1):
        other = cupy.zeros(1, np.float32)
        stream = cupy.cuda.Stream()
    with refused(api.CU.ERROR_INVALID_HANDLE):
        f((1,), (1,), (x,), stream=stream)
    with refused(api.CU.ERROR_ILLEGAL_ADDRESS):
        f((1,), (1,), (other,))
    assert "given memory of device 1" in machine.revive()[0]


def test_binary_of_unknown_source_is_refused():
    text = '#include "one.cuh"\nextern "C" __global__ void f(float* x) { x[0] = ONE * MACRO; }'
    source = KernelSource("mine.cu", text, (("one.cuh", "#define ONE 1\n"),))
    cubin, log = compiler.compile_cubin(source, {"MACRO": 3}, "sm_90a")
    program = programs.read(np.frombuffer(cubin, np.uint8).ctypes.data)
    assert (program.name, program.source, program.headers) == (
        "mine.cu",
        text,
        dict(source.headers),
    )
    assert "-DMACRO=3" in program.options
    assert "registers" in program.log
    assert program.log == log.rstrip("\0")
    module, x = cupy.cuda.Module(), cupy.zeros(1, np.float32)
    module.load(cubin)
    module.get_function("f")((1,), (1,), (x,))
    assert float(x[0]) == 3
    with refused(api.CU.ERROR_INVALID_IMAGE):
        cupy.cuda.Module().load(program.cubin + bytes(64))
    with refused(api.CU.ERROR_INVALID_IMAGE):
        cupy.cuda.Module().load(b".version 8.0\0" + bytes(64))


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
