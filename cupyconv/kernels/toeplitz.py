"""cuda-toeplitz (cuda/conv_toeplitz.cu): depthwise convolution on the tensor cores.

The source is the tensor under the taps: x, or dy in backprop_input.  The blocks divide the pixels
of the other tensor among themselves: y, dx in backprop_input, dy in backprop_filter.  A strip is 8
adjacent columns of this divided tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from cupyconv.kernels import cost, parameters, streaming
from cupyconv.kernels.calibration import prices
from cupyconv.kernels.family import copies_async, spatial
from cupyconv.kernels.limits import MOST_BLOCKS, Count
from cupyconv.kernels.request import Epilogue, Request
from cupyconv.kernels.strides import neighbours
from cupyconv.launch import STORAGE
from cupyconv.problem import ITEMSIZE, PASSES

CHANNELS = 8
"""Channels per block, one warp each."""

THREADS = 32 * CHANNELS
"""Threads per block."""

LARGEST_ROW = 64
"""Largest number of columns of a block's part, and of taps of a filter row (hand-set).  With these
taps, a strip of 8 columns reads 9 blocks of 8 columns, in 5 products."""


@dataclass(frozen=True)
class Tiling:
    """Free choices of a launch of cuda-toeplitz, except the number of chunks.

    Attributes:
        row_tiles: number of tiles of 16 rows per block.
        aligned: 1 if the rows of each image are rounded up to whole blocks, else 0.
        strips: number of strips of 8 columns per block.
    """

    row_tiles: int
    aligned: int
    strips: int


@dataclass(frozen=True, kw_only=True)
class Geometry(streaming.Geometry):
    """Thread blocks of a tiling for a layer.

    A part is a patch: the rows and columns of the divided tensor that a block processes.

    Attributes:
        rows: number of rows of all images of the divided tensor, rounded up if ``aligned`` is 1.
        tap_rows: number of filter rows per block.
        lines: number of source rows that a block reads.
        shares: number of sets into which the filter's rows are divided; each set has its own
            blocks.
    """

    is_persistent = False

    tiling: Tiling
    rows: int
    tap_rows: int
    lines: int
    shares: int


class Access(NamedTuple):
    """Vector access to x or y.

    Attributes:
        is_last: whether vectors run along contiguous channels; else along columns.
        vector: elements per vector.
    """

    is_last: bool
    vector: int


def accesses(request: Request) -> tuple[Access, Access]:
    """Return the accesses to the source tensor and to the tensor that the blocks divide."""
    x, y = _access(request, "x"), _access(request, "y")
    return (y, x) if request.pass_ == "backprop_input" else (x, y)


def _access(request: Request, role: str) -> Access:
    """Return the access to x or y."""
    problem, memory = request.problem, request.memory
    layout = memory.x if role == "x" else memory.y
    channel, column = problem.data_axes[1], problem.data_axes[-1]
    last = layout[channel] == 1 and problem.groups > 1
    width = (problem.input_sizes if role == "x" else problem.output_sizes)[-1]
    axis, extent = (channel, problem.groups) if last else (column, width)
    itemsize = ITEMSIZE[problem.dtype]
    vector = neighbours(layout, axis, extent, memory.alignment, itemsize)
    return Access(last, vector)


@lru_cache(maxsize=4096)
def ranked_tilings(request: Request) -> tuple[Tiling, ...]:
    """Return the tilings that fit into a block, fastest modelled time first.

    Tilings with several resident blocks per SM precede all tilings with a single resident block.
    """
    problem, chip = request.problem, request.chip
    # Ignore the memory order, so that a layer has the same tiling in every memory order.
    whole = (Access(False, CHANNELS), Access(False, CHANNELS))

    def order(geom: Geometry) -> tuple[bool, float]:
        # With a single resident block, an SM does not multiply while this block copies.
        blocks = geom.work_tiles * geom.shares * -(-problem.groups // CHANNELS)
        work = _work(request, geom.tiling, geom.tap_rows, geom.lines, whole)
        demand = cost.Kernel(blocks, geom.resident, CHANNELS, work).demand(chip, 0)
        return geom.resident == 1, demand.microseconds(prices(request, Toeplitz.name))

    read = accesses(request)
    geometries = [_construct(request, tiling, read) for tiling in _tilings(request)]
    fitting = [geom for geom in geometries if geom.shared_bytes <= _most_shared(request)]
    return tuple(geom.tiling for geom in sorted(fitting, key=order))


def _most_shared(request: Request) -> int:
    """Return the largest shared memory per block, in bytes."""
    return request.chip.block_shared << 10


def _tilings(request: Request) -> Iterator[Tiling]:
    height, width = _divided_sizes(request)
    rows = request.problem.N * height
    strips = -(-min(width, LARGEST_ROW) // 8)
    choices = product((2, 1) if rows > 16 else (1,), (0, 1), range(strips, 0, -1))
    return (Tiling(*each) for each in choices)


def _divided_sizes(request: Request) -> tuple[int, int]:
    """Return the height and width of the tensor that the blocks divide: dx, y or dy."""
    problem, is_input = request.problem, request.pass_ == "backprop_input"
    _, height, width = spatial(problem.input_sizes if is_input else problem.output_sizes)
    return height, width


@lru_cache(maxsize=4096)
def geometry(request: Request, tiling: Tiling) -> Geometry | None:
    """Return the blocks of a tiling; None if the tiling is illegal on the request's device."""
    if tiling not in _tilings(request):
        return None
    geom = _construct(request, tiling, accesses(request))
    return geom if geom.shared_bytes <= _most_shared(request) else None


def _construct(request: Request, tiling: Tiling, read: tuple[Access, Access]) -> Geometry:
    problem, pass_, strips = request.problem, request.pass_, tiling.strips
    (height, width), (_, taps_r, taps) = _divided_sizes(request), spatial(problem.filter_sizes)
    is_filter, shares = pass_ == "backprop_filter", 1
    if is_filter:
        # ``sums`` is the number of registers per thread for sums.  With long filters, fragments of
        # the source need more registers.
        sums = 40 if request.device.instructions < (8, 0) or products(taps) > 2 else 48
        affordable = max(sums // (4 * products(taps)), 1)
        shares = -(-taps_r // affordable)
    tap_rows = -(-taps_r // shares)
    rows = 16 * tiling.row_tiles
    if tiling.aligned:
        height = -(-height // rows) * rows
    # A block begins at a multiple of ``rows`` and may contain rows of several images.
    images_begun = 1 + (rows - gcd(rows, height) - 1) // height
    lines = rows + (tap_rows - 1) * (1 + images_begun)
    source = CHANNELS * lines * _line_bytes(strips + window(taps) - 1)
    tiled = CHANNELS * rows * _line_bytes(strips)
    where = 8 * (lines + rows)
    if is_filter:
        plain_sums = CHANNELS * tap_rows * taps * 4
        diagonals = CHANNELS * 16 * products(taps) * 9 * 4
        shared = max(source + tiled + plain_sums + where, diagonals)
    else:
        shared = max(source, tiled) + CHANNELS * taps_r * (8 * window(taps) + 8) * 2 + where
    shared = -(-shared // 16) * 16
    # Resident blocks per SM as registers allow (counted).
    by_registers = 2 if is_filter or tiling.row_tiles * strips > 8 else 3
    numbered, channel_blocks = problem.N * height, -(-problem.groups // CHANNELS)
    return Geometry(
        tiling=tiling,
        rows=numbered,
        tap_rows=tap_rows,
        lines=lines,
        shares=shares,
        work_tiles=-(-numbered // rows) * -(-width // (8 * strips)),
        others=(channel_blocks, shares) if is_filter else (channel_blocks,),
        threads=THREADS,
        shared_bytes=shared,
        resident=max(min(request.chip.blocks_by_shared(shared), by_registers), 1),
        work=_work(request, tiling, tap_rows, lines, read),
    )


def window(taps: int) -> int:
    """Return how many blocks of 8 source columns a strip of 8 result columns reads."""
    return (taps + 14) // 8


def products(taps: int) -> int:
    """Return the number of matrix products, of 16 source columns each, per strip and filter row."""
    return (window(taps) + 1) // 2


def _line_bytes(blocks: int) -> int:
    return (blocks | 1) * 16


def _work(
    request: Request, tiling: Tiling, tap_rows: int, lines: int, read: tuple[Access, Access]
) -> cost.Work:
    """Return the work per block, for one patch and ``tap_rows`` rows of the filter."""
    chip, taps = request.chip, request.problem.filter_sizes[-1]
    rows, blocks = 16 * tiling.row_tiles, tiling.strips + window(taps) - 1
    passed = CHANNELS * tap_rows * tiling.row_tiles
    multiplied = passed * tiling.strips * products(taps)  # products of 16 x 8 x 16
    # ``loads`` counts 8 x 8 matrices.  Matrices of the filter are loaded once per patch.
    loads = passed * 2 * blocks + CHANNELS * tap_rows * 2 * window(taps)
    moved = CHANNELS * 8 * (lines * blocks + rows * tiling.strips) / 32
    copied = wavefronts = 0.0
    for access, height, columns in zip(read, (lines, rows), (blocks, tiling.strips), strict=True):
        vectors = CHANNELS * 8 * height * columns / access.vector / 32
        copied += vectors
        apart = 2 * request.problem.groups if access.is_last else 0
        of_copy = cost.wavefronts(2 * access.vector, apart) + cost.wavefronts(2 * access.vector)
        wavefronts += vectors * of_copy
    return cost.Work(
        multiplying=multiplied * 2 * 16 * 8 * 16 / cost.per_cycle(chip, cost.tensor_rate(request)),
        wavefronts=loads + wavefronts,
        instructions=multiplied + loads + moved + cost.ACCESS_INSTRUCTIONS * copied,
        waits=1,
    )


class Toeplitz(streaming.Streaming[Geometry]):
    name = "cuda-toeplitz"
    summary = "rows of a channel times the filter's rows as Toeplitz matrices, on the tensor cores"
    tiling = Tiling
    tilings = staticmethod(ranked_tilings)
    find = staticmethod(geometry)

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if problem.dtype not in ("float16", "bfloat16"):
            return f"cuda-toeplitz multiplies 16-bit types, not {problem.dtype}"
        if problem.dtype == "bfloat16" and request.device.instructions < (8, 0):
            return "bfloat16 on tensor cores needs compute capability 8.0"
        if not problem.C == problem.K == problem.groups:
            return "cuda-toeplitz takes depthwise layers with one filter per channel"
        if problem.spatial_rank == 3:
            return "cuda-toeplitz takes 1-D and 2-D layers"
        if set(problem.stride) != {1} or set(problem.dilation) != {1}:
            return "cuda-toeplitz takes stride 1 and dilation 1"
        if (taps := problem.filter_sizes[-1]) > LARGEST_ROW:
            return f"cuda-toeplitz takes filter rows of up to {LARGEST_ROW} taps, not {taps}"
        if -(-problem.groups // CHANNELS) >= 2**16:
            return "the channels need more blocks than a launch can have"
        if not ranked_tilings(request):
            return "the rows under a block and the filter do not fit into shared memory"
        return None

    def counts_of(self, request: Request, geom: Geometry) -> Iterator[Count]:
        yield Count("blocks", geom.work_tiles, MOST_BLOCKS)
        yield Count("parts of the filter's rows", geom.shares, 2**16 - 1)

    def defines(self, request: Request, geom: Geometry, epilogue: Epilogue) -> dict[str, str | int]:
        problem, pass_ = request.problem, request.pass_
        of_source, of_tiled = accesses(request)
        pad = problem.padding[-1][0]
        if pass_ == "backprop_input":
            pad = problem.filter_sizes[-1] - 1 - pad
        return {
            "PASS": PASSES.index(pass_),
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, request.memory, geom.rows),
            "FILTER_R": spatial(problem.filter_sizes)[1],
            "FILTER_S": problem.filter_sizes[-1],
            "TAP_ROWS": geom.tap_rows,
            "ROW_TILES": geom.tiling.row_tiles,
            "ALIGNED": geom.tiling.aligned,
            "STRIPS": geom.tiling.strips,
            "SOURCE_LINES": geom.lines,
            "SOURCE_LAST": int(of_source.is_last),
            "RESULT_LAST": int(of_tiled.is_last),
            "SOURCE_VECTOR": of_source.vector,
            "RESULT_VECTOR": of_tiled.vector,
            "SOURCE_SHIFT": 0 if of_source.is_last else -pad % of_source.vector,
            "ASYNC_COPY": int(copies_async(request.device)),
            "SHARED_BYTES": geom.shared_bytes,
            **epilogue.defines,
        }


CUDA_TOEPLITZ = Toeplitz()
