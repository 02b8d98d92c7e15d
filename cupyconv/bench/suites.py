"""Layers to measure: 92 convolutions, most of them of real networks, and random layers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, zip_longest
from math import log2
from pathlib import Path
from random import Random

from cupyconv.errors import require_word
from cupyconv.problem import ConvOptions, ConvProblem

KINDS = ("dense", "pointwise", "dilated", "stem", "grouped", "depthwise", "conv1d", "conv3d")
"""Kinds of layers; a report has a geometric mean per kind, and every layer has one kind."""

STEM_CHANNELS = 4
"""Largest number of input channels of a stem, the first layer of a network."""

_QUICK = """
resnet50-01 resnet50-03 resnet50-05 resnet50-07 resnet50-17 vgg16-3 mobilenetv2-dw3 mobilenetv2-dw6
mobilenetv2-pw2 efficientnetb0-dw2 convnext-dw2 resnext50-g32-2 deeplab-d12 resnet3d-stem wav2vec-k3
conformer-dw31 odd-c67 batch1-resnet50-3x3 seed-5x100x100
"""
QUICK = tuple(_QUICK.split())
"""Layers of ``--quick``: layers of every kind, with and without stride, large and small."""


@dataclass(frozen=True)
class SuiteLayer:
    """A convolution with a name.

    Attributes:
        name: name such as "resnet50-03", which begins with the suite.
        problem: the convolution, in any dtype and memory order; a run chooses both.
        source: origin of the layer.
    """

    name: str
    problem: ConvProblem
    source: str = ""

    @property
    def suite(self) -> str:
        """Name of the network or collection that contains the layer."""
        return self.name.partition("-")[0]

    @property
    def kind(self) -> str:
        """Kind of the layer, one of KINDS: the first kind whose rule holds."""
        problem = self.problem
        rules = {
            "depthwise": 1 < problem.groups == problem.C,
            "grouped": problem.groups > 1,
            "conv3d": problem.spatial_rank == 3,
            "conv1d": problem.spatial_rank == 1,
            "stem": problem.C <= STEM_CHANNELS,
            "dilated": max(problem.dilation) > 1,
            "pointwise": max(problem.filter_sizes) == 1,
            "dense": True,
        }
        return next(kind for kind, holds in rules.items() if holds)


@cache
def listed() -> tuple[SuiteLayer, ...]:
    """Return the layers of layers.csv, in its order."""
    with Path(__file__).with_name("layers.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_layer(row) for row in csv.DictReader(file))


def suites() -> tuple[str, ...]:
    """Return the values that ``select`` accepts as suites: "all", the kinds and the suites."""
    return tuple(dict.fromkeys(("all", *KINDS, *(layer.suite for layer in listed()))))


def select(suite_words: Iterable[str] = (), names: Iterable[str] = ()) -> tuple[SuiteLayer, ...]:
    """Return the listed layers of these suites or names; all layers if both are empty.

    Raises:
        ConvError: a suite or a name is unknown; the message suggests the closest name.
    """
    wanted_suites, wanted_names = set(suite_words), set(names)
    for word in wanted_suites:
        require_word("suite", word, suites())
    for word in wanted_names:
        require_word("layer", word, [layer.name for layer in listed()])
    if not wanted_suites and not wanted_names:
        return listed()
    return tuple(
        layer
        for layer in listed()
        if layer.name in wanted_names or wanted_suites & {"all", layer.suite, layer.kind}
    )


MOST_DRAWN_FLOPS = 6e9
"""FLOPs per pass of a random layer above which its batch is reduced (hand-set)."""


def drawn(seed: int, count: int) -> tuple[SuiteLayer, ...]:
    """Return random layers, cycling through the kinds; a seed always gives the same layers."""
    numbers = Random(seed)
    return tuple(
        SuiteLayer(f"drawn-{seed}-{number}", _random(numbers, KINDS[number % len(KINDS)]))
        for number in range(count)
    )


def _random(numbers: Random, kind: str) -> ConvProblem:
    rank = {"conv1d": 1, "conv3d": 3}.get(kind, 2)
    size = {1: (200, 8000), 2: (7, 160), 3: (6, 32)}[rank]
    channels, filters = (_count(numbers, 16, 512 >> rank) for _ in range(2))
    groups, stride, dilation = 1, numbers.choice((1, 1, 2)), 1
    width = numbers.choice((3, 3, 3, 5, 7) if rank < 3 else (3, 3, 1))
    if kind == "pointwise":
        width = 1
    elif kind == "stem":
        channels, stride = numbers.randint(1, STEM_CHANNELS), numbers.choice((1, 2, 4))
    elif kind == "dilated":
        stride, dilation = 1, numbers.choice((2, 4, 6, 12))
    elif kind == "depthwise":
        filters = groups = channels
    elif kind == "grouped":
        groups = numbers.choice((2, 4, 8, 32))
        channels, filters = (-(-count // groups) * groups for count in (channels, filters))
        channels = max(channels, 2 * groups)  # one channel per group would be depthwise
    reach = dilation * (width // 2)
    padding = reach if kind == "dilated" else numbers.choice((0, reach))
    least, most = map(log2, size)
    spatial = [max(round(2 ** numbers.uniform(least, most)), width) for _ in range(rank)]
    if numbers.random() < 0.75:  # most layers have equal spatial extents
        spatial = spatial[:1] * rank
    x_shape = (numbers.choice((1, 1, 2, 4, 8, 32)), channels, *spatial)
    w_shape = (filters, channels // groups, *[width] * rank)
    options = ConvOptions(stride, padding, dilation, groups)
    problem = ConvProblem(x_shape, w_shape, **options._asdict())
    most = max(int(problem.N * MOST_DRAWN_FLOPS / problem.flops), 1)
    return _with_batch(problem, most)


def _count(numbers: Random, least: int, most: int) -> int:
    """Draw a log-uniform number of channels; round 80 % of the numbers up to a multiple of 8."""
    count = round(2 ** numbers.uniform(log2(least), log2(most)))
    return count if numbers.random() < 0.2 else -(-count // 8) * 8


def fair_order(layers: Sequence[SuiteLayer]) -> tuple[SuiteLayer, ...]:
    """Interleave the kinds, so that any prefix has about the same number of layers per kind."""
    kinds = [[layer for layer in layers if layer.kind == kind] for kind in KINDS]
    turns = chain.from_iterable(zip_longest(*kinds))
    return tuple(layer for layer in turns if layer is not None)


def with_batch(layer: SuiteLayer, largest: int) -> SuiteLayer:
    """Return the layer with its batch limited to ``largest`` images."""
    return replace(layer, problem=_with_batch(layer.problem, largest))


def _with_batch(problem: ConvProblem, largest: int) -> ConvProblem:
    shape = list(problem.input_shape)
    shape[problem.data_axes[0]] = min(problem.N, largest)
    return problem.replace(input_shape=shape)


def _layer(row: dict[str, str]) -> SuiteLayer:
    channels, filters, groups = (int(row[column]) for column in ("C", "K", "groups"))
    problem = ConvProblem(
        (int(row["N"]), channels, *_sizes(row["spatial"])),
        (filters, channels // groups, *_sizes(row["filter"])),
        stride=_sizes(row["stride"]),
        padding=[_sides(text) for text in row["padding"].split("x")],
        dilation=_sizes(row["dilation"]),
        groups=groups,
    )
    return SuiteLayer(row["name"], problem, row["source"])


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _sides(text: str) -> tuple[int, int]:
    """Return the padding before and after an axis: both of "2:0", or "1" on both sides."""
    before, _, after = text.partition(":")
    return int(before), int(after or before)
