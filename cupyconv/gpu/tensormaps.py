"""Encoding of tensor maps, which TMA reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cupyconv.gpu import driver
from cupyconv.launch import TensorMap, TiledMap

MAP_BYTES = 128
"""Bytes of an encoded tensor map (a rule of CUDA)."""

MAP_ALIGNMENT = 64
"""Alignment in bytes of an encoded tensor map (a rule of CUDA)."""

SWIZZLE = 128
"""Span in bytes of the shared-memory swizzle of all maps (chosen, the widest span of TMA)."""

# Enumerators of cuda.h.
_KINDS = {
    2: 9,  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, for float16 too: TMA only moves the bits
    4: 11,  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: TMA rounds float32 to TF32
}
_LAYOUT = (
    0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
    3,  # CU_TENSOR_MAP_SWIZZLE_128B
    3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
)

Encoder = Callable[[int, int], None]
"""Function that encodes a tensor map for a device address, and writes it to a host address.

The host address is a multiple of MAP_ALIGNMENT.
"""

_POINTER, _INT, _UINT32, _UINT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64


def encoder(one: TensorMap) -> Encoder:
    """Return the function that encodes a tensor map by the driver.

    The function raises RuntimeError if the driver rejects a map that the planner accepted.
    """
    kinds = [_POINTER, _INT, _UINT32, _POINTER, _POINTER, _POINTER]
    head = _KINDS[one.itemsize], len(one.extents)
    sizes = _array(_UINT64, one.extents), _array(_UINT64, one.strides)
    box: tuple[Any, ...]
    if isinstance(one, TiledMap):
        name = "cuTensorMapEncodeTiled"
        kinds += [_POINTER, _POINTER]
        box = _array(_UINT32, one.box), _array(_UINT32, (1,) * len(one.extents))
    else:
        name = "cuTensorMapEncodeIm2col"
        kinds += [_POINTER, _POINTER, _UINT32, _UINT32, _POINTER]
        corners = _array(_INT, one.lower), _array(_INT, one.upper)
        box = *corners, one.channels, one.pixels, _array(_UINT32, (1, *one.element_strides, 1))
    function = driver.function(name, *kinds, *(_INT,) * len(_LAYOUT))
    tail = *sizes, *box, *_LAYOUT

    def encode(address: int, destination: int) -> None:
        if status := function(destination, *head, address, *tail):
            raise RuntimeError(f"the driver refuses the tensor map {one} with status {status}")

    return encode


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
