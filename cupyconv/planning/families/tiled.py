"""What families have in common whose blocks compute one tile of a matrix product each."""

from __future__ import annotations

from abc import abstractmethod

from cupyconv.planning import cost
from cupyconv.planning.families.family import Candidate, Family, Tile, accumulator_bytes
from cupyconv.planning.request import Request
from cupyconv.problem import ITEMSIZE, GemmView


class Tiled(Family):
    """An implicit GEMM of one block a tile."""

    @abstractmethod
    def computing(self, request: Request, tile: Tile, depth: int, blocks: int) -> float:
        """Microseconds of the products of so many blocks, on the chip's multiprocessors.

        Args:
            request: what is computed.
            tile: of each block.
            depth: along k, of all tiles together.
            blocks: that are launched, each split by itself.
        """

    def gemms(self, request: Request) -> tuple[GemmView, ...]:
        """The matrix products that make up the pass."""
        return (request.problem.gemm(request.pass_),)

    def most_splits(self, request: Request) -> int:
        """Parts that gemm_k may be cut into."""
        return 1

    def splits(self, request: Request, tile: Tile) -> list[int]:
        """Numbers of parts of gemm_k that are worth a thought."""
        return [1]

    def adding(self, request: Request, splits: int) -> float:
        """Microseconds of adding up so many splits, besides the bytes that this moves."""
        return 0.0

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            self._costed(request, tile, splits)
            for tile in self.fitting_tiles(request)
            for splits in self.splits(request, tile)
        ]

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        if method or tile is None or tile not in self.fitting_tiles(request):
            return None
        fits = 1 <= splits <= self.most_splits(request)
        return self._costed(request, tile, splits) if fits else None

    def split_bytes(self, request: Request) -> int:
        """Workspace for the sums of one split."""
        gemm = request.problem.gemm(request.pass_)
        return gemm.gemm_m * gemm.gemm_n * gemm.groups * accumulator_bytes(request.problem)

    def _costed(self, request: Request, tile: Tile, splits: int) -> Candidate:
        chip, gemms = request.device.chip, self.gemms(request)
        per_gemm = [tile.blocks(gemm.gemm_m, gemm.gemm_n) * gemm.groups for gemm in gemms]
        depth = [-(-gemm.gemm_k // tile.block_k) * tile.block_k for gemm in gemms]
        padded = sum(n * k for n, k in zip(per_gemm, depth, strict=True))
        blocks = sum(per_gemm)
        workspace = splits * self.split_bytes(request) if splits > 1 else 0
        problem = request.problem
        memory, adding = cost.moving(chip, problem.bytes), 0.0
        if splits > 1:  # a launch writes the sums, and the next one reads them
            result = workspace // splits // accumulator_bytes(problem) * ITEMSIZE[problem.dtype]
            memory = cost.moving(chip, problem.bytes - result + workspace)
            adding = max(self.adding(request, splits), cost.moving(chip, workspace + result))
            adding += cost.LAUNCH_OVERHEAD
        computing = self.computing(request, tile, padded, blocks * splits) if blocks else 0
        microseconds = max(computing, memory) + cost.LAUNCH_OVERHEAD + adding
        return Candidate(self, microseconds, tile, blocks, splits, workspace, computing=computing)
