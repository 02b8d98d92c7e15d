"""ONNX's Conv and ConvTranspose, compared with ONNX's evaluator and its specification."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import cupyconv
import cupyconv.onnx as co
from cupyconv import ConvError, arrays

RANKS = (1, 2, 3)
AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def integers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(-3, 4, shape)
    return drawn.astype(arrays.numpy_dtype(dtype))


def evaluate(operator: str, x: Any, w: Any, b: Any, attributes: dict) -> np.ndarray:
    """Compute one node with onnx's reference evaluator."""
    onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
    evaluator = import_module("onnx.reference").ReferenceEvaluator
    values = {"x": x, "w": w, "b": b}
    node = onnx.helper.make_node(operator, list(values), ["y"], **attributes)
    inputs = [onnx.helper.make_tensor_value_info(name, 1, None) for name in values]
    output = onnx.helper.make_tensor_value_info("y", 1, None)
    graph = onnx.helper.make_graph([node], "one", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return evaluator(model).run(None, values)[0]


def transposed_by_the_text(x: np.ndarray, w: np.ndarray, attributes: dict) -> np.ndarray:
    """Compute ConvTranspose by the specification's formulas, adding every product in its place."""
    rank = x.ndim - 2
    ones = [1] * rank
    stride = attributes.get("strides", ones)
    dilation = attributes.get("dilations", ones)
    extra = attributes.get("output_padding", [0] * rank)
    mode, group = attributes.get("auto_pad", "NOTSET"), attributes.get("group", 1)
    taps, sizes = w.shape[2:], x.shape[2:]
    axes = range(rank)
    whole = [stride[i] * (sizes[i] - 1) + extra[i] + (taps[i] - 1) * dilation[i] + 1 for i in axes]
    result = np.zeros((x.shape[0], w.shape[1] * group, *whole), np.float64)
    per_group = x.shape[1] // group
    for g, *position in itertools.product(range(group), *map(range, taps)):
        channels = slice(g * per_group, (g + 1) * per_group)
        target = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(position, dilation, sizes, stride, strict=True)
        )
        kernel = w[(channels, slice(None), *position)].astype(np.float64)
        added = np.einsum("nc...,cm->nm...", x[:, channels].astype(np.float64), kernel)
        filters = slice(g * w.shape[1], (g + 1) * w.shape[1])
        result[(slice(None), filters, *target)] += added
    wanted = attributes.get("output_shape")
    if wanted is None and mode.startswith("SAME"):
        wanted = [n * s for n, s in zip(sizes, stride, strict=True)]
    if wanted is None:
        pads = attributes.get("pads", [0] * 2 * rank) if mode == "NOTSET" else [0] * 2 * rank
        begins, wanted = pads[:rank], [whole[i] - pads[i] - pads[rank + i] for i in axes]
    else:
        totals = [max(whole[i] - wanted[i], 0) for i in axes]
        begins = [t // 2 if mode == "SAME_UPPER" else t - t // 2 for t in totals]
    full = np.pad(result, [(0, 0), (0, 0), *((0, max(n, 0)) for n in wanted)])
    crop = tuple(slice(b, b + n) for b, n in zip(begins, wanted, strict=True))
    return full[(slice(None), slice(None), *crop)]


# -- Conv ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_pad", AUTO_PADS)
@pytest.mark.parametrize("rank", RANKS)
def test_conv_is_onnxs(rank, auto_pad):
    x, b = integers(2, 4, *range(5, 5 + rank)), integers(6, seed=2)
    layers = itertools.product((1, 2, 3), (1, 2), (1, 2), (2, 3))
    for stride, dilation, group, taps in layers:
        w = integers(6, 4 // group, *[taps] * rank, seed=1)
        attributes = {
            "auto_pad": auto_pad,
            "strides": [stride] * rank,
            "dilations": [dilation] * rank,
            "group": group,
            "kernel_shape": [taps] * rank,
        }
        if auto_pad == "NOTSET":
            attributes["pads"] = [*range(rank), *range(1, 1 + rank)]
        ours = co.conv(x, w, b, **attributes)
        np.testing.assert_array_equal(ours, evaluate("Conv", x, w, b, attributes))


def test_conv_without_attributes_is_conv_forward():
    x, w = integers(1, 2, 6, 5), integers(3, 2, 2, 3)
    np.testing.assert_array_equal(co.conv(x, w), cupyconv.conv_forward(x, w))
    np.testing.assert_array_equal(co.conv_transpose(x, w[:2]), cupyconv.conv_transpose(x, w[:2]))


# -- ConvTranspose ---------------------------------------------------------------------------------


def transposed_layers(rank: int):
    """Yield attributes and filter sizes, over strides, dilations, groups and output paddings."""
    for stride, dilation, group, taps in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 2, 3)):
        for extra in range(min(max(stride, dilation), 2)):
            yield (
                {
                    "strides": [stride] * rank,
                    "dilations": [dilation] * rank,
                    "group": group,
                    "output_padding": [extra] * rank,
                },
                taps,
            )


@pytest.mark.parametrize("auto_pad", AUTO_PADS)
@pytest.mark.parametrize("rank", RANKS)
def test_conv_transpose_is_onnxs_text(rank, auto_pad):
    x, b = integers(2, 4, *range(3, 3 + rank)), integers(6, seed=2)
    shift = b.reshape(-1, *[1] * rank)
    compared = with_shape = 0
    for attributes, taps in transposed_layers(rank):
        w = integers(4, 6 // attributes["group"], *[taps] * rank, seed=1)
        attributes["auto_pad"] = auto_pad
        given = dict(attributes)
        if auto_pad == "NOTSET" and taps > 1:
            given["pads"] = [1, *[0] * (2 * rank - 1)]
        expected = transposed_by_the_text(x, w, given) + shift
        np.testing.assert_array_equal(co.conv_transpose(x, w, b, **given), expected)
        compared += 1
        for more in (-1, 0, 1):  # around the size that SAME gives
            sizes = [n * attributes["strides"][0] + more for n in x.shape[2:]]
            given = {**attributes, "output_shape": sizes}
            span = (taps - 1) * attributes["dilations"][0] + 1
            reached = span - attributes["strides"][0] + attributes["output_padding"][0]
            if more >= span and more > reached:  # a stride or more beyond the windows
                with pytest.raises(ConvError, match=r"the convolution of .* must have the size of"):
                    co.conv_transpose(x, w, b, **given)
                continue
            expected = transposed_by_the_text(x, w, given) + shift
            ours = co.conv_transpose(x, w, b, **given)
            np.testing.assert_array_equal(ours, expected)
            with_shape += 1
    assert compared == 66
    assert with_shape > 140


@pytest.mark.parametrize("auto_pad", AUTO_PADS)
@pytest.mark.parametrize("rank", RANKS)
def test_conv_transpose_equals_onnxs_evaluator(rank, auto_pad):
    # The evaluator of onnx 1.23 does not support groups.  With SAME, it shifts a result that is
    # larger than all windows.  Without SAME, it rejects an output_shape, or ignores what follows
    # from it.  It rejects an output_padding of at least the stride; the tests with PyTorch have it.
    x, b = integers(2, 4, *range(3, 3 + rank)), integers(6, seed=2)
    compared = 0
    for attributes, taps in transposed_layers(rank):
        stride, extra = attributes["strides"][0], attributes["output_padding"][0]
        span = (taps - 1) * attributes["dilations"][0] + 1 + extra
        same = auto_pad.startswith("SAME")
        if attributes["group"] > 1 or extra >= stride or (same and span < stride):
            continue
        w = integers(4, 6, *[taps] * rank, seed=1)
        given = {**attributes, "auto_pad": auto_pad}
        if same and taps == 2:
            given["output_shape"] = [n * stride for n in x.shape[2:]]
        ours = co.conv_transpose(x, w, b, **given)
        np.testing.assert_array_equal(ours, evaluate("ConvTranspose", x, w, b, given))
        compared += 1
    assert compared >= 20


def test_output_shape_may_include_batch_and_channels():
    shapes = (1, 2, 5, 5), (2, 3, 3, 3)
    whole = co.conv_transpose_problem(*shapes, strides=[2, 2], output_shape=[1, 3, 9, 10])
    assert whole == co.conv_transpose_problem(*shapes, strides=[2, 2], output_shape=[9, 10])
    assert whole.input_shape == (1, 3, 9, 10)
    assert whole.padding == ((1, 1), (1, 0))


@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID"])
def test_output_shapes_that_onnxs_evaluator_rejects_are_rejected(
    auto_pad,
):
    x, w, no_bias = integers(1, 1, 3), integers(1, 1, 2), np.zeros(1, "float32")
    for size in (6, 7, 8, 9):  # the windows reach 6
        given = {"strides": [2], "output_shape": [size], "auto_pad": auto_pad}
        if size < 8:
            expected = evaluate("ConvTranspose", x, w, no_bias, given)
            np.testing.assert_array_equal(co.conv_transpose(x, w, **given), expected)
            continue
        with pytest.raises(ValueError, match="output_shape"):
            evaluate("ConvTranspose", x, w, no_bias, given)
        with pytest.raises(ConvError, match=r"Use output_shape=\[7\]$"):
            co.conv_transpose(x, w, **given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype):
    x, w, b = integers(1, 4, 6, dtype=dtype), integers(4, 2, 3, dtype=dtype), integers(2)
    y = co.conv_transpose(x, w, b.astype(x.dtype), strides=[2])
    assert y.dtype == x.dtype
    expected = transposed_by_the_text(x, w, {"strides": [2]}) + b.reshape(-1, 1)
    np.testing.assert_array_equal(y.astype("float64"), expected)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"auto_pad": "SAME"}, "unknown auto_pad: 'SAME'. Did you mean 'SAME_"),
        ({"pads": [1, 1]}, "2 values for 2 spatial axes. Pass 4"),
        ({"strides": [2]}, "strides must have one integer for each spatial axis"),
        ({"dilations": [1, 1, 1]}, "got 3 values for 2 spatial axes"),
        ({"kernel_shape": [3, 2]}, "got 3x2, the filter is 4x4x3x3. Leave it out, or pass [3, 3]"),
        ({"group": 3}, "group must divide"),
        ({"pads": [0, -1, 0, 0]}, "pads must not be negative"),
        ({"pads": [0] * 4, "auto_pad": "VALID"}, "auto_pad='VALID' and pads=(0, 0, 0, 0). Remove"),
    ],
)
@pytest.mark.parametrize("function", [co.conv, co.conv_transpose])
def test_attributes_that_cannot_be(function, given, said):
    with pytest.raises(ConvError) as caught:
        function(integers(1, 4, 5, 5), integers(4, 4, 3, 3), **given)
    assert said in str(caught.value)
