"""Memory that is used for one block after another, and again by a thread's next pass.

The system hands out memory in pages that it fills with zeros first, which takes about as long as
computing on them once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from math import prod
from operator import attrgetter

import numpy as np

from cupyconv.cpu.views import channels_are_last, copy, merged, operand

KEPT_BYTES = 64 << 20
"""What a thread keeps for its next pass, at most; of a pass that took more, nothing."""


class Scratch:
    """Arrays by name.

    Attributes:
        dtype: of the arrays.

    Args:
        kept: memory by name, from an earlier pass.
    """

    def __init__(self, dtype: np.dtype, kept: dict[str, np.ndarray]) -> None:
        self.dtype = dtype
        self._kept = kept
        self._used: dict[str, np.ndarray] = {}
        self._owner = ""

    def of_helper(self, number: int) -> Scratch:
        """Memory for one that works at the same time; this one's thread keeps it too."""
        helper = shallow_copy(self)
        helper._owner = f"{number} "
        return helper

    def array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """An array with undefined content, in the memory of the last one of that name."""
        name = self._owner + name
        size = prod(shape) * self.dtype.itemsize
        memory = self._used.get(name)
        if memory is None:
            memory = self._kept.pop(name, None)
        if memory is None or memory.size < size:
            # What belongs to passes of another kind must not add up with what this one takes.
            self._kept.clear()
            self._used.pop(name, None)
            memory = np.empty(size, np.uint8)
        self._used[name] = memory
        return memory[:size].view(self.dtype).reshape(shape)

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

    @property
    def memory(self) -> dict[str, np.ndarray]:
        """All by name, used or still kept; nothing if that is more than may be kept."""
        whole = {**self._kept, **self._used}
        return whole if sum(map(attrgetter("size"), whole.values())) <= KEPT_BYTES else {}


_of_thread = threading.local()


@contextmanager
def scratch(dtype: np.dtype) -> Iterator[Scratch]:
    """Memory for a pass, as the thread's last one left it."""
    kept: dict[str, np.ndarray] = _of_thread.__dict__.pop("memory", {})
    borrowed = Scratch(dtype, kept)
    yield borrowed
    _of_thread.memory = borrowed.memory
