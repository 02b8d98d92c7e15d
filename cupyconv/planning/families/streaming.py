"""What families have in common that have no tiles to choose.

The filter gradient is cut into chunks of pixels, whose sums (cuda/include/chunks.cuh) are added up
by a second launch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.families.family import Candidate, Family, Tile, accumulator_bytes
from cupyconv.planning.request import Request
from cupyconv.problem import ITEMSIZE, ConvProblem

MOST_CHUNKS = 256

TARGET_BLOCKS = 1024
"""Blocks that a kernel wants: several for each multiprocessor, to cover latency."""


@dataclass(frozen=True)
class Flow:
    """What a kernel does besides moving each tensor's bytes once: what blocks load again comes from
    L2, where those that do so at the same time find it.

    Attributes:
        microseconds: of computing, at the share of the chip's rates that it reaches.
        chunks: that the filter gradient's pixels are best cut into.
    """

    microseconds: float
    chunks: int = 1


class Streaming(Family):
    """A family of one way, but for the chunks."""

    @abstractmethod
    def flow(self, request: Request) -> Flow:
        """What the kernel does."""

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
        chunks = 1
        if request.pass_ == "backprop_filter":
            wanted = self.flow(request).chunks
            chunks = max(request.most_within_limit(wanted, chunk_bytes(request.problem)), 1)
        return [self._costed(request, chunks)]

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        most = MOST_CHUNKS if request.pass_ == "backprop_filter" else 1
        fits = tile is None and not method and 1 <= splits <= most
        return self._costed(request, splits) if fits else None

    def _costed(self, request: Request, chunks: int) -> Candidate:
        chip, problem, flow = request.device.chip, request.problem, self.flow(request)
        moved, workspace, adding = problem.bytes, 0, 0.0
        if request.pass_ == "backprop_filter":
            size, sums = accumulator_bytes(problem), prod(problem.filter_shape)
            workspace, result = chunks * sums * size, sums * ITEMSIZE[problem.dtype]
            moved += workspace - result
            adding = cost.adding(chip, sums, chunks, 1, size)
            adding = max(adding, cost.moving(chip, workspace + result)) + cost.LAUNCH_OVERHEAD
        microseconds = max(flow.microseconds, cost.moving(chip, moved))
        microseconds += cost.LAUNCH_OVERHEAD + adding
        return Candidate(
            self,
            microseconds,
            splits=chunks,
            workspace_bytes=workspace,
            computing=flow.microseconds,
        )


def chunk_bytes(problem: ConvProblem) -> int:
    """Workspace for the sums of each chunk of the filter gradient."""
    return prod(problem.filter_shape) * accumulator_bytes(problem)


def chunks_of(parts: int, others: int, least: int) -> int:
    """Chunks that make blocks enough.

    Args:
        parts: tiles, patches or pixels to be shared out.
        others: blocks of each chunk.
        least: parts that each chunk keeps at least.
    """
    return max(min(-(-TARGET_BLOCKS // others), parts // least, MOST_CHUNKS), 1)
