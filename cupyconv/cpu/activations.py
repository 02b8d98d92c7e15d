"""The activations that the forward pass can apply, on NumPy arrays."""

from __future__ import annotations

import math

import numpy as np

_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has no error function


def activate(values: np.ndarray, activation: str | None) -> np.ndarray:
    """relu max(v, 0), silu v / (1 + exp(-v)), gelu v (1 + erf(v / sqrt 2)) / 2; None is v."""
    if activation is None:
        return values
    if activation == "relu":
        return np.maximum(values, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "silu":
            return values / (1 + np.exp(-values))
        erf = np.asarray(_erf(values * math.sqrt(0.5)), dtype=values.dtype)
        return 0.5 * values * (1 + erf)
