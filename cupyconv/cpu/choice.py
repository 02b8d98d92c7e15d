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
- patches: input gradients; dy's pixels times slices of taps within which windows do not overlap.
- tiles: filters times pixels, in tiles whose sums stay in registers; needs Numba and a real dtype.
- loops: sums over shifted pixels, for layers with few channels per group; without Numba, only for
  depthwise layers.

``scattered`` and ``patches`` are chosen for few of 400 random float32 layers (forward and dx, two
cores): with Numba for 29 passes, which take 1.4 times as long by the next method (geometric mean;
at most 3.7 times), and without Numba for 130 passes, which take 1.8 times as long (at most 14).

No method transforms its operands to save products, as Winograd's minimal filtering and the FFT do.
A transform adds inputs of different results to each other, so the rounding error of a large input
would reach results that do not depend on this input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import islice
from math import gcd, prod

from cupyconv.cpu.axis import (
    TAP_CALLS,
    Axis,
    LoopBlocks,
    Pieces,
    by_window,
    clamp,
    extent,
    forward_axis,
    inner_windows,
    loop_blocks,
    phases,
    pieces,
    separate_taps,
    stride_phases,
)
from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem
from cupyconv.signals import import_whole

RATE = 230e9
"""FLOP/s of a matrix product (rough)."""

SPEED = 6e9
"""Elements that NumPy copies or adds per second on two cores (rough)."""

CALL = 5e-6
"""Seconds of overhead per call of NumPy, including the slicing around it (rough)."""

BLOCK_BYTES = 2 << 20
"""Bytes of a thread's buffer; a few buffers of this size fit the cache of a core (hand-set)."""

LEAST_PIXELS = 128
"""Number of columns, which are pixels, from which a matrix product is fast (rough)."""

LOOP_ELEMENTS = 32
"""Elements that NumPy copies in the time that it takes to start a contiguous row (rough)."""

MOST_ROW_BYTES = 16 << 20
"""Largest size in bytes of a block or of an image's sums in the method ``patches`` (hand-set)."""

MOST_PIECES = 256
"""Largest number of pieces into which ``patches`` divides windows with padding (hand-set)."""

TRANSPOSED = 2.5
"""Factor by which copies between channels first and channels last are slower (measured)."""

TILE_RATE = 240e9
"""FLOP/s of compiled tiles (rough)."""

NARROW = 3
"""Factor by which tiles with few filters are slower (rough)."""

TILE_BYTES = 64
"""Bytes of a vector of results of a tile (rough)."""

TILE_ROWS = 12
"""Number of rows of a tile (rough)."""

LINE_ELEMENTS = 96
"""Elements that NumPy copies in the time that a tile's loops start to copy a row (rough)."""

FAR_ELEMENTS = 128
"""Elements that NumPy copies in the time to read a line that has left the cache (rough)."""

NEAR_ELEMENTS = 12
"""Elements that NumPy copies in the time to read a pixel of a group with few channels (rough)."""

CACHE_PERIOD, CACHE_WAYS = 1 << 16, 16
"""Bytes after which addresses share a set of the L2 cache, and lines per set (hand-set)."""

PASS_CALLS = 10
"""Calls of NumPy that take as long as starting a pass of tiles (rough)."""

PART_PRODUCTS = 1 << 23
"""Products of a block or part of tiles, below which more are not worth their calls (hand-set)."""

PART_BYTES = 1 << 20
"""Bytes of a block of tiles, below which more blocks are not worth their calls (hand-set)."""

MOST_PHASES = 1 << 8
"""Largest number of stride phases for tiles, since the plan of each is kept (hand-set)."""

WINDOWS = 4
"""Smallest size of a block of tiles in windows, so that few pixels are in two blocks (hand-set)."""

LOOP_RATE = 15e9
"""FLOP/s of sums of rows of channels without Numba, for long rows (rough)."""

PLANE_RATE = 64e9
"""FLOP/s of compiled loops over planes of pixels (rough)."""

SHORT_ROW = 16
"""Outputs of a row whose products take as long as those of a shorter row (rough)."""

GRADIENT_ROWS = 32
"""Number of pixels whose products take as long as reading and writing sums twice (rough)."""

CONVERSION_CALLS = 20
"""Calls of NumPy that take as long as starting a block of tiles with copied operands (rough)."""

SUMS = 8
"""Largest number of partial sums of a filter gradient (hand-set)."""

MOST_PAIRS = 1 << 10
"""Channels times filters of a group above which matrix products beat loops (hand-set)."""

LOOP_PARTS = 8
"""Smallest number of blocks into which the method ``loops`` divides a large layer (hand-set)."""

COMPILED = frozenset(("tiles", "loops"))
"""Methods whose loops Numba compiles."""

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
    """Pass as one or several correlations of a source with filters, described by the largest.

    Attributes:
        channels, filters: channels and filters per group; exchanged in backprop_input.
        axes: spatial axes of each correlation, without unused parts.
        channels_last: whether the channels of a pixel are contiguous in memory.
        phases: number of correlations, one per stride phase.
        share: (output, tap) pairs of a correlation relative to those of the largest, on average.
        itemsize: bytes of an element of the sums.
        dtype: dtype of the operands.
    """

    images: int
    groups: int
    channels: int
    filters: int
    axes: tuple[Axis, ...]
    channels_last: bool
    phases: int
    share: float
    itemsize: int
    dtype: str

    @cached_property
    def pixels(self) -> int:
        """Pixels of one correlation's result, in all images and groups."""
        return self.images * self.groups * prod(axis.outputs for axis in self.axes)

    @cached_property
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
    """Return whether Numba is installed and works with this NumPy."""
    return _numba_works()


@cache
def _numba_works() -> bool:
    try:
        numba = import_whole("numba")
    except Exception:  # Numba raises many types if NumPy is too new or a library is missing
        return False
    return not numba.config.DISABLE_JIT  # if it is set, loops run as plain Python


@cache
def _is_numba_installed() -> bool:
    return find_spec("numba") is not None


def methods(problem: ConvProblem, pass_: str, planned: str = "") -> tuple[Method, ...]:
    """Return all methods that can compute a pass.

    Importing Numba takes longer than computing a small layer.  Numba is therefore only searched
    for, unless the fastest method or ``planned`` needs it, and NumPy is imported.

    Args:
        planned: name of a method that was planned before; "" for no method.
    """
    is_known = "numba" in sys.modules or _numba_works.cache_info().currsize > 0
    numba = has_numba() if is_known else _is_numba_installed()
    found = _methods(problem, pass_, numba)
    if numba and not is_known and "numpy" in sys.modules:
        fastest = min(found, key=lambda method: method.microseconds)
        if not COMPILED.isdisjoint((fastest.name, planned)) and not has_numba():
            found = _methods(problem, pass_, False)
    return found


def _methods(problem: ConvProblem, pass_: str, numba: bool) -> tuple[Method, ...]:
    """Return all methods that can compute a pass, with or without Numba."""
    work = _correlations_of(problem, pass_)
    is_gradient = pass_ == "backprop_filter"
    candidates = [_products(work, is_gradient), *_windows(work), *_loops(work, numba)]
    if numba:
        candidates += _tiles(work, is_gradient)
    if not is_gradient:
        candidates += _scattered(work)
    if pass_ == "backprop_input":
        candidates += _patches(problem, work)
    return tuple(candidates)


def tap_slices(axes: Sequence[ConvAxis]) -> int:
    """Return the number of slices of taps for ``patches``; 1 if windows do not overlap."""
    return prod(-(-axis.filter // separate_taps(axis)) for axis in axes)


def product_pieces(
    axes: tuple[Axis, ...], images: int, groups: int, channels: int, filters: int
) -> Pieces:
    """Divide a correlation's outputs into parts, so that few products read padding."""
    products = max(images * groups * channels * filters, 1)
    # Each part copies its filters once more.
    tap = groups * channels * filters / SPEED * RATE / products
    return pieces(axes, CALL * RATE / 2 / products, tap=tap)


def tile_pieces(
    axes: tuple[Axis, ...],
    images: int,
    groups: int,
    channels: int,
    filters: int,
    itemsize: int,
    is_gradient: bool,
    is_in_place: bool,
) -> Pieces:
    """Divide a correlation's outputs into parts for the method ``tiles``; see ``pieces``.

    Args:
        is_in_place: whether pixels are read in place and their channels are contiguous.  Otherwise
            short rows of outputs are slow.
    """
    call = CALL * TILE_RATE / 2 / (images * groups * channels * filters)
    # A part of a gradient reads and writes all sums, in the time of some products.
    rows = GRADIENT_ROWS if is_gradient else TILE_ROWS
    if is_in_place:
        return pieces(axes, call, 1, images, rows, share=1)
    return pieces(axes, call, 1, images, rows, row=SHORT_ROW)


def most_loop_bytes(block_bytes: int, share: int) -> int:
    """Return the largest number of bytes of a block that the method ``loops`` copies.

    Args:
        block_bytes: bytes of a thread's buffer.
        share: bytes of the source and the result, divided by the desired number of blocks.
    """
    return min(block_bytes // 2, max(share, block_bytes // 4))


# -- the methods' costs ----------------------------------------------------------------------------


def _correlations_of(problem: ConvProblem, pass_: str) -> _Pass:
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    axes, count, share = [], 1, 1.0
    for axis in problem.axes:
        if pass_ == "backprop_input":
            rules = [used_part(rule) for rule, *_ in islice(phases(axis), SAMPLE)] or [Axis()]
            outputs = max(rule.outputs for rule in rules)
            largest = max(rules, key=lambda rule: rule.taps).changed(outputs=outputs)
            pairs = sum(rule.outputs * rule.taps for rule in rules)
            share *= pairs / (len(rules) * largest.outputs * largest.taps)
            axes.append(largest)
            step = axis.stride // gcd(axis.stride, axis.dilation)
            count *= axis.output if by_window(axis) else min(step, axis.filter, axis.input)
        else:
            axes.append(used_part(forward_axis(axis)))
    if pass_ == "backprop_input":
        channels, filters = filters, channels
    return _Pass(
        max(problem.N, 1),  # an empty batch is ranked like one image
        problem.groups,
        channels,
        filters,
        tuple(axes),
        problem.data_format.endswith("C"),
        count,
        share,
        max(ITEMSIZE[problem.dtype], 4),  # 16-bit types are summed in float32
        problem.dtype,
    )


def used_part(axis: Axis) -> Axis:
    """Return ``axis.without_unused()``; if it is empty, return one output with one tap."""
    used = axis.without_unused()
    return used if used.outputs else Axis()


def _products(work: _Pass, is_gradient: bool) -> Method:
    division = product_pieces(work.axes, work.images, work.groups, work.channels, work.filters)
    gathered = work.images * work.groups * work.channels * division.pairs
    results = work.pixels * work.filters
    operations = 2.0 * gathered * work.filters
    is_view = all(axis.taps == axis.stride == 1 and axis.span <= axis.size for axis in work.axes)
    if is_view and (work.groups == 1 or not work.channels_last):
        gathered = 0  # nothing to gather
    weights = work.groups * work.channels * work.filters * division.taps  # copied for each part
    elements = 1.5 * gathered * _short_runs(work) + 2 * weights + results
    blocks = max(gathered, results) * work.itemsize / BLOCK_BYTES
    parts = 1.0  # number of parts of a filter gradient
    if is_gradient:
        rows = max(work.filters, LEAST_PIXELS) * work.weights / max(work.filters, 1)
        parts = max(rows * work.itemsize / BLOCK_BYTES, 1.0)
    calls = 44 + division.calls * (parts + blocks)
    return _method(work, "products", "filters times gathered pixels", operations, elements, calls)


def _windows(work: _Pass) -> Iterator[Method]:
    padded = work.images * work.groups * work.channels * prod(axis.span for axis in work.axes)
    gathered = work.pixels * work.channels * work.taps
    results = work.pixels * work.filters
    size = work.itemsize * (padded + gathered + work.weights + results)
    if size <= 2 * BLOCK_BYTES:
        # The rates are for two threads.  This method uses one, as all methods do for little data.
        factor = 2 if work.phases * size > BLOCK_BYTES else 1.5
        yield _method(
            work,
            "windows",
            "filters times all windows",
            factor * work.operations,
            factor * (padded + gathered * _short_runs(work) + results),
            6,
        )


def _patches(problem: ConvProblem, work: _Pass) -> Iterator[Method]:
    slices, taps = tap_slices(problem.axes), prod(problem.filter_sizes)
    pixels = work.images * prod(problem.output_sizes)
    weights = problem.K * work.filters * taps
    gradients = pixels * weights // (work.channels or 1)
    row = prod(problem.output_sizes[1:]) * work.itemsize
    at_once = min(work.filters * taps, 8 * BLOCK_BYTES // max(work.channels * work.itemsize, 1))
    sums = work.filters * work.groups * prod(problem.input_sizes) * work.itemsize
    is_large = row * max(at_once, work.channels) > MOST_ROW_BYTES
    is_large |= slices > 1 and ITEMSIZE[problem.dtype] < work.itemsize and sums > MOST_ROW_BYTES
    inner = [(axis.output, inner_windows(axis)) for axis in problem.axes]
    padded = prod(outputs - (of.stop - of.start) + 1 for outputs, of in inner)
    # With one tap per slice, ``products`` and ``scattered`` copy fewer gradients.
    if slices == taps or is_large or padded > MOST_PIECES:
        return
    last = problem.axes[-1]
    run = work.filters if work.channels_last else min(last.filter, separate_taps(last))
    blocks = max(gradients * work.itemsize * 4 / BLOCK_BYTES, slices * work.groups)
    start = 3 * LOOP_ELEMENTS
    copies = gradients * (1 + start / run) + slices * pixels * problem.K + weights
    threads = 1  # the rates are for two threads; slices are added up by one
    if slices > 1:
        copies += work.images * problem.C * prod(problem.input_sizes)
        threads = 2
    yield Method(
        "patches",
        "pixels times slices of taps of windows that do not overlap",
        threads * 2.0 * pixels * weights,
        threads * copies,
        blocks * (12 + padded) + 20 * slices,
    )


def _tiles(work: _Pass, is_gradient: bool) -> Iterator[Method]:
    if work.dtype.startswith("complex") or work.phases > MOST_PHASES:
        return
    if is_by_channel(work.groups, work.channels, work.filters, work.itemsize):
        yield from _channel_tiles(work, is_gradient)
    if work.channels == work.filters == 1 < work.groups:
        return  # tiles of a single filter would be mostly empty
    lanes = TILE_BYTES // work.itemsize
    columns = -(-work.filters // lanes) * lanes
    counts = work.images, work.groups, work.channels
    blocks = tile_blocks(work.axes, *counts, columns, work.itemsize, BLOCK_BYTES, is_gradient)
    rows = work.channels * work.taps
    if max(blocks.places * work.itemsize, 2 * TILE_BYTES * rows) > 4 * BLOCK_BYTES:
        return  # a single pixel, or the filters of a tile, take too much memory
    is_converted = work.itemsize != ITEMSIZE[work.dtype]
    is_in_place = work.channels_last and not is_converted
    extents = *counts, work.filters, work.itemsize
    division = tile_pieces(work.axes, *extents, is_gradient, is_in_place)
    padded_rows = -(-rows // TILE_ROWS) * TILE_ROWS / rows if is_gradient else 1
    parts = max(division.parts, 1) if is_gradient else prod(map(len, division.cuts))
    images = work.images * work.groups
    size = images * (work.channels * division.read + columns * division.outputs)
    count = max(round(size / blocks.places), parts)
    operations = 2.0 * images * work.channels * division.pairs * padded_rows * columns
    if work.filters <= lanes // 2:
        operations *= NARROW
    order = 1 if work.channels_last else TRANSPOSED
    elements = float(work.weights) * (1 if is_gradient else order)
    if is_converted:
        elements += images * work.channels * division.read
    else:
        lines = division.lines if work.channels_last else division.lines * work.channels
        elements += images * (division.padded * work.channels + LINE_ELEMENTS * lines)
    if is_gradient:
        # Each block reads and writes the sums of its groups.
        sums = count / parts * blocks.most[0] * work.channels * division.taps * columns
        elements += images * division.outputs * columns * order + sums
    elif is_converted or not work.channels_last:
        elements += 1.5 * work.pixels * work.filters * order
    if not work.channels_last:
        # A tile reads another cache line for each channel and row of taps.
        read = work.channels * division.pairs / (TILE_ROWS * work.axes[-1].taps)
        elements += images * read * NEAR_ELEMENTS
    elif work.groups > 1:
        # Groups share cache lines, which stay in the cache unless strides are powers of two.
        sizes, outputs = (
            work.images * prod(getattr(axis, name) for axis in work.axes)
            for name in ("size", "outputs")
        )
        for pixels, channels in ((sizes, work.channels), (outputs, work.filters)):
            step = gcd(work.groups * channels * work.itemsize, CACHE_PERIOD)
            is_far = pixels * step > CACHE_WAYS * CACHE_PERIOD
            elements += pixels * work.groups * (FAR_ELEMENTS if is_far else NEAR_ELEMENTS)
    yield _tiles_method(
        work,
        "filters times pixels, in tiles",
        operations * RATE / TILE_RATE,
        elements,
        count * work.phases,
        is_converted,
    )


def is_by_channel(groups: int, channels: int, filters: int, itemsize: int) -> bool:
    """Return whether the method ``tiles`` computes a depthwise layer in vectors of channels."""
    return channels == filters == 1 and groups * itemsize >= TILE_BYTES


def _channel_tiles(work: _Pass, is_gradient: bool) -> Iterator[Method]:
    blocks = channel_blocks(work.axes, work.images, work.groups, work.itemsize, BLOCK_BYTES)
    sums = SUMS * work.weights if is_gradient else work.weights
    if max(blocks.places, sums) * work.itemsize > 4 * BLOCK_BYTES:
        return
    rows = -(-work.taps // TILE_ROWS) * TILE_ROWS / work.taps if is_gradient else 1
    counts = work.images, work.groups, 1, 1
    is_in_place = work.channels_last and work.itemsize == ITEMSIZE[work.dtype]
    division = tile_pieces(work.axes, *counts, work.itemsize, is_gradient, is_in_place)
    operations = 2.0 * work.images * work.groups * division.pairs * rows
    sources = work.images * work.groups * (division.padded if is_in_place else division.read)
    elements: float = sources + work.weights
    if not work.channels_last:
        run = 1 + LOOP_ELEMENTS / (4 * work.axes[-1].outputs)
        elements += 2.5 * TRANSPOSED * (sources + work.pixels) * run
    count = max(blocks.blocks, prod(map(len, division.cuts))) * work.phases
    yield _tiles_method(
        work,
        "taps times pixels, in vectors of channels",
        operations * RATE / TILE_RATE,
        elements,
        count,
        not is_in_place,
    )


def _tiles_method(
    work: _Pass,
    summary: str,
    operations: float,
    elements: float,
    blocks: int,
    is_converted: bool,
) -> Method:
    """Return the method ``tiles``, from the costs of the largest of the pass's correlations.

    Args:
        blocks: number of blocks in all correlations.
        is_converted: whether operands are copied before the loops read them.
    """
    # The rates are for two threads; a single block is computed by one.
    factor = work.phases * work.share * (2 if blocks == 1 else 1)
    calls = PASS_CALLS + (CONVERSION_CALLS if is_converted else 1) * blocks
    return Method("tiles", summary, factor * operations, factor * elements, calls)


def channel_blocks(
    axes: tuple[Axis, ...], images: int, channels: int, itemsize: int, block_bytes: int
) -> LoopBlocks:
    """Divide a depthwise correlation into blocks for the method ``tiles``."""
    pixels, sources = (
        images * prod(getattr(axis, name) for axis in axes) for name in ("outputs", "span")
    )
    size = (sources + pixels) * channels * itemsize
    share = size // clamp(size // PART_BYTES, LOOP_PARTS)
    least = max(block_bytes // 4, WINDOWS * _window_places(axes, channels, channels) * itemsize)
    most = min(max(share, least), 2 * block_bytes) // itemsize
    return loop_blocks(axes, images, 1, channels, channels, most, by_pixel=True)


def _window_places(axes: tuple[Axis, ...], channels: int, columns: int) -> int:
    """Return the number of elements that a single output reads and writes, padding included."""
    return channels * prod(axis.narrow(slice(0, 1)).span for axis in axes) + columns


def tile_blocks(
    axes: tuple[Axis, ...],
    images: int,
    groups: int,
    channels: int,
    columns: int,
    itemsize: int,
    block_bytes: int,
    is_gradient: bool,
) -> LoopBlocks:
    """Divide a correlation into blocks for the method ``tiles``.

    Args:
        columns: filters per group, extended to whole tiles.
    """
    if is_gradient:  # all pixels of a block are read once per tile, so they should fit the cache
        most = block_bytes // 2
    else:
        pixels = images * groups * prod(axis.outputs for axis in axes)
        products = pixels * channels * columns * prod(axis.taps for axis in axes)
        sources = images * groups * channels * prod(axis.span for axis in axes)
        share = (sources + pixels * columns) * itemsize
        share //= clamp(max(products // PART_PRODUCTS, share // PART_BYTES), LOOP_PARTS // 2)
        least = WINDOWS * _window_places(axes, channels, columns) * itemsize
        most = min(max(share, least, block_bytes // 64), 2 * block_bytes)
    most //= itemsize
    return loop_blocks(axes, images, groups, channels, columns, most, True, long_rows=False)


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
    blocks = 1 + read * max(sums, work.channels) * work.itemsize / BLOCK_BYTES
    yield _method(
        work,
        "scattered",
        "filters times pixels, added up by taps",
        2.0 * read * work.channels * sums,
        (added + work.pixels * work.filters) * run + read * sums + work.weights,
        48 + TAP_CALLS * blocks * work.taps,
    )


def _loops(work: _Pass, numba: bool) -> Iterator[Method]:
    counts = work.groups, work.channels, work.filters
    by_pixel = not numba
    if work.channels * work.filters > (1 if by_pixel else MOST_PAIRS):
        return
    weights = work.filters * work.channels * work.taps
    pixel = work.taps * (work.channels + work.filters)
    if by_pixel:
        pixel = prod(axis.narrow(slice(0, 1)).span for axis in work.axes) + 1
    if work.itemsize * max(pixel, weights) > BLOCK_BYTES // 2:
        return  # a single pixel of one group takes too much memory
    sources = work.images * work.groups * work.channels * prod(axis.size for axis in work.axes)
    share = (sources + work.pixels * work.filters) * work.itemsize // LOOP_PARTS
    most_elements = most_loop_bytes(BLOCK_BYTES, share) // work.itemsize
    division = loop_blocks(work.axes, work.images, *counts, most_elements, by_pixel)
    operations, rate, gathers = work.operations, LOOP_RATE, 1
    moved: float = division.blocks * division.places
    if not by_pixel:  # the loops also sum positions between rows
        most = zip(work.axes, division.most[2:], strict=True)
        plane = prod(extent(axis.narrow(slice(0, outputs))) for axis, outputs in most)
        operations = 2.0 * division.blocks * prod(division.most[:2]) * plane * weights
        moved *= 0.5 + LOOP_ELEMENTS / work.axes[-1].outputs
        rate, gathers = PLANE_RATE, prod(map(stride_phases, work.axes))
    if by_pixel != work.channels_last:
        moved *= TRANSPOSED
    if by_pixel:
        row = work.axes[-1]
        run = work.groups * (row.outputs if row.stride == 1 else 1)
        operations *= 1 + 3 * LOOP_ELEMENTS / run
    yield _method(
        work,
        "loops",
        "rows of channels, tap by tap" if by_pixel else "planes of pixels, tap by tap",
        RATE / rate * operations,
        moved + work.weights,
        (6 + TAP_CALLS * gathers) * (2 + division.blocks),
    )


def _method(
    work: _Pass, name: str, summary: str, operations: float, elements: float, calls: float
) -> Method:
    """Return a method of a pass, from the costs of the largest of the pass's correlations."""
    size = work.phases * work.share
    return Method(name, summary, size * operations, size * elements, work.phases * calls)


def _short_runs(work: _Pass) -> float:
    """Return the factor by which short contiguous rows slow down copies."""
    row = work.axes[-1]
    run = work.channels * row.taps if work.channels_last else row.outputs
    return 1 + LOOP_ELEMENTS / run
