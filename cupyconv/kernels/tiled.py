"""Base class of families in which each thread block computes one tile of a matrix product."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import mul

from cupyconv.kernels import cost
from cupyconv.kernels.family import Candidate, Choices, Family, Tile, accumulator_bytes
from cupyconv.kernels.request import Request
from cupyconv.problem import ITEMSIZE, GemmView


class Tiled(Family):
    """An implicit GEMM with one thread block per tile."""

    @abstractmethod
    def block(self, request: Request, tile: Tile) -> tuple[int, cost.Work, cost.Work]:
        """Return the resident blocks per SM, and the work per element of k and per block."""

    def gemms(self, request: Request, divided: bool = False) -> tuple[GemmView, ...]:
        """Return the matrix products of the pass, with or without divided frames."""
        return (request.problem.gemm(request.pass_),)

    def most_splits(self, request: Request) -> int:
        """Return the largest number of splits of gemm_k."""
        return 1

    def splits(self, request: Request, tile: Tile) -> list[int]:
        """Return the numbers of splits of gemm_k that ``candidates`` estimates."""
        return [1]

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            candidate
            for tile in self.worthwhile_tiles(request)
            for candidate in self.costed(request, tile, self.splits(request, tile))
        ]

    def worthwhile_tiles(self, request: Request) -> list[Tile]:
        """Return the tiles to estimate.

        Tiles of few rows are for matrices of as few rows.  Tiles of few columns are for matrices of
        few columns, except in float64.
        """
        rows = max((gemm.gemm_m for gemm in self.gemms(request)), default=0)
        columns = max((gemm.gemm_n for gemm in self.gemms(request)), default=0)
        tiles = self.fitting_tiles(request)
        return [
            tile
            for tile in tiles
            if (tile.block_m >= 64 or rows <= tile.block_m)
            and (tile.block_n >= 32 or columns <= 2 * tile.block_n or tile.itemsize == 8)
        ] or tiles

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        tile, splits = choices.tile, choices.splits
        if not choices.has_only("tile", "splits") or tile not in self.fitting_tiles(request):
            return None
        assert tile is not None
        fits = 1 <= splits <= self.most_splits(request)
        return self.costed(request, tile, [splits])[0] if fits else None

    def further_launches(self, request: Request, divided: bool) -> int:
        """Return the number of launches of the product after the first."""
        return 0

    def sums(self, request: Request) -> int:
        """Return the number of partial sums per split."""
        gemm = request.problem.gemm(request.pass_)
        return gemm.gemm_m * gemm.gemm_n * gemm.groups

    def split_bytes(self, request: Request) -> int:
        """Return the workspace bytes per split."""
        return self.sums(request) * accumulator_bytes(request.problem)

    def costed(
        self, request: Request, tile: Tile, splits: Sequence[int], divided: bool = False
    ) -> list[Candidate]:
        """Return the candidates with a tile, one for each number of splits."""
        chip, problem, gemms = request.chip, request.problem, self.gemms(request, divided)
        blocks_of = [tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups for gemm in gemms]
        depth_of = [-(-gemm.gemm_k // tile.block_k) * tile.block_k for gemm in gemms]
        blocks, places = sum(blocks_of), chip.multiprocessors
        depth = sum(map(mul, blocks_of, depth_of)) / max(blocks, 1)
        if len(gemms) > 1 and blocks:  # the longest blocks may keep few multiprocessors busy
            longest = max(-(-n // places) * k for n, k in zip(blocks_of, depth_of, strict=True))
            depth = max(depth, longest / -(-blocks // places))
        resident, per_k, fixed = self.block(request, tile)
        sums, further = self.sums(request), self.further_launches(request, divided)
        part, result = sums * accumulator_bytes(problem), sums * ITEMSIZE[problem.dtype]
        found = []
        for count in splits:
            kernel = cost.Kernel(
                blocks * count, resident, tile.threads // 32, per_k.times(depth / count) + fixed
            )
            workspace = count * part if count > 1 else 0
            if count > 1:  # one launch writes the sums, and the next launch reads them
                product = kernel.demand(chip, problem.bytes + workspace - result)
                demand = cost.together(product, cost.further(chip, workspace + result, count))
            else:
                demand = kernel.demand(chip, problem.bytes)._replace(further=further)
            choices = {"tile": tile, "blocks": blocks, "divides_frames": divided}
            choices["workspace_bytes"] = workspace
            found.append(self.priced(request, demand, splits=count, **choices))
        return found
