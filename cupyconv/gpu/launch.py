"""From a plan and arrays to a kernel launch.

What is launched is worked out without touching a GPU; a Runtime, which is CuPy's here and the CPU
emulator's in the tests, loads kernels and runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.gpu import compiler, parameters, sources
from cupyconv.gpu.parameters import Strides
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ConvProblem

Kernel = Callable[..., None]
"""Called as kernel(grid, block, arguments, shared_mem=bytes), like a cupy.RawKernel."""

# Element types in cuda/include/numeric.cuh.
STORAGE = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
_NULL = np.uint64(0)
_BIAS_THREADS = 256


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the memory's addresses.

    Attributes:
        source: kernel file in cuda/; the kernel has the file's name.
        defines: macros that make the variant.
        grid, block: launch dimensions; an empty grid means that there is nothing to do.
        shared_bytes: dynamic shared memory.
        parameters: the parameter struct, a 1-element array.
    """

    source: str
    defines: tuple[tuple[str, str | int], ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    parameters: np.ndarray

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return self.source.removesuffix(".cu")


class Runtime(Protocol):
    """What launching needs of a GPU, or of what stands in for one."""

    def kernel(self, launch: Launch) -> Kernel:
        """The loaded kernel of a launch's variant."""
        ...


def prepare(
    pass_plan: PassPlan, problem: ConvProblem, strides: Strides, activation: str | None = None
) -> Launch:
    """The launch of one planned pass.

    Args:
        pass_plan: a plan for a GPU.
        strides: of x or dx, w or dw, y or dy and the bias, in elements.
        activation: None, "relu", "silu" or "gelu"; of the forward pass only.
    """
    tile = pass_plan.tile
    assert tile is not None, f"{pass_plan.implementation} has no kernel"
    defines: dict[str, str | int] = {
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "THREAD_M": tile.thread_m,
        "THREAD_N": tile.thread_n,
    }
    return Launch(
        source=pass_plan.family.source(pass_plan.pass_),
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks,),
        block=(tile.threads,),
        shared_bytes=0,
        parameters=parameters.pack(problem, strides, activation),
    )


def prepare_bias(problem: ConvProblem, strides: Strides) -> Launch:
    """The launch of the bias gradient: one block for each output channel."""
    defines: dict[str, str | int] = {
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": parameters.index_type(problem, strides),
        "THREADS": _BIAS_THREADS,
    }
    return Launch(
        source="conv_backprop_bias.cu",
        defines=tuple(defines.items()),
        grid=(problem.K,),
        block=(_BIAS_THREADS,),
        shared_bytes=0,
        parameters=parameters.pack(problem, strides),
    )


def run(launch: Launch, operands: tuple[Any, ...], runtime: Runtime) -> None:
    """Run a launch on arrays, in the order of the kernel's pointer arguments; None is null."""
    if 0 in launch.grid:
        return
    pointers = tuple(_NULL if operand is None else operand for operand in operands)
    kernel = runtime.kernel(launch)
    kernel(
        launch.grid, launch.block, (*pointers, launch.parameters), shared_mem=launch.shared_bytes
    )


class CupyRuntime:
    """Kernels on the current CuPy device and stream."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def kernel(self, launch: Launch) -> Kernel:
        return _load(launch.source, launch.defines, self.architecture)


@cache
def _load(source: str, defines: tuple[tuple[str, str | int], ...], architecture: str) -> Kernel:
    # CuPy keeps one loaded module per device behind a RawKernel, so one per architecture is enough.
    path = compiler.cached_cubin(sources.load(source), dict(defines), architecture)
    module = arrays.cupy().RawModule(path=str(path))
    return module.get_function(source.removesuffix(".cu"))
