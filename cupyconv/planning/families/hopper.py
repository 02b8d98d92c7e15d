"""cuda-hopper (cuda/conv_hopper.cu): TMA's walks as numbers, what it refuses, how it is cut.

The fields of the walks are those of cuda/include/walk.cuh, which says where they come from.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from cupyconv.planning import cost
from cupyconv.planning.copies import (
    PIECE_BYTES,
    ROLES_OF,
    called,
    copy_bytes,
    copy_strides,
    permuted,
    reordered,
    shape_of,
)
from cupyconv.planning.device import CHIPS
from cupyconv.planning.families.family import Candidate, Family, Tile
from cupyconv.planning.reach import Count, reach_counts
from cupyconv.planning.request import Request
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem

LINE_BYTES = 128
"""Bytes of a line in shared memory: the span of the swizzle."""

BARRIER_BYTES = 8

TURN_BARRIERS = 2
"""Of the warpgroups that take turns."""

MOST_STAGES = 8
"""Of a ring: more hide nothing."""

MAX_MAPS = 16
"""Tensor maps of what is gathered, and walks, that fit into the 4 KB of a kernel's parameters."""

_MOST_TILE_ROWS = 512
"""Of a cluster's tiles, which the last ones may reach beyond a matrix by."""

_MOST_FILLED = 1.25
"""Pixels computed for each of an image, where rows fill up lines; a copy is better than more."""

# Of cuTensorMapEncodeIm2col, by spatial axes: the range of the corners of the box of base pixels,
# and the largest offset of a tap.
_CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
_LARGEST_OFFSET = {1: 2**16 - 1, 2: 2**8 - 1, 3: 2**5 - 1}
_LARGEST_ELEMENT_STRIDE = 8
_LARGEST_STRIDE_BYTES = 2**40

SUMS_PIECE = 8
"""Columns of C whose splits are added up at once."""

_EFFICIENCY = 0.75  # share of the rate; to be replaced by measurements

_WIDTH_EFFICIENCY = {256: 1.0, 192: 0.97, 128: 0.9, 64: 0.6}
"""Share of the rate that products of a warpgroup reach by their width: narrow ones wait for A."""

_DRAINING = 0.15
"""Microseconds from a tile's last product to what becomes of its sums."""

_STORING = 0.55 / (128 * 256)
"""Microseconds in which two warpgroups round and store a sum.

Counted: 560 instructions of a warp for a tile of 128 x 256, and two warps to a scheduler.
"""

_MOST_WAVES = 4
"""In which splits fill the chip: more of them add sums and save little."""


@dataclass(frozen=True)
class AxisWalk:
    """One spatial axis of a walk.

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
        """Upper corner of the base pixels, counted from the tensor's last pixel."""
        return self.base + (self.pixels - 1) * self.stride - (self.extent - 1)


Walk = tuple[AxisWalk, ...]
"""The spatial axes of one dense problem."""


def has_taps(walk: Walk) -> bool:
    """Whether any tap contributes; the pixels of a stride phase without taps are zero."""
    return all(axis.taps for axis in walk)


def walks(problem: ConvProblem, pass_: str) -> tuple[Walk, ...]:
    """The walks of a pass: one, or those stride phases of backprop_input that have pixels.

    Those of most taps come first, so that the chip's last tiles are short ones.
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
        # The taps are walked backwards.
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
    """Lines of channels under all taps: the other side of the filter gradient."""
    return prod(problem.filter_sizes) * -(-(problem.C // problem.groups) // line)


def matrices(
    problem: ConvProblem, pass_: str, tile: Tile, splits: int
) -> list[tuple[int, int, int]]:
    """Rows and columns of a group's product, and the steps that each sum takes, for each walk.

    Of the filter gradient, rows or columns beyond the channels of a window count: they are
    computed, and dropped.
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
    """Pixels of all images as the product counts them: of planar ones, rows of whole lines."""
    *outer, row = sizes
    row = -(-row // line) * line if is_planar(problem) else row
    return problem.N * prod(outer) * row


def split_elements(problem: ConvProblem, pass_: str, tile: Tile) -> int:
    """Sums of a split in the workspace: C, its rows in whole pieces of eight."""
    ((rows, columns, _),) = matrices(problem, pass_, tile, 1)
    return rows * -(-columns // SUMS_PIECE) * SUMS_PIECE * problem.groups


def has_window_rows(problem: ConvProblem, tile: Tile, splits: int) -> bool:
    """Whether the windows of the filter gradient are the rows of the product, else the filters.

    A result that is stored as it is computed has its contiguous axis along the columns.  Sums of
    splits are added up afterwards and may lie either way, so that what takes fewer tiles is taken.
    """
    as_stored = filters_last(problem)
    if splits == 1:
        return as_stored
    sides = windows(problem, tile.block_k) * tile.block_k, problem.K // problem.groups
    tiles = {True: tile_count(tile, *sides), False: tile_count(tile, *sides[::-1])}
    return as_stored if tiles[True] == tiles[False] else tiles[True] < tiles[False]


def tile_count(tile: Tile, rows: int, columns: int) -> int:
    """Tiles of a matrix, those of whole clusters."""
    cluster = tile.defines["CLUSTER"]
    return -(-rows // (tile.block_m * cluster)) * cluster * -(-columns // tile.block_n)


def is_pointwise(problem: ConvProblem) -> bool:
    """Whether a pass is a plain matrix product over the pixels."""
    return all(
        axis.filter == 1 and axis.stride == 1 and not axis.pad_before and not axis.pad_after
        for axis in problem.axes
    )


def is_planar(problem: ConvProblem) -> bool:
    """Whether the kernels read x and dy with channels first, in lines of a row's pixels."""
    return problem.data_axes[1] == 1


def row_ends(problem: ConvProblem, pass_: str) -> tuple[int, ...]:
    """Where the rows of what planar images are gathered from end, for each map of it.

    The filter gradient is a sum over lines of pixels.  Where the last one is filled up, x ends at
    what each tap along the row reads for the last pixel.
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
    """Whether axes of a tensor, outermost first, can be walked over as one with a single stride."""
    walked = [axis for axis in axes if shape[axis] > 1]
    return all(strides[outer] == strides[inner] * shape[inner] for outer, inner in pairwise(walked))


def filters_last(problem: ConvProblem) -> bool:
    """Whether the filters are the last axis of w, else the channels are."""
    return problem.filter_axes[0] == len(problem.filter_shape) - 1


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What the kernels see of the tensors.

    Attributes:
        problem: the same problem with channels last, and channels or filters last in w; or
            (``is_planar``) with channels first where rows of pixels are read as they lie, which of
            a pointwise layer are whole images: it is then one with a single spatial axis.
        strides: of the tensors in the axis order of its formats.
        copied: roles ("x", "w", "y") of operands that TMA cannot reach where they lie: the kernels
            read copies of them, in which each pixel or tap begins at a multiple of 16 bytes.
    """

    problem: ConvProblem
    strides: Strides
    copied: tuple[str, ...]

    @property
    def copied_bytes(self) -> int:
        """Workspace for the copies."""
        itemsize = ITEMSIZE[self.problem.dtype]
        return sum(copy_bytes(shape_of(self.problem, role), itemsize) for role in self.copied)


@lru_cache(maxsize=4096)
def layouts(
    problem: ConvProblem, pass_: str, strides: Strides, operands: str
) -> tuple[Layout, ...]:
    """The ways in which a pass may meet its tensors: channels last and, if can be, ``is_planar``.

    Args:
        problem, pass_: what is computed.
        strides: of the tensors in the problem's formats.
        operands: what is multiplied, as Request.operands says, or "planes" of bfloat16, which are
            made of tensors where they lie.
    """
    filter_, channel, *taps = problem.filter_axes
    last = strides.w[filter_] == 1 and strides.w[channel] != 1
    if operands == "tf32":  # wgmma takes it only with both operands contiguous along k
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
    """The layout in which operands that TMA does not reach are copied."""
    copied = tuple(role for role in ROLES_OF[pass_][:-1] if role not in reached)
    itemsize = ITEMSIZE[seen.dtype]
    copies = {role: copy_strides(shape_of(seen, role), itemsize) for role in copied}
    steps = {**steps, **copies}
    return Layout(seen, replace(strides, x=steps["x"], w=steps["w"], y=steps["y"]), copied)


def _in_rows(
    problem: ConvProblem, strides: Strides, filter_order: Sequence[int]
) -> tuple[ConvProblem, dict[str, tuple[int, ...]]]:
    """The problem and its strides with channels first; if it can be, an image as a single row."""
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
    """Whether TMA can read the rows of these tensors, channels first, and they fill its lines well.

    Along a row it reads neighbours only, so that windows may not be further apart there.
    """
    axis, itemsize = problem.axes[-1], ITEMSIZE[problem.dtype]
    if problem.spatial_rank > 2 or (axis.stride > 1 and pass_ != "backprop_input"):
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
    """Whether TMA can read an operand with these strides."""
    shape = shape_of(problem, role)
    if not mappable(steps, shape, ITEMSIZE[problem.dtype]):
        return False
    axes = range(len(shape) - 1)
    if role == "w":  # with the taps as one axis
        first = 0 if filters_last(problem) else 1
        return flattens(steps, shape, range(first, first + problem.spatial_rank))
    is_gathered = role == ROLES_OF[pass_][0]
    return not (is_pointwise(problem) or not is_gathered) or flattens(steps, shape, axes)


def mappable(steps: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Whether the driver takes a map of a tensor: neighbours on the last axis, and so outwards.

    Its documentation makes each stride of the one before, times the extent there and any padding,
    so that axes that are reversed, broadcast, overlapping or in another order have no map.
    """
    if steps[-1] != 1:
        return False
    inner, extent = itemsize, shape[-1]
    for step, outer in list(zip(steps, shape, strict=True))[-2::-1]:
        if outer == 1:
            continue  # of a single element, any stride will do
        stride = step * itemsize
        if stride % max(inner, PIECE_BYTES) or not inner * extent <= stride < _LARGEST_STRIDE_BYTES:
            return False
        inner, extent = stride, outer
    return True


# -- what it cannot do -----------------------------------------------------------------------------


def layouts_of(request: Request) -> tuple[Layout, ...]:
    """The ways in which cuda-hopper may meet the tensors of what is asked for."""
    return layouts(request.problem, request.pass_, request.memory, request.operands)


def layout_of(request: Request, tile: Tile) -> Layout:
    """The layout that a tile is for."""
    operands = "planes" if tile.defines["PLANES"] > 1 else request.operands
    found = layouts(request.problem, request.pass_, request.memory, operands)
    return found[tile.defines["PLANAR"]]


def tma_refuses(request: Request, operand_bytes: int) -> str | None:
    """Why TMA and wgmma do not take the operands; None if they do."""
    problem = request.problem
    if request.device.capability != (9, 0):
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
    """What TMA's coordinates and the kernels number."""
    problem, line = request.problem, LINE_BYTES // operand_bytes
    yield from reach_counts(problem)
    # Rows that fill up lines make a quarter more of them.
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
    """Up to which a block that stays can number them, the one that it then lacks included."""
    return 2**31 - 1 - request.device.resident_blocks


def _refuse_groups(problem: ConvProblem, pass_: str, line: int) -> str | None:
    """What lines of so many channels or filters hold too much of other groups for."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    if 2 * min(channels, filters) < line:
        return (
            f"of the {line} channels or filters that a line holds, most would be of other groups: "
            f"groups have {channels} and {filters}"
        )
    # What a product sums over may not have anything of another group, a NaN for one.
    summed = {"forward": (channels, "channels"), "backprop_input": (filters, "filters")}
    count, role = summed.get(pass_, (0, ""))
    if count % line:
        return f"the lines that TMA loads hold {line} {role} of one group, and groups have {count}"
    return None


def _refuse_walks(problem: ConvProblem, pass_: str) -> str | None:
    """What the im2col mode cannot walk over."""
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
    """Of the biases of a tile's columns, for each of two warpgroups."""
    return 2 * block_n * 4


def output_bytes(itemsize: int) -> int:
    """Of two warpgroups' two buffers for C on its way out; float leaves registers for memory."""
    return 2 * 2 * 64 * LINE_BYTES if itemsize == 2 else 0


def ring_stages(block_m: int, block_n: int, itemsize: int) -> int:
    """Stages of lines of both operands, two barriers each: as many as shared memory holds.

    Args:
        block_m, block_n: the tile.
        itemsize: bytes of an element of C.
    """
    fixed = output_bytes(itemsize) + bias_bytes(block_n) + TURN_BARRIERS * BARRIER_BYTES
    room = (CHIPS[9, 0].block_shared << 10) - fixed
    return min(room // ((block_m + block_n) * LINE_BYTES + 2 * BARRIER_BYTES), MOST_STAGES)


def tile_of(block_m: int, block_n: int, itemsize: int, operand_bytes: int, **macros: int) -> Tile:
    """Two warpgroups that multiply and one that loads lines of so wide operands."""
    line = LINE_BYTES // operand_bytes
    return Tile(block_m, block_n, line, 384, tuple(macros.items()), (9, 0), itemsize)


def takes_turns(tile: Tile) -> bool:
    """Whether a warpgroup computes a whole tile while the other one stores its own (TURNS)."""
    return tile.block_n == 64 and tile.defines["PLANES"] == 1


def _matrices(request: Request, tile: Tile, splits: int) -> list[tuple[int, int, int]]:
    """``matrices`` of what is asked for."""
    return matrices(layout_of(request, tile).problem, request.pass_, tile, splits)


def _split_bytes(request: Request, tile: Tile) -> int:
    """Of a split's sums in the workspace."""
    return split_elements(layout_of(request, tile).problem, request.pass_, tile) * 4


class Staying(Family):
    """A family whose blocks stay on the chip, and take one tile after the other."""

    def products(self, request: Request) -> int:
        """Products of 16-bit operands in the time of one of a request's."""
        return 2 if request.operands == "tf32" else 1

    def before(self, request: Request, tile: Tile) -> tuple[float, int, str]:
        """Bytes moved by the launch before the product, its workspace, and what it does, if any."""
        seen = layout_of(request, tile)
        does = f"{called(seen.copied)} copied with channels last" if seen.copied else ""
        return 2 * seen.copied_bytes, seen.copied_bytes, does

    def tiles_counted(self, request: Request) -> Count:
        """What blocks that stay number, of whichever tiles are taken."""
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

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        if method or tile is None or tile not in self.fitting_tiles(request):
            return None
        if not 1 <= splits <= self._most_splits(request, tile):
            return None
        return self._costed(request, tile, splits)

    def _splits(self, request: Request, tile: Tile) -> list[int]:
        """The splits worth a thought: those that fill the chip once or a few times."""
        most = self._most_splits(request, tile)
        if most == 1:
            return [1]
        ((rows, columns, steps),) = _matrices(request, tile, 2)
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        blocks = request.device.chip.multiprocessors
        found = (min(waves * blocks // tiles, most) for waves in range(1, _MOST_WAVES + 1))
        # Each has as many steps as the others, and none is left without.
        return sorted({1, *(-(-steps // -(-steps // splits)) for splits in found if splits > 1)})

    def _most_splits(self, request: Request, tile: Tile) -> int:
        """Those that leave steps enough, within the workspace limit."""
        found = _matrices(request, tile, 1)
        if len(found) > 1:
            return 1
        rows, columns, steps = found[0]
        tiles = tile_count(tile, rows, columns) * request.problem.groups
        most = min(steps // cost.LEAST_SPLIT_STEPS, most_tiles(request) // tiles)
        if request.workspace_limit is not None:
            _, least, _ = self.before(request, tile)
            left = request.workspace_limit - least
            most = min(most, left // _split_bytes(request, tile))
        return max(most, 1)

    def _costed(self, request: Request, tile: Tile, splits: int) -> Candidate:
        """Rounds of whole tiles, each of its steps and an overhead; and what is around them."""
        problem, chip = request.problem, request.device.chip
        cluster = tile.defines["CLUSTER"]
        tiles = steps = 0
        for rows, columns, steps_of_sum in _matrices(request, tile, splits):
            here = tile_count(tile, rows, columns) * problem.groups
            tiles += here
            steps += here * -(-steps_of_sum // splits)
        sums = splits * _split_bytes(request, tile) if splits > 1 else 0
        moved, workspace, before = self.before(request, tile)

        rate = chip.group_tensor_rate / self.products(request)
        rate *= _WIDTH_EFFICIENCY[tile.block_n] * _EFFICIENCY
        operations = 2 * tile.block_m * tile.block_n * tile.block_k
        loaded = (tile.block_m + tile.block_n / cluster) * LINE_BYTES
        step = chip.multiprocessors * max(
            operations / (rate * 1e6), loaded / (chip.cache_bandwidth * 1e3)
        )
        multiplying = steps / tiles * step
        storing = tile.block_m * tile.block_n * _STORING
        rounds = -(-tiles * splits // chip.multiprocessors)
        if takes_turns(tile):  # a warpgroup is as long at its tile as both are at two others
            storing *= 2
            later = max(multiplying, (multiplying + _DRAINING + storing) / 2)
            compute = multiplying + _DRAINING + storing + (rounds - 1) * later
        else:
            compute = rounds * (multiplying + _DRAINING + storing)
        microseconds = max(compute, cost.moving(chip, problem.bytes + sums))
        microseconds += cost.moving(chip, moved + sums)
        microseconds += (1 + (splits > 1) + bool(before)) * cost.LAUNCH_OVERHEAD
        return Candidate(self, microseconds, tile, tiles, splits, workspace + sums, summary=before)


class Hopper(Staying):
    name = "cuda-hopper"
    summary = "implicit GEMM on wgmma, fed by TMA, in blocks that stay for many tiles"
    kernels = "hopper"
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
