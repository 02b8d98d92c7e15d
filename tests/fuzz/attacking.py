"""Run cases in worker processes, which are replaced when they hang or crash."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from .cases import Case, NumpyRun
from .checking import Finding, Setting, check, implementation, layer_of
from .drawing import kernel_cases, numpy_cases
from .judging import can_be_judged
from .kernels import NotTakenError, pool
from .oracle import geometry
from .reporting import Figures, report
from .shrinking import shrunk

STREAMS: dict[str, Callable[[object, int], Iterator[Case]]] = {
    "numpy": numpy_cases,
    "kernels": kernel_cases,
}

SHRINK_SECONDS = {"numpy": 5.0, "kernels": 15.0}

MOST_SHRUNK = 60
"""Largest number of kinds of findings to shrink; more would leave no time for new cases."""

LONGEST = 180.0
"""Seconds after which a layer counts as hanging; the first kernel also builds a C++ library."""


PATIENCE = 30.0
"""Seconds in which an interrupted process must end."""

TOLD_EVERY = 1.0
"""Seconds between reports of the figures."""

Message = tuple[str, Any]


class Attack:
    """State of the attack in one process.

    Attributes:
        figures: counts so far.
        kinds: kinds of findings so far; each kind is reported once.
    """

    def __init__(self, seed: object) -> None:
        self.seed = seed
        self.figures = Figures()
        self.kinds: set[tuple[str, ...]] = set()

    def layer(self, stream: str, number: int) -> Iterator[tuple[tuple[str, ...], str]]:
        """Run the cases of one layer number; yield kinds and reports of new findings."""
        self.figures.layers[stream] += 1
        shared, seed = None, None
        for case in STREAMS[stream](self.seed, number):
            try:
                if shared is None or case.seed != seed:  # the data differ
                    shared, seed = layer_of(case), case.seed
                finding = self._judged(case, shared)
            except Exception as error:  # a fault of the attack must not end it
                traceback.print_exc()
                finding = Finding(case, ("the attack itself", repr(error)[:80]), f"{case}")
            if finding is None or finding.kind in self.kinds:
                continue
            self.kinds.add(finding.kind)
            if len(self.kinds) <= MOST_SHRUNK:
                finding = shrunk(finding, SHRINK_SECONDS[stream])
            found_at = f"--only {stream} --seed {self.seed} --case {number}"
            yield finding.kind, report(finding, found_at)

    def _judged(self, case: Case, layer: Setting) -> Finding | None:
        figures = self.figures
        if layer.oracle is not None and not can_be_judged(case, layer.oracle):
            figures.left_out["with too many terms or too much padding"] += 1
            return None
        try:
            finding = check(case, layer)
        except NotTakenError as error:
            figures.left_out[str(error)] += 1
            return None
        if layer.oracle is None:
            figures.left_out["illegal, and refused" if finding is None else "illegal"] += 1
        elif isinstance(case.run, NumpyRun):
            figures.passes[implementation(case, geometry(case))] += 1
        else:
            figures.kernels[f"{implementation(case, geometry(case))} {case.run.arch}"] += 1
        return finding


@dataclass(frozen=True)
class Orders:
    """Task of a process.

    Attributes:
        seed: seed of all draws.
        streams: "numpy", "kernels" or both, which then get the same time.
        first: number of the first layer.
        step: difference between successive layer numbers.
        seconds: time limit; None for no limit.
        layers: maximum number of layers to draw; None for no limit.
    """

    seed: object
    streams: tuple[str, ...] = tuple(STREAMS)
    first: int = 0
    step: int = 1
    seconds: float | None = None
    layers: int | None = None


def attack(orders: Orders, stop: Callable[[], bool] = lambda: False) -> Iterator[Message]:
    """Carry out orders in this process.

    Args:
        orders: the task.
        stop: function called before each layer; the attack ends if it returns true.

    Returns:
        An iterator over ("layer", (stream, number)) before each layer, ("finding", (kind, text))
        for each kind of finding, and ("figures", Figures so far) at intervals and at the end.
    """
    doing, begun, told = Attack(orders.seed), time.monotonic(), time.monotonic()
    numbers = {stream: itertools.count(orders.first, orders.step) for stream in orders.streams}
    spent = dict.fromkeys(orders.streams, 0.0)
    with pool.limited():
        for count in itertools.count():
            start = time.monotonic()
            over = orders.seconds is not None and start - begun >= orders.seconds
            if over or stop() or count == orders.layers:
                break
            stream = min(spent, key=spent.__getitem__)
            number = next(numbers[stream])
            yield "layer", (stream, number)
            for found in doing.layer(stream, number):
                yield "finding", found
            spent[stream] += time.monotonic() - start
            if time.monotonic() - told > TOLD_EVERY:
                doing.figures.builds = len(pool)
                yield "figures", doing.figures
                told = time.monotonic()
    doing.figures.builds = len(pool)
    yield "figures", doing.figures


# -- worker processes ------------------------------------------------------------------------------


class _Worker:
    """A process that carries out orders."""

    def __init__(self, orders: Orders, stop: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.orders = orders
        self.receiver, sender = context.Pipe(duplex=False)
        self.at, self.since = ("", orders.first - orders.step), time.monotonic()
        self.figures = Figures()
        self.process = context.Process(target=_work, args=(orders, sender, stop), daemon=True)
        self.process.start()
        sender.close()

    def end(self, hangs: bool = True) -> int | None:
        """End the process; return its exit code if it ended by itself, None if it hangs."""
        if not hangs:
            self.process.join()
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.receiver.close()
        return code

    def successor(self, seconds: float | None, stop: Any) -> _Worker:
        """Return a new process that continues after this process's current layer."""
        first = self.at[1] + self.orders.step
        return _Worker(replace(self.orders, first=first, seconds=seconds), stop)


def _work(orders: Orders, sender: Any, stop: Any) -> None:
    # Only the parent handles interrupts, and sets ``stop``; compilers inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for message in attack(orders, stop.is_set):
        sender.send(message)
    sender.close()


def until_interrupted() -> Any:
    """Return an event that processes can share; an interrupt sets it, and does nothing else."""
    stop = multiprocessing.get_context("spawn").Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    return stop


def attack_in_processes(orders: Orders, jobs: int, stop: Any) -> Iterator[Message]:
    """Run ``attack`` in several processes; report findings of the same kind once.

    A process that hangs or dies is a finding, and a new process continues in its place.  All
    processes end once ``stop`` is set.
    """
    begun, stopped, kinds, figures = time.monotonic(), 0.0, set(), Figures()
    workers = [
        _Worker(replace(orders, first=orders.first + job, step=jobs), stop) for job in range(jobs)
    ]
    try:
        while workers:
            now = time.monotonic()
            stopped = stopped or (now if stop.is_set() else 0.0)
            ready = connection.wait([worker.receiver for worker in workers], 1.0)
            for worker in list(workers):
                if worker.receiver in ready:
                    message = _received(worker)
                    if message is not None:
                        if message[0] == "finding" and message[1][0] not in kinds:
                            kinds.add(message[1][0])
                            yield message
                        continue
                late = now - worker.since > LONGEST or (stopped and now - stopped > PATIENCE)
                if worker.receiver not in ready and not late:
                    continue
                workers.remove(worker)
                figures.add(worker.figures)
                code = worker.end(hangs=worker.receiver not in ready)
                if code == 0 or stopped:
                    continue
                yield "finding", _lost(worker, code)
                left = None if orders.seconds is None else orders.seconds - (now - begun)
                if left is None or left > 0:
                    workers.append(worker.successor(left, stop))
    finally:
        for worker in workers:
            worker.end()
    figures.seconds = time.monotonic() - begun
    yield "figures", figures


def _received(worker: _Worker) -> Message | None:
    """Return a worker's next message and note its progress; None at the end."""
    try:
        message = worker.receiver.recv()
    except EOFError:
        return None
    if message[0] == "layer":
        worker.at, worker.since = message[1], time.monotonic()
    elif message[0] == "figures":
        worker.figures = message[1]
    return message


def _lost(worker: _Worker, code: int | None) -> tuple[tuple[str, ...], str]:
    """Return the finding for a process that hangs or died."""
    stream, number = worker.at
    what = "hangs" if code is None else f"died with {code}"
    again = f"--only {stream} --seed {worker.orders.seed} --case {number}"
    return (what, stream, str(number)), f"finding: {what} in {again}\n"
