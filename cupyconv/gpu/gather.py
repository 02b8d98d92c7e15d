"""Launches of the tensor-core gather kernels (cuda/conv_gather.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
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
        shared_bytes=_shared_bytes(defines, ITEMSIZE[problem.dtype]),
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


def _accesses(
    pass_: str, problem: ConvProblem, strides: Strides
) -> tuple[_Access, _Access, _Access]:
    """How A, B and C are taken from memory."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    w_filter, w_channel = problem.filter_axes[:2]
    alignment, itemsize = strides.alignment, ITEMSIZE[problem.dtype]
    filters_last = strides.w[w_filter] < strides.w[w_channel]
    w = (
        neighbours(strides.w, w_filter, filters, alignment, itemsize)
        if filters_last
        else neighbours(strides.w, w_channel, channels, alignment, itemsize)
    )

    def along_channels_or_pixels(
        layout: tuple[int, ...], extent: int, sizes: tuple[int, ...], pixels_follow: bool
    ) -> _Access:
        channel = problem.data_axes[1]
        if layout[channel] == 1:
            return _Access(True, neighbours(layout, channel, extent, alignment, itemsize))
        follow = pixels_follow and _following_pixels(layout, problem, sizes, alignment)
        return _Access(False, follow or 1)

    # Pixels that follow each other in the matrix do so in memory where they are visited in the
    # order of their numbers, and under a tap only if it is the only one, and each has its own.
    unit_stride = set(problem.stride) == {1}
    pointwise = (
        set(problem.filter_sizes) == {1} and unit_stride and not any(map(any, problem.padding))
    )
    x_in_order = {"forward": pointwise, "backprop_input": unit_stride, "backprop_filter": pointwise}
    y_in_order = pass_ != "backprop_input" or pointwise
    x = along_channels_or_pixels(strides.x, channels, problem.input_sizes, x_in_order[pass_])
    y = along_channels_or_pixels(strides.y, filters, problem.output_sizes, y_in_order)
    if pass_ == "forward":
        return x, _Access(not filters_last, w), y
    if pass_ == "backprop_input":
        return y, _Access(filters_last, w), x
    return (
        _Access(not y.along_first, y.vector),
        _Access(not x.along_first, x.vector),
        _Access(not filters_last, w),
    )


def _following_pixels(
    strides: tuple[int, ...], problem: ConvProblem, sizes: tuple[int, ...], alignment: int
) -> int:
    """Pixels, in the order of their numbers, that can be moved at once: a power of two."""
    run, rest = 1, list(strides)
    for axis, size in reversed(list(zip(problem.data_axes[2:], sizes, strict=True))):
        if size > 1 and strides[axis] != run:
            break
        run *= size
        rest[axis] = 0
    return neighbours((*rest, 1), len(rest), run, alignment, ITEMSIZE[problem.dtype])


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
