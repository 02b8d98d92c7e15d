"""Views of the tensors that make every memory order look alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

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


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step) if indices else slice(0, 0)
