"""Results of a run, and their two file formats.

During a run, every result is appended to a log of JSON lines.  At the end, all results are written
to one JSON file.  ``load`` reads both formats, including a log whose run was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from cupyconv.bench.ceilings import Ceiling
from cupyconv.errors import ConvError, shown
from cupyconv.problem import PASSES
from cupyconv.records import parse_json, record

SCHEMA = 2
"""Version of the format; it changes when older files could be misread."""

KIND = "cupyconv bench"


@dataclass(frozen=True)
class Row:
    """Measurement of one implementation of one pass of a layer, in one dtype and memory order.

    Attributes:
        layer, suite, kind: name of the layer, its suite and its kind.
        pass_: "forward", "backprop_input" or "backprop_filter".
        implementation: value of ``impl``, such as "auto", or a key of peers.PEERS.
        kernel: planned implementation and its tile.
        layout: "channels_last" or "channels_first".
        microseconds, low, high: time of a call and its spread, in µs; see ``timing.Timing``.
        samples: number of samples.
        host_microseconds: µs until a call returns to Python; None on the CPU.
        workspace_bytes: device memory besides operands and result; None if unknown.
        useful_flops, bytes: FLOPs of the pass without products with padding, and bytes if each
            tensor is moved once, from ConvProblem.
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
        """TFLOP/s without products with padding, which an implementation may skip."""
        return self.useful_flops / self.microseconds * 1e-6

    @property
    def gbps(self) -> float:
        """GB/s if each tensor is moved once."""
        return self.bytes / self.microseconds * 1e-3


@dataclass(frozen=True)
class Note:
    """Measurement that was skipped or failed, and why."""

    layer: str
    dtype: str
    what: str
    reason: str


@dataclass
class Results:
    """Results of a run.

    Attributes:
        environment: hardware and software versions.
        options: options of the run.
        ceilings: roofline by dtype.
        rows: measured passes.
        skipped: measurements that were skipped.
        failed: wrong results of cupyconv, which are not timed.
        finished: whether the run was completed.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    finished: bool = False


class Log:
    """Results that are also appended to a file one by one.

    Args:
        path: the file, which is replaced; None keeps the results only in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.results = Results()
        self.path = path
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._write("header", {"schema": SCHEMA, "is": KIND})

    def start(self, environment: dict[str, Any], options: dict[str, Any]) -> None:
        self.results.environment, self.results.options = environment, options
        self._write("start", {"environment": environment, "options": options})

    def ceiling(self, dtype: str, ceiling: Ceiling) -> None:
        self.results.ceilings[dtype] = ceiling
        self._write("ceiling", {"dtype": dtype, **asdict(ceiling)})

    def row(self, row: Row) -> None:
        self.results.rows.append(row)
        self._write("row", asdict(row))

    def skip(self, note: Note) -> None:
        if note in self.results.skipped:
            return
        self.results.skipped.append(note)
        self._write("skip", asdict(note))

    def fail(self, note: Note) -> None:
        self.results.failed.append(note)
        self._write("fail", asdict(note))

    def finish(self) -> None:
        self.results.finished = True
        self._write("finish", {})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"entry": kind, **content}) + "\n")
            self._file.flush()


# -- reading ---------------------------------------------------------------------------------------


def load(path: Path) -> Results:
    """Load results from a JSON file or a log.

    Raises:
        ConvError: the file is not a results file, is damaged, or has another version.
        OSError: the file cannot be read.
    """
    text = path.read_text(errors="replace")
    try:
        content = parse_json(text)
    except ValueError:
        return _from_entries(path, _entries(path, text))
    if isinstance(content, dict) and "entry" in content:  # a log of one line
        return _from_entries(path, iter([content]))
    _require_version(path, content)
    try:
        return Results(
            environment=_mapping(content["environment"], _ENVIRONMENT),
            options=_mapping(content["options"], _OPTIONS),
            ceilings={key: _read(Ceiling, entry) for key, entry in content["ceilings"].items()},
            rows=[_read(Row, entry) for entry in content["rows"]],
            skipped=[_read(Note, entry) for entry in content["skipped"]],
            failed=[_read(Note, entry) for entry in content["failed"]],
            finished=bool(content["finished"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, error) from None


def newest(root: Path, device: str) -> Results | None:
    """Return the latest run on "gpu" or "cpu" among bench-*.json; skip unreadable files."""
    folder = root / device / "results"
    runs = []
    for path in sorted(folder.glob("bench-*.json")) if folder.is_dir() else []:
        try:
            loaded = load(path)
        except ConvError as error:
            print(f"skipped {path.name}: {error}", file=sys.stderr)
            continue
        if loaded.environment.get("device") == device and loaded.rows:
            runs.append(loaded)
    return max(runs, key=lambda run: str(run.environment.get("date")), default=None)


def _entries(path: Path, text: str) -> Iterator[dict[str, Any]]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        try:
            entry = parse_json(line)
        except ValueError:
            if number == len(lines) - 1 and number:  # the run was killed while writing this line
                return
            raise _foreign(path) from None
        if not isinstance(entry, dict):
            raise _foreign(path)
        yield entry


def _from_entries(path: Path, entries: Iterator[dict[str, Any]]) -> Results:
    log = Log()
    _require_version(path, next(entries, None))
    try:
        for entry in entries:
            kind = entry.pop("entry")
            if kind == "start":
                about = _mapping(entry["environment"], _ENVIRONMENT)
                log.start(about, _mapping(entry["options"], _OPTIONS))
            elif kind == "ceiling":
                log.ceiling(entry.pop("dtype"), _read(Ceiling, entry))
            elif kind == "row":
                log.row(_read(Row, entry))
            elif kind in ("skip", "fail"):
                (log.skip if kind == "skip" else log.fail)(_read(Note, entry))
            elif kind == "finish":
                log.finish()
    except ConvError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from None
    return log.results


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
"""Numbers that must be positive."""

_LARGEST = 1e30
"""Upper limit of any number, so that products of numbers do not overflow (chosen)."""

_NUMBER = int | float
_ENVIRONMENT = {
    "launch_microseconds": _NUMBER | None,
    "load": _NUMBER | None,
    "smi": dict | None,
    "threads": _NUMBER,
}
_OPTIONS = {"dtypes": list, "layers": list}
"""Types of the optional entries that a report computes with; other entries are only printed."""


def _mapping(value: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    for name, kind in kinds.items():
        if name in value and not isinstance(value[name], kind):
            raise ValueError(f"{name} is {shown(value[name])}")
    return value


def _require_version(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or content.get("is") != KIND:
        raise _foreign(path)
    if content.get("schema") != SCHEMA:
        raise ConvError(
            f"results must have format version {SCHEMA}",
            f"{path} has version {content.get('schema')}",
            "Measure again with this cupyconv, or read the file with the cupyconv that wrote it",
        )


def _foreign(path: Path) -> ConvError:
    return ConvError(
        "results must be a file written by `cupyconv bench --json`",
        f"{path} has another format",
        "Write one with: cupyconv bench --quick --json new.json",
    )


def _damaged(path: Path, error: Exception) -> ConvError:
    return ConvError(
        "all entries of a results file must be present and valid",
        f"{path} has a missing or invalid entry ({type(error).__name__}: {error})",
        "Measure again",
    )
