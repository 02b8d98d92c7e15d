"""The passes summed plainly, one term after another, in the precision that results are summed in.

float32 and float64 are summed in themselves, 16-bit types in float32 and rounded once.  This is
the yardstick of accuracy: an implementation may not be much less exact than plain summation.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from cupyconv.cpu import reference
from cupyconv.cpu.views import accumulator_of, data_view
from cupyconv.problem import ConvProblem

_SEVERAL = 8
"""Channels from which on a row of them is added to a row."""


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(accumulator_of(array.dtype.name))


def _add(sums: np.ndarray, matrices: np.ndarray, pixels: np.ndarray) -> None:
    """One channel at a time."""
    for channel in range(pixels.shape[2]):
        weights = matrices[:, :, channel]
        sums += pixels[:, :, channel, None] * weights.reshape(
            *weights.shape, *[1] * (sums.ndim - 3)
        )


def _contract(gradients: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """One output pixel of one image at a time."""
    rows = np.ascontiguousarray(_in_a_row(pixels).swapaxes(1, 2))  # (G, N * pixels, C)
    total: Any = np.zeros((len(rows), gradients.shape[2], rows.shape[2]), rows.dtype)
    if rows.size:
        for number, row in enumerate(_in_a_row(gradients).swapaxes(0, 1)):
            total[:, number] = _running_sum(row[..., None] * rows)
    return total


def _in_a_row(pixels: np.ndarray) -> np.ndarray:
    """(N, G, channels, ...) as (G, channels, N * pixels)."""
    ordered = np.moveaxis(pixels, 0, 2)
    return ordered.reshape(*ordered.shape[:2], prod(ordered.shape[2:]))


def _running_sum(terms: np.ndarray) -> np.ndarray:
    """The sum over the middle axis, one term after another.

    NumPy sums pairwise along the axis that lies contiguous in memory alone; along another it adds
    row to row, which several channels share.
    """
    if terms.shape[2] >= _SEVERAL:
        return terms.sum(axis=1)
    return np.cumsum(terms, axis=1)[:, -1]


_SUMS = reference.Sums(_wide, _add, _contract)

forward = partial(reference.forward, by=_SUMS)
backprop_input = partial(reference.backprop_input, by=_SUMS)
backprop_filter = partial(reference.backprop_filter, by=_SUMS)


def backprop_bias(problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
    """db, adding one output pixel of one image at a time."""
    terms = _in_a_row(_wide(data_view(problem, dy))).reshape(problem.K, -1)
    db[...] = np.cumsum(terms, axis=-1)[:, -1] if terms.size else 0
