"""Correlation of views, the common form of all passes on the CPU.

forward correlates x with w.  backprop_input correlates dy with the flipped w, once for each stride
phase of dx; all pixels of a phase use the same taps.  Both compute, in each group,

    result[n, k, o] = sum over c, t of source[n, c, o * stride + t * dilation + offset] * w[k, c, t]

for image n, filter k, output o, channel c and tap t.  Pixels outside the source are zero.
backprop_filter is the gradient of this sum with respect to w, if dy is the gradient of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.axis import (
    MANY_PHASES,
    Axis,
    Phase,
    boxes,
    clamp,
    forward_axis,
    phases,
    split_evenly,
    used_slices,
)
from cupyconv.cpu.choice import LEAST_PIXELS, PART_PRODUCTS, product_pieces
from cupyconv.cpu.views import accumulator_of, copy
from cupyconv.problem import ConvAxis, ConvProblem

ALL: Any = slice(None)


class Correlation(NamedTuple):
    """Correlation of array views.

    A filter gradient reads ``source`` and ``result``, and writes ``filters``.

    Attributes:
        axes: spatial axes, with sizes, stride, dilation and offset.
        source: array (G, C, N, *sizes).
        filters: array (G, K, C, *taps), with K filters and C channels per group.
        result: array (G, K, N, *outputs).
        accumulator: dtype of the sums.
        bias: array (G, K) added to the result; None for no bias.
        addend: array like the result, added to it; shares no memory with it.  None for no addend.
        activation: activation applied after bias and addend; None for no activation.
        conjugate: whether to conjugate ``filters``, or ``result`` for a filter gradient.
    """

    axes: tuple[Axis, ...]
    source: np.ndarray
    filters: np.ndarray
    result: np.ndarray
    accumulator: np.dtype
    bias: np.ndarray | None = None
    addend: np.ndarray | None = None
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
        """Filters per group, equal to the result's channels per group."""
        return self.result.shape[1]

    @property
    def channels(self) -> int:
        """Source channels per group."""
        return self.source.shape[1]

    @property
    def has_epilogue(self) -> bool:
        """Whether ``finish`` changes the sums."""
        return any(part is not None for part in (self.bias, self.addend, self.activation))

    def narrow(
        self,
        *,
        groups: slice = ALL,
        filters: slice = ALL,
        channels: slice = ALL,
        images: slice = ALL,
        outputs: Sequence[slice] = (),
        taps: Sequence[slice] = (),
    ) -> Correlation:
        """Return the correlation of these groups, filters, channels, images, outputs and taps."""
        axes, counts = self.axes, (self.groups, self.filter_count, self.channels, self.images)
        parts_of = (groups, filters, channels, images, *(outputs or [ALL] * len(axes)), *taps)
        extents = (*counts, *(axis.outputs for axis in axes), *(axis.taps for axis in axes))
        if all(part in (ALL, slice(0, n)) for part, n in zip(parts_of, extents, strict=False)):
            return self
        if outputs:
            axes = tuple(map(Axis.narrow, axes, outputs))
        if taps:
            axes = tuple(map(Axis.with_taps, axes, taps))
        of_result = (groups, filters, images, *outputs)
        return self._replace(
            axes=axes,
            source=self.source[groups, channels, images],
            filters=self.filters[(groups, filters, channels, *taps)],
            result=self.result[of_result],
            addend=None if self.addend is None else self.addend[of_result],
            bias=None if self.bias is None else self.bias[groups, filters],
        )

    def without_unused(self) -> Correlation:
        """Trim each axis to the outputs, taps and pixels that contribute to the result.

        If one axis becomes empty, all axes become empty.
        """
        used = used_slices(self.axes)
        if used is None:
            return self
        (outputs, taps, pixels), axes = used
        source = self.source[(ALL, ALL, ALL, *pixels)]
        return self.narrow(outputs=outputs, taps=taps)._replace(axes=axes, source=source)

    def unused(self) -> Iterator[Correlation]:
        """Yield the parts that ``without_unused`` leaves out, whose sums have no terms."""
        used = used_slices(self.axes)
        for at, outputs in enumerate(used[0][0] if used else ()):
            for outside in (slice(0, outputs.start), slice(outputs.stop, self.axes[at].outputs)):
                if outside.start < outside.stop:
                    extents = [slice(0, axis.outputs) for axis in self.axes]
                    extents[at] = outside
                    yield self.narrow(outputs=extents)

    def trimmed(self) -> Correlation:
        """Trim leading and trailing taps that read only padding."""
        return self.narrow(taps=[axis.reached() for axis in self.axes])

    def chunks(self, most_bytes: int, least_filters: int = 1) -> Iterator[Correlation]:
        """Divide groups and filters into parts whose weights take at most ``most_bytes``.

        Args:
            least_filters: a group with fewer filters is treated as if it had this many, so that a
                part has fewer groups.
        """
        window = max(prod(self.filters.shape[2:]), 1) * self.accumulator.itemsize
        filters = clamp(most_bytes // window, self.filter_count)
        groups = clamp(most_bytes // (window * max(filters, least_filters)), self.groups)
        for group in split_evenly(self.groups, groups):
            for part in split_evenly(self.filter_count, filters):
                yield self.narrow(groups=group, filters=part)

    def pieces(self, cuts: Sequence[Sequence[slice]] = ()) -> Iterator[Correlation]:
        """Divide the outputs and trim each part's taps, to avoid products with padding.

        Args:
            cuts: slices of each axis; by default those for a matrix product.
        """
        if not cuts:
            extents = self.images, self.groups, self.channels, self.filter_count
            cuts = product_pieces(self.axes, *extents).cuts
        if all(len(slices) == 1 for slices in cuts):
            yield self.trimmed()
            return
        for outputs in product(*cuts):
            yield self.narrow(outputs=outputs).trimmed()

    def divided(self, count: int, slower: int = 1) -> Iterator[Correlation]:
        """Divide images and outputs into up to ``count`` parts, fewer for a small correlation.

        The mean part has at least twice the pixels and products of a part that is worth its calls,
        since rounding may halve a part.

        Args:
            slower: time of a product, relative to a matrix product.
        """
        extents = [axis.outputs for axis in self.axes]
        pixels = self.images * prod(extents)
        products = pixels * self.filters.size * slower
        count = clamp(min(pixels // LEAST_PIXELS, products // PART_PRODUCTS) // 2, count)
        most = []
        for extent in (self.images, *extents):
            most.append(-(-extent // count))
            count //= -(-extent // most[-1])
        return self.boxes(self.groups, *most)

    def boxes(self, *most: int) -> Iterator[Correlation]:
        """Divide into parts with at most ``most`` groups, images and outputs along each axis."""
        extents = (self.groups, self.images, *(axis.outputs for axis in self.axes))
        for group, images, *outputs in boxes(extents, (*most, *extents[len(most) :])):
            yield self.narrow(groups=group, images=images, outputs=outputs)

    def finish_empty(self) -> None:
        """Write the results of sums that have no terms: the bias plus the addend, activated."""
        if not self.has_epilogue:
            self.result[...] = 0
            return
        if self.addend is not None:
            for box in self.boxes(1, 1):
                for filters in split_evenly(self.filter_count, 1):
                    plane = box.narrow(filters=filters)
                    plane.finish(np.zeros(plane.result.shape, self.accumulator))
            return
        border = np.zeros((*self.result.shape[:2], *[1] * (self.result.ndim - 2)), self.accumulator)
        if self.bias is not None:
            border += self.bias.reshape(border.shape)
        activate(border, self.activation)
        self.result[...] = border.astype(self.result.dtype)  # converts each value once

    def finish(self, sums: np.ndarray) -> None:
        """Add the bias and the addend, apply the activation and write the result.

        The sums have the result's shape and may be the result itself.
        """
        if self.bias is not None:
            sums += self.bias.reshape(*self.bias.shape, *[1] * (sums.ndim - 2))
        if self.addend is not None:
            sums += self.addend
        activate(sums, self.activation)
        if sums is not self.result:
            copy(self.result, sums)


class Selection(NamedTuple):
    """Part of a pass that is one correlation: a stride phase of backprop_input, or the whole pass.

    Attributes:
        axes: spatial axes of the correlation.
        source, filters, result: indices of its arrays in those of the pass.
    """

    axes: tuple[Axis, ...] = ()
    source: Any = ()
    filters: Any = ()
    result: Any = ()


WHOLE = Selection()
"""All of a pass, without axes."""


def correlation(
    problem: ConvProblem, pass_: str, activation: str | None = None, conjugate: bool = False
) -> Callable[..., Correlation]:
    """Return the function that makes the correlation of a pass from its arrays.

    The function takes x, w and y (or their gradients), the bias, the addend and a Selection.
    """
    batch, channel, *spatial = problem.data_axes
    order, groups, filter_axes = (channel, batch, *spatial), problem.groups, problem.filter_axes
    channels, filters = problem.C // groups, problem.K // groups
    x_shape = (groups, channels, problem.N, *problem.input_sizes)
    w_shape = (groups, filters, channels, *problem.filter_sizes)
    y_shape = (groups, filters, problem.N, *problem.output_sizes)
    swaps, accumulator = pass_ == "backprop_input", accumulator_of(problem.dtype)
    add_shape, new = (x_shape if swaps else y_shape), tuple.__new__

    def of(
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        bias: np.ndarray | None = None,
        add: np.ndarray | None = None,
        selection: Selection = WHOLE,
    ) -> Correlation:
        axes, of_source, of_filters, of_result = selection
        source, result = x.transpose(order).reshape(x_shape), y.transpose(order).reshape(y_shape)
        weights = w.transpose(filter_axes).reshape(w_shape)
        if swaps:
            source, weights, result = result, weights.swapaxes(1, 2), source
        if bias is not None:
            bias = bias.astype(accumulator).reshape(groups, -1)
        if add is not None:
            add = add.transpose(order).reshape(add_shape)[of_result]
        arrays = source[of_source], weights[of_filters], result[of_result]
        # Without a Python function of NamedTuple, which every call would enter.
        return new(Correlation, (axes, *arrays, accumulator, bias, add, activation, conjugate))

    return of


def with_three_axes(whole: Correlation) -> Correlation:
    """Extend a correlation to 3 spatial axes, with axes of extent 1 in front."""
    missing = 3 - len(whole.axes)
    extra = (ALL, ALL, ALL, *[None] * missing)
    return whole._replace(
        axes=(*[Axis()] * missing, *whole.axes),
        source=whole.source[extra],
        filters=whole.filters[extra],
        result=whole.result[extra],
        addend=None if whole.addend is None else whole.addend[extra],
    )


def selections(problem: ConvProblem, pass_: str) -> Iterable[Selection]:
    """Return the correlations of a pass: for backprop_input, one per stride phase with taps.

    The result is a tuple, or an iterator if there may be more than MANY_PHASES correlations.
    """
    if pass_ != "backprop_input":
        return (Selection(tuple(map(forward_axis, problem.axes))),)
    found = map(_selection, _combinations(problem.axes))
    count = prod(min(axis.stride, axis.filter) for axis in problem.axes)
    return tuple(found) if count <= MANY_PHASES else found


def _selection(phases_of_axes: tuple[Phase, ...]) -> Selection:
    axes, outputs, pixels, taps = zip(*phases_of_axes, strict=True)
    before = (ALL,) * 3
    return Selection(axes, (*before, *outputs), (*before, *taps), (*before, *pixels))


def _combinations(axes: Sequence[ConvAxis]) -> Iterator[tuple[Phase, ...]]:
    """Yield every combination of the axes' phases, one at a time, as there may be very many."""
    if not axes:
        yield ()
        return
    for phase in phases(axes[0]):
        for inner in _combinations(axes[1:]):
            yield (phase, *inner)


# -- blocks ----------------------------------------------------------------------------------------


def gather(target: np.ndarray, source: np.ndarray, axes: Sequence[Axis], first: int) -> None:
    """Copy the pixel that the first tap reads for each output, or zero outside the source.

    Args:
        target, source: arrays whose dimensions from ``first`` on belong to ``axes``; earlier
            dimensions are copied whole.
    """
    before = (ALL,) * first
    inside, read = zip(*(axis.inside(0) for axis in axes), strict=True)
    copy(target[before + inside], source[before + read])
    for at, (axis, part) in enumerate(zip(axes, inside, strict=True), first):
        if part.start > 0:
            target[(ALL,) * at + (slice(0, part.start),)] = 0
        if part.stop < axis.outputs:
            target[(ALL,) * at + (slice(part.stop, None),)] = 0
