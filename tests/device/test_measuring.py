"""Measured plans: the fastest is chosen, once, and remembered.

Launched is on an emulated device, by CuPy, with kernels that do nothing and times that are made up.
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
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, arrays, backends, measuring
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import compiler, gather, launch, launches
from cupyconv.planning import Request
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests.device import machine
from tests.device.fixtures import before_each_launch

PROBLEM = ConvProblem((4, 32, 20, 20), (32, 32, 3, 3), dtype="float16")


class Gpu:
    """What an emulated device is asked to do, and how long that takes, which is made up.

    Attributes:
        launched: what was launched.
        loaded: the variants that were loaded together.
        seconds: of a call, by implementation; others take 1 ms.
        timed: samples that were taken.
        at_launch: what is done before each launch of a kernel file.
    """

    def __init__(self):
        self.launched, self.loaded = [], []
        self.seconds = {}
        self.timed = 0
        self.at_launch = {}

    def begin(self, one, _):
        self.at_launch.get(one.source, bool)()
        self.launched.append(one)

    def time(self, call, times):
        self.timed += 1
        for _ in range(times):
            call()
        (candidate,) = call.args
        return self.seconds.get(candidate.implementation, 1e-3) * (1 + candidate.splits / 1000)


@pytest.fixture
def gpu(monkeypatch, empty_kernels):
    """The device of compute capability 8.0, for which few families compete."""
    found, load = Gpu(), launch.CupyRuntime.load

    def watched(self, launches):
        found.loaded.append({one.defines for one in launches})
        load(self, launches)

    before_each_launch(monkeypatch, found.begin)
    monkeypatch.setattr(launch.CupyRuntime, "load", watched)
    monkeypatch.setattr(measuring, "seconds", found.time)
    with cupy.cuda.Device(1):
        yield found


def request(pass_="forward"):
    return Request(PROBLEM, pass_, backends.current_device())


def call(**more):
    x = cupy.ones(PROBLEM.input_shape, PROBLEM.dtype)
    w = cupy.ones(PROBLEM.filter_shape, PROBLEM.dtype)
    return cupyconv.conv_forward(x, w, **more)


def failing(error, after=0):
    """Raises the error when it is called, from some call on."""
    calls = count()

    def call():
        if next(calls) >= after:
            raise error

    return call


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
    candidates = measuring.candidates_of(request(), "auto")
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
    candidates = list(measuring.candidates_of(request(), "auto"))
    measuring._measure(candidates, lambda _: None, lambda _: None)
    assert order[2 * len(candidates) :] == candidates * measuring.ROUNDS


def test_calls_measure_when_they_are_told_to(gpu, monkeypatch):
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
    prepared, prepare = [], gather.prepare
    monkeypatch.setattr(gather, "prepare", lambda *a: (prepared.append(a), prepare(*a))[1])
    call()
    of_a_call = len(gpu.launched)
    for _ in range(2):
        call()
    for _ in range(3):
        call(stride=[1, 1])  # cannot be hashed
    assert len(gpu.launched) == 6 * of_a_call
    assert len(prepared) == len(gpu.loaded) == 1 + 3
    for change in ({"activation": "relu"}, {"padding": 1}, {"impl": "cuda-gather"}):
        before = len(prepared)
        call(**change)
        call(**change)
        assert len(prepared) == before + 1
    with pytest.raises(ConvTypeError, match="must be made of integers"):
        call(stride=1.0)  # equals 1, and so would find what that came to


def test_what_is_remembered_waits_for_nobody_who_measures(gpu, monkeypatch):
    planned = cupyconv.plan(PROBLEM, measure=True)
    monkeypatch.setattr(measuring, "_measuring", None)  # cannot be entered
    assert cupyconv.plan(PROBLEM, measure=True) == planned


def test_ways_are_named_with_their_methods(gpu):
    one, *_ = measuring.candidates_of(request(), "auto")
    plain, copying = (measuring._name(replace(one, method=how)) for how in ("", "w arranged"))
    assert copying == f"{plain} (w arranged)"


def test_a_choice_outlives_the_process(gpu, own_cache):
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


def test_a_damaged_file_is_measured_again(gpu, own_cache):
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


def test_what_another_process_has_measured_meanwhile_is_taken(gpu, monkeypatch, own_cache):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    theirs = {path: path.read_text() for path in files(own_cache)}
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
    assert {path: path.read_text() for path in files(own_cache)} == theirs


@pytest.mark.parametrize("what", ["driver", "chip", "version", "limit", "precision"])
def test_a_choice_holds_for_what_it_was_measured_on(gpu, monkeypatch, what):
    cupyconv.plan(PROBLEM, measure=True)
    measuring.forget()
    gpu.timed = 0
    more = {}
    if what == "driver":
        monkeypatch.setattr(measuring, "driver_version", lambda: 13020)
    elif what == "chip":
        here = backends.of(arrays.Home.GPU)
        monkeypatch.setattr(here, "device", replace(here.device, name="another sm_80"))
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
def test_what_others_may_write_is_not_believed(gpu, own_cache, which):
    gpu.seconds = {"cuda-generic": 1e-4}
    cupyconv.plan(PROBLEM, measure=True)
    opened = {"cache": [own_cache], "measured": [own_cache / "measured"], "file": files(own_cache)}
    for path in opened[which]:
        path.chmod(0o777)
    measuring.forget()
    compiler._warn.cache_clear()
    gpu.timed = 0
    said = nullcontext() if which == "file" else pytest.warns(RuntimeWarning, match="chmod go-w")
    with said:
        cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed > 0


def test_a_folder_that_cannot_be_written_is_done_without(gpu, monkeypatch, own_cache):
    (own_cache / "file").write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(own_cache / "file"))
    gpu.seconds = {"cuda-generic": 1e-4}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    timed = gpu.timed
    cupyconv.plan(PROBLEM, measure=True)
    assert gpu.timed == timed


REFUSED = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument\nwith more lines")


@pytest.mark.parametrize(
    "error", [KernelCompileError("no registers", ""), MemoryError(), REFUSED, ValueError()]
)
def test_what_cannot_run_is_left_out_with_its_reason(gpu, error, own_cache):
    gpu.seconds = {"cuda-gather": 1e-6}
    gpu.at_launch["conv_gather.cu"] = failing(error)
    measured = cupyconv.plan(PROBLEM, measure=True)
    forward = measured["forward"]
    assert forward.implementation == "cuda-generic"
    assert "fastest of 1: " in forward.reason
    words = type(error).__name__ + (f": {error}" if str(error) else "")
    names = [measuring._name(one) for one in measuring.candidates_of(request(), "auto")]
    broken = next(name for name in names if name.startswith("cuda-gather "))
    assert f"left out: {broken} ({words.splitlines()[0]})" in forward.reason
    assert "more lines" not in forward.reason
    assert cupyconv.plan(PROBLEM, measure=True) == measured
    is_kept = error is REFUSED or isinstance(error, KernelCompileError)  # it will be so again
    assert len(files(own_cache)) == (3 if is_kept else 0)
    gpu.at_launch["conv_forward.cu"] = failing(error)
    measuring.forget()
    with pytest.raises(type(error)):
        cupyconv.plan(PROBLEM, measure=True, workspace_limit=0)


def test_a_lack_of_memory_is_not_remembered_for_later(gpu, own_cache):
    gpu.at_launch["conv_gather.cu"] = failing(MemoryError())
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert files(own_cache) == []
    measuring.forget()
    gpu.at_launch.clear()
    gpu.seconds = {"cuda-gather": 1e-6}
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"
    assert len(files(own_cache)) == 3


def test_one_that_fails_later_is_left_out_too(gpu):
    """A kernel may fault only after it was launched many times."""
    gpu.seconds = {"cuda-gather": 1e-6}
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED, after=200)
    forward = cupyconv.plan(PROBLEM, measure=True)["forward"]
    assert [one.source for one in gpu.launched].count("conv_gather.cu") == 200
    assert forward.implementation == "cuda-generic"
    assert "CUDA_ERROR_INVALID_VALUE" in forward.reason


@pytest.mark.parametrize("chained", [False, True])
def test_what_fails_holds_no_memory(gpu, chained):
    """While the others are measured, arrays of one that failed may be what they lack.

    An error that another one led to, as CuPy's of memory, has that one's frames too.
    """
    kept, alive = [], []

    class Buffer:
        pass

    def run():
        workspace = Buffer()
        kept.append(weakref.ref(workspace))
        try:
            raise ValueError
        except ValueError as cause:
            if chained:
                raise RuntimeError(*REFUSED.args) from cause
        raise REFUSED

    def watch():
        alive.append(sum(one() is not None for one in kept))

    gpu.at_launch = {"conv_gather.cu": run, "conv_forward.cu": watch}
    cupyconv.plan(PROBLEM, measure=True)
    assert len(kept) >= 3
    assert alive
    assert not any(alive)


def test_what_cannot_be_told_from_bad_luck_is_not_kept(gpu, own_cache):
    error = RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    gpu.at_launch["conv_gather.cu"] = failing(error)
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-generic"
    assert files(own_cache) == []


# Arrays that are dropped while a device is lost cannot give their memory back.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_context_ends_the_measuring(gpu, own_cache):
    """Else all that come after would be left out for what another did."""
    fault = machine.DeviceFault("something was astray")
    gpu.at_launch["conv_gather.cu"] = lambda: machine.DEVICES[1].fail(fault)
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="LAUNCH_FAILED"):
        cupyconv.plan(PROBLEM, measure=True)
    assert machine.revive() == ["something was astray"]
    assert gpu.launched[-1].source == "conv_gather.cu"
    assert files(own_cache) == []
    gpu.at_launch.clear()
    assert cupyconv.plan(PROBLEM, measure=True)["forward"].implementation == "cuda-gather"


def test_reasons_survive_json_whatever_they_say(gpu):
    gpu.at_launch["conv_gather.cu"] = failing(ValueError("a\ttab, a\rreturn, \x1b[31mred"))
    measured = cupyconv.plan(PROBLEM, measure=True)
    assert "left out" in measured["forward"].reason
    assert cupyconv.Plan.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_the_generic_kernel_is_the_last_resort_however_late_others_fail(gpu, monkeypatch, calls):
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED, calls)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"


def test_the_generic_kernel_is_the_last_resort(gpu, monkeypatch):
    """Where it is not even among the most promising."""
    gpu.seconds = {"cuda-generic": 1e-9}
    monkeypatch.setattr(measuring, "CONTENDERS", 1)
    assert [one.implementation for one in contenders(request(), "auto", 1)] == ["cuda-gather"]
    for pass_ in PASSES:
        asked = request(pass_)
        names = [one.implementation for one in measuring.candidates_of(asked, "auto")]
        assert names == ["cuda-gather", "cuda-generic"]
        assert len(contenders(asked, "cuda-generic", 2)) == 1, "it has one way"
    gpu.at_launch["conv_gather.cu"] = failing(REFUSED)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    call()
    assert gpu.launched[-1].source == "conv_forward.cu"
    gpu.at_launch.clear()
    assert cupyconv.plan(PROBLEM, measure=True)["backprop_input"].implementation == "cuda-gather"


def test_nothing_is_measured_while_a_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(cupyconv, "benchmark", True)
    x, w, out = (
        cupy.ones(shape, PROBLEM.dtype)
        for shape in (PROBLEM.input_shape, PROBLEM.filter_shape, PROBLEM.output_shape)
    )
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(ConvError, match="while a graph is captured"):
            cupyconv.conv_forward(x, w, out=out)
        stream.end_capture()
        assert gpu.launched == []
        cupyconv.conv_forward(x, w, out=out)
        stream.begin_capture()
        cupyconv.conv_forward(x, w, out=out)  # remembered by now
        stream.end_capture()


def test_a_workspace_limit_is_kept_by_what_is_measured(gpu, monkeypatch):
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    for planned in cupyconv.plan(PROBLEM, measure=True):
        assert planned.workspace_bytes == 0
    assert any(one.workspace_bytes for one in contenders(request("backprop_filter"), "auto", 5))


def test_only_the_current_gpu_is_measured(gpu):
    cupyconv.plan(PROBLEM, "sm_80", measure=True)
    with pytest.raises(ConvError, match=r"emulated sm_80 \(sm_80\), asked for is sm_90"):
        cupyconv.plan(PROBLEM, "sm_90", measure=True)
    with pytest.raises(ConvError, match="asked for is cpu"):
        cupyconv.plan(PROBLEM, "cpu", measure=True)
