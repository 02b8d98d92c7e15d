"""Input gradients of layers whose windows do not overlap, such as patch embeddings.

One matrix product multiplies every pixel of dy with all taps.  Each element of the result is the
gradient of one input, so the elements are copied to dx, and nothing is added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.activations import activate
from cupyconv.cpu.axis import boxes, clamp, parts
from cupyconv.cpu.correlation import ALL
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import channels_are_last, copy
from cupyconv.problem import ConvAxis


def backprop_input(
    axes: Sequence[ConvAxis],
    source: np.ndarray,
    filters: np.ndarray,
    result: np.ndarray,
    bias: np.ndarray | None,
    addend: np.ndarray | None,
    activation: str | None,
    conjugate: bool,
    pool: Pool,
    block_bytes: int,
) -> None:
    """Compute dx for all input pixels that are in a window.

    Args:
        axes: spatial axes, for which ``choice.are_separate`` holds.
        source: dy as an array (G, K, N, *outputs).
        filters: w as an array (G, K, C, *taps).
        result: dx as an array (G, C, N, *inputs).
        bias: array (G, C) added to the result; None for no bias.
        addend: array like the result, added to it; None for no addend.
        activation: activation applied after bias and addend; None for no activation.
        conjugate: whether to conjugate the filters.
        pool: memory of the pass.
        block_bytes: bytes of a thread's buffer, from which the size of blocks follows.
    """
    groups, count, channels, *taps = filters.shape
    images, outputs = source.shape[2], source.shape[3:]
    is_last = channels_are_last(result)
    itemsize = pool.dtype.itemsize
    of_channel = prod(taps)
    most_channels = clamp(8 * block_bytes // (count * of_channel * itemsize), channels)
    for group, part in product(range(groups), parts(channels, most_channels)):
        weights = filters[group, :, part]
        if is_last:
            weights = np.moveaxis(weights, 1, -1)
        matrix = pool.array("shared", weights.shape)
        copy(matrix, weights, conjugate)
        columns = matrix[0].size
        line = prod(outputs[1:]) * max(columns, count) * itemsize
        rows = clamp(block_bytes // 4 // line, outputs[0])
        most = (clamp(block_bytes // 4 // (line * rows), images), rows)
        size = prod(most) * prod(outputs[1:]) * (columns + count)
        work = partial(
            _compute,
            axes,
            source[group],
            matrix.reshape(count, columns),
            result[group, part],
            None if bias is None else bias[group, part],
            None if addend is None else addend[group, part],
            activation,
            is_last,
        )
        each(work, boxes((images, outputs[0]), most), pool, size)


def _compute(
    axes: Sequence[ConvAxis],
    source: np.ndarray,
    matrix: np.ndarray,
    result: np.ndarray,
    bias: np.ndarray | None,
    addend: np.ndarray | None,
    activation: str | None,
    is_last: bool,
    block: tuple[slice, slice],
    scratch: Scratch,
) -> None:
    """Compute dx for the input pixels under the windows of a block.

    Args:
        block: slices of the images, and of the outputs along the first axis.
    """
    images, rows = block
    pixels = np.moveaxis(source[:, images, rows], 0, -1)  # (N, *outputs, K)
    packed = scratch.array("pixels", pixels.shape)
    copy(packed, pixels)
    products = scratch.array("products", (prod(pixels.shape[:-1]), matrix.shape[1]))
    np.matmul(packed.reshape(-1, matrix.shape[0]), matrix, out=products)
    channels, taps = len(result), [axis.filter for axis in axes]
    order = (*taps, channels) if is_last else (channels, *taps)
    values = products.reshape(*pixels.shape[:-1], *order)
    rank = len(axes)
    if is_last:
        values = np.moveaxis(values, -1, 1 + rank)  # (N, *outputs, C, *taps)
    if bias is not None:
        values += bias.reshape(-1, *[1] * rank)
    result = result[:, images]
    for piece in product(*(_pieces(axis) for axis in axes)):
        outputs, reached, firsts = zip(*piece, strict=True)
        first, *others = outputs
        shared = slice(max(first.start, rows.start), min(first.stop, rows.stop))
        if shared.start >= shared.stop:
            continue
        skipped = (shared.start - first.start) * axes[0].stride
        corner = (ALL, ALL, *_from((firsts[0] + skipped, *firsts[1:])))
        inside = slice(shared.start - rows.start, shared.stop - rows.start)
        of_piece = values[(ALL, inside, *others, ALL, *reached)]
        if addend is not None:
            of_piece += _windows(addend[:, images][corner], axes, of_piece.shape)
        target = _windows(result[corner], axes, of_piece.shape)
        target[...] = activate(of_piece, activation)


def _pieces(axis: ConvAxis) -> Iterator[tuple[slice, slice, int]]:
    """Yield slices of outputs and taps, and the input under the first tap of the first output.

    The windows without padding are yielded together.  Every window with padding is yielded
    separately, with the taps that are inside the input.
    """
    stride, pad = axis.stride, axis.pad_before
    first = min(-(-pad // stride), axis.output)
    stop = (axis.input + pad - axis.effective_filter) // stride + 1
    stop = min(max(stop, first), axis.output)
    if first < stop:
        yield slice(first, stop), ALL, first * stride - pad
    for output in (*range(first), *range(stop, axis.output)):
        start = output * stride - pad
        low = max(-(start // axis.dilation), 0)
        high = min((axis.input - 1 - start) // axis.dilation + 1, axis.filter)
        if low < high:
            at = start + low * axis.dilation
            yield slice(output, output + 1), slice(low, high), at


def _from(firsts: Sequence[int]) -> Iterator[slice]:
    return (slice(first, None) for first in firsts)


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
    by_output = [
        axis.stride * step if count > 1 else 0
        for axis, step, count in zip(axes, steps, outputs, strict=True)
    ]
    by_tap = [
        axis.dilation * step if count > 1 else 0
        for axis, step, count in zip(axes, steps, taps, strict=True)
    ]
    return as_strided(corner, shape, (image, *by_output, channel, *by_tap))
