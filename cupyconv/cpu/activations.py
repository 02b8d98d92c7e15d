"""Activation functions of the passes on NumPy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_erfc = np.frompyfunc(math.erfc, 1, 1)  # NumPy has no error function

BUFFER_ELEMENTS = {"silu": 1 << 14, "gelu": 1 << 11}
"""Elements that ``activate`` processes at once, keyed by activation (hand-set).

Small buffers save temporary memory.  The buffer of gelu is smaller, since erfc creates a
Python object per element.
"""


def activate(values: np.ndarray, activation: str | None) -> np.ndarray:
    """Apply an activation in place, and return the array; None leaves it unchanged.

    For each value v, relu is max(v, 0), silu is v / (1 + exp(-v)), and gelu is
    v (1 + erf(v / sqrt(2))) / 2, computed with erfc(-v / sqrt(2)) to avoid cancellation.  silu is
    -0 where exp(-v) overflows, and NaN at -infinity, as in the kernels and in PyTorch.
    """
    if activation == "relu":
        return np.maximum(values, 0, out=values)
    if activation is None or not values.size:
        return values
    size = BUFFER_ELEMENTS[activation]
    with (
        np.errstate(over="ignore", invalid="ignore"),
        np.nditer(values, ["external_loop", "buffered"], ["readwrite"], buffersize=size) as buffers,
    ):
        buffer: Any
        for buffer in buffers:
            if activation == "silu":
                buffer /= 1 + np.exp(-buffer)
            else:
                wide = buffer.astype(np.float64)
                buffer[...] = wide / 2 * _erfc(wide * -math.sqrt(0.5)).astype(np.float64)
    return values
