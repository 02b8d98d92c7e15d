"""Load and run the kernels of launches.

A Runtime loads and launches kernels.  The runtime of this module uses CuPy; the tests have a
runtime that emulates a GPU on the CPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays, files, log
from cupyconv.gpu import capture, compiler, driver, sources, tensormaps
from cupyconv.gpu.compiler import Variant
from cupyconv.gpu.tensormaps import MAP_ALIGNMENT, MAP_BYTES, Encoder
from cupyconv.launch import ROLES, Launch, Part, TensorMap, TensorMaps

MOST_ADDRESSES = 1024
"""Largest number of addresses for which a launch keeps encoded tensor maps (hand-set)."""


class Runtime(Protocol):
    """Functions of a GPU or an emulator that load and launch kernels."""

    def load(self, launches: Sequence[Launch]) -> None:
        """Load the kernels of launches, after compiling missing kernels in parallel."""
        ...

    def launcher(self, launch: Launch) -> tuple[Callable[..., Any], Any]:
        """Return the function that launches a loaded kernel, and its configuration.

        If the configuration is None, the function takes the stream's handle, the address of the
        array of pointers to the kernel's parameters, and 0.  Otherwise the caller first stores the
        stream's handle as ``stream`` of the configuration, and the function takes the two other
        arguments and returns the driver's status.  A configuration serves one call at a time.
        """
        ...

    def stream(self) -> Any:
        """Return the current stream; its attribute ``ptr`` is the handle."""
        ...

    def scratch(self, size: int) -> Any:
        """Allocate ``size`` bytes for the current stream; the attribute ``ptr`` is the address."""
        ...

    def encoder(self, one: TensorMap) -> Encoder:
        """Return the function that encodes a tensor map."""
        ...


class Series:
    """A sequence of launches, called with the addresses of arrays.

    The kernels are loaded at the first call.  Everything else is prepared once: a call writes its
    addresses into a table, to which the pointers to the kernels' parameters refer, and launches.

    Attributes:
        launches: launches whose grid is not empty.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        runtime: Runtime,
        roles: Sequence[str] = ROLES[:-1],
        workspace_bytes: int = 0,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            launches: launches in the order in which they run.
            runtime: runtime that loads and runs the launches.
            roles: roles of the addresses that a call passes, in order.
            workspace_bytes: size of the workspace that each call allocates.
            fixed: arrays that all calls read instead of the passed ones, keyed by role; their
                attribute ``ptr`` is the address.
        """
        self.launches = tuple(launch for launch in launches if 0 not in launch.grid)
        self._runtime = runtime
        self._workspace_bytes = workspace_bytes
        self._fixed = tuple((fixed or {}).values())  # these references keep the memory alive
        workspace = ("workspace",) if workspace_bytes else ()
        self._slots = {role: slot for slot, role in enumerate((*roles, *workspace, *(fixed or {})))}
        parts = {
            (self._slots[one.role], one.offset): None
            for launch in self.launches
            for one in launch.arguments
            if isinstance(one, Part)
        }
        self._parts = tuple(parts)  # (slot of the array, offset in bytes)
        words = len(roles) + len(workspace) + len(self._fixed) + len(parts)
        self._table = struct.Struct(f"{words}Q")
        self._free: list[_Block] = []  # blocks that no call uses
        self._constants: list[list[Any]] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the kernels are loaded."""
        return self._constants is not None

    def load(self) -> None:
        """Load the kernels, and prepare the parameters that are the same in all calls."""
        self._runtime.load(self.launches)
        constants = [list(map(self._constant, launch.arguments)) for launch in self.launches]
        self._free.append(self._block(constants))
        self._constants = constants

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Run the launches on the arrays at these addresses; 0 is a null pointer."""
        workspace = None
        try:
            try:
                block = self._free.pop()
            except IndexError:  # this is the first call, or other calls are under way
                block = self._another_block()
            if self._workspace_bytes:
                workspace = self._runtime.scratch(self._workspace_bytes)
                addresses = (*addresses, workspace.ptr)
            if addresses != block.addresses:
                self._set(block, addresses)
            stream = self._runtime.stream().ptr
            for launch, config, parameters in block.launches:
                if config is None:
                    launch(stream, parameters, 0)
                else:
                    config.stream = stream
                    status = launch(parameters, 0)
                    if status:
                        raise arrays.cupy().cuda.driver.CUDADriverError(status)
            self._free.append(block)
        finally:
            # The frame of an error's traceback must not keep the workspace: it must be released
            # before a capture ends, even if the caller keeps the error.
            del workspace

    def _set(self, block: _Block, addresses: tuple[int, ...]) -> None:
        """Write the addresses of a call into a block, and the tensor maps for these addresses."""
        block.addresses = None  # until all parameters are written
        values = addresses
        if self._fixed:
            values = (*values, *[one.ptr for one in self._fixed])
        if self._parts:
            values = (*values, *[values[slot] + offset for slot, offset in self._parts])
        self._table.pack_into(block.table, 0, *values)
        block.structures = [maps.at(values) for _, _, maps in block.maps]
        for (pointers, position, _), structure in zip(block.maps, block.structures, strict=True):
            pointers[position] = structure.address
        block.addresses = addresses

    def _another_block(self) -> _Block:
        if self._constants is None:
            self.load()
            return self._free.pop()
        return self._block(self._constants)

    def _constant(self, argument: Any) -> Any:
        """Return the slot of an address, an argument by value as an array, or _Maps.

        The address of an array that calls do not pass is null.
        """
        if isinstance(argument, TensorMaps):
            return _Maps(argument, self._slots, self._runtime)
        if isinstance(argument, Part):
            part = self._slots[argument.role], argument.offset
            return self._table.size // 8 - len(self._parts) + self._parts.index(part)
        if isinstance(argument, str):
            return self._slots.get(argument, np.zeros(1, np.uint64))
        return np.ascontiguousarray(np.atleast_1d(argument))

    def _block(self, constants: Sequence[Sequence[Any]]) -> _Block:
        block = _Block(self._table.size)
        table = ctypes.addressof(block.table)
        for launch, values in zip(self.launches, constants, strict=True):
            pointers = (ctypes.c_void_p * len(values))()
            for position, value in enumerate(values):
                if isinstance(value, _Maps):
                    block.maps.append((pointers, position, value))
                elif isinstance(value, int):
                    pointers[position] = table + 8 * value
                else:
                    pointers[position] = value.ctypes.data
            function, config = self._runtime.launcher(launch)
            if log.logs_launches():
                function = _logged(function, launch)
            block.launches.append((function, config, ctypes.addressof(pointers)))
            block.kept += pointers, values
        return block


def _logged(function: Callable[..., Any], launch: Launch) -> Callable[..., Any]:
    """Return a function that logs a launch before it launches."""

    def run(*arguments: int) -> Any:
        shape = launch.grid, launch.block, launch.shared_bytes
        log.launch("launch of %s: grid %s, block %s, %s shared bytes", launch.entry, *shape)
        return function(*arguments)

    return run


class _Block:
    """Parameters of one call at a time.

    Attributes:
        table: the addresses of the call's arrays.
        addresses: addresses that the parameters have; None while they are changed.
        launches: for each launch, function and configuration from ``Runtime.launcher``, and address
            of the array of pointers to the kernel's parameters.
        maps: tensor maps of the launches, each with its array of pointers and its index there.
        kept: objects that own the memory to which the pointers refer.
    """

    def __init__(self, table_bytes: int) -> None:
        self.table = ctypes.create_string_buffer(table_bytes)
        self.addresses: tuple[int, ...] | None = None
        self.launches: list[tuple[Callable[..., Any], Any, int]] = []
        self.maps: list[tuple[Any, int, _Maps]] = []
        self.kept: list[Any] = []
        self.structures: list[Any] = []


class _Maps:
    """Encoded tensor maps of a kernel parameter, by the addresses of their arrays."""

    def __init__(self, maps: TensorMaps, slots: Mapping[str, int], runtime: Runtime) -> None:
        self._slots = [slots[one.role] for one in maps.maps]
        self._encoders = [(runtime.encoder(one), one.offset) for one in maps.maps]
        self._encoded: dict[tuple[int, ...], _Struct] = {}

    def at(self, addresses: Sequence[int]) -> _Struct:
        """Return the struct of the maps for the addresses of a call."""
        key = tuple([addresses[slot] for slot in self._slots])
        found = self._encoded.get(key)
        if found is None:
            if len(self._encoded) >= MOST_ADDRESSES:
                self._encoded.clear()  # blocks keep the structs that they refer to
            found = _Struct(MAP_BYTES * len(key))
            places = range(found.address, found.address + MAP_BYTES * len(key), MAP_BYTES)
            for (encode, offset), address, place in zip(self._encoders, key, places, strict=True):
                encode(address + offset, place)
            self._encoded[key] = found  # complete: other threads may read it
        return found


class _Struct:
    """Memory of a parameter, aligned for tensor maps; ``address`` is its address."""

    def __init__(self, size: int) -> None:
        self._memory = ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % MAP_ALIGNMENT


class CupyRuntime:
    """Runtime that uses CuPy; kernels run on the current device and stream of each call."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: target for the compiler, such as "sm_90a" or "compute_90".
        """
        self.target = target
        self._kernels: dict[tuple[Variant, str], Any] = {}  # cupy.RawKernel by variant and entry
        self._cuda = arrays.cupy().cuda
        self.stream = self._cuda.get_current_stream

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
                            log.info("loaded %s for %s", key[1], self.target)
                            self._kernels[key] = module.get_function(key[1])
                            _ = self._kernels[key].kernel  # load while the file exists
        for one in compiled.values():
            one.result()  # raise the error of a failed compilation

    @capture.relaxed()
    def launcher(self, launch: Launch) -> tuple[Callable[..., Any], Any]:
        kernel = self._kernels[variant_of(launch, self.target), launch.entry]
        # Never lower the attribute: other launches of the same function may need the higher value.
        if kernel.max_dynamic_shared_size_bytes < launch.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
        # The function of the current device; the RawKernel keeps its module loaded.
        function = kernel.kernel.ptr
        grid, block = _three(launch.grid), _three(launch.block)
        if not launch.may_overlap:
            launcher = self._cuda.driver.launchKernel
            return partial(launcher, function, *grid, *block, launch.shared_bytes), None
        config = driver.LaunchConfig(grid, block, launch.shared_bytes)
        pointer = ctypes.c_void_p
        launcher = driver.function("cuLaunchKernelEx", pointer, pointer, pointer, pointer)
        return partial(launcher, ctypes.addressof(config), function), config

    def scratch(self, size: int) -> Any:
        return capture.allocate(size, self._cuda)

    encoder = staticmethod(tensormaps.encoder)


def _three(extents: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def variant_of(launch: Launch, target: str) -> Variant:
    """Return the source, macros and target of a launch's kernel."""
    return Variant(sources.load(launch.source), launch.defines, target)
