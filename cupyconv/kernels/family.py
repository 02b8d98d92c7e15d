"""Interface of a kernel family: unsupported layers, candidates, modelled times and launches.

A kernel family is one implementation of the passes, such as "cuda-gather".  A candidate is a
configuration with which the family can compute a pass: a tile, a number of splits and so on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar

from cupyconv.kernels import cost
from cupyconv.kernels.calibration import prices
from cupyconv.kernels.device import CHIPS, Device
from cupyconv.kernels.limits import Count, offset_counts
from cupyconv.kernels.request import PLAIN, Epilogue, Implementation, Request
from cupyconv.launch import FilterForm, Launch, operand_names
from cupyconv.problem import ITEMSIZE, ConvProblem


@dataclass(frozen=True)
class Tile:
    """The block tile of a GEMM kernel.

    Attributes:
        block_m, block_n, block_k: extents in elements.
        threads: threads per block.
        macros: (name, value) of each macro of the tile except BLOCK_M, BLOCK_N and BLOCK_K.
        since: oldest compute capability that supports the tile.
        itemsize: bytes per element that the tile is for; None for all sizes up to ``most_bytes``.
        most_bytes: largest element size, in bytes, for which the tile fits into shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    threads: int
    macros: tuple[tuple[str, int], ...]
    since: tuple[int, int] = (7, 5)
    itemsize: int | None = None
    most_bytes: int = 16

    def is_for(self, itemsize: int) -> bool:
        """Return whether the tile supports elements of this many bytes."""
        return self.itemsize in (None, itemsize) and itemsize <= self.most_bytes

    @cached_property
    def defines(self) -> dict[str, int]:
        """Macros of the tile, by name."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**sizes, **dict(self.macros)}

    def blocks(self, gemm_m: int, gemm_n: int) -> int:
        """Return the number of block tiles that cover a matrix."""
        return -(-gemm_m // self.block_m) * -(-gemm_n // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """All free choices of a launch; the problem and its tensors determine everything else.

    Attributes:
        tile: block tile of a GEMM kernel, else None.
        tiling: tile extents and similar choices of a family without block tiles, as an instance of
            the family's ``tiling`` class; else None.
        blocks: in a family with block tiles, number of tiles that cover the result, which ``tile``
            determines.  In a family with tilings, number of thread blocks among which forward and
            backprop_input divide the tiles; 0 in backprop_filter, which divides the tiles among
            ``splits``.  0 on the CPU.
        splits: number of parts into which gemm_k or the pixels are divided.  Each part has its own
            partial sums, which a second launch adds up in a fixed order, or a cluster of blocks.
        workspace_bytes: bytes of device memory in addition to the tensors.
        view: name of the view (views.py) that computes the pass; "" for the pass itself.
        copies: operands that "cuda-gather" and "cuda-columns" copy before the product, each "x",
            "w" or "y" for dy; () in all other families.
        divides_frames: whether the frames of a 3-D layer are divided (frames.py).
        method: name of the algorithm in "numpy"; "" in all other families.
    """

    tile: Tile | None = None
    tiling: Any = None
    blocks: int = 0
    splits: int = 1
    workspace_bytes: int = 0
    view: str = ""
    copies: tuple[str, ...] = ()
    divides_frames: bool = False
    method: str = ""

    def has_only(self, *names: str) -> bool:
        """Return whether all other choices, except computed ones, have their defaults."""
        free = {*names, "blocks", "workspace_bytes"}
        others = (field for field in fields(Choices) if field.name not in free)
        return all(getattr(self, field.name) == field.default for field in others)


@dataclass(frozen=True)
class Candidate(Choices):
    """A configuration of a pass with its modelled time.

    Attributes:
        family: the kernel family.
        microseconds: modelled time.
        summary: text that ``plan`` prints: the algorithm on the CPU, the kind of copies on a GPU.
        copied: operands that a launch before the product copies or splits, as in ``copies``.
        demand: demand from which the time was modelled; None on the CPU.
    """

    family: Family
    microseconds: float
    summary: str = ""
    copied: tuple[str, ...] = ()
    demand: cost.Demand | None = None

    def with_demand(self, request: Request, more: cost.Demand) -> Candidate:
        """Return the candidate with more demand, and its modelled time."""
        assert self.demand is not None
        demand = cost.together(self.demand, more)
        time = demand.microseconds(prices(request, self.family.name))
        return replace(self, demand=demand, microseconds=time)


class Family(ABC):
    """An implementation of the passes.

    Attributes:
        name: name that ``impl`` takes and ``plan`` prints.
        summary: the algorithm in one line.
        on_gpu: whether the family runs on a GPU; else on the CPU.
        tiles: block tiles that the family's kernels may be compiled with.
        tiling: class of ``Choices.tiling``, if the family has no block tiles; else None.
    """

    name: ClassVar[Implementation]
    summary: ClassVar[str]
    on_gpu: ClassVar[bool] = True
    tiles: ClassVar[tuple[Tile, ...]] = ()
    tiling: ClassVar[type | None] = None

    def refuses(self, request: Request) -> str | None:
        """Return why the family cannot compute a request; None if the family can."""
        refusal = self.refuses_layer(request)
        if refusal is not None or not self.on_gpu:
            return refusal
        counts = chain(offset_counts(request.problem, request.memory), self.counts(request))
        return next((f"{self.name} {count}" for count in counts if count.value > count.most), None)

    def refuses_layer(self, request: Request) -> str | None:
        """Return why the family cannot compute a layer; ``refuses`` also checks integer ranges."""
        return None

    @abstractmethod
    def counts(self, request: Request) -> Iterable[Count]:
        """Return the quantities of a layer that must fit into the kernels' 32-bit integers."""

    @abstractmethod
    def candidates(self, request: Request) -> Sequence[Candidate]:
        """Return the candidates within the workspace limit, for a supported request."""

    def alternatives(self, request: Request, count: int) -> Sequence[Candidate]:
        """Return at most ``count`` more candidates to autotune, the most promising first."""
        return ()

    @abstractmethod
    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        """Return the candidate with these choices; None if they are illegal.

        The family computes the workspace and, if ``blocks`` is 0, the number of blocks.
        """

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launches that compute a pass, in order, as plain data.

        Args:
            request: a request that the family supports, as ``Request.reduced`` returns it.
            choices: legal choices, such as those of a plan.
            epilogue: addition of an array and activation, applied to the results of forward or
                backprop_input.
            copied_w: whether the caller passes, in place of w, the copy that ``filter_form``
                describes.
        """
        raise NotImplementedError(f"{self.name} launches no kernels")

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        """Return the copy of w that the first launch writes for the later launches.

        The result is None if the launches read w itself.
        """
        return None

    def reason(self, candidate: Candidate, note: str = "") -> str:
        """Return the reason that ``plan`` prints; ``note`` is added after the estimated time."""
        view = f", with {candidate.view}" if candidate.view else ""
        text = f"estimated {cost.duration(candidate.microseconds)}{note}{view}: {self.summary}"
        text += "; frames divided" if candidate.divides_frames else ""
        names = operand_names(candidate.copied)
        return f"{text}; before it, {names} {candidate.summary}" if names else text

    def priced(self, request: Request, demand: cost.Demand, **choices: Any) -> Candidate:
        """Return a candidate with the modelled time of its demand."""
        microseconds = demand.microseconds(prices(request, self.name))
        return Candidate(self, microseconds, demand=demand, **choices)

    def fitting_tiles(self, request: Request) -> list[Tile]:
        """Return the tiles that the request's chip and dtype support."""
        itemsize = ITEMSIZE[request.problem.dtype]
        return list(_tiles_for(self, itemsize, request.device.instructions))


@cache
def _tiles_for(family: Family, itemsize: int, newest: tuple[int, int]) -> tuple[Tile, ...]:
    """Return the tiles of a family for elements of a size and instructions of a capability."""
    return tuple(t for t in family.tiles if t.since <= newest and t.is_for(itemsize))


def mma_refuses(request: Request) -> str | None:
    """Return why mma.sync cannot multiply the operands; None if mma.sync can."""
    operands, device = request.operands, request.device
    if request.problem.is_complex:
        return "tensor cores multiply only real numbers"
    if operands == "float32":
        return "tensor cores multiply float32 only as TF32, which precision='tf32' permits"
    if operands == "float64" and not device.chip.double_tensor_rate:
        chips = ", ".join(f"{c[0]}.{c[1]}" for c, chip in CHIPS.items() if chip.double_tensor_rate)
        return f"only chips of compute capability {chips} have tensor cores for float64"
    if operands != "float16" and device.instructions < (8, 0):
        return f"{operands} on tensor cores needs compute capability 8.0"
    return None


def copies_async(device: Device) -> bool:
    """Return whether the device has asynchronous copies (cp.async)."""
    return device.instructions >= (8, 0)


def spatial(values: Sequence[int], filler: int = 1) -> tuple[int, int, int]:
    """Return the values of one to three axes as (depth, height, width).

    ``filler`` is the value of the missing axes, which are the leftmost.
    """
    depth, height, width = (*(filler,) * (3 - len(values)), *values)
    return depth, height, width


def accumulator_bytes(problem: ConvProblem) -> int:
    """Return the bytes per partial sum in the workspace."""
    return max(ITEMSIZE[problem.dtype], 4)
