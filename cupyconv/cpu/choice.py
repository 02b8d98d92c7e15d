"""Choice of the NumPy method of a pass, by a fixed cost rule.

    time = operations / RATE + elements / SPEED + calls * CALL

Here ``operations`` are those of the matrix products, ``elements`` are copied, added or multiplied
by NumPy's own loops, and ``calls`` are calls of NumPy.  The constants are nominal values for two
cores with AVX-512 at about 3.5 GHz.  The method therefore depends on whether Numba is installed,
but on nothing else of the machine, and every number of threads sums the same terms.

Each method has a module in cupyconv/cpu/:

- products: filters times gathered pixels (im2col); every configuration.
- windows: filters times gathered pixels of a small layer, in one product.
- scattered: filters times pixels; the products are then added up tap by tap (col2im).
- patches: input gradients of windows that do not overlap, as one product of pixels and taps.
- loops: sums over shifted pixels, for layers with few channels per group; without Numba, only for
  depthwise layers.

No method saves products by transforming its operands, as minimal filtering and FFT do.  Such
transforms add values that a result depends on to values that it does not depend on, so the rounding
errors of large values would reach neighbouring results.
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
"""Operations per second of a matrix product (nominal)."""

SPEED = 6e9
"""Elements that NumPy copies or adds per second on two cores (nominal)."""

CALL = 4e-6
"""Seconds of overhead per call of NumPy, including the slicing around it (nominal)."""

BLOCK_BYTES = 2 << 20
"""Bytes of a thread's buffer; a few buffers of this size fit the cache of a core."""

LEAST_ROWS = 64
"""Number of filters below which matrix products are slower."""

LEAST_PIXELS = 128
"""Smallest number of columns of a matrix product that pay for packing the filters again."""

LOOP_ELEMENTS = 32
"""Elements that NumPy copies in the time that it takes to start a contiguous row."""

TRANSPOSED = 2.5
"""Factor by which copying from channels first to channels last takes longer (measured)."""

TAP_CALLS = 4
"""Calls of NumPy per tap whose pixels are gathered, or whose products are added, separately."""

LEAST_PADDED = 1 << 23
"""Multiply-adds, with many filters, that take as long as one more part of a correlation."""

GATHERED = RATE / 2 / SPEED
"""Multiply-adds, with many filters, that take as long as gathering one element."""

TAP_PRODUCTS = TAP_CALLS * CALL * RATE / 2
"""Multiply-adds, with many filters, that take as long as the calls for one gathered tap."""

PART_GROUPS = 128
"""Number of groups whose products together take as long to start as one more part."""

PLANE_RATE = 65e9
"""Operations per second of compiled sums over planes, including positions between rows."""

LOOP_RATE, FOUR_FILTERS, UNCOMPILED = 50e9, 2.4, 0.3
"""Operations per second of sums over taps; the factor for four filters that share their pixels;
the factor without Numba, for long rows."""

LOOP_PARTS = 8
"""Smallest number of parts into which the method ``loops`` divides a large layer."""

MOST_PAIRS = 1 << 10
"""Channels times filters per group above which matrix products are faster than loops."""

SMALL_PLANE = 256
"""Output pixels of a depthwise layer up to which rows of channels are faster than planes."""

LEAST_ROW = 8
"""Smallest number of channels per pixel that pay for a loop over channels."""

GRADIENT_SHARE = 0.7
"""Fraction of LOOP_RATE for filter gradients with Numba without FOUR_FILTERS (measured)."""

LONG_ROW, LARGEST_ROWS = 1 << 9, 1 << 16
"""Elements of neighbouring pixels that are summed in one loop, and largest number of elements of
the weights repeated for these pixels, so that the weights stay in the cache."""

ROW_BEGINS = 400
"""Elements that a compiled loop computes in the time that it takes to start a row."""

LEAST_PLANE = 1 << 11
"""Output positions of a plane that pay for a loop; smaller images share a block."""

LEAST_FILTERS = 4 * LEAST_PIXELS
"""Number of filters whose weights take as much memory as the windows of a few pixels."""

SAMPLE = 128
"""Stride phases per axis that the rule examines; the others are assumed to be similar."""


@dataclass(frozen=True)
class Method:
    """Method to compute a pass, with its cost.

    Attributes:
        name: name of the method, as ``plan`` prints it.
        summary: short description of the computation.
        operations: operations of matrix products; slower operations are counted more than once.
        elements: elements that are copied or added.
        calls: calls of NumPy.
    """

    name: str
    summary: str
    operations: float
    elements: float
    calls: float

    @property
    def microseconds(self) -> float:
        """Time estimated by the rule, in µs."""
        return (self.operations / RATE + self.elements / SPEED + self.calls * CALL) * 1e6


@dataclass(frozen=True)
class _Pass:
    """Pass as one or several correlations of a source with filters, all of the same size.

    Attributes:
        channels, filters: channels and filters per group; exchanged in backprop_input.
        axes: spatial axes of each correlation, without unused parts.
        channels_last: whether the channels of a pixel are contiguous in memory.
        of_filters: whether the pass sums the filter gradient, not the result.
        phases: number of correlations, one per stride phase.
        itemsize: bytes of a sum.
        converted: whether the operands have another dtype than the sums.
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
        """Pixels of one correlation's result, in all images and groups."""
        return self.images * self.groups * prod(axis.outputs for axis in self.axes)

    @property
    def taps(self) -> int:
        return prod(axis.taps for axis in self.axes)

    @property
    def weights(self) -> int:
        """Elements of the filters of one correlation."""
        return self.groups * self.filters * self.channels * self.taps

    @property
    def operations(self) -> float:
        """Operations of one correlation, including products with padding."""
        return 2.0 * self.pixels * self.filters * self.channels * self.taps


def has_numba() -> bool:
    """Return whether Numba is installed and works with this NumPy.

    If NumPy is not imported, Numba is only searched for, so that planning alone stays fast.
    """
    return _numba_works() if "numpy" in sys.modules else find_spec("numba") is not None


@cache
def _numba_works() -> bool:
    try:
        numba = import_whole("numba")
    except Exception:  # Numba raises many types if NumPy is too new or a library is missing
        return False
    return not numba.config.DISABLE_JIT  # if it is set, loops run as plain Python


def methods(problem: ConvProblem, pass_: str) -> tuple[Method, ...]:
    """Return all methods that can compute a pass."""
    seen = _seen(problem, pass_)
    candidates = [_products(seen), *_windows(seen), *_loops(seen)]
    if not seen.of_filters:
        candidates += _scattered(seen)
    if pass_ == "backprop_input" and are_separate(problem.axes):
        candidates.append(_patches(problem, seen))
    return tuple(candidates)


def are_separate(axes: Sequence[ConvAxis]) -> bool:
    """Return whether no input is in two windows, so that dx needs no sums over windows."""
    return all(axis.output == 1 or axis.stride >= axis.effective_filter for axis in axes)


def product_pieces(
    axes: tuple[Axis, ...], images: int, groups: int, channels: int, filters: int
) -> Pieces:
    """Divide a correlation into parts with separate products, so that few products read padding."""
    elements = max(images * groups * channels, 1)
    pair = elements * (filters * _slower(filters) + GATHERED)
    return pieces(axes, LEAST_PADDED * (1 + groups / PART_GROUPS) / pair, TAP_PRODUCTS / pair)


def least_filters(pixels: int) -> int:
    """Return the number of filters that ``products`` assumes for groups with fewer filters.

    Args:
        pixels: output pixels of all images.
    """
    return clamp(4 * pixels, LEAST_FILTERS)


def most_loop_bytes(block_bytes: int, share: int, in_place: bool) -> int:
    """Return the largest number of bytes of a block of the method ``loops``.

    Args:
        block_bytes: bytes of a thread's buffer.
        share: desired bytes of the source and the result per part.
        in_place: whether the source is read and the result written without a copy.
    """
    most = 4 * block_bytes if in_place else block_bytes // 2
    return min(most, max(share, block_bytes // 4))


def most_loop_images(axes: Sequence[Axis], by_pixel: bool) -> int:
    """Return the largest number of images of a block of the method ``loops``."""
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
            windows = by_window(axis)
            count *= axis.output if windows else min(_step(axis), axis.filter, axis.input)
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
        # This method runs on one thread, but the rates are for two threads: count everything twice.
        how = "filters times all windows"
        yield Method("windows", how, 2 * operations, 2 * seen.phases * moved, calls)


def _patches(problem: ConvProblem, seen: _Pass) -> Method:
    pixels = seen.images * prod(problem.output_sizes)
    weights = problem.K * seen.filters * prod(problem.filter_sizes)
    gradients = pixels * weights // (seen.channels or 1)
    run = problem.filter_sizes[-1] if not seen.channels_last else seen.filters
    blocks = max(gradients * seen.itemsize * 4 / BLOCK_BYTES, seen.groups)
    return Method(
        "patches",
        "pixels times all taps of windows that do not overlap",
        2.0 * pixels * weights * _slower(pixels),
        gradients * (1 + LOOP_ELEMENTS / run) + pixels * problem.K + weights,
        blocks * 12 + 20,
    )


def _scattered(seen: _Pass) -> Iterator[Method]:
    rows, *columns = seen.axes
    wide = max(seen.filters * seen.taps // rows.taps, seen.channels)
    wide *= prod(axis.size for axis in columns)
    wide = max(wide, seen.filters * prod(axis.outputs for axis in columns))
    if seen.itemsize * seen.groups * wide > 2 * BLOCK_BYTES:
        return  # a single row, the smallest block, takes too much memory
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
        return  # a single pixel of one group takes too much memory
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
    if has_numba() and not by_pixel:  # positions between rows are summed too
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
    """Return the factor by which a matrix product with few rows is slower per operation."""
    return max(LEAST_ROWS / max(rows, 1), 1.0) ** 0.6
