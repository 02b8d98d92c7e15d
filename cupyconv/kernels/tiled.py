"""Base class of families in which each thread block computes one tile of a matrix product."""

from __future__ import annotations

from abc import abstractmethod

from cupyconv.kernels import cost
from cupyconv.kernels.family import Candidate, Choices, Family, Tile, accumulator_bytes
from cupyconv.kernels.request import Request
from cupyconv.problem import ITEMSIZE, GemmView


class Tiled(Family):
    """An implicit GEMM with one thread block per tile."""

    @abstractmethod
    def kernel(self, request: Request, tile: Tile, depth: int, blocks: int) -> cost.Kernel:
        """Return the work of the product, for the cost model.

        Args:
            request: the pass.
            tile: tile of each block.
            depth: extents along k of all tiles, added up.
            blocks: number of launched blocks, in all splits together.
        """

    def gemms(self, request: Request) -> tuple[GemmView, ...]:
        """Return the matrix products of the pass."""
        return (request.problem.gemm(request.pass_),)

    def most_splits(self, request: Request) -> int:
        """Return the largest number of splits of gemm_k."""
        return 1

    def splits(self, request: Request, tile: Tile) -> list[int]:
        """Return the numbers of splits of gemm_k that ``candidates`` estimates."""
        return [1]

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            self._costed(request, tile, splits)
            for tile in self.worthwhile_tiles(request)
            for splits in self.splits(request, tile)
        ]

    def worthwhile_tiles(self, request: Request) -> list[Tile]:
        """Return the tiles to estimate: tiles of few rows only for matrices of as few rows."""
        rows = max((gemm.gemm_m for gemm in self.gemms(request)), default=0)
        tiles = self.fitting_tiles(request)
        return [tile for tile in tiles if tile.block_m >= 64 or rows <= tile.block_m]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        tile, splits = choices.tile, choices.splits
        if choices.method or choices.tiling or tile not in self.fitting_tiles(request):
            return None
        assert tile is not None
        fits = 1 <= splits <= self.most_splits(request)
        return self._costed(request, tile, splits) if fits else None

    def sums(self, request: Request) -> int:
        """Return the number of partial sums per split."""
        gemm = request.problem.gemm(request.pass_)
        return gemm.gemm_m * gemm.gemm_n * gemm.groups

    def split_bytes(self, request: Request) -> int:
        """Return the workspace bytes per split."""
        return self.sums(request) * accumulator_bytes(request.problem)

    def _costed(self, request: Request, tile: Tile, splits: int) -> Candidate:
        chip, gemms = request.chip, self.gemms(request)
        per_gemm = [tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups for gemm in gemms]
        depth = [-(-gemm.gemm_k // tile.block_k) * tile.block_k for gemm in gemms]
        padded = sum(n * k for n, k in zip(per_gemm, depth, strict=True))
        blocks, places = sum(per_gemm), chip.multiprocessors
        if len(gemms) > 1 and blocks:  # the longest blocks may keep few multiprocessors busy
            longest = max(-(-n // places) * k for n, k in zip(per_gemm, depth, strict=True))
            padded = max(padded, longest * blocks // -(-blocks // places))
        workspace = splits * self.split_bytes(request) if splits > 1 else 0
        problem = request.problem
        kernel = self.kernel(request, tile, padded, blocks * splits)
        if splits > 1:  # one launch writes the sums, and the next launch reads them
            result = self.sums(request) * ITEMSIZE[problem.dtype]
            product = kernel.demand(chip, problem.bytes + workspace - result)
            demand = cost.together(product, cost.further(chip, workspace + result, splits))
        else:
            demand = kernel.demand(chip, problem.bytes)
        return self.priced(
            request,
            demand,
            tile=tile,
            blocks=blocks,
            splits=splits,
            workspace_bytes=workspace,
        )
