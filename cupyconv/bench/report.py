"""Report of a run: ratios, geometric means, wins and losses, as text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Any

from cupyconv.bench import environment
from cupyconv.bench.peers import PEERS
from cupyconv.bench.results import Note, Results, Row
from cupyconv.bench.suites import KINDS
from cupyconv.markup import UNBOUND, Table
from cupyconv.problem import PASSES

SLOWEST = 10
"""Largest number of rows in the table of the passes that are slowest compared with a peer
(chosen)."""

PASS_WORDS = {
    "forward": "forward",
    "backprop_input": "dx",
    "backprop_filter": "dw",
}


@dataclass(frozen=True)
class Chapter:
    """Table below a title and lines of text; columns not in ``left`` are right-aligned."""

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left: tuple[str, ...] = ()

    def text(self) -> str:
        """Format the chapter as plain text."""
        return "\n".join([self.title, *self.lines, *self._table()])

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        right = tuple(column for column in self.columns if column not in self.left)
        return list(Table(self.columns, self.rows, right).lines(UNBOUND))


@dataclass(frozen=True)
class Comparison:
    """Two measurements of the same pass: cupyconv's, and a peer's or an earlier one."""

    row: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """Time of ``peer`` divided by the time of ``row``; above 1, ``row`` is faster."""
        return self.peer.microseconds / self.row.microseconds

    @property
    def even(self) -> bool:
        """Whether the spreads of the two times overlap."""
        return self.row.low <= self.peer.high and self.peer.low <= self.row.high


@dataclass
class Score:
    """Ratios of several comparisons, and how many are wins and losses beyond the spread."""

    ratios: list[float] = field(default_factory=list)
    wins: int = 0
    losses: int = 0

    def add(self, comparison: Comparison) -> None:
        self.ratios.append(comparison.ratio)
        if not comparison.even:
            self.wins += comparison.ratio > 1
            self.losses += comparison.ratio < 1

    @property
    def even(self) -> int:
        return len(self.ratios) - self.wins - self.losses


# -- arithmetic ------------------------------------------------------------------------------------


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean; the mean of 2 and 1/2 is 1."""
    return exp(sum(map(log, ratios)) / len(ratios))


def best(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], Row]:
    """Return the fastest row, keyed by (dtype, layer, pass, implementation)."""
    fastest: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        key = (row.dtype, row.layer, row.pass_, row.implementation)
        if key not in fastest or row.microseconds < fastest[key].microseconds:
            fastest[key] = row
    return fastest


def measured_peers(results: Results) -> list[str]:
    """Return the PEERS with at least one row."""
    names = {row.implementation for row in results.rows}
    return [peer for peer in PEERS if peer in names]


def layouts(results: Results) -> list[str]:
    """Return the measured memory orders."""
    return list(dict.fromkeys(row.layout for row in results.rows))


def comparisons(results: Results, peer: str, layout: str | None = None) -> list[Comparison]:
    """Compare cupyconv's rows with the peer's rows of the same pass, in the order of the options.

    Args:
        layout: memory order of both rows; None for the faster order of each library.
    """
    fastest = best(row for row in results.rows if layout in (None, row.layout))
    pairs = [
        Comparison(row, fastest[dtype, layer, pass_, peer])
        for (dtype, layer, pass_, implementation), row in fastest.items()
        if implementation not in PEERS and (dtype, layer, pass_, peer) in fastest
    ]
    return sorted(pairs, key=lambda pair: _order(results, pair.row))


def ratios(results: Results, peer: str) -> list[float | None]:
    """Return the peer's shortest time over the time of each row; None if the peer has no time."""
    fastest = best(results.rows)
    values: list[float | None] = []
    for row in results.rows:
        peer_row = fastest.get((row.dtype, row.layer, row.pass_, peer))
        values.append(None if peer_row is None else peer_row.microseconds / row.microseconds)
    return values


def roofline_share(results: Results, row: Row) -> float | None:
    """Return the roofline time divided by the measured time; None without ceilings.

    The share can exceed 1: cached data is not read from memory, input that a stride skips is not
    read at all, and the ceilings are themselves measurements.
    """
    ceiling = results.ceilings.get(row.dtype)
    if ceiling is None:
        return None
    return ceiling.seconds(row.useful_flops, row.bytes) / row.microseconds * 1e6


def scores(pairs: Iterable[Comparison]) -> dict[tuple[str, str, str, str], Score]:
    """Return scores keyed by (dtype, implementation, kind, pass); "all" stands for every value."""
    score_of: dict[tuple[str, str, str, str], Score] = {}
    for pair in pairs:
        row = pair.row
        for kind in (row.kind, "all"):
            for pass_ in (row.pass_, "all"):
                key = (row.dtype, row.implementation, kind, pass_)
                score_of.setdefault(key, Score()).add(pair)
    return score_of


def _order(results: Results, row: Row) -> tuple[int, int, int, str]:
    """Return the sort key of a row: dtype, layer and pass in the order of the options."""
    options = results.options
    dtypes, layers = options.get("dtypes", []), options.get("layers", [])
    return (
        dtypes.index(row.dtype) if row.dtype in dtypes else len(dtypes),
        layers.index(row.layer) if row.layer in layers else len(layers),
        PASSES.index(row.pass_),
        row.implementation,
    )


# -- tables ----------------------------------------------------------------------------------------


def sections(results: Results) -> list[Chapter]:
    """Return the whole report of a run, ending with the summary."""
    everything = [
        *_measured(results),
        _per_call(results),
        _notes("Not measured", results.skipped),
        _notes("Wrong results, not timed", results.failed),
        *_slowest(results),
        *_means(results),
        _conditions(results),
    ]
    return [section for section in everything if section.rows or section.lines]


def summary(results: Results) -> list[Chapter]:
    """Return the summary of a run: means, wins and losses, and the environment."""
    return [*_means(results), _conditions(results)]


def _measured(results: Results) -> list[Chapter]:
    """Return one table per dtype."""
    fastest, peers = best(results.rows), measured_peers(results)
    tables: dict[str, list[tuple[str, ...]]] = {}
    ours = [row for row in fastest.values() if row.implementation not in PEERS]
    for row in sorted(ours, key=lambda row: _order(results, row)):
        beside = [fastest.get((row.dtype, row.layer, row.pass_, peer)) for peer in peers]
        share = roofline_share(results, row)
        kernel, _, _tile = row.kernel.partition(" ")
        cells = (
            row.layer,
            PASS_WORDS[row.pass_],
            kernel,
            number(row.microseconds),
            f"{(row.high - row.low) / 2 / row.microseconds:.0%}",
            number(row.tflops),
            number(row.gbps),
            "-" if share is None else f"{share:.0%}",
            *(f"{Comparison(row, peer).ratio:.2f}" if peer else "-" for peer in beside),
        )
        tables.setdefault(row.dtype, []).append(cells)
    labels = [f"{PEERS[peer]}/ours" for peer in peers]
    columns = ("layer", "pass", "kernel", "µs", "±", "TFLOP/s", "GB/s", "roof", *labels)
    lines = (
        "µs: time of a call from a cold cache (GPU: median, CPU: minimum), ± half the spread; each",
        "library in its faster memory order. TFLOP/s: without products with padding. GB/s: each",
        "tensor moved once. roof: roofline time / measured time.",
        *(["/ours: a peer's time over ours; above 1, cupyconv is faster."] if peers else []),
    )
    return [
        Chapter(f"Every pass in {dtype}", lines, columns, tuple(rows), ("layer", "pass", "kernel"))
        for dtype, rows in tables.items()
    ]


def _means(results: Results) -> list[Chapter]:
    """Return tables per peer: for each library's faster memory order, and for each order."""
    orders = layouts(results)
    return [
        table
        for peer in measured_peers(results)
        for layout in (None, *(orders if len(orders) > 1 else ()))
        for table in _means_of(comparisons(results, peer, layout), PEERS[peer], layout)
    ]


def _means_of(pairs: Sequence[Comparison], label: str, layout: str | None) -> list[Chapter]:
    score_of = scores(pairs)
    chapters = []
    order = f", both in {layout}" if layout else ""
    for dtype, implementation in dict.fromkeys((key[0], key[1]) for key in score_of):
        table = []
        for kind in (*KINDS, "all"):
            total = score_of.get((dtype, implementation, kind, "all"))
            if total is None:
                continue
            means = []
            for pass_ in (*PASSES, "all"):
                score = score_of.get((dtype, implementation, kind, pass_))
                means.append(f"{geometric_mean(score.ratios):.2f}" if score else "-")
            layers = {
                pair.row.layer
                for pair in pairs
                if (pair.row.dtype, pair.row.implementation) == (dtype, implementation)
                and kind in (pair.row.kind, "all")
            }
            table.append(
                (kind, str(len(layers)), *means, f"{total.wins}/{total.even}/{total.losses}")
            )
        passes = [PASS_WORDS[pass_] for pass_ in PASSES]
        chapters.append(
            Chapter(
                f"Against {label} in {dtype}, {implementation}{order}",
                (f"Geometric means of {label}'s time over ours; even: the spreads overlap.",),
                ("kind", "layers", *passes, "all", "faster/even/slower"),
                tuple(table),
                ("kind",),
            )
        )
    return chapters


_WHICH = ("layer", "pass", "dtype", "implementation")


def _which(row: Row) -> tuple[str, ...]:
    """Return the cells of the columns _WHICH."""
    return row.layer, PASS_WORDS[row.pass_], row.dtype, row.implementation


def _slowest(results: Results) -> list[Chapter]:
    chapters = []
    for peer in measured_peers(results):
        label, pairs = PEERS[peer], comparisons(results, peer)
        slower = sorted((pair for pair in pairs if pair.ratio < 1), key=lambda pair: pair.ratio)
        rows = tuple(
            (
                *_which(pair.row),
                number(pair.row.microseconds),
                number(pair.peer.microseconds),
                f"{pair.ratio:.2f}",
            )
            for pair in slower[:SLOWEST]
        )
        if rows:
            columns = (*_WHICH, "µs", f"{label} µs", f"{label}/ours")
            chapters.append(Chapter(f"Slowest against {label}", (), columns, rows, _WHICH))
    return chapters


def _per_call(results: Results) -> Chapter:
    lines = []
    launch = results.environment.get("launch_microseconds")
    if launch is not None:
        lines.append(
            f"{launch:.1f} µs of every GPU call are spent in CuPy: creating an array and launching"
        )
    for name in dict.fromkeys(row.implementation for row in results.rows):
        rows = [row for row in results.rows if row.implementation == name]
        hosts = [row.host_microseconds for row in rows if row.host_microseconds is not None]
        spaces = [row.workspace_bytes for row in rows if row.workspace_bytes is not None]
        if hosts:
            lines.append(f"{name}: {median(hosts):.1f} µs of host time per call (median)")
        if spaces:
            lines.append(f"{name}: at most {max(spaces) / 2**20:,.1f} MiB of workspace")
    return Chapter("Per call", tuple(lines))


def _notes(title: str, notes: Sequence[Note]) -> Chapter:
    lines = []
    for reason, what in dict.fromkeys((note.reason, note.what) for note in notes):
        names = dict.fromkeys(
            " ".join(filter(None, (note.layer, note.dtype)))
            for note in notes
            if (note.reason, note.what) == (reason, what)
        )
        where = ", ".join(filter(None, names))
        lines.append(f"{what}: {reason}" + (f": {where}" if where else ""))
    return Chapter(title, tuple(lines))


def busy(about: dict[str, Any]) -> str | None:
    """Return a warning if the CPU was loaded before the run, else None.

    Args:
        about: environment of the run.
    """
    load, threads = about.get("load") or 0, about.get("threads", 1)
    if about.get("device") != "cpu" or load <= threads / 2:
        return None
    return (
        f"The load average was {load:g} on {threads} threads before the run began. Other programs "
        "were running, so the times may be too long."
    )


def _conditions(results: Results) -> Chapter:
    about = results.environment
    lines = [environment.title(about)]
    keys = ("cupyconv", "commit", "cupy", "cuda_runtime", *PEERS, "cudnn", "numpy", "blas")
    named = [f"{key} {about[key]}" for key in keys if about.get(key)]
    if about.get("smi"):
        smi = about["smi"]
        named.append(f"driver {smi.get('driver_version')}")
        named.append(f"SM clock up to {smi.get('clocks.max.sm')}")
    lines.append(", ".join(named))
    lines += filter(None, [busy(about)])
    for dtype, ceiling in results.ceilings.items():
        lines.append(
            f"ceilings in {dtype}: {ceiling.flops_per_second / 1e12:,.3g} TFLOP/s "
            f"({ceiling.product_by}), {ceiling.bytes_per_second / 1e9:,.0f} GB/s "
            f"({ceiling.copy_by})" + (f", at {ceiling.clock}" if ceiling.clock else "")
        )
    if not results.finished:
        lines.append("The run was stopped early; layers or passes are missing.")
    return Chapter("Measured on", tuple(lines))


# -- two files -------------------------------------------------------------------------------------


def compare(old: Results, new: Results) -> list[Chapter]:
    """Report what became faster and what became slower between two runs."""
    before, after = best(old.rows), best(new.rows)
    shared = [key for key in after if key in before]
    ordered = sorted(shared, key=lambda key: _order(new, after[key]))
    changes = [(Comparison(after[key], before[key])) for key in ordered]
    table = [
        (
            *_which(pair.row),
            number(pair.peer.microseconds),
            number(pair.row.microseconds),
            f"{pair.ratio:.2f}",
        )
        for pair in changes
        if not pair.even
    ]
    columns = (*_WHICH, "old µs", "new µs", "old/new")
    lines = []
    by_group: dict[tuple[str, str], Score] = {}
    for pair in changes:
        by_group.setdefault((pair.row.dtype, pair.row.implementation), Score()).add(pair)
    for (dtype, implementation), score in by_group.items():
        lines.append(
            f"{implementation} in {dtype}: old time / new time {geometric_mean(score.ratios):.3f} "
            f"(geometric mean of {len(score.ratios)}); faster {score.wins}, even {score.even}, "
            f"slower {score.losses}"
        )
    lines += [f"only in one of the files: {count}" for count in _unshared(before, after)]
    lines += _differences(old, new)
    return [
        Chapter("Changes beyond the spread", (), columns, tuple(table), _WHICH)
        if table
        else Chapter("No change beyond the spread"),
        Chapter("Together", tuple(lines) or ("The files have no measurement in common.",)),
    ]


def _unshared(before: dict, after: dict) -> list[str]:
    count = len(before.keys() ^ after.keys())
    return [f"{count} measurements"] if count else []


def _differences(old: Results, new: Results) -> list[str]:
    """Describe the differences in environment and method between two runs."""
    keys = ("gpu", "cpu", "threads", "cuda_runtime", "cupy", *PEERS, "cudnn", "numpy")
    lines = []
    for key in keys:
        was, now = old.environment.get(key), new.environment.get(key)
        if was != now:
            lines.append(f"the runs differ in {key}: {was}, then {now}")
    was, now = _statistic(old), _statistic(new)
    if old.rows and new.rows and was != now:
        lines.append(f"the runs differ in the statistic of the samples: {was}, then {now}")
    return lines


def _statistic(results: Results) -> str:
    """Return the statistic of the samples; older files have medians on a CPU, too."""
    medians = any(row.low < row.microseconds for row in results.rows)
    return "median" if medians else "minimum"


def number(value: float) -> str:
    """Format three digits without an exponent: 0.0123, 4.56, 78.9, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.4f}"
