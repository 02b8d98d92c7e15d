"""Results as a JSON file and as CSV, with the figures that follow from them in every row."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cupyconv import files
from cupyconv.bench import report
from cupyconv.bench.peers import PEERS
from cupyconv.bench.results import KIND, SCHEMA, Results, Row

_RATIOS = {peer: f"ratio_to_{peer}" for peer in PEERS}

DERIVED = ("tflops", "gbps", "roofline_share", *_RATIOS.values())
"""Columns beside those of Row: TFLOP/s, GB/s, 1 at the roofline, and above 1 where it is faster
than each peer."""


def to_json(results: Results) -> dict[str, Any]:
    """Everything as one JSON object."""
    ratios = {name: report.ratios(results, peer) for peer, name in _RATIOS.items()}
    return {
        "schema": SCHEMA,
        "is": KIND,
        "finished": results.finished,
        "environment": results.environment,
        "options": results.options,
        "ceilings": {dtype: asdict(ceiling) for dtype, ceiling in results.ceilings.items()},
        "rows": [
            {
                **asdict(row),
                "tflops": row.tflops,
                "gbps": row.gbps,
                "roofline_share": report.roofline_share(results, row),
                **{name: found[number] for name, found in ratios.items()},
            }
            for number, row in enumerate(results.rows)
        ],
        "skipped": [asdict(note) for note in results.skipped],
        "failed": [asdict(note) for note in results.failed],
        "first_calls": [asdict(entry) for entry in results.first_calls],
    }


def write_json(results: Results, path: Path) -> None:
    """Everything as a JSON file, an entry of a list in a line."""
    files.put(path, f"{_lines(to_json(results))}\n".encode())


def _lines(value: dict[str, Any]) -> str:
    """JSON of an object: a line for each of its values, and for each entry of a list."""
    parts = []
    for name, content in value.items():
        text = json.dumps(content)
        if isinstance(content, list) and content:
            text = "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in content) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def to_csv(results: Results) -> str:
    """A line for each row; above them, what it was measured on, in lines that begin with #."""
    text = io.StringIO(newline="")
    for key, value in results.environment.items():
        text.write(f"# {key}: {json.dumps(value)}\n")
    writer = csv.DictWriter(text, [*(column.name for column in fields(Row)), *DERIVED])
    writer.writeheader()
    writer.writerows(to_json(results)["rows"])
    return text.getvalue()
