"""What the emulator believes of the chip, and which kernels that hardware has proved bear it out.

``python -m tests.emulator.beliefs [--field WORDS] [--unconfirmed] [--jobs N]``

``beliefs.toml`` lists what each wrapper of ptx.cuh encodes, and for each such field changes of the
emulator that contradict it.  Every change is tried on the witnesses (``witnesses/cases.py``) that
have the wrapper's instruction: one that fails under it bears the field out.  ``confirmed.toml`` is
what came of it; a field of a wrapper under whose changes no witness fails is unconfirmed, and in
the table of ``tests/gpu/README.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
CONFIRMED = HERE / "confirmed.toml"
REPOSITORY = HERE.parents[1]
SURVIVED = "survived"
AND = ", "
"""Between the names of witnesses."""

LISTING = REPOSITORY / "tests" / "gpu" / "README.md"
BEGIN, END = "<!-- what no witness bears out -->", "<!-- end -->"
"""Where the table of what is unconfirmed is."""

CPU_SECONDS = 120
"""Of a trial of one change; what takes longer never ends."""


@dataclass(frozen=True)
class Change:
    """One change of the emulator.

    Attributes:
        file: below this folder.
        old, new: what stands there, once, and what is put in its place.
        only: the wrappers that it is meant for, if not all of the belief's.
        argued: why no witness can tell, if none can.
    """

    file: str
    old: str
    new: str
    only: tuple[str, ...] = ()
    argued: str = ""

    @functools.cached_property
    def text(self) -> str:
        """The file, changed."""
        text = (HERE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has not once, but {text.count(self.old)}: {self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Belief:
    """A field of one or more wrappers.

    Attributes:
        field: what is believed.
        wrappers: that encode it.
        changes: that contradict it.
        unconfirmed: why there are none.
    """

    field: str
    wrappers: tuple[str, ...]
    changes: tuple[Change, ...]
    unconfirmed: str = ""

    def of(self, is_wanted: Callable[[tuple[str, str]], bool]) -> Belief:
        """That of some of its wrappers, told by wrapper and field."""
        wanted = (one for one in self.wrappers if is_wanted((one, self.field)))
        return replace(self, wrappers=tuple(wanted))

    def changes_of(self, wrapper: str) -> list[Change]:
        """Those meant for a wrapper, and not argued."""
        return [
            one for one in self.changes if not one.argued and (not one.only or wrapper in one.only)
        ]


@functools.cache
def _read() -> dict:
    return tomllib.loads((HERE / "beliefs.toml").read_text())


def instructions() -> dict[str, re.Pattern[str]]:
    """How the instruction of each wrapper is known in PTX."""
    return {name: re.compile(pattern) for name, pattern in _read()["instructions"].items()}


def beliefs() -> list[Belief]:
    """All of them, in order."""
    return [
        Belief(
            one["field"],
            tuple(one["wrappers"]),
            tuple(
                Change(**{**change, "only": tuple(change.get("only", ()))})
                for change in one.get("mutants", ())
            ),
            one.get("unconfirmed", ""),
        )
        for one in _read()["belief"]
    ]


def _rows(kind: str) -> dict[tuple[str, str], str]:
    found = tomllib.loads(CONFIRMED.read_text())
    key = {"confirmed": "witness", "unconfirmed": "why"}[kind]
    return {(one["wrapper"], one["field"]): one[key] for one in found.get(kind, ())}


def confirmed() -> dict[tuple[str, str], str]:
    """By wrapper and field, the witnesses that bear it out."""
    return _rows("confirmed")


def unconfirmed() -> dict[tuple[str, str], str]:
    """By wrapper and field, why no witness bears it out."""
    return _rows("unconfirmed")


def unconfirmed_table() -> list[str]:
    """The lines of what no witness bears out, a field a line, in Markdown."""
    by_field: dict[tuple[str, str], list[str]] = {}
    for (wrapper, field), why in unconfirmed().items():
        by_field.setdefault((field, why), []).append(f"`{wrapper}`")
    rows = [
        f"| {field} | {', '.join(wrappers)} | {why} |"
        for (field, why), wrappers in by_field.items()
    ]
    every = sum(len(one.wrappers) for one in beliefs())
    count = f"Witnesses bear out {len(confirmed())} of {every} fields of wrappers; not these:"
    return [count, "", "| field | of | why |", "|---|---|---|", *rows]


# --------------------------------------------------------------------------------------------------
# A trial, in a process of its own
# --------------------------------------------------------------------------------------------------
def _put_in(change: Change, folder: Path, prepared: Path) -> None:
    """Makes this process one with the change."""
    from . import build, ptx, runtime

    path = HERE / change.file
    product = build.build_runtime()
    if path.suffix == ".cpp":
        product = folder / product.name
        source, changed = folder / path.name, folder / "changed.o"
        source.write_text(change.text)
        compiler, flags = build.find_compiler(), [*build.COMMON_FLAGS, *build.RUNTIME_FLAGS]
        compiler.run(
            [*flags, f"-I{build.HOST_DIRECTORY}", "-c", str(source), "-o", str(changed)],
            f"compiling {path.name}",
        )
        objects = [
            str(changed if name == path.name else prepared / f"{name}.o")
            for name in build.RUNTIME_SOURCES
        ]
        # Of the same name: the kernels that are built ask for it by that.
        soname = f"-Wl,-soname,{product.name}"
        compiler.run([*flags, "-shared", soname, *objects, "-o", str(product)], "linking")
    elif path.suffix == ".cuh":
        # Always in the same place, so that kernels are built once.
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


def _try(change: Change, groups: Sequence[Sequence[str]], known: dict[str, str]) -> None:
    """Runs witnesses until one of each group has failed; prints each before and after."""
    from .reports import CheckerError
    from .witnesses.cases import WITNESSES

    for group in groups:
        for name in group:
            if any(known.get(one, SURVIVED) != SURVIVED for one in group):
                break
            if name in known:
                continue
            print(json.dumps([name]), flush=True)
            try:
                WITNESSES[name].testify()
                known[name] = SURVIVED
            except AssertionError:
                known[name] = "numbers"
            except CheckerError as error:
                known[name] = error.reports[0].kind
            print(json.dumps([name, known[name]]), flush=True)


def _trial() -> None:
    """A child process, told what to do by its parent."""
    fields, groups, known, prepared = json.load(sys.stdin)
    change = Change(**fields)
    with tempfile.TemporaryDirectory(prefix="belief-") as folder:
        _put_in(change, Path(folder), Path(prepared))
        _try(change, groups, known)


def fates(change: Change, groups: Sequence[Sequence[str]], prepared: Path) -> dict[str, str]:
    """What becomes of witnesses under a change: SURVIVED, or how they fail.

    Args:
        change: of the emulator.
        groups: of witnesses, of each of which one failure is enough.
        prepared: a folder with the runtime's objects.
    """
    known: dict[str, str] = {}
    while any(groups):
        request = json.dumps([asdict(change), groups, known, str(prepared)])
        done = subprocess.run(
            [sys.executable, "-m", "tests.emulator.beliefs", "--trial"],
            input=request,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            preexec_fn=_limit,
        )
        begun = None
        for line in done.stdout.splitlines():
            if line.startswith("["):
                begun, *outcome = json.loads(line)
                known.update((begun, one) for one in outcome)
        if done.returncode == 0:
            return known
        if done.returncode > 0 or begun is None or begun in known:
            raise RuntimeError(f"the trial of {change} ended with {done.returncode}: {done.stderr}")
        known[begun] = signal.Signals(-done.returncode).name
    return known


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


# --------------------------------------------------------------------------------------------------
# All of them
# --------------------------------------------------------------------------------------------------
def prepare(folder: Path) -> None:
    """The runtime's objects as they are."""
    from . import build

    compiler, flags = build.find_compiler(), [*build.COMMON_FLAGS, *build.RUNTIME_FLAGS]
    for name in build.RUNTIME_SOURCES:
        source, product = build.HOST_DIRECTORY / name, folder / f"{name}.o"
        compiler.run([*flags, "-c", str(source), "-o", str(product)], f"compiling {name}")


def _having(wrapper: str, texts: Mapping[str, str]) -> list[str]:
    """The witnesses with a wrapper's instruction."""
    pattern = instructions()[wrapper]
    return [name for name, text in texts.items() if pattern.search(text)]


def _judge(
    belief: Belief, texts: Mapping[str, str], prepared: Path
) -> Iterator[tuple[str, str, str]]:
    """Wrapper, field and witnesses of what is borne out; prints each change."""
    killed: dict[Change, dict[str, str]] = {}
    for change in belief.changes:
        groups = [
            _having(wrapper, texts)
            for wrapper in belief.wrappers
            if not change.only or wrapper in change.only
        ]
        known = fates(change, groups, prepared)
        killed[change] = {name: how for name, how in known.items() if how != SURVIVED}
        how = ", ".join(f"{name} ({outcome})" for name, outcome in killed[change].items())
        fate = f"killed by {how}" if how else "argued" if change.argued else "SURVIVES"
        print(f"{belief.field}: {change.new.strip()[:70]!r}: {fate}", flush=True)
    for wrapper in belief.wrappers:
        able, changes = set(_having(wrapper, texts)), belief.changes_of(wrapper)
        witnesses = [next((name for name in killed[one] if name in able), None) for one in changes]
        if changes and None not in witnesses:
            yield wrapper, belief.field, AND.join(dict.fromkeys(map(str, witnesses)))


def _why_not(belief: Belief, wrapper: str, texts: Mapping[str, str]) -> str:
    """Why no witness bears out what is not borne out."""
    argued = [one.argued for one in belief.changes if one.argued]
    if belief.unconfirmed or argued:
        return belief.unconfirmed or argued[0]
    if not _having(wrapper, texts):
        return "no witness has the instruction"
    return "those that have the instruction do not tell"


def write(found: Mapping[tuple[str, str], str], whys: Mapping[tuple[str, str], str]) -> None:
    """Writes confirmed.toml and the table of what is not.

    Args:
        found: by wrapper and field, the witnesses that bear it out.
        whys: of the others, why none does.
    """
    lines = ["# Written by `python -m tests.emulator.beliefs`.\n"]
    for one in beliefs():
        for wrapper in one.wrappers:
            witness = found.get((wrapper, one.field))
            kind, key = ("confirmed", "witness") if witness else ("unconfirmed", "why")
            last = witness or whys.get((wrapper, one.field), "not tried")
            named = (("wrapper", wrapper), ("field", one.field), (key, last))
            lines.append(f"[[{kind}]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in named))
    CONFIRMED.write_text("\n".join(lines))
    head, _, rest = LISTING.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    LISTING.write_text("\n".join([head + BEGIN, *unconfirmed_table(), END + tail]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.beliefs", description=__doc__)
    parser.add_argument("--field", default="", help="only fields with this in their name")
    parser.add_argument(
        "--unconfirmed", action="store_true", help="only what was not borne out when last tried"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.trial:
        _trial()
        return 0
    known = confirmed()
    judged = [one for one in beliefs() if chosen.field in one.field]
    if chosen.unconfirmed:
        judged = [one.of(lambda place: place not in known) for one in judged]
        judged = [one for one in judged if one.wrappers]
    texts: dict[str, str] = {}
    if any(one.changes for one in judged):
        from .witnesses import MissingError
        from .witnesses.cases import WITNESSES

        try:
            texts = {name: one.kernel().ptx for name, one in WITNESSES.items()}
        except MissingError as error:
            print(error, file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory(prefix="runtime-") as folder:
        if texts:
            prepare(Path(folder))
        with ThreadPoolExecutor(chosen.jobs) as pool:
            results = pool.map(lambda one: list(_judge(one, texts, Path(folder))), judged)
            rows = [row for found in results for row in found]
    fields = sum(len(one.wrappers) for one in judged)
    print(f"{fields} fields of wrappers: {len(rows)} confirmed, {fields - len(rows)} not")
    tried = {
        (wrapper, one.field): _why_not(one, wrapper, texts)
        for one in judged
        for wrapper in one.wrappers
    }
    kept = {place: one for place, one in known.items() if place not in tried}
    found = {**kept, **{(wrapper, field): one for wrapper, field, one in rows}}
    write(found, {**unconfirmed(), **tried})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
