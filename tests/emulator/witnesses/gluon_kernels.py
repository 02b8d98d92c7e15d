"""Kernels that Triton's compiler makes of Gluon, as they are launched here.

Each shows what others leave open: boxes and columns of tensors as they arrive, operands in shared
memory without a swizzle, warps that work apart, blocks that read each other's memory.
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
SWIZZLE = 64  # bytes: 32 elements of 16 bits, a box's or column's inner extent
LENGTH = 1024  # of the rows that are summed
ROWS = (2, 5, 3)  # that each party sums
_PARTIES = (WARPS, 4, 2)  # warps
EXCHANGED = 32  # rows and columns
TILE = (64, 32, 16)  # m, n and k of a product


@dataclass(frozen=True)
class Box:
    """A box of a tensor that TMA loads, or stores.

    Attributes:
        shape: of the tensor.
        box: extents of the box.
        corner: where it begins; it lies in part outside.
    """

    shape: tuple[int, ...]
    box: tuple[int, ...]
    corner: tuple[int, ...]


BOXES = {
    2: Box((13, 40), (16, 32), (-3, 16)),
    3: Box((5, 7, 40), (4, 8, 32), (2, -3, 16)),
    4: Box((3, 4, 5, 40), (4, 2, 4, 32), (1, -1, 2, 16)),
}
"""By axes."""
BOX_OF_FLOAT32 = Box((5, 7, 40), (4, 8, 16), (2, -3, 8))


@dataclass(frozen=True)
class Column:
    """A column of pixels that TMA loads in im2col mode, over one axis, from image to image.

    Attributes:
        shape: images, pixels and channels.
        base: image and pixel that it begins at.
        pixels: of the column.
        corners: first base pixel, and by how much the last is past the image's last.
        step: from base pixel to base pixel.
        tap: by how much each pixel is moved.
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
        raise MissingError(
            f"{error.name} is missing: pip install 'cupyconv[test,witnesses]'"
        ) from None
    return language


def _flat(warps: int = WARPS, blocks: int = 1) -> Any:
    """Of one axis: each block of a cluster has its part."""
    gl = _gluon()
    return gl.BlockedLayout([1], [32], [warps], [0], cga_layout=[[1]] * (blocks - 1))


def _spread(axes: int, blocks: int = 1) -> Any:
    """Of a box over the threads: each block of a cluster has all."""
    gl, ones = _gluon(), [1] * (axes - 1)
    order = list(range(axes))[::-1]
    return gl.BlockedLayout(
        [*ones, 2], [*ones[1:], 4, 8], [WARPS, *ones], order, cga_layout=_everywhere(axes, blocks)
    )


def _everywhere(axes: int, blocks: int) -> list[list[int]]:
    return [[0] * axes] * (blocks - 1)


def _descriptor(box: tuple[int, ...], blocks: int = 1, dtype: str = "fp16", rank: int = 0) -> str:
    """The type of a descriptor; of a column's, ``rank`` is that of the tensor."""
    axes, bits = len(box), int(dtype.removeprefix("fp"))
    layout = _gluon().NVMMASharedLayout(SWIZZLE, bits, axes, cga_layout=_everywhere(axes, blocks))
    extents = ", ".join(map(str, box))
    kind, place = ("tensordesc_im2col", f"input_rank={rank},") if rank else ("tensordesc", "")
    return f"{kind}<{dtype}[{extents}],{place}{layout!r}>"


@cache
def loaded_box(axes: int, blocks: int) -> Launcher:
    """One of BOXES; two blocks have it by multicast.

    Raises:
        MissingError: Triton is not installed; so do the others.
    """
    one = BOXES[axes]
    types = [_descriptor(one.box, blocks), "*fp16"]
    constants = [one.corner, blocks > 1, _spread(axes, blocks), _flat(blocks=blocks)]
    return Launcher(Specialised((_FILE, "loaded_box"), _CHIP, types, constants, blocks=blocks))


@cache
def loaded_box_of_float32() -> Launcher:
    """BOX_OF_FLOAT32."""
    one = BOX_OF_FLOAT32
    types = [_descriptor(one.box, dtype="fp32"), "*fp32"]
    constants = [one.corner, False, _spread(len(one.box)), _flat()]
    return Launcher(Specialised((_FILE, "loaded_box"), _CHIP, types, constants))


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """By Triton's own account of what a map of TF32 does on the way."""
    from triton.runtime import interpreter

    return interpreter._round_f32_to_tf32(values)


@cache
def stored_box(axes: int) -> Launcher:
    """One of BOXES."""
    one = BOXES[axes]
    types = ["*fp16", _descriptor(one.box)]
    constants = [one.corner, _spread(axes), _flat()]
    return Launcher(Specialised((_FILE, "stored_box"), _CHIP, types, constants))


@cache
def loaded_column(blocks: int) -> Launcher:
    """COLUMN; two blocks have it by multicast."""
    box = (COLUMN.pixels, COLUMN.shape[2])
    types = [_descriptor(box, blocks, rank=len(COLUMN.shape)), "*fp16"]
    constants = [
        (*COLUMN.base, 0), (COLUMN.tap,), blocks > 1, _spread(2, blocks), _flat(blocks=blocks)
    ]  # fmt: skip
    return Launcher(Specialised((_FILE, "loaded_column"), _CHIP, types, constants, blocks=blocks))


def run_column(blocks: int, source: np.ndarray, result: np.ndarray) -> Outcome:
    """Launches ``loaded_column`` on arrays of ``memory``."""
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
    """Of one tile of float16, row by row, its operands without a swizzle in shared memory.

    Args:
        a_along_k, b_along_k: whether lines along k lie in one piece there, else along m or n.
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
    """Eight lines of 16 bytes in one piece, such pieces first along the lines."""
    lines, length = (rows, columns) if along_columns else (columns, rows)
    bits = [(0, 1), (0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]
    bits += [(0, 8 << i) for i in range((length // 8).bit_length() - 1)]
    bits += [(8 << i, 0) for i in range((lines // 8).bit_length() - 1)]
    order = 1 if along_columns else -1
    return _gluon().SharedLinearLayout([list(bit[::order]) for bit in bits])


@cache
def sums_by_parties() -> Launcher:
    """Sums of rows of float32, as many as ROWS says, by three parties of warps at the same time."""
    constants = [ROWS, LENGTH, _PARTIES, tuple(_flat(warps) for warps in _PARTIES)]
    return Launcher(Specialised((_FILE, "sums_by_parties"), _CHIP, ["*fp32"] * 2, constants))


@cache
def transposed_between_blocks() -> Launcher:
    """A square of float32; a block reads half of the rows, and writes half of the columns."""
    gl = _gluon()
    by_rows = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0], cga_layout=[[1, 0]])
    by_columns = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1], cga_layout=[[0, 1]])
    constants = [EXCHANGED, by_rows, by_columns]
    source = (_FILE, "transposed_between_blocks")
    return Launcher(Specialised(source, _CHIP, ["*fp32"] * 2, constants, blocks=2))
