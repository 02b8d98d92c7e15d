"""Loops of cupyconv/cpu/loops.py, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyconv.cpu.compiled import TERMS, compiled
from cupyconv.cpu.views import L1_BYTES

_TERMS = TERMS // 3 * 3  # three taps are added together

_STRETCH = L1_BYTES // (4 * 8)  # positions summed at once: four rows of 8 bytes fit the cache

_PITCH = _STRETCH + 48  # so that rows do not share the sets of the L1 cache


@compiled
def planar_sums(pixels: Any, offsets: Any, weights: Any, sums: Any, length: int) -> None:
    """Set sums[g, k, i] = sum over t of weights[g, k, t] * pixels[g, offsets[t] + i], i < length.

    Index t runs over the taps of all channels.
    """
    groups, filters, _ = sums.shape
    chunk = np.zeros((4, _PITCH), sums.dtype)
    for g in range(groups):
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            for first in range(0, filters, 4):
                last = min(first + 4, filters)
                _sum(pixels[g], offsets, weights[g], (first, last), (begin, end), sums[g], chunk)


@compiled
def _sum(
    pixels: Any, offsets: Any, weights: Any, rows: Any, columns: Any, sums: Any, chunk: Any
) -> None:
    """Set a part of sums[k, i] = sum over t of weights[k, t] * pixels[offsets[t] + i].

    At most _TERMS products are added one after another.

    Args:
        rows, columns: pairs (first, stop) of the filters, at most four, and of the positions.
        chunk: zeros, as scratch for the sums of some taps.
    """
    first, last = rows
    begin, end = columns
    for row in range(first, last):
        sums[row, begin:end] = 0
    step = _step(len(offsets))
    for tap in range(0, len(offsets), step):
        places, w = offsets[tap : tap + step], weights[:, tap : tap + step]
        target, k, left = sums, first, begin
        if tap:
            target, k, left = chunk, 0, 0
        right, done = left + end - begin, 0
        if first + 4 == last:
            p, q = target[k, left:right], target[k + 1, left:right]
            r, s = target[k + 2, left:right], target[k + 3, left:right]
            done = _add_to_four(pixels, places, w, first, begin, p, q, r, s)
        for row in range(first, last):
            _add_to_one(pixels, places, w, row, begin, target[k + row - first, left:right], done)
            if tap:
                _move(sums[row, begin:end], chunk[row - first])


@compiled
def _step(taps: int) -> int:
    """Return how many taps are added one after another: a multiple of 3, at most _TERMS."""
    parts = max(-(-taps // _TERMS), 1)
    return max(-(-taps // (parts * 3)), 1) * 3


@compiled
def _move(total: Any, terms: Any) -> None:
    """Add terms to their totals, and clear them."""
    for i in range(len(total)):
        total[i] += terms[i]
        terms[i] = 0


@compiled
def _add_to_four(
    pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, q: Any, r: Any, s: Any
) -> int:
    """Add the products of filters k to k + 3 to their sums p, q, r and s, three taps at a time.

    Return the number of taps added; up to two taps remain.
    """
    taps = len(offsets) - len(offsets) % 3
    for t in range(0, taps, 3):
        u, v = offsets[t] + begin, offsets[t + 1] + begin
        a, b, c = pixels[u:], pixels[v:], pixels[offsets[t + 2] + begin :]
        pa, pb, pc = w[k, t], w[k, t + 1], w[k, t + 2]
        qa, qb, qc = w[k + 1, t], w[k + 1, t + 1], w[k + 1, t + 2]
        ra, rb, rc = w[k + 2, t], w[k + 2, t + 1], w[k + 2, t + 2]
        sa, sb, sc = w[k + 3, t], w[k + 3, t + 1], w[k + 3, t + 2]
        for i in range(len(p)):
            x, y, z = a[i], b[i], c[i]
            p[i] += pa * x + pb * y + pc * z
            q[i] += qa * x + qb * y + qc * z
            r[i] += ra * x + rb * y + rc * z
            s[i] += sa * x + sb * y + sc * z
    return taps


@compiled
def _add_to_one(pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, t: int) -> None:
    """Add the products of filter k's weights, from tap t on, to the filter's sums p."""
    while t + 3 <= len(offsets):
        u, v = offsets[t] + begin, offsets[t + 1] + begin
        a, b, c = pixels[u:], pixels[v:], pixels[offsets[t + 2] + begin :]
        pa, pb, pc = w[k, t], w[k, t + 1], w[k, t + 2]
        for i in range(len(p)):
            p[i] += pa * a[i] + pb * b[i] + pc * c[i]
        t += 3
    while t < len(offsets):
        a, pa = pixels[offsets[t] + begin :], w[k, t]
        for i in range(len(p)):
            p[i] += pa * a[i]
        t += 1


@compiled
def plane_sums(
    source: Any,
    steps: Any,
    shape: Any,
    weights: Any,
    offsets: Any,
    result: Any,
    places: Any,
    rules: Any,
    pixels: Any,
    sums: Any,
) -> None:
    """Correlate the plane of each group and image with the only filter of the group.

    Args:
        source, steps, shape: flat memory, strides (G, N, H) in elements and extents (G, N, H, W).
        weights: array (G, 1, taps).
        offsets: position of each tap in a padded plane.
        result, places: flat memory and strides (G, N, rows) in elements.
        rules: first source row and column of the padded plane, which may be negative; rows and
            columns of the result; rows and columns of the padded plane.
        pixels, sums: scratch for a padded plane and its sums.
    """
    first_row, first_column, outputs, columns, lines, pitch = rules
    groups, images, height, width = shape
    left = max(-first_column, 0)
    right = min(width - first_column, pitch)
    length = (outputs - 1) * pitch + columns
    total, chunk = sums[:length], np.zeros(length, sums.dtype)
    step = _step(len(offsets))
    pixels[:] = 0
    for g, n in np.ndindex((groups, images)):
        for line in range(max(-first_row, 0), min(height - first_row, lines)):
            begin = g * steps[0] + n * steps[1] + (line + first_row) * steps[2] + first_column
            _copy(pixels[line * pitch + left : line * pitch + right], source[begin + left :])
        total[:] = 0
        _add_to_one(pixels, offsets[:step], weights[g], 0, 0, total, 0)
        for tap in range(step, len(offsets), step):
            at, w = offsets[tap : tap + step], weights[g, :, tap : tap + step]
            _add_to_one(pixels, at, w, 0, 0, chunk, 0)
            _move(total, chunk)
        for p in range(outputs):
            begin = g * places[0] + n * places[1] + p * places[2]
            _copy(result[begin : begin + columns], sums[p * pitch :])


@compiled
def _copy(target: Any, source: Any) -> None:
    for i in range(len(target)):
        target[i] = source[i]


@compiled
def planar_products(
    pixels: Any, offsets: Any, gradients: Any, inside: Any, totals: Any, length: int
) -> None:
    """Add the sum of gradients[g, k, i] * pixels[g, offsets[t] + i] to totals[g, k, t].

    The sum is over the positions i < length for which inside[i] is not 0; t runs over the taps of
    all channels.
    """
    groups, filters, _ = gradients.shape
    for g in range(groups):
        x = pixels[g]
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            are_in = inside[begin:end]
            for first in range(0, filters, 4):
                last, done = min(first + 4, filters), 0
                if first + 4 == last:
                    p, q = gradients[g, first, begin:end], gradients[g, first + 1, begin:end]
                    r, s = gradients[g, first + 2, begin:end], gradients[g, first + 3, begin:end]
                    done = _products_of_four(
                        x, offsets, totals[g], first, begin, are_in, p, q, r, s
                    )
                for k in range(first, last):
                    p = gradients[g, k, begin:end]
                    _products_of_one(x, offsets, totals[g, k], begin, are_in, p, done)


@compiled
def _products_of_one(
    pixels: Any, offsets: Any, w: Any, begin: int, inside: Any, p: Any, t: int
) -> None:
    """Add the gradients p of a filter, times the pixels, to the totals w, from tap t on."""
    zero = pixels.dtype.type(0)
    while t < len(offsets):
        # The last taps may be added together with taps that are then ignored.
        u, v = min(t + 1, len(offsets) - 1), min(t + 2, len(offsets) - 1)
        a, b, c = (
            pixels[offsets[t] + begin :],
            pixels[offsets[u] + begin :],
            pixels[offsets[v] + begin :],
        )
        pa, pb, pc = zero, zero, zero
        for i in range(len(p)):
            x, y, z = a[i], b[i], c[i]
            if inside[i] == 0:
                x, y, z = zero, zero, zero
            pa, pb, pc = pa + p[i] * x, pb + p[i] * y, pc + p[i] * z
        w[t] += pa
        if t + 1 < len(offsets):
            w[u] += pb
        if t + 2 < len(offsets):
            w[v] += pc
        t += 3


@compiled
def _products_of_four(
    pixels: Any,
    offsets: Any,
    w: Any,
    k: int,
    begin: int,
    inside: Any,
    p: Any,
    q: Any,
    r: Any,
    s: Any,
) -> int:
    """Add the gradients p, q, r and s of filters k to k + 3, times the pixels, to the totals w.

    Return the number of taps added, three at a time; up to two taps remain.
    """
    taps, zero = len(offsets) - len(offsets) % 3, pixels.dtype.type(0)
    for t in range(0, taps, 3):
        u, v = offsets[t] + begin, offsets[t + 1] + begin
        a, b, c = pixels[u:], pixels[v:], pixels[offsets[t + 2] + begin :]
        pa, pb, pc = w[k, t], w[k, t + 1], w[k, t + 2]
        qa, qb, qc = w[k + 1, t], w[k + 1, t + 1], w[k + 1, t + 2]
        ra, rb, rc = w[k + 2, t], w[k + 2, t + 1], w[k + 2, t + 2]
        sa, sb, sc = w[k + 3, t], w[k + 3, t + 1], w[k + 3, t + 2]
        for i in range(len(p)):
            x, y, z = a[i], b[i], c[i]
            if inside[i] == 0:
                x, y, z = zero, zero, zero
            pa, pb, pc = pa + p[i] * x, pb + p[i] * y, pc + p[i] * z
            qa, qb, qc = qa + q[i] * x, qb + q[i] * y, qc + q[i] * z
            ra, rb, rc = ra + r[i] * x, rb + r[i] * y, rc + r[i] * z
            sa, sb, sc = sa + s[i] * x, sb + s[i] * y, sc + s[i] * z
        w[k, t], w[k, t + 1], w[k, t + 2] = pa, pb, pc
        w[k + 1, t], w[k + 1, t + 1], w[k + 1, t + 2] = qa, qb, qc
        w[k + 2, t], w[k + 2, t + 1], w[k + 2, t + 2] = ra, rb, rc
        w[k + 3, t], w[k + 3, t + 1], w[k + 3, t + 2] = sa, sb, sc
    return taps
