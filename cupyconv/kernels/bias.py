"""Launches of the bias gradient (cuda/conv_backprop_bias.cu).

The pixels of dy are divided into chunks.  A block sums one chunk for some channels; if there are
several chunks, a second launch adds up their sums.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cupyconv.errors import ConvError
from cupyconv.kernels import parameters
from cupyconv.kernels.cost import ADDING_THREADS
from cupyconv.kernels.device import CHIPS, Device
from cupyconv.kernels.family import accumulator_bytes
from cupyconv.kernels.limits import MOST_BLOCKS
from cupyconv.kernels.strides import Strides, followers, neighbours
from cupyconv.launch import STORAGE, Launch
from cupyconv.problem import ITEMSIZE, ConvProblem

THREADS = 256
"""Threads per block."""

_LEAST_VECTORS = 16
"""Smallest number of vectors per thread in a chunk; smaller chunks are too costly (hand-set)."""

_BLOCKS_PER_SM = min(chip.threads for chip in CHIPS.values()) // THREADS
"""Number of blocks per SM that the choice of chunks aims at: blocks that are resident together on
every chip.  Each thread has four vector loads in flight."""


def prepare_bias(
    problem: ConvProblem, strides: Strides, device: Device, workspace_limit: int | None = None
) -> tuple[tuple[Launch, ...], int]:
    """Return the launches that sum dy into the bias gradient, and the bytes of their workspace.

    Args:
        problem: the configuration.
        strides: strides of dy as ``y``, and the stride of the bias gradient as ``bias``.
        device: device of the tensors.
        workspace_limit: largest number of bytes of the workspace; None for no limit.

    Raises:
        ConvError: dy has more channels than the blocks of a grid can sum.
    """
    import numpy as np

    channel, layout = problem.data_axes[1], strides.canonical(problem).y
    alignment, itemsize = strides.alignment, ITEMSIZE[problem.dtype]
    along_channels = neighbours(layout, channel, problem.K, alignment, itemsize)
    channels_last = layout[channel] == 1
    along_pixels = followers(
        layout, problem.data_axes[2:], problem.output_sizes, alignment, itemsize
    )
    vector = along_channels if channels_last else along_pixels
    channel_lanes = 1
    if channels_last:
        channel_lanes = min(32, 1 << (-(-problem.K // vector) - 1).bit_length())
    packed = parameters.pack(problem, strides)
    packed["filters"] = problem.K  # all filters, as in a single group
    channels = channel_lanes * vector if channels_last else 1
    step = THREADS // channel_lanes * (1 if channels_last else vector)
    blocks = -(-problem.K // channels)
    if blocks > MOST_BLOCKS:
        raise ConvError(
            "dy must not have more channels than the blocks of a launch can sum",
            f"dy has {problem.K:,} channels, a block sums {channels}, and a launch has up to "
            f"{MOST_BLOCKS:,} blocks",
            "Sum dy in parts",
        )
    pixels = problem.N * prod(problem.output_sizes)
    wanted = -(-_BLOCKS_PER_SM * device.chip.multiprocessors // blocks)
    steps = -(-pixels // step)
    chunks = min(wanted, steps // _LEAST_VECTORS)
    chunk_bytes = problem.K * accumulator_bytes(problem)
    if workspace_limit is not None:
        chunks = min(chunks, workspace_limit // chunk_bytes)
    chunks = max(chunks, 1)
    steps_of_chunk = max(-(-steps // chunks), 1)
    chunks = max(-(-steps // steps_of_chunk), 1)
    defines: dict[str, str | int] = {
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "VECTOR": vector,
        "CHANNELS_LAST": int(channels_last),
        "CHANNEL_LANES": channel_lanes,
    }
    product = Launch(
        source="conv_backprop_bias.cu",
        entry="conv_backprop_bias",
        defines=tuple(defines.items()),
        grid=(blocks, chunks),
        block=(THREADS,),
        shared_bytes=0,
        arguments=("y", "bias", "workspace", np.int64(steps_of_chunk * step), packed),
    )
    if chunks == 1:
        return (product,), 0
    reduction = replace(
        product,
        entry="conv_backprop_bias_reduce",
        grid=(-(-problem.K // ADDING_THREADS),),
        block=(ADDING_THREADS,),
        arguments=("workspace", "bias", np.int32(chunks), packed),
    )
    return (product, reduction), chunks * chunk_bytes
