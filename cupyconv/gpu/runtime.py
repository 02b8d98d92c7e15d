"""Load and run the kernels of launches.

A Runtime loads and runs kernels.  The runtime of this module uses CuPy; the tests have a runtime
that emulates a GPU on the CPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays, files
from cupyconv.gpu import capture, compiler, sources, tensormaps
from cupyconv.gpu.compiler import Variant
from cupyconv.gpu.overlapping import Overlapping
from cupyconv.launch import ROLES, Launch, Part, TensorMap, TensorMaps

Kernel = Callable[..., Any]
"""Loaded kernel, called as kernel(grid, block, arguments, shared_mem=bytes), like cupy.RawKernel.
"""

_NULL = np.uint64(0)


class Runtime(Protocol):
    """Functions of a GPU or an emulator that load and launch kernels."""

    def load(self, launches: Sequence[Launch]) -> None:
        """Load the kernels of launches, after compiling missing kernels in parallel."""
        ...

    def kernel(self, launch: Launch) -> Kernel:
        """Return the loaded kernel of a launch.

        If the kernel's limit on dynamic shared memory is below the launch's ``shared_bytes``, it is
        raised.  The default limit is known only after loading, because the static shared memory
        of the cubin counts toward it.
        """
        ...

    def address(self, array: Any) -> int:
        """Return the device address of an array's first element."""
        ...

    def encode(self, one: TensorMap, address: int) -> bytes:
        """Return a tensor map encoded for an address, in 128 bytes."""
        ...


class Series:
    """A sequence of launches whose kernels are loaded at the first call.

    Attributes:
        launches: launches whose grid is not empty.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        runtime: Runtime,
        workspace: Callable[[], Any] | None = None,
    ) -> None:
        """
        Args:
            launches: launches in the order in which they run.
            runtime: runtime that loads and runs the launches.
            workspace: function that allocates the workspace of a call; None if the launches need
                no workspace.
        """
        self.launches = tuple(launch for launch in launches if 0 not in launch.grid)
        self._runtime = runtime
        self._workspace = workspace
        self._loaded: list[tuple[Kernel, Launch, _Arguments]] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the kernels are loaded."""
        return self._loaded is not None

    def __call__(self, operands: Sequence[Any]) -> None:
        """Run the launches on arrays in the order of ROLES; None is passed as a null pointer."""
        if self._loaded is None:
            self._runtime.load(self.launches)
            self._loaded = [
                (self._runtime.kernel(one), one, _Arguments(one.arguments, self._runtime))
                for one in self.launches
            ]
        try:
            if self._workspace is not None:
                operands = (*operands, self._workspace())
            for kernel, one, arguments in self._loaded:
                kernel(one.grid, one.block, arguments.of(operands), shared_mem=one.shared_bytes)
        except BaseException as error:
            if self._workspace is not None:
                # The frames of the traceback refer to the workspace, which must be released before
                # a capture ends, even if the caller keeps the error.
                operands = ()
                traceback.clear_frames(error.__traceback__)
            raise


class _Arguments:
    """Arguments of a launch, computed in advance except for addresses."""

    def __init__(self, arguments: Sequence[Any], runtime: Runtime) -> None:
        self._fixed: list[Any] = []
        self._arrays: list[tuple[int, int]] = []  # (position of the argument, index in ROLES)
        self._computed: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
        for position, argument in enumerate(arguments):
            self._fixed.append(_NULL if isinstance(argument, str) else argument)
            if isinstance(argument, str):
                self._arrays.append((position, ROLES.index(argument)))
            elif isinstance(argument, Part):
                self._computed.append((position, _part_maker(argument, runtime)))
            elif isinstance(argument, TensorMaps):
                self._computed.append((position, _maps_maker(argument, runtime)))

    def of(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments for arrays in the order of ROLES."""
        arguments = self._fixed.copy()
        for position, role in self._arrays:
            if role < len(operands) and operands[role] is not None:
                arguments[position] = operands[role]
        for position, make in self._computed:
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
    """Runtime that uses CuPy; kernels run on the current device and stream of each call."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: target for the compiler, such as "sm_90a" or "compute_90".
        """
        self.target = target
        self._kernels: dict[tuple[Variant, str], Any] = {}  # cupy.RawKernel by variant and entry

    @capture.relaxed()
    def load(self, launches: Sequence[Launch]) -> None:
        """Load the kernels of launches; compile in parallel the kernels that the cache lacks.

        Raises:
            KernelCompileError: a kernel does not compile; all other kernels are still loaded.
        """
        every = dict.fromkeys((variant_of(one, self.target), one.entry) for one in launches)
        missing = [key for key in every if key not in self._kernels]
        variants = list(dict.fromkeys(variant for variant, _ in missing))
        compiled = dict(zip(variants, compiler.compile_missing(variants), strict=True))
        # Load from a new file: the file in the cache may have changed since its digest was checked.
        with TemporaryDirectory(prefix="cupyconv-") as folder:  # readable by the owner only
            for number, (variant, one) in enumerate(compiled.items()):
                if one.exception() is None:
                    path = Path(folder, str(number))
                    files.put(path, one.result().cubin)
                    module = arrays.cupy().RawModule(path=str(path))
                    for key in missing:
                        if key[0] == variant:
                            self._kernels[key] = module.get_function(key[1])
                            _ = self._kernels[key].kernel  # load while the file exists
        for one in compiled.values():
            one.result()  # raise the error of a failed compilation

    @capture.relaxed()
    def kernel(self, launch: Launch) -> Kernel:
        kernel = self._kernels[variant_of(launch, self.target), launch.entry]
        # Never lower the attribute: other launches of the same function may need the higher value.
        if kernel.max_dynamic_shared_size_bytes < launch.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
        # Return the function of the current device; a RawKernel would look it up at every call.
        function: Kernel = kernel.kernel
        return Overlapping(function) if launch.may_overlap else function

    def address(self, array: Any) -> int:
        pointer: int = array.data.ptr
        return pointer

    encode = staticmethod(tensormaps.encode)


def variant_of(launch: Launch, target: str) -> Variant:
    """Return the source, macros and target of a launch's kernel."""
    return Variant(sources.load(launch.source), launch.defines, target)
