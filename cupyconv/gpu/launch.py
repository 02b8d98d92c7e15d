"""A kernel launch, and what runs it.

What is launched is worked out without touching a GPU; a Runtime, which is CuPy's here and the CPU
emulator's in the tests, loads kernels and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.gpu import compiler, sources

Kernel = Callable[..., Any]
"""Called as kernel(grid, block, arguments, shared_mem=bytes), like a cupy.RawKernel."""

# Element types in cuda/include/numeric.cuh.
STORAGE = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
_NULL = np.uint64(0)
_DEFAULT_SHARED_BYTES = 48 << 10  # more has to be allowed per kernel


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the memory's addresses.

    Attributes:
        source: kernel file in cuda/.
        entry: name of the kernel.
        defines: macros that make the variant.
        grid, block: launch dimensions; an empty grid means that there is nothing to do.
        shared_bytes: dynamic shared memory.
        arguments: the kernel's arguments in order; a str is the role of an array ("x", "w", "y",
            "bias", "workspace"), anything else is passed by value.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, str | int], ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    arguments: tuple[Any, ...]


class Runtime(Protocol):
    """What launching needs of a GPU, or of what stands in for one."""

    def kernel(self, launch: Launch) -> Kernel:
        """The loaded kernel of a launch's variant."""
        ...


def run(launches: Sequence[Launch], operands: Mapping[str, Any], runtime: Runtime) -> None:
    """Run launches one after the other on arrays given by role; a role without one is null."""
    for launch in launches:
        if 0 in launch.grid:
            continue
        arguments = [
            _pointer(operands.get(argument)) if isinstance(argument, str) else argument
            for argument in launch.arguments
        ]
        kernel = runtime.kernel(launch)
        kernel(launch.grid, launch.block, tuple(arguments), shared_mem=launch.shared_bytes)


def _pointer(array: Any) -> Any:
    return _NULL if array is None else array


class CupyRuntime:
    """Kernels on the current CuPy device and stream."""

    def __init__(self, architecture: str, ordinal: int) -> None:
        self.architecture = architecture
        self.ordinal = ordinal

    def kernel(self, launch: Launch) -> Kernel:
        return _load(
            launch.source,
            launch.entry,
            launch.defines,
            launch.shared_bytes,
            self.architecture,
            self.ordinal,
        )


@cache
def _load(
    source: str,
    entry: str,
    defines: tuple[tuple[str, str | int], ...],
    shared_bytes: int,
    architecture: str,
    ordinal: int,  # a kernel's limit on shared memory is set per device
) -> Kernel:
    path = compiler.cached_cubin(sources.load(source), dict(defines), architecture)
    kernel = arrays.cupy().RawModule(path=str(path)).get_function(entry)
    if shared_bytes > _DEFAULT_SHARED_BYTES:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel
