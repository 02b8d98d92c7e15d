"""Lines that a type checker must reject: if it accepts one, it reports an unused ignore comment."""

import numpy as np

import cupyconv
import cupyconv.dask as cd
from cupyconv import ConvProblem, cudnn, onnx, raw_ops

x = np.zeros((8, 64, 56, 56), np.float32)
w = np.zeros((128, 64, 3, 3), np.float32)

# Option values.
cupyconv.conv_forward(x, w, padding="sane")  # type: ignore[arg-type]  # pyright: ignore
cupyconv.conv_forward(x, w, data_format="NHCW")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x, w, filter_format="IOHW")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x, w, activation="relo")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x, w, precision="fp32")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x, w, impl="cuda-gathr")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_backprop_input(x.shape, w, x, impl="cuda")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_backprop_filter(x, w.shape, x, impl="cudnn")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_backward(x, w, x, impl="Auto")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_transpose(x, w, impl="CUDA-direct")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_transpose(x, w, padding="full")  # type: ignore[arg-type]  # pyright: ignore
cupyconv.conv_backprop_bias(x, data_format="NHCW")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_backward(x, w, x, needs=["weight"])  # type: ignore[list-item]  # pyright: ignore
ConvProblem(x.shape, w.shape, padding="sane")  # type: ignore[arg-type]  # pyright: ignore
ConvProblem(x.shape, w.shape, dtype="float31")  # type: ignore[arg-type]  # pyright: ignore
ConvProblem(x.shape, w.shape).replace(dtype="int8")  # type: ignore[arg-type]  # pyright: ignore
cupyconv.plan(ConvProblem(x.shape, w.shape), precision="tf23")  # type: ignore[arg-type]  # pyright: ignore
cupyconv.plan(ConvProblem(x.shape, w.shape), impl="numby")  # type: ignore[arg-type]  # pyright: ignore
cd.conv_forward(x, w, impl="dask")  # type: ignore[arg-type]  # pyright: ignore
cupyconv.explain(ConvProblem(x.shape, w.shape), values="ones")  # type: ignore[arg-type]  # pyright: ignore
onnx.conv(x, w, auto_pad="SAME")  # type: ignore[call-overload]  # pyright: ignore
raw_ops.Conv2D(input=x, filter=w, strides=[1], padding="same")  # type: ignore[call-overload]  # pyright: ignore
raw_ops.Conv3D(input=x, filter=w, strides=[1], padding="EXPLICIT")  # type: ignore[call-overload]  # pyright: ignore
raw_ops.Conv3DBackpropInputV2(  # type: ignore[call-overload]
    input_sizes=x.shape, filter=w, out_backprop=x, strides=[1], padding="SAME",
    explicit_paddings=()  # pyright: ignore
)  # fmt: skip
raw_ops.DepthwiseConv2dNativeBackpropFilter(  # type: ignore[call-overload]
    input=x, filter_sizes=[1], out_backprop=x, strides=[1], padding="SAME",
    use_cudnn_on_gpu=True  # pyright: ignore
)  # fmt: skip
raw_ops.Conv2DBackpropInputV2(  # type: ignore[call-overload]
    input=x, filter=w, out_backprop=x, strides=[1], padding="SAME",
    data_format="NDHWC"  # pyright: ignore
)  # fmt: skip
cudnn.convolution_forward(x, w, None, x, 1, 1, 1, 1, auto_tune=True, tensor_core="no")  # type: ignore[arg-type]  # pyright: ignore

# Names.
cupyconv.conv_foward(x, w)  # type: ignore[attr-defined]  # pyright: ignore
cupyconv.conv_forward(x, w, strides=2)  # type: ignore[call-overload]  # pyright: ignore
from cupyconv import Backend  # type: ignore[attr-defined]  # pyright: ignore  # noqa: E402, F401
from cupyconv.typing import Words  # type: ignore[attr-defined]  # pyright: ignore  # noqa: E402, F401

# Types.
cupyconv.conv_forward([[1.0]], w)  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x, w, stride=1.5)  # type: ignore[call-overload]  # pyright: ignore
raw_ops.Conv2DBackpropFilter(input=x, out_backprop=x, strides=[1], padding="SAME")  # type: ignore[call-overload]  # pyright: ignore
raw_ops.Conv2DBackpropFilterV2(input=x, filter=[1], out_backprop=x, strides=[1], padding="SAME")  # type: ignore[call-overload]  # pyright: ignore
cupyconv.conv_forward(x)  # type: ignore[call-overload]  # pyright: ignore
ConvProblem(x.shape, w.shape).stride = (2, 2)  # type: ignore[misc]  # pyright: ignore
len(cupyconv.conv_backward(x, w, x, needs=["bias"]).dx)  # type: ignore[arg-type]  # pyright: ignore
