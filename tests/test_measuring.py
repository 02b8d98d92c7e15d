"""Measured plans: the fastest is chosen, once, and remembered; on a stand-in for a GPU."""

import json
import os
import weakref
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, DeviceError, arrays, backends, measuring
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import compiler, gather, launches
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES

PROBLEM = ConvProblem((4, 32, 20, 20), (32, 32, 1, 1), dtype="float16")


class StandIn:
    """A GPU that computes nothing: its kernels are recorded, and their time is made up."""

    def __init__(self):
        self.launched = []
        self.loaded = []
        self.seconds = {}  # by implementation; others take 1 ms
        self.broken = {}  # errors by source file
        self.timed = 0
        self.lost = False

    def load(self, launches):
        self.loaded.append({launch.defines for launch in launches})

    def kernel(self, launch):
        if launch.source in self.broken:
            raise self.broken[launch.source]
        return lambda *_, **__: self.launched.append(launch)

    def allow(self, kernel, shared_bytes):
        pass

    def address(self, array):
        return 0  # aligned

    def time(self, call, count):
        self.timed += 1
        for _ in range(count):
            call()
        (candidate,) = call.args
        return self.seconds.get(candidate.implementation, 1e-3) * (1 + candidate.splits / 1000)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    runtime = StandIn()
    backend = backends.GpuBackend(Device("Imaginary 9000", "sm_80"), runtime)
    backend.empty = lambda shape, dtype: np.empty(shape, arrays.numpy_dtype(dtype))
    monkeypatch.setattr(backends, "of", lambda home: backend)
    monkeypatch.setattr(measuring, "seconds", runtime.time)
    monkeypatch.setattr(measuring, "capturing", lambda: False)
    monkeypatch.setattr(measuring, "lost", lambda: runtime.lost)
    monkeypatch.setattr(measuring, "driver_version", lambda: 13010)
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    measuring.forget()
    yield runtime
    measuring.forget()


def call(**more):
    x = np.ones(PROBLEM.input_shape, PROBLEM.dtype)
    w = np.ones(PROBLEM.filter_shape, PROBLEM.dtype)
    return cupyconv.conv_forward(x, w, **more)


def files(folder):
    return sorted((folder / "measured").glob("*"))


def test_the_fastest_is_planned(gpu):
    gpu.seconds = {"cuda-generic": 1e-4}
    assert cupyconv.plan(PROBLEM, "sm_80")["forward"].implementation == "cuda-gather"
    measured = cupyconv.plan(PROBLEM, measure=True)
    for planned in measured:
        assert planned.implementation == "cuda-generic"
        assert "measured 100 us" in planned.reason
    assert cupyconv.Plan.from_json(measured.to_json()) == measured


def test_a_difference_that_may_be_chance_changes_nothing(gpu):
    gpu.seconds = {"cuda-generic": 0.99e-3}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_the_planned_one_stays_unless_another_is_clearly_faster(gpu, monkeypatch, broken):
    """Whichever of the others cannot run; where it cannot itself, the fastest is taken."""
    request = Request(PROBLEM, "forward", Device("Imaginary 9000", "sm_80"))
    candidates = measuring.candidates_of(request, "auto")
    taken = [1e-3, 2e-3, *[3e-3] * (len(candidates) - 3), 0.99e-3]
    failed = []

    def time(call, count):
        number = candidates.index(*call.args)
        if number == broken:
            failed.append(number)
            raise REFUSED
        return taken[number]

    monkeypatch.setattr(measuring, "seconds", time)
    found = measuring._measure(candidates, lambda _: None, lambda _: None)
    assert found.fastest == (len(candidates) - 1 if broken == 0 else 0)
    assert failed == ([] if broken is None else [broken]), "not tried again"
    assert list(found.left_out) == failed


@pytest.mark.parametrize(
    ("taken", "calls"), [(1.0, 1), (1e-3, 1), (1.1e-4, 10), (1e-9, 50), (0.0, 50)]
)
def test_a_sample_has_as_many_calls_as_a_millisecond_takes(gpu, monkeypatch, taken, calls):
    """After one that pays for what a first call does, and one that says how many."""
    counts = defaultdict(list)

    def time(call, count):
        counts[call.args[0]].append(count)
        return taken

    monkeypatch.setattr(measuring, "seconds", time)
    cupyconv.plan(PROBLEM, measure=True)
    assert len(counts) > 3
    for found in counts.values():
        assert found == [1, 1, *[calls] * measuring.ROUNDS]


def test_candidates_take_turns(gpu, monkeypatch):
    """So that a clock that changes meets them all; each turn has every one."""
    order = []
    monkeypatch.setattr(measuring, "seconds", lambda call, _: (order.append(call.args[0]), 1e-3)[1])
    request = Request(PROBLEM, "forward", Device("Imaginary 9000", "sm_80"))
    candidates = list(measuring.candidates_of(request, "auto"))
    measuring._measure(candidates, lambda _: None, lambda _: None)
    assert order[2 * len(candidates) :] == candidates * measuring.ROUNDS


def test_candidates_are_named_by_what_tells_them_apart():
    (planned, *_) = cupyconv.plan(PROBLEM, "sm_80")
    for splits, words in ((1, ""), (2, " x 2"), (3, " x 3")):
        named = replace(planned, splits=splits)
        assert measuring._name(named) == f"cuda-gather {planned.tile}{words}"
        assert measuring._name(replace(named, tile=None)) == f"cuda-gather{words}"


def test_calls_measure_when_they_are_told_to(gpu, monkeypatch):
    gpu.seconds = {"cuda-generic": 1e-4}
    call()
    assert gpu.timed == 0
    assert [one.source for one in gpu.launched] == ["conv_gather.cu"]
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"
    timed = gpu.timed
    assert timed > len(contenders(Request(PROBLEM, "forward", Device.of("sm_80")), "auto", 5))
    gpu.launched.clear()
    call()
    call(activation="relu")
    assert gpu.timed == timed
    assert [one.source for one in gpu.launched] == ["conv_forward.cu"] * 2
    call(impl="cuda-gather")  # a choice of its own
    assert gpu.launched[-1].source == "conv_gather.cu"
    assert gpu.timed > timed


def test_what_is_measured_is_worked_out_once_and_loaded_at_once(gpu, monkeypatch):
    """The host's work is no part of the times, and kernels are compiled side by side."""
    prepared, prepare = [], launches.prepare
    monkeypatch.setattr(launches, "prepare", lambda *a: (prepared.append(a[0]), prepare(*a))[1])
    cupyconv.plan(PROBLEM, measure=True)
    assert len(prepared) == len(set(prepared)) > 3
    together, *singly = gpu.loaded
    forward = [one for one in prepared if one.pass_ == "forward"]
    assert len(together) > 1
    assert all(loaded <= together for loaded in singly[: len(forward)])


def test_a_repeated_call_is_worked_out_once(gpu, monkeypatch):
    prepared, loaded = [], []
    prepare, kernel = gather.prepare, gpu.kernel
    monkeypatch.setattr(gather, "prepare", lambda *a: (prepared.append(a), prepare(*a))[1])
    gpu.kernel = lambda launch: (loaded.append(launch), kernel(launch))[1]
    for _ in range(3):
        call()
        call(stride=[1, 1])  # cannot be hashed
    assert len(gpu.launched) == 6
    assert len(prepared) == len(loaded) == 1 + 3
    for change in ({"activation": "relu"}, {"padding": 1}, {"impl": "cuda-gather"}):
        count = len(prepared)
        call(**change)
        call(**change)
        assert len(prepared) == count + 1
    with pytest.raises(ConvTypeError, match="must be made of integers"):
        call(stride=1.0)  # equals 1, and so would find what that came to


def test_what_is_remembered_waits_for_nobody_who_measures(gpu, monkeypatch):
    planned = cupyconv.plan(PROBLEM, measure=True)
    monkeypatch.setattr(measuring, "_measuring", None)  # cannot be entered
    assert cupyconv.plan(PROBLEM, measure=True) == planned


def test_a_choice_outlives_the_process(gpu, tmp_path):
    gpu.seconds = {"cuda-generic": 1e-4}
    first = cupyconv.plan(PROBLEM, measure=True)
    assert len(files(tmp_path)) == 3
    entry = json.loads(files(tmp_path)[0].read_text())
    assert entry["device"] == "Imaginary 9000"
    measuring.forget()
    gpu.seconds, gpu.timed = {"cuda-gather": 1e-6}, 0
    assert cupyconv.plan(PROBLEM, measure=True) == first
    assert gpu.timed == 0


@pytest.mark.parametrize(
    "change",
    [
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
    ],
)
def test_a_damaged_file_is_measured_again(gpu, tmp_path, change):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    for path in files(tmp_path):
        path.write_text(change(path.read_text()))
    measuring.forget()
    gpu.timed = 0
    planned = cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed > 0
    assert planned["forward"].implementation == "cuda-generic"
    measuring.forget()
    gpu.timed = 0
    assert cupyconv.plan(PROBLEM, measure=True) == planned
    assert gpu.timed == 0


def test_what_another_process_has_measured_meanwhile_is_taken(gpu, monkeypatch, tmp_path):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    theirs = {path: path.read_text() for path in files(tmp_path)}
    for path in theirs:
        path.unlink()
    measuring.forget()
    time = gpu.time

    def slow(call, count):
        for path, text in theirs.items():
            compiler.keep(path, text.encode())
        return time(call, count)

    gpu.seconds = {"cuda-gather": 1e-6}
    monkeypatch.setattr(measuring, "seconds", slow)
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert {path: path.read_text() for path in files(tmp_path)} == theirs


@pytest.mark.parametrize("what", ["driver", "chip", "version", "limit", "precision"])
def test_a_choice_holds_for_what_it_was_measured_on(gpu, monkeypatch, what):
    cupyconv.plan(PROBLEM, measure=True)
    measuring.forget()
    gpu.timed = 0
    more = {}
    if what == "driver":
        monkeypatch.setattr(measuring, "driver_version", lambda: 13020)
    elif what == "chip":
        backends.of(arrays.Home.GPU).device = Device("Imaginary 9001", "sm_80")
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
def test_what_others_may_write_is_not_believed(gpu, tmp_path, which):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    opened = {"cache": [tmp_path], "measured": [tmp_path / "measured"], "file": files(tmp_path)}
    for path in opened[which]:
        path.chmod(0o777)
    measuring.forget()
    compiler._warn.cache_clear()
    gpu.timed = 0
    said = nullcontext() if which == "file" else pytest.warns(RuntimeWarning, match="chmod go-w")
    with said:
        cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed > 0


def test_a_folder_that_cannot_be_written_is_done_without(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file"))
    gpu.seconds = {"cuda-generic": 1e-4}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    timed = gpu.timed
    cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed == timed


REFUSED = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument\nwith more lines")


@pytest.mark.parametrize(
    "error", [KernelCompileError("no registers", ""), MemoryError(), REFUSED, ValueError()]
)
def test_what_cannot_run_is_left_out_with_its_reason(gpu, error, tmp_path):
    gpu.seconds = {"cuda-gather": 1e-6}
    gpu.broken = {"conv_gather.cu": error}
    measured = cupyconv.plan(PROBLEM, measure=True)
    forward = measured["forward"]
    assert forward.implementation == "cuda-generic"
    assert "fastest of 1: " in forward.reason
    words = type(error).__name__ + (f": {error}" if str(error) else "")
    request = Request(PROBLEM, "forward", Device("Imaginary 9000", "sm_80"))
    names = [measuring._name(one) for one in measuring.candidates_of(request, "auto")]
    broken = next(name for name in names if name.startswith("cuda-gather "))
    assert f"left out: {broken} ({words.splitlines()[0]})" in forward.reason
    assert "more lines" not in forward.reason
    assert cupyconv.plan(PROBLEM, measure=True) == measured
    is_kept = error is REFUSED or isinstance(error, KernelCompileError)  # it will be so again
    assert len(files(tmp_path)) == (3 if is_kept else 0)
    gpu.broken["conv_forward.cu"] = error
    measuring.forget()
    with pytest.raises(type(error)):
        cupyconv.plan(PROBLEM, measure=True, workspace_limit=0)


def test_a_lack_of_memory_is_not_remembered_for_later(gpu, tmp_path):
    gpu.broken = {"conv_gather.cu": MemoryError()}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert files(tmp_path) == []
    measuring.forget()
    gpu.broken = {}
    gpu.seconds = {"cuda-gather": 1e-6}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"
    assert len(files(tmp_path)) == 3


def test_one_that_fails_later_is_left_out_too(gpu):
    """A kernel may fault only after it was launched many times."""
    gpu.seconds = {"cuda-gather": 1e-6}
    kernel, calls = gpu.kernel, []

    def flaky(launch):
        def run(*_, **__):
            calls.append(launch)
            if len(calls) > 200:
                raise REFUSED

        return run if launch.source == "conv_gather.cu" else kernel(launch)

    gpu.kernel = flaky
    forward = cupyconv.plan(PROBLEM, measure=True)["forward"]
    assert len(calls) > 200
    assert forward.implementation == "cuda-generic"
    assert "CUDA_ERROR_INVALID_VALUE" in forward.reason


@pytest.mark.parametrize("chained", [False, True])
def test_what_fails_holds_no_memory(gpu, chained):
    """While the others are measured, arrays of one that failed may be what they lack.

    An error that another one led to, as CuPy's of memory, has that one's frames too.
    """
    kept, kernel, alive = [], gpu.kernel, []

    class Buffer:
        pass

    def hungry(launch):
        def run(*_, **__):
            workspace = Buffer()
            kept.append(weakref.ref(workspace))
            try:
                raise ValueError
            except ValueError as cause:
                if chained:
                    raise RuntimeError(*REFUSED.args) from cause
            raise REFUSED

        def watching(*_, **__):
            alive.append(sum(one() is not None for one in kept))

        kernel(launch)
        return run if launch.source == "conv_gather.cu" else watching

    gpu.kernel = hungry
    cupyconv.plan(PROBLEM, measure=True)
    assert len(kept) >= 3
    assert alive
    assert not any(alive)


def test_what_cannot_be_told_from_bad_luck_is_not_kept(gpu, tmp_path):
    gpu.broken = {"conv_gather.cu": RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert files(tmp_path) == []


def test_a_lost_context_ends_the_measuring(gpu, tmp_path):
    """Else all that come after would be left out for what another did."""
    gpu.lost = True
    gpu.broken = {"conv_gather.cu": RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")}
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        cupyconv.plan(PROBLEM, measure=True)
    assert files(tmp_path) == []
    gpu.lost, gpu.broken = False, {}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"


def test_reasons_survive_json_whatever_they_say(gpu):
    gpu.broken = {"conv_gather.cu": ValueError("a\ttab, a\rreturn, \x1b[31mred")}
    measured = cupyconv.plan(PROBLEM, measure=True)
    assert "left out" in measured["forward"].reason
    assert cupyconv.Plan.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_the_generic_kernel_is_the_last_resort_however_late_others_fail(gpu, monkeypatch, calls):
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    kernel, made = gpu.kernel, []

    def failing(launch):
        def run(*_, **__):
            made.append(launch)
            if len(made) > calls:
                raise REFUSED

        return run if launch.source == "conv_gather.cu" else kernel(launch)

    gpu.kernel = failing
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"


def test_the_generic_kernel_is_the_last_resort(gpu, monkeypatch):
    """Where it is not even among the most promising."""
    gpu.seconds = {"cuda-generic": 1e-9}
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    request = Request(PROBLEM, "forward", Device.of("sm_80"))
    assert [one.implementation for one in contenders(request, "auto", 1)] == ["cuda-gather"]
    for pass_ in PASSES:
        asked = replace(request, pass_=pass_)
        names = [one.implementation for one in measuring.candidates_of(asked, "auto")]
        assert names == ["cuda-gather", "cuda-generic"]
        assert len(contenders(asked, "cuda-generic", 2)) == 1, "it has one way"
    gpu.broken = {"conv_gather.cu": REFUSED}
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"
    gpu.broken = {}
    assert cupyconv.plan(PROBLEM, measure=True)["backprop_input"].implementation == "cuda-gather"


def test_nothing_is_measured_while_a_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(measuring, "capturing", lambda: True)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    with pytest.raises(ConvError, match="while a graph is captured"):
        call()
    assert gpu.launched == []
    monkeypatch.setattr(measuring, "capturing", lambda: False)
    call()
    monkeypatch.setattr(measuring, "capturing", lambda: True)
    call()  # remembered by now


def test_a_workspace_limit_is_kept_by_what_is_measured(gpu, monkeypatch):
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    for planned in cupyconv.plan(PROBLEM, measure=True):
        assert planned.workspace_bytes == 0
    request = Request(PROBLEM, "backprop_filter", Device.of("sm_80"))
    assert any(one.workspace_bytes for one in contenders(request, "auto", 5))


def test_only_the_current_gpu_is_measured(gpu):
    cupyconv.plan(PROBLEM, "sm_80", measure=True)
    with pytest.raises(ConvError, match=r"Imaginary 9000 \(sm_80\), asked for is sm_90"):
        cupyconv.plan(PROBLEM, "sm_90", measure=True)
    with pytest.raises(ConvError, match="asked for is cpu"):
        cupyconv.plan(PROBLEM, "cpu", measure=True)


def test_measuring_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="GPU"):
        cupyconv.plan(PROBLEM, measure=True)


def test_numpy_arrays_are_not_measured(monkeypatch):
    expected = call()
    monkeypatch.setattr(cupyconv, "benchmark", True)
    assert (call() == expected).all()


def test_the_best_of_each_family_is_measured():
    request = Request(PROBLEM, "forward", Device.of("sm_80"))
    chosen = contenders(request, "auto", 5)
    assert {one.implementation for one in chosen} == {"cuda-gather", "cuda-generic"}
    assert chosen[0].implementation == "cuda-gather"
    assert len(set(chosen)) == 5
    assert contenders(request, "auto", 1) == chosen[:1]
