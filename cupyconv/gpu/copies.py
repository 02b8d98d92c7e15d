"""Launches that copy operands before a product (cuda/conv_arrange.cu, cuda/conv_planes.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from cupyconv.gpu.launch import STORAGE, Launch, Part
from cupyconv.planning.copies import shape_of, tiles
from cupyconv.planning.strides import Strides
from cupyconv.problem import ConvProblem

THREADS = 256
VECTOR = 8  # elements that a thread splits

_COPIED_AXES = [("extent", np.int64, 4), ("stride", np.int64, 4)]
PLANE_SHAPE = np.dtype([*_COPIED_AXES, ("inner", np.int64), ("blocks", np.int64)])
"""``PlaneShape`` of cuda/conv_planes.cu."""


ARRANGE_SHAPE = np.dtype(
    [*_COPIED_AXES, ("channels", np.int64), ("channel_stride", np.int64), ("tiles", np.int64)]
)
"""``ArrangeShape`` of cuda/conv_arrange.cu."""

_NOTHING = np.uint64(0)
"""In the place of a second tensor."""

Made = Sequence[tuple[str, int]]
"""Roles of one or two tensors, and where in the workspace their copies are to be."""


def arrange(asked: ConvProblem, seen: ConvProblem, strides: Strides, made: Made) -> Launch:
    """The launch that copies tensors."""
    shapes = np.zeros(1, [("of", ARRANGE_SHAPE, 2)])
    for record, (role, _) in zip(shapes["of"][0], made, strict=False):
        shape, steps = _walked(record, asked, seen, role, strides)
        record["channels"], record["channel_stride"] = shape[-1], steps[-1]
        record["tiles"] = tiles(shape)
    blocks = int(shapes["of"]["tiles"].sum())
    return _copying("conv_arrange", (("STORAGE", STORAGE[seen.dtype]),), shapes, blocks, made)


def split(asked: ConvProblem, seen: ConvProblem, strides: Strides, made: Made) -> Launch:
    """The launch that splits tensors into planes."""
    shapes = np.zeros(1, [("of", PLANE_SHAPE, 2)])
    for record, (role, _) in zip(shapes["of"][0], made, strict=False):
        shape, _ = _walked(record, asked, seen, role, strides)
        record["inner"] = shape[-1]
        pieces = prod(shape[:-1]) * -(-shape[-1] // VECTOR)
        record["blocks"] = -(-pieces // THREADS)
    return _copying("conv_planes", (), shapes, int(shapes["of"]["blocks"].sum()), made)


def _walked(
    record: np.void, asked: ConvProblem, seen: ConvProblem, role: str, strides: Strides
) -> tuple[tuple[int, ...], list[int]]:
    """Fills in what is walked over; a tensor's shape and strides as the kernels see its axes."""
    name = "filter_axes" if role == "w" else "data_axes"
    # Where they see one spatial axis instead of several, each of w has a single tap.
    place = dict(zip(getattr(seen, name), getattr(asked, name), strict=False))
    shape, given = shape_of(seen, role), getattr(strides, role)
    steps = [given[place[axis]] for axis in range(len(shape))]
    missing = 5 - len(shape)
    record["extent"] = [1] * missing + list(shape[:-1])
    record["stride"] = [0] * missing + steps[:-1]
    return shape, steps


def _copying(
    entry: str,
    defines: tuple[tuple[str, str | int], ...],
    shapes: np.ndarray,
    blocks: int,
    made: Made,
) -> Launch:
    """The launch of a kernel that copies one or two tensors."""
    given = [one for role, offset in made for one in (role, Part("workspace", offset))]
    return Launch(
        source=f"{entry}.cu",
        entry=entry,
        defines=defines,
        grid=(blocks,),
        block=(THREADS,),
        shared_bytes=0,
        arguments=(*given, *[_NOTHING] * (4 - len(given)), shapes),
    )
