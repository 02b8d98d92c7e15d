"""What an implementation of the passes is to the planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar

from cupyconv.planning.device import CHIPS, Device
from cupyconv.planning.reach import Count, offset_counts
from cupyconv.planning.request import Implementation, Request
from cupyconv.problem import ITEMSIZE, ConvProblem


@dataclass(frozen=True)
class Tile:
    """The block tile of a GEMM kernel.

    Attributes:
        block_m, block_n, block_k: its sizes in elements.
        threads: threads of a block.
        macros: further macros of the variant, by name.
        since: oldest compute capability that has the registers and instructions for it.
        itemsize: bytes of the elements that it is for; None for any.
        most_bytes: of an element, for which shared memory is enough.
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
        """Whether it has elements of so many bytes."""
        return self.itemsize in (None, itemsize) and itemsize <= self.most_bytes

    @cached_property
    def defines(self) -> dict[str, int]:
        """All macros that the tile stands for."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**sizes, **dict(self.macros)}

    def blocks(self, gemm_m: int, gemm_n: int) -> int:
        """Blocks that cover a matrix."""
        return -(-gemm_m // self.block_m) * -(-gemm_n // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


@dataclass(frozen=True)
class Candidate:
    """One way to compute a pass, with what it is expected to take.

    Attributes:
        family: whose it is.
        microseconds: the estimate of the family's cost model.
        tile: block tile of a GEMM kernel, else None.
        blocks: thread blocks of one split.
        splits: into how many parts gemm_k, or the pixels, are cut.
        workspace_bytes: device memory beside the tensors.
        method: of the family, if it has several; else empty.
        summary: of the method, in a few words; on a GPU, what is done to operands before.
        computing: microseconds without the movement of bytes, by which equal estimates are told
            apart; 0 where that is not known.
    """

    family: Family
    microseconds: float
    tile: Tile | None = None
    blocks: int = 0
    splits: int = 1
    workspace_bytes: int = 0
    method: str = ""
    summary: str = ""
    computing: float = 0.0


class Family(ABC):
    """One implementation of the passes: what it refuses, and the ways that it has.

    Attributes:
        name: what ``impl`` takes and ``plan`` prints.
        summary: how it computes, in a line.
        kernels: of a family on the GPU, the module of cupyconv/gpu that works out its launches.
            Its product is ``cuda/conv_{kernels}.cu``; those of cuda-generic are ``conv_{pass}.cu``.
        on_gpu: whether it runs on the GPU, else on the CPU.
        tiles: block tiles that its kernels may be compiled with.
    """

    name: ClassVar[Implementation]
    summary: ClassVar[str]
    kernels: ClassVar[str]
    on_gpu: ClassVar[bool] = True
    tiles: ClassVar[tuple[Tile, ...]] = ()

    def refuses(self, request: Request) -> str | None:
        """Why it cannot compute what is asked for; None if it can."""
        refusal = self.refuses_layer(request)
        if refusal is not None or not self.on_gpu:
            return refusal
        counts = chain(offset_counts(request.problem, request.memory), self.counts(request))
        return next((f"{self.name} {count}" for count in counts if count.value > count.most), None)

    def refuses_layer(self, request: Request) -> str | None:
        """Why, but for what its kernels cannot count."""
        return None

    @abstractmethod
    def counts(self, request: Request) -> Iterable[Count]:
        """What its kernels have numbers of 32 bits for, of a layer that it does not refuse."""

    @abstractmethod
    def candidates(self, request: Request) -> Sequence[Candidate]:
        """The ways to compute what it does not refuse within the workspace limit, costed."""

    @abstractmethod
    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        """One way, costed, be it worth a thought or not; None if the family does not have it."""

    def reason(self, candidate: Candidate, note: str = "") -> str:
        """What ``plan`` says of a candidate, with a note on its estimate."""
        text = f"estimated {candidate.microseconds:.3g} us{note}: {self.summary}"
        return f"{text}; before it, {candidate.summary}" if candidate.summary else text

    def fitting_tiles(self, request: Request) -> list[Tile]:
        """The tiles for a request's chip and type of elements."""
        itemsize, capability = ITEMSIZE[request.problem.dtype], request.device.capability
        return [t for t in self.tiles if t.since <= capability and t.is_for(itemsize)]


def mma_refuses(request: Request) -> str | None:
    """Why mma.sync does not multiply the operands; None if it does."""
    operands, device = request.operands, request.device
    if request.problem.is_complex:
        return "the tensor cores multiply real numbers"
    if operands == "float32":
        return "tensor cores multiply float32 only as TF32, which precision='tf32' permits"
    if operands == "float64" and not device.chip.double_tensor_rate:
        chips = ", ".join(f"{c[0]}.{c[1]}" for c, chip in CHIPS.items() if chip.double_tensor_rate)
        return f"only chips of compute capability {chips} have tensor cores for float64"
    if operands != "float16" and device.capability < (8, 0):
        return f"{operands} on tensor cores needs compute capability 8.0"
    return None


def copies_async(device: Device) -> bool:
    """Whether copies go on by themselves."""
    return device.capability >= (8, 0)


def spatial(values: Sequence[int], filler: int = 1) -> tuple[int, int, int]:
    """Depth, height and width of values of any rank."""
    depth, height, width = (*(filler,) * (3 - len(values)), *values)
    return depth, height, width


def accumulator_bytes(problem: ConvProblem) -> int:
    """Size of the sums that splits and chunks leave in a workspace."""
    return max(ITEMSIZE[problem.dtype], 4)
