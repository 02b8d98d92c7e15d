"""The implementations of the passes, a module each.

A kernel family is added with its module here, the one of the same name in cupyconv/gpu that works
out its launches, cuda/conv_{name}.cu, and one line below.  Two are otherwise: cuda-generic has a
file for each pass, and cuda-hopper-bf16x6 is of the launches and the product of cuda-hopper.
"""

from cupyconv.planning.families.cpu import NUMPY, REFERENCE
from cupyconv.planning.families.direct import CUDA_DIRECT
from cupyconv.planning.families.family import Candidate, Family, Tile
from cupyconv.planning.families.gather import CUDA_GATHER
from cupyconv.planning.families.generic import CUDA_GENERIC
from cupyconv.planning.families.hopper import CUDA_HOPPER
from cupyconv.planning.families.hopper_bf16x6 import CUDA_HOPPER_BF16X6
from cupyconv.planning.families.patch import CUDA_PATCH
from cupyconv.planning.families.toeplitz import CUDA_TOEPLITZ

__all__ = ["FAMILIES", "Candidate", "Family", "Tile"]

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
        CUDA_HOPPER,
        CUDA_HOPPER_BF16X6,
    )
}
"""All implementations by name."""
