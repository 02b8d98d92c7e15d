"""Autotuning: measure the candidates for a pass on the current GPU once, and remember the fastest.

A choice is stored in the process, and for later processes in a file next to the compiled kernels.
The file's key contains the driver's CUDA version, cupyconv's version, the candidates and the
request, which includes the GPU.  While the choice is stored, the same kernel runs and gives bitwise
equal results.  On another GPU, or after the file is deleted, another kernel may be chosen, which
sums in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import ceil
from pathlib import Path
from threading import RLock
from time import perf_counter
from traceback import clear_frames
from typing import Any, NamedTuple

import numpy as np

import cupyconv
from cupyconv import arrays, cache_folder, files, markup, records
from cupyconv.errors import ConvError, KernelCompileError
from cupyconv.gpu import capture
from cupyconv.kernels.cost import duration
from cupyconv.kernels.generic import CUDA_GENERIC
from cupyconv.launch import operand_names
from cupyconv.planning import PassPlan, Request
from cupyconv.planning.plan import AUTO, contenders

CONTENDERS = 8  # largest number of candidates that are measured (hand-set)
ROUNDS = 3  # samples of each candidate (hand-set)
SAMPLE_SECONDS = 1e-3  # shortest sample in s; samples of MOST_CALLS calls may be shorter (hand-set)
MOST_CALLS = 50  # largest number of calls per sample (hand-set)
LEAD = 3  # time that the GPU waits before a sample, in the host's time of its calls (hand-set)
MOST_LEAD = 0.02  # longest time in s that the GPU waits before a sample (hand-set)
CLEARLY_FASTER = 0.97  # largest time ratio at which a candidate replaces the planned one (hand-set)

_FORMAT = 2  # version of the file format

Run = Callable[[PassPlan], None]
"""Function that runs a candidate for the request's pass on the current stream."""

Load = Callable[[Sequence[PassPlan]], None]
"""Function that loads the kernels of several candidates."""

_remembered: dict[tuple[Request, str], PassPlan] = {}  # fastest candidates, by request and impl
_measuring = RLock()  # reentrant: a signal handler may compute a pass during a measurement


def fastest(request: Request, impl: str, run: Run, load: Load) -> PassPlan:
    """Return the fastest candidate for a pass; measure the candidates at the first call.

    Args:
        request: the pass to compute on the current GPU.
        impl: "auto", or the implementation whose variants are candidates.
        run: function that runs a candidate; it is called repeatedly and overwrites its result.
        load: function that loads the kernels of candidates before they run.

    Raises:
        ConvError: as for ``plan``; or the candidates are not measured yet, and a graph is being
            captured, which forbids measurements.
    """
    key = request, impl
    choice = _remembered.get(key)
    if choice is None:
        with _measuring:
            choice = _remembered.get(key) or _look_up(*key, run, load)
            choice = _remembered.setdefault(key, choice)
    return choice


def forget() -> None:
    """Forget the choices of this process, but keep the files."""
    _remembered.clear()


def candidates_of(request: Request, impl: str) -> tuple[PassPlan, ...]:
    """Return the candidates to measure, at most CONTENDERS, the planned one first.

    With impl "auto", a generic kernel is added if there is none among them.  It is measured only if
    all others fail.
    """
    candidates = contenders(request, impl, CONTENDERS)
    if impl == AUTO and all(entry.implementation != CUDA_GENERIC.name for entry in candidates):
        candidates += contenders(request, CUDA_GENERIC.name, 1)
    return candidates


def _look_up(request: Request, impl: str, run: Run, load: Load) -> PassPlan:
    candidates = candidates_of(request, impl)
    path = _path(request, impl, candidates)
    measured = _read(path, candidates)
    if measured is None:
        new = _measure(candidates, run, load)
        measured = _read(path, candidates)  # another process may have written the file meanwhile
        if measured is None:
            measured = new
            if measured.lasts and path is not None:
                _write(path, request, candidates, measured)
    chosen = candidates[measured.fastest]
    seconds, count = measured.seconds[measured.fastest], len(measured.seconds)
    reason = f"measured {duration(seconds * 1e6)}, fastest of {count}: {chosen.family.summary}"
    for number, why in measured.left_out.items():
        reason += f"; left out: {_name(candidates[number])} ({why})"
    return replace(chosen, reason=reason, microseconds=seconds * 1e6)


def _name(candidate: PassPlan) -> str:
    """Return a candidate's implementation and choices as text."""
    tile = f" {candidate.tile}" if candidate.tile else ""
    splits = f" x {candidate.splits}" if candidate.splits > 1 else ""
    copies = f"{operand_names(candidate.copies)} copied" if candidate.copies else ""
    how = (candidate.view, copies, "frames divided" if candidate.divides_frames else "")
    text = ", ".join(filter(None, how))
    return f"{candidate.implementation}{tile}{splits}" + (f" ({text})" if text else "")


@dataclass(frozen=True)
class _Measurements:
    """Measurements of candidates, keyed by the candidates' indices.

    Attributes:
        fastest: index of the candidate to use.
        seconds: time per call of each candidate that ran.
        left_out: error of each candidate that failed.
        lasts: whether the choice may be stored for later processes, because every failure would
            occur there, too.
    """

    fastest: int
    seconds: dict[int, float]
    left_out: dict[int, str]
    lasts: bool = True


# -- measuring -------------------------------------------------------------------------------------


def _measure(candidates: Sequence[PassPlan], run: Run, load: Load) -> _Measurements:
    """Time the candidates in turns; leave out candidates that fail.

    Raises:
        ConvError: a graph is being captured.
        Exception: the error of the first candidate, if all candidates failed; or the error of a
            candidate that destroyed the GPU's context.
    """
    if capture.is_active():
        raise ConvError(
            "nothing can be measured while a graph is captured",
            "this pass has no remembered measurement",
            "Call the function once before the capture, or set cupyconv.benchmark = False",
        )
    failures: dict[int, Exception] = {}
    samples: dict[int, list[float]] = {}
    counts: dict[int, int] = {}
    leads: dict[int, float] = {}

    def sample(number: int, count: int, lead: float = 0.0) -> Timed | None:
        try:
            return timed(partial(run, candidates[number]), count, lead)
        except Exception as error:  # compiler, driver and allocator raise many types
            # Free the arrays in the error's frames: the next candidates may need the memory.
            clear_frames(error.__traceback__)
            failures[number] = error.with_traceback(None)
            samples.pop(number, None)
            if lost():
                raise  # the context can run no more kernels
            return None

    def rounds(numbers: Sequence[int]) -> None:
        with suppress(Exception):  # a failing candidate raises again in ``sample``
            load([candidates[number] for number in numbers])
        for number in numbers:
            sample(number, 1)
            once = None if number in failures else sample(number, 1)
            if once is not None:
                count = min(max(ceil(SAMPLE_SECONDS / max(once.device, 1e-7)), 1), MOST_CALLS)
                counts[number] = count
                leads[number] = min(LEAD * count * once.host, MOST_LEAD)
                samples[number] = []
        for _ in range(ROUNDS):
            for number in list(samples):
                found = sample(number, counts[number], leads[number])
                if found is not None:
                    samples[number].append(found.device)

    rounds(range(min(len(candidates), CONTENDERS)))
    if not samples:
        rounds(range(CONTENDERS, len(candidates)))  # the generic kernel
    if not samples:
        raise failures[0]
    times = {number: min(values) for number, values in samples.items()}
    best = min(times, key=times.__getitem__)
    if 0 in times and times[best] > CLEARLY_FASTER * times[0]:
        best = 0
    left_out = {number: _first_line(error) for number, error in sorted(failures.items())}
    lasts = all(map(_is_reproducible, failures.values()))
    return _Measurements(best, times, left_out, lasts)


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error, with control characters escaped."""
    text = markup.in_line(str(error).partition("\n")[0]).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_reproducible(error: Exception) -> bool:
    """Return whether an error is due to the kernel itself and would occur again.

    Other errors, such as a lack of memory, may not occur again.
    """
    refused = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    return isinstance(error, KernelCompileError) or any(word in str(error) for word in refused)


def lost() -> bool:
    """Return whether the GPU's context is lost, for example after an illegal memory access."""
    try:
        arrays.cupy().cuda.get_current_stream().synchronize()
    except Exception:
        return True
    return False


class Timed(NamedTuple):
    """Mean seconds per call, of consecutive calls: on the GPU, and until a call returns."""

    device: float
    host: float


_WAIT = """
extern "C" __global__ void wait(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""
_CYCLES = 2.5e9  # cycles per second of lead; GPUs run at about 1 to 2.5 GHz


@cache
def _wait() -> Any:
    return arrays.cupy().RawKernel(_WAIT, "wait")


def timed(call: Callable[[], object], count: int, lead: float = 0.0) -> Timed:
    """Time ``count`` consecutive calls on the current stream.

    Args:
        lead: seconds that the GPU waits before the first call.  If the host queues all calls in
            this time, the GPU never waits for the host, and its time does not contain the host's.
    """
    cuda = arrays.cupy().cuda
    start, stop = cuda.Event(), cuda.Event()
    if lead:
        _wait()((1,), (1,), (np.int64(lead * _CYCLES),))
    start.record()
    begun = perf_counter()
    for _ in range(count):
        call()
    host = perf_counter() - begun
    stop.record()
    stop.synchronize()
    return Timed(cuda.get_elapsed_time(start, stop) * 1e-3 / count, host / count)


# -- files -----------------------------------------------------------------------------------------


def driver_version() -> int:
    """Return the CUDA version that the GPU's driver supports, such as 13010 for CUDA 13.1."""
    return int(arrays.cupy().cuda.runtime.driverGetVersion())


def _path(request: Request, impl: str, candidates: Sequence[PassPlan]) -> Path | None:
    """Return the path of the file that stores a choice; None if the cache is unusable."""
    folder = cache_folder.trusted_directory("measured")
    if folder is None:
        return None
    versions = (_FORMAT, cupyconv.__version__, driver_version())
    key = (*versions, impl, asdict(request), list(map(asdict, candidates)))
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return folder / f"{digest}.json"


def _read(path: Path | None, candidates: Sequence[PassPlan]) -> _Measurements | None:
    """Read the measurements of the candidates; None if there is no valid file."""
    if path is None:
        return None
    numbers = range(len(candidates))
    try:
        entry = records.parse_json(files.read_private(path))
        times = {int(number): float(time) for number, time in entry["seconds"].items()}
        left_out = {int(number): str(why) for number, why in entry["left_out"].items()}
        fastest = int(entry["fastest"])
        known = all(number in numbers for number in (*times, *left_out))
        if known and fastest in times and min(times.values()) > 0:
            return _Measurements(fastest, times, left_out)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None


def _write(
    path: Path, request: Request, candidates: Sequence[PassPlan], measured: _Measurements
) -> None:
    """Store a choice for later processes, if the folder is writable."""
    entry = {
        "device": request.device.name,
        "problem": str(request.problem),
        "pass": request.pass_,
        "candidates": list(map(_name, candidates)),
        **{key: getattr(measured, key) for key in ("fastest", "seconds", "left_out")},
    }
    with suppress(OSError):
        cache_folder.keep(path, json.dumps(entry, indent=1).encode())
