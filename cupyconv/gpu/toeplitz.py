"""Launches of the Toeplitz kernels (cuda/conv_toeplitz.cu)."""

from __future__ import annotations

from cupyconv.gpu import chunks, parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families import toeplitz
from cupyconv.planning.families.family import copies_async
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES, ConvProblem

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
    request = Request(problem, pass_, device, strides=strides)
    made = toeplitz.cut(Request(problem, pass_, device))
    assert made is not None
    source, walked = ("y", "x") if pass_ == "backprop_input" else ("x", "y")
    of_source, of_walked = toeplitz.access(request, source), toeplitz.access(request, walked)
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
        "SOURCE_LAST": int(of_source.is_last),
        "RESULT_LAST": int(of_walked.is_last),
        "SOURCE_VECTOR": of_source.vector,
        "RESULT_VECTOR": of_walked.vector,
        "SOURCE_SHIFT": 0 if of_source.is_last else -pad % of_source.vector,
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
