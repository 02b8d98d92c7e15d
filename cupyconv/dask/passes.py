"""Passes on Dask arrays; each chunk of a result is computed from parts of the operands."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Any

import dask.array as da

from cupyconv import arrays, binding, formats
from cupyconv.dask import tasks
from cupyconv.dask.chunks import as_chunked
from cupyconv.dask.graph import Graph
from cupyconv.dask.halos import (
    channel_blocks,
    input_bounds,
    output_bounds,
    receptive_field,
    window_of,
)
from cupyconv.dask.ranges import Range, bounds_of, combinations, lengths_of, ranges_of, split
from cupyconv.errors import ConvError, naming_arguments
from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.planning import Impl, Precision
from cupyconv.problem import (
    ITEMSIZE,
    ConvOptions,
    ConvProblem,
    Padding,
    Size,
    shape_text,
    shared_dtype,
)


@naming_arguments
def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl = "auto",
) -> da.Array:
    """Compute ``cupyconv.conv_forward`` on Dask arrays.

    Args:
        x: input, whose chunks determine the chunks of the result.
        w: filter of x's dtype; a Dask array, or any array that ``conv_forward`` accepts.  Its
            chunks over O divide the result's channels.
        bias: shape (K,); any array that is accepted as w.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_forward``.

    Returns:
        y.  Over the batch and space, a chunk of y has the outputs whose windows are centred in one
        chunk of x.

    Raises:
        ConvError: the convolution is invalid, or a chunk's size is unknown (nan); during
            computation, a chunk does not have its declared shape.
        ConvTypeError: dtypes differ or are not supported, or an array is masked.

    >>> x = dask.array.ones((4, 2, 8, 8), chunks=(2, 2, 4, 8))
    >>> y = cd.conv_forward(x, np.ones((3, 2, 3, 3)), padding=1)
    >>> y.shape, y[0, 0, 0, :3].compute().tolist()
    ((4, 3, 8, 8), [8.0, 12.0, 12.0])
    """
    operands = _chunked(x=x, w=w, bias=bias)
    x, w, bias = map(operands.get, ("x", "w", "bias"))
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    problem = binding.problem_of("forward", operands, None, options)
    n_axis, c_axis, *spatial = problem.data_axes
    batches = ranges_of(x.chunks[n_axis])
    blocks = channel_blocks(
        problem, bounds_of(x.chunks[c_axis]), bounds_of(w.chunks[problem.filter_axes[0]])
    )
    sums = any(len(pieces) > 1 for _, pieces in blocks)
    graph = Graph("forward", problem, precision, impl, operands, sums=sums)
    grids = [
        split(output_bounds(axis, bounds_of(x.chunks[position])))
        for axis, position in zip(problem.axes, spatial, strict=True)
    ]
    for place, (batch, (filters, pieces), *outputs) in combinations(batches, blocks, *grids):
        inputs, pads = _windows(problem, outputs)
        terms = []
        for number, (channels, taken, count) in enumerate(pieces):
            arguments = [
                graph.gather("x", graph.data(batch, channels, *inputs)),
                graph.gather("w", graph.filters(filters, taken)),
            ]
            if bias is not None and number == 0:
                arguments.append(graph.gather("bias", [filters]))
            shape = lengths_of(graph.data(batch, filters, *outputs))
            terms.append(graph.block(pads, count, shape, arguments))
        graph.finish(graph.data(*place), terms)
    sizes = (batches, [k for k, _ in blocks], *grids)
    return graph.array(graph.data(*map(lengths_of, sizes)))


def _windows(
    problem: ConvProblem, outputs: Iterable[Range]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Return the inputs that some outputs read, and the padding around them, per spatial axis."""
    found = (window_of(axis, *o) for axis, o in zip(problem.axes, outputs, strict=True))
    inputs, pads = zip(*found, strict=True)
    return inputs, pads


@naming_arguments
def conv_backprop_input(
    input_shape: Iterable[int],
    w: Any,
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl = "auto",
) -> da.Array:
    """Compute ``cupyconv.conv_backprop_input`` on Dask arrays.

    Args:
        input_shape: shape of x.
        w: filter of dy's dtype; a Dask array, or any array that ``conv_forward`` accepts.  Without
            groups, its chunks over I divide the result's channels.
        dy: gradient with respect to the output, whose chunks determine the chunks of the result.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_backprop_input``.

    Returns:
        dx.  Over the batch and space, a chunk of dx covers the window centres of one chunk of dy.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.

    >>> dy = dask.array.ones((4, 3, 6, 6), chunks=(2, 3, 3, 6))
    >>> dx = cd.conv_backprop_input((4, 2, 8, 8), np.ones((3, 2, 3, 3)), dy)
    >>> dx.shape, dx[0, 0, 0, :3].compute().tolist()
    ((4, 2, 8, 8), [3.0, 6.0, 9.0])
    """
    operands = _chunked(w=w, dy=dy)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    problem = binding.problem_of("backprop_input", operands, input_shape, options)
    return _input_gradient(problem, operands["w"], operands["dy"], precision, impl)


def _chunked(**operands: Any) -> dict[str, da.Array]:
    """Return the operands that are not None as Dask arrays."""
    return {name: as_chunked(name, one) for name, one in operands.items() if one is not None}


def _input_gradient(
    problem: ConvProblem, w: da.Array, dy: da.Array, precision: str, impl: str, name: str = "dy"
) -> da.Array:
    """Compute dx.

    Args:
        name: name of dy in error messages.
    """
    n_axis, k_axis, *spatial = problem.data_axes
    batches = ranges_of(dy.chunks[n_axis])
    bounds = bounds_of(w.chunks[problem.filter_axes[1]]) if problem.groups == 1 else [0, problem.C]
    blocks = channel_blocks(problem, bounds, bounds_of(dy.chunks[k_axis]), of_input=True)
    sums = any(len(pieces) > 1 for _, pieces in blocks)
    graph = Graph("backprop_input", problem, precision, impl, {name: dy, "w": w}, sums=sums)
    grids = [
        split(input_bounds(axis, bounds_of(dy.chunks[position])))
        for axis, position in zip(problem.axes, spatial, strict=True)
    ]
    for place, (batch, (channels, pieces), *inputs) in combinations(batches, blocks, *grids):
        found = (receptive_field(axis, *h) for axis, h in zip(problem.axes, inputs, strict=True))
        outputs, computed, pads = zip(*found, strict=True)
        read = [
            (start - h, stop - h) for (start, stop), (h, _) in zip(computed, inputs, strict=True)
        ]
        into = graph.data((0, batch[1] - batch[0]), (0, channels[1] - channels[0]), *read)
        terms = []
        for filters, taken, count in pieces:
            arguments = [
                graph.gather("w", graph.filters(filters, taken)),
                graph.gather(name, graph.data(batch, filters, *outputs)),
            ]
            shape = lengths_of(graph.data(batch, channels, *inputs))
            terms.append(graph.block(pads, count, shape, arguments, into=into))
        graph.finish(graph.data(*place), terms)
    sizes = (batches, [c for c, _ in blocks], *grids)
    return graph.array(graph.data(*map(lengths_of, sizes)))


@naming_arguments
def conv_transpose(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    output_shape: Iterable[int] | None = None,
    output_padding: Size | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl = "auto",
) -> da.Array:
    """Compute ``cupyconv.conv_transpose`` on Dask arrays, without activations.

    Args:
        x: input, whose chunks determine the chunks of the result.
        w: filter of x's dtype; a Dask array, or any array that ``conv_forward`` accepts.
        bias: shape (C,); any array that is accepted as w.
        output_shape, output_padding: as for ``cupyconv.conv_transpose``.
        stride, padding, dilation, groups: as for ``cupyconv.conv_transpose``.
        data_format, filter_format, precision, impl: as for ``cupyconv.conv_transpose``.

    Returns:
        The result, with chunks like those of dx from ``conv_backprop_input``.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.

    >>> x = dask.array.ones((4, 2, 8, 8), chunks=(2, 2, 4, 8))
    >>> cd.conv_transpose(x, np.ones((2, 3, 2, 2)), stride=2).shape
    (4, 3, 16, 16)
    """
    operands = _chunked(w=w, x=x, bias=bias)
    w, x, bias = map(operands.get, ("w", "x", "bias"))
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    sizes = (output_shape, output_padding)
    problem = binding.problem_of("transpose", operands, sizes, options)
    dtype = problem.dtype
    if problem.is_complex:
        w = w.conj()  # the input gradient conjugates w again
    for axis, (size, needed) in enumerate(zip(x.shape, problem.output_shape, strict=True)):
        if size < needed:  # output_padding adds windows
            missing = (*x.shape[:axis], needed - size, *x.shape[axis + 1 :])
            x = da.concatenate([x, da.zeros_like(x, shape=missing)], axis)
    if bias is None:
        return _input_gradient(problem, w, x, precision, impl, "x")
    if ITEMSIZE[dtype] < 4:  # round once, after the bias
        x, w, bias = (array.astype("float32") for array in (x, w, bias))
        problem = problem.replace(dtype="float32")
    y = _input_gradient(problem, w, x, precision, impl, "x")
    channel = problem.data_axes[1]
    places = tuple(slice(None) if axis == channel else None for axis in range(y.ndim))
    y = y + bias.rechunk((y.chunks[channel],))[places]
    return y.astype(arrays.numpy_dtype(dtype))


@naming_arguments
def conv_backprop_filter(
    x: Any,
    filter_shape: Iterable[int],
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl = "auto",
) -> da.Array:
    """Compute ``cupyconv.conv_backprop_filter`` on Dask arrays.

    Each chunk of dy contributes a partial sum; the partial sums are added in a tree of fixed order.

    Args:
        x: input of dy's dtype; a Dask array, or any array that ``conv_forward`` accepts.
        filter_shape: shape of w.
        dy: gradient with respect to the output, whose chunks determine the partial sums.
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``cupyconv.conv_backprop_filter``.

    Returns:
        dw.  Its O axis is chunked like dy's channels.  Without groups, its I axis is chunked like
        x's channels; with groups, it has one chunk.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.

    >>> x = dask.array.ones((4, 2, 8, 8), chunks=(2, 2, 4, 8))
    >>> dy = dask.array.ones((4, 3, 6, 6), chunks=(2, 3, 3, 6))
    >>> dw = cd.conv_backprop_filter(x, (3, 2, 3, 3), dy)
    >>> dw.shape, dw[0, 0, 0].compute().tolist()
    ((3, 2, 3, 3), [144.0, 144.0, 144.0])
    """
    operands = _chunked(x=x, dy=dy)
    x, dy = operands.values()
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    problem = binding.problem_of("backprop_filter", operands, filter_shape, options)
    n_axis, c_axis, *spatial = problem.data_axes
    batches = ranges_of(dy.chunks[n_axis])
    blocks = channel_blocks(problem, bounds_of(x.chunks[c_axis]), bounds_of(dy.chunks[c_axis]))
    grids = [ranges_of(dy.chunks[position]) for position in spatial]
    sums = len(batches) * prod(map(len, grids)) > 1
    graph = Graph("backprop_filter", problem, precision, impl, {"dy": dy, "x": x}, sums=sums)
    in_depth = (
        [taken for _, taken, _ in blocks[0][1]] if groups == 1 else [(0, problem.C // groups)]
    )
    for k_place, (filters, pieces) in enumerate(blocks):
        parts = []
        for channels, taken, count in pieces:
            terms = []
            for batch, *outputs in product(batches, *grids):
                inputs, pads = _windows(problem, outputs)
                arguments = [
                    graph.gather("x", graph.data(batch, channels, *inputs)),
                    graph.gather("dy", graph.data(batch, filters, *outputs)),
                ]
                shape = lengths_of(graph.filters(filters, taken))
                terms.append(graph.block(pads, count, shape, arguments))
            parts.append(terms)
        if groups == 1:
            for i_place, terms in enumerate(parts):
                graph.finish(graph.filters(k_place, i_place, taps=0), terms)
        else:
            graph.finish(graph.filters(k_place, 0, taps=0), *parts, join=problem.filter_axes[1])
    sizes = graph.filters(lengths_of([k for k, _ in blocks]), lengths_of(in_depth))
    taps = set(problem.filter_axes[2:])
    chunks = [(size[1],) if axis in taps else size for axis, size in enumerate(sizes)]
    return graph.array(chunks)


@naming_arguments
def conv_backprop_bias(dy: Any, *, data_format: DataFormat | None = None) -> da.Array:
    """Compute ``cupyconv.conv_backprop_bias`` on Dask arrays: sum over all axes but the channels.

    Args:
        dy: gradient with respect to the output, of shape (N, K, spatial) in ``data_format`` order.

    Returns:
        db, of shape (K,), chunked like dy's channels.

    Raises:
        ConvError, ConvTypeError: as for ``conv_forward``.

    >>> dy = dask.array.ones((4, 3, 6, 6), chunks=(2, 3, 3, 6))
    >>> cd.conv_backprop_bias(dy).compute().tolist()
    [144.0, 144.0, 144.0]
    """
    dy = as_chunked("dy", dy)
    name = shared_dtype({"dy": dy.dtype})
    rank = dy.ndim - 2
    if rank not in formats.SPATIAL_AXES:
        raise ConvError(
            "dy must have a batch axis, a channel axis and 1 to 3 spatial axes",
            f"it is {shape_text(dy.shape) or 'a scalar'}",
            "Pass 3 to 5 axes",
        )
    n_axis, _, *spatial = formats.data_axes(formats.resolve_data_format(data_format, rank))
    wide = "float32" if name in ("float16", "bfloat16") else name
    dy = dy.map_blocks(tasks.require_dy, dtype=dy.dtype, meta=dy._meta)
    return dy.sum(axis=(n_axis, *spatial), dtype=wide).astype(dy.dtype)
