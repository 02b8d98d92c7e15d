"""Tensor maps: what TMA has to know of a tensor, apart from its address until a launch.

A map belongs to an address and a shape.  Encoded ones are kept under all that they were made from,
so that another tensor at a reused address gets a map of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyconv.gpu import bindings

MAP_BYTES = 128
SWIZZLE = 128
"""Bytes of the shared-memory swizzle of all our maps."""


@dataclass(frozen=True)
class TiledMap:
    """Boxes of a tensor; dimensions are counted from the innermost, which is contiguous.

    Attributes:
        role: of the tensor, as in a Launch's arguments.
        itemsize: bytes of an element.
        extents: elements of each dimension.
        strides: bytes from one to the next along each dimension but the first.
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
        role, itemsize, extents, strides, offset: as of TiledMap.
        lower, upper: corners of the box of base pixels, W first; ``upper`` is counted from the
            tensor's last pixel.
        element_strides: steps of the walk, W first.
        channels: of each pixel.
        pixels: of a column.
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
    """Maps that a kernel takes together, as one struct by value.

    Told apart by identity: every launch has its own, and hashing all the maps whenever their
    encoded form is looked up would take a third of a call's time.
    """

    maps: tuple[TensorMap, ...]


Encode = Callable[[TensorMap, int], bytes]
"""Makes the 128 bytes of a map for an address."""


@lru_cache(maxsize=4096)
def encoded(maps: TensorMaps, addresses: tuple[int, ...], encode: Encode) -> np.ndarray:
    """The struct of maps for arrays at these addresses: one structured element of NumPy."""
    tensors = zip(maps.maps, addresses, strict=True)
    parts = [encode(one, address + one.offset) for one, address in tensors]
    return np.frombuffer(b"".join(parts), np.dtype([("maps", "u8", len(parts) * MAP_BYTES // 8)]))


def encode(one: TensorMap, address: int) -> bytes:
    """The driver's encoding of a map.

    Raises:
        RuntimeError: the driver refuses the map, which the planner should have foreseen.
    """
    driver = bindings.driver()
    uint32, uint64 = driver.cuuint32_t, driver.cuuint64_t
    kinds = driver.CUtensorMapDataType
    kind = {
        2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,  # moved, not computed with: float16 as well
        4: kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,  # rounded to TF32 on the way
    }[one.itemsize]
    tensor = (
        kind,
        len(one.extents),
        address,
        [uint64(extent) for extent in one.extents],
        [uint64(stride) for stride in one.strides],
    )
    layout = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLE}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if isinstance(one, TiledMap):
        steps = [uint32(1)] * len(one.extents)
        status, made = driver.cuTensorMapEncodeTiled(
            *tensor, [uint32(size) for size in one.box], steps, *layout
        )
    else:
        steps = [uint32(step) for step in (1, *one.element_strides, 1)]
        status, made = driver.cuTensorMapEncodeIm2col(
            *tensor, list(one.lower), list(one.upper), one.channels, one.pixels, steps, *layout
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refuses the tensor map {one} with {status}")
    return np.array([int(word) for word in made.opaque], np.uint64).tobytes()
