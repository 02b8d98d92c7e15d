"""Launches of the depthwise kernels (cuda/conv_depthwise.cu)."""

from __future__ import annotations

from math import prod

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.gather import neighbours
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.gpu.parameters import Strides
from cupyconv.planning.device import Device
from cupyconv.planning.families import depthwise_strip
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

THREADS = 128
_REDUCE_THREADS = 256
_LARGEST_PIECE = 16  # bytes
_STAGED_BYTES = 24 << 10  # of shared memory for rows of the filter

# Sums that a thread of backprop_filter keeps, one for each tap of a filter row and channel.
_SUMS_OF_THREAD = 64


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of one planned pass; backprop_filter has the reduction of its chunks too."""
    pass_ = pass_plan.pass_
    vector = _vector(pass_, problem, strides)
    channels = problem.C if pass_ == "backprop_input" else problem.K
    lanes = min(32, 1 << (-(-channels // vector) - 1).bit_length())
    strips = THREADS // lanes
    taps = problem.filter_sizes[-1]
    accumulator = max(ITEMSIZE[problem.dtype], 4)
    row_bytes = taps * lanes * vector * accumulator
    rows = prod(problem.filter_sizes[:-1])
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "VECTOR": vector,
        "LANES": lanes,
        "STRIPS": strips,
        "TILE": depthwise_strip(problem, pass_),
        "FILTER_S": taps,
        "STRIDE_W": problem.stride[-1],
        "DILATION_W": problem.dilation[-1],
        "PHASE_W": problem.padding[-1][0] % problem.stride[-1],
        "ACTIVATION": parameters.ACTIVATIONS[activation],
        "STAGED_ROWS": min(rows, max(_STAGED_BYTES // row_bytes, 1)),
    }
    packed = parameters.pack(problem, strides)
    channel_blocks = -(-channels // (lanes * vector))

    def launch(entry: str, grid: tuple[int, ...], threads: int, *arguments: object) -> Launch:
        variant = tuple(defines.items())
        return Launch("conv_depthwise.cu", entry, variant, grid, (threads,), 0, arguments)

    if pass_ != "backprop_filter":
        walked = problem.output_sizes if pass_ == "forward" else problem.input_sizes
        blocks = -(-_strips(problem, walked, int(defines["TILE"])) // strips)
        source, result = ("x", "y") if pass_ == "forward" else ("y", "x")
        grid = (blocks, channel_blocks)
        return (launch("conv_depthwise", grid, THREADS, source, "w", "bias", result, packed),)
    chunks = pass_plan.splits
    elements = prod(problem.filter_shape)
    return (
        launch(
            "conv_depthwise",
            (chunks, channel_blocks, rows),
            THREADS,
            *("x", "y", "workspace", packed),
        ),
        launch(
            "conv_depthwise_reduce",
            (-(-elements // _REDUCE_THREADS),),
            _REDUCE_THREADS,
            *("workspace", "w", np.int32(chunks), packed),
        ),
    )


def _strips(problem: ConvProblem, sizes: tuple[int, ...], strip: int) -> int:
    return problem.N * prod(sizes[:-1]) * -(-sizes[-1] // strip)


def _vector(pass_: str, problem: ConvProblem, strides: Strides) -> int:
    """Channels of a thread: as many as fit 16 bytes and are neighbours in x and in y."""
    if problem.K != problem.C:
        return 1
    itemsize = ITEMSIZE[problem.dtype]
    axis = problem.data_axes[1]
    vector = min(
        neighbours(layout, axis, problem.C, strides.alignment, itemsize, _LARGEST_PIECE)
        for layout in (strides.x, strides.y)
    )
    if pass_ == "backprop_filter":
        while vector > 1 and vector * problem.filter_sizes[-1] > _SUMS_OF_THREAD:
            vector //= 2
    return vector
