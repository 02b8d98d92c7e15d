"""The passes as their definition says: one tap at a time, summed in float64, rounded once.

Slow and plain on purpose: this is what every other implementation is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import data_view, filter_view, taps
from cupyconv.problem import ConvProblem

ALL: Any = slice(None)


class Sums(NamedTuple):
    """How the terms of a tap are summed.

    Attributes:
        wide: an array in the dtype of its sums.
        add: each group's matrix (G, K, C) times its pixels (N, G, C, ...), to sums (N, G, K, ...).
        contract: gradients (N, G, K, ...) times pixels (N, G, C, ...), summed to (G, K, C).
    """

    wide: Callable[[np.ndarray], np.ndarray]
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    contract: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _add(sums: np.ndarray, matrices: np.ndarray, pixels: np.ndarray) -> None:
    sums += np.matmul(matrices, _in_a_row(pixels)).reshape(sums.shape)


def _contract(gradients: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    return np.matmul(_in_a_row(gradients), _in_a_row(pixels).swapaxes(2, 3)).sum(axis=0)


def _in_a_row(pixels: np.ndarray) -> np.ndarray:
    """(N, G, channels, ...) as (N, G, channels, pixels)."""
    return pixels.reshape(*pixels.shape[:3], prod(pixels.shape[3:]))


_FLOAT64 = Sums(_wide, _add, _contract)


def forward(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
    by: Sums = _FLOAT64,
) -> None:
    """y[n, k, p] = act(bias[k] + sum over c, r of x[n, c, h] w[k, c, r]),

    with h = p * stride - pad + r * dilation.
    """
    pixels, weights = by.wide(data_view(problem, x)), by.wide(filter_view(problem, w))
    result = data_view(problem, y)
    sums: Any = np.zeros(result.shape, pixels.dtype)
    for tap, outputs, inputs in taps(problem):
        matrices = weights[(ALL, ALL, ALL, *tap)]
        by.add(sums[(ALL, ALL, ALL, *outputs)], matrices, pixels[(ALL, ALL, ALL, *inputs)])
    result[...] = _finished(sums, bias, activation)


def backprop_input(
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
    by: Sums = _FLOAT64,
) -> None:
    """dx[n, c, h] = act(bias[c] + sum of dy[n, k, p] w[k, c, r] over all k, r, p)

    with p * stride - pad + r * dilation = h.
    """
    gradients, weights = by.wide(data_view(problem, dy)), by.wide(filter_view(problem, w)).conj()
    result = data_view(problem, dx)
    sums: Any = np.zeros(result.shape, gradients.dtype)
    for tap, outputs, inputs in taps(problem):
        matrices = weights[(ALL, ALL, ALL, *tap)].swapaxes(1, 2)
        by.add(sums[(ALL, ALL, ALL, *inputs)], matrices, gradients[(ALL, ALL, ALL, *outputs)])
    result[...] = _finished(sums, bias, activation)


def backprop_filter(
    problem: ConvProblem, x: np.ndarray, dy: np.ndarray, dw: np.ndarray, by: Sums = _FLOAT64
) -> None:
    """dw[k, c, r] = sum over n, p of dy[n, k, p] x[n, c, h],

    with h = p * stride - pad + r * dilation.
    """
    pixels, gradients = by.wide(data_view(problem, x)).conj(), by.wide(data_view(problem, dy))
    result = filter_view(problem, dw)
    for tap, outputs, inputs in taps(problem):
        result[(ALL, ALL, ALL, *tap)] = by.contract(
            gradients[(ALL, ALL, ALL, *outputs)], pixels[(ALL, ALL, ALL, *inputs)]
        )


def _finished(sums: np.ndarray, bias: np.ndarray | None, activation: str | None) -> np.ndarray:
    """Sums (N, G, K, ...) with the bias, activated."""
    if bias is not None:
        sums += bias.astype(sums.dtype).reshape(*sums.shape[1:3], *[1] * (sums.ndim - 3))
    return activate(sums, activation)
