"""Choice of the NumPy method of a pass, by a fixed cost rule.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from math import gcd, prod

from cupyconv.cpu.axis import (
    Axis,
    Pieces,
    by_window,
    clamp,
    extent,
    loop_blocks,
    phases,
    pieces,
    stride_phases,
)
from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem
from cupyconv.signals import import_whole

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
"""Slowdown of elements that are copied from channels first to channels last (measured)."""

TAP_CALLS = 4
"""Calls of NumPy for each tap whose pixels are gathered, or whose products are added, alone."""

LEAST_PADDED = 1 << 23
"""Products with padding, of many filters, that take as long as one more part of a correlation."""

GATHERED = RATE / 2 / SPEED
"""Products of many filters that take as long as gathering an element."""

TAP_PRODUCTS = TAP_CALLS * CALL * RATE / 2
"""Products of many filters that take as long as the calls of a tap that is gathered alone."""

PART_GROUPS = 128
"""Groups whose small products take as long to begin as one more part."""

PLANE_RATE = 65e9
"""Operations of compiled sums over planes in a second, with the places between their rows."""

LOOP_RATE, FOUR_FILTERS, UNCOMPILED = 50e9, 2.4, 0.3
"""Operations of sums over taps in a second; how many times as many there are of four filters that
share their pixels, and without Numba, of long rows."""

LOOP_PARTS = 8
"""Parts of a layer, at least, that loops compute one by one."""

MOST_PAIRS = 1 << 10
"""Channels times filters of a group, above which matrix products are faster than any loops."""

SMALL_PLANE = 256
"""Pixels of a depthwise layer's result up to which rows of channels are faster than planes."""

LEAST_ROW = 8
"""Channels of a pixel that are worth a loop."""

GRADIENT_SHARE = 0.7
"""Fraction of that rate for the gradient of fewer filters, with Numba (measured)."""

LONG_ROW, LARGEST_ROWS = 1 << 9, 1 << 16
"""Elements of neighbouring pixels that are worth a loop, and of the weights of a row of pixels that
the cache has beside them."""

ROW_BEGINS = 400
"""Elements that a compiled loop computes in the time that it takes to begin a row."""

LEAST_PLANE = 1 << 11
"""Places that are worth a loop: of as many images as have them together."""

LEAST_FILTERS = 4 * LEAST_PIXELS
"""Filters whose weights take what the windows of a few pixels do."""

SAMPLE = 128
"""Stride phases, for each axis, that the rule looks at; others are like them."""


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
class _Pass:
    """A pass as correlations of a source with filters, all alike.

    Attributes:
        channels, filters: of a group; in backprop_input exchanged.
        axes: the spatial axes of each correlation, without what is unused.
        channels_last: whether they are neighbours in memory.
        of_filters: whether the filters' gradient is summed, not the result.
        phases: correlations, one for each stride phase.
        itemsize: bytes of a sum.
        converted: whether operands have another dtype than sums.
    """

    images: int
    groups: int
    channels: int
    filters: int
    axes: tuple[Axis, ...]
    channels_last: bool
    of_filters: bool
    phases: int
    itemsize: int
    converted: bool

    @property
    def pixels(self) -> int:
        """Pixels of a correlation's result, in all images and groups."""
        return self.images * self.groups * prod(axis.outputs for axis in self.axes)

    @property
    def taps(self) -> int:
        return prod(axis.taps for axis in self.axes)

    @property
    def weights(self) -> int:
        """Elements of a correlation's filters."""
        return self.groups * self.filters * self.channels * self.taps

    @property
    def operations(self) -> float:
        """Operations of a correlation, with padding."""
        return 2.0 * self.pixels * self.filters * self.channels * self.taps


def has_numba() -> bool:
    """Return whether Numba is installed and works with this NumPy.

    Numba is imported only if NumPy is: planning alone must stay fast.
    """
    return _numba_works() if "numpy" in sys.modules else find_spec("numba") is not None


@cache
def _numba_works() -> bool:
    try:
        numba = import_whole("numba")
    except Exception:  # it raises many, where NumPy is too new for it or a library of it is missing
        return False
    return not numba.config.DISABLE_JIT  # in which case it runs loops as Python does


def methods(problem: ConvProblem, pass_: str) -> tuple[Method, ...]:
    """Return all methods that can compute a pass."""
    seen = _seen(problem, pass_)
    found = [_products(seen), *_windows(seen), *_loops(seen)]
    return tuple(found) if seen.of_filters else (*found, *_scattered(seen))


def product_pieces(
    axes: tuple[Axis, ...], images: int, groups: int, channels: int, filters: int
) -> Pieces:
    """Return parts of a correlation for separate products, so that few are with padding."""
    elements = max(images * groups * channels, 1)
    pair = elements * (filters * _slower(filters) + GATHERED)
    return pieces(axes, LEAST_PADDED * (1 + groups / PART_GROUPS) / pair, TAP_PRODUCTS / pair)


def least_filters(pixels: int) -> int:
    """Return the number of filters per group that products count at least."""
    return clamp(4 * pixels, LEAST_FILTERS)


def most_loop_bytes(block_bytes: int, share: int, in_place: bool) -> int:
    """Return bytes of a block of loops.

    Args:
        block_bytes: the unit of a thread's buffers.
        share: bytes of the source and the result that a part should have.
        in_place: whether both are read and written where they are.
    """
    most = 4 * block_bytes if in_place else block_bytes // 2
    return min(most, max(share, block_bytes // 4))


def most_loop_images(axes: Sequence[Axis], by_pixel: bool) -> int:
    """Return images that a block of loops has at most."""
    return sys.maxsize if by_pixel else -(-LEAST_PLANE // prod(axis.outputs for axis in axes))


# -- the methods' costs ----------------------------------------------------------------------------


def _seen(problem: ConvProblem, pass_: str) -> _Pass:
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    axes, count = [], 1
    for axis in problem.axes:
        if pass_ == "backprop_input":
            some = [used_part(rule) for rule, *_ in islice(phases(axis), SAMPLE)] or [Axis()]
            outputs = max(rule.outputs for rule in some)
            axes.append(max(some, key=lambda rule: rule.taps).changed(outputs=outputs))
            of = axis.output if by_window(axis) else min(_step(axis), axis.filter, axis.input)
            count *= of
        else:
            rule = (axis.output, axis.filter, axis.input, axis.stride, axis.dilation)
            axes.append(used_part(Axis(*rule, -axis.pad_before)))
    if pass_ == "backprop_input":
        channels, filters = filters, channels
    channels_last, of_filters = problem.data_format.endswith("C"), pass_ == "backprop_filter"
    images = max(problem.N, 1)  # an empty batch is ranked like one image
    counts = images, problem.groups, channels, filters
    converted = ITEMSIZE[problem.dtype] < 4
    itemsize = max(ITEMSIZE[problem.dtype], 4)  # 16-bit types are summed in float32
    return _Pass(*counts, tuple(axes), channels_last, of_filters, count, itemsize, converted)


def _step(axis: ConvAxis) -> int:
    return axis.stride // gcd(axis.stride, axis.dilation)


def used_part(axis: Axis) -> Axis:
    """Return the axis without unused parts; at least one pixel with one tap."""
    used = axis.without_unused()
    return used if used.outputs else Axis()


def _products(seen: _Pass) -> Method:
    some = product_pieces(seen.axes, seen.images, seen.groups, seen.channels, seen.filters)
    taps = max(int(some.taps), 1)
    gathered = seen.images * seen.groups * seen.channels * some.pairs
    operations = 2.0 * gathered * seen.filters
    most_bytes = (4 if seen.of_filters else 8) * BLOCK_BYTES
    window = seen.channels * (seen.taps if seen.of_filters else taps) * seen.itemsize
    filters = clamp(most_bytes // window, seen.filters)
    least = least_filters(seen.pixels // seen.groups)
    groups = clamp(most_bytes // (window * max(filters, least)), seen.groups)
    chunks = -(-seen.filters // filters)
    window = groups * taps * seen.itemsize
    channels = clamp(2 * BLOCK_BYTES // (window * LEAST_PIXELS), seen.channels)
    column = groups * max(channels * taps, filters) * seen.itemsize
    blocks = max(seen.images * some.outputs * column / BLOCK_BYTES, 1)
    blocks *= chunks * -(-seen.groups // groups) * -(-seen.channels // channels)
    calls = some.count * blocks * (20 + (TAP_CALLS * taps if some.is_gathered_by_taps else 0))
    gathered *= chunks
    if all(axis.taps == axis.stride == 1 and axis.span <= axis.size for axis in seen.axes):
        gathered = 0  # nothing to gather
    return Method(
        "products",
        "filters times gathered pixels",
        seen.phases * operations * _slower(seen.filters),
        seen.phases
        * (gathered * _short_runs(seen) + 2 * seen.weights + seen.pixels * seen.filters),
        seen.phases * (44 + calls),
    )


def _short_runs(seen: _Pass) -> float:
    """Return the factor by which short contiguous rows slow down copies."""
    row = seen.axes[-1]
    run = seen.channels * row.taps if seen.channels_last else row.outputs
    return 1 + LOOP_ELEMENTS / run


def _windows(seen: _Pass) -> Iterator[Method]:
    padded = seen.images * seen.groups * seen.channels * prod(axis.span for axis in seen.axes)
    gathered = seen.pixels * seen.channels * seen.taps
    made = padded + gathered + seen.weights + seen.pixels * seen.filters
    if seen.itemsize * made <= 2 * BLOCK_BYTES:
        operations = seen.phases * seen.operations * _slower(seen.filters)
        moved = padded + gathered * _short_runs(seen) + seen.pixels * seen.filters
        calls = 6 * seen.phases
        # The rates are those of two threads.
        how = "filters times all windows"
        yield Method("windows", how, 2 * operations, 2 * seen.phases * moved, calls)


def _scattered(seen: _Pass) -> Iterator[Method]:
    rows, *columns = seen.axes
    wide = max(seen.filters * seen.taps // rows.taps, seen.channels)
    wide *= prod(axis.size for axis in columns)
    wide = max(wide, seen.filters * prod(axis.outputs for axis in columns))
    if seen.itemsize * seen.groups * wide > 2 * BLOCK_BYTES:
        return  # a row, which is the least that is computed at a time, takes too much memory
    read = seen.images * seen.groups * prod(axis.size for axis in seen.axes)
    sums = seen.filters * seen.taps
    added = seen.images * seen.groups * seen.filters
    added *= prod(axis.pairs(axis.taps) for axis in seen.axes)
    run = 1 + LOOP_ELEMENTS / columns[-1].outputs if columns else 1
    window = seen.channels * seen.taps * seen.itemsize
    chunks = max(seen.groups * seen.filters * window / (8 * BLOCK_BYTES), 1)
    blocks = chunks + read * max(sums, seen.channels) * seen.itemsize / BLOCK_BYTES
    yield Method(
        "scattered",
        "filters times pixels, added up by taps",
        seen.phases * 2 * read * seen.channels * sums * _slower(seen.filters * seen.taps),
        seen.phases
        * (3 * (added + seen.pixels * seen.filters) * run + 2 * read * sums + seen.weights),
        seen.phases * (TAP_CALLS * blocks * seen.taps + 48),
    )


def _loops(seen: _Pass) -> Iterator[Method]:
    depthwise = seen.channels == seen.filters == 1
    if seen.channels * seen.filters > MOST_PAIRS or not (depthwise or has_numba()):
        return
    small = prod(axis.outputs for axis in seen.axes) <= SMALL_PLANE
    rows = seen.groups >= LEAST_ROW and (seen.channels_last or small)
    by_pixel = depthwise and (rows or not has_numba())
    weights = seen.filters * seen.channels * seen.taps
    pixel = seen.taps * (seen.channels + seen.filters)
    if by_pixel:
        pixel = prod(axis.part(slice(0, 1)).span for axis in seen.axes) + 1
    if seen.itemsize * max(pixel, weights) > BLOCK_BYTES // 2:
        return  # a group of a single pixel takes too much memory
    in_place = by_pixel and seen.channels_last and not seen.converted
    pixels = seen.images * seen.groups * prod(axis.size for axis in seen.axes)
    share = (pixels * seen.channels + seen.pixels * seen.filters) * seen.itemsize // LOOP_PARTS
    axes = (*[Axis()] * (3 - len(seen.axes)), *seen.axes)
    blocks = loop_blocks(
        axes,
        seen.groups,
        seen.images,
        most_loop_images(axes, by_pixel),
        (seen.channels, seen.filters),
        most_loop_bytes(BLOCK_BYTES, share, in_place) // seen.itemsize,
        by_pixel,
    )
    moved: float = blocks.count * blocks.places
    if in_place and has_numba():
        moved = seen.pixels * 2
    rate, operations = LOOP_RATE, seen.operations
    if by_pixel != seen.channels_last:
        moved *= TRANSPOSED
    moved += blocks.count * blocks.most[0] * weights
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
    if has_numba() and by_pixel:
        together = min(max(blocks.most[0], min(LARGEST_ROWS // weights, LONG_ROW)), LONG_ROW)
        rate *= (1 + ROW_BEGINS / LONG_ROW) / (1 + ROW_BEGINS / together)
    if has_numba() and not by_pixel:  # places between rows are summed too
        rate *= PLANE_RATE / LOOP_RATE
        lengths = (extent(a.part(slice(0, n))) for a, n in zip(axes, blocks.most[2:], strict=True))
        places = blocks.count * blocks.most[0] * blocks.most[1] * prod(lengths)
        operations = 2.0 * places * weights
    gathers = 1 if by_pixel else prod(map(stride_phases, axes))
    yield Method(
        "loops",
        "rows of channels, tap by tap" if by_pixel else "planes of pixels, tap by tap",
        seen.phases * RATE / rate * operations,
        seen.phases * (moved + seen.weights),
        seen.phases * (20 if by_pixel else 16 + 4 * gathers) * (blocks.count + 2),
    )


def _slower(rows: int) -> float:
    """Return the slowdown of a matrix product with few rows."""
    return max(LEAST_ROWS / max(rows, 1), 1.0) ** 0.6
