"""Measured plans: the fastest candidate is chosen once and remembered.

CuPy launches empty kernels on an emulated device, and the measured times are made up.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import cupy
import numpy as np
import pytest

import cupyconv
from cupyconv import (
    ConvError,
    ConvProblem,
    ConvTypeError,
    arrays,
    backends,
    cache_folder,
    measuring,
)
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import runtime
from cupyconv.planning import Request, plan_pass
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests.device import machine
from tests.device.fixtures import before_each_launch

HOST_SECONDS = 5e-6
PROBLEM = ConvProblem((4, 32, 20, 20), (32, 32, 3, 3), dtype="float16")


class Gpu:
    """Recorder of launches on an emulated device, with made-up times.

    Attributes:
        launched: all launches.
        loaded: sets of variants that were loaded together.
        seconds: time of a call by implementation; 1 ms for others.
        timed: number of samples.
        at_launch: function called before each launch of a kernel file.
    """

    def __init__(self):
        self.launched, self.loaded = [], []
        self.seconds = {}
        self.timed = 0
        self.at_launch = {}

    def begin(self, item, _):
        self.at_launch.get(item.source, bool)()
        self.launched.append(item)

    def time(self, call, times, lead):
        self.timed += 1
        for _ in range(times):
            call()
        (candidate,) = call.args
        default = self.seconds.get(candidate.implementation, 1e-3)
        seconds = self.seconds.get(candidate.tiling, default) * (1 + candidate.splits / 1000)
        return measuring.Timed(seconds, HOST_SECONDS)


@pytest.fixture
def gpu(monkeypatch, empty_kernels):
    """Use the device of compute capability 8.0, which has few candidate families."""
    recorder, load = Gpu(), runtime.CupyRuntime.load

    def record_load(self, launches):
        recorder.loaded.append({item.defines for item in launches})
        load(self, launches)

    before_each_launch(monkeypatch, recorder.begin)
    monkeypatch.setattr(runtime.CupyRuntime, "load", record_load)
    monkeypatch.setattr(measuring, "timed", recorder.time)
    with cupy.cuda.Device(1):
        yield recorder


def request(pass_="forward"):
    return Request(PROBLEM, pass_, backends.current_device())


def call(**more):
    x = cupy.ones(PROBLEM.input_shape, PROBLEM.dtype)
    w = cupy.ones(PROBLEM.filter_shape, PROBLEM.dtype)
    return cupyconv.conv_forward(x, w, **more)


def failing(error, after=0):
    """Return a function that raises the error from call ``after`` on."""
    calls = count()

    def call():
        if next(calls) >= after:
            raise error

    return call


def files(folder):
    return sorted((folder / "measured").glob("*"))


DEPTHWISE = ConvProblem((8, 96, 28, 28), (96, 1, 7, 7), groups=96, padding=3, dtype="float16")


def test_fastest_candidate_is_planned(gpu):
    gpu.seconds = {"cuda-toeplitz": 1e-4}
    assert cupyconv.plan(DEPTHWISE, "sm_80")["forward"].implementation == "cuda-direct"
    measured = cupyconv.plan(DEPTHWISE, measure=True)
    for planned in measured:
        assert planned.implementation == "cuda-toeplitz"
        launches = 2 if planned.splits > 1 else 1  # the second launch takes 1 us
        assert f"measured {99 + launches} us" in planned.reason
    assert cupyconv.Plan.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_planned_candidate_wins_unless_clearly_slower(gpu, monkeypatch, broken):
    """If the planned candidate cannot run, the fastest other one is chosen."""
    candidates = measuring.candidates_of(request(), "auto")
    seconds = [1e-3, 2e-3, *[3e-3] * (len(candidates) - 3), 0.99e-3]
    failures = []

    def time(call, _count, _lead):
        number = candidates.index(*call.args)
        if number == broken:
            failures.append(number)
            raise REFUSED
        return measuring.Timed(seconds[number], HOST_SECONDS)

    monkeypatch.setattr(measuring, "timed", time)
    result = measuring._measure(candidates, lambda _: None, lambda _: None)
    assert result.fastest == (len(candidates) - 1 if broken == 0 else 0)
    assert failures == ([] if broken is None else [broken]), "a failed candidate was tried again"
    assert list(result.left_out) == failures


@pytest.mark.parametrize(
    ("taken", "calls"), [(1.0, 1), (1e-3, 1), (1.1e-4, 10), (1e-9, 50), (0.0, 50)]
)
def test_sample_fills_a_millisecond(gpu, monkeypatch, taken, calls):
    """Two single calls come first: a warm-up, and one to choose the number of calls.

    The GPU waits before a sample until the host has queued its calls.
    """
    counts = defaultdict(list)

    def time(call, count, lead):
        counts[call.args[0]].append(count)
        sampled = len(counts[call.args[0]]) > 2
        assert lead == (measuring.LEAD * count * HOST_SECONDS if sampled else 0)
        return measuring.Timed(taken, HOST_SECONDS)

    monkeypatch.setattr(measuring, "timed", time)
    cupyconv.plan(PROBLEM, measure=True)
    assert len(counts) > 3
    for samples in counts.values():
        assert samples == [1, 1, *[calls] * measuring.ROUNDS]


def test_candidates_take_turns(gpu, monkeypatch):
    """Every round times every candidate, so a changing clock affects all of them."""
    order = []

    def time(call, _count, _lead):
        order.append(call.args[0])
        return measuring.Timed(1e-3, HOST_SECONDS)

    monkeypatch.setattr(measuring, "timed", time)
    candidates = list(measuring.candidates_of(request(), "auto"))
    measuring._measure(candidates, lambda _: None, lambda _: None)
    assert order[2 * len(candidates) :] == candidates * measuring.ROUNDS


def test_benchmark_option_measures_calls(gpu, monkeypatch):
    gpu.seconds = {"cuda-generic": 1e-4}
    call()
    assert gpu.timed == 0
    assert gpu.launched[-1].source == "conv_gather.cu"
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"
    timed = gpu.timed
    assert timed > len(contenders(request(), "auto", 5))
    gpu.launched.clear()
    call()
    call(activation="relu")
    assert gpu.timed == timed
    assert [item.source for item in gpu.launched] == ["conv_forward.cu"] * 2
    call(impl="cuda-gather")  # measured separately
    assert gpu.launched[-1].source == "conv_gather.cu"
    assert gpu.timed > timed


def recorded_plans(patch):
    """Return the list of plans for which the backend prepares launches."""
    plans, prepare = [], backends.GpuBackend.prepare
    patch.setattr(
        backends.GpuBackend,
        "prepare",
        lambda self, request, planned, *more: (
            plans.append(planned),
            prepare(self, request, planned, *more),
        )[1],
    )
    return plans


def test_candidates_are_prepared_once_and_loaded_together(gpu, monkeypatch):
    """Times exclude host work, and kernels are compiled in parallel."""
    plans = recorded_plans(monkeypatch)
    cupyconv.plan(PROBLEM, measure=True)
    # The planned candidates are also prepared when the calls are bound.
    assert 3 < len({replace(one, reason="") for one in plans}) == len(plans) - len(PASSES)
    together, *separate = gpu.loaded
    forward = [planned for planned in plans if planned.pass_ == "forward"]
    assert len(together) > 1
    # The planned and the chosen candidate are prepared again, but not loaded.
    assert all(loaded <= together for loaded in separate[: len(forward) - 2])


def test_repeated_call_is_prepared_once(gpu, monkeypatch):
    prepared = recorded_plans(monkeypatch)
    call()
    launches_per_call = len(gpu.launched)
    for _ in range(2):
        call()
    for _ in range(3):
        call(stride=np.array([1, 1]))  # cannot be hashed
    assert len(gpu.launched) == 6 * launches_per_call
    assert len(prepared) == len(gpu.loaded) == 1 + 3
    for change in ({"activation": "relu"}, {"padding": 1}, {"impl": "cuda-gather"}):
        before = len(prepared)
        call(**change)
        call(**change)
        assert len(prepared) == before + 1
    with pytest.raises(ConvTypeError, match="must be made of integers"):
        call(stride=1.0)  # equal to 1, so a cache lookup would accept it


def test_functions_do_not_reuse_measured_call_of_a_filter(gpu, monkeypatch):
    """The call of a filter reads a copy of it; the function copies the filter that is passed."""
    monkeypatch.setattr(cupyconv, "benchmark", True)
    monkeypatch.setattr(measuring, "fastest", lambda request, impl, *_: plan_pass(request, impl))
    how = {"data_format": "NHWC", "filter_format": "OIHW", "impl": "cuda-hopper"}
    with cupy.cuda.Device(0):
        x, w = cupy.ones((1, 9, 9, 64), "float16"), cupy.ones((64, 64, 3, 3), "float16")
        cupyconv.bind("forward", x, w, **how).with_filter(w)(x)
        cupyconv.conv_forward(x, w, **how)
    assert [item.source for item in gpu.launched[1:]] == [
        *("conv_hopper.cu", "conv_arrange.cu", "conv_hopper.cu")
    ]


def test_measured_plan_is_returned_without_lock(gpu, monkeypatch):
    planned = cupyconv.plan(PROBLEM, measure=True)
    monkeypatch.setattr(measuring, "_measuring", None)  # cannot be entered
    assert cupyconv.plan(PROBLEM, measure=True) == planned


def test_choice_outlives_the_process(gpu, own_cache):
    gpu.seconds = {"cuda-generic": 1e-4}
    first = cupyconv.plan(PROBLEM, measure=True)
    assert len(files(own_cache)) == 3
    entry = json.loads(files(own_cache)[0].read_text())
    assert entry["device"] == backends.current_device().name
    measuring.forget()
    gpu.seconds, gpu.timed = {"cuda-gather": 1e-6}, 0
    assert cupyconv.plan(PROBLEM, measure=True) == first
    assert gpu.timed == 0


DAMAGES = (
    lambda text: text[: len(text) // 2],
    lambda text: "[]",
    lambda text: text.replace('"fastest": ', '"fastest": 7'),
    lambda text: text.replace('"fastest": ', '"fastest": -'),
    lambda text: text.replace('"seconds"', '"minutes"'),
    lambda text: json.dumps(
        {**json.loads(text), "seconds": dict.fromkeys(map(str, range(9)), 10**400)}
    ),
    lambda text: "[" * 100_000,
    lambda text: "",
    lambda text: text.replace('"left_out": {', '"left_out": {"99": "why"'),
    lambda text: json.dumps(
        {**json.loads(text), "seconds": dict.fromkeys(json.loads(text)["seconds"], 0.0)}
    ),
)


def test_damaged_file_is_measured_again(gpu, own_cache):
    gpu.seconds = {"cuda-generic": 1e-4}
    whole = cupyconv.plan(PROBLEM, measure=True)
    for damage in DAMAGES:
        for path in files(own_cache):
            path.write_text(damage(path.read_text()))
        for measured in (True, False):
            measuring.forget()
            gpu.timed = 0
            assert cupyconv.plan(PROBLEM, measure=True) == whole
            assert (gpu.timed > 0) == measured


def test_concurrent_measurement_is_adopted(gpu, monkeypatch, own_cache):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    contents = {path: path.read_text() for path in files(own_cache)}
    for path in contents:
        path.unlink()
    measuring.forget()
    time = gpu.time

    def slow(call, count, lead):
        for path, text in contents.items():
            cache_folder.keep(path, text.encode())
        return time(call, count, lead)

    gpu.seconds = {"cuda-gather": 1e-6}
    monkeypatch.setattr(measuring, "timed", slow)
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert {path: path.read_text() for path in files(own_cache)} == contents


@pytest.mark.parametrize("what", ["driver", "chip", "version", "limit", "precision"])
def test_choice_is_keyed_by_its_conditions(gpu, monkeypatch, what):
    cupyconv.plan(PROBLEM, measure=True)
    measuring.forget()
    gpu.timed = 0
    more = {}
    if what == "driver":
        monkeypatch.setattr(measuring, "driver_version", lambda: 13020)
    elif what == "chip":
        backend = backends.of(arrays.Home.GPU)
        monkeypatch.setattr(backend, "device", replace(backend.device, name="another sm_80"))
    elif what == "version":
        monkeypatch.setattr(cupyconv, "__version__", "99")
    elif what == "limit":
        more = {"workspace_limit": 0}
    else:
        more = {"precision": "tf32"}
    cupyconv.plan(PROBLEM, measure=True, **more)
    assert gpu.timed > 0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners of this kind")
@pytest.mark.parametrize("which", ["cache", "measured", "file"])
def test_writable_cache_is_not_trusted(gpu, own_cache, which):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    paths = {"cache": [own_cache], "measured": [own_cache / "measured"], "file": files(own_cache)}
    for path in paths[which]:
        path.chmod(0o777)
    measuring.forget()
    cache_folder._warn.cache_clear()
    gpu.timed = 0
    warning = nullcontext() if which == "file" else pytest.warns(RuntimeWarning, match="chmod go-w")
    with warning:
        cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed > 0


def test_unwritable_folder_is_ignored(gpu, monkeypatch, own_cache):
    (own_cache / "file").write_text("")
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(own_cache / "file"))
    gpu.seconds = {"cuda-generic": 1e-4}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    timed = gpu.timed
    cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed == timed


REFUSED = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument\nwith more lines")


@pytest.mark.parametrize(
    "error",
    [
        KernelCompileError("no registers", ""),
        MemoryError(),
        REFUSED,
        ValueError(),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    ],
)
def test_failed_candidate_is_left_out_with_reason(gpu, error, own_cache):
    gpu.seconds = {"cuda-gather": 1e-6}
    gpu.at_launch["conv_gather.cu"] = failing(error)
    measured = cupyconv.plan(PROBLEM, measure=True)
    forward = measured["forward"]
    assert forward.implementation == "cuda-generic"
    assert "fastest of 1: " in forward.reason
    words = type(error).__name__ + (f": {error}" if str(error) else "")
    names = [measuring._name(item) for item in measuring.candidates_of(request(), "auto")]
    broken = next(name for name in names if name.startswith("cuda-gather "))
    assert f"left out: {broken} ({words.splitlines()[0]})" in forward.reason
    assert "more lines" not in forward.reason
    assert cupyconv.plan(PROBLEM, measure=True) == measured
    is_kept = error is REFUSED or isinstance(error, KernelCompileError)  # the error is permanent
    assert len(files(own_cache)) == (3 if is_kept else 0)
    gpu.at_launch["conv_forward.cu"] = failing(error)
    measuring.forget()
    with pytest.raises(type(error)):
        cupyconv.plan(PROBLEM, measure=True, workspace_limit=0)


def test_candidate_failing_later_is_left_out(gpu):
    """A kernel may fault only after many launches."""
    gpu.seconds = {"cuda-gather": 1e-6}
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED, after=200)
    forward = cupyconv.plan(PROBLEM, measure=True)["forward"]
    assert [item.source for item in gpu.launched].count("conv_gather.cu") == 200
    assert forward.implementation == "cuda-generic"
    assert "CUDA_ERROR_INVALID_VALUE" in forward.reason


@pytest.mark.parametrize("chained", [False, True])
def test_failed_candidate_holds_no_memory(gpu, chained):
    """Memory of a failed candidate must be free while the others are measured.

    A chained error, such as CuPy's memory error, also keeps the frames of its cause.
    """
    references, alive = [], []

    class Buffer:
        pass

    def run():
        workspace = Buffer()
        references.append(weakref.ref(workspace))
        try:
            raise ValueError
        except ValueError as cause:
            if chained:
                raise RuntimeError(*REFUSED.args) from cause
        raise REFUSED

    def watch():
        alive.append(sum(reference() is not None for reference in references))

    gpu.at_launch = {"conv_gather.cu": run, "conv_forward.cu": watch}
    cupyconv.plan(PROBLEM, measure=True)
    assert len(references) >= 3
    assert alive
    assert not any(alive)


# Arrays dropped while a device has failed cannot free their memory.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_lost_context_ends_measurement(gpu, own_cache):
    """If measuring went on, one candidate's fault would exclude all later candidates."""
    fault = machine.DeviceFault("emulated fault")
    gpu.at_launch["conv_gather.cu"] = lambda: machine.DEVICES[1].fail(fault)
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="LAUNCH_FAILED"):
        cupyconv.plan(PROBLEM, measure=True)
    assert machine.revive() == ["emulated fault"]
    assert gpu.launched[-1].source == "conv_gather.cu"
    assert files(own_cache) == []
    gpu.at_launch.clear()
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"


def test_reasons_survive_json(gpu):
    gpu.at_launch["conv_gather.cu"] = failing(ValueError("a\ttab, a\rreturn, \x1b[31mred"))
    measured = cupyconv.plan(PROBLEM, measure=True)
    assert "left out" in measured["forward"].reason
    assert cupyconv.Plan.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_generic_kernel_replaces_late_failures(gpu, monkeypatch, calls):
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED, calls)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"


def test_generic_kernel_is_the_last_resort(gpu, monkeypatch):
    """The generic kernel is measured although it is not among the best candidates."""
    gpu.seconds = {"cuda-generic": 1e-9}
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    assert [item.implementation for item in contenders(request(), "auto", 1)] == ["cuda-gather"]
    for pass_ in PASSES:
        pass_request = request(pass_)
        names = [item.implementation for item in measuring.candidates_of(pass_request, "auto")]
        assert names == ["cuda-gather", "cuda-generic"]
        assert len(contenders(pass_request, "cuda-generic", 2)) == 1, "it has one candidate"
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"
    gpu.at_launch.clear()
    assert cupyconv.plan(PROBLEM, measure=True)["backprop_input"].implementation == "cuda-gather"


def test_measurement_respects_workspace_limit(gpu, monkeypatch):
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    for planned in cupyconv.plan(PROBLEM, measure=True):
        assert planned.workspace_bytes == 0
    assert any(item.workspace_bytes for item in contenders(request("backprop_filter"), "auto", 5))


def test_only_current_gpu_is_measured(gpu):
    cupyconv.plan(PROBLEM, "sm_80", measure=True)
    with pytest.raises(ConvError, match=r"emulated sm_80 \(sm_80\), the requested device is sm_90"):
        cupyconv.plan(PROBLEM, "sm_90", measure=True)
    with pytest.raises(ConvError, match="requested device is cpu"):
        cupyconv.plan(PROBLEM, "cpu", measure=True)
