"""Functions of NVIDIA's driver that CuPy does not offer, called through ctypes.

Numbers of enumerators are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def library() -> Any:
    """Return the driver's library, which CuPy has loaded, as a ctypes library."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def function(name: str, *kinds: type) -> Any:
    """Return a function of the driver that takes arguments of these ctypes types.

    The function returns a status, which is 0 for success.
    """
    found = library()[name]
    found.argtypes, found.restype = kinds, ctypes.c_int
    return found


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of a launch with programmatic stream serialization.

    With this attribute, a kernel may begin before the previous kernel in its stream has ended.
    The caller sets ``stream`` before the launch.
    """

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )

    def __init__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> None:
        super().__init__(grid, block, shared_bytes, None, None, 1)
        self._attribute = _Attribute(_SERIALIZATION, b"", 1, b"")
        self.attributes = ctypes.addressof(self._attribute)
