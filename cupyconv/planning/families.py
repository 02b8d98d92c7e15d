"""The implementations: what each takes, and how its kernels are cut.

A kernel family is added here with one entry, beside its file in cuda/ and its module in
cupyconv/gpu/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from cupyconv.planning import hopper, patch, toeplitz
from cupyconv.planning.request import Request
from cupyconv.problem import ITEMSIZE, ConvProblem

Refusal = Callable[[Request], str | None]


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

    @property
    def defines(self) -> dict[str, int]:
        """All macros that the tile stands for."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**sizes, **dict(self.macros)}

    def blocks(self, gemm_m: int, gemm_n: int) -> int:
        """Blocks that cover a matrix."""
        return -(-gemm_m // self.block_m) * -(-gemm_n // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


def _generic_tile(
    block_m: int, block_n: int, thread_m: int, thread_n: int, itemsize: int | None = None
) -> Tile:
    threads = (block_m // thread_m) * (block_n // thread_n)
    macros = (("THREAD_M", thread_m), ("THREAD_N", thread_n))
    most = 8 if itemsize is None else itemsize
    return Tile(block_m, block_n, 16, threads, macros, itemsize=itemsize, most_bytes=most)


def _warp_tile(
    block_m: int,
    block_n: int,
    warps_m: int,
    warps_n: int,
    itemsize: int,
    since: tuple[int, int] = (8, 0),
) -> Tile:
    """Four stages, whose lines along k are of 64 bytes."""
    macros = (("WARPS_M", warps_m), ("WARPS_N", warps_n), ("STAGES", 4))
    threads = warps_m * warps_n * 32
    return Tile(block_m, block_n, 64 // itemsize, threads, macros, since, itemsize)


@dataclass(frozen=True)
class Family:
    """One implementation of the passes.

    Attributes:
        name: what ``impl`` takes and ``plan`` prints.
        summary: how it computes, in a line.
        on_gpu: whether it runs on the GPU, else on the CPU.
        refuses: why it cannot compute what is asked for; None if it can.
        tiles: block tiles its kernels may be compiled with; none on the CPU.
        uses_tensor_cores: which of the chip's rates bounds it.
        splits: whether gemm_k may be shared out over blocks.
        has_phases: whether backprop_input visits only the taps of each stride phase.
        streams: whether it has no tiles to choose and moves each byte about once.
        stays: whether its blocks stay on the chip and compute one tile after the other.
        on_request: whether "auto" leaves it out: its accuracy, or when it is the faster one, has
            not been measured on a GPU.
    """

    name: str
    summary: str
    on_gpu: bool
    refuses: Refusal = lambda request: None
    tiles: tuple[Tile, ...] = ()
    uses_tensor_cores: bool = False
    splits: bool = False
    has_phases: bool = False
    streams: bool = False
    stays: bool = False
    on_request: bool = False


def _tensor_cores_refuse(request: Request) -> str | None:
    """Why mma.sync does not multiply the operands; None if it does."""
    operands, capability = request.operands, request.device.capability
    if request.problem.is_complex:
        return "the tensor cores multiply real numbers"
    if operands == "float32":
        return "tensor cores multiply float32 only as TF32, which precision='tf32' permits"
    if operands == "float64" and capability not in DOUBLE_TENSOR_CORES:
        chips = ", ".join(f"{major}.{minor}" for major, minor in sorted(DOUBLE_TENSOR_CORES))
        return f"only chips of compute capability {chips} have tensor cores for float64"
    if operands != "float16" and capability < (8, 0):
        return f"{operands} on tensor cores needs compute capability 8.0"
    return None


def _gather_refuses(request: Request) -> str | None:
    refusal, phases = _tensor_cores_refuse(request), prod(request.problem.stride)
    if refusal is None and request.pass_ == "backprop_input" and phases > MAX_PHASES:
        return f"{phases} stride phases are more than {MAX_PHASES}"
    return refusal


def _direct_refuses(request: Request) -> str | None:
    problem, pass_ = request.problem, request.pass_
    outs, ins = direct_channels(problem, pass_)
    if problem.is_complex:
        return "cuda-direct multiplies real numbers"
    if ins > MAX_SOURCES:
        return f"cuda-direct takes up to {MAX_SOURCES} source channels a group, not {ins}"
    strip = direct_strip(problem, pass_)
    taps, stride, dilation = problem.filter_sizes[-1], problem.stride[-1], problem.dilation[-1]
    columns = (strip - 1) * stride + (taps - 1) * dilation + 1
    if columns > MAX_COLUMNS:
        return f"{columns} columns under a strip of {strip} are more than {MAX_COLUMNS}"
    if taps * ins > MAX_UNROLLED:
        return f"{taps} taps of {ins} channels are more than the {MAX_UNROLLED} that are unrolled"
    if prod(problem.filter_sizes[:-1]) * ins >= 2**16 or problem.groups * outs >= 2**16:
        return "the rows of the filter, or the channels, are more than a launch has blocks for"
    return _chunks_refused(request, "cuda-direct")


def _toeplitz_refuses(request: Request) -> str | None:
    return toeplitz.refusal(request) or _chunks_refused(request, "cuda-toeplitz")


def _patch_refuses(request: Request) -> str | None:
    refusal = _tensor_cores_refuse(request) or patch.refusal(request)
    return refusal or _chunks_refused(request, "cuda-patch")


def _chunks_refused(request: Request, family: str) -> str | None:
    least = chunk_bytes(request.problem) if request.pass_ == "backprop_filter" else 0
    if request.affords(least):
        return None
    return (
        f"{family} sums the filter gradient in a workspace of at least {least} bytes, the "
        f"limit is {request.workspace_limit}"
    )


def direct_channels(problem: ConvProblem, pass_: str) -> tuple[int, int]:
    """Results and sources of a group at a pixel, for a pass of cuda-direct.

    The filter gradient walks the output, so its results are the filters.
    """
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    return (channels, filters) if pass_ == "backprop_input" else (filters, channels)


def chunk_bytes(problem: ConvProblem) -> int:
    """Workspace that streaming families need for each chunk of pixels of the filter gradient."""
    return prod(problem.filter_shape) * accumulator_bytes(problem)


def direct_strip(problem: ConvProblem, pass_: str) -> int:
    """Neighbouring pixels of a row that a thread of cuda-direct computes.

    In backprop_input, whole strides.
    """
    return -(-4 // problem.stride[-1]) * problem.stride[-1] if pass_ == "backprop_input" else 4


def accumulator_bytes(problem: ConvProblem) -> int:
    """Size of the sums that splits and chunks leave in a workspace."""
    return max(ITEMSIZE[problem.dtype], 4)


MAX_SOURCES = 16
"""Source channels of a group, all of which a thread holds for a pixel."""

MAX_UNROLLED = 64
"""Taps of a row times source channels, whose products are unrolled."""

MAX_COLUMNS = 96
"""Columns of the input under a strip that are still unrolled: a 31-tap filter with dilation 2."""

DOUBLE_TENSOR_CORES = {(8, 0), (9, 0), (10, 0)}
"""Compute capabilities of the chips whose tensor cores multiply float64 at a useful rate."""

MAX_PHASES = 64
"""Stride phases that a block is still quick to find its own among."""

REFERENCE = Family(
    "reference", "the definition, tap by tap, summed in float64 with NumPy", on_gpu=False
)
NUMPY = Family(
    "numpy", "block by block with NumPy's BLAS, by the method that suits the layer", on_gpu=False
)
CUDA_GENERIC = Family(
    "cuda-generic",
    "tiled implicit GEMM for every configuration, dtype and chip",
    on_gpu=True,
    tiles=(
        _generic_tile(64, 64, 4, 4),
        _generic_tile(256, 8, 4, 2),  # few channels or filters in a group
        # A sum takes four registers, and a tile of 256 rows more than shared memory has.
        _generic_tile(32, 32, 2, 2, itemsize=16),
        _generic_tile(128, 8, 4, 2, itemsize=16),
    ),
)
CUDA_GATHER = Family(
    "cuda-gather",
    "implicit GEMM on the tensor cores, fed by a ring of asynchronous copies",
    on_gpu=True,
    refuses=_gather_refuses,
    tiles=(
        # Before 8.0 copies go through registers, which the larger tiles have none left for.
        _warp_tile(128, 128, 2, 4, itemsize=2),
        _warp_tile(128, 64, 4, 2, itemsize=2),
        _warp_tile(64, 64, 2, 2, itemsize=2, since=(7, 5)),
        _warp_tile(128, 128, 2, 4, itemsize=4),
        _warp_tile(128, 64, 4, 2, itemsize=4),
        _warp_tile(64, 64, 2, 2, itemsize=4),
        # A sum takes two registers: 128 x 128 of them do not fit.
        _warp_tile(128, 64, 4, 2, itemsize=8),
        _warp_tile(64, 64, 2, 2, itemsize=8),
    ),
    uses_tensor_cores=True,
    splits=True,
    has_phases=True,
)

CUDA_DIRECT = Family(
    "cuda-direct",
    "strips of neighbouring pixels and channels, each byte moved about once",
    on_gpu=True,
    refuses=_direct_refuses,
    streams=True,
)


def _hopper_tile(
    block_m: int, block_n: int, stages: int, cluster: int = 1, itemsize: int = 2, planes: int = 1
) -> Tile:
    """Two warpgroups that multiply and one that loads; as many stages as shared memory holds."""
    macros = (("STAGES", stages), ("CLUSTER", cluster), ("PLANES", planes))
    line = hopper.LINE_BYTES // (itemsize if planes == 1 else 2)
    return Tile(block_m, block_n, line, 384, macros, (9, 0), itemsize)


CUDA_HOPPER = Family(
    "cuda-hopper",
    "implicit GEMM on wgmma, fed by TMA, in blocks that stay for many tiles",
    on_gpu=True,
    refuses=hopper.refusal,
    tiles=tuple(
        _hopper_tile(block_m, block_n, stages, cluster, itemsize)
        for itemsize in (2, 4)
        for block_m, block_n, stages, cluster in (
            (128, 256, 4, 2),
            (128, 256, 4, 1),
            (256, 128, 4, 2),
            (256, 128, 4, 1),
            (128, 192, 4, 1),
            (128, 128, 6, 2),
            (128, 128, 6, 1),
            (256, 64, 4, 1),
            (128, 64, 6, 1),
        )
    ),
    uses_tensor_cores=True,
    splits=True,
    has_phases=True,
    stays=True,
)
CUDA_HOPPER_BF16X6 = Family(
    "cuda-hopper-bf16x6",
    "float32 as cuda-hopper's products of three bfloat16 planes",
    on_gpu=True,
    refuses=hopper.refusal_of_planes,
    # Sums are kept twice, in and out of the tensor cores: 256 columns of them do not fit.
    tiles=(
        _hopper_tile(128, 128, 6, 2, itemsize=4, planes=hopper.PLANES),
        _hopper_tile(128, 128, 6, itemsize=4, planes=hopper.PLANES),
        _hopper_tile(256, 64, 4, itemsize=4, planes=hopper.PLANES),
        _hopper_tile(128, 64, 6, itemsize=4, planes=hopper.PLANES),
    ),
    uses_tensor_cores=True,
    splits=True,
    has_phases=True,
    stays=True,
    on_request=True,
)


def _halo_tile(block_m: int, block_n: int, rows: int, cluster: int, itemsize: int) -> Tile:
    """Pixels in rows of 8, and as many stages of the filter as shared memory holds beside them."""
    macros = (("CLUSTER", cluster), ("ROWS", rows))
    return Tile(block_m, block_n, hopper.LINE_BYTES // itemsize, 384, macros, (9, 0), itemsize)


CUDA_HOPPER_HALO = Family(
    "cuda-hopper-halo",
    "cuda-hopper for filters of several rows: the input loaded once for each filter column",
    on_gpu=True,
    refuses=hopper.refusal_of_halos,
    tiles=tuple(
        _halo_tile(block_m, block_n, rows, cluster, itemsize)
        for itemsize in (2, 4)
        for block_m, block_n in ((128, 256), (256, 128), (128, 128))
        for rows in (16, 8)
        for cluster in (2, 1)
    ),
    uses_tensor_cores=True,
    stays=True,
    on_request=True,
)

CUDA_TOEPLITZ = Family(
    "cuda-toeplitz",
    "rows of a channel times the filter's rows as Toeplitz matrices, on the tensor cores",
    on_gpu=True,
    refuses=_toeplitz_refuses,
    uses_tensor_cores=True,
    streams=True,
)

CUDA_PATCH = Family(
    "cuda-patch",
    "few channels: the input under a tile copied once, rows of the filter as gemm_k, on the tensor "
    "cores",
    on_gpu=True,
    refuses=_patch_refuses,
    uses_tensor_cores=True,
    streams=True,
)

FAMILIES = {
    family.name: family
    for family in (
        REFERENCE,
        NUMPY,
        CUDA_GENERIC,
        CUDA_GATHER,
        CUDA_DIRECT,
        CUDA_TOEPLITZ,
        CUDA_PATCH,
        CUDA_HOPPER,
        CUDA_HOPPER_BF16X6,
        CUDA_HOPPER_HALO,
    )
}
"""All implementations by name."""
