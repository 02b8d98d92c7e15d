"""What a run says: ratios, geometric means, wins and losses, as tables of text."""

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
"""Rows of the table of the slowest against each peer."""

PASS_WORDS = {
    "forward": "forward",
    "backprop_input": "dx",
    "backprop_filter": "dw",
}


@dataclass(frozen=True)
class Chapter:
    """A table with a title, lines above it, and columns that are aligned to the right."""

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left: tuple[str, ...] = ()

    def text(self) -> str:
        """As plain text."""
        return "\n".join([self.title, *self.lines, *self._table()])

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        right = tuple(column for column in self.columns if column not in self.left)
        return list(Table(self.columns, self.rows, right).lines(UNBOUND))


@dataclass(frozen=True)
class Comparison:
    """The fastest of our memory orders beside the fastest of a peer's."""

    row: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """The peer's time over ours: above 1, ours is faster."""
        return self.peer.microseconds / self.row.microseconds

    @property
    def even(self) -> bool:
        """Whether the difference is within the spread, on either side."""
        return self.row.low <= self.peer.high and self.peer.low <= self.row.high


@dataclass
class Score:
    """Ratios of several comparisons."""

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
    """The mean of ratios: twice as fast and half as fast are 1 together."""
    return exp(sum(map(log, ratios)) / len(ratios))


def best(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], Row]:
    """The fastest memory order, by (dtype, layer, pass, implementation)."""
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        key = (row.dtype, row.layer, row.pass_, row.implementation)
        if key not in found or row.microseconds < found[key].microseconds:
            found[key] = row
    return found


def measured_peers(results: Results) -> list[str]:
    """Those of PEERS that have a row."""
    names = {row.implementation for row in results.rows}
    return [peer for peer in PEERS if peer in names]


def layouts(results: Results) -> list[str]:
    """The memory orders that were measured."""
    return list(dict.fromkeys(row.layout for row in results.rows))


def comparisons(results: Results, peer: str, layout: str | None = None) -> list[Comparison]:
    """Ours with a peer's, where there are both; in the order that was asked for.

    Args:
        layout: the memory order of both; None for the faster one on either side.
    """
    fastest = best(row for row in results.rows if layout in (None, row.layout))
    pairs = [
        Comparison(row, fastest[dtype, layer, pass_, peer])
        for (dtype, layer, pass_, implementation), row in fastest.items()
        if implementation not in PEERS and (dtype, layer, pass_, peer) in fastest
    ]
    return sorted(pairs, key=lambda pair: _order(results, pair.row))


def ratios(results: Results, peer: str) -> list[float | None]:
    """For each row, the time of the peer's fastest over its own; None without the peer."""
    fastest = best(results.rows)
    found: list[float | None] = []
    for row in results.rows:
        theirs = fastest.get((row.dtype, row.layer, row.pass_, peer))
        found.append(None if theirs is None else theirs.microseconds / row.microseconds)
    return found


def roofline_share(results: Results, row: Row) -> float | None:
    """The least time by the ceilings over the time taken; None if there are no ceilings.

    It can be above 1: what fits a cache need not come from memory, what a stride steps over need
    not be read, and the ceilings are measured, too.
    """
    ceiling = results.ceilings.get(row.dtype)
    if ceiling is None:
        return None
    return ceiling.seconds(row.useful_flops, row.bytes) / row.microseconds * 1e6


def scores(pairs: Iterable[Comparison]) -> dict[tuple[str, str, str, str], Score]:
    """By (dtype, implementation, kind, pass); "all" stands for every kind, and for every pass."""
    found: dict[tuple[str, str, str, str], Score] = {}
    for pair in pairs:
        row = pair.row
        for kind in (row.kind, "all"):
            for pass_ in (row.pass_, "all"):
                key = (row.dtype, row.implementation, kind, pass_)
                found.setdefault(key, Score()).add(pair)
    return found


def _order(results: Results, row: Row) -> tuple[int, int, int, str]:
    """Where a row stands: by dtype, layer and pass as they were asked for."""
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
    """Everything worth saying about a run, the sum of it last."""
    everything = [
        *_measured(results),
        _per_call(results),
        _notes("Not measured", results.skipped),
        _notes("Wrong, and so not timed", results.failed),
        *_slowest(results),
        *_means(results),
        _conditions(results),
    ]
    return [section for section in everything if section.rows or section.lines]


def summary(results: Results) -> list[Chapter]:
    """The sum of a run: means, wins and losses, and what it was measured on."""
    return [*_means(results), _conditions(results)]


def _measured(results: Results) -> list[Chapter]:
    """One table for each dtype."""
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
        "µs of a call from a cold cache, of a GPU the median and of a CPU the best, ± half the",
        "spread; the faster memory order counts, on either side. TFLOP/s without products with",
        "padding, GB/s of each tensor once; roof: the share of the roofline that these are.",
        *(["/ours: a peer's time over ours; above 1, cupyconv is faster."] if peers else []),
    )
    return [
        Chapter(f"Every pass in {dtype}", lines, columns, tuple(rows), ("layer", "pass", "kernel"))
        for dtype, rows in tables.items()
    ]


def _means(results: Results) -> list[Chapter]:
    """Tables beside each peer: of the faster memory order, and of each order by itself."""
    orders = layouts(results)
    return [
        table
        for peer in measured_peers(results)
        for layout in (None, *(orders if len(orders) > 1 else ()))
        for table in _means_of(comparisons(results, peer, layout), PEERS[peer], layout)
    ]


def _means_of(pairs: Sequence[Comparison], label: str, layout: str | None) -> list[Chapter]:
    counted = scores(pairs)
    found = []
    order = f", {layout} on either side" if layout else ""
    for dtype, implementation in dict.fromkeys((key[0], key[1]) for key in counted):
        table = []
        for kind in (*KINDS, "all"):
            total = counted.get((dtype, implementation, kind, "all"))
            if total is None:
                continue
            means = []
            for pass_ in (*PASSES, "all"):
                score = counted.get((dtype, implementation, kind, pass_))
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
        found.append(
            Chapter(
                f"Against {label} in {dtype}, {implementation}{order}",
                (f"Geometric means of {label}'s time over ours; even: the spreads meet.",),
                ("kind", "layers", *passes, "all", "faster/even/slower"),
                tuple(table),
                ("kind",),
            )
        )
    return found


_WHICH = ("layer", "pass", "dtype", "implementation")


def _which(row: Row) -> tuple[str, ...]:
    """What was measured, in the columns of that name."""
    return row.layer, PASS_WORDS[row.pass_], row.dtype, row.implementation


def _slowest(results: Results) -> list[Chapter]:
    found = []
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
            found.append(Chapter(f"Slowest against {label}", (), columns, rows, _WHICH))
    return found


def _per_call(results: Results) -> Chapter:
    lines = []
    launch = results.environment.get("launch_microseconds")
    if launch is not None:
        lines.append(
            f"{launch:.1f} µs of every GPU call are CuPy's own: an array made, a kernel launched"
        )
    for name in dict.fromkeys(row.implementation for row in results.rows):
        rows = [row for row in results.rows if row.implementation == name]
        hosts = [row.host_microseconds for row in rows if row.host_microseconds is not None]
        spaces = [row.workspace_bytes for row in rows if row.workspace_bytes is not None]
        if hosts:
            lines.append(f"{name}: {median(hosts):.1f} µs of the host, median of all calls")
        if spaces:
            lines.append(f"{name}: at most {max(spaces) / 2**20:,.1f} MiB of workspace")
    for entry in results.first_calls:
        with_cache = f" with a {entry.cache} kernel cache" if entry.cache else ""
        lines.append(
            f"{entry.implementation}: first {PASS_WORDS[entry.pass_]} of {entry.layer} in a new "
            f"process {entry.milliseconds:,.0f} ms{with_cache}"
        )
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


def busy(found: dict[str, Any]) -> str | None:
    """What is to be said of a CPU's load, in the environment of a run; None of a quiet one."""
    load, threads = found.get("load") or 0, found.get("threads", 1)
    if found.get("device") != "cpu" or load <= threads / 2:
        return None
    return (
        f"The load average was {load:g} on {threads} threads before the run began: other programs "
        "ran too, and these figures are not to be relied on."
    )


def _conditions(results: Results) -> Chapter:
    found = results.environment
    lines = [environment.title(found)]
    words = ("cupyconv", "commit", "cupy", "cuda_runtime", *PEERS, "cudnn", "numpy", "blas")
    named = [f"{word} {found[word]}" for word in words if found.get(word)]
    if found.get("smi"):
        smi = found["smi"]
        named.append(f"driver {smi.get('driver_version')}")
        named.append(f"SM clock up to {smi.get('clocks.max.sm')}")
    lines.append(", ".join(named))
    lines += filter(None, [busy(found)])
    for dtype, ceiling in results.ceilings.items():
        lines.append(
            f"ceilings in {dtype}: {ceiling.flops_per_second / 1e12:,.3g} TFLOP/s "
            f"({ceiling.product_by}), {ceiling.bytes_per_second / 1e9:,.0f} GB/s "
            f"({ceiling.copy_by})" + (f", at {ceiling.clock}" if ceiling.clock else "")
        )
    if not results.finished:
        lines.append("The run did not come to its end: these are the figures it had.")
    return Chapter("Measured on", tuple(lines))


# -- two files -------------------------------------------------------------------------------------


def compare(old: Results, new: Results) -> list[Chapter]:
    """What became faster and what slower from one run to another."""
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
            f"{implementation} in {dtype}: old time over new {geometric_mean(score.ratios):.3f} "
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
    """What makes the two runs hard to compare."""
    words = ("gpu", "cpu", "threads", "cuda_runtime", "cupy", *PEERS, "cudnn", "numpy")
    found = []
    for word in words:
        was, now = old.environment.get(word), new.environment.get(word)
        if was != now:
            found.append(f"the runs differ in {word}: {was}, then {now}")
    was, now = _what_counts(old), _what_counts(new)
    if old.rows and new.rows and was != now:
        found.append(f"the runs differ in what counts: {was}, then {now}; by that alone times do")
    return found


def _what_counts(results: Results) -> str:
    """Of the samples of a call; those on a CPU had a median once, as those on a GPU have."""
    medians = any(row.low < row.microseconds for row in results.rows)
    return "the median of samples" if medians else "the best"


def number(value: float) -> str:
    """Three digits, without an exponent: 0.0123, 4.56, 78.9, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.4f}"
