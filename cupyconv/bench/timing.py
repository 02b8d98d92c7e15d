"""Time of a call: the median of samples on a GPU, the minimum over many short turns on a CPU.

A sample is one or more consecutive calls, each on a different set of operands.  Before each sample,
a sweep over a scratch array larger than the cache evicts the operands.  On a GPU, the host queues
the calls while the sweep runs, so that the events around the calls time the device and not Python.
Compared implementations take turns, so that a change of the clock frequency affects all of them.

Other programs can only make calls slower.  The time on a CPU is therefore the minimum over many
turns, and the spread reaches from that minimum to the lower quartile of the turns' minima.  Two
implementations are even if their spreads overlap.  The order of the implementations is reversed in
every other turn.  Each turn begins with a pause, since idle BLAS threads spin for a tenth of a
second and would slow down the next implementation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles
from typing import Any, Protocol

import numpy as np

Call = Callable[[int], Any]
"""Function that runs an implementation on the operand set with a given index."""

TURNS, CPU_TURNS = 3, 10  # largest number of turns, over which samples are divided
FEWEST_SAMPLES, MOST_SAMPLES = 3, 150
SHORTEST_SAMPLE = 50e-6  # s; shorter calls are grouped, at most one call per operand set
HOST_CALLS = 20  # consecutive calls; far fewer than the launches that a stream can queue
MOST_SWEEPS = 64  # largest number of sweeps before a sample
PAUSE = 0.15  # s of pause before a turn on the CPU


@dataclass(frozen=True)
class Timing:
    """Time of one call, in seconds.

    Attributes:
        seconds: median of the samples; on the CPU their minimum.
        low, high: quartiles of the samples; on the CPU the minimum, and the lower quartile of the
            turns' minima.
        samples: number of samples.
        host: time until the call returns to Python; None on the CPU, where calls are synchronous.
    """

    seconds: float
    low: float
    high: float
    samples: int
    host: float | None = None


class Clock(Protocol):
    """Interface of a processor's clock."""

    asynchronous: bool
    """Whether calls return before they finish."""

    sweep_seconds: float
    """Time of one sweep."""

    def now(self) -> float:
        """Return the host's time in seconds."""
        ...

    def synchronize(self) -> None:
        """Wait until all calls have finished."""
        ...

    def settle(self) -> None:
        """Wait until the previous implementation no longer occupies the processor."""
        ...

    def sample(self, calls: Sequence[Callable[[], Any]], lead: float = 0.0) -> float:
        """Return the total seconds of the calls, from a cold cache.

        Args:
            lead: host time of the calls; sweeps take at least this long.
        """
        ...


class CpuClock:
    """Clock of the host."""

    asynchronous = False

    def __init__(self, sweep_bytes: int) -> None:
        self._scratch = np.ones(sweep_bytes // 8)
        self._sweep()  # the first sweep is slower: the system maps the pages
        start = self.now()
        self._sweep()
        self.sweep_seconds = self.now() - start

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: calls are synchronous."""

    def settle(self) -> None:
        time.sleep(PAUSE)

    def sample(self, calls: Sequence[Callable[[], Any]], lead: float = 0.0) -> float:
        self._sweep()
        start = self.now()
        for call in calls:
            call()
        return self.now() - start

    def _sweep(self) -> None:
        self._scratch.sum()


class CudaClock:
    """Clock of CUDA events on CuPy's current stream."""

    asynchronous = True

    def __init__(self, cupy: Any, sweep_bytes: int) -> None:
        self._cupy = cupy
        self._scratch = cupy.ones(sweep_bytes // 4, "float32")
        self._total = cupy.empty((), "float32")
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self.sweep_seconds = 0.0
        self.sample([self._sweep])  # compiles the sweep
        self.sweep_seconds = max(self.sample([self._sweep]), 1e-6)

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def settle(self) -> None:
        self.synchronize()

    def sample(self, calls: Sequence[Callable[[], Any]], lead: float = 0.0) -> float:
        sweeps = ceil(lead / self.sweep_seconds) if self.sweep_seconds else 0
        for _ in range(min(max(sweeps, 1), MOST_SWEEPS)):
            self._sweep()
        self._start.record()
        for call in calls:
            call()
        self._stop.record()
        self._stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(self._start, self._stop) * 1e-3

    def _sweep(self) -> None:
        # Only read: dirty cache lines would be written back during the next call.
        self._scratch.sum(out=self._total)


@dataclass
class _Series:
    """Measurement of one implementation in progress."""

    call: Call
    calls: int  # per sample
    samples: int  # over all turns
    lead: float  # s
    host: float | None  # s
    times: list[float]  # s per call, of each sample
    best: list[float]  # s per call, minimum of each turn


def measure(
    calls: Mapping[str, Call], sets: int, clock: Clock, seconds: float
) -> dict[str, Timing]:
    """Time implementations against each other.

    Args:
        calls: functions by name, called with set indices from 0 to ``sets`` - 1.
        seconds: time per implementation, without warm-up; slow calls still get FEWEST_SAMPLES.
    """
    series = {name: _prepare(call, sets, clock, seconds) for name, call in calls.items()}
    turns = TURNS if clock.asynchronous else CPU_TURNS
    for number in range(turns):
        for entry in list(series.values())[:: -1 if number % 2 else 1]:
            samples = entry.samples * (number + 1) // turns - entry.samples * number // turns
            if samples and len(series) > 1:
                clock.settle()
            _take_turn(entry, samples, sets, clock)
    summary = _median if clock.asynchronous else _best
    return {name: summary(entry) for name, entry in series.items()}


def _take_turn(series: _Series, samples: int, sets: int, clock: Clock) -> None:
    before = len(series.times)
    for _ in range(samples):
        calls = [_bind(series.call, number, sets, series.times) for number in range(series.calls)]
        series.times.append(clock.sample(calls, series.lead) / series.calls)
    if samples:
        series.best.append(min(series.times[before:]))


def _bind(call: Call, number: int, sets: int, times: Sequence[float]) -> Callable[[], Any]:
    index = (number + len(times)) % sets  # consecutive samples start with different sets
    return lambda: call(index)


def _prepare(call: Call, sets: int, clock: Clock, seconds: float) -> _Series:
    """Warm up the implementation, and choose the calls per sample and the number of samples."""
    start = clock.now()
    call(0)
    clock.synchronize()
    if clock.now() - start < seconds:
        call(min(1, sets - 1))
    host = host_seconds(call, sets, clock, seconds) if clock.asynchronous else None
    lead = 2 * (host or 0.0)
    estimate = max(clock.sample([lambda: call(0)], lead), 1e-9)
    calls_per_sample = min(max(ceil(SHORTEST_SAMPLE / estimate), 1), sets)
    lead *= calls_per_sample
    cost = estimate * calls_per_sample + max(clock.sweep_seconds, lead)
    samples = min(max(round(seconds / cost), FEWEST_SAMPLES), MOST_SAMPLES)
    return _Series(call, calls_per_sample, samples, lead, host, [], [])


def host_seconds(call: Call, sets: int, clock: Clock, seconds: float) -> float:
    """Return the median host time of a call while the device's queue has room."""
    start = clock.now()
    call(0)
    clock.synchronize()
    estimate = max(clock.now() - start, 1e-9)
    times = []
    for number in range(min(max(int(seconds / 4 / estimate), 3), HOST_CALLS)):
        start = clock.now()
        call(number % sets)
        times.append(clock.now() - start)
    clock.synchronize()
    return median(times)


def _median(series: _Series) -> Timing:
    low, middle, high = quantiles(series.times, n=4, method="inclusive")
    return Timing(middle, low, high, len(series.times), series.host)


def _best(series: _Series) -> Timing:
    best = min(series.best)
    high, _, _ = quantiles(series.best, n=4, method="inclusive")
    return Timing(best, best, high, len(series.times), series.host)
