"""A program on PyTorch's tensors, as its author's type checkers see it; it is not run."""

from typing import Any, assert_type

import torch
from torch import Tensor

import cupyconv
import cupyconv.torch as ct
from cupyconv import raw_ops

x, w = torch.zeros(8, 64, 56, 56), torch.zeros(128, 64, 3, 3)
y = ct.conv2d(x, w, stride=2, padding=1)
assert_type(y, Tensor)
assert_type(ct.conv2d(x, w, padding="same"), Tensor)
assert_type(ct.conv_transpose2d(y, w, output_padding=(1, 1)), Tensor)
assert_type(ct.conv2d_input(x.shape, w, y), Tensor)
assert_type(ct.conv2d_weight(x, w.shape, y), Tensor)

with ct.patch() as report:
    torch.nn.Conv2d(64, 128, 3)(x)
assert_type(report, ct.PatchReport)
assert_type(report.left, dict[str, str])

# A NumPy or a CuPy array, depending on the device of its memory.
theirs: Any = cupyconv.conv_forward(x, w)
assert_type(cupyconv.as_kind_of(theirs, x), Tensor)

gradient = raw_ops.Conv2DBackpropInput(
    input_sizes=(8, 56, 56, 64), filter=w, out_backprop=y, strides=(1, 1, 1, 1), padding="SAME"
)
assert_type(gradient, Any)

ct.conv3d(x, x, x, 1, 0, 1, 1, x)  # type: ignore[call-arg]  # pyright: ignore
ct.conv2d(x, w, padding="sane")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
