"""Base class of kernel families whose tilings divide a pass into many small tiles.

The filter gradient splits the tiles into chunks, and a second launch adds up the partial sums of
the chunks (cuda/include/chunks.cuh).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

from cupyconv.kernels import cost, parameters
from cupyconv.kernels.family import Candidate, Choices, Family, accumulator_bytes
from cupyconv.kernels.limits import Count
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.launch import Launch
from cupyconv.problem import ITEMSIZE, ConvProblem

MOST_CHUNKS = 256
"""Largest number of chunks (hand-set)."""

BLOCKS = (0.25, 0.5, 1, 2, 3, 4, 6, 8)
"""Numbers of blocks per SM that the choice of chunks aims at (hand-set).  More blocks hide latency;
fewer blocks move fewer bytes."""

NO_WORK = cost.Work(0, 0)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Thread blocks of a tiling for particular tensors and a chip, with their work.

    A work tile is the work that a block does at a time: a tile or, in cuda-direct, several tiles.
    The work tiles are divided among blocks or, in backprop_filter, among chunks.

    Attributes:
        is_persistent: whether a block of forward or backprop_input computes several work tiles, so
            that the number of blocks is a free choice; else a block computes one work tile.
        tiling: the tiling, an instance of the family's class.
        work_tiles: number of work tiles.
        others: extents of the grid's further axes, along which blocks compute the same work tiles
            for other channels and, in backprop_filter, for other elements of the filter.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block, in bytes.
        resident: resident blocks per SM.
        work: work per work tile.
        fixed_work: work per block in addition to its work tiles.
    """

    is_persistent: ClassVar[bool] = True

    tiling: Any
    work_tiles: int
    others: tuple[int, ...]
    threads: int
    shared_bytes: int
    resident: int
    work: cost.Work
    fixed_work: cost.Work = NO_WORK

    def blocks(self, multiprocessors: int) -> int:
        """Return the number of blocks that divide the work tiles in forward and backprop_input.

        All persistent blocks are resident at once, and the work tiles are balanced among them.
        """
        if not self.is_persistent:
            return max(self.work_tiles, 1)
        at_once = max(multiprocessors * self.resident // prod(self.others), 1)
        each = max(-(-self.work_tiles // at_once), 1)
        return max(-(-self.work_tiles // each), 1)

    def kernel(self, blocks: int) -> cost.Kernel:
        """Return the work of the product if ``blocks`` blocks or chunks divide the work tiles."""
        work = self.work.times(-(-self.work_tiles // blocks)) + self.fixed_work
        warps = -(-self.threads // 32)
        return cost.Kernel(blocks * prod(self.others), self.resident, warps, work)


AnyGeometry = TypeVar("AnyGeometry", bound=Geometry)


class Streaming(Family, Generic[AnyGeometry]):
    """A family with tilings; in backprop_filter, the tiles are divided into chunks.

    Attributes:
        tiling: dataclass of the free choices of a launch; all fields are integers.
    """

    tiling: ClassVar[type]

    @abstractmethod
    def tilings(self, request: Request) -> Sequence[Any]:
        """Return all tilings of a supported layer, the most promising first."""

    @abstractmethod
    def find(self, request: Request, tiling: Any) -> AnyGeometry | None:
        """Return the thread blocks of a tiling; None if the tiling is illegal."""

    @abstractmethod
    def counts_of(self, request: Request, geom: AnyGeometry) -> Iterator[Count]:
        """Yield the quantities of a tiling that must fit into the kernels' 32-bit integers."""

    @abstractmethod
    def defines(
        self, request: Request, geom: AnyGeometry, epilogue: Epilogue
    ) -> dict[str, str | int]:
        """Return the macros of a launch."""

    def schedule(self, request: Request, geom: AnyGeometry, each: int) -> tuple[Any, ...]:
        """Return the kernel's arguments between the arrays and the parameters.

        Args:
            request: the pass.
            geom: thread blocks of the launch.
            each: largest number of work tiles per block.
        """
        return ()

    def choose(self, request: Request) -> Any:
        """Return the most promising tiling of a supported layer."""
        return self.tilings(request)[0]

    def geometry(self, request: Request, tiling: Any) -> AnyGeometry:
        """Return the thread blocks of a legal tiling."""
        geom = self.find(request, tiling)
        assert geom is not None
        return geom

    def counts(self, request: Request) -> Iterator[Count]:
        return self.counts_of(request, self.geometry(request, self.choose(request)))

    def is_legal(self, request: Request, tiling: Any) -> bool:
        """Return whether the kernel supports a tiling of a supported layer on its device."""
        geom = self.find(request, tiling)
        return geom is not None and all(
            count.value <= count.most for count in self.counts_of(request, geom)
        )

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

    def alternatives(self, request: Request, count: int) -> list[Candidate]:
        others = self.tilings(request)[1:]
        legal = [tiling for tiling in others if self.is_legal(request, tiling)]
        best = [
            min(self.candidates_of(request, tiling), key=lambda candidate: candidate.microseconds)
            for tiling in legal[:count]
        ]
        return sorted(best, key=lambda candidate: candidate.microseconds)

    def candidates_of(self, request: Request, tiling: Any) -> list[Candidate]:
        """Return the candidates with a tiling; in backprop_filter, one per number of chunks."""
        geom = self.geometry(request, tiling)
        if request.pass_ != "backprop_filter":
            blocks = geom.blocks(request.device.resident_blocks)
            return [self._costed(request, tiling, blocks=blocks)]
        others, places = prod(geom.others), request.chip.multiprocessors
        size = chunk_bytes(request.problem)
        wanted = chunk_counts(geom.work_tiles, others, places)
        # A smaller limit must not add candidates: no modelled time may become shorter.
        found = [chunks for chunks in wanted if request.affords(chunks * size)]
        found = found or [even(geom.work_tiles, max(request.most_within_limit(wanted[0], size), 1))]
        return [self._costed(request, tiling, chunks) for chunks in reversed(found)]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        tiling, splits, blocks = choices.tiling, choices.splits, choices.blocks
        if not choices.has_only("tiling", "splits") or not isinstance(tiling, self.tiling):
            return None
        if not self.is_legal(request, tiling):
            return None
        if request.pass_ == "backprop_filter":
            fits = 1 <= splits <= MOST_CHUNKS and blocks == 0
        else:
            geom = self.geometry(request, tiling)
            blocks = blocks or geom.blocks(request.device.resident_blocks)
            most = max(geom.work_tiles, 1)
            least = 1 if geom.is_persistent else most
            fits = splits == 1 and least <= blocks <= most
        return self._costed(request, tiling, splits, blocks) if fits else None

    def _costed(self, request: Request, tiling: Any, chunks: int = 1, blocks: int = 0) -> Candidate:
        chip, problem, geom = request.chip, request.problem, self.geometry(request, tiling)
        workspace = 0
        if request.pass_ != "backprop_filter":
            # Count the nominal chip's multiprocessors, not the card's, so that all cards of an
            # architecture have the same plans.
            demand = geom.kernel(geom.blocks(chip.multiprocessors)).demand(chip, problem.bytes)
        else:
            workspace = chunks * chunk_bytes(problem)
            result = prod(problem.filter_shape) * ITEMSIZE[problem.dtype]
            product = geom.kernel(chunks).demand(chip, problem.bytes + workspace - result)
            demand = cost.together(product, cost.further(chip, workspace + result, chunks))
        return self.priced(
            request,
            demand,
            blocks=blocks,
            splits=chunks,
            workspace_bytes=workspace,
            tiling=tiling,
        )

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launch of the product and, in backprop_filter, the reduction of its chunks."""
        import numpy as np

        problem, geom = request.problem, self.geometry(request, choices.tiling)
        is_filter = request.pass_ == "backprop_filter"
        blocks = choices.splits if is_filter else choices.blocks
        each = -(-geom.work_tiles // blocks)
        if not is_filter:  # all blocks compute nearly the same number of work tiles
            blocks = -(-geom.work_tiles // max(each, 1))
        source, result = ("y", "x") if request.pass_ == "backprop_input" else ("x", "y")
        arrays = ("x", "y", "workspace") if is_filter else (source, "w", "bias", "add", result)
        packed = parameters.pack(problem, request.memory)
        name = self.name.replace("cuda-", "conv_")
        product = Launch(
            source=f"{name}.cu",
            entry=name,
            defines=tuple(self.defines(request, geom, epilogue).items()),
            grid=(blocks, *geom.others),
            block=(geom.threads,),
            shared_bytes=geom.shared_bytes,
            arguments=(*arrays, *self.schedule(request, geom, each), packed),
        )
        if not is_filter:
            return (product,)
        reduction = replace(
            product,
            entry=f"{name}_reduce",
            grid=(-(-prod(problem.filter_shape) // cost.ADDING_THREADS),),
            block=(cost.ADDING_THREADS,),
            shared_bytes=0,
            arguments=("workspace", "w", np.int32(choices.splits), packed),
        )
        return product, reduction


def chunk_bytes(problem: ConvProblem) -> int:
    """Return the workspace bytes per chunk of the filter gradient."""
    return prod(problem.filter_shape) * accumulator_bytes(problem)


def even(work_tiles: int, chunks: int) -> int:
    """Return the smallest number of chunks that leaves the size of the largest chunk unchanged.

    For example, 9 work tiles have up to 3 work tiles per chunk with 4 chunks and with 3 chunks.

    Args:
        work_tiles: number of work tiles (``Geometry``) that are divided among the chunks.
        chunks: number of chunks to reduce.
    """
    return -(-work_tiles // -(-work_tiles // chunks)) if work_tiles else 1


def chunk_counts(work_tiles: int, others: int, multiprocessors: int) -> list[int]:
    """Return the numbers of chunks to estimate as candidates, in ascending order.

    Each number is the smallest for the size of its largest chunk (``even``).  If there are enough
    work tiles, some of the numbers keep every multiprocessor busy.

    Args:
        work_tiles: number of work tiles (``Geometry``) that are divided among the chunks.
        others: blocks per chunk.
        multiprocessors: number of multiprocessors of the chip.
    """
    work_tiles = max(work_tiles, 1)  # an empty batch has no work tiles
    most = min(work_tiles, MOST_CHUNKS)
    filling = min(-(-multiprocessors // others), most)
    found = {even(work_tiles, min(-(-work_tiles // (work_tiles // filling)), most))}
    for count in BLOCKS:
        wanted = int(count * multiprocessors)
        for chunks in (wanted // others, -(-wanted // others)):
            found.add(even(work_tiles, max(min(chunks, most), 1)))
    return sorted(found)
