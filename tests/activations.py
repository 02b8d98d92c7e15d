"""The activations, with everything that tests know about them; a new activation is added here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class Activation:
    """An activation and the errors that its implementations may have.

    Attributes:
        exact: formula in double precision, without cancellation.
        plain: literal formula on a float32 array.
        steepest: largest slope, rounded up.
        at_minus_infinity: result of the formula at -infinity.
        bounds: lower ends of ranges of values, each with three error bounds of the kernels in units
            in the last place of the result; empty if results are exact.  The bounds apply if the
            chip's functions round to nearest, and if their errors are one unit and two units, which
            NVIDIA's manuals allow.
        numpy_bound: error bound of the NumPy path, in the same units.
        worst: inputs with the largest errors, found by trying all float32 numbers.
    """

    exact: Callable[[float], float]
    plain: Callable[[np.ndarray], np.ndarray]
    steepest: float
    at_minus_infinity: float = math.nan
    bounds: tuple[tuple[float, float, float, float], ...] = ()
    numpy_bound: float = 0
    worst: tuple[float, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether no result is rounded."""
        return not self.bounds


ACTIVATIONS = {
    "relu": Activation(
        exact=lambda v: max(v, 0.0),
        plain=lambda v: np.maximum(v, 0),
        steepest=1,
        at_minus_infinity=0,
    ),
    "silu": Activation(
        exact=lambda v: 0.0 if v <= -700 else v / (1 + math.exp(-v)),
        plain=lambda v: v / (1 + np.exp(-v.astype(np.float64)).astype(np.float32)),
        steepest=1.1,
        bounds=((0, 1.5, 2.1, 2.7), (-88.72, 2.4, 4.3, 6.3)),
        numpy_bound=3.1,
        worst=(
            *(8.00055599, 0.691680372, 0.691900015, 0.693124354),
            *(-16.6781521, -16.6783352, -16.680687, -16.6811695, -88.72),
        ),
    ),
    "gelu": Activation(
        exact=lambda v: v * math.erfc(-v / math.sqrt(2)) / 2,
        plain=lambda v: v / 2 * (1 + _erf(v * np.float32(math.sqrt(0.5))).astype(np.float32)),
        steepest=1.13,
        bounds=(
            *((0, 1.3, 2.1, 3.5), (-1, 2.3, 3.3, 4.4)),
            *((-3, 21.1, 21.8, 22.6), (-6, 135.1, 136.1, 138.1)),
        ),
        numpy_bound=0.6,
        worst=(
            *(0.211826444, 0.0596616045, 1.12054977e-07, -0.340774596, -0.671019971, -0.968791187),
            *(-0.997223198, -0.998111188),  # the largest error of the literal formula
            *(-2.88841534, -2.90484357, -2.90646267, -5.84796715, -5.99706268),
        ),
    ),
}
"""Every activation, by the name that ``activation`` takes."""


def activated(values: np.ndarray, activation: str | None) -> np.ndarray:
    """Apply an activation in double precision, value by value."""
    wide = values.astype(np.float64)
    if activation is None:
        return wide
    one = ACTIVATIONS[activation]
    with np.errstate(invalid="ignore"):
        exact = np.vectorize(one.exact, otypes=[np.float64])(wide)
    return np.where(np.isneginf(wide), one.at_minus_infinity, exact)
