"""Base class of kernel families whose tilings divide a pass into many small tiles.

The filter gradient splits the tiles into chunks, and a second launch adds up the partial sums of
the chunks (cuda/include/chunks.cuh).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar, Generic, NamedTuple, TypeVar

from cupyconv.kernels import cost
from cupyconv.kernels.family import Candidate, Choices, Family, accumulator_bytes
from cupyconv.kernels.request import Request
from cupyconv.launch import Launch
from cupyconv.problem import ITEMSIZE, ConvProblem

MOST_CHUNKS = 256
"""Largest number of chunks (chosen)."""

BLOCKS = (0.25, 0.5, 1, 2, 3, 4, 6, 8)
"""Numbers of blocks per SM that the choice of chunks aims at (chosen).  More blocks hide latency;
fewer blocks move fewer bytes."""

MOST_ALTERNATIVES = 7
"""Largest number of tilings that autotuning tries in addition to the planned tiling (chosen)."""

IDLE = 0.95
"""Largest time of a candidate that leaves multiprocessors idle, relative to the best candidate that
fills the chip (chosen)."""


AnyTiling = TypeVar("AnyTiling")


class Shares(NamedTuple):
    """Division of a pass among thread blocks.

    Attributes:
        parts: number of tiles, or of rounds of tiles, to divide among blocks.
        others: number of blocks that compute the same tiles, for different channels or parts of
            the filter.
    """

    parts: int
    others: int


class Streaming(Family, Generic[AnyTiling]):
    """A family with tilings; in backprop_filter, the tiles are divided into chunks.

    Attributes:
        tiling: dataclass of the free choices of a launch; all fields are integers.
        is_persistent: whether a block of forward or backprop_input computes several parts, so that
            the number of blocks is a free choice; else a block computes one part.
    """

    tiling: ClassVar[type]
    is_persistent: ClassVar[bool] = True

    @abstractmethod
    def tilings(self, request: Request) -> Sequence[AnyTiling]:
        """Return all tilings of a supported layer, the most promising first."""

    def choose(self, request: Request) -> AnyTiling:
        """Return the most promising tiling of a supported layer."""
        return self.tilings(request)[0]

    @abstractmethod
    def is_legal(self, request: Request, tiling: AnyTiling) -> bool:
        """Return whether the kernel supports a tiling of a supported layer on its device."""

    @abstractmethod
    def shares(self, request: Request, tiling: AnyTiling) -> Shares:
        """Return how the tiles of a pass are divided among thread blocks."""

    @abstractmethod
    def blocks(self, request: Request, tiling: AnyTiling, multiprocessors: int) -> int:
        """Return the number of blocks among which forward or backprop_input divides the tiles."""

    @abstractmethod
    def kernel(self, request: Request, tiling: AnyTiling, blocks: int) -> cost.Kernel:
        """Return the work of the product if ``blocks`` blocks or chunks divide the tiles."""

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
        return self.candidates_of(request, self.choose(request))

    def alternatives(self, request: Request) -> list[Candidate]:
        others = self.tilings(request)[1:]
        legal = [tiling for tiling in others if self.is_legal(request, tiling)]
        best = [
            min(self.candidates_of(request, tiling), key=lambda candidate: candidate.microseconds)
            for tiling in legal[:MOST_ALTERNATIVES]
        ]
        return sorted(best, key=lambda candidate: candidate.microseconds)

    def candidates_of(self, request: Request, tiling: AnyTiling) -> list[Candidate]:
        """Return the candidates with a tiling, one for each number of chunks worth ranking."""
        if request.pass_ != "backprop_filter":
            blocks = self.blocks(request, tiling, request.device.resident_blocks)
            return [self._costed(request, tiling, blocks=blocks)]
        parts, others = self.shares(request, tiling)
        places, size = request.chip.multiprocessors, chunk_bytes(request.problem)
        wanted = chunk_counts(parts, others, places)
        # A smaller limit must not add candidates: no modelled time may become shorter.
        found = [chunks for chunks in wanted if request.affords(chunks * size)]
        found = found or [even(parts, max(request.most_within_limit(wanted[0], size), 1))]
        costed = [self._costed(request, tiling, chunks) for chunks in reversed(found)]
        filling = [one for one in costed if one.splits * others >= places] or costed[:1]
        most = IDLE * min(one.microseconds for one in filling)
        return [one for one in costed if one in filling or one.microseconds < most]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        splits, blocks = choices.splits, choices.blocks
        if choices.tile is not None or choices.method:
            return None
        if not isinstance(choices.tiling, self.tiling):
            return None
        tiling: AnyTiling = choices.tiling  # type: ignore[assignment]
        if not self.is_legal(request, tiling):
            return None
        if request.pass_ == "backprop_filter":
            fits = 1 <= splits <= MOST_CHUNKS and blocks == 0
        else:
            blocks = blocks or self.blocks(request, tiling, request.device.resident_blocks)
            most = max(self.shares(request, tiling).parts, 1)
            least = 1 if self.is_persistent else most
            fits = splits == 1 and least <= blocks <= most
        return self._costed(request, tiling, splits, blocks) if fits else None

    def _costed(
        self, request: Request, tiling: AnyTiling, chunks: int = 1, blocks: int = 0
    ) -> Candidate:
        chip, problem = request.chip, request.problem
        moved, workspace, adding = problem.bytes, 0, 0.0
        if request.pass_ != "backprop_filter":
            # Use the nominal chip, so that all cards of an architecture have the same plans.
            nominal = self.blocks(request, tiling, chip.multiprocessors)
            kernel = self.kernel(request, tiling, nominal)
        else:
            kernel = self.kernel(request, tiling, chunks)
            size, sums = accumulator_bytes(problem), prod(problem.filter_shape)
            workspace, result = chunks * sums * size, sums * ITEMSIZE[problem.dtype]
            moved += workspace - result
            adding = cost.of_reduction(chip, chunks, workspace + result)
        microseconds = kernel.microseconds(chip, moved) + adding
        return Candidate(
            self,
            microseconds,
            blocks=blocks,
            splits=chunks,
            workspace_bytes=workspace,
            tiling=tiling,
            computing=kernel.computing(chip),
        )


def chunk_bytes(problem: ConvProblem) -> int:
    """Return the workspace bytes per chunk of the filter gradient."""
    return prod(problem.filter_shape) * accumulator_bytes(problem)


def even(parts: int, chunks: int) -> int:
    """Return the smallest number of chunks that leaves the size of the largest chunk unchanged.

    For example, 9 parts have up to 3 parts per chunk with 4 chunks and with 3 chunks.

    Args:
        parts: number of tiles that the chunks divide among themselves.
        chunks: number of chunks to reduce.
    """
    return -(-parts // -(-parts // chunks)) if parts else 1


def chunk_counts(parts: int, others: int, multiprocessors: int) -> list[int]:
    """Return the numbers of chunks worth ranking, in ascending order.

    Each number is the smallest for the size of its largest chunk (``even``).  If there are enough
    parts, some of the numbers keep every multiprocessor busy.

    Args:
        parts: number of tiles that the chunks divide among themselves.
        others: blocks per chunk.
        multiprocessors: number of multiprocessors of the chip.
    """
    parts = max(parts, 1)  # an empty batch has no parts
    most = min(parts, MOST_CHUNKS)
    filling = min(-(-multiprocessors // others), most)
    found = {even(parts, min(-(-parts // (parts // filling)), most))}
    for count in BLOCKS:
        wanted = int(count * multiprocessors)
        for chunks in (wanted // others, -(-wanted // others)):
            found.add(even(parts, max(min(chunks, most), 1)))
    return sorted(found)


def reduction(product: Launch, problem: ConvProblem, chunks: int) -> Launch:
    """Return the launch that adds up the partial sums of the chunks, which ``product`` computes."""
    import numpy as np

    packed = product.arguments[-1]
    return replace(
        product,
        entry=f"{product.entry}_reduce",
        grid=(-(-prod(problem.filter_shape) // cost.ADDING_THREADS),),
        block=(cost.ADDING_THREADS,),
        shared_bytes=0,
        arguments=("workspace", "w", np.int32(chunks), packed),
    )
