"""Matrix products compiled by Triton, and their launches.

Triton decides memory layouts, register layouts and synchronization; it shares no code with CUTLASS.
It compiles for a chip that need not be present.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from .. import driver, tensormap
from ..build import cache_directory
from ..module import EmulatedModule, Outcome
from . import MissingError, well_aligned

_POINTEES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_ALIGNED = [["tt.divisibility", 16]]  # also used for sizes
WARPS = 4


@dataclass(frozen=True)
class Product:
    """A matrix product c = a b, row-major.

    Attributes:
        chip: architecture, such as "sm_90a".
        dtype: dtype of all three matrices; float32 is multiplied as TF32.
        is_transposed: whether b is column-major.
        tile: extents of a block's tile along m, n and k.
        size: m, n and k.
        by_descriptor: whether TMA loads and stores the matrices.
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


CHAINS = {
    "8.0 f16 chain": (64, 16, 16, 16, False),
    "8.0 f16 narrow chain": (64, 16, 16, 8, False),
    "8.0 f16 narrow chain transposed": (64, 16, 16, 8, True),
}
"""Sizes of (a b) v: rows of a, b and v, columns of v, and whether v is column-major.  The product
a b stays in registers.  In a narrow chain, a warp loads two matrices of v at once."""

THREEFOLD_SIZE = (64, 32, 32)
"""m, n and k of the product with float32 accuracy."""


@dataclass(frozen=True)
class Specialised:
    """A Triton kernel with its compilation parameters.

    Attributes:
        source: module of this folder, and name of the function.
        chip: architecture, such as "sm_90a".
        types: types of its arguments in Triton's notation.
        constants: the arguments after these.
        aligned: indices of the arguments that are multiples of 16.
        blocks: blocks per cluster.
    """

    source: tuple[str, str]
    chip: str
    types: Sequence[str]
    constants: Sequence[Any]
    aligned: Sequence[int] = ()
    blocks: int = 1

    def compiled(self) -> Any:
        """Compile the kernel with Triton.

        Raises:
            MissingError: Triton is not installed.
        """
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))
        try:
            import triton
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource
            from triton.experimental.gluon._runtime import GluonASTSource
        except ImportError as error:
            raise MissingError.of(error.name) from None
        file, name = self.source
        function = getattr(import_module(f".{file}", __package__), name)
        types = [*self.types, *["constexpr"] * len(self.constants)]
        source = (GluonASTSource if file.startswith("gluon") else ASTSource)(
            function,
            dict(zip(function.arg_names, types, strict=True)),
            {(len(self.types) + index,): value for index, value in enumerate(self.constants)},
            {(index,): _ALIGNED for index in self.aligned},
        )
        options = {"num_warps": WARPS, "num_ctas": self.blocks, "num_stages": 3}
        return triton.compile(
            source,
            target=GPUTarget("cuda", int(re.sub(r"\D", "", self.chip)), 32),
            options={**options, "enable_fp_fusion": True},
        )


class Launcher:
    """A Triton kernel that can be launched."""

    def __init__(self, specialised: Specialised) -> None:
        """Raises MissingError: Triton is not installed."""
        compiled = specialised.compiled()
        text, chip = well_aligned(compiled.asm["ptx"]), driver.chip_of(specialised.chip)
        module = EmulatedModule.from_ptx(text, "triton", chip=chip)
        self.kernel = module.get_function(compiled.metadata.name)
        self.kernel.allow(compiled.metadata.shared)
        self._metadata, self._blocks = compiled.metadata, specialised.blocks

    def __call__(self, *arguments: Any, grid: tuple[int, ...] = (1,)) -> Outcome:
        """Run clusters of the grid on arrays of ``memory``."""
        first, *rest = grid
        return self.kernel(
            (first * self._blocks, *rest),
            (32 * self._metadata.num_warps,),
            [*arguments, None, None],  # no scratch memory
            self._metadata.shared,
        )

    def described(self, array: np.ndarray, number: int = 0, to_tf32: bool = False) -> list[Any]:
        """Return a tensor as Triton's launcher passes it: map, extents and strides.

        Args:
            array: an array of ``memory``.
            number: index of the kernel's descriptor.
            to_tf32: whether to load it as TF32 (Triton's ``round_f32_to_tf32``).
        """
        meta = self._metadata.tensordesc_meta[number]
        encoded = tensormap.encode_tiled(
            array.ctypes.data,
            array.itemsize,
            array.shape[::-1],
            array.strides[-2::-1],
            meta["block_size"][::-1],
            swizzle=tensormap.SWIZZLES[meta["swizzle"]],
            to_tf32=to_tf32,
        )
        return [encoded, *extents_and_strides(array)]


def extents_and_strides(array: np.ndarray) -> list[Any]:
    """Return the arguments that follow a tensor's map."""
    strides = [np.uint64(stride // array.itemsize) for stride in array.strides]
    return [*map(np.int32, array.shape), *strides]


@cache
def product(name: str) -> Launcher:
    """Return one of PRODUCTS; raises as ``Launcher``."""
    spec = PRODUCTS[name]
    pointee, (m, n, k) = _POINTEES[spec.dtype], spec.tile
    if spec.by_descriptor:
        types = [f"tensordesc<{pointee}[{i}, {j}]>" for i, j in ((m, k), (k, n), (m, n))] + ["i32"]
        source = ("triton_source", "product_by_descriptor")
        return Launcher(Specialised(source, spec.chip, types, spec.tile, (3,)))
    types, constants = [f"*{pointee}"] * 3 + ["i32"] * 3, (*spec.tile, spec.is_transposed)
    source = ("triton_source", "product")
    return Launcher(Specialised(source, spec.chip, types, constants, range(6)))


def run_product(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Outcome:
    """Run one of PRODUCTS on arrays of ``memory``."""
    spec, launcher = PRODUCTS[name], product(name)
    m, n, k = spec.size
    arguments: list[Any] = [a, b, c, np.int32(m), np.int32(n), np.int32(k)]
    if spec.by_descriptor:
        descriptors = (launcher.described(array, number) for number, array in enumerate((a, b, c)))
        arguments = [part for descriptor in descriptors for part in descriptor] + [np.int32(k)]
    return launcher(*arguments, grid=(-(-m // spec.tile[0]), -(-n // spec.tile[1])))


@cache
def chain(name: str) -> Launcher:
    """Return one of CHAINS; raises as ``Launcher``."""
    source = ("triton_source", "chain")
    return Launcher(Specialised(source, "sm_80", ["*fp16"] * 5, CHAINS[name], range(5)))


@cache
def threefold() -> Launcher:
    """Return a float32 product computed as three TF32 products; raises as ``Launcher``."""
    source = ("triton_source", "threefold_product")
    return Launcher(Specialised(source, "sm_80", ["*fp32"] * 3, THREEFOLD_SIZE, range(3)))
