"""Check results: exactly for integers, within error bounds for all other values.

The error is divided by the sum of the absolute values of a result's terms.  It may be at most twice
the largest error of plain summation in the same precision, in the order of the terms or largest
first.  (Largest first, every addition rounds a value of the sum's size.)  A few results may all be
nearly exact by chance, so plain summation is credited at least ``LEAST_ERROR`` roundings, or
``OF_FEW``.  The result itself is rounded to its dtype once, so it must lie between the rounded
bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.activations import ACTIVATIONS

from .cases import PART, Case, KernelRun
from .oracle import (
    MOST_PADDED,
    MOST_TERMS,
    ComplexOracle,
    Oracle,
    activate,
    rounded,
    term_count,
)

LEAST_ERROR = 1.5
"""Least number of roundings that plain summation is credited."""

FEW, OF_FEW = 64, 1.3
"""FEW: if there are fewer different errors, OF_FEW applies.  OF_FEW: least number of roundings that
plain summation is credited in this case, per square root of the number of terms.

Few errors may all be small by chance.  Roundings of half a unit add up like a random walk, and
twice OF_FEW is more than four of its standard deviations per root of a term."""

ROUNDING = {"float16": 2.0**-24, "bfloat16": 2.0**-24, "float32": 2.0**-24, "float64": 2.0**-53}
"""Relative rounding error of the precision of sums, by dtype."""

TF32_ROUNDING = 2.0**-10
"""Relative rounding error of a TF32 operand, which keeps 10 bits; Hopper truncates."""

PLANES = "cuda-hopper-bf16x6"
"""Family that may return NaN instead of infinity, because the lower planes overflow."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of each element of a result: from ``low`` to ``high``, both included.

    Attributes:
        low, high: the bounds; equal where the result is exact, NaN where it must be NaN.
        may_be_nan: mask of the elements that may also be NaN.
    """

    low: np.ndarray
    high: np.ndarray
    may_be_nan: np.ndarray | bool = False

    def wrong(self, got: np.ndarray) -> np.ndarray:
        """Return a mask of the wrong elements."""
        values = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            right = (values >= self.low) & (values <= self.high)
        right |= np.isnan(values) & (np.isnan(self.low) | self.may_be_nan)
        return ~right


def is_exact(case: Case) -> bool:
    """Return whether every sum of the case is an integer that is exact in its precision."""
    finite = case.poke is None or np.isfinite(case.poke[2])
    return (
        case.values == "integers"
        and finite
        and (case.activation is None or ACTIVATIONS[case.activation].is_exact)
    )


def can_be_judged(case: Case, oracle: Oracle | ComplexOracle) -> bool:
    """Return whether padded x, and the terms if they are needed, are small enough."""
    if oracle.layer.padded_elements > MOST_PADDED:
        return False
    parts = 2 if case.dtype in PART else 1
    return is_exact(case) or parts * term_count(oracle.layer, case.operation) <= MOST_TERMS


def bounds(case: Case, oracle: Oracle | ComplexOracle) -> Bounds:
    """Return the bounds of a case's result; complex results have their parts on the last axis.

    Each part is checked as a real sum of twice as many terms.
    """
    if isinstance(oracle, ComplexOracle):
        run = replace(case.run, precision="ieee") if isinstance(case.run, KernelRun) else case.run
        real = replace(case, dtype=PART[case.dtype], run=run)
        both = [bounds(real, part) for part in oracle.parts(case.operation)]
        maybe = [np.broadcast_to(one.may_be_nan, one.low.shape) for one in both]
        edges = ([one.low for one in both], [one.high for one in both], maybe)
        return Bounds(*(np.stack(edge, -1) for edge in edges))
    if is_exact(case):
        values = rounded(activate(oracle.exact(case.operation), case.activation), case.dtype)
        return Bounds(values, values)
    with np.errstate(all="ignore"):
        return _bounds_of_sums(case, oracle)


def _bounds_of_sums(case: Case, oracle: Oracle) -> Bounds:
    terms, there = oracle.terms(case.operation)
    real = np.where(there, terms, 0)
    roundoff = ROUNDING[case.dtype]
    precision = np.float64 if case.dtype == "float64" else np.float32
    exact = oracle.stored(case.operation, real.sum(-1))
    sizes = oracle.stored(case.operation, np.abs(real).sum(-1)).astype(np.float64)
    if case.poke is None or np.isfinite(case.poke[2]):
        # The oracle computes the result in two ways; if they differ, the oracle is wrong.
        difference = np.abs(oracle.exact(case.operation) - exact)
        assert (difference <= terms.shape[-1] * 2.0**-52 * sizes).all(), case
    largest_first = np.take_along_axis(terms, np.argsort(-np.abs(terms), -1, kind="stable"), -1)
    errors = np.concatenate(
        [
            _errors(oracle.stored(case.operation, one), exact, sizes)
            for one in (_one_by_one(terms, precision), _one_by_one(largest_first, precision))
        ]
    )
    least = LEAST_ERROR
    # Results of the same operands, as in a broadcast array, count once.
    if np.unique(errors).size < FEW:
        least = max(2 * LEAST_ERROR, OF_FEW * terms.shape[-1] ** 0.5)
    relative = 2 * max(float(errors.max(initial=0)), least * roundoff)
    if isinstance(case.run, KernelRun) and case.run.precision == "tf32" and case.dtype == "float32":
        relative += 2.01 * TF32_ROUNDING
    # One smallest subnormal per term: a subnormal product is rounded by up to half of it.
    slack = relative * sizes + terms.shape[-1] * np.finfo(precision).smallest_subnormal
    middle = exact.astype(np.float64)
    if case.activation is not None:
        before, middle = middle, activate(middle, case.activation)
        slack = ACTIVATIONS[case.activation].steepest * slack
        slack += 8 * roundoff * (np.abs(middle) + np.abs(before))
    low, high = (rounded(_shifted(middle, s), case.dtype) for s in (-slack, slack))
    loose = np.isnan(oracle.stored(case.operation, terms.sum(-1)))
    if isinstance(case.run, KernelRun):
        loose = loose | oracle.between(case.operation)
    if isinstance(case.run, KernelRun) and case.run.impl == PLANES:
        loose = loose | np.isinf(middle)
    return Bounds(low, high, loose)


def _one_by_one(terms: np.ndarray, precision: type[np.floating]) -> np.ndarray:
    """Return the sums over the last axis, rounded after each term."""
    first = np.zeros((*terms.shape[:-1], 1))
    return np.cumsum(np.concatenate([first, terms], -1), -1, precision)[..., -1]


def _errors(sums: np.ndarray, exact: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the errors of finite sums, relative to the sum of their terms' absolute values."""
    sums = sums.astype(exact.dtype)
    measured = (sizes > 0) & np.isfinite(exact) & np.isfinite(sums)
    return (np.abs(sums - exact) / sizes)[measured]


def _shifted(middle: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Shift finite values; NaN and infinity are unchanged."""
    return np.where(np.isfinite(middle), middle + by, middle)
