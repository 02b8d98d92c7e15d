"""The parts of a pass, divided over threads.

A part is computed by one thread, with the BLAS on one thread too, so that results are the same bits
whatever the number of threads, and so that one thread copies while another one multiplies.  There
are as many as the BLAS would have, whose number the user limits in the usual ways: OMP_NUM_THREADS,
threadpoolctl, affinity.  They are the caller and helpers that all passes of the process share; a
helper leaves where there are enough passes in threads of the user's.

A signal may come between any two instructions, and its handler may raise or compute a pass itself.
What has to be undone is therefore noted before it is done, and undone again until that came to its
end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

from cupyconv.cpu.scratch import CALLS_BYTES, Pool, Scratch

MOST_THREADS = 8
"""Of a pass."""

Part = TypeVar("Part")


class _Process:
    """What the passes of a process share.

    Attributes:
        passes: at work, with the threads that the BLAS had before each.
        helpers: at work.
        allowed: threads that the BLAS had before they were taken from it.
        taken: whether they are.
        lock: for these.
        tasks, threads: what helpers are to do, and how many there are for it.
    """

    def __init__(self) -> None:
        self.passes: dict[object, int] = {}
        self.helpers: set[object] = set()
        self.allowed, self.taken = 1, False
        self.lock = threading.RLock()
        self.tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.threads = 0

    @property
    def free(self) -> int:
        """Threads that could be at work beside those that are; below 0 if there are too many."""
        return self.allowed - len(self.passes) - len(self.helpers)

    def begin(self, one: object) -> None:
        """Take the BLAS's threads from it for a pass."""
        with self.lock:
            self.passes[one] = blas_threads()
            if not self.taken:
                self.allowed = self.passes[one]
                self.taken = True
            _set_blas_threads(1)

    def end(self, one: object) -> None:
        """Give them back after the last pass; a thread that has a number of its own, after its."""
        with self.lock:
            if _is_by_thread() and one in self.passes:
                _set_blas_threads(self.passes[one])
            self.passes.pop(one, None)
            if self.taken and not self.passes:
                if not _is_by_thread():
                    _set_blas_threads(self.allowed)
                self.taken = False

    def ask(self, tasks: list[Callable[[], None]]) -> None:
        """Have helpers do tasks, if there can be any; their threads end with the process."""
        with self.lock:
            wanted = min(len(self.helpers) + len(tasks), MOST_THREADS - 1)
            with suppress(RuntimeError):  # no more threads can be, or the interpreter is ending
                while self.threads < wanted:
                    threading.Thread(target=self._do_tasks, name="cupyconv", daemon=True).start()
                    self.threads += 1
        for task in tasks if self.threads else ():
            self.tasks.put(task)

    def _do_tasks(self) -> None:
        while True:
            self.tasks.get()()


_process = _Process()


def with_one_blas_thread(compute: Callable[[], None]) -> None:
    """Compute a pass with the BLAS on one thread."""
    process, one = _process, object()

    def begin_and_compute() -> None:
        process.begin(one)
        compute()

    _undone(begin_and_compute, partial(process.end, one))


def _undone(compute: Callable[[], None], undo: Callable[[], None]) -> None:
    """Compute, and undo what that took, whatever signals come."""
    interrupt = None
    try:
        compute()
    finally:
        while True:
            try:
                undo()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def each(
    work: Callable[[Part, Scratch], None], parts: Iterable[Part], pool: Pool, size: int
) -> None:
    """Call ``work`` with every part, in any order, and memory that no other call has meanwhile.

    Args:
        size: elements of memory that a call takes, at most; as many as fit are at work.

    Raises:
        BaseException: what a call raised, after all that were begun have ended.
    """
    left = iter(parts)
    first = list(islice(left, 2))
    loop = _Loop(work, chain(first, left))

    def compute() -> None:
        fit = CALLS_BYTES // max(size * pool.dtype.itemsize, 1)
        most = min(_process.free + 1, MOST_THREADS, fit) if len(first) > 1 else 1
        own, *others = pool.divided("calls", size, max(most, 1))
        loop.ask_for(others)
        loop.run(own, lambda: True)

    _undone(compute, loop.end)
    if loop.error is not None:
        raise loop.error


class _Loop:
    """Parts that threads take in turn.

    Attributes:
        error: what a helper raised.
    """

    def __init__(self, work: Callable[[Any, Scratch], None], parts: Iterator[Any]) -> None:
        self._work, self._parts = work, parts
        self._lock = threading.Lock()  # a generator must not be entered twice
        self._stopped = False
        self._helpers: list[threading.Lock] = []  # each holds one while it is at work
        self.error: BaseException | None = None

    def ask_for(self, memories: Iterable[Scratch]) -> None:
        """Have helpers compute parts too, each with memory of its own."""
        _process.ask([partial(copy_context().run, self._help, one) for one in memories])

    def run(self, scratch: Scratch, is_wanted: Callable[[], bool]) -> None:
        """Compute parts until none is left, or this thread is not wanted."""
        while is_wanted():
            with self._lock:
                part = None if self._stopped else next(self._parts, None)
            if part is None:
                return
            self._work(part, scratch.rest())

    def end(self) -> None:
        """Wait until no helper is at work; none begins any more."""
        with self._lock:
            self._stopped = True
        for helper in self._helpers:
            with helper:
                pass

    def _help(self, scratch: Scratch) -> None:
        """Compute parts as long as there are not too many threads."""
        process, at_work = _process, threading.Lock()
        with at_work:
            with self._lock:
                if self._stopped:
                    return
                self._helpers.append(at_work)
            try:
                # Not under the lock, which a thread may hold that waits for this one.
                process.helpers.add(at_work)
                if _is_by_thread():
                    _set_blas_threads(1)
                self.run(scratch, lambda: process.free >= 0)
            except BaseException as error:
                self.error, self._stopped = error, True
            finally:
                process.helpers.discard(at_work)


def cores() -> int:
    """Cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas_threads() -> int:
    """Threads of the BLAS, in this thread; 0 if it does not tell."""
    libraries = _blas()
    return libraries[0].get_num_threads() or 0 if libraries else 0


def _set_blas_threads(count: int) -> None:
    for library in _blas():
        # threadpoolctl obeys one thread alone, the first that sets a number, until it is told that
        # the others may: users of it need that as we do.
        release = getattr(library, "clear_controlling_thread", lambda force: None)
        release(force=True)
        library.set_num_threads(count)
        release(force=True)


@cache
def _is_by_thread() -> bool:
    """Whether the BLAS has a number of threads for each thread that calls it."""
    return any(getattr(library, "threading_layer", "") == "openmp" for library in _blas())


@cache
def _blas() -> list[Any]:
    """NumPy's BLAS, as threadpoolctl knows it."""
    from threadpoolctl import ThreadpoolController  # not before it is needed

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [one for one in found if "numpy" in one.filepath] or found


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _process
    before, _process = _process, _Process()
    if before.taken:
        _set_blas_threads(before.allowed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
