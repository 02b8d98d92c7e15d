"""Figures, and the two files that they are kept in.

While a run goes on, every figure is appended to a log of JSON lines as soon as there is one; at the
end the whole becomes one JSON file.  Both are read back alike, also a log that breaks off.
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
"""Changes when a file of before could be misread."""

KIND = "cupyconv bench"


@dataclass(frozen=True)
class Row:
    """One implementation of one pass of one layer, in one dtype and memory order.

    Attributes:
        layer, suite, kind: its name, and what it belongs to.
        pass_: "forward", "backprop_input" or "backprop_filter".
        implementation: as it was asked for, such as "auto"; or one of peers.PEERS.
        kernel: what "auto" was, with its tile.
        layout: "channels_last" or "channels_first".
        microseconds, low, high: of a call and its spread, in µs, as ``timing.Timing`` has them.
        samples: how many they are taken over.
        host_microseconds: µs until a call returns to Python; None on the CPU.
        workspace_bytes: device memory beside operands and result; None if not known.
        useful_flops, bytes: of the pass, as ConvProblem counts them: no product with padding, and
            each tensor once.
        error, bound: relative error against float64, and what it had to be within.
        checked: the share of the result's arithmetic that was compared; 1 is everything.
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
        """TFLOP/s, without the products with padding, which an implementation may leave out."""
        return self.useful_flops / self.microseconds * 1e-6

    @property
    def gbps(self) -> float:
        """GB/s, each tensor moved once."""
        return self.bytes / self.microseconds * 1e-3


@dataclass(frozen=True)
class Note:
    """Something that was not measured, and why."""

    layer: str
    dtype: str
    what: str
    reason: str


@dataclass(frozen=True)
class FirstCall:
    """Milliseconds until a new process has its first result, its imports and CUDA context ready.

    Attributes:
        cache: "cold" without compiled kernels on disk, "warm" with them; "" for a peer.
    """

    implementation: str
    layer: str
    dtype: str
    cache: str
    pass_: str
    milliseconds: float


@dataclass
class Results:
    """All of a run.

    Attributes:
        environment: what it was measured on.
        options: what was asked for.
        ceilings: by dtype.
        rows: what was measured.
        skipped: what was not.
        failed: wrong results of ours, which are not timed.
        first_calls: times of first calls.
        finished: whether the run came to its end.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)
    finished: bool = False


class Log:
    """Results that are appended to a file as they come.

    Args:
        path: the file, which is replaced; None keeps the results in memory alone.
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

    def first_call(self, entry: FirstCall) -> None:
        self.results.first_calls.append(entry)
        self._write("first_call", asdict(entry))

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
    """The results in a JSON file or in a log.

    Raises:
        ConvError: it is not such a file, or one of another version.
        OSError: it cannot be read.
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
            first_calls=[_read(FirstCall, entry) for entry in content["first_calls"]],
            finished=bool(content["finished"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, error) from None


def newest(root: Path, device: str) -> Results | None:
    """The latest run on "gpu" or "cpu" among its results, bench-*.json; others are passed over."""
    folder = root / device / "results"
    found = []
    for path in sorted(folder.glob("bench-*.json")) if folder.is_dir() else []:
        try:
            loaded = load(path)
        except ConvError as error:
            print(f"passed over {path.name}: {error}", file=sys.stderr)
            continue
        if loaded.environment.get("device") == device and loaded.rows:
            found.append(loaded)
    return max(found, key=lambda one: str(one.environment.get("date")), default=None)


def _entries(path: Path, text: str) -> Iterator[dict[str, Any]]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        try:
            entry = parse_json(line)
        except ValueError:
            if number == len(lines) - 1 and number:  # the run was ended while it wrote this
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
            elif kind == "first_call":
                log.first_call(_read(FirstCall, entry))
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
    made = record(kind, {column.name: entry[column.name] for column in fields(kind)})
    for name, value in vars(made).items():
        if name == "pass_" and value not in PASSES:
            raise ValueError(f"there is no pass {shown(value)}")
        least = 0 if name in _DIVISORS else -float("inf")
        if isinstance(value, (int, float)) and not least < value < _LARGEST:
            raise ValueError(f"{name} cannot be {shown(value)}")
    return made


_DIVISORS = ("microseconds", "low", "high", "flops_per_second", "bytes_per_second")
"""Numbers that have to be above zero."""

_LARGEST = 1e30  # of any number: neither infinity, nor what overflows when it is multiplied


_NUMBER = int | float
_ENVIRONMENT = {
    "launch_microseconds": _NUMBER | None,
    "load": _NUMBER | None,
    "smi": dict | None,
    "threads": _NUMBER,
}
_OPTIONS = {"dtypes": list, "layers": list}
"""What a report computes with, as far as it is there; the rest it only quotes."""


def _mapping(value: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"an object is needed, not {shown(value)}")
    for name, kind in kinds.items():
        if name in value and not isinstance(value[name], kind):
            raise ValueError(f"{name} cannot be {shown(value[name])}")
    return value


def _require_version(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or content.get("is") != KIND:
        raise _foreign(path)
    if content.get("schema") != SCHEMA:
        raise ConvError(
            f"results must be of version {SCHEMA}",
            f"{path} is of version {content.get('schema')}",
            "Measure again with this cupyconv, or read the file with the one that wrote it",
        )


def _foreign(path: Path) -> ConvError:
    return ConvError(
        "results must be a file that `cupyconv bench --json` wrote",
        f"{path} is something else",
        "Write one with: cupyconv bench --quick --json new.json",
    )


def _damaged(path: Path, error: Exception) -> ConvError:
    return ConvError(
        "results must be complete",
        f"{path} lacks an entry ({type(error).__name__}: {error})",
        "Measure again",
    )
