"""Runs cases on mutants, each in a process of its own, with as few builds as will do.

A mutant is judged by its first report or wrong number, so the cases that killed its neighbours come
first.  A case is left out where every kernel that it builds is, after preprocessing, what it is
without the change.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from unittest import mock

from . import build
from .build import (
    CHECKED_FLAGS,
    INCLUDE_DIRECTORY,
    KERNEL_DIRECTORY,
    BuildError,
    build_kernel,
    build_runtime,
    find_compiler,
)
from .mutations import Mutant
from .reports import CheckerError

Case = tuple[str, Callable[[], None]]
"""A name, and what raises CheckerError or AssertionError where the kernels are wrong."""

CasesOf = Callable[[str], Sequence[Case]]
"""The cases that a mutant of a file is judged by; a function of a module, for child processes."""

Variant = tuple[str, tuple[tuple[str, str], ...]]
"""A kernel file and the macros that it is built with."""

LEAST_SECONDS = 3.0
PATIENCE = 20
"""A case on a mutant has this multiple of its processor time on the kernels as they are."""


UNOPTIMISED = tuple("-O0" if flag == "-O1" else flag for flag in CHECKED_FLAGS)
"""How kernels are compiled for a trial: in a third of the time, and with all that they access."""


@dataclass(frozen=True)
class Measured:
    """A case on the kernels as they are: processor time, and digests of the sources it builds."""

    seconds: float
    sources: Mapping[Variant, str]


@dataclass(frozen=True)
class Unchanged:
    """The cases of a file on the kernels as they are.

    Attributes:
        failure: The first case that fails and why: a wrong case.  Empty where all pass.
        cases: By name, in the order in which they were given.
    """

    failure: str
    cases: Mapping[str, Measured]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``survived``, ``uncompiled``, or what killed it in which case."""

    mutant: Mutant
    outcome: str
    case: str = ""
    detail: str = ""


def _digest(folder: Path, variant: Variant) -> str:
    """Of the preprocessed source, without ptx.cuh, which is never changed."""
    file, defines = variant
    flags = ["-DCUPYCONV_PTX_CUH", f"-I{folder / 'include'}"]
    flags += [f"-D{name}={value}" for name, value in defines]
    with tempfile.TemporaryDirectory(prefix="expanded-") as scratch:
        output = Path(scratch) / "expanded.cpp"
        find_compiler().run(
            ["-xc++", "-E", "-P", *flags, str(folder / file), "-o", str(output)],
            f"preprocessing {file}",
        )
        return hashlib.sha256(output.read_bytes()).hexdigest()


@contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, CUPYCONV_EMULATOR_CACHE=str(folder)):
        yield


class _Builds:
    """Stands for build_kernel: sees what is built, and builds anew only what has changed."""

    def __init__(self, folder: Path, unchanged: Unchanged | None = None) -> None:
        self._folder = folder
        self._known = {
            variant: digest
            for one in (unchanged.cases.values() if unchanged else ())
            for variant, digest in one.sources.items()
        }
        self._changed: dict[Variant, bool] = {}
        self.seen: dict[Variant, str] = {}

    def changed(self, variant: Variant) -> bool:
        if variant not in self._changed:
            digest = _digest(self._folder / "cuda", variant)
            self._changed[variant] = digest != self._known.get(variant)
        return self._changed[variant]

    def __call__(
        self,
        path: Path,
        defines: Mapping[str, str] | None = None,
        include_directories: Sequence[Path] = (INCLUDE_DIRECTORY,),
        checked: bool = True,
    ) -> Path:
        variant = (path.name, tuple(sorted((defines or {}).items())))
        if path.parent == KERNEL_DIRECTORY:
            self.seen[variant] = _digest(KERNEL_DIRECTORY, variant)
        elif path.parent == self._folder / "cuda":
            if not self.changed(variant):
                return build_kernel(KERNEL_DIRECTORY / path.name, defines, checked=checked)
            with _cache_at(self._folder / "builds"):
                return build_kernel(path, defines, include_directories, checked)
        return build_kernel(path, defines, include_directories, checked)


def _fate(run: Callable[[], None]) -> tuple[str, str]:
    try:
        run()
    except CheckerError as error:
        return "report", str(error.reports[0])
    except BuildError as error:
        return "uncompiled", str(error)[:500]
    except AssertionError as error:
        return "numbers", str(error)[:500]
    except Exception:
        return "error", traceback.format_exc(limit=-1)
    return "survived", ""


def _quietly() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _measure(file: str, cases_of: CasesOf, folder: Path, answer: connection.Connection) -> None:
    """A child process: the cases on the kernels as they are; sends an Unchanged."""
    from . import convolutions, module

    _quietly()
    cases: dict[str, Measured] = {}
    failure = ""
    for name, run in cases_of(file):
        convolutions._module.cache_clear()  # each case is to build what it uses
        builds = _Builds(folder)
        started = time.process_time()
        with (
            mock.patch.object(build, "CHECKED_FLAGS", UNOPTIMISED),
            mock.patch.object(module, "build_kernel", builds),
        ):
            outcome, detail = _fate(run)
        cases[name] = Measured(time.process_time() - started, builds.seen)
        if outcome != "survived":
            failure = f"{name}: {detail}"
            break
    answer.send(Unchanged(failure, cases))


def _try(
    mutant: Mutant,
    order: Sequence[str],
    cases_of: CasesOf,
    unchanged: Unchanged,
    folder: Path,
    answer: connection.Connection,
) -> None:
    """A child process: the cases on a mutant; sends each case's name, then (outcome, detail)."""
    from cupyconv.gpu import sources

    from . import module

    _quietly()
    kernels = folder / "cuda"
    shutil.copytree(KERNEL_DIRECTORY, kernels)
    below = kernels if mutant.file.endswith(".cu") else kernels / "include"
    (below / mutant.file).write_text(mutant.text)
    build_runtime()  # from the usual cache
    builds = _Builds(folder, unchanged)
    cases = dict(cases_of(mutant.file))
    outcome, detail = "survived", ""
    with (
        mock.patch.object(sources, "directory", return_value=kernels),
        mock.patch.object(build, "CHECKED_FLAGS", UNOPTIMISED),
        mock.patch.object(module, "build_kernel", builds),
    ):
        for name in order:
            measured = unchanged.cases[name]
            if not any(map(builds.changed, measured.sources)):
                continue
            answer.send(name)
            # Processor time of this process: neither builds nor a pause of the machine count.
            signal.setitimer(signal.ITIMER_PROF, max(LEAST_SECONDS, PATIENCE * measured.seconds))
            outcome, detail = _fate(cases[name])
            signal.setitimer(signal.ITIMER_PROF, 0)
            if outcome != "survived":
                break
    answer.send((outcome, detail))


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.emulator.cases"])
    return context


class _Trial:
    """A child process that judges one mutant."""

    def __init__(
        self, mutant: Mutant, order: Sequence[str], cases_of: CasesOf, unchanged: Unchanged
    ) -> None:
        context = _context()
        self.mutant = mutant
        self.case = ""
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self.receiver, sender = context.Pipe(duplex=False)
        arguments = (mutant, order, cases_of, unchanged, Path(self._folder.name), sender)
        self._child = context.Process(target=_try, args=arguments)
        self._child.start()
        sender.close()

    def listen(self) -> Verdict | None:
        """The verdict once the child has reached it; to be called when the receiver is ready."""
        try:
            message = self.receiver.recv()
        except EOFError:
            return self._end(*self._death())
        if isinstance(message, str):
            self.case = message
            return None
        return self._end(*message)

    def _death(self) -> tuple[str, str]:
        self._child.join()
        code = self._child.exitcode or 0
        if code >= 0:  # no mutant's doing: cases answer even when they fail
            self._folder.cleanup()
            raise RuntimeError(f"the trial of {self.mutant} ended with {code}")
        name = signal.Signals(-code).name
        return ("timeout" if name == "SIGPROF" else "crash"), name

    def _end(self, outcome: str, detail: str) -> Verdict:
        self._child.join()
        self.receiver.close()
        self._folder.cleanup()
        case = "" if outcome == "survived" else self.case
        return Verdict(self.mutant, outcome, case, detail)


def judge_unchanged(file: str, cases_of: CasesOf) -> Unchanged:
    """Runs the cases on the kernels as they are."""
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        child = context.Process(target=_measure, args=(file, cases_of, Path(folder), sender))
        child.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"the cases of {file} ended with {child.exitcode}") from None
        finally:
            child.join()
            receiver.close()


@dataclass
class _Kills:
    """Which cases killed mutants of which lines."""

    _kills: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        if verdict.case:
            self._kills[verdict.mutant.file, verdict.mutant.line, verdict.case] += 1

    def order(self, mutant: Mutant, cases: Iterable[str]) -> list[str]:
        """The cases, those first that killed the most mutants the nearest by."""
        promise: Counter[str] = Counter()
        for (file, line, case), count in self._kills.items():
            if file == mutant.file:
                promise[case] -= count / (1 + abs(line - mutant.line)) ** 2
        return sorted(cases, key=promise.__getitem__)


def judge(mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 1) -> Iterator[Verdict]:
    """Runs the cases on each mutant in a child process; verdicts come as they are reached.

    Raises:
        RuntimeError: A case fails on the kernels as they are, or a child process by itself.
    """
    waiting = iter(mutants)
    running: list[_Trial] = []
    unchanged: dict[str, Unchanged] = {}
    kills = _Kills()
    while True:
        while len(running) < jobs and (mutant := next(waiting, None)) is not None:
            file = mutant.file
            if file not in unchanged:
                unchanged[file] = judge_unchanged(file, cases_of)
                if unchanged[file].failure:
                    raise RuntimeError(
                        f"the cases of {file} fail on the kernels as they are:"
                        f" {unchanged[file].failure}"
                    )
            order = kills.order(mutant, unchanged[file].cases)
            running.append(_Trial(mutant, order, cases_of, unchanged[file]))
        if not running:
            return
        ready = connection.wait([trial.receiver for trial in running])
        for trial in [trial for trial in running if trial.receiver in ready]:
            verdict = trial.listen()
            if verdict is not None:
                running.remove(trial)
                kills.add(verdict)
                yield verdict
