"""The parameter struct of the kernels, for NumPy.

The same fields as ``ConvParameters`` in cuda/include/parameters.cuh, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyconv.planning.families.family import spatial
from cupyconv.planning.reach import MARGIN, largest_index
from cupyconv.planning.request import ACTIVATIONS
from cupyconv.planning.strides import Strides
from cupyconv.problem import ConvProblem

SPATIAL = 3
ACTIVATION: dict[str | None, int] = {word: number for number, word in enumerate(ACTIVATIONS)}
"""Values of the macro of that name: ``enum Activation`` in cuda/include/epilogue.cuh."""

CONV_PARAMETERS = np.dtype(
    [
        ("batch", np.int64),
        ("groups", np.int64),
        ("channels", np.int64),
        ("filters", np.int64),
        ("input", np.int64, SPATIAL),
        ("filter", np.int64, SPATIAL),
        ("output", np.int64, SPATIAL),
        ("stride", np.int64, SPATIAL),
        ("pad", np.int64, SPATIAL),
        ("dilation", np.int64, SPATIAL),
        ("x_stride", np.int64, 2 + SPATIAL),
        ("w_stride", np.int64, 2 + SPATIAL),
        ("y_stride", np.int64, 2 + SPATIAL),
        ("bias_stride", np.int64),
    ],
    align=True,
)


def pack(problem: ConvProblem, strides: Strides) -> np.ndarray:
    """The parameter struct of a problem, as a 1-element array of CONV_PARAMETERS."""
    record = np.zeros(1, CONV_PARAMETERS)
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
    return record


def index_type(problem: ConvProblem, strides: Strides, numbered: int = 0) -> str:
    """The C++ type of a kernel's indices and offsets: ``int`` where nothing leaves 32 bits.

    Args:
        problem, strides: of the tensors.
        numbered: how many there are of what the kernel numbers beside them.
    """
    largest = max(largest_index(problem, strides), numbered + MARGIN)
    return "int" if largest < 2**31 else "long long"


def _ordered(strides: Sequence[int], axes: Sequence[int]) -> list[int]:
    steps = [strides[axis] for axis in axes]
    return [*steps[:2], *spatial(steps[2:], 0)]
