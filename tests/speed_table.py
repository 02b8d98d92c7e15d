"""The README's tables of speed, from the newest results of a GPU and of a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

from cupyconv.bench import environment, report
from cupyconv.bench.results import Comparison, Results, Row, comparisons, load
from cupyconv.bench.suites import KINDS
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
    "A figure is PyTorch's time over cupyconv's: above 1, cupyconv is faster. It is the geometric "
    "mean over the measured layers of a kind; the number of layers follows the kind in brackets. "
    "The brackets after a figure count the passes in which cupyconv is faster, equal and slower. "
    "Each library runs in its faster memory order, unless the heading names the order."
)
"""Explanation of the table."""

_COUNTED = "auto"  # the implementation that a user gets


def table(root: Path, device: str) -> str:
    """Return the newest table as Markdown, headed by the processor, the date and the versions."""
    found = newest(root, device)
    return NOTHING[device] if found is None else of_results(found)


def summary(root: Path) -> str:
    """Return a table of the newest run on a GPU: a row per dtype, and one for TF32."""
    found = newest(root, "gpu")
    if found is None:
        return NOTHING["gpu"]
    names = ("forward", "backprop-input", "backprop-filter", "all")
    lines = [_about(found), "", f"| dtype | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    architecture = found.environment.get("architecture")
    tf32 = load(root / "gpu" / "results" / f"tf32-{architecture}.json")
    for run, suffix in ((found, ""), (tf32, " with TF32")):
        columns = _columns(run)
        rows = [row for row in run.rows if row.implementation == _COUNTED]
        for dtype in dict.fromkeys(row.dtype for row in rows):
            count = len({row.layer for row in rows if row.dtype == dtype})
            cells = (
                _cell(columns[name], lambda row, dtype=dtype: row.dtype == dtype) for name in names
            )
            lines.append(f"| {dtype}{suffix} ({count} layers) | {' | '.join(cells)} |")
    return "\n".join(lines)


def newest(root: Path, device: str) -> Results | None:
    """Return the latest run on "gpu" or "cpu" among bench-*.json; skip unreadable files."""
    return next(iter(runs(root / device / "results", device)), None)


def by_card(root: Path) -> str:
    """Return the tables of all runs on GPUs as Markdown, the newest first."""
    return "\n\n".join(of_results(run) for run in runs(root / "gpu" / "results", "gpu"))


def runs(folder: Path, device: str) -> list[Results]:
    """Return the runs on "gpu" or "cpu" among bench-*.json, the newest first."""
    found = []
    for path in sorted(folder.glob("bench-*.json")) if folder.is_dir() else []:
        try:
            loaded = load(path)
        except ConvError as error:
            print(f"skipped {path.name}: {error}", file=sys.stderr)
            continue
        if loaded.environment.get("device") == device and loaded.rows:
            found.append(loaded)
    return sorted(found, key=lambda run: str(run.environment.get("date")), reverse=True)


def of_results(found: Results) -> str:
    """Return the table of a run, as Markdown."""
    busy, columns = report.busy(found.environment), _columns(found)
    lines = [_about(found), ""] + ([busy, ""] if busy else [])
    if not any(columns.values()):
        return "\n".join([*lines, "PyTorch was not measured."])
    lines += [READ, ""]
    lines += [f"| dtype | layers | {' | '.join(columns)} |", f"|---|---|{'---:|' * len(columns)}"]
    rows = [row for row in found.rows if row.implementation == _COUNTED]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for kind in (*KINDS, "all"):

            def fits(row: Row, dtype: str = dtype, kind: str = kind) -> bool:
                return row.dtype == dtype and kind in (row.kind, "all")

            layers = len({row.layer for row in filter(fits, rows)})
            if layers:
                cells = [_cell(pairs, fits) for pairs in columns.values()]
                lines.append(f"| {dtype} | {kind} ({layers}) | {' | '.join(cells)} |")
    if not found.finished:
        lines += ["", "The run was interrupted: the table contains the results until then."]
    return "\n".join(lines)


def _columns(found: Results) -> dict[str, list[Comparison]]:
    """Return comparisons by heading: each pass, all passes, and each of several memory orders."""

    def of_auto(layout: str | None = None) -> list[Comparison]:
        return [p for p in comparisons(found, layout) if p.row.implementation == _COUNTED]

    pairs = of_auto()
    columns = {
        pass_.replace("_", "-"): [pair for pair in pairs if pair.row.pass_ == pass_]
        for pass_ in PASSES
    }
    columns["all"] = pairs
    orders = list(dict.fromkeys(row.layout for row in found.rows))
    for order in orders if len(orders) > 1 else ():
        columns[f"all, {order}"] = of_auto(order)
    return columns


def _cell(pairs: list[Comparison], fits: Callable[[Row], bool]) -> str:
    chosen = [pair for pair in pairs if fits(pair.row)]
    if not chosen:
        return "–"
    counts = " / ".join(map(str, report.tally(chosen)))
    return f"{geometric_mean(pair.ratio for pair in chosen):.2f}× ({counts})"


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
