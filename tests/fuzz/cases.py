"""A case of the attack: one call of the library, with the arrays that it is given.

A case is plain data, so that it can be drawn, made smaller and written down as a program.  Its
sizes are by meaning (channels, taps); ``x``, ``w`` and ``dy`` are the shapes that the library sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

VALUES = {
    "integers": "rng.integers(-{size}, {size} + 1, {count})",
    "normal": "rng.standard_normal({count})",
    "decades": "rng.choice((-1, 1), {count}) * 10.0 ** rng.uniform({size} - 8, {size}, {count})",
}
"""Programs that make values, over eight decades up to ``size``."""

PART = {"complex64": "float32", "complex128": "float64"}
"""Complex dtypes, with that of their parts."""


@dataclass(frozen=True)
class View:
    """Memory layout of an array of any shape.

    Attributes:
        order: its axes by their strides, the largest first; () as they are.
        steps: how many elements apart neighbours lie, per axis of the array; () without gaps.
        reversed: axes with negative strides.
        repeated: axes with stride 0, which only inputs can have.
        overlap: an axis and the elements that it goes on by, though its items are larger.
        lead: elements before the array, which change its alignment.
        shift: bytes before the array, which leave its elements misaligned.
        swapped: the other byte order.
        read_only: not to be written.
        lazy: "negated" or "conjugated" for a tensor of PyTorch that does so when it is read, ""
            for an array.
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
        """Return strides in elements."""
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
    """Run on the emulator, with its settings; ``tile`` is the number of the tile to plan."""

    impl: str = "auto"
    arch: str = "sm_80"
    precision: str = "ieee"
    settings: Mapping[str, Any] = field(default_factory=dict)
    tile: int | None = None


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        operation: the function's name.
        batch, channels, filters: of the layer.
        slice: channels that a filter has, the layer's divided by ``groups`` where it is legal.
        sizes, taps: of the input and the filter, on the spatial axes.
        stride, dilation, groups, padding, data_format, filter_format: as they are passed.
        dtype: of all arrays but ``stranger``.
        dy: shape of the output's gradient; of conv_transpose's x.
        output_padding: of conv_transpose; "shape" if the output's shape is passed instead.
        bias, shift: length of conv_forward's bias, and of conv_transpose's; None for none.
        activation: of these two.
        views: by the array's name; "out" only if it is passed.
        values: one of VALUES.
        size: of the values: the largest integer, or the largest decade.
        seed: of the values.
        poke: a name, a share of the array, and the value that is put there.
        stranger: name of an array of another dtype.
        bad_out: what is wrong with ``out``: "shape", "read-only", "overlapping" or "shared".
        run: where, and how, it is computed.
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
        """Shapes of the arrays that the operation is given, by name."""
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
        return shapes

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of all operations on the layer."""
        shapes = {"x": self.x, "w": self.w, "dy": self.dy}
        lengths = {"bias": self.bias, "shift": self.shift}
        return {**shapes, **{name: (n,) for name, n in lengths.items() if n is not None}}


def is_channels_last(data_format: str | None) -> bool:
    """Return whether the channels are the last axis of x and y."""
    return data_format is not None and (
        data_format.lower() == "channels_last" or data_format.upper().endswith("C")
    )


def filter_word(filter_format: str | None, data_format: str | None) -> str:
    """Return the filter format: the given word, or the default for the data format."""
    if filter_format is not None:
        return filter_format.upper()
    return "IO" if is_channels_last(data_format) else "OI"


@cache
def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# -- arrays ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """An array in its memory.

    Attributes:
        array: the values.
        memory: the bytes that ``given`` is a view of.
        given: the array itself, or a lazy tensor of the same values.
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
    """Return the memory that an array takes, with an element to spare after it."""
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
    """Return values in memory, seen as an array."""
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
"""Kinds of lazy tensors: how their memory is made of the values, and they of it."""


def lazy_tensor(array: np.ndarray, kind: str) -> torch.Tensor:
    """Return a tensor over an array's memory that PyTorch changes when it is read."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return LAZY[kind][1](tensor)


SEEDS = {"x": 0, "w": 1, "dy": 2, "bias": 3, "out": 4, "shift": 5}


def flat_values(case: Case, name: str, count: int) -> np.ndarray:
    """Return the values in the memory of an operand."""
    namespace = {"rng": np.random.default_rng((case.seed, SEEDS[name]))}
    # Texts, so that what is run is what is printed.
    flat = eval(_compiled(values_text(case, count)), namespace)
    if case.poke is not None and case.poke[0] == name:
        flat = flat.astype(complex if case.dtype in PART else float)
        flat[poked(case, count)] = case.poke[2]
    return flat


def poked(case: Case, count: int) -> int:
    """Return the element of a piece of memory that the case's poke is for."""
    assert case.poke is not None
    return int(case.poke[1] * count)


def values_text(case: Case, count: int) -> str:
    """Return the program of the values in a block of memory; complex values have two parts."""
    text = VALUES[case.values].format(size=case.size, count=count)
    return f"{text} + 1j * {text}" if case.dtype in PART else text


def _compiled(text: str) -> Any:
    return compile(text, "<values>", "eval")


def places_of(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Buffer]:
    """Return arrays of a case, in memory of their own."""
    places = {}
    with np.errstate(over="ignore"):
        for name, shape in shapes.items():
            view = case.views.get(name, PLAIN)
            flat = flat_values(case, name, layout(view, shape).count)
            places[name] = place(view, shape, operand_dtype(case, name), flat)
    return places
