"""Registry of the implementations.

A kernel family ``cuda-{name}`` has a line in FAMILIES and two files,
``cupyconv/kernels/{name}.py`` and ``cuda/conv_{name}.cu``.  cuda-generic has a .cu file per pass;
cuda-hopper-bf16x6 uses the kernel of cuda-hopper.
"""

from cupyconv.cpu.families import NUMPY, REFERENCE
from cupyconv.kernels.columns import CUDA_COLUMNS
from cupyconv.kernels.direct import CUDA_DIRECT
from cupyconv.kernels.family import Family
from cupyconv.kernels.gather import CUDA_GATHER
from cupyconv.kernels.generic import CUDA_GENERIC
from cupyconv.kernels.hopper import CUDA_HOPPER
from cupyconv.kernels.hopper_bf16x6 import CUDA_HOPPER_BF16X6
from cupyconv.kernels.patch import CUDA_PATCH
from cupyconv.kernels.toeplitz import CUDA_TOEPLITZ

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        REFERENCE,
        NUMPY,
        CUDA_GENERIC,
        CUDA_GATHER,
        CUDA_DIRECT,
        CUDA_TOEPLITZ,
        CUDA_PATCH,
        CUDA_COLUMNS,
        CUDA_HOPPER,
        CUDA_HOPPER_BF16X6,
    )
}
"""All implementations by name."""
