"""How the driver's functions are written in Python, and given to the library that CuPy loads.

A function is called as its C original is, with addresses as integers (None where they are null).
It returns nothing, or raises ``Refused`` with the status to be returned.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import gc
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar

from . import header

CU = SimpleNamespace(**header.constants(), STREAM_LEGACY_HANDLE=1, STREAM_PER_THREAD_HANDLE=2)
"""The enumerators of cuda.h: CU.ERROR_INVALID_VALUE is CUDA_ERROR_INVALID_VALUE."""

FUNCTIONS: dict[str, Callable[..., int]] = {}
"""The driver's functions by their names in cuda.h."""

_keep: list[Any] = []


class Refused(Exception):
    """A call that the driver refuses, with a status, and why."""

    last: ClassVar[dict[int, tuple[int, str]]] = {}
    """What was refused last in each thread: the status, and why."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.last[threading.get_ident()] = status, text


_one_at_a_time = threading.RLock()
_guards: list[Callable[[], None]] = []


def guard(check: Callable[[], None]) -> Callable[[], None]:
    """A check that every function makes first, but those that work in any state."""
    _guards.append(check)
    return check


def function(of: Callable[..., None] | None = None, *, always: bool = False) -> Any:
    """Makes a function of cuda.h out of a Python function of its name and parameters.

    Args:
        of: the Python function.
        always: it can be called without a context, and after the device has failed.
    """
    if of is None:
        return lambda one: function(one, always=always)

    @wraps(of)
    def called(*arguments: Any) -> int:
        try:
            with _one_at_a_time, _no_collection():
                for check in () if always else _guards:
                    check()
                of(*arguments)
            return 0
        except Refused as refused:
            return refused.status
        except KeyboardInterrupt:  # nothing can be raised through C: again, once that is left
            _thread.interrupt_main()
            return CU.ERROR_UNKNOWN
        except BaseException:
            traceback.print_exc()
            return CU.ERROR_UNKNOWN

    FUNCTIONS[of.__name__] = called
    return of


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python collects may be arrays, which give back their memory: not in midst of a call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def put(address: int | None, kind: Any, value: Any) -> None:
    """Writes a result of a ctypes type to where the caller wants it."""
    if address is None:
        raise Refused(CU.ERROR_INVALID_VALUE, "a result has nowhere to go")
    kind.from_address(address).value = value


def require(condition: object, text: str, status: int = CU.ERROR_INVALID_VALUE) -> None:
    """Refuses a call unless a rule holds."""
    if not condition:
        raise Refused(status, text)


class Handles:
    """What is handed out for objects: numbers that are never used twice."""

    def __init__(self) -> None:
        self._next = 0x5E00_0000_0000
        self._objects: dict[int, Any] = {}

    def give(self, made: Any) -> int:
        self._next += 64
        self._objects[self._next] = made
        return self._next

    def get(self, handle: int | None, kind: type) -> Any:
        """The object of a handle; refused if there is none, or none any more."""
        found = self._objects.get(handle or 0)
        require(isinstance(found, kind), f"no {kind.__name__} any more", CU.ERROR_INVALID_HANDLE)
        return found

    def drop(self, handle: int | None, kind: type) -> Any:
        found = self.get(handle, kind)
        del self._objects[handle or 0]
        return found


handles = Handles()


def forwarders() -> str:
    """C++ of the library: each function, which hands its call on to Python."""
    lines = [
        "#include <cuda.h>",
        "static int closed = 1;",
        'extern "C" void device_close(int now) { closed = now; }',
    ]
    for name, one in header.functions(list(FUNCTIONS)).items():
        arguments = ", ".join(parameter for parameter, _ in one.parameters)
        # What Python leaves behind is given back after its end, by who cannot take a refusal.
        ended = "SUCCESS" if re.search("Destroy|Unload|Free", name) else "ERROR_DEINITIALIZED"
        lines.append(
            f"static CUresult (*hook_{name})({one.declaration});\n"
            f'extern "C" void device_hook_{name}(void* hook) '
            f"{{ hook_{name} = reinterpret_cast<decltype(hook_{name})>(hook); }}\n"
            f'extern "C" CUresult CUDAAPI {name}({one.declaration}) {{\n'
            f"  return closed ? CUDA_{ended} : hook_{name}({arguments});\n}}"
        )
    return "\n".join(lines) + "\n"


def connect(library: ctypes.CDLL) -> None:
    """Gives the library its functions; they fail, as the driver's do, once Python ends."""
    for name, one in header.functions(list(FUNCTIONS)).items():
        wanted = [parameter for parameter, _ in one.parameters]
        given = list(inspect.signature(FUNCTIONS[name]).parameters)
        if len(wanted) != len(given):
            raise TypeError(f"{name}({one.declaration}) is written as {name}({', '.join(given)})")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(kind for _, kind in one.parameters))
        hook = kind(FUNCTIONS[name])
        _keep.append(hook)
        getattr(library, f"device_hook_{name}")(hook)
    library.device_close(0)
    atexit.register(library.device_close, 1)
