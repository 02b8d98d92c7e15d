"""Kernel launches as plain data: the kernels and the memory that they use.

Kernel families compute launches without a GPU; ``gpu.runtime`` loads the kernels and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Element types in cuda/include/numeric.cuh.
STORAGE = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex64_t",
    "complex128": "complex128_t",
}
ROLES = ("x", "w", "y", "bias", "add", "workspace")
"""Names of the arrays of launches.  A gradient has the name of its tensor: dx is "x"."""


@dataclass(frozen=True)
class TiledMap:
    """Tensor map for boxes of a tensor; its first dimension is the innermost and contiguous.

    Attributes:
        role: name of the tensor, as in a Launch's arguments.
        itemsize: bytes per element.
        extents: elements along each dimension.
        strides: bytes per step along each dimension except the first.
        box: elements of a box along each dimension.
        offset: bytes from the beginning of the role's array to the tensor.
    """

    role: str
    itemsize: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Im2colMap:
    """Tensor map for columns of pixels of a channels-last tensor.

    The dimensions, from the innermost, are C, W, (H, (D,)) N.

    Attributes:
        role, itemsize, extents, strides, offset: as in TiledMap.
        lower, upper: corners of the box of base pixels, W first; ``upper`` is relative to the
            tensor's last pixel.
        element_strides: steps between base pixels, W first.
        channels: channels per pixel.
        pixels: pixels per column.
    """

    role: str
    itemsize: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    element_strides: tuple[int, ...]
    channels: int
    pixels: int
    offset: int


TensorMap = TiledMap | Im2colMap


@dataclass(frozen=True, eq=False)
class TensorMaps:
    """Tensor maps that a kernel takes as one struct by value.

    Instances are compared by identity, because the cache of encoded maps hashes them in every call:
    hashing the maps themselves would take a third of a call's time.
    """

    maps: tuple[TensorMap, ...]


@dataclass(frozen=True)
class Part:
    """Part of the array of a role, from ``offset`` (in bytes) to the end of the array."""

    role: str
    offset: int


@dataclass(frozen=True)
class Launch:
    """A kernel launch, complete except for addresses.

    Attributes:
        source: kernel file in cuda/.
        entry: name of the kernel.
        defines: macros of the variant.
        grid, block: launch dimensions; an empty grid launches nothing.
        shared_bytes: dynamic shared memory per block.
        arguments: the kernel's arguments in order.  A str is the role of an array, and a Part is a
            part of the array of a role.  TensorMaps are encoded for the arrays of their roles.
            All other values are passed unchanged.
        may_overlap: whether the kernel may begin before earlier launches have ended.  Such a kernel
            waits for their results itself (griddepcontrol.wait, from compute capability 9.0 on).
    """

    source: str
    entry: str
    defines: tuple[tuple[str, str | int], ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    arguments: tuple[Any, ...]
    may_overlap: bool = False


@dataclass(frozen=True)
class FilterForm:
    """Copy of w that a pass reads instead of w.

    Attributes:
        name: name of the memory order; passes with equal names read the same copy.
        bytes: size of the copy.
        launch: launch that copies w to the beginning of the workspace.
    """

    name: str
    bytes: int
    launch: Launch
