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
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any
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
"""Minimum CPU time limit of a case on a mutant (hand-set)."""

PATIENCE = 20
"""CPU time limit of a case on a mutant, as a multiple of its time on the original (hand-set)."""


UNOPTIMISED = tuple("-O0" if flag == "-O1" else flag for flag in CHECKED_FLAGS)
"""Compiler flags of trials: -O0 takes a third of the compile time, and keeps every access."""


@dataclass(frozen=True)
class Measured:
    """A case on the original kernels: CPU time, and digests of the sources that it builds."""

    seconds: float
    sources: Mapping[Variant, str]


Unchanged = Mapping[str, Measured]
"""The cases of a file on the original kernels, by name, in the order of the cases."""


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

    def __init__(self, folder: Path, unchanged: Unchanged) -> None:
        self._folder = folder
        self._known = {
            variant: digest
            for measured in unchanged.values()
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
    """Child process: run the cases on the original kernels; send an Unchanged, or the failure."""
    from . import convolutions, module

    _silence_stderr()
    cases: dict[str, Measured] = {}
    for name, run in cases_of(file):
        convolutions._module.cache_clear()  # so each case builds what it uses
        builds = _Builds(folder, {})
        started = time.process_time()
        with (
            mock.patch.object(build, "CHECKED_FLAGS", UNOPTIMISED),
            mock.patch.object(module, "build_kernel", builds),
        ):
            outcome, detail = _fate(run)
        cases[name] = Measured(time.process_time() - started, builds.digests)
        if outcome != "survived":
            answer.send(f"{name}: {detail}")
            return
    answer.send(cases)


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
            measured = unchanged[name]
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


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Any, Any]]:
    """Run a function in a new process; yield the receiving end of its pipe, and the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.emulator.cases"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    with receiver:
        try:
            yield receiver, process
        finally:
            process.join()


def judge_unchanged(file: str, cases_of: CasesOf) -> Unchanged:
    """Run the cases on the original kernels.

    Raises:
        RuntimeError: A case fails, or the child process exits by itself.
    """
    with (
        tempfile.TemporaryDirectory(prefix="unchanged-") as folder,
        child(_measure, file, cases_of, Path(folder)) as (receiver, process),
    ):
        try:
            answer = receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"the cases of {file} ended with {process.exitcode}") from None
    if isinstance(answer, str):
        raise RuntimeError(f"the cases of {file} fail on the original kernels: {answer}")
    return answer


def _judge_mutant(
    mutant: Mutant, order: Sequence[str], cases_of: CasesOf, unchanged: Unchanged
) -> Verdict:
    """Run the cases on a mutant in a child process."""
    case = ""
    with (
        tempfile.TemporaryDirectory(prefix="mutant-") as folder,
        child(_try, mutant, order, cases_of, unchanged, Path(folder)) as (receiver, process),
    ):
        try:
            while isinstance(message := receiver.recv(), str):
                case = message
            outcome, detail = message
        except EOFError:
            process.join()
            code = process.exitcode or 0
            if code >= 0:  # not caused by the mutant: failing cases still answer
                raise RuntimeError(f"the trial of {mutant} ended with {code}") from None
            detail = signal.Signals(-code).name
            outcome = "timeout" if detail == "SIGPROF" else "crash"
    return Verdict(mutant, outcome, "" if outcome == "survived" else case, detail)


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
    """Run the cases on each mutant in a child process; yield the verdicts in order.

    Raises:
        RuntimeError: A case fails on the original kernels, or a child process exits by itself.
    """
    unchanged: dict[str, Unchanged] = {}
    kills = _Kills()
    lock = threading.Lock()

    def verdict_of(mutant: Mutant) -> Verdict:
        with lock:
            if mutant.file not in unchanged:
                unchanged[mutant.file] = judge_unchanged(mutant.file, cases_of)
            order = kills.order(mutant, unchanged[mutant.file])
        verdict = _judge_mutant(mutant, order, cases_of, unchanged[mutant.file])
        with lock:
            kills.add(verdict)
        return verdict

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(verdict_of, mutants)
    finally:
        pool.shutdown(cancel_futures=True)
