"""PyTorch's convolutions on cupyconv, with PyTorch's names, signatures and autograd.

``conv1d`` to ``conv_transpose3d`` replace the functions of the same names in
``torch.nn.functional``, and ``conv1d_input`` to ``conv3d_weight`` replace those in
``torch.nn.grad``.  ``patch`` runs models that call PyTorch's own convolutions::

    import cupyconv.torch as ct

    y = ct.conv2d(x, weight, bias, stride=2, padding=1)
    with ct.patch() as report:
        loss = criterion(model(x), target)
    print(report)

CPU tensors are computed by the NumPy path, CUDA tensors by the kernels on PyTorch's current stream.
Tensors are passed without copies.  The functions call three custom operators,
``torch.ops.cupyconv.forward``, ``.backprop_input`` and ``.backprop_filter``.  The gradients of each
operator are computed by the other two operators, so the functions can be differentiated any number
of times.  Here, ddx and ddw are the gradients with respect to dx and dw::

    y  = forward(x, w)            has the gradients  backprop_input(w, dy), backprop_filter(x, dy)
    dx = backprop_input(w, dy)    has the gradients  backprop_filter(ddx, dy), forward(ddx, w)
    dw = backprop_filter(x, dy)   has the gradients  backprop_input(ddw, dy), forward(x, ddw)

Differences from PyTorch:

* ``conv1d`` to ``conv3d`` also take ``add=``, a tensor that the same kernel adds to the result.
* Only floating-point dtypes, complex64 and complex128 are supported.
* float32 is computed in float32, regardless of ``torch.backends.cudnn.allow_tf32``.
* A convolution with no input channels is rejected in a compiled graph.
* Errors are ``cupyconv.ConvError`` and ``ConvTypeError``, here also subclasses of RuntimeError.
* ``torch.autograd``, forward mode and ``torch.func`` differentiate these functions any number of
  times, and ``torch.func.vmap`` computes all slices of the mapped axis in one call.  The custom
  operators themselves only support reverse mode.
* ``torch.compile`` breaks its graph at a transform of ``torch.func`` around these functions, and
  ``torch.export`` rejects such a transform.  In both cases, ``patch`` leaves the convolutions
  inside the transform to PyTorch.
* ``torch.export`` and ``torch.fx.symbolic_trace`` support these functions; ``torch.jit.trace``,
  ``torch.jit.script`` and ``torch.func.functionalize`` do not.
* ``torch.onnx.export`` cannot convert these functions.  It converts a model that calls PyTorch's
  own convolutions, even inside ``patch``.

This package requires PyTorch 2.4 or later, which is not installed with cupyconv.  Examples assume
``import torch`` and ``import cupyconv.torch as ct``.
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


def __dir__() -> list[str]:
    return sorted(__all__)
