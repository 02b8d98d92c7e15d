"""The command line, its benchmark with sizes that an emulated device is up to.

``python -m tests.device -m tests.device.rehearsal bench ...``
"""

from __future__ import annotations

from functools import cached_property

from cupyconv.bench import ceilings, places
from cupyconv.bench.timing import Clock, CudaClock
from cupyconv.cli.main import main

_SWEEP_BYTES = 1 << 16
_PRODUCT_SIZE = 32  # rows and columns
_COPY_BYTES = 1 << 16


class _Place(places.GpuPlace):
    """A GPU without caches."""

    @cached_property
    def clock(self) -> Clock:
        return CudaClock(self.xp, _SWEEP_BYTES)


if __name__ == "__main__":
    places.GpuPlace = _Place
    ceilings.PRODUCT_SIZE["gpu"], ceilings.COPY_BYTES["gpu"] = _PRODUCT_SIZE, _COPY_BYTES
    main()
