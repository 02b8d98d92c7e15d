"""cuda-hopper (cuda/conv_hopper.cu): an implicit GEMM on wgmma, fed by TMA.

A traversal describes how TMA visits the pixels and taps of one dense problem: a whole pass, or a
stride phase of backprop_input.  cuda/include/traversal.cuh explains its fields.

The operand under the taps, or source, is x; in backprop_input, it is dy.  A line is 128 contiguous
bytes of an operand: channels or filters of one pixel or tap or, in a planar layout, pixels of one
row.  In a planar layout, x and y have channels first.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product, takewhile
from math import isqrt, prod
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from cupyconv.formats import data_formats, filter_formats
from cupyconv.kernels import cost, frames, parameters
from cupyconv.kernels.copies import (
    LINE_BYTES,
    PIECE_BYTES,
    ROLES_OF,
    arrange,
    arrange_bands,
    band_strides,
    copy_bytes,
    copy_strides,
    permuted,
    pitch,
    reordered,
    shape_of,
    split,
)
from cupyconv.kernels.device import CHIPS, Chip, Device
from cupyconv.kernels.family import Candidate, Choices, Family, Tile
from cupyconv.kernels.limits import Count, extent_counts
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides, followers, neighbours
from cupyconv.kernels.views import Viewed
from cupyconv.launch import (
    STORAGE,
    FilterForm,
    Im2colMap,
    Launch,
    TensorMap,
    TensorMaps,
    TiledMap,
)
from cupyconv.problem import ITEMSIZE, PASSES, ConvAxis, ConvProblem, derived

if TYPE_CHECKING:
    import numpy as np

BARRIER_BYTES = 8
"""Bytes per mbarrier (hardware)."""

WARPGROUP = 128
"""Threads per warpgroup (hardware)."""

CLUSTER_BLOCKS = 8
"""Largest number of blocks per cluster that every chip with clusters supports (CUDA's rule)."""

_GPCS = 8
"""GPCs of an H100 (hardware).  A GPC has pairs of SMs, and a cluster occupies SMs of one GPC."""

MOST_STAGES = 8
"""Largest number of stages of the pipeline (hand-set)."""

MAX_MAPS = 16
"""Largest number of traversals, and of tensor maps of the operand under the taps.  All maps must
fit into the 4 KB of kernel parameters."""

_MOST_TILE_ROWS = 512
"""Largest number of rows of the tiles of a cluster of blocks.  The last tiles of a matrix extend
beyond its end by fewer rows than this."""

_FLOPS_PER_BYTE = 150
"""Flops of TF32 products in the time that a byte of device memory takes (an H100's data sheet)."""

_MOST_FILLED = 1.25
"""Largest number of computed pixels per result pixel, if rows are padded to lines (hand-set)."""

# Limits of cuTensorMapEncodeIm2col by number of spatial axes: range of the corners of the box of
# base pixels, and largest offset of a tap.
_CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
_LARGEST_OFFSET = {1: 2**16 - 1, 2: 2**8 - 1, 3: 2**5 - 1}
_LARGEST_ELEMENT_STRIDE = 8  # largest step between base pixels (CUDA's rule)
_LARGEST_STRIDE_BYTES = 2**40  # strides of a tensor map must be smaller (CUDA's rule)

PLANES = 3
"""Number of planes, bfloat16 tensors that add up to a float32 tensor (cuda/conv_planes.cu)."""

SUMS_PIECE = 8
"""Columns of C per vector access of the kernel that adds up splits."""

EMPTY_LINE = 4
"""Wavefronts that TMA takes to fill a line with zeros, beyond the line's own (fitted)."""

_MOST_WAVES = 4
"""Largest number of waves of blocks that the choice of splits aims at (hand-set)."""


class AxisTraversal(NamedTuple):
    """A traversal along one spatial axis.

    Attributes:
        start: first coordinate of the source tensor that the traversal's tensor map contains.
        extent: number of coordinates that the tensor map contains.
        pixels: number of pixels that the traversal visits.
        base: coordinate in the map that the first pixel reads under the first tap: TMA's base
            pixel.
        stride: step between the base pixels of adjacent pixels.
        taps: number of taps that contribute.
        spacing: step between taps in the source tensor.
        filter_first, filter_step: filter coordinate of the first tap, and step between taps.
        place_first, place_step: result coordinate of the first pixel, and step between pixels.
    """

    extent: int
    pixels: int
    base: int
    stride: int
    taps: int
    spacing: int
    filter_first: int
    filter_step: int
    place_first: int
    place_step: int
    start: int = 0

    @property
    def upper(self) -> int:
        """Upper corner of the base pixels, relative to the last pixel of the tensor map."""
        return self.base + (self.pixels - 1) * self.stride - (self.extent - 1)


Traversal = tuple[AxisTraversal, ...]
"""Traversal along each spatial axis of one dense problem."""


def has_taps(traversal: Traversal) -> bool:
    """Return whether any tap contributes; the results of a stride phase without taps are zero."""
    return all(axis.taps for axis in traversal)


@lru_cache(maxsize=256)
def traversals(problem: ConvProblem, pass_: str, divided: bool = False) -> tuple[Traversal, ...]:
    """Return TMA's traversals in a pass: one per non-empty part (frames.py) of the spatial axes.

    Traversals with the most taps come first, so that the last tiles on the chip are short.
    """
    walk_of = _phase if pass_ == "backprop_input" else _window
    found = zip(problem.axes, frames.parts(problem, pass_, divided), strict=True)
    traversals_ = product(
        *([walk_of(axis, *part) for part in parts if part[0]] for axis, parts in found)
    )
    return tuple(sorted(traversals_, key=lambda traversal: -prod(axis.taps for axis in traversal)))


def _window(axis: ConvAxis, outputs: range, taps: range) -> AxisTraversal:
    traversal = AxisTraversal(
        extent=axis.input,
        pixels=len(outputs),
        base=outputs.start * axis.stride - axis.pad_before + taps.start * axis.dilation,
        stride=axis.stride,
        taps=len(taps),
        spacing=axis.dilation,
        filter_first=taps.start,
        filter_step=1,
        place_first=outputs.start,
        place_step=1,
    )
    return (
        traversal if len(outputs) * len(taps) == axis.output * axis.filter else _narrowed(traversal)
    )


def _phase(axis: ConvAxis, inputs: range, taps: range) -> AxisTraversal:
    # The traversal visits taps in reverse order.
    base, spacing = axis.outputs_of_phase(inputs, taps)
    traversal = AxisTraversal(
        extent=axis.output,
        pixels=len(inputs),
        base=base,
        stride=1,
        taps=len(taps),
        spacing=spacing,
        filter_first=taps[-1] if taps else 0,
        filter_step=-taps.step,
        place_first=inputs.start,
        place_step=axis.stride,
    )
    return traversal if (inputs, taps) in axis.stride_phases else _narrowed(traversal)


def _narrowed(traversal: AxisTraversal) -> AxisTraversal:
    """Return a traversal that reads no padding, with a tensor map of only the coordinates that it
    reads.

    The corners of this map are within TMA's limits, wherever the traversal begins.
    """
    if not traversal.taps:
        return traversal
    read = (traversal.pixels - 1) * traversal.stride + (traversal.taps - 1) * traversal.spacing + 1
    return traversal._replace(start=traversal.base, base=0, extent=read)


def windows(problem: ConvProblem, line: int) -> int:
    """Return the number of windows, which are pairs of a tap and a line of ``line`` channels.

    In the filter gradient, windows are one side of the matrix, and filters are the other side.
    """
    return prod(problem.filter_sizes) * -(-(problem.C // problem.groups) // line)


def matrices(
    problem: ConvProblem, pass_: str, tile: Tile, splits: int, divided: bool = False
) -> list[tuple[int, int, int]]:
    """Return the rows and columns of a group's matrix C, and the steps along k, per traversal.

    A step multiplies one line along k.  In the filter gradient, the channels of each tap are padded
    to whole lines.
    """
    found = list(_matrices_of(problem, pass_, tile.block_k, divided))
    if pass_ == "backprop_filter" and not has_window_rows(problem, tile, splits):
        ((rows, columns, steps),) = found
        return [(columns, rows, steps)]
    return found


@lru_cache(maxsize=256)
def _matrices_of(
    problem: ConvProblem, pass_: str, line: int, divided: bool
) -> tuple[tuple[int, int, int], ...]:
    """Return ``matrices`` for lines of ``line`` elements, with windows as rows."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    if pass_ == "backprop_filter":
        steps = -(-_pixels(problem, problem.output_sizes, line) // line)
        return ((windows(problem, line) * line, filters, steps),)
    summed, columns = (channels, filters) if pass_ == "forward" else (filters, channels)
    return tuple(
        (
            _pixels(problem, [axis.pixels for axis in traversal], line),
            columns,
            prod([axis.taps for axis in traversal]) * -(-summed // line),
        )
        for traversal in traversals(problem, pass_, divided)
    )


def _pixels(problem: ConvProblem, sizes: Sequence[int], line: int) -> int:
    """Return the number of pixels of all images, with planar rows padded to whole lines."""
    *outer, row = sizes
    row = -(-row // line) * line if is_planar(problem) else row
    return problem.N * prod(outer) * row


def split_elements(problem: ConvProblem, pass_: str, tile: Tile) -> int:
    """Return the number of sums per split: the elements of C, with columns padded (SUMS_PIECE)."""
    ((rows, columns, _),) = matrices(problem, pass_, tile, 1)
    return rows * -(-columns // SUMS_PIECE) * SUMS_PIECE * problem.groups


def has_window_rows(problem: ConvProblem, tile: Tile, splits: int) -> bool:
    """Return whether the rows of the filter gradient's product are windows; else they are filters.

    Without splits, the contiguous axis of the result must run along the columns.  With splits,
    either order is possible, and the order with fewer tiles is used.
    """
    as_stored = filters_last(problem)
    if splits == 1:
        return as_stored
    sides = windows(problem, tile.block_k) * tile.block_k, problem.K // problem.groups
    tiles = {True: tile_count(tile, *sides), False: tile_count(tile, *sides[::-1])}
    return as_stored if tiles[True] == tiles[False] else tiles[True] < tiles[False]


def cluster_splits(problem: ConvProblem, pass_: str, tile: Tile, splits: int, tiles: int) -> int:
    """Return the number of splits that a cluster adds, or 1 if a second launch adds them.

    A cluster adds them unless this takes more waves, because some multiprocessors get no cluster,
    or more registers than a thread has: in filter gradients of volumes or with channels first, the
    addresses of tiles of more than 128 rows or columns would spill.

    Args:
        problem, pass_: the problem, in the layout that the tile reads, and the pass.
        tile, splits: the tile, and the number of splits.
        tiles: number of tiles in all groups.
    """
    size, blocks = tile.defines["CLUSTER"] * splits, tiles * splits
    if size > CLUSTER_BLOCKS or -(-blocks // places(size)) > -(-blocks // places(1)):
        return 1
    has_long_addresses = problem.spatial_rank == 3 or tile.defines["PLANAR"]
    if pass_ == "backprop_filter" and has_long_addresses and max(tile.block_m, tile.block_n) > 128:
        return 1
    return splits


def cluster_splits_of(problem: ConvProblem, pass_: str, tile: Tile, splits: int) -> int:
    """Return ``cluster_splits`` of a pass."""
    if splits == 1:
        return 1
    ((rows, columns, _),) = matrices(problem, pass_, tile, splits)
    tiles = tile_count(tile, rows, columns) * problem.groups
    return cluster_splits(problem, pass_, tile, splits, tiles)


@cache
def places(cluster: int) -> int:
    """Return how many multiprocessors clusters of this many blocks occupy, one block each."""
    pairs, rest = divmod(CHIPS[9, 0].multiprocessors // 2, _GPCS)
    clusters = (_GPCS - rest) * (2 * pairs // cluster) + rest * (2 * (pairs + 1) // cluster)
    return clusters * cluster


def tile_count(tile: Tile, rows: int, columns: int) -> int:
    """Return the number of tiles of a matrix that is padded to whole clusters."""
    cluster = tile.defines["CLUSTER"]
    return -(-rows // (tile.block_m * cluster)) * cluster * -(-columns // tile.block_n)


def is_pointwise(problem: ConvProblem) -> bool:
    """Return whether the layer is a plain matrix product over the pixels."""
    return all(map(_is_plain, problem.axes))


def _is_plain(axis: ConvAxis) -> bool:
    return axis.filter == axis.stride == 1 and not axis.pad_before and not axis.pad_after


def is_planar(problem: ConvProblem) -> bool:
    """Return whether kernels read x and dy with channels first, in lines of pixels of a row."""
    return problem.data_axes[1] == 1


def row_ends(problem: ConvProblem, pass_: str) -> tuple[int, ...]:
    """Return the row length in each tensor map of the operand under the taps, in a planar layout.

    The filter gradient sums over lines of pixels.  If the last line of a row is padded, each tap
    along the row has its own map: x ends at the element that the tap reads for the last pixel.
    """
    axis, line = problem.axes[-1], LINE_BYTES // ITEMSIZE[problem.dtype]
    if pass_ != "backprop_filter" or axis.output % line == 0:
        return (axis.output if pass_ == "backprop_input" else axis.input,)
    lasts = (
        (axis.output - 1) * axis.stride - axis.pad_before + tap * axis.dilation
        for tap in range(axis.filter)
    )
    return tuple(min(axis.input, last + 1) for last in lasts)


def flattens(strides: Sequence[int], shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether axes of a tensor, outermost first, can be merged into one axis."""
    long_axes = [axis for axis in axes if shape[axis] > 1]
    return all(
        strides[outer] == strides[inner] * shape[inner] for outer, inner in pairwise(long_axes)
    )


def filters_last(problem: ConvProblem) -> bool:
    """Return whether filters are the last axis of w; else channels are."""
    return problem.filter_axes[0] == len(problem.filter_shape) - 1


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Formats and strides of the tensors that the kernels read.

    Attributes:
        problem: the problem with channels last, and channels or filters last in w.  In a planar
            layout, x and y have channels first; if the strides allow it, the last pointwise axes
            are merged into one.  A planar problem with three spatial axes has bands
            (``_in_bands``).
        strides: strides of the tensors in the formats of ``problem``.
        copied: names of operands that TMA cannot read.  Kernels read copies of them, in which each
            pixel or tap begins at a multiple of 16 bytes.
    """

    problem: ConvProblem
    strides: Strides
    copied: tuple[str, ...]

    @cached_property
    def copied_bytes(self) -> int:
        """Size of the copies, in bytes."""
        itemsize = ITEMSIZE[self.problem.dtype]
        return sum(copy_bytes(shape_of(self.problem, role), itemsize) for role in self.copied)


@lru_cache(maxsize=4096)
def layouts(
    problem: ConvProblem, pass_: str, strides: Strides, operands: str
) -> Mapping[int, Layout]:
    """Return the layouts of a pass by PLANAR: 0 for channels last, 1 for a planar layout.

    Args:
        problem, pass_: the problem and the pass.
        strides: strides of the tensors in the problem's formats.
        operands: type of the operands as in Request.operands, or "planes" if each operand is split
            into planes of bfloat16, so that TMA does not read the operand itself.
    """
    filter_, channel, *taps = problem.filter_axes
    last = strides.w[filter_] == 1 and strides.w[channel] != 1
    if operands == "tf32" and pass_ == "backprop_filter":
        return {1: _in_bands(problem, strides, last)}
    if operands == "tf32":  # wgmma requires both operands contiguous along k
        last = pass_ == "backprop_input"
    data_order = (problem.data_axes[0], *problem.data_axes[2:], problem.data_axes[1])
    filter_order = (*taps, channel, filter_) if last else (filter_, *taps, channel)
    target, steps = reordered(problem, strides, data_order, filter_order)
    read = ROLES_OF[pass_][:-1]
    pixels = {"x", "y"} & set(read)
    is_aligned = strides.alignment % PIECE_BYTES == 0
    readable = {
        role for role in read if is_aligned and _is_readable(target, pass_, role, steps[role])
    }
    if operands == "planes":
        readable = set(read)
    found = {0: _with_copies(strides, target, steps, pass_, readable)}
    if is_aligned and operands != "tf32" and not pixels <= readable:
        planar, planar_steps = _channels_first(problem, strides, filter_order)
        if _has_lines(planar, pass_, {role: planar_steps[role] for role in pixels}):
            found[1] = _with_copies(strides, planar, planar_steps, pass_, readable | pixels)
    return found


def _with_copies(
    strides: Strides,
    target: ConvProblem,
    steps: dict[str, tuple[int, ...]],
    pass_: str,
    readable: Container[str],
) -> Layout:
    """Return the layout with copies of the operands that TMA cannot read."""
    copied = tuple(role for role in ROLES_OF[pass_][:-1] if role not in readable)
    itemsize = ITEMSIZE[target.dtype]
    copies = {role: copy_strides(shape_of(target, role), itemsize) for role in copied}
    steps = {**steps, **copies}
    return Layout(target, replace(strides, x=steps["x"], w=steps["w"], y=steps["y"]), copied)


def _channels_first(
    problem: ConvProblem, strides: Strides, filter_order: Sequence[int]
) -> tuple[ConvProblem, dict[str, tuple[int, ...]]]:
    """Return the problem and its strides with channels first.

    The last spatial axes are merged into one if they are pointwise and the strides allow it.
    """
    target, steps = reordered(problem, strides, problem.data_axes, filter_order)
    shapes = {role: shape_of(target, role) for role in ("x", "y")}
    rank = target.spatial_rank
    first = rank - len(list(takewhile(_is_plain, reversed(target.axes))))
    merged = range(2 + first, 2 + rank)
    if len(merged) < 2 or not all(flattens(steps[role], shapes[role], merged) for role in shapes):
        return target, steps
    dropped = target.filter_axes[3 + first :]
    kept = [axis for axis in range(len(filter_order)) if axis not in dropped]
    flat = derived(
        problem,
        input_shape=(*shapes["x"][: merged.start], prod(shapes["x"][merged.start :])),
        filter_shape=permuted(target.filter_shape, kept),
        stride=target.stride[: first + 1],
        padding=target.padding[: first + 1],
        dilation=(*target.dilation[:first], 1),
        data_format=data_formats(first + 1)[0],
        filter_format=filter_formats(first + 1)[1 if filters_last(target) else 2],
        padding_mode="explicit",
    )
    flat_steps = {"w": permuted(steps["w"], kept)}
    for role, shape in shapes.items():
        long_axes = [axis for axis in merged if shape[axis] > 1]
        inner = steps[role][long_axes[-1]] if long_axes else 1
        flat_steps[role] = (*steps[role][: merged.start], inner)
    return flat, flat_steps


def has_bands(problem: ConvProblem) -> bool:
    """Return whether the last axis of x and y is (image, band); see ``_in_bands``."""
    return is_planar(problem) and problem.spatial_rank == 3


def _in_bands(problem: ConvProblem, strides: Strides, filters_last: bool) -> Layout:
    """Return a layout for the filter gradient of a 1-D or 2-D problem, with copies of x and y.

    The output rows of each image are divided into bands of equal height.  The copies have the axes
    (row of a band, column, channel, (image, band)) in memory, and the filter has a single tap along
    the last axis.  So the products are summed along contiguous memory, and every tap begins at a
    multiple of 16 bytes.  The bands of x overlap.
    """
    rows = problem.axes[0]
    extent, itemsize = rows.output, ITEMSIZE[problem.dtype]
    line = LINE_BYTES // itemsize

    def read(bands: int) -> tuple[int, int]:
        """Return the first row and the end of the rows of a band that any band reads from x.

        There is at least one row, because TMA supports no empty tensors.
        """
        height = extent // bands
        first = rows.pad_before - (bands - 1) * height * rows.stride
        end = (height - 1) * rows.stride + rows.effective_filter
        first, end = max(first, 0), min(end, rows.pad_before + rows.input)
        return first, max(end, first + 1)

    def work(bands: int) -> float:
        """Return the bytes of x that are moved, and the bytes moved during the products."""
        pairs, (first, end) = problem.N * bands, read(bands)
        pixels = -(-pairs // line) * line * (extent // bands) * out_width
        copied = 2 * itemsize * problem.C * pairs * (end - first) * width
        return copied + 2 * pixels * products / _FLOPS_PER_BYTE

    # Products per pixel: tiles have whole lines of channels, and pairs of lines of filters.
    filters = -(-problem.K // problem.groups // (2 * line)) * 2 * line
    products = problem.groups * windows(problem, line) * line * filters
    width, out_width = (prod(sizes[1:]) for sizes in (problem.input_sizes, problem.output_sizes))
    # Divisors ascend, so that equal work gives the fewest bands.
    divisors = [count for count in range(1, isqrt(extent) + 1) if extent % count == 0]
    divisors += [extent // count for count in reversed(divisors)]
    bands = min(divisors, key=work)
    first, end = read(bands)
    beyond = (extent // bands - 1) * rows.stride + rows.effective_filter - end
    filter_, channel, *taps = problem.filter_axes
    missing = 3 - len(taps)  # the last axis and, in 1-D, the columns
    ones = (1,) * missing
    sizes = (*problem.filter_sizes, *ones)
    steps = (*(strides.w[axis] for axis in taps), *ones)
    of_filter = problem.filter_shape[filter_], strides.w[filter_]
    of_channel = problem.filter_shape[channel], strides.w[channel]
    ordered = [*zip(sizes, steps, strict=True), of_channel]
    ordered.insert(len(ordered) if filters_last else 0, of_filter)
    target = derived(
        problem,
        input_shape=(1, problem.C, end - first, width, problem.N * bands),
        filter_shape=tuple(size for size, _ in ordered),
        stride=(*problem.stride, *ones),
        padding=((first, beyond), *problem.padding[1:], *((0, 0) for _ in ones)),
        dilation=(*problem.dilation, *ones),
        data_format=data_formats(3)[0],
        filter_format=filter_formats(3)[1 if filters_last else 2],
        padding_mode="explicit",
    )
    x, y = (band_strides(shape_of(target, role), itemsize) for role in ("x", "y"))
    w = tuple(step for _, step in ordered)
    return Layout(target, replace(strides, x=x, w=w, y=y), ("x", "y"))


def _has_lines(problem: ConvProblem, pass_: str, steps: Mapping[str, Sequence[int]]) -> bool:
    """Return whether TMA can read rows of these tensors, with few pixels wasted on padded lines.

    Windows must be adjacent along a row, and each tap must begin at a multiple of 16 bytes.
    """
    axis, itemsize = problem.axes[-1], ITEMSIZE[problem.dtype]
    if problem.spatial_rank > 2 or (axis.stride > 1 and pass_ != "backprop_input"):
        return False
    rows = [traversal[-1] for traversal in traversals(problem, pass_)]
    taps = [row.base + tap * row.spacing for row in rows for tap in range(row.taps)]
    if any(first * itemsize % PIECE_BYTES for first in taps):
        return False
    if not all(mappable(given, shape_of(problem, role), itemsize) for role, given in steps.items()):
        return False
    ends = row_ends(problem, pass_)
    if len(ends) > MAX_MAPS or min(ends) < 1:
        return False
    line = LINE_BYTES // itemsize
    sizes = [[axis.pixels for axis in traversal] for traversal in traversals(problem, pass_)]
    computed = sum(_pixels(problem, size, line) for size in sizes)
    return computed <= _MOST_FILLED * problem.N * sum(map(prod, sizes))


def _is_readable(problem: ConvProblem, pass_: str, role: str, steps: Sequence[int]) -> bool:
    """Return whether TMA can read an operand with these strides."""
    shape = shape_of(problem, role)
    if not mappable(steps, shape, ITEMSIZE[problem.dtype]):
        return False
    axes = range(len(shape) - 1)
    if role == "w":  # taps are merged into one axis
        first = 0 if filters_last(problem) else 1
        return flattens(steps, shape, range(first, first + problem.spatial_rank))
    is_gathered = role == ROLES_OF[pass_][0]
    return not (is_pointwise(problem) or not is_gathered) or flattens(steps, shape, axes)


def mappable(steps: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Return whether the driver accepts a tensor map for these strides.

    The last axis must be contiguous, and each stride must be at least the span of the axes inside
    it.  Reversed, broadcast, overlapping or permuted axes have no map.
    """
    if steps[-1] != 1:
        return False
    inner, extent = itemsize, shape[-1]
    for step, outer in list(zip(steps, shape, strict=True))[-2::-1]:
        if outer == 1:
            continue  # an axis of one element may have any stride
        stride = step * itemsize
        if stride % max(inner, PIECE_BYTES) or not inner * extent <= stride < _LARGEST_STRIDE_BYTES:
            return False
        inner, extent = stride, outer
    return True


# -- refusals --------------------------------------------------------------------------------------


def layouts_of(request: Request) -> Mapping[int, Layout]:
    """Return the layouts of a request, by PLANAR."""
    return layouts(request.problem, request.pass_, request.memory, request.operands)


def layout_of(request: Request, tile: Tile) -> Layout:
    """Return the layout that a tile reads."""
    operands = "planes" if tile.defines["PLANES"] > 1 else request.operands
    found = layouts(request.problem, request.pass_, request.memory, operands)
    return found[tile.defines["PLANAR"]]


def tma_refuses(request: Request, operand_bytes: int) -> str | None:
    """Return why TMA or wgmma cannot use the operands; None if both can."""
    problem = request.problem
    if request.device.target != "sm_90a":
        return "wgmma needs compute capability 9.0"
    if not request.device.has_tensor_maps:
        return "TMA needs a driver that encodes tensor maps"
    if 0 in (*problem.input_shape, *problem.filter_shape, *problem.output_shape):
        return "TMA does not support empty tensors"
    if problem.groups > 1:
        refusal = _refuse_groups(problem, request.pass_, LINE_BYTES // operand_bytes)
        if refusal is not None:
            return refusal
    return _refuse_traversals(problem, request.pass_)


def tma_counts(request: Request, operand_bytes: int, planes: int = 1) -> Iterator[Count]:
    """Yield the quantities that must fit into TMA's coordinates and the kernels' counters."""
    problem, line = request.problem, LINE_BYTES // operand_bytes
    yield from extent_counts(problem)
    # Rows of pixels are padded to whole lines, which adds at most a quarter (_MOST_FILLED).  With
    # this limit, the padded pixels too can be counted in 32 bits.
    pixels = problem.N * max(prod(problem.input_sizes), prod(problem.output_sizes))
    yield Count("pixels", pixels, 2**30 - 1)
    yield Count("images", problem.N, (2**31 - 1) // planes)
    most = 2**31 - _MOST_TILE_ROWS
    if request.pass_ == "backprop_input":
        filters = -(-(problem.K // problem.groups) // line) * line
        yield Count("filters under all taps", prod(problem.filter_sizes) * filters, most)
    else:
        yield Count("channels under all taps", windows(problem, line) * line, most)


def most_tiles(request: Request) -> int:
    """Return the largest number of tiles that the 32-bit tile counter of a block supports."""
    # A block's counter ends beyond the last tile, by less than two rounds of the resident blocks.
    return 2**31 - 1 - 2 * request.device.resident_blocks


def _refuse_groups(problem: ConvProblem, pass_: str, line: int) -> str | None:
    """Return why TMA cannot load the channels or filters of one group; None if it can."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    if 2 * min(channels, filters) < line:
        return (
            f"a line of {line} channels or filters must be at least half filled by one group: "
            f"groups have {channels} and {filters}"
        )
    # TMA requires innermost coordinates that are multiples of 16 bytes, also at a group's start.
    piece = line * PIECE_BYTES // LINE_BYTES
    if channels % piece or filters % piece:
        return (
            f"each group must have a multiple of {piece} channels and filters: groups have "
            f"{channels} and {filters}"
        )
    # A sum must not include another group, which may contain a NaN.
    summed = {"forward": (channels, "channels"), "backprop_input": (filters, "filters")}
    count, role = summed.get(pass_, (0, ""))
    if count % line:
        return (
            f"each group must have a multiple of {line} {role}, since TMA loads lines of {line}: "
            f"groups have {count}"
        )
    return None


def _refuse_traversals(problem: ConvProblem, pass_: str) -> str | None:
    """Return why TMA's im2col mode does not support a pass; None if the mode supports it."""
    phases = prod(problem.stride) if pass_ == "backprop_input" else 1
    if phases > MAX_MAPS:
        return f"the kernel takes up to {MAX_MAPS} stride phases, not {phases}"
    if is_pointwise(problem):
        return None
    if not any(map(has_taps, traversals(problem, pass_))):
        return "no tap of the filter reads the input"
    low, high = _CORNERS[problem.spatial_rank]
    for axis in (
        axis
        for traversal in traversals(problem, pass_)
        if has_taps(traversal)
        for axis in traversal
    ):
        if axis.stride > _LARGEST_ELEMENT_STRIDE:
            return f"TMA supports strides up to {_LARGEST_ELEMENT_STRIDE}, not {axis.stride}"
        if not low <= axis.base <= high or not low <= axis.upper <= high:
            corners = f"{axis.base} and {axis.upper}"
            return f"TMA supports corners of base pixels in [{low}, {high}], not {corners}"
        offset = (axis.taps - 1) * axis.spacing
        if offset > _LARGEST_OFFSET[problem.spatial_rank]:
            most = _LARGEST_OFFSET[problem.spatial_rank]
            return f"TMA supports offsets of taps up to {most} pixels, not {offset}"
    return None


# -- tiles -----------------------------------------------------------------------------------------


def consumers(block_m: int) -> int:
    """Return the number of warpgroups per block that multiply; one more warpgroup loads operands.

    Each computes an equal share of a tile's rows or, if ``takes_turns``, whole tiles.
    """
    return 2 if block_m % 128 == 0 else 3


def _consumer_bytes(block_n: int, itemsize: int) -> int:
    """Return the bytes of a consumer warpgroup's biases, output buffers and barrier.

    The two output buffers have 64 x 64 elements each; float32 needs none.
    """
    return block_n * 4 + (2 * 64 * LINE_BYTES if itemsize == 2 else 0) + BARRIER_BYTES


def pipeline_stages(block_m: int, block_n: int, itemsize: int) -> int:
    """Return the number of stages, each with two barriers, that shared memory has room for.

    Args:
        block_m, block_n: extents of the tile.
        itemsize: bytes per element of C.
    """
    fixed = consumers(block_m) * _consumer_bytes(block_n, itemsize)
    room = (CHIPS[9, 0].block_shared << 10) - fixed
    return min(room // ((block_m + block_n) * LINE_BYTES + 2 * BARRIER_BYTES), MOST_STAGES)


def tile_of(block_m: int, block_n: int, itemsize: int, operand_bytes: int, **macros: int) -> Tile:
    """Return a tile of a kernel with ``consumers`` consumer warpgroups and one producer warpgroup.

    Args:
        block_m, block_n: extents of the tile.
        itemsize: bytes per element of C.
        operand_bytes: bytes per element of A and B as the kernel multiplies them.
        macros: all other macros of the tile.
    """
    line, threads = LINE_BYTES // operand_bytes, (consumers(block_m) + 1) * WARPGROUP
    return Tile(block_m, block_n, line, threads, tuple(macros.items()), (9, 0), itemsize)


def takes_turns(tile: Tile, added: int) -> bool:
    """Return whether the consumer warpgroups compute whole tiles in turn (macro TURNS).

    ``added`` is the number of splits that a cluster adds.
    """
    return tile.block_n == 64 and tile.defines["PLANES"] == added == 1


def _matrices(
    request: Request, tile: Tile, splits: int, divided: bool = False
) -> list[tuple[int, int, int]]:
    """Return ``matrices`` of a request, in the layout that the tile reads."""
    return matrices(layout_of(request, tile).problem, request.pass_, tile, splits, divided)


def busiest(tiles: Sequence[tuple[int, int]], places: int) -> int:
    """Return the most steps that a multiprocessor computes, if tiles have several lengths.

    Tiles run in rounds, from the longest to the shortest.  The multiprocessor that computes the
    first tile of a round computes the last of the next round (``Schedule`` in cuda/conv_hopper.cu).

    Args:
        tiles: pairs of a number of tiles and the steps of each.
        places: multiprocessors.

    >>> busiest([(3, 10), (4, 1)], places=4)  # 10, 10, 10, 1 and then, for three of them, 1
    11
    """
    if len(tiles) == 1:
        ((count, steps),) = tiles
        return -(-count // places) * steps
    runs, end = [], 0
    for count, steps in sorted(tiles, key=itemgetter(1), reverse=True):
        runs.append((end, end + count, steps))
        end += count
    # The sums of adjacent multiprocessors differ only where one of their tiles begins a run.
    period = 2 * places
    edges = {places, *(edge % period for run in runs for edge in run[:2])}
    near = {at % period for edge in edges for at in (edge, edge - 1)}
    found = []
    for place in {min(at, period - 1 - at) for at in near}:
        sums = 0
        for first, last, steps in runs:
            for tile in (place, period - 1 - place):
                sums += steps * ((last - tile - 1) // period - (first - tile - 1) // period)
        found.append(sums)
    return max(found)


def _divisions(request: Request, tile: Tile) -> list[bool]:
    """Return whether frames may be divided: False and, if the kernel takes the traversals, True."""
    problem, pass_ = request.problem, request.pass_
    if tile.defines["PLANAR"] or not frames.is_worthwhile(problem, pass_):
        return [False]
    divided = traversals(problem, pass_, True)
    least = _CORNERS[problem.spatial_rank][0]
    fits = len(divided) <= MAX_MAPS and all(traversal[0].upper >= least for traversal in divided)
    return [False, True] if fits else [False]


def _exchange(chip: Chip, tile: Tile, splits: int) -> cost.Work:
    """Return the work of a block that adds its share of a tile's splits in a cluster.

    The block reads the sums of the other splits from other blocks, at its share of the device
    memory's bandwidth (modelled).
    """
    read = 4 * tile.block_m * tile.block_n * (splits - 1) / splits
    return cost.Work(0, read / cost.per_cycle(chip, chip.bandwidth / 1e3))


def _empty(request: Request, tile: Tile) -> float:
    """Return the share of the source's lines that TMA fills with zeros, for lack of channels."""
    problem, line = request.problem, tile.block_k
    if tile.defines["PLANAR"]:
        return 0.0
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    summed = {"forward": (channels,), "backprop_input": (filters,)}
    counts = summed.get(request.pass_, (channels, filters))
    return max(1 - count / (-(-count // line) * line) for count in counts)


def _split_bytes(request: Request, tile: Tile) -> int:
    """Return the workspace bytes per split."""
    return split_elements(layout_of(request, tile).problem, request.pass_, tile) * 4


# -- launches --------------------------------------------------------------------------------------

_SHARED_ALIGNMENT = 1024
_BOX = LINE_BYTES // 2  # pixels and channels per TMA store of 16-bit types

# Values of the macro STORE in cuda/conv_hopper.cu.
STORE_ROWS, STORE_BOXES, STORE_FLOAT, STORE_COLUMNS = range(4)


class Operand(NamedTuple):
    """Location of a tensor, or of its planes.

    Attributes:
        role: name of the array that contains the tensor.
        itemsize: bytes per element.
        strides: strides of all tensors of the pass, as they are stored.
        offset: bytes from the beginning of the array to the tensor.
        planes: number of planes, stored consecutively; 1 for a plain tensor.
    """

    role: str
    itemsize: int
    strides: Strides
    offset: int = 0
    planes: int = 1


class Staged(NamedTuple):
    """A pass with the locations of the operands that its product reads.

    Attributes:
        problem, strides: problem and strides in the formats that the product reads.
        gathered, other: location of the tensor under the taps, and of the other operand.
        before: launches that copy operands, or split them into planes.
        copies: name of each copied operand, with the byte offset of its copy in the workspace.
    """

    problem: ConvProblem
    strides: Strides
    gathered: Operand
    other: Operand
    before: tuple[Launch, ...]
    copies: tuple[tuple[str, int], ...]


def stage(request: Request, choices: Choices, copied_w: bool = False) -> Staged:
    """Return a pass with the locations of its operands; arguments are as for ``Family.launches``.

    In the workspace, copies and planes follow the sums of splits.
    """
    problem, strides, pass_ = request.problem, request.memory, request.pass_
    tile, splits = choices.tile, choices.splits
    assert tile is not None
    planes = tile.defines["PLANES"]
    has_planes = planes == PLANES
    multiplied = "tf32" if problem.dtype == "float32" else problem.dtype
    found = layouts(problem, pass_, strides, "planes" if has_planes else multiplied)
    layout = found[tile.defines["PLANAR"]]
    itemsize = 2 if has_planes else ITEMSIZE[problem.dtype]
    in_bands = has_bands(layout.problem)

    offset = 0
    if splits > cluster_splits_of(layout.problem, pass_, tile, splits):
        offset = splits * split_elements(layout.problem, pass_, tile) * 4
    operands: list[Operand] = []
    made: list[tuple[str, int]] = []
    for role in ROLES_OF[pass_][:-1]:
        operand = Operand(role, itemsize, layout.strides)
        if has_planes or role in layout.copied:
            copies = layout.strides if in_bands else _copies(layout.problem, itemsize)
            if role == "w" and copied_w:
                operand = Operand(role, itemsize, copies, planes=planes)
            else:
                operand = Operand("workspace", itemsize, copies, offset, planes)
                made.append((role, offset))
                offset += planes * copy_bytes(shape_of(layout.problem, role), itemsize)
        operands.append(operand)
    gathered, other = operands
    make = arrange_bands if in_bands else split if has_planes else arrange
    before = (make(problem, layout.problem, strides, made),) if made else ()
    return Staged(layout.problem, layout.strides, gathered, other, before, tuple(made))


def _copies(problem: ConvProblem, itemsize: int) -> Strides:
    """Return the strides that copies of x, w and y have."""
    x, w, y = (copy_strides(shape_of(problem, role), itemsize) for role in ("x", "w", "y"))
    return Strides(x, w, y)


def common_defines(
    tile: Tile, pass_: str, problem: ConvProblem, epilogue: Epilogue
) -> dict[str, str | int]:
    """Return the macros of the pass, the types, the tile, the order of w, and the epilogue."""
    has_planes = tile.defines["PLANES"] == PLANES
    return {
        "PASS": PASSES.index(pass_),
        "STORAGE": "bfloat16_t" if has_planes else STORAGE[problem.dtype],
        "RESULT": STORAGE[problem.dtype],
        **{name: value for name, value in tile.defines.items() if name != "BLOCK_K"},
        "FILTERS_LAST": int(filters_last(problem)),
        **epilogue.defines,
    }


def _grid(traversal: np.ndarray, tile: Tile, splits: int, device: Device) -> tuple[int]:
    """Return the grid of the product.

    Blocks are persistent: at most one per SM, and at most one per tile.  If clusters add splits,
    each block has one tile.
    """
    cluster, tiles = tile.defines["CLUSTER"], int(traversal["tiles"][0])
    if splits > 1:
        return (tiles * cluster * splits,)
    return (min(tiles, max(device.resident_blocks // cluster, 1)) * cluster,)


def _store(
    staged: Staged, pass_: str, traversals_: Sequence[Traversal], splits: int, epilogue: Epilogue
) -> tuple[int, int]:
    """Return the values of the macros STORE (how C is stored) and RUN (elements per vector)."""
    problem, strides, result = staged.problem, staged.strides, ROLES_OF[pass_][-1]
    steps, shape = getattr(strides, result), shape_of(problem, result)
    itemsize, alignment = ITEMSIZE[problem.dtype], strides.alignment
    if result == "w":
        along = len(shape) - 1
        of_group = shape[-1] // (problem.groups if filters_last(problem) else 1)
        canonical = strides.canonical(problem).w
    else:
        along = problem.data_axes[1]
        of_group, canonical = strides.run_of_channels(problem, result)
    run = neighbours(canonical, along, of_group, alignment, itemsize)
    if problem.dtype == "float32":
        return STORE_FLOAT, min(run, 2)
    if result == "w" or splits > 1:
        return STORE_ROWS, run
    batch, _, *spatial = problem.data_axes
    if steps[along] != 1 and any(axis.place_step > 1 for axis in traversals_[0]):
        return STORE_COLUMNS, 1  # pixels of a stride phase are not adjacent
    if steps[along] != 1:
        # Planar products pad each row, so that only pixels of one row are adjacent.  If frames are
        # divided, the pixels of one frame are adjacent.
        lined = spatial[-1:] if is_planar(problem) else spatial[len(traversals_) > 1 :]
        sizes = [shape[axis] for axis in lined]
        return STORE_COLUMNS, followers(canonical, lined, sizes, alignment, itemsize)
    is_matrix = len(traversals_) == 1 and not is_planar(problem)
    is_matrix &= flattens(steps, shape, (batch, *spatial))
    # A box must not extend into the next group.
    is_matrix &= (problem.groups == 1 or of_group % _BOX == 0) and not strides.fold
    has_map = mappable(steps, shape, itemsize) and alignment == PIECE_BYTES
    has_map &= not epilogue.adds  # the kernel loads addends only for stores without TMA
    return STORE_BOXES if is_matrix and has_map else STORE_ROWS, run


def shared_bytes(tile: Tile) -> int:
    """Return the bytes of the kernel's struct SharedMemory."""
    assert tile.itemsize is not None
    stages = tile.defines["STAGES"]
    stage_bytes = stages * (tile.block_m + tile.block_n) * LINE_BYTES
    barriers = 2 * stages * BARRIER_BYTES
    others = consumers(tile.block_m) * _consumer_bytes(tile.block_n, tile.itemsize) + barriers
    return -(-(stage_bytes + others) // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT


# -- the traversal ---------------------------------------------------------------------------------

_PHASE_FIELDS = ("pixels", "base", "taps", "filter_first", "place_first")
_SHARED_FIELDS = ("stride", "spacing", "filter_step", "place_step")


@lru_cache(maxsize=64)
def traversal_type(phases: int) -> np.dtype:
    """Return the NumPy dtype of the struct ``Traversal`` in cuda/include/traversal.cuh."""
    import numpy as np

    axes = (np.int32, parameters.SPATIAL)
    phase = np.dtype([*((name, *axes) for name in _PHASE_FIELDS), ("tile_rows", np.int32)])
    counts = ("tile_columns", "tiles_of_group", "tiles", "steps_of_split")
    return np.dtype(
        [
            *((name, *axes) for name in _SHARED_FIELDS),
            *((name, np.int32) for name in counts),
            ("phase", phase, phases),
        ]
    )


def pack_traversal(
    problem: ConvProblem,
    traversals_: Sequence[Traversal],
    tile: Tile,
    parts: Sequence[tuple[int, int, int]],
    splits: int,
) -> np.ndarray:
    """Return the kernels' argument of type ``Traversal``: all phases and their tiles.

    Args:
        problem, tile, splits: as in ``matrices``.
        traversals_: result of ``traversals``.
        parts: result of ``matrices``.
    """
    import numpy as np

    record = np.zeros(1, traversal_type(len(traversals_)))
    fields = record[0]
    cluster_rows = tile.block_m * tile.defines["CLUSTER"]
    tiles = all_steps = 0
    for traversal, part, phase in zip(traversals_, parts, fields["phase"], strict=True):
        rows, columns, steps = part
        phase["tile_rows"] = -(-rows // cluster_rows)
        for name in _PHASE_FIELDS:
            phase[name] = _spatial(traversal, name)
        tiles += int(phase["tile_rows"]) * -(-columns // tile.block_n)
        all_steps = max(all_steps, steps)
    # These fields are equal in all phases, but a phase without taps has no spacing.
    sample = next(traversal for traversal in traversals_ if has_taps(traversal))
    for name in _SHARED_FIELDS:
        fields[name] = _spatial(sample, name)
    fields["tile_columns"] = -(-columns // tile.block_n)
    fields["tiles_of_group"] = tiles
    fields["tiles"] = tiles * problem.groups * splits
    fields["steps_of_split"] = -(-all_steps // splits)
    return record


def _spatial(traversal: Traversal, name: str) -> list[int]:
    """Return a traversal's field for three axes; missing leading axes have one pixel and one
    tap."""
    missing = [int(name in ("pixels", "taps"))] * (parameters.SPATIAL - len(traversal))
    return missing + [getattr(axis, name) for axis in traversal]


# -- tensor maps -----------------------------------------------------------------------------------


def _maps(
    staged: Staged, pass_: str, tile: Tile, traversals_: Sequence[Traversal], splits: int
) -> list[TensorMap]:
    """Return the tensor maps of the operand under the taps, then the map of the other operand.

    The operand under the taps has one map per traversal or, if it is planar, one map per row
    length.
    """
    problem = staged.problem
    gathered, other, _ = ROLES_OF[pass_]
    line = tile.block_k
    # Pixels are the rows of a tile of C; in backprop_filter, they run along k.
    pixels = line if pass_ == "backprop_filter" else tile.block_m
    maps: list[TensorMap]
    if is_planar(problem):
        ends = row_ends(problem, pass_)
        maps = [_rows(problem, gathered, staged.gathered, line, end, line) for end in ends]
    elif is_pointwise(problem):
        maps = [_pixel_matrix(problem, gathered, staged.gathered, line, pixels)]
    else:
        # A phase without taps loads nothing; its map only has to be valid.
        sample = next(traversal for traversal in traversals_ if has_taps(traversal))
        maps = [
            _im2col(
                problem, gathered, staged.gathered, traversal if has_taps(traversal) else sample,
                line, pixels,
            )
            for traversal in traversals_
        ]  # fmt: skip
    if pass_ == "backprop_filter" and is_planar(problem):
        filters = line
        if has_bands(problem):  # one load for all filters of a block
            window_rows = has_window_rows(problem, tile, splits)
            filters = tile.block_n // tile.defines["CLUSTER"] if window_rows else tile.block_m
        maps.append(_rows(problem, other, staged.other, line, problem.axes[-1].output, filters))
    elif pass_ == "backprop_filter":
        maps.append(_pixel_matrix(problem, other, staged.other, line, line))
    else:
        maps.append(filter_map(problem, pass_, tile, staged.other))
    return maps


def _pixel_matrix(
    problem: ConvProblem,
    role: str,
    operand: Operand,
    line: int,
    pixels: int,
    with_planes: bool = True,
) -> TiledMap:
    """Return the map of x or y as a matrix; a box has ``line`` channels of ``pixels`` pixels.

    ``with_planes`` adds planes as the outermost dimension.
    """
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *spatial = problem.data_axes
    count, step = _merged_axis(shape, steps, (*reversed(spatial), batch))
    strides = _outer_strides(shape[channel], [(count, step), (operand.planes, 0)], operand.itemsize)
    extents, box = (shape[channel], count, operand.planes), (line, pixels, 1)
    dimensions = 2 + with_planes
    return TiledMap(
        operand.role,
        operand.itemsize,
        extents[:dimensions],
        strides[: dimensions - 1],
        box[:dimensions],
        operand.offset,
    )


def _merged_axis(
    shape: Sequence[int], steps: Sequence[int], axes: Sequence[int]
) -> tuple[int, int]:
    """Return the extent and the stride of the axis that several axes merge into.

    Args:
        shape, steps: shape and strides of the tensor.
        axes: axes to merge, innermost first.
    """
    long_axes = [axis for axis in axes if shape[axis] > 1]
    return prod(shape[axis] for axis in long_axes), steps[long_axes[0]] if long_axes else 0


def _outer_strides(inner: int, axes: Sequence[tuple[int, int]], itemsize: int) -> tuple[int, ...]:
    """Return the strides of axes in bytes, from the second innermost axis outwards.

    Each stride must be a multiple of the previous stride.  Therefore an axis of one element gets
    the stride of the next outer axis with several elements, if any.

    Args:
        inner: extent of the innermost axis.
        axes: extent and stride, in elements, of the other axes.  A stride of 0 means the stride of
            a dense tensor.
        itemsize: bytes per element.
    """
    beyond, strides = pitch(inner, itemsize), []
    for place, (extent, _) in enumerate(axes):
        stride = next((step for size, step in axes[place:] if size > 1), 0) or beyond
        strides.append(stride * itemsize)
        beyond = stride * extent
    return tuple(strides)


def _rows(
    problem: ConvProblem, role: str, operand: Operand, line: int, end: int, channels: int
) -> TiledMap:
    """Return the map of x or y with channels first; a box has ``line`` pixels of one row.

    Args:
        problem: the problem.
        role: "x" or "y".
        operand: location of the tensor.
        line: number of pixels per box.
        end: number of pixels of a row that the map contains; pixels from ``end`` on read as zero.
        channels: number of channels per box.
    """
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *rows, _ = range(len(shape))
    ones = (1,) * len(rows)
    outwards, box = (*reversed(rows), channel, batch), (line, *ones, channels, 1)
    if has_bands(problem):  # there is one image, and channels are inside rows and columns
        outwards, box = (channel, *reversed(rows)), (line, channels, *ones)
    sizes = [(shape[axis], steps[axis]) for axis in outwards]
    return TiledMap(
        operand.role,
        operand.itemsize,
        (end, *(shape[axis] for axis in outwards)),
        _outer_strides(shape[-1], sizes, operand.itemsize),
        box,
        operand.offset,
    )


def _im2col(
    problem: ConvProblem, role: str, operand: Operand, traversal: Traversal, line: int, pixels: int
) -> Im2colMap:
    """Return the im2col map of x or y for a traversal; planes count as additional images.

    The map loads ``pixels`` pixels of ``line`` channels.
    """
    extents, strides = pixel_dimensions(problem, role, operand)
    inner_first = tuple(reversed(traversal))
    skipped = sum(axis.start * step for axis, step in zip(inner_first, strides, strict=False))
    return Im2colMap(
        operand.role,
        operand.itemsize,
        (extents[0], *(axis.extent for axis in inner_first), extents[-1] * operand.planes),
        strides,
        tuple(axis.base for axis in inner_first),
        tuple(axis.upper for axis in inner_first),
        tuple(axis.stride for axis in inner_first),
        line,
        pixels,
        operand.offset + skipped,
    )


def pixel_dimensions(
    problem: ConvProblem, role: str, operand: Operand
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the extents and the strides (in bytes) of x or y, for a tensor map.

    The axes are ordered from the innermost: channels, then spatial axes, then images.
    """
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *spatial = problem.data_axes
    axes = (*reversed(spatial), batch)
    sizes = [(shape[axis], steps[axis]) for axis in axes]
    extents = (shape[channel], *(shape[axis] for axis in axes))
    return extents, _outer_strides(shape[channel], sizes, operand.itemsize)


def filter_map(problem: ConvProblem, pass_: str, tile: Tile, operand: Operand) -> TiledMap:
    """Return the map of w with its axes in memory order.

    The axes, from the innermost, are (filters, channels, taps) or (channels, taps, filters), then
    planes.  A box has a line of the innermost axis and a single tap.  Along the other one of
    channels and filters, it has the block's share of the tile's columns if the innermost axis is k,
    and a line of k otherwise.
    """
    shape, steps = problem.filter_shape, operand.strides.w
    filter_, channel, *spatial = problem.filter_axes
    taps = _merged_axis(shape, steps, tuple(reversed(spatial)))
    channels, filters = ((shape[axis], steps[axis]) for axis in (channel, filter_))
    last, line = filters_last(problem), tile.block_k
    along_k = last == (pass_ == "backprop_input")
    rows = tile.block_n // tile.defines["CLUSTER"] if along_k else line
    inner, *others = (filters, channels, taps) if last else (channels, taps, filters)
    box = (line, rows, 1) if last else (line, 1, rows)
    return TiledMap(
        operand.role,
        operand.itemsize,
        (inner[0], *(extent for extent, _ in others), operand.planes),
        _outer_strides(inner[0], [*others, (operand.planes, 0)], operand.itemsize),
        (*box, 1),
        operand.offset,
    )


# -- families --------------------------------------------------------------------------------------


class Persistent(Family):
    """A family with persistent blocks.

    Attributes:
        passes: tile products per step along k (not passes of a convolution); each product loads its
            own operand tiles.
    """

    passes: ClassVar[int] = 1

    def before(self, request: Request, tile: Tile) -> tuple[float, int, tuple[str, ...], str]:
        """Return the moved bytes, workspace bytes, operands and kind of the copies."""
        layout = layout_of(request, tile)
        last = "images and bands of rows" if has_bands(layout.problem) else "channels"
        copied = layout.copied_bytes
        return 2 * copied, copied, layout.copied, f"copied with {last} last"

    def count_of_tiles(self, request: Request) -> Count:
        """Return the number of tiles and its limit, for the tile size that gives the most tiles."""
        most = max(
            sum(tile_count(tile, rows, columns) for rows, columns, _ in found)
            for tile in self.fitting_tiles(request)
            for found in (_matrices(request, tile, 1, one) for one in _divisions(request, tile))
        )
        return Count("tiles", most * request.problem.groups, most_tiles(request))

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            candidate
            for tile in self.fitting_tiles(request)
            for divided in _divisions(request, tile)
            for candidate in self._costed(
                request, tile, [1] if divided else self._splits(request, tile), divided
            )
        ]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        tile, splits, divided = choices.tile, choices.splits, choices.divides_frames
        names = ("tile", "splits", "divides_frames")
        if not choices.has_only(*names) or tile not in self.fitting_tiles(request):
            return None
        assert tile is not None
        fits = 1 <= splits <= (1 if divided else self._most_splits(request, tile))
        fits &= divided in _divisions(request, tile)
        return next(iter(self._costed(request, tile, [splits], divided)), None) if fits else None

    def _splits(self, request: Request, tile: Tile) -> list[int]:
        """Return the numbers of splits to estimate: 1, and numbers that fill a few waves."""
        (rows, columns, steps), *_ = _matrices(request, tile, 2)
        most = min(steps // cost.LEAST_SPLIT_STEPS, self._most_splits(request, tile))
        if most <= 1:
            return [1]
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        in_workspace, cluster = most, tile.defines["CLUSTER"]
        if request.workspace_limit is not None:
            _, least, *_ = self.before(request, tile)
            left = request.workspace_limit - least
            in_workspace = min(most, left // _split_bytes(request, tile))
        in_cluster = {}  # most splits that a cluster adds, by the number of waves
        for splits in range(2, min(most, CLUSTER_BLOCKS // cluster) + 1):
            in_cluster[-(-tiles * splits // places(cluster * splits))] = splits
        found = {1}
        for waves in range(1, _MOST_WAVES + 1):
            found.add(min(waves * request.chip.multiprocessors // tiles, in_workspace))
            found.add(in_cluster.get(waves, 1))
        # All splits have the same number of steps, up to rounding, and no split is empty.
        return sorted({-(-steps // -(-steps // splits)) for splits in found if splits > 0})

    def _most_splits(self, request: Request, tile: Tile) -> int:
        """Return the most splits that the steps and the tile counter allow."""
        found = _matrices(request, tile, 1)
        if len(found) > 1:
            return 1
        rows, columns, steps = found[0]
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        return max(min(steps, most_tiles(request) // tiles), 1)

    def _costed(
        self, request: Request, tile: Tile, splits: Sequence[int], divided: bool
    ) -> list[Candidate]:
        """Return the candidates with a tile; times include copies and the reduction of splits."""
        problem, chip = request.problem, request.chip
        moved, workspace, copied, summary = self.before(request, tile)
        of_step, stored = self._work(request, tile)
        read, found = layout_of(request, tile).problem, []
        for count in splits:
            lengths, tiles = [], 0
            for rows, columns, steps in _matrices(request, tile, count, divided):
                here = tile_count(tile, rows, columns) * problem.groups
                lengths.append((here * count, -(-steps // count)))
                tiles += here
            added = cluster_splits(read, request.pass_, tile, count, tiles)
            room = places(tile.defines["CLUSTER"] * added)
            sums = count * _split_bytes(request, tile) if count > added else 0
            if not request.affords(workspace + sums):
                continue
            waves = -(-tiles * count // room)
            work = of_step.times(busiest(lengths, room) / waves) + stored
            if added > 1:
                work += _exchange(chip, tile, added)
            kernel = cost.Kernel(tiles * count, 1, tile.threads // 32, work)
            demands = [kernel.demand(chip, problem.bytes + sums, room)]
            if added > 1 and waves > 1:  # blocks of each wave wait for their first loads
                demands.append(cost.Demand(waits=waves - 1))
            if sums:
                demands.append(cost.further(chip, sums, count))
            if copied:
                demands.append(cost.further(chip, moved))
            found.append(
                self.priced(
                    request,
                    cost.together(*demands) if len(demands) > 1 else demands[0],
                    summary=summary,
                    copied=copied,
                    tile=tile,
                    blocks=tiles,
                    splits=count,
                    workspace_bytes=workspace + sums,
                    divides_frames=divided,
                )
            )
        return found

    def _work(self, request: Request, tile: Tile) -> tuple[cost.Work, cost.Work]:
        """Return the work of a step along k, and of storing the results of a tile."""
        chip, m, n = request.chip, tile.block_m, tile.block_n
        rate = chip.group_tensor_rate / (2 if request.operands == "tf32" else 1)
        # TMA writes the lines of A and B.  A warpgroup reads its own lines of A and, for every 64
        # rows, all lines of B.
        lines = (m + n) + (m + m / 64 * n) + EMPTY_LINE * m * _empty(request, tile)
        of_step = cost.Work(
            multiplying=self.passes * 2 * m * n * tile.block_k / cost.per_cycle(chip, rate),
            wavefronts=self.passes * lines,
        )
        return of_step, cost.Work(0, cost.RESULT_WAVEFRONTS * m * n / 32)

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launches: any copy of operands, the product, and any sum of splits."""
        import numpy as np

        tile, pass_, splits = choices.tile, request.pass_, choices.splits
        assert tile is not None
        staged = stage(request, choices, copied_w)
        problem = staged.problem
        traversals_ = traversals(problem, pass_, choices.divides_frames)
        parts = matrices(problem, pass_, tile, splits, choices.divides_frames)
        traversal = pack_traversal(problem, traversals_, tile, parts, splits)
        added = cluster_splits_of(problem, pass_, tile, splits)
        traversal["tiles"] //= added
        store, run = _store(staged, pass_, traversals_, splits, epilogue)
        maps = _maps(staged, pass_, tile, traversals_, splits)
        defines: dict[str, str | int] = {
            **common_defines(tile, pass_, problem, epilogue),
            **parameters.fold_defines(problem, staged.strides),
            "WINDOW_ROWS": int(
                pass_ == "backprop_filter" and has_window_rows(problem, tile, splits)
            ),
            "SPATIAL": problem.spatial_rank,
            "PHASES": len(traversals_),
            "MAPS": len(maps) - 1,
            "POINTWISE": int(is_pointwise(problem) and not is_planar(problem)),
            "STORE": store,
            "RUN": run,
            "SPLIT": int(splits > added),
            "CLUSTER_SPLITS": added,
            "SHARED_BYTES": shared_bytes(tile),
        }
        result = ROLES_OF[pass_][-1]
        if store == STORE_BOXES:
            written = Operand(result, ITEMSIZE[problem.dtype], staged.strides)
            maps.append(_pixel_matrix(problem, result, written, _BOX, _BOX, False))
        else:
            maps.append(maps[-1])  # unused
        packed = parameters.pack(problem, staged.strides)
        product = Launch(
            source="conv_hopper.cu",
            entry="conv_hopper",
            defines=tuple(defines.items()),
            grid=_grid(traversal, tile, added, request.device),
            block=(tile.threads,),
            shared_bytes=shared_bytes(tile),
            arguments=(
                "bias",
                "add",
                result,
                "workspace",
                TensorMaps(tuple(maps)),
                traversal,
                packed,
            ),
            may_overlap=bool(staged.before),
        )
        if splits == added:
            return (*staged.before, product)
        pieces = split_elements(problem, pass_, tile) // SUMS_PIECE
        reduction = Launch(
            source="conv_hopper.cu",
            entry="conv_hopper_reduce",
            defines=product.defines,
            grid=(-(-pieces // cost.ADDING_THREADS),),
            block=(cost.ADDING_THREADS,),
            shared_bytes=0,
            arguments=("workspace", "bias", "add", result, np.int32(splits), traversal, packed),
            may_overlap=True,
        )
        return (*staged.before, product, reduction)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        """Return the copy or planes of w that the first launch makes; None if kernels read w."""
        problem, strides = request.problem, request.memory
        staged = stage(request, choices)
        if "w" not in dict(staged.copies):
            return None
        held, make = staged.other, arrange
        name: str = filter_formats(problem.spatial_rank)[1 if filters_last(staged.problem) else 2]
        if held.planes == PLANES:
            name, make = f"{name} in {PLANES} planes of bfloat16", split
        size = held.planes * copy_bytes(staged.problem.filter_shape, held.itemsize)
        return FilterForm(name, size, make(problem, staged.problem, strides, [("w", 0)]))


class Hopper(Persistent):
    name = "cuda-hopper"
    summary = "implicit GEMM on wgmma, fed by TMA, in persistent blocks that compute many tiles"
    tiles = tuple(
        tile_of(
            *(block_m, block_n, itemsize, itemsize),
            STAGES=pipeline_stages(block_m, block_n, itemsize),
            CLUSTER=cluster,
            PLANES=1,
            PLANAR=planar,
        )
        for block_m, block_n, cluster in (
            (128, 256, 2),
            (128, 256, 1),
            (256, 128, 2),
            (128, 192, 2),
            (128, 192, 1),
            (192, 128, 2),
            (128, 128, 2),
            (256, 64, 1),
            (128, 64, 1),
        )
        for itemsize, planar in ((2, 1), (2, 0), (4, 1), (4, 0))
        # Of rows that are eight windows of x, in clusters, the producer would spill registers.
        if not (itemsize == 4 and planar and block_m * cluster > 384)
        # Each block of a cluster loads as many boxes of the columns, a line wide, as the other.
        and block_n * itemsize % (LINE_BYTES * cluster) == 0
    )

    def counts(self, request: Request) -> Iterator[Count]:
        yield from tma_counts(request, ITEMSIZE[request.problem.dtype])
        for layout in layouts_of(request).values():
            if has_bands(layout.problem):  # few images and bands are padded to a line
                line = LINE_BYTES // ITEMSIZE[layout.problem.dtype]
                pixels = _pixels(layout.problem, layout.problem.output_sizes, line)
                yield Count("pixels with padding", pixels, 2**30 - 1)
        yield self.count_of_tiles(request)

    def refuses_layer(self, request: Request) -> str | None:
        operands = request.operands
        if operands not in ("float16", "bfloat16", "tf32"):
            return f"cuda-hopper multiplies 16-bit types and TF32, not {operands}"
        in_bands = operands == "tf32" and request.pass_ == "backprop_filter"
        if in_bands and request.problem.spatial_rank > 2:
            return (
                "wgmma needs TF32 operands that are contiguous along k: in backprop_filter, k runs "
                "over pixels, which cuda-hopper rearranges only in 1-D and 2-D"
            )
        refusal = tma_refuses(request, ITEMSIZE[request.problem.dtype])
        if refusal is not None:
            return refusal
        least = min(found.copied_bytes for found in layouts_of(request).values())
        if not request.affords(least):
            return (
                f"copies of the tensors need a workspace of {least} bytes, but the limit is "
                f"{request.workspace_limit}"
            )
        return None

    def fitting_tiles(self, request: Request) -> list[Tile]:
        found = layouts_of(request).items()
        affordable = [planar for planar, layout in found if request.affords(layout.copied_bytes)]
        fitting = super().fitting_tiles(request)
        return [tile for tile in fitting if tile.defines["PLANAR"] in affordable]


class ViewedHopper(Viewed, Hopper):
    """cuda-hopper with the views of views.py."""


CUDA_HOPPER = ViewedHopper()
