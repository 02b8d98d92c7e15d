"""Layers of few channels in each group: sums over taps, by loops that Numba compiles.

Depthwise layers with channels last are summed where they are, in rows of channels.

Others have a plane of pixels for each channel, which is copied with the zeros around it and, where
there is a stride, phase by phase.  There, what a tap reads for all results is one stretch of
memory, so many pixels on from that of another:

    sums[i] = sum over channels and taps t of weights[t] * pixels[offsets[t] + i]

Between the rows of results there are places i that are none: they are summed too, and left out.

Without Numba, NumPy's einsum computes depthwise layers, in rows of channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu import products
from cupyconv.cpu.correlation import ALL, SUMS, Axis, Correlation, clamp, gather
from cupyconv.cpu.scratch import Pool, Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import are_finite, copy, merged
from cupyconv.planning.cpu import LEAST_ROW, SMALL_PLANE, has_numba

LEAST_PLANE = 1 << 11
"""Places that are worth a loop: of as many images as have them together."""

LONG_ROW, LARGEST_ROWS = 1 << 9, 1 << 16
"""Elements of neighbouring pixels that are worth a loop, and of the weights of a row of pixels that
the cache has beside them."""


def correlate(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute the result."""

    for chunk in _chunks(whole, block_bytes):
        by_pixel = _is_by_pixel(chunk)
        add = _sum_pixels if by_pixel else _sum_planes
        most, size = _most(chunk, by_pixel, block_bytes, SUMS)
        each(add, chunk.boxes(*most), pool, size)


def filter_gradient(whole: Correlation, pool: Pool, block_bytes: int) -> None:
    """Compute the filters' gradient; by matrix products if operands of planes are not finite.

    The places that are no result's have a gradient of zero, which makes NaN of such numbers.
    """
    if not all(_filter_gradient(one, pool, block_bytes) for one in _chunks(whole, block_bytes)):
        products.filter_gradient(whole, pool, block_bytes)


def _filter_gradient(chunk: Correlation, pool: Pool, block_bytes: int) -> bool:
    by_pixel = _is_by_pixel(chunk)
    add_block = _add_pixels if by_pixel else _add_planes
    several = list(chunk.divided(SUMS))
    most, sizes = zip(*(_most(one, by_pixel, block_bytes) for one in several), strict=True)
    totals = pool.array("shared", (len(several), *chunk.filters.shape))
    totals[...] = 0

    def add(number: int, memory: Scratch) -> None:
        for block in replace(several[number], filters=totals[number]).boxes(*most[number]):
            add_block(block, memory.rest())

    each(add, range(len(several)), pool, max(sizes))
    for total in totals[1:]:
        totals[0] += total
    chunk.filters[...] = totals[0]
    if by_pixel or np.isfinite(totals[0]).all():
        return True
    return are_finite(chunk.source, chunk.result)


# -- parts -----------------------------------------------------------------------------------------


def _chunks(whole: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The groups in parts whose weights fit, with planes, rows and columns."""
    lacks = 3 - len(whole.axes)
    views = whole.source, whole.filters, whole.result
    source, filters, result = (one[(ALL, ALL, ALL, *[None] * lacks)] for one in views)
    axes = (*[Axis()] * lacks, *whole.axes)
    whole = replace(whole, axes=axes, source=source, filters=filters, result=result)
    return whole.chunks(block_bytes)


def _is_by_pixel(whole: Correlation) -> bool:
    """Whether pixels are rows of channels, or are made so: of small planes, or without Numba."""
    single = whole.channels == whole.filter_count == 1
    if not single or not has_numba():
        return single
    near = abs(whole.source.strides[0]) == whole.source.itemsize
    small = prod(axis.outputs for axis in whole.axes) <= SMALL_PLANE
    return (near or small) and whole.groups >= LEAST_ROW


def _most(
    whole: Correlation, by_pixel: bool, block_bytes: int, least: int = 1
) -> tuple[list[int], int]:
    """Groups, images and pixels that fit with all that is under their windows; what they take.

    Args:
        least: parts of a whole that is large enough to be divided.
    """
    both = (whole.source, whole.result)
    in_place = by_pixel and all(_are_rows(_pixels_last(one), whole) for one in both)
    most_bytes = 4 * block_bytes if in_place else block_bytes // 2
    share = (whole.source.size + whole.result.size) * whole.accumulator.itemsize // least
    most_bytes = min(most_bytes, max(share, block_bytes // 4))
    extents = (whole.groups, whole.images, *(axis.outputs for axis in whole.axes))
    most = list(extents)
    if not by_pixel:
        most[1] = min(-(-LEAST_PLANE // prod(extents[2:])), whole.images)

    def taken() -> int:
        places = max(map(places_of, product(*map(_kinds_of_parts, whole.axes, most[2:]))))
        return most[0] * most[1] * places * whole.accumulator.itemsize

    def places_of(axes: Sequence[Axis]) -> int:
        if by_pixel:
            return prod(axis.span for axis in axes) + prod(axis.outputs for axis in axes)
        phases = prod(min(a.taps, _step(a) // gcd(_step(a), a.dilation)) for a in axes)
        return prod(map(_extent, axes)) * (phases * whole.channels + whole.filter_count)

    for at in (1, 2, 3, 4, 0) if by_pixel else (0, 1, 2, 3, 4):
        if at < 2:
            most[at] = clamp(most[at] * most_bytes // taken(), most[at])
        while most[at] > 1 and taken() > most_bytes:
            most[at] = -(-most[at] // 2)
    size = weights = most[0] * whole.filters[0].size
    if by_pixel:  # for several pixels, and their sum
        size += min(max(weights, LARGEST_ROWS), weights * most[4])
    if not (in_place and has_numba()) or whole.conjugate:
        size += taken() // whole.accumulator.itemsize
    return most, size


def _kinds_of_parts(axis: Axis, most: int) -> list[Axis]:
    """A long part of an axis that is cut into parts of at most so many outputs; and a short one."""
    count = -(-axis.outputs // most)
    sizes = {-(-axis.outputs // count), axis.outputs // count}
    return [axis.part(slice(0, size)) for size in sizes]


# -- rows of channels ------------------------------------------------------------------------------


def _sum_pixels(block: Correlation, scratch: Scratch) -> None:
    sums = _pixels_last(block.result)
    in_place = _are_rows(sums, block)
    if not in_place:
        sums = scratch.array("sums", sums.shape)
    source, rules = _rows_of_channels(block, scratch)
    weights = _weights(block, scratch, source, sums)
    filters = block.filters[:, 0, 0].transpose(1, 2, 3, 0)
    copy(weights, filters[..., None, :], block.conjugate)
    flat = weights.reshape(*weights.shape[:3], -1)
    if has_numba():
        _loops().pixel_sums(*_memory(source), flat, *_memory(sums), sums.shape, rules)
    else:
        windows = _windows(source, block, weights.shape[3])
        out = sums.reshape(*windows.shape[:4], -1)
        np.einsum("nzpqtrsg,trsg->nzpqg", windows, flat, out=out)
    block.finish(block.result if in_place else sums.transpose(4, 0, 1, 2, 3)[:, None])


def _add_pixels(block: Correlation, scratch: Scratch) -> None:
    gradients = _pixels_last(block.result)
    if block.conjugate or not _are_rows(gradients, block):
        gradients = scratch.array("sums", gradients.shape)
        copy(gradients, _pixels_last(block.result), block.conjugate)
    source, rules = _rows_of_channels(block, scratch)
    total = _weights(block, scratch, source, gradients)
    total[...] = 0
    flat = total.reshape(*total.shape[:3], -1)
    if has_numba():
        memory, shape = _memory(gradients), gradients.shape
        _loops().pixel_products(*_memory(source), flat, *memory, shape, rules)
    else:
        windows = _windows(source, block, total.shape[3])
        gradients = gradients.reshape(*windows.shape[:4], -1)
        np.einsum("nzpqtrsg,nzpqg->trsg", windows, gradients, out=flat)
    filters: Any = block.filters
    filters[:, 0, 0] += total.sum(axis=3).transpose(3, 0, 1, 2)


def _weights(block: Correlation, scratch: Scratch, *operands: np.ndarray) -> np.ndarray:
    """Memory (*taps, several, G) for the weights of so many pixels, which are summed at a time."""
    several = _pixels_at_once(block, *operands)
    return scratch.array("weights", (*block.filters.shape[3:], several, block.groups))


def _pixels_at_once(block: Correlation, *operands: np.ndarray) -> int:
    """Pixels of a row that are summed at a time, with weights for each; einsum takes all or one."""
    columns, channels = block.axes[2].outputs, block.groups
    together = all(one.strides[3] == channels * one.itemsize for one in operands)
    if not together or block.axes[2].stride != 1:
        return 1
    most = LARGEST_ROWS // prod(block.filters.shape)
    if has_numba():
        return clamp(min(LONG_ROW // channels, most), columns)
    return columns if columns <= most else 1


def _rows_of_channels(block: Correlation, scratch: Scratch) -> tuple[np.ndarray, _Rules]:
    """The source (N, planes, rows, columns, G), and how it is read."""
    source = _pixels_last(block.source)
    if has_numba() and _are_rows(source, block):
        return source, tuple((a.stride, a.dilation, a.offset, a.taps, a.size) for a in block.axes)
    axes = [axis.pixels() for axis in block.axes]
    padded = scratch.array("pixels", (block.images, *(a.outputs for a in axes), block.groups))
    gather(padded, source, axes, 1)
    both = zip(block.axes, axes, strict=True)
    return padded, tuple((a.stride, a.dilation, 0, a.taps, pixels.outputs) for a, pixels in both)


_Rules = tuple[tuple[int, ...], ...]
"""Stride, dilation, offset, taps and size of each axis."""


def _pixels_last(array: np.ndarray) -> np.ndarray:
    """(G, 1, N, planes, rows, columns) as (N, planes, rows, columns, G)."""
    return array[:, 0].transpose(1, 2, 3, 4, 0)


def _are_rows(pixels: np.ndarray, block: Correlation) -> bool:
    """Whether loops take (N, planes, rows, columns, G) where they are."""
    size, steps = pixels.itemsize, pixels.strides
    if pixels.dtype != block.accumulator or not pixels.flags.aligned:
        return False
    # Numbers of two parts are aligned to one of them, and so may their steps be.
    return steps[-1] == size and min(steps) >= 0 and not any(step % size for step in steps)


def _memory(pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """All memory from the first to the last item, and the steps of the other axes in it."""
    steps = tuple(step // pixels.itemsize for step in pixels.strides)
    span = 1 + sum((n - 1) * step for n, step in zip(pixels.shape, steps, strict=True))
    return as_strided(pixels, (span,), (pixels.itemsize,)), steps[:-1]


def _windows(source: np.ndarray, block: Correlation, several: int) -> np.ndarray:
    """(N, planes, rows, columns, *taps, G) of what is under the windows, several columns as one."""
    image, *steps, channel = source.strides
    axes = list(zip(block.axes, steps, strict=True))
    outputs = [axis.outputs for axis in block.axes]
    outputs[2] //= several
    shape = (len(source), *outputs, *(a.taps for a in block.axes), several * block.groups)
    by = (*(a.stride * step for a, step in axes), *(a.dilation * step for a, step in axes))
    return as_strided(source, shape, (image, *by, channel))


# -- planes ----------------------------------------------------------------------------------------


def _sum_planes(block: Correlation, scratch: Scratch) -> None:
    layout = _layout(tuple(map(_shape, block.axes)), block.channels, block.images)
    weights = scratch.array("weights", block.filters.shape)
    copy(weights, block.filters, block.conjugate)
    sums = scratch.array("sums", (*weights.shape[:2], block.images, *layout.extents))
    pixels, by_offset, flat = layout.pixels(block, scratch), merged(weights, 2), merged(sums, 2)
    _loops().planar_sums(pixels, layout.offsets, by_offset, flat, layout.length)
    block.finish(layout.results(sums, block))


def _add_planes(block: Correlation, scratch: Scratch) -> None:
    layout = _layout(tuple(map(_shape, block.axes)), block.channels, block.images)
    total = scratch.array("weights", block.filters.shape)
    total[...] = 0
    gradients = scratch.array("sums", (*total.shape[:2], block.images, *layout.extents))
    gradients[...] = 0
    copy(layout.results(gradients, block), block.result, block.conjugate)
    pixels, by_offset, flat = layout.pixels(block, scratch), merged(total, 2), merged(gradients, 2)
    _loops().planar_products(pixels, layout.offsets, flat, by_offset, layout.length)
    filters: Any = block.filters
    filters += total


@dataclass(frozen=True)
class _Layout:
    """Where the pixels and the sums of a block are.

    Attributes:
        extents: of the pixels of a phase and of the sums, along each axis.
        firsts: the first pixels of the stride phases, along each axis.
        offsets: of the taps of all channels.
        length: from the first result to the last.
    """

    extents: tuple[int, ...]
    firsts: tuple[tuple[int, ...], ...]
    offsets: np.ndarray
    length: int

    def pixels(self, block: Correlation, scratch: Scratch) -> np.ndarray:
        """(G, places of all channels and phases)."""
        phases = prod(map(len, self.firsts))
        shape = (block.groups, block.channels, phases, block.images, *self.extents)
        memory = scratch.array("pixels", shape)
        for number, firsts in enumerate(product(*self.firsts)):
            rules = zip(block.axes, self.extents, firsts, strict=True)
            axes = [Axis(n, 1, a.size, _step(a), 1, a.offset + first) for a, n, first in rules]
            gather(memory[:, :, number], block.source, axes, 3)
        return memory.reshape(block.groups, -1)

    def results(self, sums: np.ndarray, block: Correlation) -> np.ndarray:
        """What of sums (G, K, N, *extents) are results."""
        return sums[(ALL, ALL, ALL, *(slice(0, axis.outputs) for axis in block.axes))]


def _shape(axis: Axis) -> Axis:
    """What of an axis a layout depends on."""
    return Axis(axis.outputs, axis.taps, 1, axis.stride, axis.dilation)


def _step(axis: Axis) -> int:
    """From one pixel of a phase to the next: the stride, or of a single result the dilation."""
    return axis.dilation if axis.outputs == 1 else axis.stride


def _extent(axis: Axis) -> int:
    """Pixels of a stride phase."""
    return axis.outputs + (axis.taps - 1) * axis.dilation // _step(axis)


@lru_cache(maxsize=16)  # each may have as many offsets as a filter has weights
def _layout(axes: tuple[Axis, ...], channels: int, images: int) -> _Layout:
    extents = tuple(map(_extent, axes))
    pitches = [prod(extents[axis + 1 :]) for axis in range(len(axes))]
    # Of each tap, the number of its phase and how far on it reads there.
    numbers, shifts, firsts = np.array(0), np.array(0), []
    for axis, pitch in zip(axes, pitches, strict=True):
        shift, phase = np.divmod(np.arange(axis.taps) * axis.dilation, _step(axis))
        found, number = np.unique(phase, return_inverse=True)
        numbers = np.add.outer(numbers * len(found), number)
        shifts = np.add.outer(shifts, shift * pitch)
        firsts.append(tuple(found.tolist()))
    of_phase = images * prod(extents)
    of_channels = np.arange(channels) * (prod(map(len, firsts)) * of_phase)
    offsets = np.add.outer(of_channels, (numbers * of_phase + shifts).ravel()).ravel()
    after = sum((axis.outputs - 1) * pitch for axis, pitch in zip(axes, pitches, strict=True))
    return _Layout(extents, tuple(firsts), offsets, of_phase - prod(extents) + after + 1)


@cache
def _loops() -> Any:
    return import_module("cupyconv.cpu.loops_numba")
