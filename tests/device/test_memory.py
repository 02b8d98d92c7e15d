"""Memory as CuPy's users set it up, and as it runs out."""

from __future__ import annotations

import gc
from itertools import product

import cupy
import pytest

import cupyconv
from cupyconv.backends import current_device
from cupyconv.formats import data_formats, filter_formats
from cupyconv.planning import plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests.agreement import compute, fits, planned, require_equal
from tests.configurations import (
    DIRECT_CASES,
    FAMILY_CASES,
    HOPPER_CASES,
    PATCH_CASES,
    TOEPLITZ_CASES,
    in_formats,
    integer_data,
)
from tests.device import machine, memory
from tests.device.test_order import ORDERS, calls, on_device, split_layer
from tests.gpu.fixtures import as_a_new_process
from tests.gpu.test_ways_in import whole_numbers

POOLS = {
    "default": lambda: cupy.get_default_memory_pool().malloc,
    "none": lambda: None,
    "async": lambda: cupy.cuda.malloc_async,
    "async pool": lambda: cupy.cuda.MemoryAsyncPool().malloc,
}


@pytest.mark.parametrize("order", ["", *ORDERS])
@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool, order, allocator):
    allocator(POOLS[pool]())
    problem = split_layer()
    data = integer_data(problem)
    with machine.order(machine.named(order)):
        for name, (call, exact) in calls(problem, data).items():
            require_equal(cupy.asnumpy(call()), exact, name)


MANAGED = {
    "none": lambda: cupy.cuda.malloc_managed,
    "pool": lambda: cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc,
}


@pytest.mark.parametrize("pool", MANAGED)
def test_managed_memory_is_refused_and_nothing_is_lost(pool, allocator):
    problem = split_layer()
    made, before = calls(problem, integer_data(problem)), settled()
    allocator(MANAGED[pool]())
    for call, _ in made.values():
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="managed memory, which"):
            call()
    assert settled() == before
    allocator(cupy.get_default_memory_pool().malloc)
    for name, (call, exact) in made.items():
        require_equal(cupy.asnumpy(call()), exact, name)


one_by_one = cupy.cuda.MemoryAsyncPool().malloc
"""Allocates each array by itself, and says in CuPy's words that it cannot."""


class Counted:
    """An allocator that counts."""

    def __init__(self):
        self.count = 0

    def malloc(self, size):
        self.count += 1
        return one_by_one(size)


def settled():
    """Bytes that the device has, once nothing is left behind."""
    gc.collect()
    cupy.cuda.get_current_stream().synchronize()
    return machine.DEVICES[0].allocated


def require_recovers(call, exact, name):
    """Memory runs out at each allocation of a call: an error, nothing lost, and it works again."""
    counted = Counted()
    with cupy.cuda.using_allocator(counted.malloc):
        require_equal(cupy.asnumpy(call()), exact, name)
    assert counted.count
    before = settled()
    for left in range(counted.count):
        with (
            cupy.cuda.using_allocator(one_by_one),
            memory.allocations_left(left),
            pytest.raises(cupy.cuda.memory.OutOfMemoryError),
        ):
            call()
        assert settled() == before, f"{name}: memory is kept after {left} allocations"
        with cupy.cuda.using_allocator(one_by_one):
            require_equal(cupy.asnumpy(call()), exact, name)
    return counted.count


def test_running_out_at_any_allocation():
    problem = split_layer()
    made = calls(problem, integer_data(problem))
    counts = {name: require_recovers(call, exact, name) for name, (call, exact) in made.items()}
    assert counts["forward"] == 2, "the result and a workspace"


ROOMY = {
    "cuda-generic": (FAMILY_CASES, "float64", "ieee", False),
    "cuda-gather": (FAMILY_CASES, "float16", "ieee", True),
    "cuda-direct": (DIRECT_CASES, "float32", "ieee", False),
    "cuda-toeplitz": (TOEPLITZ_CASES, "float16", "ieee", False),
    "cuda-patch": (PATCH_CASES, "float16", "ieee", False),
    "cuda-hopper": (HOPPER_CASES, "float16", "ieee", False),
    "cuda-hopper-bf16x6": (HOPPER_CASES, "float32", "bf16x6", True),
}
"""Of each family, cases with a dtype, a precision and whether channels are last."""


def roomy(impl, pass_):
    """The smallest problem that a family takes a workspace for, or any if there is none."""
    cases, dtype, precision, last = ROOMY[impl]
    found = []
    for case in cases:
        rank = case.problem.spatial_rank
        formats = data_formats(rank)[last], filter_formats(rank)[last]
        problem = in_formats(case.problem, *formats).replace(dtype=dtype)
        if problem.N and pass_ in fits(problem, impl, current_device(), precision):
            taken = workspace_bytes(problem, pass_, impl, precision)
            found.append((not taken, case.macs, problem))
    return min(found, key=lambda one: one[:2])[2], precision


def workspace_bytes(problem, pass_, impl, precision):
    return plan_pass(problem, pass_, current_device(), impl, precision).workspace_bytes


def test_every_family_is_tried():
    assert list(ROOMY) == [name for name, family in FAMILIES.items() if family.on_gpu]


@pytest.mark.parametrize(
    ("impl", "pass_"),
    [pair for pair in product(ROOMY, PASSES) if pair != ("cuda-patch", "backprop_input")],
)
def test_running_out_in_every_family(impl, pass_):
    with planned(impl, 0, splits=3):
        problem, precision = roomy(impl, pass_)
        data = integer_data(problem)
        given = on_device(data)
        how = {"impl": impl, "precision": precision}
        exact = compute(cupyconv, pass_, problem, data, impl="reference")
        count = require_recovers(
            lambda: compute(cupyconv, pass_, problem, given, **how), exact, f"{impl}'s {pass_}"
        )
        assert count == 1 + bool(workspace_bytes(problem, pass_, impl, precision))


def test_running_out_where_arrays_are_copied_first():
    """A filter that is conjugated, and an input beyond its windows."""
    problem = cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype="complex64")
    data = whole_numbers(problem)
    x, w = cupy.asarray(data.dy), cupy.asarray(data.w)
    rules = {"stride": 1, "dilation": 2, "output_padding": 1}
    exact = cupyconv.conv_transpose(data.dy, data.w, impl="reference", **rules)
    count = require_recovers(lambda: cupyconv.conv_transpose(x, w, **rules), exact, "transposed")
    assert count >= 3


def test_running_out_before_anything_was_ever_run():
    """What was prepared for a call that failed is as good as any."""
    problem = split_layer("bfloat16")
    made = calls(problem, integer_data(problem))
    for name, (call, exact) in made.items():
        with (
            cupy.cuda.using_allocator(one_by_one),
            memory.allocations_left(0),
            pytest.raises(MemoryError),
        ):
            call()
        require_equal(cupy.asnumpy(call()), exact, name)


def test_running_out_leaves_out_as_it_was():
    problem = split_layer()
    data = integer_data(problem)
    x, w = cupy.asarray(data.x), cupy.asarray(data.w)
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    out = cupyconv.conv_forward(x, w, **words)
    out.fill(9)
    with (
        cupy.cuda.using_allocator(one_by_one),
        memory.allocations_left(0),
        pytest.raises(MemoryError),
    ):
        cupyconv.conv_forward(x, w, out=out, **words)
    assert (out == 9).all()


def test_running_out_in_a_backward_pass():
    problem = split_layer()
    data = integer_data(problem)
    x, w, dy = map(cupy.asarray, (data.x, data.w, data.dy))
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    exact = cupyconv.conv_backward(data.x, data.w, data.dy, impl="reference", **words)

    def call():
        return cupyconv.conv_backward(x, w, dy, **words).dw

    assert require_recovers(call, exact.dw, "backward") >= 3


def test_running_out_at_any_allocation_of_a_measurement(own_cache, monkeypatch):
    """The result's ends the call; a workspace's costs a candidate, and the call is right."""
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem = split_layer()
    call, exact = calls(problem, integer_data(problem))["forward"]
    for left in range(3):
        as_a_new_process()
        before = settled()
        with cupy.cuda.using_allocator(one_by_one), memory.allocations_left(left):
            if left:
                require_equal(cupy.asnumpy(call()), exact, f"with {left} allocations")
            else:
                with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                    call()
        assert settled() == before, f"memory is kept after {left} allocations"


def test_running_out_while_measuring(own_cache, monkeypatch):
    """A candidate that does not fit is left out; where none fits, the error is that of memory."""
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem = split_layer()
    call, exact = calls(problem, integer_data(problem))["forward"]
    with cupy.cuda.using_allocator(one_by_one):
        with memory.allocations_left(0), pytest.raises(MemoryError):
            call()
        as_a_new_process()
        with memory.allocations_left(1):  # the result, and no workspace
            require_equal(cupy.asnumpy(call()), exact, "forward")
        assert not list(own_cache.glob("measured/*")), "bad luck is not kept"
        as_a_new_process()
        require_equal(cupy.asnumpy(call()), exact, "forward")
        assert list(own_cache.glob("measured/*"))
