"""Scratch memory that is reused by all blocks of a pass, and by the thread's next pass.

Reuse saves time: the system zeroes new pages, which takes about as long as using them once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import numpy as np

from cupyconv.cpu.views import LINE, channels_are_last, copy, merged, operand

MOST_BYTES = 64_000_000
"""Memory limit of a pass in bytes; a thread keeps at most as much for its next pass (hand-set)."""

CALLS_BYTES = MOST_BYTES - (16 << 20) - (1 << 20)
"""Bytes for concurrent calls: MOST_BYTES less 16 MiB of shared arrays and 1 MiB for Python."""


class Scratch:
    """Named arrays in the scratch memory of a block.

    Attributes:
        dtype: dtype of the arrays.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.dtype, self._left = memory.dtype, memory
        self._arrays: dict[str, np.ndarray] = {}

    def rest(self) -> Scratch:
        """Return the memory that no array uses, as the scratch of the next block."""
        return Scratch(self._left)

    def array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Return an uninitialised array; a later array with the same name reuses its memory."""
        size = prod(shape)
        if name not in self._arrays or self._arrays[name].size < size:
            memory = self._left[:size]
            self._arrays[name] = memory if memory.size == size else np.empty(size, self.dtype)
            self._left = self._left[size:]
        return self._arrays[name][:size].reshape(shape)

    def sums(self, shape: Sequence[int], _dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array for the sums of a part of ``views.matmul``."""
        return self.array("part", shape)

    def like(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return an uninitialised array with the array's shape (G, rows, ...) and memory order."""
        if not channels_are_last(array):
            return self.array(name, array.shape)
        groups, rows, *others = array.shape
        return np.moveaxis(self.array(name, (groups, *others, rows)), -1, 1)

    def matrices(self, name: str, array: np.ndarray, conjugate: bool = False) -> np.ndarray:
        """Return (G, rows, ...) as matrices (G, rows, columns), as a view if BLAS accepts one."""
        view = None if conjugate else operand(array, 2, self.dtype)
        if view is not None:
            return view
        packed = self.like(name, array)
        copy(packed, array, conjugate)
        return merged(packed, 2)


class Pool:
    """Memory of a pass: "shared" for arrays that all threads use, "calls" for ``threads.each``.

    All methods use only these two names, so that they reuse the same memory.  A ``with`` block
    reuses the memory of the thread's last pass.

    Attributes:
        dtype: dtype of the arrays.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._kept: dict[str, np.ndarray] = {}

    def __enter__(self) -> Pool:
        self._kept = _local.__dict__.pop("kept", {})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and sum(map(len, self._kept.values())) <= MOST_BYTES:
            _local.kept = self._kept

    def array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Return an uninitialised array that reuses the memory with this name."""
        size = prod(shape) * self.dtype.itemsize
        if name not in self._kept or self._kept[name].size < size:
            self._kept.pop(name, None)
            memory = np.empty(size + LINE, np.uint8)
            self._kept[name] = memory[-memory.ctypes.data % LINE :]
        return self._kept[name][:size].view(self.dtype).reshape(shape)

    def divided(self, name: str, size: int, count: int = 1) -> list[Scratch]:
        """Return ``count`` scratch memories of ``size`` elements each."""
        line = LINE // self.dtype.itemsize
        return [Scratch(row) for row in self.array(name, (count, -(-size // line) * line))]


_local = threading.local()
