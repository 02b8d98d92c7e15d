"""Results of a run, their comparison, and the JSON file that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from sys import float_info
from typing import Any

from cupyconv import files
from cupyconv.errors import ConvError, shown
from cupyconv.problem import PASSES
from cupyconv.records import parse_json, record

SCHEMA = 2
"""Version of the JSON format; it is increased when older files would be misread."""

KIND = "cupyconv bench"
TORCH = "torch"
"""Name of the implementation in PyTorch's rows; all other names are implementations of cupyconv."""


@dataclass(frozen=True)
class Row:
    """Measurement of one implementation of one pass of a layer, in one dtype and memory order.

    Attributes:
        implementation: value of ``impl``, such as "auto", or TORCH.
        kernel: planned implementation and its tile.
        microseconds, low, high: time of a call, and the ends of its spread, in µs; see ``timing``.
        host_microseconds: µs until a call returns to Python; None on the CPU.
        workspace_bytes: planned device memory besides operands and result; None on the CPU and
            for PyTorch.
        useful_flops, bytes: ``ConvProblem.useful_flops``, FLOPs of the pass that do not multiply
            padding; and ``ConvProblem.bytes``, bytes moved if each tensor is moved once.
        error, bound: relative error against float64, and its limit.
        checked: share of the multiply-adds whose results were compared; 1 is the whole result.
    """

    layer: str
    suite: str
    kind: str
    pass_: str
    dtype: str
    precision: str
    implementation: str
    kernel: str
    layout: str
    microseconds: float
    low: float
    high: float
    samples: int
    host_microseconds: float | None
    workspace_bytes: int | None
    useful_flops: int
    bytes: int
    error: float
    bound: float
    checked: float

    @property
    def tflops(self) -> float:
        """TFLOP/s; products with padding do not count, since an implementation may skip them."""
        return self.useful_flops / self.microseconds * 1e-6

    @property
    def loop_microseconds(self) -> float:
        """µs per call in a loop of calls: the longer of the device's and the host's time."""
        return max(self.microseconds, self.host_microseconds or 0)


@dataclass(frozen=True)
class Ceiling:
    """The roofline of one dtype.

    Attributes:
        flops_per_second: rate of the matrix product.
        bytes_per_second: rate of the copy, counting bytes read and bytes written.
        product_by, copy_by: libraries that ran the product and the copy.
        clock: SM clock right after the product, from nvidia-smi; empty on a CPU.
    """

    flops_per_second: float
    bytes_per_second: float
    product_by: str
    copy_by: str
    clock: str = ""

    def seconds(self, flops: float, bytes_: float) -> float:
        """Return the roofline time of these FLOPs and this memory traffic."""
        return max(flops / self.flops_per_second, bytes_ / self.bytes_per_second)


@dataclass(frozen=True)
class Note:
    """Measurement that was skipped or failed, and why.

    Attributes:
        layer, dtype: layer and dtype of the measurement; "" if the note concerns the whole run.
        what: what was not measured, such as "the layer" or an implementation and a pass.
    """

    layer: str
    dtype: str
    what: str
    reason: str


@dataclass
class Results:
    """Results of a run.

    Attributes:
        environment, options: description of the machine, and options of the run.
        ceilings: roofline by dtype.
        skipped: measurements that were not made.
        failed: implementations that failed or computed a wrong result, and were not timed.
        finished: whether the run was completed.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    finished: bool = False

    def skip(self, note: Note) -> None:
        """Add a skipped measurement, unless ``skipped`` already contains an equal note."""
        if note not in self.skipped:
            self.skipped.append(note)

    def roofline_share(self, row: Row) -> float | None:
        """Return the roofline time divided by the measured time; None if the dtype has no ceiling.

        The share can exceed 1: cached data is not read from memory, input that a stride skips is
        not read at all, and the ceilings are themselves measurements.
        """
        ceiling = self.ceilings.get(row.dtype)
        if ceiling is None:
            return None
        return ceiling.seconds(row.useful_flops, row.bytes) / row.microseconds * 1e6

    def to_json(self) -> dict[str, Any]:
        """Return the results as a JSON object, with derived columns in every row.

        ``ratio_to_torch`` is PyTorch's shortest time divided by the time of the row, and
        ``loop_ratio_to_torch`` the ratio of the same rows' times in a loop.
        """
        fastest = best(self.rows)
        rows = []
        for row in self.rows:
            torch = fastest.get((row.dtype, row.layer, row.pass_, TORCH))
            derived = {
                "tflops": row.tflops,
                "gbps": row.bytes / row.microseconds * 1e-3,
                "roofline_share": self.roofline_share(row),
                "ratio_to_torch": torch and torch.microseconds / row.microseconds,
                "loop_ratio_to_torch": torch and torch.loop_microseconds / row.loop_microseconds,
            }
            rows.append(asdict(row) | derived)
        return {"schema": SCHEMA, "is": KIND, **asdict(self), "rows": rows}

    def save(self, path: Path) -> None:
        """Write the results as a JSON file, with one line per list entry."""
        parts = []
        for name, content in self.to_json().items():
            text = json.dumps(content)
            if isinstance(content, list) and content:
                text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in content) + "\n ]"
            parts.append(f" {json.dumps(name)}: {text}")
        files.put(path, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A measurement ``row``, and ``other``: PyTorch's or an older measurement of the same pass."""

    row: Row
    other: Row

    @property
    def ratio(self) -> float:
        """Time of ``other`` divided by the time of ``row``; above 1, ``row`` is faster."""
        return self.other.microseconds / self.row.microseconds

    @property
    def loop_ratio(self) -> float:
        """``ratio`` of the times in a loop of calls."""
        return self.other.loop_microseconds / self.row.loop_microseconds

    @property
    def even(self) -> bool:
        """Whether the spreads of the two times overlap."""
        return self.row.low <= self.other.high and self.other.low <= self.row.high


def best(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], Row]:
    """Return the fastest row of each (dtype, layer, pass, implementation), with these keys."""
    fastest: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        key = (row.dtype, row.layer, row.pass_, row.implementation)
        if key not in fastest or row.microseconds < fastest[key].microseconds:
            fastest[key] = row
    return fastest


def comparisons(results: Results, layout: str | None = None) -> list[Comparison]:
    """Compare cupyconv's rows with PyTorch's rows of the same pass.

    Args:
        layout: memory order of both rows; None for the faster order of each library.
    """
    fastest = best(row for row in results.rows if layout in (None, row.layout))
    return [
        Comparison(row, fastest[dtype, layer, pass_, TORCH])
        for (dtype, layer, pass_, implementation), row in fastest.items()
        if implementation != TORCH and (dtype, layer, pass_, TORCH) in fastest
    ]


# -- reading ---------------------------------------------------------------------------------------


def load(path: Path) -> Results:
    """Load results from a JSON file.

    Raises:
        ConvError: the file is not a results file, is damaged, or has another version.
        OSError: the file cannot be read.
    """
    try:
        content = parse_json(files.read(path).decode(errors="replace"))
    except ValueError:
        content = None
    known = isinstance(content, dict) and content.get("is") == KIND
    if not known or content.get("schema") != SCHEMA:
        found = f"version {content.get('schema')}" if known else "another format"
        raise ConvError(
            f"results must be written by `cupyconv bench --json`, in format version {SCHEMA}",
            f"{path} has {found}",
            "Write new results with: cupyconv bench --quick --json new.json",
        )
    try:
        return Results(
            environment=_mapping(content["environment"]),
            options=_mapping(content["options"]),
            ceilings={key: _read(Ceiling, entry) for key, entry in content["ceilings"].items()},
            rows=[_read(Row, entry) for entry in content["rows"]],
            skipped=[_read(Note, entry) for entry in content["skipped"]],
            failed=[_read(Note, entry) for entry in content["failed"]],
            finished=bool(content["finished"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConvError(
            "all entries of a results file must be present and valid",
            f"{path} has a missing or invalid entry ({type(error).__name__}: {error})",
            "Measure again",
        ) from None


def _read(kind: Any, entry: Mapping[str, Any]) -> Any:
    instance = record(kind, {column.name: entry[column.name] for column in fields(kind)})
    for name, value in vars(instance).items():
        if name == "pass_" and value not in PASSES:
            raise ValueError(f"unknown pass {shown(value)}")
        least = 0 if name in _DIVISORS else -float("inf")
        if isinstance(value, (int, float)) and not least < value < _LARGEST:
            raise ValueError(f"{name} is {shown(value)}")
    return instance


_DIVISORS = ("microseconds", "low", "high", "flops_per_second", "bytes_per_second")
_LARGEST = float_info.max ** (1 / 10)  # limit of all numbers, so that products do not overflow

_KINDS = {"load": int | float | None, "threads": int | float, "smi": dict, "layers": list}
"""Types of the optional entries that a report uses in computations; it only prints the others."""


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    for name, kind in _KINDS.items():
        if name in value and not isinstance(value[name], kind):
            raise ValueError(f"{name} is {shown(value[name])}")
    return value
