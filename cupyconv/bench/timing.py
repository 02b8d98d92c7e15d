"""How long a call takes: on a GPU the median of samples, on the CPU the best of many short turns.

A sample is one or more calls in a row, each on another set of operands.  Before it, a sweep over a
scratch array larger than the cache makes sure that every operand is read from memory.  On a GPU
the sweep has a second use: while it runs, the host gets ahead, so that the events around the calls
measure the device and not Python.  Implementations that are compared take turns, so that a change
of the clock frequency meets them all.

A CPU is shared with whatever else runs, which makes calls longer and never shorter.  There the time
of a call is the best one, of many turns, since what disturbs one turn has often passed in another;
and the spread is from there to the lower quartile of the turns' best, which another run would reach
too.  Where the spreads of two implementations meet, they are even.  The order of the turns is
reversed each time, and a turn begins with a pause: the threads of a BLAS go on spinning for a tenth
of a second, and would take the cores from those of another.
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
"""Runs an implementation on the set of operands with this number."""

TURNS, CPU_TURNS = 3, 10  # that each implementation takes, at most, of as many samples
FEWEST_SAMPLES, MOST_SAMPLES = 3, 150
SHORTEST_SAMPLE = 50e-6  # s; shorter calls are put in a row, as far as there are sets
HOST_CALLS = 20  # in a row: well under the launches that a stream can queue
MOST_SWEEPS = 64  # before one sample
PAUSE = 0.15  # s, before a turn on the CPU


@dataclass(frozen=True)
class Timing:
    """Time of one call, in seconds.

    Attributes:
        seconds, low, high: median and quartiles over the samples; on the CPU the best, again the
            best, and the lower quartile of the turns' best.
        samples: how many there are.
        host: until the call returns to Python, on a GPU; None on the CPU, where that is all of it.
    """

    seconds: float
    low: float
    high: float
    samples: int
    host: float | None = None


class Clock(Protocol):
    """What a processor's time is read from."""

    asynchronous: bool
    """Whether calls return before they are done."""

    sweep_seconds: float
    """How long a sweep takes."""

    def now(self) -> float:
        """The host's time, in seconds."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was called is done."""
        ...

    def settle(self) -> None:
        """Wait until nothing is left running of what another implementation started."""
        ...

    def sample(self, calls: Sequence[Callable[[], Any]], lead: float = 0.0) -> float:
        """Seconds that the calls take together, from a cold cache.

        Args:
            lead: how long the host needs to make the calls; sweeps take at least this long.
        """
        ...


class CpuClock:
    """The host's own clock."""

    asynchronous = False

    def __init__(self, sweep_bytes: int) -> None:
        self._scratch = np.ones(sweep_bytes // 8)
        self._sweep()  # the first one is slower: the system maps the pages
        start = self.now()
        self._sweep()
        self.sweep_seconds = self.now() - start

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to do: calls return when they are done."""

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
    """CUDA events on CuPy's current stream."""

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
        # Read only: lines that were written would be written back while the next call runs.
        self._scratch.sum(out=self._total)


@dataclass
class _Series:
    """One implementation while it is measured."""

    call: Call
    calls: int  # of one sample
    samples: int  # of one turn
    lead: float  # s
    host: float | None  # s
    times: list[float]  # s of one call
    best: list[float]  # s, of each turn


def measure(
    calls: Mapping[str, Call], sets: int, clock: Clock, seconds: float
) -> dict[str, Timing]:
    """Time implementations against each other.

    Args:
        calls: by name; each is called with set numbers from 0 to ``sets`` - 1.
        seconds: to spend on each, warm-up left out; very slow calls take FEWEST_SAMPLES times
            their own time.
    """
    series = {name: _prepare(call, sets, clock, seconds) for name, call in calls.items()}
    turns = TURNS if clock.asynchronous else CPU_TURNS
    for number in range(turns):
        for one in list(series.values())[:: -1 if number % 2 else 1]:
            samples = one.samples * (number + 1) // turns - one.samples * number // turns
            if samples and len(series) > 1:
                clock.settle()
            _take_turn(one, samples, sets, clock)
    summary = _median if clock.asynchronous else _best
    return {name: summary(one) for name, one in series.items()}


def _take_turn(one: _Series, samples: int, sets: int, clock: Clock) -> None:
    before = len(one.times)
    for _ in range(samples):
        row = [_bound(one.call, number, sets, one.times) for number in range(one.calls)]
        one.times.append(clock.sample(row, one.lead) / one.calls)
    if samples:
        one.best.append(min(one.times[before:]))


def _bound(call: Call, number: int, sets: int, times: Sequence[float]) -> Callable[[], Any]:
    index = (number + len(times)) % sets  # consecutive samples begin with different sets
    return lambda: call(index)


def _prepare(call: Call, sets: int, clock: Clock, seconds: float) -> _Series:
    """Warm up, and choose how many calls make a sample and how many samples to take."""
    start = clock.now()
    call(0)
    clock.synchronize()
    if clock.now() - start < seconds:
        call(min(1, sets - 1))
    host = host_seconds(call, sets, clock, seconds) if clock.asynchronous else None
    lead = 2 * (host or 0.0)
    estimate = max(clock.sample([lambda: call(0)], lead), 1e-9)
    in_a_row = min(max(ceil(SHORTEST_SAMPLE / estimate), 1), sets)
    lead *= in_a_row
    cost = estimate * in_a_row + max(clock.sweep_seconds, lead)
    samples = min(max(round(seconds / cost), FEWEST_SAMPLES), MOST_SAMPLES)
    return _Series(call, in_a_row, samples, lead, host, [], [])


def host_seconds(call: Call, sets: int, clock: Clock, seconds: float) -> float:
    """Median time until a call returns, the device being free to take it."""
    start = clock.now()
    call(0)
    clock.synchronize()
    one = max(clock.now() - start, 1e-9)
    times = []
    for number in range(min(max(int(seconds / 4 / one), 3), HOST_CALLS)):
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
