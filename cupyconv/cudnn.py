"""The convolutions of CuPy 13's ``cupy.cudnn``, which CuPy 14 no longer has.

A program that calls these functions needs only one changed import::

    from cupyconv import cudnn

    cudnn.convolution_forward(x, W, b, y, pad, stride, dilation, groups,
                              auto_tune=True, tensor_core="auto")

Functions and arguments have the names and meanings of ``cupy.cudnn`` (later ``cupyx.cudnn``).
Each function writes its result into an array that the caller passes.  Differences:

* Convolutions of NumPy arrays run on the CPU.  Operands and results may have 1 to 3 spatial axes
  and any strides in memory.  Asymmetric padding, bfloat16 and complex numbers are supported.
  ``pad``, ``stride`` and ``dilation`` may have any form that ``cupyconv.conv_forward`` accepts.
* ``tensor_core`` decides whether float32 may be rounded to TF32: "always" permits rounding, "auto"
  and "never" do not.  For 16-bit types and float64, ``tensor_core`` has no effect: the planner
  decides whether tensor cores compute them, and only the rounding of their sums differs.
* ``auto_tune`` times the most promising kernels at the first call with new shapes, dtype or options
  on a GPU.  With ``deterministic``, the kernel is instead chosen by its estimated time, so every
  process chooses the same kernel.  A kernel always gives the same bits, with or without
  ``deterministic``.
* The largest workspace is ``cupyconv.workspace_limit``, which applies to the whole library.  By
  default there is no limit.  No call fails because the limit is too small.
* A 16-bit result is rounded once, after its bias is added.
* Gradients of complex arrays, which cuDNN did not support, conjugate W or x, as in PyTorch.
* Invalid arguments raise ``cupyconv.ConvError`` (a ValueError) or ``ConvTypeError`` (a TypeError).

Examples assume the import above, ``import cupyconv`` and ``import numpy as np``.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from cupyconv import arrays, formats, settings
from cupyconv.binding import ArgumentNames
from cupyconv.calls import compute
from cupyconv.errors import (
    ConvError,
    ConvTypeError,
    Names,
    any_padding,
    naming_arguments,
    require_word,
    shown,
)
from cupyconv.problem import LARGEST, ConvOptions, Padding, Size

__all__ = [
    "CUDNN_TENSOR_NCHW",
    "CUDNN_TENSOR_NHWC",
    "convolution_backward_data",
    "convolution_backward_filter",
    "convolution_forward",
    "get_max_workspace_size",
    "set_max_workspace_size",
]


_ELSEWHERE = {
    "activation": "use cupy.maximum(x, 0), cupy.tanh or activation= of cupyconv.conv_forward",
    "softmax": "use cupyx.scipy.special.softmax",
    "pooling": "reduce cupy.lib.stride_tricks.sliding_window_view",
    "batch_normalization": "use cupy.mean and cupy.var over all axes but the channels",
    "dropout": "multiply by a random mask of cupy.random",
    "reduce": "use cupy.sum, cupy.max or another reduction of CuPy",
    "add": "add the arrays, or use add= of cupyconv.conv_forward",
    "rnn": "use PyTorch, which reads CuPy arrays through DLPack",
    "create": "pass arrays, since cupyconv needs no descriptors",
    "get": "pass arrays, since cupyconv needs no handles",
}
"""Replacement of other functions of ``cupy.cudnn``, keyed by the start of their names."""


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers report unknown names themselves

    def __getattr__(name: str) -> Any:
        text = f"module {__name__!r} has no attribute {name!r}"
        for start, replacement in _ELSEWHERE.items():
            if name.startswith(f"{start}_"):
                text += f": it has the convolutions of cupy.cudnn only; {replacement}"
        raise AttributeError(text, name=name)


CUDNN_TENSOR_NCHW: Literal[0] = 0
"""Layout code of channels-first arrays (N, C, ...), and of filters (K, C, ...)."""

CUDNN_TENSOR_NHWC: Literal[1] = 1
"""Layout code of channels-last arrays (N, ..., C), and of filters (K, ..., C)."""

TensorCore = Literal["always", "auto", "never"]


def _layout(key: str, word: str) -> Any:
    """Return the value of an argument as error messages show it to a caller of this module.

    Args:
        key: name of the argument in ConvProblem.
        word: its value.

    Returns:
        A format's layout code, or None for a filter format without one; other values unchanged.
    """
    if key == "data_format":
        return CUDNN_TENSOR_NHWC if word.endswith("C") else CUDNN_TENSOR_NCHW
    if key == "filter_format":
        return {"I": CUDNN_TENSOR_NHWC, "O": None}.get(word[-1], CUDNN_TENSOR_NCHW)
    return word


_NAMES = Names(
    padding="pad",
    data_format="d_layout",
    filter_format="w_layout",
    spell=_layout,
    pad=lambda value: None if isinstance(value, str) else ("pad", any_padding(value)[1]),
)
_FORWARD = ArgumentNames(("x", "W", "b"), "y", _NAMES._replace(x="x", w="W", y="y"))
_BACKWARD_FILTER = ArgumentNames(("x", "gy"), "gW", _NAMES._replace(x="x", w="gW", y="gy"))
_BACKWARD_DATA = ArgumentNames(("W", "x", "b"), "y", _NAMES._replace(x="y", w="W", y="x"))

_LAYOUTS = (CUDNN_TENSOR_NCHW, CUDNN_TENSOR_NHWC)
_PRECISIONS = {"always": "tf32", "auto": "ieee", "never": "ieee"}


def get_max_workspace_size() -> int:
    """Return the largest number of bytes of GPU memory that a pass may use besides its arrays.

    The result is ``cupyconv.workspace_limit``, or 2**63 - 1 if there is no limit (None).

    >>> cudnn.set_max_workspace_size(64 * 2**20)
    >>> cudnn.get_max_workspace_size()
    67108864
    """
    limit = settings.workspace_limit
    return LARGEST if limit is None else limit


def set_max_workspace_size(size: int) -> None:
    """Set ``cupyconv.workspace_limit`` to a number of bytes.

    Raises:
        ConvError: ``size`` is not an integer from 0 to 2**63 - 1.

    >>> cudnn.set_max_workspace_size(0)
    >>> cupyconv.workspace_limit
    0
    """
    is_number = isinstance(size, Integral) and not isinstance(size, bool)
    if not is_number or not 0 <= size <= LARGEST:
        raise ConvError(
            "the workspace size must be a non-negative integer, in bytes",
            f"got {shown(size)}",
            "Use 0 for no workspace, or 2**63 - 1 for no limit",
        )
    settings.workspace_limit = int(size)


@naming_arguments
def convolution_forward(
    x: Any,
    W: Any,
    b: Any,
    y: Any,
    pad: Padding,
    stride: Size,
    dilation: Size,
    groups: int,
    *,
    auto_tune: bool,
    tensor_core: TensorCore,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute y = (x correlated with W) + b, as ``cupyconv.conv_forward`` does.

    Args:
        x: input, (N, C, [[D,] H,] W); channels last with ``CUDNN_TENSOR_NHWC``.
        W: filter, (K, C / groups, ...); (K, ..., C / groups) with ``CUDNN_TENSOR_NHWC``.
        b: bias, an array of any shape with K values; None for no bias.
        y: array for the result, (N, K, [[Z,] P,] Q); channels last with ``CUDNN_TENSOR_NHWC``.
        pad, stride: one integer per spatial axis.
        dilation: one integer per spatial axis; None means 1.
        groups: number of independent convolutions into which C and K are divided.
        auto_tune: whether the first call with new shapes, dtype or options on a GPU times the most
            promising kernels.
        tensor_core: "always" permits rounding float32 to TF32; "auto" and "never" do not.
        d_layout: layout of x and y.
        w_layout: layout of W.

    Raises:
        ConvError: the convolution is invalid, or y has another shape than the result.
        ConvTypeError, DeviceError: as for ``cupyconv.conv_forward``.

    >>> x, W, y = np.ones((1, 2, 4, 4)), np.ones((3, 2, 3, 3)), np.empty((1, 3, 2, 2))
    >>> options = {"auto_tune": False, "tensor_core": "auto"}
    >>> cudnn.convolution_forward(x, W, None, y, (0, 0), (1, 1), (1, 1), 1, **options)
    >>> y[0, 0].tolist()
    [[18.0, 18.0], [18.0, 18.0]]
    """
    layer = _options(x, pad, stride, dilation, groups, d_layout, w_layout)
    arrays_of = (x, W, None if b is None else _flat(b), None, _result("y", y))
    options = (None, *layer, None, _precision(tensor_core), "auto")
    compute("forward", *arrays_of, options, _FORWARD, bool(auto_tune))


@naming_arguments
def convolution_backward_filter(
    x: Any,
    gy: Any,
    gW: Any,
    pad: Padding,
    stride: Size,
    dilation: Size,
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: TensorCore,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute gW, the gradient with respect to W, as ``cupyconv.conv_backprop_filter`` does.

    Args:
        x, pad, stride, dilation, groups, d_layout, w_layout: as for ``convolution_forward``.
        gy: gradient with respect to the output, with the output's shape.
        gW: array for the result, with the shape of W.
        deterministic: whether to choose the kernel by its estimated time, even with ``auto_tune``.
        auto_tune, tensor_core: as for ``convolution_forward``.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``convolution_forward``.

    >>> x, gy, gW = np.ones((1, 2, 4, 4)), np.ones((1, 3, 2, 2)), np.empty((3, 2, 3, 3))
    >>> options = {"deterministic": True, "auto_tune": False, "tensor_core": "auto"}
    >>> cudnn.convolution_backward_filter(x, gy, gW, (0, 0), (1, 1), (1, 1), 1, **options)
    >>> gW[0, 0].tolist()
    [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    layer = _options(x, pad, stride, dilation, groups, d_layout, w_layout)
    options = (_result("gW", gW).shape, *layer, None, _precision(tensor_core), "auto")
    measure = bool(auto_tune) and not deterministic
    compute("backprop_filter", x, gy, None, None, gW, options, _BACKWARD_FILTER, measure)


@naming_arguments
def convolution_backward_data(
    W: Any,
    x: Any,
    b: Any,
    y: Any,
    pad: Padding,
    stride: Size,
    dilation: Size,
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: TensorCore,
    d_layout: int = CUDNN_TENSOR_NCHW,
    w_layout: int = CUDNN_TENSOR_NCHW,
) -> None:
    """Compute the gradient with respect to the convolution's input, plus a bias.

    Without a bias, the result is that of ``cupyconv.conv_backprop_input``.  With a bias, the result
    is that of ``cupyconv.conv_transpose`` for real dtypes; a complex W is conjugated.

    Args:
        W, pad, stride, dilation, groups, d_layout, w_layout: parameters of the convolution, as for
            ``convolution_forward``.
        x: gradient with respect to the convolution's output, (N, K, ...).
        b: bias, an array of any shape with C values; None for no bias.
        y: array for the result, (N, C, ...).  With a stride above 1, several input sizes of the
            convolution have the same output size; the shape of y selects one of them.
        deterministic, auto_tune, tensor_core: as for ``convolution_backward_filter``.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``convolution_forward``.

    >>> W, gy, gx = np.ones((3, 2, 2, 2)), np.ones((1, 3, 2, 2)), np.empty((1, 2, 3, 3))
    >>> options = {"deterministic": True, "auto_tune": False, "tensor_core": "auto"}
    >>> cudnn.convolution_backward_data(W, gy, None, gx, (0, 0), (1, 1), (1, 1), 1, **options)
    >>> gx[0, 0].tolist()
    [[3.0, 6.0, 3.0], [6.0, 12.0, 6.0], [3.0, 6.0, 3.0]]
    """
    layer = _options(x, pad, stride, dilation, groups, d_layout, w_layout)
    operation, bias, shape = "backprop_input", None, _result("y", y).shape
    if b is not None:
        operation, bias, shape = "conjugate_transpose", _flat(b), (shape, None)
    options = (shape, *layer, None, _precision(tensor_core), "auto")
    measure = bool(auto_tune) and not deterministic
    compute(operation, W, x, bias, None, y, options, _BACKWARD_DATA, measure)


# -- reading the arguments -------------------------------------------------------------------------


def _options(
    data: Any, pad: Any, stride: Any, dilation: Any, groups: int, d_layout: int, w_layout: int
) -> ConvOptions:
    """Check the layout codes of a call, and return its options in cupyconv's form."""
    for what, layout in (("d_layout", d_layout), ("w_layout", w_layout)):
        is_number = isinstance(layout, Integral) and not isinstance(layout, bool)
        if not is_number or layout not in _LAYOUTS:
            raise ConvError(
                f"{what} must be CUDNN_TENSOR_NCHW or CUDNN_TENSOR_NHWC",
                f"got {shown(layout)}",
                "Use {} or {}".format(*_LAYOUTS),
            )
    shape = getattr(data, "shape", None)
    rank = len(shape) - 2 if isinstance(shape, tuple) else 0
    data_format = filter_format = None
    if rank in formats.SPATIAL_AXES:  # otherwise ConvProblem raises an error
        data_format = formats.data_formats(rank)[_LAYOUTS.index(d_layout)]
        filter_format = formats.filter_formats(rank)[2 * _LAYOUTS.index(w_layout)]
    dilation = 1 if dilation is None else dilation
    return ConvOptions(stride, pad, dilation, groups, data_format, filter_format)


def _precision(tensor_core: str) -> str:
    require_word("tensor_core", tensor_core, _PRECISIONS)
    return _PRECISIONS[tensor_core]


def _flat(b: Any) -> Any:
    """Return the bias as an array with one axis."""
    bias, _ = arrays.take("b", b)
    return bias.reshape(-1)


def _result(name: str, array: Any) -> Any:
    if not hasattr(array, "shape"):
        raise ConvTypeError(
            f"{name} must be the array for the result: got {shown(array)}. "
            "Pass an array of the result's shape, for example from numpy.empty or cupy.empty"
        )
    return array
