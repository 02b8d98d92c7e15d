"""Kernel launches as plain data: kernel, grid, block, shared memory and arguments.

Kernel families compute launches without a GPU; ``gpu.runtime`` loads the kernels and runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Element types in cuda/include/numeric.cuh, keyed by dtype.
STORAGE = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex64_t",
    "complex128": "complex128_t",
}
ROLES = ("x", "w", "y", "bias", "add", "workspace")
"""Roles of the arrays that launches use.  A gradient has the role of its tensor: dx is "x"."""


def operand_names(roles: Sequence[str]) -> str:
    """Return the operands as text for a plan, such as "dy and w"."""
    return " and ".join("dy" if role == "y" else role for role in roles)


@dataclass(frozen=True)
class TiledMap:
    """Tensor map that lets the TMA unit copy boxes of a tensor.

    The dimensions begin with the innermost, which is contiguous.

    Attributes:
        role: role of the tensor's array, one of ROLES.
        itemsize: bytes per element.
        extents: elements along each dimension.
        strides: bytes per step along each dimension except the first.
        box: elements of a box along each dimension.
        offset: bytes from the beginning of the array to the tensor.
    """

    role: str
    itemsize: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Im2colMap:
    """Tensor map of a channels-last tensor, for TMA's im2col mode, which copies pixels under a tap.

    The dimensions, from the innermost, are C, W, [H, [D,]] N.

    Attributes:
        role, itemsize, extents, strides, offset: as in TiledMap.
        lower, upper: first and last corner of the box of base pixels, W first.  ``lower`` is
            relative to the tensor's first pixel, and ``upper`` to its last pixel.
        element_strides: steps between base pixels, W first.
        channels: channels that a copy loads per pixel.
        pixels: pixels that a copy loads.
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

    Instances are compared and hashed by identity.  The cache of encoded maps hashes an instance in
    every call, and hashing all fields of the maps would take a third of a call's time.
    """

    maps: tuple[TensorMap, ...]


@dataclass(frozen=True)
class Part:
    """Part of the array of a role, from ``offset`` (in bytes) to the end of the array."""

    role: str
    offset: int


@dataclass(frozen=True)
class Launch:
    """A kernel launch, complete except for the arrays' addresses.

    Attributes:
        source: name of the kernel's file in cuda/.
        entry: name of the kernel.
        defines: names and values of the macros with which the file is compiled.
        grid, block: launch dimensions; a grid with a dimension of 0 launches nothing.
        shared_bytes: bytes of dynamic shared memory per block.
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
        name: name of the memory order, such as "OHWI"; passes with equal names read the same copy.
        bytes: size of the copy in bytes.
        launch: launch that copies w to the beginning of the workspace.
    """

    name: str
    bytes: int
    launch: Launch
