"""Draw layers with hypothesis, check their calls, and print a program for each fault."""

from __future__ import annotations

import itertools
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .cases import Case, NumpyRun
from .checking import Fault, Setting, check, fault, implementation, layer_of
from .drawing import Draw, kernel_cases, numpy_cases
from .judging import can_be_judged
from .kernels import NotTakenError, pool
from .oracle import geometry

STREAMS: dict[str, Callable[[Draw], Iterator[Case]]] = {
    "numpy": numpy_cases,
    "kernels": kernel_cases,
}

LAYERS = {"numpy": 20, "kernels": 4}
"""Layers per round; hypothesis shrinks the faults of a round after it."""

CALL_SECONDS = 60
"""CPU seconds of this process, builds excluded, after which a call ends the process."""


class Layer(tuple):
    """Calls of one layer; a fault's message shows the wrong call."""

    def __repr__(self) -> str:
        return f"{len(self)} calls"


@st.composite
def layers(draw: Callable[[Any], Any], stream: str) -> Layer:
    """Draw the calls of one layer."""
    return Layer(STREAMS[stream](Draw(draw)))


class Attack:
    """State of the attack in one process.

    Attributes:
        counts: calls by implementation, or by the reason why they were not checked.
        known: kinds of faults that were reported; each is reported once.
        latest: file with the program of the latest call, for a process that dies.
    """

    def __init__(self, latest: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.known: set[tuple[str, ...]] = set()
        self.latest = latest

    def round(self, stream: str, name: str, end: float = float("inf")) -> list[str]:
        """Check the layers that a round draws; return a report of each new fault.

        Args:
            stream: a key of STREAMS.
            name: what the draws depend on.
            end: value of ``time.monotonic`` at which the round ends, unless it has found a fault.
        """
        failed = False

        @seed(crc32(name.encode()))
        @settings(
            max_examples=LAYERS[stream],
            deadline=None,
            phases=(Phase.reuse, Phase.generate, Phase.shrink) if not self.known else
            (Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(layers(stream))
        def calls_are_right(cases: Layer) -> None:
            nonlocal failed
            try:
                if failed or time.monotonic() < end:
                    self.layer(cases)
            except Exception:
                failed = True
                raise

        try:
            calls_are_right()
        except Exception as error:
            faults = error.exceptions if isinstance(error, ExceptionGroup) else [error]
            self.known |= {fault.kind for fault in faults if isinstance(fault, Fault)}
            return [
                f"{type(fault).__name__}\n{fault}" if isinstance(fault, Fault) else
                "".join(traceback.format_exception(fault)) for fault in faults
            ]  # fmt: skip
        return []

    def layer(self, cases: Layer) -> None:
        """Check the calls of one layer; raises Fault."""
        first, setting = None, None
        for case in cases:
            if first is None or setting is None or not _share_data(first, case):
                first, setting = case, layer_of(case)
            try:
                self.counts[self._check(case, setting)] += 1
            except NotTakenError as error:
                self.counts[str(error)] += 1

    def _check(self, case: Case, layer: Setting) -> str:
        """Check a call; return under which name it is counted."""
        if layer.oracle is not None and not can_be_judged(case, layer.oracle):
            return "not checked: too many terms or too much padding"
        if self.latest is not None:
            self.latest.write_text(program(case))
        signal.setitimer(signal.ITIMER_PROF, CALL_SECONDS)  # counts CPU time, of this process only
        try:
            check(case, layer)
        except Fault as error:
            if error.kind not in self.known:
                raise fault(error.kind, f"  {error}\n\n{program(case)}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if layer.oracle is None:
            return "illegal"
        name = implementation(case, geometry(case))
        return name if isinstance(case.run, NumpyRun) else f"{name} {case.run.arch}"


_OF_A_CALL = ("operation", "output_padding", "bias", "shift", "adds", "activation", "run")
"""Fields of a Case in which calls on the same data may differ."""


def _share_data(first: Case, other: Case) -> bool:
    """Return whether the data of ``layer_of(first)`` are those of the other call.

    Seeds do not decide this, because hypothesis may draw the same seed for other data.
    """
    same = replace(other, **{name: getattr(first, name) for name in _OF_A_CALL})
    return same == first and replace(first, operation=other.operation).operands == other.operands


def work(
    streams: list[str], name: str, first: int, step: int, end: float, latest: Path
) -> NoReturn:
    """Run rounds until the time ends, and print faults; exit with 1 if there were any."""
    attacking, spent = Attack(latest), dict.fromkeys(streams, 0.0)
    numbers = {stream: itertools.count(first, step) for stream in streams}
    with pool.limited():
        while (begun := time.monotonic()) < end:
            stream = min(sorted(spent, reverse=first % 2 == 0), key=spent.__getitem__)
            number = next(numbers[stream])
            for text in attacking.round(stream, f"{name} {stream} {number}", end):
                again = f"--only {stream} --seed {name} --round {number}"
                print(f"\nfinding: {text}\nfirst in {again}", flush=True)
            spent[stream] += time.monotonic() - begun
    counts = sorted(attacking.counts.items())
    print(", ".join(f"{what} {count:,}" for what, count in counts), flush=True)
    sys.exit(1 if attacking.known else 0)


def program(case: Case) -> str:
    """Return a Python program that fails as long as the fault of a case exists."""
    return f"""\
from math import inf, nan
from tests.fuzz.cases import Case, KernelRun, NumpyRun, View
from tests.fuzz.checking import check

check({case!r})
"""
