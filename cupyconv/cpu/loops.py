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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import ALL, SUMS, Axis, Correlation, boxes, clamp, gather, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.threads import each
from cupyconv.cpu.views import are_finite
from cupyconv.planning.cpu import SMALL_PLANE, has_numba

LEAST_PLANE = 1 << 11
"""Places that are worth a loop: of as many images as have them together."""

LEAST_ROW = 8
"""Channels of a pixel that are worth a loop."""

LARGEST_ROWS = 1 << 18
"""Bytes of the weights of a row of pixels that the cache has beside the pixels."""


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int) -> None:
    """Compute the result."""

    for chunk in _chunks(whole, block_bytes):
        by_pixel = _is_by_pixel(chunk)
        add = _sum_pixels if by_pixel else _sum_planes
        each(add, _blocks(chunk, by_pixel, block_bytes, SUMS), scratch, blocks=4)


def filter_gradient(whole: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    """Compute the filters' gradient; False if operands of planes are not finite.

    The places that are no result's have a gradient of zero, which makes NaN of such numbers.
    """
    return all(_filter_gradient(one, scratch, block_bytes) for one in _chunks(whole, block_bytes))


def _filter_gradient(chunk: Correlation, scratch: Scratch, block_bytes: int) -> bool:
    by_pixel = _is_by_pixel(chunk)
    add_block = _add_pixels if by_pixel else _add_planes
    several = list(_divided(chunk, by_pixel))
    totals = scratch.array("totals", (len(several), *chunk.filters.shape))
    totals[...] = 0

    def add(number: int, memory: Scratch) -> None:
        groups, pixels = several[number]
        with_totals = replace(pixels, filters=totals[number, groups])
        for block in _blocks(with_totals, by_pixel, block_bytes):
            add_block(block, memory)

    each(add, range(len(several)), scratch, blocks=4)
    chunk.filters[...] = totals.sum(axis=0)
    if by_pixel or np.isfinite(chunk.filters).all():
        return True
    return are_finite(chunk.source, chunk.result)


# -- parts -----------------------------------------------------------------------------------------


def _chunks(whole: Correlation, block_bytes: int) -> Iterator[Correlation]:
    """The groups in parts whose weights fit, with planes, rows and columns."""
    while len(whole.axes) < 3:
        whole = whole.with_axis(0)
    one = prod(whole.filters.shape[1:]) * whole.accumulator.itemsize
    for some in parts(whole.groups, clamp(block_bytes // one, whole.groups)):
        yield whole.part(groups=some)


def _is_by_pixel(whole: Correlation) -> bool:
    """Whether pixels are rows of channels, or are made so: of small planes, or without Numba."""
    single = whole.channels == whole.filter_count == 1
    if not single or not has_numba():
        return single
    near = abs(whole.source.strides[1]) == whole.source.itemsize
    small = prod(axis.outputs for axis in whole.axes) <= SMALL_PLANE
    return (near or small) and whole.groups >= LEAST_ROW


def _divided(whole: Correlation, by_pixel: bool) -> Iterator[tuple[slice, Correlation]]:
    """Groups or pixels in parts whose sums are apart."""
    if whole.groups >= SUMS and not by_pixel:
        for some in parts(whole.groups, -(-whole.groups // SUMS)):
            yield some, whole.part(groups=some)
    else:
        for pixels in whole.divided(SUMS):
            yield slice(0, whole.groups), pixels


def _blocks(
    whole: Correlation, by_pixel: bool, block_bytes: int, least: int = 1
) -> Iterator[Correlation]:
    """Images, groups and pixels in parts that fit with all that is under their windows.

    Args:
        least: parts of a whole that is large enough to be divided.
    """
    most_bytes = block_bytes // 2
    if by_pixel and all(_are_rows(_pixels_last(a), whole) for a in (whole.source, whole.result)):
        most_bytes = 4 * block_bytes  # where they are
    share = (whole.source.size + whole.result.size) * whole.accumulator.itemsize // least
    most_bytes = min(most_bytes, max(share, block_bytes // 4))
    outputs = [axis.outputs for axis in whole.axes]
    most, groups = list(outputs), whole.groups if by_pixel else 1
    phases = prod(min(a.taps, a.stride // gcd(a.stride, a.dilation)) for a in whole.axes)
    per_place = phases * whole.channels + whole.filter_count

    def taken() -> int:
        axes = tuple(axis.part(slice(0, some)) for axis, some in zip(whole.axes, most, strict=True))
        if by_pixel:
            places = prod(axis.span for axis in axes) + prod(most)
        else:
            places = prod(map(_extent, axes)) * per_place
        return groups * places * whole.accumulator.itemsize

    for axis in range(len(most)):
        while most[axis] > 1 and taken() > most_bytes:
            most[axis] = -(-most[axis] // 2)
    while groups > 1 and taken() > most_bytes:
        groups = -(-groups // 2)
    images = 1
    if most == outputs:
        fitting = most_bytes // max(taken(), 1)
        images = fitting if by_pixel else min(fitting, -(-LEAST_PLANE // prod(outputs)))
        images = clamp(images, whole.images)
        if not by_pixel:
            groups = clamp(fitting // images, whole.groups)
    for some in parts(whole.images, images):
        for group in parts(whole.groups, groups):
            for box in boxes(outputs, most):
                yield whole.part(images=some, groups=group, outputs=box)


# -- rows of channels ------------------------------------------------------------------------------


def _sum_pixels(block: Correlation, scratch: Scratch) -> None:
    source, rules = _rows_of_channels(block, scratch)
    sums = _pixels_last(block.result)
    in_place = _are_rows(sums, block)
    if not in_place:
        sums = scratch.array("sums", sums.shape)
    several = _pixels_at_once(block, source, sums)
    weights = scratch.array("weights", (*block.filters.shape[3:], several, block.groups))
    weights[...] = block.filters[:, 0, 0].transpose(1, 2, 3, 0)[..., None, :]
    if block.conjugate:
        np.conjugate(weights, out=weights)
    rows = weights.reshape(*weights.shape[:3], -1)
    if has_numba():
        _loops().pixel_sums(*_memory(source), rows, *_memory(sums), sums.shape, rules)
    else:
        windows = _windows(source, block, several)
        out = sums.reshape(*windows.shape[:4], -1)
        np.einsum("nzpqtrsg,trsg->nzpqg", windows, rows, out=out)
    block.finish(block.result if in_place else sums.transpose(0, 4, 1, 2, 3)[:, :, None])


def _add_pixels(block: Correlation, scratch: Scratch) -> None:
    source, rules = _rows_of_channels(block, scratch)
    gradients = _pixels_last(block.result)
    if block.conjugate or not _are_rows(gradients, block):
        gradients = scratch.array("sums", gradients.shape)
        gradients[...] = _pixels_last(block.result)
    if block.conjugate:
        np.conjugate(gradients, out=gradients)
    several = _pixels_at_once(block, source, gradients)
    total = scratch.array("weights", (*block.filters.shape[3:], several, block.groups))
    total[...] = 0
    rows = total.reshape(*total.shape[:3], -1)
    if has_numba():
        shape = gradients.shape
        _loops().pixel_products(*_memory(source), rows, *_memory(gradients), shape, rules)
    else:
        windows = _windows(source, block, several)
        gradients = gradients.reshape(*windows.shape[:4], -1)
        np.einsum("nzpqtrsg,nzpqg->trsg", windows, gradients, out=rows)
    filters: Any = block.filters
    filters[:, 0, 0] += total.sum(axis=3).transpose(3, 0, 1, 2)


def _pixels_at_once(block: Correlation, *operands: np.ndarray) -> int:
    """Pixels of a row that are summed at a time, with weights for each: one, or all of them."""
    columns, channels = block.axes[2].outputs, block.groups
    together = all(one.strides[3] == channels * one.itemsize for one in operands)
    rows = prod(block.filters.shape) * columns * block.accumulator.itemsize
    if together and block.axes[2].stride == 1 and rows <= LARGEST_ROWS:
        return columns
    return 1


def _rows_of_channels(block: Correlation, scratch: Scratch) -> tuple[np.ndarray, _Rules]:
    """The source (N, planes, rows, columns, G), and how it is read."""
    source = _pixels_last(block.source)
    if has_numba() and _are_rows(source, block):
        return source, tuple((a.stride, a.dilation, a.offset, a.taps, a.size) for a in block.axes)
    axes = [axis.pixels() for axis in block.axes]
    padded = scratch.array("pixels", (block.images, *(a.outputs for a in axes), block.groups))
    gather(padded, source, dict(enumerate(axes, 1)))
    both = zip(block.axes, axes, strict=True)
    return padded, tuple((a.stride, a.dilation, 0, a.taps, pixels.outputs) for a, pixels in both)


_Rules = tuple[tuple[int, ...], ...]
"""Stride, dilation, offset, taps and size of each axis."""


def _pixels_last(array: np.ndarray) -> np.ndarray:
    """(N, G, 1, planes, rows, columns) as (N, planes, rows, columns, G)."""
    return array[:, :, 0].transpose(0, 2, 3, 4, 1)


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
    weights[...] = block.filters
    if block.conjugate:
        np.conjugate(weights, out=weights)
    sums = scratch.array("sums", (*weights.shape[:2], block.images, *layout.extents))
    pixels, flat = layout.pixels(block, scratch), sums.reshape(*sums.shape[:2], -1)
    weights = weights.reshape(*weights.shape[:2], -1)
    _loops().planar_sums(pixels, layout.offsets, weights, flat, layout.length)
    block.finish(layout.results(sums, block))


def _add_planes(block: Correlation, scratch: Scratch) -> None:
    layout = _layout(tuple(map(_shape, block.axes)), block.channels, block.images)
    shape = (*block.filters.shape[:2], block.images, *layout.extents)
    gradients = scratch.array("sums", shape)
    gradients[...] = 0
    results = layout.results(gradients, block)
    results[...] = block.result
    if block.conjugate:
        np.conjugate(results, out=results)
    total = scratch.array("weights", block.filters.shape)
    total[...] = 0
    pixels, flat = layout.pixels(block, scratch), gradients.reshape(*shape[:2], -1)
    by_offset = total.reshape(*shape[:2], -1)
    _loops().planar_products(pixels, layout.offsets, flat, by_offset, layout.length)
    filters: Any = block.filters
    filters += total


@dataclass(frozen=True)
class _Layout:
    """Where the pixels and the sums of a block are.

    Attributes:
        extents: of the pixels of a phase and of the sums, along each axis.
        phases: the first pixel of each stride phase, along each axis.
        offsets: of the taps of all channels.
        length: from the first result to the last.
    """

    extents: tuple[int, ...]
    phases: tuple[tuple[int, ...], ...]
    offsets: np.ndarray
    length: int

    def pixels(self, block: Correlation, scratch: Scratch) -> np.ndarray:
        """(G, places of all channels and phases)."""
        shape = (block.groups, block.channels, len(self.phases), block.images, *self.extents)
        memory = scratch.array("pixels", shape)
        source = block.source.transpose(1, 2, 0, 3, 4, 5)
        for number, firsts in enumerate(self.phases):
            rules = zip(block.axes, self.extents, firsts, strict=True)
            axes = [Axis(n, 1, a.size, a.stride, 1, a.offset + first) for a, n, first in rules]
            gather(memory[:, :, number], source, dict(enumerate(axes, 3)))
        return memory.reshape(block.groups, -1)

    def results(self, sums: np.ndarray, block: Correlation) -> np.ndarray:
        """What of sums (G, K, N, *extents) are results, (N, G, K, *outputs)."""
        inside = tuple(slice(0, axis.outputs) for axis in block.axes)
        return sums.transpose(2, 0, 1, 3, 4, 5)[(ALL, ALL, ALL, *inside)]


def _shape(axis: Axis) -> Axis:
    """What of an axis a layout depends on."""
    return Axis(axis.outputs, axis.taps, 1, axis.stride, axis.dilation)


def _extent(axis: Axis) -> int:
    """Pixels of a stride phase."""
    return axis.outputs + (axis.taps - 1) * axis.dilation // axis.stride


@lru_cache(maxsize=16)  # each may have as many offsets as a filter has weights
def _layout(axes: tuple[Axis, ...], channels: int, images: int) -> _Layout:
    extents = tuple(map(_extent, axes))
    pitches = [prod(extents[axis + 1 :]) for axis in range(len(axes))]
    # Of each tap, the number of its phase and how far on it reads there.
    numbers, shifts, met = np.array(0), np.array(0), []
    for axis, pitch in zip(axes, pitches, strict=True):
        shift, phase = np.divmod(np.arange(axis.taps) * axis.dilation, axis.stride)
        found, number = np.unique(phase, return_inverse=True)
        numbers = np.add.outer(numbers * len(found), number)
        shifts = np.add.outer(shifts, shift * pitch)
        met.append(found.tolist())
    phases = tuple(product(*met))
    of_phase = images * prod(extents)
    of_channels = np.arange(channels) * (len(phases) * of_phase)
    offsets = np.add.outer(of_channels, (numbers * of_phase + shifts).ravel()).ravel()
    after = sum((axis.outputs - 1) * pitch for axis, pitch in zip(axes, pitches, strict=True))
    return _Layout(extents, phases, offsets, of_phase - prod(extents) + after + 1)


@cache
def _loops() -> Any:
    return import_module("cupyconv.cpu.loops_numba")
