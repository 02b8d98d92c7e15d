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

BLOCKS = (0.25, 0.5, 1, 2, 3, 4, 6, 8)
"""For each multiprocessor, that chunks may come to: several cover latency, and the fewer they are,
the less is written and read again."""

IDLE = 0.95
"""Share of the time of chunks that fill the chip, below which fewer are taken."""


class Streaming(Family):
    """A family of one way, but for the chunks."""

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
        places, size = request.device.chip.multiprocessors, chunk_bytes(request.problem)
        wanted = chunk_counts(parts, others, places)
        # A limit leaves of them, so that none is expected to take less for it.
        found = [chunks for chunks in wanted if request.affords(chunks * size)]
        found = found or [even(parts, max(request.most_within_limit(wanted[0], size), 1))]
        costed = [self._costed(request, chunks) for chunks in reversed(found)]
        filling = [one for one in costed if one.splits * others >= places] or costed[:1]
        most = IDLE * min(one.microseconds for one in filling)
        return [one for one in costed if one in filling or one.microseconds < most]

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


def even(parts: int, chunks: int) -> int:
    """The fewest chunks whose largest has no more parts than of so many: none is empty."""
    return -(-parts // -(-parts // chunks)) if parts else 1


def chunk_counts(parts: int, others: int, multiprocessors: int) -> list[int]:
    """Numbers of chunks, in ascending order, each the fewest with its most parts of a chunk.

    Some of them leave no multiprocessor without a block, if there are parts enough.

    Args:
        parts: that the chunks share out.
        others: blocks for each.
        multiprocessors: of the chip.
    """
    parts = max(parts, 1)  # of an empty batch
    most = min(parts, MOST_CHUNKS)
    filling = min(-(-multiprocessors // others), most)
    found = {even(parts, min(-(-parts // (parts // filling)), most))}
    for count in BLOCKS:
        wanted = int(count * multiprocessors)
        for chunks in (wanted // others, -(-wanted // others)):
            found.add(even(parts, max(min(chunks, most), 1)))
    return sorted(found)
