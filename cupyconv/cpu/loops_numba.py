"""The loops of cupyconv/cpu/loops.py, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache


class _Kept(FunctionCache):
    """What was compiled, on disk; what is damaged there, or cannot be written, is not missed."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)


def _compiled(function: Callable) -> Any:
    """A function that is compiled for the types it is called with, and kept where it can be."""
    # Sums may be reordered, which makes them vectors; of nothing else is there anything assumed.
    compiled: Any = numba.njit(nogil=True, fastmath={"contract", "reassoc", "nsz"})(function)
    with suppress(RuntimeError):  # there is no folder to write to
        compiled._cache = _Kept(function)
    return compiled


_STRETCH = 1024  # places that are summed at a time: four rows of them stay in the nearest cache


@_compiled
def planar_sums(pixels: Any, offsets: Any, weights: Any, sums: Any, length: int) -> None:
    """sums[g, k, i] = sum over t of weights[g, k, t] * pixels[g, offsets[t] + i], i < length."""
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


@_compiled
def _add_to_four(
    pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, q: Any, r: Any, s: Any
) -> int:
    """Four filters, for which the pixels of three taps at a time are read once; how many taps."""
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


@_compiled
def _add_to_one(pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, t: int) -> None:
    """One filter, from a tap on, three at a time too."""
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


@_compiled
def planar_products(pixels: Any, offsets: Any, gradients: Any, totals: Any, length: int) -> None:
    """totals[g, k, t] += sum over i < length of gradients[g, k, i] * pixels[g, offsets[t] + i]."""
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


@_compiled
def _products_of_four(
    pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, q: Any, r: Any, s: Any
) -> int:
    """Four filters and three taps at a time, whose sums are in registers; how many taps."""
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


# Of pixels that are rows of channels: memory as it is, with steps between images, planes, rows and
# pixels; axes of (stride, dilation, offset, taps, size), as Axis has them.  Where there are weights
# for several pixels of a row, so many are summed at a time.


@_compiled
def pixel_sums(
    source: Any, steps: Any, weights: Any, sums: Any, places: Any, ends: Any, axes: Any
) -> None:
    """sums[n, z, p, q, g] = sum over taps of weights[t, r, s, g] * source[n, d, h, w, g]."""
    for n, z, p in np.ndindex((ends[0], ends[1], ends[2])):
        line = sums[n * places[0] + z * places[1] + p * places[2] :]
        for q in range(ends[3]):
            line[q * places[3] : q * places[3] + ends[4]] = 0
        for t, r in np.ndindex((axes[0][3], axes[1][3])):
            d, h = _read(axes[0], z, t), _read(axes[1], p, r)
            if 0 <= d < axes[0][4] and 0 <= h < axes[1][4]:
                row = source[n * steps[0] + d * steps[1] + h * steps[2] :]
                _add_taps(line, places[3], weights[t, r], row, steps[3], axes[2], ends)


@_compiled
def pixel_products(
    source: Any, steps: Any, totals: Any, gradients: Any, places: Any, ends: Any, axes: Any
) -> None:
    """totals[t, r, s, g] += sum over n, z, p, q of gradients[...] * source[n, d, h, w, g]."""
    for n, z, p in np.ndindex((ends[0], ends[1], ends[2])):
        line = gradients[n * places[0] + z * places[1] + p * places[2] :]
        for t, r in np.ndindex((axes[0][3], axes[1][3])):
            d, h = _read(axes[0], z, t), _read(axes[1], p, r)
            if 0 <= d < axes[0][4] and 0 <= h < axes[1][4]:
                row = source[n * steps[0] + d * steps[1] + h * steps[2] :]
                _add_products(totals[t, r], line, places[3], row, steps[3], axes[2], ends)


@_compiled
def _add_taps(
    sums: Any, place: int, weights: Any, source: Any, step: int, axis: Any, outputs: Any
) -> None:
    """A row of taps to a row of sums, three at a time where none of them is outside."""
    taps, size, distance, channels = axis[3], axis[4], axis[1] * step, outputs[4]
    several = weights.shape[1] // channels
    for s in range(0, taps, 3):
        for q in range(0, outputs[3], several):
            count, w = min(outputs[3] - q, several), _read(axis, q, s)
            if s + 3 <= taps and w >= 0 and _read(axis, q, s + 2) + count <= size:
                at = w * step
                total = sums[q * place : q * place + count * channels]
                a, b, c = weights[s], weights[s + 1], weights[s + 2]
                x, y, z = source[at:], source[at + distance :], source[at + 2 * distance :]
                for g in range(len(total)):
                    total[g] += a[g] * x[g] + b[g] * y[g] + c[g] * z[g]
            else:
                for one in range(s, min(s + 3, taps)):
                    w = _read(axis, q, one)
                    begin, end = max(-w, 0), min(size - w, count)
                    if begin < end:
                        total = sums[q * place + begin * channels : q * place + end * channels]
                        _add(total, weights[one], source[(w + begin) * step :])


@_compiled
def _add_products(
    totals: Any, gradients: Any, place: int, source: Any, step: int, axis: Any, outputs: Any
) -> None:
    """A row of gradients times what the taps read, to the gradient of a row of weights."""
    channels = outputs[4]
    several = totals.shape[1] // channels
    for q in range(0, outputs[3], several):
        for s in range(axis[3]):
            w = _read(axis, q, s)
            begin, end = max(-w, 0), min(axis[4] - w, outputs[3] - q, several)
            if begin < end:
                total = totals[s, : (end - begin) * channels]
                _add(total, gradients[q * place + begin * channels :], source[(w + begin) * step :])


@_compiled
def _add(sums: Any, factors: Any, x: Any) -> None:
    for g in range(len(sums)):
        sums[g] += factors[g] * x[g]


@_compiled
def _read(axis: Any, output: int, tap: int) -> int:
    """What an output reads by a tap."""
    return output * axis[0] + tap * axis[1] + axis[2]
