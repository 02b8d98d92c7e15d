"""PyTorch's convolutions on cupyconv: its names, its signatures, its autograd.

``conv1d`` to ``conv_transpose3d`` stand for their namesakes in ``torch.nn.functional``,
``conv1d_input`` to ``conv3d_weight`` for those in ``torch.nn.grad``, and ``patch`` runs a model
that calls PyTorch's own::

    import cupyconv.torch as ct

    y = ct.conv2d(x, weight, bias, stride=2, padding=1)
    with ct.patch() as report:
        loss = criterion(model(x), target)
    print(report)

CPU tensors are computed by the NumPy path, CUDA tensors by the kernels on PyTorch's current stream;
neither is copied.  Underneath are three custom operators, ``torch.ops.cupyconv.forward``,
``.backprop_input`` and ``.backprop_filter``.  The gradient of each is made of the other two, so any
number of derivatives can be taken::

    y  = forward(x, w)              gives  backprop_input(w, dy)   and  backprop_filter(x, dy)
    dx = backprop_input(w, dy)      gives  backprop_filter(ddx, dy)  and  forward(ddx, w)
    dw = backprop_filter(x, dy)     gives  backprop_input(ddw, dy)   and  forward(x, ddw)

What differs from PyTorch:

* Floating-point and complex numbers only, and no complex ones of 32 bits: integers are refused.
* float32 is computed in float32 whatever ``torch.backends.cudnn.allow_tf32`` says.
* Of no input channels at all, a result is its bias, where PyTorch gives one of no channels.
* Errors are ``cupyconv.ConvError`` and ``ConvTypeError``, which are RuntimeErrors here too.
* ``torch.autograd``, forward mode and ``torch.func`` differentiate these functions, as often as is
  asked for, and ``torch.func.vmap`` computes all examples in one call.  The operators themselves
  have what PyTorch gives to custom operators: reverse mode.
* ``torch.jit.trace`` and ``torch.jit.script`` do not see them; ``torch.export`` does.

Needs PyTorch 2.4 or later, which is not among the library's dependencies.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cupyconv.torch needs PyTorch, which could not be imported ({error}). "
        "Install it as https://pytorch.org/get-started says for your machine"
    ) from error

from cupyconv.torch.functions import (
    conv1d,
    conv1d_input,
    conv1d_weight,
    conv2d,
    conv2d_input,
    conv2d_weight,
    conv3d,
    conv3d_input,
    conv3d_weight,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from cupyconv.torch.patching import PatchReport, patch

__all__ = [
    "PatchReport",
    "conv1d",
    "conv1d_input",
    "conv1d_weight",
    "conv2d",
    "conv2d_input",
    "conv2d_weight",
    "conv3d",
    "conv3d_input",
    "conv3d_weight",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "patch",
]
