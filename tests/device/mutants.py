"""Mutates the host code of the GPU path and says which changes no test notices.

``python -m tests.device.mutants [--file launch] [--limit N] [--seed S] [--jobs J]``

A mutant is a module with one comparison, number, operator, argument or statement changed.  Tests on
emulated devices run on it, and then those without a device that are nearest to it: first those that
run the changed line, the quickest before all others, and if none fails the whole of them.  A
survivor is answered by a new test, or argued to be equivalent in equivalent_mutants.toml.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tests.device import covered, mutated
from tests.emulator.mutants import equivalent_mutants
from tests.emulator.mutations import Mutant

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
LIMIT = 900  # s; the tests take one without a mutant

NEAREST = {
    "cupyconv/arrays.py": (
        "tests/test_dlpack.py",
        "tests/test_operations.py",
        "tests/test_errors.py",
    ),
    "cupyconv/backends.py": ("tests/test_operations.py", "tests/test_host_cost.py"),
    "cupyconv/measuring.py": ("tests/test_measuring.py",),
    "cupyconv/gpu/launch.py": ("tests/test_host_cost.py",),
    "cupyconv/gpu/tensormaps.py": ("tests/test_host_cost.py", "tests/test_hopper.py"),
}
"""The modules that are mutated, each with the tests without a device that are nearest to it."""

ON_DEVICES = ("tests/gpu/test_ways_in.py", "tests/device", "tests/gpu/test_cupy.py")

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
                if not isinstance(before, ast.Starred) and not isinstance(after, ast.Starred):
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


@dataclass(frozen=True)
class Suite:
    """Tests that judge mutants.

    Attributes:
        how: how they kill, in words.
        command: of Python, that runs them.
        covered: what each of them runs, as the plugin ``covered`` writes it.
        cache: kernels that they have compiled.
    """

    how: str
    command: tuple[str, ...]
    covered: Mapping[str, Any]
    cache: Path

    @staticmethod
    def of(how: str, command: tuple[str, ...], folder: Path) -> Suite:
        """The tests, which run once without a mutant.

        Raises:
            SystemExit: one of them fails.
        """
        folder.mkdir()
        cache, found = folder / "cache", folder / "covered.json"
        environment = {covered.VARIABLE: str(found), "CUPYCONV_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [sys.executable, *command, "-p", "tests.device.covered"],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"without a mutant, tests {how} fail:\n{done.stdout[-2000:]}")
        return Suite(how, command, json.loads(found.read_text()), cache)

    def nearest(self, mutant: Mutant) -> list[str]:
        """The tests that run a mutant's line, the quickest first; all if it runs between tests."""
        tests = {name: one for name, one in self.covered.items() if name}
        between = self.covered[""]["lines"].get(mutant.file, ())
        if mutant.line not in between:
            tests = {
                name: one
                for name, one in tests.items()
                if mutant.line in one["lines"].get(mutant.file, ())
            }
        return sorted(tests, key=lambda name: tests[name]["seconds"])

    def seconds(self, tests: Sequence[str]) -> float:
        """How long they take."""
        return sum(self.covered[name]["seconds"] for name in tests)

    def kills(self, mutant: Mutant, tests: Sequence[str] | None = None) -> bool:
        """Whether a test fails: of those that are named, in their order, else of all."""
        if tests is not None and not tests:
            return False
        module = mutant.file.removesuffix(".py").replace("/", ".")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "mutant.py").write_text(mutant.text)
            environment = {
                **os.environ,
                mutated.VARIABLE: f"{module}:{folder / 'mutant.py'}",
                "CUPYCONV_CACHE_DIR": str(folder / "cache"),
            }
            if self.cache.exists():
                shutil.copytree(self.cache, folder / "cache")
            if tests is not None:
                (folder / "tests.json").write_text(json.dumps(tests))
                environment[mutated.TESTS_VARIABLE] = str(folder / "tests.json")
            try:
                done = subprocess.run(
                    [sys.executable, *self.command, "-x", "-p", "tests.device.mutated"],
                    env=environment,
                    cwd=ROOT,
                    capture_output=True,
                    timeout=LIMIT,
                )
            except subprocess.TimeoutExpired:
                return True
        return done.returncode != 0


class Judges:
    """The suites, each run once without a mutant when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._suites: dict[str, Suite] = {}
        self._lock = Lock()

    def of(self, mutant: Mutant) -> tuple[Suite, Suite]:
        """The tests on devices, and those without that are nearest to the mutant's module."""
        with self._lock:
            on_devices = ("-m", "tests.device", *PYTEST, *ON_DEVICES)
            return (
                self._suite("on devices", on_devices, "devices"),
                self._suite("without", (*PYTEST, *NEAREST[mutant.file]), Path(mutant.file).stem),
            )

    def _suite(self, how: str, command: tuple[str, ...], name: str) -> Suite:
        if name not in self._suites:
            self._suites[name] = Suite.of(how, command, self._folder / name)
        return self._suites[name]

    def judge(self, mutant: Mutant) -> str:
        """How a mutant ends: killed on devices, killed without, or survived."""
        suites = self.of(mutant)
        nearest = {suite.how: suite.nearest(mutant) for suite in suites}
        for suite in sorted(suites, key=lambda one: one.seconds(nearest[one.how])):
            if suite.kills(mutant, nearest[suite.how]):
                return f"killed {suite.how}"
        for suite in suites:
            if suite.kills(mutant):
                return f"killed {suite.how}, by tests that do not run its line"
        return "survived"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if there are unexplained survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.mutants", description=__doc__)
    parser.add_argument("--file", help="one module: launch, backends, ...; default all")
    parser.add_argument("--limit", type=int, help="judge a random sample of so many")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        judges = Judges(Path(folder))
        for mutant, outcome in zip(mutants, pool.map(judges.judge, mutants), strict=True):
            if outcome == "survived" and (mutant.file, mutant.source, mutant.change) in argued:
                outcome = "argued equivalent"
            counts[outcome] += 1
            if outcome == "survived" or chosen.verbose:
                print(f"{outcome:17s} {mutant}", flush=True)
    print(
        f"{len(mutants)} mutants:",
        ", ".join(f"{count} {how}" for how, count in sorted(counts.items())),
        f"in {time.monotonic() - started:.0f} s",
    )
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
