"""The three passes on Dask arrays: data larger than a machine's or a GPU's memory.

The functions are those of cupyconv with the same arguments, on arrays whose chunks are NumPy or
CuPy, and give Dask arrays that compute nothing until they are asked::

    import cupyconv.dask as cd

    x = dask.array.from_zarr("volume.zarr")
    y = cd.conv_forward(x, w, padding=1)
    cd.to_zarr(y, "result.zarr")

* Arrays may be chunked over the batch, the channels and space, anywhere: a boundary may lie inside
  a stride or a group.  Nothing is gathered into one chunk.
* A chunk of the result takes exactly the pixels under its windows (or over its taps) from its
  neighbours; these are cut out where they are, and only they move.
* What several chunks contribute to one number is added in the order of the chunks, so that results
  are the same bits whatever the scheduler and the number of its workers.  16-bit types are added in
  float32 and rounded once.
* There are a few tasks for each chunk: at most three to the number of chunked axes for its pieces,
  one that puts them together, one that computes.

Needs the dask extra: pip install 'cupyconv[dask]'.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from math import ceil, prod
from pathlib import Path
from typing import Any

try:
    import dask.array as da
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph
except ImportError as error:
    raise ImportError(
        f"cupyconv.dask needs Dask, which could not be imported ({error}). "
        "Install it with: pip install 'cupyconv[dask]'"
    ) from error

import numpy as np

from cupyconv import arrays, formats, operations
from cupyconv.errors import ConvError, ConvTypeError
from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem, Padding, Size, shape_text

__all__ = [
    "conv_backprop_bias",
    "conv_backprop_filter",
    "conv_backprop_input",
    "conv_forward",
    "suggest_chunks",
    "to_zarr",
]

Range = tuple[int, int]

_FAN_IN = 8
"""Arrays that one task adds up: fewer make the tree deeper, more hold more memory at once."""


def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
) -> da.Array:
    """``cupyconv.conv_forward`` on Dask arrays.

    Args:
        x: input; its chunks decide those of the result.
        w: filter, of x's dtype; a Dask array, or any array that ``conv_forward`` takes.  Its chunks
            over O are those of the result's channels.
        bias: (K,), likewise.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_forward``.

    Returns:
        y, with a chunk for each of x's over the batch and space: the outputs whose windows are
        centred in it.

    Raises:
        ConvError: no such convolution exists, or a chunk's size is unknown (nan).
        ConvTypeError: dtypes that differ or are not supported.
    """
    x, w = _chunked("x", x), _chunked("w", w)
    layer: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "data_format": data_format,
        "filter_format": filter_format,
    }
    problem = ConvProblem(x.shape, w.shape, dtype=_dtype(x=x, w=w), **layer)
    graph = _Graph("forward", problem, precision, impl, x, w, bias)
    if bias is not None:
        bias = _chunked("bias", bias)
        _dtype(x=x, bias=bias)
        if bias.shape != problem.bias_shape:
            raise ConvError(
                "the bias must have one value for each output channel",
                f"bias is {shape_text(bias.shape) or 'a scalar'}, the filter has {problem.K} "
                "output channels",
                f"Pass a bias of shape ({problem.K},)",
            )
    n_axis, c_axis, *spatial = problem.data_axes
    batches = _ranges(x.chunks[n_axis])
    blocks = _channel_blocks(
        problem, _bounds(x.chunks[c_axis]), _bounds(w.chunks[problem.filter_axes[0]])
    )
    graph.sums(any(len(pieces) > 1 for _, pieces in blocks))
    grids = [
        _split(_output_bounds(axis, _bounds(x.chunks[position])))
        for axis, position in zip(problem.axes, spatial, strict=True)
    ]
    for place, (batch, (filters, pieces), *outputs) in _enumerate(batches, blocks, *grids):
        windows = [_window(axis, *o) for axis, o in zip(problem.axes, outputs, strict=True)]
        terms = []
        for number, (channels, taken, count) in enumerate(pieces):
            inputs = [window[0] for window in windows]
            arguments = [
                graph.gather(x, graph.data(batch, channels, *inputs)),
                graph.gather(w, graph.filters(filters, taken)),
            ]
            if bias is not None and number == 0:
                arguments.append(graph.gather(bias, [filters]))
            shape = _lengths(graph.data(batch, filters, *outputs))
            terms.append(graph.block([pads for _, pads in windows], count, shape, arguments))
        graph.finish(graph.data(*place), terms)
    sizes = (batches, [k for k, _ in blocks], *grids)
    return graph.array(graph.data(*map(_lengths, sizes)), [x, w, bias])


def conv_backprop_input(
    input_shape: Iterable[int],
    w: Any,
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
) -> da.Array:
    """``cupyconv.conv_backprop_input`` on Dask arrays.

    Args:
        input_shape: shape of x.
        w: filter, of dy's dtype; a Dask array, or any array that ``conv_forward`` takes.  Without
            groups, its chunks over I are those of the result's channels.
        dy: gradient with respect to the output; its chunks decide those of the result.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_backprop_input``.

    Returns:
        dx, with a chunk for each of dy's over the batch and space.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.
    """
    w, dy = _chunked("w", w), _chunked("dy", dy)
    layer: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "data_format": data_format,
        "filter_format": filter_format,
    }
    problem = ConvProblem(input_shape, w.shape, dtype=_dtype(w=w, dy=dy), **layer)
    problem.require_output_gradient(dy.shape)
    graph = _Graph("backprop_input", problem, precision, impl, dy, w)
    n_axis, k_axis, *spatial = problem.data_axes
    batches = _ranges(dy.chunks[n_axis])
    wanted = _bounds(w.chunks[problem.filter_axes[1]]) if problem.groups == 1 else [0, problem.C]
    blocks = _channel_blocks(problem, wanted, _bounds(dy.chunks[k_axis]), of_input=True)
    graph.sums(any(len(pieces) > 1 for _, pieces in blocks))
    grids = [
        _split(_input_bounds(axis, _bounds(dy.chunks[position])))
        for axis, position in zip(problem.axes, spatial, strict=True)
    ]
    for place, (batch, (channels, pieces), *inputs) in _enumerate(batches, blocks, *grids):
        reaches = [_reach(axis, *h) for axis, h in zip(problem.axes, inputs, strict=True)]
        terms = []
        for filters, taken, count in pieces:
            outputs = [reach[0] for reach in reaches]
            arguments = [
                graph.gather(w, graph.filters(filters, taken)),
                graph.gather(dy, graph.data(batch, filters, *outputs)),
            ]
            shape = _lengths(graph.data(batch, channels, *inputs))
            read = [
                (computed[0] - h[0], computed[1] - h[0])
                for (_, computed, _), h in zip(reaches, inputs, strict=True)
            ]
            into = graph.data((0, batch[1] - batch[0]), (0, channels[1] - channels[0]), *read)
            pads = [pads for *_, pads in reaches]
            terms.append(graph.block(pads, count, shape, arguments, into=into))
        graph.finish(graph.data(*place), terms)
    sizes = (batches, [c for c, _ in blocks], *grids)
    return graph.array(graph.data(*map(_lengths, sizes)), [w, dy])


def conv_backprop_filter(
    x: Any,
    filter_shape: Iterable[int],
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
) -> da.Array:
    """``cupyconv.conv_backprop_filter`` on Dask arrays.

    Each chunk of dy gives a part of the sum, and the parts are added in a tree of fixed order.

    Args:
        x: input, of dy's dtype; a Dask array, or any array that ``conv_forward`` takes.
        filter_shape: shape of w.
        dy: gradient with respect to the output; its chunks are the parts of the sum.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_backprop_filter``.

    Returns:
        dw, chunked over O as dy's channels are, and without groups over I as x's are.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.
    """
    x, dy = _chunked("x", x), _chunked("dy", dy)
    layer: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "data_format": data_format,
        "filter_format": filter_format,
    }
    problem = ConvProblem(x.shape, filter_shape, dtype=_dtype(x=x, dy=dy), **layer)
    problem.require_output_gradient(dy.shape)
    graph = _Graph("backprop_filter", problem, precision, impl, dy, x)
    n_axis, c_axis, *spatial = problem.data_axes
    batches = _ranges(dy.chunks[n_axis])
    blocks = _channel_blocks(problem, _bounds(x.chunks[c_axis]), _bounds(dy.chunks[c_axis]))
    grids = [_ranges(dy.chunks[position]) for position in spatial]
    graph.sums(len(batches) * prod(map(len, grids)) > 1)
    in_depth = (
        [taken for _, taken, _ in blocks[0][1]] if groups == 1 else [(0, problem.C // groups)]
    )
    for k_place, (filters, pieces) in enumerate(blocks):
        parts = []
        for channels, taken, count in pieces:
            terms = []
            for batch, *outputs in product(batches, *grids):
                windows = [_window(axis, *o) for axis, o in zip(problem.axes, outputs, strict=True)]
                inputs = [window[0] for window in windows]
                arguments = [
                    graph.gather(x, graph.data(batch, channels, *inputs)),
                    graph.gather(dy, graph.data(batch, filters, *outputs)),
                ]
                shape = _lengths(graph.filters(filters, taken))
                terms.append(graph.block([pads for _, pads in windows], count, shape, arguments))
            parts.append(terms)
        if groups == 1:
            for i_place, terms in enumerate(parts):
                graph.finish(graph.filters(k_place, i_place, taps=0), terms)
        else:
            graph.finish(graph.filters(k_place, 0, taps=0), *parts, join=problem.filter_axes[1])
    sizes = graph.filters(_lengths([k for k, _ in blocks]), _lengths(in_depth))
    taps = set(problem.filter_axes[2:])
    chunks = [(size[1],) if axis in taps else size for axis, size in enumerate(sizes)]
    return graph.array(chunks, [x, dy])


def conv_backprop_bias(dy: Any, *, data_format: str | None = None) -> da.Array:
    """``cupyconv.conv_backprop_bias`` on Dask arrays: dy summed over all axes but the channels.

    Args:
        dy: (N, K, spatial) in ``data_format`` order.

    Returns:
        db, (K,), chunked as dy's channels are.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.
    """
    dy = _chunked("dy", dy)
    name = _dtype(dy=dy)
    rank = dy.ndim - 2
    if rank not in formats.SPATIAL_AXES:
        raise ConvError(
            "dy must have a batch axis, a channel axis and 1 to 3 spatial axes",
            f"it is {shape_text(dy.shape) or 'a scalar'}",
            "Pass 3 to 5 axes",
        )
    n_axis, _, *spatial = formats.data_axes(formats.resolve_data_format(data_format, rank))
    wide = "float64" if name == "float64" else "float32"
    return dy.sum(axis=(n_axis, *spatial), dtype=wide, split_every=_FAN_IN).astype(dy.dtype)


# -- chunks ----------------------------------------------------------------------------------------


def suggest_chunks(problem: ConvProblem, memory_limit: int) -> tuple[tuple[int, ...], ...]:
    """Chunks of x under which every task of every pass keeps within a quarter of the memory.

    The rest is for what a worker holds beside a task: finished chunks, and others on their way.

    Args:
        problem: the layer.
        memory_limit: bytes that a worker has for each task that it runs at once: its memory limit
            divided by its threads.

    Returns:
        The chunks' sizes on every axis of x, as ``rechunk`` and ``from_array`` take them.

    Raises:
        ConvError: the filter and one window of pixels do not fit.
    """
    budget = memory_limit // 4
    strides = (1, *problem.stride)
    lengths = [max(problem.N, 1), *problem.input_sizes]
    while (needed := _task_bytes(problem, lengths)) > budget:
        # A batch costs nothing to cut; then the longest axis, whose halo is least beside it.
        axis = 0 if lengths[0] > 1 else max(range(1, len(lengths)), key=lengths.__getitem__)
        shorter = ceil(lengths[axis] / 2 / strides[axis]) * strides[axis]
        if shorter >= lengths[axis]:
            raise ConvError(
                "a window of pixels, the filter and their products must fit into a quarter of the "
                "memory limit",
                f"they need {needed:,} bytes, the limit is {memory_limit:,}",
                f"Use a limit of at least {4 * needed:,} bytes, or fewer channels",
            )
        lengths[axis] = shorter
    n, *sizes = lengths
    chunks: list[tuple[int, ...]] = [(problem.C,)] * len(problem.input_shape)
    totals = (problem.N, *problem.input_sizes)
    for axis, length, total in zip(
        (problem.data_axes[0], *problem.data_axes[2:]), (n, *sizes), totals, strict=True
    ):
        whole, rest = divmod(total, length)
        chunks[axis] = (length,) * whole + ((rest,) if rest or not whole else ())
    return tuple(chunks)


def _task_bytes(problem: ConvProblem, lengths: Sequence[int]) -> int:
    """What the largest task holds for a chunk of x with these lengths: its arrays, twice.

    Twice, because pieces are copied when they are put together, and 16-bit types are computed in
    float32.
    """
    batch, *sizes = lengths
    axes = problem.axes
    inputs = [
        min(size + axis.effective_filter - 1, axis.input)
        for size, axis in zip(sizes, axes, strict=True)
    ]
    outputs = [-(-size // axis.stride) for size, axis in zip(sizes, axes, strict=True)]
    elements = batch * (problem.C * prod(inputs) + problem.K * prod(outputs)) + 2 * prod(
        problem.filter_shape
    )
    return 2 * elements * max(ITEMSIZE[problem.dtype], 4)


def _chunked(name: str, value: Any) -> da.Array:
    """A Dask array with chunks of known sizes; another array becomes one chunk."""
    if not isinstance(value, da.Array):
        array, _ = arrays.take(name, value)
        return da.from_array(array, chunks=-1, asarray=False)
    for axis, sizes in enumerate(value.chunks):
        if any(size != size for size in sizes):  # nan
            raise ConvError(
                "the sizes of all chunks must be known, since shapes and halos follow from them",
                f"axis {axis} of {name} has chunks of unknown size (nan)",
                f"Call {name}.compute_chunk_sizes(), or give the array a shape when it is made",
            )
    return value


def _dtype(**given: da.Array) -> str:
    """The dtype that the arrays share."""
    (first, array), *others = given.items()
    for name, other in others:
        if other.dtype != array.dtype:
            raise ConvTypeError(
                f"all arrays must have one dtype: {first} is {array.dtype}, {name} is "
                f"{other.dtype}. Convert one of them, for example {name}.astype('{array.dtype}')"
            )
    return array.dtype.name


def _bounds(chunks: Sequence[int]) -> list[int]:
    """Where an axis's chunks begin, and where the last ends; without those of size 0."""
    bounds = sorted({0, *accumulate(chunks)})
    return bounds if len(bounds) > 1 else [0, 0]


def _split(bounds: Sequence[int]) -> list[Range]:
    return list(pairwise(bounds))


def _ranges(chunks: Sequence[int]) -> list[Range]:
    return _split(_bounds(chunks))


def _lengths(ranges: Iterable[Range]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def _enumerate(*lists: Sequence[Any]) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Every combination of the lists' entries, with their numbers."""
    return zip(product(*(range(len(one)) for one in lists)), product(*lists), strict=True)


# -- halos, from ConvAxis --------------------------------------------------------------------------


def _output_bounds(axis: ConvAxis, inputs: Sequence[int]) -> list[int]:
    """Where to cut the outputs so that each window is centred in the chunk of its own number."""
    centre = axis.effective_filter // 2 - axis.pad_before
    cuts = {-(-(bound - centre) // axis.stride) for bound in inputs}
    return sorted({0, axis.output, *(cut for cut in cuts if 0 < cut < axis.output)})


def _input_bounds(axis: ConvAxis, outputs: Sequence[int]) -> list[int]:
    """Where to cut the inputs so that each is in the chunk of the windows centred on it."""
    centre = axis.effective_filter // 2 - axis.pad_before
    cuts = {bound * axis.stride + centre for bound in outputs}
    return sorted({0, axis.input, *(cut for cut in cuts if 0 < cut < axis.input)})


def _window(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range]:
    """The inputs under a range of outputs, and the padding that is left of and right of them."""
    first = start * axis.stride - axis.pad_before
    last = (stop - 1) * axis.stride - axis.pad_before + axis.effective_filter
    begin, end = max(first, 0), min(last, axis.input)
    if begin >= end:  # all of it is padding
        return (0, 0), (0, 0)
    return (begin, end), (begin - first, last - end)


def _reach(axis: ConvAxis, start: int, stop: int) -> tuple[Range, Range, Range]:
    """The outputs that read a range of inputs, those inputs that they read, and their padding.

    Inputs of the range before the first and after the last window are read by none.
    """
    stride, dilation, before = axis.stride, axis.dilation, axis.pad_before

    def reads(output: int) -> bool:
        first = output * stride - before
        tap = max(-(-(start - first) // dilation), 0)
        return tap < axis.filter and first + tap * dilation < stop

    low = max(-(-(start + before - axis.effective_filter + 1) // stride), 0)
    high = min((stop - 1 + before) // stride + 1, axis.output)
    while low < high and not reads(low):
        low += 1
    while low < high and not reads(high - 1):
        high -= 1
    if low >= high:
        return (0, 0), (start, start), (0, 0)
    first = low * stride - before
    last = (high - 1) * stride - before + axis.effective_filter
    begin, end = max(start, first), min(stop, last)
    return (low, high), (begin, end), (begin - first, last - end)


def _channel_blocks(
    problem: ConvProblem,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    of_input: bool = False,
) -> list[tuple[Range, list[tuple[Range, Range, int]]]]:
    """How the channels of the result are cut, and the pieces that each cut is a sum over.

    A cut is inside one group or made of whole groups, so that it is a convolution itself.

    Args:
        inputs, outputs: where C and K are to be cut.
        of_input: the result has the input's channels and sums over the output's.

    Returns:
        For every cut its channels, and for each piece its channels on the other side, its range on
        the filter's I axis, and its number of groups.
    """
    own, other = problem.K // problem.groups, problem.C // problem.groups
    wanted, summed = outputs, inputs
    if of_input:
        own, other, wanted, summed = other, own, inputs, outputs
    cuts = set(wanted)
    for bound in wanted:
        group, rest = divmod(bound, own)
        cuts |= {group * own, (group + 1) * own} if rest else set()
    for bound in summed:
        group, rest = divmod(bound, other)
        cuts |= {group * own, (group + 1) * own} if rest else {group * own}
    blocks = []
    for start, stop in pairwise(sorted(cuts)):
        first, last = start // own, -(-stop // own)
        taps_of = (0, problem.C // problem.groups)
        pieces = []
        inner = [b for b in summed if first * other < b < last * other]
        for low, high in pairwise([first * other, *inner, last * other]):
            if last - first == 1:
                low_i, high_i = (start, stop) if of_input else (low, high)
                shift = first * (own if of_input else other)
                taps_of = (low_i - shift, high_i - shift)
            pieces.append(((low, high), taps_of, last - first))
        blocks.append(((start, stop), pieces))
    return blocks


# -- the graph -------------------------------------------------------------------------------------


class _Graph:
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
        self._compute, self._problem, self._like = _COMPUTE[pass_], problem, like
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

    def gather(self, array: da.Array, ranges: Sequence[Range]) -> Any:
        """The key of a region of an array, put together from its chunks."""
        key = (f"conv-region-{array.name}-{self._token}", *(n for one in ranges for n in one))
        if key in self._tasks:
            return key
        pieces = [_pieces(sizes, *one) for sizes, one in zip(array.chunks, ranges, strict=True)]
        keys, places = [], []
        for combined in product(*pieces):
            chunk = (array.name, *(number for number, _, _ in combined))
            cut = tuple(inner for _, inner, _ in combined)
            whole = all(
                inner == slice(0, sizes[number])
                for (number, inner, _), sizes in zip(combined, array.chunks, strict=True)
            )
            if not whole:
                piece = (f"conv-piece-{array.name}-{self._token}", len(self._tasks))
                self._tasks[piece] = (partial(_cut, where=cut), chunk)
                chunk = piece
            keys.append(chunk)
            places.append(tuple(slice(at, at + i.stop - i.start) for _, i, at in combined))
        if len(keys) == 1:
            return keys[0]
        self._tasks[key] = (partial(_join, _lengths(ranges), places), keys)
        return key

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
            arguments: keys of the operands.
        """
        problem = self._problem
        layer = {
            "stride": problem.stride,
            "padding": tuple(pads),
            "dilation": problem.dilation,
            "groups": groups,
            "data_format": problem.data_format,
            "filter_format": problem.filter_format,
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
            self._tasks[last] = (partial(_concatenate, join), added)
        final = (self._name, *place)
        if self.wide:
            self._tasks[final] = (partial(_cast, self._like.dtype), last)
        else:
            self._tasks[final] = self._tasks.pop(last)

    def _tree(self, terms: list[Any]) -> Any:
        while len(terms) > 1:
            above = []
            for start in range(0, len(terms), _FAN_IN):
                some = terms[start : start + _FAN_IN]
                if len(some) > 1:
                    key = (f"conv-sum-{self._token}", len(self._tasks))
                    self._tasks[key] = (_add, some)
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


# -- what the tasks do -----------------------------------------------------------------------------


def _cut(chunk: Any, where: tuple[slice, ...]) -> Any:
    """A part of a chunk; copied, because a view would keep the whole chunk in memory."""
    return chunk[where].copy()


def _join(
    shape: tuple[int, ...], places: Sequence[tuple[slice, ...]], pieces: Sequence[Any]
) -> Any:
    joined = np.empty_like(pieces[0], shape=shape)
    for place, piece in zip(places, pieces, strict=True):
        joined[place] = piece
    return joined


def _concatenate(axis: int, parts: Sequence[Any]) -> Any:
    return np.concatenate(parts, axis=axis)


def _add(parts: Sequence[Any]) -> Any:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _cast(dtype: np.dtype, array: Any) -> Any:
    return array.astype(dtype)


def _operands(wide: bool, *given: Any) -> list[Any]:
    return [array.astype(np.float32) if wide else array for array in given]


def _forward(
    shape: tuple[int, ...], layer: dict[str, Any], x: Any, w: Any, *bias: Any, wide: bool
) -> Any:
    x, w, *shift = _operands(wide, x, w, *bias)
    if 0 not in x.shape:
        return operations.conv_forward(x, w, *shift, **layer)
    y = np.zeros_like(x, shape=shape)  # under every window there is padding only
    if shift:
        y += shift[0].reshape([-1 if letter == "C" else 1 for letter in layer["data_format"]])
    return y


def _backprop_input(
    shape: tuple[int, ...],
    layer: dict[str, Any],
    w: Any,
    dy: Any,
    *,
    wide: bool,
    into: tuple[Range, ...],
) -> Any:
    w, dy = _operands(wide, w, dy)
    computed = _lengths(into)
    if 0 in dy.shape or 0 in computed:  # no window reaches this chunk
        return np.zeros_like(dy, shape=shape)
    dx = operations.conv_backprop_input(computed, w, dy, **layer)
    if computed == shape:
        return dx
    whole = np.zeros_like(dy, shape=shape)
    whole[tuple(slice(*one) for one in into)] = dx
    return whole


def _backprop_filter(
    shape: tuple[int, ...], layer: dict[str, Any], x: Any, dy: Any, *, wide: bool
) -> Any:
    x, dy = _operands(wide, x, dy)
    if 0 in x.shape:
        return np.zeros_like(dy, shape=shape)
    return operations.conv_backprop_filter(x, shape, dy, **layer)


_COMPUTE: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "backprop_input": _backprop_input,
    "backprop_filter": _backprop_filter,
}


# -- Zarr ------------------------------------------------------------------------------------------


def to_zarr(array: da.Array, path: str | os.PathLike[str]) -> Path:
    """Compute an array and write it to a Zarr folder: the whole of it, or nothing.

    It is written beside ``path`` under another name, which it loses when all chunks are there, so
    that a full disk or a worker that dies leaves nothing that could be taken for the result.

    Args:
        array: any Dask array; where its chunks differ in size, they are rechunked to the largest.
        path: the folder to make, on a file system that all workers share.

    Returns:
        The path.

    Raises:
        ConvError: there is something at ``path`` already, or no folder to make it in.
        ConvTypeError: Zarr has no such dtype.
        OSError: the disk is full or cannot be written.
    """
    import zarr

    target = Path(path)
    if target.exists():
        raise ConvError("a result is written to a new folder", f"{target} exists", "Choose another")
    if not target.parent.is_dir():
        raise ConvError(
            "a result is written into a folder", f"there is no {target.parent}", "Make it first"
        )
    if array.dtype == arrays.numpy_dtype("bfloat16"):
        raise ConvTypeError(
            "Zarr has no bfloat16. Write float32, which holds it exactly: y.astype('float32')"
        )
    largest = tuple(max(sizes) for sizes in array.chunks)
    regular = array.rechunk(largest)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        chunks = tuple(max(size, 1) for size in largest)
        store = zarr.create_array(
            store=str(temporary / "whole"), shape=array.shape, chunks=chunks, dtype=array.dtype
        )
        regular.store(store, lock=False)
        os.replace(temporary / "whole", target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
