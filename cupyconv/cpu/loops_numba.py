"""The loops of cupyconv/cpu/loops.py, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
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
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            k = 0
            while k + 4 <= filters:
                first, second = sums[g, k, begin:end], sums[g, k + 1, begin:end]
                third, fourth = sums[g, k + 2, begin:end], sums[g, k + 3, begin:end]
                _sum_four(pixels[g], offsets, weights[g], k, begin, first, second, third, fourth)
                k += 4
            while k < filters:
                _sum_one(pixels[g], offsets, weights[g], k, begin, sums[g, k, begin:end])
                k += 1


@_compiled
def _sum_four(
    pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any, q: Any, r: Any, s: Any
) -> None:
    """Four filters, for which the pixels of three taps at a time are read once."""
    taps, length = len(offsets), len(p)
    for i in range(length):
        p[i] = q[i] = r[i] = s[i] = 0
    t = 0
    while t + 3 <= taps:
        u, v = offsets[t] + begin, offsets[t + 1] + begin
        a, b, c = pixels[u:], pixels[v:], pixels[offsets[t + 2] + begin :]
        pa, pb, pc = w[k, t], w[k, t + 1], w[k, t + 2]
        qa, qb, qc = w[k + 1, t], w[k + 1, t + 1], w[k + 1, t + 2]
        ra, rb, rc = w[k + 2, t], w[k + 2, t + 1], w[k + 2, t + 2]
        sa, sb, sc = w[k + 3, t], w[k + 3, t + 1], w[k + 3, t + 2]
        for i in range(length):
            x, y, z = a[i], b[i], c[i]
            p[i] += pa * x + pb * y + pc * z
            q[i] += qa * x + qb * y + qc * z
            r[i] += ra * x + rb * y + rc * z
            s[i] += sa * x + sb * y + sc * z
        t += 3
    while t < taps:
        a = pixels[offsets[t] + begin :]
        pa, qa, ra, sa = w[k, t], w[k + 1, t], w[k + 2, t], w[k + 3, t]
        for i in range(length):
            x = a[i]
            p[i] += pa * x
            q[i] += qa * x
            r[i] += ra * x
            s[i] += sa * x
        t += 1


@_compiled
def _sum_one(pixels: Any, offsets: Any, w: Any, k: int, begin: int, p: Any) -> None:
    taps, length = len(offsets), len(p)
    for i in range(length):
        p[i] = 0
    t = 0
    while t + 3 <= taps:
        u, v = offsets[t] + begin, offsets[t + 1] + begin
        a, b, c = pixels[u:], pixels[v:], pixels[offsets[t + 2] + begin :]
        pa, pb, pc = w[k, t], w[k, t + 1], w[k, t + 2]
        for i in range(length):
            p[i] += pa * a[i] + pb * b[i] + pc * c[i]
        t += 3
    while t < taps:
        a, pa = pixels[offsets[t] + begin :], w[k, t]
        for i in range(length):
            p[i] += pa * a[i]
        t += 1


@_compiled
def planar_products(pixels: Any, offsets: Any, gradients: Any, totals: Any, length: int) -> None:
    """totals[g, k, t] += sum over i < length of gradients[g, k, i] * pixels[g, offsets[t] + i]."""
    groups, filters, _ = gradients.shape
    for g in range(groups):
        for begin in range(0, length, _STRETCH):
            end = min(begin + _STRETCH, length)
            for t in range(len(offsets)):
                x = pixels[g, offsets[t] + begin : offsets[t] + end]
                k = 0
                while k + 4 <= filters:
                    a, b = gradients[g, k, begin:end], gradients[g, k + 1, begin:end]
                    c, d = gradients[g, k + 2, begin:end], gradients[g, k + 3, begin:end]
                    p, q = totals[g, k, t], totals[g, k + 1, t]
                    r, s = totals[g, k + 2, t], totals[g, k + 3, t]
                    for i in range(end - begin):
                        p += a[i] * x[i]
                        q += b[i] * x[i]
                        r += c[i] * x[i]
                        s += d[i] * x[i]
                    totals[g, k, t], totals[g, k + 1, t] = p, q
                    totals[g, k + 2, t], totals[g, k + 3, t] = r, s
                    k += 4
                while k < filters:
                    a, p = gradients[g, k, begin:end], totals[g, k, t]
                    for i in range(end - begin):
                        p += a[i] * x[i]
                    totals[g, k, t] = p
                    k += 1


# Of pixels that are rows of channels: memory as it is, with steps between images, planes, rows and
# pixels; axes of (stride, dilation, offset, taps, size), as Axis has them.  Where there are weights
# for each pixel of a row, all of them are summed at a time.


@_compiled
def pixel_sums(
    source: Any, steps: Any, weights: Any, sums: Any, places: Any, outputs: Any, axes: Any
) -> None:
    """sums[n, z, p, q, g] = sum over taps of weights[t, r, s, g] * source[n, d, h, w, g]."""
    row, channels, length = axes[2], outputs[4], weights.shape[3]
    for n in range(outputs[0]):
        for z in range(outputs[1]):
            for p in range(outputs[2]):
                line = n * places[0] + z * places[1] + p * places[2]
                for q in range(outputs[3]):
                    total = sums[line + q * places[3] :]
                    for g in range(channels):
                        total[g] = 0
                for t in range(*_inside(axes[0], z)):
                    for r in range(*_inside(axes[1], p)):
                        read = n * steps[0] + _read(axes[0], z, t) * steps[1]
                        read += _read(axes[1], p, r) * steps[2]
                        for s in range(0, row[3], 3):
                            _sum_taps(
                                source, read, steps[3], weights[t, r], s, min(s + 3, row[3]),
                                sums, line, places[3], outputs[3], row, channels, length,
                            )  # fmt: skip


@_compiled
def _sum_taps(
    source: Any, read: int, step: int, weights: Any, s: int, stop: int,
    sums: Any, line: int, place: int, outputs: int, row: Any, channels: int, length: int,
) -> None:  # fmt: skip
    """Add up to three taps of a row: all of them at a time, where they are inside."""
    begin, end, several = _under(row, s, outputs)[0], 0, length // channels
    if stop == s + 3:
        end = _under(row, s + 2, outputs)[1]
    q = begin
    while q < end:
        count, of = (end - q, q * channels) if several > 1 else (1, 0)
        u, v, w = weights[s, of:], weights[s + 1, of:], weights[s + 2, of:]
        at, tap = read + _read(row, q, s) * step, row[1] * step
        a, b, c, total = (
            source[at:],
            source[at + tap :],
            source[at + 2 * tap :],
            sums[line + q * place :],
        )
        for g in range(count * channels):
            total[g] += u[g] * a[g] + v[g] * b[g] + w[g] * c[g]
        q += count
    for one in range(s, stop):
        first, beyond = _under(row, one, outputs)
        for q in range(first, beyond):
            if begin <= q < end:
                continue
            u = weights[one, q * channels if several > 1 else 0 :]
            a, total = source[read + _read(row, q, one) * step :], sums[line + q * place :]
            for g in range(channels):
                total[g] += u[g] * a[g]


@_compiled
def pixel_products(
    source: Any, steps: Any, totals: Any, gradients: Any, places: Any, outputs: Any, axes: Any
) -> None:
    """totals[t, r, s, g] += sum over n, z, p, q of gradients[...] * source[n, d, h, w, g]."""
    row, channels, several = axes[2], outputs[4], totals.shape[3] // outputs[4]
    for n in range(outputs[0]):
        for z in range(outputs[1]):
            for p in range(outputs[2]):
                line = n * places[0] + z * places[1] + p * places[2]
                for t in range(*_inside(axes[0], z)):
                    for r in range(*_inside(axes[1], p)):
                        read = n * steps[0] + _read(axes[0], z, t) * steps[1]
                        read += _read(axes[1], p, r) * steps[2]
                        for s in range(row[3]):
                            q, end = _under(row, s, outputs[3])
                            while q < end:
                                count, at = (end - q, q * channels) if several > 1 else (1, 0)
                                x = source[read + _read(row, q, s) * steps[3] :]
                                a, total = gradients[line + q * places[3] :], totals[t, r, s, at:]
                                for g in range(count * channels):
                                    total[g] += a[g] * x[g]
                                q += count


@_compiled
def _read(axis: Any, output: int, tap: int) -> int:
    """What an output reads by a tap."""
    return output * axis[0] + tap * axis[1] + axis[2]


@_compiled
def _inside(axis: Any, output: int) -> tuple[int, int]:
    """The taps that an output has inside the source."""
    stride, dilation, offset, taps, size = axis
    first = output * stride + offset
    start = max(-(first // dilation), 0)
    return start, max(min((size - 1 - first) // dilation + 1, taps), start)


@_compiled
def _under(axis: Any, tap: int, outputs: int) -> tuple[int, int]:
    """The outputs that have a tap inside the source."""
    stride, dilation, offset, _, size = axis
    first = tap * dilation + offset
    start = max(-(first // stride), 0)
    return start, max(min((size - 1 - first) // stride + 1, outputs), start)
