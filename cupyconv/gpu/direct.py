"""Launches of the direct kernels (cuda/conv_direct.cu)."""

from __future__ import annotations

import numpy as np

from cupyconv.gpu import chunks, parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.families import direct
from cupyconv.planning.families.family import spatial
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES, ConvProblem

TILE_WALK = np.dtype([("tiles", np.int64, 4), ("step", np.int64, 4), ("rounds", np.int64)])
"""``TileWalk`` of cuda/conv_direct.cu."""


def _walk(problem: ConvProblem, pass_: str, made: direct.Cut, rounds: int) -> np.ndarray:
    """How blocks of so many rounds each go through the tiles."""
    walked = problem.input_sizes if pass_ == "backprop_input" else problem.output_sizes
    tiles = (made.across.tiles, made.down.tiles, spatial(walked)[0], problem.N)
    record = np.zeros(1, TILE_WALK)
    rest, step = made.block.strips, record[0]["step"]
    for number, size in enumerate(tiles[:-1]):
        rest, step[number] = divmod(rest, size)
    step[-1] = rest
    record[0]["tiles"], record[0]["rounds"] = tiles, rounds
    return record


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of one planned pass; backprop_filter has the reduction of its chunks too."""
    pass_ = pass_plan.pass_
    made = direct.cut(Request(problem, pass_, device, strides=strides))
    assert made is not None
    outs, ins = direct.channels_of(problem, pass_)
    depth, height, width = spatial(problem.filter_sizes)
    stride_d, stride_h, stride_w = spatial(problem.stride)
    _, dilation_h, dilation_w = spatial(problem.dilation)
    _, pad_h, pad_w = spatial(tuple(before for before, _ in problem.padding), 0)
    block, down, across, pieces = made.block, made.down, made.across, made.pieces
    # The columns of the source that the first tile and the last begin with.
    begin, step = across.first - pad_w, across.extent * stride_w
    width_under = problem.input_sizes[-1]
    if pass_ == "backprop_input":
        begin, step = across.first + pad_w // stride_w, across.extent // stride_w
        width_under = problem.output_sizes[-1]
    shift = begin % pieces.source_columns
    last = begin + (across.tiles - 1) * step
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "OUTS": outs,
        "INS": ins,
        "VECTOR": block.vector,
        "TILE_ROWS": down.extent,
        "TILE_COLUMNS": across.extent,
        "LANES": block.lanes,
        "STRIPS": block.strips,
        "RESIDENT": made.resident,
        "RESULT_CHANNELS": pieces.result_channels,
        "RESULT_COLUMNS": pieces.result_columns,
        "SOURCE_CHANNELS": pieces.source_channels,
        "SOURCE_COLUMNS": pieces.source_columns,
        "SHIFT": shift,
        "INSIDE_FROM": max(shift - begin, 0),
        "INSIDE_TO": max(width_under - last + shift, 0),
        "FILTER_T": depth,
        "FILTER_R": height,
        "FILTER_S": width,
        "STRIDE_D": stride_d,
        "STRIDE_H": stride_h,
        "STRIDE_W": stride_w,
        "DILATION_H": dilation_h,
        "DILATION_W": dilation_w,
        "PHASE_H": pad_h % stride_h,
        "PHASE_W": pad_w % stride_w,
        "TAP_ROWS": made.tap_rows,
        "SHARE": made.share,
        "RAGGED": int(down.ragged or across.ragged),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    packed = parameters.pack(problem, strides)

    def launch(grid: tuple[int, ...], *arguments: object) -> Launch:
        variant, threads = tuple(defines.items()), block.lanes * block.strips
        return Launch("conv_direct.cu", "conv_direct", variant, grid, (threads,), 0, arguments)

    if pass_ != "backprop_filter":
        staying = made.staying(device.chip, device.resident_blocks)
        rounds_each = max(-(-made.rounds // staying.chunks), 1)
        grid = (-(-made.rounds // rounds_each), block.number)
        source, result = ("x", "y") if pass_ == "forward" else ("y", "x")
        walk = _walk(problem, pass_, made, rounds_each)
        return (launch(grid, source, "w", "bias", result, walk, packed),)
    chunked = (pass_plan.splits, block.number, made.parts)
    walk = _walk(problem, pass_, made, -(-made.rounds // pass_plan.splits))
    product = launch(chunked, "x", "y", "workspace", walk, packed)
    return product, chunks.reduction(product, problem, pass_plan.splits)
