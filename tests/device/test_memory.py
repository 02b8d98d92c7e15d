"""CuPy's memory pools, and device memory that runs out."""

from __future__ import annotations

import gc

import cupy
import pytest

import cupyconv
from cupyconv.backends import current_device
from cupyconv.formats import data_formats, filter_formats
from cupyconv.planning.families import FAMILIES
from tests.agreement import compute, fits, plan_with, require_equal
from tests.configurations import (
    FAMILY_CASES,
    in_formats,
    integer_data,
)
from tests.device import machine, memory
from tests.device.test_order import ORDERS, calls, on_device, split_layer
from tests.families import FAMILY_LAYERS
from tests.gpu.fixtures import as_a_new_process

POOLS = {
    "default": lambda: cupy.get_default_memory_pool().malloc,
    "none": lambda: None,
    "async": lambda: cupy.cuda.malloc_async,
    "async pool": lambda: cupy.cuda.MemoryAsyncPool().malloc,
}


@pytest.mark.parametrize("order", ["", *ORDERS])
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_gives_exact_results(pool, order, allocator):
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
def test_managed_memory_is_refused_without_leak(pool, allocator):
    problem = split_layer()
    operations, before = calls(problem, integer_data(problem)), settled()
    allocator(MANAGED[pool]())
    for call, _ in operations.values():
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="managed memory"):
            call()
    assert settled() == before
    allocator(cupy.get_default_memory_pool().malloc)
    for name, (call, exact) in operations.items():
        require_equal(cupy.asnumpy(call()), exact, name)


one_by_one = cupy.cuda.MemoryAsyncPool().malloc
"""Allocator that makes one allocation per array and raises CuPy's memory error."""


class Counted:
    """Allocator that counts its calls."""

    def __init__(self):
        self.count = 0

    def malloc(self, size):
        self.count += 1
        return one_by_one(size)


def settled():
    """Return the allocated bytes of the device after all work and garbage collection."""
    gc.collect()
    cupy.cuda.get_current_stream().synchronize()
    return machine.DEVICES[0].allocated


def require_recovers(call, exact, name):
    """Let memory run out at each allocation of a call: it raises, leaks nothing and works again."""
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


def test_exhausted_memory_at_any_allocation():
    problem = split_layer()
    operations = calls(problem, integer_data(problem))
    counts = {
        name: require_recovers(call, exact, name) for name, (call, exact) in operations.items()
    }
    assert counts["forward"] == 2, "the result and a workspace"


ROOMY = {
    name: (
        layers.edge_cases or FAMILY_CASES,
        layers.dtype,
        layers.precision if layers.dtype == "float32" else "ieee",
        layers.channels_last,
    )
    for name, layers in FAMILY_LAYERS.items()
}
"""Problems of each family, dtype, precision, and whether channels are last."""

COMPUTED = [(name, pass_) for name, layers in FAMILY_LAYERS.items() for pass_ in layers.passes]
"""Families, and passes that they compute."""


def roomy(impl, pass_, **choices):
    """Return the family's smallest problem, preferring one with a workspace, with a plan.

    Args:
        impl, pass_: the family, and the pass to compute.
        choices: further arguments of ``plan_with``; the precision comes from ROOMY.
    """
    cases, dtype, precision, last = ROOMY[impl]
    candidates = []
    for case in cases:
        rank = case.problem.spatial_rank
        formats = data_formats(rank)[last], filter_formats(rank)[last]
        problem = in_formats(case.problem, *formats).replace(dtype=dtype)
        if problem.N and pass_ in fits(problem, impl, current_device(), precision):
            plan = plan_with(
                *(problem, impl, current_device()), passes=(pass_,), precision=precision, **choices
            )
            candidates.append((not plan[pass_].workspace_bytes, case.macs, plan))
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def test_roomy_cases_cover_every_family():
    assert list(ROOMY) == [name for name, family in FAMILIES.items() if family.on_gpu]


@pytest.mark.parametrize(("impl", "pass_"), COMPUTED)
def test_exhausted_memory_in_every_family(impl, pass_):
    plan = roomy(impl, pass_, splits=3)
    problem, planned = plan.problem, plan[pass_]
    data = integer_data(problem)
    operands = on_device(data)
    options = {"impl": plan, "precision": planned.precision}
    exact = compute(cupyconv, pass_, problem, data, impl="reference")
    count = require_recovers(
        lambda: compute(cupyconv, pass_, problem, operands, **options),
        exact,
        f"{impl}'s {pass_}",
    )
    assert count == 1 + bool(planned.workspace_bytes)


def test_exhausted_memory_with_copied_operands():
    """The filter is conjugated and the input is extended beyond its windows."""
    problem = cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype="complex64")
    data = integer_data(problem)
    x, w = cupy.asarray(data.dy), cupy.asarray(data.w)
    rules = {"stride": 1, "dilation": 2, "output_padding": 1}
    exact = cupyconv.conv_transpose(data.dy, data.w, impl="reference", **rules)
    count = require_recovers(lambda: cupyconv.conv_transpose(x, w, **rules), exact, "transposed")
    assert count >= 3


def test_exhausted_memory_in_first_call():
    """The next call reuses what a failed call has prepared."""
    problem = split_layer("bfloat16")
    operations = calls(problem, integer_data(problem))
    for name, (call, exact) in operations.items():
        with (
            cupy.cuda.using_allocator(one_by_one),
            memory.allocations_left(0),
            pytest.raises(MemoryError),
        ):
            call()
        require_equal(cupy.asnumpy(call()), exact, name)


def test_exhausted_memory_leaves_out_unchanged():
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


def test_exhausted_memory_in_backward_pass():
    problem = split_layer()
    data = integer_data(problem)
    x, w, dy = map(cupy.asarray, (data.x, data.w, data.dy))
    words = {"data_format": "NHWC", "filter_format": "OHWI"}
    exact = cupyconv.conv_backward(data.x, data.w, data.dy, impl="reference", **words)

    def call():
        return cupyconv.conv_backward(x, w, dy, **words).dw

    assert require_recovers(call, exact.dw, "backward") >= 3


def test_exhausted_memory_at_any_measured_allocation(own_cache, monkeypatch):
    """Without memory for the result the call fails; without a workspace only a candidate does."""
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


def test_exhausted_memory_while_measuring(own_cache, monkeypatch):
    """A candidate that does not fit is left out; if none fits, the memory error is raised."""
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem = split_layer()
    call, exact = calls(problem, integer_data(problem))["forward"]
    with cupy.cuda.using_allocator(one_by_one):
        with memory.allocations_left(0), pytest.raises(MemoryError):
            call()
        as_a_new_process()
        with memory.allocations_left(1):  # enough for the result only
            require_equal(cupy.asnumpy(call()), exact, "forward")
        assert not list(own_cache.glob("measured/*")), "a memory error was cached"
        as_a_new_process()
        require_equal(cupy.asnumpy(call()), exact, "forward")
        assert list(own_cache.glob("measured/*"))
