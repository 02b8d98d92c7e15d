"""Connect driver functions written in Python to the library that CuPy loads.

A function takes the parameters of its C original, with addresses as integers (None for null).
It returns nothing, or raises ``Refused`` with the status for the caller.
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
"""Enumerators of cuda.h: CU.ERROR_INVALID_VALUE is CUDA_ERROR_INVALID_VALUE."""

FUNCTIONS: dict[str, Callable[..., int]] = {}
"""Driver functions by their names in cuda.h."""

_keep: list[Any] = []


class Refused(Exception):
    """A call that the driver refuses: the status and the reason."""

    last: ClassVar[dict[int, tuple[int, str]]] = {}
    """Status and reason of the last refusal, keyed by thread."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.last[threading.get_ident()] = status, text


_driver_lock = threading.RLock()
_guards: list[Callable[[], None]] = []


def guard(check: Callable[[], None]) -> Callable[[], None]:
    """Register a check that runs before every function except those marked ``always``."""
    _guards.append(check)
    return check


def function(of: Callable[..., None] | None = None, *, always: bool = False) -> Any:
    """Register a Python function as the implementation of cuda.h's function of the same name.

    Args:
        of: the Python function.
        always: the function works without a context and after the device has failed.
    """
    if of is None:
        return lambda original: function(original, always=always)

    @wraps(of)
    def call(*arguments: Any) -> int:
        try:
            with _driver_lock, _no_collection():
                for check in () if always else _guards:
                    check()
                of(*arguments)
            return 0
        except Refused as refused:
            return refused.status
        except KeyboardInterrupt:  # cannot pass through C: raise it again in Python
            _thread.interrupt_main()
            return CU.ERROR_UNKNOWN
        except BaseException:
            traceback.print_exc()
            return CU.ERROR_UNKNOWN

    FUNCTIONS[of.__name__] = call
    return of


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: arrays collected inside a call would free their memory there."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def put(address: int | None, kind: Any, value: Any) -> None:
    """Write a result of a ctypes type to the caller's address."""
    if address is None:
        raise Refused(CU.ERROR_INVALID_VALUE, "the address of a result is null")
    kind.from_address(address).value = value


def require(condition: object, text: str, status: int = CU.ERROR_INVALID_VALUE) -> None:
    """Refuse the call unless the condition holds."""
    if not condition:
        raise Refused(status, text)


class Handles:
    """Table of objects by handle; a handle is never reused."""

    def __init__(self) -> None:
        self._next = 0x5E00_0000_0000
        self._objects: dict[int, Any] = {}

    def give(self, value: Any) -> int:
        self._next += 64
        self._objects[self._next] = value
        return self._next

    def get(self, handle: int | None, kind: type) -> Any:
        """Return the object of a handle; refuse a handle that is unknown or closed."""
        value = self._objects.get(handle or 0)
        require(isinstance(value, kind), f"unknown {kind.__name__}", CU.ERROR_INVALID_HANDLE)
        return value

    def drop(self, handle: int | None, kind: type) -> Any:
        value = self.get(handle, kind)
        del self._objects[handle or 0]
        return value


handles = Handles()


_IN_C = {
    "cuCtxGetCurrent": "static CUcontext one; if (!one) hook_cuCtxGetCurrent(&one); *pctx = one;",
    "cuCtxGetDevice": "*device = 0;",
    "cuLaunchKernel": "",
    "cuLaunchKernelEx": "",
    "cuStreamIsCapturing": "*captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;",
    "cuThreadExchangeStreamCaptureMode": "",
}
"""Answers in C to the functions of a repeated call, for host_time.py, keyed by function."""


def forwarders() -> str:
    """Return the library's C++ source: each function forwards its call to Python."""
    lines = [
        "#include <cuda.h>",
        "static int closed = 1, in_c = 0;",
        'extern "C" void device_in_c(int now) { in_c = now; }',
        'extern "C" void device_close(int now) { closed = now; }',
    ]
    for name, entry in header.functions(list(FUNCTIONS)).items():
        arguments = ", ".join(parameter for parameter, _ in entry.parameters)
        # Destructors run after Python has ended and cannot handle an error status.
        status = "SUCCESS" if re.search("Destroy|Unload|Free", name) else "ERROR_DEINITIALIZED"
        answered = ""
        if name in _IN_C:
            answered = f"  if (in_c) {{ {_IN_C[name]} return CUDA_SUCCESS; }}\n"
        lines.append(
            f"static CUresult (*hook_{name})({entry.declaration});\n"
            f'extern "C" void device_hook_{name}(void* hook) '
            f"{{ hook_{name} = reinterpret_cast<decltype(hook_{name})>(hook); }}\n"
            f'extern "C" CUresult CUDAAPI {name}({entry.declaration}) {{\n'
            f"{answered}"
            f"  return closed ? CUDA_{status} : hook_{name}({arguments});\n}}"
        )
    return "\n".join(lines) + "\n"


def connect(library: ctypes.CDLL) -> None:
    """Connect the library's functions to Python; like the driver's, they fail once Python ends."""
    for name, entry in header.functions(list(FUNCTIONS)).items():
        parameters = [parameter for parameter, _ in entry.parameters]
        names = list(inspect.signature(FUNCTIONS[name]).parameters)
        if len(parameters) != len(names):
            raise TypeError(f"{name}({entry.declaration}) is written as {name}({', '.join(names)})")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(kind for _, kind in entry.parameters))
        hook = kind(FUNCTIONS[name])
        _keep.append(hook)
        getattr(library, f"device_hook_{name}")(hook)
    library.device_close(0)
    atexit.register(library.device_close, 1)
