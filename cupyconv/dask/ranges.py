"""Axes cut into ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

Range = tuple[int, int]
"""Where a part of an axis begins, and where it ends."""


def bounds_of(chunks: Sequence[int]) -> list[int]:
    """Where an axis's chunks begin, and where the last ends; without those of size 0."""
    bounds = sorted({0, *accumulate(chunks)})
    return bounds if len(bounds) > 1 else [0, 0]


def split(bounds: Sequence[int]) -> list[Range]:
    return list(pairwise(bounds))


def ranges_of(chunks: Sequence[int]) -> list[Range]:
    return split(bounds_of(chunks))


def lengths_of(ranges: Iterable[Range]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def combinations(*lists: Sequence[Any]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Every combination of the lists' entries, with their numbers."""
    return zip(product(*(range(len(one)) for one in lists)), product(*lists), strict=True)
