"""What a part of one tensor reads of another: pixels under windows, and channels by groups."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from cupyconv.dask.ranges import Range
from cupyconv.problem import ConvAxis, ConvProblem, count_pairs


def output_bounds(axis: ConvAxis, inputs: Sequence[int]) -> list[int]:
    """Where to cut the outputs so that each window is centred in the chunk of its own number."""
    centre = axis.effective_filter // 2 - axis.pad_before
    cuts = {-(-(bound - centre) // axis.stride) for bound in inputs}
    return sorted({0, axis.output, *(cut for cut in cuts if 0 < cut < axis.output)})


def input_bounds(axis: ConvAxis, outputs: Sequence[int]) -> list[int]:
    """Where to cut the inputs so that each is in the chunk of the windows centred on it."""
    centre = axis.effective_filter // 2 - axis.pad_before
    cuts = {bound * axis.stride + centre for bound in outputs}
    return sorted({0, axis.input, *(cut for cut in cuts if 0 < cut < axis.input)})


def window_of(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range]:
    """The inputs under a range of outputs, and the padding that is left of and right of them."""
    first = start * axis.stride - axis.pad_before
    last = (stop - 1) * axis.stride - axis.pad_before + axis.effective_filter
    begin, end = max(first, 0), min(last, axis.input)
    if begin >= end:  # all of it is padding
        return (0, 0), (0, 0)
    return (begin, end), (begin - first, last - end)


def reach_of(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range, Range]:
    """The outputs that read a range of inputs, those inputs that they read, and their padding.

    Inputs of the range before the first and after the last window are read by none.
    """
    stride, dilation, before = axis.stride, axis.dilation, axis.pad_before

    def reads(outputs: int) -> int:
        """How often the first outputs read the range."""
        return count_pairs(outputs, axis.filter, stride, dilation, start + before, stop + before)

    low = max(-(-(start + before - axis.effective_filter + 1) // stride), 0)
    high = min((stop - 1 + before) // stride + 1, axis.output)
    if low >= high or not reads(high):
        return (0, 0), (start, start), (0, 0)
    # Windows step over the range with their taps, or with their strides.
    low = bisect_right(range(high), 0, lo=low, key=lambda output: reads(output + 1))
    high = bisect_left(range(high + 1), reads(high), lo=low, key=reads)
    first = low * stride - before
    last = (high - 1) * stride - before + axis.effective_filter
    begin, end = max(start, first), min(stop, last)
    return (low, high), (begin, end), (begin - first, last - end)


def channel_blocks(
    problem: ConvProblem,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    of_input: bool = False,
) -> list[tuple[Range, list[tuple[Range, Range, int]]]]:
    """How the channels of the result are cut, and the pieces that each cut is a sum over.

    A cut is inside one group or made of whole groups, so that it is a convolution itself.

    Args:
        inputs, outputs: where C and K are to be cut.
        of_input: the result has the input's channels and sums over the output's.

    Returns:
        For every cut its channels, and for each piece its channels on the other side, its range on
        the filter's I axis, and its number of groups.
    """
    own, other = problem.K // problem.groups, problem.C // problem.groups
    wanted, summed = outputs, inputs
    if of_input:
        own, other, wanted, summed = other, own, inputs, outputs
    cuts = set(wanted)
    for bound in wanted:
        group, rest = divmod(bound, own)
        cuts |= {group * own, (group + 1) * own} if rest else set()
    for bound in summed:
        group, rest = divmod(bound, other)
        cuts |= {group * own, (group + 1) * own} if rest else {group * own}
    blocks = []
    for start, stop in pairwise(sorted(cuts)):
        first, last = start // own, -(-stop // own)
        taps_of = (0, problem.C // problem.groups)
        pieces = []
        inner = [b for b in summed if first * other < b < last * other]
        for low, high in pairwise([first * other, *inner, last * other]):
            if last - first == 1:
                low_i, high_i = (start, stop) if of_input else (low, high)
                shift = first * (own if of_input else other)
                taps_of = (low_i - shift, high_i - shift)
            pieces.append(((low, high), taps_of, last - first))
        blocks.append(((start, stop), pieces))
    return blocks
