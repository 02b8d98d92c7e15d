"""The emulator as a place where the golden cases run (tests/gpu/golden.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.gpu import golden

from . import memory, tensormap
from .module import EmulatedModule


@cache
def _module(wgmma: bool) -> EmulatedModule:
    return EmulatedModule(golden.SOURCE, {"GOLDEN_ARCH": "900", "GOLDEN_WGMMA": str(int(wgmma))})


class EmulatorDevice:
    """Runs golden cases under the checker."""

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
        kernel = _module(case.wgmma).get_function(case.kernel)
        kernel.max_dynamic_shared_size_bytes = case.shared
        kernel((case.blocks,), (case.threads,), arguments, shared_mem=case.shared)
