"""cuda-hopper (cuda/conv_hopper.cu): an implicit GEMM on wgmma, fed by TMA.

The fields of walks are those of cuda/include/walk.cuh, which derives them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, ClassVar

from cupyconv.formats import filter_formats
from cupyconv.kernels import cost, parameters
from cupyconv.kernels.copies import (
    PIECE_BYTES,
    ROLES_OF,
    arrange,
    called,
    copy_bytes,
    copy_strides,
    permuted,
    pitch,
    reordered,
    shape_of,
    split,
)
from cupyconv.kernels.device import CHIPS, Device
from cupyconv.kernels.family import Candidate, Choices, Family, Tile
from cupyconv.kernels.reach import Count, reach_counts
from cupyconv.kernels.request import Request
from cupyconv.kernels.strides import Strides, followers, neighbours
from cupyconv.launch import (
    STORAGE,
    FilterForm,
    Im2colMap,
    Launch,
    TensorMap,
    TensorMaps,
    TiledMap,
)
from cupyconv.problem import ITEMSIZE, PASSES, ConvAxis, ConvProblem

if TYPE_CHECKING:
    import numpy as np

LINE_BYTES = 128
"""Bytes per line in shared memory: the span of the swizzle (hardware)."""

BARRIER_BYTES = 8
"""Bytes per mbarrier (hardware)."""

TURN_BARRIERS = 2
"""Barriers of the two consumer warpgroups, which take turns."""

MOST_STAGES = 8
"""Most stages of the ring (chosen)."""

MAX_MAPS = 16
"""Most tensor maps and walks of the gathered tensor; 4 KB of kernel parameters hold them."""

_MOST_TILE_ROWS = 512
"""Most rows of a cluster's tiles, by which the last tile may exceed the matrix."""

_MOST_FILLED = 1.25
"""Most computed pixels per image pixel where rows are padded to lines (chosen)."""

# Limits of cuTensorMapEncodeIm2col by number of spatial axes: corners of the box of base pixels,
# and the largest offset of a tap.
_CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
_LARGEST_OFFSET = {1: 2**16 - 1, 2: 2**8 - 1, 3: 2**5 - 1}
_LARGEST_ELEMENT_STRIDE = 8
_LARGEST_STRIDE_BYTES = 2**40

PLANES = 3
"""bfloat16 planes that float32 tensors are split into."""

SUMS_PIECE = 8
"""Columns of C per vector of the reduction of splits."""

_MOST_WAVES = 4
"""Most waves that splits fill the chip with (chosen)."""


@dataclass(frozen=True)
class AxisWalk:
    """A spatial axis of a walk.

    Attributes:
        extent: size of the tensor that is read.
        pixels: pixels walked over.
        base: coordinate of the first base pixel, before any tap.
        stride: from one base pixel to the next.
        taps: taps that contribute.
        spacing: from one tap to the next, in the tensor read.
        filter_first, filter_step: the taps in the filter.
        place_first, place_step: the pixels in the tensor written.
    """

    extent: int
    pixels: int
    base: int
    stride: int
    taps: int
    spacing: int
    filter_first: int
    filter_step: int
    place_first: int
    place_step: int

    @property
    def upper(self) -> int:
        """Upper corner of the base pixels, relative to the tensor's last pixel."""
        return self.base + (self.pixels - 1) * self.stride - (self.extent - 1)


Walk = tuple[AxisWalk, ...]
"""Spatial axes of one dense problem."""


def has_taps(walk: Walk) -> bool:
    """Return whether any tap contributes; a stride phase without taps is zero."""
    return all(axis.taps for axis in walk)


def walks(problem: ConvProblem, pass_: str) -> tuple[Walk, ...]:
    """Return the walks of a pass: one, or the non-empty stride phases of backprop_input.

    Phases with most taps come first, so that the last tiles on the chip are short.
    """
    if pass_ != "backprop_input":
        return (tuple(_window(axis) for axis in problem.axes),)
    phases = product(*(_phases(axis) for axis in problem.axes))
    found = (phase for phase in phases if all(axis.pixels for axis in phase))
    return tuple(sorted(found, key=lambda phase: -prod(axis.taps for axis in phase)))


def _window(axis: ConvAxis) -> AxisWalk:
    return AxisWalk(
        extent=axis.input,
        pixels=axis.output,
        base=-axis.pad_before,
        stride=axis.stride,
        taps=axis.filter,
        spacing=axis.dilation,
        filter_first=0,
        filter_step=1,
        place_first=0,
        place_step=1,
    )


def _phases(axis: ConvAxis) -> list[AxisWalk]:
    walked = []
    for inputs, taps in axis.stride_phases:
        # The walk visits taps in reverse order.
        base, spacing = axis.outputs_of_phase(inputs, taps)
        walked.append(
            AxisWalk(
                extent=axis.output,
                pixels=len(inputs),
                base=base,
                stride=1,
                taps=len(taps),
                spacing=spacing,
                filter_first=taps[-1] if taps else 0,
                filter_step=-taps.step,
                place_first=inputs.start,
                place_step=axis.stride,
            )
        )
    return walked


def windows(problem: ConvProblem, line: int) -> int:
    """Return the lines of channels under all taps, the other side of the filter gradient."""
    return prod(problem.filter_sizes) * -(-(problem.C // problem.groups) // line)


def matrices(
    problem: ConvProblem, pass_: str, tile: Tile, splits: int
) -> list[tuple[int, int, int]]:
    """Return rows and columns of a group's product, and steps per sum, for each walk.

    In the filter gradient, they include the padding of a window's channels to whole lines.
    """
    line = tile.block_k
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    if pass_ == "backprop_filter":
        rows, columns = windows(problem, line) * line, filters
        if not has_window_rows(problem, tile, splits):
            rows, columns = columns, rows
        return [(rows, columns, -(-_pixels(problem, problem.output_sizes, line) // line))]
    summed, columns = (channels, filters) if pass_ == "forward" else (filters, channels)
    return [
        (
            _pixels(problem, [axis.pixels for axis in walk], line),
            columns,
            prod(axis.taps for axis in walk) * -(-summed // line),
        )
        for walk in walks(problem, pass_)
    ]


def _pixels(problem: ConvProblem, sizes: Sequence[int], line: int) -> int:
    """Return the pixels of all images; rows of planar images are padded to whole lines."""
    *outer, row = sizes
    row = -(-row // line) * line if is_planar(problem) else row
    return problem.N * prod(outer) * row


def split_elements(problem: ConvProblem, pass_: str, tile: Tile) -> int:
    """Return the sums per split: C with rows padded to a multiple of eight."""
    ((rows, columns, _),) = matrices(problem, pass_, tile, 1)
    return rows * -(-columns // SUMS_PIECE) * SUMS_PIECE * problem.groups


def has_window_rows(problem: ConvProblem, tile: Tile, splits: int) -> bool:
    """Return whether rows of the filter gradient's product are windows; else they are filters.

    Without splits, the contiguous axis of the result must run along the columns.  Sums of splits
    may have either order; the order with fewer tiles is used.
    """
    as_stored = filters_last(problem)
    if splits == 1:
        return as_stored
    sides = windows(problem, tile.block_k) * tile.block_k, problem.K // problem.groups
    tiles = {True: tile_count(tile, *sides), False: tile_count(tile, *sides[::-1])}
    return as_stored if tiles[True] == tiles[False] else tiles[True] < tiles[False]


def tile_count(tile: Tile, rows: int, columns: int) -> int:
    """Return the tiles of a matrix, padded to whole clusters."""
    cluster = tile.defines["CLUSTER"]
    return -(-rows // (tile.block_m * cluster)) * cluster * -(-columns // tile.block_n)


def is_pointwise(problem: ConvProblem) -> bool:
    """Return whether a pass is a plain matrix product over the pixels."""
    return all(
        axis.filter == 1 and axis.stride == 1 and not axis.pad_before and not axis.pad_after
        for axis in problem.axes
    )


def is_planar(problem: ConvProblem) -> bool:
    """Return whether the kernels read x and dy with channels first, in lines of a row's pixels."""
    return problem.data_axes[1] == 1


def row_ends(problem: ConvProblem, pass_: str) -> tuple[int, ...]:
    """Return the row length of the gathered tensor for each of its maps, for planar images.

    The filter gradient sums over lines of pixels.  Where the last line is padded, x ends at the
    element that each tap along the row reads for the last pixel.
    """
    axis, line = problem.axes[-1], LINE_BYTES // ITEMSIZE[problem.dtype]
    if pass_ != "backprop_filter" or axis.output % line == 0:
        return (axis.output if pass_ == "backprop_input" else axis.input,)
    lasts = (
        (axis.output - 1) * axis.stride - axis.pad_before + tap * axis.dilation
        for tap in range(axis.filter)
    )
    return tuple(min(axis.input, last + 1) for last in lasts)


def flattens(strides: Sequence[int], shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether axes of a tensor, outermost first, can be merged into one with one stride."""
    walked = [axis for axis in axes if shape[axis] > 1]
    return all(strides[outer] == strides[inner] * shape[inner] for outer, inner in pairwise(walked))


def filters_last(problem: ConvProblem) -> bool:
    """Return whether filters are the last axis of w; else channels are."""
    return problem.filter_axes[0] == len(problem.filter_shape) - 1


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The tensors as the kernels read them.

    Attributes:
        problem: the problem with channels last, and channels or filters last in w; or, if
            ``is_planar``, with channels first.  A planar pointwise layer has one spatial axis.
        strides: strides of the tensors in the formats of ``problem``.
        copied: names of operands that TMA cannot read: the kernels read copies, in which each pixel
            or tap begins at a multiple of 16 bytes.
    """

    problem: ConvProblem
    strides: Strides
    copied: tuple[str, ...]

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies."""
        itemsize = ITEMSIZE[self.problem.dtype]
        return sum(copy_bytes(shape_of(self.problem, role), itemsize) for role in self.copied)


@lru_cache(maxsize=4096)
def layouts(
    problem: ConvProblem, pass_: str, strides: Strides, operands: str
) -> tuple[Layout, ...]:
    """Return the layouts of a pass: channels last and, if possible, a planar layout.

    Args:
        problem, pass_: the pass.
        strides: strides of the tensors in the problem's formats.
        operands: type of the products as in Request.operands, or "planes" for planes of bfloat16,
            which are made from tensors with any strides.
    """
    filter_, channel, *taps = problem.filter_axes
    last = strides.w[filter_] == 1 and strides.w[channel] != 1
    if operands == "tf32":  # wgmma requires both operands contiguous along k
        last = pass_ == "backprop_input"
    data_order = (problem.data_axes[0], *problem.data_axes[2:], problem.data_axes[1])
    filter_order = (*taps, channel, filter_) if last else (filter_, *taps, channel)
    seen, steps = reordered(problem, strides, data_order, filter_order)
    read = ROLES_OF[pass_][:-1]
    pixels = {"x", "y"} & set(read)
    is_aligned = strides.alignment % PIECE_BYTES == 0
    reached = {role for role in read if is_aligned and _reaches(seen, pass_, role, steps[role])}
    if operands == "planes":
        reached = set(read)
    found = [_with_copies(strides, seen, steps, pass_, reached)]
    if is_aligned and operands != "tf32" and not pixels <= reached:
        planar, planar_steps = _in_rows(problem, strides, filter_order)
        if _has_lines(planar, pass_, {role: planar_steps[role] for role in pixels}):
            found.append(_with_copies(strides, planar, planar_steps, pass_, reached | pixels))
    return tuple(found)


def _with_copies(
    strides: Strides,
    seen: ConvProblem,
    steps: dict[str, tuple[int, ...]],
    pass_: str,
    reached: Container[str],
) -> Layout:
    """Return the layout with copies of the operands that TMA cannot read."""
    copied = tuple(role for role in ROLES_OF[pass_][:-1] if role not in reached)
    itemsize = ITEMSIZE[seen.dtype]
    copies = {role: copy_strides(shape_of(seen, role), itemsize) for role in copied}
    steps = {**steps, **copies}
    return Layout(seen, replace(strides, x=steps["x"], w=steps["w"], y=steps["y"]), copied)


def _in_rows(
    problem: ConvProblem, strides: Strides, filter_order: Sequence[int]
) -> tuple[ConvProblem, dict[str, tuple[int, ...]]]:
    """Return the problem and its strides with channels first, images as rows if possible."""
    seen, steps = reordered(problem, strides, problem.data_axes, filter_order)
    spatial = range(2, 2 + problem.spatial_rank)
    shapes = {role: shape_of(seen, role) for role in ("x", "y")}
    if not is_pointwise(problem) or not all(
        flattens(steps[role], shapes[role], spatial) for role in shapes
    ):
        return seen, steps
    taps = seen.filter_axes[2:]
    kept = [axis for axis in range(len(filter_order)) if axis not in taps[1:]]
    flat = ConvProblem(
        (*shapes["x"][:2], prod(shapes["x"][2:])),
        permuted(seen.filter_shape, kept),
        groups=problem.groups,
        data_format="NCW",
        filter_format="WIO" if filters_last(seen) else "OWI",
        dtype=problem.dtype,
    )
    flat_steps = {"w": permuted(steps["w"], kept)}
    for role, shape in shapes.items():
        walked = [axis for axis in spatial if shape[axis] > 1]
        flat_steps[role] = (*steps[role][:2], steps[role][walked[-1]] if walked else 1)
    return flat, flat_steps


def _has_lines(problem: ConvProblem, pass_: str, steps: Mapping[str, Sequence[int]]) -> bool:
    """Return whether TMA can read rows of these tensors, and lines waste few pixels.

    Along a row, windows are adjacent, and each tap begins at a multiple of 16 bytes.
    """
    axis, itemsize = problem.axes[-1], ITEMSIZE[problem.dtype]
    if problem.spatial_rank > 2 or (axis.stride > 1 and pass_ != "backprop_input"):
        return False
    rows = [walk[-1] for walk in walks(problem, pass_)]
    taps = [row.base + tap * row.spacing for row in rows for tap in range(row.taps)]
    if any(first * itemsize % PIECE_BYTES for first in taps):
        return False
    if not all(mappable(given, shape_of(problem, role), itemsize) for role, given in steps.items()):
        return False
    ends = row_ends(problem, pass_)
    if len(ends) > MAX_MAPS or min(ends) < 1:
        return False
    line = LINE_BYTES // itemsize
    sizes = [[axis.pixels for axis in walk] for walk in walks(problem, pass_)]
    computed = sum(_pixels(problem, size, line) for size in sizes)
    return computed <= _MOST_FILLED * problem.N * sum(map(prod, sizes))


def _reaches(problem: ConvProblem, pass_: str, role: str, steps: Sequence[int]) -> bool:
    """Return whether TMA can read an operand with these strides."""
    shape = shape_of(problem, role)
    if not mappable(steps, shape, ITEMSIZE[problem.dtype]):
        return False
    axes = range(len(shape) - 1)
    if role == "w":  # taps are merged into one axis
        first = 0 if filters_last(problem) else 1
        return flattens(steps, shape, range(first, first + problem.spatial_rank))
    is_gathered = role == ROLES_OF[pass_][0]
    return not (is_pointwise(problem) or not is_gathered) or flattens(steps, shape, axes)


def mappable(steps: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Return whether the driver accepts a tensor map for these strides.

    The last axis must be contiguous, and each stride at least the extent of the axes inside it:
    reversed, broadcast, overlapping or permuted axes have no map.
    """
    if steps[-1] != 1:
        return False
    inner, extent = itemsize, shape[-1]
    for step, outer in list(zip(steps, shape, strict=True))[-2::-1]:
        if outer == 1:
            continue  # any stride is valid for one element
        stride = step * itemsize
        if stride % max(inner, PIECE_BYTES) or not inner * extent <= stride < _LARGEST_STRIDE_BYTES:
            return False
        inner, extent = stride, outer
    return True


# -- what it cannot do -----------------------------------------------------------------------------


def layouts_of(request: Request) -> tuple[Layout, ...]:
    """Return the layouts of a request."""
    return layouts(request.problem, request.pass_, request.memory, request.operands)


def layout_of(request: Request, tile: Tile) -> Layout:
    """Return the layout of a tile."""
    operands = "planes" if tile.defines["PLANES"] > 1 else request.operands
    found = layouts(request.problem, request.pass_, request.memory, operands)
    return found[tile.defines["PLANAR"]]


def tma_refuses(request: Request, operand_bytes: int) -> str | None:
    """Return why TMA or wgmma cannot use the operands; None if they can."""
    problem = request.problem
    if request.device.target != "sm_90a":
        return "wgmma needs compute capability 9.0"
    if not request.device.has_tensor_maps:
        return "TMA needs NVIDIA's bindings of the driver: pip install cuda-bindings"
    if 0 in (*problem.input_shape, *problem.filter_shape, *problem.output_shape):
        return "TMA takes no empty tensors"
    if problem.groups > 1:
        refusal = _refuse_groups(problem, request.pass_, LINE_BYTES // operand_bytes)
        if refusal is not None:
            return refusal
    return _refuse_walks(problem, request.pass_)


def tma_counts(request: Request, operand_bytes: int, planes: int = 1) -> Iterator[Count]:
    """Yield the quantities that TMA's coordinates and the kernels count."""
    problem, line = request.problem, LINE_BYTES // operand_bytes
    yield from reach_counts(problem)
    # Rows padded to lines add up to a quarter.
    pixels = problem.N * max(prod(problem.input_sizes), prod(problem.output_sizes))
    yield Count("pixels", pixels, 2**30 - 1)
    yield Count("images", problem.N, (2**31 - 1) // planes)
    most = 2**31 - _MOST_TILE_ROWS
    if request.pass_ == "backprop_input":
        filters = -(-(problem.K // problem.groups) // line) * line
        yield Count("filters under all taps", prod(problem.filter_sizes) * filters, most)
    else:
        yield Count("channels under all taps", windows(problem, line) * line, most)


def most_tiles(request: Request) -> int:
    """Return the most tiles that persistent blocks can count, including one past the end."""
    return 2**31 - 1 - request.device.resident_blocks


def _refuse_groups(problem: ConvProblem, pass_: str, line: int) -> str | None:
    """Return why groups do not fit lines of channels or filters; None if they do."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    if 2 * min(channels, filters) < line:
        return (
            f"of the {line} channels or filters that a line holds, most would be of other groups: "
            f"groups have {channels} and {filters}"
        )
    # TMA requires innermost coordinates that are multiples of 16 bytes, also at a group's start.
    piece = line * PIECE_BYTES // LINE_BYTES
    if channels % piece or filters % piece:
        return (
            f"each group must begin at a whole piece of {piece} channels or filters: groups have "
            f"{channels} and {filters}"
        )
    # A sum must not include another group: it may hold a NaN.
    summed = {"forward": (channels, "channels"), "backprop_input": (filters, "filters")}
    count, role = summed.get(pass_, (0, ""))
    if count % line:
        return f"the lines that TMA loads hold {line} {role} of one group, and groups have {count}"
    return None


def _refuse_walks(problem: ConvProblem, pass_: str) -> str | None:
    """Return why TMA's im2col mode cannot walk the pass; None if it can."""
    phases = prod(problem.stride) if pass_ == "backprop_input" else 1
    if phases > MAX_MAPS:
        return f"{phases} stride phases are more than {MAX_MAPS}"
    if is_pointwise(problem):
        return None
    if not any(map(has_taps, walks(problem, pass_))):
        return "no tap meets the input, so that there is nothing to walk over"
    low, high = _CORNERS[problem.spatial_rank]
    for axis in (axis for walk in walks(problem, pass_) if has_taps(walk) for axis in walk):
        if axis.stride > _LARGEST_ELEMENT_STRIDE:
            return f"TMA walks with strides up to {_LARGEST_ELEMENT_STRIDE}, not {axis.stride}"
        if not low <= axis.base <= high or not low <= axis.upper <= high:
            return f"TMA's corners lie in [{low}, {high}], not at {axis.base} and {axis.upper}"
        offset = (axis.taps - 1) * axis.spacing
        if offset > _LARGEST_OFFSET[problem.spatial_rank]:
            return f"TMA's taps reach {_LARGEST_OFFSET[problem.spatial_rank]} pixels, not {offset}"
    return None


# -- how it is cut ---------------------------------------------------------------------------------


def bias_bytes(block_n: int) -> int:
    """Return the bytes of a tile's biases, for two warpgroups."""
    return 2 * block_n * 4


def output_bytes(itemsize: int) -> int:
    """Return the bytes of two output buffers per warpgroup; float32 needs none."""
    return 2 * 2 * 64 * LINE_BYTES if itemsize == 2 else 0


def ring_stages(block_m: int, block_n: int, itemsize: int) -> int:
    """Return the stages, with two barriers each, that shared memory has room for.

    Args:
        block_m, block_n: extents of the tile.
        itemsize: bytes per element of C.
    """
    fixed = output_bytes(itemsize) + bias_bytes(block_n) + TURN_BARRIERS * BARRIER_BYTES
    room = (CHIPS[9, 0].block_shared << 10) - fixed
    return min(room // ((block_m + block_n) * LINE_BYTES + 2 * BARRIER_BYTES), MOST_STAGES)


def tile_of(block_m: int, block_n: int, itemsize: int, operand_bytes: int, **macros: int) -> Tile:
    """Return a tile of two consumer warpgroups and one producer warpgroup."""
    line = LINE_BYTES // operand_bytes
    return Tile(block_m, block_n, line, 384, tuple(macros.items()), (9, 0), itemsize)


def takes_turns(tile: Tile) -> bool:
    """Return whether each warpgroup computes whole tiles, in turns (TURNS)."""
    return tile.block_n == 64 and tile.defines["PLANES"] == 1


def _matrices(request: Request, tile: Tile, splits: int) -> list[tuple[int, int, int]]:
    """Return ``matrices`` of a request."""
    return matrices(layout_of(request, tile).problem, request.pass_, tile, splits)


def _split_bytes(request: Request, tile: Tile) -> int:
    """Return the workspace bytes per split."""
    return split_elements(layout_of(request, tile).problem, request.pass_, tile) * 4


# -- launches --------------------------------------------------------------------------------------

_SHARED_ALIGNMENT = 1024
_BOX = LINE_BYTES // 2  # pixels and channels per TMA store of 16-bit types

# Values of the macro STORE in cuda/conv_hopper.cu.
STORE_ROWS, STORE_BOXES, STORE_FLOAT, STORE_COLUMNS = range(4)


@dataclass(frozen=True)
class Operand:
    """Location of a tensor, or of its planes.

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
    """A pass after its operands are copied.

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


def stage(request: Request, choices: Choices) -> Staged:
    """Return a pass with its operands in place; copies and planes follow the splits' sums."""
    problem, strides, pass_ = request.problem, request.memory, request.pass_
    tile, splits = choices.tile, choices.splits
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
    """Return the strides of copies of all tensors."""
    x, w, y = (copy_strides(shape_of(problem, role), itemsize) for role in ("x", "w", "y"))
    return Strides(x, w, y)


def common_defines(
    tile: Tile, pass_: str, problem: ConvProblem, activation: str | None
) -> dict[str, str | int]:
    """Return the macros that do not depend on how operands are loaded and C is stored."""
    has_planes = tile.defines["PLANES"] == PLANES
    return {
        "PASS": PASSES.index(pass_),
        "STORAGE": "bfloat16_t" if has_planes else STORAGE[problem.dtype],
        "RESULT": STORAGE[problem.dtype],
        **{name: value for name, value in tile.defines.items() if name != "BLOCK_K"},
        "FILTERS_LAST": int(filters_last(problem)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }


def staying_grid(walk: np.ndarray, tile: Tile, device: Device) -> tuple[int]:
    """Return the grid of persistent blocks: at most one per SM and one per tile."""
    cluster = tile.defines["CLUSTER"]
    clusters = max(device.resident_blocks // cluster, 1)
    return (min(int(walk["tiles"][0]), clusters) * cluster,)


def _store(staged: Staged, pass_: str, walked: int, splits: int) -> tuple[int, int]:
    """Return how C is stored (STORE), and the elements per store (RUN)."""
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
        return STORE_COLUMNS, 1  # pixels of a stride phase are not adjacent
    if steps[along] != 1:
        lined = spatial[-1:] if is_planar(problem) else spatial  # axes without padding
        sizes = [shape[axis] for axis in lined]
        return STORE_COLUMNS, followers(taken, lined, sizes, alignment, itemsize)
    is_matrix = walked == 1 and not is_planar(problem) and flattens(steps, shape, (batch, *spatial))
    # A box must not reach into the next group.
    is_matrix &= problem.groups == 1 or of_group % _BOX == 0
    has_map = mappable(steps, shape, itemsize) and alignment == PIECE_BYTES
    return STORE_BOXES if is_matrix and has_map else STORE_ROWS, run


def shared_bytes(tile: Tile) -> int:
    """Return the bytes of the kernel's SharedMemory."""
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
    import numpy as np

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
    """Return the walk of a pass and its tiles, as a 1-element array of ``walk_type``."""
    import numpy as np

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
    # These fields are equal in all phases; a phase without taps has no spacing.
    sample = next(walk for walk in walked if has_taps(walk))
    for name in _SHARED_FIELDS:
        fields[name] = _spatial(sample, name)
    fields["tile_columns"] = -(-columns // tile.block_n)
    fields["tiles_of_group"] = tiles_of_group
    fields["tiles"] = tiles_of_group * problem.groups * splits
    fields["steps_of_split"] = -(-all_steps // splits)
    return record


def _spatial(walk: Walk, name: str) -> list[int]:
    """Return a field of all three axes; missing leading axes have one pixel and one tap."""
    missing = [int(name in ("pixels", "taps"))] * (parameters.SPATIAL - len(walk))
    return missing + [getattr(axis, name) for axis in walk]


# -- tensor maps -----------------------------------------------------------------------------------


def _maps(staged: Staged, pass_: str, tile: Tile, walked: Sequence[Walk]) -> list[TensorMap]:
    """Return the maps of the gathered tensor, by walk or row length, and of the other operand."""
    problem = staged.problem
    gathered, other, _ = ROLES_OF[pass_]
    line = tile.block_k
    # Pixels are the rows of a tile of C, or its depth.
    pixels = line if pass_ == "backprop_filter" else tile.block_m
    maps: list[TensorMap]
    if is_planar(problem):
        ends = row_ends(problem, pass_)
        maps = [_rows(problem, gathered, staged.gathered, line, end) for end in ends]
    elif is_pointwise(problem):
        maps = [_pixel_matrix(problem, gathered, staged.gathered, line, pixels)]
    else:
        # A phase without taps loads nothing; any valid map will do.
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
    """Return the map of x or y as a matrix of pixels and channels."""
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
    """Return extent and stride of axes, innermost first, that are merged into one."""
    walked = [axis for axis in axes if shape[axis] > 1]
    return prod(shape[axis] for axis in walked), steps[walked[0]] if walked else 0


def _outwards(inner: int, axes: Sequence[tuple[int, int]], itemsize: int) -> tuple[int, ...]:
    """Return the strides of axes in bytes, from the second innermost outwards.

    Each stride is a multiple of the previous one: an axis of one element gets the stride of the
    next axis outwards with several elements, if there is one.

    Args:
        inner: extent of the innermost axis.
        axes: extent and stride, in elements, of the other axes; a stride of 0 stands for that of a
            dense tensor.
        itemsize: bytes per element.
    """
    beyond, strides = pitch(inner, itemsize), []
    for place, (extent, _) in enumerate(axes):
        stride = next((step for size, step in axes[place:] if size > 1), 0) or beyond
        strides.append(stride * itemsize)
        beyond = stride * extent
    return tuple(strides)


def _rows(problem: ConvProblem, role: str, operand: Operand, line: int, end: int) -> TiledMap:
    """Return the map of x or y with channels first, in boxes of pixels of a row and channels.

    Args:
        problem, role, operand: problem, name and location of the tensor.
        line: pixels and channels per box.
        end: pixels per row; pixels beyond it read as zero.
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
    """Return the im2col map of x or y for a walk; planes are further images."""
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
    """Return extents of x or y, channels first and images last, and their strides in bytes."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    batch, channel, *spatial = problem.data_axes
    axes = (*reversed(spatial), batch)
    walked = [(shape[axis], steps[axis]) for axis in axes]
    extents = (shape[channel], *(shape[axis] for axis in axes))
    return extents, _outwards(shape[channel], walked, operand.itemsize)


def filter_map(problem: ConvProblem, pass_: str, tile: Tile, operand: Operand) -> TiledMap:
    """Return the map of w: (filters, channels, taps) or (channels, taps, filters), as in memory.

    A box has a line of the contiguous axis.  Along the other axis it has this block's share of the
    tile's columns, if k is contiguous; else a line of k.
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


# -- families --------------------------------------------------------------------------------------


class Staying(Family):
    """A family with persistent blocks.

    Attributes:
        passes: products of tiles per step, each of which loads its operands.
    """

    passes: ClassVar[int] = 1

    def before(self, request: Request, tile: Tile) -> tuple[float, int, str]:
        """Return the bytes moved by copies before the product, their workspace, and a summary."""
        seen = layout_of(request, tile)
        does = f"{called(seen.copied)} copied with channels last" if seen.copied else ""
        return 2 * seen.copied_bytes, seen.copied_bytes, does

    def tiles_counted(self, request: Request) -> Count:
        """Return the tiles that persistent blocks count, for any tile."""
        most = max(
            sum(tile_count(tile, rows, columns) for rows, columns, _ in _matrices(request, tile, 1))
            for tile in self.fitting_tiles(request)
        )
        return Count("tiles", most * request.problem.groups, most_tiles(request))

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            self._costed(request, tile, splits)
            for tile in self.fitting_tiles(request)
            for splits in self._splits(request, tile)
        ]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        tile, splits = choices.tile, choices.splits
        if choices.method or choices.tiling or tile not in self.fitting_tiles(request):
            return None
        assert tile is not None
        fits = 1 <= splits <= self._most_splits(request, tile)
        return self._costed(request, tile, splits) if fits else None

    def _splits(self, request: Request, tile: Tile) -> list[int]:
        """Return the splits worth ranking, which fill the chip once or a few times."""
        (rows, columns, steps), *_ = _matrices(request, tile, 2)
        most = min(steps // cost.LEAST_SPLIT_STEPS, self._most_splits(request, tile))
        if most <= 1:
            return [1]
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        blocks = request.chip.multiprocessors
        found = (min(waves * blocks // tiles, most) for waves in range(1, _MOST_WAVES + 1))
        # All splits have equally many steps, up to rounding, and none is empty.
        return sorted({1, *(-(-steps // -(-steps // splits)) for splits in found if splits > 1)})

    def _most_splits(self, request: Request, tile: Tile) -> int:
        """Return the most splits: one per step, within the counts and the workspace limit."""
        found = _matrices(request, tile, 1)
        if len(found) > 1:
            return 1
        rows, columns, steps = found[0]
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        most = min(steps, most_tiles(request) // tiles)
        if request.workspace_limit is not None:
            _, least, _ = self.before(request, tile)
            left = request.workspace_limit - least
            most = min(most, left // _split_bytes(request, tile))
        return max(most, 1)

    def _costed(self, request: Request, tile: Tile, splits: int) -> Candidate:
        """Return the candidate; its time is rounds of tiles, with the copies and the reduction."""
        problem, chip = request.problem, request.chip
        tiles = steps = 0
        for rows, columns, steps_of_sum in _matrices(request, tile, splits):
            here = tile_count(tile, rows, columns) * problem.groups
            tiles += here
            steps += here * -(-steps_of_sum // splits)
        sums = splits * _split_bytes(request, tile) if splits > 1 else 0
        moved, workspace, before = self.before(request, tile)

        kernel = self._kernel(request, tile, tiles * splits, steps / tiles)
        microseconds = kernel.microseconds(chip, problem.bytes + sums)
        if splits > 1:
            microseconds += cost.of_reduction(chip, splits, sums)
        if before:
            microseconds += cost.of_copy(chip, moved)
        return Candidate(
            self,
            microseconds,
            summary=before,
            computing=kernel.computing(chip),
            tile=tile,
            blocks=tiles,
            splits=splits,
            workspace_bytes=workspace + sums,
        )

    def _kernel(self, request: Request, tile: Tile, tiles: int, steps: float) -> cost.Kernel:
        """Return the blocks of tiles with ``steps`` steps of BLOCK_K each, one after another."""
        chip, m, n = request.chip, tile.block_m, tile.block_n
        rate = chip.group_tensor_rate / (2 if request.operands == "tf32" else 1)
        # TMA writes the lines of A and B.  A warpgroup reads its lines of A, and for each 64 rows
        # of them all lines of B.
        lines = (m + n) + (m + m / 64 * n)
        work = cost.Work(
            multiplying=steps * self.passes * 2 * m * n * tile.block_k / cost.per_cycle(chip, rate),
            wavefronts=steps * self.passes * lines + cost.RESULT_WAVEFRONTS * m * n / 32,
        )
        return cost.Kernel(tiles, 1, tile.threads // 32, work)

    def launches(
        self, request: Request, choices: Choices, activation: str | None = None
    ) -> tuple[Launch, ...]:
        """Return the copy of operands, if any, the product, and the sum of its splits, if any."""
        import numpy as np

        tile, pass_, splits = choices.tile, request.pass_, choices.splits
        assert tile is not None
        staged = stage(request, choices)
        seen = staged.problem
        walked = walks(seen, pass_)
        walk = pack_walk(seen, pass_, tile, matrices(seen, pass_, tile, splits), splits)
        store, run = _store(staged, pass_, len(walked), splits)
        maps = _maps(staged, pass_, tile, walked)
        defines: dict[str, str | int] = {
            **common_defines(tile, pass_, seen, activation),
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
            maps.append(maps[-1])  # unused
        packed = parameters.pack(seen, staged.strides)
        product = Launch(
            source="conv_hopper.cu",
            entry="conv_hopper",
            defines=tuple(defines.items()),
            grid=staying_grid(walk, tile, request.device),
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
            grid=(-(-pieces // cost.ADDING_THREADS),),
            block=(cost.ADDING_THREADS,),
            shared_bytes=0,
            arguments=("workspace", "bias", result, np.int32(splits), walk, packed),
            may_overlap=True,
        )
        return (*staged.before, product, reduction)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        """Return the copy of w, or its planes, that the launches begin with; None without one."""
        problem, strides = request.problem, request.memory
        staged = stage(request, choices)
        if "w" not in dict(staged.made):
            return None
        held, make = staged.other, arrange
        name: str = filter_formats(problem.spatial_rank)[1 if filters_last(staged.problem) else 2]
        if held.planes == PLANES:
            name, make = f"{name} in {PLANES} planes of bfloat16", split
        size = held.planes * copy_bytes(staged.problem.filter_shape, held.itemsize)
        return FilterForm(name, size, make(problem, staged.problem, strides, [("w", 0)]))


class Hopper(Staying):
    name = "cuda-hopper"
    summary = "implicit GEMM on wgmma, fed by TMA, in blocks that stay for many tiles"
    tiles = tuple(
        tile_of(
            *(block_m, block_n, itemsize, itemsize),
            STAGES=ring_stages(block_m, block_n, itemsize),
            CLUSTER=cluster,
            PLANES=1,
            PLANAR=planar,
        )
        for block_m, block_n, cluster in (
            (128, 256, 2),
            (128, 256, 1),
            (256, 128, 2),
            (128, 192, 1),
            (128, 128, 2),
            (256, 64, 1),
            (128, 64, 1),
        )
        for itemsize, planar in ((2, 1), (2, 0), (4, 0))
    )

    def counts(self, request: Request) -> Iterator[Count]:
        yield from tma_counts(request, ITEMSIZE[request.problem.dtype])
        yield self.tiles_counted(request)

    def refuses_layer(self, request: Request) -> str | None:
        operands = request.operands
        if operands not in ("float16", "bfloat16", "tf32"):
            return f"cuda-hopper multiplies 16-bit types and TF32, not {operands}"
        if operands == "tf32" and request.pass_ == "backprop_filter":
            return "wgmma takes TF32 only contiguous along k, which are pixels in backprop_filter"
        refusal = tma_refuses(request, ITEMSIZE[request.problem.dtype])
        if refusal is not None:
            return refusal
        least = min(found.copied_bytes for found in layouts_of(request))
        if not request.affords(least):
            return (
                f"the tensors' copies with channels last take a workspace of {least} bytes, the "
                f"limit is {request.workspace_limit}"
            )
        return None

    def fitting_tiles(self, request: Request) -> list[Tile]:
        found = enumerate(layouts_of(request))
        wanted = [planar for planar, one in found if request.affords(one.copied_bytes)]
        fitting = super().fitting_tiles(request)
        return [tile for tile in fitting if tile.defines["PLANAR"] in wanted]


CUDA_HOPPER = Hopper()
