"""Launches of the Hopper kernels (cuda/conv_hopper.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, FilterForm, Launch, Part
from cupyconv.gpu.tensormaps import Im2colMap, TensorMap, TensorMaps, TiledMap
from cupyconv.planning.device import Device
from cupyconv.planning.families import Tile
from cupyconv.planning.families.hopper import (
    BARRIER_BYTES,
    LINE_BYTES,
    OUTPUT_BYTES,
    TURN_BARRIERS,
    Walk,
    bias_bytes,
    filters_last,
    flattens,
    has_taps,
    has_window_rows,
    is_pointwise,
    layout,
    matrices,
    shape_of,
    walks,
)
from cupyconv.planning.families.hopper_bf16x6 import PLANES
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

_SHARED_ALIGNMENT = 1024
_THREADS = 256  # of the kernels before and after the product
_PIECE_BYTES = 16  # that a thread adds up
_PLANES_VECTOR = 8  # elements that a thread splits
_ARRANGE_TILE = 64

# Values of the macro STORE in cuda/include/hopper.cuh.
STORE_ROWS, STORE_BOXES, STORE_FLOAT = range(3)

# The roles of the tensor gathered under taps, the other operand, and the result, by pass.
ROLES_OF = {
    "forward": ("x", "w", "y"),
    "backprop_input": ("y", "w", "x"),
    "backprop_filter": ("x", "y", "w"),
}


@dataclass(frozen=True)
class Operand:
    """Where a tensor, or its planes, are read.

    Attributes:
        role: of the array.
        itemsize: bytes of an element there.
        strides: of the tensors there.
        offset: bytes from the array's beginning.
        planes: how many tensors follow each other.
    """

    role: str
    itemsize: int
    strides: Strides
    offset: int = 0
    planes: int = 1


@dataclass(frozen=True)
class Staged:
    """A pass as the product meets it.

    Attributes:
        problem, strides: of the tensors, or their copies, with channels or filters last.
        gathered, other, result: the tensor under the taps, the other operand, and C.
        before, after: launches that copy tensors, or split them into planes.
    """

    problem: ConvProblem
    strides: Strides
    gathered: Operand
    other: Operand
    result: Operand
    before: tuple[Launch, ...]
    after: tuple[Launch, ...]

    @property
    def c(self) -> str | Part:
        """The kernel's argument that says where C lies."""
        role, offset = self.result.role, self.result.offset
        return Part(role, offset) if role == "workspace" else role


def stage(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> Staged:
    """Where a planned pass finds its operands: in copies and planes behind the splits' sums."""
    tile, pass_, splits = pass_plan.tile, pass_plan.pass_, pass_plan.splits
    assert tile is not None
    planes = tile.defines.get("PLANES", 1)
    multiplied = "tf32" if problem.dtype == "float32" and planes == 1 else problem.dtype
    seen = layout(problem, pass_, strides, multiplied)
    itemsize = ITEMSIZE[problem.dtype]

    offset = _elements(seen.problem, pass_, tile) * splits * 4 if splits > 1 else 0
    operands: list[Operand] = []
    before: list[Launch] = []
    after: list[Launch] = []
    roles = ROLES_OF[pass_]
    for role in roles:
        operand = Operand(role, itemsize, seen.strides)
        elements = prod(shape_of(seen.problem, role))
        is_result = role == roles[-1]
        if role == "w" and strides.w_arranged:
            if planes > 1:
                operand = Operand(role, 2, Strides.contiguous(seen.problem), planes=PLANES)
        elif role in seen.copied:
            operand = Operand("workspace", itemsize, seen.strides, offset)
            copy = _arrange(problem, seen.problem, role, strides, offset, out=is_result)
            (after if is_result else before).append(copy)
            offset += elements * itemsize
        elif planes > 1 and not is_result:
            before.append(_split(seen.problem, role, seen.strides, offset))
            inner = Strides.contiguous(seen.problem)
            operand = Operand("workspace", 2, inner, offset, PLANES)
            offset += PLANES * elements * 2
        operands.append(operand)
    gathered, other, result = operands
    return Staged(seen.problem, seen.strides, gathered, other, result, tuple(before), tuple(after))


def filter_form(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> FilterForm | None:
    """The copy of w, or its planes, that a planned pass begins with; None where it has none."""
    staged = stage(pass_plan, problem, strides)
    made = [one for one in staged.before if one.arguments[0] == "w"]
    if not made:
        return None
    (one,), held = made, staged.other
    name: str = staged.problem.filter_format
    if held.planes > 1:
        name += f" in {held.planes} planes of bfloat16"
    size = held.planes * prod(staged.problem.filter_shape) * held.itemsize
    arguments = (one.arguments[0], Part("workspace", 0), *one.arguments[2:])
    return FilterForm(name, size, replace(one, arguments=arguments))


def _elements(problem: ConvProblem, pass_: str, tile: Tile) -> int:
    rows, columns, _ = matrices(problem, pass_, tile, 1)[0]
    return rows * columns * problem.groups


def common_defines(
    pass_plan: PassPlan, problem: ConvProblem, activation: str | None
) -> dict[str, str | int]:
    """The macros of hopper.cuh that do not depend on how operands are loaded and C is stored."""
    tile = pass_plan.tile
    assert tile is not None
    planes = tile.defines.get("PLANES", 1)
    return {
        "PASS": PASSES.index(pass_plan.pass_),
        "STORAGE": "bfloat16_t" if planes > 1 else STORAGE[problem.dtype],
        "RESULT": STORAGE[problem.dtype],
        **{name: value for name, value in tile.defines.items() if name != "BLOCK_K"},
        "FILTERS_LAST": int(filters_last(problem)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }


def staying_grid(walk: np.ndarray, tile: Tile, device: Device) -> tuple[int]:
    """As many blocks as stay on the chip, or as there are tiles."""
    cluster = tile.defines["CLUSTER"]
    clusters = max(device.resident_blocks // cluster, 1)
    return (min(int(walk["tiles"][0]), clusters) * cluster,)


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of a planned pass: operands split into planes, the product, splits added up."""
    tile, pass_, splits = pass_plan.tile, pass_plan.pass_, pass_plan.splits
    assert tile is not None
    staged = stage(pass_plan, problem, strides)
    seen = staged.problem
    walked = walks(seen, pass_)
    walk = pack_walk(seen, pass_, tile, matrices(seen, pass_, tile, splits), splits)
    defines: dict[str, str | int] = {
        **common_defines(pass_plan, seen, activation),
        "WINDOW_ROWS": int(pass_ == "backprop_filter" and has_window_rows(seen, tile, splits)),
        "SPATIAL": seen.spatial_rank,
        "PHASES": len(walked),
        "POINTWISE": int(is_pointwise(seen)),
        "STORE": _store(staged, pass_) if len(walked) == splits == 1 else STORE_ROWS,
        "SPLIT": int(splits > 1),
        "SHARED_BYTES": shared_bytes(tile),
    }
    if seen.dtype == "float32":
        defines["STORE"] = STORE_FLOAT
    maps = _maps(staged, pass_, tile, walked)
    if defines["STORE"] == STORE_BOXES:
        box = LINE_BYTES // 2  # pixels and channels
        maps.append(_pixel_matrix(seen, ROLES_OF[pass_][-1], staged.result, box, box, False))
    else:
        maps.append(maps[-1])  # not used
    packed = parameters.pack(seen, staged.strides)
    product = Launch(
        source="conv_hopper.cu",
        entry="conv_hopper",
        defines=tuple(defines.items()),
        grid=staying_grid(walk, tile, device),
        block=(tile.threads,),
        shared_bytes=shared_bytes(tile),
        arguments=("bias", staged.c, "workspace", TensorMaps(tuple(maps)), walk, packed),
    )
    if splits == 1:
        return (*staged.before, product, *staged.after)
    pieces = _elements(seen, pass_, tile) // (_PIECE_BYTES // ITEMSIZE[seen.dtype])
    reduction = Launch(
        source="conv_hopper.cu",
        entry="conv_hopper_reduce",
        defines=product.defines,
        grid=(-(-pieces // _THREADS),),
        block=(_THREADS,),
        shared_bytes=0,
        arguments=("workspace", "bias", staged.c, np.int32(splits), walk, packed),
    )
    return (*staged.before, product, reduction, *staged.after)


def _store(staged: Staged, pass_: str) -> int:
    """How 16-bit sums of a single walk are stored."""
    if pass_ == "backprop_filter":
        return STORE_ROWS
    result = ROLES_OF[pass_][-1]
    batch, _, *spatial = staged.problem.data_axes
    steps, shape = getattr(staged.strides, result), shape_of(staged.problem, result)
    return STORE_BOXES if flattens(steps, shape, (batch, *spatial)) else STORE_ROWS


def shared_bytes(tile: Tile) -> int:
    """Size of the kernel's SharedMemory."""
    stages = tile.defines["STAGES"]
    ring = stages * (tile.block_m + tile.block_n) * LINE_BYTES
    barriers = (2 * stages + TURN_BARRIERS) * BARRIER_BYTES
    return whole_shared_bytes(ring + OUTPUT_BYTES + bias_bytes(tile.block_n) + barriers)


def whole_shared_bytes(size: int) -> int:
    """The size of a struct that is aligned as the swizzle is."""
    return -(-size // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT


# -- copies and planes -----------------------------------------------------------------------------

PLANE_SHAPE = np.dtype([("extent", np.int64, 4), ("stride", np.int64, 4), ("inner", np.int64)])
"""``PlaneShape`` of cuda/conv_planes.cu."""


ARRANGE_SHAPE = np.dtype(
    [
        ("extent", np.int64, 4),
        ("stride", np.int64, 4),
        ("channels", np.int64),
        ("channel_stride", np.int64),
    ]
)
"""``ArrangeShape`` of cuda/conv_arrange.cu."""


def _arrange(
    asked: ConvProblem, seen: ConvProblem, role: str, strides: Strides, offset: int, *, out: bool
) -> Launch:
    """The launch that copies a tensor between its place and a contiguous copy in the workspace."""
    shape, steps = shape_of(seen, role), getattr(strides, role)
    if role == "w":
        order = _order(asked.filter_axes, seen.filter_axes)
    else:
        order = _order(asked.data_axes, seen.data_axes)
    record = np.zeros(1, ARRANGE_SHAPE)
    missing = 5 - len(shape)
    record[0]["extent"] = [1] * missing + list(shape[:-1])
    record[0]["stride"] = [0] * missing + [steps[axis] for axis in order[:-1]]
    record[0]["channels"] = shape[-1]
    record[0]["channel_stride"] = steps[order[-1]]
    tiles = -(-prod(shape[:-1]) // _ARRANGE_TILE) * -(-shape[-1] // _ARRANGE_TILE)
    return Launch(
        source="conv_arrange.cu",
        entry="conv_arrange_out" if out else "conv_arrange_in",
        defines=(("STORAGE", STORAGE[seen.dtype]),),
        grid=(tiles,),
        block=(_THREADS,),
        shared_bytes=0,
        arguments=(role, Part("workspace", offset), record),
    )


def _order(asked: Sequence[int], seen: Sequence[int]) -> list[int]:
    """For each axis of a seen tensor, its place in the tensor that was given."""
    place = dict(zip(seen, asked, strict=True))
    return [place[axis] for axis in range(len(seen))]


def _split(problem: ConvProblem, role: str, strides: Strides, offset: int) -> Launch:
    """The launch that splits a tensor into planes at an offset of the workspace."""
    shape, steps = shape_of(problem, role), getattr(strides, role)
    record = np.zeros(1, PLANE_SHAPE)
    missing = 5 - len(shape)
    record[0]["extent"] = [1] * missing + list(shape[:-1])
    record[0]["stride"] = [0] * missing + list(steps[:-1])
    record[0]["inner"] = shape[-1]
    return Launch(
        source="conv_planes.cu",
        entry="conv_planes",
        defines=(),
        grid=(-(-prod(shape) // (_THREADS * _PLANES_VECTOR)),),
        block=(_THREADS,),
        shared_bytes=0,
        arguments=(role, Part("workspace", offset), record),
    )


# -- the walk --------------------------------------------------------------------------------------

_PHASE_FIELDS = ("pixels", "base", "taps", "filter_first", "place_first")
_SHARED_FIELDS = ("stride", "spacing", "filter_step", "place_step")


@lru_cache(maxsize=64)
def walk_type(phases: int) -> np.dtype:
    """``Walk`` of cuda/include/walk.cuh for NumPy."""
    axes = (np.int32, parameters.SPATIAL)
    phase = np.dtype([*((name, *axes) for name in _PHASE_FIELDS), ("tile_rows", np.int32)])
    counts = ("tile_columns", "tiles_of_group", "tiles", "steps_of_split")
    return np.dtype(
        [
            *((name, *axes) for name in _SHARED_FIELDS),
            *((name, np.int32) for name in counts),
            ("phase", phase, phases),
        ]
    )


def pack_walk(
    problem: ConvProblem,
    pass_: str,
    tile: Tile,
    parts: Sequence[tuple[int, int, int]],
    splits: int = 1,
) -> np.ndarray:
    """The walk of a pass and the tiles of its matrices, as a 1-element array of ``walk_type``."""
    walked = walks(problem, pass_)
    record = np.zeros(1, walk_type(len(walked)))
    fields = record[0]
    cluster_rows = tile.block_m * tile.defines["CLUSTER"]
    tiles_of_group = all_steps = 0
    for walk, part, phase in zip(walked, parts, fields["phase"], strict=True):
        rows, columns, steps = part
        phase["tile_rows"] = -(-rows // cluster_rows)
        for name in _PHASE_FIELDS:
            phase[name] = _spatial(walk, name)
        tiles_of_group += int(phase["tile_rows"]) * -(-columns // tile.block_n)
        all_steps = max(all_steps, steps)
    # What does not differ between phases; one without taps does not know the spacing.
    sample = next(walk for walk in walked if has_taps(walk))
    for name in _SHARED_FIELDS:
        fields[name] = _spatial(sample, name)
    fields["tile_columns"] = -(-columns // tile.block_n)
    fields["tiles_of_group"] = tiles_of_group
    fields["tiles"] = tiles_of_group * problem.groups * splits
    fields["steps_of_split"] = -(-all_steps // splits)
    return record


# What a leading axis of size 1, which 1-D and 2-D layers do not have, would say.
_NO_AXIS = {"pixels": 1, "taps": 1, "stride": 1, "spacing": 1, "filter_step": 1, "place_step": 1}


def _spatial(walk: Walk, name: str) -> list[int]:
    missing = [_NO_AXIS.get(name, 0)] * (parameters.SPATIAL - len(walk))
    return missing + [getattr(axis, name) for axis in walk]


# -- tensor maps -----------------------------------------------------------------------------------


def _maps(staged: Staged, pass_: str, tile: Tile, walked: Sequence[Walk]) -> list[TensorMap]:
    """Maps of the gathered tensor for each walk, and of the other operand."""
    problem = staged.problem
    gathered, other, _ = ROLES_OF[pass_]
    line = tile.block_k
    # Pixels come as the rows of a tile of C, or as its depth.
    pixels = line if pass_ == "backprop_filter" else tile.block_m
    maps: list[TensorMap]
    if is_pointwise(problem):
        maps = [_pixel_matrix(problem, gathered, staged.gathered, line, pixels)]
    else:
        # A phase without taps loads nothing; it gets a map that the driver takes.
        sample = next(walk for walk in walked if has_taps(walk))
        maps = [
            _im2col(
                problem, gathered, staged.gathered, walk if has_taps(walk) else sample,
                line, pixels,
            )
            for walk in walked
        ]  # fmt: skip
    if pass_ == "backprop_filter":
        maps.append(_pixel_matrix(problem, other, staged.other, line, line))
    else:
        maps.append(filter_map(problem, pass_, tile, staged.other))
    return maps


def _pixel_matrix(
    problem: ConvProblem,
    role: str,
    operand: Operand,
    line: int,
    pixels: int,
    with_planes: bool = True,
) -> TiledMap:
    """x or y as a matrix of pixels and channels, in boxes of ``pixels`` and ``line``."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *spatial = problem.data_axes
    walked = [axis for axis in (*reversed(spatial), batch) if shape[axis] > 1]
    count = prod(shape[axis] for axis in walked)
    step = steps[walked[0]] if walked else shape[channel]
    extents, strides, box = [shape[channel], count], [step], [line, pixels]
    if with_planes:
        extents.append(operand.planes)
        strides.append(step * count)
        box.append(1)
    return TiledMap(
        operand.role,
        operand.itemsize,
        tuple(extents),
        tuple(stride * operand.itemsize for stride in strides),
        tuple(box),
        operand.offset,
    )


def _im2col(
    problem: ConvProblem, role: str, operand: Operand, walk: Walk, line: int, pixels: int
) -> Im2colMap:
    """x or y under the taps of a walk; planes are further images."""
    extents, strides = pixel_dimensions(problem, role, operand)
    inner_first = tuple(reversed(walk))
    return Im2colMap(
        operand.role,
        operand.itemsize,
        (*extents[:-1], extents[-1] * operand.planes),
        strides,
        tuple(axis.base for axis in inner_first),
        tuple(axis.upper for axis in inner_first),
        tuple(axis.stride for axis in inner_first),
        line,
        pixels,
        operand.offset,
    )


def pixel_dimensions(
    problem: ConvProblem, role: str, operand: Operand
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents of x or y, channels first and images last, and the strides in bytes between them."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *spatial = problem.data_axes
    walked = (*reversed(spatial), batch)
    extents, strides, beyond = [shape[channel]], [], shape[channel]
    for place, axis in enumerate(walked):
        # Each stride is a multiple of the one before: a single element has that of the next axis
        # outwards, which may leave a gap, as far as there is one with several.
        step = next((steps[outer] for outer in walked[place:] if shape[outer] > 1), beyond)
        strides.append(step * operand.itemsize)
        extents.append(shape[axis])
        beyond = step * shape[axis]
    return tuple(extents), tuple(strides)


def filter_map(problem: ConvProblem, pass_: str, tile: Tile, operand: Operand) -> TiledMap:
    """w, its dimensions in memory order: (filters, channels, taps) or (channels, taps, filters).

    Boxes have a line of the contiguous axis: of k and, if k is contiguous, this block's share of
    the tile's columns, else a line of k.
    """
    shape, steps = problem.filter_shape, operand.strides.w
    filter_, channel, *spatial = problem.filter_axes
    walked = [axis for axis in reversed(spatial) if shape[axis] > 1]
    taps = prod(shape[axis] for axis in walked)
    last, line = filters_last(problem), tile.block_k
    along_k = last == (pass_ == "backprop_input")
    rows = tile.block_n // tile.defines["CLUSTER"] if along_k else line
    channels, filters = shape[channel], shape[filter_]
    if last:
        channel_step = steps[channel]
        tap_step = steps[walked[0]] if walked else channel_step * channels
        strides = [channel_step, tap_step, tap_step * taps]
        extents, box = (filters, channels, taps), (line, rows, 1)
    else:
        filter_step = steps[filter_]
        tap_step = steps[walked[0]] if walked else filter_step
        strides = [tap_step, filter_step, filter_step * filters]
        extents, box = (channels, taps, filters), (line, 1, rows)
    return TiledMap(
        operand.role,
        operand.itemsize,
        (*extents, operand.planes),
        tuple(stride * operand.itemsize for stride in strides),
        (*box, 1),
        operand.offset,
    )
