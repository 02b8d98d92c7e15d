"""Shapes that do not belong together, as people report them, and the repair that an expert names.

Each case is a call whose x, w and dy do not fit.  A public issue in parentheses reports the
symptom; sizes that it does not give are chosen.  The error must state the conflict, and the
expert's repair must be one of the first two that it offers.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import raw_ops
from cupyconv.cli.main import main
from tests.errors.test_remedies import (
    FUNCTIONS,
    OWN,
    TF,
    TORCH,
    Function,
    function,
    outcome,
    readable,
    stop_after_checks,
)
from tests.ways_out import Layout, alternatives, applied

pytestmark = pytest.mark.quick

MOST = 2
"""Number of ways out among which the expert's repair must be (hand-set)."""


class Case(NamedTuple):
    """A call with shapes that do not fit.

    Attributes:
        label: symptom, with the public issue if there is one.
        function: key of CALLED.
        given: arguments, with shapes instead of tensors.
        conflict: text of the message that names what is off.
        repair: arguments that the repair changes, with their new values.
    """

    label: str
    function: str
    given: dict[str, Any]
    conflict: str
    repair: dict[str, Any]


CALLED = {
    **FUNCTIONS,
    "DepthwiseConv2dNativeBackpropInput": function(
        raw_ops.DepthwiseConv2dNativeBackpropInput, TF, "input_sizes", "filter", "out_backprop"
    ),
    "smallest_transpose": function(cupyconv.conv_transpose, OWN, None, "w", "x", transposed=True),
}


def unbatched(call: Any, axes: str) -> Function:
    """Return a function of PyTorch, whose input may lack the batch axis."""
    made = function(call, TORCH, "input", "weight")

    def layout(given: dict[str, Any]) -> Layout:
        return made.layout(given)._replace(data=axes[len(axes) - len(given["input"]) :])

    return made._replace(layout=layout)


if find_spec("torch"):
    in_torch = import_module("cupyconv.torch")
    CALLED["torch.conv1d"] = unbatched(in_torch.conv1d, "NCW")
    CALLED["torch.conv_transpose2d"] = unbatched(in_torch.conv_transpose2d, "NCHW")
    CALLED["torch.conv2d_weight"] = function(
        in_torch.conv2d_weight, TORCH, "input", "weight_size", "grad_output"
    )

ONE, TWO = [1, 1, 1, 1], [1, 2, 2, 1]

CASES = [
    # -- TensorFlow: Conv2DBackpropInput and conv2d_transpose --------------------------------------
    Case(
        "size of out_backprop doesn't match computed: actual 3, computed 4"
        " (LMescheder/AdversarialVariationalBayes#1)",
        "Conv2DBackpropInput",
        {
            "input_sizes": [64, 7, 7, 32],
            "filter": (5, 5, 32, 64),
            "out_backprop": (64, 3, 3, 64),
            "strides": TWO,
            "padding": "SAME",
        },
        "an input of 7 gives ceil(7/2) = 4, out_backprop has 3",
        {"input_sizes": (64, 5, 5, 32)},
    ),
    Case(
        "rows of out_backprop don't match computed: actual 7, computed 16 (tflearn/tflearn#112)",
        "Conv2DBackpropInput",
        {
            "input_sizes": [8, 16, 16, 1],
            "filter": (16, 16, 1, 32),
            "out_backprop": (8, 7, 7, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "an input of 16 gives ceil(16/1) = 16, out_backprop has 7",
        {"input_sizes": (8, 7, 7, 1)},
    ),
    Case(
        "input and out_backprop must have the same batch size: 50, 25 (keras-team/keras#11041)",
        "Conv2DBackpropInput",
        {
            "input_sizes": [50, 28, 28, 16],
            "filter": (3, 3, 16, 32),
            "out_backprop": (25, 14, 14, 32),
            "strides": TWO,
            "padding": "SAME",
        },
        "the same batch size: out_backprop has 25, the input has 50",
        {"input_sizes": (25, 28, 28, 16)},
    ),
    Case(
        "conv2d_transpose with the filter of conv2d: (h, w, in, out) for (h, w, out, in)",
        "Conv2DBackpropInput",
        {
            "input_sizes": [1, 14, 14, 64],
            "filter": (5, 5, 128, 64),
            "out_backprop": (1, 7, 7, 128),
            "strides": TWO,
            "padding": "SAME",
        },
        "the input has 64 channels, the filter 5x5x128x64 has 128 input channels",
        {"filter": (5, 5, 64, 128)},
    ),
    Case(
        "DCGAN generator with VALID for SAME",
        "Conv2DBackpropInput",
        {
            "input_sizes": [64, 8, 8, 256],
            "filter": (5, 5, 256, 512),
            "out_backprop": (64, 4, 4, 512),
            "strides": TWO,
            "padding": "VALID",
        },
        "(8 + 0 + 0 - 5)/2) + 1 = 2, out_backprop has 4",
        {"padding": "SAME"},
    ),
    Case(
        "gradient of a VALID layer with SAME",
        "Conv2DBackpropInput",
        {
            "input_sizes": [64, 28, 28, 1],
            "filter": (5, 5, 1, 32),
            "out_backprop": (64, 24, 24, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "ceil(28/1) = 28, out_backprop has 24",
        {"padding": "VALID"},
    ),
    Case(
        "gradient of a strided layer without its strides",
        "Conv2DBackpropInput",
        {
            "input_sizes": [64, 14, 14, 64],
            "filter": (5, 5, 64, 128),
            "out_backprop": (64, 7, 7, 128),
            "strides": ONE,
            "padding": "SAME",
        },
        "ceil(14/1) = 14, out_backprop has 7",
        {"strides": [1, 2, 2, 1]},
    ),
    Case(
        "input_sizes in PyTorch's order",
        "Conv2DBackpropInput",
        {
            "input_sizes": [64, 3, 32, 32],
            "filter": (5, 5, 3, 16),
            "out_backprop": (64, 16, 16, 16),
            "strides": TWO,
            "padding": "SAME",
        },
        "the input has 32 channels, the filter 5x5x3x16 has 3 input channels",
        {"input_sizes": (64, 32, 32, 3)},
    ),
    Case(
        "input_sizes of one image, without the batch",
        "Conv2DBackpropInput",
        {
            "input_sizes": [28, 28, 1],
            "filter": (5, 5, 1, 32),
            "out_backprop": (8, 14, 14, 32),
            "strides": TWO,
            "padding": "SAME",
        },
        "input_sizes must be the input's shape of 4 values",
        {"input_sizes": (8, 28, 28, 1)},
    ),
    Case(
        "input_sizes that ignore the explicit paddings",
        "Conv2DBackpropInput",
        {
            "input_sizes": [1, 10, 10, 3],
            "filter": (3, 3, 3, 4),
            "out_backprop": (1, 4, 4, 4),
            "strides": TWO,
            "padding": "EXPLICIT",
            "explicit_paddings": [0, 0, 0, 1, 0, 1, 0, 0],
        },
        "floor((10 + 0 + 1 - 3)/2) + 1 = 5, out_backprop has 4; input sizes 8 to 9",
        {"input_sizes": (1, 8, 8, 3)},
    ),
    # -- TensorFlow: Conv2D and others -------------------------------------------------------------
    Case(
        "strides of NHWC with NCHW",
        "Conv2D",
        {
            "input": (8, 3, 32, 32),
            "filter": (7, 7, 3, 64),
            "strides": TWO,
            "padding": "SAME",
            "data_format": "NCHW",
        },
        "strides must be 1 on the batch and channel axes of NCHW",
        {"strides": [1, 1, 2, 2]},
    ),
    Case(
        "input depth must be evenly divisible by filter depth: 4 vs 3, an image with alpha",
        "Conv2D",
        {
            "input": (1, 224, 224, 4),
            "filter": (3, 3, 3, 64),
            "strides": ONE,
            "padding": "SAME",
        },
        "the input has 4 channels, the filter 3x3x3x64 has 3 input channels",
        {"input": (1, 224, 224, 3)},
    ),
    Case(
        "input depth must be evenly divisible by filter depth: 1 vs 3, a grey image",
        "Conv2D",
        {
            "input": (1, 224, 224, 1),
            "filter": (3, 3, 3, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "the input has 1 channel, the filter 3x3x3x32 has 3 input channels",
        {"input": (1, 224, 224, 3)},
    ),
    Case(
        "NCHW images for an NHWC layer",
        "Conv2D",
        {
            "input": (32, 3, 224, 224),
            "filter": (7, 7, 3, 64),
            "strides": ONE,
            "padding": "SAME",
        },
        "the input has 224 channels",
        {"data_format": "NCHW"},
    ),
    Case(
        "filter loaded from PyTorch, OIHW for HWIO",
        "Conv2D",
        {
            "input": (8, 224, 224, 3),
            "filter": (64, 3, 7, 7),
            "strides": TWO,
            "padding": "SAME",
        },
        "the filter 64x3x7x7 has 7 input channels",
        {"filter": (7, 7, 3, 64)},
    ),
    Case(
        "Keras: expected ndim=4, found ndim=3, an image (28, 28, 1)",
        "Conv2D",
        {
            "input": (28, 28, 1),
            "filter": (3, 3, 1, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "input must have 4 axes: got shape 28x28x1",
        {"input": (1, 28, 28, 1)},
    ),
    Case(
        "Keras: expected ndim=4, found ndim=3, MNIST as (n, 28, 28)",
        "Conv2D",
        {
            "input": (64, 28, 28),
            "filter": (3, 3, 1, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "input must have 4 axes: got shape 64x28x28",
        {"input": (64, 28, 28, 1)},
    ),
    Case(
        "filter_sizes in PyTorch's order",
        "Conv2DBackpropFilter",
        {
            "input": (8, 224, 224, 3),
            "filter_sizes": [64, 3, 7, 7],
            "out_backprop": (8, 112, 112, 64),
            "strides": TWO,
            "padding": "SAME",
        },
        "the filter 64x3x7x7 has 7 input channels",
        {"filter_sizes": (7, 7, 3, 64)},
    ),
    Case(
        "depthwise filter as (h, w, 1, channels)",
        "DepthwiseConv2dNative",
        {
            "input": (1, 112, 112, 32),
            "filter": (3, 3, 1, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "the input has 32 channels, the filter 3x3x1x32 has 1",
        {"filter": (3, 3, 32, 1)},
    ),
    Case(
        "depthwise gradient without the channel multiplier",
        "DepthwiseConv2dNativeBackpropInput",
        {
            "input_sizes": [1, 28, 28, 32],
            "filter": (3, 3, 32, 2),
            "out_backprop": (1, 28, 28, 32),
            "strides": ONE,
            "padding": "SAME",
        },
        "out_backprop has 32 channels, the filter has O = 64",
        {"out_backprop": (1, 28, 28, 64)},
    ),
    # -- PyTorch -----------------------------------------------------------------------------------
    Case(
        "weight [32, 3, 3, 3], expected input[30, 416, 416, 3] to have 3 channels"
        " (aladdinpersson/Machine-Learning-Collection#59)",
        "torch.conv2d",
        {"input": (30, 416, 416, 3), "weight": (32, 3, 3, 3)},
        "input 30x416x416x3 (NCHW) has C = 416",
        {"input": (30, 3, 416, 416)},
    ),
    Case(
        "Conv1d with sequences as (n, length, channels)",
        "torch.conv1d",
        {"input": (32, 50, 100), "weight": (64, 100, 3)},
        "input 32x50x100 (NCW) has C = 50",
        {"input": (32, 100, 50)},
    ),
    Case(
        "weight [6, 1, 5, 5], expected input[1, 3, 32, 32] to have 1 channels"
        " (RedstoneWill/CNN_PyTorch_Beginner#1)",
        "torch.conv2d",
        {"input": (1, 3, 32, 32), "weight": (6, 1, 5, 5)},
        "weight 6x1x5x5 (OIHW) has I = 1",
        {"weight": (6, 3, 5, 5)},
    ),
    Case(
        "depthwise layer without groups",
        "torch.conv2d",
        {"input": (1, 32, 112, 112), "weight": (32, 1, 3, 3), "padding": 1},
        "C = 32, groups=1",
        {"groups": 32},
    ),
    Case(
        "padded input (3 x 3), kernel (4 x 4) can't be greater (Ha0Tang/SelectionGAN#5)",
        "torch.conv2d",
        {"input": (1, 512, 1, 1), "weight": (1, 512, 4, 4), "padding": 1},
        "a weight of 4 with dilation 1 spans 4, the input of 1 with padding (1, 1) has 3",
        {"input": (1, 512, 2, 2)},
    ),
    Case(
        "Conv1d: a batch of signals without the channel axis, read as one image",
        "torch.conv1d",
        {"input": (32, 100), "weight": (16, 1, 3)},
        "input 1x32x100 (NCW) has C = 32",
        {"input": (32, 1, 100)},
    ),
    Case(
        "output padding must be smaller than either stride or dilation",
        "torch.conv_transpose2d",
        {"input": (1, 16, 8, 8), "weight": (16, 8, 3, 3), "padding": 1, "output_padding": 1},
        "got 1 with stride 1 and dilation 1; 0 would fit",
        {"output_padding": 0},
    ),
    Case(
        "upsampling by two without the stride",
        "torch.conv_transpose2d",
        {"input": (1, 16, 8, 8), "weight": (16, 8, 3, 3), "padding": 1, "output_padding": 1},
        "got 1 with stride 1 and dilation 1; 0 would fit",
        {"stride": 2},
    ),
    Case(
        "conv2d_input with the size of grad_output",
        "torch.conv2d_input",
        {"input_size": (1, 1, 3, 2), "weight": (1, 1, 1, 2), "grad_output": (1, 1, 3, 2)},
        "an input of 2 gives floor((2 + 0 + 0 - 2)/1) + 1 = 1, grad_output has 2",
        {"input_size": (1, 1, 3, 3)},
    ),
    Case(
        "conv2d_weight without the stride of the layer",
        "torch.conv2d_weight",
        {
            "input": (8, 3, 32, 32),
            "weight_size": (16, 3, 3, 3),
            "grad_output": (8, 16, 16, 16),
            "padding": 1,
        },
        "an input of 32 gives floor((32 + 1 + 1 - 3)/1) + 1 = 32, grad_output has 16",
        {"stride": 2},
    ),
    # -- arrays: CuPy, JAX, Keras ------------------------------------------------------------------
    Case(
        "expected 4-dimensional input for 4-dimensional weight, got [3, 224, 224]",
        "conv_forward",
        {"x": (3, 224, 224), "w": (32, 3, 3, 3)},
        "the input 3x224x224 has 3, the filter 32x3x3x3 has 4",
        {"x": (1, 3, 224, 224)},
    ),
    Case(
        "expected 4-dimensional input for 4-dimensional weight, got [64, 28, 28]",
        "conv_forward",
        {"x": (64, 28, 28), "w": (32, 1, 3, 3)},
        "the input 64x28x28 has 3, the filter 32x1x3x3 has 4",
        {"x": (64, 1, 28, 28)},
    ),
    Case(
        "one grey image without batch and channel",
        "conv_forward",
        {"x": (28, 28), "w": (32, 1, 3, 3)},
        "input 28x28 has 2 axes",
        {"x": (1, 1, 28, 28)},
    ),
    Case(
        "an image from a file, (height, width, 3)",
        "conv_forward",
        {"x": (224, 224, 3), "w": (32, 3, 3, 3)},
        "the input 224x224x3 has 3, the filter 32x3x3x3 has 4",
        {"x": (1, 224, 224, 3), "data_format": "NHWC", "filter_format": "OIHW"},
    ),
    Case(
        "an axis of size 1 too many, as in (n, 1, c, h, w)",
        "conv_forward",
        {"x": (32, 1, 3, 64, 64), "w": (16, 3, 3, 3)},
        "the input 32x1x3x64x64 has 5, the filter 16x3x3x3 has 4",
        {"x": (32, 3, 64, 64)},
    ),
    Case(
        "weight [64, 512, 1, 1], expected input[2, 256, 128, 128] (fcjian/TOOD#16)",
        "conv_forward",
        {"x": (2, 256, 128, 128), "w": (64, 512, 1, 1)},
        "so 256 per filter; filter 64x512x1x1 (OIHW) has I = 512",
        {"w": (64, 256, 1, 1)},
    ),
    Case(
        "JAX: lhs feature dimension must equal rhs, channels last data (jax-ml/jax#3289)",
        "ConvProblem",
        {"input_shape": (8, 32, 32, 3), "filter_shape": (16, 3, 3, 3)},
        "input 8x32x32x3 (NCHW) has C = 32",
        {"data_format": "NHWC", "filter_format": "OIHW"},
    ),
    Case(
        "grouped layer with the filter of an ungrouped one",
        "ConvProblem",
        {"input_shape": (1, 64, 56, 56), "filter_shape": (128, 64, 3, 3), "groups": 32},
        "groups=32, so 2 per filter; filter 128x64x3x3 (OIHW) has I = 64",
        {"filter_shape": (128, 2, 3, 3)},
    ),
    Case(
        "ASPP with dilation 18 and without its padding",
        "ConvProblem",
        {"input_shape": (1, 2048, 33, 33), "filter_shape": (256, 2048, 3, 3), "dilation": 18},
        "a filter of 3 with dilation 18 spans 37",
        {"padding": 18},
    ),
    Case(
        "gradient of a SAME layer: 74 to 37 with stride 2",
        "conv_backward",
        {"x": (2, 16, 74, 74), "w": (24, 16, 3, 3), "dy": (2, 24, 37, 37), "stride": 2},
        "floor((74 + 0 + 0 - 3)/2) + 1 = 36, dy has 37",
        {"padding": "same"},
    ),
    Case(
        "dy flattened for a dense layer",
        "conv_backward",
        {"x": (8, 3, 32, 32), "w": (16, 3, 3, 3), "dy": (8, 14400)},
        "dy is 8x14400, the input is 8x3x32x32",
        {"dy": (8, 16, 30, 30)},
    ),
    Case(
        "height and width exchanged",
        "conv_backward",
        {"x": (1, 3, 48, 64), "w": (16, 3, 3, 3), "dy": (1, 16, 64, 48), "padding": 1},
        "floor((48 + 1 + 1 - 3)/1) + 1 = 48, dy has 64",
        {"dy": (1, 16, 48, 64)},
    ),
    Case(
        "dy of a channels-last framework",
        "conv_backward",
        {"x": (1, 3, 32, 32), "w": (16, 3, 3, 3), "dy": (1, 32, 32, 16), "padding": 1},
        "dy has 32 channels, the filter has O = 16",
        {"dy": (1, 16, 32, 32)},
    ),
    Case(
        "input_shape of one image, without the batch of dy",
        "conv_backprop_input",
        {
            "input_shape": (3, 32, 32),
            "w": (16, 3, 3, 3),
            "dy": (8, 16, 32, 32),
            "padding": 1,
        },
        "the input 3x32x32 has 3, the filter 16x3x3x3 has 4",
        {"input_shape": (8, 3, 32, 32)},
    ),
    Case(
        "input_shape of one channels-last image, without the batch of dy",
        "conv_backprop_input",
        {
            "input_shape": (32, 32, 3),
            "w": (16, 3, 3, 3),
            "dy": (8, 16, 32, 32),
            "padding": 1,
        },
        "the input 32x32x3 has 3, the filter 16x3x3x3 has 4",
        {"input_shape": (8, 3, 32, 32)},
    ),
    Case(
        "dw without the padding of the layer",
        "conv_backprop_filter",
        {"x": (8, 3, 32, 32), "filter_shape": (16, 3, 5, 5), "dy": (8, 16, 32, 32)},
        "floor((32 + 0 + 0 - 5)/1) + 1 = 28, dy has 32",
        {"padding": 2},
    ),
    Case(
        "requested an output size of 64, but valid sizes range from 32 to 33",
        "conv_transpose",
        {
            "output_shape": (1, 8, 64, 64),
            "x": (1, 16, 16, 16),
            "w": (16, 8, 4, 4),
            "stride": 2,
            "padding": 1,
        },
        "a result of 64 has floor((64 + 1 + 1 - 4)/2) + 1 = 32, x has 16",
        {"output_shape": (1, 8, 32, 32)},
    ),
    Case(
        "upsampling 7 to 14 with a 5x5 kernel (PaddlePaddle/Paddle#12292)",
        "conv_transpose",
        {"output_shape": (1, 1, 14, 14), "x": (1, 25, 7, 7), "w": (25, 1, 5, 5), "stride": 2},
        "a result of 14 has floor((14 + 0 + 0 - 5)/2) + 1 = 5, x has 7",
        {"padding": 2},
    ),
    Case(
        "output_padding of 2 with stride 2",
        "smallest_transpose",
        {"x": (1, 16, 8, 8), "w": (16, 8, 3, 3), "stride": 2, "output_padding": 2},
        "got 2 with stride 2 and dilation 1; 0 to 1 would fit",
        {"output_padding": 1},
    ),
    # -- ONNX --------------------------------------------------------------------------------------
    Case(
        "input channels C is not equal to kernel channels * group: C 1, kernel 3 (onnx/onnx#2560)",
        "onnx.conv",
        {"x": (1, 1, 224, 224), "w": (64, 3, 7, 7)},
        "has C = 1, group=1, so 1 per filter; filter 64x3x7x7 (OIHW) has I = 3",
        {"x": (1, 3, 224, 224)},
    ),
    Case(
        "an image of a TensorFlow model",
        "onnx.conv",
        {"x": (1, 224, 224, 3), "w": (32, 3, 3, 3)},
        "input 1x224x224x3 (NCHW) has C = 224",
        {"x": (1, 3, 224, 224)},
    ),
    Case(
        "padded input (1 x 4), kernel (3 x 3) can't be greater (tamarott/SinGAN#28)",
        "onnx.conv",
        {"x": (1, 3, 1, 4), "w": (32, 3, 3, 3)},
        "a filter of 3 with dilation 1 spans 3, the input of 1 with padding (0, 0) has 1",
        {"x": (1, 3, 3, 4)},
    ),
    Case(
        "ConvTranspose with the weights of Conv",
        "onnx.conv_transpose",
        {"x": (1, 64, 7, 7), "w": (32, 64, 4, 4), "strides": [2, 2]},
        "x has 64 channels, and the filter has O = 32 (32x64x4x4, OIHW)",
        {"w": (64, 32, 4, 4)},
    ),
    Case(
        "ConvTranspose with an output_shape beyond the windows",
        "onnx.conv_transpose",
        {"x": (1, 64, 7, 7), "w": (64, 32, 4, 4), "strides": [2, 2], "output_shape": [20, 20]},
        "a result of 20 has floor((20 + 0 + 0 - 4)/2) + 1 = 9, x has 7",
        {"output_shape": [17, 17]},
    ),
]


def plain(value: Any) -> Any:
    """Return a value with lists as tuples, and equal entries of all axes as one integer."""
    if isinstance(value, (list, tuple)):
        entries = tuple(map(plain, value))
        return entries[0] if len(entries) == 2 and len(set(entries)) == 1 else entries
    return value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_mismatch_offers_the_experts_repair(case, monkeypatch):
    stop_after_checks(monkeypatch)
    if case.function.startswith("torch"):
        pytest.importorskip("torch")
    function = CALLED[case.function]
    is_tf = case.function in vars(raw_ops)
    given = {**({"data_format": "NHWC"} if is_tf else {}), **case.given}
    error = outcome(function, given)
    assert case.conflict in f"{error.rule}: {error.values}", error
    wanted = {key: plain(value) for key, value in {**given, **case.repair}.items()}
    offered = []
    for way_out in alternatives(error.remedy):
        after = applied(given, way_out, error.axis, readable(function))
        offered.append({key: plain(value) for key, value in after.items()})
        assert outcome(function, after) is None, f"{error}\n\nafter '{way_out}': {after}"
    assert wanted in offered[:MOST], error


# -- the command line ------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command line with shapes that do not fit.

    Attributes:
        label: symptom.
        line: the command line.
        conflict: text of the message that names what is off.
        way_out: the expert's repair, as the message writes it.
        options: options that the repair changes, with their new values.
    """

    label: str
    line: str
    conflict: str
    way_out: str
    options: dict[str, str]


COMMANDS = [
    Command(
        "stride and SAME forgotten",
        "shapes --input 1x28x28x1 --filter 5x5x1x32 --data-format NHWC --dy 1x14x14x32",
        "an input of 28 gives floor((28 + 0 + 0 - 5)/1) + 1 = 24, dy has 14",
        "use --stride 2 and --padding same",
        {"--stride": "2", "--padding": "same"},
    ),
    Command(
        "padding of a ResNet stem forgotten",
        "shapes --input 1x3x224x224 --filter 64x3x7x7 --stride 2 --dy 1x64x112x112",
        "floor((224 + 0 + 0 - 7)/2) + 1 = 109, dy has 112",
        "use --padding 3",
        {"--padding": "3"},
    ),
    Command(
        "dy of one image more",
        "explain --input 1x3x8x8 --filter 4x3x3x3 --dy 8x4x6x6",
        "dy has 8, the input has 1",
        "use N = 8 for the input",
        {"--input": "8x3x8x8"},
    ),
    Command(
        "dy in NHWC",
        "grads --no-check --input 1x3x8x8 --filter 16x3x3x3 --padding 1 --dy 1x8x8x16",
        "dy has 8 channels, the filter has O = 16",
        "use --dy 1x16x8x8",
        {"--dy": "1x16x8x8"},
    ),
    Command(
        "depthwise layer without --groups",
        "grads --no-check --input 1x32x8x8 --filter 32x1x3x3 --padding 1",
        "C = 32, groups=1, so 32 per filter; filter 32x1x3x3 (OIHW) has I = 1",
        "use --groups 32",
        {"--groups": "32"},
    ),
    Command(
        "Keras shapes in the short form",
        "explain 1x8x8x3 3x3x3x16",
        "input 1x8x8x3 (NCHW) has C = 8",
        "use --data-format NHWC",
        {"--data-format": "NHWC"},
    ),
    Command(
        "image without a batch",
        "shapes --input 3x224x224 --filter 64x3x7x7",
        "the input 3x224x224 has 3, the filter 64x3x7x7 has 4",
        "use --input 1x3x224x224",
        {"--input": "1x3x224x224"},
    ),
    Command(
        "requested an output size of 64, but valid sizes range from 32 to 33",
        "shapes --input 1x16x16x16 --filter 16x8x4x4 --transposed --stride 2 --padding 1 "
        "--output-shape 1x8x64x64",
        "a result of 64 has floor((64 + 1 + 1 - 4)/2) + 1 = 32, the input has 16",
        "use a result of 32 to 33 by 32 to 33",
        {"--output-shape": "1x8x32x32"},
    ),
    Command(
        "transposed layer with the filter of an ordinary one",
        "shapes --input 1x64x7x7 --filter 32x64x4x4 --transposed --stride 2",
        "has O = 32",
        "use --filter 64x32x4x4",
        {"--filter": "64x32x4x4"},
    ),
    Command(
        "dy and a filter with I and O exchanged",
        "shapes --dy 1x3x3x4 --filter 3x3x4x3 --stride 2 --data-format NHWC",
        "dy 1x3x3x4 has 4 channels, w 3x3x4x3 has 3 filters",
        "use --filter 3x3x3x4",
        {"--filter": "3x3x3x4"},
    ),
]


def run(words: list[str]) -> Any:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case.label)
def test_command_offers_the_experts_repair(case):
    words = shlex.split(case.line)
    result = run(words)
    assert result.exit_code == 2, result.output
    assert case.conflict in result.stderr
    remedy = re.split(r"\. (?=[A-Z])", result.stderr.strip())[-1]
    assert case.way_out in alternatives(remedy)[:MOST], result.stderr
    for option, value in case.options.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    result = run(words)
    assert result.exit_code == 0, result.output
