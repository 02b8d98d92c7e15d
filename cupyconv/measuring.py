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
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from threading import Lock
from traceback import clear_frames

import cupyconv
from cupyconv import arrays, files, markup, records
from cupyconv.errors import ConvError, KernelCompileError
from cupyconv.gpu import compiler
from cupyconv.planning import PassPlan, Request
from cupyconv.planning.families.generic import CUDA_GENERIC
from cupyconv.planning.plan import AUTO, contenders

CONTENDERS = 5
ROUNDS = 3  # turns that each contender takes
SAMPLE_SECONDS = 1e-3
MOST_CALLS = 50  # of a sample
CLEARLY_FASTER = 0.97  # of the planned one's time: below that, a difference may be chance

_FORMAT = 2  # of a file

Run = Callable[[PassPlan], None]
"""Computes the pass of a request in a given way, on the current stream."""

Load = Callable[[Sequence[PassPlan]], None]
"""Has the kernels of several ways at hand."""

_remembered: dict[tuple[Request, str], PassPlan] = {}
_measuring = Lock()


def fastest(request: Request, impl: str, run: Run, load: Load) -> PassPlan:
    """The fastest way to compute a pass, measured unless it is remembered.

    Args:
        request: what to compute, on the current GPU.
        impl: "auto", or the one implementation whose variants to choose from.
        run: computes the pass; what it writes is overwritten again and again.
        load: called before with what is to be run.

    Raises:
        ConvError: as for ``plan``; or nothing can be measured, since a graph is being captured.
    """
    asked = replace(request, strides=request.memory)
    found = _remembered.get((asked, impl))
    if found is None:
        with _measuring:
            found = _remembered.get((asked, impl)) or _look_up(asked, impl, run, load)
            _remembered[asked, impl] = found
    return found


def forget() -> None:
    """Forget what this process remembers; files stay."""
    _remembered.clear()


def candidates_of(request: Request, impl: str) -> tuple[PassPlan, ...]:
    """The ways that are measured; the last resort, beyond CONTENDERS, only if all others fail."""
    candidates = contenders(request, impl, CONTENDERS)
    if impl == AUTO and all(one.implementation != CUDA_GENERIC.name for one in candidates):
        candidates += contenders(request, CUDA_GENERIC.name, 1)
    return candidates


def _look_up(request: Request, impl: str, run: Run, load: Load) -> PassPlan:
    candidates = candidates_of(request, impl)
    path = _path(request, impl, candidates)
    kept = _read(path, candidates)
    if kept is None:
        measured = _measure(candidates, run, load)
        kept = _read(path, candidates)  # another process may have been sooner
        if kept is None:
            kept = measured
            if kept.lasts and path is not None:
                _write(path, request, candidates, kept)
    chosen = candidates[kept.fastest]
    seconds, count = kept.seconds[kept.fastest], len(kept.seconds)
    reason = f"measured {seconds * 1e6:.3g} us, fastest of {count}: {chosen.family.summary}"
    for number, why in kept.left_out.items():
        reason += f"; left out: {_name(candidates[number])} ({why})"
    return replace(chosen, reason=reason)


def _name(candidate: PassPlan) -> str:
    """A candidate in a few words."""
    tile = f" {candidate.tile}" if candidate.tile else ""
    splits = f" x {candidate.splits}" if candidate.splits > 1 else ""
    method = f" ({candidate.method})" if candidate.method else ""
    return f"{candidate.implementation}{tile}{splits}{method}"


@dataclass(frozen=True)
class _Measured:
    """What is known of candidates, by their numbers.

    Attributes:
        fastest: the one to take.
        seconds: of a call of each that could be run.
        left_out: why each of the others could not.
        lasts: whether that is likely to be so the next time; running out of memory is not.
    """

    fastest: int
    seconds: dict[int, float]
    left_out: dict[int, str]
    lasts: bool = True


# -- measuring -------------------------------------------------------------------------------------


def _measure(candidates: Sequence[PassPlan], run: Run, load: Load) -> _Measured:
    """Time candidates in turns; one that fails in any way is left out.

    Raises:
        ConvError: a graph is being captured.
        Exception: that of the first candidate, which is the planned one, where all fail; or
            whatever ended the GPU's context.
    """
    if capturing():
        raise ConvError(
            "nothing can be measured while a graph is captured",
            "this pass has no remembered measurement",
            "Call it once before the capture, or set cupyconv.benchmark = False",
        )
    failures: dict[int, Exception] = {}
    samples: dict[int, list[float]] = {}
    counts: dict[int, int] = {}

    def sample(number: int, count: int) -> float | None:
        try:
            return seconds(partial(run, candidates[number]), count)
        except Exception as error:  # whatever a compiler, a driver or an allocator says
            # Its frames hold arrays that the next candidates may need the memory of.
            clear_frames(error.__traceback__)
            failures[number] = error.with_traceback(None)
            samples.pop(number, None)
            if lost():
                raise  # no kernel runs in this context any more, whoever is to blame
            return None

    def rounds(numbers: Sequence[int]) -> None:
        with suppress(Exception):  # whatever it is, the one that has it will say so again
            load([candidates[number] for number in numbers])
        for number in numbers:
            sample(number, 1)
            once = None if number in failures else sample(number, 1)
            if once is not None:
                counts[number] = min(max(ceil(SAMPLE_SECONDS / max(once, 1e-7)), 1), MOST_CALLS)
                samples[number] = []
        for _ in range(ROUNDS):
            for number in list(samples):
                taken = sample(number, counts[number])
                if taken is not None:
                    samples[number].append(taken)

    rounds(range(min(len(candidates), CONTENDERS)))
    if not samples:
        rounds(range(CONTENDERS, len(candidates)))  # the last resort
    if not samples:
        raise failures[0]
    times = {number: min(taken) for number, taken in samples.items()}
    best = min(times, key=lambda number: times[number])
    if 0 in times and times[best] > CLEARLY_FASTER * times[0]:
        best = 0
    left_out = {number: _in_short(error) for number, error in sorted(failures.items())}
    lasts = all(map(_will_be_so_again, failures.values()))
    return _Measured(best, times, left_out, lasts)


def _in_short(error: Exception) -> str:
    """The first line of what went wrong, as it can be printed."""
    text = markup.in_line(str(error).partition("\n")[0]).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _will_be_so_again(error: Exception) -> bool:
    """Whether a kernel fails by itself, and not for want of what may be there the next time."""
    refused = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    return isinstance(error, KernelCompileError) or any(word in str(error) for word in refused)


def lost() -> bool:
    """Whether the GPU's context has failed for good, as after a kernel that wrote astray."""
    try:
        arrays.cupy().cuda.get_current_stream().synchronize()
    except Exception:
        return True
    return False


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


def _read(path: Path | None, candidates: Sequence[PassPlan]) -> _Measured | None:
    """What was measured of the candidates; None if no whole file is there."""
    if path is None:
        return None
    numbers = range(len(candidates))
    try:
        entry = records.parse_json(files.read_private(path))
        times = {int(number): float(found) for number, found in entry["seconds"].items()}
        left_out = {int(number): str(why) for number, why in entry["left_out"].items()}
        fastest = int(entry["fastest"])
        known = all(number in numbers for number in (*times, *left_out))
        if known and fastest in times and min(times.values()) > 0:
            return _Measured(fastest, times, left_out)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None


def _write(
    path: Path, request: Request, candidates: Sequence[PassPlan], measured: _Measured
) -> None:
    """Keep a choice for later processes; a folder that cannot be written keeps none."""
    entry = {
        "device": request.device.name,
        "problem": str(request.problem),
        "pass": request.pass_,
        "candidates": [_name(candidate) for candidate in candidates],
        "fastest": measured.fastest,
        "seconds": measured.seconds,
        "left_out": measured.left_out,
    }
    with suppress(OSError):
        compiler.keep(path, json.dumps(entry, indent=1).encode())
