"""Loops of cupyconv/cpu/loops.py, compiled by Numba."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from cupyconv import files
from cupyconv.cache_folder import keep, trusted_directory
from cupyconv.signals import uninterrupted


class _CodeCache:
    """File cache for the machine code of a function.

    Numba's own cache trusts any file it finds and does not detect truncation.  This cache only
    reads files that no other user can write and whose digest matches; otherwise the function is
    compiled again.
    """

    cache_path = None  # read by Numba's statistics

    def __init__(self, function: Callable) -> None:
        self._name = function.__qualname__

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if it is not cached or not readable."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        if path is None:
            return None
        try:
            content = files.read_private(path)
            digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest == hashlib.sha256(code).digest():
                return CompileResult._rebuild(target_context, *pickle.loads(code))
        except Exception:  # Numba and pickle raise many types
            pass
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache the code for a signature if possible."""
        path = self._path(sig, data.codegen)
        if path is not None:
            with suppress(Exception):
                code = dumps(data._reduce())
                keep(path, hashlib.sha256(code).digest() + code)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        folder = trusted_directory("loops")
        key = repr((_versions(), self._name, str(sig), codegen.magic_tuple()))
        return folder and folder / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


_DIGEST_BYTES = hashlib.sha256().digest_size


@cache
def _versions() -> tuple[str, ...]:
    """Return the digest of this file and the versions of Python, NumPy and Numba."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return source, sys.version, np.__version__, numba.__version__


def _compile(function: Callable) -> Any:
    """Wrap a function so that Numba compiles it per signature and caches the code."""
    # Reordering allows vectorization.  NaN and infinities keep their meaning.
    compiled: Any = numba.njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})(function)
    compiled._cache = _CodeCache(function)
    compile_for = compiled._compile_for_args
    # An interrupt during Numba's first compilation would leave its registries incomplete.
    compiled._compile_for_args = lambda *args: uninterrupted(lambda: compile_for(*args))
    return compiled


_STRETCH = 1024  # positions summed at once, so that four rows fit the L1 cache (hand-set)


@_compile
def planar_sums(pixels: Any, offsets: Any, weights: Any, sums: Any, length: int) -> None:
    """Set sums[g, k, i] = sum over t of weights[g, k, t] * pixels[g, offsets[t] + i], i < length.

    Index t runs over the taps of all channels.
    """
    groups, filters, _ = sums.shape
    for g in range(groups):
        x, w = pixels[g], weights[g]
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            for first in range(0, filters, 4):
                last, done = min(first + 4, filters), 0
                sums[g, first:last, begin:end] = 0
                if first + 4 == last:
                    p, q = sums[g, first, begin:end], sums[g, first + 1, begin:end]
                    r, s = sums[g, first + 2, begin:end], sums[g, first + 3, begin:end]
                    done = _add_to_four(x, offsets, w, first, begin, p, q, r, s)
                for k in range(first, last):
                    _add_to_one(x, offsets, w, k, begin, sums[g, k, begin:end], done)


@_compile
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


@_compile
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


@_compile
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
    pixels[:] = 0
    for g, n in np.ndindex((groups, images)):
        for line in range(max(-first_row, 0), min(height - first_row, lines)):
            begin = g * steps[0] + n * steps[1] + (line + first_row) * steps[2] + first_column
            _copy(pixels[line * pitch + left : line * pitch + right], source[begin + left :])
        sums[:length] = 0
        _add_to_one(pixels, offsets, weights[g], 0, 0, sums[:length], 0)
        for p in range(outputs):
            begin = g * places[0] + n * places[1] + p * places[2]
            _copy(result[begin : begin + columns], sums[p * pitch :])


@_compile
def _copy(target: Any, source: Any) -> None:
    for i in range(len(target)):
        target[i] = source[i]


@_compile
def planar_products(pixels: Any, offsets: Any, gradients: Any, totals: Any, length: int) -> None:
    """Add the sum over i < length of gradients[g, k, i] * pixels[g, offsets[t] + i] to
    totals[g, k, t], where t runs over the taps of all channels."""
    groups, filters, _ = gradients.shape
    for g in range(groups):
        x = pixels[g]
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            for first in range(0, filters, 4):
                last, done = min(first + 4, filters), 0
                if first + 4 == last:
                    p, q = gradients[g, first, begin:end], gradients[g, first + 1, begin:end]
                    r, s = gradients[g, first + 2, begin:end], gradients[g, first + 3, begin:end]
                    done = _products_of_four(x, offsets, totals[g], first, begin, p, q, r, s)
                for k in range(first, last):
                    p = gradients[g, k, begin:end]
                    for t in range(done, len(offsets)):
                        a, pa = x[offsets[t] + begin :], totals[g, k, t]
                        for i in range(len(p)):
                            pa += p[i] * a[i]
                        totals[g, k, t] = pa


@_compile
def _products_of_four(
    pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, q: Any, r: Any, s: Any
) -> int:
    """Add the gradients p, q, r and s of filters k to k + 3, times the pixels, to the totals w.

    Return the number of taps added, three at a time; up to two taps remain.
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
            pa, pb, pc = pa + p[i] * x, pb + p[i] * y, pc + p[i] * z
            qa, qb, qc = qa + q[i] * x, qb + q[i] * y, qc + q[i] * z
            ra, rb, rc = ra + r[i] * x, rb + r[i] * y, rc + r[i] * z
            sa, sb, sc = sa + s[i] * x, sb + s[i] * y, sc + s[i] * z
        w[k, t], w[k, t + 1], w[k, t + 2] = pa, pb, pc
        w[k + 1, t], w[k + 1, t + 1], w[k + 1, t + 2] = qa, qb, qc
        w[k + 2, t], w[k + 2, t + 1], w[k + 2, t + 2] = ra, rb, rc
        w[k + 3, t], w[k + 3, t + 1], w[k + 3, t + 2] = sa, sb, sc
    return taps


# The functions below sum rows of channels.  Source and result are flat memory of arrays with the
# axes (N, depth, rows, columns, G).  ``steps`` (source) and ``places`` (result) are the strides of
# the first four axes, in elements.  ``ends`` has the extents of the result.  ``axes`` has (stride,
# dilation, offset, taps, size) of depth, rows and columns.  If the weights are repeated for several
# pixels, one loop computes all these pixels.


@_compile
def pixel_sums(
    source: Any, steps: Any, weights: Any, sums: Any, places: Any, ends: Any, axes: Any
) -> None:
    """Set sums[n, z, p, q, g] = sum over t, r, s of weights[t, r, s, g] * source[n, d, h, w, g].

    (d, h, w) is the pixel that tap (t, r, s) reads for output (z, p, q).
    """
    for n, z, p in np.ndindex((ends[0], ends[1], ends[2])):
        line = sums[n * places[0] + z * places[1] + p * places[2] :]
        for q in range(ends[3]):
            line[q * places[3] : q * places[3] + ends[4]] = 0
        for t, r in np.ndindex((axes[0][3], axes[1][3])):
            d, h = _position(axes[0], z, t), _position(axes[1], p, r)
            if 0 <= d < axes[0][4] and 0 <= h < axes[1][4]:
                row = source[n * steps[0] + d * steps[1] + h * steps[2] :]
                _add_taps(line, places[3], weights[t, r], row, steps[3], axes[2], ends)


@_compile
def pixel_products(
    source: Any, steps: Any, totals: Any, gradients: Any, places: Any, ends: Any, axes: Any
) -> None:
    """Add the sum over n, z, p, q of gradients[n, z, p, q, g] * source[n, d, h, w, g] to
    totals[t, r, s, g].

    (d, h, w) is the pixel that tap (t, r, s) reads for output (z, p, q).
    """
    for n, z, p in np.ndindex((ends[0], ends[1], ends[2])):
        line = gradients[n * places[0] + z * places[1] + p * places[2] :]
        for t, r in np.ndindex((axes[0][3], axes[1][3])):
            d, h = _position(axes[0], z, t), _position(axes[1], p, r)
            if 0 <= d < axes[0][4] and 0 <= h < axes[1][4]:
                row = source[n * steps[0] + d * steps[1] + h * steps[2] :]
                _add_products(totals[t, r], line, places[3], row, steps[3], axes[2], ends)


@_compile
def _add_taps(
    sums: Any, place: int, weights: Any, source: Any, step: int, axis: Any, outputs: Any
) -> None:
    """Add the products of a row of taps to a row of sums.

    Three taps at a time are added where all three are inside the source.
    """
    taps, size, distance, channels = axis[3], axis[4], axis[1] * step, outputs[4]
    several = weights.shape[1] // channels
    for s in range(0, taps, 3):
        for q in range(0, outputs[3], several):
            count, w = min(outputs[3] - q, several), _position(axis, q, s)
            if s + 3 <= taps and w >= 0 and _position(axis, q, s + 2) + count <= size:
                at = w * step
                total = sums[q * place : q * place + count * channels]
                a, b, c = weights[s], weights[s + 1], weights[s + 2]
                x, y, z = source[at:], source[at + distance :], source[at + 2 * distance :]
                for g in range(len(total)):
                    total[g] += a[g] * x[g] + b[g] * y[g] + c[g] * z[g]
            else:
                for tap in range(s, min(s + 3, taps)):
                    w = _position(axis, q, tap)
                    begin, end = max(-w, 0), min(size - w, count)
                    if begin < end:
                        total = sums[q * place + begin * channels : q * place + end * channels]
                        _add(total, weights[tap], source[(w + begin) * step :])


@_compile
def _add_products(
    totals: Any, gradients: Any, place: int, source: Any, step: int, axis: Any, outputs: Any
) -> None:
    """Add one row of dy, times the pixels under one row of taps, to the gradient of these taps."""
    channels = outputs[4]
    several = totals.shape[1] // channels
    for q in range(0, outputs[3], several):
        for s in range(axis[3]):
            w = _position(axis, q, s)
            begin, end = max(-w, 0), min(axis[4] - w, outputs[3] - q, several)
            if begin < end:
                total = totals[s, : (end - begin) * channels]
                _add(total, gradients[q * place + begin * channels :], source[(w + begin) * step :])


@_compile
def _add(sums: Any, factors: Any, x: Any) -> None:
    for g in range(len(sums)):
        sums[g] += factors[g] * x[g]


@_compile
def _position(axis: Any, output: int, tap: int) -> int:
    """Return the source position that a tap reads for an output, along one axis."""
    return output * axis[0] + tap * axis[1] + axis[2]
