"""Check the emulator's model of the chip against witnesses: kernels proven on hardware.

``python -m tests.emulator.beliefs [--field WORDS] [--jobs N]``

``beliefs.toml`` lists what each wrapper of ptx.cuh encodes and, for each such field, changes of the
emulator that contradict it.  Each change is tried on the witnesses (``witnesses/cases.py``) that
contain the wrapper's instruction.  A field is confirmed if some witness fails under every change.
The results are written to ``results/confirmed.json``; unconfirmed fields also to the table of
``tests/gpu/README.md``.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import re
import resource
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from unittest import mock

from .trials import child

HERE = Path(__file__).resolve().parent
CONFIRMED = HERE / "results" / "confirmed.json"
REPOSITORY = HERE.parents[1]
SURVIVED = "survived"
AND = ", "
"""Separator of witness names."""

LISTING = REPOSITORY / "tests" / "gpu" / "README.md"
BEGIN, END = "<!-- unconfirmed fields -->", "<!-- end -->"
"""Markers around the table of unconfirmed fields."""

CPU_SECONDS = 120
"""CPU time limit of a trial of one change; a longer trial is taken to hang (hand-set)."""


@dataclass(frozen=True)
class Change:
    """A change of the emulator that contradicts a belief.

    Attributes:
        file: path relative to this folder.
        old, new: text that occurs once in the file, and its replacement.
        only: wrappers that it applies to; empty for all wrappers of the belief.
        argued: reason why no witness can fail under the change, if that is so.
    """

    file: str
    old: str
    new: str
    only: tuple[str, ...] = ()
    argued: str = ""

    @functools.cached_property
    def text(self) -> str:
        """The changed file's text."""
        text = (HERE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} has {text.count(self.old)} occurrences, not 1, of: {self.old}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Belief:
    """A field of one or more wrappers.

    Attributes:
        field: description of the belief.
        wrappers: wrappers that encode the field.
        changes: changes that contradict it.
        unconfirmed: reason why there are no changes.
    """

    field: str
    wrappers: tuple[str, ...]
    changes: tuple[Change, ...]
    unconfirmed: str = ""

    def changes_of(self, wrapper: str) -> list[Change]:
        """Return the changes that apply to a wrapper and are not argued."""
        return [
            change
            for change in self.changes
            if not change.argued and (not change.only or wrapper in change.only)
        ]


@functools.cache
def _read() -> dict:
    return tomllib.loads((HERE / "beliefs.toml").read_text())


def instructions() -> dict[str, re.Pattern[str]]:
    """Return the pattern of each wrapper's instruction in PTX."""
    return {name: re.compile(pattern) for name, pattern in _read()["instructions"].items()}


def _wrappers(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the wrappers whose names match patterns such as "tma_load_*"."""
    return tuple(name for pattern in patterns for name in fnmatch.filter(instructions(), pattern))


def beliefs() -> list[Belief]:
    """Return all beliefs in order."""
    return [
        Belief(
            entry["field"],
            _wrappers(entry["wrappers"]),
            tuple(
                Change(**{**change, "only": tuple(change.get("only", ()))})
                for change in entry.get("mutants", ())
            ),
            entry.get("unconfirmed", ""),
        )
        for entry in _read()["belief"]
    ]


def _rows(kind: str) -> dict[tuple[str, str], str]:
    fields = json.loads(CONFIRMED.read_text())[kind]
    return {
        (wrapper, field): value for field, row in fields.items() for wrapper, value in row.items()
    }


def confirmed() -> dict[tuple[str, str], str]:
    """Return the confirming witnesses by wrapper and field."""
    return _rows("confirmed")


def unconfirmed() -> dict[tuple[str, str], str]:
    """Return the reason for each unconfirmed wrapper and field."""
    return _rows("unconfirmed")


def unconfirmed_table() -> list[str]:
    """Return the Markdown table of unconfirmed fields."""
    by_field: dict[tuple[str, str], list[str]] = {}
    for (wrapper, field), why in unconfirmed().items():
        by_field.setdefault((field, why), []).append(f"`{wrapper}`")
    rows = [
        f"| {field} | {', '.join(wrappers)} | {why} |"
        for (field, why), wrappers in by_field.items()
    ]
    total = sum(len(belief.wrappers) for belief in beliefs())
    count = f"The witnesses confirm {len(confirmed())} of {total} fields of wrappers. Unconfirmed:"
    return [count, "", "| field | wrappers | reason |", "|---|---|---|", *rows]


# --------------------------------------------------------------------------------------------------
# A trial, run in a child process
# --------------------------------------------------------------------------------------------------
def _install(change: Change, folder: Path, prepared: Path) -> None:
    """Apply a change to this process."""
    from . import build, ptx, runtime

    path = HERE / change.file
    product = build.build_runtime()
    if path.suffix == ".cpp":
        product = folder / product.name
        source, changed_object = folder / path.name, folder / "changed.o"
        source.write_text(change.text)
        compiler, flags = build.find_compiler(), [*build.COMMON_FLAGS, *build.RUNTIME_FLAGS]
        compiler.run(
            [*flags, f"-I{build.HOST_DIRECTORY}", "-c", str(source), "-o", str(changed_object)],
            f"compiling {path.name}",
        )
        objects = [
            str(changed_object if name == path.name else prepared / f"{name}.o")
            for name in build.RUNTIME_SOURCES
        ]
        # Built kernels link to this name.
        soname = f"-Wl,-soname,{product.name}"
        compiler.run([*flags, "-shared", soname, *objects, "-o", str(product)], "linking")
    elif path.suffix == ".cuh":
        # A fixed path, so kernels are built once per change.
        headers = build.cache_directory() / f"changed-{build.digest(change.text)}"
        headers.mkdir(exist_ok=True)
        for header in build.HOST_DIRECTORY.glob("*.*h"):
            (headers / header.name).write_text(header.read_text())
        (headers / path.name).write_text(change.text)
        first = "cuda_builtins.h"
        build.SOURCE_FLAGS = tuple(
            str(headers / first) if flag == first else flag for flag in build.SOURCE_FLAGS
        )
    else:
        ptx.table.INSTRUCTIONS.clear()
        ptx.table.find.cache_clear()
        for module in (ptx.arithmetic, ptx.asynchronous, ptx.data_movement, ptx.warps):
            file = Path(module.__file__)
            text = change.text if file == path else file.read_text()
            exec(compile(text, file, "exec"), module.__dict__)
    for module in (build, runtime):
        mock.patch.object(module, "build_runtime", return_value=product).start()


def _trial(
    change: Change,
    groups: Sequence[Sequence[str]],
    known: dict[str, str],
    prepared: Path,
    answer: connection.Connection,
) -> None:
    """Child process: run witnesses until one of each group has failed; send None at the end.

    Each witness's name is sent before it runs, and its name and outcome afterwards.
    """
    from .reports import CheckerError
    from .witnesses.cases import WITNESSES

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with tempfile.TemporaryDirectory(prefix="belief-") as folder:
        _install(change, Path(folder), prepared)
        for group in groups:
            for name in group:
                if any(known.get(witness, SURVIVED) != SURVIVED for witness in group):
                    break
                if name in known:
                    continue
                answer.send((name,))
                try:
                    WITNESSES[name].testify()
                    known[name] = SURVIVED
                except CheckerError as error:
                    known[name] = error.reports[0].kind
                except AssertionError:
                    known[name] = "numbers"
                answer.send((name, known[name]))
    answer.send(None)


def fates(change: Change, groups: Sequence[Sequence[str]], prepared: Path) -> dict[str, str]:
    """Return the outcome of each witness under a change: SURVIVED, or how it failed.

    Args:
        change: the change of the emulator.
        groups: groups of witnesses; one failure per group is enough.
        prepared: folder with the runtime's object files.
    """
    known: dict[str, str] = {}
    while any(groups):
        started = None
        with child(_trial, change, groups, known, prepared) as (receiver, process):
            try:
                while message := receiver.recv():
                    started, *outcome = message
                    known.update((started, result) for result in outcome)
                return known
            except EOFError:
                process.join()
        if process.exitcode >= 0 or started is None or started in known:
            raise RuntimeError(f"the trial of {change} ended with {process.exitcode}")
        known[started] = signal.Signals(-process.exitcode).name
    return known


# --------------------------------------------------------------------------------------------------
# All beliefs
# --------------------------------------------------------------------------------------------------
def prepare(folder: Path) -> None:
    """Compile the object files of the unchanged runtime."""
    from . import build

    compiler, flags = build.find_compiler(), [*build.COMMON_FLAGS, *build.RUNTIME_FLAGS]
    for name in build.RUNTIME_SOURCES:
        source, product = build.HOST_DIRECTORY / name, folder / f"{name}.o"
        compiler.run([*flags, "-c", str(source), "-o", str(product)], f"compiling {name}")


def _witnesses_with(wrapper: str, texts: Mapping[str, str]) -> list[str]:
    """Return the witnesses that contain a wrapper's instruction."""
    pattern = instructions()[wrapper]
    return [name for name, text in texts.items() if pattern.search(text)]


def _judge(
    belief: Belief, texts: Mapping[str, str], prepared: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield wrapper, field and witnesses of confirmed fields; print the fate of each change."""
    kills: dict[Change, dict[str, str]] = {}
    for change in belief.changes:
        groups = [
            _witnesses_with(wrapper, texts)
            for wrapper in belief.wrappers
            if not change.only or wrapper in change.only
        ]
        known = fates(change, groups, prepared)
        kills[change] = {name: how for name, how in known.items() if how != SURVIVED}
        how = ", ".join(f"{name} ({outcome})" for name, outcome in kills[change].items())
        fate = f"killed by {how}" if how else "argued" if change.argued else "SURVIVES"
        print(f"{belief.field}: {change.new.strip()[:70]!r}: {fate}", flush=True)
    for wrapper in belief.wrappers:
        candidates, changes = set(_witnesses_with(wrapper, texts)), belief.changes_of(wrapper)
        witnesses = [
            next((name for name in kills[change] if name in candidates), None) for change in changes
        ]
        if changes and None not in witnesses:
            yield wrapper, belief.field, AND.join(dict.fromkeys(map(str, witnesses)))


def _why_not(belief: Belief, wrapper: str, texts: Mapping[str, str]) -> str:
    """Return the reason why a field is unconfirmed for a wrapper."""
    argued = [change.argued for change in belief.changes if change.argued]
    if belief.unconfirmed or argued:
        return belief.unconfirmed or argued[0]
    if not _witnesses_with(wrapper, texts):
        return "no witness has the instruction"
    return "no witness with the instruction fails under every change"


def write(found: Mapping[tuple[str, str], str], whys: Mapping[tuple[str, str], str]) -> None:
    """Write CONFIRMED and the table of unconfirmed fields.

    Args:
        found: confirming witnesses by wrapper and field.
        whys: reasons for the unconfirmed fields.
    """
    results: dict[str, dict[str, dict[str, str]]] = {"confirmed": {}, "unconfirmed": {}}
    for belief in beliefs():
        for wrapper in belief.wrappers:
            key = wrapper, belief.field
            kind = "confirmed" if key in found else "unconfirmed"
            value = found.get(key) or whys.get(key, "not tried")
            results[kind].setdefault(belief.field, {})[wrapper] = value
    CONFIRMED.write_text(json.dumps(results, indent=1) + "\n")
    head, _, remainder = LISTING.read_text().partition(BEGIN)
    _, _, tail = remainder.partition(END)
    LISTING.write_text("\n".join([head + BEGIN, *unconfirmed_table(), END + tail]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.beliefs", description=__doc__)
    parser.add_argument(
        "--field", default="", help="Try only fields whose description contains this text."
    )
    parser.add_argument("--jobs", type=int, default=2, help="Number of parallel processes.")
    options = parser.parse_args(arguments)
    known = confirmed()
    selection = [belief for belief in beliefs() if options.field in belief.field]
    texts: dict[str, str] = {}
    if any(belief.changes for belief in selection):
        from .witnesses import MissingError
        from .witnesses.cases import WITNESSES

        try:
            texts = {name: witness.kernel().ptx for name, witness in WITNESSES.items()}
        except MissingError as error:
            print(error, file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory(prefix="runtime-") as folder:
        if texts:
            prepare(Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda belief: list(_judge(belief, texts, Path(folder))), selection)
            rows = [row for found in results for row in found]
    fields = sum(len(belief.wrappers) for belief in selection)
    print(f"{fields} fields of wrappers: {len(rows)} confirmed, {fields - len(rows)} not")
    reasons = {
        (wrapper, belief.field): _why_not(belief, wrapper, texts)
        for belief in selection
        for wrapper in belief.wrappers
    }
    previous = {key: witness for key, witness in known.items() if key not in reasons}
    found = {**previous, **{(wrapper, field): witness for wrapper, field, witness in rows}}
    write(found, {**unconfirmed(), **reasons})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
