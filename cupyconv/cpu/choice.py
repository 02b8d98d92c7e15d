"""Choice of the NumPy method of a pass, by a fixed cost rule.

    time = operations / RATE + elements / SPEED + calls * CALL

Here ``operations`` is the number of FLOPs of the matrix products, ``elements`` the number of array
elements that NumPy's own loops copy, add or multiply, and ``calls`` the number of calls of NumPy.
The constants are nominal values for two cores with AVX-512 at about 3.5 GHz, on every machine.  The
chosen method therefore depends on the layer and on whether Numba is installed, but not on the
processor or the number of threads.

Each method has a module in cupyconv/cpu/:

- products: filters times gathered pixels (im2col); supports every configuration.
- windows: filters times gathered pixels in a single product, for small layers.
- scattered: filters times pixels; the products are then added up tap by tap (col2im).
- patches: input gradients of windows that do not overlap, as one product of pixels and taps.
- loops: sums over shifted pixels, for layers with few channels per group; without Numba, only for
  depthwise layers.

No method transforms its operands to save products, as Winograd's minimal filtering and the FFT do.
A transform adds inputs of different results to each other, so the rounding error of a large input
would reach results that do not depend on this input.
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
"""FLOP/s of a matrix product (nominal)."""

SPEED = 6e9
"""Elements that NumPy copies or adds per second on two cores (nominal)."""

CALL = 4e-6
"""Seconds of overhead per call of NumPy, including the slicing around it (nominal)."""

BLOCK_BYTES = 2 << 20
"""Bytes of a thread's buffer; a few buffers of this size fit the cache of a core (chosen)."""

LEAST_ROWS = 64
"""Rows of a matrix product (filters) below which a FLOP takes longer (nominal)."""

LEAST_PIXELS = 128
"""Smallest number of columns (pixels) of a fast matrix product (nominal)."""

LOOP_ELEMENTS = 32
"""Elements that NumPy copies in the time that it takes to start a contiguous row (nominal)."""

TRANSPOSED = 2.5
"""Factor by which copies between channels first and channels last are slower (measured)."""

TAP_CALLS = 4
"""Calls of NumPy that gather the pixels of a single tap, or that add up its products (nominal)."""

LEAST_PADDED = 1 << 23
"""Cost of one more part of a correlation, in multiply-adds of a fast matrix product (nominal)."""

GATHERED = RATE / 2 / SPEED
"""Cost of gathering one element, in multiply-adds of a fast matrix product."""

TAP_PRODUCTS = TAP_CALLS * CALL * RATE / 2
"""Cost of the calls that gather one tap, in multiply-adds of a fast matrix product."""

PART_GROUPS = 128
"""Groups whose matrix products together cost as much to start as LEAST_PADDED (nominal)."""

PLANE_RATE = 65e9
"""FLOP/s of compiled loops over planes, counting the positions between rows (nominal)."""

LOOP_RATE = 50e9
"""FLOP/s of compiled loops over rows of channels (nominal)."""

FOUR_FILTERS = 2.4
"""Factor on LOOP_RATE for four or more filters, which share the loaded pixels (nominal)."""

UNCOMPILED = 0.3
"""Factor on LOOP_RATE without Numba, for long rows (nominal)."""

LOOP_PARTS = 8
"""Smallest number of parts into which the method ``loops`` divides a large layer (chosen)."""

MOST_PAIRS = 1 << 10
"""Channels times filters of a group above which matrix products beat loops (chosen)."""

SMALL_PLANE = 256
"""Output pixels per image up to which loops over channels beat loops over planes (chosen)."""

LEAST_ROW = 8
"""Smallest number of channels per pixel for which a loop over channels is fast (chosen)."""

GRADIENT_SHARE = 0.7
"""Factor on LOOP_RATE for filter gradients with Numba and fewer than four filters (measured)."""

LONG_ROW = 1 << 9
"""Elements that one inner loop sums: the channels of one or several adjacent pixels (chosen)."""

LARGEST_ROWS = 1 << 16
"""Largest number of weights, repeated for the pixels of one loop, that stay in the cache."""

ROW_BEGINS = 400
"""Elements that a compiled loop computes in the time that it takes to start a row (nominal)."""

LEAST_PLANE = 1 << 11
"""Smallest number of output pixels per block; smaller images share a block (chosen)."""

LEAST_FILTERS = 4 * LEAST_PIXELS
"""Largest result of ``least_filters``, in filters per group."""

SAMPLE = 128
"""Stride phases per axis that the estimate examines; the others are assumed to be similar."""


@dataclass(frozen=True)
class Method:
    """Method to compute a pass, with its cost.

    Attributes:
        name: name of the method, as ``plan`` prints it.
        summary: short description of the computation.
        operations: FLOPs of the matrix products, multiplied by a factor where they are slower.
        elements: array elements that are copied or added.
        calls: number of calls of NumPy.
    """

    name: str
    summary: str
    operations: float
    elements: float
    calls: float

    @property
    def microseconds(self) -> float:
        """Estimated time in µs."""
        return (self.operations / RATE + self.elements / SPEED + self.calls * CALL) * 1e6


@dataclass(frozen=True)
class _Pass:
    """Pass as one or several correlations of a source with filters, modelled as equal in size.

    Attributes:
        channels, filters: channels and filters per group; exchanged in backprop_input.
        axes: spatial axes of each correlation, without unused parts.
        channels_last: whether the channels of a pixel are contiguous in memory.
        of_filters: whether the pass is backprop_filter.
        phases: number of correlations, one per stride phase.
        itemsize: bytes of an element of the sums.
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
        """Weights in the filters of one correlation, in all groups."""
        return self.groups * self.filters * self.channels * self.taps

    @property
    def operations(self) -> float:
        """FLOPs of one correlation, including products with padding."""
        return 2.0 * self.pixels * self.filters * self.channels * self.taps


def has_numba() -> bool:
    """Return whether Numba is installed and works with this NumPy.

    Before NumPy is imported, Numba is only searched for and not imported, so that planning is fast.
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
    work = _correlations_of(problem, pass_)
    candidates = [_products(work), *_windows(work), *_loops(work)]
    if not work.of_filters:
        candidates += _scattered(work)
    if pass_ == "backprop_input" and are_separate(problem.axes):
        candidates.append(_patches(problem, work))
    return tuple(candidates)


def are_separate(axes: Sequence[ConvAxis]) -> bool:
    """Return whether no input pixel is in two windows, so that dx needs no sums over windows."""
    return all(axis.output == 1 or axis.stride >= axis.effective_filter for axis in axes)


def product_pieces(
    axes: tuple[Axis, ...], images: int, groups: int, channels: int, filters: int
) -> Pieces:
    """Divide a correlation's outputs into parts, so that few products read padding."""
    elements = max(images * groups * channels, 1)
    pair = elements * (filters * _slower(filters) + GATHERED)
    return pieces(axes, LEAST_PADDED * (1 + groups / PART_GROUPS) / pair, TAP_PRODUCTS / pair)


def least_filters(pixels: int) -> int:
    """Return the argument ``least_filters`` of ``Correlation.chunks`` for the method ``products``.

    Args:
        pixels: output pixels of all images.
    """
    return clamp(4 * pixels, LEAST_FILTERS)


def most_loop_bytes(block_bytes: int, share: int, in_place: bool) -> int:
    """Return the largest number of bytes of a block of the method ``loops``.

    Args:
        block_bytes: bytes of a thread's buffer.
        share: bytes of the source and the result, divided by the desired number of parts.
        in_place: whether the source is read and the result written without a copy.
    """
    most = 4 * block_bytes if in_place else block_bytes // 2
    return min(most, max(share, block_bytes // 4))


def most_loop_images(axes: Sequence[Axis], by_pixel: bool) -> int:
    """Return the largest number of images of a block of the method ``loops``.

    Args:
        by_pixel: whether the method sums rows of channels; then the number is not limited.
    """
    return sys.maxsize if by_pixel else -(-LEAST_PLANE // prod(axis.outputs for axis in axes))


# -- the methods' costs ----------------------------------------------------------------------------


def _correlations_of(problem: ConvProblem, pass_: str) -> _Pass:
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    axes, count = [], 1
    for axis in problem.axes:
        if pass_ == "backprop_input":
            rules = [used_part(rule) for rule, *_ in islice(phases(axis), SAMPLE)] or [Axis()]
            outputs = max(rule.outputs for rule in rules)
            axes.append(max(rules, key=lambda rule: rule.taps).changed(outputs=outputs))
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
    """Return ``axis.without_unused()``; if it is empty, return one output with one tap."""
    used = axis.without_unused()
    return used if used.outputs else Axis()


def _products(work: _Pass) -> Method:
    division = product_pieces(work.axes, work.images, work.groups, work.channels, work.filters)
    taps = max(int(division.taps), 1)
    gathered = work.images * work.groups * work.channels * division.pairs
    operations = 2.0 * gathered * work.filters
    most_bytes = (4 if work.of_filters else 8) * BLOCK_BYTES
    window = work.channels * (work.taps if work.of_filters else taps) * work.itemsize
    filters = clamp(most_bytes // window, work.filters)
    least = least_filters(work.pixels // work.groups)
    groups = clamp(most_bytes // (window * max(filters, least)), work.groups)
    chunks = -(-work.filters // filters)
    window = groups * taps * work.itemsize
    channels = clamp(2 * BLOCK_BYTES // (window * LEAST_PIXELS), work.channels)
    column = groups * max(channels * taps, filters) * work.itemsize
    blocks = max(work.images * division.outputs * column / BLOCK_BYTES, 1)
    blocks *= chunks * -(-work.groups // groups) * -(-work.channels // channels)
    calls_of_taps = TAP_CALLS * taps if division.is_gathered_by_taps else 0
    calls = division.count * blocks * (20 + calls_of_taps)
    gathered *= chunks
    if all(axis.taps == axis.stride == 1 and axis.span <= axis.size for axis in work.axes):
        gathered = 0  # nothing to gather
    return Method(
        "products",
        "filters times gathered pixels",
        work.phases * operations * _slower(work.filters),
        work.phases
        * (gathered * _short_runs(work) + 2 * work.weights + work.pixels * work.filters),
        work.phases * (44 + calls),
    )


def _short_runs(work: _Pass) -> float:
    """Return the factor by which short contiguous rows slow down copies."""
    row = work.axes[-1]
    run = work.channels * row.taps if work.channels_last else row.outputs
    return 1 + LOOP_ELEMENTS / run


def _windows(work: _Pass) -> Iterator[Method]:
    padded = work.images * work.groups * work.channels * prod(axis.span for axis in work.axes)
    gathered = work.pixels * work.channels * work.taps
    elements = padded + gathered + work.weights + work.pixels * work.filters
    if work.itemsize * elements <= 2 * BLOCK_BYTES:
        operations = work.phases * work.operations * _slower(work.filters)
        moved = padded + gathered * _short_runs(work) + work.pixels * work.filters
        calls = 6 * work.phases
        # This method runs on one thread, but the rates are for two threads: count the work twice.
        how = "filters times all windows"
        yield Method("windows", how, 2 * operations, 2 * work.phases * moved, calls)


def _patches(problem: ConvProblem, work: _Pass) -> Method:
    pixels = work.images * prod(problem.output_sizes)
    weights = problem.K * work.filters * prod(problem.filter_sizes)
    gradients = pixels * weights // (work.channels or 1)
    run = problem.filter_sizes[-1] if not work.channels_last else work.filters
    blocks = max(gradients * work.itemsize * 4 / BLOCK_BYTES, work.groups)
    return Method(
        "patches",
        "pixels times all taps of windows that do not overlap",
        2.0 * pixels * weights * _slower(pixels),
        gradients * (1 + LOOP_ELEMENTS / run) + pixels * problem.K + weights,
        blocks * 12 + 20,
    )


def _scattered(work: _Pass) -> Iterator[Method]:
    rows, *columns = work.axes
    wide = max(work.filters * work.taps // rows.taps, work.channels)
    wide *= prod(axis.size for axis in columns)
    wide = max(wide, work.filters * prod(axis.outputs for axis in columns))
    if work.itemsize * work.groups * wide > 2 * BLOCK_BYTES:
        return  # a single row, the smallest block, takes too much memory
    read = work.images * work.groups * prod(axis.size for axis in work.axes)
    sums = work.filters * work.taps
    added = work.images * work.groups * work.filters
    added *= prod(axis.pairs(axis.taps) for axis in work.axes)
    run = 1 + LOOP_ELEMENTS / columns[-1].outputs if columns else 1
    window = work.channels * work.taps * work.itemsize
    chunks = max(work.groups * work.filters * window / (8 * BLOCK_BYTES), 1)
    blocks = chunks + read * max(sums, work.channels) * work.itemsize / BLOCK_BYTES
    yield Method(
        "scattered",
        "filters times pixels, added up by taps",
        work.phases * 2 * read * work.channels * sums * _slower(work.filters * work.taps),
        work.phases
        * (3 * (added + work.pixels * work.filters) * run + 2 * read * sums + work.weights),
        work.phases * (TAP_CALLS * blocks * work.taps + 48),
    )


def _loops(work: _Pass) -> Iterator[Method]:
    depthwise = work.channels == work.filters == 1
    if work.channels * work.filters > MOST_PAIRS or not (depthwise or has_numba()):
        return
    small = prod(axis.outputs for axis in work.axes) <= SMALL_PLANE
    rows = work.groups >= LEAST_ROW and (work.channels_last or small)
    by_pixel = depthwise and (rows or not has_numba())
    weights = work.filters * work.channels * work.taps
    pixel = work.taps * (work.channels + work.filters)
    if by_pixel:
        pixel = prod(axis.part(slice(0, 1)).span for axis in work.axes) + 1
    if work.itemsize * max(pixel, weights) > BLOCK_BYTES // 2:
        return  # a single pixel of one group takes too much memory
    in_place = by_pixel and work.channels_last and not work.converted
    pixels = work.images * work.groups * prod(axis.size for axis in work.axes)
    share = (pixels * work.channels + work.pixels * work.filters) * work.itemsize // LOOP_PARTS
    axes = (*[Axis()] * (3 - len(work.axes)), *work.axes)
    blocks = loop_blocks(
        axes,
        work.groups,
        work.images,
        most_loop_images(axes, by_pixel),
        (work.channels, work.filters),
        most_loop_bytes(BLOCK_BYTES, share, in_place) // work.itemsize,
        by_pixel,
    )
    moved: float = blocks.count * blocks.places
    if in_place and has_numba():
        moved = work.pixels * 2
    rate, operations = LOOP_RATE, work.operations
    if by_pixel != work.channels_last:
        moved *= TRANSPOSED
    moved += blocks.count * blocks.most[0] * weights
    if not has_numba():
        rate *= UNCOMPILED
        if not work.of_filters:
            row = work.axes[-1]
            run = work.groups * (row.outputs if row.stride == 1 else 1)
            rate /= 1 + 3 * LOOP_ELEMENTS / run
    elif not by_pixel and work.filters >= 4:
        rate *= FOUR_FILTERS
    elif work.of_filters:
        rate *= GRADIENT_SHARE
    if has_numba() and by_pixel:
        together = min(max(blocks.most[0], min(LARGEST_ROWS // weights, LONG_ROW)), LONG_ROW)
        rate *= (1 + ROW_BEGINS / LONG_ROW) / (1 + ROW_BEGINS / together)
    if has_numba() and not by_pixel:  # the loops also sum positions between rows
        rate *= PLANE_RATE / LOOP_RATE
        lengths = (extent(a.part(slice(0, n))) for a, n in zip(axes, blocks.most[2:], strict=True))
        places = blocks.count * blocks.most[0] * blocks.most[1] * prod(lengths)
        operations = 2.0 * places * weights
    gathers = 1 if by_pixel else prod(map(stride_phases, axes))
    yield Method(
        "loops",
        "rows of channels, tap by tap" if by_pixel else "planes of pixels, tap by tap",
        work.phases * RATE / rate * operations,
        work.phases * (moved + work.weights),
        work.phases * (20 if by_pixel else 16 + 4 * gathers) * (blocks.count + 2),
    )


def _slower(rows: int) -> float:
    """Return the factor by which a FLOP takes longer in a matrix product with few rows."""
    return max(LEAST_ROWS / max(rows, 1), 1.0) ** 0.6
