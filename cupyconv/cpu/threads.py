"""The parts of a pass, divided over threads.

A part is computed by one thread, with the BLAS on one thread too, so that results are the same bits
whatever the number of threads, and so that one thread copies while another one multiplies.  There
are as many as the BLAS would have, whose number the user limits in the usual ways: OMP_NUM_THREADS,
threadpoolctl, affinity.  They are the caller and helpers that all passes of the process share; a
helper leaves where there are enough passes in threads of the user's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from itertools import chain, islice
from typing import Any, TypeVar

from cupyconv.cpu.scratch import Scratch

MOST_THREADS, MOST_BLOCKS = 8, 24
"""Of a pass: threads, and blocks of memory that they take together."""

Part = TypeVar("Part")


class _Process:
    """What the passes of a process share.

    Attributes:
        passes, helpers: at work.
        allowed: threads that the BLAS had before the first of the passes took them from it.
        lock: for these.
    """

    def __init__(self) -> None:
        self.passes, self.helpers, self.allowed = 0, 0, 1
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(MOST_THREADS - 1, "cupyconv")  # has no thread before its use

    @property
    def free(self) -> int:
        """Threads that could be at work beside those that are; below 0 if there are too many."""
        return self.allowed - self.passes - self.helpers


_process = _Process()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """The BLAS on one thread, while any pass is computed."""
    process = _process
    with process.lock:
        before = _set_blas_threads(1)
        if not process.passes:
            process.allowed = before
        process.passes += 1
    try:
        yield
    finally:
        with process.lock:
            process.passes -= 1
            if not process.passes:
                _set_blas_threads(process.allowed)
            elif _is_by_thread():
                _set_blas_threads(before)


def each(
    work: Callable[[Part, Scratch], None], parts: Iterable[Part], scratch: Scratch, blocks: int
) -> None:
    """Call ``work`` with every part, in any order, and memory that no other call has meanwhile.

    Args:
        blocks: of memory that a call takes, at most.

    Raises:
        BaseException: what a call raised, after all that were begun have ended.
    """
    left = iter(parts)
    first = list(islice(left, 2))
    loop = _Loop(work, chain(first, left))
    helpers: list[Future] = []
    try:
        if len(first) > 1:
            most = min(MOST_THREADS, MOST_BLOCKS // blocks) - 1
            for number in range(1, min(_process.free, most) + 1):
                memory = scratch.of_helper(number)
                helpers.append(_process.pool.submit(copy_context().run, loop.help, memory))
        loop.run(scratch, lambda: True)
    finally:
        loop.stopped = True
        _wait(helpers)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


class _Loop:
    """Parts that threads take in turn."""

    def __init__(self, work: Callable[[Any, Scratch], None], parts: Iterator[Any]) -> None:
        self._work, self._parts = work, parts
        self._lock = threading.Lock()  # a generator must not be entered twice
        self.stopped = False

    def run(self, scratch: Scratch, is_wanted: Callable[[], bool]) -> None:
        """Compute parts until none is left, or this thread is not wanted."""
        while is_wanted():
            with self._lock:
                part = None if self.stopped else next(self._parts, None)
            if part is None:
                return
            self._work(part, scratch)

    def help(self, scratch: Scratch) -> None:
        """Compute parts as long as there are not too many threads."""
        process = _process
        with process.lock:
            process.helpers += 1
            _set_blas_threads(1)  # this thread's own, if it has one
        try:
            self.run(scratch, lambda: process.free >= 0)
        except BaseException:
            self.stopped = True
            raise
        finally:
            with process.lock:
                process.helpers -= 1


def _wait(helpers: list[Future]) -> None:
    """Wait until no helper is at work, whatever signals come."""
    begun = [helper for helper in helpers if not helper.cancel()]
    interrupt = None
    while True:
        try:
            wait(begun)
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def cores() -> int:
    """Cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _set_blas_threads(count: int) -> int:
    """How many threads the BLAS had; 1, with nothing set, of one whose threads are its own."""
    before = 1
    for library in _blas():
        before = library.get_num_threads()
        # threadpoolctl obeys one thread alone, the first that sets a number, until it is told that
        # the others may: users of it need that as we do.
        release = getattr(library, "clear_controlling_thread", _nothing)
        release(force=True)
        library.set_num_threads(count)
        release(force=True)
    return before


def _nothing(force: bool) -> None:
    pass


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
    if before.passes:
        _set_blas_threads(before.allowed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
