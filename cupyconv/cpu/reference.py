"""The passes as their definition says: one tap at a time, summed in float64, rounded once.

Slow and plain on purpose: this is what every other implementation is compared with.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import data_view, filter_view, taps
from cupyconv.problem import ConvProblem

ALL: Any = slice(None)


def forward(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
) -> None:
    """y[n, k, p] = act(bias[k] + sum over c, r of x[n, c, h] w[k, c, r]),

    with h = p * stride - pad + r * dilation.
    """
    x64, w64 = _float64(data_view(problem, x)), _float64(filter_view(problem, w))
    y64: Any = np.zeros(data_view(problem, y).shape, x64.dtype)
    for tap, outputs, inputs in taps(problem):
        pixels = x64[(ALL, ALL, ALL, *inputs)]
        y64[(ALL, ALL, ALL, *outputs)] += _times(w64[(ALL, ALL, ALL, *tap)], pixels)
    if bias is not None:
        y64 += _float64(bias).reshape(problem.groups, -1, *[1] * problem.spatial_rank)
    data_view(problem, y)[...] = activate(y64, activation)


def backprop_input(
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
) -> None:
    """dx[n, c, h] = act(bias[c] + sum of dy[n, k, p] w[k, c, r] over all k, r, p)

    with p * stride - pad + r * dilation = h.
    """
    w64, dy64 = _float64(filter_view(problem, w)).conj(), _float64(data_view(problem, dy))
    dx64: Any = np.zeros(data_view(problem, dx).shape, w64.dtype)
    for tap, outputs, inputs in taps(problem):
        pixels = dy64[(ALL, ALL, ALL, *outputs)]
        dx64[(ALL, ALL, ALL, *inputs)] += _times(w64[(ALL, ALL, ALL, *tap)].swapaxes(1, 2), pixels)
    if bias is not None:
        dx64 += _float64(bias).reshape(problem.groups, -1, *[1] * problem.spatial_rank)
    data_view(problem, dx)[...] = activate(dx64, activation)


def backprop_filter(problem: ConvProblem, x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """dw[k, c, r] = sum over n, p of dy[n, k, p] x[n, c, h],

    with h = p * stride - pad + r * dilation.
    """
    x64, dy64 = _float64(data_view(problem, x)).conj(), _float64(data_view(problem, dy))
    dw64: Any = np.zeros(filter_view(problem, dw).shape, x64.dtype)
    for tap, outputs, inputs in taps(problem):
        gradients = _in_a_row(dy64[(ALL, ALL, ALL, *outputs)])
        pixels = _in_a_row(x64[(ALL, ALL, ALL, *inputs)])
        dw64[(ALL, ALL, ALL, *tap)] = np.matmul(gradients, pixels.swapaxes(2, 3)).sum(axis=0)
    filter_view(problem, dw)[...] = dw64


def _times(matrices: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Each group's matrix (G, K, C) times all its pixels (N, G, C, ...)."""
    products = np.matmul(matrices, _in_a_row(pixels))
    return products.reshape(*products.shape[:3], *pixels.shape[3:])


def _in_a_row(pixels: np.ndarray) -> np.ndarray:
    """(N, G, channels, ...) as (N, G, channels, pixels)."""
    return pixels.reshape(*pixels.shape[:3], prod(pixels.shape[3:]))


def _float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
