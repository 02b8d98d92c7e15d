"""The activations that a pass can apply, on NumPy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_erfc = np.frompyfunc(math.erfc, 1, 1)  # NumPy has no error function

PIECES = {"silu": 1 << 14, "gelu": 1 << 11}
"""Values that are activated at a time: the steps in between take memory, most of them objects'."""


def activate(values: np.ndarray, activation: str | None) -> np.ndarray:
    """relu max(v, 0), silu v / (1 + exp(-v)), gelu v (1 + erf(v / sqrt 2)) / 2; None is v.

    In place.  The factor of gelu is erfc(-v / sqrt 2), in which nothing cancels.
    """
    if activation == "relu":
        return np.maximum(values, 0, out=values)
    if activation is None or not values.size:
        return values
    most = PIECES[activation]
    with (
        np.errstate(over="ignore", invalid="ignore"),
        np.nditer(values, ["external_loop", "buffered"], ["readwrite"], buffersize=most) as pieces,
    ):
        piece: Any
        for piece in pieces:
            if activation == "silu":
                piece /= 1 + np.exp(-piece)
            else:
                wide = piece.astype(np.float64)
                piece[...] = wide / 2 * _erfc(wide * -math.sqrt(0.5)).astype(np.float64)
    return values
