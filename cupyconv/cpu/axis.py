"""Geometry of the correlations that the CPU computes, axis by axis.

The methods in cupyconv/cpu/ and the cost estimate in cupyconv/cpu/choice.py share this geometry, so
that the estimate divides a layer as the methods do.

Along an axis, a stride phase is the set of pixels of dx whose positions have the same remainder
modulo the stride.  All pixels of a phase use the same taps.  A block is a part of a correlation
that is computed at once and whose data fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise, product
from math import gcd, prod
from typing import NamedTuple

from cupyconv.problem import ConvAxis, count_pairs

ALL = slice(None)

Slices = tuple[slice, ...]
"""A slice of each axis."""

MANY_PHASES = 64
"""Number of stride phases above which they are not kept for the next call, and backprop_input may
compute dx window by window (hand-set)."""

READ_SHARE = 0.85
"""Share of (output, tap) pairs that read no padding, below which an axis is divided (hand-set)."""

MOST_CUTS = 16
"""Largest number of parts into which the outputs of an axis are divided (hand-set)."""

PART_CALLS = 20
"""Number of NumPy calls per block that is computed by a matrix product (rough)."""

TAP_CALLS = 4
"""Number of NumPy calls that gather the pixels of one tap, or add up its products (rough)."""


class _Fields(NamedTuple):
    outputs: int
    taps: int
    size: int
    stride: int
    dilation: int
    offset: int


class Axis(_Fields):
    """One spatial axis: output o and tap t read the source at o * stride + t * dilation + offset.

    Axes are tuples, which hash fast, because they are cache keys in every call.

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
        # The stride of a single output and the dilation of a single tap have no effect, but very
        # large values would overflow.
        if outputs == 1:
            stride = 1
        if taps == 1:
            dilation = 1
        return tuple.__new__(cls, (outputs, taps, size, stride, dilation, offset))

    def changed(self, **changes: int) -> Axis:
        """Return the axis with some attributes changed."""
        return Axis(**{**self._asdict(), **changes})

    def inside(self, tap: int) -> tuple[slice, slice]:
        """Return the outputs for which a tap is inside the source, and the pixels that it reads.

        Returns:
            (outputs, pixels): two slices of equal length.
        """
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

    def narrow(self, outputs: slice) -> Axis:
        """Return the axis restricted to these outputs."""
        if outputs == slice(0, self.outputs):
            return self
        _, taps, size, stride, dilation, offset = self
        count = outputs.stop - outputs.start
        return Axis(count, taps, size, stride, dilation, offset + outputs.start * stride)

    @property
    def span(self) -> int:
        """Number of positions from the first window's first tap to the last window's last tap."""
        return (self.outputs - 1) * self.stride + max(self.taps - 1, 0) * self.dilation + 1

    def pairs(self, taps: int) -> int:
        """Return how many pairs of an output and one of the first ``taps`` taps read a pixel."""
        low = -self.offset
        return count_pairs(self.outputs, taps, self.stride, self.dilation, low, low + self.size)

    def reached(self) -> slice:
        """Return a slice of taps; all taps outside the slice read only padding, in every window."""
        corner = self.offset + (self.outputs - 1) * self.stride
        return _indices_inside(corner, self.offset, self.size, self.dilation, self.taps)

    def with_taps(self, taps: slice) -> Axis:
        """Return the axis restricted to these taps."""
        if taps == slice(0, self.taps):
            return self
        outputs, _, size, stride, dilation, offset = self
        count = taps.stop - taps.start
        return Axis(outputs, count, size, stride, dilation, offset + taps.start * dilation)

    def used(self) -> tuple[slice, slice, slice]:
        """Return slices of outputs, taps and pixels that contain every product with a source pixel.

        All slices are empty if every product reads padding.
        """
        return _used(self)

    def without_unused(self) -> Axis:
        """Return the axis restricted to the outputs, taps and pixels of ``used``."""
        outputs, taps, pixels = self.used()
        axis = self.narrow(outputs).with_taps(taps)
        return axis.changed(size=pixels.stop - pixels.start, offset=axis.offset - pixels.start)

    def pixels(self) -> Axis:
        """Return the axis that copies the padded source: one tap, and ``span`` outputs."""
        return Axis(self.span, size=self.size, offset=self.offset)

    def cuts(self, share: float = READ_SHARE) -> list[slice]:
        """Divide the outputs if many products read padding; otherwise return one slice.

        The outputs of a slice have about the same taps inside the source.

        Args:
            share: smallest share of (output, tap) pairs without padding that is not divided.
        """
        edges = {0, self.outputs}
        if self.pairs(self.taps) < share * self.outputs * self.taps:
            taps = range(self.taps)[self.reached()]
            most = MOST_CUTS // 2
            for tap in (*taps[:: len(taps) // most + 1], *taps[-1:]):
                inside, _ = self.inside(tap)
                edges |= {inside.start, inside.stop}
            if len(taps) > most:
                edges |= set(range(0, self.outputs, -(-self.outputs // most)))
        ordered = sorted(edges)
        starts = ordered[: -1 : len(ordered) // MOST_CUTS + 1]
        return [slice(start, stop) for start, stop in pairwise([*starts, self.outputs])]


def forward_axis(axis: ConvAxis) -> Axis:
    """Return the axis of the correlation of forward and backprop_filter."""
    return Axis(axis.output, axis.filter, axis.input, axis.stride, axis.dilation, -axis.pad_before)


@lru_cache(maxsize=4096)
def _used(axis: Axis) -> tuple[slice, slice, slice]:
    if not axis.pairs(axis.taps):
        return slice(0, 0), slice(0, 0), slice(0, 0)
    outputs, taps = slice(0, axis.outputs), slice(0, axis.taps)
    while True:
        inner = axis.narrow(outputs).with_taps(taps)
        corner = inner.offset + (inner.taps - 1) * inner.dilation
        inside = _indices_inside(corner, inner.offset, inner.size, inner.stride, inner.outputs)
        outputs = slice(outputs.start + inside.start, outputs.start + inside.stop)
        inside = axis.narrow(outputs).with_taps(taps).reached()
        taps = slice(taps.start + inside.start, taps.start + inside.stop)
        trimmed = axis.narrow(outputs).with_taps(taps)
        if trimmed == inner:
            end = min(trimmed.offset + trimmed.span, axis.size)
            return outputs, taps, slice(max(trimmed.offset, 0), end)


@lru_cache(maxsize=4096)
def used_slices(
    axes: tuple[Axis, ...],
) -> tuple[tuple[Slices, Slices, Slices], tuple[Axis, ...]] | None:
    """Return what contributes to the results; None if all outputs, taps and pixels do.

    Returns:
        (slices, axes): the slices of outputs, taps and pixels of all axes, and the axes restricted
        to them.  If the slices of one axis are empty, the slices of all axes are empty.
    """
    parts_of = [axis.used() for axis in axes]
    if any(outputs.start == outputs.stop for outputs, _, _ in parts_of):
        nothing = (slice(0, 0),) * len(axes)
        inner = tuple(axis.changed(outputs=0, taps=0) for axis in axes)
        return (nothing, nothing, nothing), inner
    whole = [tuple(slice(0, n) for n in (axis.outputs, axis.taps, axis.size)) for axis in axes]
    if parts_of == whole:
        return None
    outputs, taps, pixels = zip(*parts_of, strict=True)
    return (outputs, taps, pixels), tuple(axis.without_unused() for axis in axes)


def _indices_inside(first: int, last: int, size: int, step: int, count: int) -> slice:
    """Return the range of all i < count with first + i * step >= 0 and last + i * step < size."""
    start = max(-(first // step), 0)
    stop = min((size - 1 - last) // step + 1, count)
    return slice(start, max(stop, start))


class Pieces(NamedTuple):
    """Division of a correlation's outputs into parts.

    A part is computed without the taps that read only padding in it.

    Attributes:
        cuts: for each axis, the slices into which its outputs are divided.
        pairs: number of computed (output, tap) pairs per image, in all parts.
        slow_pairs: number of pairs in long rows that take as long; short rows are slower.
        calls: number of calls of NumPy, if each part is one block.
        taps: number of taps in all parts.
        parts: number of parts that have taps.
        outputs: number of computed outputs per image, in parts that have taps.
        read: number of positions that the windows of all parts read per image and channel.
        padded: number of these positions in parts with padding.
        lines: number of rows of the positions in parts with padding.
    """

    cuts: tuple[tuple[slice, ...], ...]
    pairs: float
    slow_pairs: float
    calls: float
    taps: int
    parts: int
    outputs: float
    read: int
    padded: int
    lines: int


@lru_cache(maxsize=4096)
def pieces(
    axes: tuple[Axis, ...],
    call: float,
    part_calls: int = PART_CALLS,
    images: int = 1,
    rows: int = 1,
    share: float = READ_SHARE,
    tap: float = 0,
    row: int = 1,
) -> Pieces:
    """Divide the outputs if the saved products with padding cost more than the added calls.

    Args:
        axes: axes of a correlation.
        call: cost of a call of NumPy, relative to the cost of one (output, tap) pair.
        part_calls: number of calls per part.
        images: number of images.
        rows: number of outputs of all images that are computed together; the outputs of a part are
            rounded up to a multiple.
        share: smallest share of (output, tap) pairs without padding that is not divided.
        tap: cost of copying the filters of a tap, relative to the cost of one (output, tap) pair.
        row: number of outputs along the last axis below which a row takes as long as if it had
            this number.
    """
    either = (_divisions(axis, share) for axis in axes)
    tries = [_pieces(parts_of, part_calls, images, rows, row) for parts_of in product(*either)]
    return min(tries, key=lambda of: of.slow_pairs + call * of.calls + tap * of.taps)


class _AxisPart(NamedTuple):
    """Part of the outputs of an axis, with the taps that read a pixel in it.

    Attributes:
        cut: slice of the outputs.
        outputs, taps, span: as in Axis.
        is_padded: whether windows read padding.
    """

    cut: slice
    outputs: int
    taps: int
    span: int
    is_padded: bool


@lru_cache(maxsize=4096)
def _divisions(axis: Axis, share: float) -> tuple[tuple[_AxisPart, ...], ...]:
    """Return the undivided axis and, if many products read padding, its parts; see ``cuts``."""

    def part_of(cut: slice) -> _AxisPart:
        part = axis.narrow(cut)
        part = part.with_taps(part.reached())
        span = part.span
        is_padded = part.offset < 0 or part.offset + span > part.size
        return _AxisPart(cut, part.outputs, part.taps, span, is_padded)

    uncut, cuts = (part_of(slice(0, axis.outputs)),), axis.cuts(share)
    return (uncut, tuple(map(part_of, cuts))) if len(cuts) > 1 else (uncut,)


def _pieces(
    parts_of: Sequence[Sequence[_AxisPart]], part_calls: int, images: int, rows: int, row: int
) -> Pieces:
    """Return the division of a correlation, given the parts of each axis."""
    taps, outputs, span, count = 1.0, 1.0, 1.0, 1  # three means over the parts
    for along in parts_of:
        _, of_outputs, of_taps, spans, _ = zip(*along, strict=True)
        taps *= sum(of_taps) / len(along)
        outputs *= sum(of_outputs) / len(along)
        span *= sum(spans) / len(along)
        count *= len(along)
    pairs, slow_pairs, all_outputs = 0.0, 0.0, 0.0
    all_taps, busy, read, padded, padded_lines = 0, 0, 0, 0, 0
    for part in product(*parts_of):
        _, line, of_part, width, is_padded = part[-1]
        lines, above = images, 1
        for axis in part[:-1]:
            lines *= axis.outputs
            above *= axis.span
            of_part *= axis.taps
            is_padded |= axis.is_padded
        computed = -(-lines * line // rows) * rows / images
        pairs += computed * of_part
        all_outputs += computed if of_part else 0
        busy += of_part > 0
        read += above * width
        if is_padded:
            padded += above * width
            padded_lines += above
        slow_pairs += -(-lines * (-(-line // row) * row) // rows) * rows * of_part / images
        all_taps += of_part
    # If windows are far apart, the pixels of each tap are gathered separately.
    calls = part_calls + (TAP_CALLS * taps if outputs * taps < span and rows == 1 else 0)
    calls *= count
    cuts = tuple([tuple([one.cut for one in along]) for along in parts_of])
    return Pieces(
        cuts, pairs, slow_pairs, calls, all_taps, busy, all_outputs, read, padded, padded_lines
    )


# -- the stride phases of backprop_input -----------------------------------------------------------

Phase = tuple[Axis, slice, slice, slice]
"""Axis of the correlation that computes a stride phase, and its slices of dy, dx and the taps."""


def by_window(axis: ConvAxis) -> bool:
    """Return whether backprop_input computes dx window by window, not by stride phase.

    This is faster for many stride phases and few windows, if no pixel is in two windows.
    """
    step = axis.stride // gcd(axis.stride, axis.dilation)
    is_sparse = step >= axis.filter and MANY_PHASES * axis.output < axis.filter
    return min(step, axis.filter) > MANY_PHASES and (axis.output == 1 or is_sparse)


def phases(axis: ConvAxis) -> Iterable[Phase]:
    """Return the stride phases of an axis that have inputs and taps.

    If ``by_window(axis)`` holds, each window is a phase.  Phases have their taps in reverse order.
    """
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
    """Yield one phase, the inputs under a window; or nothing if the window is all padding."""
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


def split_evenly(extent: int, most: int) -> Iterator[slice]:
    """Yield consecutive slices of about equal length, each with at most ``most`` elements."""
    count = -(-extent // most)
    for number in range(count):
        yield slice(-(-extent * number // count), -(-extent * (number + 1) // count))


def inner_windows(axis: ConvAxis) -> slice:
    """Return the slice of the outputs whose windows contain no padding.

    Negative paddings are supported.
    """
    first = min(max(-(-axis.pad_before // axis.stride), 0), axis.output)
    stop = (axis.input + axis.pad_before - axis.effective_filter) // axis.stride + 1
    return slice(first, min(max(stop, first), axis.output))


def separate_taps(axis: ConvAxis) -> int:
    """Return the most consecutive taps with which no two windows read the same input."""
    return axis.filter if axis.output == 1 else (axis.stride - 1) // axis.dilation + 1


def boxes(extents: Sequence[int], most: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield all combinations of ``split_evenly`` of several extents; the last extent varies
    fastest."""
    if not extents:
        yield ()
        return
    for first in split_evenly(extents[0], most[0]):
        for inner in boxes(extents[1:], most[1:]):
            yield (first, *inner)


def box_of(extents: Sequence[int], most: int) -> list[int]:
    """Return the extents of a box of at most ``most`` elements, reduced along outer axes first."""
    inner = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
    return [clamp(most // below, extent) for extent, below in zip(extents, inner, strict=True)]


def clamp(value: int, most: int) -> int:
    """Limit the value to at most ``most``, and to at least 1."""
    return max(min(value, most), 1)


# -- blocks of loops -------------------------------------------------------------------------------

# The method ``loops`` sums either rows of channels or planes of pixels; see cupyconv/cpu/loops.py.
# Along an axis, a plane has the pixels of a block whose positions have the same remainder modulo
# ``step(axis)``.  These remainders are the stride phases of this section.

SHORT_RUN = 32
"""Number of channels whose sums take as long as starting the loop over them (hand-set)."""

LEAST_PLANE = 1 << 11
"""Smallest number of output pixels per block of planes; smaller images share a block (hand-set)."""


def step(axis: Axis) -> int:
    """Return the distance between pixels of a plane: the stride, or the dilation for one output."""
    return axis.dilation if axis.outputs == 1 else axis.stride


def extent(axis: Axis) -> int:
    """Return the extent of a plane along an axis, which is restricted to the outputs of a block."""
    return axis.outputs + max(axis.taps - 1, 0) * axis.dilation // step(axis)


def stride_phases(axis: Axis) -> int:
    """Return the number of planes along an axis: the stride phases that taps read."""
    apart = step(axis)
    return min(axis.taps, apart // gcd(apart, axis.dilation))


class LoopBlocks(NamedTuple):
    """Division of a correlation into blocks for the method ``loops``.

    Attributes:
        most: largest number of groups, of images and of outputs along each axis, per block.
        places: number of elements of the source and the result in a block, padding included.
        blocks: number of blocks.
    """

    most: tuple[int, ...]
    places: int
    blocks: int


@lru_cache(maxsize=4096)
def loop_blocks(
    axes: tuple[Axis, ...],
    images: int,
    groups: int,
    channels: int,
    filters: int,
    most_elements: int,
    by_pixel: bool,
    long_rows: bool = True,
) -> LoopBlocks:
    """Divide a correlation into blocks of limited size that read few inputs twice.

    Two adjacent blocks of an image both copy the inputs that windows of both blocks read.  With
    large windows, groups and images are therefore divided instead of outputs.

    Args:
        images, groups, channels, filters: numbers of images and groups, and of channels and
            filters per group.
        most_elements: largest number of elements per block; only a block with a single output may
            have more.
        by_pixel: whether to sum rows of channels, not planes.
        long_rows: whether a block should have many groups, which are a row.
    """
    extents = (groups, images, *(axis.outputs for axis in axes))

    def count(most: tuple[int, ...]) -> int:
        return prod([-(-n // of) for n, of in zip(extents, most, strict=True)])

    def places(most: tuple[int, ...]) -> int:
        source, result = 1, 1
        for axis, outputs in zip(axes, most[2:], strict=True):
            read, written = _part_extents(axis, outputs, by_pixel)
            source, result = source * read, result * written
        planes = most[0] * (channels * source + filters * result)
        return most[1] * (planes if by_pixel else planes + result)

    def work(most: tuple[int, ...]) -> float:
        """Return the number of elements in all blocks, times a factor for short rows."""
        is_slow = by_pixel and long_rows
        return count(most) * places(most) * (1 + SHORT_RUN / most[0] if is_slow else 1)

    most, order = extents, [*range(1, len(extents)), 0]
    if not long_rows:
        order.sort()
    if not by_pixel:
        most = (groups, min(-(-LEAST_PLANE // prod(extents[2:])), images), *extents[2:])
        order.sort()
    while (size := places(most)) > most_elements and max(most) > 1:
        tries = []
        for at in order:
            if most[at] > 1:
                fewer = -(-most[at] // 2)
                if at < 2:
                    fewer = max(fewer, clamp(most[at] * most_elements // size, most[at] - 1))
                tries.append((*most[:at], fewer, *most[at + 1 :]))
        most = min(tries, key=work)
    return LoopBlocks(most, places(most), count(most))


@lru_cache(maxsize=4096)
def _part_extents(axis: Axis, most: int, by_pixel: bool) -> tuple[int, int]:
    """Return the extents of the largest part of an axis, in the source and in the result.

    Args:
        most: largest number of outputs per part.
    """
    count = -(-axis.outputs // most)
    source, result = 0, 0
    for size in {-(-axis.outputs // count), axis.outputs // count}:
        part = axis.narrow(slice(0, size))
        if by_pixel:
            read, written = part.span, part.outputs
        else:
            written = extent(part)
            read = written * stride_phases(part)
        source, result = max(source, read), max(result, written)
    return source, result
