"""Random tensors of a layer.

For each dtype, PERIOD normally distributed values are drawn once, and repeated to fill the tensors.
This is faster than drawing every element.  The period is prime, so that equally spaced rows of a
tensor start at different values.  Tensors are not zero, because processors can run faster on zeros.
"""

from __future__ import annotations

from functools import cache
from math import prod
from random import Random
from typing import Any

import numpy as np

from cupyconv import formats
from cupyconv.arrays import numpy_dtype
from cupyconv.checking import Operands
from cupyconv.problem import REAL_PART, ConvProblem, dtype_name

LAYOUTS = (formats.CHANNELS_LAST, formats.CHANNELS_FIRST)
"""Memory orders that a run measures by default."""

PERIOD = 4_194_301  # values before they repeat; the largest prime below 2^22


def in_layout(problem: ConvProblem, layout: str, dtype: str) -> ConvProblem:
    """Return the convolution in another memory order and dtype.

    With channels last, the filter axes are O, spatial, I, which is the memory order of PyTorch's
    channels_last format.  With channels first, the filter axes are O, I, spatial.
    """
    rank = problem.spatial_rank
    data_format = formats.resolve_data_format(layout, rank)
    filter_format = formats.filter_formats(rank)[2 if layout == formats.CHANNELS_LAST else 0]
    x_shape = (problem.N, problem.C, *problem.input_sizes)
    w_shape = (problem.K, problem.C // problem.groups, *problem.filter_sizes)
    return problem.replace(
        input_shape=formats.ordered(formats.data_axes(data_format), x_shape),
        filter_shape=formats.ordered(formats.filter_axes(filter_format), w_shape),
        data_format=data_format,
        filter_format=filter_format,
        dtype=dtype_name(dtype),
    )


def random_sets(problem: ConvProblem, count: int, xp: Any) -> list[Operands]:
    """Return ``count`` different sets of random operands x, w and dy; ``xp`` is numpy or cupy."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)

    def tensor(seed: int) -> Any:
        shape = shapes[seed % 3]
        return random_flat(prod(shape), problem.dtype, seed, xp).reshape(shape)

    return [Operands(*map(tensor, range(3 * i, 3 * i + 3))) for i in range(count)]


def random_flat(count: int, dtype: str, seed: int, xp: Any) -> Any:
    """Return a flat array of ``count`` random values, which depend on ``dtype`` and ``seed``."""
    numbers = _numbers(dtype, xp)
    flat = xp.empty(count, numbers.dtype)
    start, offset = 0, Random(seed).randrange(PERIOD)  # each seed starts elsewhere in the period
    while start < count:
        chunk = numbers[offset : offset + count - start]
        flat[start : start + chunk.size] = chunk
        start, offset = start + chunk.size, 0
    return flat


@cache
def _numbers(dtype: str, xp: Any) -> Any:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(PERIOD, dtype=np.float32)
    if dtype in REAL_PART:
        values = values + 1j * generator.standard_normal(PERIOD, dtype=np.float32)
    return xp.asarray(values.astype(numpy_dtype(dtype)))
