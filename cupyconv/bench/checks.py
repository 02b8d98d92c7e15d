"""Correctness check of every implementation before it is timed.

The reference is the same pass in float64, computed by PyTorch if it is installed and by NumPy
otherwise.  If computing the whole reference would take too long, only the last images, groups and
channels are compared, since an overflowing index corrupts those first.  The check compares norms,
which need no memory beyond the results; cupyconv/checking.py compares each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from cupyconv.bench.implementations import pass_call
from cupyconv.bench.places import Place
from cupyconv.checking import ROUNDOFF, Operands
from cupyconv.cpu.views import data_view, filter_view
from cupyconv.problem import REAL_PART, ConvProblem

Exact = Callable[[ConvProblem, str, Any, Any, Any], Any]
"""Function of (problem, pass, x, w, dy) that returns the result.

All arrays are channels first, in float64 or complex128.
"""

_TF32_ROUNDOFF = 2.0**-11
_PEAK = 16
"""Allowed ratio of the largest error to the RMS error (chosen; normal errors reach 6)."""


@dataclass(frozen=True)
class Excerpt:
    """Part of a result to compare: slices of the images, the groups, and K and C within a group.

    Attributes:
        share: fraction of the pass's multiply-adds that compute this part; 1 is the whole result.
    """

    images: slice
    groups: slice
    filters: slice
    channels: slice
    share: float


@dataclass(frozen=True)
class Verdict:
    """Error of a result against the reference.

    Attributes:
        error: norm of the difference divided by the norm of the reference.
        largest: largest difference divided by the root mean square of the reference.
        bound: upper limit of ``error``; ``largest`` may be up to _PEAK times as large.
    """

    error: float
    largest: float
    bound: float

    @property
    def good(self) -> bool:
        # Comparisons with NaN are false, so a NaN error is not good.
        return self.error <= self.bound and self.largest <= _PEAK * self.bound


def bound(problem: ConvProblem, pass_: str, precision: str) -> float:
    """Return the largest allowed relative error (norm over norm): twice the expected error.

    The operands are exact, and the result is rounded once.  A sum rounds at every addition, in
    float32 for 16-bit dtypes; on random data this error grows as the square root of the number of
    terms.  Tensor cores truncate every 16 terms instead of rounding; this error grows with the
    number of terms.  This
    error is allowed, up to 1 %, if tensor cores may be used.  The real and the
    imaginary part of a complex sum each have two real products per complex product.
    """
    terms = problem.gemm(pass_).gemm_k * (2 if problem.is_complex else 1)
    dtype = REAL_PART.get(problem.dtype, problem.dtype)
    sum_roundoff = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    expected = ROUNDOFF[dtype] + sum_roundoff * sqrt(terms)
    tf32 = problem.dtype == "float32" and precision == "tf32"
    if tf32:
        expected += sqrt(2) * _TF32_ROUNDOFF
    if tf32 or dtype in ("float16", "bfloat16"):
        expected += min(sum_roundoff * terms / 16, 5e-3)
    return 2 * expected


def excerpt_of(problem: ConvProblem, pass_: str, most_flops: float) -> Excerpt:
    """Return the part of a pass's result that takes about ``most_flops`` to compute."""
    extents = {
        "images": max(problem.N, 1),
        "groups": problem.groups,
        "filters": problem.K // problem.groups,
        "channels": problem.C // problem.groups,
    }
    shrinkable = {  # all axes except the summed axes
        "forward": ("images", "groups", "filters"),
        "backprop_input": ("images", "groups", "channels"),
        "backprop_filter": ("groups", "filters", "channels"),
    }[pass_]
    sizes = dict(extents)
    for axis in shrinkable:
        share = most_flops / max(problem.flops, 1) * prod(extents.values()) / prod(sizes.values())
        if share >= 1:
            break
        sizes[axis] = max(int(extents[axis] * share), 1)
    slices = {axis: slice(extents[axis] - size, extents[axis]) for axis, size in sizes.items()}
    return Excerpt(**slices, share=prod(sizes.values()) / prod(extents.values()))


def reference(
    problem: ConvProblem, pass_: str, tensors: Operands, part: Excerpt, exact: Exact
) -> Any:
    """Compute an excerpt of the result in float64, with the axes of ``result_part``."""
    x = data_view(problem, tensors.x)[part.images, part.groups, part.channels]
    w = filter_view(problem, tensors.w)[part.groups, part.filters, part.channels]
    dy = data_view(problem, tensors.dy)[part.images, part.groups, part.filters]
    groups = w.shape[0]
    # Copy to row-major arrays, since PyTorch 2.13's grouped float64 filter gradient is wrong on the
    # CPU if all operands are channels last.
    x, dy = (_wide(_merged(array, 1)) for array in (x, dy))
    w = _wide(_merged(w, 0))
    part_problem = ConvProblem(
        x.shape,
        w.shape,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=groups,
        dtype=x.dtype.name,
    )
    return _grouped(part_problem, pass_, exact(part_problem, pass_, x, w, dy))


def result_part(problem: ConvProblem, pass_: str, result: Any, part: Excerpt) -> Any:
    """Return an excerpt of a result, with its channels split into groups."""
    whole = _grouped(problem, pass_, result)
    if pass_ == "backprop_filter":
        return whole[part.groups, part.filters, part.channels]
    return whole[part.images, part.groups, part.filters if pass_ == "forward" else part.channels]


def judge(result: Any, expected: Any, limit: float) -> Verdict:
    """Compare an excerpt of a result with its reference."""
    if expected.size == 0:
        return Verdict(0.0, 0.0, limit)
    difference = abs(_wide(result) - expected)
    norm = sqrt(float((abs(expected) ** 2).sum()))
    difference_norm = sqrt(float((difference * difference).sum()))
    scale = norm / sqrt(expected.size)
    if norm == 0:
        return Verdict(difference_norm, difference_norm, limit)
    return Verdict(difference_norm / norm, float(difference.max()) / scale, limit)


def numpy_exact(place: Place, impl: str) -> Exact:
    """Return a reference function that runs one of cupyconv's CPU implementations."""

    def exact(problem: ConvProblem, pass_: str, x: Any, w: Any, dy: Any) -> Any:
        x, w, dy = (place.to_host(array) for array in (x, w, dy))
        call = pass_call(problem, pass_, [Operands(x, w, dy)], impl, "ieee")
        return place.xp.asarray(call(0))

    return exact


def _grouped(problem: ConvProblem, pass_: str, result: Any) -> Any:
    view = filter_view if pass_ == "backprop_filter" else data_view
    return view(problem, result)


def _merged(array: Any, axis: int) -> Any:
    """Return the array with ``axis`` and the next axis (groups and channels) merged."""
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def _wide(array: Any) -> Any:
    """Return a row-major copy in float64 or complex128."""
    if array.dtype.name == "bfloat16":  # convert the bits, as casts may be unsupported
        bits = array.view("uint16").astype("uint32") << 16
        array = bits.view("float32")
    return array.astype("complex128" if array.dtype.kind == "c" else "float64", order="C")
