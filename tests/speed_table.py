"""The pages' tables of speed, from the newest results of a GPU and of a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from cupyconv.bench import environment, report, suites
from cupyconv.bench.results import Comparison, Results, Row, best, comparisons, load
from cupyconv.errors import ConvError
from cupyconv.problem import PASSES

NOTHING = {
    "gpu": "Nothing has been measured on a GPU yet: there is no results file. On a machine with "
    "one, `python -m tests.gpu --out tests/gpu/results` measures it.",
    "cpu": "Nothing has been measured on a CPU yet: there is no results file. "
    "`cupyconv bench --device cpu --json tests/cpu/results/bench-cpu.json` measures it.",
}
"""Text shown for a device without a table."""

READ = (
    "A ratio is PyTorch's time over cupyconv's: above 1, cupyconv is faster. It is the geometric "
    "mean over passes; in brackets are the numbers of passes in which cupyconv is faster, equal "
    "and slower. *Sum* is PyTorch's total time over cupyconv's. The number of layers follows a "
    "kind in brackets."
)
HOST = (
    "These ratios compare GPU times. *Host* is the median time in µs until a call returns to "
    "Python. *Loop* is the ratio for a loop of calls, in which a call takes the longer of its GPU "
    "and host times."
)
ONE_ORDER = "Both libraries run with {}."
FASTER_ORDER = "Each library runs in its faster memory order, unless the heading names the order."
APART = (
    "The 1-D layers have a row of their own, since it compares with copies: PyTorch makes their "
    "3-D tensors contiguous, and then channels last again."
)
"""Explanations of the table."""

DETERMINISTIC = "torch, deterministic"
"""Implementation of PyTorch's rows with deterministic algorithms of cuDNN."""

PRECISIONS = {
    "ieee": "TF32 forbidden in both",
    "tf32": "TF32 in both",
    "bf16x6": "bf16x6; TF32 forbidden in PyTorch",
}
"""Meaning of each precision for float32 on a GPU, in the order of the table."""

FILES = {"ieee": "bench-", "tf32": "tf32-", "bf16x6": "bf16x6-"}
"""Beginnings of the names of results files, by precision."""

_COUNTED = "auto"  # the implementation that a user gets
_NONE = "–"  # cell without measurements
ONE_D = frozenset(layer.name for layer in suites.listed() if layer.problem.spatial_rank == 1)
"""Names of the 1-D layers, depthwise ones included."""


def table(root: Path, device: str) -> str:
    """Return the newest table as Markdown, headed by the processor, the date and the versions."""
    found = newest(root, device)
    return NOTHING[device] if found is None else of_results(found)


def summary(root: Path) -> str:
    """Return a table of the newest run on a GPU, without rows per kind of layer, and limits."""
    found = newest(root, "gpu")
    return NOTHING["gpu"] if found is None else of_results(found, in_short=True)


def newest(root: Path, device: str) -> Results | None:
    """Return the latest run on "gpu" or "cpu" among bench-*.json; skip unreadable files."""
    return next(iter(runs(root / device / "results", device)), None)


def by_card(root: Path) -> str:
    """Return the tables of all runs on GPUs as Markdown, the newest first."""
    return "\n\n".join(of_results(run) for run in runs(root / "gpu" / "results", "gpu"))


def runs(folder: Path, device: str) -> list[Results]:
    """Return the runs on "gpu" or "cpu" among bench-*.json, the newest first.

    The rows of other precisions, from the files of FILES, are added to those of a run.
    """
    found = []
    for path in sorted(folder.glob("bench-*.json")) if folder.is_dir() else []:
        try:
            loaded = _load(path)
        except ConvError as error:
            print(f"skipped {path.name}: {error}", file=sys.stderr)
            continue
        if loaded.environment.get("device") == device and loaded.rows:
            found.append(loaded)
    return sorted(found, key=lambda run: str(run.environment.get("date")), reverse=True)


def _load(path: Path) -> Results:
    first, *others = (path.with_name(path.name.replace("bench-", name)) for name in FILES.values())
    found = load(first)
    found.rows += [row for other in others if other.exists() for row in load(other).rows]
    return found


def table_of(path: Path) -> str:
    """Return the table of a results file bench-*.json, as Markdown."""
    return of_results(_load(path))


def of_results(found: Results, *, in_short: bool = False) -> str:
    """Return the table of a run, as Markdown; in short, without rows per kind, and limits."""
    lines, busy = [_about(found), ""], report.busy(found.environment)
    lines += [busy, ""] if busy else []
    if not comparisons(found):
        return "\n".join([*lines, "PyTorch was not measured."])
    orders = {row.layout for row in found.rows}
    read = [READ, FASTER_ORDER if len(orders) > 1 else ONE_ORDER.format(*orders).replace("_", " ")]
    if found.environment.get("device") != "cpu":
        read.insert(1, HOST)
        read += [APART] if any(row.layer in ONE_D for row in found.rows) else []
    lines += [" ".join(read), "", *_table(found, by_kind=not in_short), *_waiting(found)]
    if (limits := found.environment.get("limits")) and not in_short:
        lines += ["", "Limits of this run:", "", *(f"- {limit}" for limit in limits)]
    if not found.finished:
        lines += ["", "The run was interrupted: the table contains the results until then."]
    return "\n".join(lines)


def _table(found: Results, *, by_kind: bool) -> list[str]:
    """Return the lines of a table with a row per dtype, precision and group of layers."""
    rows = []
    for dtype in dict.fromkeys(row.dtype for row in found.rows):
        for precision, meaning in PRECISIONS.items():
            of_both = [r for r in found.rows if (r.dtype, r.precision) == (dtype, precision)]
            label = dtype
            if dtype == "float32" and found.environment.get("device") != "cpu":
                label += f", {meaning}"
            for group, fits in _groups(by_kind):
                part = replace(found, rows=list(filter(fits, of_both)))
                if layers := {row.layer for row in part.rows if row.implementation == _COUNTED}:
                    rows.append({"dtype": label, "layers": f"{group} ({len(layers)})"}
                                | _cells(part, {row.layout for row in found.rows}))  # fmt: skip
    columns = [name for name in rows[0] if any(row[name] != _NONE for row in rows)]
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    return lines + [f"| {' | '.join(row[name] for name in columns)} |" for row in rows]


def _groups(by_kind: bool) -> Iterator[tuple[str, Callable[[Row], bool]]]:
    """Yield names of groups of layers, and functions that tell whether a row is in the group."""
    for kind in suites.KINDS if by_kind else ():
        yield kind, lambda row, kind=kind: row.kind == kind and row.layer not in ONE_D
    yield "all but 1-D", lambda row: row.layer not in ONE_D
    yield "all but 1-D, depthwise", lambda row: row.layer not in ONE_D and row.kind != "depthwise"
    yield "1-D", lambda row: row.layer in ONE_D


def _cells(part: Results, orders: set[str]) -> dict[str, str]:
    """Return the cells of some layers by heading; ``orders`` has the run's memory orders."""
    pairs, fastest = _pairs(part), best(part.rows)
    fixed = [
        Comparison(pair.row, fastest[key])
        for pair in pairs
        if (key := (pair.row.dtype, pair.row.layer, pair.row.pass_, DETERMINISTIC)) in fastest
    ]
    cells = {
        pass_.replace("_", "-"): _mean([pair for pair in pairs if pair.row.pass_ == pass_])
        for pass_ in PASSES
    }
    cells |= {"all": _mean(pairs), "sum": _NONE, "deterministic cuDNN": _mean(fixed)}
    for order in sorted(orders, reverse=True) if len(orders) > 1 else ():
        cells[f"all, {order}"] = _mean(_pairs(part, order))
    host = "host: cupyconv / PyTorch"
    cells |= {host: _NONE, "loop": _NONE}
    ours, theirs = [pair.row for pair in pairs], [pair.other for pair in pairs]
    if pairs:
        theirs_sum, our_sum = (sum(row.microseconds for row in rows) for rows in (theirs, ours))
        cells["sum"] = f"{theirs_sum / our_sum:.2f}×"
    if pairs and all(row.host_microseconds for row in ours):
        cells[host] = " / ".join(
            f"{median(row.host_microseconds or 0 for row in rows):.0f}" for rows in (ours, theirs)
        )
        cells["loop"] = f"{geometric_mean(pair.loop_ratio for pair in pairs):.2f}×"
    return cells


def _pairs(part: Results, order: str | None = None) -> list[Comparison]:
    return [pair for pair in comparisons(part, order) if pair.row.implementation == _COUNTED]


def _mean(pairs: list[Comparison]) -> str:
    if not pairs:
        return _NONE
    counts = " / ".join(map(str, report.tally(pairs)))
    return f"{geometric_mean(pair.ratio for pair in pairs):.2f}× ({counts})"


def _waiting(found: Results) -> list[str]:
    """Return how often the host takes longer than the GPU, as lines below a table."""
    text = report.waiting([row for row in found.rows if row.implementation == _COUNTED])
    return ["", text.replace("cupyconv.bind", "`cupyconv.bind`")] if text else []


def _about(found: Results) -> str:
    about = found.environment
    on_cpu = about.get("device") == "cpu"
    omitted = ("cupy", "cuda_runtime", "cudnn") if on_cpu else ("numpy", "numba", "blas")
    versions = environment.versions(about, "cupyconv", "commit", "python", *omitted)
    if about.get("smi"):
        versions.append(f"driver {about['smi'].get('driver_version')}")
        versions.append(f"SM clock up to {about['smi'].get('clocks.max.sm')}")
    asked, there = found.options.get("layers"), len({row.layer for row in found.rows})
    how = [f"`{about['command']}`"] if about.get("command") else []
    how += [f"at commit {about['commit']}"] if about.get("commit") else []
    how += [f"{there} of {len(asked)} layers"] if asked else []
    told = f"Measured by {', '.join(how)}." if about.get("command") else ""
    return f"{environment.title(about)} ({', '.join(versions)}). {told}".rstrip()
