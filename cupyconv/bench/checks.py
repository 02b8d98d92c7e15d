"""Is a result right?  Nothing is timed before it is.

Results are compared with the same pass in float64, computed by PyTorch where it is installed and
by NumPy where it is not.  Where that would take too long, a part of the result is compared: its
last images, groups and channels, the ones an overflowing index spoils first.  They are judged by
norms, which takes no more than the results themselves; cupyconv/checking.py judges each number.
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
"""(problem, pass, x, w, dy) to the result, all in float64, or its complex dtype, and channels
first."""

_TF32_ROUNDOFF = 2.0**-11
_PEAK = 16  # largest error over the root mean square of errors: 6 for normal ones, and room


@dataclass(frozen=True)
class Excerpt:
    """What of a result is compared: slices of images, groups, and K and C within a group.

    Attributes:
        share: of all multiply-adds of the pass, how many this takes; 1 is everything.
    """

    images: slice
    groups: slice
    filters: slice
    channels: slice
    share: float


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the reference.

    Attributes:
        error: norm of the difference over the norm of the reference.
        largest: largest difference over the root mean square of the reference.
        bound: what ``error`` has to be within; ``largest`` has _PEAK times as much room.
    """

    error: float
    largest: float
    bound: float

    @property
    def good(self) -> bool:
        # NaN is not good either.
        return self.error <= self.bound and self.largest <= _PEAK * self.bound


def bound(problem: ConvProblem, pass_: str, precision: str) -> float:
    """The largest relative error (norm over norm) of a sound implementation: twice the expected.

    Operands are taken as they are.  The result is rounded once; each sum rounds at every addition,
    in float32 for the 16-bit types, and rounding errors of random data grow as the square root of
    the number of terms.  Tensor cores cut off instead of rounding, 16 terms at a time, and that
    error grows with their number: it is allowed where they may be used, up to 1 %.  Each part of a
    complex sum has two real products for each of its own.
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
    """The part of a pass's result that about ``most_flops`` are enough for."""
    extents = {
        "images": max(problem.N, 1),
        "groups": problem.groups,
        "filters": problem.K // problem.groups,
        "channels": problem.C // problem.groups,
    }
    cut = {  # an axis that is summed over stays whole
        "forward": ("images", "groups", "filters"),
        "backprop_input": ("images", "groups", "channels"),
        "backprop_filter": ("groups", "filters", "channels"),
    }[pass_]
    left = dict(extents)
    for axis in cut:
        share = most_flops / max(problem.flops, 1) * prod(extents.values()) / prod(left.values())
        if share >= 1:
            break
        left[axis] = max(int(extents[axis] * share), 1)
    slices = {axis: slice(extents[axis] - size, extents[axis]) for axis, size in left.items()}
    return Excerpt(**slices, share=prod(left.values()) / prod(extents.values()))


def reference(
    problem: ConvProblem, pass_: str, tensors: Operands, part: Excerpt, exact: Exact
) -> Any:
    """That part of the result in float64, as ``result_part`` gives it."""
    x = data_view(problem, tensors.x)[part.images, part.groups, part.channels]
    w = filter_view(problem, tensors.w)[part.groups, part.filters, part.channels]
    dy = data_view(problem, tensors.dy)[part.images, part.groups, part.filters]
    groups = w.shape[0]
    # Copied to plain row-major arrays, the road that every implementation has best tested:
    # PyTorch 2.13's grouped float64 filter gradient is wrong on the CPU if all are channels last.
    x, dy = (_wide(_merged(array, 1)) for array in (x, dy))
    w = _wide(_merged(w, 0))
    small = ConvProblem(
        x.shape,
        w.shape,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=groups,
        dtype=x.dtype.name,
    )
    return _grouped(small, pass_, exact(small, pass_, x, w, dy))


def result_part(problem: ConvProblem, pass_: str, result: Any, part: Excerpt) -> Any:
    """The part of a result, its channels split into groups."""
    whole = _grouped(problem, pass_, result)
    if pass_ == "backprop_filter":
        return whole[part.groups, part.filters, part.channels]
    return whole[part.images, part.groups, part.filters if pass_ == "forward" else part.channels]


def judge(result: Any, expected: Any, limit: float) -> Verdict:
    """Compare a part of a result with the reference for it."""
    if expected.size == 0:
        return Verdict(0.0, 0.0, limit)
    difference = abs(_wide(result) - expected)
    norm = sqrt(float((abs(expected) ** 2).sum()))
    off = sqrt(float((difference * difference).sum()))
    scale = norm / sqrt(expected.size)
    if norm == 0:
        return Verdict(off, off, limit)
    return Verdict(off / norm, float(difference.max()) / scale, limit)


def numpy_exact(place: Place, impl: str) -> Exact:
    """Float64 passes by one of our own CPU implementations."""

    def exact(problem: ConvProblem, pass_: str, x: Any, w: Any, dy: Any) -> Any:
        x, w, dy = (place.to_host(array) for array in (x, w, dy))
        call = pass_call(problem, pass_, [Operands(x, w, dy)], impl, "ieee")
        return place.xp.asarray(call(0))

    return exact


def _grouped(problem: ConvProblem, pass_: str, result: Any) -> Any:
    view = filter_view if pass_ == "backprop_filter" else data_view
    return view(problem, result)


def _merged(array: Any, axis: int) -> Any:
    """Two neighbouring axes, groups and channels, as one."""
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def _wide(array: Any) -> Any:
    """The same numbers in float64, or its complex dtype, in row-major order."""
    if array.dtype.name == "bfloat16":  # by its bits, which need nothing of NumPy or CuPy
        bits = array.view("uint16").astype("uint32") << 16
        array = bits.view("float32")
    return array.astype("complex128" if array.dtype.kind == "c" else "float64", order="C")
