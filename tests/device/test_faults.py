"""Faults of the host code, put in one at a time, are seen by the tests beside this.

mutants.py changes everything and asks whether anyone notices; here are the faults that are made by
whoever writes such code: a stream, a device, an address or a wait that is not the right one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import arrays, backends
from cupyconv.gpu import launch, tensormaps
from tests.agreement import compute, require_equal
from tests.configurations import HOPPER_CASES, Data, in_formats, integer_data
from tests.device import machine
from tests.device import test_order as in_order
from tests.device.test_order import ORDERS, calls, in_disorder, split_layer
from tests.gpu import test_cupy as on_gpu
from tests.gpu import test_ways_in as ways


def with_views():
    on_gpu.test_views_are_read_and_written_in_place()


def with_streams():
    for order in ORDERS:
        in_order.test_a_call_runs_on_the_stream_that_is_current_whatever_ran_before(order)


def with_workspaces():
    for order in ORDERS:
        in_order.test_passes_that_keep_partial_sums_meanwhile(order)


def with_workspaces_on_two_streams():
    """The same layer on two streams at a time, which nothing orders."""
    problem = split_layer()
    data = [integer_data(problem, seed) for seed in range(2)]
    for seed in range(12):
        with in_disorder(f"random {seed}") as first:
            second = cupy.cuda.Stream(non_blocking=True)
            ready = []
            for stream, given in zip((first, second), data, strict=True):
                with stream:
                    ready.append((stream, *calls(problem, given)["forward"]))
                stream.synchronize()
            running = []
            for stream, call, exact in ready:
                with stream:
                    running.append((stream, call(), exact))
            for stream, got, exact in running:
                require_equal(cupy.asnumpy(got, stream=stream), exact, "forward")


def with_devices():
    in_order.test_two_devices_by_turns("")


def with_tensor_maps():
    """On the same arrays and on others, which are views at some place of a larger array."""
    case = next(case for case in HOPPER_CASES if case.name == "everything_differs")
    problem = in_formats(case.problem, "NHWC", "OHWI").replace(dtype="float16")
    data = [integer_data(problem, seed) for seed in range(2)]
    kept = []
    for given in (*data, data[0]):
        kept.append(Data(*map(inside_a_larger_one, (given.x, given.w, given.dy, given.bias))))
        got = compute(cupyconv, "forward", problem, kept[-1], impl="cuda-hopper")
        exact = compute(cupyconv, "forward", problem, given, impl="reference")
        require_equal(cupy.asnumpy(got), exact, "forward")


def inside_a_larger_one(array):
    larger = cupy.full(array.size + 128, 9, array.dtype)
    view = larger[64 : 64 + array.size].reshape(array.shape)
    view[...] = cupy.asarray(array)
    return view


def with_exporters():
    for order in ORDERS:
        in_order.test_what_another_stream_still_writes_is_waited_for("dlpack", order)


def with_host_reads():
    problem, data, words = ways.layer()
    y = cupyconv.conv_forward(data.x, data.w, **words)
    for order in ORDERS:
        with in_disorder(order):
            x = cupy.zeros(data.x.shape, np.float32)
            x += cupy.asarray(data.x)
            found = cupyconv.explain(problem, x=x, w=data.w, y=y).element("y[1,5,2,3]")
            assert found.sum == found.computed


def with_arrays_that_are_extended():
    with in_disorder("late"):  # on memory that nobody has written before
        ways.test_a_transposed_convolution_beyond_its_windows("float32")


# -- faults ----------------------------------------------------------------------------------------
def first_byte_of_the_allocation(patch):
    patch.setattr(launch.CupyRuntime, "address", lambda self, array: array.data.mem.ptr)


def null_stream(patch):
    run = launch.Series.__call__

    def on_null(self, operands):
        with cupy.cuda.Stream.null:
            run(self, operands)

    patch.setattr(launch.Series, "__call__", on_null)


def stream_of_the_first_call(patch):
    streams = []
    run = launch.Series.__call__

    def on_first(self, operands):
        streams.append(cupy.cuda.get_current_stream())
        with streams[0]:
            run(self, operands)

    patch.setattr(launch.Series, "__call__", on_first)


def one_workspace_for_all_calls(patch):
    empty = backends.GpuBackend.empty
    kept = cache(empty)
    patch.setattr(
        backends.GpuBackend,
        "empty",
        lambda self, shape, dtype: (kept if len(shape) == 1 else empty)(self, shape, dtype),
    )


def workspace_given_back_by_another_stream(patch):
    empty = backends.GpuBackend.empty
    other = cupy.cuda.Stream(non_blocking=True)

    def elsewhere(self, shape, dtype):
        if len(shape) > 1:
            return empty(self, shape, dtype)
        with other:
            made = empty(self, shape, dtype)
            other.synchronize()
            return made

    patch.setattr(backends.GpuBackend, "empty", elsewhere)


def modules_of_the_first_device(patch):
    modules = {}

    def begin(self, architecture):
        self.architecture, self._modules = "sm_80", modules

    patch.setattr(launch.CupyRuntime, "__init__", begin)


def backend_of_the_first_device(patch):
    patch.setattr(backends, "_gpu", lambda ordinal: gpu(0))


gpu = backends._gpu


def no_shared_memory_asked_for(patch):
    patch.setattr(launch.CupyRuntime, "allow", lambda *_: None)


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

    def swapped(one, address):
        if isinstance(one, tensormaps.Im2colMap):
            one = replace(one, lower=one.upper, upper=one.lower)
        return encode(one, address)

    patch.setattr(launch.CupyRuntime, "encode", staticmethod(swapped))


def x_for_w(patch):
    of = launch._Arguments.of
    patch.setattr(
        launch._Arguments, "of", lambda self, given: of(self, (given[1], given[0], *given[2:]))
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
        copied = self.empty(shape, array.dtype.name)
        copied[tuple(map(slice, array.shape))] = array
        return copied

    patch.setattr(backends.GpuBackend, "extended", extended)


class Unordered:
    """Exports another object's memory, and asks it not to wait for anything."""

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
    modules_of_the_first_device: with_devices,
    backend_of_the_first_device: with_devices,
    no_shared_memory_asked_for: with_tensor_maps,
    maps_of_the_first_arrays: with_tensor_maps,
    swapped_corners: with_tensor_maps,
    x_for_w: with_views,
    dlpack_without_its_stream: with_exporters,
    read_without_waiting: with_host_reads,
    zeros_left_out: with_arrays_that_are_extended,
}


# Arrays that are dropped while a device is lost cannot give their memory back.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, nothing_loaded, monkeypatch):
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(Exception) as seen:  # noqa: PT011 (wrong numbers, or the driver's words)
            FAULTS[fault]()
    assert seen.type not in (AttributeError, NameError, TypeError), seen.value
    machine.revive()


def test_without_a_fault_nothing_is_seen(nothing_loaded):
    for check in dict.fromkeys(FAULTS.values()):
        check()
