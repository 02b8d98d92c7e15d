"""The emulator as a device for the golden cases (tests/gpu/golden.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.gpu import golden

from . import memory, tensormap
from .module import EmulatedModule
from .ptx.nvrtc import OPTIONS, compile_ptx
from .runtime import current_settings


@cache
def _module(wgmma: bool, source: str) -> EmulatedModule:
    defines = {"GOLDEN_ARCH": "900", "GOLDEN_WGMMA": str(int(wgmma))}
    if source == "cuda":
        return EmulatedModule(golden.SOURCE, defines)
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    headers = {path.name: path.read_text() for path in golden.INCLUDE.glob("*.cuh")}
    flags = ["-arch=compute_90a", *OPTIONS, *macros]
    text = compile_ptx(golden.SOURCE.read_text(), golden.SOURCE.name, headers, flags)
    return EmulatedModule.from_ptx(text, "golden", [golden.SOURCE.parent, golden.INCLUDE])


class EmulatorDevice:
    """Device that runs golden cases under the checker."""

    def upload(self, values: np.ndarray) -> np.ndarray:
        return memory.array(values, "input")

    def output(self, wanted: golden.Output) -> np.ndarray:
        if wanted.initial is not None:
            return memory.array(wanted.initial, "output", read_only=False)
        return memory.empty(wanted.shape, wanted.dtype)

    def download(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def encode(self, described: golden.Map, array: np.ndarray) -> np.ndarray:
        extents, strides = array.shape[::-1], array.strides[::-1][1:]
        place = (array.ctypes.data, array.itemsize, extents, strides)
        if described.corners:
            lower, upper = described.corners
            return tensormap.encode_im2col(
                *place, lower, upper, *described.box, described.steps, described.swizzle
            )
        return tensormap.encode_tiled(*place, described.box, described.steps, described.swizzle)

    def launch(self, case: golden.Case, arguments: tuple[Any, ...]) -> None:
        kernel = _module(case.wgmma, current_settings().source).get_function(case.kernel)
        kernel.max_dynamic_shared_size_bytes = case.shared
        kernel((case.blocks,), (case.threads,), arguments, shared_mem=case.shared)
