"""NVIDIA's bindings of the driver (cuda-bindings), for what CuPy has no word for."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def driver() -> Any:
    """The module of the driver's functions.

    Raises:
        ImportError: it is not installed.
    """
    from cuda.bindings import driver as found

    return found


@cache
def available() -> bool:
    """Whether they are installed."""
    try:
        driver()
    except ImportError:
        return False
    return True
