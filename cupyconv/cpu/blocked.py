"""The passes with NumPy, block by block, each by the method that suits its shape.

A pass is computed by one of the methods that cupyconv/planning/cpu.py chooses among.  Beside its
operands and its result it takes a fixed block of memory, whatever the layer: at most 64 MB, as long
as no result is a sum of more than a million products with filters.  Arithmetic is in the arrays'
dtype, complex ones included; 16-bit types are converted to float32 block by block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyconv.cpu import loops, products, scattered, windows
from cupyconv.cpu.correlation import Correlation, correlation, fill_unread, input_correlations
from cupyconv.cpu.scratch import pool
from cupyconv.planning.cpu import BLOCK_BYTES
from cupyconv.problem import ConvProblem

UFUNC_BUFFER = 64
"""Elements of NumPy's own buffers, into which it copies rows shorter than these before it adds."""

METHODS = {"products": products, "windows": windows, "scattered": scattered, "loops": loops}
"""Each computes a correlation, and all but scattered the filters' gradient."""


def forward(
    problem: ConvProblem,
    method: str,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
) -> None:
    """y[n, k, p] = act(bias[k] + sum over c, r of x[n, c, h] w[k, c, r])."""
    _compute("correlate", method, correlation(problem, x, w, y, bias, activation))


def backprop_input(
    problem: ConvProblem,
    method: str,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
) -> None:
    """dx[n, c, h] = act(bias[c] + sum of dy[n, k, p] w[k, c, r]), for each stride phase of h."""
    fill_unread(problem, dx, bias, activation)  # of which there may be no phase
    for phase in input_correlations(problem, w, dy, dx, bias, activation):
        _compute("correlate", method, phase)


def backprop_filter(
    problem: ConvProblem, method: str, x: np.ndarray, dy: np.ndarray, dw: np.ndarray
) -> None:
    """dw[k, c, r] = sum over n, p of dy[n, k, p] x[n, c, h]."""
    if not problem.N:
        dw[...] = 0
        return
    # The conjugate of the sum over conjugated dy and x: there are less of dw than of x.
    whole = replace(correlation(problem, x, dw, dy), conjugate=problem.is_complex)
    _compute("filter_gradient", method, whole)
    if problem.is_complex:
        np.conjugate(dw, out=dw)


def _compute(what: str, method: str, whole: Correlation) -> None:
    if not whole.images:
        return
    with np.errstate(), pool(whole.accumulator) as memory:  # errstate restores the buffer's size
        np.setbufsize(UFUNC_BUFFER)
        getattr(METHODS[method], what)(whole, memory, BLOCK_BYTES)
