"""The driver's documented rules for launches: a launch that a GPU refuses raises here.

A kernel's resources come from the cubin that NVRTC compiles for its variant (tests/cubins.py); a
chip's limits come from the CUDA programming guide's table of technical specifications.  NVIDIA's
own occupancy calculator decides whether a block fits an SM.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cupyconv.gpu import compiler, sources
from cupyconv.launch import Launch
from cupyconv.planning import Device
from tests.cubins import Resources, resources
from tests.parameters import decoded

from . import tensormap
from .build import BuildError, build_library

DEFAULT_SHARED_BYTES = 48 << 10
"""Bytes of static plus dynamic shared memory per block without opt-in (hardware rule)."""

MOST_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
MOST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024
PORTABLE_CLUSTER = 8
"""Blocks per cluster that every chip with clusters supports (hardware rule)."""

PARAMETER_BYTES = 4096
"""Bytes of kernel parameters that every driver accepts; since CUDA 12.1 some accept more."""

MAP_ALIGNMENT = 64
"""Alignment of a tensor map's address, in bytes (hardware rule)."""

# Bits of cudaOccLimitingFactor.
_LIMITS = {1: "threads", 2: "registers", 4: "shared memory", 8: "blocks", 16: "barriers"}


class Refusal(ValueError):
    """A launch that the driver would refuse; the message states the rule and the values."""


@dataclass(frozen=True)
class Chip:
    """Limits of a compute capability.

    Attributes:
        capability: compute capability, such as (9, 0).
        shared_per_block: maximum bytes of shared memory per block, with opt-in.
        shared_per_multiprocessor: bytes of shared memory per SM.
        reserved_shared: bytes of shared memory that the system reserves per block.
        threads: resident threads per SM.
    """

    capability: tuple[int, int]
    shared_per_block: int
    shared_per_multiprocessor: int
    reserved_shared: int
    threads: int


def _chip(major: int, minor: int, per_block: int, per_multiprocessor: int, threads: int) -> Chip:
    reserved = 1 << 10 if major >= 8 else 0
    return Chip((major, minor), per_block << 10, per_multiprocessor << 10, reserved, threads)


CHIPS = {
    chip.capability: chip
    for chip in (
        _chip(7, 5, 64, 64, 1024),
        _chip(8, 0, 163, 164, 2048),
        _chip(8, 6, 99, 100, 1536),
        _chip(8, 9, 99, 100, 1536),
        _chip(9, 0, 227, 228, 2048),
        _chip(10, 0, 227, 228, 2048),
        _chip(12, 0, 99, 100, 1536),
    )
}


class Function:
    """A loaded kernel with the driver's checks of its launches."""

    def __init__(self, name: str, chip: Chip, resources: Resources) -> None:
        """
        Args:
            name: names of the kernel and its variant, for messages.
            chip: the chip that the kernel is loaded on.
            resources: the resources of the kernel in its cubin.
        """
        self._name = name
        self._chip = chip
        self._resources = resources
        self._allowed: int | None = None

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Maximum dynamic shared memory of a launch, in bytes."""
        if self._allowed is None:
            return DEFAULT_SHARED_BYTES - self._resources.static_shared
        return self._allowed

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, dynamic: int) -> None:
        most = self._chip.shared_per_block
        static = self._resources.static_shared
        if static + dynamic > most:
            raise self._refusal(
                f"{dynamic} bytes of dynamic and {static} of static shared memory are more than "
                f"the {most} that a block can have"
            )
        self._allowed = dynamic

    def allow(self, dynamic: int) -> None:
        """Raise the limit of dynamic shared memory to at least ``dynamic`` bytes."""
        if self.max_dynamic_shared_size_bytes < dynamic:
            self.max_dynamic_shared_size_bytes = dynamic

    def require_launchable(self, grid: Sequence[int], block: Sequence[int], dynamic: int) -> None:
        """Check a launch, apart from its arguments.

        Args:
            grid, block: three extents each.
            dynamic: bytes of dynamic shared memory.

        Raises:
            Refusal: with the rule and the values.
        """
        kernel, chip = self._resources, self._chip
        for word, extents, most in (("grid", grid, MOST_GRID), ("block", block, MOST_BLOCK)):
            if not all(1 <= extent <= limit for extent, limit in zip(extents, most, strict=True)):
                raise self._refusal(
                    f"a {word} has 1 to {most} along its axes, not {tuple(extents)}"
                )
        threads, bound = prod(block), min(kernel.launch_bounds or MOST_THREADS, MOST_THREADS)
        if threads > bound:
            raise self._refusal(f"takes 1 to {bound} threads a block: got {threads}")
        self._require_clusters(grid)
        allowed = self.max_dynamic_shared_size_bytes
        if dynamic > allowed:
            raise self._refusal(
                f"asks for {dynamic} bytes of dynamic shared memory beside {kernel.static_shared} "
                f"static ones, {allowed} are allowed (max_dynamic_shared_size_bytes)"
            )
        resident, limits = resident_blocks(chip, kernel, threads, dynamic, self._allowed)
        if resident == 0:
            raise self._refusal(
                f"a block of {threads} threads with {kernel.registers} registers each, "
                f"{kernel.static_shared} bytes of static and {dynamic} of dynamic shared memory "
                f"does not fit a multiprocessor: too much of {' and '.join(limits)}"
            )

    def _require_clusters(self, grid: Sequence[int]) -> None:
        cluster = self._resources.cluster or (1, 1, 1)
        if prod(cluster) == 1:
            return
        if self._chip.capability < (9, 0):
            raise self._refusal("clusters need compute capability 9.0")
        if prod(cluster) > PORTABLE_CLUSTER:
            raise self._refusal(
                f"clusters of {cluster} have more than the {PORTABLE_CLUSTER} blocks that every "
                "chip with clusters supports"
            )
        if any(extent % size for extent, size in zip(grid, cluster, strict=True)):
            raise self._refusal(
                f"runs in clusters of {cluster}: a grid of {tuple(grid)} is not a multiple"
            )

    def require_arguments(self, sizes: Sequence[int], arguments: Sequence[Any]) -> None:
        """Check the arguments of a launch.

        The driver itself makes no such check: it copies as many bytes as the kernel declares.

        Args:
            sizes: bytes of each argument.
            arguments: the arguments; tensor maps are recognized by their dtype.

        Raises:
            Refusal: with the rule and the values.
        """
        parameters = self._resources.parameters
        declared = [parameter.size for parameter in parameters]
        if declared != list(sizes):
            raise self._refusal(f"takes arguments of {declared} bytes: got {list(sizes)}")
        if parameters:
            last = parameters[-1]
            total = last.address - parameters[0].address + last.size
            if total > PARAMETER_BYTES:
                raise self._refusal(f"takes {total} bytes of arguments, {PARAMETER_BYTES} fit")
        for parameter, argument in zip(parameters, arguments, strict=True):
            if tensormap.is_encoded(argument) and parameter.address % MAP_ALIGNMENT:
                raise self._refusal(
                    f"has tensor maps at {parameter.address} of its parameters, which is no "
                    f"multiple of {MAP_ALIGNMENT}"
                )

    def _refusal(self, text: str) -> Refusal:
        major, minor = self._chip.capability
        return Refusal(f"{self._name} on compute capability {major}.{minor}: {text}")


class CheckedFunction(Function):
    """A kernel whose launches are checked but not run."""

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        self.require_launchable(three(grid), three(block), shared_mem)
        self.require_arguments([argument.nbytes for argument in arguments], arguments)


class DriverRuntime:
    """Loader of NVRTC's cubins that checks launches without running them.

    Replaces ``cupyconv.gpu.runtime.CupyRuntime``; arrays are addresses of type np.uint64.
    """

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self._functions: dict[tuple[Any, ...], CheckedFunction] = {}

    def load(self, launches: Sequence[Launch]) -> None:
        pass  # kernels are loaded on first use

    def kernel(self, launch: Launch) -> CheckedFunction:
        """Return the function of a variant, which all its launches share, as with a module."""
        key = (launch.source, launch.defines, launch.entry)
        if key not in self._functions:
            resources = compiled(launch.source, launch.defines, self.architecture)[launch.entry]
            chip = chip_of(self.architecture)
            self._functions[key] = CheckedFunction(variant_name(launch), chip, resources)
        if launch.shared_bytes:
            self._functions[key].allow(launch.shared_bytes)
        return self._functions[key]

    def launcher(self, launch: Launch) -> tuple[Callable[..., Any], None]:
        """Return a function that checks a launch, without running it."""
        function = self.kernel(launch)

        def check(stream: int, parameters: int, extra: int) -> None:
            arguments = decoded(launch, parameters)
            function(launch.grid, launch.block, arguments, shared_mem=launch.shared_bytes)

        return check, None

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=0)

    def scratch(self, size: int) -> SimpleNamespace:
        return SimpleNamespace(ptr=1 << 45)

    encoder = staticmethod(tensormap.encoder)


@cache
def compiled(
    source: str, defines: tuple[tuple[str, str | int], ...], architecture: str
) -> dict[str, Resources]:
    """Return the resources of a shipped variant's kernels, by name."""
    made = compiler.compile_cubin(sources.load(source), dict(defines), architecture)
    return resources(*made)


def variant_name(launch: Launch) -> str:
    """Return the names of a launch's kernel and variant, for messages."""
    macros = " ".join(f"-D{name}={value}" for name, value in launch.defines)
    return f"{launch.entry} ({launch.source} {macros})"


def chip_of(architecture: str) -> Chip:
    """Return the chip of an architecture such as "sm_90a"."""
    return CHIPS[Device.of(architecture).capability]


def three(extents: Sequence[int]) -> list[int]:
    """Extend the one to three extents of a grid or block to three."""
    values = [int(extent) for extent in extents]
    if not 1 <= len(values) <= 3:
        raise ValueError(f"a grid or block has one to three extents: got {tuple(extents)}")
    return values + [1] * (3 - len(values))


def resident_blocks(
    chip: Chip, kernel: Resources, threads: int, dynamic: int, allowed: int | None
) -> tuple[int, list[str]]:
    """Return the resident blocks per SM of a kernel, and the resources that limit them."""
    limits = ctypes.c_uint()
    blocks = _calculator().resident_blocks(
        (ctypes.c_int * 6)(
            *chip.capability,
            chip.threads,
            chip.shared_per_block,
            chip.shared_per_multiprocessor,
            chip.reserved_shared,
        ),
        (ctypes.c_int * 4)(
            kernel.registers,
            kernel.static_shared,
            kernel.launch_bounds or 0,
            -1 if allowed is None else allowed,
        ),
        threads,
        dynamic,
        ctypes.byref(limits),
    )
    if blocks < 0:
        raise Refusal(f"the occupancy calculator takes no {threads} threads on {chip}")
    return blocks, [word for bit, word in _LIMITS.items() if limits.value & bit]


@cache
def _calculator() -> ctypes.CDLL:
    source = Path(__file__).with_name("occupancy.cpp")
    folder = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "include")
    header = folder / "cuda_occupancy.h"
    if not header.exists():
        raise BuildError("the occupancy calculator is missing: pip install nvidia-cuda-runtime")
    texts = [source.read_text(), header.read_text()]
    return ctypes.CDLL(str(build_library("occupancy", [source], texts, [folder])))
