"""Pool of kernels built for the emulator, which grows as time permits.

A build takes about a second, and a pass with it hundredths of a second.  So a case that needs a new
build is skipped unless builds have used less than their share of the time so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.emulator import convolutions

SHARE = 0.6
"""Fraction of the time that builds may take (hand-set)."""

GRACE = 20.0
"""Seconds that builds may take in addition to that fraction."""

LONGEST = 2.0
"""Seconds that one build counts as, at most; the first build also builds the compiler's library."""


class NotTakenError(Exception):
    """The requested implementation does not support the layer, or is not built yet."""


class Pool:
    """Kernels built by this process.

    Attributes:
        ran: the family whose launches were prepared last.
        seconds: total time of the builds.
    """

    def __init__(self) -> None:
        self.ran = ""
        self.seconds = 0.0
        self._built: set[tuple[Any, ...]] = set()
        self._begun: float | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Build kernels only while builds have used at most their share of the time."""
        load = convolutions.EmulatorRuntime.kernel
        prepare = convolutions.EmulatorBackend.prepare

        def kernel(runtime: Any, launch: Any) -> Any:
            key = (launch.source, tuple(launch.defines))
            if key in self._built:
                return load(runtime, launch)
            begun = time.monotonic()
            self._begun = self._begun or begun
            if self.seconds > GRACE + SHARE * (begun - self._begun):
                raise NotTakenError("not built")
            loaded = load(runtime, launch)
            self.seconds += min(time.monotonic() - begun, LONGEST)
            self._built.add(key)
            return loaded

        def prepared(backend: Any, request: Any, planned: Any, *rest: Any, **more: Any) -> Any:
            self.ran = planned.implementation
            return prepare(backend, request, planned, *rest, **more)

        with (
            mock.patch.object(convolutions.EmulatorRuntime, "kernel", kernel),
            mock.patch.object(convolutions.EmulatorBackend, "prepare", prepared),
        ):
            yield


pool = Pool()
"""Pool of this process."""
