"""Counted work of the planned method on hostile layers, without timing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.cpu import (
    choice,
    correlation,
    loops,
    products,
    scattered,
    scratch,
    threads,
    tile_plans,
    tiles,
)
from cupyconv.problem import PASSES
from tests import agreement
from tests.configurations import Data

FACTOR = 4
"""Limit of the planned method's work / the best method's work (hand-set)."""

FLOOR = 1e-3
"""Seconds of work that are always allowed, as a few calls would be a large factor (hand-set)."""

MOST = 0.5
"""Seconds of work after which counting stops (hand-set)."""


class TooMuchWorkError(Exception):
    """A method exceeds MOST seconds of work."""


class Work:
    """Counter of operations, in seconds at the rates of the cost rule."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, products: float, elements: float) -> None:
        self.seconds += 2 * products / choice.RATE + elements / choice.SPEED + choice.CALL
        if self.seconds > MOST:
            raise TooMuchWorkError

    def copy(self, target: np.ndarray, *_args: object, **_more: object) -> None:
        self.add(0, target.size)

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        shape = (*a.shape[:-1], b.shape[-1])
        size = float(np.prod(shape))
        self.add(size * a.shape[-1], size)
        return np.empty(shape, a.dtype) if out is None else out

    def sum(self, a: np.ndarray, _b: np.ndarray, out: np.ndarray) -> np.ndarray:
        self.add(0, 3 * out.size)
        return out

    def einsum(self, _how: str, windows: np.ndarray, *_: np.ndarray, out: np.ndarray) -> np.ndarray:
        self.add(windows.size * choice.RATE / choice.LOOP_RATE, out.size)
        return out

    def planes(self, _pixels: Any, offsets: Any, first: Any, *arguments: Any) -> None:
        (groups, filters, _), length = first.shape, arguments[-1]
        self.add(groups * filters * len(offsets) * length * choice.RATE / choice.PLANE_RATE, 0)

    def single_planes(self, *arguments: Any) -> None:
        _, _, (groups, images, *_), _, offsets, _, _, rules, pixels, sums = arguments
        positions = groups * images * ((rules[2] - 1) * rules[5] + rules[3])
        products = positions * len(offsets) * choice.RATE / choice.PLANE_RATE
        self.add(products, pixels.size + sums.size)

    def tiles(self, arguments: Any, by_channel: bool = False) -> None:
        """Count the products of blocks of tiles, and the copied pixels of their windows."""
        _, _, _, rows, first, stop, _ = arguments
        job = import_module("cupyconv.cpu.tiles_numba")._job.py_func
        for row in rows[first:stop]:
            *_, axes, (channels, filters, _), box, _ = job(row)
            extents = [stop - first for first, stop in box]
            taps = [axis[3] for axis in axes]
            spans = (
                (n - 1) * axis[0] + max(axis[3] - 1, 0) * axis[1] + 1
                for n, axis in zip(extents[2:], axes, strict=True)
            )
            pixels = extents[0] * extents[1] * channels * float(np.prod([*spans]))
            columns = 1 if by_channel else -(-filters // 16) * 16
            products = float(np.prod(extents + taps)) * channels * columns
            self.add(products * choice.RATE / choice.TILE_RATE, pixels)

    def product_tiles(self, *arguments: Any) -> None:
        self.tiles(arguments)

    def channel_tiles(self, *arguments: Any) -> None:
        self.tiles(arguments, by_channel=True)

    def pack(self, _filters: Any, _shared: Any, rows: Any, first: int, stop: int) -> None:
        for row in rows[first:stop]:
            groups, _, depth, columns, begin, end = row[13:19]
            self.add(0, 2 * groups * depth * columns * (end - begin))


@pytest.fixture
def work(monkeypatch) -> Work:
    """Count operations instead of computing them."""
    counter = Work()
    for module in (correlation, products, scattered, loops, scratch, tiles):
        monkeypatch.setattr(module, "copy", counter.copy)
    monkeypatch.setattr(np, "matmul", counter.matmul)
    monkeypatch.setattr(np, "einsum", counter.einsum)
    monkeypatch.setattr(scattered, "np", SimpleNamespace(**{**vars(np), "add": counter.sum}))
    compiled = {"planar_sums": counter.planes, "planar_products": counter.planes}
    compiled |= {"plane_sums": counter.single_planes}
    monkeypatch.setattr(loops, "_loops", lambda: SimpleNamespace(**compiled))
    of_tiles = {"width": lambda itemsize: 128 // itemsize, "pack": counter.pack}
    of_tiles |= dict.fromkeys(("correlate", "add_gradient"), counter.product_tiles)
    channels = ("correlate_channels", "add_channel_gradient")
    of_tiles |= dict.fromkeys(channels, counter.channel_tiles)
    monkeypatch.setattr(tile_plans, "compiled_loops", lambda: SimpleNamespace(**of_tiles))
    monkeypatch.setattr(threads, "blas_threads", lambda: 1)
    return counter


def seconds(work: Work, problem: ConvProblem, pass_: str, method: str, data: Data) -> float:
    """Return the seconds of work of a pass by a method."""
    planned = cupyconv.plan(problem)
    passes = tuple(replace(entry, method=method) for entry in planned.passes)
    work.seconds = 0.0
    with suppress(TooMuchWorkError):
        agreement.compute(cupyconv, pass_, problem, data, impl=replace(planned, passes=passes))
    return work.seconds


def require_little_work(work: Work, problem: ConvProblem) -> None:
    """Require that the planned method of each pass does little more work than the best."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape, problem.bias_shape)
    data = Data(*(np.zeros(shape, problem.dtype) for shape in shapes))
    for pass_ in PASSES:
        names = [method.name for method in choice.methods(problem, pass_)]
        chosen = min(choice.methods(problem, pass_), key=lambda method: method.microseconds).name
        work_of = {name: seconds(work, problem, pass_, name, data) for name in names}
        bound = FACTOR * min(work_of.values()) + FLOOR
        assert work_of[chosen] <= bound, (problem, pass_, chosen, work_of)


def depthwise(shape: tuple[int, ...], taps: tuple[int, ...], **rules: Any) -> ConvProblem:
    channels = shape[1]
    return ConvProblem(shape, (channels, 1, *taps), groups=channels, **rules)


LAYERS = {
    "dilated": depthwise((1, 256, 16, 16), (3, 3), padding=18, dilation=18),
    "far dilated": depthwise((8, 256, 14, 14), (3, 3), padding=63, dilation=63),
    "channels last, float16": ConvProblem(
        (1, 33, 33, 512), (3, 3, 1, 512), padding=18, dilation=18, groups=512,
        data_format="NHWC", filter_format="HWIO", dtype="float16",
    ),
    "volume": depthwise((1, 256, 4, 8, 8), (3, 3, 3), padding=8, dilation=8),
    "large filter": depthwise((1, 512, 14, 14), (27, 27), padding=13),
    "half dilated": depthwise((1, 256, 33, 33), (3, 3), padding=24, dilation=24),
    "few results": ConvProblem(
        (1, 48, 2, 1), (16, 3, 47, 1), stride=(3, 1000), padding=(45999, 0),
        dilation=(1000, 1), groups=16,
    ),
    "few pixels": ConvProblem(
        (1, 64, 3, 3), (1024, 1, 288, 11), groups=64, stride=63, padding=(285, 158),
        dilation=(1, 16), dtype="float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_planned_work_of_hostile_layers_is_near_the_best(name, compiled, work, monkeypatch):
    for module in (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: compiled)
    require_little_work(work, LAYERS[name])


def hostile_layer(rng: np.random.Generator) -> ConvProblem:
    """Draw a layer whose strides, dilations and paddings are large or odd."""
    pick = partial(rng.choice)

    def axis(rank: int) -> tuple[int, int, int, int, int]:
        taps = int(pick(([1, 2, 3, 9, 27, 99], [1, 3, 5, 7, 27], [1, 2, 3, 5])[rank - 1]))
        dilation, stride = int(pick([1, 1, 2, 8, 18, 63, 320])), int(pick([1, 1, 2, 8, 63, 320]))
        reach = (taps - 1) * dilation
        padding = int(pick([0, reach // 2, reach, rng.integers(0, 500)]))
        outputs = int(pick([1, 2, 5, 14, 33, 60]))
        size = (outputs - 1) * stride + reach + 1 - 2 * padding
        return max(size, int(rng.integers(1, 20))), taps, stride, dilation, padding

    while True:
        rank = int(pick([1, 2, 2, 3]))
        rules = zip(*(axis(rank) for _ in range(rank)), strict=True)
        sizes, taps, stride, dilation, padding = rules
        groups = int(pick([1, 1, 8, 64, 256]))
        channels, filters = (
            int(pick([1, 1, 2, 8] if groups > 1 else [1, 3, 16, 64])) for _ in "CK"
        )
        batch = int(pick([1, 1, 4, 16]))
        is_last = bool(pick([False, True]))
        data, weights = (batch, groups * channels), (groups * filters, channels)
        problem = ConvProblem(
            (*data[:1], *sizes, *data[1:]) if is_last else (*data, *sizes),
            (*taps, *weights[::-1]) if is_last else (*weights, *taps),
            stride=stride, padding=padding, dilation=dilation, groups=groups,
            data_format="channels_last" if is_last else "channels_first",
            dtype=str(pick(["float32", "float32", "float64", "float16"])),
        )  # fmt: skip
        shapes = problem.input_shape, problem.filter_shape, problem.output_shape
        if max(map(np.prod, shapes)) <= 1 << 21 and problem.useful_flops <= 1 << 31:
            return problem


@pytest.mark.parametrize("seed", range(20))
def test_planned_work_of_random_layers_is_near_the_best(seed, work):
    rng = np.random.default_rng(seed)
    for _ in range(3):
        require_little_work(work, hostile_layer(rng))


def test_estimates_count_the_taps_of_each_stride_phase(work, monkeypatch):
    """One stride phase of an axis has two taps, and the five others have one."""
    monkeypatch.setattr(choice, "has_numba", lambda: True)
    problem = ConvProblem((8, 8, 20, 20, 20), (16, 8, 7, 7, 7), stride=6, padding=3)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape, problem.bias_shape)
    data = Data(*(np.zeros(shape, np.float32) for shape in shapes))
    found = {method.name: method for method in choice.methods(problem, "backprop_input")}
    counted = seconds(work, problem, "backprop_input", "tiles", data)
    assert found["tiles"].microseconds <= 2e6 * counted
