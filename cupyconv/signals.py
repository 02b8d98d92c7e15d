"""Work that signal handlers must not interrupt, such as the import of a large package."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, ModuleType
from typing import TypeVar

Value = TypeVar("Value")


def uninterrupted(compute: Callable[[], Value]) -> Value:
    """Return the result of ``compute``, which signal handlers do not interrupt.

    Signal handlers run in the main thread only.  In the main thread, this function therefore runs
    ``compute`` in another thread and waits.  If a handler raises an exception meanwhile, this
    function raises that exception after ``compute`` has ended.

    Raises:
        BaseException: the exception of ``compute`` or of a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        return compute()
    tasks: list[Callable[[], Value]] = [compute]
    values: list[Value] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            task = tasks.pop()
        except IndexError:  # another thread runs ``compute``
            return
        try:
            values.append(task())
        except BaseException as error:
            errors.append(error)
        ended.release()

    interrupt: BaseException | None = None
    while not (values or errors):
        try:
            if tasks:
                _start(run)
            ended.acquire()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    if errors:
        raise errors[0]
    return values[0]


def _start(run: Callable[[], None]) -> None:
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # no thread can be started, or the interpreter is shutting down
        run()


def import_whole(name: str) -> ModuleType:
    """Import a module and all modules that it imports; signals do not interrupt the import.

    An exception during an import leaves a package partly imported, and importing it again fails.
    If another thread is importing the module, this function waits for that import.
    """
    if name in sys.modules:
        return import_module(name)
    return uninterrupted(lambda: import_module(name))


_PAUSE = 0.02
"""Seconds to wait before an interrupt that came during an import is sent again (hand-set)."""


class _Note:
    """Handler of SIGINT that sets ``came`` and calls ``before``, the handler that it replaces.

    During an import, it sends the interrupt again later instead of calling ``before``, because
    compiled modules print a traceback when an interrupt stops their import.
    """

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before, self.came = before, False
        self._imports = _imports(sys._getframe())

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if _imports(frame) > self._imports:
            again = threading.Timer(_PAUSE, _thread.interrupt_main)
            again.daemon = True
            again.start()
            return
        self.before(number, frame)


def _imports(frame: FrameType | None) -> int:
    """Return the number of import-system frames on the call stack of a frame."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORT_SYSTEM
        frame = frame.f_back
    return count


_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether an interrupt (SIGINT) has come since the block began.

    The function is needed because some libraries suppress a KeyboardInterrupt during their import,
    or raise another error instead.  If the program has a SIGINT handler other than Python's
    default, that handler is not replaced, and no interrupts are recorded.
    """
    before = signal.getsignal(signal.SIGINT)
    is_usual = before is signal.default_int_handler or isinstance(before, _Note)
    note = _Note(before if isinstance(before, _Note) else signal.default_int_handler)
    is_noting = is_usual and threading.current_thread() is threading.main_thread()
    if is_noting:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: note.came
    finally:
        if is_noting:
            signal.signal(signal.SIGINT, before)
