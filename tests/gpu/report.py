"""Write tables and files of a run's results: ``python -m tests.gpu report DIR``.

The files are report.md (speed compared with cuDNN, the planner's choices, failures with commands
that repeat them), calibration.json (prices for the planner, which fitting.py fits),
golden-<chip>.npz, and bench-<chip>.json and tf32-<chip>.json, from which ``python -m tests.readme``
writes tables.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cupyconv.bench import environment
from cupyconv.bench.results import Results, Row
from tests import speed_table
from tests.fuzz import cliffs
from tests.gpu import fitting, instructions
from tests.gpu.running import GOOD, SANITIZER_LINE

MOST_SPREAD = 1.1  # largest ratio of a timing's ends for choices and calibration (hand-set)

Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """Return the records of all results files in a folder, without incomplete lines."""
    found = []
    for path in sorted(folder.glob("results*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def timed(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records of timed candidates, with the parts of their names as entries."""
    names = ("layer", "pass", "dtype", "precision", "layout", "candidate")
    for one in records:
        if one.get("step") == "contenders" and "row" in one:
            yield one | one["row"] | dict(zip(names, one["case"].split(" "), strict=True))


def steady(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the timed candidates whose times vary little; others may contain the host's time."""
    return (one for one in timed(records) if one["high"] <= MOST_SPREAD * one["low"])


def by_pass(records: Iterable[Record]) -> dict[tuple[str, ...], dict[str, Record]]:
    """Return steady candidates by label, for each layer, pass, dtype, precision and layout."""
    found: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for one in steady(records):
        key = tuple(one[name] for name in ("dtype", "precision", "layout", "layer", "pass"))
        found[key][one["candidate"]] = one
    return found


def once(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the steady candidates; a later measurement replaces an earlier one."""
    return (one for labels in by_pass(records).values() for one in labels.values())


def results(records: Iterable[Record], precision: str) -> Results:
    """Return planned kernels and cuDNN in one precision, as results of ``cupyconv bench``.

    Layers outside the benchmark's list are left out, and passes that only one of both computed.  A
    later measurement replaces an earlier one.
    """
    rows: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for one in timed(records):
        if one["precision"] == precision and one["layer"] not in cliffs.LAYERS:
            row = Row(**one["row"])
            key = row.dtype, row.layout, row.layer, row.pass_
            if one["candidate"] == "0":
                rows[key]["0"] = replace(row, implementation="auto")
            elif one["candidate"] == "cudnn":
                rows[key]["cudnn"] = row
    both = [row for pair in rows.values() if len(pair) == 2 for row in pair.values()]
    return Results(environment=machine(records), finished=True, rows=both)


def unusual(records: Sequence[Record]) -> list[str]:
    """Return a table of the planned kernels and cuDNN for the layers of the search for cliffs."""
    heading = ("layer", "pass", "dtype", "kernel", "us", "PyTorch: us", "PyTorch / cupyconv")
    lines = [f"| {' | '.join(heading)} |", "|---|---|---|---|---:|---:|---:|"]
    for (dtype, precision, layout, layer, pass_), candidates in by_pass(records).items():
        if layer in cliffs.LAYERS and "0" in candidates and layout == "channels_last":
            ours = candidates["0"]["microseconds"]
            words = [layer, pass_, f"{dtype} {precision}", candidates["0"]["kernel"], f"{ours:.1f}"]
            if "cudnn" in candidates:
                theirs = candidates["cudnn"]["microseconds"]
                words += [f"{theirs:.1f}", f"{theirs / ours:.2f}"]
            lines.append(f"| {' | '.join([*words, '', ''][:7])} |")
    return lines if len(lines) > 2 else ["None was measured."]


def choices(records: Sequence[Record]) -> list[str]:
    """Return a table of the planned candidate's time divided by the fastest candidate's."""
    losses: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for (dtype, precision, layout, layer, pass_), candidates in by_pass(records).items():
        ours = {label: one["microseconds"] for label, one in candidates.items() if label != "cudnn"}
        if "0" in ours and len(ours) > 1:
            loss = ours["0"] / min(ours.values())
            losses[f"{dtype} {precision} {layout}", pass_].append((loss, layer))
    lines = ["| dtype | pass | planned / fastest | worst layer |", "|---|---|---:|---|"]
    for (order, pass_), found in losses.items():
        worst, layer = max(found)
        mean = geometric_mean(loss for loss, _ in found)
        lines.append(f"| {order} | {pass_} | {mean:.3f} ({len(found)}) | {layer} {worst:.2f} |")
    return lines


def calibration(records: Sequence[Record]) -> dict[str, Any]:
    """Return the prices that today's cost model needs for the measured times."""
    about = machine(records)
    names = {"chip": "architecture", "gpu": "gpu", "date": "date", "commit": "commit"}
    timed = fitting.timings(once(records), about["architecture"])
    return {
        **{name: about.get(entry) for name, entry in names.items()},
        "prices": fitting.fit(timed) if timed else [],
    }


def replay(folder: Path) -> int:
    """Print the errors of today's estimates, and what the first choices lose; 1 without results."""
    records = load(folder)
    if not records:
        print(f"no results*.jsonl in {folder}")
        return 1
    timed = fitting.timings(once(records), machine(records)["architecture"])
    print("\n".join(fitting.report(timed)))
    return 0


def machine(records: Iterable[Record]) -> Record:
    """Return the last recorded description of the machine."""
    found: Record = {}
    for one in records:
        found = one.get("about") or found
    return found


def last_of_each(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each case; a case that failed may have been repeated."""
    return list({(one["step"], one["case"]): one for one in records if "case" in one}.values())


def counts(records: Sequence[Record]) -> dict[str, Counter[str]]:
    """Return the number of cases of each step, and of its cases in each state."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in last_of_each(records):
        found[one["step"]].update(("cases", one["state"]))
    return found


def tally(records: Sequence[Record]) -> list[str]:
    """Return a table of ``counts``."""
    found = counts(records)
    states = list(dict.fromkeys(["cases", *(state for one in found.values() for state in one)]))
    lines = [f"| step | {' | '.join(states)} |", f"|---|{'---:|' * len(states)}"]
    for step, count in found.items():
        lines.append(f"| {step} | {' | '.join(str(count[state] or '') for state in states)} |")
    return lines


def reason(one: Record) -> str:
    """Return why a case failed, in one line; a tool's first report has no ``detail``."""
    output = str(one.get("output", "")).splitlines()
    reports = [line.lstrip("= ") for line in output if line.startswith(SANITIZER_LINE)]
    return " ".join(str(one.get("detail") or next(iter(reports), "")).split())[:300]


def failures(records: Iterable[Record]) -> list[str]:
    """Return each failed case with its reason and the command that repeats it."""
    lines = []
    for one in last_of_each(records):
        if one["state"] not in GOOD:
            step, case = one["step"], one["case"]
            command = f"python -m tests.gpu {step} --only {shlex.quote(case)}"
            lines += [f"- {step}: {case}: {one['state']}: {reason(one)}", f"  `{command}`"]
    return lines or ["None."]


def main(folder: Path) -> int:
    """Write and print the report of a folder's results; return 1 without results."""
    records = load(folder)
    if not records:
        print(f"no results*.jsonl in {folder}")
        return 1
    about = machine(records)
    ends = {one["step"]: one for one in records if one.get("event") == "end"}
    unfinished = [one for one in ends.values() if one.get("left") != 0]
    unfinished += [one for one in records if one.get("event") == "no worker"]
    parts = {
        f"Run on {environment.title(about)}": [
            *tally(records),
            "",
            *(f"- {one['text']}" for one in unfinished),
        ],
        "Speed": speed_table.of_results(results(records, "ieee")).splitlines(),
        "Speed with TF32": speed_table.of_results(results(records, "tf32")).splitlines(),
        "Layers with large strides, large filters or few channels": unusual(records),
        "Choices of the planner": choices(records),
        "Failures": failures(records),
    }
    text = "\n".join(
        line for title, lines in parts.items() for line in (f"## {title}", "", *lines, "")
    )
    (folder / "report.md").write_text(text)
    (folder / "calibration.json").write_text(json.dumps(calibration(records), indent=1) + "\n")
    instructions.write(records, folder)
    for name, precision in (("bench", "ieee"), ("tf32", "tf32")):
        results(records, precision).save(folder / f"{name}-{about.get('architecture')}.json")
    print(text)
    return 0
