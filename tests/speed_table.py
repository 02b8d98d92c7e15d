"""The README's tables of speed, from the newest results of a GPU and of a CPU."""

from __future__ import annotations

from pathlib import Path

from cupyconv.bench import environment, report
from cupyconv.bench.peers import PEERS
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
"""Text shown for a device without a table."""

READ = (
    "A figure is another library's time over cupyconv's: above 1, cupyconv is faster. It is the "
    "geometric mean over the measured layers of a kind; the number of layers follows the kind in "
    "brackets. The brackets after a figure count the passes in which cupyconv is faster, equal and "
    "slower. Each library runs in its faster memory order, unless the heading names the order."
)
"""Explanation of the table."""

_COUNTED = "auto"  # the implementation that a user gets
_PASSES = {pass_.replace("_", "-"): pass_ for pass_ in PASSES}


def table(root: Path, device: str) -> str:
    """Return the newest table as Markdown, headed by the processor, the date and the versions."""
    found = newest(root, device)
    return NOTHING[device] if found is None else of_results(found)


def of_results(found: Results) -> str:
    """Return the table of a run, as Markdown."""
    busy, columns = report.busy(found.environment), _columns(found)
    lines = [_about(found), ""] + ([busy, ""] if busy else [])
    if not columns:
        return "\n".join([*lines, "No other library was measured."])
    lines += [READ, ""]
    lines += [f"| dtype | layers | {' | '.join(columns)} |", f"|---|---|{'---:|' * len(columns)}"]
    rows = [row for row in found.rows if row.implementation == _COUNTED]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for kind in (*KINDS, "all"):
            of_kind = (row for row in rows if row.dtype == dtype and kind in (row.kind, "all"))
            layers = len({row.layer for row in of_kind})
            if layers:
                scores = [column.get((dtype, kind)) for column in columns.values()]
                lines.append(f"| {dtype} | {kind} ({layers}) | {' | '.join(map(_cell, scores))} |")
    if not found.finished:
        lines += ["", "The run was interrupted: the table contains the results until then."]
    return "\n".join(lines)


def _columns(found: Results) -> dict[str, dict[tuple[str, str], Score]]:
    """Return the scores of each column by dtype and kind, keyed by the column's heading.

    Every peer has a column for all passes together.  The first peer also has a column for each
    pass and for each memory order.
    """
    columns = {}
    peers = report.measured_peers(found)
    for peer in peers:
        scores = report.scores(report.comparisons(found, peer))
        passes = _PASSES if peer == peers[0] else {}
        for heading, pass_ in {**passes, "all": "all"}.items():
            columns[f"{PEERS[peer]}: {heading}"] = _of_pass(scores, pass_)
    orders = report.layouts(found)
    for order in orders if peers and len(orders) > 1 else ():
        scores = report.scores(report.comparisons(found, peers[0], order))
        columns[f"{PEERS[peers[0]]}: all, {order}"] = _of_pass(scores, "all")
    return columns


def _of_pass(scores: dict[tuple[str, str, str, str], Score], wanted: str) -> dict:
    return {
        (dtype, kind): score
        for (dtype, implementation, kind, pass_), score in scores.items()
        if (implementation, pass_) == (_COUNTED, wanted)
    }


def _cell(score: Score | None) -> str:
    if score is None:
        return "–"
    counts = f"{score.wins} / {score.even} / {score.losses}"
    return f"{report.geometric_mean(score.ratios):.2f}× ({counts})"


def _about(found: Results) -> str:
    about = found.environment
    words = {"cudnn": "cuDNN", "cupy": "CuPy", "cuda_runtime": "CUDA"}
    if about.get("device") == "cpu":
        words = {"numpy": "NumPy", "numba": "Numba", "blas": "BLAS"}
    words = {peer: PEERS[peer] for peer in report.measured_peers(found)} | words
    versions = [f"{label} {about[word]}" for word, label in words.items() if about.get(word)]
    if about.get("smi"):
        versions.append(f"driver {about['smi'].get('driver_version')}")
        versions.append(f"SM clock up to {about['smi'].get('clocks.max.sm')}")
    asked, there = found.options.get("layers"), len({row.layer for row in found.rows})
    how = [f"`{about['command']}`"] if about.get("command") else []
    how += [f"at commit {about['commit']}"] if about.get("commit") else []
    how += [f"{there} of {len(asked)} layers"] if asked else []
    told = f"Measured by {', '.join(how)}." if about.get("command") else ""
    return f"{environment.title(about)} ({', '.join(versions)}). {told}".rstrip()
