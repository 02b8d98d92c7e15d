"""Kernels compiled by Triton from Gluon, and their launches.

They cover what other witnesses do not: loaded boxes and im2col columns, operands in shared memory
without a swizzle, warp specialization, and reads of another block's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .. import tensormap
from ..module import Outcome
from . import MissingError
from .triton_kernels import WARPS, Launcher, Specialised, extents_and_strides

_CHIP = "sm_90a"
_FILE = "gluon_source"
SWIZZLE = 64  # bytes: the inner extent of a box or column, 32 elements of 16 bits
LENGTH = 1024  # elements of a summed row
ROWS = (2, 5, 3)  # rows per party
_PARTIES = (WARPS, 4, 2)  # warps per party
EXCHANGED = 32  # rows and columns of the transposed matrix
TILE = (64, 32, 16)  # m, n and k of the product


@dataclass(frozen=True)
class Box:
    """A box of a tensor that TMA loads or stores.

    Attributes:
        shape: shape of the tensor.
        box: extents of the box.
        corner: index of its first element; part of the box is outside the tensor.
    """

    shape: tuple[int, ...]
    box: tuple[int, ...]
    corner: tuple[int, ...]


BOXES = {
    2: Box((13, 40), (16, 32), (-3, 16)),
    3: Box((5, 7, 40), (4, 8, 32), (2, -3, 16)),
    4: Box((3, 4, 5, 40), (4, 2, 4, 32), (1, -1, 2, 16)),
}
"""Boxes by number of axes."""
BOX_OF_FLOAT32 = Box((5, 7, 40), (4, 8, 16), (2, -3, 8))


@dataclass(frozen=True)
class Column:
    """A column of pixels that TMA loads in im2col mode, over one axis and several images.

    Attributes:
        shape: images, pixels and channels.
        base: image and pixel of the first base pixel.
        pixels: pixels of the column.
        corners: first base pixel, and offset of the last base pixel from the image's last pixel.
        step: distance of base pixels.
        tap: offset of each pixel from its base pixel.
    """

    shape: tuple[int, int, int]
    base: tuple[int, int]
    pixels: int
    corners: tuple[int, int]
    step: int
    tap: int


COLUMN = Column((3, 13, 32), (0, 3), 16, (-1, -2), 2, 1)


def _gluon() -> Any:
    try:
        from triton.experimental.gluon import language
    except ImportError as error:
        raise MissingError.of(error.name) from None
    return language


def _flat(warps: int = WARPS, blocks: int = 1) -> Any:
    """Return a one-dimensional layout, split over the blocks of a cluster."""
    gl = _gluon()
    return gl.BlockedLayout([1], [32], [warps], [0], cga_layout=[[1]] * (blocks - 1))


def _spread(axes: int, blocks: int = 1) -> Any:
    """Return a layout of a box over the threads; each block of a cluster has the whole box."""
    gl, ones = _gluon(), [1] * (axes - 1)
    order = list(range(axes))[::-1]
    return gl.BlockedLayout(
        [*ones, 2], [*ones[1:], 4, 8], [WARPS, *ones], order, cga_layout=_everywhere(axes, blocks)
    )


def _everywhere(axes: int, blocks: int) -> list[list[int]]:
    return [[0] * axes] * (blocks - 1)


def _descriptor(box: tuple[int, ...], blocks: int = 1, dtype: str = "fp16", rank: int = 0) -> str:
    """Return the type of a descriptor; ``rank`` is the tensor's rank for im2col, else 0."""
    axes, bits = len(box), int(dtype.removeprefix("fp"))
    layout = _gluon().NVMMASharedLayout(SWIZZLE, bits, axes, cga_layout=_everywhere(axes, blocks))
    extents = ", ".join(map(str, box))
    kind, rank_text = ("tensordesc_im2col", f"input_rank={rank},") if rank else ("tensordesc", "")
    return f"{kind}<{dtype}[{extents}],{rank_text}{layout!r}>"


@cache
def loaded_box(axes: int, blocks: int) -> Launcher:
    """Return the load of one of BOXES; two blocks use multicast.

    Raises:
        MissingError: Triton is not installed; all functions that return kernels raise it.
    """
    box = BOXES[axes]
    types = [_descriptor(box.box, blocks), "*fp16"]
    constants = [box.corner, blocks > 1, _spread(axes, blocks), _flat(blocks=blocks)]
    return Launcher(Specialised((_FILE, "loaded_box"), _CHIP, types, constants, blocks=blocks))


@cache
def loaded_box_of_float32() -> Launcher:
    """Return the load of BOX_OF_FLOAT32."""
    box = BOX_OF_FLOAT32
    types = [_descriptor(box.box, dtype="fp32"), "*fp32"]
    constants = [box.corner, False, _spread(len(box.box)), _flat()]
    return Launcher(Specialised((_FILE, "loaded_box"), _CHIP, types, constants))


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Round as Triton's interpreter does for a map of type TF32."""
    from triton.runtime import interpreter

    return interpreter._round_f32_to_tf32(values)


@cache
def stored_box(axes: int) -> Launcher:
    """Return the store of one of BOXES."""
    box = BOXES[axes]
    types = ["*fp16", _descriptor(box.box)]
    constants = [box.corner, _spread(axes), _flat()]
    return Launcher(Specialised((_FILE, "stored_box"), _CHIP, types, constants))


@cache
def loaded_column(blocks: int) -> Launcher:
    """Return the load of COLUMN; two blocks use multicast."""
    box = (COLUMN.pixels, COLUMN.shape[2])
    types = [_descriptor(box, blocks, rank=len(COLUMN.shape)), "*fp16"]
    constants = [
        (*COLUMN.base, 0), (COLUMN.tap,), blocks > 1, _spread(2, blocks), _flat(blocks=blocks)
    ]  # fmt: skip
    return Launcher(Specialised((_FILE, "loaded_column"), _CHIP, types, constants, blocks=blocks))


def run_column(blocks: int, source: np.ndarray, result: np.ndarray) -> Outcome:
    """Run ``loaded_column`` on arrays of ``memory``."""
    lower, upper = COLUMN.corners
    encoded = tensormap.encode_im2col(
        source.ctypes.data,
        source.itemsize,
        source.shape[::-1],
        source.strides[-2::-1],
        (lower,),
        (upper,),
        COLUMN.shape[2],
        COLUMN.pixels,
        (1, COLUMN.step, 1),
        SWIZZLE,
    )
    return loaded_column(blocks)(encoded, *extents_and_strides(source), result)


@cache
def product(a_along_k: bool, b_along_k: bool) -> Launcher:
    """Return a product of one row-major float16 tile; shared memory is not swizzled.

    Args:
        a_along_k, b_along_k: whether the operand is contiguous along k in shared memory (otherwise
            along m or n).
    """
    gl, (m, n, k) = _gluon(), TILE
    of_c = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, n, 16])
    registers = gl.BlockedLayout([1, 2], [4, 8], [WARPS, 1], [1, 0])
    constants = [
        m, n, k, _by_core_matrices(m, k, a_along_k), _by_core_matrices(k, n, not b_along_k), of_c,
        registers, _flat(),
    ]  # fmt: skip
    return Launcher(Specialised((_FILE, "product"), _CHIP, ["*fp16"] * 3, constants))


def _by_core_matrices(rows: int, columns: int, along_columns: bool) -> Any:
    """Return a layout of core matrices (8 rows of 16 bytes each), ordered along the rows."""
    lines, length = (rows, columns) if along_columns else (columns, rows)
    bits = [(0, 1), (0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]
    bits += [(0, 8 << i) for i in range((length // 8).bit_length() - 1)]
    bits += [(8 << i, 0) for i in range((lines // 8).bit_length() - 1)]
    order = 1 if along_columns else -1
    return _gluon().SharedLinearLayout([list(bit[::order]) for bit in bits])


@cache
def sums_by_parties() -> Launcher:
    """Return the float32 row sums that three parties of warps compute concurrently (see ROWS)."""
    constants = [ROWS, LENGTH, _PARTIES, tuple(_flat(warps) for warps in _PARTIES)]
    return Launcher(Specialised((_FILE, "sums_by_parties"), _CHIP, ["*fp32"] * 2, constants))


@cache
def transposed_between_blocks() -> Launcher:
    """Return a float32 transposition: a block reads half the rows and writes half the columns."""
    gl = _gluon()
    by_rows = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0], cga_layout=[[1, 0]])
    by_columns = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1], cga_layout=[[0, 1]])
    constants = [EXCHANGED, by_rows, by_columns]
    source = (_FILE, "transposed_between_blocks")
    return Launcher(Specialised(source, _CHIP, ["*fp32"] * 2, constants, blocks=2))
