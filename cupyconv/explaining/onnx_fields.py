"""Receptive fields in an ONNX model: the inputs of the model on which an output of a layer depends.

Where branches meet, the field covers the fields of all branches.  It is unknown behind an operator
that reads other positions, such as a global pooling, a Reshape or a Resize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple

from cupyconv.errors import ConvError, ConvTypeError
from cupyconv.explaining.onnx_graph import Shape, Visit
from cupyconv.explaining.onnx_operators import OWN_DOMAINS, plain_attributes
from cupyconv.explaining.receptive import Field, field
from cupyconv.onnx import conv_problem
from cupyconv.problem import ConvAxis

_POOLS = ("AveragePool", "LpPool", "MaxPool")

_ALONG_CHANNELS = ("Concat", "Split")
"""Operators that keep positions if their axis is the channel axis."""

_POINTWISE = frozenset(
    {
        *("Abs", "Add", "BatchNormalization", "Cast", "Ceil", "Clip", "Div", "Dropout", "Elu"),
        *("Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu"),
        *("Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Round"),
        *("Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tanh"),
        *("DequantizeLinear", "QuantizeLinear", "ThresholdedRelu", "Where"),
        *_ALONG_CHANNELS,
    }
)
"""Operators whose outputs depend on inputs at the same position only."""


class Reach(NamedTuple):
    """Inputs of the model on which the outputs of a node depend, along an axis.

    Output p depends on the inputs from p * step + first to p * step + last at most.

    Attributes:
        source: name of the model's input.
        size: largest number of inputs from the first to the last one of an output.
    """

    source: str
    step: Fraction
    first: Fraction
    last: Fraction
    size: Fraction

    def through(self, axis: ConvAxis, is_transposed: bool) -> Reach:
        """Return the reach of the outputs of a layer whose input has this reach."""
        low, high = -axis.pad_before, axis.effective_filter - 1 - axis.pad_before
        step, unit = self.step * axis.stride, self.step
        if is_transposed:
            low, high = -high, -low
            step = unit = self.step / axis.stride
        first, last = self.first + low * unit, self.last + high * unit
        own = field([(axis, is_transposed)])
        more = own.size - 1 if own else (high - low) * unit / self.step
        return Reach(self.source, step, first, last, self.size + max(more, 0) * self.step)


class Fields:
    """Receptive fields of the tensors of a model.

    Args:
        inputs: shapes of the model's inputs, by name.
    """

    def __init__(self, inputs: Mapping[str, Shape]) -> None:
        zero, one = Fraction(0), Fraction(1)
        self._known: dict[str, tuple[Reach, ...]] = {
            name: (Reach(name, one, zero, zero, one),) * (len(shape) - 2)
            for name, shape in inputs.items()
        }

    def add(
        self, visit: Visit, layer: Sequence[ConvAxis] = (), is_transposed: bool = False
    ) -> tuple[Field, ...]:
        """Return the receptive field of a node's outputs, along each axis; () if it is unknown.

        Args:
            visit: the node; the nodes before it must be added before.
            layer: spatial axes of a convolution; empty for other nodes.
            is_transposed: whether the convolution is transposed.
        """
        node, scope = visit.node, visit.scope
        names = [name for name in node.input if name and scope[name].stored is None]
        is_standard = node.domain in OWN_DOMAINS
        axes: Sequence[ConvAxis] | None = None
        if layer:
            axes = layer
        elif is_standard and node.op_type in _POOLS:
            axes = _pool(node, scope[node.input[0]].shape)
        elif is_standard and node.op_type in _POINTWISE:
            along = plain_attributes(node).get("axis", 0)
            keeps = node.op_type not in _ALONG_CHANNELS or along == 1
            axes = () if keeps and len({scope[name].shape[2:] for name in names}) == 1 else None
        reaches = [self._known.get(name, ()) for name in names]
        if visit.inside or axes is None or not all(reaches) or not reaches:
            return ()
        first, *others = reaches
        if axes:
            pairs = zip(first, axes, strict=True)
            first = tuple(reach.through(axis, is_transposed) for reach, axis in pairs)
        merged = [_merged(along) for along in zip(first, *others, strict=False)]
        found = tuple(reach for reach in merged if reach)
        if len(found) < len(merged):
            return ()
        self._known |= dict.fromkeys(filter(None, node.output), found)
        return tuple(Field(floor(reach.size), reach.step) for reach in found)


def _merged(reaches: Sequence[Reach]) -> Reach | None:
    """Return the reach that covers all branches; None if their positions do not correspond."""
    one = reaches[0]
    if any(reach[:2] != one[:2] for reach in reaches):
        return None
    first, last = min(reach.first for reach in reaches), max(reach.last for reach in reaches)
    size = max(reach.size for reach in reaches)
    if any(reach[2:4] != one[2:4] for reach in reaches):
        size = last - first + 1
    return Reach(one.source, one.step, first, last, size)


def _pool(node: Any, x: Shape) -> tuple[ConvAxis, ...] | None:
    """Return the spatial axes of a pooling; None if a size is unknown or an attribute invalid."""
    names = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")
    attributes = {name: each for name, each in plain_attributes(node).items() if name in names}
    sizes = [size for size in x[2:] if isinstance(size, int)]
    taps = attributes.get("kernel_shape", ())
    if not sizes or len(sizes) != len(x) - 2:
        return None
    try:
        return conv_problem((1, 1, *sizes), (1, 1, *taps), **attributes).axes
    except (ConvError, ConvTypeError):
        return None
