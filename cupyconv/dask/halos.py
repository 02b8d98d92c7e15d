"""Dependencies between parts of tensors: pixels in windows, and channels of groups."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cupyconv.dask.ranges import Range
from cupyconv.problem import ConvAxis, ConvProblem, count_pairs


def output_bounds(axis: ConvAxis, inputs: Sequence[int]) -> list[int]:
    """Return the bounds of output chunks; a chunk's windows are centred in one input chunk.

    Args:
        inputs: bounds of the input chunks.
    """
    centre = axis.effective_filter // 2 - axis.pad_before
    return _within(axis.output, (-(-(bound - centre) // axis.stride) for bound in inputs))


def input_bounds(axis: ConvAxis, outputs: Sequence[int]) -> list[int]:
    """Return the bounds of input chunks; a chunk has the window centres of one output chunk.

    Args:
        outputs: bounds of the output chunks.
    """
    centre = axis.effective_filter // 2 - axis.pad_before
    return _within(axis.input, (bound * axis.stride + centre for bound in outputs))


def _within(size: int, cuts: Iterable[int]) -> list[int]:
    return sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})


def window_of(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range]:
    """Return the inputs that a range of outputs reads, and the padding before and after them."""
    first = start * axis.stride - axis.pad_before
    last = (stop - 1) * axis.stride - axis.pad_before + axis.effective_filter
    begin, end = max(first, 0), min(last, axis.input)
    if begin >= end:  # padding only
        return (0, 0), (0, 0)
    return (begin, end), (begin - first, last - end)


def receptive_field(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range, Range]:
    """Return the outputs that read a range of inputs, the inputs that they read, and padding.

    Returns:
        The range of outputs; the range of inputs, without inputs before the first window and after
        the last window; and the padding.  The padding is how far the first window begins before
        these inputs, and how far the last window ends after them.
    """
    stride, dilation, before = axis.stride, axis.dilation, axis.pad_before

    def reads(outputs: int) -> int:
        """Return how often the outputs below ``outputs`` read inputs of the range."""
        return count_pairs(outputs, axis.filter, stride, dilation, start + before, stop + before)

    low = max(-(-(start + before - axis.effective_filter + 1) // stride), 0)
    high = min((stop - 1 + before) // stride + 1, axis.output)
    if low >= high or not reads(high):
        return (0, 0), (start, start), (0, 0)
    # Windows with dilation may skip the range: find the first and the last output that read it.
    low = bisect_right(range(high), 0, lo=low, key=lambda output: reads(output + 1))
    high = bisect_left(range(high + 1), reads(high), lo=low, key=reads)
    first = low * stride - before
    last = (high - 1) * stride - before + axis.effective_filter
    begin, end = max(start, first), min(stop, last)
    return (low, high), (begin, end), (begin - first, last - end)


def channel_blocks(
    problem: ConvProblem, inputs: Sequence[int], outputs: Sequence[int], *, of_input: bool = False
) -> list[tuple[Range, list[tuple[Range, Range, int]]]]:
    """Divide the result's channels into blocks, and the channels that a block sums into pieces.

    A block is part of one group or consists of whole groups, so that it is a convolution itself.

    Args:
        inputs, outputs: bounds of the chunks of C and of K.
        of_input: whether the result has input channels and sums over output channels.

    Returns:
        For each block, its range of channels and its pieces.  A piece is a tuple of the range of
        channels that it sums over, its range on the filter's I axis, and its number of groups.
    """
    own, other = problem.K // problem.groups, problem.C // problem.groups
    divided, summed = outputs, inputs
    if of_input:
        own, other, divided, summed = other, own, inputs, outputs
    cuts = set(divided)
    for bound in divided:
        group, remainder = divmod(bound, own)
        cuts |= {group * own, (group + 1) * own} if remainder else set()
    for bound in summed:
        group, remainder = divmod(bound, other)
        cuts |= {group * own, (group + 1) * own} if remainder else {group * own}
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
