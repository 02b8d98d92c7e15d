"""Launches of the Hopper kernels that load halos (cuda/conv_hopper_halo.cu)."""

from __future__ import annotations

from cupyconv.gpu import hopper, parameters
from cupyconv.gpu.launch import Launch
from cupyconv.gpu.tensormaps import TensorMap, TensorMaps, TiledMap
from cupyconv.planning.device import Device
from cupyconv.planning.families import Tile
from cupyconv.planning.families.hopper import (
    BARRIER_BYTES,
    LINE_BYTES,
    OUTPUT_BYTES,
    stages_beside,
)
from cupyconv.planning.families.hopper_halo import SQUARE, halo_matrices, halo_rows
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ConvProblem

filter_form = hopper.filter_form  # tensors are staged likewise

_BOX_STAGES = 2  # stages of the input: one is loaded while the other is multiplied, row by row


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of a planned pass: copies of tensors where they are needed, and the product."""
    tile, pass_ = pass_plan.tile, pass_plan.pass_
    assert tile is not None
    staged = hopper.stage(pass_plan, problem, strides)
    seen = staged.problem
    halo = halo_rows(seen, pass_)
    stages, shared = _shared(tile, halo)
    defines: dict[str, str | int] = {
        **hopper.common_defines(pass_plan, seen, activation),
        "PHASES": 1,
        "HALO": halo,
        "BOX_STAGES": _BOX_STAGES,
        "STAGES": stages,
        "SHARED_BYTES": shared,
        "STORE": hopper.STORE_FLOAT if seen.dtype == "float32" else hopper.STORE_BOXES,
    }
    rows = tile.defines["ROWS"]
    gathered, _, result = hopper.ROLES_OF[pass_]
    read = (tile.block_k, SQUARE, rows + halo, tile.block_m // (rows * SQUARE))
    stored = (LINE_BYTES // 2, SQUARE, SQUARE, 1)
    maps: list[TensorMap] = [
        _pixels(seen, gathered, staged.gathered, read),
        hopper.filter_map(seen, pass_, tile, staged.other),
    ]
    if defines["STORE"] == hopper.STORE_BOXES:
        maps.append(_pixels(seen, result, staged.result, stored))
    else:
        maps.append(maps[-1])  # not used
    walk = hopper.pack_walk(seen, pass_, tile, halo_matrices(seen, pass_, tile))
    product = Launch(
        source="conv_hopper_halo.cu",
        entry="conv_hopper_halo",
        defines=tuple(defines.items()),
        grid=hopper.staying_grid(walk, tile, device),
        block=(tile.threads,),
        shared_bytes=shared,
        arguments=(
            "bias",
            staged.c,
            TensorMaps(tuple(maps)),
            walk,
            parameters.pack(seen, staged.strides),
        ),
    )
    return (*staged.before, product, *staged.after)


def _shared(tile: Tile, halo: int) -> tuple[int, int]:
    """Stages of the filter, and the size of the kernel's SharedMemory with them."""
    rows = tile.defines["ROWS"]
    lines = tile.block_m // rows * (rows + halo)
    stage = tile.block_n * LINE_BYTES
    boxes = _BOX_STAGES * (lines * LINE_BYTES + 2 * BARRIER_BYTES)
    stages = stages_beside(boxes + OUTPUT_BYTES, stage)
    used = boxes + OUTPUT_BYTES + stages * (stage + 2 * BARRIER_BYTES)
    return stages, hopper.whole_shared_bytes(used)


def _pixels(
    problem: ConvProblem, role: str, operand: hopper.Operand, box: tuple[int, ...]
) -> TiledMap:
    """x or y in boxes of channels, columns, rows and images."""
    extents, strides = hopper.pixel_dimensions(problem, role, operand)
    return TiledMap(operand.role, operand.itemsize, extents, strides, box, operand.offset)
