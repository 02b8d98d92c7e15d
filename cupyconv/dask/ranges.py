"""Ranges of indices on an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

Range = tuple[int, int]
"""Start and stop of a part of an axis."""


def bounds_of(chunks: Sequence[int]) -> list[int]:
    """Return the bounds of an axis's chunks, leaving out chunks of size 0."""
    bounds = sorted({0, *accumulate(chunks)})
    return bounds if len(bounds) > 1 else [0, 0]


def split(bounds: Sequence[int]) -> list[Range]:
    return list(pairwise(bounds))


def ranges_of(chunks: Sequence[int]) -> list[Range]:
    return split(bounds_of(chunks))


def lengths_of(ranges: Iterable[Range]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def combinations(*lists: Sequence[Any]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Return every combination of the lists' entries, with their indices."""
    return zip(product(*(range(len(entries)) for entries in lists)), product(*lists), strict=True)
