"""Copies of operands in the workspace: their layout, and the launches that write them.

cuda/conv_arrange.cu reorders axes.  cuda/conv_planes.cu splits a float32 tensor into three bfloat16
tensors, its planes, whose sum is the float32 tensor except for bits below 2^-133.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from cupyconv import formats
from cupyconv.kernels.strides import Strides, contiguous_strides
from cupyconv.launch import STORAGE, Launch, Part
from cupyconv.problem import ITEMSIZE, ConvProblem, derived

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES = 16
"""Bytes per vector.  Rows of copies begin at multiples of this size, as TMA requires of addresses
and strides (CUDA's rule)."""

LINE_BYTES = 128
"""Bytes per line of cuda-hopper in shared memory, the span of the swizzle (hardware)."""

ROLES_OF = {
    "forward": ("x", "w", "y"),
    "backprop_input": ("y", "w", "x"),
    "backprop_filter": ("x", "y", "w"),
}
"""Names of the tensors by pass: (operand under the taps, other operand, result).  The operand under
the taps is read at positions that each tap shifts.  A gradient has the name of its tensor: "y" is
dy in backprop_input."""


def copy_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a copy in elements: C-contiguous, with rows padded to ``pitch``."""
    return contiguous_strides((*shape[:-1], pitch(shape[-1], itemsize)))


def band_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a copy with the axes (1, channel, row, column, (image, band)).

    In memory, channels are inside rows and columns.
    """
    one, channels, *pixels, last = shape
    return permuted(copy_strides((one, *pixels, channels, last), itemsize), (0, 3, 1, 2, 4))


def pitch(extent: int, itemsize: int) -> int:
    """Return the elements per row of a copy: ``extent``, rounded up to a multiple of 16 bytes."""
    piece = PIECE_BYTES // itemsize
    return -(-extent // piece) * piece


def copy_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the size of a copy in bytes."""
    return copy_strides((1, *shape), itemsize)[0] * itemsize


def shape_of(problem: ConvProblem, role: str) -> tuple[int, ...]:
    """Return the shape of x, w or y."""
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    return shapes[role]


TILE = 64
"""Extent, in pixels and in channels, of the tile that a block of cuda/conv_arrange.cu copies."""

BAND_PIXELS = 128
BAND_CHANNELS = 32
"""Extents of the tile if the last axis of the copy is (image, band)."""


def tiles(shape: Sequence[int], pixels: int = TILE, channels: int = TILE) -> int:
    """Return the number of tiles of a channels-last tensor; each block copies one tile."""
    return -(-prod(shape[:-1]) // pixels) * -(-shape[-1] // channels)


@lru_cache(maxsize=4096)
def arranged(
    problem: ConvProblem, strides: Strides, roles: tuple[str, ...]
) -> tuple[ConvProblem, Strides]:
    """Return the problem in channels-last formats, and its strides after copies of some tensors.

    Args:
        problem: the problem in the caller's formats.
        strides: strides of the caller's tensors.
        roles: names of the copied tensors.
    """
    batch, channel, *spatial = problem.data_axes
    filter_, of_filter, *taps = problem.filter_axes
    orders = (batch, *spatial, channel), (filter_, *taps, of_filter)
    target, steps = reordered(problem, strides, *orders)
    for role in roles:
        steps[role] = copy_strides(shape_of(target, role), ITEMSIZE[problem.dtype])
    return target, replace(strides, x=steps["x"], w=steps["w"], y=steps["y"], copied=roles)


def reordered(
    problem: ConvProblem, strides: Strides, data_order: Sequence[int], filter_order: Sequence[int]
) -> tuple[ConvProblem, dict[str, tuple[int, ...]]]:
    """Return the problem with its axes in another order, and the strides of x, w and y by name.

    Args:
        problem: the problem.
        strides: strides of the tensors.
        data_order, filter_order: axes of x and y, and of w, in the new order.
    """
    rank = problem.spatial_rank
    data, filters = formats.data_formats(rank), formats.filter_formats(rank)
    target = derived(
        problem,
        input_shape=permuted(problem.input_shape, data_order),
        filter_shape=permuted(problem.filter_shape, filter_order),
        data_format=data[data_order[-1] == problem.data_axes[1]],
        filter_format=filters[1 if filter_order[-1] == problem.filter_axes[0] else 2],
    )
    steps = {
        "x": permuted(strides.x, data_order),
        "w": permuted(strides.w, filter_order),
        "y": permuted(strides.y, data_order),
    }
    return target, steps


def permuted(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the values, one per axis, in the given order of the axes."""
    return tuple(values[axis] for axis in order)


# -- launches --------------------------------------------------------------------------------------

THREADS = 256
"""Threads per block of the kernels that copy."""

VECTOR = 8
"""Elements per thread of cuda/conv_planes.cu."""

_COPIED_AXES = (("extent", "i8", 4), ("stride", "i8", 4))
PLANE_SHAPE = (*_COPIED_AXES, ("inner", "i8"), ("blocks", "i8"))
"""Fields of the struct ``PlaneShape`` in cuda/conv_planes.cu, in NumPy's notation."""

ARRANGE_SHAPE = (
    *_COPIED_AXES,
    *((name, "i8") for name in ("channels", "channel_stride", "tiles")),
    ("copy_stride", "i8", 4),
    *((name, "i8") for name in ("row_axis", "first_row", "rows", "bands", "band_rows")),
)
"""Fields of the struct ``ArrangeShape`` in cuda/conv_arrange.cu, in NumPy's notation."""

Copies = Sequence[tuple[str, int]]
"""One or two pairs of a tensor's name and the byte offset of the tensor's copy in the workspace."""


def arrange(source: ConvProblem, target: ConvProblem, strides: Strides, copies: Copies) -> Launch:
    """Return the launch that copies tensors of ``source`` to the formats of ``target``."""
    tensors = [_in_formats(source, target, role, strides) for role, _ in copies]
    return _arrange(target.dtype, tensors, copies)


def arrange_bands(
    source: ConvProblem, target: ConvProblem, strides: Strides, copies: Copies
) -> Launch:
    """Return the launch that copies x and y of ``source`` with (image, band) as the last axis.

    Args:
        source: a 1-D or 2-D problem.
        target: the problem over the copies, with axes (1, channel, row, column, (image, band)).
        strides: strides of the tensors of ``source``.
        copies: the copies, whose strides are ``band_strides``.
    """
    shapes = _pair_of(ARRANGE_SHAPE)
    rows, of_band = source.axes[0], target.axes[0]
    first_of_x = of_band.pad_before - rows.pad_before, rows.input, of_band.output * rows.stride
    batch, *axes = source.data_axes
    for record, (role, _) in zip(shapes["of"][0], copies, strict=False):
        shape, steps = shape_of(target, role), getattr(strides, role)
        to = band_strides(shape, ITEMSIZE[target.dtype])
        # Axes of the copy and of the tensor.  The axis with the smallest stride in the tensor is
        # last, because adjacent threads load adjacent elements of it.
        order = sorted(zip((1, 2, 3), axes, strict=False), key=lambda pair: -abs(steps[pair[1]]))
        _write_outer_axes(
            record,
            [*(shape[there] for there, _ in order), shape[-1]],
            [*(steps[here] for _, here in order), steps[batch]],
        )
        record["channels"], record["channel_stride"] = shape[-1], steps[batch]
        record["tiles"] = tiles(shape, BAND_PIXELS, BAND_CHANNELS)
        record["copy_stride"] = [0] * (4 - len(order)) + [to[there] for there, _ in order]
        record["row_axis"] = 4 - len(order) + [there for there, _ in order].index(2)
        record["bands"] = rows.output // of_band.output
        record["first_row"], record["rows"], record["band_rows"] = (
            first_of_x if role == "x" else (0, rows.output, of_band.output)
        )
    defines = (("STORAGE", STORAGE[target.dtype]), ("BANDS", 1))
    blocks = int(shapes["of"]["tiles"].sum())
    return _copy_launch("conv_arrange", defines, shapes, blocks, copies)


def filter_by_channels(problem: ConvProblem, strides: Strides, offset: int) -> Launch:
    """Return the launch that copies w to the order (groups, channels, taps, filters).

    Args:
        problem: a problem for which ``has_even_taps`` returns True.
        strides: strides of the caller's tensors.
        offset: bytes from the beginning of the workspace to the copy.
    """
    filter_, channel, *taps = problem.filter_axes
    shape, apart = _shape_by_channels(problem), strides.w[filter_]
    step = strides.w[taps[-2]] if len(taps) == 2 else 0
    steps = (shape[-1] * apart, strides.w[channel], step, strides.w[taps[-1]], apart)
    return _arrange(problem.dtype, [(shape, steps)], [("w", offset)])


def filter_by_channels_bytes(problem: ConvProblem) -> int:
    """Return the bytes of the copy of w that ``filter_by_channels`` makes."""
    return copy_bytes(_shape_by_channels(problem), ITEMSIZE[problem.dtype])


def has_even_taps(problem: ConvProblem, strides: Strides) -> bool:
    """Return whether w's tap axes can be merged, without a copy, into at most two axes."""
    if problem.spatial_rank < 3:
        return True
    depth, height, width = problem.filter_axes[2:]
    sizes, apart = problem.filter_shape, strides.w
    rows = sizes[height] == 1 or apart[height] == sizes[width] * apart[width]
    return rows and (
        sizes[depth] == 1 or apart[depth] == sizes[height] * sizes[width] * apart[width]
    )


def split(source: ConvProblem, target: ConvProblem, strides: Strides, copies: Copies) -> Launch:
    """Return the launch that splits float32 tensors into planes of bfloat16."""
    shapes = _pair_of(PLANE_SHAPE)
    for record, (role, _) in zip(shapes["of"][0], copies, strict=False):
        shape, steps = _in_formats(source, target, role, strides)
        _write_outer_axes(record, shape, steps)
        record["inner"] = shape[-1]
        pieces = prod(shape[:-1]) * -(-shape[-1] // VECTOR)
        record["blocks"] = -(-pieces // THREADS)
    return _copy_launch("conv_planes", (), shapes, int(shapes["of"]["blocks"].sum()), copies)


_Tensor = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a tensor, in the axis order of its copy."""


def _shape_by_channels(problem: ConvProblem) -> tuple[int, ...]:
    """Return the shape of the copy that ``filter_by_channels`` makes, with two axes of taps."""
    taps = problem.filter_sizes if problem.spatial_rank == 2 else (1, prod(problem.filter_sizes))
    groups = problem.groups
    return (groups, problem.C // groups, *taps, problem.K // groups)


def _in_formats(source: ConvProblem, target: ConvProblem, role: str, strides: Strides) -> _Tensor:
    """Return the shape and the strides of a tensor in the axis order of ``target``."""
    name = "filter_axes" if role == "w" else "data_axes"
    # If ``target`` merges spatial axes, zip drops axes of w, which then have one tap each.
    place = dict(zip(getattr(target, name), getattr(source, name), strict=False))
    shape, own = shape_of(target, role), getattr(strides, role)
    return shape, [own[place[axis]] for axis in range(len(shape))]


def _arrange(dtype: str, tensors: Sequence[_Tensor], copies: Copies) -> Launch:
    """Return the launch of cuda/conv_arrange.cu that copies one or two tensors."""
    shapes = _pair_of(ARRANGE_SHAPE)
    for record, (shape, steps) in zip(shapes["of"][0], tensors, strict=False):
        _write_outer_axes(record, shape, steps)
        record["channels"], record["channel_stride"] = shape[-1], steps[-1]
        record["tiles"] = tiles(shape)
    blocks = int(shapes["of"]["tiles"].sum())
    return _copy_launch("conv_arrange", (("STORAGE", STORAGE[dtype]),), shapes, blocks, copies)


def _pair_of(fields: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """Return an array of one struct; its field ``of`` has two zero records with these fields."""
    import numpy as np

    return np.zeros(1, [("of", np.dtype(list(fields)), 2)])


def _write_outer_axes(record: np.void, shape: Sequence[int], steps: Sequence[int]) -> None:
    """Write the extents and strides of all axes but the last into a record for five axes."""
    missing = 5 - len(shape)
    record["extent"] = [1] * missing + list(shape[:-1])
    record["stride"] = [0] * missing + list(steps[:-1])


def _copy_launch(
    entry: str,
    defines: tuple[tuple[str, str | int], ...],
    shapes: np.ndarray,
    blocks: int,
    copies: Copies,
) -> Launch:
    """Return the launch of a kernel that copies one or two tensors."""
    import numpy as np

    pairs = [array for role, offset in copies for array in (role, Part("workspace", offset))]
    nothing = [np.uint64(0)] * (4 - len(pairs))
    return Launch(
        source=f"{entry}.cu",
        entry=entry,
        defines=defines,
        grid=(blocks,),
        block=(THREADS,),
        shared_bytes=0,
        arguments=(*pairs, *nothing, shapes),
    )
