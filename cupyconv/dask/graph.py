"""The tasks of a pass: pieces cut out of chunks and put together, parts computed and added up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any, get_args

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from cupyconv.dask import tasks
from cupyconv.dask.ranges import Range, lengths_of
from cupyconv.errors import require_word
from cupyconv.planning import PRECISIONS, Impl
from cupyconv.problem import ITEMSIZE, ConvProblem

FAN_IN = 8
"""Arrays that one task adds up: fewer make the tree deeper, more hold more memory at once."""


class Graph:
    """The tasks of one pass, in one layer.

    Args:
        pass_: which.
        like: the operand whose kind of chunks the result has.
        operands: everything that the tasks depend on.

    Attributes:
        wide: compute 16-bit types in float32, because there are sums to be rounded once.
    """

    def __init__(
        self,
        pass_: str,
        problem: ConvProblem,
        precision: str,
        impl: str,
        like: da.Array,
        *operands: Any,
    ) -> None:
        require_word("precision", precision, PRECISIONS)
        require_word("impl", impl, get_args(Impl))
        self._compute, self._problem, self._like = tasks.COMPUTE[pass_], problem, like
        names = [getattr(operand, "name", None) for operand in (like, *operands)]
        self._token = tokenize(pass_, problem, precision, impl, names)
        self._name = f"conv-{pass_}-{self._token}"
        self._tasks: dict[Any, Any] = {}
        self._how = {"precision": precision, "impl": impl}
        self.wide = False

    def sums(self, some: bool) -> None:
        """Say whether the result has sums of several terms."""
        self.wide = some and ITEMSIZE[self._problem.dtype] < 4

    def data(self, n: Any, channel: Any, *spatial: Any) -> list[Any]:
        """What belongs to the axes of x or y, in their order."""
        placed: list[Any] = [None] * (2 + len(spatial))
        for axis, value in zip(self._problem.data_axes, (n, channel, *spatial), strict=True):
            placed[axis] = value
        return placed

    def filters(self, out: Any, into: Any, taps: Any = None) -> list[Any]:
        """What belongs to the axes of w; of its spatial axes the whole, or ``taps``."""
        sizes = self._problem.filter_sizes
        inner = [(0, size) if taps is None else taps for size in sizes]
        placed: list[Any] = [None] * (2 + len(sizes))
        for axis, value in zip(self._problem.filter_axes, (out, into, *inner), strict=True):
            placed[axis] = value
        return placed

    def gather(self, name: str, array: da.Array, ranges: Sequence[Range]) -> Any:
        """A region of an operand: a chunk, or what puts it together from pieces of chunks.

        The pieces are tasks of their own, made where their chunk is, so that no more than them is
        moved.  Putting them together is not: it is done where the region is used, and the region
        is neither kept nor moved.
        """
        pieces = [_pieces(sizes, *one) for sizes, one in zip(array.chunks, ranges, strict=True)]
        keys, places = [], []
        for combined in product(*pieces):
            number = tuple(number for number, _, _ in combined)
            sizes = zip(array.chunks, number, strict=True)
            declared = tasks.Declared(name, number, tuple(axis[one] for axis, one in sizes))
            chunk = (array.name, *number)
            cut = tuple(inner for _, inner, _ in combined)
            if cut == tuple(slice(0, size) for size in declared.shape):
                keys.append((declared.require, chunk))  # where it is used, as below
            else:
                inside = (bound for one in cut for bound in (one.start, one.stop))
                piece = (f"conv-piece-{array.name}-{self._token}", *number, *inside)
                self._tasks[piece] = (partial(tasks.cut, declared=declared, where=cut), chunk)
                keys.append(piece)
            places.append(tuple(slice(at, at + i.stop - i.start) for _, i, at in combined))
        if len(keys) == 1:
            return keys[0]
        return (partial(tasks.join, lengths_of(ranges), places), keys)

    def block(
        self,
        pads: Sequence[Range],
        groups: int,
        shape: Sequence[int],
        arguments: Sequence[Any],
        into: Sequence[Range] | None = None,
    ) -> Any:
        """The task that computes a part of a chunk of the result.

        Args:
            pads: the padding on each spatial axis.
            groups: of this part.
            shape: of the chunk; of it, ``into`` is computed and the rest is zero.
            arguments: the operands, as ``gather`` gives them.
        """
        problem = self._problem
        layer = {
            **problem.keywords,
            "padding": tuple(pads),
            "groups": groups,
            **self._how,
        }
        more: dict[str, Any] = {"wide": self.wide}
        if into is not None:
            more["into"] = tuple(into)
        key = (f"conv-part-{self._token}", len(self._tasks))
        self._tasks[key] = (partial(self._compute, tuple(shape), layer, **more), *arguments)
        return key

    def finish(self, place: Sequence[int], *sums: list[Any], join: int | None = None) -> None:
        """The chunk of the result at ``place``: the terms of a sum added up.

        Args:
            sums: the terms; of several sums, the results are put together along the axis ``join``.
        """
        added = [self._tree(terms) for terms in sums]
        last = added[0]
        if join is not None and len(added) > 1:
            last = (f"conv-joined-{self._token}", len(self._tasks))
            self._tasks[last] = (partial(tasks.concatenate, join), added)
        final = (self._name, *place)
        if self.wide:
            self._tasks[final] = (partial(tasks.cast, self._like.dtype), last)
        else:
            self._tasks[final] = self._tasks.pop(last)

    def _tree(self, terms: list[Any]) -> Any:
        while len(terms) > 1:
            above = []
            for start in range(0, len(terms), FAN_IN):
                some = terms[start : start + FAN_IN]
                if len(some) > 1:
                    key = (f"conv-sum-{self._token}", len(self._tasks))
                    self._tasks[key] = (tasks.add, some)
                    some = [key]
                above += some
            terms = above
        return terms[0]

    def array(self, chunks: Sequence[tuple[int, ...]], dependencies: Iterable[Any]) -> da.Array:
        """The result."""
        used = [array for array in dependencies if array is not None]
        graph = HighLevelGraph.from_collections(self._name, self._tasks, dependencies=used)
        meta = np.empty_like(self._like._meta, shape=(0,) * len(chunks), dtype=self._like.dtype)
        return da.Array(graph, self._name, tuple(chunks), meta=meta)


def _pieces(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, slice, int]]:
    """The chunks of an axis that a range is in.

    Returns:
        For each its number, the part of it, and where that goes, counted from ``start``.
    """
    bounds = [0, *accumulate(sizes)]
    if start == stop:
        return [(0, slice(0, 0), 0)]
    number = bisect_right(bounds, start) - 1
    pieces = []
    while number < len(sizes) and bounds[number] < stop:
        first, last = max(bounds[number], start), min(bounds[number + 1], stop)
        if first < last:
            inner = slice(first - bounds[number], last - bounds[number])
            pieces.append((number, inner, first - start))
        number += 1
    return pieces
