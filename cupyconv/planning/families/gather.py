"""cuda-gather (cuda/conv_gather.cu): how it is cut, and takes its matrices from memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.families.family import Tile, mma_refuses
from cupyconv.planning.families.tiled import Tiled
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, ConvProblem, GemmView

MAX_PHASES = 64
"""Stride phases that a block is still quick to find its own among."""

SPLIT_TARGET_BLOCKS = 256
"""Blocks below which gemm_k is shared out: two for each multiprocessor of the larger chips."""

PIECE_INSTRUCTIONS = 20
"""Instructions of a thread that copies a piece of an operand, its address included: counted in the
source, not measured."""


@dataclass(frozen=True)
class Access:
    """How the elements of one matrix are taken from memory.

    Attributes:
        along_first: whether neighbours in memory are neighbours in the first of the matrix's two
            directions (k for A and B, n for C), else in the second.
        vector: elements of a piece.
    """

    along_first: bool
    vector: int


def accesses(pass_: str, problem: ConvProblem, strides: Strides) -> tuple[Access, Access, Access]:
    """How A, B and C are taken from memory."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    w_filter, w_channel = problem.filter_axes[:2]
    alignment, itemsize = strides.alignment, ITEMSIZE[problem.dtype]
    along_filters = neighbours(strides.w, w_filter, filters, alignment, itemsize)
    along_channels = neighbours(strides.w, w_channel, channels, alignment, itemsize)
    # Where neither has neighbours, along what is nearer; views have strides of any sign, and 0.
    nearer = abs(strides.w[w_filter]) < abs(strides.w[w_channel])
    filters_last = (along_filters, nearer) > (along_channels, not nearer)
    w = max(along_filters, along_channels)

    def along_channels_or_pixels(
        layout: tuple[int, ...], extent: int, sizes: tuple[int, ...], pixels_follow: bool
    ) -> Access:
        channel = problem.data_axes[1]
        if layout[channel] == 1:
            return Access(True, neighbours(layout, channel, extent, alignment, itemsize))
        follow = pixels_follow and _following_pixels(layout, problem, sizes, alignment)
        return Access(False, follow or 1)

    # Pixels that follow each other in the matrix do so in memory where they are visited in the
    # order of their numbers, and under a tap only if it is the only one, and each has its own.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    x = along_channels_or_pixels(strides.x, channels, problem.input_sizes, x_in_order[pass_])
    y = along_channels_or_pixels(strides.y, filters, problem.output_sizes, y_in_order)
    if pass_ == "forward":
        return x, Access(not filters_last, w), y
    if pass_ == "backprop_input":
        return y, Access(filters_last, w), x
    return (
        Access(not y.along_first, y.vector),
        Access(not x.along_first, x.vector),
        Access(not filters_last, w),
    )


def _following_pixels(
    strides: tuple[int, ...], problem: ConvProblem, sizes: tuple[int, ...], alignment: int
) -> int:
    """Pixels, in the order of their numbers, that can be moved at once: a power of two."""
    run, rest = 1, list(strides)
    for axis, size in reversed(list(zip(problem.data_axes[2:], sizes, strict=True))):
        if size > 1 and strides[axis] != run:
            break
        run *= size
        rest[axis] = 0
    return neighbours((*rest, 1), len(rest), run, alignment, ITEMSIZE[problem.dtype])


def _tile(
    block_m: int,
    block_n: int,
    warps_m: int,
    warps_n: int,
    itemsize: int,
    since: tuple[int, int] = (8, 0),
) -> Tile:
    """Four stages, whose lines along k are of 64 bytes."""
    macros = (("WARPS_M", warps_m), ("WARPS_N", warps_n), ("STAGES", 4))
    threads = warps_m * warps_n * 32
    return Tile(block_m, block_n, 64 // itemsize, threads, macros, since, itemsize)


class Gather(Tiled):
    name = "cuda-gather"
    summary = "implicit GEMM on the tensor cores, fed by a ring of asynchronous copies"
    kernels = "gather"
    efficiency = 0.5
    tiles = (
        # Before 8.0 copies go through registers, which the larger tiles have none left for.
        _tile(128, 128, 2, 4, itemsize=2),
        _tile(128, 64, 4, 2, itemsize=2),
        _tile(64, 64, 2, 2, itemsize=2, since=(7, 5)),
        _tile(128, 128, 2, 4, itemsize=4),
        _tile(128, 64, 4, 2, itemsize=4),
        _tile(64, 64, 2, 2, itemsize=4),
        # A sum takes two registers: 128 x 128 of them do not fit.
        _tile(128, 64, 4, 2, itemsize=8),
        _tile(64, 64, 2, 2, itemsize=8),
    )

    def refuses(self, request: Request) -> str | None:
        refusal, phases = mma_refuses(request), prod(request.problem.stride)
        if refusal is None and request.pass_ == "backprop_input" and phases > MAX_PHASES:
            return f"{phases} stride phases are more than {MAX_PHASES}"
        return refusal

    def rate(self, request: Request) -> float:
        return cost.tensor_rate(request)

    def gemms(self, request: Request) -> tuple[GemmView, ...]:
        if request.pass_ == "backprop_input":
            return request.problem.phase_gemms
        return super().gemms(request)

    def most_splits(self, request: Request) -> int:
        return cost.MOST_SPLITS if len(self.gemms(request)) == 1 else 1

    def wanted_splits(self, request: Request, tile: Tile) -> int:
        gemm = request.problem.gemm(request.pass_)
        blocks = tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups
        if not blocks:
            return 1
        affordable = -(-gemm.gemm_k // tile.block_k) // cost.LEAST_SPLIT_STEPS
        wanted = min(-(-SPLIT_TARGET_BLOCKS // blocks), affordable, self.most_splits(request))
        return max(request.most_within_limit(wanted, self.split_bytes(request)), 1)

    def instructions(self, request: Request, tile: Tile, depth: int) -> float:
        a, b, _ = accesses(request.pass_, request.problem, request.memory)
        pieces = depth * (tile.block_m / a.vector + tile.block_n / b.vector)
        return pieces * PIECE_INSTRUCTIONS


CUDA_GATHER = Gather()
