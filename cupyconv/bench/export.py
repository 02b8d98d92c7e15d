"""Results as a JSON file and as CSV, with the figures that follow from them in every row."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cupyconv.bench import report
from cupyconv.bench.results import KIND, SCHEMA, Results, Row

DERIVED = ("tflops", "gbps", "roofline_share", "ratio")
"""Columns beside those of Row: TFLOP/s, GB/s, 1 at the roofline, and above 1 where it is faster
than PyTorch."""


def to_json(results: Results) -> dict[str, Any]:
    """Everything as one JSON object."""
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
                "ratio": ratio,
            }
            for row, ratio in zip(results.rows, report.ratios(results), strict=True)
        ],
        "skipped": [asdict(note) for note in results.skipped],
        "failed": [asdict(note) for note in results.failed],
        "first_calls": [asdict(entry) for entry in results.first_calls],
    }


def write_json(results: Results, path: Path) -> None:
    """Put the JSON file in place at once, so that a reader never finds half of one."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(to_json(results), indent=1) + "\n")
    os.replace(temporary, path)


def write_csv(results: Results, path: Path) -> None:
    """A line for each row; above them, what it was measured on, in lines that begin with #."""
    with path.open("w", newline="") as file:
        for key, value in results.environment.items():
            file.write(f"# {key}: {json.dumps(value)}\n")
        writer = csv.DictWriter(file, [*(column.name for column in fields(Row)), *DERIVED])
        writer.writeheader()
        writer.writerows(to_json(results)["rows"])
