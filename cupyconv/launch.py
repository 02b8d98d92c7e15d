"""Kernel launches as plain data: what runs, and on which memory.

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
ROLES = ("x", "w", "y", "bias", "workspace")
"""Names of the arrays that launches take; in backprop_input x is dx, and so on."""


@dataclass(frozen=True)
class TiledMap:
    """Boxes of a tensor; dimensions are counted from the innermost, which is contiguous.

    Attributes:
        role: name of the tensor, as in a Launch's arguments.
        itemsize: bytes per element.
        extents: elements along each dimension.
        strides: bytes per step along each dimension but the first.
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
    """Columns of pixels of a channels-last tensor: dimensions C, W, (H, (D,)) N.

    Attributes:
        role, itemsize, extents, strides, offset: as in TiledMap.
        lower, upper: corners of the box of base pixels, W first; ``upper`` is counted from the
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

    Compared by identity: every launch has its own, and hashing all maps at each lookup of their
    encoded form would take a third of a call's time.
    """

    maps: tuple[TensorMap, ...]


@dataclass(frozen=True)
class Part:
    """The memory of a role's array from an offset in bytes."""

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
        arguments: the kernel's arguments in order; a str is one of ROLES, a Part is part of such an
            array, TensorMaps are encoded for the arrays of their roles, all else is passed by
            value.
        may_overlap: whether the kernel may begin before earlier launches have ended; it then waits
            for their results (griddepcontrol.wait, from compute capability 9.0 on).
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
    """A copy of w that a pass reads instead of w.

    Attributes:
        name: name of the layout; passes with equal names read the same copy.
        bytes: size of the copy.
        launch: launch that copies w to the beginning of the workspace.
    """

    name: str
    bytes: int
    launch: Launch
