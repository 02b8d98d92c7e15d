"""Inner loops of cupyconv/cpu/tiles.py, compiled by Numba with explicit vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyconv.cpu.choice import TILE_ROWS
from cupyconv.cpu.compiled import TERMS, compiled
from cupyconv.cpu.views import L2_ELEMENTS

_features = binding.get_host_cpu_features()
_has_32_registers = bool(_features.get("avx512f")) or bool(_features.get("neon"))

VECTOR_BYTES = 64 if _features.get("avx512f") else 32 if _features.get("avx") else 16
"""Bytes of a vector register."""

ROWS = TILE_ROWS if _has_32_registers else TILE_ROWS // 2
"""Rows of a tile; with two vectors per row, its sums fit 32 or 16 vector registers."""

LEAST_DIVIDED = 1 << 11
"""Smallest number of pixels for which padding is treated separately (hand-set)."""

LEAST_DIVIDED_CHANNELS = 1 << 8
"""Smallest number of pixels of a depthwise layer for which padding is treated separately
(hand-set)."""


def width(itemsize: int) -> int:
    """Return the columns of a tile: two vectors of elements of this size."""
    return 2 * VECTOR_BYTES // itemsize


def _tile(vectors: int, by_channel: bool = False) -> Callable:
    """Return an intrinsic that computes a tile of ROWS rows of some vectors.

    Args:
        by_channel: whether ``a`` also has columns, which are contiguous.
    """

    @intrinsic
    def tile(
        _typing: Any,
        a: Any,
        b: Any,
        sums: Any,
        rows: Any,
        places: Any,
        runs: Any,
        run: Any,
        out: Any,
        adds: Any,
        lines: Any,
    ) -> Any:
        """Set sums[places[i] + j * out[1]] to the sum of a[rows[i] + x] * b[y + j] over t and u.

        Here x = runs[t, 0] + u * run[0], y = runs[t, 1] + u * run[1], and u < runs[t, 2].  If tiles
        are computed by channel, the factor is a[rows[i] + x + j] instead.  The terms of run[2] runs
        are summed in registers, and these sums are then added up.

        There are ROWS rows i.  Columns j < out[0] are written, at most as many as a tile has.  If
        ``adds`` holds, sums are added to the previous values; a tile must then be whole.  ``lines``
        is scratch memory for a tile.
        """

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            element, index = context.get_value_type(a.dtype), ir.IntType(64)
            lanes = VECTOR_BYTES * 8 // a.dtype.bitwidth
            vector, width_of_tile = ir.VectorType(element, lanes), vectors * lanes

            def place(number: int, *offsets: Any) -> Any:
                """Return the address of an element of an argument, the sum of the offsets."""
                kind, array = signature.args[number], arguments[number]
                pointer = context.make_array(kind)(context, builder, array).data
                for offset in offsets:
                    pointer = builder.gep(pointer, [offset])
                return pointer

            def vector_at(pointer: Any, number: int) -> Any:
                pointer = builder.gep(pointer, [index(number * lanes)])
                return builder.bitcast(pointer, vector.as_pointer())

            def load(pointer: Any, number: int) -> Any:
                return builder.load(vector_at(pointer, number), align=a.dtype.bitwidth // 8)

            def store(value: Any, pointer: Any, number: int) -> None:
                builder.store(value, vector_at(pointer, number), align=a.dtype.bitwidth // 8)

            def repeated(value: Any) -> Any:
                undefined = ir.Constant(vector, ir.Undefined)
                mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                single = builder.insert_element(undefined, value, ir.IntType(32)(0))
                return builder.shuffle_vector(single, undefined, mask)

            def copy_line(line: Any, target: Any, count: Any) -> None:
                """Copy a row of fewer columns than a tile has, by the bits of their number."""
                bit = width_of_tile // 2
                while bit:
                    is_set = builder.icmp_signed("!=", builder.and_(count, index(bit)), index(0))
                    with builder.if_then(is_set):
                        first = builder.and_(count, index(-2 * bit))
                        kind = ir.VectorType(element, bit).as_pointer()
                        pointers = (builder.gep(of, [first]) for of in (line, target))
                        source, copied = (builder.bitcast(of, kind) for of in pointers)
                        value = builder.load(source, align=a.dtype.bitwidth // 8)
                        builder.store(value, copied, align=a.dtype.bitwidth // 8)
                    bit //= 2

            a_step, b_step, runs_at_once = cgutils.unpack_tuple(builder, arguments[6])
            a_rows, targets = (
                [place(to, builder.load(place(of, index(row)))) for row in range(ROWS)]
                for to, of in ((0, 3), (2, 4))
            )
            tile_of = [(row, v) for row in range(ROWS) for v in range(vectors)]
            totals = {at: cgutils.alloca_once(builder, vector) for at in tile_of}
            scratch = [place(9, index(row * width_of_tile)) for row in range(ROWS)]
            zero = ir.Constant(vector, [0.0] * lanes)

            def clear() -> None:
                for at in tile_of:
                    builder.store(zero, totals[at])

            def add(addresses: Sequence[Any]) -> None:
                for row, v in tile_of:
                    total = builder.fadd(builder.load(totals[row, v]), load(addresses[row], v))
                    builder.store(total, totals[row, v])

            def write(addresses: Sequence[Any]) -> None:
                for row, v in tile_of:
                    store(builder.load(totals[row, v]), addresses[row], v)

            clear()
            count = context.make_array(runs)(context, builder, arguments[5]).shape
            count = builder.extract_value(count, 0)
            with cgutils.for_range_slice(builder, index(0), count, runs_at_once) as (begin, _):
                clear()
                end = builder.add(begin, runs_at_once)
                is_last = builder.icmp_signed(">=", end, count)
                end = builder.select(is_last, count, end)
                with cgutils.for_range(builder, end, begin) as outer:
                    first = builder.mul(outer.index, index(3))
                    a_first, b_first, length = (
                        builder.load(place(5, first, index(at))) for at in range(3)
                    )
                    with cgutils.for_range(builder, length) as inner:
                        steps = (builder.mul(inner.index, step) for step in (a_step, b_step))
                        a_at, b_at = map(builder.add, (a_first, b_first), steps)
                        factors = [load(place(1, b_at), v) for v in range(vectors)]
                        for row in range(ROWS):
                            pointer = builder.gep(a_rows[row], [a_at])
                            value = None if by_channel else repeated(builder.load(pointer))
                            for v in range(vectors):
                                operand = load(pointer, v) if by_channel else value
                                product = builder.fmul(operand, factors[v], flags=("contract",))
                                total = builder.load(totals[row, v])
                                total = builder.fadd(product, total, flags=("contract",))
                                builder.store(total, totals[row, v])
                with builder.if_then(builder.icmp_signed(">", begin, index(0))):
                    add(scratch)
                with builder.if_then(builder.not_(is_last)):
                    write(scratch)
            with builder.if_then(arguments[8]):
                add(targets)
            columns, column_step = cgutils.unpack_tuple(builder, arguments[7])
            is_contiguous = builder.icmp_signed("==", column_step, index(1))
            is_whole = builder.icmp_signed(">=", columns, index(vectors * lanes))
            with builder.if_else(builder.and_(is_whole, is_contiguous)) as (whole, part):
                with whole:
                    write(targets)
                with part:
                    write(scratch)
                    count = builder.select(is_whole, index(width_of_tile), columns)
                    with cgutils.for_range(builder, index(ROWS)) as loop:
                        line = place(9, builder.mul(loop.index, index(width_of_tile)))
                        target = place(2, builder.load(place(4, loop.index)))
                        with builder.if_else(is_contiguous) as (near, far):
                            with near:
                                copy_line(line, target, count)
                            with far, cgutils.for_range(builder, count) as column:
                                value = builder.load(builder.gep(line, [column.index]))
                                to = builder.mul(column.index, column_step)
                                builder.store(value, builder.gep(target, [to]))
            return context.get_dummy_value()

        operands = (a, b, sums, rows, places, runs, run, out, adds, lines)
        return types.void(*operands), build

    return tile


_two_vectors, _one_vector = _tile(2), _tile(1)
_two_of_channels, _one_of_channels = _tile(2, by_channel=True), _tile(1, by_channel=True)


# A job is a block of a pass, as a row of integers; ``tile_plans.row_of`` writes rows, and ``_job``
# reads them.  ``source`` and ``result`` are the memories of whole operands, and ``shared`` is the
# shared memory of a stage; a row has the positions of the block's first elements.  A filter
# gradient reads ``result``, which is dy.  Strides are in elements.


@compiled
def pack(filters: Any, shared: Any, rows: Any, first: int, stop: int) -> None:
    """Copy filters (G, K, *terms) to panels, for the rows from ``first`` to ``stop``.

    A row has the position of the first filter, the strides of G, K and the four axes of a term,
    the extents of these axes, the number of filters, the position of the array (G, panels, terms,
    columns of a tile), its extents, and the first panel to copy and the first not to copy.
    """
    for number in range(first, stop):
        row = rows[number]
        groups, panels, depth, columns = row[13], row[14], row[15], row[16]
        size = groups * panels * depth * columns
        target = shared[row[12] : row[12] + size].reshape((groups, panels, depth, columns))
        terms = row[7], row[8], row[9], row[10]
        _pack(filters, row[0], _six(row, 1), terms, row[11], target, row[17], row[18])


@compiled
def _pack(
    array: Any, start: int, steps: Any, terms: Any, filters: int, panels: Any, first: int, stop: int
) -> None:
    """Copy filters (G, K, *terms) to panels ``first`` to ``stop``; missing columns become zero.

    Args:
        array, start: flat memory and the position of the first element.
        steps: strides of (G, K, *terms), which may be negative.
        terms: extents of the four axes of a term.
        panels: array (G, panels, terms, columns of a tile).
    """
    groups, _, depth, columns = panels.shape
    offsets = _offsets(terms, steps[2:], depth, depth)
    for g in range(groups):
        for number in range(first, stop):
            count = min(filters - number * columns, columns)
            begin = start + g * steps[0] + number * columns * steps[1]
            for term in range(depth):
                position, target = begin + offsets[term], panels[g, number, term]
                if steps[1] == 1:
                    for k in range(count):
                        target[k] = array[position + k]
                else:
                    for k in range(count):
                        target[k] = array[position + k * steps[1]]
                target[count:] = 0


@compiled
def _six(row: Any, at: int) -> Any:
    return row[at], row[at + 1], row[at + 2], row[at + 3], row[at + 4], row[at + 5]


@compiled
def _job(row: Any) -> Any:
    """Return the parts of a row.

    Returns:
        (starts, steps, places, weights, axes, counts, box, columns): positions in ``source``,
        ``result`` and ``shared``; strides of the source (G, C, N, depth, rows, columns), of the
        result (G, K, N, depth, rows, columns), and of packed filters (G, panels, C, *taps), or of
        the sums of a filter gradient (G, K, C, *taps);
        the tuple (stride, dilation, offset, taps, size) of each spatial axis; the number of
        channels, the number of filters, and whether the axes of a term begin with the channel; the
        pairs (first, stop) of the groups, images and outputs along each axis; and the columns of a
        tile.
    """
    starts = row[0], row[1], row[2]
    axes = (
        (row[21], row[22], row[23], row[24], row[25]),
        (row[26], row[27], row[28], row[29], row[30]),
        (row[31], row[32], row[33], row[34], row[35]),
    )
    counts = row[36], row[37], row[38] != 0
    box = (
        (row[39], row[40]),
        (row[41], row[42]),
        (row[43], row[44]),
        (row[45], row[46]),
        (row[47], row[48]),
    )
    return starts, _six(row, 3), _six(row, 9), _six(row, 15), axes, counts, box, row[49]


@compiled
def correlate(
    source: Any, result: Any, shared: Any, rows: Any, first: int, stop: int, memory: Any
) -> None:
    """Compute the blocks of a correlation's result from rows ``first`` to ``stop``.

    Args:
        shared: packed filters; see ``pack``.
        memory: has space for the padded source of a block.
    """
    for number in range(first, stop):
        starts, steps, places, weights, axes, counts, box, columns = _job(rows[number])
        channels, filters, are_first = counts
        operands = source[starts[0] :], steps, axes, channels
        terms = _ordered(channels, axes[0][3], axes[1][3], axes[2][3], are_first)
        panel_steps = _ordered(weights[2], weights[3], weights[4], weights[5], are_first)
        for part in _subboxes(axes, box, LEAST_DIVIDED):
            pixels, by, _ = _pixels(operands, part, memory)
            extents, row_steps = _outputs(by, axes, part)
            _products(
                pixels,
                shared[starts[2] + box[0][0] * weights[0] :],
                result[starts[1] + _start(places, part) :],
                (extents, row_steps, places[2:]),
                (terms, _term_steps(by, axes, are_first), panel_steps),
                (box[0][1] - box[0][0], by[0], places[0], weights[0]),
                (filters, places[1], columns, weights[1]),
                False,
            )


@compiled
def add_gradient(
    source: Any, result: Any, shared: Any, rows: Any, first: int, stop: int, memory: Any
) -> None:
    """Add the filter gradients of the blocks of dy from rows ``first`` to ``stop``.

    Args:
        shared: has the sums, whose filters are contiguous and extend to whole tiles.
        memory: has space for the padded source and the dy of a block.
    """
    for number in range(first, stop):
        starts, steps, places, weights, axes, counts, box, columns = _job(rows[number])
        channels, filters, are_first = counts
        pixels, by, used = _pixels((source[starts[0] :], steps, axes, channels), box, memory)
        terms, term_steps = _outputs(by, axes, box)
        depth = terms[0] * terms[1] * terms[2] * terms[3]
        groups, count = box[0][1] - box[0][0], -(-filters // columns)
        used = -(-used // columns) * columns
        assert used + groups * count * depth * columns <= len(memory), "dy exceeds its memory"
        panels = memory[used : used + groups * count * depth * columns]
        panels = panels.reshape((groups, count, depth, columns))
        at = starts[1] + _start(places, box)
        _pack(result, at, places, terms, filters, panels, 0, count)
        extents = _ordered(channels, axes[0][3], axes[1][3], axes[2][3], are_first)
        by_row = _ordered(weights[2], weights[3], weights[4], weights[5], are_first)
        line, row = terms[3] * columns, terms[2] * terms[3] * columns
        _products(
            pixels,
            panels.ravel(),
            shared[starts[2] + box[0][0] * weights[0] :],
            (extents, _term_steps(by, axes, are_first), by_row),
            (terms, term_steps, (terms[1] * row, row, line, columns)),
            (groups, by[0], weights[0], count * depth * columns),
            (filters, 1, columns, depth * columns),
            True,
        )


@compiled
def correlate_channels(
    source: Any, result: Any, shared: Any, rows: Any, first: int, stop: int, memory: Any
) -> None:
    """Compute the blocks of a depthwise correlation's result from rows ``first`` to ``stop``.

    Args:
        source, result: their channels are contiguous.
        shared: packed filters (taps, channels).
    """
    for number in range(first, stop):
        starts, steps, places, weights, axes, counts, box, columns = _job(rows[number])
        channels, _, _ = counts
        terms = 1, axes[0][3], axes[1][3], axes[2][3]
        operands = source[starts[0] :], steps, axes, channels
        for part in _subboxes(axes, box, LEAST_DIVIDED_CHANNELS):
            pixels, by, _ = _pixels(operands, part, memory)
            extents, row_steps = _outputs(by, axes, part)
            _channel_products(
                pixels,
                shared[starts[2] :],
                result[starts[1] + _start(places, part) :],
                (extents, row_steps, places[2:]),
                (terms, _term_steps(by, axes, True), (0, weights[3], weights[4], weights[5])),
                channels,
                columns,
                False,
            )


@compiled
def add_channel_gradient(
    source: Any, result: Any, shared: Any, rows: Any, first: int, stop: int, memory: Any
) -> None:
    """Add the depthwise filter gradients of the blocks of dy from rows ``first`` to ``stop``.

    Args:
        source, result: their channels are contiguous.
        shared: has the sums (taps along three axes, panels * columns); see ``_channel_products``.
    """
    for number in range(first, stop):
        starts, steps, places, weights, axes, counts, box, columns = _job(rows[number])
        channels, _, _ = counts
        operands = source[starts[0] :], steps, axes, channels
        extents = 1, axes[0][3], axes[1][3], axes[2][3]
        for part in _subboxes(axes, box, LEAST_DIVIDED_CHANNELS):
            pixels, by, _ = _pixels(operands, part, memory)
            terms, term_steps = _outputs(by, axes, part)
            _channel_products(
                pixels,
                result[starts[1] + _start(places, part) :],
                shared[starts[2] :],
                (extents, _term_steps(by, axes, True), (0, weights[3], weights[4], weights[5])),
                (terms, term_steps, places[2:]),
                channels,
                columns,
                True,
            )


@compiled
def _channel_products(
    pixels: Any,
    factors: Any,
    sums: Any,
    rows: Any,
    terms: Any,
    channels: int,
    at_once: int,
    adds: bool,
) -> None:
    """Set sums[row, c] = sum over terms of pixels[row, term, c] * factors[term, c].

    Channels are divided into panels of as many columns as a tile has; the last panel also has
    columns of the one before it.

    Args:
        rows: extents of a row's axes, and their strides in ``pixels`` and in ``sums``.
        terms: extents of a term's axes, and their strides in ``pixels`` and in ``factors``.
        at_once: columns of a tile, one or two vectors.
        adds: whether to add to ``sums``, where panels then follow each other.
    """
    lanes = VECTOR_BYTES // sums.itemsize
    runs, runs_at_once = _runs(terms, terms[0][3], terms[1][3], terms[2][3])
    run = terms[1][3], terms[2][3], runs_at_once
    row_count = rows[0][0] * rows[0][1] * rows[0][2] * rows[0][3]
    whole = -(-row_count // ROWS) * ROWS
    sources = _offsets(rows[0], rows[1], row_count, whole)
    targets = _offsets(rows[0], rows[2], row_count, whole)
    out, lines = (at_once, 1), _lines(sums)
    some = max(L2_ELEMENTS // (channels * ROWS), 1) * ROWS
    for first in range(0, row_count, some):
        for number in range(-(-channels // at_once)):
            start = min(number * at_once, channels - at_once)
            x, w, z = pixels[start:], factors[start:], sums[number * at_once if adds else start :]
            for row in range(first, min(first + some, row_count), ROWS):
                at, to = sources[row:], targets[row:]
                if at_once > lanes:
                    _two_of_channels(x, w, z, at, to, runs, run, out, adds, lines)
                else:
                    _one_of_channels(x, w, z, at, to, runs, run, out, adds, lines)


@compiled
def _subboxes(axes: Any, box: Any, least: int) -> Any:
    """Separate the outputs of a box whose windows contain padding from all others.

    Only the former copy pixels.  There is no division if there are fewer than ``least`` pixels, or
    if more than a quarter of the outputs read padding.
    """
    depth, rows, columns = _cuts(axes[0], box[2]), _cuts(axes[1], box[3]), _cuts(axes[2], box[4])
    inner, outer = box[1][1] - box[1][0], box[1][1] - box[1][0]
    for cuts in (depth, rows, columns):
        inner *= cuts[2] - cuts[1]
        outer *= cuts[3] - cuts[0]
    if outer < least or 4 * inner < 3 * outer or inner == outer:
        return [box]
    parts = []
    for i in range(3):
        for j in range(3):
            for k in range(3):
                a, b, c = depth[i : i + 2], rows[j : j + 2], columns[k : k + 2]
                if a[0] < a[1] and b[0] < b[1] and c[0] < c[1]:
                    parts.append((box[0], box[1], (a[0], a[1]), (b[0], b[1]), (c[0], c[1])))
    return parts


@compiled
def _cuts(axis: Any, outputs: Any) -> Any:
    """Return (first, begin, end, stop): outputs first to stop, of which begin to end read no
    padding."""
    stride, dilation, offset, taps, size = axis
    first, stop = outputs
    begin = min(max(-(offset // stride), first), stop)
    end = (size - 1 - offset - (taps - 1) * dilation) // stride + 1
    return np.array((first, begin, min(max(end, begin), stop), stop))


@compiled
def _start(places: Any, box: Any) -> int:
    """Return the position of the first element of a box."""
    first = box[0][0] * places[0] + box[1][0] * places[2]
    return first + box[2][0] * places[3] + box[3][0] * places[4] + box[4][0] * places[5]


@compiled
def _outputs(by: Any, axes: Any, box: Any) -> Any:
    """Return the extents of images and outputs, and the strides in pixels from one to the next."""
    extents = (
        box[1][1] - box[1][0],
        box[2][1] - box[2][0],
        box[3][1] - box[3][0],
        box[4][1] - box[4][0],
    )
    return extents, (by[2], axes[0][0] * by[3], axes[1][0] * by[4], axes[2][0] * by[5])


@compiled
def _term_steps(by: Any, axes: Any, are_first: bool) -> Any:
    """Return the strides in pixels from one channel or tap to the next, in a term's order."""
    return _ordered(by[1], axes[0][1] * by[3], axes[1][1] * by[4], axes[2][1] * by[5], are_first)


@compiled
def _ordered(channel: int, depth: int, row: int, column: int, are_first: bool) -> Any:
    if are_first:
        return channel, depth, row, column
    return depth, row, column, channel


@compiled
def _pixels(operands: Any, box: Any, memory: Any) -> Any:
    """Return memory that begins with a box's first pixel, its strides, and the memory used.

    If windows of the box contain padding, the source is copied to ``memory`` with padding.
    """
    source, steps, axes, channels = operands
    d, depth, size_d = _window(axes[0], box[2])
    h, height, size_h = _window(axes[1], box[3])
    w, width, size_w = _window(axes[2], box[4])
    first = box[0][0] * steps[0] + box[1][0] * steps[2]
    first += d * steps[3] + h * steps[4] + w * steps[5]
    is_inside = min(d, h, w) >= 0 and d + depth <= size_d
    if is_inside and h + height <= size_h and w + width <= size_w:
        return source[first:], steps, 0
    groups, images = box[0][1] - box[0][0], box[1][1] - box[1][0]
    # Rows are copied; a row has the pixels of all channels, or of one.
    outer, inner = (1, channels) if steps[1] == 1 else (channels, 1)
    line = width * inner
    image = depth * height * line
    by = (outer * images * image, images * image, image, height * line, line, inner)
    if outer == 1:
        by = (images * image, 1, image, height * line, line, inner)
    used = groups * outer * images * image
    assert used <= len(memory), "the padded source exceeds its scratch memory"
    left = min(max(-w, 0), width) * inner
    right = max(min(size_w - w, width) * inner, left)
    for g in range(groups):
        for c in range(outer):
            for n in range(images):
                for z in range(depth):
                    for y in range(height):
                        at = g * by[0] + c * by[1] + n * by[2] + z * by[3] + y * by[4]
                        row = memory[at : at + line]
                        if not (0 <= z + d < size_d and 0 <= y + h < size_h):
                            row[:] = 0
                            continue
                        begin = first + g * steps[0] + c * steps[1] + n * steps[2]
                        begin += z * steps[3] + y * steps[4]
                        row[:left] = 0
                        row[right:] = 0
                        if steps[5] == inner:
                            for i in range(left, right):
                                row[i] = source[begin + i]
                        else:
                            for i in range(left // inner, right // inner):
                                for j in range(inner):
                                    row[i * inner + j] = source[begin + i * steps[5] + j]
    return memory, by, used


@compiled
def _window(axis: Any, outputs: Any) -> Any:
    """Return the first position that outputs read, the number of positions, and the source's size,
    along an axis."""
    stride, dilation, offset, taps, size = axis
    first = outputs[0] * stride + offset
    span = (outputs[1] - outputs[0] - 1) * stride + max(taps - 1, 0) * dilation + 1
    return first, span, size


@compiled
def _products(
    pixels: Any,
    panels: Any,
    sums: Any,
    rows: Any,
    terms: Any,
    groups: Any,
    columns: Any,
    adds: bool,
) -> None:
    """Set sums[g, row, k] = sum over terms of pixels[g, row, term] * panels[g, term, k].

    Args:
        rows: extents of a row's axes, and their strides in ``pixels`` and in ``sums``.
        terms: extents of a term's axes, and their strides in ``pixels`` and in ``panels``.
        groups: number of groups, and strides of a group in ``pixels``, ``sums`` and ``panels``.
        columns: number of columns, their stride in ``sums``, the number of columns of a tile, and
            the stride of a panel in ``panels``.
        adds: whether to add to ``sums``, whose rows then extend to whole tiles.
    """
    # The last axes of a term, if they are one axis in memory, are summed in one loop.
    length, step, panel_step = 1, 0, 0
    for axis in range(3, -1, -1):
        if terms[0][axis] > 1:
            if length == 1:
                step, panel_step = terms[1][axis], terms[2][axis]
            elif terms[1][axis] != length * step or terms[2][axis] != length * panel_step:
                break
            length *= terms[0][axis]
    runs, runs_at_once = _runs(terms, length, step, panel_step)
    row_count = rows[0][0] * rows[0][1] * rows[0][2] * rows[0][3]
    whole = -(-row_count // ROWS) * ROWS
    sources = _offsets(rows[0], rows[1], row_count, whole)
    targets = _offsets(rows[0], rows[2], row_count, whole)
    run, at_once = (step, panel_step, runs_at_once), columns[2]
    lines = _lines(sums)
    for g in range(groups[0]):
        x, y, of_group = pixels[g * groups[1] :], sums[g * groups[2] :], panels[g * groups[3] :]
        for number in range(-(-columns[0] // at_once)):
            left = columns[0] - number * at_once
            panel, z = of_group[number * columns[3] :], y[number * at_once * columns[1] :]
            for row in range(0, row_count, ROWS):
                at, to = sources[row:], targets[row:]
                out = (at_once if adds else left, columns[1])
                if 2 * left > at_once:
                    _two_vectors(x, panel, z, at, to, runs, run, out, adds, lines)
                else:
                    _one_vector(x, panel, z, at, to, runs, run, out, adds, lines)


@compiled
def _lines(sums: Any) -> Any:
    """Return memory for the sums of a tile."""
    return np.empty(ROWS * 2 * VECTOR_BYTES // sums.itemsize, sums.dtype)


@compiled
def _runs(terms: Any, length: int, step: int, panel_step: int) -> Any:
    """Divide terms into runs of at most TERMS neighbours.

    Args:
        terms: extents of a term's axes, and their strides in the two factors.
        length, step, panel_step: number of neighbours in memory, and their strides.

    Returns:
        (runs, at_once): the array (runs, 3) of a tile, and how many runs are summed in registers,
        which is about the same number for all sums of a tile and at most TERMS terms.
    """
    depth = terms[0][0] * terms[0][1] * terms[0][2] * terms[0][3]
    of_pixels = _offsets(terms[0], terms[1], depth, depth)
    of_panels = _offsets(terms[0], terms[2], depth, depth)
    pieces = max(-(-length // TERMS), 1)
    runs = np.empty((depth // max(length, 1) * pieces, 3), np.int64)
    for number in range(len(runs)):
        at, piece = number // pieces * length, number % pieces
        begin, end = length * piece // pieces, length * (piece + 1) // pieces
        runs[number, 0] = of_pixels[at] + begin * step
        runs[number, 1] = of_panels[at] + begin * panel_step
        runs[number, 2] = end - begin
    most = max(TERMS // max(length, 1), 1)
    return runs, -(-len(runs) // max(-(-len(runs) // most), 1))


@compiled
def _offsets(extents: Any, steps: Any, count: int, whole: int) -> Any:
    """Return the positions of ``count`` elements in C order, and the last one up to ``whole``."""
    offsets = np.empty(whole, np.int64)
    number = 0
    for i in range(extents[0]):
        for j in range(extents[1]):
            for k in range(extents[2]):
                first = i * steps[0] + j * steps[1] + k * steps[2]
                for m in range(extents[3]):
                    offsets[number] = first + m * steps[3]
                    number += 1
    for number in range(count, whole):
        offsets[number] = offsets[count - 1]
    return offsets
