"""Export of results to JSON, with derived columns in every row."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupyconv import files
from cupyconv.bench import report
from cupyconv.bench.peers import PEERS
from cupyconv.bench.results import KIND, SCHEMA, Results

_RATIOS = {peer: f"ratio_to_{peer}" for peer in PEERS}
"""Columns of each peer's time over cupyconv's; above 1, cupyconv is faster."""


def to_json(results: Results) -> dict[str, Any]:
    """Return all results as one JSON object."""
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
                **{name: values[number] for name, values in ratios.items()},
            }
            for number, row in enumerate(results.rows)
        ],
        "skipped": [asdict(note) for note in results.skipped],
        "failed": [asdict(note) for note in results.failed],
    }


def write_json(results: Results, path: Path) -> None:
    """Write all results as a JSON file, with one line per list entry."""
    files.put(path, f"{_lines(to_json(results))}\n".encode())


def _lines(value: dict[str, Any]) -> str:
    """Format a JSON object with one line per value and one line per list entry."""
    parts = []
    for name, content in value.items():
        text = json.dumps(content)
        if isinstance(content, list) and content:
            text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in content) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"
