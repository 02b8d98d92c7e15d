"""Stands in for the driver's tensor map encoders; the twin's TMA reads what this writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cupyconv.gpu import tensormaps

MAP_BYTES = 128
_MAGIC = 0x70616D5F726F736E
_MAX_RANK = 5
SWIZZLES = (0, 32, 64, 128)

# host/tensor_map.h declares the same fields.
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

# Per rank of an im2col map: the range of the corners of the bounding box.
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
    """A map for tiled loads and stores, as cuTensorMapEncodeTiled makes one.

    Args:
        address: Of element 0; a multiple of 16.
        element_size: Bytes: 1, 2, 4 or 8.
        extents: Elements, innermost dimension first; rank 1 to 5.
        strides: Bytes, of dimensions 1 and up; multiples of 16.
        box: Elements of one copy, per dimension; 1 to 256.
        element_strides: Steps of the box per dimension, 1 to 8.
        swizzle: Span in bytes: 0, 32, 64 or 128; the box's inner dimension fills it.
        nested: Hold the strides to the documentation, which builds each from the one before.
            CUTLASS's kernels do not keep to that, and give a dimension of one element a stride of
            0, so the driver does not insist on it.
        to_tf32: Round float32 to TF32 when it is loaded: a map of type TFLOAT32.

    Returns:
        An array of shape (1,) with 128 structured bytes, passed to a kernel by value.

    Raises:
        ValueError: What the driver would refuse (as far as it is documented).
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
    """A map for im2col loads of an N(D)(H)WC tensor, as cuTensorMapEncodeIm2col makes one.

    Args:
        extents: C, W, (H, (D,)) N; rank 3 to 5.
        lower, upper: Corners of the bounding box of base pixels, W first: a base pixel lies in
            [lower, extent - 1 + upper].
        channels_per_pixel: Up to 256.
        pixels_per_column: Up to 1024.
        address, element_size, strides, element_strides, swizzle, nested, to_tf32: As in
            ``encode_tiled``.

    Returns:
        As ``encode_tiled``.

    Raises:
        ValueError: What the driver would refuse (as far as it is documented).
    """
    rank = len(extents)
    steps = list(element_strides or [1] * rank)
    _check_common(address, element_size, extents, strides, steps, swizzle, nested)
    _require(rank in _CORNER_RANGE, f"an im2col map has rank 3 to 5: got {rank}")
    low, high = _CORNER_RANGE[rank]
    for name, corner in (("lower", lower), ("upper", upper)):
        fits = len(corner) == rank - 2 and all(low <= value <= high for value in corner)
        _require(fits, f"{name} has {rank - 2} corners in [{low}, {high}]: got {tuple(corner)}")
    # The driver allows others; what they do is not documented, so kernels do not use them.
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


def encode(one: tensormaps.TensorMap, address: int) -> bytes:
    """What ``cupyconv.gpu.tensormaps.encode`` has the driver make."""
    tensor = (address, one.itemsize, one.extents, one.strides)
    rules = {"swizzle": tensormaps.SWIZZLE, "to_tf32": one.itemsize == 4}
    if isinstance(one, tensormaps.TiledMap):
        return encode_tiled(*tensor, one.box, **rules).tobytes()
    return encode_im2col(
        *tensor,
        one.lower,
        one.upper,
        one.channels,
        one.pixels,
        (1, *one.element_strides, 1),
        **rules,
    ).tobytes()


def is_encoded(argument: object) -> bool:
    """Whether a kernel's argument is a tensor map, or several."""
    names = getattr(getattr(argument, "dtype", None), "names", None)
    return names in (("maps",), _RECORD.names)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_nested(element_size, extents, strides) -> None:
    # The documentation builds each stride from the one before, times the extent and any padding.
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
        # The driver allows less; how the rows then lie is not documented, so kernels do not use it.
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
