"""Which method computes a pass with NumPy, by a written-down cost rule.

    time = operations / RATE + elements / SPEED + calls * CALL

with the operations of the matrix products, the elements that NumPy's own loops copy, add or
multiply, and the calls of NumPy.  The constants are nominal, those of two cores with AVX-512 at
about 3.5 GHz: every machine takes the same method, whatever it has but Numba, and so every thread
count adds up the same terms.

The methods, which cupyconv/cpu/ has a module each for:

- products: filters times gathered pixels (im2col); every configuration.
- windows: the same of a small layer, in one product.
- scattered: filters times pixels, then each tap's products are added up (col2im).
- loops: sums over shifted pixels, of layers of few channels in each group; without Numba of
  depthwise ones alone.

None of them saves products by transforming its operands, as minimal filtering and FFT do: sums of
what a result reads with what it does not leave the rounding of large values in their neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import gcd, prod

from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem

RATE = 230e9
"""Operations of a matrix product in a second."""

SPEED = 6e9
"""Elements that NumPy moves, or adds to others, in a second, on both cores."""

CALL = 4e-6
"""Seconds that a call of NumPy takes beside its work, with the slicing around it."""

BLOCK_BYTES = 2 << 20
"""The unit of a thread's buffers, a few of which stay in the cache of its core."""

LEAST_ROWS = 64
"""Filters below which matrix products are slower."""

LEAST_PIXELS = 128
"""Columns of a matrix product that are worth packing the filters once more."""

LOOP_ELEMENTS = 32
"""Elements that NumPy could have moved in the time that it takes to begin a row of neighbours."""

TRANSPOSED = 2.5
"""How many times as long elements take that are moved from channels first to channels last."""

PADDED_SHARE = 0.85
"""Share of products with pixels, not padding, below which it pays to leave out the others."""

LEAST_PADDED = 1 << 28
"""Products with padding that are left out only where there are so many: parts take time too."""

LOOP_RATE, FOUR_FILTERS, UNCOMPILED = 50e9, 2.4, 0.3
"""Operations of sums over taps in a second; how many times as many there are of four filters that
share their pixels, and without Numba, of long rows."""

MOST_PAIRS = 1 << 10
"""Channels times filters of a group, above which matrix products are faster than any loops."""

SMALL_PLANE = 256
"""Pixels of a depthwise layer's result up to which rows of channels are faster than planes."""

LEAST_ROW = 8
"""Channels of a pixel that are worth a loop."""

GRADIENT_SHARE = 0.7
"""Of that rate, for the gradient of fewer filters, with Numba."""

MANY_PHASES = 64
"""Stride phases, for every window, above which windows are taken one by one instead."""


@dataclass(frozen=True)
class Method:
    """One way to compute a pass, with what it takes.

    Attributes:
        name: as ``plan`` prints it.
        summary: how it computes, in a few words.
        operations: of matrix products, those of a lower rate counted more often.
        elements: that are copied or added.
        calls: of NumPy.
    """

    name: str
    summary: str
    operations: float
    elements: float
    calls: float

    @property
    def microseconds(self) -> float:
        """The rule's estimate."""
        return (self.operations / RATE + self.elements / SPEED + self.calls * CALL) * 1e6


@dataclass(frozen=True)
class _Axis:
    """A spatial axis as a pass sees it.

    Attributes:
        outputs, taps, size: extents of what is summed to, of the filter, and of what is read;
            in backprop_input the taps of a stride phase, rounded up, or of a window.
        useful: the share of the products that are not with padding.
    """

    outputs: int
    taps: int
    size: int
    stride: int
    dilation: int
    useful: float


@dataclass(frozen=True)
class _Pass:
    """A pass as a correlation of a source with filters.

    Attributes:
        channels, filters: of a group; in backprop_input exchanged.
        channels_last: whether they are neighbours in memory.
        of_filters: whether the filters' gradient is summed, not the result.
        phases: into how many correlations a stride divides it.
        itemsize: bytes of a sum.
    """

    images: int
    groups: int
    channels: int
    filters: int
    axes: tuple[_Axis, ...]
    channels_last: bool
    of_filters: bool
    phases: int
    itemsize: int

    @property
    def pixels(self) -> int:
        """Of the result, in all images and groups."""
        return self.images * self.groups * prod(axis.outputs for axis in self.axes)

    @property
    def taps(self) -> int:
        return prod(axis.taps for axis in self.axes)

    @property
    def weights(self) -> int:
        """Of all filters."""
        return self.groups * self.filters * self.channels * self.taps

    @property
    def short_runs(self) -> float:
        """How many times as long elements take, as few are neighbours when they are moved."""
        row = self.axes[-1]
        run = self.channels * row.taps if self.channels_last else row.outputs
        return 1 + LOOP_ELEMENTS / run

    @property
    def operations(self) -> float:
        """Of all windows, padding included."""
        return 2.0 * self.pixels * self.filters * self.channels * self.taps


def has_numba() -> bool:
    """Whether there is what compiles loops.

    It is imported to see whether it works with this NumPy, but not where NumPy is not: what only
    plans is not to wait for that.
    """
    return _numba_works() if "numpy" in sys.modules else find_spec("numba") is not None


@cache
def _numba_works() -> bool:
    try:
        numba = import_module("numba")
    except Exception:  # it raises many, where NumPy is too new for it or a library of it is missing
        return False
    return not numba.config.DISABLE_JIT  # in which case it runs loops as Python does


def methods(problem: ConvProblem, pass_: str) -> tuple[Method, ...]:
    """All methods that can compute a pass."""
    seen = _seen(problem, pass_)
    found = [_products(seen), *_windows(seen), *_loops(seen)]
    return tuple(found) if seen.of_filters else (*found, *_scattered(problem, seen))


def by_window(axis: ConvAxis) -> bool:
    """Whether backprop_input takes the windows of an axis one by one, not its stride phases.

    No input is under two of them, so that each is as good as a phase.
    """
    step = axis.stride // gcd(axis.stride, axis.dilation)
    lone = step >= axis.filter and MANY_PHASES * axis.output < axis.filter
    return min(step, axis.filter) > MANY_PHASES and (axis.output == 1 or lone)


# -- the methods' costs ----------------------------------------------------------------------------


def _seen(problem: ConvProblem, pass_: str) -> _Pass:
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    axes, phases = [], 1
    for axis in problem.axes:
        if pass_ == "backprop_input" and by_window(axis):
            phases *= axis.output
            taps = max(min(axis.filter, axis.pairs), 1)
            outputs = axis.output * taps
            useful = axis.pairs / (outputs * taps)
            axes.append(_Axis(outputs, taps, axis.output, 1, 1, useful))
        elif pass_ == "backprop_input":
            common = gcd(axis.stride, axis.dilation)
            phases *= min(axis.stride // common, axis.filter, axis.input)
            taps, dilation = -(-axis.filter * common // axis.stride), axis.dilation // common
            useful = min(axis.pairs / (axis.input * taps), 1.0)
            axes.append(_Axis(axis.input, taps, axis.output, 1, dilation, useful))
        else:
            useful = axis.pairs / (axis.output * axis.filter)
            extents = (axis.output, axis.filter, axis.input)
            axes.append(_Axis(*extents, axis.stride, axis.dilation, useful))
    if pass_ == "backprop_input":
        channels, filters = filters, channels
    channels_last, of_filters = problem.data_format.endswith("C"), pass_ == "backprop_filter"
    images = max(problem.N, 1)  # of no images, the work is that of one
    counts = images, problem.groups, channels, filters
    itemsize = max(ITEMSIZE[problem.dtype], 4)  # 16-bit types are summed in float32
    return _Pass(*counts, tuple(axes), channels_last, of_filters, phases, itemsize)


def _products(seen: _Pass) -> Method:
    share = _uncut_share(seen)
    gathered = seen.pixels * seen.channels * seen.taps * share
    if all(axis.taps == axis.stride == axis.useful == 1 for axis in seen.axes):
        gathered = 0  # nothing to gather
    blocks = 4 * gathered / BLOCK_BYTES
    return Method(
        "products",
        "filters times gathered pixels",
        seen.operations * share * _slower(seen.filters),
        gathered * seen.short_runs + 2 * seen.weights + seen.pixels * seen.filters,
        20 * blocks + 64 * seen.phases,
    )


def _windows(seen: _Pass) -> Iterator[Method]:
    spans = ((a.outputs - 1) * a.stride + (a.taps - 1) * a.dilation + 1 for a in seen.axes)
    padded = seen.images * seen.groups * seen.channels * prod(spans)
    gathered = seen.pixels * seen.channels * seen.taps
    made = padded + gathered + seen.weights + seen.pixels * seen.filters
    if seen.itemsize * made <= 2 * BLOCK_BYTES:
        operations = seen.operations * _slower(seen.filters)
        moved = padded + gathered * seen.short_runs + seen.pixels * seen.filters
        calls = 6 * seen.phases
        # The rates are those of two threads.
        yield Method("windows", "filters times all windows", 2 * operations, 2 * moved, calls)


def _scattered(problem: ConvProblem, seen: _Pass) -> Iterator[Method]:
    rows, *columns = seen.axes
    wide = max(seen.filters * seen.taps // rows.taps, seen.channels)
    wide *= prod(axis.size for axis in columns)
    wide = max(wide, seen.filters * prod(axis.outputs for axis in columns))
    if seen.itemsize * seen.groups * wide > 2 * BLOCK_BYTES:
        return  # a row, which is the least that is computed at a time, takes too much memory
    read = seen.images * seen.groups * min(rows.size, rows.outputs * rows.taps)
    read *= prod(axis.size for axis in columns)
    sums = seen.filters * prod(problem.filter_sizes)
    added = problem.useful_flops // (2 * seen.channels)
    run = 1 + LOOP_ELEMENTS / columns[-1].outputs if columns else 1
    yield Method(
        "scattered",
        "filters times pixels, added up by taps",
        2 * read * seen.channels * sums * _slower(seen.filters * seen.taps),
        3 * (added + seen.pixels * seen.filters) * run + seen.weights,
        4 * (4 * read * sums / BLOCK_BYTES + 1) * prod(problem.filter_sizes) + 48 * seen.phases,
    )


def _loops(seen: _Pass) -> Iterator[Method]:
    depthwise = seen.channels == seen.filters == 1
    if seen.channels * seen.filters > MOST_PAIRS or not (depthwise or has_numba()):
        return
    phases = prod(min(axis.stride, axis.taps) if axis.outputs > 1 else 1 for axis in seen.axes)
    small = prod(axis.outputs for axis in seen.axes) <= SMALL_PLANE
    rows = seen.groups >= LEAST_ROW and (seen.channels_last or small)
    by_pixel = depthwise and (rows or not has_numba())
    weights = seen.filters * seen.channels * seen.taps
    pixel = seen.taps * (seen.channels + seen.filters)
    if by_pixel:
        pixel = prod((axis.taps - 1) * axis.dilation + 1 for axis in seen.axes) + 1
    if seen.itemsize * max(pixel, weights) > BLOCK_BYTES // 2:
        return  # a group of a single pixel takes too much memory
    moved: float = seen.pixels * (phases * seen.channels + seen.filters)
    rate, operations = LOOP_RATE, seen.operations
    if by_pixel != seen.channels_last:
        moved *= TRANSPOSED
    if not has_numba():
        rate *= UNCOMPILED
        if not seen.of_filters:
            row = seen.axes[-1]
            run = seen.groups * (row.outputs if row.stride == 1 else 1)
            rate /= 1 + 3 * LOOP_ELEMENTS / run
    elif not by_pixel and seen.filters >= 4:
        rate *= FOUR_FILTERS
    elif seen.of_filters:
        rate *= GRADIENT_SHARE
    if has_numba() and not by_pixel:
        operations *= prod(
            1 + (axis.taps - 1) * axis.dilation / axis.stride / axis.outputs for axis in seen.axes
        )
    yield Method(
        "loops",
        "rows of channels, tap by tap" if by_pixel else "planes of pixels, tap by tap",
        RATE / rate * operations,
        moved + seen.weights,
        (20 if by_pixel else 16 + 4 * phases) * (8 * moved / BLOCK_BYTES + 3 * seen.phases),
    )


def _uncut_share(seen: _Pass) -> float:
    """The share of the products that is left where those with padding are left out."""
    padded = (1 - prod(axis.useful for axis in seen.axes)) * seen.operations / 2
    if padded / seen.phases < LEAST_PADDED:
        return 1
    return prod(axis.useful for axis in seen.axes if axis.useful < PADDED_SHARE)


def _slower(rows: int) -> float:
    """How many times as long a matrix product of few rows takes."""
    return max(LEAST_ROWS / max(rows, 1), 1.0) ** 0.6
