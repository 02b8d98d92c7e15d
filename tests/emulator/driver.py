"""The driver's rules for a launch: what a GPU would refuse is an error here.

They are CUDA's documented ones.  The figures of a kernel come from the cubin that NVRTC makes of
the very variant (tests/cubins.py), those of a chip from the CUDA programming guide's table of
technical specifications; whether a block fits a multiprocessor is decided by NVIDIA's own occupancy
calculator.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.gpu import compiler, sources
from cupyconv.gpu.launch import Launch
from cupyconv.planning import Device
from tests.cubins import Resources, resources

from . import tensormap
from .build import BuildError, build_library

DEFAULT_SHARED_BYTES = 48 << 10
"""Static and dynamic shared memory of a block together, unless a kernel is allowed more."""

MOST_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
MOST_BLOCK = (1024, 1024, 64)
MOST_THREADS = 1024
PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every chip with clusters can hold at once."""

PARAMETER_BYTES = 4096
"""Of a kernel, with any driver; those since CUDA 12.1 take more of some chips."""

MAP_ALIGNMENT = 64
"""Bytes that the address of a tensor map is a multiple of."""

# Bits of cudaOccLimitingFactor.
_LIMITS = {1: "threads", 2: "registers", 4: "shared memory", 8: "blocks", 16: "barriers"}


class Refusal(ValueError):
    """The driver would refuse this; the message has the rule and the figures."""


@dataclass(frozen=True)
class Chip:
    """What a compute capability has.

    Attributes:
        capability: such as (9, 0).
        shared_per_block: the most shared memory, in bytes, that a kernel may be allowed.
        shared_per_multiprocessor: in bytes.
        reserved_shared: bytes of each block that the system keeps for itself.
        threads: that a multiprocessor holds.
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
    """A loaded kernel as the driver knows it: what it may take, and which launches are refused."""

    def __init__(self, name: str, chip: Chip, resources: Resources) -> None:
        """
        Args:
            name: of the kernel, and of its variant, for messages.
            chip: that it is loaded on.
            resources: what its cubin says.
        """
        self._name = name
        self._chip = chip
        self._resources = resources
        self._allowed: int | None = None

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Dynamic shared memory that the kernel may be launched with, in bytes."""
        if self._allowed is None:
            return DEFAULT_SHARED_BYTES - self._resources.static_shared
        return self._allowed

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, dynamic: int) -> None:
        most = self._chip.shared_per_block
        static = self._resources.static_shared
        if static + dynamic > most:
            raise self._refusal(
                f"{dynamic} bytes of dynamic shared memory and {static} static ones are more than "
                f"the {most} that a block can be allowed"
            )
        self._allowed = dynamic

    def allow(self, dynamic: int) -> None:
        """Let it be launched with at least so much dynamic shared memory."""
        if self.max_dynamic_shared_size_bytes < dynamic:
            self.max_dynamic_shared_size_bytes = dynamic

    def require_launchable(self, grid: Sequence[int], block: Sequence[int], dynamic: int) -> None:
        """What the driver checks of a launch, apart from its arguments.

        Args:
            grid, block: three extents each.
            dynamic: bytes of dynamic shared memory.

        Raises:
            Refusal: with the rule and the figures.
        """
        kernel, chip = self._resources, self._chip
        for word, extents, most in (("grid", grid, MOST_GRID), ("block", block, MOST_BLOCK)):
            if not all(1 <= one <= limit for one, limit in zip(extents, most, strict=True)):
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
                f"clusters of {cluster} are more than the {PORTABLE_CLUSTER} blocks that are sure "
                "to be resident together"
            )
        if any(extent % size for extent, size in zip(grid, cluster, strict=True)):
            raise self._refusal(
                f"runs in clusters of {cluster}: a grid of {tuple(grid)} is no multiple"
            )

    def require_arguments(self, sizes: Sequence[int], arguments: Sequence[Any]) -> None:
        """What has to hold of a launch's arguments.

        The driver itself copies as many bytes as the kernel declares from wherever it is pointed
        to, and says nothing.

        Args:
            sizes: bytes of each.
            arguments: as they were given; those that are tensor maps are told by their dtype.

        Raises:
            Refusal: with the rule and the figures.
        """
        parameters = self._resources.parameters
        wanted = [parameter.size for parameter in parameters]
        if wanted != list(sizes):
            raise self._refusal(f"takes arguments of {wanted} bytes: got {list(sizes)}")
        if parameters:
            last = parameters[-1]
            taken = last.address - parameters[0].address + last.size
            if taken > PARAMETER_BYTES:
                raise self._refusal(f"takes {taken} bytes of arguments, {PARAMETER_BYTES} fit")
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
    """A kernel whose launches are only checked."""

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
    """Loads kernels with NVRTC's cubins, and checks their launches without running them.

    Stands in for ``cupyconv.gpu.launch.CupyRuntime``; arrays are their addresses, as np.uint64.
    """

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self._functions: dict[tuple[Any, ...], CheckedFunction] = {}

    def load(self, launches: Sequence[Launch]) -> None:
        pass  # each is, when it is asked for

    def kernel(self, launch: Launch) -> CheckedFunction:
        """A function that all launches of a variant share, as those of a module do."""
        key = (launch.source, launch.defines, launch.entry)
        if key not in self._functions:
            takes = compiled(launch.source, launch.defines, self.architecture)[launch.entry]
            chip = chip_of(self.architecture)
            self._functions[key] = CheckedFunction(variant_name(launch), chip, takes)
        return self._functions[key]

    def allow(self, kernel: CheckedFunction, shared_bytes: int) -> None:
        kernel.allow(shared_bytes)

    def address(self, array: np.uint64) -> int:
        return int(array)

    encode = staticmethod(tensormap.encode)


@cache
def cubin(
    source: str, defines: tuple[tuple[str, str | int], ...], architecture: str
) -> tuple[bytes, str]:
    """The cubin of a shipped variant, and the compiler's log."""
    return compiler.compile_cubin(sources.load(source), dict(defines), architecture)


@cache
def compiled(
    source: str, defines: tuple[tuple[str, str | int], ...], architecture: str
) -> dict[str, Resources]:
    """The resources of a shipped variant's kernels, by name."""
    return resources(*cubin(source, defines, architecture))


def variant_name(launch: Launch) -> str:
    """A launch's kernel and its variant, for messages."""
    macros = " ".join(f"-D{name}={value}" for name, value in launch.defines)
    return f"{launch.entry} ({launch.source} {macros})"


def chip_of(architecture: str) -> Chip:
    """The chip of an architecture such as "sm_90a"."""
    return CHIPS[Device.of(architecture).capability]


def three(extents: Sequence[int]) -> list[int]:
    """A grid's or block's one to three extents, as three."""
    values = [int(extent) for extent in extents]
    if not 1 <= len(values) <= 3:
        raise ValueError(f"a grid or block has one to three extents: got {tuple(extents)}")
    return values + [1] * (3 - len(values))


def resident_blocks(
    chip: Chip, kernel: Resources, threads: int, dynamic: int, allowed: int | None
) -> tuple[int, list[str]]:
    """Blocks of a kernel that a multiprocessor holds at a time, and what limits them."""
    limits = ctypes.c_uint()
    found = _calculator().resident_blocks(
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
    if found < 0:
        raise Refusal(f"the occupancy calculator takes no {threads} threads on {chip}")
    return found, [word for bit, word in _LIMITS.items() if limits.value & bit]


@cache
def _calculator() -> ctypes.CDLL:
    source = Path(__file__).with_name("occupancy.cpp")
    folder = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "include")
    header = folder / "cuda_occupancy.h"
    if not header.exists():
        raise BuildError("the occupancy calculator is missing: pip install nvidia-cuda-runtime")
    texts = [source.read_text(), header.read_text()]
    return ctypes.CDLL(str(build_library("occupancy", [source], texts, [folder])))
