"""The implementations: what each takes, and where its code is.

A kernel family is added here with one entry; kernels themselves are in cuda/.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.problem import PASSES, ConvProblem


@dataclass(frozen=True)
class Tile:
    """The block tile of a GEMM kernel: sizes in elements, and each thread's share of it."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.block_m // self.thread_m) * (self.block_n // self.thread_n)

    def blocks(self, gemm_m: int, gemm_n: int) -> int:
        """Blocks that cover one group's output matrix."""
        return -(-gemm_m // self.block_m) * -(-gemm_n // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


@dataclass(frozen=True)
class Family:
    """One implementation of the passes.

    Attributes:
        name: what ``impl`` takes and ``plan`` prints.
        summary: how it computes, in a line.
        on_gpu: whether it runs on the GPU, else on the CPU.
        passes: the passes it has.
        tiles: block tiles its kernels may be compiled with; none on the CPU.
    """

    name: str
    summary: str
    on_gpu: bool
    passes: tuple[str, ...] = PASSES
    tiles: tuple[Tile, ...] = ()

    def source(self, pass_: str) -> str:
        """The kernel file of a pass; its kernel has the same name."""
        return f"conv_{pass_}.cu"

    def refuses(self, problem: ConvProblem, pass_: str) -> str | None:
        """Why this family cannot compute a pass of a problem; None if it can."""
        return None if pass_ in self.passes else f"{self.name} has no {pass_} pass"


REFERENCE = Family(
    "reference", "the definition, tap by tap, summed in float64 with NumPy", on_gpu=False
)
NUMPY = Family(
    "numpy", "blocks of the im2col matrix times the filter, with NumPy's BLAS", on_gpu=False
)
CUDA_GENERIC = Family(
    "cuda-generic",
    "tiled implicit GEMM for every configuration, dtype and chip",
    on_gpu=True,
    tiles=(
        Tile(64, 64, 16, 4, 4),
        Tile(256, 8, 16, 4, 2),  # few channels or filters in a group
    ),
)

FAMILIES = {family.name: family for family in (REFERENCE, NUMPY, CUDA_GENERIC)}
"""All implementations by name; of those that fit, the last is preferred."""
