"""Fit of the prices in ``cupyconv/kernels/calibration.py`` to measured times, and its errors.

    python -m tests.gpu replay tests/gpu/results

prints how far the estimates of today's cost model are from the times, and how much the planner's
choices lose.  The fit minimises the squares of (estimate / time - 1), with prices that are not
negative.  Few timings determine few prices: the prices of a family are drawn towards those of all
families, and the prices of a pass and class of dtypes towards those of its family.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median, pstdev
from typing import Any, NamedTuple

import numpy as np

from cupyconv.kernels.cost import Demand
from cupyconv.kernels.request import dtype_class
from tests.gpu import contenders

Record = dict[str, Any]

DRAWN = 0.5
"""Weight of the prices towards which a fit is drawn, in timings (hand-set)."""

FAR = 0.25
"""Error of log(estimate / time) from which a timing counts less (hand-set)."""

ROUNDS = 6
"""Fits, each with weights from the errors of the fit before (hand-set)."""

SWEEPS = 300
"""Passes over all prices per fit (hand-set)."""


class Timing(NamedTuple):
    """A timed candidate.

    Attributes:
        key: family, pass and class of dtypes.
        pass_: dtype, precision, memory order, layer and pass.
        demand: demand of the candidate, by today's cost model.
        estimate: time by today's prices, in microseconds.
        time: measured time, in microseconds.
    """

    key: tuple[str, str, str]
    pass_: tuple[str, ...]
    demand: Demand
    estimate: float
    time: float


def timings(records: Iterable[Record], architecture: str) -> list[Timing]:
    """Return the timed candidates among records that today's planner still has."""
    found = []
    for one in records:
        candidate = contenders.candidate_of(one, architecture)
        if candidate is not None and candidate.demand is not None:
            class_ = dtype_class(one["dtype"], one["precision"])
            key = one["implementation"], one["pass"], class_
            names = ("dtype", "precision", "layout", "layer", "pass")
            pass_ = tuple(one[name] for name in names)
            found.append(
                Timing(key, pass_, candidate.demand, candidate.microseconds, one["microseconds"])
            )
    return found


def fit(timed: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return the prices of all families together, of each family, and of each key."""
    groups: dict[tuple[str, str, str], list[Timing]] = defaultdict(list)
    for one in timed:
        for key in (("", "", ""), (one.key[0], "", ""), one.key):
            groups[key].append(one)
    usual = (_relative(timed) ** 2).mean(0)
    prices: dict[tuple[str, str, str], np.ndarray] = {}
    for key in sorted(groups):
        family, pass_, _ = key
        parent = (family, "", "") if pass_ else ("", "", "")
        prices[key] = _fit(groups[key], prices.get(parent) if family else None, usual)
    return [
        {
            "family": key[0],
            "pass": key[1],
            "dtypes": key[2],
            "count": len(groups[key]),
            "prices": dict(zip(Demand._fields, _rounded(found), strict=True)),
        }
        for key, found in prices.items()
    ]


def _rounded(prices: np.ndarray) -> list[float]:
    return [float(f"{price:.3g}") for price in prices]


def _relative(timed: Sequence[Timing]) -> np.ndarray:
    """Return each timing's demand, divided by its time."""
    return np.array([[unit / one.time for unit in one.demand] for one in timed])


def _fit(timed: Sequence[Timing], towards: np.ndarray | None, usual: np.ndarray) -> np.ndarray:
    """Return prices for timings.

    Args:
        timed: the timings.
        towards: prices towards which the fit is drawn; None for a fit of all timings.
        usual: mean square of each unit's share of the time, over all timings.  It is the least
            weight of a price, so that long passes do not determine the price of a launch.
    """
    relative = _relative(timed)
    prices = np.ones(len(usual)) if towards is None else towards
    drawn = DRAWN * np.maximum((relative**2).mean(0), usual) * (towards is not None)
    aim, weights = drawn * prices, np.ones(len(timed))
    for _ in range(ROUNDS):
        weighted = relative * weights[:, None]
        prices = _minimum(weighted.T @ relative + np.diag(drawn), weighted.sum(0) + aim, prices)
        error = np.log(np.maximum(relative @ prices, 0.01))
        weights = 1 / (1 + (error / FAR) ** 2)
    return prices


def _minimum(square: np.ndarray, linear: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimises x @ square @ x / 2 - linear @ x, by coordinate descent."""
    x = start.copy()
    for _ in range(SWEEPS):
        for i, diagonal in enumerate(square.diagonal()):
            if diagonal:
                x[i] = max(x[i] + (linear[i] - square[i] @ x) / diagonal, 0.0)
    return x


def losses(timed: Iterable[Timing]) -> list[float]:
    """Return, for each pass with several timings, the first choice's time over the fastest's."""
    passes: dict[tuple[str, ...], list[Timing]] = defaultdict(list)
    for one in timed:
        passes[one.pass_].append(one)
    several = (found for found in passes.values() if len(found) > 1)
    return [
        min(found, key=lambda one: one.estimate).time / min(one.time for one in found)
        for found in several
    ]


def errors(timed: Iterable[Timing]) -> list[float]:
    """Return log(estimate / time) of each timing."""
    return [float(np.log(one.estimate / one.time)) for one in timed]


def report(timed: Sequence[Timing]) -> list[str]:
    """Return the errors of today's estimates by family, and the loss of the first choices."""
    lines = ["| family | timings | standard deviation | median error |", "|---|---:|---:|---:|"]
    families: dict[str, list[Timing]] = {"all": list(timed)}
    for one in timed:
        families.setdefault(one.key[0], []).append(one)
    for family, found in families.items():
        error = errors(found)
        middle = median(map(abs, error))
        lines.append(f"| {family} | {len(found)} | {pstdev(error):.3f} | {middle:.3f} |")
    lost = losses(timed)
    lines += [
        "",
        f"In {len(lost)} passes with several timings, the first choice takes "
        f"{geometric_mean(lost):.3f} times the time of the fastest, at most {max(lost):.2f}.",
    ]
    return lines
