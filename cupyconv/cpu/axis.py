"""Geometry of the correlations that the CPU computes, axis by axis; pure.

The methods in cupyconv/cpu/ and their cost rule in cupyconv/cpu/choice.py share it, so that the
rule counts the blocks that a method really has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from math import gcd, prod
from typing import NamedTuple

from cupyconv.problem import ConvAxis, count_pairs

ALL = slice(None)

MANY_PHASES = 64
"""Stride phases, for every window, above which windows are taken one by one instead."""

PADDED_SHARE = 0.85
"""Share of products with pixels, not padding, below which an axis is cut."""

MOST_CUTS = (8, 64)
"""Parts that an axis is cut into at most, to leave out products with padding; a second try."""


class _Rules(NamedTuple):
    outputs: int
    taps: int
    size: int
    stride: int
    dilation: int
    offset: int


class Axis(_Rules):
    """One spatial axis: output o and tap t read the source at o * stride + t * dilation + offset.

    A tuple, because each call looks values up under its axes.

    Attributes:
        outputs, taps, size: extents of the result, of the filter and of the source.
    """

    __slots__ = ()

    def __new__(
        cls,
        outputs: int = 1,
        taps: int = 1,
        size: int = 1,
        stride: int = 1,
        dilation: int = 1,
        offset: int = 0,
    ) -> Axis:
        # A single output needs no stride and a single tap no dilation; as large as an address, they
        # would overflow.
        if outputs == 1:
            stride = 1
        if taps == 1:
            dilation = 1
        return tuple.__new__(cls, (outputs, taps, size, stride, dilation, offset))

    def changed(self, **changes: int) -> Axis:
        """Return the axis with some attributes changed."""
        return Axis(**{**self._asdict(), **changes})

    def inside(self, tap: int) -> tuple[slice, slice]:
        """Return the outputs whose window has this tap inside the source, and its elements."""
        stride, outputs = self.stride, self.outputs
        first = self.offset + tap * self.dilation
        start = 0 if first >= 0 else -(first // stride)
        stop = -((first - self.size) // stride)
        if stop > outputs:
            stop = outputs
        if start >= stop:
            return slice(0, 0), slice(0, 0)
        read = first + start * stride
        return slice(start, stop), slice(read, read + (stop - start - 1) * stride + 1, stride)

    def part(self, outputs: slice) -> Axis:
        """Return the axis with some of its outputs."""
        if outputs == slice(0, self.outputs):
            return self
        offset = self.offset + outputs.start * self.stride
        return self.changed(outputs=outputs.stop - outputs.start, offset=offset)

    @property
    def span(self) -> int:
        """Positions under all windows, from the first to the last."""
        return (self.outputs - 1) * self.stride + max(self.taps - 1, 0) * self.dilation + 1

    def pairs(self, taps: int) -> int:
        """Return pairs of an output and one of the first taps that is inside the source there."""
        low = -self.offset
        return count_pairs(self.outputs, taps, self.stride, self.dilation, low, low + self.size)

    def reached(self) -> slice:
        """Range of taps that some window may have inside the source."""
        corner = self.offset + (self.outputs - 1) * self.stride
        return _reaching(corner, self.offset, self.size, self.dilation, self.taps)

    def with_taps(self, taps: slice) -> Axis:
        """Return the axis with some of its taps."""
        if taps == slice(0, self.taps):
            return self
        offset = self.offset + taps.start * self.dilation
        return self.changed(taps=taps.stop - taps.start, offset=offset)

    def used(self) -> tuple[slice, slice, slice]:
        """Outputs, taps and pixels that contribute; all are empty if nothing does."""
        return _used(self)

    def without_unused(self) -> Axis:
        """Return the axis with the outputs, taps and pixels that ``used`` has."""
        outputs, taps, pixels = self.used()
        axis = self.part(outputs).with_taps(taps)
        return axis.changed(size=pixels.stop - pixels.start, offset=axis.offset - pixels.start)

    def pixels(self) -> Axis:
        """Return the axis of a single tap that reads all pixels under the windows, one by one."""
        return Axis(self.span, size=self.size, offset=self.offset)

    def cuts(self, most: int) -> list[slice]:
        """Return all outputs, or parts with about equal taps if many products are padding."""
        edges = {0, self.outputs}
        if self.pairs(self.taps) < PADDED_SHARE * self.outputs * self.taps:
            taps = range(self.taps)[self.reached()]
            for tap in (*taps[:: len(taps) // most + 1], *taps[-1:]):
                inside, _ = self.inside(tap)
                edges |= {inside.start, inside.stop}
            if len(taps) > most:
                edges |= set(range(0, self.outputs, -(-self.outputs // most)))
        ordered = sorted(edges)
        some = ordered[: -1 : len(ordered) // (2 * most) + 1]
        return [slice(start, stop) for start, stop in pairwise([*some, self.outputs])]


@lru_cache(maxsize=4096)
def _used(axis: Axis) -> tuple[slice, slice, slice]:
    if not axis.pairs(axis.taps):
        return slice(0, 0), slice(0, 0), slice(0, 0)
    outputs, taps = slice(0, axis.outputs), slice(0, axis.taps)
    while True:
        inner = axis.part(outputs).with_taps(taps)
        corner = inner.offset + (inner.taps - 1) * inner.dilation
        some = _reaching(corner, inner.offset, inner.size, inner.stride, inner.outputs)
        outputs = slice(outputs.start + some.start, outputs.start + some.stop)
        some = axis.part(outputs).with_taps(taps).reached()
        taps = slice(taps.start + some.start, taps.start + some.stop)
        found = axis.part(outputs).with_taps(taps)
        if found == inner:
            end = min(found.offset + found.span, axis.size)
            return outputs, taps, slice(max(found.offset, 0), end)


@lru_cache(maxsize=4096)
def used_parts(axes: tuple[Axis, ...]) -> tuple[tuple[slice, slice, slice], ...] | None:
    """Return ``Axis.used`` of all axes: empty if one axis is empty; None if all taps are used."""
    parts_of = [axis.used() for axis in axes]
    if any(outputs.start == outputs.stop for outputs, _, _ in parts_of):
        return ((slice(0, 0),) * 3,) * len(axes)
    whole = [tuple(slice(0, n) for n in (axis.outputs, axis.taps, axis.size)) for axis in axes]
    return None if parts_of == whole else tuple(parts_of)


def _reaching(first: int, last: int, size: int, step: int, count: int) -> slice:
    """Return the steps from the first with ``first`` >= 0 to the last with ``last`` below size."""
    start = max(-(first // step), 0)
    stop = min((size - 1 - last) // step + 1, count)
    return slice(start, max(stop, start))


@dataclass(frozen=True)
class Pieces:
    """A correlation in parts of its outputs, each with the taps that it reaches.

    Attributes:
        cuts: parts of the outputs of each axis.
        pairs: pairs of an output and a tap in all parts together.
        outputs, taps, span: extents of a part, on average.
    """

    cuts: tuple[tuple[slice, ...], ...]
    pairs: int
    outputs: float
    taps: float
    span: float

    @property
    def count(self) -> int:
        return prod(map(len, self.cuts))

    @property
    def is_gathered_by_taps(self) -> bool:
        """Whether windows are so far apart that the pixels of each tap are gathered alone."""
        return self.outputs * self.taps < self.span


def _pieces(axes: Sequence[Axis], most: int) -> Pieces:
    cuts, pairs, outputs, taps, span = [], 1, 1.0, 1.0, 1.0
    for axis in axes:
        some = axis.cuts(most) if most else [slice(0, axis.outputs)]
        parts_of = [axis.part(one) for one in some]
        parts_of = [one.with_taps(one.reached()) for one in parts_of]
        cuts.append(tuple(some))
        pairs *= sum(one.outputs * one.taps for one in parts_of)
        outputs *= axis.outputs / len(some)
        taps *= sum(one.taps for one in parts_of) / len(some)
        span *= sum(one.span for one in parts_of) / len(some)
    return Pieces(tuple(cuts), pairs, outputs, taps, span)


@lru_cache(maxsize=4096)
def pieces(axes: tuple[Axis, ...], part: float, tap: float) -> Pieces:
    """Return parts of the outputs of each axis for which few products are with padding.

    Args:
        axes: the axes of a correlation.
        part: pairs of an output and a tap that take as long as one more part.
        tap: the same for a tap whose pixels are gathered alone.
    """

    def cost(some: Pieces) -> float:
        return some.pairs + some.count * (
            part + (tap * some.taps if some.is_gathered_by_taps else 0)
        )

    tries = [_pieces(axes, most) for most in (0, *MOST_CUTS)]
    return min(tries, key=cost)


# -- the stride phases of backprop_input -----------------------------------------------------------

Phase = tuple[Axis, slice, slice, slice]
"""The rules of a stride phase; its part of the source, of the result, and of the filters."""


def by_window(axis: ConvAxis) -> bool:
    """Return whether backprop_input processes an axis window by window, not by stride phases.

    This is possible if windows do not overlap.
    """
    step = axis.stride // gcd(axis.stride, axis.dilation)
    lone = step >= axis.filter and MANY_PHASES * axis.output < axis.filter
    return min(step, axis.filter) > MANY_PHASES and (axis.output == 1 or lone)


def phases(axis: ConvAxis) -> Iterable[Phase]:
    """Return the stride phases of an axis that have inputs and taps, the last of the taps first."""
    step = axis.stride // gcd(axis.stride, axis.dilation)
    if min(step, axis.filter) <= MANY_PHASES:
        return _few_phases(axis, step)
    if by_window(axis):
        return chain.from_iterable(_window(axis, output) for output in range(axis.output))
    return _every_phase(axis, step)


@lru_cache(maxsize=4096)
def _few_phases(axis: ConvAxis, step: int) -> tuple[Phase, ...]:
    return tuple(_every_phase(axis, step))


def _every_phase(axis: ConvAxis, step: int) -> Iterator[Phase]:
    for first in range(min(step, axis.filter)):
        inputs = axis.inputs_of_phase(first * axis.dilation % axis.stride)
        if not inputs:
            continue
        taps = range(first, axis.filter, step)
        offset, distance = axis.outputs_of_phase(inputs, taps)
        rule = Axis(len(inputs), len(taps), axis.output, 1, distance, offset)
        yield rule, ALL, slice(inputs.start, inputs.stop, inputs.step), _backwards(taps)


def _window(axis: ConvAxis, output: int) -> Iterator[Phase]:
    """Yield the phase of the inputs under one window; nothing if all of them are padding."""
    corner = output * axis.stride - axis.pad_before
    first = max(-(corner // axis.dilation), 0)
    last = min((axis.input - 1 - corner) // axis.dilation, axis.filter - 1)
    taps = range(first, last + 1)
    if not taps:
        return
    begin, end = (corner + tap * axis.dilation for tap in (first, last))
    rule = Axis(len(taps), len(taps), offset=1 - len(taps))
    pixels = slice(begin, end + 1, axis.dilation)
    yield rule, slice(output, output + 1), pixels, _backwards(taps)


def _backwards(taps: range) -> slice:
    return slice(taps[-1], taps.start - 1 if taps.start else None, -taps.step)


# -- blocks ----------------------------------------------------------------------------------------


def parts(extent: int, most: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``most`` elements of about equal length."""
    count = -(-extent // most)
    for number in range(count):
        yield slice(-(-extent * number // count), -(-extent * (number + 1) // count))


def boxes(extents: Sequence[int], most: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield every combination of ``parts`` of several extents, the last one's fastest."""
    if not extents:
        yield ()
        return
    for first in parts(extents[0], most[0]):
        for others in boxes(extents[1:], most[1:]):
            yield (first, *others)


def box_of(extents: Sequence[int], most: int) -> list[int]:
    """Return extents of a box of at most ``most`` elements, cut along outer axes first."""
    inner = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
    return [clamp(most // below, extent) for extent, below in zip(extents, inner, strict=True)]


def clamp(value: int, most: int) -> int:
    """Return the value, but not above ``most``, and at least 1."""
    return max(min(value, most), 1)


# -- blocks of loops -------------------------------------------------------------------------------

SHORT_RUN = 32
"""Channels in a row that take about as long to begin as to compute."""


def step(axis: Axis) -> int:
    """Return the distance of a phase's pixels: the stride, or the dilation for a single output."""
    return axis.dilation if axis.outputs == 1 else axis.stride


def extent(axis: Axis) -> int:
    """Return pixels of a stride phase of a block in planes."""
    return axis.outputs + max(axis.taps - 1, 0) * axis.dilation // step(axis)


def stride_phases(axis: Axis) -> int:
    """Return stride phases that the pixels of a block in planes are sorted into."""
    return min(axis.taps, step(axis) // gcd(step(axis), axis.dilation))


@dataclass(frozen=True)
class LoopBlocks:
    """Blocks of a correlation that loops compute one by one.

    Attributes:
        most: groups, images and outputs of a block at most.
        places: elements of a block, padding and places between rows included.
        count: blocks.
    """

    most: tuple[int, ...]
    places: int
    count: int


@lru_cache(maxsize=4096)
def loop_blocks(
    axes: tuple[Axis, ...],
    groups: int,
    images: int,
    most_images: int,
    pixel: tuple[int, int],
    most_elements: int,
    by_pixel: bool,
) -> LoopBlocks:
    """Return the blocks that fit with all inputs under their windows, and copy little twice.

    Adjacent blocks share inputs under both of their windows. With large windows, groups and images
    are divided instead of outputs.

    Args:
        axes: planes, rows and columns.
        groups, images: extents of the correlation.
        most_images: images of a block at most.
        pixel: elements of a place in the source and in the result, in each group.
        most_elements: elements of a block at most, if a single output has no more.
        by_pixel: whether pixels are rows of channels, not planes.
    """
    extents = (groups, images, *(axis.outputs for axis in axes))
    order = (1, 2, 3, 4, 0) if by_pixel else (0, 1, 2, 3, 4)

    def places(axis: Axis, most: int) -> tuple[int, int]:
        """Return an axis's elements in source and result, for parts of ``most`` outputs."""
        count = -(-axis.outputs // most)
        source, result = 0, 0
        for size in {-(-axis.outputs // count), axis.outputs // count}:
            part = axis.part(slice(0, size))
            if by_pixel:
                under, of = part.span, part.outputs
            else:
                of = extent(part)
                under = of * stride_phases(part)
            source, result = max(source, under), max(result, of)
        return source, result

    along = [places(axis, axis.outputs) for axis in axes]

    def taken(most: Sequence[int], along: Sequence[tuple[int, int]]) -> int:
        both = zip(pixel, zip(*along, strict=True), strict=True)
        return most[0] * most[1] * sum(n * prod(of) for n, of in both)

    def work(most: Sequence[int], along: Sequence[tuple[int, int]]) -> float:
        """Return the number of elements of all blocks together."""
        count = prod(-(-n // of) for n, of in zip(extents, most, strict=True))
        return count * taken(most, along) * (1 + SHORT_RUN / most[0] if by_pixel else 1)

    most = [groups, min(most_images, images), *extents[2:]]
    while (size := taken(most, along)) > most_elements and max(most) > 1:
        tries = []
        for at in order:
            if most[at] == 1:
                continue
            fewer = -(-most[at] // 2)
            some, below = list(most), list(along)
            if at < 2:
                some[at] = max(fewer, clamp(most[at] * most_elements // size, most[at] - 1))
            else:
                some[at] = fewer
                below[at - 2] = places(axes[at - 2], fewer)
            tries.append((work(some, below), some, below))
        _, most, along = min(tries, key=lambda one: one[0])
    count = prod(-(-n // of) for n, of in zip(extents, most, strict=True))
    return LoopBlocks(tuple(most), taken(most, along), count)
