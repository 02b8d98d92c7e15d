"""The fastest of the ways to compute a pass on the GPU at hand, measured once and remembered.

A choice is kept for the process, and for later ones in a file beside the compiled kernels, under a
key of chip, driver, library version, request and contenders.  As long as it is remembered the same
kernel runs, and results are the same bits; another card or a lost file may choose another kernel,
which sums in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from pathlib import Path
from threading import Lock

import cupyconv
from cupyconv import arrays, files, records
from cupyconv.errors import ConvError, KernelCompileError
from cupyconv.gpu import compiler
from cupyconv.planning import PassPlan, Request
from cupyconv.planning.plan import contenders

CONTENDERS = 5
ROUNDS = 3  # turns that each contender takes
SAMPLE_SECONDS = 1e-3
MOST_CALLS = 50  # of a sample
CLEARLY_FASTER = 0.97  # of the planned one's time: below that, a difference may be chance

_FORMAT = 1  # of a file

Run = Callable[[PassPlan], None]
"""Computes the pass of a request in a given way, on the current stream."""

_remembered: dict[tuple[Request, str], PassPlan] = {}
_measuring = Lock()


def fastest(request: Request, impl: str, run: Run) -> PassPlan:
    """The fastest way to compute a pass, measured unless it is remembered.

    Args:
        request: what to compute, on the current GPU.
        impl: "auto", or the one implementation whose variants to choose from.
        run: computes the pass; what it writes is overwritten again and again.

    Raises:
        ConvError: as for ``plan``; or nothing can be measured, since a graph is being captured.
    """
    asked = request if request.strides else replace(request, strides=request.memory)
    found = _remembered.get((asked, impl))
    if found is None:
        with _measuring:
            found = _remembered.get((asked, impl)) or _look_up(asked, impl, run)
            _remembered[asked, impl] = found
    return found


def forget() -> None:
    """Forget what this process remembers; files stay."""
    _remembered.clear()


def _look_up(request: Request, impl: str, run: Run) -> PassPlan:
    candidates = contenders(request, impl, CONTENDERS)
    path = _path(request, impl, candidates)
    kept = _read(path, candidates)
    if kept is None:
        times = _times(candidates, run)
        best = min(times, key=lambda number: times[number])
        if 0 in times and times[best] > CLEARLY_FASTER * times[0]:
            best = 0
        kept = _read(path, candidates)  # another process may have been sooner
        if kept is None:
            _write(path, request, candidates, best, times)
            kept = best, times[best]
    number, seconds = kept
    chosen = candidates[number]
    reason = (
        f"measured {seconds * 1e6:.3g} us, fastest of {len(candidates)}: {chosen.family.summary}"
    )
    return replace(chosen, reason=reason)


# -- measuring -------------------------------------------------------------------------------------


def _times(candidates: Sequence[PassPlan], run: Run) -> dict[int, float]:
    """Seconds of a call by the candidate's number; without those that cannot be run."""
    if capturing():
        raise ConvError(
            "nothing can be measured while a graph is captured",
            "this pass has no remembered measurement",
            "Call it once before the capture, or set cupyconv.benchmark = False",
        )
    calls, failure = {}, None
    for number, candidate in enumerate(candidates):
        try:
            run(candidate)  # compiles and loads
            once = max(seconds(partial(run, candidate), 1), 1e-7)
            calls[number] = min(max(ceil(SAMPLE_SECONDS / once), 1), MOST_CALLS)
        except (KernelCompileError, MemoryError) as error:
            failure = error
    if failure is not None and not calls:
        raise failure
    found: dict[int, list[float]] = {number: [] for number in calls}
    for _ in range(ROUNDS):
        for number, count in calls.items():
            found[number].append(seconds(partial(run, candidates[number]), count))
    return {number: min(samples) for number, samples in found.items()}


def seconds(call: Callable[[], None], count: int) -> float:
    """Time of a call on the current stream, over so many in a row."""
    cuda = arrays.cupy().cuda
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return cuda.get_elapsed_time(start, stop) * 1e-3 / count


def capturing() -> bool:
    """Whether the current stream records a graph instead of running."""
    return bool(arrays.cupy().cuda.get_current_stream().is_capturing())


# -- files -----------------------------------------------------------------------------------------


def driver_version() -> int:
    """The CUDA version of the GPU's driver, such as 13010."""
    return int(arrays.cupy().cuda.runtime.driverGetVersion())


def _path(request: Request, impl: str, candidates: Sequence[PassPlan]) -> Path | None:
    """The file of a choice; None where none can be kept."""
    folder = compiler.trusted_directory("measured")
    if folder is None:
        return None
    key = (
        _FORMAT,
        cupyconv.__version__,
        driver_version(),
        impl,
        asdict(request),
        [asdict(candidate) for candidate in candidates],
    )
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return folder / f"{digest}.json"


def _read(path: Path | None, candidates: Sequence[PassPlan]) -> tuple[int, float] | None:
    """The number of the chosen candidate and its seconds; None if no whole file is there."""
    if path is None:
        return None
    try:
        entry = records.parse_json(files.read_private(path))
        number, found = entry["fastest"], entry["seconds"][str(entry["fastest"])]
        known = type(number) is int and number in range(len(candidates))
        return (number, found) if known and type(found) is float and found > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    path: Path | None,
    request: Request,
    candidates: Sequence[PassPlan],
    best: int,
    times: dict[int, float],
) -> None:
    """Keep a choice for later processes; a folder that cannot be written keeps none."""
    if path is None:
        return
    entry = {
        "device": request.device.name,
        "problem": str(request.problem),
        "pass": request.pass_,
        "candidates": [f"{c.implementation} {c.tile or ''} x {c.splits}" for c in candidates],
        "fastest": best,
        "seconds": times,
    }
    with suppress(OSError):
        compiler.keep(path, json.dumps(entry, indent=1).encode())
