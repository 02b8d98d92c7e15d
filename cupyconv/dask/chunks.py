"""Chunks: what an operand has to have, and which sizes fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import dask.array as da

from cupyconv import arrays
from cupyconv.errors import ConvError, ConvTypeError
from cupyconv.problem import ITEMSIZE, ConvProblem, integer, require_problem

_LENGTH_OF_HALO = 16  # times which a chunk is long, before the next axis is cut


def suggest_chunks(problem: ConvProblem, memory_limit: int) -> tuple[tuple[int, ...], ...]:
    """Chunks of x under which every task of every pass keeps within a quarter of the memory.

    The rest is for what a worker holds beside a task: finished chunks, and others on their way.

    Args:
        problem: the layer.
        memory_limit: bytes that a worker has for each task that it runs at once: its memory limit
            divided by its threads.

    Returns:
        The chunks' sizes on every axis of x, as ``rechunk`` and ``from_array`` take them.

    Raises:
        ConvError: the filter and one window of pixels do not fit.
        ConvTypeError: ``problem`` is not a ConvProblem, or the limit no integer.
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
                "a window of pixels, the filter and their products must fit into a quarter of the "
                "memory limit",
                f"they need {needed:,} bytes, the limit is {memory_limit:,}",
                f"Use a limit of at least {4 * needed:,} bytes, or fewer channels",
            )
        lengths[axis] = shorter
    n, *sizes = lengths
    chunks: list[tuple[int, ...]] = [(problem.C,)] * len(problem.input_shape)
    totals = (problem.N, *problem.input_sizes)
    for axis, length, total in zip(
        (problem.data_axes[0], *problem.data_axes[2:]), (n, *sizes), totals, strict=True
    ):
        whole, rest = divmod(total, length)
        chunks[axis] = (length,) * whole + ((rest,) if rest or not whole else ())
    return tuple(chunks)


def _axis_to_halve(problem: ConvProblem, lengths: Sequence[int]) -> int:
    """The outermost spatial axis whose halves are long beside the halo that they read.

    Slabs have two neighbours, where blocks have eight or twenty-six and a task for a piece of each.
    Where every axis is short already it is the longest, whose halo is least.
    """
    for number, axis in enumerate(problem.axes, 1):
        if lengths[number] >= 2 * _LENGTH_OF_HALO * max(axis.effective_filter - 1, 1):
            return number
    return max(range(1, len(lengths)), key=lengths.__getitem__)


def task_bytes(problem: ConvProblem, lengths: Sequence[int]) -> int:
    """What the largest task holds for a chunk of x with these lengths: its arrays, twice.

    Twice, because pieces are copied when they are put together, and 16-bit types are computed in
    float32.
    """
    batch, *sizes = lengths
    axes = problem.axes
    inputs = [
        min(size + axis.effective_filter - 1, axis.input)
        for size, axis in zip(sizes, axes, strict=True)
    ]
    outputs = [-(-size // axis.stride) for size, axis in zip(sizes, axes, strict=True)]
    elements = batch * (problem.C * prod(inputs) + problem.K * prod(outputs)) + 2 * prod(
        problem.filter_shape
    )
    return 2 * elements * max(ITEMSIZE[problem.dtype], 4)


def as_chunked(name: str, value: Any) -> da.Array:
    """A Dask array with chunks of known sizes; another array becomes one chunk."""
    if not isinstance(value, da.Array):
        array, _ = arrays.take(name, value)
        return da.from_array(array, chunks=-1, asarray=False)
    arrays.require_plain(name, value._meta)
    for axis, sizes in enumerate(value.chunks):
        if any(size != size for size in sizes):  # nan
            raise ConvError(
                "the sizes of all chunks must be known, since shapes and halos follow from them",
                f"axis {axis} of {name} has chunks of unknown size (nan)",
                f"Call {name}.compute_chunk_sizes(), or give the array a shape when it is made",
            )
    return value


def shared_dtype(**given: da.Array) -> Any:
    """The dtype that the arrays share."""
    (first, array), *others = given.items()
    for name, other in others:
        if other.dtype != array.dtype:
            raise ConvTypeError(
                f"all arrays must have one dtype: {first} is {array.dtype}, {name} is "
                f"{other.dtype}. Convert one of them, for example {name}.astype('{array.dtype}')"
            )
    return array.dtype.name
