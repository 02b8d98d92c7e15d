"""Launches of the tensor-core gather kernels (cuda/conv_gather.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.gpu.parameters import Strides
from cupyconv.planning.device import Device
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import PASSES, ConvProblem

_ITEMSIZE = 2
_REDUCE_THREADS = 256
_OUTPUT_PADDING = 8  # elements by which the lines of OutputTile are longer
_INDEX_BYTES = {"int": 4, "long long": 8}

# The kernel's a, b, bias, c and partial, by pass.
_OPERANDS = {
    "forward": ("x", "w", "bias", "y", "workspace"),
    "backprop_input": ("y", "w", "bias", "x", "workspace"),
    "backprop_filter": ("y", "x", "bias", "w", "workspace"),
}


@dataclass(frozen=True)
class _Access:
    """How the elements of one matrix are taken from memory.

    Attributes:
        along_first: whether neighbours in memory are neighbours in the first of the matrix's two
            directions (k for A and B, n for C), else in the second.
        vector: elements of a piece.
    """

    along_first: bool
    vector: int


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
    a, b, c = _accesses(pass_plan.pass_, problem, strides)
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
        "ACTIVATION": parameters.ACTIVATIONS[activation],
    }
    packed = parameters.pack(problem, strides)
    a_role, b_role, bias, c_role, workspace = _OPERANDS[pass_plan.pass_]
    product = Launch(
        source="conv_gather.cu",
        entry="conv_gather",
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks, pass_plan.splits),
        block=(tile.threads,),
        shared_bytes=_shared_bytes(defines),
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
        grid=(-(-elements // _REDUCE_THREADS),),
        block=(_REDUCE_THREADS,),
        shared_bytes=0,
        arguments=(workspace, bias, c_role, np.int32(pass_plan.splits), packed),
    )
    return product, reduction


def _accesses(
    pass_: str, problem: ConvProblem, strides: Strides
) -> tuple[_Access, _Access, _Access]:
    """How A, B and C are taken from memory."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    x_channel, y_channel = problem.data_axes[1], problem.data_axes[1]
    w_filter, w_channel = problem.filter_axes[:2]
    x = neighbours(strides.x, x_channel, channels, strides.alignment, _ITEMSIZE)
    y = neighbours(strides.y, y_channel, filters, strides.alignment, _ITEMSIZE)
    w_filters = neighbours(strides.w, w_filter, filters, strides.alignment, _ITEMSIZE)
    w_channels = neighbours(strides.w, w_channel, channels, strides.alignment, _ITEMSIZE)
    filters_last = strides.w[w_filter] < strides.w[w_channel]
    w_vector = w_filters if filters_last else w_channels
    x_last = strides.x[x_channel] == 1
    y_last = strides.y[y_channel] == 1
    if pass_ == "forward":
        return _Access(x_last, x), _Access(not filters_last, w_vector), _Access(y_last, y)
    if pass_ == "backprop_input":
        return _Access(y_last, y), _Access(filters_last, w_vector), _Access(x_last, x)
    return _Access(not y_last, y), _Access(not x_last, x), _Access(not filters_last, w_vector)


def neighbours(
    strides: Sequence[int],
    axis: int,
    extent: int,
    alignment: int,
    itemsize: int,
    largest_bytes: int = 16,
) -> int:
    """Elements that can be moved at once along an axis: a power of two, 1 if none are neighbours.

    Args:
        strides: of the tensor, in elements.
        axis: along which the elements would be taken.
        extent: elements that belong together on it, such as the channels of a group.
        alignment: bytes that the tensor's address is a multiple of.
        itemsize: bytes of an element.
        largest_bytes: that can be moved at once.
    """
    others = [stride for number, stride in enumerate(strides) if number != axis]
    vector = largest_bytes // itemsize if strides[axis] == 1 else 1
    while vector > 1:
        fits = alignment % (vector * itemsize) == 0 and extent % vector == 0
        if fits and all(stride % vector == 0 for stride in others):
            return vector
        vector //= 2
    return 1


def _shared_bytes(defines: dict[str, str | int]) -> int:
    """Size of the kernel's SharedMemory: the ring, or the tile of C if that is larger."""
    m, n, k = (int(defines[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    ring = int(defines["STAGES"]) * (m + n) * k * _ITEMSIZE
    lines, line = (m, n) if defines["C_ALONG_N"] else (n, m)
    offsets = (m + n) * _INDEX_BYTES[str(defines["INDEX"])]
    output = lines * (line + _OUTPUT_PADDING) * _ITEMSIZE + offsets
    return max(ring, -(-output // 128) * 128)
