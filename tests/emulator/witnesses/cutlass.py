"""CUTLASS's kernels for compute capability 8.0 and their launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from cupyconv import ConvError, ConvProblem, arrays
from cupyconv.problem import PASSES

from .. import driver
from ..module import EmulatedKernel, EmulatedModule, Outcome
from . import assembled, compiled, resources_of

THREADS = 128
SHARED_BYTES = 48 << 10
TILE = 64  # GEMM tile, rows and columns


@dataclass(frozen=True)
class Gemm:
    """An instance of the GEMM; the attributes become macros of its file.

    Attributes:
        dtype: dtype of all matrices; float32 is multiplied as TF32.
        vector: elements per copy.
        instruction: m and k of the mma.sync.
        tile_k: k extent of a tile.
        arch, stages: target chip, and number of pipeline stages.
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
class Convolution:
    """An instance of the convolution; the attributes become macros of its file.

    Attributes:
        tile: rows and columns of a tile.
        tile_k: k extent of a tile.
        dtype: dtype of all tensors.
        warps: warps per block along both axes.
        instruction: m, n and k of the mma.sync; (1, 1, 1) for fused multiply-adds.
        vector: elements per copy.
        stages: number of pipeline stages.
    """

    tile: int
    tile_k: int
    dtype: str = "float16"
    warps: tuple[int, int] = (2, 2)
    instruction: tuple[int, int, int] = (16, 8, 16)
    vector: int = 8
    stages: int = 4

    @property
    def threads(self) -> int:
        return prod(self.warps) * 32

    @property
    def shared_bytes(self) -> int:
        """Bytes of all stages; rows are padded if elements are copied singly."""
        line = self.tile + (4 if self.vector == 1 else 0)
        itemsize = arrays.numpy_dtype(self.dtype).itemsize
        return self.stages * 2 * line * self.tile_k * itemsize


CONVOLUTIONS = {
    ("float16", 64): Convolution(64, 32, stages=3),
    ("float16", 128): Convolution(128, 32),
    ("bfloat16", 128): Convolution(128, 32, "bfloat16"),
    ("float32", 128): Convolution(128, 8, "float32", (4, 2), (1, 1, 1), vector=1),
    ("tf32", 128): Convolution(128, 16, "float32", (2, 2), (16, 8, 8), vector=4),
    ("float64", 128): Convolution(128, 16, "float64", (4, 2), (8, 8, 4), vector=1, stages=3),
}
"""Instances by operand type and tile."""


@dataclass(frozen=True)
class ConvolutionLaunch:
    """One pass of a problem by CUTLASS's implicit GEMM for compute capability 8.0.

    Attributes:
        instance: the launched instance.
        pass_: the pass.
        is_strided: whether it uses stride phases.
        roles: names (x, w, y) of the operands and the result, in the kernel's order.
        grid: blocks along each axis.
        numbers: the arguments after the arrays.
    """

    instance: Convolution
    pass_: str
    is_strided: bool
    roles: tuple[str, str, str]
    grid: tuple[int, int]
    numbers: tuple[np.int32, ...]

    def kernel(self, counted: bool = False) -> EmulatedKernel:
        """Return the kernel, with the resources of its cubin.

        Args:
            counted: add counters of executed instructions.

        Raises:
            MissingError: the packages are not installed.
        """
        instance = self.instance
        element, sum_ = _ELEMENTS[instance.dtype]
        is_plain = prod(instance.instruction) == 1
        defines = {
            "PASS": PASSES.index(self.pass_),
            "STRIDED": int(self.is_strided),
            "ELEMENT": element,
            "SUM": sum_,
            "OPERATION": "OpClassSimt" if is_plain else "OpClassTensorOp",
            "TILE": instance.tile,
            "TILE_K": instance.tile_k,
            "WARPS_M": instance.warps[0],
            "WARPS_N": instance.warps[1],
            **{
                f"INSTRUCTION_{axis}": n
                for axis, n in zip("MNK", instance.instruction, strict=True)
            },
            "STAGES": instance.stages,
            "VECTOR": instance.vector,
            "SHARED_BYTES": instance.shared_bytes,
        }
        macros = tuple((name, str(value)) for name, value in defines.items())
        kernel = _kernel("cutlass_conv_sm80", "conv", macros, counted)
        kernel.allow(instance.shared_bytes)
        return kernel

    def run(self, kernel: EmulatedKernel, *tensors: np.ndarray) -> Outcome:
        """Run the kernel on the tensors named by ``roles``."""
        arguments = (*tensors, *self.numbers)
        return kernel(self.grid, (self.instance.threads,), arguments, self.instance.shared_bytes)


def instance_of(numbers: str, tile: int = 128) -> Convolution:
    """Return one of CONVOLUTIONS; ConvError if it does not exist."""
    if (numbers, tile) not in CONVOLUTIONS:
        raise ConvError(
            "CUTLASS's instances must include the operand type and the tile",
            f"{numbers}, {tile}",
            f"Use one of {', '.join(f'{name} {edge}x{edge}' for name, edge in CONVOLUTIONS)}",
        )
    return CONVOLUTIONS[numbers, tile]


def gemm_grid(m: int, n: int, tile: int = TILE) -> tuple[int, int]:
    """Return the grid of a matrix product of m rows and n columns."""
    return -(-m // tile), -(-n // tile)


def convolution(problem: ConvProblem, pass_: str, instance: Convolution) -> ConvolutionLaunch:
    """Return the launch of a pass.

    Raises:
        ConvError: the instance does not support the problem.
    """
    uniform = all(len(set(extents)) == 1 for extents in (problem.stride, problem.dilation))
    paddings = {side for pair in problem.padding for side in pair}
    supported = (
        problem.dtype == instance.dtype
        and problem.data_format == "NHWC"
        and problem.filter_format == "OHWI"
        and problem.groups == 1
        and problem.C % instance.vector == problem.K % instance.vector == 0
    )
    if not supported or not uniform or len(paddings) != 1:
        raise ConvError(
            "CUTLASS's instances must fit the problem",
            f"{problem}",
            f"Use {instance.dtype} in NHWC, with one padding, stride and dilation for all axes",
        )
    n, *spatial, c = problem.input_shape
    k, *window, _ = problem.filter_shape
    stride, outputs = problem.stride[0], prod(problem.output_shape) // k
    is_strided = pass_ == "backprop_input" and stride > 1
    # All stride phases use the pixel count of the largest.
    phase = n * prod(-(-size // stride) for size in spatial)
    roles, size = {
        "forward": (("x", "w", "y"), (outputs, k)),
        "backprop_input": (("y", "w", "x"), (phase, c)),
        "backprop_filter": (("y", "x", "w"), (k, prod(window) * c)),
    }[pass_]
    rows, columns = gemm_grid(*size, instance.tile)
    grid = (rows * stride**2 if is_strided else rows, columns)
    numbers = (n, *spatial, c, k, *window, paddings.pop(), stride, problem.dilation[0])
    return ConvolutionLaunch(
        instance, pass_, is_strided, roles, grid, tuple(map(np.int32, numbers))
    )


def gemm_kernel(name: str = "f16") -> EmulatedKernel:
    """Return the kernel of one of GEMMS; raises as ``ConvolutionLaunch.kernel``."""
    instance = GEMMS[name]
    element, sum_ = _ELEMENTS[instance.dtype]
    defines = {
        "ELEMENT": element,
        "SUM": sum_,
        "ARCH": instance.arch,
        "INSTRUCTION_M": instance.instruction[0],
        "INSTRUCTION_K": instance.instruction[1],
        "TILE_K": instance.tile_k,
        "STAGES": instance.stages,
        "VECTOR": instance.vector,
    }
    macros = tuple((macro, str(value)) for macro, value in defines.items())
    return _kernel("cutlass_gemm_sm80", "gemm", macros, False)


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
    )
    return module.get_function(entry)
