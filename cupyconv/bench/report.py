"""Report of a run, and of the changes between two runs, as sections of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean, median
from typing import Any

from cupyconv.bench import environment
from cupyconv.bench.results import TORCH, Comparison, Note, Results, Row, best, comparisons
from cupyconv.bench.suites import KINDS
from cupyconv.markup import Block, Paragraph, Section, Table, in_line
from cupyconv.problem import PASSES

_PASS_WORDS = {"forward": "forward", "backprop_input": "dx", "backprop_filter": "dw"}


def sections(results: Results) -> list[Section]:
    """Return the whole report of a run, ending with means and measuring conditions."""
    everything = [
        *_measured(results),
        _notes("Not measured", results.skipped),
        _notes("Wrong results and failures, not timed", results.failed),
        *_means(results),
        _section("Measured on", _conditions(results)),
    ]
    return [section for section in everything if section.blocks]


def tally(pairs: Iterable[Comparison]) -> tuple[int, int, int]:
    """Count the comparisons whose ``row`` is faster, even (the spreads overlap) and slower."""
    signs = [0 if pair.even else 1 if pair.ratio > 1 else -1 for pair in pairs]
    return signs.count(1), signs.count(0), signs.count(-1)


def number(value: float) -> str:
    """Format to three significant digits or to an integer: 1.23e-05, 0.0123, 4.56, 78.9, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share as percent: 78%, or to one significant digit below 10 %, such as 0.03%."""
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.1g}%"


def busy(about: dict[str, Any]) -> str | None:
    """Return a warning if the environment records a loaded CPU before the run, else None."""
    load, threads = about.get("load") or 0, about.get("threads", 1)
    if about.get("device") != "cpu" or load <= threads / 2:
        return None
    return (
        f"The load average was {load:g} on {threads} threads before the run began. Other programs "
        "were running, so the times may be too long."
    )


def waiting(rows: Sequence[Row]) -> str | None:
    """Return how often the host takes longer than the GPU, and what helps; None if never."""
    if not (count := sum(row.loop_microseconds > row.microseconds for row in rows)):
        return None
    return (
        f"In {count} of {len(rows)} passes, a call takes the host longer than the GPU, so that the "
        "GPU waits in a loop of such calls. A bound call (cupyconv.bind) takes the host less time, "
        "and a captured graph launches many calls at once."
    )


# -- one run ---------------------------------------------------------------------------------------


def _section(
    title: str,
    lines: Iterable[str] = (),
    columns: tuple[str, ...] = (),
    rows: Sequence[tuple[str, ...]] = (),
    left: tuple[str, ...] = (),
) -> Section:
    """Return lines of text, and a table if there are rows; columns in ``left`` are left-aligned."""
    blocks: list[Block] = [Paragraph(in_line(line)) for line in lines]
    if rows:
        right = tuple(column for column in columns if column not in left)
        cells = tuple(tuple(map(in_line, row)) for row in rows)
        blocks.append(Table(columns, cells, right))
    return Section(in_line(title), tuple(blocks))


def _groups(pairs: Iterable[Comparison], key: Callable[[Row], Any]) -> dict[Any, list[Comparison]]:
    """Group comparisons by a key, which a function computes from their rows."""
    found: dict[Any, list[Comparison]] = {}
    for pair in pairs:
        found.setdefault(key(pair.row), []).append(pair)
    return found


def _measured(results: Results) -> list[Section]:
    """Return one section per dtype, with a table of the measured passes."""
    fastest = best(results.rows)
    ours = [row for row in fastest.values() if row.implementation != TORCH]
    has_torch = len(ours) < len(fastest)
    has_host = any(row.host_microseconds is not None for row in fastest.values())

    def against_torch(row: Row, ratio: str) -> str:
        torch = fastest.get((row.dtype, row.layer, row.pass_, TORCH))
        return f"{getattr(Comparison(row, torch), ratio):.2f}" if torch else "-"

    def roof(row: Row) -> str:
        share = results.roofline_share(row)
        return "-" if share is None else percent(share)

    columns: dict[str, Callable[[Row], str]] = {
        "layer": lambda row: row.layer,
        "pass": lambda row: _PASS_WORDS[row.pass_],
        "kernel": lambda row: row.kernel.partition(" ")[0],  # without the tile
        "µs": lambda row: number(row.microseconds),
        "±": lambda row: f"{(row.high - row.low) / 2 / row.microseconds:.0%}",
    }
    text = (
        "µs: time of a call from a cold cache, ± half the spread; each library in its "
        "faster memory order. TFLOP/s: without products with padding. roof: roofline time / "
        "measured time."
    )
    if has_host:
        columns["host"] = lambda row: number(row.host_microseconds or 0)
        text += " host: µs until the call returns to Python."
    columns |= {"TFLOP/s": lambda row: number(row.tflops), "roof": roof}
    if has_torch:
        columns["PyTorch/ours"] = lambda row: against_torch(row, "ratio")
        text += " PyTorch/ours: PyTorch's time over cupyconv's; above 1, cupyconv is faster."
    if has_torch and has_host:
        columns["loop"] = lambda row: against_torch(row, "loop_ratio")
        text += " loop: this ratio for the longer of µs and host, as in a loop of calls."
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in ours:
        tables.setdefault(row.dtype, []).append(tuple(cell(row) for cell in columns.values()))
    names = tuple(columns)
    return [
        _section(f"Every pass in {dtype}", [text], names, rows, names[:3])
        for dtype, rows in tables.items()
    ]


def _means(results: Results) -> list[Section]:
    """Return one table of geometric means per dtype and implementation."""
    found = []
    has_host = any(row.host_microseconds is not None for row in results.rows)
    by_run = _groups(comparisons(results), lambda row: (row.dtype, row.implementation))
    for (dtype, implementation), pairs in by_run.items():
        rows = []
        for kind in (*KINDS, "all"):
            if not (of_kind := [pair for pair in pairs if kind in (pair.row.kind, "all")]):
                continue
            by_pass = _groups(of_kind, lambda row: row.pass_) | {"all": of_kind}
            means = [_mean(by_pass.get(pass_, [])) for pass_ in (*PASSES, "all")]
            layers = len({pair.row.layer for pair in of_kind})
            if has_host:
                means.append(f"{geometric_mean(pair.loop_ratio for pair in of_kind):.2f}")
            rows.append((kind, str(layers), *means, "/".join(map(str, tally(of_kind)))))
        passes = [_PASS_WORDS[pass_] for pass_ in PASSES]
        loop = ("loop",) if has_host else ()
        found.append(
            _section(
                f"Against PyTorch in {dtype}, {implementation}",
                ["Geometric means of PyTorch's time over cupyconv's; even: the spreads overlap."],
                ("kind", "layers", *passes, "all", *loop, "faster/even/slower"),
                rows,
                ("kind",),
            )
        )
    return found


def _mean(pairs: Sequence[Comparison]) -> str:
    return f"{geometric_mean(pair.ratio for pair in pairs):.2f}" if pairs else "-"


def _notes(title: str, notes: Sequence[Note]) -> Section:
    where: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        name = " ".join(filter(None, (note.layer, note.dtype)))
        where.setdefault((note.what, note.reason), []).append(name)
    lines = (
        f"{what}: {reason}" + (f": {', '.join(dict.fromkeys(names))}" if any(names) else "")
        for (what, reason), names in where.items()
    )
    return _section(title, lines)


def _conditions(results: Results) -> list[str]:
    about = results.environment
    named = environment.versions(about)
    if smi := about.get("smi"):
        driver, clock = smi.get("driver_version"), smi.get("clocks.max.sm")
        named += [f"driver {driver}", f"SM clock up to {clock}"]
    lines = [environment.title(about), ", ".join(named), *filter(None, [busy(about)])]
    for dtype, ceiling in results.ceilings.items():
        lines.append(
            f"ceilings in {dtype}: {ceiling.flops_per_second / 1e12:,.3g} TFLOP/s "
            f"({ceiling.product_by}), {ceiling.bytes_per_second / 1e9:,.0f} GB/s "
            f"({ceiling.copy_by})" + (f", at {ceiling.clock}" if ceiling.clock else "")
        )
    for name in dict.fromkeys(row.implementation for row in results.rows):
        rows = [row for row in results.rows if row.implementation == name]
        if hosts := [row.host_microseconds for row in rows if row.host_microseconds is not None]:
            lines.append(f"{name}: {median(hosts):.1f} µs of host time per call (median)")
        if spaces := [row.workspace_bytes for row in rows if row.workspace_bytes is not None]:
            lines.append(f"{name}: at most {max(spaces) / 2**20:,.1f} MiB of workspace")
    ours = [row for row in results.rows if row.implementation != TORCH]
    lines += filter(None, [waiting(ours)])
    if results.rows:
        share = min(row.checked for row in results.rows)
        lines.append(f"checked: at least {share:.1%} of the multiply-adds of each pass")
    if not results.finished:
        lines.append("The run was stopped early; layers or passes are missing.")
    return list(filter(None, lines))


# -- two runs --------------------------------------------------------------------------------------


def compare(old: Results, new: Results) -> list[Section]:
    """Report what became faster and what became slower between two runs."""
    before, after = (
        # Two versions may give one name to different layers, so the key also has FLOPs and bytes.
        {(*key, row.useful_flops, row.bytes, row.precision): row for key, row in best(rows).items()}
        for rows in (old.rows, new.rows)
    )
    pairs = [Comparison(row, before[key]) for key, row in after.items() if key in before]
    rows = [
        (
            pair.row.layer,
            _PASS_WORDS[pair.row.pass_],
            pair.row.dtype,
            pair.row.implementation,
            number(pair.other.microseconds),
            number(pair.row.microseconds),
            f"{pair.ratio:.2f}",
        )
        for pair in pairs
        if not pair.even
    ]
    columns = ("layer", "pass", "dtype", "implementation", "old µs", "new µs", "old/new")
    lines = [] if pairs else ["The files have no measurement in common."]
    by_run = _groups(pairs, lambda row: (row.dtype, row.implementation))
    for (dtype, implementation), group in by_run.items():
        faster, even, slower = tally(group)
        lines.append(
            f"{implementation} in {dtype}: old time / new time "
            f"{geometric_mean(pair.ratio for pair in group):.3f} (geometric mean of {len(group)}); "
            f"faster {faster}, even {even}, slower {slower}"
        )
    unshared = len(before.keys() ^ after.keys())
    lines += [f"only in one of the files: {unshared} measurements"] if unshared else []
    title = "Changes beyond the spread" if rows else "No change beyond the spread"
    return [
        _section(title, (), columns, rows, columns[:4]),
        _section("Together", [*lines, *_differences(old, new)]),
    ]


def _differences(old: Results, new: Results) -> list[str]:
    """Describe the differences in environment and method between two runs."""
    lines = []
    hardware = {"gpu": "GPU", "cpu": "CPU", "threads": "threads"}
    for key, label in (hardware | environment.VERSIONS).items():
        was, now = old.environment.get(key), new.environment.get(key)
        if was != now:
            lines.append(f"the runs differ in {label}: {was}, then {now}")
    was, now = (  # older versions of cupyconv stored medians
        "median" if any(row.low < row.microseconds for row in run.rows) else "minimum"
        for run in (old, new)
    )
    if old.rows and new.rows and was != now:
        lines.append(f"the runs differ in the statistic of the samples: {was}, then {now}")
    return lines
