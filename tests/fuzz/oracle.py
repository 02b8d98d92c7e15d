"""Expected results of calls, computed independently of the library.

Sizes, padding and the legality of calls are computed here from the published rules; values come
from PyTorch in float64.  Nothing of cupyconv is imported.

``terms`` lists the products whose sum is a result.  They give the sum of absolute values, the
result of plain summation in the result's precision, and the places of NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from .cases import ADDENDS, DATA_FORMATS, FILTER_FORMATS, PART, Case, dtype_of

torch.set_num_threads(1)  # the layers are too small for several threads

DTYPES = ("float16", "bfloat16", "float32", "float64", *PART)

MOST_TERMS = 1 << 20
"""Largest number of products that are listed."""

MOST_PADDED = 1 << 24
"""Largest number of elements of x with its padding, which PyTorch copies."""


class IllegalError(Exception):
    """The call is illegal."""


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise IllegalError(reason)


@dataclass(frozen=True)
class Geometry:
    """A legal layer, with sizes named by meaning; spatial entries are per axis.

    Attributes:
        channels, filters: channels and filters per group.
        data, filter: positions in the arrays of N, C and O, I, then of the spatial axes.
    """

    batch: int
    groups: int
    channels: int
    filters: int
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    data: tuple[int, ...]
    filter: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, in the library's formats."""
        x = (self.batch, self.groups * self.channels, *self.sizes)
        y = (self.batch, self.groups * self.filters, *self.outputs)
        w = (self.groups * self.filters, self.channels, *self.taps)
        return {
            "x": _stored(x, self.data),
            "dy": _stored(y, self.data),
            "w": _stored(w, self.filter),
            "bias": (self.groups * self.filters,),
        }

    @property
    def macs(self) -> int:
        """Products per pass, those with padding included."""
        return prod((self.batch, self.groups, self.channels, self.filters, *self.outputs)) * prod(
            self.taps
        )

    @property
    def padded_elements(self) -> int:
        """Elements of x with its padding."""
        sizes = (size + sum(pair) for size, pair in zip(self.sizes, self.pads, strict=True))
        return self.batch * self.groups * self.channels * prod(sizes)

    @property
    def most_terms(self) -> int:
        """Largest number of terms of a single result."""
        channels = self.channels * prod(self.taps), self.filters * prod(self.taps)
        return max(*channels, self.batch * prod(self.outputs)) + 2  # bias and addend


def _stored(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    stored = [0] * len(shape)
    for size, axis in zip(shape, axes, strict=True):
        stored[axis] = size
    return tuple(stored)


# -- legality --------------------------------------------------------------------------------------


def geometry(case: Case) -> Geometry:
    """Return the layer of a case.

    Raises:
        IllegalError: the layer is illegal, or an array does not fit it.
    """
    of_dy = case.operation in ("conv_backprop_bias", "conv_transpose")
    rank = len(case.dy if of_dy else case.x) - 2
    _require(rank in DATA_FORMATS, "1 to 3 spatial axes")
    data_format = _word(case.data_format, DATA_FORMATS[rank], True)
    filter_format = FILTER_FORMATS[rank][data_format.endswith("C")]
    if case.filter_format is not None and case.operation != "conv_backprop_bias":
        filter_format = _word(case.filter_format, FILTER_FORMATS[rank], False)
    spatial = "DHW"[3 - rank :]
    data = tuple(data_format.index(letter) for letter in "NC" + spatial)
    filter_ = tuple(filter_format.index(letter) for letter in "OI" + spatial)
    _require(case.dtype in DTYPES, "a dtype that is taken")
    _require(case.stranger not in case.operands, "one dtype")
    _require(not case.bad_out, f"another out: {case.bad_out}")
    _require(case.dtype not in PART or case.activation is None, "real numbers to activate")
    if case.operation == "conv_backprop_bias":
        return _of_bias(case, data, filter_)
    _require(len(case.w) == rank + 2, "a filter of the input's rank")
    _require(case.groups >= 1, "groups")
    stride, dilation = _each(case.stride, rank), _each(case.dilation, rank)
    _require(min(*stride, *dilation) >= 1, "stride and dilation")
    w = [case.w[axis] for axis in filter_]
    filters, slice_, *taps = w
    _require(min(w) >= 1, "sizes")
    _require(filters % case.groups == 0, "groups divide the filters")
    sides = _sides(case.padding, rank)
    if case.operation == "conv_transpose":
        sizes, sides = _transposed_sizes(case, data, taps, stride, dilation)
        batch, channels = case.dy[data[0]], slice_ * case.groups
        if case.output_padding == "shape":
            _require(case.x[data[0]] == batch, "the batch is kept")
            _require(case.x[data[1]] == channels, "the filter's channels")
    else:
        batch, channels, *sizes = (case.x[axis] for axis in data)
    _require(batch >= 0, "a batch")
    _require(min(channels, *sizes) >= 1, "sizes")
    _require(channels % case.groups == 0, "groups divide the channels")
    _require(channels // case.groups == slice_, "channels of a filter")
    axes = [
        _axis(size, tap, step, gap, pad)
        for size, tap, step, gap, pad in zip(sizes, taps, stride, dilation, sides, strict=True)
    ]
    found = Geometry(
        batch,
        case.groups,
        slice_,
        filters // case.groups,
        tuple(sizes),
        tuple(taps),
        tuple(output for output, _ in axes),
        stride,
        dilation,
        tuple(pads for _, pads in axes),
        data,
        filter_,
    )
    if "dy" in case.operands:
        _require(case.dy == found.shapes["dy"], "dy of the output's shape")
    if "bias" in case.operands:
        _require(case.bias == filters, "a bias for each filter")
    if "shift" in case.operands:
        _require(case.shift == channels, "a bias for each channel of the result")
    if "add" in case.operands:
        _require(case.dy == found.shapes["dy"], "an addend of the result's shape")
    if "add_x" in case.operands:
        _require(case.x == found.shapes["x"], "an addend of the result's shape")
    return found


def _of_bias(case: Case, data: tuple[int, ...], filter_: tuple[int, ...]) -> Geometry:
    """Return a depthwise layer of one tap whose output is dy."""
    batch, channels, *sizes = (case.dy[axis] for axis in data)
    _require(batch >= 0, "a batch")
    _require(min(channels, *sizes) >= 1, "sizes")
    sizes, ones = tuple(sizes), (1,) * len(sizes)
    pads = ((0, 0),) * len(sizes)
    return Geometry(batch, channels, 1, 1, sizes, ones, sizes, ones, ones, pads, data, filter_)


def _word(word: str | None, known: Sequence[str], has_names: bool) -> str:
    if word is None:
        return known[0]
    names = {"channels_first": known[0], "channels_last": known[1]} if has_names else {}
    found = names.get(word.lower(), word.upper())
    _require(found in known, "a format of this rank")
    return found


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    _require(len(values) == rank, "one value, or one for each axis")
    return values


def _sides(padding: Any, rank: int) -> list[Any]:
    """Return the padding of each axis: its name, or a pair (before, after)."""
    if isinstance(padding, str):
        word = padding.lower()
        _require(word in ("valid", "same", "same_lower"), "a padding that is known")
        return [word] * rank
    sides = []
    for side in _each(padding, rank):
        pair = (side, side) if isinstance(side, int) else tuple(side)
        _require(len(pair) == 2, "before and after")
        _require(min(pair) >= 0, "padding of no negative size")
        sides.append(pair)
    return sides


def _axis(size: int, taps: int, stride: int, dilation: int, pad: Any) -> tuple[int, Any]:
    """Return the output size and padding of an axis."""
    reach = dilation * (taps - 1) + 1
    if pad in ("same", "same_lower"):
        # TensorFlow's documented rule: pad by the elements that the last window lacks.
        last = size % stride or stride
        lack = max(reach - last, 0)
        less, more = lack // 2, lack - lack // 2
        return len(range(0, size, stride)), (less, more) if pad == "same" else (more, less)
    before, after = (0, 0) if pad == "valid" else pad
    starts = range(0, before + size + after - reach + 1, stride)
    _require(len(starts) > 0, "a window fits")
    return len(starts), (before, after)


def _transposed_sizes(
    case: Case,
    data: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[list[int], list[Any]]:
    """Return the spatial sizes of conv_transpose's result, and the padding for x's windows.

    The sizes are passed in the call, or follow from PyTorch's and Keras's rules.  With the returned
    padding, as many windows fit as x has.  This padding is less than the call's padding
    if output_padding is at least the stride; it is negative at an end that no window reaches.
    """
    rank, sizes = len(taps), []
    sides = _sides(case.padding, rank)
    if case.output_padding == "shape":
        _require(len(case.x) == len(data), "a shape of the rank")
        return [case.x[axis] for axis in data[2:]], sides
    added = [None] * rank if case.output_padding is None else _each(case.output_padding, rank)
    for number, (axis, tap, step, gap, side, more) in enumerate(
        zip(data[2:], taps, stride, dilation, sides, added, strict=True)
    ):
        count = case.dy[axis]
        same = side in ("same", "same_lower")
        extra = more if more is not None else step - 1 if same else 0
        pads = (0, 0) if isinstance(side, str) else side
        if same:
            _require(0 <= extra < step, "output_padding below the stride")
        else:
            _require(0 <= extra < max(step, gap), "output_padding below the stride or dilation")
            sides[number] = (pads[0], pads[1] - extra // step * step)
        smallest = (count - 1) * step + 1
        if not same:
            smallest += gap * (tap - 1) - sum(pads)
        sizes.append(smallest + extra)
    return sizes, sides


# -- results ---------------------------------------------------------------------------------------


class Oracle:
    """Results of a layer's operations on given operands.

    Args:
        layer: the layer.
        dtype: dtype of the results.
        operands: x, w, dy, bias, shift, add and add_x in the library's formats; unused ones
            may be missing.
    """

    def __init__(self, layer: Geometry, dtype: str, operands: dict[str, np.ndarray]) -> None:
        self.layer, self.dtype = layer, dtype
        self._given = operands
        self._exact: dict[str, np.ndarray] = {}
        self._terms: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def exact(self, operation: str) -> np.ndarray:
        """Return the result in float64, in the library's layout, without activation."""
        name = _RESULT[operation]
        if name not in self._exact:
            if name == "bias":
                others = tuple(axis for axis in range(len(self.layer.data)) if axis != 1)
                self._exact["bias"] = self._wide("dy").sum(axis=others)
            elif name == "y":
                self._forward()
            else:
                self._backward(name)
        exact = self._exact[name]
        if operation == "conv_transpose" and "shift" in self._given:
            exact = exact + self.stored(operation, self._shift(1))
        if ADDENDS.get(operation) in self._given:
            exact = exact + self._given[ADDENDS[operation]].astype(np.float64)
        return exact

    def _shift(self, axes: int) -> np.ndarray:
        """Return conv_transpose's bias broadcast to the results, (N, G, channels, pixels, ...)."""
        layer = self.layer
        shift = self._wide("shift").reshape(1, layer.groups, layer.channels, *[1] * axes)
        pixels = (layer.batch, layer.groups, layer.channels, prod(layer.sizes), *[1] * (axes - 1))
        return np.broadcast_to(shift, pixels)

    def _wide(self, name: str) -> np.ndarray:
        """Return an operand in float64, channels first."""
        array = self._given[name].astype(np.float64)
        axes = {"w": self.layer.filter, "bias": (0,), "shift": (0,)}.get(name, self.layer.data)
        return np.ascontiguousarray(array.transpose(axes))

    def _tensor(self, name: str) -> Any:
        return torch.from_numpy(self._wide(name))

    def _nothing(self, name: str) -> Any:
        """Return zeros in place of an operand, channels first."""
        axes = self.layer.filter if name == "w" else self.layer.data
        shape = [self.layer.shapes[name][axis] for axis in axes]
        return torch.zeros(shape, dtype=torch.float64)

    def _convolved(self, x: Any, w: Any, bias: Any = None) -> Any:
        layer = self.layer
        padded = torch.nn.functional.pad(
            x, [side for pair in reversed(layer.pads) for side in pair]
        )
        convolve = _CONVOLVE[len(layer.sizes)]
        y = convolve(padded, w, bias, layer.stride, 0, layer.dilation, layer.groups)
        assert tuple(y.shape[2:]) == layer.outputs, (tuple(y.shape[2:]), layer)
        return y

    def _forward(self) -> None:
        bias = torch.from_numpy(self._wide("bias")) if "bias" in self._given else None
        y = self._convolved(self._tensor("x"), self._tensor("w"), bias)
        self._keep("y", y.numpy(), self.layer.data)

    def _backward(self, name: str) -> None:
        # y is linear in either operand: its gradient does not depend on that operand's values.
        wanted = self._nothing(name).requires_grad_()
        if name == "x":
            y = self._convolved(wanted, self._tensor("w"))
        else:
            y = self._convolved(self._tensor("x"), wanted)
        (gradient,) = torch.autograd.grad(y, (wanted,), self._tensor("dy"))
        axes = self.layer.data if name == "x" else self.layer.filter
        self._keep(name, gradient.numpy(), axes)

    def _keep(self, name: str, values: np.ndarray, axes: Sequence[int]) -> None:
        self._exact[name] = values.transpose(np.argsort(axes))

    # -- sums, term by term

    def terms(self, operation: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the terms of each result on the last axis, and a mask of those that exist.

        The terms are exact, except for float64, where they have a few bits more than the dtype.  A
        term that does not exist is 0, or a product with padding, which is NaN if the other factor
        is not finite.
        """
        name = _RESULT[operation]
        if name not in self._terms:
            self._terms[name] = getattr(self, f"_terms_of_{name}")()
        products, there = self._terms[name]
        added = []
        if operation == "conv_transpose" and "shift" in self._given:
            added.append(self._shift(2))
        if ADDENDS.get(operation) in self._given:
            added.append(self._wide(ADDENDS[operation]).reshape(*products.shape[:4], 1))
        for one in added:
            products = np.concatenate([products, one.astype(self._wider)], -1)
            there = np.concatenate([there, np.ones_like(one, bool)], -1)
        return products, there

    def stored(self, operation: str, values: np.ndarray) -> np.ndarray:
        """Arrange one value per result, in the order of ``terms``, in the layout of the result."""
        name = _RESULT[operation]
        if name == "bias":
            return values
        axes = self.layer.filter if name == "w" else self.layer.data
        shape = self.layer.shapes["dy" if name == "y" else name]
        return values.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))

    def between(self, operation: str) -> np.ndarray | bool:
        """Return a mask of results for which a non-finite weight falls between two outputs.

        Kernels may multiply such a weight by a zero, in the gap that the stride leaves."""
        if _RESULT[operation] != "x":
            return False
        strange = (~np.isfinite(self._grouped("w"))).any(1).astype(int)  # g c r
        reached = np.einsum("gcr,hr->gch", strange, (self._outputs == -2).astype(int)) > 0
        return self.stored(operation, np.broadcast_to(reached, (self.layer.batch, *reached.shape)))

    @cached_property
    def _wider(self) -> np.dtype:
        return np.dtype(np.longdouble if self.dtype == "float64" else np.float64)

    def _grouped(self, name: str) -> np.ndarray:
        """Return an operand as (N, G, channels, pixels) or (G, filters, channels, taps)."""
        layer = self.layer
        array = self._wide(name).astype(self._wider)
        if name == "w":
            return array.reshape(layer.groups, layer.filters, layer.channels, -1)
        channels = layer.channels if name == "x" else layer.filters
        return array.reshape(layer.batch, layer.groups, channels, prod(array.shape[2:]))

    @property
    def _axes(self) -> Iterator[tuple[int, int, int, int, int, tuple[int, int]]]:
        """Size, taps, outputs, stride, dilation and padding of each axis."""
        one = self.layer
        rules = (one.sizes, one.taps, one.outputs, one.stride, one.dilation, one.pads)
        return zip(*rules, strict=True)

    @cached_property
    def _inputs(self) -> np.ndarray:
        """Index of the input pixel under (output, tap); -1 in the padding."""
        found = np.zeros((1, 1), np.int64)
        for size, taps, outputs, stride, dilation, (before, _) in self._axes:
            at = np.arange(outputs)[:, None] * stride - before + np.arange(taps) * dilation
            at[(at < 0) | (at >= size)] = -1
            found = _product(found, at, size)
        return found

    @cached_property
    def _outputs(self) -> np.ndarray:
        """Index of the output that (input, tap) feeds; -1 outside the output, -2 in a gap."""
        found = np.zeros((1, 1), np.int64)
        for size, taps, outputs, stride, dilation, (before, _) in self._axes:
            far = np.arange(size)[:, None] + before - np.arange(taps) * dilation
            at = far // stride
            at[(at < 0) | (at >= outputs)] = -1
            at[far % stride != 0] = -2
            found = _product(found, at, outputs)
        return found

    def _terms_of_y(self) -> tuple[np.ndarray, np.ndarray]:
        x, w, at = self._grouped("x"), self._grouped("w"), self._inputs
        pixels = _gathered(x, at)  # n g c o r
        # n g k o c r
        products = pixels.transpose(0, 1, 3, 2, 4)[:, :, None] * w[None, :, :, None]
        there = np.broadcast_to((at >= 0)[:, None], products.shape)
        if "bias" in self._given:
            layer = self.layer
            bias = self._wide("bias").astype(self._wider)
            bias = bias.reshape(1, layer.groups, layer.filters, 1, 1)
            products, there = _rows(products, 4), _rows(there, 4)
            bias = np.broadcast_to(bias, (*products.shape[:-1], 1))
            products = np.concatenate([products, bias], -1)
            there = np.concatenate([there, np.ones_like(bias, bool)], -1)
        return _rows(products, 4), _rows(there, 4)

    def _terms_of_x(self) -> tuple[np.ndarray, np.ndarray]:
        w, dy, at = self._grouped("w"), self._grouped("dy"), self._outputs
        pixels = _gathered(dy, at)  # n g k h r
        # n g c h k r
        products = (
            pixels.transpose(0, 1, 3, 2, 4)[:, :, None] * w.transpose(0, 2, 1, 3)[None, :, :, None]
        )
        products = np.where((at > -2)[:, None], products, 0)  # no product between outputs
        return _rows(products, 4), _rows(np.broadcast_to((at >= 0)[:, None], products.shape), 4)

    def _terms_of_w(self) -> tuple[np.ndarray, np.ndarray]:
        x, dy, at = self._grouped("x"), self._grouped("dy"), self._inputs
        pixels = _gathered(x, at)  # n g c o r
        # g k c r n o
        products = (
            pixels.transpose(1, 2, 4, 0, 3)[:, None] * dy.transpose(1, 2, 0, 3)[:, :, None, None]
        )
        return _rows(products, 4), _rows(np.broadcast_to((at >= 0).T[:, None], products.shape), 4)

    def _terms_of_bias(self) -> tuple[np.ndarray, np.ndarray]:
        dy = self._grouped("dy")
        products = np.moveaxis(dy, 0, 2).reshape(dy.shape[1] * dy.shape[2], -1)
        return products, np.ones_like(products, bool)


class ComplexOracle:
    """Results of a layer's operations on complex operands, as real and imaginary parts.

    (a + bi)(c + di) = (ac - bd) + (ad + bc)i; the gradients multiply dy by conjugates.  Each part
    is the result of a real layer whose sums have twice as many terms.

    Args:
        layer, operands: as for ``Oracle``.
        dtype: dtype of the parts.
    """

    def __init__(self, layer: Geometry, dtype: str, operands: dict[str, np.ndarray]) -> None:
        self.layer, self._dtype, self._given = layer, dtype, operands
        self.parts = cache(self._parts)

    def _parts(self, operation: str) -> tuple[Oracle, Oracle]:
        """Return the oracles of the real and the imaginary parts of an operation's results."""
        if operation == "conv_backprop_bias":
            dy = self._given["dy"]
            real, imaginary = (
                Oracle(self.layer, self._dtype, {"dy": p}) for p in (dy.real, dy.imag)
            )
            return real, imaginary
        name, other, summed = _MULTIPLIED[operation]
        doubled = replace(self.layer, **{summed: 2 * getattr(self.layer, summed)})
        sign = -1 if operation in ("conv_backprop_input", "conv_backprop_filter") else 1
        a, b = self._given[name], self._given[other]

        def oracle(part: str, first: np.ndarray, second: np.ndarray, last: np.ndarray) -> Oracle:
            taken = {one: getattr(array, part) for one, array in self._given.items()}
            taken[name] = self._joined(name, summed, first, second)
            taken[other] = self._joined(other, summed, b.real, last)
            return Oracle(doubled, self._dtype, taken)

        real = oracle("real", a.real, a.imag, -sign * b.imag)
        return real, oracle("imag", a.imag, a.real, sign * b.imag)

    def _joined(self, name: str, summed: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return two tensors joined along the axis of the sum, within each group."""
        layer = self.layer
        axis, groups = {
            ("x", "channels"): (layer.data[1], layer.groups),
            ("w", "channels"): (layer.filter[1], 1),
            ("dy", "filters"): (layer.data[1], layer.groups),
            ("w", "filters"): (layer.filter[0], layer.groups),
        }.get((name, summed), (layer.data[0], 1))
        size, *others = np.moveaxis(first, axis, 0).shape
        pair = (
            np.moveaxis(one, axis, 0).reshape(groups, size // groups, *others)
            for one in (first, second)
        )
        whole = np.concatenate(list(pair), 1).reshape(2 * size, *others)
        return np.moveaxis(whole, 0, axis)


_MULTIPLIED = {
    "conv_forward": ("x", "w", "channels"),
    "conv_transpose": ("dy", "w", "filters"),
    "conv_backprop_input": ("dy", "w", "filters"),
    "conv_backprop_filter": ("dy", "x", "batch"),
}
"""Operands of an operation, and the size over which it sums, besides taps or pixels."""

_RESULT = {
    "conv_forward": "y",
    "conv_backprop_input": "x",
    "conv_transpose": "x",
    "conv_backprop_filter": "w",
    "conv_backprop_bias": "bias",
}
_CONVOLVE = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


def result_shape(layer: Geometry, operation: str) -> tuple[int, ...]:
    """Return the shape of an operation's result."""
    name = _RESULT[operation]
    return layer.shapes["dy" if name == "y" else name]


def can_overlap(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape has two elements that can share memory."""
    return 0 not in shape and max(shape) > 1


def term_count(layer: Geometry, operation: str) -> int:
    """Return the number of elements of ``terms``."""
    if _RESULT[operation] != "x":
        return layer.macs
    return prod((layer.batch, layer.groups, layer.channels, layer.filters, *layer.sizes)) * prod(
        layer.taps
    )


def activate(values: np.ndarray, activation: str | None) -> np.ndarray:
    """Apply PyTorch's activation in float64."""
    if activation is None:
        return values
    function = getattr(torch.nn.functional, activation)
    return function(torch.from_numpy(np.ascontiguousarray(values, np.float64))).numpy()


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round values to a dtype, and return them in float64."""
    with np.errstate(over="ignore"):
        return values.astype(dtype_of(dtype)).astype(np.float64)


def _product(outer: np.ndarray, inner: np.ndarray, size: int) -> np.ndarray:
    """Combine pixel indices of the outer axes and of one more axis; keep the least negative one."""
    joint = outer[:, None, :, None] * size + inner[None, :, None, :]
    least = np.minimum(outer[:, None, :, None], inner[None, :, None, :])
    joint = np.where(least < 0, least, joint)
    return joint.reshape(outer.shape[0] * inner.shape[0], -1)


def _gathered(pixels: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the pixels with these indices on the last axis; 0 for negative indices."""
    zero = np.zeros((*pixels.shape[:-1], 1), pixels.dtype)
    return np.concatenate([pixels, zero], -1)[..., np.maximum(at, -1)]


def _rows(values: np.ndarray, axes: int) -> np.ndarray:
    """Merge all axes but the first ``axes`` into one."""
    return values.reshape(*values.shape[:axes], prod(values.shape[axes:]))
