"""Arguments and macros that the kernels of several families take.

NumPy is imported only when launches are computed, so that planning works without NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from cupyconv.kernels.family import spatial
from cupyconv.kernels.limits import MARGIN, largest_index
from cupyconv.kernels.strides import Strides
from cupyconv.problem import ConvProblem

if TYPE_CHECKING:
    import numpy as np

SPATIAL = 3
"""Number of spatial axes in ConvParameters; missing axes are leading axes of one element."""


@cache
def parameters_type() -> np.dtype:
    """Return the NumPy dtype of the struct ``ConvParameters`` in cuda/include/parameters.cuh."""
    import numpy as np

    sizes = ("input", "filter", "output", "stride", "pad", "dilation")
    return np.dtype(
        [
            *((name, np.int64) for name in ("batch", "groups", "channels", "filters")),
            *((name, np.int64, SPATIAL) for name in sizes),
            *((name, np.int64, 2 + SPATIAL) for name in ("x_stride", "w_stride", "y_stride")),
            ("bias_stride", np.int64),
            ("fold_stride", np.int64, SPATIAL),
        ],
        align=True,
    )


def pack(problem: ConvProblem, strides: Strides) -> np.ndarray:
    """Return the parameter struct of a problem, as a 1-element array."""
    import numpy as np

    record = np.zeros(1, parameters_type())
    fields = record[0]
    fields["batch"] = problem.N
    fields["groups"] = problem.groups
    fields["channels"] = problem.C // problem.groups
    fields["filters"] = problem.K // problem.groups
    fields["input"] = spatial(problem.input_sizes)
    fields["filter"] = spatial(problem.filter_sizes)
    fields["output"] = spatial(problem.output_sizes)
    fields["stride"] = spatial(problem.stride)
    fields["pad"] = spatial([before for before, _ in problem.padding], 0)
    fields["dilation"] = spatial(problem.dilation)
    fields["x_stride"] = _ordered(strides.x, problem.data_axes)
    fields["w_stride"] = _ordered(strides.w, problem.filter_axes)
    fields["y_stride"] = _ordered(strides.y, problem.data_axes)
    fields["bias_stride"] = strides.bias
    fields["fold_stride"] = spatial([step for _, step in strides.fold], 0)
    return record


def fold_defines(problem: ConvProblem, strides: Strides) -> dict[str, str | int]:
    """Return the macros of cuda/include/fold.cuh; none if no pixels of x are folded."""
    if not strides.fold:
        return {}
    cells = spatial([cell for cell, _ in strides.fold])
    names = ("FOLD_D", "FOLD_H", "FOLD_W")
    return {"FOLD_CHANNELS": problem.C // prod(cells), **dict(zip(names, cells, strict=True))}


def index_type(problem: ConvProblem, strides: Strides, largest_count: int = 0) -> str:
    """Return the C++ type of a kernel's indices and offsets: ``int`` if all fit into 32 bits.

    Args:
        problem: the configuration.
        strides: strides of the tensors.
        largest_count: largest number that the kernel counts to, such as the rows of all images.
    """
    largest = max(largest_index(problem, strides), largest_count + MARGIN)
    return "int" if largest < 2**31 else "long long"


def _ordered(strides: Sequence[int], axes: Sequence[int]) -> list[int]:
    steps = [strides[axis] for axis in axes]
    return [*steps[:2], *spatial(steps[2:], 0)]
