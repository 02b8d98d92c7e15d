"""ONNX operators that convolve, and operators of ONNX Runtime with the shapes of a standard one.

ONNX Runtime writes its own operators into the models that it optimizes or quantizes.  The tables
follow its schemas: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md,
nhwc_schema_defs.cc and internal_nhwc_onnx_schemas.cc.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

OWN_DOMAINS = ("", "ai.onnx")
"""Domain names of ONNX's standard operators."""

CONVOLUTIONS = ("Conv", "ConvTranspose")
"""Standard operators that are supported."""

_RUNTIME, _NHWC, _BLOCKED = "com.microsoft", "com.ms.internal.nhwc", "com.microsoft.nchwc"

FUSED_ATTRIBUTES = ("activation", "activation_params")
"""Attributes that ONNX Runtime adds to a convolution."""

_Size = TypeVar("_Size")


class Form(NamedTuple):
    """Standard operator with which an operator shares its shapes.

    Attributes:
        operator: name of the standard operator.
        inputs: the inputs that the standard operator takes.
        is_channels_last: whether the first input and the output have the channels last.
        filter_orders: for a convolution, whether the input channels of the filter come last; if
            both are possible, the probable order is the first.
    """

    operator: str
    inputs: slice = slice(None)
    is_channels_last: bool = False
    filter_orders: tuple[bool, ...] = (False,)

    def in_standard_order(self, x: tuple[_Size, ...]) -> tuple[_Size, ...]:
        """Return the sizes of the first input in the order of the standard operator."""
        return channels_first(x) if self.is_channels_last else x

    def in_own_order(self, x: tuple[_Size, ...]) -> tuple[_Size, ...]:
        """Return the sizes of the first input, or of the output, in the order of the operator."""
        return channels_last(x) if self.is_channels_last else x

    def has_filter_channels_last(
        self, x: tuple[Any, ...], w: tuple[Any, ...], attributes: Mapping[str, Any]
    ) -> bool:
        """Return whether the input channels of a filter come last.

        Args:
            x: sizes of the input, as far as they are known.
            w: sizes of the filter, as far as they are known.
            attributes: attributes of the node.
        """
        taps, groups = attributes.get("kernel_shape"), attributes.get("group", 1)
        channels = self.in_standard_order(x)[1] if len(x) > 1 else "?"
        for is_last in self.filter_orders if len(w) > 1 else ():
            _, inner, *kernel = channels_first(w) if is_last else w
            known = all(isinstance(size, int) for size in (channels, inner, groups))
            if taps in (None, kernel) and (not known or channels == inner * groups):
                return is_last
        return self.filter_orders[0]


def channels_first(sizes: tuple[_Size, ...]) -> tuple[_Size, ...]:
    """Return sizes whose last axis is moved to the second place."""
    return (sizes[0], sizes[-1], *sizes[1:-1]) if len(sizes) > 1 else sizes


def channels_last(sizes: tuple[_Size, ...]) -> tuple[_Size, ...]:
    """Return sizes whose second axis is moved to the end."""
    return (sizes[0], *sizes[2:], sizes[1]) if len(sizes) > 1 else sizes


_FIRST, _TWO_TENSORS = slice(0, 1), slice(0, 4, 3)

_FORMS = {
    "FusedConv": Form("Conv", slice(0, 2)),
    # The tools that write NhwcConv transpose the filter, but the documentation does not mention it.
    "NhwcConv": Form("Conv", slice(0, 2), True, (True, False)),
    "NhwcFusedConv": Form("Conv", slice(0, 2), True, (False, True)),
    "NhwcMaxPool": Form("MaxPool", _FIRST, True),
    "QLinearConv": Form("QLinearConv"),
    "QLinearConvTranspose": Form("ConvTranspose", _TWO_TENSORS),
    "QLinearAveragePool": Form("AveragePool", _FIRST),
    "QLinearGlobalAveragePool": Form("GlobalAveragePool", _FIRST),
    "QLinearAdd": Form("Add", _TWO_TENSORS),
    "QLinearMul": Form("Mul", _TWO_TENSORS),
    "QLinearConcat": Form("Concat", slice(2, None, 3)),
    "QuantizeLinear": Form("QuantizeLinear"),
    "DequantizeLinear": Form("DequantizeLinear"),
    **dict.fromkeys(
        (
            *("BiasGelu", "FastGelu", "Gelu", "GroupNorm", "QLinearLeakyRelu", "QLinearSigmoid"),
            *("QLinearSoftmax", "QuickGelu", "SkipGroupNorm"),
        ),
        Form("Identity", _FIRST),
    ),
}
"""Forms of operators of the domain com.microsoft."""

_LAYOUT_ATTRIBUTE = "channels_last"
"""Attribute with which some operators of com.microsoft select channels last."""


def form_of(node: Any) -> Form | None:
    """Return the form of a node; None for an operator that is neither standard nor known."""
    if node.domain in OWN_DOMAINS:
        return Form(node.op_type)
    if node.domain == _NHWC:  # ONNX Runtime infers the shape of Resize in the standard order
        return Form(node.op_type, is_channels_last=node.op_type != "Resize")
    form = _FORMS.get(node.op_type) if node.domain == _RUNTIME else None
    if form and any(one.name == _LAYOUT_ATTRIBUTE and one.i for one in node.attribute):
        return Form(form.operator, form.inputs, True)
    return form


_PLAIN = {1: "f", 2: "i", 3: "s", 6: "floats", 7: "ints", 8: "strings"}
"""Fields of an AttributeProto, keyed by ONNX's number for the type of the attribute."""


def plain_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node that are numbers, strings or lists of these, by name."""
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type in _PLAIN:
            value = getattr(attribute, _PLAIN[attribute.type])
            is_single = isinstance(value, (int, float, bytes))
            values[attribute.name] = decoded(value) if is_single else [*map(decoded, value)]
    return values


def decoded(value: Any) -> Any:
    """Return a value, with bytes decoded to text."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


_UNSUPPORTED = {
    "CausalConvWithState": "keeps a state between calls",
    "ConvInteger": "computes with quantized integers",
    "ConvTransposeWithDynamicPads": "has its padding as an input",
    "DeformConv": "has the positions of its taps as an input",
    "QLinearConv": "computes with quantized integers",
    "QLinearConvTranspose": "computes with quantized integers",
}
"""Reasons why known operators are unsupported."""


def unsupported(node: Any) -> str:
    """Return why a node that convolves is unsupported; "" if it is supported."""
    operator = operator_text(node)
    if node.domain == _BLOCKED:
        return f"{operator} stores tensors in blocks of channels, which is unsupported"
    if node.op_type in _UNSUPPORTED:
        return f"{operator} {_UNSUPPORTED[node.op_type]}, which is unsupported"
    form = form_of(node)
    if form is None or form.operator not in CONVOLUTIONS:
        return f"{operator} is not a known operator"
    return ""


def operator_text(node: Any) -> str:
    """Return the operator of a node, with its domain if that is not the standard domain."""
    return node.op_type if node.domain in OWN_DOMAINS else f"{node.op_type} of {node.domain}"
