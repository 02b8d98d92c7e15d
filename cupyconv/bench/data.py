"""Random tensors of a layer.

A few million normally distributed numbers are drawn once and repeated.  The period is a prime, so
no axis of a tensor is a multiple of it, and drawing takes no part of a run's time.  Zeros would be
timed wrong: processors run faster on them.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from cupyconv import formats
from cupyconv.arrays import numpy_dtype
from cupyconv.checking import Operands
from cupyconv.problem import REAL_PART, ConvProblem, dtype_name

LAYOUTS = (formats.CHANNELS_LAST, formats.CHANNELS_FIRST)
"""Memory orders that are measured."""

PERIOD = 4_194_301  # the largest prime below 2^22
_STEP = 524_287  # a prime too


def in_layout(problem: ConvProblem, layout: str, dtype: str) -> ConvProblem:
    """The same convolution in a memory order and dtype.

    Channels last goes with filters O + spatial + I, so that operands are the same bytes as those
    of a PyTorch layer in its channels_last format; channels first with O I + spatial.
    """
    rank = problem.spatial_rank
    data_format = formats.resolve_data_format(layout, rank)
    filter_format = formats.filter_formats(rank)[2 if layout == formats.CHANNELS_LAST else 0]
    x_shape = (problem.N, problem.C, *problem.input_sizes)
    w_shape = (problem.K, problem.C // problem.groups, *problem.filter_sizes)
    return problem.replace(
        input_shape=_ordered(x_shape, formats.data_axes(data_format)),
        filter_shape=_ordered(w_shape, formats.filter_axes(filter_format)),
        data_format=data_format,
        filter_format=filter_format,
        dtype=dtype_name(dtype),
    )


def random_sets(problem: ConvProblem, count: int, xp: Any) -> list[Operands]:
    """Several sets of operands, all different; ``xp`` is numpy or cupy."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    seeds = iter(range(3 * count))
    return [
        Operands(*(_random(shape, problem.dtype, next(seeds), xp) for shape in shapes))
        for _ in range(count)
    ]


def reordered(tensors: Operands, source: ConvProblem, target: ConvProblem, xp: Any) -> Operands:
    """The same values in another problem's memory order."""
    data = _permutation(source.data_axes, target.data_axes)
    filters = _permutation(source.filter_axes, target.filter_axes)
    return Operands(
        xp.ascontiguousarray(tensors.x.transpose(data)),
        xp.ascontiguousarray(tensors.w.transpose(filters)),
        xp.ascontiguousarray(tensors.dy.transpose(data)),
    )


def random_flat(count: int, dtype: str, seed: int, xp: Any) -> Any:
    """This many random numbers in a row."""
    numbers = _numbers(dtype, xp)
    flat = xp.empty(count, numbers.dtype)
    start, skipped = 0, _STEP * seed % PERIOD  # other tensors begin elsewhere in the numbers
    while start < count:
        piece = numbers[skipped : skipped + count - start]
        flat[start : start + piece.size] = piece
        start, skipped = start + piece.size, 0
    return flat


def _random(shape: tuple[int, ...], dtype: str, seed: int, xp: Any) -> Any:
    return random_flat(prod(shape), dtype, seed, xp).reshape(shape)


@cache
def _numbers(dtype: str, xp: Any) -> Any:
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal(PERIOD, dtype=np.float32)
    if dtype in REAL_PART:
        drawn = drawn + 1j * generator.standard_normal(PERIOD, dtype=np.float32)
    return xp.asarray(drawn.astype(numpy_dtype(dtype)))


def _ordered(shape: tuple[int, ...], positions: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes moved to these positions."""
    return tuple(size for _, size in sorted(zip(positions, shape, strict=True)))


def _permutation(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """The transposition that moves what is at the source positions to the target positions."""
    return _ordered(source, target)
