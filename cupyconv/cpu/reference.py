"""Passes computed from the definition: one tap at a time, summed in float64, rounded once.

These passes are simple and slow; every other implementation is compared with them.
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
    """Functions that sum products; they determine the precision and the order of the sums.

    Attributes:
        wide: converts an array to the dtype of the sums.
        add: adds each group's matrix (G, K, C) times its pixels (N, G, C, ...) to the sums
            (N, G, K, ...).
        contract: sums gradients (N, G, K, ...) times pixels (N, G, C, ...) to (G, K, C).
    """

    wide: Callable[[np.ndarray], np.ndarray]
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    contract: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _add(sums: np.ndarray, matrices: np.ndarray, pixels: np.ndarray) -> None:
    sums += np.matmul(matrices, _flat_pixels(pixels)).reshape(sums.shape)


def _contract(gradients: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    return np.matmul(_flat_pixels(gradients), _flat_pixels(pixels).swapaxes(2, 3)).sum(axis=0)


def _flat_pixels(pixels: np.ndarray) -> np.ndarray:
    """Reshape (N, G, channels, ...) to (N, G, channels, pixels)."""
    return pixels.reshape(*pixels.shape[:3], prod(pixels.shape[3:]))


_FLOAT64 = Sums(_wide, _add, _contract)


def prepare(
    problem: ConvProblem, pass_: str, method: str, activation: str | None, conjugates: bool
) -> Callable[..., None]:
    """Return the function that computes a pass, as ``blocked.prepare`` does; ``method`` is ""."""

    def compute(x: Any, w: Any, y: Any, bias: Any, add: Any) -> None:
        if pass_ == "forward":
            forward(problem, x, w, bias, add, activation, y)
        elif pass_ == "backprop_input":
            backprop_input(problem, w, y, bias, add, activation, x, conjugates=conjugates)
        else:
            backprop_filter(problem, x, y, w)

    return compute


def forward(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
    by: Sums = _FLOAT64,
) -> None:
    """Compute y[n, k, p] = act(sum over c, r of x[n, c, h] w[k, c, r] + bias[k] + add[n, k, p]).

    Here h = p * stride - pad + r * dilation is the input pixel that tap r reads for output pixel p
    of image n; k is a filter and c a channel of its group.  A term that is None is omitted.
    """
    pixels, weights = by.wide(data_view(problem, x)), by.wide(filter_view(problem, w))
    result = data_view(problem, y)
    sums: Any = np.zeros(result.shape, pixels.dtype)
    for tap, outputs, inputs in taps(problem):
        matrices = weights[(ALL, ALL, ALL, *tap)]
        by.add(sums[(ALL, ALL, ALL, *outputs)], matrices, pixels[(ALL, ALL, ALL, *inputs)])
    result[...] = _finish(problem, sums, bias, add, activation)


def backprop_input(
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
    by: Sums = _FLOAT64,
    conjugates: bool = True,
) -> None:
    """Compute dx[n, c, h] = act(sum of dy[n, k, p] w[k, c, r] + bias[c] + add[n, c, h]).

    For input pixel h and channel c of image n, the sum is over all filters k, output pixels p and
    taps r with p * stride - pad + r * dilation = h.  A term that is None is omitted.

    Args:
        conjugates: whether to conjugate a complex w.
    """
    gradients, weights = by.wide(data_view(problem, dy)), by.wide(filter_view(problem, w))
    if conjugates:
        weights = weights.conj()
    result = data_view(problem, dx)
    sums: Any = np.zeros(result.shape, gradients.dtype)
    for tap, outputs, inputs in taps(problem):
        matrices = weights[(ALL, ALL, ALL, *tap)].swapaxes(1, 2)
        by.add(sums[(ALL, ALL, ALL, *inputs)], matrices, gradients[(ALL, ALL, ALL, *outputs)])
    result[...] = _finish(problem, sums, bias, add, activation)


def backprop_filter(
    problem: ConvProblem, x: np.ndarray, dy: np.ndarray, dw: np.ndarray, by: Sums = _FLOAT64
) -> None:
    """Compute dw[k, c, r] = sum over n, p of dy[n, k, p] conj(x[n, c, h]).

    Here h = p * stride - pad + r * dilation is the input pixel that tap r reads for output pixel p
    of image n; k is a filter and c a channel of its group.  Only complex dtypes need conj.
    """
    pixels, gradients = by.wide(data_view(problem, x)).conj(), by.wide(data_view(problem, dy))
    result = filter_view(problem, dw)
    for tap, outputs, inputs in taps(problem):
        result[(ALL, ALL, ALL, *tap)] = by.contract(
            gradients[(ALL, ALL, ALL, *outputs)], pixels[(ALL, ALL, ALL, *inputs)]
        )


def _finish(
    problem: ConvProblem,
    sums: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
) -> np.ndarray:
    """Add bias and addend to sums (N, G, K, ...), and apply the activation."""
    if bias is not None:
        sums += bias.astype(sums.dtype).reshape(*sums.shape[1:3], *[1] * (sums.ndim - 3))
    if add is not None:
        sums += data_view(problem, add).astype(sums.dtype)
    return activate(sums, activation)
