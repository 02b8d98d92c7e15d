"""What the passes have in common on the CPU: a correlation of views, with rules for each axis.

forward correlates x with w.  backprop_input correlates dy with the flipped w, once for each stride
phase of dx, whose pixels are under windows with the same taps.  Both are, in each group,

    result[n, k, o] = sum over c, t of source[n, c, o * stride + t * dilation + offset] * w[k, c, t]

where pixels outside the source are zero.  backprop_filter is the gradient of this sum with respect
to w, with dy in the place of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import copy, copy_uncached, data_view, filter_view
from cupyconv.planning.cpu import PADDED_SHARE
from cupyconv.problem import ConvAxis, ConvProblem

ALL: Any = slice(None)

MOST_CUTS = 8
"""Parts that an axis is cut into at most, to leave out products with padding."""

CUT_AXES = 3
"""How many axes, the first ones, are cut."""


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

    def reached(self) -> slice:
        """The taps from the first to the last that any window has inside the source."""
        start, stop = 0, self.taps
        while start < stop and not self.inside(start)[0].stop:
            start += 1
        while start < stop and not self.inside(stop - 1)[0].stop:
            stop -= 1
        return slice(start, stop)

    def with_taps(self, taps: slice) -> Axis:
        """The axis with some of its taps."""
        if taps == slice(0, self.taps):
            return self
        offset = self.offset + taps.start * self.dilation
        return replace(self, taps=taps.stop - taps.start, offset=offset)

    def pixels(self) -> Axis:
        """The axis of a single tap that reads, one by one, all pixels under the windows."""
        last_tap = max(self.taps - 1, 0) * self.dilation
        span = (self.outputs - 1) * self.stride + last_tap + 1
        return Axis(span, size=self.size, offset=self.offset)

    def cuts(self) -> Iterator[slice]:
        """All outputs; or if many products are with padding, parts with about the same taps."""
        inside = [self.inside(tap)[0] for tap in range(self.taps)]
        useful = sum(part.stop - part.start for part in inside)
        edges = {0, self.outputs}
        if useful < PADDED_SHARE * self.outputs * self.taps:
            edges |= {part.start for part in inside} | {part.stop for part in inside}
        ordered = sorted(edges)
        some = ordered[: -1 : len(ordered) // MOST_CUTS + 1]
        for start, stop in pairwise([*some, self.outputs]):
            yield slice(start, stop)


@dataclass(frozen=True)
class Correlation:
    """A correlation of views of arrays.

    Attributes:
        axes: the rules of the spatial axes.
        source: (N, G, C, *sizes).
        filters: (G, K, C, *taps).
        result: (N, G, K, *outputs).
        accumulator: dtype to compute in.
        bias: (G, K), to be added to the result; None for no bias.
        activation: to be applied to the result after that.
    """

    axes: tuple[Axis, ...]
    source: np.ndarray
    filters: np.ndarray
    result: np.ndarray
    accumulator: np.dtype
    bias: np.ndarray | None = None
    activation: str | None = None

    @property
    def images(self) -> int:
        return self.result.shape[0]

    @property
    def groups(self) -> int:
        return self.result.shape[1]

    @property
    def filter_count(self) -> int:
        """Filters of a group, which are the channels of its result."""
        return self.result.shape[2]

    @property
    def channels(self) -> int:
        """Channels of the source in a group."""
        return self.source.shape[2]

    def part(
        self,
        *,
        images: slice = ALL,
        groups: slice = ALL,
        filters: slice = ALL,
        outputs: Sequence[slice] = (),
    ) -> Correlation:
        """The correlation for some images, groups, filters, and outputs of the first axes."""
        extents = (*self.result.shape[:3], *(axis.outputs for axis in self.axes))
        parts_of = (images, groups, filters, *outputs)
        if all(map(_is_whole, parts_of, extents)):
            return self
        cut = tuple(axis.part(some) for axis, some in zip(self.axes, outputs, strict=False))
        return replace(
            self,
            axes=cut + self.axes[len(cut) :],
            source=self.source[images, groups],
            filters=self.filters[groups, filters],
            result=self.result[(images, groups, filters, *outputs)],
            bias=None if self.bias is None else self.bias[groups, filters],
        )

    def trimmed(self) -> Correlation:
        """Without the leading and trailing taps of the first axes that no window has inside."""
        taps = tuple(axis.reached() for axis in self.axes[:CUT_AXES])
        if all(map(_is_whole, taps, (axis.taps for axis in self.axes))):
            return self
        axes = tuple(axis.with_taps(some) for axis, some in zip(self.axes, taps, strict=False))
        filters = self.filters[(ALL, ALL, ALL, *taps)]
        return replace(self, axes=axes + self.axes[CUT_AXES:], filters=filters)

    def pieces(self) -> Iterator[Correlation]:
        """The correlation, cut along the first axes where many products are with padding."""
        for outputs in product(*(axis.cuts() for axis in self.axes[:CUT_AXES])):
            yield self.part(outputs=outputs).trimmed()

    def with_axis(self, at: int) -> Correlation:
        """With one more spatial axis, of one pixel and one tap, before axis number ``at``."""
        added = (ALL,) * (3 + at) + (None,)
        return replace(
            self,
            axes=(*self.axes[:at], Axis(), *self.axes[at:]),
            source=self.source[added],
            filters=self.filters[added],
            result=self.result[added],
        )

    def finish(self, sums: np.ndarray) -> None:
        """Add the bias to sums of the result's shape, activate them, and write the result."""
        if self.bias is not None:
            sums += self.bias.reshape(*self.bias.shape, *[1] * len(self.axes))
        copy(self.result, activate(sums, self.activation))


def correlation(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
) -> Correlation:
    """That of forward; or of backprop_filter, with dw for w and dy for y."""
    accumulator = _accumulator(problem)
    if bias is not None:
        bias = bias.astype(accumulator).reshape(problem.groups, -1)
    return Correlation(
        tuple(
            Axis(axis.output, axis.filter, axis.input, axis.stride, axis.dilation, -axis.pad_before)
            for axis in problem.axes
        ),
        data_view(problem, x),
        filter_view(problem, w),
        data_view(problem, y),
        accumulator,
        bias,
        activation,
    )


def input_correlations(
    problem: ConvProblem, w: np.ndarray, dy: np.ndarray, dx: np.ndarray
) -> Iterator[Correlation]:
    """Those of backprop_input, one for each stride phase."""
    filters = filter_view(problem, w).swapaxes(1, 2)
    source, result = data_view(problem, dy), data_view(problem, dx)
    for phases in product(*(_phases(axis) for axis in problem.axes)):
        axes, pixels, taps = zip(*phases, strict=True)
        yield Correlation(
            axes,
            source,
            filters[(ALL, ALL, ALL, *taps)],
            result[(ALL, ALL, ALL, *pixels)],
            _accumulator(problem),
        )


def _phases(axis: ConvAxis) -> Iterator[tuple[Axis, slice, slice]]:
    """The stride phases of an axis: their rules, their inputs, and their taps, the last one first.

    Input h and tap r belong to output (h + pad_before - r * dilation) / stride.
    """
    for inputs, taps in axis.stride_phases:
        if not inputs:
            continue
        pixels = slice(inputs.start, inputs.stop, inputs.step)
        if not taps:
            yield Axis(len(inputs), 0, axis.output), pixels, slice(0, 0)
            continue
        offset = (inputs[0] + axis.pad_before - taps[-1] * axis.dilation) // axis.stride
        distance = taps.step * axis.dilation // axis.stride if len(taps) > 1 else 1
        flipped = slice(taps[-1], taps.start - 1 if taps.start else None, -taps.step)
        yield Axis(len(inputs), len(taps), axis.output, 1, distance, offset), pixels, flipped


def _accumulator(problem: ConvProblem) -> np.dtype:
    return np.dtype(np.float64 if problem.dtype == "float64" else np.float32)


def _is_whole(part: slice, extent: int) -> bool:
    return part == ALL or part == slice(0, extent)


# -- blocks ----------------------------------------------------------------------------------------


def gather(target: np.ndarray, source: np.ndarray, axes: dict[int, Axis]) -> None:
    """Copy what the first tap of each axis reads, and zero where that is outside the source.

    Args:
        axes: the rules, by the position of the axis in both arrays; others are copied whole.
    """
    to: list[slice] = [ALL] * target.ndim
    origin: list[slice] = [ALL] * target.ndim
    for position, axis in axes.items():
        to[position], origin[position] = axis.inside(0)
    copy_uncached(target[tuple(to)], source[tuple(origin)])
    for position, axis in axes.items():
        around = (ALL,) * position
        if to[position].start > 0:
            target[(*around, slice(0, to[position].start))] = 0
        if to[position].stop < axis.outputs:
            target[(*around, slice(to[position].stop, None))] = 0


def parts(extent: int, most: int) -> Iterator[slice]:
    """Consecutive slices of at most ``most``, all about as long."""
    count = -(-extent // most)
    for number in range(count):
        yield slice(extent * number // count, extent * (number + 1) // count)


def clamp(value: int, most: int) -> int:
    """The value, but not above ``most``, and at least 1."""
    return max(min(value, most), 1)
