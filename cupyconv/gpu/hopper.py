"""Launches of the Hopper kernels (cuda/conv_hopper.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from cupyconv.formats import filter_formats
from cupyconv.gpu import parameters
from cupyconv.gpu.copies import arrange, split
from cupyconv.gpu.launch import STORAGE, FilterForm, Launch
from cupyconv.gpu.tensormaps import Im2colMap, TensorMap, TensorMaps, TiledMap
from cupyconv.planning.copies import (
    PIECE_BYTES,
    ROLES_OF,
    copy_bytes,
    copy_strides,
    pitch,
    shape_of,
)
from cupyconv.planning.cost import ADDING_THREADS
from cupyconv.planning.device import Device
from cupyconv.planning.families import Tile
from cupyconv.planning.families.hopper import (
    BARRIER_BYTES,
    LINE_BYTES,
    SUMS_PIECE,
    TURN_BARRIERS,
    Walk,
    bias_bytes,
    filters_last,
    flattens,
    has_taps,
    has_window_rows,
    is_planar,
    is_pointwise,
    layouts,
    mappable,
    matrices,
    output_bytes,
    row_ends,
    split_elements,
    walks,
)
from cupyconv.planning.families.hopper_bf16x6 import PLANES
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides, followers, neighbours
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem

_SHARED_ALIGNMENT = 1024
_BOX = LINE_BYTES // 2  # pixels and channels that TMA stores at once, of 16-bit types

# Values of the macro STORE in cuda/include/hopper.cuh.
STORE_ROWS, STORE_BOXES, STORE_FLOAT, STORE_COLUMNS = range(4)


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
        gathered, other: the tensor under the taps, and the other operand.
        before: launches that copy operands, or split them into planes.
        made: the roles of these, and where in the workspace the copies are.
    """

    problem: ConvProblem
    strides: Strides
    gathered: Operand
    other: Operand
    before: tuple[Launch, ...]
    made: tuple[tuple[str, int], ...]


def stage(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> Staged:
    """Where a planned pass finds its operands: in copies and planes behind the splits' sums."""
    tile, pass_, splits = pass_plan.tile, pass_plan.pass_, pass_plan.splits
    assert tile is not None
    planes = tile.defines["PLANES"]
    has_planes = planes == PLANES
    multiplied = "tf32" if problem.dtype == "float32" else problem.dtype
    found = layouts(problem, pass_, strides, "planes" if has_planes else multiplied)
    seen = found[tile.defines["PLANAR"]]
    itemsize = 2 if has_planes else ITEMSIZE[problem.dtype]

    offset = split_elements(seen.problem, pass_, tile) * splits * 4 if splits > 1 else 0
    operands: list[Operand] = []
    made: list[tuple[str, int]] = []
    for role in ROLES_OF[pass_][:-1]:
        operand = Operand(role, itemsize, seen.strides)
        if has_planes or role in seen.copied:
            copies = _copies(seen.problem, itemsize)
            if role == "w" and strides.w_arranged:
                operand = Operand(role, itemsize, copies, planes=planes)
            else:
                operand = Operand("workspace", itemsize, copies, offset, planes)
                made.append((role, offset))
                offset += planes * copy_bytes(shape_of(seen.problem, role), itemsize)
        operands.append(operand)
    gathered, other = operands
    make = split if has_planes else arrange
    before = (make(problem, seen.problem, strides, made),) if made else ()
    return Staged(seen.problem, seen.strides, gathered, other, before, tuple(made))


def _copies(problem: ConvProblem, itemsize: int) -> Strides:
    """Strides of copies of all tensors."""
    x, w, y = (copy_strides(shape_of(problem, role), itemsize) for role in ("x", "w", "y"))
    return Strides(x, w, y)


def filter_form(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> FilterForm | None:
    """The copy of w, or its planes, that a planned pass begins with; None where it has none."""
    staged = stage(pass_plan, problem, strides)
    if "w" not in dict(staged.made):
        return None
    held, make = staged.other, arrange
    name: str = filter_formats(problem.spatial_rank)[1 if filters_last(staged.problem) else 2]
    if held.planes == PLANES:
        name, make = f"{name} in {PLANES} planes of bfloat16", split
    size = held.planes * copy_bytes(staged.problem.filter_shape, held.itemsize)
    return FilterForm(name, size, make(problem, staged.problem, strides, [("w", 0)]))


def common_defines(
    pass_plan: PassPlan, problem: ConvProblem, activation: str | None
) -> dict[str, str | int]:
    """The macros of hopper.cuh that do not depend on how operands are loaded and C is stored."""
    tile = pass_plan.tile
    assert tile is not None
    has_planes = tile.defines["PLANES"] == PLANES
    return {
        "PASS": PASSES.index(pass_plan.pass_),
        "STORAGE": "bfloat16_t" if has_planes else STORAGE[problem.dtype],
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
    store, run = _store(staged, pass_, len(walked), splits)
    maps = _maps(staged, pass_, tile, walked)
    defines: dict[str, str | int] = {
        **common_defines(pass_plan, seen, activation),
        "WINDOW_ROWS": int(pass_ == "backprop_filter" and has_window_rows(seen, tile, splits)),
        "SPATIAL": seen.spatial_rank,
        "PHASES": len(walked),
        "MAPS": len(maps) - 1,
        "POINTWISE": int(is_pointwise(seen) and not is_planar(seen)),
        "STORE": store,
        "RUN": run,
        "SPLIT": int(splits > 1),
        "SHARED_BYTES": shared_bytes(tile),
    }
    result = ROLES_OF[pass_][-1]
    if store == STORE_BOXES:
        written = Operand(result, ITEMSIZE[seen.dtype], staged.strides)
        maps.append(_pixel_matrix(seen, result, written, _BOX, _BOX, False))
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
        arguments=("bias", result, "workspace", TensorMaps(tuple(maps)), walk, packed),
        may_overlap=bool(staged.before),
    )
    if splits == 1:
        return (*staged.before, product)
    pieces = split_elements(seen, pass_, tile) // SUMS_PIECE
    reduction = Launch(
        source="conv_hopper.cu",
        entry="conv_hopper_reduce",
        defines=product.defines,
        grid=(-(-pieces // ADDING_THREADS),),
        block=(ADDING_THREADS,),
        shared_bytes=0,
        arguments=("workspace", "bias", result, np.int32(splits), walk, packed),
        may_overlap=True,
    )
    return (*staged.before, product, reduction)


def _store(staged: Staged, pass_: str, walked: int, splits: int) -> tuple[int, int]:
    """How C is stored (STORE), and how many elements of it at once (RUN)."""
    problem, strides, result = staged.problem, staged.strides, ROLES_OF[pass_][-1]
    steps, shape = getattr(strides, result), shape_of(problem, result)
    itemsize, alignment = ITEMSIZE[problem.dtype], strides.alignment
    if result == "w":
        along = len(shape) - 1
        of_group = shape[-1] // (problem.groups if filters_last(problem) else 1)
    else:
        along = problem.data_axes[1]
        of_group = shape[along] // problem.groups
    taken = getattr(strides.taken(problem), result)
    run = neighbours(taken, along, of_group, alignment, itemsize)
    if problem.dtype == "float32":
        return STORE_FLOAT, min(run, 2)
    if result == "w" or splits > 1:
        return STORE_ROWS, run
    batch, _, *spatial = problem.data_axes
    if steps[along] != 1 and walked > 1:
        return STORE_COLUMNS, 1  # the pixels of a stride phase are not neighbours
    if steps[along] != 1:
        lined = spatial[-1:] if is_planar(problem) else spatial  # without gaps in their numbers
        sizes = [shape[axis] for axis in lined]
        return STORE_COLUMNS, followers(taken, lined, sizes, alignment, itemsize)
    is_matrix = walked == 1 and not is_planar(problem) and flattens(steps, shape, (batch, *spatial))
    # A box may not hang over into the next group.
    is_matrix &= problem.groups == 1 or of_group % _BOX == 0
    has_map = mappable(steps, shape, itemsize) and alignment == PIECE_BYTES
    return STORE_BOXES if is_matrix and has_map else STORE_ROWS, run


def shared_bytes(tile: Tile) -> int:
    """Size of the kernel's SharedMemory."""
    assert tile.itemsize is not None
    stages = tile.defines["STAGES"]
    ring = stages * (tile.block_m + tile.block_n) * LINE_BYTES
    barriers = (2 * stages + TURN_BARRIERS) * BARRIER_BYTES
    others = output_bytes(tile.itemsize) + bias_bytes(tile.block_n) + barriers
    return -(-(ring + others) // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT


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
    splits: int,
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


def _spatial(walk: Walk, name: str) -> list[int]:
    """A field of all axes; a leading one, that 1-D and 2-D layers lack, has a pixel and a tap."""
    missing = [int(name in ("pixels", "taps"))] * (parameters.SPATIAL - len(walk))
    return missing + [getattr(axis, name) for axis in walk]


# -- tensor maps -----------------------------------------------------------------------------------


def _maps(staged: Staged, pass_: str, tile: Tile, walked: Sequence[Walk]) -> list[TensorMap]:
    """Maps of the gathered tensor, by walks or ends of rows, and one of the other operand."""
    problem = staged.problem
    gathered, other, _ = ROLES_OF[pass_]
    line = tile.block_k
    # Pixels come as the rows of a tile of C, or as its depth.
    pixels = line if pass_ == "backprop_filter" else tile.block_m
    maps: list[TensorMap]
    if is_planar(problem):
        ends = row_ends(problem, pass_)
        maps = [_rows(problem, gathered, staged.gathered, line, end) for end in ends]
    elif is_pointwise(problem):
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
    if pass_ == "backprop_filter" and is_planar(problem):
        maps.append(_rows(problem, other, staged.other, line, problem.axes[-1].output))
    elif pass_ == "backprop_filter":
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
    count, step = _as_one(shape, steps, (*reversed(spatial), batch))
    strides = _outwards(shape[channel], [(count, step), (operand.planes, 0)], operand.itemsize)
    extents, box = (shape[channel], count, operand.planes), (line, pixels, 1)
    dimensions = 2 + with_planes
    return TiledMap(
        operand.role,
        operand.itemsize,
        extents[:dimensions],
        strides[: dimensions - 1],
        box[:dimensions],
        operand.offset,
    )


def _as_one(shape: Sequence[int], steps: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """Extent and stride of axes, innermost first, that are walked over as one."""
    walked = [axis for axis in axes if shape[axis] > 1]
    return prod(shape[axis] for axis in walked), steps[walked[0]] if walked else 0


def _outwards(inner: int, axes: Sequence[tuple[int, int]], itemsize: int) -> tuple[int, ...]:
    """Bytes between the elements of axes, from the second innermost outwards.

    Each stride is a multiple of the one before: a single element has that of the next axis outwards
    with several, which may leave a gap, as far as there is one.

    Args:
        inner: extent of the innermost axis.
        axes: extent and stride, in elements, of the others; with a stride of 0, they follow what
            lies inside of them.
        itemsize: bytes of an element.
    """
    beyond, strides = pitch(inner, itemsize), []
    for place, (extent, _) in enumerate(axes):
        stride = next((step for size, step in axes[place:] if size > 1), 0) or beyond
        strides.append(stride * itemsize)
        beyond = stride * extent
    return tuple(strides)


def _rows(problem: ConvProblem, role: str, operand: Operand, line: int, end: int) -> TiledMap:
    """x or y with channels first, in boxes of ``line`` pixels of a row and as many channels.

    Args:
        problem, role, operand: of the tensor.
        line: pixels and channels of a box.
        end: pixels of a row; what lies beyond reads as zero.
    """
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    images, channels, *rows, _ = range(len(shape))
    outwards = (*reversed(rows), channels, images)
    walked = [(shape[axis], steps[axis]) for axis in outwards]
    return TiledMap(
        operand.role,
        operand.itemsize,
        (end, *(shape[axis] for axis in outwards)),
        _outwards(shape[-1], walked, operand.itemsize),
        (line, *(1 for _ in rows), line, 1),
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
    axes = (*reversed(spatial), batch)
    walked = [(shape[axis], steps[axis]) for axis in axes]
    extents = (shape[channel], *(shape[axis] for axis in axes))
    return extents, _outwards(shape[channel], walked, operand.itemsize)


def filter_map(problem: ConvProblem, pass_: str, tile: Tile, operand: Operand) -> TiledMap:
    """w, its dimensions in memory order: (filters, channels, taps) or (channels, taps, filters).

    Boxes have a line of the contiguous axis: of k and, if k is contiguous, this block's share of
    the tile's columns, else a line of k.
    """
    shape, steps = problem.filter_shape, operand.strides.w
    filter_, channel, *spatial = problem.filter_axes
    taps = _as_one(shape, steps, tuple(reversed(spatial)))
    channels, filters = ((shape[axis], steps[axis]) for axis in (channel, filter_))
    last, line = filters_last(problem), tile.block_k
    along_k = last == (pass_ == "backprop_input")
    rows = tile.block_n // tile.defines["CLUSTER"] if along_k else line
    inner, *others = (filters, channels, taps) if last else (channels, taps, filters)
    box = (line, rows, 1) if last else (line, 1, rows)
    return TiledMap(
        operand.role,
        operand.itemsize,
        (inner[0], *(extent for extent, _ in others), operand.planes),
        _outwards(inner[0], [*others, (operand.planes, 0)], operand.itemsize),
        (*box, 1),
        operand.offset,
    )
