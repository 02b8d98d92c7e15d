"""Launches of the tensor-core gather kernels (cuda/conv_gather.cu)."""

from __future__ import annotations

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families.gather import accesses
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

_REDUCE_THREADS = 256
_INDEX_BYTES = {"int": 4, "long long": 8}

# The kernel's a, b, bias, c and partial, by pass.
_OPERANDS = {
    "forward": ("x", "w", "bias", "y", "workspace"),
    "backprop_input": ("y", "w", "bias", "x", "workspace"),
    "backprop_filter": ("y", "x", "bias", "w", "workspace"),
}


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of one planned pass: the product and, if it is split, the reduction."""
    tile = pass_plan.tile
    assert tile is not None
    a, b, c = accesses(pass_plan.pass_, problem, strides)
    index = parameters.index_type(problem, strides)
    split = pass_plan.splits > 1
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_plan.pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": index,
        **tile.defines,
        "A_ALONG_K": int(a.along_first),
        "A_VECTOR": a.vector,
        "B_ALONG_K": int(b.along_first),
        "B_VECTOR": b.vector,
        "C_ALONG_N": int(c.along_first),
        "C_VECTOR": c.vector,
        "SPLIT": int(split),
        "ASYNC_COPY": int(device.capability >= (8, 0)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    shared_bytes = _shared_bytes(defines, ITEMSIZE[problem.dtype])
    defines["SHARED_BYTES"] = shared_bytes
    packed = parameters.pack(problem, strides)
    a_role, b_role, bias, c_role, workspace = _OPERANDS[pass_plan.pass_]
    product = Launch(
        source="conv_gather.cu",
        entry="conv_gather",
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks, pass_plan.splits),
        block=(tile.threads,),
        shared_bytes=shared_bytes,
        arguments=(a_role, b_role, bias, c_role, workspace, packed),
    )
    if not split:
        return (product,)
    gemm = problem.gemm(pass_plan.pass_)
    elements = gemm.gemm_m * gemm.gemm_n * gemm.groups
    reduction = Launch(
        source="conv_gather.cu",
        entry="conv_gather_reduce",
        defines=product.defines,
        grid=(-(-elements // (_REDUCE_THREADS * c.vector)),),
        block=(_REDUCE_THREADS,),
        shared_bytes=0,
        arguments=(workspace, bias, c_role, np.int32(pass_plan.splits), packed),
    )
    return product, reduction


def _shared_bytes(defines: dict[str, str | int], itemsize: int) -> int:
    """Size of the kernel's SharedMemory: the ring, or the tile of C if that is larger."""
    m, n, k = (int(defines[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))

    def tile(extent: int, along_k: str | int) -> int:  # RingTile, with its PADDING
        padding = 0 if along_k or itemsize == 2 else 32 // itemsize
        return (extent + padding) * k * itemsize

    stage = tile(m, defines["A_ALONG_K"]) + tile(n, defines["B_ALONG_K"])
    lines, line = (m, n) if defines["C_ALONG_N"] else (n, m)
    offsets = (m + n) * _INDEX_BYTES[str(defines["INDEX"])]
    padding = 8 if itemsize == 2 else 4  # OutputTile::PADDING
    output = lines * (line + padding) * itemsize + offsets
    return max(int(defines["STAGES"]) * stage, -(-output // 128) * 128)
