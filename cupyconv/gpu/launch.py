"""A kernel launch, and what runs it.

What is launched is worked out without touching a GPU; a Runtime, which is CuPy's here and the CPU
emulator's in the tests, loads kernels and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.gpu import compiler, sources, tensormaps
from cupyconv.gpu.compiler import Variant
from cupyconv.gpu.overlapping import Overlapping
from cupyconv.gpu.tensormaps import TensorMap, TensorMaps

Kernel = Callable[..., Any]
"""Called as kernel(grid, block, arguments, shared_mem=bytes), like a cupy.RawKernel."""

# Element types in cuda/include/numeric.cuh.
STORAGE = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex64_t",
    "complex128": "complex128_t",
}
ROLES = ("x", "w", "y", "bias", "workspace")
"""The arrays that a launch may take; in backprop_input x is dx, and so on."""

_NULL = np.uint64(0)
_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h


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
        arguments: the kernel's arguments in order; a str is one of ROLES, a Part is an array from
            an offset on, TensorMaps are made for the arrays of their roles, anything else is
            passed by value.
        may_overlap: whether it may begin before the launches before it have ended, since its kernel
            waits for what they write (griddepcontrol.wait); from compute capability 9.0 on.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, str | int], ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    arguments: tuple[Any, ...]
    may_overlap: bool = False


@dataclass(frozen=True)
class FilterForm:
    """What a pass reads in the place of w, which is copied for that.

    Attributes:
        name: the same for passes that read the same.
        bytes: of the copy.
        launch: that makes it, of w, at the beginning of the workspace.
    """

    name: str
    bytes: int
    launch: Launch


class Runtime(Protocol):
    """What launching needs of a GPU, or of what stands in for one."""

    def load(self, launches: Sequence[Launch]) -> None:
        """Load the kernels of launches; those that have to be compiled are so side by side."""
        ...

    def kernel(self, launch: Launch) -> Kernel:
        """The loaded kernel of a launch's variant."""
        ...

    def allow(self, kernel: Kernel, shared_bytes: int) -> None:
        """Let a loaded kernel be launched with so much dynamic shared memory."""
        ...

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        ...

    def encode(self, one: TensorMap, address: int) -> bytes:
        """The 128 bytes of a tensor map."""
        ...


class Series:
    """Launches one after the other, whose kernels are loaded at the first call.

    Attributes:
        launches: those that have anything to do.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        runtime: Runtime,
        workspace: Callable[[], Any] | None = None,
    ) -> None:
        """
        Args:
            launches: in the order in which they are made.
            runtime: that runs them.
            workspace: makes the array of that role, for each call; None where there is none.
        """
        self.launches = tuple(one for one in launches if 0 not in one.grid)
        self._runtime = runtime
        self._workspace = workspace
        self._loaded: list[tuple[Kernel, Launch, _Arguments]] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether it was called before, so that nothing is left to be loaded."""
        return self._loaded is not None

    def __call__(self, operands: Sequence[Any]) -> None:
        """Launch them on arrays in the order of ROLES; one that is missing or None is null."""
        if self._workspace is not None:
            operands = (*operands, self._workspace())
        if self._loaded is None:
            self._runtime.load(self.launches)
            self._loaded = [
                (self._load(one), one, _Arguments(one.arguments, self._runtime))
                for one in self.launches
            ]
        for kernel, one, arguments in self._loaded:
            kernel(one.grid, one.block, arguments.of(operands), shared_mem=one.shared_bytes)

    def _load(self, one: Launch) -> Kernel:
        """The kernel, allowed its dynamic shared memory.

        What a kernel may have unasked is less by its static shared memory, which only its cubin
        knows; so it is asked for always.
        """
        kernel = self._runtime.kernel(one)
        if one.shared_bytes:
            self._runtime.allow(kernel, one.shared_bytes)
        return kernel


class _Arguments:
    """A launch's arguments, worked out as far as they are without the arrays."""

    def __init__(self, arguments: Sequence[Any], runtime: Runtime) -> None:
        self._fixed: list[Any] = []
        self._arrays: list[tuple[int, int]] = []  # positions among the arguments and in ROLES
        self._made: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
        for position, argument in enumerate(arguments):
            self._fixed.append(_NULL if isinstance(argument, str) else argument)
            if isinstance(argument, str):
                self._arrays.append((position, ROLES.index(argument)))
            elif isinstance(argument, Part):
                self._made.append((position, _part_maker(argument, runtime)))
            elif isinstance(argument, TensorMaps):
                self._made.append((position, _maps_maker(argument, runtime)))

    def of(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments for arrays in the order of ROLES."""
        arguments = self._fixed.copy()
        for position, role in self._arrays:
            if role < len(operands) and operands[role] is not None:
                arguments[position] = operands[role]
        for position, make in self._made:
            arguments[position] = make(operands)
        return tuple(arguments)


def _part_maker(part: Part, runtime: Runtime) -> Callable[[Sequence[Any]], np.uint64]:
    role, offset, address = ROLES.index(part.role), part.offset, runtime.address
    return lambda operands: np.uint64(address(operands[role]) + offset)


def _maps_maker(maps: TensorMaps, runtime: Runtime) -> Callable[[Sequence[Any]], np.ndarray]:
    roles, address = [ROLES.index(one.role) for one in maps.maps], runtime.address

    def make(operands: Sequence[Any]) -> np.ndarray:
        addresses = tuple([address(operands[role]) for role in roles])
        return tensormaps.encoded(maps, addresses, runtime.encode)

    return make


class CupyRuntime:
    """Kernels on a CuPy device, which is the current one at each call, and its current stream."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self._modules: dict[Variant, Any] = {}

    def load(self, launches: Sequence[Launch]) -> None:
        """Load the variants of launches, compiling side by side those that the cache lacks.

        Raises:
            KernelCompileError: one does not compile; the others are loaded then all the same.
        """
        wanted = dict.fromkeys(variant_of(one, self.architecture) for one in launches)
        missing = [variant for variant in wanted if variant not in self._modules]
        made = compiler.compile_missing(missing)
        for variant, one in zip(missing, made, strict=True):
            if one.exception() is None:
                module = arrays.cupy().cuda.Module()
                # Bytes that were checked, and not their path, where something else may be by now.
                module.load(one.result().cubin)
                self._modules[variant] = module
        for one in made:
            one.result()  # raises what went wrong

    def kernel(self, launch: Launch) -> Kernel:
        module = self._modules[variant_of(launch, self.architecture)]
        kernel: Kernel = module.get_function(launch.entry)
        return Overlapping(kernel) if launch.may_overlap else kernel

    def allow(self, kernel: Kernel, shared_bytes: int) -> None:
        driver, pointer = arrays.cupy().cuda.driver, kernel.ptr  # type: ignore[attr-defined]
        # Of the function, whatever else is loaded from the module: it is never made less.
        if driver.funcGetAttribute(_MOST_DYNAMIC_SHARED, pointer) < shared_bytes:
            driver.funcSetAttribute(pointer, _MOST_DYNAMIC_SHARED, shared_bytes)

    def address(self, array: Any) -> int:
        pointer: int = array.data.ptr
        return pointer

    encode = staticmethod(tensormaps.encode)


def variant_of(launch: Launch, architecture: str) -> Variant:
    """What a launch's kernel is compiled from."""
    return Variant(sources.load(launch.source), launch.defines, architecture)
