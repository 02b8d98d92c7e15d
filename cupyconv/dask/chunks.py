"""Chunk sizes: requirements on operands, and sizes that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import dask.array as da

from cupyconv import arrays
from cupyconv.errors import ConvError
from cupyconv.problem import ITEMSIZE, ConvProblem, integer, require_problem

# Smallest ratio of chunk length to halo; below it, the next axis is divided (hand-set).
_LENGTH_OF_HALO = 16


def suggest_chunks(problem: ConvProblem, memory_limit: int) -> tuple[tuple[int, ...], ...]:
    """Suggest chunks of x such that each task of each pass takes at most a quarter of the memory.

    The other three quarters are for finished chunks and transfers.

    Args:
        problem: the layer.
        memory_limit: bytes per concurrent task: a worker's memory limit divided by its number of
            threads.

    Returns:
        The chunk sizes on every axis of x, as accepted by ``rechunk`` and ``from_array``.

    Raises:
        ConvError: the filter and one window of pixels do not fit into a quarter of the memory.
        ConvTypeError: ``problem`` is not a ConvProblem, or the limit is not an integer.

    >>> problem = cupyconv.ConvProblem((8, 4, 64, 64), (8, 4, 3, 3), padding=1)
    >>> cd.suggest_chunks(problem, memory_limit=2**20)
    ((1, 1, 1, 1, 1, 1, 1, 1), (4,), (32, 32), (64,))
    """
    require_problem("suggest_chunks", problem)
    memory_limit = integer("memory_limit", memory_limit)
    budget = memory_limit // 4
    strides = (1, *problem.stride)
    lengths = [max(problem.N, 1), *problem.input_sizes]
    while (needed := task_bytes(problem, lengths)) > budget:
        axis = 0 if lengths[0] > 1 else _axis_to_halve(problem, lengths)  # a batch has no halo
        shorter = ceil(lengths[axis] / 2 / strides[axis]) * strides[axis]
        if shorter >= lengths[axis]:
            raise ConvError(
                "a window of pixels, the filter and the output must fit into a quarter of the "
                "memory limit",
                f"they need {needed:,} bytes, the limit is {memory_limit:,}",
                f"Use a limit of at least {4 * needed:,} bytes, or fewer channels",
            )
        lengths[axis] = shorter
    chunks: list[tuple[int, ...]] = [(problem.C,)] * len(problem.input_shape)
    n_axis, _, *spatial = problem.data_axes
    totals = (problem.N, *problem.input_sizes)
    for axis, length, total in zip((n_axis, *spatial), lengths, totals, strict=True):
        whole, remainder = divmod(total, length)
        chunks[axis] = (length,) * whole + ((remainder,) if remainder or not whole else ())
    return tuple(chunks)


def _axis_to_halve(problem: ConvProblem, lengths: Sequence[int]) -> int:
    """Return the outermost spatial axis whose halves are long compared with their halo.

    Chunks that are divided along one axis have 2 neighbours; along two or three axes, they have 8
    or 26.  Each neighbour needs a task, so few axes are divided.  If all axes are short already,
    return the longest axis, because its halo is relatively smallest.

    Args:
        lengths: chunk lengths of the batch and of each spatial axis.
    """
    for number, axis in enumerate(problem.axes, 1):
        if lengths[number] >= 2 * _LENGTH_OF_HALO * max(axis.effective_filter - 1, 1):
            return number
    return max(range(1, len(lengths)), key=lengths.__getitem__)


def task_bytes(problem: ConvProblem, lengths: Sequence[int]) -> int:
    """Return the memory of the largest task for a chunk of x, in bytes: twice its arrays' size.

    The factor 2 is needed because joining pieces copies them.  16-bit dtypes are computed in
    float32 and count as float32.

    Args:
        lengths: lengths of the chunk along the batch and each spatial axis.
    """
    batch, *sizes = lengths
    inputs = outputs = 1
    for size, axis in zip(sizes, problem.axes, strict=True):
        inputs *= min(size + axis.effective_filter - 1, axis.input)
        outputs *= -(-size // axis.stride)
    elements = batch * (problem.C * inputs + problem.K * outputs) + 2 * prod(problem.filter_shape)
    return 2 * elements * max(ITEMSIZE[problem.dtype], 4)


def as_chunked(name: str, value: Any) -> da.Array:
    """Return a Dask array with known chunk sizes; any other array becomes one chunk."""
    if not isinstance(value, da.Array):
        array, _ = arrays.take(name, value)
        return da.from_array(array, chunks=-1, asarray=False)
    arrays.take(name, value._meta)
    for axis, sizes in enumerate(value.chunks):
        if any(size != size for size in sizes):  # only nan differs from itself
            raise ConvError(
                "the sizes of all chunks must be known, since shapes and halos follow from them",
                f"axis {axis} of {name} has chunks of unknown size (nan)",
                f"Call {name}.compute_chunk_sizes(), or create the array with a known shape",
            )
    return value
