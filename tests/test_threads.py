"""The threads of the NumPy path: the same bits for any number, no more than allowed, no harm."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupyconv
from cupyconv import ConvProblem
from cupyconv.cpu import blocked, correlation, threads
from cupyconv.cpu.scratch import Scratch, pool
from cupyconv.planning import cpu
from tests.configurations import random_data
from tests.test_cpu import DEEP, DENSE, DEPTHWISE, compute, methods

LAYERS = {
    "dense": DENSE.replace(input_shape=(5, 40, 40, 40)),
    "depthwise": DEPTHWISE.replace(input_shape=(4, 40, 60, 60)),
    "deep": DEEP.replace(input_shape=(4, 12, 6, 14, 14)),
    "grouped": ConvProblem((4, 24, 50, 50), (48, 6, 3, 3), padding=1, groups=4, stride=2),
}

FLOAT32 = np.dtype("float32")


@pytest.fixture
def allowed(monkeypatch):
    """Sets how many threads the BLAS is said to have."""
    set_threads, before = threads._set_blas_threads, blas_threads()

    def allow(count: int) -> None:
        monkeypatch.setattr(threads, "blas_threads", lambda: count)
        monkeypatch.setattr(
            threads, "_set_blas_threads", lambda wanted: set_threads(1 if wanted == 1 else before)
        )

    yield allow
    monkeypatch.undo()
    assert blas_threads() == before


def blas_threads() -> int:
    return threads._blas()[0].get_num_threads()


@contextmanager
def pass_at_work() -> Iterator[None]:
    """As if this thread computed a pass meanwhile."""
    one = object()
    threads._process.begin(one)
    yield
    threads._process.end(one)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that small layers have many, and are divided."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", cpu.BLOCK_BYTES // 16)
    monkeypatch.setattr(correlation, "LEAST_PRODUCTS", 1)


def parts_by_thread(parts: int, work=lambda part: time.sleep(0.002)) -> dict[int, int]:
    """Computes parts; how many each thread did."""
    done: dict[int, int] = {}
    lock = threading.Lock()

    def one(part: int, _: Scratch) -> None:
        with lock:
            done[threading.get_ident()] = done.get(threading.get_ident(), 0) + 1
        work(part)

    def compute() -> None:
        with pool(FLOAT32) as memory:
            threads.each(one, range(parts), memory, 0)

    threads.with_one_blas_thread(compute)
    return done


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_the_same_bits_for_any_number_of_threads(layer, allowed):
    problem = LAYERS[layer]
    data = random_data(problem)
    for pass_, method in methods(problem):
        allowed(1)
        alone = compute(problem, pass_, method, data)
        for count in (2, 3, 8):
            allowed(count)
            together = compute(problem, pass_, method, data)
            np.testing.assert_array_equal(together, alone, err_msg=f"{pass_} by {method}")


def test_results_are_the_same_bits_for_any_number_in_the_environment():
    script = (
        "import sys; from tests import test_threads, test_cpu; "
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


# -- how many --------------------------------------------------------------------------------------


def test_parts_are_divided_over_the_threads_that_are_allowed(allowed):
    for count in (1, 2, 4):
        allowed(count)
        together = threading.Barrier(count, timeout=60)
        done = parts_by_thread(40, lambda part, together=together: together.wait())
        assert sum(done.values()) == 40
        assert len(done) == count
        assert threading.get_ident() in done


def test_each_thread_finds_its_memory_again(allowed):
    allowed(2)
    together = threading.Barrier(2, timeout=60)
    blocks: list[np.ndarray] = []  # alive, so that no other memory has their addresses

    def one(part: int, memory: Scratch) -> None:
        blocks.append(memory.array("block", (1000,)))
        together.wait()  # no thread takes both parts

    for _ in range(2):
        with pass_at_work(), pool(FLOAT32) as memory:
            threads.each(one, range(2), memory, 1000)
    addresses = [block.ctypes.data for block in blocks]
    assert len(set(addresses)) == 2
    assert sorted(addresses[:2]) == sorted(addresses[2:])


def test_threadpoolctl_limits_them():
    with threadpool_limits(1, "blas"):
        assert list(parts_by_thread(20)) == [threading.get_ident()]
        assert blas_threads() == 1


def test_passes_in_threads_of_the_user_need_no_helpers(allowed):
    allowed(2)
    here, started = threading.Barrier(2), threading.Barrier(2)

    def one() -> dict[int, int]:
        with pass_at_work():
            here.wait(10)  # now there are two passes
            done = parts_by_thread(10)
            started.wait(10)
            return done

    with ThreadPoolExecutor(2) as users:
        found = [future.result() for future in [users.submit(one) for _ in range(2)]]
    assert [len(done) for done in found] == [1, 1]


def test_a_helper_leaves_where_the_user_begins_another_pass(allowed):
    allowed(2)
    helped, other = threading.Event(), pass_at_work()
    caller = threading.get_ident()

    def work(part: int) -> None:
        if threading.get_ident() != caller:
            other.__enter__()
            helped.set()
        else:
            assert helped.wait(10)

    done = parts_by_thread(20, work)
    other.__exit__(None, None, None)
    assert sorted(done.values()) == [1, 19]


def test_the_blas_has_its_threads_again():
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


# -- harm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", ["caller", "helper"])
def test_an_exception_leaves_after_all_parts_that_were_begun(culprit, allowed):
    allowed(3)
    at_work = threading.Semaphore(0)
    running: set[int] = set()
    caller = threading.get_ident()

    def work(part: int) -> None:
        running.add(part)
        at_work.release()
        if (threading.get_ident() == caller) == (culprit == "caller"):
            assert at_work.acquire(timeout=10)
            assert at_work.acquire(timeout=10)  # another one is at work too
            running.discard(part)
            raise ZeroDivisionError
        time.sleep(0.01)
        running.discard(part)

    with pytest.raises(ZeroDivisionError):
        parts_by_thread(100, work)
    assert not running
    assert not threads._process.passes
    assert not threads._process.helpers
    assert sum(parts_by_thread(10).values()) == 10


@pytest.fixture
def interruptible():
    """Takes SIGINT, which a shell makes those ignore that it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_after_all_parts_that_were_begun(allowed, interruptible):
    allowed(2)
    helping, running = threading.Event(), []
    caller = threading.get_ident()

    def work(part: int) -> None:
        if threading.get_ident() == caller:
            assert helping.wait(10)
            signal.raise_signal(signal.SIGINT)
        running.append(part)
        helping.set()
        time.sleep(0.05)
        running.remove(part)

    with pytest.raises(KeyboardInterrupt):
        parts_by_thread(100, work)
    assert not running
    assert not threads._process.passes
    assert not threads._process.helpers


def at_event(number: int, act: Callable[[], object]) -> Callable:
    """A profiler that acts once, where a signal's handler may: after so many calls that begin in
    Python, or end in C."""
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


def require_rest(before: int) -> None:
    """No pass and no helper is at work, and the BLAS has its threads."""
    assert not threads._process.passes
    assert not threads._process.helpers
    assert blas_threads() == before


def test_an_interrupt_at_any_instruction_leaves_nothing_behind(allowed):
    allowed(2)
    before, running = blas_threads(), []

    caller = threading.get_ident()

    def work(part: int) -> None:
        if threading.get_ident() != caller:
            running.append(part)
            running.remove(part)

    parts_by_thread(4, work)
    for number in itertools.count(1):
        try:
            sys.setprofile(at_event(number, interrupt))
            parts_by_thread(4, work)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.setprofile(None)
            assert not running
            require_rest(before)
    assert number > 50


def test_a_handler_may_compute_a_pass_at_any_instruction(allowed):
    allowed(2)
    before, nested = blas_threads(), []
    parts_by_thread(4)
    for number in itertools.count(1):
        try:
            sys.setprofile(at_event(number, lambda: nested.append(parts_by_thread(3))))
            done = parts_by_thread(4, lambda part: None)
        finally:
            sys.setprofile(None)
        assert sum(done.values()) == 4
        require_rest(before)
        if len(nested) < number:
            break
    assert number > 50
    assert all(sum(done.values()) == 3 for done in nested)


def test_a_pass_is_computed_while_the_interpreter_ends():
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
@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, where another test has imported it
def test_a_child_computes_after_a_fork(allowed):
    allowed(2)
    problem = LAYERS["dense"]
    data = random_data(problem)
    expected = cupyconv.conv_forward(data.x, data.w, **problem.keywords)
    with pass_at_work():
        child = os.fork()
        if not child:
            got = cupyconv.conv_forward(data.x, data.w, **problem.keywords)
            os._exit(0 if np.array_equal(got, expected) and not threads._process.passes else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_threads_of_the_user_get_what_one_gets(allowed):
    allowed(2)
    calls = list(soak_calls())
    with ThreadPoolExecutor(6) as users:
        for future in [users.submit(require_same, *call) for call in 2 * calls]:
            future.result()
    assert not threads._process.passes
    assert not threads._process.helpers


@pytest.mark.slow
def test_sixteen_threads_for_a_minute():
    calls = list(soak_calls())
    until = time.monotonic() + 60

    def compute_until(number: int) -> int:
        done = 0
        while time.monotonic() < until:
            require_same(*calls[(number + done) % len(calls)])
            done += 1
        return done

    with ThreadPoolExecutor(16) as users:
        done = list(users.map(compute_until, range(16)))
    assert min(done) > 0
    assert not threads._process.passes
    assert not threads._process.helpers


def soak_calls() -> Iterator[tuple]:
    """Every pass of the layers by every method, with what it gives."""
    for problem in LAYERS.values():
        data = random_data(problem)
        for pass_, method in methods(problem):
            yield problem, pass_, method, data, compute(problem, pass_, method, data)


def require_same(problem, pass_, method, data, expected) -> None:
    got = compute(problem, pass_, method, data)
    assert np.array_equal(got, expected), f"{pass_} by {method} of {problem}"
