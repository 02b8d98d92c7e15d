"""What families have in common that have no tiles to choose.

The filter gradient is cut into chunks of pixels, whose sums (cuda/include/chunks.cuh) are added up
by a second launch.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.families.family import Candidate, Family, Tile, accumulator_bytes
from cupyconv.planning.request import Request
from cupyconv.problem import ITEMSIZE, ConvProblem

MOST_CHUNKS = 256

ENOUGH_BLOCKS = 1024
"""That a kernel wants: several for each multiprocessor, to cover latency."""


class Streaming(Family):
    """A family of one way, but for the chunks.

    Attributes:
        targets: blocks of which it wants one number, in a filter gradient: the fewer they are, the
            less is written and read again.
    """

    targets: tuple[int, ...] = (ENOUGH_BLOCKS, 512, 256, 128, 64)

    @abstractmethod
    def shared_out(self, request: Request) -> tuple[int, int]:
        """Parts of the pixels, and blocks that compute each; a chunk has one or more parts."""

    @abstractmethod
    def computing(self, request: Request, chunks: int) -> float:
        """Microseconds of the kernel, where parts are taken in so many chunks.

        Without moving each tensor's bytes once: what blocks load again comes from L2, where those
        that do so at the same time find it.
        """

    def refuses(self, request: Request) -> str | None:
        refusal = super().refuses(request)
        least = chunk_bytes(request.problem) if request.pass_ == "backprop_filter" else 0
        if refusal is not None or request.affords(least):
            return refusal
        return (
            f"{self.name} sums the filter gradient in a workspace of at least {least} bytes, the "
            f"limit is {request.workspace_limit}"
        )

    def candidates(self, request: Request) -> list[Candidate]:
        if request.pass_ != "backprop_filter":
            return [self._costed(request, 1)]
        parts, others = self.shared_out(request)
        wanted = {chunks_of(parts, others, target) for target in self.targets}
        size = chunk_bytes(request.problem)
        # A limit leaves of them, so that none is expected to take less for it.
        found = {chunks for chunks in wanted if request.affords(chunks * size)}
        found = found or {max(request.most_within_limit(min(wanted), size), 1)}
        return [self._costed(request, chunks) for chunks in sorted(found, reverse=True)]

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        most = MOST_CHUNKS if request.pass_ == "backprop_filter" else 1
        fits = tile is None and not method and 1 <= splits <= most
        return self._costed(request, splits) if fits else None

    def _costed(self, request: Request, chunks: int) -> Candidate:
        chip, problem = request.device.chip, request.problem
        moved, workspace, adding = problem.bytes, 0, 0.0
        if request.pass_ != "backprop_filter":
            parts, _ = self.shared_out(request)
            computing = self.computing(request, max(parts, 1))  # each by itself
        else:
            computing = self.computing(request, chunks)
            size, sums = accumulator_bytes(problem), prod(problem.filter_shape)
            workspace, result = chunks * sums * size, sums * ITEMSIZE[problem.dtype]
            moved += workspace - result
            adding = cost.adding(chip, sums, chunks, 1, size)
            adding = max(adding, cost.moving(chip, workspace + result)) + cost.LAUNCH_OVERHEAD
        microseconds = max(computing, cost.moving(chip, moved))
        microseconds += cost.LAUNCH_OVERHEAD + adding
        return Candidate(
            self,
            microseconds,
            splits=chunks,
            workspace_bytes=workspace,
            computing=computing,
        )


def chunk_bytes(problem: ConvProblem) -> int:
    """Workspace for the sums of each chunk of the filter gradient."""
    return prod(problem.filter_shape) * accumulator_bytes(problem)


def chunks_of(parts: int, others: int, target: int = ENOUGH_BLOCKS) -> int:
    """Chunks of so many parts, with so many blocks each, that make as many blocks as wanted."""
    return max(min(-(-target // others), parts, MOST_CHUNKS), 1)
