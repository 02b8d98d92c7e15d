"""Encoding of tensor maps, which TMA reads.

Encoded maps are cached by map and address.  The address alone would not be enough, because a later
tensor at the same address may need another map.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from cupyconv.gpu import bindings
from cupyconv.launch import TensorMap, TensorMaps, TiledMap

MAP_BYTES = 128
"""Bytes of an encoded tensor map (a rule of CUDA)."""

SWIZZLE = 128
"""Span in bytes of the shared-memory swizzle of all maps (chosen, the widest span of TMA)."""


Encode = Callable[[TensorMap, int], bytes]
"""Function that encodes a tensor map for a device address and returns its MAP_BYTES bytes."""


@lru_cache(maxsize=4096)
def encoded(maps: TensorMaps, addresses: tuple[int, ...], encode: Encode) -> np.ndarray:
    """Return the encoded maps for arrays at these addresses, as a NumPy array with one struct."""
    tensors = zip(maps.maps, addresses, strict=True)
    parts = [encode(one, address + one.offset) for one, address in tensors]
    return np.frombuffer(b"".join(parts), np.dtype([("maps", "u8", len(parts) * MAP_BYTES // 8)]))


def encode(one: TensorMap, address: int) -> bytes:
    """Return a tensor map, encoded for an address by the driver.

    Raises:
        RuntimeError: the driver rejects a map that the planner accepted.
    """
    driver = bindings.driver()
    uint32, uint64 = driver.cuuint32_t, driver.cuuint64_t
    kinds = driver.CUtensorMapDataType
    kind = {
        2: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,  # for float16 too: TMA only moves the bits
        4: kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,  # TMA rounds float32 to TF32
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
        status, tensor_map = driver.cuTensorMapEncodeTiled(
            *tensor, [uint32(size) for size in one.box], steps, *layout
        )
    else:
        steps = [uint32(step) for step in (1, *one.element_strides, 1)]
        status, tensor_map = driver.cuTensorMapEncodeIm2col(
            *tensor, list(one.lower), list(one.upper), one.channels, one.pixels, steps, *layout
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refuses the tensor map {one} with {status}")
    return np.array([int(word) for word in tensor_map.opaque], np.uint64).tobytes()
