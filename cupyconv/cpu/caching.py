"""Caches whose size in bytes is limited."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from cupyconv.cpu.scratch import MOST_BYTES


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=_Sized)


class ByteCache(Generic[_Key, _Value]):
    """Function that keeps the results of its last calls.

    They take at most half as many bytes as the scratch memory of a pass.
    """

    def __init__(self, function: Callable[[_Key], _Value]) -> None:
        self._function = function
        self.cache_clear()
        if hasattr(os, "register_at_fork"):
            # Another thread of the parent may hold the lock.
            os.register_at_fork(after_in_child=self.cache_clear)

    def __call__(self, key: _Key) -> _Value:
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
                return result
        result = self._function(key)
        with self._lock:
            if key not in self._results:
                self._results[key] = result
                self._size += result.nbytes
            while self._size > MOST_BYTES // 2:
                _, oldest = self._results.popitem(last=False)
                self._size -= oldest.nbytes
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        self._results: OrderedDict[_Key, _Value] = OrderedDict()
        self._size = 0
        self._lock = threading.RLock()  # reentrant: a signal handler may compute a pass
