"""A program on NumPy arrays, as its author's type checkers see it; it is not run."""

from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import cupyconv
from cupyconv import ConvError, ConvProblem, onnx, raw_ops
from cupyconv.typing import Impl, Implementation, Padding, Rules, Size

Images = NDArray[np.float32]

x = np.zeros((8, 64, 56, 56), np.float32)
w = np.zeros((128, 64, 3, 3), np.float32)
bias = np.zeros(128, np.float32)

y = cupyconv.conv_forward(x, w, bias, stride=2, padding="same", activation="relu")
assert_type(y, Images)
assert_type(cupyconv.conv_backprop_input(x.shape, w, y, stride=(2, 2), padding="SAME"), Images)
assert_type(cupyconv.conv_backprop_filter(x, w.shape, y, dilation=[1, 1], padding=1), Images)
assert_type(cupyconv.conv_backprop_bias(y, data_format="channels_last"), Images)
assert_type(cupyconv.conv_transpose(y, w, stride=2, output_padding=1, precision="tf32"), Images)
out = np.empty_like(y)
cupyconv.conv_forward(x, w, padding=((0, 1), (0, 1)), out=out, filter_format="OHWI")

dx, dw, db = cupyconv.conv_backward(x, w, y, stride=2, padding="same")
assert_type(dx, Images)
some = cupyconv.conv_backward(x, w, y, needs=("input", "bias"))
assert_type(some.dw, Images | None)
cupyconv.conv_backward(x, w, y, needs="filter")


def of_a_file(mapped: "np.memmap[tuple[int, ...], np.dtype[np.float32]]") -> None:
    assert_type(cupyconv.conv_forward(mapped, w), Images)


def halve(images: Images, filters: Images, padding: Padding = "same", stride: Size = 2) -> Images:
    return cupyconv.conv_forward(images, filters, padding=padding, stride=stride)


def compared(images: Images, filters: Images, impl: Impl = "auto") -> bool:
    y = cupyconv.conv_forward(images, filters, impl=impl)
    return bool((y == cupyconv.conv_forward(images, filters, impl="reference")).all())


def repeated(images: Images, filters: Images, rules: Rules) -> Iterator[Images]:
    yield cupyconv.conv_forward(images, filters, **rules)
    problem = ConvProblem(images.shape, filters.shape, **rules)
    yield cupyconv.conv_forward(images, filters, **problem.keywords)


problem = ConvProblem(
    (1, 5, 5, 3), (3, 3, 3, 4), padding="same", data_format="NHWC", dtype="float16"
)
same = ConvProblem(x.shape, w.shape, dtype=x.dtype)
other = same.replace(stride=2, dtype=np.float64, data_format=same.data_format)
assert_type(problem.output_shape, tuple[int, ...])
assert_type(problem.axes[0].output, int)
again = ConvProblem(x.shape, w.shape, dtype=problem.dtype, data_format=problem.data_format)

prepared = cupyconv.prepare(w, same, passes=["forward"])
held: cupyconv.PreparedFilter[Images] = prepared
assert_type(held.array, Images)
assert_type(cupyconv.conv_forward(x, prepared, bias), Images)
assert_type(cupyconv.conv_backprop_input(x.shape, prepared, y), Images)
assert_type(cupyconv.conv_transpose(y, prepared), Images)
assert_type(cupyconv.conv_backward(x, prepared, y).dx, Images)
assert_type(onnx.conv(x, prepared), Images)
print(cupyconv.warm([same, other], "sm_90a", passes="forward", activation="relu").summary)

planned = cupyconv.plan(problem, "sm_90a", precision="bf16x6")
assert_type(planned, cupyconv.Plan)
assert_type(planned["forward"].implementation, Implementation)
cupyconv.conv_forward(x, w, impl=planned["forward"].implementation)
assert_type(cupyconv.Plan.from_json(planned.to_json()), cupyconv.Plan)
cupyconv.conv_forward(x, w, impl=planned)
cupyconv.benchmark = True
cupyconv.workspace_limit = None

explanation = cupyconv.explain(problem, values="integers", seed=3)
assert_type(explanation, cupyconv.Explanation)
assert_type(explanation.svg(), str)
assert_type(cupyconv.kernel_sources(), Path)

try:
    ConvProblem((1, 1, 2, 2), (1, 1, 3, 3))
except ConvError as error:
    assert_type(error.axis, str | None)

sizes = [1, 5, 5, 3]
assert_type(
    raw_ops.Conv2DBackpropInput(
        input_sizes=sizes, filter=w, out_backprop=y, strides=[1, 2, 2, 1], padding="SAME"
    ),
    Images,
)
assert_type(raw_ops.Conv2D(input=x, filter=w, strides=(1, 1, 1, 1), padding="VALID"), Images)
layers = raw_ops.Conv2DBackpropFilterV2(
    input=x, filter=w, out_backprop=y, strides=sizes, padding="EXPLICIT", explicit_paddings=sizes
)
assert_type(layers, Images)
volumes = raw_ops.Conv3DBackpropFilterV2(
    input=x, filter_sizes=sizes, out_backprop=y, strides=sizes, padding="SAME", data_format="NCDHW"
)
assert_type(volumes, Images)
assert_type(raw_ops.BiasAddGrad(out_backprop=y), Images)
assert_type(onnx.conv(x, w, bias, auto_pad="SAME_UPPER", strides=[2, 2]), Images)
assert_type(onnx.conv_transpose(y, w, output_padding=[1, 1]), Images)
