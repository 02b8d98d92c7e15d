"""Passes with NumPy, computed block by block with a method chosen by the planner.

cupyconv/cpu/choice.py chooses the method.  A pass needs at most 64 MB besides its operands and its
result, if each result sums at most a million products.  Arithmetic is in the arrays' dtype,
including complex dtypes; 16-bit dtypes are converted to float32 block by block.
"""

from __future__ import annotations

import numpy as np

from cupyconv.cpu import loops, patches, products, scattered, tiles, windows
from cupyconv.cpu.axis import used_parts
from cupyconv.cpu.choice import BLOCK_BYTES
from cupyconv.cpu.correlation import Correlation, correlation, input_gradient, phases_of
from cupyconv.cpu.scratch import Pool
from cupyconv.problem import ConvAxis, ConvProblem

METHODS = {
    "products": products,
    "windows": windows,
    "scattered": scattered,
    "loops": loops,
}
"""Modules that compute a correlation and, except ``scattered``, the filter gradient.

The method ``tiles`` computes all correlations of a pass together.
"""


def forward(
    problem: ConvProblem,
    method: str,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
) -> None:
    """Compute y[n, k, p] = act(sum over c, r of x[n, c, h] w[k, c, r] + bias[k] + add[n, k, p]).

    Here h = p * stride - pad + r * dilation is the input pixel that tap r reads for output pixel p
    of image n; k is a filter and c a channel of its group.  A term that is None is omitted.
    """
    if method == "tiles":
        if problem.N:
            tiles.correlate(problem, "forward", x, w, y, bias, add, activation, BLOCK_BYTES)
        return
    _compute("correlate", method, correlation(problem, x, w, y, bias, add, activation))


def backprop_input(
    problem: ConvProblem,
    method: str,
    w: np.ndarray,
    dy: np.ndarray,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    activation: str | None,
    dx: np.ndarray,
    conjugates: bool = True,
) -> None:
    """Compute dx[n, c, h] = act(sum of dy[n, k, p] w[k, c, r] + bias[c] + add[n, c, h]).

    For input pixel h and channel c of image n, the sum is over all filters k, output pixels p and
    taps r with p * stride - pad + r * dilation = h.  A term that is None is omitted.

    Input pixels h with the same remainder modulo the stride are computed together.

    Args:
        conjugates: whether to conjugate a complex w.
    """
    if method == "tiles":
        if problem.N:
            operands = dx, w, dy, bias, add, activation
            tiles.correlate(problem, "backprop_input", *operands, BLOCK_BYTES)
        return
    conjugate = conjugates and problem.is_complex
    whole = input_gradient(problem, w, dy, dx, bias, add, activation, conjugate)
    if any(axis.unread_inputs for axis in problem.axes):
        whole.finish_empty()  # the methods below may skip unread inputs
    if method == "patches":
        with Pool(whole.accumulator) as memory:
            patches.backprop_input(whole, problem.axes, memory, BLOCK_BYTES)
        return
    _compute("correlate", method, whole, problem.axes)


def backprop_filter(
    problem: ConvProblem, method: str, x: np.ndarray, dy: np.ndarray, dw: np.ndarray
) -> None:
    """Compute dw[k, c, r] = sum over n, p of dy[n, k, p] conj(x[n, c, h]).

    Here h = p * stride - pad + r * dilation is the input pixel that tap r reads for output pixel p
    of image n; k is a filter and c a channel of its group.  Only complex dtypes need conj.
    """
    if not problem.N:
        dw[...] = 0
        return
    if method == "tiles":
        tiles.filter_gradient(problem, x, dw, dy, BLOCK_BYTES)
        return
    # dw = conj(sum of conj(dy) x), because conjugating dw is cheaper than conjugating x.
    is_complex = problem.is_complex
    whole = correlation(problem, x, dw, dy)
    _compute("filter_gradient", method, whole._replace(conjugate=True) if is_complex else whole)
    if is_complex:
        np.conjugate(dw, out=dw)


def _compute(
    function: str, method: str, whole: Correlation, axes: tuple[ConvAxis, ...] = ()
) -> None:
    """Compute the correlations or filter gradients of all ``phases_of(whole, axes)``."""
    if not whole.images:
        return
    with Pool(whole.accumulator) as memory:
        for phase in phases_of(whole, axes) if axes else (whole,):
            inner = phase
            if used_parts(phase.axes) is not None:
                inner = phase.without_unused()
                for part in phase.unused() if function == "correlate" else ():
                    part.finish_empty()
                if function == "filter_gradient" and inner.filters.size < phase.filters.size:
                    phase.filters[...] = 0
            if inner.axes[0].outputs:
                getattr(METHODS[method], function)(inner, memory, BLOCK_BYTES)
