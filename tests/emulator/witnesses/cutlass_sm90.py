"""CUTLASS's convolution for compute capability 9.0 as it is launched here.

Its parameters are made by CUTLASS's own host code, whose tensor maps the emulator encodes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from tests.cubins import Resources

from .. import driver, tensormap
from ..module import EmulatedKernel, EmulatedModule, Outcome
from . import assembled, compiled, host_library, resources_of

PASSES = {"forward": "kFprop", "backprop_input": "kDgrad"}
_CLUSTER = (2, 1, 1)
_MOST_PARAMETER_BYTES = 4096
_PARAMETER_ALIGNMENT = 64

# Bytes of an element by CUtensorMapDataType.
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}

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


class Convolution:
    """One pass of 2-D convolution in float16, NHWC and KRSC."""

    def __init__(self, pass_: str, counted: bool = False) -> None:
        """
        Args:
            pass_: one of PASSES.
            counted: with counters of executed instructions, and what the cubin takes.

        Raises:
            MissingError: the packages are not installed.
        """
        defines = (("PASS", PASSES[pass_]),)
        self._host = host_library("cutlass_conv_sm90", "sm_90a", defines)
        self.kernel = _kernel(defines, counted)

    def run(
        self, sizes: tuple[int, ...], a: np.ndarray, b: np.ndarray, result: np.ndarray
    ) -> Outcome:
        """Launches the kernel.

        Args:
            sizes: N, H, W, C, K, R, S, padding, stride, dilation.
            a, b, result: arrays of ``memory``: operands in the order of the pass, and what it
                computes.
        """
        grid, threads, shared, value = self.launch(sizes, a, b, result)
        return self.kernel(grid, (threads,), (value,), shared_mem=shared)

    def launch(
        self, sizes: tuple[int, ...], a: np.ndarray, b: np.ndarray, result: np.ndarray
    ) -> tuple[tuple[int, ...], int, int, np.ndarray]:
        """Grid, threads of a block, bytes of shared memory and the argument of a launch."""
        problems: list[Exception] = []

        def encoder(encode: Callable[..., bytes]) -> Callable[..., int]:
            def guarded(place: int, *arguments: object) -> int:
                try:
                    ctypes.memmove(place, encode(*arguments), tensormap.MAP_BYTES)
                except (ValueError, KeyError) as error:  # no exception crosses CUTLASS's code
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
            *(_POINTER(one.ctypes.data) for one in (a, b, result)),
        )
        if problems:
            raise problems[0]
        size, shared, *grid, threads = launch
        value = np.frombuffer(parameters[:size].tobytes(), np.dtype([("bytes", "u1", size)]))
        self.kernel.max_dynamic_shared_size_bytes = shared
        return tuple(grid), threads, shared, value


@cache
def _kernel(defines: tuple[tuple[str, str], ...], counted: bool) -> EmulatedKernel:
    text = compiled("cutlass_conv_sm90", "sm_90a", defines)
    # CUTLASS takes the start of dynamic shared memory to be aligned better than it declares: it is,
    # on the chip, where a kernel has no static one.
    text = re.sub(r"(\.extern \.shared \.align) \d+", r"\1 1024", text)
    module = EmulatedModule.from_ptx(
        text,
        "cutlass_conv_sm90",
        cluster=_CLUSTER,
        counted=counted,
        chip=driver.chip_of("sm_90a"),
        resources=_with_cluster(resources_of(text, "sm_90a")) if counted else None,
        cubin=assembled(text, "sm_90a")[0] if counted else None,
    )
    (name,) = re.findall(r"\.entry (\w*device_kernel\w*)", text)
    return module.get_function(name)


def _with_cluster(found: Mapping[str, Resources]) -> dict[str, Resources]:
    """What the cubin says, and what a launch of it adds."""
    return {name: replace(one, cluster=_CLUSTER) for name, one in found.items()}


def _tiled(type_, rank, address, extents, strides, box, steps, swizzle) -> bytes:
    return tensormap.encode_tiled(
        address or 0,
        _ELEMENT_BYTES[type_],
        extents[:rank],
        strides[: rank - 1],
        box[:rank],
        steps[:rank],
        tensormap.SWIZZLES[swizzle],
        nested=False,
    ).tobytes()


def _im2col(
    type_, rank, address, extents, strides, lower, upper, channels, pixels, steps, swizzle
) -> bytes:
    return tensormap.encode_im2col(
        address or 0,
        _ELEMENT_BYTES[type_],
        extents[:rank],
        strides[: rank - 1],
        lower[: rank - 2],
        upper[: rank - 2],
        channels,
        pixels,
        steps[:rank],
        tensormap.SWIZZLES[swizzle],
        nested=False,
    ).tobytes()


def _aligned(size: int) -> np.ndarray:
    """Zeroed bytes at an address that suits a tensor map."""
    whole = np.zeros(size + _PARAMETER_ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _PARAMETER_ALIGNMENT
    return whole[start : start + size]
