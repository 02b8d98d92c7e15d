"""Winograd's minimal filtering by matrix products, for 3x3 taps without stride or dilation.

A tile of m neighbouring results is m windows on m + 2 pixels x.  With matrices A, B and G of
constants,

    sum over results o and taps t of y_o x_(o+t) w_t = sum over components of (A y)(B x)(G w)

which has m + 2 products or a few more, instead of 3 m.  Along two axes it is applied twice, so that
a tile of m x m results takes the square of that.  It is linear in each of y, x and w, and so its
gradients are the passes, with A' and G' the transposes:

    y = A' (Bx * Gw)        dw = G' (Bx * Ay)

Summed over channels or tiles, the products of a component are a matrix product.  So are the
transforms, with the components of a tile as rows.  The taps of a third axis, before the other two,
are summed over as channels are.

The constants come from multiplying polynomials by way of their values (S. Winograd, Arithmetic
Complexity of Computations, 1980; A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural
Networks, 2016).  TWO takes the values at 0, 1, -1 and infinity.  FOUR takes the same and those at
the imaginary units, as in L. Meng and J. Brothers, Efficient Winograd Convolution via Integer
Arithmetic, 2019: the remainder modulo x x + 1, whose product takes three multiplications.  That is
one more than the values at 2 and -2 would take, but every constant is a sum of few powers of two,
the error is that of plain sums, and integers stay exact.

Infinity minus infinity is not a number: one such pixel spoils its whole tile, where the definition
spoils only the windows that read it.  Results that are not finite are therefore given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv.cpu.correlation import Axis, Correlation, clamp, gather, parts
from cupyconv.cpu.scratch import Scratch
from cupyconv.cpu.views import copy_uncached
from cupyconv.planning.cpu import winograd_filters, winograd_tiles

TAPS = 3


@dataclass(frozen=True)
class Transform:
    """The constants for tiles of some results along an axis.

    Attributes:
        a, b, g: (components, results), (components, pixels) and (components, taps).
    """

    a: np.ndarray
    b: np.ndarray
    g: np.ndarray

    @property
    def results(self) -> int:
        return self.a.shape[1]

    @property
    def components(self) -> int:
        """Those of a tile along both axes."""
        return len(self.a) ** 2


TWO = Transform(
    a=np.array([[1, 0], [1, 1], [1, -1], [0, -1]]),
    b=np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
    g=np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2,
)

FOUR = Transform(
    a=np.array(
        [
            [1, 0, 0, 0],
            [1, 1, 1, 1],
            [1, -1, 1, -1],
            [1, 0, -1, 0],  # modulo x x + 1: the constant, the factor of x, and the sum of both
            [0, 1, 0, -1],
            [1, 1, -1, -1],
            [0, 0, 0, 1],
        ]
    ),
    b=np.array(
        [
            [1, 0, 0, 0, -1, 0],
            [0, 1, 1, 1, 1, 0],
            [0, -1, 1, -1, 1, 0],
            [0, -1, -1, 1, 1, 0],
            [0, -1, 1, 1, -1, 0],
            [0, 1, 0, -1, 0, 0],
            [0, -1, 0, 0, 0, 1],
        ]
    ),
    g=np.array(
        [[4, 0, 0], [1, 1, 1], [1, -1, 1], [2, 0, -2], [0, 2, 0], [2, 2, -2], [0, 0, 4]],
    )
    / 4,
)


def correlate(whole: Correlation, scratch: Scratch, block_bytes: int, transform: Transform) -> bool:
    """Compute the result; False if it is not finite and has to be computed in another way."""
    back = _both_axes(transform.a, whole).T
    pieces = (piece for group in _groups(whole) for piece in group.pieces(first=1))
    for piece in pieces:
        chunks = _filter_chunks(piece, block_bytes, transform, of_filters=False)
        only = _transformed_filters(piece, transform, scratch) if len(chunks) == 1 else None
        for block in _blocks(piece, block_bytes, transform, chunks[0].stop):
            windows = _transformed_windows(block, transform, scratch)
            for some in chunks:
                part = block.part(filters=some)
                weights = only
                if weights is None:
                    weights = _transformed_filters(part, transform, scratch)
                _, rows, tiles, _ = windows.shape
                shape = (transform.components, tiles, rows, part.filter_count)
                sums = scratch.array("work", shape)
                np.matmul(windows, weights[:, None], out=sums.swapaxes(1, 2))
                values = _times(back, sums, scratch.array("values", (len(back), *shape[1:])))
                if not np.isfinite(values.sum()):
                    return False
                _finish(part, values, transform)
    return True


def filter_gradient(
    whole: Correlation, scratch: Scratch, block_bytes: int, transform: Transform
) -> bool:
    """Compute the filters' gradient; False if it is not finite."""
    back = _both_axes(transform.g, whole).T
    side = len(transform.g)
    for group in _groups(whole):
        for some in _filter_chunks(group, block_bytes, transform, of_filters=True):
            chunk = group.part(filters=some)
            _, filters, channels, taps, _, _ = chunk.filters.shape
            total = scratch.array("total", (side * side, filters, taps, channels))
            total[...] = 0
            in_place = total.reshape(1, side, side, filters, taps, channels)
            in_place = in_place.transpose(0, 3, 5, 4, 1, 2)
            for piece in replace(chunk, filters=in_place).pieces(first=1):
                sums = _components(piece.filters)
                term = scratch.array("term", sums.shape)
                for block in _blocks(piece, block_bytes, transform, filters):
                    windows = _transformed_windows(block, transform, scratch)
                    gradients = _transformed_gradients(block, transform, scratch)
                    for row in range(windows.shape[1]):
                        np.matmul(gradients[:, row].swapaxes(1, 2), windows[:, row], out=term)
                        sums += term
            by_tap = _times(back, total, scratch.array("work", (len(back), *total.shape[1:])))
            if not np.isfinite(by_tap.sum()):
                return False
            by_tap = by_tap.reshape(TAPS, TAPS, *total.shape[1:])
            chunk.filters[0] = by_tap.transpose(2, 4, 3, 0, 1)
    return True


# -- parts -----------------------------------------------------------------------------------------


def _groups(whole: Correlation) -> Iterator[Correlation]:
    """Each group, with three axes."""
    if len(whole.axes) == 2:
        whole = whole.with_axis(0)
    for group in parts(whole.groups, 1):
        yield whole.part(groups=group)


def _filter_chunks(
    group: Correlation, block_bytes: int, transform: Transform, of_filters: bool
) -> list[slice]:
    """The filters in parts that fit when they are transformed."""
    _, filters, channels, taps, _, _ = group.filters.shape
    itemsize = group.accumulator.itemsize
    most = winograd_filters(
        transform.components, channels * taps, filters, itemsize, block_bytes, of_filters
    )
    return list(parts(filters, most))


def _blocks(
    piece: Correlation, block_bytes: int, transform: Transform, filters: int
) -> Iterator[Correlation]:
    """The images and pixels in parts whose tiles fit, with so many filters at a time."""
    depth, height, width = piece.axes
    tall, wide = _tiles(height, transform), _tiles(width, transform)
    windows = piece.channels * depth.taps
    itemsize = piece.accumulator.itemsize
    tiles = winograd_tiles(transform.components, windows, filters, itemsize, block_bytes)
    images, lines = clamp(tiles // (tall * wide), piece.images), clamp(tiles // wide, tall)
    columns = clamp(tiles, wide)
    # Neighbouring planes of results have most planes of their windows in common.
    planes = tiles * depth.taps // (images * lines * columns) - depth.taps + 1
    for some in parts(piece.images, images):
        for slices in parts(depth.outputs, clamp(planes, depth.outputs)):
            for high in parts(tall, lines):
                for broad in parts(wide, columns):
                    pixels = (_pixels(high, height, transform), _pixels(broad, width, transform))
                    yield piece.part(images=some, outputs=(slices, *pixels))


def _tiles(axis: Axis, transform: Transform) -> int:
    """The last of them may have results beyond the end."""
    return -(-axis.outputs // transform.results)


def _pixels(tiles: slice, axis: Axis, transform: Transform) -> slice:
    """The results that the tiles are of."""
    size = transform.results
    return slice(tiles.start * size, min(tiles.stop * size, axis.outputs))


# -- transforms ------------------------------------------------------------------------------------


def _both_axes(matrix: np.ndarray, whole: Correlation) -> np.ndarray:
    """The matrix applied along two axes, as a matrix."""
    return np.kron(matrix, matrix).astype(whole.accumulator)


def _transformed_filters(part: Correlation, transform: Transform, scratch: Scratch) -> np.ndarray:
    """Gw as (components, taps of the first axis * C, K)."""
    order = [3, 4, 2, 1, 0]
    filters_last = part.filters.strides[1] < part.filters.strides[2]  # they are neighbours
    if not filters_last:
        order = [3, 4, 0, 2, 1]
    by_tap = part.filters[0].transpose(order)
    packed = scratch.array("filters", by_tap.shape)
    copy_uncached(packed, by_tap)
    packed = packed.reshape(TAPS * TAPS, *by_tap.shape[2:])
    weights = scratch.array("weights", (transform.components, *packed.shape[1:]))
    _times(_both_axes(transform.g, part), packed, weights)
    if filters_last:
        return weights.reshape(len(weights), -1, part.filter_count)
    return weights.reshape(len(weights), part.filter_count, -1).swapaxes(1, 2)


def _components(filters: np.ndarray) -> np.ndarray:
    """(1, K, C, taps, ...) of components along two axes as (components, K, taps * C), a view."""
    _, count, channels, taps, *sides = filters.shape
    return filters[0].transpose(3, 4, 0, 2, 1).reshape(prod(sides), count, taps * channels)


def _transformed_windows(block: Correlation, transform: Transform, scratch: Scratch) -> np.ndarray:
    """Bx as (components, rows, tiles, taps * C), where windows of neighbouring rows overlap."""
    depth, height, width = block.axes
    planes, channels = depth.pixels(), block.channels
    size = transform.results + TAPS - 1
    pixels = _gathered(block.source, (planes, height, width), size, transform, scratch)
    shape = (transform.components, *pixels.shape[1:])
    whole = _times(_both_axes(transform.b, block), pixels, scratch.array("windows", shape))
    component, _, _, tile, plane, item = whole.strides
    return as_strided(
        whole,
        (len(whole), depth.outputs, prod(shape[1:4]), depth.taps * channels),
        (component, depth.stride * plane, tile, item),
    )


def _transformed_gradients(
    block: Correlation, transform: Transform, scratch: Scratch
) -> np.ndarray:
    """Ay as (components, rows, tiles, K)."""
    axes = [Axis(axis.outputs, size=axis.outputs) for axis in block.axes]
    planes, height, width = axes
    size = transform.results
    pixels = _gathered(block.result, (planes, height, width), size, transform, scratch)
    shape = (transform.components, *pixels.shape[1:])
    whole = _times(_both_axes(transform.a, block), pixels, scratch.array("gradients", shape))
    return whole.reshape(len(whole), -1, *shape[4:]).swapaxes(1, 2)


def _gathered(
    array: np.ndarray,
    axes: tuple[Axis, Axis, Axis],
    size: int,
    transform: Transform,
    scratch: Scratch,
) -> np.ndarray:
    """(size * size, N, tiles down, tiles across, planes, channels): the pixels of every tile.

    Args:
        array: (N, 1, channels, planes, rows, columns).
        axes: what to read of planes, rows and columns; of these two, for each tile's results.
        size: pixels of a tile along an axis, neighbours of which may be another tile's too.
    """
    planes, *flat = axes
    step = transform.results
    tall, wide = (_tiles(axis, transform) for axis in flat)
    rows, columns = (
        Axis(step * (count - 1) + size, size=axis.size, offset=axis.offset)
        for axis, count in zip(flat, (tall, wide), strict=True)
    )
    images, _, channels = array.shape[:3]
    shape = (images, rows.outputs, columns.outputs, planes.outputs, channels)
    padded = scratch.array("padded", shape)
    gather(padded, array[:, 0].transpose(0, 3, 4, 2, 1), {1: rows, 2: columns, 3: planes})
    image, row, column, plane, item = padded.strides
    tiles = as_strided(
        padded,
        (size, size, images, tall, wide, planes.outputs, channels),
        (row, column, image, step * row, step * column, plane, item),
    )
    pixels = scratch.array("work", tiles.shape)
    pixels[...] = tiles
    return pixels.reshape(size * size, *tiles.shape[2:])


def _finish(part: Correlation, values: np.ndarray, transform: Transform) -> None:
    """Write the values, (results of a tile, tiles, rows, K), of all tiles."""
    size = transform.results
    _, height, width = part.axes
    tiles = (part.images, _tiles(height, transform), _tiles(width, transform))
    by_tile = values.reshape(size, size, *tiles, *values.shape[2:])
    for row, column in product(range(size), repeat=2):
        result = part.result[..., row::size, column::size]
        tall, wide = result.shape[-2:]
        some = by_tile[row, column, :, :tall, :wide].transpose(0, 4, 3, 1, 2)
        replace(part, result=result).finish(some[:, None])


def _times(matrix: np.ndarray, array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """matrix @ array over the first axis."""
    np.matmul(matrix, array.reshape(len(array), -1), out=out.reshape(len(out), -1))
    return out
