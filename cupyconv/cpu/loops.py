"""Loops over taps, compiled by Numba, for layers with few channels per group.

Each channel is copied to zero-padded planes of pixels, one per stride phase: the pixels whose
positions have the same remainders modulo the strides.  In a plane, the pixels that tap t reads for
all results are contiguous and begin at offsets[t]:

    sums[i] = sum over channels and taps t of weights[t] * pixels[offsets[t] + i]

Positions i between the rows of results are also summed, and then discarded.

Without Numba, NumPy's einsum computes depthwise layers, in rows of the channels of one pixel or of
several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.axis import Axis, clamp, extent, loop_blocks, split_evenly, step
from cupyconv.cpu.caching import ByteCache
from cupyconv.cpu.choice import LOOP_PARTS, PLANE_RATE, RATE, SUMS, has_numba, most_loop_bytes
from cupyconv.cpu.correlation import ALL, Correlation, gather, with_three_axes
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import L2_ELEMENTS, MOST_TERMS, copy, has_whole_steps, memory_of, merged
from cupyconv.kernels.strides import element_strides
from cupyconv.problem import ITEMSIZE
from cupyconv.signals import import_whole

SLOWER = round(RATE / PLANE_RATE)
"""Time of a product of planes, relative to a product in a matrix product."""

MOST_PADDED = 4
"""Largest ratio of padded to source pixels for which planes are summed one at a time (hand-set)."""


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute ``whole.result`` in blocks, whose size is proportional to ``block_bytes``."""
    for chunk in with_three_axes(whole).chunks(block_bytes):
        if _is_single_planes(chunk):
            _sum_single_planes(chunk, pool, block_bytes)
            continue
        add = _sum_planes if has_numba() else _sum_pixels
        most, size = _blocks(chunk, block_bytes, LOOP_PARTS)
        each(add, chunk.boxes(*most), pool, size)


def filter_gradient(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Write the filter gradient to ``whole.filters``; ``whole.result`` is dy."""
    for chunk in with_three_axes(whole).chunks(block_bytes):
        _filter_gradient(chunk, pool, block_bytes)


def _filter_gradient(chunk: Correlation, pool: Pool, block_bytes: int) -> None:
    terms = list(chunk.divided(SUMS, SLOWER))
    blocks, sizes = zip(*(_blocks(term, block_bytes) for term in terms), strict=True)
    totals = pool.array("shared", (len(terms), *chunk.filters.shape))

    def add(number: int, memory: Scratch) -> None:
        totals[number] = 0
        for block in terms[number]._replace(filters=totals[number]).boxes(*blocks[number]):
            (_add_planes if has_numba() else _add_pixels)(block, memory.rest())

    each(add, range(len(terms)), pool, max(sizes))
    for total in totals[1:]:
        totals[0] += total
    chunk.filters[...] = totals[0]


# -- parts -----------------------------------------------------------------------------------------


def _blocks(whole: Correlation, block_bytes: int, least: int = 1) -> tuple[tuple[int, ...], int]:
    """Return the arguments of ``boxes`` for blocks that fit, and a block's scratch elements.

    Args:
        least: smallest number of parts into which a large correlation is divided.
    """
    share = (whole.source.size + whole.result.size) * whole.accumulator.itemsize // least
    most_bytes, by_pixel = most_loop_bytes(block_bytes, share), not has_numba()
    counts = whole.images, whole.groups, whole.channels, whole.filter_count
    blocks = loop_blocks(whole.axes, *counts, most_bytes // whole.accumulator.itemsize, by_pixel)
    size = weights = blocks.most[0] * whole.filters[0].size
    if by_pixel:  # the weights are repeated for several pixels
        size += min(max(weights, L2_ELEMENTS), weights * blocks.most[4])
    return blocks.most, size + blocks.places


# -- rows of channels ------------------------------------------------------------------------------


def _sum_pixels(block: Correlation, scratch: Scratch) -> None:
    sums = _pixels_last(block.result)
    in_place = _are_rows(sums, block)
    if not in_place:
        sums = scratch.array("sums", sums.shape)
    source = _rows_of_channels(block, scratch)
    weights = _weights(block, scratch, source, sums)
    filters = block.filters[:, 0, 0].transpose(1, 2, 3, 0)
    copy(weights, filters[..., None, :], block.conjugate)
    windows = _windows(source, block, weights.shape[3])
    out, flat = sums.reshape(*windows.shape[:4], -1), weights.reshape(*weights.shape[:3], -1)
    np.einsum("nzpqtrsg,trsg->nzpqg", windows, flat, out=out)
    block.finish(block.result if in_place else sums.transpose(4, 0, 1, 2, 3)[:, None])


def _add_pixels(block: Correlation, scratch: Scratch) -> None:
    gradients = _pixels_last(block.result)
    if block.conjugate or not _are_rows(gradients, block):
        gradients = scratch.array("sums", gradients.shape)
        copy(gradients, _pixels_last(block.result), block.conjugate)
    source = _rows_of_channels(block, scratch)
    total = _weights(block, scratch, source, gradients)
    windows = _windows(source, block, total.shape[3])
    gradients = gradients.reshape(*windows.shape[:4], -1)
    flat, filters = total.reshape(*total.shape[:3], -1), block.filters
    pixels = prod(windows.shape[:2]) * windows.shape[3]
    terms = max(MOST_TERMS // 4, 4 * L2_ELEMENTS // flat.size)  # few for many weights
    for rows in split_evenly(windows.shape[2], max(terms // pixels, 1)):
        of_rows = windows[:, :, rows], gradients[:, :, rows]
        np.einsum("nzpqtrsg,nzpqg->trsg", *of_rows, out=flat)
        filters[:, 0, 0] += total.sum(axis=3).transpose(3, 0, 1, 2)


def _weights(block: Correlation, scratch: Scratch, *operands: np.ndarray) -> np.ndarray:
    """Return a scratch array (*taps, pixels, G) for one copy of the weights per pixel of a loop."""
    pixels = _pixels_at_once(block, *operands)
    return scratch.array("weights", (*block.filters.shape[3:], pixels, block.groups))


def _pixels_at_once(block: Correlation, *operands: np.ndarray) -> int:
    """Return how many pixels of a row are summed at once: one, or the whole row."""
    columns, channels = block.axes[2].outputs, block.groups
    is_contiguous = all(array.strides[3] == channels * array.itemsize for array in operands)
    is_row = is_contiguous and block.axes[2].stride == 1
    return columns if is_row and columns * prod(block.filters.shape) <= L2_ELEMENTS else 1


def _rows_of_channels(block: Correlation, scratch: Scratch) -> np.ndarray:
    """Return the padded source (N, depth, rows, columns, G)."""
    axes = [axis.pixels() for axis in block.axes]
    padded = scratch.array("pixels", (block.images, *(a.outputs for a in axes), block.groups))
    gather(padded, _pixels_last(block.source), axes, 1)
    return padded


def _pixels_last(array: np.ndarray) -> np.ndarray:
    """Transpose (G, 1, N, depth, rows, columns) to (N, depth, rows, columns, G)."""
    return array[:, 0].transpose(1, 2, 3, 4, 0)


def _are_rows(pixels: np.ndarray, block: Correlation) -> bool:
    """Return whether the loops can use an array without a copy: its last axis is contiguous."""
    return pixels.strides[-1] == pixels.itemsize and has_whole_steps(pixels, block.accumulator)


def _memory(pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the memory as a 1-D view, and the strides of all axes but the last, in elements."""
    return memory_of(pixels), element_strides(pixels)[:-1]


def _windows(source: np.ndarray, block: Correlation, several: int) -> np.ndarray:
    """Return the windows (N, depth, rows, columns, *taps, G).

    Every ``several`` neighbouring columns are merged into one column of several * G channels.
    """
    image, *steps, channel = source.strides
    axes = list(zip(block.axes, steps, strict=True))
    outputs = [axis.outputs for axis in block.axes]
    outputs[2] //= several
    shape = (len(source), *outputs, *(a.taps for a in block.axes), several * block.groups)
    by = (*(a.stride * step for a, step in axes), *(a.dilation * step for a, step in axes))
    return as_strided(source, shape, (image, *by, channel))


# -- planes ----------------------------------------------------------------------------------------


def _sum_planes(block: Correlation, scratch: Scratch) -> None:
    layout = _layout((tuple(map(_shape, block.axes)), block.channels, block.images))
    weights = scratch.array("weights", block.filters.shape)
    copy(weights, block.filters, block.conjugate)
    sums = scratch.array("sums", (*weights.shape[:2], block.images, *layout.extents))
    pixels, by_offset, flat = layout.pixels(block, scratch), merged(weights, 2), merged(sums, 2)
    _loops().planar_sums(pixels, layout.offsets, by_offset, flat, layout.length)
    block.finish(layout.results(sums, block))


def _is_single_planes(whole: Correlation) -> bool:
    """Return whether to sum one plane at a time, in scratch for a single padded plane.

    This needs Numba, a depthwise layer of stride 1 in one or two dimensions, little padding, and
    contiguous rows of pixels in the accumulator's dtype.
    """
    depth, rows, columns = whole.axes
    if whole.channels != 1 or whole.filter_count != 1 or not has_numba() or whole.conjugate:
        return False
    if (depth.taps, depth.outputs, depth.size) != (1, 1, 1) or rows.stride * columns.stride != 1:
        return False
    if rows.span * columns.span > MOST_PADDED * rows.size * columns.size:
        return False
    return all(_are_rows(array, whole) for array in (whole.source, whole.result))


def _sum_single_planes(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    _, rows, columns = whole.axes
    pitch, lines = columns.span, rows.span
    offsets = np.add.outer(
        np.arange(rows.taps) * rows.dilation * pitch, np.arange(columns.taps) * columns.dilation
    ).ravel()
    plane = rows.outputs * columns.outputs + rows.size * columns.size
    most = block_bytes // ITEMSIZE["float32"]  # not fewer of a wider dtype: few stay in the cache
    groups = clamp(most // plane, whole.groups)
    images = clamp(most // (plane * groups), whole.images)
    size = (lines + rows.outputs) * pitch + groups * len(offsets)
    rules = (rows.offset, columns.offset, rows.outputs, columns.outputs, lines, pitch)
    sum_block = partial(_sum_block_of_planes, offsets, rules)
    each(sum_block, whole.boxes(groups, images), pool, size)


def _sum_block_of_planes(
    offsets: np.ndarray, rules: tuple[int, ...], block: Correlation, scratch: Scratch
) -> None:
    *_, lines, pitch = rules
    weights = scratch.array("weights", (block.groups, 1, len(offsets)))
    weights[...] = block.filters.reshape(weights.shape)
    pixels = scratch.array("pixels", (lines * pitch,))
    sums = scratch.array("sums", (rules[2] * pitch,))
    source, result = (array[:, 0, :, 0] for array in (block.source, block.result))
    _loops().plane_sums(
        *_memory(source), source.shape, weights, offsets, *_memory(result), rules, pixels, sums
    )
    block.finish(block.result)


def _add_planes(block: Correlation, scratch: Scratch) -> None:
    """Add the filter gradient of a block's images and outputs to ``block.filters``."""
    layout = _layout((tuple(map(_shape, block.axes)), block.channels, block.images))
    total = scratch.array("weights", block.filters.shape)
    total[...] = 0
    gradients = scratch.array("sums", (*total.shape[:2], block.images, *layout.extents))
    gradients[...] = 0
    copy(layout.results(gradients, block), block.result, block.conjugate)
    pixels, by_offset, flat = layout.pixels(block, scratch), merged(total, 2), merged(gradients, 2)
    inside = scratch.array("inside", (1, 1, *gradients.shape[2:]))
    inside[...] = 0
    layout.results(inside, block)[...] = 1
    arrays = pixels, layout.offsets, flat, inside.ravel(), by_offset
    _loops().planar_products(*arrays, layout.length)
    filters: Any = block.filters
    filters += total


@dataclass(frozen=True)
class _Layout:
    """Memory layout of a block: a plane of pixels per stride phase, and the plane of the sums.

    Attributes:
        extents: extents of each plane: depth, rows and columns.
        firsts: for each axis, the first pixel of each stride phase, relative to the first window.
        offsets: position in memory of the pixel that each tap of each channel reads for the first
            result.
        length: number of positions from the first result to the last.
    """

    extents: tuple[int, ...]
    firsts: tuple[tuple[int, ...], ...]
    offsets: np.ndarray
    length: int

    @property
    def nbytes(self) -> int:
        """Estimated size of the layout in bytes."""
        return self.offsets.nbytes + 2048

    def pixels(self, block: Correlation, scratch: Scratch) -> np.ndarray:
        """Copy the source to an array (G, elements) of the planes of all channels and phases."""
        phases = prod(map(len, self.firsts))
        shape = (block.groups, block.channels, phases, block.images, *self.extents)
        memory = scratch.array("pixels", shape)
        for number, firsts in enumerate(product(*self.firsts)):
            rules = zip(block.axes, self.extents, firsts, strict=True)
            axes = [Axis(n, 1, a.size, step(a), 1, a.offset + first) for a, n, first in rules]
            gather(memory[:, :, number], block.source, axes, 3)
        return memory.reshape(block.groups, -1)

    def results(self, sums: np.ndarray, block: Correlation) -> np.ndarray:
        """Return the view of the sums (G, K, N, *extents) without positions between rows."""
        return sums[(ALL, ALL, ALL, *(slice(0, axis.outputs) for axis in block.axes))]


def _shape(axis: Axis) -> Axis:
    """Return the axis without its size and offset, on which a layout does not depend."""
    return Axis(axis.outputs, axis.taps, 1, axis.stride, axis.dilation)


def _plan_layout(key: tuple[tuple[Axis, ...], int, int]) -> _Layout:
    """Return the layout of a block, from its axes, its channels per group and its images."""
    axes, channels, images = key
    extents = tuple(map(extent, axes))
    pitches = [prod(extents[axis + 1 :]) for axis in range(len(axes))]
    # For each tap, the index of its phase and its shift within the phase.
    numbers, shifts, firsts = np.array(0), np.array(0), []
    for axis, pitch in zip(axes, pitches, strict=True):
        shift, phase = np.divmod(np.arange(axis.taps) * axis.dilation, step(axis))
        present, number = np.unique(phase, return_inverse=True)
        numbers = np.add.outer(numbers * len(present), number)
        shifts = np.add.outer(shifts, shift * pitch)
        firsts.append(tuple(present.tolist()))
    of_phase = images * prod(extents)
    of_channels = np.arange(channels) * (prod(map(len, firsts)) * of_phase)
    offsets = np.add.outer(of_channels, (numbers * of_phase + shifts).ravel()).ravel()
    last = sum((axis.outputs - 1) * pitch for axis, pitch in zip(axes, pitches, strict=True))
    return _Layout(extents, tuple(firsts), offsets, of_phase - prod(extents) + last + 1)


_layout = ByteCache(_plan_layout)


@cache
def _loops() -> Any:
    return import_whole("cupyconv.cpu.loops_numba")
