"""The README's table of speed, from the newest results that were measured on a GPU.

    python -m cupyconv.bench.readme tests/gpu/results --into README.md

writes it between two comment lines of the README; without --into, it is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cupyconv.bench import environment, report, results
from cupyconv.bench.results import Results
from cupyconv.bench.suites import KINDS
from cupyconv.errors import ConvError

BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"

NOTHING = (
    "Nothing has been measured on a GPU yet: there is no results file. On a machine with one, "
    "`python -m tests.gpu --out tests/gpu/results` measures it."
)

_COUNTED = "auto"  # the implementation that a user gets


def newest(folder: Path) -> Results | None:
    """The latest run on a GPU among a folder's bench-*.json; other versions are passed over."""
    found = []
    for path in sorted(folder.glob("bench-*.json")) if folder.is_dir() else []:
        try:
            loaded = results.load(path)
        except ConvError as error:
            print(f"passed over {path.name}: {error}", file=sys.stderr)
            continue
        if loaded.environment.get("device") == "gpu" and loaded.rows:
            found.append(loaded)
    return max(found, key=lambda one: str(one.environment.get("date")), default=None)


def table(found: Results | None) -> str:
    """The table as Markdown, with the card, the date and the versions above it."""
    if found is None:
        return NOTHING
    pairs = [pair for pair in report.comparisons(found) if pair.row.implementation == _COUNTED]
    counted = report.tallies(pairs)
    dtypes = list(dict.fromkeys(pair.row.dtype for pair in pairs))
    lines = [_about(found), ""]
    if not pairs:
        return "\n".join([*lines, "PyTorch was not measured beside it."])
    lines += [f"| | {' | '.join(dtypes)} |", f"|---|{'---:|' * len(dtypes)}"]
    for kind in (*KINDS, "all"):
        tallies = [counted.get((dtype, _COUNTED, kind, "all")) for dtype in dtypes]
        if any(tallies):
            cells = [f"{report.geometric_mean(t.ratios):.2f}×" if t else "–" for t in tallies]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    totals = [counted.get((dtype, _COUNTED, "all", "all")) for dtype in dtypes]
    cells = [f"{t.wins} / {t.even} / {t.losses}" if t else "–" for t in totals]
    lines.append(f"| faster / even / slower | {' | '.join(cells)} |")
    if not found.finished:
        lines += ["", "The run did not come to its end: these are the figures it had."]
    return "\n".join(lines)


def _about(found: Results) -> str:
    about = found.environment
    words = {"torch": "PyTorch", "cudnn": "cuDNN", "cupy": "CuPy", "cuda_runtime": "CUDA"}
    versions = [f"{label} {about[word]}" for word, label in words.items() if about.get(word)]
    if about.get("smi"):
        versions.append(f"driver {about['smi'].get('driver_version')}")
        versions.append(f"SM clock up to {about['smi'].get('clocks.max.sm')}")
    return (
        f"{environment.title(about)} ({', '.join(versions)}): PyTorch's time over cupyconv's, "
        "geometric means over the three passes of each layer. Above 1, cupyconv is faster."
    )


def put_into(text: str, content: str) -> str:
    """A README with the table between its two comment lines.

    Raises:
        ConvError: it does not have them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConvError(
            "the README must have two lines for the table to stand between",
            f"{BEGIN} and {END} are not both there",
            "Add them",
        )
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cupyconv.bench.readme", description=__doc__)
    parser.add_argument("results", type=Path, help="folder of results files")
    parser.add_argument("--into", type=Path, metavar="README", help="file to write it into")
    given = parser.parse_args(arguments)
    content = table(newest(given.results))
    if given.into is None:
        print(content)
    else:
        given.into.write_text(put_into(given.into.read_text(), content))


if __name__ == "__main__":
    main()
