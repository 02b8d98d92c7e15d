"""Vector accesses of launches, checked against the address of every element."""

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels.strides import Strides, element_strides, followers
from tests import agreement, emulator
from tests.configurations import integer_data

pytestmark = pytest.mark.costly


def coordinates(sizes):
    """Return the coordinates of a shape's elements, one array per axis, the last axis fastest."""
    return np.unravel_index(np.arange(prod(sizes)), sizes)


def stepped(rng, shape):
    """Return random strides of a tensor: axes in any order, with gaps, reversed or broadcast."""
    order = list(range(len(shape)))
    if rng.random() < 0.6:
        rng.shuffle(order)
    steps, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps[axis] = step * rng.choice([1] * 12 + [-1, 0])
        step = step * shape[axis] + rng.choice([0, 0, 0, 0, 1, 2, 4, 8, 16])
        if shape[axis] == 1 and rng.random() < 0.5:
            steps[axis] = rng.randint(-9, 9)
    return tuple(steps)


def test_followers_are_aligned_in_every_part_of_an_axis():
    """A part may be one element of a longer axis, for example a group with one filter."""
    rng = random.Random(0)
    found = 0
    for _ in range(4000):
        shape = [rng.choice([1, 1, 2, 3, 4, 8]) for _ in range(4)]
        steps = stepped(rng, shape)
        axes = rng.sample(range(4), rng.randint(1, 3))
        sizes = [shape[axis] for axis in axes]
        sizes[0] = rng.choice([size for size in range(1, sizes[0] + 1) if sizes[0] % size == 0])
        vector = followers(steps, axes, sizes, alignment=16, itemsize=2)
        found += vector > 1
        others = [axis for axis in range(4) if axis not in axes]
        starts = coordinates(
            [shape[a] for a in others] + [shape[a] // s for a, s in zip(axes, sizes, strict=True)]
        )
        first = sum(
            index * steps[a] * s
            for index, a, s in zip(starts, others + axes, [1] * len(others) + sizes, strict=True)
        )
        share = sum(index * steps[a] for index, a in zip(coordinates(sizes), axes, strict=True))
        pieces = (first[:, None] + share).reshape(-1, vector)
        assert share.size % vector == 0
        assert (pieces == pieces[:, :1] + np.arange(vector)).all()
        assert (pieces[:, 0] % vector == 0).all()
    assert found > 200


@pytest.mark.parametrize(
    ("problem", "gap", "impl"),
    [
        (ConvProblem((2, 8, 6, 7), (4, 2, 2, 4), groups=4, dtype="float16"), 1, "cuda-gather"),
        (ConvProblem((2, 64, 9), (2, 32, 4), groups=2), 1, "cuda-gather"),
        (ConvProblem((1, 128, 9, 9), (2, 64, 4, 4), groups=2, dtype="float64"), 1, "auto"),
    ],
    ids=str,
)
def test_groups_of_one_filter_may_be_unaligned(problem, gap, impl):
    """Only the filter of the first group is aligned to a vector."""
    data = integer_data(problem)
    apart = np.zeros((problem.K, prod(problem.filter_shape[1:]) + gap), data.w.dtype)
    w = apart[:, :-gap].reshape(problem.filter_shape, copy=False)
    w[...] = data.w
    data = replace(data, w=w)
    expected = agreement.compute(cupyconv, "backprop_input", problem, data, impl="reference")
    strides = replace(Strides.contiguous(problem), w=element_strides(w))
    plan = agreement.plan_without_copies(problem, impl, emulator.device("sm_80"), strides=strides)
    found = agreement.compute(emulator, "backprop_input", problem, data, impl=plan, arch="sm_80")
    agreement.require_equal(found, expected, "dx")
