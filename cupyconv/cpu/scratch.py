"""Memory that is used for one block after another, and again by a thread's next pass.

The system hands out memory in pages that it fills with zeros first, which takes about as long as
computing on them once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np

from cupyconv.cpu.views import channels_are_last, copy, merged, operand

MOST_BYTES = 64_000_000
"""What a pass takes, and its thread keeps for the next one; of a pass that took more, nothing."""

CALLS_BYTES = MOST_BYTES - (16 << 20) - (1 << 20)
"""Of that, for calls at the same time, beside what they share, and what Python itself takes."""


class Scratch:
    """Arrays by name, in memory that has room for those of a block.

    Attributes:
        dtype: of the arrays.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.dtype, self._left = memory.dtype, memory
        self._arrays: dict[str, np.ndarray] = {}

    def rest(self) -> Scratch:
        """What is left, for one block after the other."""
        return Scratch(self._left)

    def array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """An array with undefined content, in the memory of the block's last one of that name."""
        size = prod(shape)
        if name not in self._arrays or self._arrays[name].size < size:
            found = self._left[:size]
            self._arrays[name] = found if found.size == size else np.empty(size, self.dtype)
            self._left = self._left[size:]
        return self._arrays[name][:size].reshape(shape)

    def like(self, name: str, array: np.ndarray) -> np.ndarray:
        """Memory for (G, rows, ...), with the rows as near in it as the array has them."""
        if not channels_are_last(array):
            return self.array(name, array.shape)
        groups, rows, *others = array.shape
        return np.moveaxis(self.array(name, (groups, *others, rows)), -1, 1)

    def matrices(self, name: str, array: np.ndarray, conjugate: bool = False) -> np.ndarray:
        """(G, rows, ...) as (G, rows, columns), where it is if BLAS takes it there."""
        view = None if conjugate else operand(array, 2, self.dtype)
        if view is not None:
            return view
        packed = self.like(name, array)
        copy(packed, array, conjugate)
        return merged(packed, 2)


class Pool:
    """The memory of a pass: what is shared, and that of calls at the same time.

    Of more names, those of passes of different kinds would add up.

    Args:
        kept: bytes by name, which the thread's last pass left.
    """

    def __init__(self, dtype: np.dtype, kept: dict[str, np.ndarray]) -> None:
        self.dtype, self._kept = dtype, kept

    def array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """An array with undefined content, in the memory of the last one of that name."""
        size = prod(shape) * self.dtype.itemsize
        if name not in self._kept or self._kept[name].size < size:
            self._kept.pop(name, None)
            self._kept[name] = np.empty(size, np.uint8)
        return self._kept[name][:size].view(self.dtype).reshape(shape)

    def divided(self, name: str, size: int, count: int = 1) -> list[Scratch]:
        """So many parts of it, each for arrays of so many elements together."""
        return [Scratch(row) for row in self.array(name, (count, size))]


_of_thread = threading.local()


@contextmanager
def pool(dtype: np.dtype) -> Iterator[Pool]:
    """Memory for a pass, as the thread's last one left it."""
    kept: dict[str, np.ndarray] = _of_thread.__dict__.pop("kept", {})
    yield Pool(dtype, kept)
    _of_thread.kept = kept if sum(map(len, kept.values())) <= MOST_BYTES else {}
