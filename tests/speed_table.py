"""The README's tables of speed, from the newest results of a GPU and of a CPU."""

from __future__ import annotations

from pathlib import Path

from cupyconv.bench import environment, report
from cupyconv.bench.report import Score
from cupyconv.bench.results import Results, newest
from cupyconv.bench.suites import KINDS
from cupyconv.problem import PASSES

NOTHING = {
    "gpu": "Nothing has been measured on a GPU yet: there is no results file. On a machine with "
    "one, `python -m tests.gpu --out tests/gpu/results` measures it.",
    "cpu": "Nothing has been measured on a CPU yet: there is no results file. "
    "`cupyconv bench --device cpu --json tests/cpu/results/bench-cpu.json` measures it.",
}
"""What stands in the place of the table of a device, before there is one."""

_COUNTED = "auto"  # the implementation that a user gets
_COLUMNS = {pass_.replace("_", "-"): pass_ for pass_ in PASSES} | {"all": "all"}


def table(root: Path, device: str) -> str:
    """The newest table as Markdown, with the processor, the date and the versions above it."""
    found = newest(root, device)
    return NOTHING[device] if found is None else of_results(found)


def of_results(found: Results) -> str:
    """The table of a run, as Markdown."""
    pairs = [pair for pair in report.comparisons(found) if pair.row.implementation == _COUNTED]
    counted = report.scores(pairs)
    dtypes = dict.fromkeys(pair.row.dtype for pair in pairs)
    lines = [_about(found), ""]
    if not pairs:
        return "\n".join([*lines, "PyTorch was not measured beside it."])
    lines += [f"| dtype | layers | {' | '.join(_COLUMNS)} |", f"|---|---|{'---:|' * len(_COLUMNS)}"]
    for dtype in dtypes:
        for kind in (*KINDS, "all"):
            rows = [p.row for p in pairs if p.row.dtype == dtype and kind in (p.row.kind, "all")]
            if rows:
                layers = len({row.layer for row in rows})
                scores = [counted.get((dtype, _COUNTED, kind, one)) for one in _COLUMNS.values()]
                lines.append(f"| {dtype} | {kind} ({layers}) | {' | '.join(map(_cell, scores))} |")
    if not found.finished:
        lines += ["", "The run did not come to its end: these are the figures it had."]
    return "\n".join(lines)


def _cell(score: Score | None) -> str:
    if score is None:
        return "–"
    counts = f"{score.wins} / {score.even} / {score.losses}"
    return f"{report.geometric_mean(score.ratios):.2f}× ({counts})"


def _about(found: Results) -> str:
    about = found.environment
    words = {"torch": "PyTorch", "cudnn": "cuDNN", "cupy": "CuPy", "cuda_runtime": "CUDA"}
    if about.get("device") == "cpu":
        words = {"torch": "PyTorch", "numpy": "NumPy", "blas": "BLAS"}
    versions = [f"{label} {about[word]}" for word, label in words.items() if about.get(word)]
    if about.get("smi"):
        versions.append(f"driver {about['smi'].get('driver_version')}")
        versions.append(f"SM clock up to {about['smi'].get('clocks.max.sm')}")
    return (
        f"{environment.title(about)} ({', '.join(versions)}): PyTorch's time over cupyconv's, "
        "geometric means over the layers of a kind, so many of which were measured. Above 1, "
        "cupyconv is faster; in brackets, how often it is faster, even and slower."
    )
