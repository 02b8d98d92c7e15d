"""A program on CuPy arrays, as its author's type checkers see it with cupy-stubs; it is not run."""

from typing import assert_type

import cupy

import cupyconv
from cupyconv import onnx, raw_ops


def program(x: cupy.ndarray, w: cupy.ndarray) -> cupy.ndarray:
    y = cupyconv.conv_forward(x, w, padding="same")
    assert_type(y, cupy.ndarray)
    assert_type(cupyconv.conv_forward(x, w, out=y, impl="cuda-gather"), cupy.ndarray)
    assert_type(cupyconv.conv_backprop_input(x.shape, w, y), cupy.ndarray)
    assert_type(cupyconv.conv_backprop_filter(x, w.shape, y), cupy.ndarray)
    assert_type(cupyconv.conv_backprop_bias(y), cupy.ndarray)
    assert_type(cupyconv.conv_transpose(y, w), cupy.ndarray)
    assert_type(cupyconv.conv_backward(x, w, y).dx, cupy.ndarray)
    assert_type(cupyconv.conv_backward(x, w, y, needs=["filter"]).dx, cupy.ndarray | None)
    prepared = cupyconv.prepare(w, cupyconv.ConvProblem(x.shape, w.shape))
    assert_type(cupyconv.conv_forward(x, prepared), cupy.ndarray)
    strides = (1, 1, 1, 1)
    z = raw_ops.Conv2D(input=x, filter=w, strides=strides, padding="SAME", data_format="NCHW")
    assert_type(z, cupy.ndarray)
    dw = raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=x, filter_sizes=w.shape, out_backprop=y, strides=strides, padding="SAME"
    )
    assert_type(dw, cupy.ndarray)
    assert_type(onnx.conv(x, w, pads=(1, 1, 1, 1)), cupy.ndarray)
    return y
