"""cuda-hopper-bf16x6: products of float32 operands, computed as products of bfloat16 values.

cuda/conv_planes.cu splits each operand into three bfloat16 tensors, its planes, which add up to the
operand.  The kernel of cuda-hopper multiplies the planes.
"""

from __future__ import annotations

from collections.abc import Iterator

from cupyconv.kernels.copies import ROLES_OF, copy_bytes, shape_of
from cupyconv.kernels.family import Tile
from cupyconv.kernels.hopper import (
    PLANES,
    Layout,
    Persistent,
    layouts,
    pipeline_stages,
    tile_of,
    tma_counts,
    tma_refuses,
)
from cupyconv.kernels.limits import Count
from cupyconv.kernels.request import Request
from cupyconv.kernels.views import Viewed


def plane_bytes(request: Request) -> int:
    """Return the workspace for the planes of both operands of a pass, in bytes."""
    problem = _layout(request).problem
    operands = ROLES_OF[request.pass_][:-1]
    return sum(PLANES * copy_bytes(shape_of(problem, role), 2) for role in operands)


def _layout(request: Request) -> Layout:
    return layouts(request.problem, request.pass_, request.memory, "planes")[0]


class HopperBf16x6(Persistent):
    name = "cuda-hopper-bf16x6"
    summary = "float32 split into three bfloat16 planes, which cuda-hopper's kernel multiplies"
    passes = 6  # products of planes per product of float32 operands
    # A thread has two sets of sums in registers: the accumulators of wgmma, and the float sums to
    # which the kernel adds these accumulators.  Tiles of 256 columns would need too many registers.
    tiles = tuple(
        tile_of(
            *(block_m, block_n, 4, 2),
            STAGES=pipeline_stages(block_m, block_n, 4),
            CLUSTER=cluster,
            PLANES=PLANES,
            PLANAR=0,
        )
        for block_m, block_n, cluster in ((128, 128, 2), (128, 128, 1), (256, 64, 1), (128, 64, 1))
    )

    def counts(self, request: Request) -> Iterator[Count]:
        yield from tma_counts(request, operand_bytes=2, planes=PLANES)
        yield self.count_of_tiles(request)

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if problem.dtype != "float32":
            return f"cuda-hopper-bf16x6 multiplies float32, not {problem.dtype}"
        if request.precision != "bf16x6":
            return (
                "cuda-hopper-bf16x6 loses bits of numbers below 2^-110 and may turn infinity into "
                "NaN, which only precision='bf16x6' permits"
            )
        refusal = tma_refuses(request, operand_bytes=2)
        if refusal is not None:
            return refusal
        least = plane_bytes(request)
        if not request.affords(least):
            return (
                f"the planes of the operands need a workspace of {least} bytes, the limit is "
                f"{request.workspace_limit}"
            )
        layout = _layout(request)
        for role in ROLES_OF[request.pass_][:-1]:
            if getattr(layout.strides, role)[-1] != 1 < shape_of(layout.problem, role)[-1]:
                return (
                    "cuda-hopper-bf16x6 takes operands with channels or filters contiguous in "
                    f"memory: in {role}, they are not contiguous"
                )
        return None

    def before(self, request: Request, tile: Tile) -> tuple[float, int, tuple[str, ...], str]:
        planes = plane_bytes(request)
        moved = planes * 5 / 3  # per element, 4 bytes are read and 3 x 2 bytes are written
        return moved, planes, ROLES_OF[request.pass_][:-1], "split into planes"


class ViewedHopperBf16x6(Viewed, HopperBf16x6):
    """cuda-hopper-bf16x6 with the views of views.py."""


CUDA_HOPPER_BF16X6 = ViewedHopperBf16x6()
