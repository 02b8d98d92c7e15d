"""Replacement of the driver's tensor map encoders; the emulated TMA reads its maps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cupyconv.gpu import tensormaps

MAP_BYTES = 128
_MAGIC = 0x70616D5F726F736E
_MAX_RANK = 5
SWIZZLES = (0, 32, 64, 128)
"""Spans in bytes, by the number of the driver's enumerator."""

ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4}
"""Element size in bytes, by CUtensorMapDataType."""

TF32 = 11
"""CU_TENSOR_MAP_DATA_TYPE_TFLOAT32."""

# The same fields as in host/tensor_map.h.
_RECORD = np.dtype(
    {
        "names": [
            "magic",
            "base",
            "stride",
            "extent",
            "box",
            "lower",
            "upper",
            "element_stride",
            "element_size",
            "rank",
            "swizzle",
            "im2col",
            "to_tf32",
        ],
        "formats": [
            "u8",
            "u8",
            ("u8", 4),
            ("u4", 5),
            ("u2", 5),
            ("i2", 3),
            ("i2", 3),
            ("u1", 5),
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
        ],
        "offsets": [0, 8, 16, 48, 68, 78, 84, 90, 95, 96, 97, 98, 99],
        "itemsize": MAP_BYTES,
    }
)

# Range of the corners of an im2col bounding box, by rank (hardware rule).
_CORNER_RANGE = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}


def encode_tiled(
    address: int,
    element_size: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    swizzle: int = 0,
    nested: bool = True,
    to_tf32: bool = False,
) -> np.ndarray:
    """Return a map for tiled loads and stores, like cuTensorMapEncodeTiled.

    Args:
        address: Address of element 0; a multiple of 16.
        element_size: Bytes: 1, 2, 4 or 8.
        extents: Elements, innermost dimension first; rank 1 to 5.
        strides: Bytes, of dimensions 1 and up; multiples of 16.
        box: Elements of one copy, per dimension; 1 to 256.
        element_strides: Steps of the box per dimension, 1 to 8.
        swizzle: Span in bytes: 0, 32, 64 or 128; the box's inner dimension fills it.
        nested: Apply the documented rule that each stride is a multiple of the previous one.
            The driver does not enforce it: CUTLASS's kernels break it, and use a stride of 0 for
            a dimension of one element.
        to_tf32: Round float32 to TF32 on loads: a map of type TFLOAT32.

    Returns:
        An array of shape (1,) with 128 structured bytes, passed to a kernel by value.

    Raises:
        ValueError: The driver's documented rules are violated.
    """
    rank = len(extents)
    steps = list(element_strides or [1] * rank)
    _check_common(address, element_size, extents, strides, steps, swizzle, nested)
    _require(len(box) == rank, f"the box has {len(box)} extents, the tensor {rank}")
    _require(all(1 <= size <= 256 for size in box), f"box extents are 1 to 256: got {tuple(box)}")
    _check_inner(box[0] * element_size, swizzle)
    return _pack(address, element_size, extents, strides, box, steps, swizzle, to_tf32)


def encode_im2col(
    address: int,
    element_size: int,
    extents: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels_per_pixel: int,
    pixels_per_column: int,
    element_strides: Sequence[int] | None = None,
    swizzle: int = 0,
    nested: bool = True,
    to_tf32: bool = False,
) -> np.ndarray:
    """Return a map for im2col loads of an N(D)(H)WC tensor, like cuTensorMapEncodeIm2col.

    Args:
        extents: C, W, (H, (D,)) N; rank 3 to 5.
        lower, upper: Corners of the bounding box of base pixels, W first: a base pixel is in
            [lower, extent - 1 + upper].
        channels_per_pixel: Up to 256.
        pixels_per_column: Up to 1024.
        address, element_size, strides, element_strides, swizzle, nested, to_tf32: As in
            ``encode_tiled``.

    Returns:
        As ``encode_tiled``.

    Raises:
        ValueError: The driver's documented rules are violated.
    """
    rank = len(extents)
    steps = list(element_strides or [1] * rank)
    _check_common(address, element_size, extents, strides, steps, swizzle, nested)
    _require(rank in _CORNER_RANGE, f"an im2col map has rank 3 to 5: got {rank}")
    low, high = _CORNER_RANGE[rank]
    for name, corner in (("lower", lower), ("upper", upper)):
        fits = len(corner) == rank - 2 and all(low <= value <= high for value in corner)
        _require(fits, f"{name} has {rank - 2} corners in [{low}, {high}]: got {tuple(corner)}")
    # The driver allows other steps, but their effect is not documented.
    _require(steps[0] == steps[-1] == 1, f"channels and images have steps of 1: got {steps}")
    _require(1 <= channels_per_pixel <= 256, f"channels per pixel: 1 to 256, {channels_per_pixel}")
    _require(1 <= pixels_per_column <= 1024, f"pixels per column: 1 to 1024, {pixels_per_column}")
    _check_inner(channels_per_pixel * element_size, swizzle)
    pixels = zip(extents[1:-1], lower, upper, strict=True)
    boxes = [extent + last - first for extent, first, last in pixels]
    _require(min(boxes) > 0, f"the bounding box has no pixels: {boxes} between its corners")
    box = (channels_per_pixel, pixels_per_column)
    record = _pack(address, element_size, extents, strides, box, steps, swizzle, to_tf32)
    record["lower"][0, : len(lower)] = lower
    record["upper"][0, : len(upper)] = upper
    record["im2col"] = True
    return record


def encoder(tensor_map: tensormaps.TensorMap) -> tensormaps.Encoder:
    """Return the function that encodes a map, like ``cupyconv.gpu.tensormaps.encoder``."""

    def write(address: int, destination: int) -> None:
        ctypes.memmove(destination, encode(tensor_map, address), MAP_BYTES)

    return write


def encode(tensor_map: tensormaps.TensorMap, address: int) -> bytes:
    """Return a map encoded for an address."""
    tensor = (address, tensor_map.itemsize, tensor_map.extents, tensor_map.strides)
    rules = {"swizzle": tensormaps.SWIZZLE, "to_tf32": tensor_map.itemsize == 4}
    if isinstance(tensor_map, tensormaps.TiledMap):
        return encode_tiled(*tensor, tensor_map.box, **rules).tobytes()
    return encode_im2col(
        *tensor,
        tensor_map.lower,
        tensor_map.upper,
        tensor_map.channels,
        tensor_map.pixels,
        (1, *tensor_map.element_strides, 1),
        **rules,
    ).tobytes()


def is_encoded(argument: object) -> bool:
    """Return whether a kernel's argument is one or more tensor maps."""
    names = getattr(getattr(argument, "dtype", None), "names", None)
    return names in (("maps",), _RECORD.names)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_nested(element_size, extents, strides) -> None:
    # Documented: each stride is the previous one times the extent, plus any padding.
    lengths = [element_size, *strides]
    for axis, (inner, stride) in enumerate(pairwise(lengths)):
        whole = axis == 0 or stride % inner == 0
        _require(
            whole and stride >= inner * extents[axis],
            f"stride {stride} of dimension {axis + 1} is no multiple of the one before, {inner}, "
            f"or steps over less than the {extents[axis]} elements there",
        )


def _check_common(address, element_size, extents, strides, steps, swizzle, nested) -> None:
    rank = len(extents)
    _require(1 <= rank <= _MAX_RANK, f"rank 1 to {_MAX_RANK}: got {rank}")
    _require(element_size in (1, 2, 4, 8), f"element size 1, 2, 4 or 8: got {element_size}")
    _require(address % 16 == 0, f"the address is a multiple of 16: got {address:#x}")
    _require(len(strides) == rank - 1, f"{rank - 1} strides for rank {rank}: got {len(strides)}")
    fits = all(stride % 16 == 0 and nested <= stride < 1 << 40 for stride in strides)
    _require(fits, f"strides are multiples of 16 below 2^40: got {tuple(strides)}")
    fits = all(0 < extent <= 1 << 32 for extent in extents)
    _require(fits, f"extents are 1 to 2^32: got {tuple(extents)}")
    fits = len(steps) == rank and all(1 <= step <= 8 for step in steps)
    _require(fits, f"element strides are {rank} numbers from 1 to 8: got {tuple(steps)}")
    _require(swizzle in SWIZZLES, f"swizzle is one of {SWIZZLES}: got {swizzle}")
    if nested:
        _check_nested(element_size, extents, strides)


def _check_inner(inner_bytes: int, swizzle: int) -> None:
    _require(inner_bytes % 16 == 0, f"the inner row is a multiple of 16 bytes: got {inner_bytes}")
    if swizzle:
        # The driver allows shorter rows, but their layout is not documented.
        _require(inner_bytes == swizzle, f"the inner row fills {swizzle} bytes: got {inner_bytes}")


def _pack(address, element_size, extents, strides, box, steps, swizzle, to_tf32):
    _require(element_size == 4 or not to_tf32, f"TF32 has 4 bytes: got {element_size}")
    record = np.zeros(1, _RECORD)
    record["magic"], record["base"] = _MAGIC, address
    record["stride"][0, : len(strides)] = strides
    record["extent"][0, : len(extents)] = [min(extent, (1 << 32) - 1) for extent in extents]
    record["box"][0, : len(box)] = box
    record["element_stride"][0, : len(steps)] = steps
    record["element_size"], record["rank"] = element_size, len(extents)
    record["swizzle"], record["to_tf32"] = swizzle, to_tf32
    return record
