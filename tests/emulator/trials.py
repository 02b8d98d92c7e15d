"""Trials of mutants: cases run on each mutant in a child process, with few builds.

The first report or wrong number decides, so cases that killed nearby mutants run first.  A case is
skipped if preprocessing shows that the mutant changes none of its kernels.
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
"""A name, and a function that raises CheckerError or AssertionError for wrong kernels."""

CasesOf = Callable[[str], Sequence[Case]]
"""Function that returns the cases for a file; module-level, so child processes can import it."""

Variant = tuple[str, tuple[tuple[str, str], ...]]
"""A kernel file and its macros."""

LEAST_SECONDS = 3.0
"""Minimum CPU time limit of a case on a mutant (chosen)."""

PATIENCE = 20
"""CPU time limit of a case on a mutant, as a multiple of its time on the original (chosen)."""


UNOPTIMISED = tuple("-O0" if flag == "-O1" else flag for flag in CHECKED_FLAGS)
"""Compiler flags of trials: -O0 takes a third of the compile time, and keeps every access."""


@dataclass(frozen=True)
class Measured:
    """A case on the original kernels: CPU time, and digests of the sources that it builds."""

    seconds: float
    sources: Mapping[Variant, str]


@dataclass(frozen=True)
class Unchanged:
    """The cases of a file on the original kernels.

    Attributes:
        failure: The first failing case and the reason; empty if all pass.
        cases: Measurements by name, in the order of the cases.
    """

    failure: str
    cases: Mapping[str, Measured]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a mutant: ``survived``, ``uncompiled``, or what killed it in which case."""

    mutant: Mutant
    outcome: str
    case: str = ""
    detail: str = ""


def _digest(folder: Path, variant: Variant) -> str:
    """Return the digest of the preprocessed source, without ptx.cuh, which is not mutated."""
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
    """Replacement of build_kernel that records builds and rebuilds only changed kernels."""

    def __init__(self, folder: Path, unchanged: Unchanged | None = None) -> None:
        self._folder = folder
        self._known = {
            variant: digest
            for measured in (unchanged.cases.values() if unchanged else ())
            for variant, digest in measured.sources.items()
        }
        self._changed: dict[Variant, bool] = {}
        self.digests: dict[Variant, str] = {}

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
            self.digests[variant] = _digest(KERNEL_DIRECTORY, variant)
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


def _silence_stderr() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _measure(file: str, cases_of: CasesOf, folder: Path, answer: connection.Connection) -> None:
    """Child process: run the cases on the original kernels and send an Unchanged."""
    from . import convolutions, module

    _silence_stderr()
    cases: dict[str, Measured] = {}
    failure = ""
    for name, run in cases_of(file):
        convolutions._module.cache_clear()  # so each case builds what it uses
        builds = _Builds(folder)
        started = time.process_time()
        with (
            mock.patch.object(build, "CHECKED_FLAGS", UNOPTIMISED),
            mock.patch.object(module, "build_kernel", builds),
        ):
            outcome, detail = _fate(run)
        cases[name] = Measured(time.process_time() - started, builds.digests)
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
    """Child process: run cases on a mutant; send each case's name, then (outcome, detail)."""
    from cupyconv.gpu import sources

    from . import module

    _silence_stderr()
    kernels = folder / "cuda"
    shutil.copytree(KERNEL_DIRECTORY, kernels)
    directory = kernels if mutant.file.endswith(".cu") else kernels / "include"
    (directory / mutant.file).write_text(mutant.text)
    build_runtime()  # in the shared cache
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
            # CPU time of this process, so builds and a busy machine do not count.
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
        """Return the verdict once the child has sent it; call when the receiver is ready."""
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
        if code >= 0:  # not caused by the mutant: failing cases still answer
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
    """Run the cases on the original kernels."""
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
    """Counts of kills by file, line and case."""

    _kills: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        if verdict.case:
            self._kills[verdict.mutant.file, verdict.mutant.line, verdict.case] += 1

    def order(self, mutant: Mutant, cases: Iterable[str]) -> list[str]:
        """Sort the cases so that those with most kills near the mutant's line come first."""
        promise: Counter[str] = Counter()
        for (file, line, case), count in self._kills.items():
            if file == mutant.file:
                promise[case] -= count / (1 + abs(line - mutant.line)) ** 2
        return sorted(cases, key=promise.__getitem__)


def judge(mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 1) -> Iterator[Verdict]:
    """Run the cases on each mutant in a child process; yield verdicts as they are reached.

    Raises:
        RuntimeError: A case fails on the original kernels, or a child process exits by itself.
    """
    remaining = iter(mutants)
    running: list[_Trial] = []
    unchanged: dict[str, Unchanged] = {}
    kills = _Kills()
    while True:
        while len(running) < jobs and (mutant := next(remaining, None)) is not None:
            file = mutant.file
            if file not in unchanged:
                unchanged[file] = judge_unchanged(file, cases_of)
                if unchanged[file].failure:
                    raise RuntimeError(
                        f"the cases of {file} fail on the original kernels:"
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
