"""Launches of the Toeplitz kernels (cuda/conv_toeplitz.cu)."""

from __future__ import annotations

from cupyconv.gpu import chunks, parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families import toeplitz
from cupyconv.planning.families.family import copies_async
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

THREADS = 32 * toeplitz.CHANNELS


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of one planned pass; backprop_filter has the reduction of its chunks too."""
    pass_ = pass_plan.pass_
    made = toeplitz.cut(Request(problem, pass_, device))
    assert made is not None
    source, walked = ("y", "x") if pass_ == "backprop_input" else ("x", "y")
    layouts = {"x": strides.x, "y": strides.y}
    source_last, source_vector = _access(problem, layouts[source], strides.alignment, source)
    result_last, result_vector = _access(problem, layouts[walked], strides.alignment, walked)
    pad = problem.padding[-1][0]
    if pass_ == "backprop_input":
        pad = problem.filter_sizes[-1] - 1 - pad
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides, made.rows),
        "FILTER_R": problem.filter_sizes[0] if problem.spatial_rank == 2 else 1,
        "FILTER_S": problem.filter_sizes[-1],
        "TAP_ROWS": made.tap_rows,
        "ROW_TILES": made.row_tiles,
        "ALIGNED": int(made.aligned),
        "STRIPS": made.strips,
        "SOURCE_LINES": made.lines,
        "SOURCE_LAST": int(source_last),
        "RESULT_LAST": int(result_last),
        "SOURCE_VECTOR": source_vector,
        "RESULT_VECTOR": result_vector,
        "SOURCE_SHIFT": 0 if source_last else -pad % source_vector,
        "ASYNC_COPY": int(copies_async(device)),
        "SHARED_BYTES": made.shared_bytes,
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    packed = parameters.pack(problem, strides)
    channel_blocks = -(-problem.groups // toeplitz.CHANNELS)
    is_filter = pass_ == "backprop_filter"
    product = Launch(
        source="conv_toeplitz.cu",
        entry="conv_toeplitz",
        defines=tuple(defines.items()),
        grid=(pass_plan.splits, channel_blocks, made.shares)
        if is_filter
        else (made.patches, channel_blocks),
        block=(THREADS,),
        shared_bytes=made.shared_bytes,
        arguments=("x", "y", "workspace", packed)
        if is_filter
        else (source, "w", "bias", walked, packed),
    )
    if not is_filter:
        return (product,)
    return product, chunks.reduction(product, problem, pass_plan.splits)


def _access(
    problem: ConvProblem, layout: tuple[int, ...], alignment: int, role: str
) -> tuple[bool, int]:
    """Whether a tensor's channels are contiguous, and the elements of it that are moved at once.

    They are channels then, else columns of a row.
    """
    channel, column = problem.data_axes[1], problem.data_axes[-1]
    last = layout[channel] == 1 and problem.groups > 1
    width = (problem.input_sizes if role == "x" else problem.output_sizes)[-1]
    axis, extent = (channel, problem.groups) if last else (column, width)
    return last, neighbours(layout, axis, extent, alignment, ITEMSIZE[problem.dtype])
