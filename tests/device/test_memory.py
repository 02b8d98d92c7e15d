"""Memory as CuPy's users set it up, and as it runs out."""

from __future__ import annotations

import gc

import cupy
import pytest

import cupyconv
from tests.agreement import require_equal
from tests.configurations import integer_data
from tests.device import machine, memory
from tests.device.test_order import ORDERS, calls, split_layer
from tests.gpu.fixtures import as_a_new_process

POOLS = {
    "default": lambda: cupy.get_default_memory_pool().malloc,
    "none": lambda: None,
    "async": lambda: cupy.cuda.malloc_async,
    "async pool": lambda: cupy.cuda.MemoryAsyncPool().malloc,
}


@pytest.fixture
def allocator():
    """Sets CuPy's allocator, until the test ends."""
    yield cupy.cuda.set_allocator
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.mark.parametrize("order", ["", *ORDERS])
@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool, order, allocator):
    allocator(POOLS[pool]())
    problem = split_layer()
    data = integer_data(problem)
    with machine.order(machine.named(order)):
        for name, (call, exact) in calls(problem, data).items():
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
            pytest.raises(MemoryError),
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
