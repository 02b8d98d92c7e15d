"""Work that interrupts (SIGINT) do not stop, such as the import of a large package."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")


def uninterrupted(compute: Callable[[], Value]) -> Value:
    """Return the result of ``compute``; an interrupt's handler is called after it has ended."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return compute()  # signal handlers run in the main thread only
    came: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        return compute()
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def import_whole(name: str) -> ModuleType:
    """Import a module and all that it imports; half an import could not be repeated."""
    return uninterrupted(lambda: import_module(name))
