"""Passes with NumPy, computed block by block with a method chosen by the planner.

cupyconv/cpu/choice.py chooses the method.  A pass needs at most 64 MB besides its operands and its
result, if each result sums at most a million products.  Arithmetic is in the arrays' dtype,
including complex dtypes; 16-bit dtypes are converted to float32 block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from cupyconv.cpu.axis import used_slices
from cupyconv.cpu.choice import BLOCK_BYTES
from cupyconv.cpu.correlation import WHOLE, Selection, correlation, selections
from cupyconv.cpu.scratch import Pool
from cupyconv.cpu.views import accumulator_of
from cupyconv.problem import ConvProblem


def prepare(
    problem: ConvProblem,
    pass_: str,
    method: str,
    activation: str | None = None,
    conjugates: bool = True,
) -> Callable[..., None]:
    """Return the function that computes a pass of x, w, y (or their gradients), bias and addend.

    forward computes y[n, k, p] = act(sum over c, r of x[n, c, h] w[k, c, r] + bias[k] +
    add[n, k, p]).  Here h = p * stride - pad + r * dilation is the input pixel that tap r reads for
    output pixel p of image n; k is a filter and c a channel of its group.  backprop_input computes
    dx[n, c, h] = act(sum of dy[n, k, p] w[k, c, r] + bias[c] + add[n, c, h]) over all k, p and r
    that read h; all h with the same remainder modulo the stride are computed together.
    backprop_filter computes dw[k, c, r] = sum over n, p of dy[n, k, p] conj(x[n, c, h]).

    Args:
        activation: activation of the results; None for no activation.
        conjugates: whether backprop_input conjugates a complex w.
    """
    is_gradient, is_input = pass_ == "backprop_filter", pass_ == "backprop_input"
    if not problem.N:
        return _write_zeros if is_gradient else _write_nothing
    module = import_module(f"cupyconv.cpu.{method}")
    if method == "tiles":
        compute_tiles = module.prepare(problem, pass_, activation)
        return lambda *arrays: compute_tiles(*arrays, BLOCK_BYTES)
    # dw = conj(sum of conj(dy) x), because conjugating dw is cheaper than conjugating x.
    conjugate = problem.is_complex and (is_gradient or (is_input and conjugates))
    of = correlation(problem, pass_, activation, conjugate)
    few: Iterable[Selection]
    if method == "patches":
        run, few = partial(module.backprop_input, problem.axes), (WHOLE,)
    else:
        run = getattr(module, "filter_gradient" if is_gradient else "correlate")
        few = selections(problem, pass_)
    is_few = isinstance(few, tuple)
    # The methods may skip unread inputs.
    has_unread = is_input and any(axis.unread_inputs for axis in problem.axes)

    def compute(*arrays: Any, pool: Any = None) -> None:
        if has_unread:
            of(*arrays).finish_empty()
        for selection in few if is_few else selections(problem, pass_):
            phase = inner = of(*arrays, selection)
            if used_slices(selection.axes) is not None:
                inner = phase.without_unused()
                for part in () if is_gradient else phase.unused():
                    part.finish_empty()
                if is_gradient and inner.filters.size < phase.filters.size:
                    phase.filters[...] = 0
            if inner.result.size:
                run(inner, pool, BLOCK_BYTES)
        if is_gradient and conjugate:
            np.conjugate(arrays[1], out=arrays[1])

    def compute_in_pool(*arrays: Any) -> None:
        with Pool(accumulator_of(problem.dtype)) as pool:
            compute(*arrays, pool=pool)

    return compute if method == "windows" else compute_in_pool


def _write_nothing(*arrays: np.ndarray) -> None:
    """Compute a pass of an empty batch, whose result is empty."""


def _write_zeros(x: np.ndarray, dw: np.ndarray, dy: np.ndarray, *_: None) -> None:
    """Compute the filter gradient of an empty batch."""
    dw[...] = 0
