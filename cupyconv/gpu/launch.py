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
from cupyconv.gpu import compiler, sources, tensormaps
from cupyconv.gpu.tensormaps import TensorMap, TensorMaps

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
class Part:
    """The memory of a role's array from an offset in bytes on."""

    role: str
    offset: int


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
            "bias", "workspace"), a Part is an array from an offset on, TensorMaps are made for the
            arrays of their roles, anything else is passed by value.
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

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        ...

    def encode(self, one: TensorMap, address: int) -> bytes:
        """The 128 bytes of a tensor map."""
        ...


class Series:
    """Launches one after the other, whose kernels are loaded at the first run."""

    def __init__(self, launches: Sequence[Launch], runtime: Runtime) -> None:
        self._launches = [one for one in launches if 0 not in one.grid]
        self._runtime = runtime
        self._kernels: list[Kernel] | None = None

    def run(self, operands: Mapping[str, Any]) -> None:
        """Run them on arrays given by role; a role without one is null."""
        if self._kernels is None:
            self._kernels = [self._runtime.kernel(one) for one in self._launches]
        for one, kernel in zip(self._launches, self._kernels, strict=True):
            arguments = [_argument(role, operands, self._runtime) for role in one.arguments]
            kernel(one.grid, one.block, tuple(arguments), shared_mem=one.shared_bytes)


def _argument(argument: Any, operands: Mapping[str, Any], runtime: Runtime) -> Any:
    if isinstance(argument, str):
        array = operands.get(argument)
        return _NULL if array is None else array
    if isinstance(argument, Part):
        return np.uint64(runtime.address(operands[argument.role]) + argument.offset)
    if isinstance(argument, TensorMaps):
        addresses = tuple(runtime.address(operands[one.role]) for one in argument.maps)
        return tensormaps.encoded(argument, addresses, runtime.encode)
    return argument


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

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    encode = staticmethod(tensormaps.encode)


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
