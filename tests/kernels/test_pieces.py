"""Vector accesses of launches, checked against the address of every element."""

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels import gather
from cupyconv.kernels.strides import Strides, element_strides, followers
from cupyconv.problem import PASSES
from tests import agreement, emulator
from tests.configurations import integer_data

pytestmark = pytest.mark.costly


def coordinates(sizes):
    """Return the coordinates of a shape's elements, one array per axis, the last axis fastest."""
    return np.unravel_index(np.arange(prod(sizes)), sizes) if prod(sizes) else ([],) * len(sizes)


def require_pieces(offsets, exists, vector):
    """Require each vector along the last axis to be contiguous, aligned, and all in or out."""
    if vector == 1 or not offsets.size:
        return
    assert offsets.shape[-1] % vector == 0
    pieces = offsets.reshape(-1, vector)
    inside = np.broadcast_to(exists, offsets.shape).reshape(-1, vector)
    assert (inside == inside[:, :1]).all()
    pieces = pieces[inside[:, 0]]
    assert (pieces == pieces[:, :1] + np.arange(vector)).all()
    assert (pieces[:, 0] % vector == 0).all()


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
        require_pieces(first[:, None] + share, True, vector)
    assert found > 200


def within(at, sizes):
    """Return whether all coordinates are inside the sizes."""
    return np.all([(i >= 0) & (i < size) for i, size in zip(at, sizes, strict=True)], axis=0)


def matrices(pass_, problem, strides, taps_fastest):
    """Yield (offsets, exists) of all elements of A, B and C, for each stride phase.

    A and B have axes (group, m or n, k), and C has axes (group, m, n).
    """
    groups, channels, filters = (
        problem.groups,
        problem.C // problem.groups,
        problem.K // problem.groups,
    )
    x_n, x_c, *x_steps = (strides.x[axis] for axis in problem.data_axes)
    y_n, y_c, *y_steps = (strides.y[axis] for axis in problem.data_axes)
    w_k, w_c, *w_steps = (strides.w[axis] for axis in problem.filter_axes)
    rank = len(problem.stride)
    group = np.arange(groups)[:, None, None]

    def tap_numbers(taps, lines):
        """Return the filter coordinates, and the channel or filter, for each index along k."""
        if taps_fastest:
            line, *at = coordinates((lines, *map(len, taps)))
        else:
            *at, line = coordinates((*map(len, taps), lines))
        return [np.asarray(t)[i] for t, i in zip(taps, at, strict=True)], line

    def summed(at, steps):
        return sum(i * step for i, step in zip(at, steps, strict=True))

    all_taps = [np.arange(size) for size in problem.filter_sizes]
    if pass_ != "backprop_input":
        batch, *out = coordinates((problem.N, *problem.output_sizes))
        taps, channel = tap_numbers(all_taps, channels)
        at = [
            out[i][:, None] * problem.stride[i]
            - problem.padding[i][0]
            + taps[i] * problem.dilation[i]
            for i in range(rank)
        ]
        inside = within(at, problem.input_sizes)
        x = (batch * x_n)[:, None] + summed(at, x_steps) + channel * x_c + group * channels * x_c
        k = np.arange(filters)
        w = (k * w_k)[:, None] + channel * w_c + summed(taps, w_steps) + group * filters * w_k
        y = (batch * y_n + summed(out, y_steps))[:, None] + k * y_c + group * filters * y_c
        if pass_ == "forward":
            yield (x, inside), (w, True), (y, True)
        else:
            dy = y.transpose(0, 2, 1), True
            yield dy, (x.transpose(0, 2, 1), inside.T), (w, True)
        return
    for residue in coordinates_of(problem.stride):
        pixels, taps = [], []
        for i in range(rank):
            size, stride = problem.input_sizes[i], problem.stride[i]
            place = np.arange(size)
            pixels.append(place[(place + problem.padding[i][0]) % stride == residue[i]])
            reached = all_taps[i] * problem.dilation[i]
            taps.append(all_taps[i][reached % stride == residue[i]])
        batch, *at = coordinates((problem.N, *map(len, pixels)))
        at = [p[a] for p, a in zip(pixels, at, strict=True)]
        at_taps, k = tap_numbers(taps, filters)
        if not len(batch) or not len(k):
            continue
        out = [
            (at[i][:, None] + problem.padding[i][0] - at_taps[i] * problem.dilation[i])
            // problem.stride[i]
            for i in range(rank)
        ]
        inside = within(out, problem.output_sizes)
        y = (batch * y_n)[:, None] + summed(out, y_steps) + k * y_c + group * filters * y_c
        c = np.arange(channels)
        w = (c * w_c)[:, None] + k * w_k + summed(at_taps, w_steps) + group * filters * w_k
        x = (batch * x_n + summed(at, x_steps))[:, None] + c * x_c + group * channels * x_c
        yield (y, inside), (w, True), (x, True)


def coordinates_of(sizes):
    return list(zip(*coordinates(sizes), strict=True))


def drawn(rng):
    """Return a small random problem that allows vectors, and random strides of its tensors."""
    rank = rng.randint(1, 2)
    groups = rng.choice([1, 1, 2, 3, 4])
    channels, filters = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 2, 4, 8])
    pointwise = rng.random() < 0.4
    problem = ConvProblem(
        (rng.choice([1, 2]), groups * channels, *(rng.choice([4, 5, 8]) for _ in range(rank))),
        (
            groups * filters,
            channels,
            *(1 if pointwise else rng.choice([1, 2, 4]) for _ in range(rank)),
        ),
        stride=rng.choice([1, 1, 2]),
        padding=0 if pointwise else rng.choice([0, 1]),
        groups=groups,
        dtype=rng.choice(["float16", "float32", "float64"]),
    )
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    return problem, Strides(*(stepped(rng, shape) for shape in shapes))


@pytest.mark.thorough
def test_gather_vectors_are_aligned_and_in_matrix_order():
    rng = random.Random(1)
    found = 0
    for _ in range(3000):
        problem, strides = drawn(rng)
        for pass_ in PASSES:
            accesses = gather.accesses(pass_, problem, strides)
            found += max(accesses.a.vector, accesses.b.vector) > 1
            for a, b, c in matrices(pass_, problem, strides, accesses.taps_fastest):
                for access, (offsets, exists) in (
                    (accesses.a, a),
                    (accesses.b, b),
                    (accesses.c, c),
                ):
                    exists = np.broadcast_to(exists, offsets.shape)
                    if not access.along_first:
                        offsets, exists = offsets.swapaxes(1, 2), exists.swapaxes(1, 2)
                    require_pieces(offsets, exists, access.vector)
    assert found > 1000


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
