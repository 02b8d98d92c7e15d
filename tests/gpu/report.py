"""Write tables and files of a run's results: ``python -m tests.gpu report DIR``.

The files are report.md (the status of the hardware, speed compared with cuDNN, the planner's
choices, failures with reasons and with commands that repeat them), calibration.json (prices for the
planner, which fitting.py fits), golden-<chip>.npz, and bench-, tf32- and bf16x6-<chip>.json, from
which ``python -m tests.readme`` writes tables.
"""

from __future__ import annotations

import json
import shlex
import textwrap
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cupyconv.bench import environment
from cupyconv.bench.results import TORCH, Results, Row
from tests import speed_table
from tests.fuzz import cliffs
from tests.gpu import fitting, instructions
from tests.gpu.contenders import MOST_CANDIDATES
from tests.gpu.running import GOOD, SANITIZER_LINE

MOST_SPREAD = 1.1  # largest ratio of a timing's ends for choices and calibration (hand-set)

FEWEST = 3  # candidates of a pass without which its planned candidate is not judged (hand-set)

IMPLEMENTATIONS = {"0": "auto", "cudnn": TORCH, "deterministic": speed_table.DETERMINISTIC}
"""Implementation in a results file, keyed by candidate; "0" is the planner's choice."""

WIDTH = 124
"""Columns of the text that is written into the pages."""

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
    """Yield a record for each timed candidate, with the parts of its case's name as entries.

    A record without "timings", from before 2026-11-29, has one candidate, whose result was not
    compared with float64.
    """
    names = ("layer", "pass", "dtype", "precision", "layout", "candidate")
    for one in records:
        if "timings" in one or "row" in one:
            parts = dict(zip(names, one["case"].split(" "), strict=False))
            for timing in one.get("timings", [one]):
                found = one | timing["row"] | parts | timing
                yield found if "timings" in one else found | {"row": one["row"] | {"checked": 0.0}}


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


def results(records: Sequence[Record], precision: str, about: Record) -> Results:
    """Return planned kernels and cuDNN in one precision, as results of ``cupyconv bench``.

    Layers outside the benchmark's list are left out, and passes that only one of both computed.  A
    later measurement replaces an earlier one.
    """
    rows: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for one in timed(records):
        implementation = IMPLEMENTATIONS.get(one["candidate"])
        if one["precision"] == precision and one["layer"] not in cliffs.LAYERS and implementation:
            row = replace(Row(**one["row"]), implementation=implementation)
            rows[row.dtype, row.layout, row.layer, row.pass_][one["candidate"]] = row
    both = [found for found in rows.values() if {"0", "cudnn"} <= {*found}]
    return Results(environment=about, finished=True, rows=[r for f in both for r in f.values()])


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
        ours = {
            label: one["microseconds"] for label, one in candidates.items() if label.isdecimal()
        }
        if "0" in ours and len(ours) >= FEWEST:
            loss = ours["0"] / min(ours.values())
            losses[f"{dtype} {precision} {layout}", pass_].append((loss, layer))
    lines = [
        f"Passes with at least {FEWEST} timed candidates, their number in brackets:",
        "",
        "| dtype | pass | planned / fastest | worst layer |",
        "|---|---|---:|---|",
    ]
    for (order, pass_), found in losses.items():
        worst, layer = max(found)
        mean = geometric_mean(loss for loss, _ in found)
        lines.append(f"| {order} | {pass_} | {mean:.3f} ({len(found)}) | {layer} {worst:.2f} |")
    return lines if losses else [f"No pass has {FEWEST} timed candidates."]


def loops(records: Iterable[Record]) -> list[str]:
    """Return a table of the wall times of ResNet-50's layers, called in a row."""
    found = {one["case"]: one["microseconds"] for one in records if "microseconds" in one}
    ways = list(dict.fromkeys(way for times in found.values() for way in times))
    lines = [
        "Wall time per call in µs:",
        "",
        f"| ResNet-50's layers | {' | '.join(ways)} |",
        f"|---|{'---:|' * len(ways)}",
    ]
    for case, times in found.items():
        cells = (f"{times[way]:.1f}" if way in times else "–" for way in ways)
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines if found else ["They were not measured."]


def unmeasured(records: Sequence[Record], about: Record) -> list[str]:
    """Return a list of what no result shows yet."""
    found = list(timed(records))
    names = {one["candidate"] for one in found}
    steps = {one["step"] for one in records if one.get("state") == "passed"}
    planned = {key: names for key, names in by_pass(records).items() if {"0", "cudnn"} <= {*names}}
    slower = [
        names for names in planned.values()
        if names["0"]["microseconds"] > names["cudnn"]["microseconds"]
    ]  # fmt: skip
    few = sum(sum(map(str.isdecimal, names)) < MOST_CANDIDATES for names in slower)
    unchecked = sum(not one["row"]["checked"] for one in found)
    first = any(
        one["layout"] == "channels_first" and one["candidate"] == "cudnn"
        for one in found
        if one["kind"] == "depthwise" or one["layer"] in speed_table.ONE_D
    )
    lacks = {
        "Float32 by bf16x6": not any(one["precision"] == "bf16x6" for one in found),
        "cuDNN's deterministic algorithms": "deterministic" not in names,
        "cuDNN with channels first, in depthwise and 1-D layers": not first,
        "cuDNN's version": not about.get("cudnn"),
        "ResNet-50's layers in a row, eager and captured": "loop" not in steps,
        "Stalls of the kernels, by Nsight Compute": "profile" not in steps,
        f"{unchecked:,} of {len(found):,} timed results, against float64": unchecked,
        f"{MOST_CANDIDATES} candidates in {few} of the {len(slower)} passes in which cupyconv is "
        "slower": few,
    }
    return [f"- {what}" for what, is_missing in lacks.items() if is_missing] or ["Nothing."]


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


def failures(records: Iterable[Record], reasons: Sequence[Record] = ()) -> list[str]:
    """Return the failed cases, with a reason and a command that repeats one of each kind.

    Args:
        reasons: explanations of failures, from runs.toml.
    """
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in last_of_each(records):
        if one["state"] not in GOOD:
            step, case, why = one["step"], one["case"], reason(one)
            known = (
                each["reason"]
                for each in reasons
                if each["step"] == step and each["text"] in f"{case} {why}"
            )
            kinds[step, one["state"], why, next(known, "The reason is not known.")].append(case)
    lines = []
    for (step, state, why, known), cases in kinds.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        command = f"python -m tests.gpu {step} --only {shlex.quote(cases[0])}"
        lines += [f"- {step}: {cases[0]}{more}: {state}: {why}", f"  {known}", f"  `{command}`"]
    return lines or ["None."]


# -- the status of the hardware --------------------------------------------------------------------


def described(folder: Path) -> list[Record]:
    """Return the runs on GPUs of a folder's runs.toml, with the numbers of the results."""
    path = folder / "runs.toml"
    found: list[Record] = tomllib.loads(path.read_text())["runs"] if path.exists() else []
    numbers = counts(load(folder))
    for run in found:
        run["summary"] = run["summary"].format(**numbers)
        run["details"] = [text.format(**numbers) for text in run["details"]]
    return found


def status(folder: Path) -> str:
    """Return which GPUs have run the kernels, in short."""
    found = [f"On an {run['gpu']} ({run['date']}), {run['summary']}." for run in described(folder)]
    text = ["**Status on GPUs.** All kernels are verified on a CPU emulator.", *found]
    return _filled(" ".join([*text, "No other GPU has been tried."]))


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def status_details(folder: Path) -> str:
    """Return the results of each GPU that has run the kernels."""
    lines = []
    for run in described(folder):
        details = (_filled(f"- {detail}", "  ") for detail in run["details"])
        lines += [f"{run['gpu']}, {run['date']}:", "", *details, ""]
    return "\n".join(lines).rstrip()


def main(folder: Path) -> int:
    """Write and print the report of a folder's results; return 1 without results."""
    records = load(folder)
    if not records:
        print(f"no results*.jsonl in {folder}")
        return 1
    run = next(iter(described(folder)[-1:]), {})
    about = machine(records) | {name: run[name] for name in ("commit", "limits") if name in run}
    ends = {one["step"]: one for one in records if one.get("event") == "end"}
    unfinished = [one for one in ends.values() if one.get("left") != 0]
    unfinished += [one for one in records if one.get("event") == "no worker"]
    for precision, name in speed_table.FILES.items():
        if (found := results(records, precision, about)).rows or precision == "ieee":
            found.save(folder / f"{name}{about.get('architecture')}.json")
    parts = {
        f"Run on {environment.title(about)}": [
            *tally(records),
            "",
            *(f"- {one['text']}" for one in unfinished),
        ],
        "Status of the hardware": [status(folder), "", status_details(folder)],
        "Speed": [speed_table.table_of(folder / f"bench-{about.get('architecture')}.json")],
        "Layers in a row": loops(records),
        "Not measured yet": unmeasured(records, about),
        "Layers with large strides, large filters or few channels": unusual(records),
        "Choices of the planner": choices(records),
        "Failures": failures(records, run.get("reasons", ())),
    }
    text = "\n".join(
        line for title, lines in parts.items() for line in (f"## {title}", "", *lines, "")
    )
    (folder / "report.md").write_text(text)
    (folder / "calibration.json").write_text(json.dumps(calibration(records), indent=1) + "\n")
    instructions.write(records, folder)
    print(text)
    return 0
