"""Time of a call: the minimum over many samples.

A sample is the mean time of one or more consecutive calls, each on a different set of operands.
Before each sample, a sweep over a scratch array larger than the cache evicts the operands.  A GPU
then waits while the host queues the calls, so that the events around the calls time the device and
not Python.

Other programs and lower clock frequencies can only make calls slower, so the time is the minimum
over all samples.  The samples of each implementation are divided over at most TURNS turns.  In each
turn, the compared implementations run one after another; in every other turn, in reversed order.
The spread reaches from the minimum to the lower quartile of the turns' minima.  Two implementations
are even if their spreads overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from math import ceil
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

from cupyconv.bench.places import Place
from cupyconv.measuring import LEAD, MOST_LEAD

Call = Callable[[int], Any]
"""Function that runs an implementation on the operand set with a given index."""

TURNS = 10  # largest number of turns of a measurement
FEWEST_SAMPLES, MOST_SAMPLES = 3, 150
SHORTEST_SAMPLE = 50e-6  # s; shorter calls are grouped, at most one call per operand set
HOST_CALLS = 20  # most calls in ``host_seconds``; a stream can queue far more launches


class Timing(NamedTuple):
    """Time of one call in seconds, with the spread's upper end and the number of samples.

    ``host`` is the time until the call returns to Python; None on the CPU.
    """

    seconds: float
    high: float
    samples: int
    host: float | None


def measure(
    calls: Mapping[str, Call], sets: int, place: Place, seconds: float
) -> dict[str, Timing]:
    """Time implementations against each other.

    Args:
        calls: functions by name, called with set indices from 0 to ``sets`` - 1.
        seconds: time per implementation, without warm-up; slow calls still get FEWEST_SAMPLES.
    """
    series = {name: _Series(call, sets, place, seconds) for name, call in calls.items()}
    for turn in range(TURNS):
        for entry in list(series.values())[:: -1 if turn % 2 else 1]:
            samples = entry.samples * (turn + 1) // TURNS - entry.samples * turn // TURNS
            if samples and len(series) > 1:
                place.settle()
            if samples:
                entry.best.append(min(entry.sample() for _ in range(samples)))
    return {name: entry.timing() for name, entry in series.items()}


def host_seconds(call: Call, sets: int, place: Place, seconds: float) -> float:
    """Return the median seconds until a call returns, while the device's queue has room.

    Args:
        seconds: time per implementation; a quarter of it is spent here, on 3 to HOST_CALLS calls.
    """
    start = perf_counter()
    call(0)
    place.synchronize()
    estimate = max(perf_counter() - start, 1e-9)
    times = []
    for number in range(min(max(int(seconds / 4 / estimate), 3), HOST_CALLS)):
        start = perf_counter()
        call(number % sets)
        times.append(perf_counter() - start)
    place.synchronize()
    return median(times)


class _Series:
    """Unfinished measurement of an implementation; ``best`` has each turn's minimum in seconds."""

    def __init__(self, call: Call, sets: int, place: Place, seconds: float) -> None:
        """Warm up, and choose the calls per sample and the number of samples."""
        numbers = cycle(range(sets))
        self._call, self._place = lambda: call(next(numbers)), place
        start = perf_counter()
        self._call()
        place.synchronize()
        if perf_counter() - start < seconds:
            self._call()
        self._host = None if place.name == "cpu" else host_seconds(call, sets, place, seconds)
        lead = min(LEAD * (self._host or 0.0), MOST_LEAD)
        estimate = max(place.sample(self._call, 1, lead), 1e-9)
        self._count = min(max(ceil(SHORTEST_SAMPLE / estimate), 1), sets)
        self._lead = lead * self._count
        cost = estimate * self._count + place.sweep_seconds + self._lead
        self.samples = min(max(round(seconds / cost), FEWEST_SAMPLES), MOST_SAMPLES)
        self.best: list[float] = []

    def sample(self) -> float:
        return self._place.sample(self._call, self._count, self._lead)

    def timing(self) -> Timing:
        high, _, _ = quantiles(self.best, n=4, method="inclusive")
        return Timing(min(self.best), high, self.samples, self._host)
