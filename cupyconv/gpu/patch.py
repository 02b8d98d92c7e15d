"""Launches of the patch kernels (cuda/conv_patch.cu)."""

from __future__ import annotations

from cupyconv.gpu import chunks, parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families import patch
from cupyconv.planning.families.family import copies_async, spatial
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES, ConvProblem

THREADS = 32 * patch.WARPS


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of one planned pass; backprop_filter has the reduction of its chunks too."""
    request = Request(problem, pass_plan.pass_, device, strides=strides)
    access, made = patch.access_of(request), patch.cut(request)
    assert made is not None
    is_filter = pass_plan.pass_ == "backprop_filter"
    depth, height, width = spatial(problem.filter_sizes)
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_plan.pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "CHANNELS": problem.C,
        "X_LAST": int(access.x_last),
        "FILTER_T": depth,
        "FILTER_R": height,
        "FILTER_S": width,
        "STRIDE_H": spatial(problem.stride)[1],
        "STRIDE_W": problem.stride[-1],
        "DILATION_H": spatial(problem.dilation)[1],
        "DILATION_W": problem.dilation[-1],
        "TILE_P": made.tile_p,
        "TILE_Q": made.tile_q,
        "LINE_PITCH": made.line_pitch,
        "X_VECTOR": access.x_vector,
        "SHIFT": access.shift,
        "Y_LAST": int(access.y_last),
        "Y_VECTOR": access.y_vector,
        "ASYNC_COPY": int(copies_async(device)),
        "RESIDENT": made.resident,
        "SHARED_BYTES": made.shared_bytes,
    }
    if is_filter:
        defines |= {
            "ROW_TILES": made.filters // 16,
            "WARPS_N": made.warps_n,
            "WARPS_K": made.warps_k,
            "WARP_WORDS": made.warp_words,
            "SHARE_WORDS": made.share_words,
        }
    else:
        defines |= {"BLOCK_N": made.filters, "ACTIVATION": parameters.ACTIVATION[activation]}
    packed = parameters.pack(problem, strides)
    filter_blocks = -(-problem.K // made.filters)

    def launch(grid: tuple[int, ...], *arguments: object) -> Launch:
        return Launch(
            source="conv_patch.cu",
            entry="conv_patch",
            defines=tuple(defines.items()),
            grid=grid,
            block=(THREADS,),
            shared_bytes=made.shared_bytes,
            arguments=arguments,
        )

    if not is_filter:
        # Blocks stay, and take as many tiles each as others do.
        at_once = max(device.resident_blocks * made.resident // filter_blocks, 1)
        tiles_each = max(-(-made.tiles // at_once), 1)
        grid = (-(-made.tiles // tiles_each), filter_blocks)
        return (launch(grid, "x", "w", "bias", "y", packed),)
    product = launch((pass_plan.splits, filter_blocks, made.shares), "x", "y", "workspace", packed)
    return product, chunks.reduction(product, problem, pass_plan.splits)
