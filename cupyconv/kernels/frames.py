"""Frames of a 3-D layer, divided into runs that the same taps read.

A run of frames is a dense product with only the taps that read frames, not padding.  In a chunk of
few frames, most products with padding are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

from cupyconv.problem import ConvAxis, ConvProblem

_MOST_PADDED = 1.1
"""Smallest ratio of all products of frames and taps to the products without padding, at which
frames are divided (hand-set)."""

Part = tuple[range, range]
"""Positions along an axis, and the taps that contribute to them."""


@lru_cache(maxsize=1024)
def parts(problem: ConvProblem, pass_: str, divided: bool = False) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each spatial axis: of the outputs in forward, else of the inputs.

    Args:
        problem: the problem.
        pass_: "forward", in which an axis is one part, or "backprop_input", in which the parts are
            the stride phases.
        divided: whether the first axis has a part for each run of frames that the same taps read.
    """
    whole = tuple(_whole(axis, pass_) for axis in problem.axes)
    if not divided:
        return whole
    axis = problem.axes[0]
    read = axis.outputs_of_tap if pass_ == "forward" else axis.inputs_of_tap
    return (tuple(run for part in whole[0] for run in _runs(*part, read)), *whole[1:])


@lru_cache(maxsize=1024)
def is_worthwhile(problem: ConvProblem, pass_: str) -> bool:
    """Return whether many products of the frames of a 3-D layer are products with padding."""
    if problem.spatial_rank < 3 or pass_ == "backprop_filter":
        return False
    axis = problem.axes[0]
    products = sum(len(places) * len(taps) for places, taps in _whole(axis, pass_))
    return products > _MOST_PADDED * axis.pairs > 0


def _whole(axis: ConvAxis, pass_: str) -> tuple[Part, ...]:
    if pass_ == "backprop_input":
        return axis.stride_phases
    return ((range(axis.output), range(axis.filter)),)


def _runs(places: range, taps: range, read: Callable[[int], range]) -> Iterator[Part]:
    """Yield the runs of a part's positions, each with the taps that read inside the tensor.

    Args:
        places, taps: positions of the part, and its taps.
        read: function that returns the positions for which a tap reads inside the tensor.
    """
    spans = [read(tap) for tap in taps]
    ends = (end for span in spans if span for end in (span.start, span.stop))
    cuts = {0, len(places), *(-((places.start - end) // places.step) for end in ends)}
    for first, last in pairwise(sorted(cuts)):
        inside = [number for number, span in enumerate(spans) if places[first] in span]
        yield places[first:last], taps[inside[0] : inside[-1] + 1] if inside else taps[:0]
