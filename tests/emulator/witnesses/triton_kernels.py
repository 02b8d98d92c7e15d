"""Matrix products that Triton's compiler makes, as they are launched here.

What lies where in shared memory and in registers, and what is waited for, is Triton's doing: it
shares no code with CUTLASS.  Triton compiles for a chip that is not there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .. import driver, tensormap
from ..build import cache_directory
from ..module import EmulatedKernel, EmulatedModule, Outcome
from . import MissingError, well_aligned

_POINTEES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_ALIGNED = [["tt.divisibility", 16]]  # sizes too
WARPS = 4


@dataclass(frozen=True)
class Product:
    """One product of matrices, c = a b, row by row.

    Attributes:
        chip: such as "sm_90a".
        dtype: of all three; float32 is multiplied as TF32.
        is_transposed: b lies column by column.
        tile: of a block, along m, n and k.
        size: m, n and k.
        by_descriptor: loaded and stored by TMA.
    """

    chip: str
    dtype: str
    is_transposed: bool
    tile: tuple[int, int, int]
    size: tuple[int, int, int]
    by_descriptor: bool = False


PRODUCTS = {
    "8.0 f16": Product("sm_80", "float16", False, (64, 64, 32), (80, 144, 80)),
    "8.0 bf16 transposed": Product("sm_80", "bfloat16", True, (64, 32, 32), (64, 48, 96)),
    "8.0 tf32": Product("sm_80", "float32", True, (64, 64, 32), (64, 64, 80)),
    "9.0 f16": Product("sm_90a", "float16", False, (64, 64, 32), (80, 144, 80)),
    "9.0 f16 transposed": Product("sm_90a", "float16", True, (64, 128, 64), (144, 128, 144)),
    "9.0 bf16": Product("sm_90a", "bfloat16", False, (128, 256, 64), (128, 256, 128)),
    "9.0 f16 short lines": Product("sm_90a", "float16", True, (64, 16, 16), (64, 32, 48)),
    "9.0 tf32": Product("sm_90a", "float32", True, (64, 64, 32), (64, 64, 80)),
    "9.0 f16 by TMA": Product("sm_90a", "float16", False, (64, 64, 64), (80, 144, 208), True),
    "9.0 bf16 by TMA": Product("sm_90a", "bfloat16", False, (128, 32, 32), (144, 48, 80), True),
}


@cache
def _compiled(product: Product) -> Any:
    """What Triton makes of it."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise MissingError(
            f"{error.name} is missing: pip install 'cupyconv[test,witnesses]'"
        ) from None
    from . import triton_source

    pointee, (m, n, k) = _POINTEES[product.dtype], product.tile
    if product.by_descriptor:
        function = triton_source.product_by_descriptor
        types = [f"tensordesc<{pointee}[{i}, {j}]>" for i, j in ((m, k), (k, n), (m, n))] + ["i32"]
        chosen = product.tile
        aligned = range(3, 4)
    else:
        function = triton_source.product
        types = [f"*{pointee}"] * 3 + ["i32"] * 3
        chosen = (*product.tile, product.is_transposed)
        aligned = range(6)
    signature = dict(zip(function.arg_names, types + ["constexpr"] * len(chosen), strict=True))
    source = ASTSource(
        function,
        signature,
        {(len(types) + place,): value for place, value in enumerate(chosen)},
        {(place,): _ALIGNED for place in aligned},
    )
    capability = int(re.sub(r"\D", "", product.chip))
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "num_stages": 3, "enable_fp_fusion": True},
    )


@cache
def kernel(product: Product) -> EmulatedKernel:
    """The kernel of a product.

    Raises:
        MissingError: Triton is not installed.
    """
    made = _compiled(product)
    text = well_aligned(made.asm["ptx"])
    module = EmulatedModule.from_ptx(text, "triton", chip=driver.chip_of(product.chip))
    found = module.get_function(made.metadata.name)
    found.allow(made.metadata.shared)
    return found


def run(product: Product, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Outcome:
    """Launches it on arrays of ``memory``; sizes are those of the product."""
    m, n, k = product.size
    metadata = _compiled(product).metadata
    arguments: list[Any] = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    if product.by_descriptor:
        described = zip((a, b, c), metadata.tensordesc_meta, strict=True)
        arguments = [one for array, meta in described for one in _described(array, meta)]
        arguments.append(np.int32(k))
    arguments += [None, None]  # memory of a kernel that asks for it
    grid = (-(-m // product.tile[0]), -(-n // product.tile[1]))
    return kernel(product)(grid, (32 * WARPS,), arguments, metadata.shared)


def _described(array: np.ndarray, meta: dict[str, Any]) -> list[Any]:
    """A matrix as Triton's launcher passes it: its map, its extents and its strides."""
    rows, columns = array.shape
    encoded = tensormap.encode_tiled(
        array.ctypes.data,
        array.itemsize,
        (columns, rows),
        (columns * array.itemsize,),
        meta["block_size"][::-1],
        swizzle=tensormap.SWIZZLES[meta["swizzle"]],
    )
    extents = [np.int32(rows), np.int32(columns)]
    return [encoded, *extents, np.uint64(columns), np.uint64(1)]
