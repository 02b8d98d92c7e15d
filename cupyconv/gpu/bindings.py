"""Access to NVIDIA's driver bindings (cuda-bindings), for functions that CuPy does not offer."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def driver() -> Any:
    """Return the module ``cuda.bindings.driver``.

    Raises:
        ImportError: cuda-bindings is not installed.
    """
    from cuda.bindings import driver as module

    return module


@cache
def available() -> bool:
    """Return whether cuda-bindings is installed."""
    try:
        driver()
    except ImportError:
        return False
    return True
