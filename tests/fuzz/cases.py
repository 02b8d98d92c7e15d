"""Cases of the attack: a case is one call of the library, with its arrays.

A case is plain data, so that it can be drawn, shrunk and printed as a program.  Its sizes are named
by meaning (channels, taps); ``x``, ``w`` and ``dy`` are the shapes in the library's formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

OPERATIONS = (
    "conv_forward",
    "conv_backprop_input",
    "conv_backprop_filter",
    "conv_backprop_bias",
    "conv_transpose",
)

DATA_FORMATS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
FILTER_FORMATS = {1: ("OIW", "WIO", "OWI"), 2: ("OIHW", "HWIO", "OHWI")}
FILTER_FORMATS[3] = ("OIDHW", "DHWIO", "ODHWI")

VALUES: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "integers": lambda rng, size, count: rng.integers(-size, size + 1, count),
    "normal": lambda rng, size, count: rng.standard_normal(count),
    "decades": lambda rng, size, count: (
        rng.choice((-1, 1), count) * 10.0 ** rng.uniform(size - 8, size, count)
    ),
}
"""Functions that make values; "decades" spans eight decades up to 10**size."""

PART = {"complex64": "float32", "complex128": "float64"}
"""Dtype of the real and imaginary parts, keyed by complex dtype."""


@dataclass(frozen=True)
class View:
    """Memory layout of an array of any shape.

    Attributes:
        order: axes sorted by stride, largest first; () for the axes' own order.
        steps: distance between neighbours in elements, per axis of the array; () without gaps.
        reversed: axes with negative strides.
        repeated: axes with stride 0, which only inputs can have.
        overlap: an axis and the largest stride that it may have, in elements, so that neighbours
            along the axis share memory; None for no overlap.
        lead: elements before the array, which change its alignment.
        shift: bytes before the array, which misalign its elements.
        swapped: whether the byte order is swapped.
        read_only: whether the array is read-only.
        lazy: "negated" or "conjugated" for a PyTorch tensor that does so when it is read, "" for
            an array.
    """

    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    reversed: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    overlap: tuple[int, int] | None = None
    lead: int = 0
    shift: int = 0
    swapped: bool = False
    read_only: bool = False
    lazy: str = ""

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of an array with this layout, in elements."""
        strides, run = [0] * len(shape), 1
        order = [axis for axis in self.order if axis < len(shape)] or range(len(shape))
        for axis in reversed(order):
            strides[axis] = run * (self.steps[axis] if axis < len(self.steps) else 1)
            run = strides[axis] * max(shape[axis], 1)
        if self.overlap is not None and self.overlap[0] < len(shape):
            axis, step = self.overlap
            strides[axis] = min(strides[axis], step)
        for axis in range(len(shape)):
            if axis in self.repeated:
                strides[axis] = 0
            elif axis in self.reversed:
                strides[axis] *= -1
        return tuple(strides)


PLAIN = View()


@dataclass(frozen=True)
class NumpyRun:
    """Run on NumPy arrays: ``method`` is "auto", "reference" or a method of "numpy"."""

    method: str = "auto"
    block_bytes: int | None = None


@dataclass(frozen=True)
class KernelRun:
    """Run on the emulator, with its settings; ``tile`` is the index of the tile to plan."""

    impl: str = "auto"
    arch: str = "sm_80"
    precision: str = "ieee"
    settings: Mapping[str, Any] = field(default_factory=dict)
    tile: int | None = None


ADDENDS = {"conv_forward": "add", "conv_transpose": "add_x"}
"""Name of the array that is passed as ``add``, by the functions with this argument."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        operation: name of the function.
        batch, channels, filters: batch size, channels and filters of the layer.
        slice: channels per filter; in a legal layer, ``channels`` divided by ``groups``.
        sizes, taps: spatial sizes of the input and the filter.
        stride, dilation, groups, padding, data_format, filter_format: arguments of the call.
        dtype: dtype of all arrays but ``stranger``.
        dy: shape of the output's gradient; for conv_transpose, of its x.
        output_padding: argument of conv_transpose; "shape" to pass the output's shape instead.
        bias, shift: length of conv_forward's bias, and of conv_transpose's; None for no bias.
        adds: whether these two functions get an array to add.
        activation: activation of these two functions.
        views: view of each array, by name; "out" only if ``out`` is passed.
        values: a key of VALUES.
        size: largest integer, or largest decade, of the values.
        seed: seed of the values.
        poke: array name, position as a fraction of its memory, and the value to put there.
        stranger: name of the array with another dtype.
        bad_out: fault of ``out``: "shape", "read-only", "overlapping" or "shared".
        run: implementation that computes the case, with its settings.
    """

    operation: str
    batch: int
    channels: int
    filters: int
    slice: int
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    stride: Any = 1
    dilation: Any = 1
    padding: Any = 0
    groups: int = 1
    data_format: str | None = None
    filter_format: str | None = None
    dtype: str = "float32"
    dy: tuple[int, ...] = ()
    output_padding: Any = "shape"
    bias: int | None = None
    shift: int | None = None
    adds: bool = False
    activation: str | None = None
    views: Mapping[str, View] = field(default_factory=dict)
    values: str = "integers"
    size: int = 3
    seed: int = 0
    poke: tuple[str, float, float] | None = None
    stranger: str = ""
    bad_out: str = ""
    run: NumpyRun | KernelRun = NumpyRun()

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def x(self) -> tuple[int, ...]:
        """Shape of the input."""
        if is_channels_last(self.data_format):
            return (self.batch, *self.sizes, self.channels)
        return (self.batch, self.channels, *self.sizes)

    @property
    def w(self) -> tuple[int, ...]:
        """Shape of the filter."""
        word = filter_word(self.filter_format, self.data_format)
        if word.startswith("OI"):
            return (self.filters, self.slice, *self.taps)
        if word.startswith("O"):
            return (self.filters, *self.taps, self.slice)
        return (*self.taps, self.slice, self.filters)

    @property
    def rules(self) -> dict[str, Any]:
        """The keywords that describe the layer."""
        if self.operation == "conv_backprop_bias":
            return {"data_format": self.data_format}
        words = ("stride", "padding", "dilation", "groups", "data_format", "filter_format")
        return {word: getattr(self, word) for word in words}

    @property
    def operands(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays that the operation takes, by name."""
        shapes = {
            "conv_forward": {"x": self.x, "w": self.w},
            "conv_backprop_input": {"w": self.w, "dy": self.dy},
            "conv_backprop_filter": {"x": self.x, "dy": self.dy},
            "conv_backprop_bias": {"dy": self.dy},
            "conv_transpose": {"w": self.w, "dy": self.dy},
        }[self.operation]
        if self.operation == "conv_forward" and self.bias is not None:
            shapes["bias"] = (self.bias,)
        if self.operation == "conv_transpose" and self.shift is not None:
            shapes["shift"] = (self.shift,)
        if self.adds and self.operation in ADDENDS:
            name = ADDENDS[self.operation]
            shapes[name] = {"add": self.dy, "add_x": self.x}[name]
        return shapes

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays that any operation on the layer takes, by name."""
        shapes = {"x": self.x, "w": self.w, "dy": self.dy}
        lengths = {"bias": self.bias, "shift": self.shift}
        shapes |= {name: (n,) for name, n in lengths.items() if n is not None}
        return {**shapes, "add": self.dy, "add_x": self.x} if self.adds else shapes


def is_channels_last(data_format: str | None) -> bool:
    """Return whether the channels are the last axis of x and y."""
    return data_format is not None and (
        data_format.lower() == "channels_last" or data_format.upper().endswith("C")
    )


def filter_word(filter_format: str | None, data_format: str | None) -> str:
    """Return the given filter format, or the default for the data format."""
    if filter_format is not None:
        return filter_format.upper()
    return "IO" if is_channels_last(data_format) else "OI"


@cache
def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# -- arrays ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """An array and its memory.

    Attributes:
        array: the array.
        memory: the bytes that ``given`` is a view of.
        given: the array itself, or a lazy tensor with the same values.
    """

    array: np.ndarray
    memory: np.ndarray
    given: Any


@dataclass(frozen=True)
class Layout:
    """Position and strides of a case's array in a block of memory, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    count: int
    first: int


def layout(view: View, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array in memory, with a spare element after it."""
    strides = view.strides(shape)
    ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n > 0]
    first = view.lead - sum(end for end in ends if end < 0)
    count = view.lead + sum(map(abs, ends)) + 2
    return Layout(shape, strides, count, first)


def operand_dtype(case: Case, name: str) -> np.dtype:
    """Return the dtype of an array of a case, in its byte order."""
    if case.dtype in PART:
        other = next(name for name in PART if name != case.dtype)
    else:
        other = "float32" if case.dtype != "float32" else "float64"
    dtype = dtype_of(other if name == case.stranger else case.dtype)
    return dtype.newbyteorder() if case.views.get(name, PLAIN).swapped else dtype


def place(view: View, shape: tuple[int, ...], dtype: np.dtype, flat: np.ndarray) -> Buffer:
    """Write values into new memory, and return a view of it as a buffer."""
    where = layout(view, shape)
    memory = np.zeros(view.shift + where.count * dtype.itemsize, np.uint8)
    memory[view.shift :] = flat.astype(dtype).view(np.uint8)
    strides = tuple(stride * dtype.itemsize for stride in where.strides)
    start = view.shift + where.first * dtype.itemsize
    array = np.ndarray(shape, dtype, memory, start, strides)
    array.flags.writeable = not view.read_only
    if not view.lazy:
        return Buffer(array, memory, array)
    stored = place(replace(view, lazy=""), shape, dtype, LAZY[view.lazy][0](flat))
    return Buffer(array, stored.memory, lazy_tensor(stored.array, view.lazy))


LAZY: dict[str, tuple[Any, Any]] = {
    "negated": (np.negative, torch._neg_view),
    "conjugated": (np.conj, torch.conj),
}
"""Functions from values to memory, and from memory to the lazy tensor, by kind of tensor."""


def lazy_tensor(array: np.ndarray, kind: str) -> torch.Tensor:
    """Return a tensor over an array's memory that PyTorch negates or conjugates on reading."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return LAZY[kind][1](tensor)


SEEDS = {"x": 0, "w": 1, "dy": 2, "bias": 3, "out": 4, "shift": 5, "add": 6, "add_x": 7}


def flat_values(case: Case, name: str, count: int) -> np.ndarray:
    """Return the values in the memory of an operand."""
    rng = np.random.default_rng((case.seed, SEEDS[name]))
    make = VALUES[case.values]
    flat = make(rng, case.size, count)
    if case.dtype in PART:
        flat = flat + 1j * make(rng, case.size, count)
    if case.poke is not None and case.poke[0] == name:
        flat = flat.astype(complex if case.dtype in PART else float)
        flat[int(case.poke[1] * count)] = case.poke[2]
    return flat


def places_of(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Buffer]:
    """Return the arrays of a case, each in separate memory."""
    places = {}
    with np.errstate(over="ignore"):
        for name, shape in shapes.items():
            view = case.views.get(name, PLAIN)
            flat = flat_values(case, name, layout(view, shape).count)
            places[name] = place(view, shape, operand_dtype(case, name), flat)
    return places
