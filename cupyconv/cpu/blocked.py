"""The passes as blocks of the im2col matrix times the filter.

Outputs are taken a few rows at a time.  For each block, the pixels under its windows are copied
into a buffer of at most BUFFER_BYTES (or one output row's worth, if that is more), and one matrix
product per image and group does the rest.  16-bit types are computed in float32, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from cupyconv.cpu.activations import activate
from cupyconv.cpu.views import data_view, filter_view, taps
from cupyconv.problem import ConvProblem

BUFFER_BYTES = 4 << 20
"""Size that the buffer of gathered pixels is kept under: about what a core's cache holds."""

ALL = slice(None)


def forward(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
    y: np.ndarray,
) -> None:
    """y = act(bias + filter matrix @ im2col(x))."""
    accumulator = _accumulator(problem)
    rows = _filter_matrix(problem, w, accumulator)
    added: Any = None if bias is None else bias.astype(accumulator).reshape(problem.groups, -1, 1)
    y_view = data_view(problem, y)
    for image, outputs, columns in _blocks(problem, data_view(problem, x), accumulator):
        block = rows @ columns
        if added is not None:
            block += added
        target = y_view[(image, ALL, ALL, outputs)]
        target[...] = activate(block, activation).reshape(target.shape)


def backprop_input(problem: ConvProblem, w: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = col2im(filter matrix transposed @ dy): products are added where pixels came from."""
    accumulator = _accumulator(problem)
    rows = _filter_matrix(problem, w, accumulator).transpose(0, 2, 1)
    dx_view, dy_view = data_view(problem, dx), data_view(problem, dy)
    all_taps = list(taps(problem))
    channels = problem.C // problem.groups
    for image in range(problem.N):
        gathered: Any = np.zeros(dx_view.shape[1:], accumulator)
        for outputs in _output_rows(problem, accumulator):
            block = dy_view[image][:, :, outputs].astype(accumulator)
            columns = rows @ block.reshape(*block.shape[:2], -1)
            columns = columns.reshape(problem.groups, channels, len(all_taps), *block.shape[2:])
            for number, (_, tap_outputs, tap_inputs) in enumerate(all_taps):
                source, first = _clip(problem, tap_outputs, tap_inputs, outputs)
                gathered[(ALL, ALL, first, *tap_inputs[1:])] += columns[
                    (ALL, ALL, number, source, *tap_outputs[1:])
                ]
        dx_view[image] = gathered


def backprop_filter(problem: ConvProblem, x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """dw = sum over blocks of dy @ im2col(x) transposed, in a fixed order."""
    accumulator = _accumulator(problem)
    dw_view, dy_view = filter_view(problem, dw), data_view(problem, dy)
    total: Any = np.zeros(
        (problem.groups, problem.K // problem.groups, _gemm_k(problem)), accumulator
    )
    for image, outputs, columns in _blocks(problem, data_view(problem, x), accumulator):
        block = dy_view[image][:, :, outputs].astype(accumulator)
        total += block.reshape(*block.shape[:2], -1) @ columns.transpose(0, 2, 1)
    dw_view[...] = total.reshape(dw_view.shape)


def _accumulator(problem: ConvProblem) -> type:
    return np.float64 if problem.dtype == "float64" else np.float32


def _gemm_k(problem: ConvProblem) -> int:
    return problem.C // problem.groups * prod(problem.filter_sizes)


def _filter_matrix(problem: ConvProblem, w: np.ndarray, accumulator: type) -> np.ndarray:
    """w as (G, K/G, C/G * taps)."""
    view: Any = filter_view(problem, w).astype(accumulator)
    return view.reshape(*view.shape[:2], -1)


def _output_rows(problem: ConvProblem, accumulator: type) -> Iterator[slice]:
    """The first spatial axis of y in pieces whose gathered pixels fit the buffer."""
    rows, *others = problem.output_sizes
    row_bytes = problem.groups * _gemm_k(problem) * prod(others) * np.dtype(accumulator).itemsize
    step = max(BUFFER_BYTES // row_bytes, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _blocks(
    problem: ConvProblem, x: np.ndarray, accumulator: type
) -> Iterator[tuple[int, slice, np.ndarray]]:
    """(image, output rows, im2col(x) of these rows as (G, C/G * taps, pixels)) for every block."""
    all_taps = list(taps(problem))
    channels = problem.C // problem.groups
    for image in range(problem.N):
        for outputs in _output_rows(problem, accumulator):
            size = (outputs.stop - outputs.start, *problem.output_sizes[1:])
            columns = np.zeros((problem.groups, channels, len(all_taps), *size), accumulator)
            for number, (_, tap_outputs, tap_inputs) in enumerate(all_taps):
                target, first = _clip(problem, tap_outputs, tap_inputs, outputs)
                columns[(ALL, ALL, number, target, *tap_outputs[1:])] = x[
                    (image, ALL, ALL, first, *tap_inputs[1:])
                ]
            yield image, outputs, columns.reshape(problem.groups, channels * len(all_taps), -1)


def _clip(
    problem: ConvProblem, tap_outputs: tuple, tap_inputs: tuple, block: slice
) -> tuple[slice, slice]:
    """Of a tap's pairs on the first spatial axis, those in a block of outputs.

    Returns:
        The outputs, counted from the block's first, and the inputs that go with them.
    """
    stride = problem.stride[0]
    first = max(tap_outputs[0].start, block.start)
    last = max(min(tap_outputs[0].stop, block.stop), first)
    if first == last:
        return slice(0, 0), slice(0, 0)
    begin = tap_inputs[0].start + (first - tap_outputs[0].start) * stride
    inputs = slice(begin, begin + (last - first - 1) * stride + 1, stride)
    return slice(first - block.start, last - block.start), inputs
