"""Launches of the tensor-core gather kernels (cuda/conv_gather.cu)."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import RESERVED_SHARED, Chip, Device
from cupyconv.planning.families.gather import accesses, tap_bits
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

_REDUCE_THREADS = 256
_MOST_STAGES = 4
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
    found = accesses(pass_plan.pass_, problem, strides)
    a, b, c = found.a, found.b, found.c
    index = parameters.index_type(problem, strides)
    phases = _phases(problem, pass_plan)
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
        "TAPS_FASTEST": int(found.taps_fastest),
        "TAP_WORDS": tap_bits(problem) // 32 + 1,
        "PHASES": len(phases["phase"][0]),
        "SPLIT": int(split),
        "ASYNC_COPY": int(device.capability >= (8, 0)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    add_stages(defines, ITEMSIZE[problem.dtype], device.chip)
    shared_bytes = int(defines["SHARED_BYTES"])
    packed = parameters.pack(problem, strides)
    a_role, b_role, bias, c_role, workspace = _OPERANDS[pass_plan.pass_]
    product = Launch(
        source="conv_gather.cu",
        entry="conv_gather",
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks, pass_plan.splits),
        block=(tile.threads,),
        shared_bytes=shared_bytes,
        arguments=(a_role, b_role, bias, c_role, workspace, packed, phases),
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
        arguments=(workspace, bias, c_role, np.int32(pass_plan.splits), packed, phases),
    )
    return product, reduction


def add_stages(defines: dict[str, str | int], itemsize: int, chip: Chip) -> None:
    """Add the stages of the ring, as many as its resident blocks have room for, and its size."""
    m, n, k = (int(defines[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    index_bytes = _INDEX_BYTES[str(defines["INDEX"])]

    def tile(extent: int, along_k: str | int) -> int:  # RingTile, with its PADDING
        padding = 0 if along_k or itemsize == 2 else 32 // itemsize
        return (extent + padding) * k * itemsize

    stage = tile(m, defines["A_ALONG_K"]) + tile(n, defines["B_ALONG_K"])
    # The tables that are not in the ring: two halves of positions, four of steps, and the loops.
    half = -(-(index_bytes + 4 * int(defines["TAP_WORDS"])) // 8) * 8
    tables = (m + n + 4 * k) * half + (4 * k + 16) * index_bytes
    room = (chip.shared << 10) // int(defines["RESIDENT"]) - RESERVED_SHARED - tables
    if defines["ASYNC_COPY"]:
        defines["STAGES"] = max(2, min(_MOST_STAGES, room // stage))
    else:  # a copy is done on return
        defines["STAGES"] = 2
    lines, line = (m, n) if defines["C_ALONG_N"] else (n, m)
    output = lines * (line + 8) * itemsize + (m + n) * index_bytes if itemsize == 2 else 0
    defines["SHARED_BYTES"] = max(int(defines["STAGES"]) * stage, -(-output // 128) * 128)


# -- stride phases ---------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _phases_type(count: int) -> np.dtype:
    """``StridePhases`` of cuda/include/gather.cuh for NumPy."""
    axes = (np.int32, parameters.SPATIAL)
    names = ("first_pixel", "pixels", "first_tap", "taps", "shift")
    phase = np.dtype([*((name, *axes) for name in names), ("end", np.int32)])
    return np.dtype([("step", *axes), ("spacing", *axes), ("phase", phase, count)])


def _phases(problem: ConvProblem, pass_plan: PassPlan) -> np.ndarray:
    """The stride phases of backprop-input, those of most taps first, and where their tiles end.

    There is room for a power of two of them; a pass without phases is one.
    """
    tile = pass_plan.tile
    assert tile is not None
    if pass_plan.pass_ != "backprop_input":
        record = np.zeros(1, _phases_type(1))
        record["phase"]["end"] = pass_plan.blocks // problem.groups
        return record
    listed = list(product(*(axis.stride_phases for axis in problem.axes)))
    listed.sort(key=lambda phase: -prod(len(taps) for _, taps in phase))
    record = np.zeros(1, _phases_type(1 << (len(listed) - 1).bit_length()))
    fields, missing, end = record[0], parameters.SPATIAL - len(problem.axes), 0
    fields["step"] = fields["spacing"] = 1
    for phase, axes in zip(fields["phase"], listed, strict=False):
        phase["pixels"] = phase["taps"] = 1
        for number, (axis, (inputs, taps)) in enumerate(zip(problem.axes, axes, strict=True)):
            at = missing + number
            phase["first_pixel"][at], phase["pixels"][at] = inputs.start, len(inputs)
            phase["first_tap"][at], phase["taps"][at] = taps.start, len(taps)
            if taps:
                first, spacing = axis.outputs_of_phase(inputs, taps)
                phase["shift"][at] = first + (len(taps) - 1) * spacing
                fields["step"][at], fields["spacing"][at] = taps.step, spacing
        pixels = problem.N * int(prod(phase["pixels"].tolist()))
        end += tile.blocks(pixels, problem.C // problem.groups)
        phase["end"] = end
    fields["phase"]["end"][len(listed) :] = end
    return record
