"""The launch that adds up a filter gradient's chunks (cuda/include/chunks.cuh)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from cupyconv.gpu.launch import Launch
from cupyconv.planning.cost import ADDING_THREADS
from cupyconv.problem import ConvProblem


def reduction(product: Launch, problem: ConvProblem, chunks: int) -> Launch:
    """The launch after ``product``, which left the sums of so many chunks in the workspace."""
    packed = product.arguments[-1]
    return replace(
        product,
        entry=f"{product.entry}_reduce",
        grid=(-(-prod(problem.filter_shape) // ADDING_THREADS),),
        block=(ADDING_THREADS,),
        shared_bytes=0,
        arguments=("workspace", "w", np.int32(chunks), packed),
    )
