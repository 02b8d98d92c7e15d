"""Faults put into the host code one at a time; the tests of this folder detect each.

The faults are mistakes that host code invites: a wrong stream, device or address, or no wait.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import arrays, backends
from cupyconv.gpu import capture, runtime, tensormaps
from cupyconv.launch import Im2colMap
from tests.agreement import compute, require_equal
from tests.configurations import HOPPER_CASES, Data, in_formats, integer_data
from tests.device import machine, test_graphs
from tests.device import test_order as in_order
from tests.device.test_order import ORDERS, calls, in_disorder, split_layer
from tests.gpu import test_cupy as on_gpu
from tests.gpu import test_ways_in as ways


def with_views():
    on_gpu.test_views_are_read_and_written_in_place()


def with_streams():
    for order in ORDERS:
        in_order.test_call_runs_on_current_stream(order)


def with_workspaces():
    for order in ORDERS:
        in_order.test_passes_with_partial_sums(order)


def with_workspaces_on_two_streams():
    """Run the same layer on two unordered streams."""
    problem = split_layer()
    data = [integer_data(problem, seed) for seed in range(2)]
    for seed in range(12):
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


def with_devices():
    in_order.test_two_devices_alternate("")


def with_tensor_maps():
    """Use the same arrays again, and others, all views into larger arrays."""
    case = next(case for case in HOPPER_CASES if case.name == "everything_differs")
    problem = in_formats(case.problem, "NHWC", "OHWI").replace(dtype="float16")
    data = [integer_data(problem, seed) for seed in range(2)]
    inputs = []
    for operands in (*data, data[0]):
        inputs.append(
            Data(*map(view_into_larger_array, (operands.x, operands.w, operands.dy, operands.bias)))
        )
        result = compute(cupyconv, "forward", problem, inputs[-1], impl="cuda-hopper")
        exact = compute(cupyconv, "forward", problem, operands, impl="reference")
        require_equal(cupy.asnumpy(result), exact, "forward")


def view_into_larger_array(array):
    larger = cupy.full(array.size + 128, 9, array.dtype)
    view = larger[64 : 64 + array.size].reshape(array.shape)
    view[...] = cupy.asarray(array)
    return view


def with_exporters():
    for order in ORDERS:
        in_order.test_producer_stream_is_waited_for("dlpack", order)


def with_host_reads():
    problem, data, words = ways.layer()
    y = cupyconv.conv_forward(data.x, data.w, **words)
    for order in ORDERS:
        with in_disorder(order):
            x = cupy.zeros(data.x.shape, np.float32)
            x += cupy.asarray(data.x)
            element = cupyconv.explain(problem, x=x, w=data.w, y=y).element("y[1,5,2,3]")
            assert element.sum == element.computed


def with_arrays_that_are_extended():
    with in_disorder("late"):  # new memory, still NaN
        ways.test_a_transposed_convolution_beyond_its_windows("float32")


def with_captured_calls():
    test_graphs.test_replay_uses_memory_of_the_graph("bias", "relaxed")


# -- faults ----------------------------------------------------------------------------------------
def first_byte_of_the_allocation(patch):
    patch.setattr(runtime.CupyRuntime, "address", lambda self, array: array.data.mem.ptr)


def null_stream(patch):
    run = runtime.Series.__call__

    def on_null(self, operands):
        with cupy.cuda.Stream.null:
            run(self, operands)

    patch.setattr(runtime.Series, "__call__", on_null)


def stream_of_the_first_call(patch):
    streams = []
    run = runtime.Series.__call__

    def on_first(self, operands):
        streams.append(cupy.cuda.get_current_stream())
        with streams[0]:
            run(self, operands)

    patch.setattr(runtime.Series, "__call__", on_first)


def one_workspace_for_all_calls(patch):
    cached = cache(backends.GpuBackend.scratch)
    patch.setattr(
        backends.GpuBackend, "scratch", lambda self, shape, dtype: cached(self, shape, dtype)
    )


def workspace_given_back_by_another_stream(patch):
    scratch = backends.GpuBackend.scratch
    other = cupy.cuda.Stream(non_blocking=True)

    def elsewhere(self, shape, dtype):
        with other:
            made = scratch(self, shape, dtype)
            other.synchronize()
            return made

    patch.setattr(backends.GpuBackend, "scratch", elsewhere)


def kernels_of_the_first_device(patch):
    kernels = {}

    def begin(self, target):
        self.target, self._kernels = "sm_80", kernels

    patch.setattr(runtime.CupyRuntime, "__init__", begin)


def backend_of_the_first_device(patch):
    patch.setattr(backends, "_gpu", lambda ordinal: gpu(0))


gpu = backends._gpu


def no_shared_memory_asked_for(patch):
    def kernel(self, launch):
        return self._kernels[runtime.variant_of(launch, self.target), launch.entry].kernel

    patch.setattr(runtime.CupyRuntime, "kernel", kernel)


def maps_of_the_first_arrays(patch):
    @lru_cache
    def first(maps, encode):
        return tensormaps_encoded(maps, addresses[maps], encode)

    addresses = {}

    def stale(maps, given, encode):
        addresses.setdefault(maps, given)
        return first(maps, encode)

    patch.setattr(tensormaps, "encoded", stale)


tensormaps_encoded = tensormaps.encoded


def swapped_corners(patch):
    encode = tensormaps.encode

    def encode_swapped(tensor_map, address):
        if isinstance(tensor_map, Im2colMap):
            tensor_map = replace(tensor_map, lower=tensor_map.upper, upper=tensor_map.lower)
        return encode(tensor_map, address)

    patch.setattr(runtime.CupyRuntime, "encode", staticmethod(encode_swapped))


def x_for_w(patch):
    of = runtime._Arguments.of
    patch.setattr(
        runtime._Arguments,
        "of",
        lambda self, operands: of(self, (operands[1], operands[0], *operands[2:])),
    )


def dlpack_without_its_stream(patch):
    take = arrays.take

    def careless(name, value):
        if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, cupy.ndarray)):
            return cupy.from_dlpack(Unordered(value)), arrays.Home.GPU
        return take(name, value)

    patch.setattr(arrays, "take", careless)


def read_without_waiting(patch):
    other = cupy.cuda.Stream(non_blocking=True)
    patch.setattr(
        arrays,
        "on_host",
        lambda array: array.get(stream=other) if isinstance(array, cupy.ndarray) else array,
    )


def zeros_left_out(patch):
    def extended(self, array, shape):
        copied = self.scratch(shape, array.dtype.name)
        copied[tuple(map(slice, array.shape))] = array
        return copied

    patch.setattr(backends.GpuBackend, "extended", extended)


def workspace_that_no_graph_owns(patch):
    patch.setattr(capture, "allocate", lambda size, cuda: cuda.alloc(size))


class Unordered:
    """Exporter of another object's memory that asks the consumer not to wait."""

    def __init__(self, owner):
        self._owner = owner

    def __dlpack__(self, **keywords):
        return self._owner.__dlpack__(**{**keywords, "stream": -1})

    def __dlpack_device__(self):
        return self._owner.__dlpack_device__()


FAULTS = {
    first_byte_of_the_allocation: with_tensor_maps,
    null_stream: with_streams,
    stream_of_the_first_call: with_streams,
    one_workspace_for_all_calls: with_workspaces_on_two_streams,
    workspace_given_back_by_another_stream: with_workspaces,
    kernels_of_the_first_device: with_devices,
    backend_of_the_first_device: with_devices,
    no_shared_memory_asked_for: with_tensor_maps,
    maps_of_the_first_arrays: with_tensor_maps,
    swapped_corners: with_tensor_maps,
    x_for_w: with_views,
    dlpack_without_its_stream: with_exporters,
    read_without_waiting: with_host_reads,
    zeros_left_out: with_arrays_that_are_extended,
    workspace_that_no_graph_owns: with_captured_calls,
}


# Arrays dropped while a device has failed cannot free their memory.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_detected(fault, nothing_loaded, monkeypatch):
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(Exception) as failure:  # noqa: PT011 (wrong numbers or a driver error)
            FAULTS[fault]()
    assert failure.type not in (AttributeError, NameError, TypeError), failure.value
    machine.revive()


def test_checks_pass_without_a_fault(nothing_loaded):
    for check in dict.fromkeys(FAULTS.values()):
        check()
