"""The passes summed plainly, one term after another, in the precision that results are summed in.

float32 and float64 are summed in themselves, 16-bit types in float32 and rounded once.  This is
the yardstick of accuracy: an implementation may not be much less exact than plain summation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import accumulator_of, data_view, filter_view, taps
from cupyconv.problem import ConvProblem

ALL = slice(None)


def forward(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
) -> None:
    """y, adding one tap of one channel at a time."""
    accumulator = accumulator_of(problem.dtype)
    x_view: Any = data_view(problem, x).astype(accumulator)
    w_view: Any = filter_view(problem, w).astype(accumulator)
    total: Any = np.zeros(data_view(problem, y).shape, accumulator)
    for tap, outputs, inputs in taps(problem):
        for channel in range(problem.C // problem.groups):
            pixels = x_view[(ALL, ALL, channel, None, *inputs)]
            weights = w_view[(ALL, ALL, channel, *tap)]
            total[(ALL, ALL, ALL, *outputs)] += pixels * _per_channel(problem, weights)
    if bias is not None:
        total += _per_channel(problem, bias.astype(accumulator).reshape(problem.groups, -1))
    data_view(problem, y)[...] = activate(total, activation)


def backprop_input(
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
) -> None:
    """dx, adding one tap of one filter at a time."""
    accumulator = accumulator_of(problem.dtype)
    w_view: Any = filter_view(problem, w).astype(accumulator).conj()
    dy_view: Any = data_view(problem, dy).astype(accumulator)
    total: Any = np.zeros(data_view(problem, dx).shape, accumulator)
    for tap, outputs, inputs in taps(problem):
        for filter_ in range(problem.K // problem.groups):
            pixels = dy_view[(ALL, ALL, filter_, None, *outputs)]
            weights = w_view[(ALL, filter_, ALL, *tap)]
            total[(ALL, ALL, ALL, *inputs)] += pixels * _per_channel(problem, weights)
    if bias is not None:
        total += _per_channel(problem, bias.astype(accumulator).reshape(problem.groups, -1))
    data_view(problem, dx)[...] = activate(total, activation)


def backprop_filter(problem: ConvProblem, x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """dw, adding one output pixel of one image at a time."""
    accumulator = accumulator_of(problem.dtype)
    x_view: Any = data_view(problem, x).astype(accumulator).conj()
    dy_view: Any = data_view(problem, dy).astype(accumulator)
    total: Any = np.zeros(filter_view(problem, dw).shape, accumulator)
    for tap, outputs, inputs in taps(problem):
        images = np.moveaxis(x_view[(ALL, ALL, ALL, *inputs)], 0, 2)  # (G, C/G, N, pixels)
        if not images.size:
            continue
        channels = images.reshape(*images.shape[:2], -1)
        pixels = np.ascontiguousarray(channels.swapaxes(1, 2))  # (G, N * pixels, C/G)
        for filter_ in range(problem.K // problem.groups):
            gradients = dy_view[(ALL, ALL, filter_, None, *outputs)]
            terms = np.moveaxis(gradients, 0, 2).reshape(problem.groups, -1, 1) * pixels
            total[(ALL, filter_, ALL, *tap)] = _running_sum(terms)
    filter_view(problem, dw)[...] = total


def backprop_bias(problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
    """db, adding one output pixel of one image at a time."""
    dy_view: Any = data_view(problem, dy).astype(accumulator_of(problem.dtype))
    terms = np.moveaxis(dy_view, 0, 2).reshape(problem.K, -1)
    db[...] = np.cumsum(terms, axis=-1)[:, -1] if terms.size else 0


def _running_sum(terms: np.ndarray) -> np.ndarray:
    """The sum over the middle axis, one term after another.

    NumPy sums pairwise along the axis that lies contiguous in memory alone; along another it adds
    row to row, which several channels share.
    """
    if terms.shape[2] >= _SEVERAL:
        return terms.sum(axis=1)
    return np.cumsum(terms, axis=1)[:, -1]


_SEVERAL = 8


def _per_channel(problem: ConvProblem, values: np.ndarray) -> np.ndarray:
    """(G, channels) shaped to scale (N, G, channels, *spatial)."""
    return values.reshape(*values.shape, *[1] * problem.spatial_rank)
