"""Run the cases of a step in worker processes, which are killed and replaced when they fail.

A worker takes cases as JSON lines over a socket and answers each with a JSON line.  A case that
hangs, ends its worker or loses the GPU's context costs that case alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120  # limit for a worker to import its step and list the cases (hand-set)
GRACE_SECONDS = 10  # limit for a worker to exit once it has no more cases (hand-set)
MOST_STARTS = 2  # consecutive workers that may fail to start (hand-set)
MOST_FAILURES = 80  # failed cases that end a step (hand-set)
MOST_TEXT = 2_000  # characters of output kept for a failed case (hand-set)
MOST_REPORT = 200_000  # characters of a tool's report kept for a case (hand-set)
LINES_VARIABLE = "CUPYCONV_GPU_LINES"  # set if cubins have line numbers
GOOD = ("passed", "skipped", "refused")
SANITIZER_LINE = (
    "========= Invalid",
    "========= Error",
    "========= Warning",
    "========= Program hit",
)
"""Beginnings of the lines with which compute-sanitizer reports a fault."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A part of the run.

    Attributes:
        name: the sub-command.
        module: module with ``cases(words)`` and ``run(case)``.
        minutes: time budget; unused time goes to the next steps.
        workers: processes that share the cases.
        seconds: time limit of a case.
        words: arguments of ``cases``.
        tool: command that the worker runs under, such as compute-sanitizer.
        fresh: start a new worker for each case, so that the tool reports on one case.
        lines: compile kernels with line numbers, for the tool.
        missing: why the step cannot run; empty if it can.
    """

    name: str
    module: str
    minutes: float
    workers: int
    seconds: float
    words: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()
    fresh: bool = False
    lines: bool = False
    missing: str = ""


@dataclass(frozen=True)
class Options:
    """Choices for all steps of a run.

    Attributes:
        out: folder of the results.
        only: run the cases whose name contains this text.
        sample: run at most this many cases of a step, evenly spread; 0 for all.
        done: names of cases to leave out, by step.
        environ: variables set in the workers.
    """

    out: Path
    only: str = ""
    sample: int = 0
    done: Mapping[str, set[str]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


class Results:
    """Records appended to results.jsonl and printed as they come."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "results.jsonl"
        self.described = False  # whether the machine is on record
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            if "case" in record:
                detail = str(record.get("detail", "")).strip().splitlines()
                line = "{step}: {state:<7} {seconds:6.2f} s  {case}".format(**record)
                print(f"{line}  {detail[-1][:160]}" if detail else line, flush=True)
            elif record.get("text"):
                print(record["text"], flush=True)


class WorkerError(Exception):
    """A worker gave no answer; the first argument is the state to record."""


class Worker:
    """A process with the step's module and its own GPU context."""

    def __init__(self, step: Step, options: Options, count: int) -> None:
        """Start a worker, one of ``count`` that share the machine's cores."""
        self._folder = tempfile.TemporaryDirectory(prefix="cupyconv-gpu-")
        address = os.path.join(self._folder.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1)
        self._listener.settimeout(0.2)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as the worker is known
        self._read = 0
        threads = str(max((os.cpu_count() or 1) // count, 1))
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        program = (sys.executable, "-u", "-m", "tests.gpu.worker")
        self._process = subprocess.Popen(
            (*step.tool, *program, address, step.module, *step.words), cwd=ROOT,
            env={**os.environ, **dict.fromkeys(names, threads), **options.environ,
                 LINES_VARIABLE: "1" if step.lines else ""},
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._connection: socket.socket | None = None
        self._received = b""

    def connect(self, seconds: float) -> None:
        """Wait until the worker has imported its step.

        Raises:
            WorkerError: it ended or took too long.
        """
        until = time.monotonic() + seconds
        while self._connection is None:
            with suppress(TimeoutError):
                self._connection, _ = self._listener.accept()
            if self._connection is None and self._process.poll() is not None:
                raise WorkerError("died", f"the worker ended with {self._process.returncode}")
            if time.monotonic() > until:
                raise WorkerError("hang", f"the worker did not start in {seconds:.0f} s")

    def ask(self, question: Record, seconds: float) -> Record:
        """Return the worker's answer to a question.

        Raises:
            WorkerError: it ended or took too long.
        """
        assert self._connection is not None
        until = time.monotonic() + seconds
        try:
            self._connection.sendall(json.dumps(question).encode() + b"\n")
            while b"\n" not in self._received:
                self._connection.settimeout(max(until - time.monotonic(), 0.01))
                received = self._connection.recv(1 << 20)
                if not received:
                    raise ConnectionError
                self._received += received
        except TimeoutError:
            raise WorkerError("hang", f"no answer in {seconds:.0f} s") from None
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
            raise WorkerError("died", f"the worker ended with {self._process.poll()}") from None
        line, _, self._received = self._received.partition(b"\n")
        answer: Record = json.loads(line)
        return answer

    def output(self, most: int) -> str:
        """Return the end of what the worker printed since the last call."""
        self._log.seek(self._read)
        text = self._log.read().decode(errors="replace")
        self._read = self._log.tell()
        return _without_root(text[-most:])

    def end(self, seconds: float = 0) -> None:
        """Let the worker exit within this time, then kill it and all that it started."""
        if self._connection is not None:
            self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # the driver may hold on to a hanging kernel
            self._process.wait(GRACE_SECONDS)

    def close(self, seconds: float = 0) -> None:
        """End the worker and forget what it printed."""
        self.end(seconds)
        self._listener.close()
        self._log.close()
        self._folder.cleanup()


class Run:
    """Run of one step: cases, workers and time limit."""

    def __init__(self, step: Step, options: Options, results: Results, seconds: float) -> None:
        self.step, self.options, self.results = step, options, results
        self._until = time.monotonic() + seconds
        self._cases: deque[Record] | None = None
        self._states: Counter[str] = Counter()
        self._listing = threading.Lock()
        self._workers: set[Worker] = set()

    def everything(self) -> Counter[str]:
        """Run cases until no case or no time is left; return the number of cases by state."""
        begun, step = time.monotonic(), self.step
        if step.missing:
            self._event("end", f"not run: {step.missing}")
            return self._states
        if step.fresh:  # list without the tool, which would report on it too
            self._serve(replace(step, tool=()), only_list=True)
        serve = partial(threading.Thread, target=self._serve, args=(step,), daemon=True)
        threads = [serve() for _ in range(self.step.workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in list(self._workers):  # after an interrupt
                worker.end()
        left = "all" if self._cases is None else len(self._cases)
        counts = ", ".join(f"{count} {state}" for state, count in sorted(self._states.items()))
        text = f"{counts or 'nothing run'}, {left} left, {time.monotonic() - begun:.0f} s"
        self._event("end", text, states=dict(self._states), left=left)
        return self._states

    def _event(self, name: str, text: str, **more: Any) -> None:
        text = f"{self.step.name}: {text}"
        self.results.add({"step": self.step.name, "event": name, "text": text, **more})

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _failures(self) -> int:
        return sum(count for state, count in self._states.items() if state not in GOOD)

    def _serve(self, step: Step, only_list: bool = False) -> None:
        """List the cases, and run them in a worker; replace the worker when it fails."""
        wanted, starts = True, MOST_STARTS
        while wanted and starts and self._left() > 0:
            worker = Worker(step, self.options, self.step.workers)
            self._workers.add(worker)
            try:
                worker.connect(min(START_SECONDS, self._left() + GRACE_SECONDS))
                self._list(worker)
                starts = MOST_STARTS
                wanted = not only_list and self._give(worker)
            except WorkerError as error:  # before the worker ran a case
                worker.end()
                self._states["no worker"] += 1
                self._event("no worker", f"{error.args[1]}\n{worker.output(MOST_TEXT)}")
                starts -= 1
            finally:
                worker.close(GRACE_SECONDS if self._left() > 0 else 0)
                self._workers.discard(worker)

    def _list(self, worker: Worker) -> None:
        """Have the first worker list the cases."""
        with self._listing:
            if self._cases is not None:
                return
            question = {"list": True, "about": not self.results.described}
            answer = worker.ask(question, min(START_SECONDS, self._left() + GRACE_SECONDS))
            self.results.described = True
            done = self.options.done.get(self.step.name, set())
            cases = [one for one in answer["cases"] if one["name"] not in done]
            cases = [one for one in cases if self.options.only in one["name"]]
            if count := self.options.sample:
                cases = cases[:: max(len(cases) // count, 1)][:count]
            self._cases = deque(cases)
            self._event("begin", f"{len(cases)} cases", about=answer.get("about"))

    def _give(self, worker: Worker) -> bool:
        """Run cases in a worker; return whether a new worker is needed."""
        assert self._cases is not None
        while self._left() > 0 and self._failures() < MOST_FAILURES:
            try:
                case = self._cases.popleft()
            except IndexError:
                return False
            begun = time.monotonic()
            try:
                limit = min(self.step.seconds, self._left() + GRACE_SECONDS)
                answer = worker.ask(case, limit)
            except WorkerError as error:
                answer = {"state": error.args[0], "detail": error.args[1], "lost": True}
            if answer.get("lost") or self.step.fresh:
                worker.end(GRACE_SECONDS if "hang" not in answer.values() else 0)
            self._record(case, answer, worker, time.monotonic() - begun)
            if answer.get("lost") or self.step.fresh:
                return True
        return False

    def _record(self, case: Record, answer: Record, worker: Worker, seconds: float) -> None:
        """Record a case's result, with the worker's output if a tool ran or the case failed."""
        report = worker.output(MOST_REPORT if self.step.tool else MOST_TEXT)
        if any(line.startswith(SANITIZER_LINE) for line in report.splitlines()):
            answer["state"] = "failed"
        if "detail" in answer:
            answer["detail"] = _without_root(str(answer["detail"]))
        if self.step.tool or answer["state"] not in GOOD:
            answer["output"] = report
        record = {"step": self.step.name, "case": case["name"], "seconds": round(seconds, 3)}
        self._states[answer["state"]] += 1
        self.results.add({**record, **answer})


def _without_root(text: str) -> str:
    """Return the text without the checkout's folder, which differs between machines."""
    return text.replace(f"{ROOT}{os.sep}", "")
