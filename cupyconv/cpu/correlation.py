"""What the passes have in common on the CPU: a correlation of views, with rules for each axis.

forward correlates x with w.  backprop_input correlates dy with the flipped w, once for each stride
phase of dx, whose pixels are under windows with the same taps.  Both are, in each group,

    result[n, k, o] = sum over c, t of source[n, c, o * stride + t * dilation + offset] * w[k, c, t]

where pixels outside the source are zero.  backprop_filter is the gradient of this sum with respect
to w, with dy in the place of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise, product
from math import gcd, prod
from typing import Any

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import accumulator_of, copy, filter_view
from cupyconv.planning.cpu import LEAST_PADDED, MANY_PHASES, PADDED_SHARE, by_window
from cupyconv.problem import ConvAxis, ConvProblem, count_pairs

ALL: Any = slice(None)

SUMS, LEAST_SUMMED, LEAST_PRODUCTS = 8, 512, 1 << 22
"""Sums that a filters' gradient is made of, about, and pixels and products of each."""

MOST_CUTS = 8
"""Parts that an axis is cut into at most, to leave out products with padding; and taps that are
asked where to cut, where there are more."""


@dataclass(frozen=True)
class Axis:
    """One spatial axis: output o and tap t read the source at o * stride + t * dilation + offset.

    Attributes:
        outputs, taps, size: extents of the result, of the filter and of the source.
    """

    outputs: int = 1
    taps: int = 1
    size: int = 1
    stride: int = 1
    dilation: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        # These have no meaning, and may be as large as an address.
        if self.outputs == 1 and self.stride != 1:
            object.__setattr__(self, "stride", 1)
        if self.taps == 1 and self.dilation != 1:
            object.__setattr__(self, "dilation", 1)

    def inside(self, tap: int) -> tuple[slice, slice]:
        """The outputs whose window has this tap inside the source, and what they read there."""
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
        """The axis with some of its outputs."""
        if outputs == slice(0, self.outputs):
            return self
        offset = self.offset + outputs.start * self.stride
        return replace(self, outputs=outputs.stop - outputs.start, offset=offset)

    @property
    def span(self) -> int:
        """Places under all windows, from the first to the last."""
        return (self.outputs - 1) * self.stride + max(self.taps - 1, 0) * self.dilation + 1

    def pairs(self, taps: int) -> int:
        """Pairs of an output and one of the first taps that is inside the source there."""
        low = -self.offset
        return count_pairs(self.outputs, taps, self.stride, self.dilation, low, low + self.size)

    def reached(self) -> slice:
        """The taps from the first to the last that any window may have inside the source.

        Between these all windows together reach the source, though they may step over it.
        """
        corner = self.offset + (self.outputs - 1) * self.stride
        start = max(-(corner // self.dilation), 0)
        stop = min((self.size - 1 - self.offset) // self.dilation + 1, self.taps)
        return slice(start, max(stop, start))

    def with_taps(self, taps: slice) -> Axis:
        """The axis with some of its taps."""
        if taps == slice(0, self.taps):
            return self
        offset = self.offset + taps.start * self.dilation
        return replace(self, taps=taps.stop - taps.start, offset=offset)

    def pixels(self) -> Axis:
        """The axis of a single tap that reads, one by one, all pixels under the windows."""
        return Axis(self.span, size=self.size, offset=self.offset)

    def cuts(self) -> Iterator[slice]:
        """All outputs; or if many products are with padding, parts with about the same taps."""
        edges = {0, self.outputs}
        if self.pairs(self.taps) < PADDED_SHARE * self.outputs * self.taps:
            taps = range(self.taps)[self.reached()]
            for tap in (*taps[:: len(taps) // MOST_CUTS + 1], *taps[-1:]):
                inside, _ = self.inside(tap)
                edges |= {inside.start, inside.stop}
        ordered = sorted(edges)
        some = ordered[: -1 : len(ordered) // MOST_CUTS + 1]
        for start, stop in pairwise([*some, self.outputs]):
            yield slice(start, stop)


@dataclass(frozen=True)
class Correlation:
    """A correlation of views of arrays.

    Attributes:
        axes: the rules of the spatial axes.
        source: (G, C, N, *sizes).
        filters: (G, K, C, *taps).
        result: (G, K, N, *outputs).
        accumulator: dtype to compute in.
        bias: (G, K), to be added to the result; None for no bias.
        activation: to be applied to the result after that.
        conjugate: whether the filters are conjugated before they are multiplied, or in the
            gradient of the filters what is in the place of the result.
    """

    axes: tuple[Axis, ...]
    source: np.ndarray
    filters: np.ndarray
    result: np.ndarray
    accumulator: np.dtype
    bias: np.ndarray | None = None
    activation: str | None = None
    conjugate: bool = False

    @property
    def images(self) -> int:
        return self.result.shape[2]

    @property
    def groups(self) -> int:
        return self.result.shape[0]

    @property
    def filter_count(self) -> int:
        """Filters of a group, which are the channels of its result."""
        return self.result.shape[1]

    @property
    def channels(self) -> int:
        """Channels of the source in a group."""
        return self.source.shape[1]

    def part(
        self,
        *,
        groups: slice = ALL,
        filters: slice = ALL,
        channels: slice = ALL,
        images: slice = ALL,
        outputs: Sequence[slice] = (),
        taps: Sequence[slice] = (),
    ) -> Correlation:
        """For some groups, filters, channels of the source, images, outputs and taps."""
        axes, counts = self.axes, (self.groups, self.filter_count, self.channels, self.images)
        parts_of = (groups, filters, channels, images, *(outputs or [ALL] * len(axes)), *taps)
        extents = (*counts, *(axis.outputs for axis in axes), *(axis.taps for axis in axes))
        if all(one in (ALL, slice(0, n)) for one, n in zip(parts_of, extents, strict=False)):
            return self
        if outputs:
            axes = tuple(map(Axis.part, axes, outputs))
        if taps:
            axes = tuple(map(Axis.with_taps, axes, taps))
        return replace(
            self,
            axes=axes,
            source=self.source[groups, channels, images],
            filters=self.filters[(groups, filters, channels, *taps)],
            result=self.result[(groups, filters, images, *outputs)],
            bias=None if self.bias is None else self.bias[groups, filters],
        )

    def trimmed(self) -> Correlation:
        """Without the leading and trailing taps that no window has inside."""
        return self.part(taps=[axis.reached() for axis in self.axes])

    def chunks(self, most_bytes: int, least_filters: int = 1) -> Iterator[Correlation]:
        """The groups and filters in parts whose weights take so many bytes at most.

        Args:
            least_filters: those that a group is counted as if it had at least.
        """
        window = max(prod(self.filters.shape[2:]), 1) * self.accumulator.itemsize
        filters = clamp(most_bytes // window, self.filter_count)
        groups = clamp(most_bytes // (window * max(filters, least_filters)), self.groups)
        for group in parts(self.groups, groups):
            for some in parts(self.filter_count, filters):
                yield self.part(groups=group, filters=some)

    def pieces(self) -> Iterator[Correlation]:
        """The correlation, cut along its axes where many products are with padding."""
        products = prod(axis.outputs * axis.taps for axis in self.axes)
        useful = prod(axis.pairs(axis.taps) for axis in self.axes)
        padded = (products - useful) * prod(self.result.shape[:3]) * self.channels
        if padded < LEAST_PADDED:
            yield self.trimmed()
            return
        for outputs in product(*(axis.cuts() for axis in self.axes)):
            yield self.part(outputs=outputs).trimmed()

    def divided(self, wanted: int) -> Iterator[Correlation]:
        """The images and rows in up to so many parts, if that leaves enough in each."""
        extents = [axis.outputs for axis in self.axes]
        pixels = self.images * prod(extents)
        products = pixels * self.filters.size
        wanted = clamp(min(pixels // LEAST_SUMMED, products // LEAST_PRODUCTS), wanted)
        most = []
        for extent in (self.images, *extents):
            most.append(-(-extent // wanted))
            wanted //= -(-extent // most[-1])
        return self.boxes(self.groups, *most)

    def boxes(self, *most: int) -> Iterator[Correlation]:
        """Parts of at most so many groups, images and outputs along each axis."""
        extents = (self.groups, self.images, *(axis.outputs for axis in self.axes))
        for group, images, *outputs in boxes(extents, (*most, *extents[len(most) :])):
            yield self.part(groups=group, images=images, outputs=outputs)

    def finish(self, sums: np.ndarray) -> None:
        """Add the bias to sums of the result's shape, activate them, and write the result.

        The sums may be the result itself.
        """
        if self.bias is not None:
            sums += self.bias.reshape(*self.bias.shape, *[1] * (1 + len(self.axes)))
        activate(sums, self.activation)
        if sums is not self.result:
            copy(self.result, sums)


def correlation(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
) -> Correlation:
    """That of forward; or of backprop_filter, with dw for w and dy for y."""
    accumulator = accumulator_of(problem.dtype)
    return Correlation(
        tuple(
            Axis(axis.output, axis.filter, axis.input, axis.stride, axis.dilation, -axis.pad_before)
            for axis in problem.axes
        ),
        _by_channel(problem, x),
        filter_view(problem, w),
        _by_channel(problem, y),
        accumulator,
        _by_group(problem, bias),
        activation,
    )


def input_correlations(
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    dx: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
) -> Iterator[Correlation]:
    """Those of backprop_input, one for each stride phase that has taps."""
    filters = filter_view(problem, w).swapaxes(1, 2)
    source, result = _by_channel(problem, dy), _by_channel(problem, dx)
    for phases in _combined(problem.axes):
        axes, outputs, pixels, taps = zip(*phases, strict=True)
        yield Correlation(
            axes,
            source[(ALL, ALL, ALL, *outputs)],
            filters[(ALL, ALL, ALL, *taps)],
            result[(ALL, ALL, ALL, *pixels)],
            accumulator_of(problem.dtype),
            _by_group(problem, bias),
            activation,
            problem.is_complex,
        )


def fill_unread(
    problem: ConvProblem, dx: np.ndarray, bias: np.ndarray | None, activation: str | None
) -> None:
    """Make all of dx what it is where no window reaches it, if there is any such place."""
    if not any(axis.unread_inputs for axis in problem.axes):
        return
    sums = np.zeros((1, problem.C, *[1] * problem.spatial_rank), accumulator_of(problem.dtype))
    if bias is not None:
        sums += bias.reshape(-1, *[1] * problem.spatial_rank)
    dx.transpose(problem.data_axes)[...] = activate(sums, activation)


def _by_channel(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """As a view (G, channels of a group, N, *spatial)."""
    batch, channels, *spatial = problem.data_axes
    ordered = array.transpose(channels, batch, *spatial)
    return ordered.reshape(problem.groups, len(ordered) // problem.groups, *ordered.shape[1:])


def _by_group(problem: ConvProblem, bias: np.ndarray | None) -> np.ndarray | None:
    if bias is None:
        return None
    return bias.astype(accumulator_of(problem.dtype)).reshape(problem.groups, -1)


_Phase = tuple[Axis, slice, slice, slice]
"""The rules of a stride phase; its part of the source, of the result, and of the filters."""


def _combined(axes: Sequence[ConvAxis]) -> Iterator[tuple[_Phase, ...]]:
    """The phases of the first axis with each of the others'; there may be too many for a list."""
    if not axes:
        yield ()
        return
    for phase in _phases(axes[0]):
        for others in _combined(axes[1:]):
            yield (phase, *others)


def _phases(axis: ConvAxis) -> Iterable[_Phase]:
    """The stride phases of an axis that have inputs and taps, the last of the taps first."""
    step = axis.stride // gcd(axis.stride, axis.dilation)
    if min(step, axis.filter) <= MANY_PHASES:
        return _few_phases(axis, step)
    if by_window(axis):
        return chain.from_iterable(_window(axis, output) for output in range(axis.output))
    return _every_phase(axis, step)


@lru_cache(maxsize=4096)
def _few_phases(axis: ConvAxis, step: int) -> tuple[_Phase, ...]:
    return tuple(_every_phase(axis, step))


def _every_phase(axis: ConvAxis, step: int) -> Iterator[_Phase]:
    for first in range(min(step, axis.filter)):
        inputs = axis.inputs_of_phase(first * axis.dilation % axis.stride)
        if not inputs:
            continue
        taps = range(first, axis.filter, step)
        offset, distance = axis.outputs_of_phase(inputs, taps)
        rule = Axis(len(inputs), len(taps), axis.output, 1, distance, offset)
        yield rule, ALL, slice(inputs.start, inputs.stop, inputs.step), _backwards(taps)


def _window(axis: ConvAxis, output: int) -> Iterator[_Phase]:
    """A phase that is the inputs under one window; none if that is all in the padding."""
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


def gather(target: np.ndarray, source: np.ndarray, axes: Sequence[Axis], first: int) -> None:
    """Copy what the first tap of each axis reads, and zero where that is outside the source.

    Args:
        axes: the rules of the axes from number ``first`` on; others are copied whole.
    """
    before = (ALL,) * first
    inside, read = zip(*(axis.inside(0) for axis in axes), strict=True)
    copy(target[before + inside], source[before + read])
    for at, (axis, some) in enumerate(zip(axes, inside, strict=True), first):
        if some.start > 0:
            target[(ALL,) * at + (slice(0, some.start),)] = 0
        if some.stop < axis.outputs:
            target[(ALL,) * at + (slice(some.stop, None),)] = 0


def parts(extent: int, most: int) -> Iterator[slice]:
    """Consecutive slices of at most ``most``, all about as long, the first one the longest."""
    count = -(-extent // most)
    for number in range(count):
        yield slice(-(-extent * number // count), -(-extent * (number + 1) // count))


def boxes(extents: Sequence[int], most: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Every combination of ``parts`` of several extents, the last one's fastest."""
    if not extents:
        yield ()
        return
    for first in parts(extents[0], most[0]):
        for others in boxes(extents[1:], most[1:]):
            yield (first, *others)


def box_of(extents: Sequence[int], most: int) -> list[int]:
    """The extents of a box of at most so many elements, cut along the outer ones first."""
    inner = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
    return [clamp(most // below, extent) for extent, below in zip(extents, inner, strict=True)]


def clamp(value: int, most: int) -> int:
    """The value, but not above ``most``, and at least 1."""
    return max(min(value, most), 1)
