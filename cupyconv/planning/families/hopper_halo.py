"""cuda-hopper-halo (cuda/conv_hopper_halo.cu): rectangles of pixels, loaded with their halo."""

from __future__ import annotations

from math import prod

from cupyconv.planning.families.family import Tile
from cupyconv.planning.families.hopper import (
    CUDA_HOPPER,
    Staying,
    layout_of,
    matrices,
    tile_of,
    walks,
)
from cupyconv.planning.request import Request
from cupyconv.problem import ConvProblem

SQUARE = 8
"""Rows and columns of the pixels of a product."""

WHOLE = (4, 16, SQUARE)
"""Images, rows and columns that are whole rectangles of every tile."""

MAX_HALO = 8
"""Rows of a halo for which shared memory has room beside enough of the filter."""


def halo_rows(problem: ConvProblem, pass_: str) -> int:
    """Rows of pixels by which the taps of a column of the filter reach beyond one pixel."""
    down, _ = walks(problem, pass_)[0]
    return (down.taps - 1) * down.spacing


def halo_matrices(problem: ConvProblem, pass_: str, tile: Tile) -> list[tuple[int, int, int]]:
    """As ``matrices``; pixels beyond the edges of the rectangles count as well."""
    ((_, columns, steps),) = matrices(problem, pass_, tile.block_k)
    down, across = (axis.pixels for axis in walks(problem, pass_)[0])
    rows = tile.defines["ROWS"]
    images = tile.block_m // (rows * SQUARE)
    rectangles = -(-problem.N // images) * -(-down // rows) * -(-across // SQUARE)
    return [(rectangles * tile.block_m, columns, steps)]


class HopperHalo(Staying):
    name = "cuda-hopper-halo"
    summary = (
        "cuda-hopper for filters of several rows: the input loaded once for each filter column"
    )
    kernels = "hopper_halo"
    # When it is the faster one has not been measured on a GPU.
    on_request = True
    has_splits = False
    tiles = tuple(
        tile_of(block_m, block_n, itemsize, itemsize, CLUSTER=cluster, ROWS=rows)
        for itemsize in (2, 4)
        for block_m, block_n in ((128, 256), (256, 128), (128, 128))
        for rows in (16, 8)
        for cluster in (2, 1)
    )

    def refuses(self, request: Request) -> str | None:
        problem, pass_ = request.problem, request.pass_
        if pass_ == "backprop_filter":
            return "cuda-hopper-halo has the forward pass and backprop_input"
        if problem.spatial_rank != 2:
            return f"cuda-hopper-halo takes two spatial axes, not {problem.spatial_rank}"
        if problem.stride != (1, 1):
            return f"cuda-hopper-halo takes stride 1, not {problem.stride}"
        if problem.filter_sizes[0] == 1:
            return "a filter of one row has no halo whose rows several taps share"
        refusal = CUDA_HOPPER.refuses(request)
        if refusal is not None:
            return refusal
        rows = halo_rows(problem, pass_)
        if rows > MAX_HALO:
            return f"cuda-hopper-halo has room for a halo of {MAX_HALO} rows, not {rows}"
        extents = (problem.N, *(axis.pixels for axis in walks(problem, pass_)[0]))
        whole = zip(extents, WHOLE, strict=True)
        pixels = prod(-(-extent // unit) * unit for extent, unit in whole)
        if pixels * 2 >= 2**31:
            return f"cuda-hopper-halo counts up to {2**30} pixels in whole rectangles, not {pixels}"
        return None

    def matrices(self, request: Request, tile: Tile) -> list[tuple[int, int, int]]:
        return halo_matrices(layout_of(request).problem, request.pass_, tile)


CUDA_HOPPER_HALO = HopperHalo()
