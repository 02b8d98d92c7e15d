"""Task graph of a pass: cut pieces from chunks, join the pieces, compute parts, add the parts.

A piece is the region of an operand's chunk that a part reads.  A part is one convolution; sums of
parts, concatenated if necessary, are the chunks of the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from operator import methodcaller
from typing import Any, get_args

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from cupyconv import arrays, formats
from cupyconv.dask import tasks
from cupyconv.dask.ranges import Range, lengths_of
from cupyconv.errors import require_word, unknown_word
from cupyconv.planning import PRECISIONS, Impl, implementations
from cupyconv.problem import ITEMSIZE, ConvProblem

FAN_IN = 4
"""Largest number of arrays that one task adds (the default of Dask's own sums)."""


class Graph:
    """Tasks of one pass, which become one layer of a Dask graph.

    Args:
        pass_: "forward", "backprop_input" or "backprop_filter".
        operands: arrays by their names in errors.  The first determines the result's dtype, and
            whether its chunks are NumPy or CuPy.
        sums: whether elements of the result are sums of several parts.  Parts of 16-bit dtypes are
            then computed in float32, so that the sums are rounded once.
    """

    def __init__(
        self,
        pass_: str,
        problem: ConvProblem,
        precision: str,
        impl: str,
        operands: Mapping[str, da.Array],
        *,
        sums: bool,
    ) -> None:
        require_word("precision", precision, PRECISIONS)
        self._operands, self._like = operands, next(iter(operands.values()))
        if not isinstance(impl, str) or impl not in get_args(Impl):
            _, device = arrays.take("x", self._like._meta)
            raise unknown_word("impl", impl, implementations(device is arrays.Home.GPU))
        self._compute, self._problem = tasks.COMPUTE[pass_], problem
        names = {name: operand.name for name, operand in operands.items()}
        self._token = tokenize(pass_, problem, precision, impl, names)
        self._name = f"conv-{pass_}-{self._token}"
        self._tasks: dict[Any, Any] = {}
        self._how = {"precision": precision, "impl": impl}
        self._wide = sums and ITEMSIZE[problem.dtype] < 4

    def data(self, n: Any, channel: Any, *spatial: Any) -> tuple[Any, ...]:
        """Return the values, one per axis, in the order of the axes of x and y."""
        return formats.ordered(self._problem.data_axes, (n, channel, *spatial))

    def filters(self, out: Any, into: Any, taps: Any = None) -> tuple[Any, ...]:
        """Return the values, one per axis, in the order of the axes of w.

        Args:
            out, into: values of the axes O and I.
            taps: value of every spatial axis; None for the range of the whole axis.
        """
        sizes = self._problem.filter_sizes
        inner = [(0, size) if taps is None else taps for size in sizes]
        return formats.ordered(self._problem.filter_axes, (out, into, *inner))

    def gather(self, name: str, ranges: Sequence[Range]) -> Any:
        """Return the task for a region of an operand: a chunk, or a join of pieces of chunks.

        Each piece is a separate task that runs on the worker with its chunk, so that only pieces
        move between workers.  The join is nested in the task that uses the region, so that the
        region itself is neither stored nor moved.

        Args:
            name: name of the operand.
            ranges: the region's range on each axis.
        """
        array = self._operands[name]
        pieces = [_pieces(sizes, *span) for sizes, span in zip(array.chunks, ranges, strict=True)]
        keys, places = [], []
        for combined in product(*pieces):
            number = tuple(number for number, _, _ in combined)
            sizes = zip(array.chunks, number, strict=True)
            declared = tasks.Declared(name, number, tuple(axis[index] for axis, index in sizes))
            chunk = (array.name, *number)
            cut = tuple(inner for _, inner, _ in combined)
            if cut == tuple(slice(0, size) for size in declared.shape):
                keys.append((declared.require, chunk))  # nested in the task that uses it
            else:
                bounds = (bound for part in cut for bound in (part.start, part.stop))
                piece = (f"conv-piece-{array.name}-{self._token}", *number, *bounds)
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
        """Add the task that computes a part of a chunk of the result; return its key.

        Args:
            pads: (before, after) padding per spatial axis.
            groups: number of groups of the part.
            shape: shape of the chunk of the result.
            arguments: operands, as returned by ``gather``.
            into: ranges of the chunk to compute, for backprop_input; the remainder is zero.
        """
        layer = {**self._problem.keywords, "padding": tuple(pads), "groups": groups, **self._how}
        options: dict[str, Any] = {"wide": self._wide}
        if into is not None:
            options["into"] = tuple(into)
        key = (f"conv-part-{self._token}", len(self._tasks))
        self._tasks[key] = (partial(self._compute, tuple(shape), layer, **options), *arguments)
        return key

    def finish(self, place: Sequence[int], *sums: list[Any], join: int | None = None) -> None:
        """Add the tasks that compute a chunk of the result from sums of parts.

        Args:
            place: index of the chunk on each axis.
            sums: keys of the parts to add, for each sum.
            join: axis along which several sums are concatenated to the chunk.
        """
        added = [self._tree(terms) for terms in sums]
        last = added[0]
        if join is not None and len(added) > 1:
            last = (f"conv-joined-{self._token}", len(self._tasks))
            self._tasks[last] = (partial(np.concatenate, axis=join), added)
        final = (self._name, *place)
        if self._wide:
            self._tasks[final] = (methodcaller("astype", self._like.dtype), last)
        else:
            self._tasks[final] = self._tasks.pop(last)

    def _tree(self, terms: list[Any]) -> Any:
        while len(terms) > 1:
            above = []
            for start in range(0, len(terms), FAN_IN):
                group = terms[start : start + FAN_IN]
                if len(group) > 1:
                    key = (f"conv-sum-{self._token}", len(self._tasks))
                    self._tasks[key] = (tasks.add, group)
                    group = [key]
                above += group
            terms = above
        return terms[0]

    def array(self, chunks: Sequence[tuple[int, ...]]) -> da.Array:
        """Return the result as a Dask array."""
        used = list(self._operands.values())
        graph = HighLevelGraph.from_collections(self._name, self._tasks, dependencies=used)
        meta = np.empty_like(self._like._meta, shape=(0,) * len(chunks), dtype=self._like.dtype)
        return da.Array(graph, self._name, tuple(chunks), meta=meta)


def _pieces(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, slice, int]]:
    """Divide a range of an axis at the chunk boundaries.

    Returns:
        The index of each chunk, the slice of the chunk, and the slice's position in the range.
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
