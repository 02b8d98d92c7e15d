"""CUTLASS's kernels for compute capability 8.0 as they are launched here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cupyconv import ConvError, ConvProblem
from cupyconv.problem import PASSES

from .. import driver
from ..module import EmulatedKernel, EmulatedModule
from . import assembled, compiled, resources_of

THREADS = 128
SHARED_BYTES = 48 << 10
TILE = 64  # along both axes of the result, of a GEMM
STAGES = {64: 3, 128: 4}
"""Of a convolution's tile."""


@dataclass(frozen=True)
class Gemm:
    """An instance of the GEMM, by the macros of its file.

    Attributes:
        dtype: of all matrices; float32 is multiplied as TF32.
        vector: elements that are copied at once.
        instruction: m and k of the mma.sync.
        tile_k: of a block.
        arch, stages: for which chip, and steps of k under way.
    """

    dtype: str
    vector: int
    instruction: tuple[int, int] = (16, 16)
    tile_k: int = 32
    arch: str = "Sm80"
    stages: int = 3


GEMMS = {
    "f16": Gemm("float16", 8),
    "f16-copies-of-4": Gemm("float16", 2),
    "f16-sm75": Gemm("float16", 8, (16, 8), arch="Sm75", stages=2),
    "bf16": Gemm("bfloat16", 8),
    "tf32": Gemm("float32", 4, (16, 8), 16),
    "f64": Gemm("float64", 1, (8, 4), 16),
}
_ELEMENTS = {
    "float16": ("cutlass::half_t", "float"),
    "bfloat16": ("cutlass::bfloat16_t", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}


@dataclass(frozen=True)
class ConvolutionLaunch:
    """One pass of a problem by CUTLASS's implicit GEMM for compute capability 8.0.

    Attributes:
        roles: which of x, w and y are the operands, and the result, in the kernel's order.
        grid: blocks along each axis.
        shared_bytes: dynamic shared memory.
        numbers: the arguments after the arrays.
    """

    roles: tuple[str, str, str]
    grid: tuple[int, int]
    shared_bytes: int
    numbers: tuple[np.int32, ...]


def gemm_grid(m: int, n: int, tile: int = TILE) -> tuple[int, int]:
    """Blocks of a matrix product of m rows and n columns."""
    return -(-m // tile), -(-n // tile)


def convolution(problem: ConvProblem, pass_: str, tile: int = TILE) -> ConvolutionLaunch:
    """The launch of a pass.

    Args:
        problem, pass_: what is computed.
        tile: of a block, along both axes of the result; one of STAGES.

    Raises:
        ConvError: the instances here do not take the problem.
    """
    n, *spatial, c = problem.input_shape
    k, *window, _ = problem.filter_shape
    takes = (
        problem.dtype == "float16"
        and problem.data_format == "NHWC"
        and problem.filter_format == "OHWI"
        and problem.groups == 1
        and c % 8 == k % 8 == 0
        and (pass_ != "backprop_input" or set(problem.stride) == {1})
    )
    same = all(len(set(one)) == 1 for one in (problem.stride, problem.dilation))
    paddings = {side for pair in problem.padding for side in pair}
    if not takes or not same or len(paddings) != 1:
        raise ConvError(
            "CUTLASS's instances must fit the problem",
            f"{problem}",
            "Take float16 in NHWC with alike sides",
        )
    pixels = n * int(np.prod(spatial))
    outputs = int(np.prod(problem.output_shape)) // k
    roles, size = {
        "forward": (("x", "w", "y"), (outputs, k)),
        "backprop_input": (("y", "w", "x"), (pixels, c)),
        "backprop_filter": (("y", "x", "w"), (k, int(np.prod(window)) * c)),
    }[pass_]
    numbers = (n, *spatial, c, k, *window, paddings.pop(), problem.stride[0], problem.dilation[0])
    return ConvolutionLaunch(
        roles, gemm_grid(*size, tile), _shared_bytes(tile), tuple(map(np.int32, numbers))
    )


def _shared_bytes(tile: int) -> int:
    return STAGES[tile] * 2 * tile * 32 * 2


def convolution_kernel(pass_: str, tile: int = TILE, counted: bool = False) -> EmulatedKernel:
    """The kernel of a pass, with what its cubin takes.

    Args:
        pass_, tile: as for ``convolution``.
        counted: with counters of executed instructions.

    Raises:
        MissingError: the packages are not installed.
    """
    numbers = {"PASS": PASSES.index(pass_), "TILE": tile, "STAGES": STAGES[tile]}
    defines = {**numbers, "SHARED_BYTES": _shared_bytes(tile)}
    written = tuple((name, str(value)) for name, value in defines.items())
    kernel = _kernel("cutlass_conv_sm80", "conv", written, counted)
    kernel.allow(_shared_bytes(tile))
    return kernel


def gemm_kernel(name: str = "f16") -> EmulatedKernel:
    """The kernel of one of GEMMS; raises as ``convolution_kernel``."""
    chosen = GEMMS[name]
    element, sum_ = _ELEMENTS[chosen.dtype]
    defines = {
        "ELEMENT": element,
        "SUM": sum_,
        "ARCH": chosen.arch,
        "INSTRUCTION_M": chosen.instruction[0],
        "INSTRUCTION_K": chosen.instruction[1],
        "TILE_K": chosen.tile_k,
        "STAGES": chosen.stages,
        "VECTOR": chosen.vector,
    }
    written = tuple((macro, str(value)) for macro, value in defines.items())
    return _kernel("cutlass_gemm_sm80", "gemm", written, False)


@cache
def _kernel(
    name: str, entry: str, defines: tuple[tuple[str, str], ...], counted: bool
) -> EmulatedKernel:
    text = compiled(name, "sm_80", defines)
    module = EmulatedModule.from_ptx(
        text,
        name,
        chip=driver.chip_of("sm_80"),
        resources=resources_of(text, "sm_80"),
        cubin=assembled(text, "sm_80")[0],
        counted=counted,
    )
    return module.get_function(entry)
