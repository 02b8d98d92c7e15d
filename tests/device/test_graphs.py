"""Captured calls: a graph owns all memory that it writes, in every replay.

Without a pool, an array's memory is freed with the array, and the device fails when a replay uses
freed memory.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, DeviceError, backends, calls
from cupyconv.backends import current_device
from cupyconv.formats import data_formats, filter_formats
from cupyconv.problem import PASSES
from tests.agreement import compute, fits, plan_with, require_equal
from tests.configurations import (
    FAMILY_CASES,
    Data,
    in_formats,
    integer_data,
    random_problem,
)
from tests.device import api, devices, graphs, machine
from tests.device.test_driver import MODES
from tests.device.test_memory import COMPUTED, POOLS, ROOMY, roomy
from tests.device.test_order import ORDERS, split_layer
from tests.families import FAMILY_LAYERS


@dataclass
class Call:
    """A call of the library with its operands and its result on the device.

    Attributes:
        compute: the call; takes NumPy or CuPy arrays by name, and ``out``.
        data: operands on the host.
        how: keyword arguments of the call on the device.
        given: operands on the device.
        out: the result on the device.
    """

    compute: Callable[..., Any]
    data: dict[str, np.ndarray]
    how: dict[str, Any]

    def __post_init__(self) -> None:
        self.given = {name: cupy.asarray(array) for name, array in self.data.items()}
        self.out = cupy.asarray(self.exact())

    def exact(self) -> np.ndarray:
        return self.compute(**self.data)

    def __call__(self) -> None:
        self.compute(**self.given, **self.how, out=self.out)

    def change(self) -> None:
        """Change the operands' values in place and overwrite the result."""
        for name, array in self.data.items():
            self.data[name] = np.flip(array).copy()
            self.given[name].set(self.data[name])
        self.out.fill(-1)

    def require(self, what: str) -> None:
        require_equal(cupy.asnumpy(self.out), self.exact(), what)


def pass_call(problem, pass_, **how):
    def run(x, w, dy, bias, **more):
        return compute(cupyconv, pass_, problem, Data(x, w, dy, bias), **more)

    return Call(run, dict(vars(integer_data(problem))), how)


def planned_call(plan, pass_):
    return pass_call(plan.problem, pass_, impl=plan, precision=plan[pass_].precision)


def family_call(impl, pass_):
    return planned_call(roomy(impl, pass_, splits=3), pass_)


def copying_call(pass_):
    """Return a call with channels-first operands, of which cuda-gather copies the first."""
    problem = FAMILY_CASES[0].problem.replace(dtype="float16")
    plan = plan_with(problem, "cuda-gather", current_device(), splits=3, copies=1)
    return planned_call(plan, pass_)


def bias_call():
    dy = np.random.default_rng(0).integers(-2, 3, (9, 5, 80, 80)).astype(np.float32)
    return Call(cupyconv.conv_backprop_bias, {"dy": dy}, {})


def transpose_call():
    """Return a call with a conjugated filter and an input extended beyond its windows."""
    problem = cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype="complex64")
    data = integer_data(problem)

    def run(**arrays):
        return cupyconv.conv_transpose(stride=1, dilation=2, output_padding=1, **arrays)

    return Call(run, {"x": data.dy, "w": data.w}, {})


def adding_call():
    """Return a call with an addend whose elements are in another order than the result's."""
    problem = cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype="float16")
    data = integer_data(problem)

    def run(x, w, add, **more):
        return cupyconv.conv_forward(x, w, add=add.T, activation="relu", **more)

    return Call(run, {"x": data.x, "w": data.w, "add": data.dy.T.copy()}, {})


WITH_WORKSPACE = [
    (name, pass_) for name, layers in FAMILY_LAYERS.items() for pass_ in layers.with_workspace
]
"""Families and passes that use a workspace."""

CASES = {
    **{f"{impl} {pass_}": (family_call, (impl, pass_)) for impl, pass_ in WITH_WORKSPACE},
    **{f"copying {pass_}": (copying_call, (pass_,)) for pass_ in PASSES[:2]},
    "bias": (bias_call, ()),
    "transpose": (transpose_call, ()),
    "add": (adding_call, ()),
}
"""Cases by name: function that makes the call, its arguments."""


@contextmanager
def loaded(name: str) -> Iterator[Call]:
    """Yield a call whose kernels are loaded; each array is a separate allocation."""
    make, arguments = CASES[name]
    with cupy.cuda.using_allocator(None):
        call = make(*arguments)
        call()
        call.require(name)
        yield call


def captured(call: Callable[[], None], mode: str = "relaxed") -> cupy.cuda.Graph:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(MODES[mode])
        call()
        return stream.end_capture()


def forget_plans() -> None:
    calls.forget()


def test_capture_cases_cover_every_workspace():
    pairs = {pair for pair in COMPUTED if roomy(*pair, splits=3)[pair[1]].workspace_bytes}
    assert pairs == set(WITH_WORKSPACE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_replay_uses_memory_of_the_graph(name, mode):
    with loaded(name) as call:
        graph = captured(call, mode)
        call.change()
        forget_plans()
        gc.collect()
        arrays = [cupy.full(size, 7, "u1") for size in (64, 1152, 1 << 14, 1 << 16)]
        cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(2):
                graph.launch(stream)
                call.require(f"{name}, replay {turn}")
        assert all((array == 7).all() for array in arrays)


@pytest.mark.parametrize("pool", POOLS)
def test_replay_leaves_pool_arrays_unchanged(pool, allocator):
    """Arrays made after the capture would share the workspace's memory if a pool owned it."""
    with loaded("cuda-gather backprop_filter") as call:
        pass
    allocator(POOLS[pool]())
    graph = captured(call)
    arrays = [cupy.full(size // 4, 7, "f4") for size in (64, 1024, 1536, 2048, 4096) for _ in "ab"]
    call.change()
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        graph.launch(stream)
        call.require("a replay")
        stream.synchronize()
    assert all((array == 7).all() for array in arrays)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", ["cuda-gather forward", "cuda-hopper backprop_filter", "transpose"]
)
def test_graphs_run_concurrently(name, order):
    with loaded(name) as call, loaded("bias") as other:
        graphs = [
            captured(item, mode) for item, mode in ((call, "global"), (other, "thread_local"))
        ]
        for item in (call, other):
            item.change()
        cupy.cuda.get_current_stream().synchronize()
        with machine.order(machine.named(order)):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
            for stream in streams:  # launches of one executable run in order
                for graph in graphs:
                    graph.launch(stream)
            del graphs, graph  # destroyed while launches are pending
            for stream in streams:
                stream.synchronize()
        call.require(name)
        other.require("bias")


def test_destroyed_graph_frees_its_memory():
    with loaded("cuda-gather forward") as call:
        cupy.cuda.get_current_stream().synchronize()
        before = machine.DEVICES[0].allocated
        graph = captured(call)
        assert machine.DEVICES[0].allocated > before
        with cupy.cuda.Stream(non_blocking=True) as stream:
            graph.launch(stream)
            stream.synchronize()
        del graph
        assert machine.DEVICES[0].allocated == before


@pytest.mark.parametrize("name", ["cuda-gather forward", "transpose"])
def test_failed_call_leaves_no_memory_in_graph(name, monkeypatch):
    """The caller may keep the error and its frames after the capture ends."""

    def fail(*_):
        raise DeviceError("the launch failed")

    def calls():
        with monkeypatch.context() as patched:
            patched.setattr(backends._gpu(0).runtime, "stream", fail)
            with pytest.raises(DeviceError, match="the launch failed") as failure:
                call()
        errors.append(failure.value)
        call()

    errors: list[DeviceError] = []
    with loaded(name) as call:
        graph = captured(calls)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(2):
                call.change()
                graph.launch(stream)
                call.require(f"{name}, replay {turn}")
        assert len(errors) == 1


def test_forked_stream_keeps_graph_memory():
    with loaded("cuda-gather forward") as call:
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with main:
            main.begin_capture(MODES["global"])
            side.wait_event(main.record())
            with side:
                call()
                joined = side.record()
            main.wait_event(joined)
            graph = main.end_capture()
        call.change()
        graph.launch(main)
        main.synchronize()
        call.require("a fork")


def test_backward_pass_is_captured():
    problem = split_layer()
    data = integer_data(problem)
    host = {"x": data.x, "w": data.w, "dy": data.dy}
    operands = {name: cupy.asarray(array) for name, array in host.items()}
    formats = {"data_format": "NHWC", "filter_format": "OHWI"}
    with cupy.cuda.using_allocator(None):
        cupyconv.conv_backward(**operands, **formats)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            results = cupyconv.conv_backward(**operands, **formats)
            graph = stream.end_capture()
            for name, array in host.items():
                host[name] = np.flip(array).copy()
                operands[name].set(host[name])
            graph.launch(stream)
            expected = cupyconv.conv_backward(**host, **formats, impl="reference")
            for name, array, exact in zip("xwb", results, expected, strict=True):
                require_equal(cupy.asnumpy(array), exact, f"d{name}")


def random_call(draw, choices):
    """Return a random pass with a workspace, with a random family and its choices."""
    while True:
        impl, pass_ = draw.choice(WITH_WORKSPACE)
        _, dtype, precision, last = ROOMY[impl]
        problem = random_problem(draw.randint, max_macs=20_000)
        rank = problem.spatial_rank
        formats = data_formats(rank)[last], filter_formats(rank)[last]
        problem = in_formats(problem, *formats).replace(dtype=dtype)
        if problem.N and pass_ in fits(problem, impl, current_device(), precision):
            plan = plan_with(
                *(problem, impl, current_device()),
                passes=(pass_,),
                precision=precision,
                **choices[impl],
            )
            if plan[pass_].workspace_bytes:
                return planned_call(plan, pass_)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_of_random_calls(seed):
    """Replay several graphs of several calls with changed operands, in a random order."""
    draw = random.Random(seed)
    choices = {
        impl: {"tile": draw.randint(0, 5), "splits": draw.randint(1, 4)}
        for impl in dict.fromkeys(impl for impl, _ in WITH_WORKSPACE)
    }
    with cupy.cuda.using_allocator(None):
        calls = [random_call(draw, choices) for _ in range(4)]
        for call in calls:
            call()
        graphs_ = [
            captured(lambda group=group: [call() for call in group], draw.choice(list(MODES)))
            for group in (calls[:3], calls[3:])
        ]
        with machine.order(machine.named(f"random {seed}")):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
            for turn in range(2):
                for call in calls:
                    call.change()
                forget_plans()
                cupy.cuda.get_current_stream().synchronize()
                for graph in draw.sample(graphs_ * 2, 4):
                    graph.launch(draw.choice(streams))
                for stream in streams:
                    stream.synchronize()
                for number, call in enumerate(calls):
                    call.require(f"call {number} of seed {seed}, turn {turn}")


# -- the first call --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cuda-hopper forward", "bias", "transpose"])
def test_first_call_is_captured(name, mode, nothing_loaded):
    with loaded(name) as call:
        pass
    forget_plans()
    backends._gpu.cache_clear()
    cupy.clear_memo()  # CuPy's kernels
    with cupy.cuda.using_allocator(None):
        graph = captured(call, mode)
        call.change()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            graph.launch(stream)
            call.require(f"{name}, captured before anything was loaded")


# -- refusals --------------------------------------------------------------------------------------
@contextmanager
def refused_in_capture(words: str, kind: type[Exception] = ConvError) -> Iterator[None]:
    """Expect an error in a capture, and no recorded work and no allocation."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        before = machine.DEVICES[0].allocated
        with pytest.raises(kind, match=words):
            yield
        assert machine.DEVICES[0].allocated == before
        (recording,) = graphs._captures
        assert not recording.graph.nodes
        assert not recording.graph.memory
        stream.end_capture()


@pytest.mark.parametrize("impl", ["cuda-hopper", "cuda-generic"])
def test_prepare_is_refused_in_capture(impl):
    problem = FAMILY_CASES[0].problem.replace(dtype="float16")
    w = cupy.zeros(problem.filter_shape, "float16")
    with refused_in_capture("prepared before a graph is captured.*Call cupyconv.prepare before"):
        cupyconv.prepare(w, problem, impl=impl)
    host = np.zeros(problem.filter_shape, "float16")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert cupyconv.prepare(host, problem).array is host
        stream.end_capture()


def test_measurement_is_refused_in_capture(own_cache, monkeypatch):
    with loaded("transpose") as call:
        pass
    monkeypatch.setattr(cupyconv, "benchmark", True)
    cupy.get_default_memory_pool().free_all_blocks()
    arguments = dict(call.given, stride=1, dilation=2, output_padding=1)
    with refused_in_capture("nothing can be measured while a graph is captured"):
        cupyconv.conv_transpose(**arguments)
    call()
    calls.forget()
    graph = captured(call)  # uses the measured plan
    call.change()
    graph.launch()
    call.require("transpose")


@pytest.mark.parametrize("use", ["first run", "fastest", "fastest on arrays"])
def test_bound_call_is_not_measured_in_capture(use, own_cache, monkeypatch):
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem = cupyconv.ConvProblem((2, 3, 8), (4, 3, 2), dtype="complex64")
    x, w = cupy.ones(problem.output_shape, problem.dtype), cupy.ones((4, 3, 2), problem.dtype)
    y = cupy.ones(problem.input_shape, problem.dtype)
    call = cupyconv.bind("transpose", x, w, add=y, out=y)
    run = {"first run": call, "fastest": lambda *_, **__: call.fastest()}.get(use, call.fastest)
    with refused_in_capture("nothing can be measured while a graph is captured"):
        run(x, w, add=y, out=y)
    assert (y == 1).all()


def test_measured_plan_is_refused_in_capture(own_cache):
    cupy.get_default_memory_pool().free_all_blocks()
    with refused_in_capture("plan was called with measure=True. Call it before the capture"):
        cupyconv.plan(FAMILY_CASES[0].problem, measure=True)


def test_workspace_needs_memory_pools_in_capture(monkeypatch):
    call = pass_call(split_layer(), "forward")
    call()
    attributes = devices._attributes
    key = api.CU.DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
    monkeypatch.setattr(devices, "_attributes", lambda device: {**attributes(device), key: 0})
    call()
    with refused_in_capture("has no memory pools.*workspace_limit = 0", DeviceError):
        call()
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    graph = captured(call, "global")
    call.change()
    graph.launch()
    call.require("without a workspace")


def test_capture_page_code_runs():
    page = Path(__file__).parents[2] / "notebooks" / "how-to" / "capture-graphs.md"
    (code,) = re.findall(r"^```.code-block. text\n(.*?)^```$", page.read_text(), re.M | re.S)
    exec(compile(code, page, "exec"), {})
