"""Passes summed sequentially, one term after another, in the accumulator's precision.

float32 and float64 are summed in their own dtype.  16-bit dtypes are summed in float32, and the
result is rounded once.  No other implementation may be much less accurate than these passes.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from cupyconv.cpu import reference
from cupyconv.cpu.views import accumulator_of, data_view
from cupyconv.problem import ConvProblem


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(accumulator_of(array.dtype.name))


def _add(sums: np.ndarray, matrices: np.ndarray, pixels: np.ndarray) -> None:
    """Add the products of a tap, one channel at a time."""
    for channel in range(pixels.shape[2]):
        weights = matrices[:, :, channel]
        sums += pixels[:, :, channel, None] * weights.reshape(
            *weights.shape, *[1] * (sums.ndim - 3)
        )


def _contract(gradients: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Sum gradients times pixels, one output pixel of one image at a time."""
    if pixels.shape[2] < gradients.shape[2]:  # sums are fast if their last axis is long
        return _contract(pixels, gradients).swapaxes(1, 2)
    rows = np.ascontiguousarray(_flat_pixels(pixels).swapaxes(1, 2))  # (G, N * pixels, C)
    total: Any = np.zeros((len(rows), gradients.shape[2], rows.shape[2]), rows.dtype)
    if rows.size:
        for number, row in enumerate(_flat_pixels(gradients).swapaxes(0, 1)):
            total[:, number] = _running_sum(row[..., None] * rows)
    return total


def _flat_pixels(pixels: np.ndarray) -> np.ndarray:
    """Reshape (N, G, channels, ...) to (G, channels, N * pixels)."""
    ordered = np.moveaxis(pixels, 0, 2)
    return ordered.reshape(*ordered.shape[:2], prod(ordered.shape[2:]))


def _running_sum(terms: np.ndarray) -> np.ndarray:
    """Sum over the middle axis sequentially.

    NumPy's sum is pairwise only along the contiguous axis; along other axes it adds row to row,
    which is sequential, and fast if the contiguous axis is long.
    """
    return terms.sum(axis=1) if terms.shape[2] > 1 else np.cumsum(terms, axis=1)[:, -1]


_SUMS = reference.Sums(_wide, _add, _contract)

forward = partial(reference.forward, by=_SUMS)
backprop_input = partial(reference.backprop_input, by=_SUMS)
backprop_filter = partial(reference.backprop_filter, by=_SUMS)


def backprop_bias(problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
    """Compute db, adding one output pixel of one image at a time."""
    terms = _flat_pixels(_wide(data_view(problem, dy))).reshape(len(db), -1)
    db[...] = np.cumsum(terms, axis=-1)[:, -1] if terms.size else 0
