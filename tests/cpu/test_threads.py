"""Threads of the NumPy path: bitwise equal results, thread counts, signals and forks."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupyconv
from cupyconv import ConvProblem
from cupyconv.cpu import blocked, choice, correlation, threads
from cupyconv.cpu.scratch import Pool, Scratch
from tests.configurations import random_data
from tests.cpu.test_cpu import DEEP, DENSE, DEPTHWISE, compute, methods

LAYERS = {
    "dense": DENSE.replace(input_shape=(5, 40, 40, 40)),
    "depthwise": DEPTHWISE.replace(input_shape=(4, 40, 60, 60)),
    "deep": DEEP.replace(input_shape=(4, 12, 6, 14, 14)),
    "grouped": ConvProblem((4, 24, 50, 50), (48, 6, 3, 3), padding=1, groups=4, stride=2),
}

FLOAT32 = np.dtype("float32")


@pytest.fixture
def allowed(monkeypatch):
    """Return a function that sets the number of threads that the BLAS reports."""
    set_threads, before = threads._set_blas_threads, blas_threads()

    def allow(count: int) -> None:
        monkeypatch.setattr(threads, "blas_threads", lambda: count)
        monkeypatch.setattr(
            threads, "_set_blas_threads", lambda count: set_threads(1 if count == 1 else before)
        )

    yield allow
    monkeypatch.undo()
    assert blas_threads() == before


def blas_threads() -> int:
    return threads._blas()[0].get_num_threads()


@contextmanager
def pass_at_work() -> Iterator[None]:
    """Register a running pass of this thread."""
    pass_ = object()
    threads._process.begin(pass_)
    yield
    threads._process.end(pass_)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small blocks, so that small layers have many, and divide all sums."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", choice.BLOCK_BYTES // 16)
    monkeypatch.setattr(correlation, "PART_PRODUCTS", 1)


def tasks_by_thread(tasks: int, work=lambda task: time.sleep(0.002)) -> dict[int, int]:
    """Compute tasks; return the number of tasks per thread."""
    counts: dict[int, int] = {}
    lock = threading.Lock()

    def work_on(task: int, _: Scratch) -> None:
        with lock:
            counts[threading.get_ident()] = counts.get(threading.get_ident(), 0) + 1
        work(task)

    def compute() -> None:
        with Pool(FLOAT32) as memory:
            threads.each(work_on, range(tasks), memory, 0)

    threads.with_one_blas_thread(compute)
    return counts


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_bitwise_equal_for_any_thread_count(layer, allowed):
    problem = LAYERS[layer]
    data = random_data(problem)
    for pass_, method in methods(problem):
        allowed(1)
        alone = compute(problem, pass_, method, data)
        for count in (2, 3, 8):
            allowed(count)
            together = compute(problem, pass_, method, data)
            np.testing.assert_array_equal(together, alone, err_msg=f"{pass_} by {method}")


@pytest.mark.thorough
def test_results_are_bitwise_equal_for_any_omp_num_threads():
    script = (
        "import sys; from tests.cpu import test_threads, test_cpu; "
        "sys.stdout.buffer.write(test_cpu.all_passes(test_threads.LAYERS['dense']).tobytes())"
    )
    results = set()
    for count in ("1", "2", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": count}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True
        )
        results.add(run.stdout)
    assert len(results) == 1


# -- thread counts and memory ----------------------------------------------------------------------


def test_parts_are_divided_over_the_allowed_threads(allowed):
    for count in (1, 2, 4):
        allowed(count)
        together = threading.Barrier(count, timeout=60)
        counts = tasks_by_thread(40, lambda task, together=together: together.wait())
        assert sum(counts.values()) == 40
        assert len(counts) == count
        assert threading.get_ident() in counts


def test_each_thread_reuses_its_memory(allowed):
    allowed(2)
    together = threading.Barrier(2, timeout=60)
    blocks: list[np.ndarray] = []  # kept alive, so that addresses are unique

    def work_on(task: int, memory: Scratch) -> None:
        blocks.append(memory.array("block", (1000,)))
        together.wait()  # force one task per thread

    for _ in range(2):
        with pass_at_work(), Pool(FLOAT32) as memory:
            threads.each(work_on, range(2), memory, 1000)
    addresses = [block.ctypes.data for block in blocks]
    assert len(set(addresses)) == 2
    assert sorted(addresses[:2]) == sorted(addresses[2:])


def test_late_helpers_keep_no_memory_alive(allowed, monkeypatch):
    allowed(2)
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(threads._process, "ask", late.extend)
    references: list[weakref.ref] = []

    def compute() -> None:
        tasks = [np.zeros(1), np.zeros(1), np.zeros(1)]

        def work(task: np.ndarray, memory: Scratch) -> None:
            references.append(weakref.ref(memory))

        references.extend(map(weakref.ref, (work, tasks[2])))
        with Pool(FLOAT32) as memory:
            threads.each(work, iter(tasks), memory, 1000)
            assert len(late) == 1

    with pass_at_work():
        compute()
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    late.pop()()


def test_threadpoolctl_limits_the_threads():
    with threadpool_limits(1, "blas"):
        assert list(tasks_by_thread(20)) == [threading.get_ident()]
        assert blas_threads() == 1


def test_concurrent_user_passes_use_no_helpers(allowed):
    allowed(2)
    here, started = threading.Barrier(2), threading.Barrier(2)

    def compute() -> dict[int, int]:
        with pass_at_work():
            here.wait(10)  # both passes are running
            counts = tasks_by_thread(10)
            started.wait(10)
            return counts

    with ThreadPoolExecutor(2) as users:
        results = [future.result() for future in [users.submit(compute) for _ in range(2)]]
    assert [len(counts) for counts in results] == [1, 1]


def test_helper_stops_when_the_user_starts_another_pass(allowed):
    allowed(2)
    helped, other = threading.Event(), pass_at_work()
    caller = threading.get_ident()

    def work(task: int) -> None:
        if threading.get_ident() != caller:
            other.__enter__()
            helped.set()
        else:
            assert helped.wait(10)

    counts = tasks_by_thread(20, work)
    other.__exit__(None, None, None)
    assert sorted(counts.values()) == [1, 19]


def test_blas_threads_are_restored_after_a_pass():
    before = blas_threads()
    data = random_data(DENSE)
    cupyconv.conv_forward(data.x, data.w, padding=1)
    assert blas_threads() == before
    threads.with_one_blas_thread(require_one_thread)
    with pytest.raises(ZeroDivisionError):
        threads.with_one_blas_thread(lambda: 1 // 0)
    assert blas_threads() == before


def require_one_thread() -> None:
    assert blas_threads() == 1


# -- exceptions, signals and forks -----------------------------------------------------------------


@pytest.mark.parametrize("culprit", ["caller", "helper"])
def test_exception_is_raised_after_all_running_parts(culprit, allowed):
    allowed(3)
    at_work = threading.Semaphore(0)
    running: set[int] = set()
    caller = threading.get_ident()

    def work(task: int) -> None:
        running.add(task)
        at_work.release()
        if (threading.get_ident() == caller) == (culprit == "caller"):
            assert at_work.acquire(timeout=10)
            assert at_work.acquire(timeout=10)  # another task is running
            running.discard(task)
            raise ZeroDivisionError
        time.sleep(0.01)
        running.discard(task)

    with pytest.raises(ZeroDivisionError):
        tasks_by_thread(100, work)
    assert not running
    assert not threads._process.passes
    assert not threads._process.helpers
    assert sum(tasks_by_thread(10).values()) == 10


@pytest.fixture
def interruptible():
    """Handle SIGINT, which processes started in the background by a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_is_raised_after_all_running_parts(allowed, interruptible):
    allowed(2)
    helping, running = threading.Event(), []
    caller = threading.get_ident()

    def work(task: int) -> None:
        if threading.get_ident() == caller:
            assert helping.wait(10)
            signal.raise_signal(signal.SIGINT)
        running.append(task)
        helping.set()
        time.sleep(0.05)
        running.remove(task)

    with pytest.raises(KeyboardInterrupt):
        tasks_by_thread(100, work)
    assert not running
    assert not threads._process.passes
    assert not threads._process.helpers


def at_event(number: int, act: Callable[[], object]) -> Callable:
    """Return a profiler that calls ``act`` once, where a signal handler could run.

    It counts the starts of Python calls and the ends of C calls, and acts at the given number.
    """
    left = number

    def count(_frame, event, _argument):
        nonlocal left
        left -= event in ("call", "c_return")
        if not left:
            sys.setprofile(None)
            act()

    return count


def interrupt() -> None:
    raise KeyboardInterrupt


def require_idle(before: int) -> None:
    """Require that no pass or helper is running, and that the BLAS has its threads."""
    assert not threads._process.passes
    assert not threads._process.helpers
    assert blas_threads() == before


def test_interrupt_at_any_instruction_restores_the_state(allowed):
    allowed(2)
    before, running = blas_threads(), []

    caller = threading.get_ident()

    def work(task: int) -> None:
        if threading.get_ident() != caller:
            running.append(task)
            running.remove(task)

    tasks_by_thread(4, work)
    for number in itertools.count(1):
        try:
            sys.setprofile(at_event(number, interrupt))
            tasks_by_thread(4, work)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.setprofile(None)
            assert not running
            require_idle(before)
    assert number > 50


def test_signal_handler_may_compute_at_any_instruction(allowed):
    allowed(2)
    before, nested = blas_threads(), []
    tasks_by_thread(4)
    for number in itertools.count(1):
        try:
            sys.setprofile(at_event(number, lambda: nested.append(tasks_by_thread(3))))
            counts = tasks_by_thread(4, lambda task: None)
        finally:
            sys.setprofile(None)
        assert sum(counts.values()) == 4
        require_idle(before)
        if len(nested) < number:
            break
    assert number > 50
    assert all(sum(counts.values()) == 3 for counts in nested)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process")
def test_signal_handler_may_fork_at_any_instruction(allowed):
    """The child completes the pass without its parent's helpers."""
    allowed(2)
    before, statuses = blas_threads(), []

    def fork() -> None:
        child = os.fork()
        if child:
            statuses.append(os.waitpid(child, 0)[1])
        else:
            signal.alarm(20)  # kill a child that hangs
            is_child.append(True)

    for number in itertools.count(1):
        results, is_child = np.zeros(12), []

        def work(task: int, results=results) -> None:
            time.sleep(0.0003)
            results[task] = blas_threads()

        try:
            sys.setprofile(at_event(number, fork))
            tasks_by_thread(12, work)
        finally:
            sys.setprofile(None)
            if is_child:
                is_right = (results == 1).all() and blas_threads() == before
                is_right = is_right and not threads._process.passes
                os._exit(0 if is_right else 1)
        assert (results == 1).all()
        require_idle(before)
        if len(statuses) < number:
            break
    assert number > 50
    assert not any(statuses)


def test_thread_limit_set_during_a_pass_is_kept():
    def limit() -> None:
        threads._set_blas_threads(2)

    before = blas_threads()
    try:
        with threadpool_limits(4, "blas"):
            threads.with_one_blas_thread(limit)
            assert blas_threads() == 2
    finally:
        threads._set_blas_threads(before)


def test_pass_runs_during_interpreter_shutdown():
    script = """
import atexit
import numpy as np
from cupyconv import conv_forward
x, w = np.ones((4, 64, 60, 60), np.float32), np.ones((64, 64, 3, 3), np.float32)
atexit.register(lambda: print(int(conv_forward(x, w).sum())))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.split() == [str(4 * 64 * 58 * 58 * 64 * 9)], run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # from JAX, if another test has imported it
def test_forked_child_computes_a_pass(allowed):
    allowed(2)
    problem = LAYERS["dense"]
    data = random_data(problem)
    expected = cupyconv.conv_forward(data.x, data.w, **problem.keywords)
    with pass_at_work():
        child = os.fork()
        if not child:
            got = cupyconv.conv_forward(data.x, data.w, **problem.keywords)
    if not child:  # the child continues and ends the pass of this thread
        os._exit(0 if np.array_equal(got, expected) and not threads._process.passes else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_concurrent_user_passes_give_the_same_results(allowed):
    allowed(2)
    calls = list(soak_calls())
    with ThreadPoolExecutor(6) as users:
        for future in [users.submit(require_same, *call) for call in 2 * calls]:
            future.result()
    assert not threads._process.passes
    assert not threads._process.helpers


def soak_calls() -> Iterator[tuple]:
    """Yield every pass of the layers by every method, with the expected result."""
    for problem in LAYERS.values():
        data = random_data(problem)
        for pass_, method in methods(problem):
            yield problem, pass_, method, data, compute(problem, pass_, method, data)


def require_same(problem, pass_, method, data, expected) -> None:
    got = compute(problem, pass_, method, data)
    assert np.array_equal(got, expected), f"{pass_} by {method} of {problem}"
