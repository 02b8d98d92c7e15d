"""Mutates the host code of the GPU path and says which changes no test notices.

``python -m tests.device.mutants [--file launch] [--limit N] [--minutes M] [--jobs J]``

A mutant is a module with one comparison, number, operator, argument or statement changed.  Tests
run on it that run the changed line, as many as take a minute of a core, those first that are quick
and have killed many of the module's mutants: those without a device that are nearest to it and, if
it survives, those on emulated devices.  A survivor is answered by a new test, or argued to be
equivalent in equivalent_mutants.toml.  What was killed is kept in a folder, so that a run that is
ended goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any

from tests.device import covered, forked, mutated
from tests.emulator.build import cache_directory, digest
from tests.emulator.mutants import equivalent_mutants
from tests.emulator.mutations import Mutant

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
CPU_LIMIT = 200  # s; a mutant that takes more never ends, however busy the machine is
FOLDER = cache_directory() / "device-mutants"

NEAREST = {
    "cupyconv/arrays.py": (
        "tests/test_dlpack.py",
        "tests/test_operations.py",
        "tests/test_errors.py",
    ),
    "cupyconv/backends.py": ("tests/test_operations.py", "tests/test_warm.py"),
    "cupyconv/measuring.py": ("tests/test_measuring.py",),
    "cupyconv/prepared.py": ("tests/test_prepared.py",),
    "cupyconv/warming.py": ("tests/test_warm.py",),
    "cupyconv/planning/reach.py": ("tests/test_planning.py", "tests/test_reach.py"),
    "cupyconv/gpu/bias.py": ("tests/test_kernels.py", "tests/test_launches.py"),
    "cupyconv/gpu/bindings.py": ("tests/test_launches.py",),
    "cupyconv/gpu/chunks.py": ("tests/test_kernels.py", "tests/test_launches.py"),
    "cupyconv/gpu/compiler.py": ("tests/test_kernel_cache.py", "tests/test_warm.py"),
    "cupyconv/gpu/copies.py": ("tests/test_hopper.py", "tests/test_arranged.py"),
    "cupyconv/gpu/direct.py": ("tests/test_kernels.py", "tests/test_launches.py"),
    "cupyconv/gpu/gather.py": (
        "tests/test_kernels.py",
        "tests/test_arranged.py",
        "tests/test_launches.py",
    ),
    "cupyconv/gpu/generic.py": ("tests/test_kernels.py",),
    "cupyconv/gpu/hopper.py": ("tests/test_hopper.py",),
    "cupyconv/gpu/launch.py": ("tests/test_launches.py",),
    "cupyconv/gpu/launches.py": ("tests/test_launches.py",),
    "cupyconv/gpu/overlapping.py": ("tests/test_launches.py",),
    "cupyconv/gpu/parameters.py": ("tests/test_kernels.py", "tests/test_planning.py"),
    "cupyconv/gpu/patch.py": ("tests/test_patch.py", "tests/test_launches.py"),
    "cupyconv/gpu/sources.py": ("tests/test_kernel_cache.py",),
    "cupyconv/gpu/tensormaps.py": ("tests/test_hopper.py",),
    "cupyconv/gpu/toeplitz.py": ("tests/test_toeplitz.py", "tests/test_launches.py"),
}
"""The modules that are mutated, each with the tests without a device that are nearest to it."""

ON_DEVICES = (
    "tests/gpu/test_ways_in.py",
    "tests/device/test_launch.py",
    "tests/device/test_measuring.py",
    "tests/device/test_host_cost.py",
    "tests/device/test_order.py",
    "tests/device/test_memory.py",
    "tests/device/test_bench.py",
    "tests/device/test_prepared.py",
    "tests/device/test_warm.py",
    "tests/gpu/test_cupy.py",
)
"""Not those of the driver, of CuPy's own kernels and of faults that are put in."""

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.BitOr: "&", ast.BitAnd: "|",
    ast.Div: "*",
}  # fmt: skip


def mutations(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a module's text, but for what only messages are made of."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()) + 1)
    raw = text.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def part(node: ast.AST) -> str:
        first, end = span(node)
        return raw[first:end].decode()

    def changed(node: ast.AST, first: int, end: int, new: str, change: str) -> Mutant:
        source = lines[node.lineno - 1].strip()
        text = (raw[:first] + new.encode() + raw[end:]).decode()
        return Mutant(file, node.lineno, source, change, text)

    def replaced(node: ast.AST, new: str, change: str) -> Mutant:
        return changed(node, *span(node), new, change)

    def between(node: ast.AST, before: ast.AST, after: ast.AST, new: str) -> Mutant:
        first, end = span(before)[1], span(after)[0]
        old = raw[first:end].decode()
        kept = old.strip(" ()\n")
        return changed(node, first, end, old.replace(kept, new, 1), f"{kept} -> {new}")

    for node in _code(ast.parse(text)):
        if isinstance(node, ast.Compare):
            for before, operator, after in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield between(node, before, after, _COMPARISONS[type(operator)])
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield replaced(node, str(node.value + 1), f"{node.value} -> {node.value + 1}")
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield between(node, node.left, node.right, _OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            for before, after in zip(node.values, node.values[1:], strict=False):
                yield between(node, before, after, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replaced(node, f"({part(node.operand)})", "not removed")
        elif isinstance(node, ast.If | ast.IfExp):
            for value in ("True", "False"):
                yield replaced(node.test, value, f"{part(node.test)} -> {value}")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield replaced(node, "pass", f"{part(node.value.func)} removed")
        elif isinstance(node, ast.Call) and part(node.func) not in ("min", "max"):  # of any order
            for before, after in zip(node.args, node.args[1:], strict=False):
                starred = isinstance(before, ast.Starred) or isinstance(after, ast.Starred)
                if not starred and part(before) != part(after):
                    new = f"{part(after)}, {part(before)}"
                    change = f"{part(before)} <-> {part(after)}"
                    yield changed(node, span(before)[0], span(after)[1], new, change)


def _code(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of what runs when the library is used: no imports, types, errors' words."""
    unseen: list[ast.AST] = [tree]
    while unseen:
        node = unseen.pop()
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                unseen += [child for child in children if isinstance(child, ast.AST)]


def all_mutants(file: str | None = None) -> list[Mutant]:
    """The mutants of one module (``launch``), or of all."""
    found = []
    for name in NEAREST:
        if file in (None, name, Path(name).stem):
            found += mutations(name, (ROOT / name).read_text())
    if not found:
        raise SystemExit(f"no module called {file} is mutated")
    return found


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--part", "sample")
PYTEST += ("-m", "not slow and not thorough")
_BROKEN, _NO_TESTS = 3, 5  # pytest's exit status
_FORK_SECONDS = 0.1  # of a core, about what a run takes beside its tests
_FIRST_SECONDS = 4  # of a core, that the likeliest tests may take before any others are run
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)


@dataclass(frozen=True)
class Tests:
    """One file of tests that judge mutants.

    Attributes:
        file: its path.
        on_devices: whether they run on emulated devices.
    """

    file: str
    on_devices: bool

    @property
    def modules(self) -> tuple[str, ...]:
        """Those whose mutants they judge."""
        return tuple(name for name in NEAREST if self.on_devices or self.file in NEAREST[name])

    @property
    def command(self) -> tuple[str, ...]:
        """Of Python, that runs tests of such a file."""
        return (*(("-m", "tests.device") if self.on_devices else ()), *PYTEST)


def files_of(mutant: Mutant) -> list[Tests]:
    """Those on devices, and those without that are nearest to the mutant's module."""
    return [
        *(Tests(file, True) for file in ON_DEVICES),
        *(Tests(file, False) for file in NEAREST[mutant.file]),
    ]


def lines_of_statement(mutant: Mutant) -> set[int]:
    """Those of the innermost statement around a mutant's line; of a compound one, of its head."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())):  # inner ones come later
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno
            if node.lineno <= mutant.line <= end:
                found = set(range(node.lineno, end + 1))
    return found or {mutant.line}


def functions_of(mutant: Mutant) -> list[tuple[CodeType, CodeType]] | None:
    """Those that a mutant changes, before and after; None if it changes what runs on import."""
    try:
        return forked.functions_changed(str(ROOT / mutant.file), mutant.text)
    except ValueError:
        return None


class Judge:
    """Judges mutants by tests, and keeps what it has found out in a folder.

    What is there is not done again, as long as the modules and the tests are what they were: which
    lines tests run, file by file, and which mutants were killed.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        """
        Args:
            folder: is made if it is not there.
            seconds: that tests may have taken which judge one mutant, without devices and on them.
        """
        self._folder, self._seconds = folder, seconds
        self._kernels = folder / "kernels"
        self._kernels.mkdir(parents=True, exist_ok=True)
        self._locks: defaultdict[Tests, Lock] = defaultdict(Lock)
        self._covered: dict[Tests, Mapping[str, Any]] = {}
        self._servers: defaultdict[tuple[str, ...], list[Server]] = defaultdict(list)
        self._servers_lock = Lock()
        self._fit: dict[tuple[str, ...], bool] = {}
        self._killed = folder / "killed.jsonl"
        self._known: dict[str, str] = {}
        self._kills: Counter[tuple[str, str]] = Counter()
        for line in self._killed.read_text().splitlines() if self._killed.exists() else ():
            self._know(*json.loads(line))

    def judge(self, mutant: Mutant) -> str:
        """How a mutant ends: "killed by", and the test; "not run" by any; or "survived"."""
        key = digest(mutant.file, mutant.text)
        if key not in self._known:
            killer, was_run = self._judge(mutant)
            if not killer:
                return "survived" if was_run else "not run"
            self._know(key, killer, mutant.file)
            with self._killed.open("a") as kept:
                kept.write(json.dumps([key, killer, mutant.file]) + "\n")
        return f"killed by {self._known[key]}"

    def _know(self, key: str, killer: str, file: str) -> None:
        self._known[key] = killer
        self._kills[file, killer] += 1

    def _judge(self, mutant: Mutant) -> tuple[str, bool]:
        """The test that kills it, empty if none does, and whether any was run."""
        was_run = False
        for on_devices in (False, True):
            killer, any_run = self._judge_by(mutant, self.tests_of(mutant, on_devices))
            was_run |= any_run
            if killer:
                return killer, True
        return "", was_run

    def _judge_by(
        self, mutant: Mutant, found: Sequence[tuple[float, str, Tests]]
    ) -> tuple[str, bool]:
        """The same, of these tests, as many of them as there is time for."""
        stages: list[dict[tuple[str, ...], list[str]]] = [defaultdict(list), defaultdict(list)]
        spent = 0.0
        for seconds, test, tests in found:
            fits = not spent or spent + seconds <= self._seconds
            if fits and self._fit.get((test, *tests.command), True):
                stages[spent > _FIRST_SECONDS][tests.command].append(test)
                spent += seconds
        for stage in stages:
            for command, running in stage.items():
                fit = running
                while killer := self._killer(mutant, command, fit):
                    if self._passes_without(mutant, command, killer):
                        return killer, True
                    fit = [one for one in fit if one != killer]
        return "", any(stages)

    def _passes_without(self, mutant: Mutant, command: Sequence[str], test: str) -> bool:
        """Whether a test that failed on a mutant does not without one, where it was run."""
        if (test, *command) not in self._fit:
            text = (ROOT / mutant.file).read_text()
            is_test = "::" in test
            fit = not is_test or not self._killer(replace(mutant, text=text), command, [test])
            self._fit[test, *command] = fit
            if not fit:
                print(f"left out, since it fails without a mutant: {test}", flush=True)
        return self._fit[test, *command]

    def tests_of(self, mutant: Mutant, on_devices: bool) -> list[tuple[float, str, Tests]]:
        """Seconds, name and file of the tests that run a mutant's statement, the likeliest first.

        All that run anything of its module, if the statement runs on import.
        """
        statement, on_import = lines_of_statement(mutant), functions_of(mutant) is None
        found = []
        for tests in files_of(mutant):
            if tests.on_devices != on_devices:
                continue
            for name, one in self.covered(tests).items():
                lines = one["lines"].get(mutant.file, ())
                if name and (lines if on_import else not statement.isdisjoint(lines)):
                    found.append((one["seconds"], name, tests))
        return sorted(found, key=lambda one: (-self._promise(mutant.file, *one[:2]), one[1]))

    def _promise(self, file: str, seconds: float, test: str) -> float:
        """Kills that a test is likely to add for each second, by those of the module's so far."""
        return (self._kills[file, test] + 1) / (seconds + _FORK_SECONDS)

    def covered(self, tests: Tests) -> Mapping[str, Any]:
        """What each test of a file runs, as the plugin ``covered`` writes it.

        One that fails without a mutant is left out.
        """
        with self._locks[tests]:
            if tests not in self._covered:
                texts = [(ROOT / name).read_text() for name in (tests.file, *tests.modules)]
                kept = self._folder / f"covered-{digest(tests.command, *texts)}.json"
                if not kept.exists():
                    self._cover(tests, kept)
                self._covered[tests] = json.loads(kept.read_text())
            return self._covered[tests]

    def _cover(self, tests: Tests, kept: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            found = Path(name, "covered.json")
            command = (*tests.command, tests.file, "-p", "tests.device.covered")
            done = self._run(command, {covered.VARIABLE: str(found)}, self._kernels)
            failed = _FAILED.findall(done.stdout)
            if done.returncode not in (0, _NO_TESTS) and not failed:
                raise SystemExit(f"without a mutant, {tests.file} fails:\n{done.stdout[-2000:]}")
            for test in failed:
                print(f"left out, since it fails without a mutant: {test}", flush=True)
            runs = json.loads(found.read_text())
            kept.write_text(json.dumps({one: runs[one] for one in runs if one not in failed}))

    def _killer(self, mutant: Mutant, command: Sequence[str], tests: Sequence[str]) -> str:
        """The first test that fails, of those named, in their order; empty if none does."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            # Files are put in place whole: a mutant's do not change those that it begins with.
            shutil.copytree(self._kernels, folder / "kernels", copy_function=os.link)
            run = self._anew if functions_of(mutant) is None else self._forked
            status, failed = run(mutant, command, tests, folder)
        if status in (-signal.SIGXCPU, -signal.SIGALRM):
            return f"a limit of {CPU_LIMIT} s"
        if status == _NO_TESTS:
            raise RuntimeError(f"none of the tests is found: {tests}")
        return [*failed, f"an end with status {status}"][0] if status else ""

    def _forked(
        self, mutant: Mutant, command: Sequence[str], tests: Sequence[str], folder: Path
    ) -> tuple[int, list[str]]:
        """Exit status and the tests that failed, of a process that has collected them before."""
        failed = folder / "failed"
        request = {
            "file": str(ROOT / mutant.file),
            "text": mutant.text,
            "tests": tests,
            "failed": str(failed),
            "seconds": CPU_LIMIT,
            "environment": {
                "CUPYCONV_CACHE_DIR": str(folder / "kernels"),
                "PYTEST_DEBUG_TEMPROOT": str(folder),
            },
        }
        every = [Tests(one, True) for one in ON_DEVICES]
        every += [Tests(one, False) for nearest in NEAREST.values() for one in nearest]
        files = dict.fromkeys(one.file for one in every if one.command == command)
        with self._servers_lock:
            idle = self._servers[tuple(command)]
            server = idle.pop() if idle else Server((*command, *files), self._kernels)
        status = server.ask(request)
        with self._servers_lock:
            idle.append(server)
        if status == _BROKEN:
            raise RuntimeError(f"a process that judges mutants cannot judge {mutant}")
        return status, failed.read_text().splitlines() if failed.exists() else []

    def _anew(
        self, mutant: Mutant, command: Sequence[str], tests: Sequence[str], folder: Path
    ) -> tuple[int, list[str]]:
        """The same, of a process that imports the mutant."""
        module = mutant.file.removesuffix(".py").replace("/", ".")
        (folder / "mutant.py").write_text(mutant.text)
        (folder / "tests.json").write_text(json.dumps(tests))
        environment = {
            mutated.VARIABLE: f"{module}:{folder / 'mutant.py'}",
            mutated.TESTS_VARIABLE: str(folder / "tests.json"),
        }
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        command = (*command, *files, "-x", "-p", "tests.device.mutated")
        done = self._run(command, environment, folder / "kernels", _limit)
        return done.returncode, _FAILED.findall(done.stdout)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        kernels: Path,
        before: Callable[[], None] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **environment, "CUPYCONV_CACHE_DIR": str(kernels)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=before,
        )


class Server:
    """A process that has collected tests, and runs some of them on mutants in forks of itself."""

    def __init__(self, command: Sequence[str], kernels: Path) -> None:
        asked, answered = os.pipe(), os.pipe()
        numbers = (asked[0], answered[1])
        subprocess.Popen(
            [sys.executable, *command, "-x", "-p", "tests.device.forked"],
            env={
                **os.environ,
                forked.VARIABLE: ",".join(map(str, numbers)),
                "CUPYCONV_CACHE_DIR": str(kernels),
            },
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=numbers,
        )
        for number in numbers:
            os.close(number)
        self._requests, self._answers = os.fdopen(asked[1], "w"), os.fdopen(answered[0])

    def ask(self, request: Mapping[str, Any]) -> int:
        """The exit status of a run."""
        print(json.dumps(request), file=self._requests, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError("a process that judges mutants has ended")
        return int(answer)


def _limit() -> None:
    forked.limit(CPU_LIMIT)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if there are unexplained survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.mutants", description=__doc__)
    parser.add_argument("--file", help="one module: launch, backends, ...; default all")
    parser.add_argument("--limit", type=int, help="judge a random sample of so many")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--seconds", type=float, default=60, help="of tests of either kind")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for what has been found out")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    chosen = parser.parse_args(arguments)
    mutants = all_mutants(chosen.file)
    if chosen.limit is not None and chosen.limit < len(mutants):
        mutants = random.Random(chosen.seed).sample(mutants, chosen.limit)
    if chosen.list:
        print(*mutants, sep="\n")
        return 0
    argued = equivalent_mutants(EQUIVALENT)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    judge = Judge(chosen.folder, chosen.seconds)

    def outcome_of(mutant: Mutant) -> str:
        if (mutant.file, mutant.source, mutant.change) in argued:
            return "argued equivalent"
        late = time.monotonic() - started > chosen.minutes * 60
        return "not judged" if late else judge.judge(mutant)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        files = dict.fromkeys(tests for mutant in mutants for tests in files_of(mutant))
        list(pool.map(judge.covered, (tests for tests in files if not tests.on_devices)))
        for mutant, outcome in zip(mutants, pool.map(outcome_of, mutants), strict=True):
            counts["killed" if outcome.startswith("killed") else outcome] += 1
            if outcome in ("survived", "not run") or chosen.verbose:
                print(f"{outcome:17s} {mutant}", flush=True)
    print(
        f"{len(mutants)} mutants:",
        ", ".join(f"{count} {how}" for how, count in sorted(counts.items())),
        f"in {time.monotonic() - started:.0f} s",
    )
    return 1 if counts["survived"] + counts["not run"] else 0


if __name__ == "__main__":
    sys.exit(main())
