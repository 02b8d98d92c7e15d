"""The convolutions of CuPy 13's ``cupy.cudnn``, which CuPy 14 no longer has.

A program that lost them changes one import::

    from cupyconv import cudnn

    cudnn.convolution_forward(x, W, b, y, pad, stride, dilation, groups,
                              auto_tune=True, tensor_core="auto")

Names, arguments and their meanings are those of ``cupy.cudnn`` (later ``cupyx.cudnn``); results are
written into the array given, which keeps its memory.  What differs:

* NumPy arrays are computed on the CPU.  Any of 1 to 3 spatial axes, any strides in memory, also of
  the result, asymmetric padding, bfloat16 and complex numbers are taken; ``pad``, ``stride`` and
  ``dilation`` may be whatever ``cupyconv.conv_forward`` takes.
* ``tensor_core`` decides whether float32 may be rounded to TF32: "always" permits it, "auto" and
  "never" do not.  16-bit types and float64 use tensor cores wherever the plan does, because that
  changes nothing but rounding.
* ``auto_tune`` times the most promising kernels at the first call of a problem on a GPU, unless
  ``deterministic`` is asked for: then the kernel is chosen by its estimate, in every process alike.
  The same kernel gives the same bits always, whatever ``deterministic`` says.
* The maximal workspace is ``cupyconv.workspace_limit``, which holds for all of the library.  There
  is none at first, and no call fails for want of workspace.
* A 16-bit result is rounded once, with its bias.
* Of complex numbers, which cuDNN did not have, the gradients conjugate W or x, as PyTorch's do.
* Wrong arguments raise ``cupyconv.ConvError`` (a ValueError) or ``ConvTypeError`` (a TypeError).
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

import cupyconv
from cupyconv import arrays, formats, operations
from cupyconv.errors import ConvError, ConvTypeError, require_word, shown
from cupyconv.operations import Called
from cupyconv.problem import LARGEST, Padding, Size
from cupyconv.remedies import Names, any_padding

__all__ = [
    "CUDNN_TENSOR_NCHW",
    "CUDNN_TENSOR_NHWC",
    "convolution_backward_data",
    "convolution_backward_filter",
    "convolution_forward",
    "get_max_workspace_size",
    "set_max_workspace_size",
]

CUDNN_TENSOR_NCHW: Literal[0] = 0
"""Layout of arrays whose channels come before their pixels, and of filters (K, C, ...)."""

CUDNN_TENSOR_NHWC: Literal[1] = 1
"""Layout of arrays whose channels come last, and of filters (K, ..., C)."""

TensorCore = Literal["always", "auto", "never"]


def _layout(key: str, word: str) -> Any:
    """Return a format as a layout of cuDNN; None for a filter format that cuDNN does not have."""
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
_FORWARD = Called(("x", "W", "b"), "y", _NAMES._replace(x="x", w="W", y="y"))
_BACKWARD_FILTER = Called(("x", "gy"), "gW", _NAMES._replace(x="x", w="gW", y="gy"))
_BACKWARD_DATA = Called(("W", "x", "b"), "y", _NAMES._replace(x="y", w="W", y="x"))

_LAYOUTS = (CUDNN_TENSOR_NCHW, CUDNN_TENSOR_NHWC)
_PRECISIONS = {"always": "tf32", "auto": "ieee", "never": "ieee"}


def get_max_workspace_size() -> int:
    """Return bytes of GPU memory that a pass may use beside its arrays.

    ``cupyconv.workspace_limit``, or 2^63 - 1 where that is None.
    """
    limit = cupyconv.workspace_limit
    return LARGEST if limit is None else limit


def set_max_workspace_size(size: int) -> None:
    """Set ``cupyconv.workspace_limit``.

    Raises:
        ConvError: ``size`` is not a number of bytes.
    """
    is_number = isinstance(size, Integral) and not isinstance(size, bool)
    if not is_number or not 0 <= size <= LARGEST:
        raise ConvError(
            "the workspace size must be a number of bytes",
            f"got {shown(size)}",
            "Use 0 for none at all, or 2**63 - 1 for no limit",
        )
    cupyconv.workspace_limit = int(size)


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
    """y = b + x correlated with W: ``cupyconv.conv_forward``.

    Args:
        x: (N, C, [[D,] H,] W), or with its channels last under ``CUDNN_TENSOR_NHWC``.
        W: (K, C / groups, ...), or (K, ..., C / groups) under ``CUDNN_TENSOR_NHWC``.
        b: K values in an array of any shape, or None.
        y: the array for the result.
        pad, stride, dilation: one integer for each spatial axis; the default dilation is 1.
        groups: C and K are split into this many independent convolutions.
        auto_tune, tensor_core: as above; ``tensor_core`` is "always", "auto" or "never".
        d_layout, w_layout: of x and y, and of W.

    Raises:
        ConvError: no such convolution exists, or y does not fit it.
        ConvTypeError, DeviceError: as for ``cupyconv.conv_forward``.
    """
    rules = _rules(x, pad, stride, dilation, groups, d_layout, w_layout)
    operations.compute(
        "forward",
        (x, W) if b is None else (x, W, _flat(b)),
        None,
        rules,
        _result("y", y),
        precision=_precision(tensor_core),
        measure=bool(auto_tune),
        called=_FORWARD,
    )


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
    """gW, the gradient with respect to W, from gy: ``cupyconv.conv_backprop_filter``.

    Args:
        x, pad, stride, dilation, groups, d_layout, w_layout: as for ``convolution_forward``.
        gy: gradient with respect to the output.
        gW: the array for the result, of W's shape.
        deterministic, auto_tune, tensor_core: as above.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``convolution_forward``.
    """
    rules = _rules(x, pad, stride, dilation, groups, d_layout, w_layout)
    operations.compute(
        "backprop_filter",
        (x, gy),
        _result("gW", gW).shape,
        rules,
        gW,
        precision=_precision(tensor_core),
        measure=bool(auto_tune) and not deterministic,
        called=_BACKWARD_FILTER,
    )


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
    """y = b + the gradient with respect to an input, from x, that with respect to the output.

    ``cupyconv.conv_backprop_input``; with a bias, and of real numbers, ``cupyconv.conv_transpose``.

    Args:
        W, pad, stride, dilation, groups, d_layout, w_layout: of the convolution, as for
            ``convolution_forward``.
        x: (N, K, ...), an output of it.
        b: C values in an array of any shape, or None.
        y: the array for the result, (N, C, ...); its sizes say which of the inputs that share an
            output is meant.
        deterministic, auto_tune, tensor_core: as above.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``convolution_forward``.
    """
    rules = _rules(x, pad, stride, dilation, groups, d_layout, w_layout)
    shape = _result("y", y).shape
    how: dict[str, Any] = {
        "precision": _precision(tensor_core),
        "measure": bool(auto_tune) and not deterministic,
        "called": _BACKWARD_DATA,
    }
    if b is None:
        operations.compute("backprop_input", (W, x), shape, rules, y, **how)
        return
    given = (W, x, _flat(b))
    operations.compute("transpose", given, (shape, None), rules, y, conjugates=True, **how)


# -- reading the arguments -------------------------------------------------------------------------


def _rules(
    data: Any, pad: Any, stride: Any, dilation: Any, groups: int, d_layout: int, w_layout: int
) -> tuple[Any, ...]:
    """Return the rules of a call in the library's words."""
    for what, layout in (("d_layout", d_layout), ("w_layout", w_layout)):
        is_number = isinstance(layout, Integral) and not isinstance(layout, bool)
        if not is_number or layout not in _LAYOUTS:
            raise ConvError(
                f"{what} must be CUDNN_TENSOR_NCHW or CUDNN_TENSOR_NHWC",
                f"got {shown(layout)}",
                f"Use one of {', '.join(map(str, _LAYOUTS))}",
            )
    shape = getattr(data, "shape", None)
    rank = len(shape) - 2 if isinstance(shape, tuple) else 0
    data_format = filter_format = None
    if rank in formats.SPATIAL_AXES:  # else ConvProblem reports the rank
        data_format = formats.data_formats(rank)[_LAYOUTS.index(d_layout)]
        filter_format = formats.filter_formats(rank)[2 * _LAYOUTS.index(w_layout)]
    dilation = 1 if dilation is None else dilation
    return stride, pad, dilation, groups, data_format, filter_format


def _precision(tensor_core: str) -> str:
    require_word("tensor_core", tensor_core, _PRECISIONS)
    return _PRECISIONS[tensor_core]


def _flat(b: Any) -> Any:
    """Return the bias as an array of one axis."""
    bias, _ = arrays.take("b", b)
    return bias.reshape(-1)


def _result(name: str, array: Any) -> Any:
    if not hasattr(array, "shape"):
        raise ConvTypeError(
            f"{name} must be the array for the result: got {shown(array)}. "
            "Pass one of its shape, for example numpy.empty_like or cupy.empty of it"
        )
    return array
