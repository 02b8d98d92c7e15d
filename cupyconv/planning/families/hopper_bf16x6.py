"""cuda-hopper-bf16x6 (cuda/conv_planes.cu): float32 as planes of bfloat16, for cuda-hopper."""

from __future__ import annotations

from math import prod

from cupyconv.planning.families.hopper import Staying, layout_of, ring_stages, tile_of, tma_refuses
from cupyconv.planning.request import Request
from cupyconv.problem import ConvProblem

PLANES = 3
"""bfloat16 planes that float32 tensors are split into."""

PRODUCTS = 6
"""Products of planes for each product of float32."""


def plane_bytes(problem: ConvProblem, pass_: str) -> int:
    """Workspace for the planes of both operands of a pass."""
    shapes = {
        "forward": (problem.input_shape, problem.filter_shape),
        "backprop_input": (problem.output_shape, problem.filter_shape),
        "backprop_filter": (problem.input_shape, problem.output_shape),
    }[pass_]
    return sum(PLANES * 2 * prod(shape) for shape in shapes)


class HopperBf16x6(Staying):
    name = "cuda-hopper-bf16x6"
    summary = "float32 as cuda-hopper's products of three bfloat16 planes"
    kernels = "hopper"
    # Sums are kept twice, in and out of the tensor cores: 256 columns of them do not fit.
    tiles = tuple(
        tile_of(
            *(block_m, block_n, 4, 2),
            STAGES=ring_stages(block_m, block_n),
            CLUSTER=cluster,
            PLANES=PLANES,
        )
        for block_m, block_n, cluster in ((128, 128, 2), (128, 128, 1), (256, 64, 1), (128, 64, 1))
    )

    def refuses(self, request: Request) -> str | None:
        problem = request.problem
        if problem.dtype != "float32":
            return f"cuda-hopper-bf16x6 multiplies float32, not {problem.dtype}"
        if request.precision != "bf16x6":
            return (
                "cuda-hopper-bf16x6 loses bits of numbers below 2^-110 and may make NaN of "
                "infinity, which precision='bf16x6' permits"
            )
        refusal = tma_refuses(request, operand_bytes=2)
        if refusal is not None:
            return refusal
        least = plane_bytes(problem, request.pass_)
        if not request.affords(least):
            return (
                f"the planes of the operands take a workspace of {least} bytes, the limit is "
                f"{request.workspace_limit}"
            )
        if layout_of(request).copied:
            return (
                "cuda-hopper-bf16x6 takes tensors with channels or filters last, 16-byte aligned, "
                "neither reversed nor with elements that share memory"
            )
        return None

    def products(self, request: Request) -> int:
        return PRODUCTS

    def around(self, request: Request) -> tuple[float, int, int]:
        planes = plane_bytes(request.problem, request.pass_)
        return planes * 5 / 3, planes, 2  # float32 read, three planes written


CUDA_HOPPER_BF16X6 = HopperBf16x6()
