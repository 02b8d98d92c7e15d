"""CUTLASS's kernels for compute capability 9.0 and their launches.

CUTLASS's own host code builds the parameters; the emulator encodes their tensor maps.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from .. import driver, tensormap
from ..module import EmulatedKernel, EmulatedModule, Outcome
from . import assembled, compiled, host_library, resources_of, well_aligned

PASSES = {"forward": "kFprop", "backprop_input": "kDgrad", "backprop_filter": "kWgrad"}
_ELEMENTS = {
    "float16": "cutlass::half_t",
    "bfloat16": "cutlass::bfloat16_t",
    "float32": "float",  # multiplied as TF32
}
_MOST_PARAMETER_BYTES = 4096
_PARAMETER_ALIGNMENT = 64

_INT, _UNSIGNED = ctypes.c_int, ctypes.c_uint
_POINTER = ctypes.c_void_p
_LONGS = ctypes.POINTER(ctypes.c_uint64)
_WORDS = ctypes.POINTER(ctypes.c_uint32)
_NUMBERS = ctypes.POINTER(ctypes.c_int)
_ENCODE_TILED = ctypes.CFUNCTYPE(
    _INT, _POINTER, _INT, _UNSIGNED, _POINTER, _LONGS, _LONGS, _WORDS, _WORDS, _INT
)
_ENCODE_IM2COL = ctypes.CFUNCTYPE(
    _INT, _POINTER, _INT, _UNSIGNED, _POINTER, _LONGS, _LONGS, _NUMBERS, _NUMBERS, _UNSIGNED,
    _UNSIGNED, _WORDS, _INT,
)  # fmt: skip


def convolution(
    pass_: str,
    rank: int = 2,
    dtype: str = "float16",
    cluster: tuple[int, int] = (2, 1),
    counted: bool = False,
) -> Instance:
    """Return a convolution pass, channels last and KRSC; tiles of 128 x 128 by 128 bytes.

    The instance's sizes are those of x and the filter, then padding, stride and dilation.

    Args:
        pass_: one of PASSES.
        rank: number of spatial axes.
        dtype: float32 is multiplied as TF32.
        cluster: blocks along the result's rows and columns.
        counted: add counters of executed instructions and the resources of the cubin.

    Raises:
        MissingError: the packages are not installed.
    """
    defines = {
        "PASS": PASSES[pass_],
        "RANK": rank,
        "ELEMENT": _ELEMENTS[dtype],
        "CLUSTER_M": f"cute::_{cluster[0]}",
        "CLUSTER_N": f"cute::_{cluster[1]}",
    }
    return _instance("cutlass_conv_sm90", defines, cluster, counted)


def gemm(
    dtype: str,
    layouts: str,
    tile: tuple[int, int, int],
    cluster: tuple[int, int],
    cooperative: bool = False,
    dependent: bool = False,
) -> Instance:
    """Return a matrix product; its sizes are m, n and k.

    Args:
        dtype: float32 is multiplied as TF32.
        layouts: of a, b and c: "T" row-major, "N" column-major; with "TNT", a and b are contiguous
            along k.
        tile: extents along m, n and k.
        cluster: blocks along m and n.
        cooperative: whether two warpgroups share a tile.
        dependent: whether a launch may begin before the previous launch has ended, and releases
            the next launch.

    Raises:
        MissingError: the packages are not installed.
    """
    rows = {"T": "RowMajor", "N": "ColumnMajor"}
    defines = {
        "ELEMENT": _ELEMENTS[dtype],
        "A_LAYOUT": rows[layouts[0]],
        "B_LAYOUT": rows[layouts[1]],
        "C_LAYOUT": rows[layouts[2]],
        **{f"TILE_{axis}": size for axis, size in zip("MNK", tile, strict=True)},
        **{f"CLUSTER_{axis}": size for axis, size in zip("MN", cluster, strict=True)},
        "COOPERATIVE": int(cooperative),
        **({"CUTLASS_ENABLE_GDC_FOR_SM90": 1} if dependent else {}),
    }
    return _instance("cutlass_gemm_sm90", defines, cluster, False)


def _instance(
    name: str, defines: Mapping[str, object], cluster: tuple[int, int], counted: bool
) -> Instance:
    macros = tuple((macro, str(value)) for macro, value in defines.items())
    return Instance(name, macros, (*cluster, 1), counted)


class Instance:
    """A kernel, with the host code that builds its parameters."""

    def __init__(
        self,
        name: str,
        defines: tuple[tuple[str, str], ...],
        cluster: tuple[int, int, int],
        counted: bool,
    ) -> None:
        self._host = host_library(name, "sm_90a", defines)
        self.kernel = _kernel(name, defines, cluster, counted)

    def run(
        self,
        sizes: Sequence[int],
        a: np.ndarray,
        b: np.ndarray,
        result: np.ndarray,
        may_overlap: bool = False,
    ) -> Outcome:
        """Launch the kernel.

        Args:
            sizes: as the instance defines them.
            a, b, result: arrays of ``memory``: operands in the order of the pass, and the result.
            may_overlap: whether the launch may begin before the previous launch has ended.
        """
        grid, threads, shared, value = self.launch(sizes, a, b, result)
        self.kernel.may_overlap = may_overlap
        return self.kernel(grid, (threads,), (value,), shared_mem=shared)

    def launch(
        self, sizes: Sequence[int], a: np.ndarray, b: np.ndarray, result: np.ndarray
    ) -> tuple[tuple[int, ...], int, int, np.ndarray]:
        """Return grid, threads per block, bytes of shared memory and the kernel's argument."""
        problems: list[Exception] = []

        def encoder(encode: Callable[..., bytes]) -> Callable[..., int]:
            def guarded(target: int, *arguments: object) -> int:
                try:
                    ctypes.memmove(target, encode(*arguments), tensormap.MAP_BYTES)
                except (
                    ValueError,
                    KeyError,
                ) as error:  # exceptions cannot pass through CUTLASS's code
                    problems.append(error)
                    return 1
                return 0

            return guarded

        tiled, im2col = _ENCODE_TILED(encoder(_tiled)), _ENCODE_IM2COL(encoder(_im2col))
        parameters = _aligned(_MOST_PARAMETER_BYTES)
        launch = (_INT * 6)()
        self._host.make_parameters(
            tiled,
            im2col,
            _POINTER(parameters.ctypes.data),
            launch,
            (_INT * len(sizes))(*sizes),
            *(_POINTER(array.ctypes.data) for array in (a, b, result)),
        )
        if problems:
            raise problems[0]
        size, shared, *grid, threads = launch
        value = np.frombuffer(parameters[:size].tobytes(), np.dtype([("bytes", "u1", size)]))
        self.kernel.max_dynamic_shared_size_bytes = shared
        return tuple(grid), threads, shared, value


@cache
def _kernel(
    name: str, defines: tuple[tuple[str, str], ...], cluster: tuple[int, int, int], counted: bool
) -> EmulatedKernel:
    return kernel_of(well_aligned(compiled(name, "sm_90a", defines)), name, cluster, counted)


def kernel_of(
    text: str, name: str, cluster: tuple[int, int, int], counted: bool = False
) -> EmulatedKernel:
    """Return the kernel of a PTX text by CUTLASS."""
    resources = resources_of(text, "sm_90a") if counted else {}
    module = EmulatedModule.from_ptx(
        text,
        name,
        cluster=cluster,
        chip=driver.chip_of("sm_90a"),
        # The launch defines the cluster, the cubin does not.
        resources={
            entry: replace(cubin_resources, cluster=cluster)
            for entry, cubin_resources in resources.items()
        }
        or None,
        cubin=assembled(text, "sm_90a")[0] if counted else None,
    )
    (entry,) = re.findall(r"\.entry (\w*device_kernel\w*)", text)
    return module.get_function(entry)


def _tiled(type_, rank, address, extents, strides, box, steps, swizzle) -> bytes:
    return tensormap.encode_tiled(
        address or 0,
        tensormap.ELEMENT_BYTES[type_],
        extents[:rank],
        strides[: rank - 1],
        box[:rank],
        steps[:rank],
        tensormap.SWIZZLES[swizzle],
        nested=False,
        to_tf32=type_ == tensormap.TF32,
    ).tobytes()


def _im2col(
    type_, rank, address, extents, strides, lower, upper, channels, pixels, steps, swizzle
) -> bytes:
    return tensormap.encode_im2col(
        address or 0,
        tensormap.ELEMENT_BYTES[type_],
        extents[:rank],
        strides[: rank - 1],
        lower[: rank - 2],
        upper[: rank - 2],
        channels,
        pixels,
        steps[:rank],
        tensormap.SWIZZLES[swizzle],
        nested=False,
        to_tf32=type_ == tensormap.TF32,
    ).tobytes()


def _aligned(size: int) -> np.ndarray:
    """Return zeroed bytes aligned for a tensor map."""
    whole = np.zeros(size + _PARAMETER_ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _PARAMETER_ALIGNMENT
    return whole[start : start + size]
