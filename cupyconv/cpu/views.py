"""Views of the tensors that make every memory order look alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod

import numpy as np

from cupyconv.problem import ConvProblem


def data_view(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """x, y or a gradient of theirs as a view (N, G, channels of a group, *spatial)."""
    ordered = array.transpose(problem.data_axes)
    groups = problem.groups
    return ordered.reshape(len(ordered), groups, ordered.shape[1] // groups, *ordered.shape[2:])


def filter_view(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """w or its gradient as a view (G, K/G, C/G, *spatial)."""
    ordered = array.transpose(problem.filter_axes)
    groups = problem.groups
    return ordered.reshape(groups, problem.K // groups, *ordered.shape[1:])


def taps(problem: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple, tuple]]:
    """Every tap with the outputs whose window has it inside the input, and the inputs it reads.

    Yields:
        (tap, outputs, inputs): the tap's index in the filter's spatial axes, and index tuples for
        the spatial axes of y and of x that pair up element by element.
    """
    for tap in product(*(range(axis.filter) for axis in problem.axes)):
        pairs = list(zip(problem.axes, tap, strict=True))
        outputs = tuple(_slice(axis.outputs_of_tap(t)) for axis, t in pairs)
        inputs = tuple(_slice(axis.inputs_of_tap(t)) for axis, t in pairs)
        yield tap, outputs, inputs


def merged(array: np.ndarray, first: int) -> np.ndarray:
    """The array with its axes from ``first`` on as one, as a view.

    Raises:
        ValueError: it would have to be copied.
    """
    if not _is_mergeable(array, first):
        raise ValueError(f"the axes from {first} on of {array.strides} are no view as one")
    return array.reshape(*array.shape[:first], prod(array.shape[first:]))


def operand(array: np.ndarray, first: int, dtype: np.dtype) -> np.ndarray | None:
    """``merged``, as matrices that BLAS takes where they are; None if it does not."""
    if array.dtype != dtype or not array.flags.aligned or not _is_mergeable(array, first):
        return None
    flat = merged(array, first)
    if min(flat.strides) < 0 or min(flat.strides[-2:]) != flat.itemsize:
        return None
    return flat


def transpose_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, whose first axis is contiguous where target's last one is.

    NumPy would write along the first axis, a line of the cache for each number.  Line by line, what
    is written stays in the cache until it is whole.
    """
    for middle in np.ndindex(target.shape[1:-1]):
        target[:, *middle] = source[:, *middle]


def _is_mergeable(array: np.ndarray, first: int) -> bool:
    """Whether the axes from ``first`` on can be one without a copy."""
    axes = list(zip(array.shape[first:], array.strides[first:], strict=True))
    steps = [(n, step) for n, step in axes if n != 1]
    fits = all(outer == n * inner for (_, outer), (n, inner) in pairwise(steps))
    return fits or array.size == 0


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step) if indices else slice(0, 0)
