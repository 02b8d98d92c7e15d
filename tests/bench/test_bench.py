"""Layers, data and times of the benchmark, and its calls of PyTorch."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from cupyconv import ConvProblem
from cupyconv.arrays import numpy_dtype
from cupyconv.bench import data, places, pytorch, suites, timing
from cupyconv.checking import Excerpt
from cupyconv.problem import ITEMSIZE, PASSES

# -- suites ----------------------------------------------------------------------------------------


def test_listed_layers_are_valid_and_have_unique_names():
    layers = suites.listed()
    assert len(layers) == 92
    assert len({layer.name for layer in layers}) == 92
    assert {layer.kind for layer in layers} == set(suites.KINDS)
    assert all(layer.problem.flops > 0 and layer.source for layer in layers)


def test_suites_select_networks_and_kinds():
    assert len(suites.select(["resnet50"])) == 23
    assert {layer.kind for layer in suites.select(["depthwise"])} == {"depthwise"}
    both = suites.select(["vgg16"], ["seed-5x100x100"])
    assert [layer.name for layer in both] == [*(f"vgg16-{i}" for i in range(1, 5)), both[-1].name]
    assert suites.select() == suites.select(["all"]) == suites.listed()


def test_fair_order_interleaves_the_kinds():
    ordered = suites.fair_order(suites.listed())
    assert sorted(ordered, key=suites.listed().index) == list(suites.listed())
    assert {layer.kind for layer in ordered[: len(suites.KINDS)]} == set(suites.KINDS)


def test_with_batch_only_reduces_the_batch():
    layer = suites.select(names=["resnet50-03"])[0]
    assert suites.with_batch(layer, 4).problem.N == 4
    assert suites.with_batch(layer, 400).problem == layer.problem


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", data.LAYOUTS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_in_layout_keeps_the_convolution(rank, layout):
    sizes, taps = (9, 8, 7)[:rank], (3, 2, 1)[:rank]
    problem = ConvProblem((2, 6, *sizes), (4, 3, *taps), groups=2, stride=2, padding=1)
    moved = data.in_layout(problem, layout, "float16")
    assert (moved.N, moved.C, moved.K, moved.groups) == (2, 6, 4, 2)
    assert (moved.input_sizes, moved.filter_sizes) == (sizes, taps)
    assert moved.flops == problem.flops
    assert moved.output_sizes == problem.output_sizes
    assert moved.dtype == "float16"
    assert moved.data_format.endswith("C") == (layout == "channels_last")


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_random_sets_are_normal_and_all_different(dtype):
    problem = ConvProblem((1, 3, 40, 50), (4, 3, 3, 3), dtype=dtype)
    sets = data.random_sets(problem, 3, np)
    arrays = [array for operands in sets for array in (operands.x, operands.w, operands.dy)]
    assert all(array.dtype == numpy_dtype(dtype) for array in arrays)
    for a, b in itertools.combinations(arrays, 2):
        assert not np.array_equal(a.ravel()[:100], b.ravel()[:100])
    values = sets[0].x
    for part in (values.real, values.imag) if values.dtype.kind == "c" else (values,):
        assert abs(part.astype(float).mean()) < 0.1
        assert 0.9 < part.astype(float).std() < 1.1


def test_random_flat_repeats_with_the_period():
    flat = data.random_flat(data.PERIOD + 1000, "float32", 1, np)
    assert np.count_nonzero(flat == 0) < 10
    # The tensor starts inside the period, so it wraps around before PERIOD numbers.
    assert np.array_equal(flat[data.PERIOD :], flat[:1000])


# -- random layers ---------------------------------------------------------------------------------


def test_drawn_layers_cover_every_kind_and_repeat_with_the_seed():
    kinds = suites.KINDS * 4
    layers = suites.drawn(5, len(kinds))
    assert layers == suites.drawn(5, len(kinds))
    assert {layer.problem for layer in layers}.isdisjoint(
        layer.problem for layer in suites.drawn(6, len(kinds))
    )
    assert [layer.kind for layer in layers] == list(kinds)
    for layer in layers:
        assert layer.problem.N == 1 or layer.problem.flops <= suites.MOST_DRAWN_FLOPS


# -- timing ----------------------------------------------------------------------------------------


class FakePlace:
    """Place whose clock advances by the given times with each call."""

    def __init__(self, monkeypatch, name="cpu", sweep=0.0):
        self.name, self.sweep_seconds = name, sweep
        self.time, self.device_time = 0.0, 0.0
        self.samples: list[tuple[int, float]] = []
        self.settled: list[int] = []  # number of samples before each settle
        monkeypatch.setattr(timing, "perf_counter", lambda: self.time)

    def settle(self):
        self.settled.append(len(self.samples))

    def synchronize(self):
        self.time = max(self.time, self.device_time)

    def sample(self, call, count, lead=0.0):
        self.samples.append((count, lead))
        self.synchronize()
        before = self.device_time if self.name == "gpu" else self.time
        for _ in range(count):
            call()
        return ((self.device_time if self.name == "gpu" else self.time) - before) / count

    def call(self, seconds, host_seconds=0.0):
        """Return an implementation that takes these times, repeated in a cycle."""
        costs = itertools.cycle([seconds] if isinstance(seconds, float) else seconds)

        def run(_number):
            if self.name == "gpu":
                self.time += host_seconds
                self.device_time += next(costs)
            else:
                self.time += next(costs)

        return run


@pytest.fixture
def cpu(monkeypatch):
    return FakePlace(monkeypatch)


def test_time_is_the_minimum_of_many_turns(cpu):
    # Other programs disturb three of four samples.
    disturbed = [0.009, 0.002, 0.017, 0.005]
    timings = timing.measure({"a": cpu.call(0.001), "b": cpu.call(disturbed)}, 4, cpu, 0.4)
    assert timings["a"].seconds == timings["a"].high == pytest.approx(0.001)
    assert timings["b"].seconds == pytest.approx(0.002)
    assert 0.002 <= timings["b"].high < 0.005
    assert timings["a"].host is None


def test_place_settles_before_each_turn_of_several(cpu):
    timing.measure({"a": cpu.call(0.01)}, 4, cpu, 0.1)
    assert cpu.settled == []
    before = len(cpu.samples)
    timing.measure({"a": cpu.call(0.5), "b": cpu.call(0.5)}, 4, cpu, 0.1)
    warm_up = before + 2
    assert cpu.settled == [warm_up + turn for turn in range(2 * timing.FEWEST_SAMPLES)]


def test_samples_follow_the_requested_seconds(cpu):
    few = timing.measure({"a": cpu.call(0.01)}, 4, cpu, 0.1)["a"].samples
    many = timing.measure({"a": cpu.call(0.01)}, 4, cpu, 1.0)["a"].samples
    assert 9 <= few <= 12
    assert 99 <= many <= 102
    slow = timing.measure({"a": cpu.call(60.0)}, 4, cpu, 0.1)["a"]
    assert slow.samples == timing.FEWEST_SAMPLES
    before = len(cpu.samples)
    quick = timing.measure({"a": cpu.call(1e-3)}, 4, cpu, 1000.0)["a"]
    assert quick.samples == timing.MOST_SAMPLES == len(cpu.samples) - before - 1


def test_sweeps_count_toward_the_requested_seconds(monkeypatch):
    place = FakePlace(monkeypatch, sweep=0.09)
    assert timing.measure({"a": place.call(0.01)}, 4, place, 1.0)["a"].samples <= 12


def test_short_calls_are_grouped_over_different_sets(cpu):
    used = []
    base = cpu.call(1e-5)

    def call(number):
        used.append(number)
        base(number)

    timings = timing.measure({"a": call}, 4, cpu, 0.01)
    lengths = [length for length, _ in cpu.samples]
    assert lengths[-1] == 4  # limited by the four sets; a sample would need five calls
    assert all(len(set(used[i : i + 4])) == 4 for i in range(len(used) - 4, 3, -4))
    assert timings["a"].seconds == pytest.approx(1e-5)


def test_implementations_take_turns(cpu):
    order = []
    calls = {name: cpu.call(0.01) for name in "ab"}
    named = {
        name: (lambda number, name=name: (order.append(name), calls[name](number)))
        for name in calls
    }
    timing.measure(named, 4, cpu, 0.4)
    turns = [(name, len(list(calls_of))) for name, calls_of in itertools.groupby(order)]
    samples = 4  # per turn; turns join where the order is reversed
    assert turns[-11:] == [("a", samples), *((n, 2 * samples) for n in "babababab"), ("a", samples)]


def test_device_time_excludes_host_time(monkeypatch):
    gpu = FakePlace(monkeypatch, "gpu", sweep=1e-4)
    result = timing.measure({"a": gpu.call(2e-4, 3e-5)}, 4, gpu, 0.1)["a"]
    assert result.seconds == pytest.approx(2e-4)
    assert result.host == pytest.approx(3e-5)
    assert gpu.samples[-1][1] == pytest.approx(timing.LEAD * 3e-5)


def test_cpu_time_matches_perf_counter(monkeypatch):
    monkeypatch.setattr(places.Place, "sweep_bytes", 1 << 20)
    place, started = places.of("cpu"), time.perf_counter()
    seconds = place.sample(lambda: time.sleep(0.02), 2)
    assert 0.02 <= seconds <= (time.perf_counter() - started) / 2
    assert place.sweep_seconds > 0


# -- PyTorch ---------------------------------------------------------------------------------------


@pytest.fixture
def torch_peer():
    pytest.importorskip("torch")
    peer, why = pytorch.find(places.of("cpu"))
    assert peer is not None, why
    return peer


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("layout", data.LAYOUTS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_torch_peer_computes_each_pass(torch_peer, rank, layout, dtype):
    sizes, taps = (9, 8, 7)[:rank], (3, 2, 1)[:rank]
    base = ConvProblem((2, 6, *sizes), (4, 3, *taps), groups=2, stride=2, padding=1, dilation=2)
    problem = data.in_layout(base, layout, dtype)
    (tensors,) = data.random_sets(problem, 1, np)
    with torch_peer.settings("ieee", 1):
        for pass_ in PASSES:
            if torch_peer.refuses(problem, pass_):
                continue
            excerpt = Excerpt(problem, pass_, tensors, "reference", 1e9)
            result = torch_peer.call(problem, pass_, [tensors])(0)
            assert excerpt.judge(torch_peer.to_array(result, problem, pass_)).passed


def test_torch_peer_restores_settings(torch_peer):
    import torch

    def settings():
        return (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_num_threads(),
        )

    before = settings()
    with torch_peer.settings("ieee", 1):
        assert settings() == (True, False, False, 1)
    assert settings() == before
    with torch_peer.settings("tf32"):
        assert settings()[:3] == (True, True, True)
    with pytest.raises(ZeroDivisionError), torch_peer.settings("ieee", 1):
        raise ZeroDivisionError
    assert settings() == before


def test_torch_peer_refuses_what_pytorch_lacks(torch_peer):
    lopsided = ConvProblem((1, 1, 4, 4), (1, 1, 3, 3), padding="same", stride=2)
    assert "both sides" in torch_peer.refuses(lopsided, "forward")
    even = ConvProblem((1, 1, 4, 4), (1, 1, 3, 3), padding=1)
    assert torch_peer.refuses(even, "backprop_input") is None
    complex_ = even.replace(dtype="complex64")
    assert "complex gradients" in torch_peer.refuses(complex_, "backprop_input")
    assert torch_peer.refuses(complex_, "forward") is None


@pytest.mark.parametrize("error", [OSError, RuntimeError, AttributeError, SystemError])
def test_find_reports_an_import_failure(error, monkeypatch):
    def broken(_name):
        raise error("libtorch.so is missing\nsecond line")

    monkeypatch.setattr(pytorch, "import_whole", broken)
    why_not = "PyTorch could not be imported: libtorch.so is missing"
    assert pytorch.find(places.of("cpu")) == (None, why_not)
