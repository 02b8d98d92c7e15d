"""Threads of the NumPy path.

A pass is divided into tasks, and a single thread with a single-threaded BLAS computes each task.
Results are therefore bitwise the same for any number of threads, and one thread can copy while
another multiplies.  A pass uses the BLAS's number of threads, which OMP_NUM_THREADS, threadpoolctl
and CPU affinity limit.  The calling thread computes tasks together with helper threads, which all
passes of the process share.  A helper stops if running passes and helpers exceed this number.

A signal may arrive between any two instructions, and its handler may raise, compute a pass, or
fork.  Each change of state is therefore recorded before it is made, and its reversal is retried
until it completes.  A forked child recomputes the tasks that helpers of its parent had begun.

All passes of the process share the number of BLAS threads.  A number that the user sets during a
pass is kept, except 1, which looks like the number that the pass itself has set.
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
"""Largest number of threads of a pass (hand-set)."""

FORK_SECONDS = 0.05
"""Seconds that a pass waits for a helper before it checks whether the helper exists (hand-set)."""

Task = TypeVar("Task")


class _Process:
    """State that the passes of a process share.

    Attributes:
        passes: for each running pass, the number of BLAS threads before it and its thread's id.
        helpers: running helpers.
        loops: the _Loop objects of all running calls of ``each``.
        allowed: number of BLAS threads before the passes set it to 1.
        taken: whether the passes have set the number of BLAS threads to 1.
        lock: guards the attributes above.
        tasks, threads: queue of the helpers' tasks, and number of helper threads.
        forking: for each fork in progress, the loops that were running before it.
    """

    def __init__(self) -> None:
        self.passes: dict[object, tuple[int, int]] = {}
        self.helpers: set[object] = set()
        self.loops: set[_Loop] = set()
        self.allowed, self.taken = 1, False
        self.lock = threading.RLock()
        self.tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.threads = 0
        self.forking: list[list[_Loop]] = []

    @property
    def free(self) -> int:
        """Number of threads that may start; negative if too many are running."""
        return self.allowed - len(self.passes) - len(self.helpers)

    def begin(self, pass_: object) -> None:
        """Register a pass and make the BLAS single-threaded."""
        with self.lock:
            count = blas_threads()
            self.passes[pass_] = count, threading.get_ident()
            if not self.taken:
                self.allowed = count
                self.taken = True
            for set_threads in _setters():
                set_threads(1)

    def end(self, pass_: object) -> None:
        """Unregister a pass; after the last pass, restore the number of BLAS threads.

        If each calling thread has its own number of BLAS threads, each pass restores its thread's
        number.
        """
        with self.lock:
            is_ours = _has_one_thread()  # False if the user has set another number
            if _is_by_thread() and pass_ in self.passes and is_ours:
                _set_blas_threads(self.passes[pass_][0])
            self.passes.pop(pass_, None)
            if self.taken and not self.passes:
                if not _is_by_thread() and is_ours:
                    _set_blas_threads(self.allowed)
                self.taken = False

    def ask(self, tasks: list[Callable[[], None]]) -> None:
        """Queue tasks for helper threads, after starting missing threads if the system permits."""
        with self.lock:
            count = min(len(self.helpers) + len(tasks), MOST_THREADS - 1)
            if self.threads < count:
                self._start_threads(count)
        for task in tasks if self.threads else ():
            self.tasks.put(task)

    def _start_threads(self, count: int) -> None:
        """Start helper threads until there are ``count``, if the system permits."""
        with suppress(RuntimeError):  # no more threads can start, or the interpreter shuts down
            while self.threads < count:
                threading.Thread(target=self._do_tasks, name="cupyconv", daemon=True).start()
                self.threads += 1

    def _do_tasks(self) -> None:
        tasks = self.tasks
        while True:
            tasks.get()()

    def before_fork(self) -> None:
        """Acquire all locks, so that the child gets consistent states."""
        self.lock.acquire()
        self.forking.append(list(self.loops))
        for loop in self.forking[-1]:
            loop.lock.acquire()

    def after_fork(self, is_child: bool) -> None:
        """Release the locks; in the child, forget the parent's other threads."""
        loops = self.forking.pop()
        if is_child:
            here = threading.get_ident()
            self.passes = {key: state for key, state in self.passes.items() if state[1] == here}
            self.helpers.clear()
            self.tasks, self.threads = SimpleQueue(), 0
            if self.taken and not self.passes:
                _set_blas_threads(self.allowed)
                self.taken = False
        for loop in loops:
            if is_child:
                loop.forget_helpers()
            loop.lock.release()
        self.lock.release()


_process = _Process()


def with_one_blas_thread(compute: Callable[[], None]) -> None:
    """Compute a pass with a single-threaded BLAS."""
    pass_ = object()
    _compute_and_undo(partial(_process.begin, pass_), compute, undo=partial(_process.end, pass_))


def _compute_and_undo(*steps: Callable[[], None], undo: Callable[[], None]) -> None:
    """Call the steps in turn; then call ``undo`` until no signal handler interrupts it."""
    interrupt = None
    try:
        for step in steps:
            step()
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
    work: Callable[[Task, Scratch], None], tasks: Iterable[Task], pool: Pool, size: int
) -> None:
    """Call ``work`` with every task and scratch memory, concurrently and in any order.

    Args:
        size: largest number of scratch elements of a call, which limits the number of concurrent
            calls.

    Raises:
        BaseException: the exception of a call, after all calls in progress have ended.
    """
    remaining = iter(tasks)
    first = list(islice(remaining, 2))
    if len(first) < 2:
        for task in first:
            work(task, *pool.divided("calls", size))
        return
    loop = _Loop(work, chain(first, remaining))

    def compute() -> None:
        fitting = CALLS_BYTES // max(size * pool.dtype.itemsize, 1)
        most = min(_process.free + 1, MOST_THREADS, fitting)
        own, *helpers = pool.divided("calls", size, max(most, 1))
        _process.loops.add(loop)
        loop.ask_for(helpers)
        loop.run(own)
        while loop.wait():
            loop.run(own)

    def end() -> None:
        loop.end()
        _process.loops.discard(loop)

    _compute_and_undo(compute, undo=end)
    if loop.error is not None:
        raise loop.error


class _Loop:
    """Loop over tasks that several threads share.

    Attributes:
        lock: guards the other attributes.
        error: exception of a helper.
    """

    def __init__(self, work: Callable[[Any, Scratch], None], tasks: Iterator[Any]) -> None:
        self._work, self._tasks = work, tasks
        self.lock = threading.RLock()  # also guards the generator of tasks
        self._stopped = False
        self._helpers: set[threading.Lock] = set()  # one lock per running helper, which holds it
        self._begun: dict[threading.Lock, Any] = {}  # last task of each helper
        self._memories: list[Scratch] = []  # scratch memory of helpers that have not started
        self.error: BaseException | None = None

    def ask_for(self, memories: Iterable[Scratch]) -> None:
        """Queue one helper per scratch memory."""
        self._memories = list(memories)
        _process.ask([partial(copy_context().run, self._help) for _ in self._memories])

    def run(self, scratch: Scratch, helper: threading.Lock | None = None) -> None:
        """Compute tasks until no task remains, or for a helper until too many threads are running.

        Args:
            helper: lock of the helper that calls this function; None for the calling thread.
        """
        while helper is None or _process.free >= 0:
            with self.lock:
                task = None if self._stopped else next(self._tasks, None)
                if helper is not None:
                    self._begun[helper] = task
            if task is None:
                return
            self._work(task, scratch.rest())

    def wait(self) -> bool:
        """Wait for all helpers; return whether tasks remain, as they may in a forked child."""
        self._wait_for_helpers()
        with self.lock:
            if self._stopped:
                return False
            task = next(self._tasks, None)
            if task is not None:
                self._tasks = chain([task], self._tasks)
            return task is not None

    def end(self) -> None:
        """Let no helper start, wait for running helpers, and drop the scratch memory.

        The memory is dropped because queued helpers may refer to the loop for a while.
        """
        with self.lock:
            self._stopped = True
            self._memories.clear()
        self._wait_for_helpers()
        self._begun.clear()
        self._tasks, self._work = iter(()), _no_work

    def _wait_for_helpers(self) -> None:
        while helpers := list(self._helpers):
            # Wait for a helper by acquiring its lock, which it releases after it has left
            # ``_helpers``.  The lock is never used again.  A forked child has no helper to release
            # it: time out.
            helpers[0].acquire(timeout=FORK_SECONDS)

    def forget_helpers(self) -> None:
        """Put back the tasks that helpers had begun; a forked child has no helpers."""
        lost = [task for task in self._begun.values() if task is not None]
        self._tasks = chain(lost, self._tasks)
        self._begun.clear()
        self._helpers.clear()

    def _help(self) -> None:
        """Compute tasks as a helper."""
        process, at_work = _process, threading.Lock()
        with at_work:
            with self.lock:
                if self._stopped:
                    return
                memory = [self._memories.pop()]  # a list, so that pop below leaves no reference
                self._helpers.add(at_work)
            try:
                # Run without the loop's lock: a thread that waits for this helper may hold it.
                process.helpers.add(at_work)
                if _is_by_thread():
                    _set_blas_threads(1)
                self.run(memory.pop(), at_work)
            except BaseException as error:
                self.error, self._stopped = error, True
            finally:
                process.helpers.discard(at_work)
                self._helpers.discard(at_work)


def _no_work(task: Any, scratch: Scratch) -> None:
    """Do nothing; replaces the work of a loop that has ended."""


def cores() -> int:
    """Return the number of cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas_threads() -> int:
    """Return the number of BLAS threads of the calling thread; 0 if it is unknown."""
    count = _getter()
    return count() or 0 if count else 0


def _has_one_thread() -> bool:
    count = _getter()
    return count is None or count() in (1, None)


def _set_blas_threads(count: int) -> None:
    for set_threads in _setters():
        set_threads(count)


@cache
def _getter() -> Callable[[], int | None] | None:
    """Return the function that returns the number of threads of the first library."""
    for library in _blas()[:1]:
        return _symbol(library, "openblas_get_num_threads") or library.get_num_threads
    return None


@cache
def _setters() -> list[Callable[[int], None]]:
    """Return functions that set a library's number of threads, from any thread.

    ``set_num_threads`` of newer releases of threadpoolctl accepts a number only from the first
    thread that sets one.
    """
    return [
        _symbol(one, "openblas_set_num_threads")
        or getattr(one, "_real_set_num_threads", one.set_num_threads)
        for one in _blas()
    ]


def _symbol(library: Any, name: str) -> Any:
    """Return a function of OpenBLAS itself, which threadpoolctl would look up in every call."""
    if library.internal_api != "openblas" or getattr(library, "threading_layer", "") == "openmp":
        return None
    find = getattr(library, "_get_symbol", None)
    return find and find(name)


@cache
def _is_by_thread() -> bool:
    """Return whether each calling thread has its own number of BLAS threads."""
    return any(getattr(library, "threading_layer", "") == "openmp" for library in _blas())


@cache
def _blas() -> list[Any]:
    """Return threadpoolctl's controllers of NumPy's BLAS, or of every BLAS if none is NumPy's."""
    from threadpoolctl import ThreadpoolController  # imported on first use

    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    return [library for library in libraries if "numpy" in library.filepath] or libraries


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_process.before_fork,
        after_in_parent=partial(_process.after_fork, False),
        after_in_child=partial(_process.after_fork, True),
    )
