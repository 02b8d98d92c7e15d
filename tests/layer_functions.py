"""Functions of every interface that take a layer, with valid arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import cupyconv
from cupyconv import ConvProblem, cudnn, onnx, raw_ops

BATCH, C, K, GROUPS, PIXELS, TAPS, OUTPUTS = 5, 4, 8, 2, 6, 3, 3
"""Sizes of the layer; its stride is 2 and its padding 1."""

TENSORS = {
    **dict.fromkeys(("x", "input"), "x"),
    **dict.fromkeys(("w", "W", "filter", "weight"), "w"),
    **dict.fromkeys(("dy", "gy", "grad_output", "out_backprop"), "y"),
    **dict.fromkeys(("b", "bias"), "bias"),
}
"""Tensor of the layer that most functions take as a parameter of this name."""

SHAPES = {
    **dict.fromkeys(("x_shape", "input_shape", "input_sizes", "input_size"), "x"),
    **dict.fromkeys(("w_shape", "filter_shape", "filter_sizes", "weight_size"), "w"),
    "output_shape": "x",
}
"""Tensor whose shape is passed as a parameter of this name."""


@dataclass(frozen=True)
class Way:
    """A function that takes a layer.

    Attributes:
        call: the function.
        unlike: tensors of parameters that differ from TENSORS and SHAPES, keyed by parameter.
        rank: number of spatial axes.
        last: whether channels are last.
        make: function that converts a NumPy array to the arrays that the function takes.
        finish: function that computes the result if the call returns a lazy result.
        without: parameter that is left out; empty for no parameter.
    """

    call: Callable[..., Any]
    unlike: dict[str, str] = field(default_factory=dict)
    rank: int = 2
    last: bool = False
    make: Callable[[Any], Any] = np.array
    finish: Callable[[Any], Any] = lambda result: result
    without: str = ""

    @property
    def name(self) -> str:
        return f"{self.call.__module__.removeprefix('cupyconv.')}.{self.call.__name__}"

    def __str__(self) -> str:
        return f"{self.name} without {self.without}" if self.without else self.name

    @property
    def transposes(self) -> bool:
        """Whether the result's size follows from the arguments, so that any size of x is valid."""
        return "transpose" in self.name or self.call == ConvProblem.from_output

    @property
    def parameters(self) -> list[str]:
        parameters = inspect.signature(self.call).parameters.values()
        return [entry.name for entry in parameters if entry.kind is not entry.VAR_KEYWORD]

    @property
    def outputs(self) -> list[str]:
        """Arguments to which the function writes its result."""
        written = {"out", "gW"} if "cudnn" not in self.name else {"gW", "y"}
        return [name for name in self.parameters if name in written]

    def tensor(self, name: str) -> str | None:
        """Return the layer's tensor that a parameter passes, or whose shape it passes."""
        return {**TENSORS, **SHAPES, **self.unlike}.get(name)

    def is_array(self, name: str) -> bool:
        return self.tensor(name) is not None and name not in SHAPES

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor == "bias":
            return (C if self.transposes or "backward_data" in self.name else K,)
        depthwise = self.call.__name__.startswith("Depthwise")
        sizes = {"x": PIXELS, "w": TAPS, "y": OUTPUTS}[tensor]
        first, second = {"x": (BATCH, C), "w": (K, C // GROUPS), "y": (BATCH, K)}[tensor]
        spatial = (sizes,) * self.rank
        if not self.last:
            return (first, second, *spatial)
        if tensor != "w":
            return (first, *spatial, second)
        return (*spatial, *((C, K // C) if depthwise else (second, first)))

    def valid(self) -> dict[str, Any]:
        """Return valid arguments, keyed by parameter."""
        ones, twos = [1] * self.rank, [2] * self.rank
        rules: dict[str, Any] = {"stride": 2, "padding": 1, "pad": 1, "dilation": 1}
        rules |= {"groups": GROUPS, "group": GROUPS, "output_padding": ones, "auto_pad": "NOTSET"}
        rules |= {"strides": twos, "dilations": ones, "pads": ones * 2, "kernel_shape": None}
        rules |= {"data_format": None, "filter_format": None, "auto_tune": False}
        rules |= {"deterministic": True, "tensor_core": "auto"}
        if self.last:
            rules |= {"strides": [1, *twos, 1], "dilations": [1, *ones, 1]}
            rules |= {"explicit_paddings": [0, 0, *ones, *ones, 0, 0]}
            rules["padding"] = "EXPLICIT" if "explicit_paddings" in self.parameters else "SAME"
        found = {}
        for name in self.parameters:
            tensor = self.tensor(name)
            if name == self.without:
                continue
            if self.is_array(name):
                found[name] = self.make(np.ones(self.shape(tensor), "float32"))
            elif tensor is not None:
                found[name] = list(self.shape(tensor))
            elif name in rules:
                found[name] = rules[name]
        return found


TRANSPOSED = {"x": "y", "input": "y"}


SIZE, PADDING = "output_shape", "output_padding"
"""Parameters that specify the size of the result in two ways."""


def library(module: Any, **more: Any) -> list[Way]:
    """Return the functions of the library, or another module's functions of the same names."""
    transposed = {**TRANSPOSED, "out": "x", "add": "x"}
    return [
        Way(module.conv_forward, {"out": "y", "add": "y"}, **more),
        Way(module.conv_backprop_input, {"out": "x"}, **more),
        Way(module.conv_backprop_filter, {"out": "w"}, **more),
        Way(module.conv_transpose, transposed, without=PADDING, **more),
        Way(module.conv_transpose, transposed, without=SIZE, **more),
        Way(module.conv_backprop_bias, {"out": "bias"}, **more),
    ]


def tensorflow() -> Iterator[Way]:
    for name in raw_ops.__all__:
        yield Way(getattr(raw_ops, name), rank=3 if "3D" in name else 2, last=True)


def pytorch() -> Iterator[Way]:
    import torch

    module = import_module("cupyconv.torch")
    for name in module.__all__:
        if name.startswith("conv"):
            unlike = TRANSPOSED if "transpose" in name else {"add": "y"}
            rank = int(re.search(r"(\d)d", name)[1])
            yield Way(getattr(module, name), unlike, rank, make=torch.from_numpy)


def dask() -> list[Way]:
    import dask.array as da

    return library(
        import_module("cupyconv.dask"),
        make=lambda array: da.from_array(array, chunks=-1),
        finish=lambda result: result.compute(scheduler="sync"),
    )


WAYS = [
    *library(cupyconv),
    Way(cupyconv.conv_backward),
    Way(ConvProblem),
    Way(ConvProblem.from_output, {SIZE: "y"}, without=PADDING),
    Way(ConvProblem.from_output, {SIZE: "y"}, without="input_shape"),
    *tensorflow(),
    Way(onnx.conv),
    Way(onnx.conv_problem),
    *(
        Way(call, unlike, without=without)
        for call, unlike in (
            (onnx.conv_transpose, TRANSPOSED),
            (onnx.conv_transpose_problem, {"x_shape": "y"}),
        )
        for without in (SIZE, PADDING)
    ),
    Way(cudnn.convolution_forward, {"y": "y"}),
    Way(cudnn.convolution_backward_filter, {"gW": "w"}),
    Way(cudnn.convolution_backward_data, {"x": "y", "y": "x"}),
    *(pytorch() if find_spec("torch") else ()),
    *(dask() if find_spec("dask") else ()),
]
