"""Input gradients of layers with strides, such as patch embeddings.

If windows do not overlap, one matrix product multiplies every pixel of dy with all taps.  Each
element of the product is the gradient of one input, so the elements are copied to dx, and nothing
is added up.  Other filters are divided into slices of taps within which windows do not overlap, and
the gradients of the slices are added up in dx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.activations import activate
from cupyconv.cpu.axis import boxes, clamp, inner_windows, separate_taps, split_evenly
from cupyconv.cpu.correlation import ALL, Correlation
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy, matmul
from cupyconv.problem import ConvAxis


def backprop_input(
    axes: Sequence[ConvAxis], whole: Correlation, pool: Pool, block_bytes: int
) -> None:
    """Compute dx; if windows do not overlap, only for the input pixels that are in a window.

    Args:
        axes: spatial axes of the layer.
        whole: all of dy, w and dx.
        block_bytes: bytes of a thread's buffer, from which the size of blocks follows.
    """
    terms = list(product(*(split_evenly(axis.filter, separate_taps(axis)) for axis in axes)))
    if len(terms) == 1:
        _backprop_input(whole, axes, pool, block_bytes, adds=False)
        return
    if not whole.images:
        return
    most = whole.images
    if whole.result.dtype != whole.accumulator:  # sums of some images
        image = whole.result.size // whole.images * whole.accumulator.itemsize
        most = clamp(4 * block_bytes // max(image, 1), most)
    for images in split_evenly(whole.images, most):
        block = whole.narrow(images=images)
        sums = block.result
        if sums.dtype != block.accumulator:
            sums = np.empty_like(sums, block.accumulator)
        sums[...] = 0
        added = block._replace(result=sums, addend=None, bias=None, activation=None)
        for taps in terms:
            term = added._replace(filters=added.filters[(ALL, ALL, ALL, *taps)])
            _backprop_input(term, list(map(_with_taps, axes, taps)), pool, block_bytes, adds=True)
        block.finish(sums)


def _with_taps(axis: ConvAxis, taps: slice) -> ConvAxis:
    """Return the axis of a filter with a slice of the taps; both paddings may be negative."""
    return replace(
        axis,
        filter=taps.stop - taps.start,
        pad_before=axis.pad_before - taps.start * axis.dilation,
        pad_after=axis.pad_after - (axis.filter - taps.stop) * axis.dilation,
        padding_mode="explicit",
    )


def _backprop_input(
    whole: Correlation, axes: Sequence[ConvAxis], pool: Pool, block_bytes: int, adds: bool
) -> None:
    """Write dx for all input pixels that are in a window, or add to dx; windows do not overlap."""
    count, *taps = whole.filters.shape[2:]
    outputs = whole.source.shape[3:]
    is_last = channels_are_last(whole.result)
    itemsize = pool.dtype.itemsize
    most_channels = clamp(8 * block_bytes // (count * prod(taps) * itemsize), whole.filter_count)
    for group, part in product(
        split_evenly(whole.groups, 1), split_evenly(whole.filter_count, most_channels)
    ):
        chunk = whole.narrow(groups=group, filters=part)
        weights = np.moveaxis(chunk.filters[0], 0, -1 if is_last else 1)
        matrix = pool.array("shared", weights.shape)
        copy(matrix, weights, whole.conjugate)
        columns = matrix[0].size
        line = prod(outputs[1:]) * max(columns, count) * itemsize
        rows = clamp(block_bytes // 4 // line, outputs[0])
        most = (clamp(block_bytes // 4 // (line * rows), whole.images), rows)
        size = prod(most) * prod(outputs[1:]) * (2 * columns + count)
        work = partial(_compute, chunk, axes, matrix, is_last, adds)
        blocks = boxes((whole.images, outputs[0]), most)
        if adds:
            # A forked child recomputes what its parent's helpers had begun, but must not add twice.
            each(partial(_in_turn, work), [blocks], pool, size)
        else:
            each(work, blocks, pool, size)


def _in_turn(
    work: Callable[[tuple[slice, ...], Scratch], None],
    blocks: Iterator[tuple[slice, ...]],
    scratch: Scratch,
) -> None:
    """Compute blocks one after another, in one thread."""
    for block in blocks:
        work(block, scratch.rest())


def _compute(
    chunk: Correlation,
    axes: Sequence[ConvAxis],
    matrix: np.ndarray,
    is_last: bool,
    adds: bool,
    block: tuple[slice, ...],
    scratch: Scratch,
) -> None:
    """Compute dx for the input pixels under the windows of a block.

    Args:
        chunk: correlation of one group.
        matrix: array (K, C, *taps), or (K, *taps, C) if ``is_last`` holds.
        adds: whether to add to dx.
        block: slices of the images, and of the outputs along the first axis.
    """
    images, rows = block
    pixels = np.moveaxis(chunk.source[0, :, images, rows], 0, -1)  # (N, *outputs, K)
    packed = scratch.array("pixels", pixels.shape)
    copy(packed, pixels)
    flat = packed.reshape(-1, len(matrix))
    products = scratch.array("products", (len(flat), matrix[0].size))
    matmul(flat, matrix.reshape(len(matrix), -1), products, scratch.sums)
    values = products.reshape(*pixels.shape[:-1], *matrix.shape[1:])
    rank = len(axes)
    if is_last:
        values = np.moveaxis(values, -1, 1 + rank)  # (N, *outputs, C, *taps)
    if chunk.bias is not None:
        values += chunk.bias.reshape(-1, *[1] * rank)
    for piece in product(*(_pieces(axis) for axis in axes)):
        outputs, reached, firsts = zip(*piece, strict=True)
        first, *others = outputs
        shared = slice(max(first.start, rows.start), min(first.stop, rows.stop))
        if shared.start >= shared.stop:
            continue
        skipped = (shared.start - first.start) * axes[0].stride
        firsts = (firsts[0] + skipped, *firsts[1:])
        corner = (ALL, ALL, *(slice(first, None) for first in firsts))
        inside = slice(shared.start - rows.start, shared.stop - rows.start)
        of_piece = values[(ALL, inside, *others, ALL, *reached)]
        if chunk.addend is not None:
            of_piece += _windows(chunk.addend[0, :, images][corner], axes, of_piece.shape)
        target = _windows(chunk.result[0, :, images][corner], axes, of_piece.shape)
        if adds:
            target += of_piece
        else:
            target[...] = activate(of_piece, chunk.activation)


def _pieces(axis: ConvAxis) -> Iterator[tuple[slice, slice, int]]:
    """Yield slices of outputs and taps, and the input under the first tap of the first output.

    The windows without padding are yielded together.  Every window with padding is yielded
    separately, with the taps that are inside the input.
    """
    stride, pad = axis.stride, axis.pad_before
    inner = inner_windows(axis)
    if inner.start < inner.stop:
        yield inner, ALL, inner.start * stride - pad
    for output in (*range(inner.start), *range(inner.stop, axis.output)):
        start = output * stride - pad
        low = max(-(start // axis.dilation), 0)
        high = min((axis.input - 1 - start) // axis.dilation + 1, axis.filter)
        if low < high:
            at = start + low * axis.dilation
            yield slice(output, output + 1), slice(low, high), at


def _windows(corner: np.ndarray, axes: Sequence[ConvAxis], shape: Sequence[int]) -> np.ndarray:
    """Return a view (N, *outputs, C, *taps) of inputs (C, N, *inputs).

    Args:
        corner: the inputs; their first spatial element is under the first tap of the first window.
        shape: shape of the view.
    """
    channel, image, *steps = corner.strides
    outputs, taps = shape[1 : 1 + len(axes)], shape[2 + len(axes) :]
    # The stride of a single window and the dilation of a single tap have no effect.  Zero replaces
    # them, since a huge value would overflow.
    both = list(zip(axes, steps, outputs, taps, strict=True))
    by_output = (axis.stride * step if count > 1 else 0 for axis, step, count, _ in both)
    by_tap = (axis.dilation * step if count > 1 else 0 for axis, step, _, count in both)
    return as_strided(corner, shape, (image, *by_output, channel, *by_tap))
