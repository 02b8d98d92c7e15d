"""Launches of the direct kernels (cuda/conv_direct.cu)."""

from __future__ import annotations

from math import gcd, prod

from cupyconv.gpu import chunks, parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families.direct import channels_of, strip_of
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides, neighbours
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

THREADS = 128
_STAGED_BYTES = 24 << 10  # of shared memory for rows of the filter

# Sums that a thread of backprop_filter keeps: taps of a filter row, sources and channels.
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
    outs, ins = channels_of(problem, pass_)
    vector, source_vector = _vectors(pass_, problem, strides)
    taps = problem.filter_sizes[-1]
    rows = prod(problem.filter_sizes[:-1])
    share = ins
    if pass_ == "backprop_filter":
        affordable = max(_SUMS_OF_THREAD // (vector * taps), 1)
        share = max(n for n in range(1, ins + 1) if ins % n == 0 and n <= affordable)
        source_vector = gcd(source_vector, share)
    channels = problem.groups * outs
    # Neighbouring threads take neighbours in memory: channels, or else pixels.
    results = strides.x if pass_ == "backprop_input" else strides.y
    channel_axis, column_axis = problem.data_axes[1], problem.data_axes[-1]
    lanes = 1
    if results[channel_axis] == 1:
        lanes = min(32, 1 << (-(-channels // vector) - 1).bit_length())
    accumulator = max(ITEMSIZE[problem.dtype], 4)
    while lanes > 1 and taps * ins * lanes * vector * accumulator > _STAGED_BYTES:
        lanes //= 2
    row_bytes = taps * ins * lanes * vector * accumulator
    strips = THREADS // lanes
    strip = strip_of(problem, pass_)
    run = 1
    if vector == 1 and pass_ != "backprop_filter":
        width = (problem.input_sizes if pass_ == "backprop_input" else problem.output_sizes)[-1]
        itemsize = ITEMSIZE[problem.dtype]
        run = gcd(strip, neighbours(results, column_axis, width, strides.alignment, itemsize))
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "OUTS": outs,
        "INS": ins,
        "VECTOR": vector,
        "SOURCE_VECTOR": source_vector,
        "SHARE": share,
        "LANES": lanes,
        "STRIPS": strips,
        "TILE": strip,
        "RUN": run,
        "FILTER_S": taps,
        "STRIDE_W": problem.stride[-1],
        "DILATION_W": problem.dilation[-1],
        "PHASE_W": problem.padding[-1][0] % problem.stride[-1],
        "STAGED_ROWS": min(rows, max(_STAGED_BYTES // row_bytes, 1)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    packed = parameters.pack(problem, strides)
    channel_blocks = -(-channels // (lanes * vector))

    def launch(grid: tuple[int, ...], *arguments: object) -> Launch:
        variant = tuple(defines.items())
        return Launch("conv_direct.cu", "conv_direct", variant, grid, (THREADS,), 0, arguments)

    if pass_ != "backprop_filter":
        walked = problem.output_sizes if pass_ == "forward" else problem.input_sizes
        blocks = -(-_strips(problem, walked, strip) // strips)
        source, result = ("x", "y") if pass_ == "forward" else ("y", "x")
        return (launch((blocks, channel_blocks), source, "w", "bias", result, packed),)
    grid = (pass_plan.splits, channel_blocks, rows * (ins // share))
    product = launch(grid, "x", "y", "workspace", packed)
    return product, chunks.reduction(product, problem, pass_plan.splits)


def _strips(problem: ConvProblem, sizes: tuple[int, ...], strip: int) -> int:
    return problem.N * prod(sizes[:-1]) * -(-sizes[-1] // strip)


def _vectors(pass_: str, problem: ConvProblem, strides: Strides) -> tuple[int, int]:
    """Channels of a thread, and sources that it loads at once.

    As many as 16 bytes hold, as are neighbours in memory, and as belong together: in a depthwise
    layer any channels, else those of one group.
    """
    itemsize = ITEMSIZE[problem.dtype]
    axis = problem.data_axes[1]
    outs, ins = channels_of(problem, pass_)
    depthwise = outs == ins == 1

    def together(layout: tuple[int, ...], of_group: int) -> int:
        extent = problem.groups if depthwise else of_group
        return neighbours(layout, axis, extent, strides.alignment, itemsize)

    sources, results = (
        (strides.y, strides.x) if pass_ == "backprop_input" else (strides.x, strides.y)
    )
    vector, source_vector = together(results, outs), together(sources, ins)
    if depthwise:
        vector = source_vector = min(vector, source_vector)
    if pass_ == "backprop_filter":
        while vector > 1 and vector * problem.filter_sizes[-1] > _SUMS_OF_THREAD:
            vector //= 2
    return vector, 1 if depthwise else source_vector
