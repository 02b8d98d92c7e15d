"""Compilation by Numba, and a file cache for the machine code."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from cupyconv import files
from cupyconv.cache_folder import keep, trusted_directory
from cupyconv.signals import uninterrupted

TERMS = 64
"""Largest number of terms that a loop adds one after another before it adds up such sums, so that
rounding errors stay small (hand-set)."""


def compiled(function: Callable) -> Any:
    """Wrap a function so that Numba compiles it per signature and caches the code."""
    # Reordering allows vectorization.  NaN and infinities keep their meaning.
    dispatcher: Any = numba.njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})(function)
    dispatcher._cache = _CodeCache(function)
    compile_for = dispatcher._compile_for_args
    # An interrupt during Numba's first compilation would leave its registries incomplete.
    dispatcher._compile_for_args = lambda *args: uninterrupted(lambda: compile_for(*args))
    return dispatcher


class _CodeCache:
    """File cache for the machine code of a function.

    Numba's own cache trusts any file it finds and does not detect truncation.  This cache only
    reads files that no other user can write and whose digest matches; otherwise the function is
    compiled again.
    """

    cache_path = None  # read by Numba's statistics

    def __init__(self, function: Callable) -> None:
        # The file is read before it can change, since its code is cached under this key.
        versions = _versions(function.__code__.co_filename)
        # The code contains the constants of the module, some of which it imports.
        constants = (pair for pair in function.__globals__.items() if isinstance(pair[1], int))
        self._name, self._versions = function.__qualname__, (*versions, *constants)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if it is not cached or not readable."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        if path is None:
            return None
        try:
            content = files.read_private(path)
            digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest == hashlib.sha256(code).digest():
                return CompileResult._rebuild(target_context, *pickle.loads(code))
        except Exception:  # Numba and pickle raise many types
            pass
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache the code for a signature if possible."""
        path = self._path(sig, data.codegen)
        if path is not None:
            with suppress(Exception):
                code = dumps(data._reduce())
                keep(path, hashlib.sha256(code).digest() + code)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        folder = trusted_directory("loops")
        key = repr((self._versions, self._name, str(sig), codegen.magic_tuple()))
        return folder and folder / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


_DIGEST_BYTES = hashlib.sha256().digest_size


@cache
def _versions(file: str) -> tuple[str, ...]:
    """Return the digests of this file and of ``file``, and the versions of what compiles it."""
    digests = (hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (__file__, file))
    return *digests, sys.version, np.__version__, numba.__version__
