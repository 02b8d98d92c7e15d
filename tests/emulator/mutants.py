"""Mutates the kernels and says which changes no case notices.

``python -m tests.emulator.mutants [--kernel conv_forward] [--limit N] [--seed S] [--jobs J]``

A mutant is a kernel source with one literal, one comparison or one synchronisation changed.  The
cases of ``tests/emulator/cases.py`` run on it under the checker; it is killed by a report, by wrong
numbers, by a crash or by running too long.  A survivor is answered by a new case, or argued to be
equivalent in ``equivalent_mutants.toml``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from unittest import mock

from .build import INCLUDE_DIRECTORY, KERNEL_DIRECTORY, BuildError, build_runtime
from .reports import CheckerError

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
NOT_MUTATED = ("ptx.cuh", "parameters.cuh")  # no logic of their own
SECONDS = 120
"""What a mutant has at least, and five times what its cases take on the unchanged kernels."""

Case = tuple[str, Callable[[], None]]
"""A name, and what raises CheckerError or AssertionError where the kernels are wrong."""

CasesOf = Callable[[str], Sequence[Case]]
"""The cases that a mutant of a file is judged by; a function of a module, for child processes."""


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        file: Name of the kernel file or header.
        line: Number of the line, from 1.
        source: The line as it is, stripped.
        change: ``old -> new``; ``removed`` for a statement.
        text: The whole file, changed.
    """

    file: str
    line: int
    source: str
    change: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: [{self.change}] in: {self.source}"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``survived``, ``uncompiled``, or what killed it."""

    mutant: Mutant | None
    outcome: str
    detail: str = ""


# --------------------------------------------------------------------------------------------------
# Mutations
# --------------------------------------------------------------------------------------------------
_LITERAL = re.compile(r"(?<![\w.])(\d+)(?=(?:u|ll|ull)?\b)(?![\w.]*\.\d|\.)")
_COMPARISON = re.compile(r"(?<= )(<=|>=|==|!=|<|>)(?= )")
_FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_SYNCHRONISATION = re.compile(
    r"(?:while \(!)?(?:__sync\w+|__threadfence\w*|ptx::(?:cp_async_(?:wait|commit)\w*|fence_\w+"
    r"|mbarrier_\w+|named_barrier_\w+|cluster_(?:arrive|wait)|wgmma_(?:fence|commit|wait)"
    r"|tma_store_(?:commit|wait)\w*))(?:<[^;]*?>)?\([^;]*?\);"
    r"|while \(!ptx::mbarrier_\w+\([^;{]*\{\s*\}"
)
_LEFT_ALONE = re.compile(r"^\s*#|static_assert|__launch_bounds__|alignas|__align__|^\s*using\b")


def _without_comments(text: str) -> str:
    """The text with comments blanked, every other character in its place."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def mutations(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a source text."""
    code = _without_comments(text)
    lines = code.split("\n")

    def changed(start: int, end: int, new: str, change: str) -> Iterator[Mutant]:
        number = code.count("\n", 0, start)
        if not _LEFT_ALONE.search(lines[number]):
            source = text.split("\n")[number].strip()
            yield Mutant(file, number + 1, source, change, text[:start] + new + text[end:])

    for match in _LITERAL.finditer(code):
        value = int(match[1])
        for other in {value + 1, max(value - 1, 0)} - {value}:
            yield from changed(*match.span(), str(other), f"{value} -> {other}")
    for match in _COMPARISON.finditer(code):
        new = _FLIPPED[match[1]]
        yield from changed(*match.span(), new, f"{match[1]} -> {new}")
    for match in _SYNCHRONISATION.finditer(code):
        call = re.search(r"(__\w+|ptx::\w+)", match[0])[1]
        yield from changed(*match.span(), ";", f"{call} removed")


def all_mutants(kernel: str | None = None) -> list[Mutant]:
    """The mutants of one file (``conv_forward``, or a header as ``tile.cuh``), or of all."""
    found = []
    for path in sorted([*KERNEL_DIRECTORY.glob("*.cu"), *INCLUDE_DIRECTORY.glob("*.cuh")]):
        wanted = kernel in (None, path.name, path.stem)
        if wanted and path.name not in NOT_MUTATED:
            found.extend(mutations(path.name, path.read_text()))
    if not found:
        raise SystemExit(f"no kernel file or header called {kernel}")
    return found


# --------------------------------------------------------------------------------------------------
# Judgement
# --------------------------------------------------------------------------------------------------
def _run_cases(cases: Sequence[Case]) -> tuple[str, str]:
    for name, run in cases:
        try:
            run()
        except CheckerError as error:
            return "report", f"{name}: {error.reports[0]}"
        except BuildError as error:
            return "uncompiled", str(error)[:500]
        except AssertionError:
            return "numbers", name
        except Exception:
            return "error", f"{name}: {traceback.format_exc(limit=-1)}"
    return "survived", ""


def _child(mutant: Mutant | None, file: str, cases_of: CasesOf, folder: Path, answer) -> None:
    """Runs the cases on a mutated copy of the kernels; the parent reads the answer."""
    from cupyconv.gpu import sources

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    kernels = folder / "cuda"
    shutil.copytree(KERNEL_DIRECTORY, kernels)
    if mutant is not None:
        below = kernels if mutant.file.endswith(".cu") else kernels / "include"
        (below / mutant.file).write_text(mutant.text)
    build_runtime()  # from the usual cache
    os.environ["CUPYCONV_EMULATOR_CACHE"] = str(folder / "builds")
    with mock.patch.object(sources, "directory", return_value=kernels):
        answer.send(_run_cases(cases_of(file)))
    answer.close()


class _Trial:
    """A child process that judges one mutant."""

    def __init__(self, mutant: Mutant | None, file: str, cases_of: CasesOf, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.mutant = mutant
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self.receiver, sender = context.Pipe(duplex=False)
        arguments = (mutant, file, cases_of, Path(self._folder.name), sender)
        self._child = context.Process(target=_child, args=arguments)
        self._child.start()
        sender.close()
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def verdict(self) -> Verdict:
        """The outcome; to be called once the receiver is ready or the deadline is over."""
        outcome, detail = "timeout", f"more than {self.seconds:.0f} s"
        broken = None
        if self.receiver.poll():
            try:
                outcome, detail = self.receiver.recv()
            except EOFError:
                self._child.join()
                code = self._child.exitcode or 0
                if code < 0:
                    outcome, detail = "crash", signal.Signals(-code).name
                else:  # no mutant's doing: cases answer even when they fail
                    broken = code
        self._child.kill()
        self._child.join()
        self.receiver.close()
        self._folder.cleanup()
        if broken is not None:
            raise RuntimeError(f"the trial of {self.mutant} ended with {broken}")
        return Verdict(self.mutant, outcome, detail)


def judge(
    mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 1, seconds: float = SECONDS
) -> Iterator[Verdict]:
    """Runs the cases on each mutant in a child process; verdicts come as they are reached."""
    waiting = iter(mutants)
    running: list[_Trial] = []
    while True:
        while len(running) < jobs and (mutant := next(waiting, None)) is not None:
            running.append(_Trial(mutant, mutant.file, cases_of, seconds))
        if not running:
            return
        patience = min(trial.deadline for trial in running) - time.monotonic()
        ready = connection.wait([trial.receiver for trial in running], max(patience, 0))
        now = time.monotonic()
        for trial in [t for t in running if t.receiver in ready or t.deadline <= now]:
            running.remove(trial)
            yield trial.verdict()


def judge_unchanged(file: str, cases_of: CasesOf) -> Verdict:
    """Runs the cases on the kernels as they are; anything but ``survived`` is a wrong case."""
    trial = _Trial(None, file, cases_of, 10 * SECONDS)
    connection.wait([trial.receiver], trial.seconds)
    return trial.verdict()


def equivalent_mutants() -> dict[tuple[str, str, str], str]:
    """Reasons of the survivors argued equivalent, by file, line text and change."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {
        (one["file"], one["source"], change): one["reason"]
        for one in entries
        for change in one["changes"]
    }


def survivors(
    mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 2, seconds: float = SECONDS
) -> list[Mutant]:
    """The mutants that no case kills and that are not argued equivalent; prints as it goes."""
    excused = equivalent_mutants()
    counts: Counter[str] = Counter()
    alive: list[Mutant] = []
    started = time.monotonic()
    for verdict in judge(mutants, cases_of, jobs, seconds):
        mutant, outcome = verdict.mutant, verdict.outcome
        assert mutant is not None
        if outcome == "survived" and (mutant.file, mutant.source, mutant.change) in excused:
            outcome = "equivalent"
        counts[outcome] += 1
        if outcome == "survived":
            alive.append(mutant)
            print(f"survived  {mutant}", flush=True)
    compiled = sum(counts.values()) - counts["uncompiled"]
    killed = compiled - counts["survived"] - counts["equivalent"]
    print(
        f"{compiled} mutants that compile: {killed} killed"
        f" ({', '.join(f'{n} by {how}' for how, n in sorted(counts.items()) if how in KILLERS)}),"
        f" {counts['equivalent']} argued equivalent, {counts['survived']} survive;"
        f" {counts['uncompiled']} do not compile; {time.monotonic() - started:.0f} s"
    )
    return alive


KILLERS = ("report", "numbers", "crash", "timeout", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if there are unexplained survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.mutants", description=__doc__)
    parser.add_argument("--kernel", help="one file: conv_forward, tile.cuh, ...; default all")
    parser.add_argument("--limit", type=int, help="judge a random sample of so many")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    chosen = parser.parse_args(arguments)
    mutants = all_mutants(chosen.kernel)
    if chosen.limit is not None and chosen.limit < len(mutants):
        mutants = random.Random(chosen.seed).sample(mutants, chosen.limit)
    if chosen.list:
        print(*mutants, sep="\n")
        return 0

    from .cases import mutation_cases  # cases_of(file) -> [(name, run), ...]

    seconds = float(SECONDS)
    for file in sorted({mutant.file for mutant in mutants}):
        started = time.monotonic()
        verdict = judge_unchanged(file, mutation_cases)
        seconds = max(seconds, 5 * chosen.jobs * (time.monotonic() - started))
        if verdict.outcome != "survived":
            print(f"the cases of {file} fail on the kernels as they are: {verdict.detail}")
            return 2
    return 1 if survivors(mutants, mutation_cases, chosen.jobs, seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
