"""ONNX's convolution operators: their attributes, on NumPy and CuPy arrays.

``conv`` and ``conv_transpose`` take the attributes of the operators Conv and ConvTranspose
(opset 11 and later) under their own names, and ``conv_problem`` and ``conv_transpose_problem`` say
what they mean without data.  The onnx package is not needed.

Formulas from https://onnx.ai/onnx/operators/onnx__Conv.html and onnx__ConvTranspose.html, with what
they leave to the reader:

* ``pads`` has the beginnings of all spatial axes and then their ends.  It counts under
  ``auto_pad="NOTSET"`` only.
* SAME_UPPER puts the odd pixel of padding at the end, SAME_LOWER at the beginning.
* The result of a ConvTranspose has the size that its attributes make it, or under SAME the input
  times the strides, or ``output_shape``.  In the last two cases its padding follows: what is beyond
  that size is cropped on both sides, the odd pixel at the end under SAME_UPPER and else at the
  beginning.  Where nothing is beyond it, nothing is cropped, and what no window reaches is zero.
* An ``output_shape`` that lies a stride or more beyond what the windows reach is refused: the Conv
  that is transposed would not give ``x``'s size back from it, and its padding would be negative, of
  which the text says nothing.  ONNX's own evaluator refuses it as well, but for SAME, and so does
  ONNX Runtime (its pull request 29446).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from cupyconv import arrays, operations
from cupyconv.errors import ConvError, ConvTypeError, require_word, shown
from cupyconv.operations import Called
from cupyconv.problem import (
    TRANSPOSED,
    ConvProblem,
    Dtype,
    Names,
    Padding,
    PaddingWord,
    integers,
    named_problem,
    shape_text,
    spatial_rank,
    transposed_problem,
)

__all__ = ["conv", "conv_problem", "conv_transpose", "conv_transpose_problem"]

Ints = Sequence[int] | None

AutoPad = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]

if TYPE_CHECKING:
    from typing import TypedDict, Unpack

    from numpy.typing import NDArray

    from cupyconv.arrays import CuPyArray, Exporter, Scalar
    from cupyconv.prepared import PreparedFilter

    class _Conv(TypedDict, total=False):
        auto_pad: AutoPad
        dilations: Ints
        group: int
        kernel_shape: Ints
        pads: Ints
        strides: Ints

    class _ConvTranspose(_Conv, total=False):
        output_padding: Ints
        output_shape: Ints


_PADDING: dict[str, PaddingWord] = {
    "SAME_UPPER": "same",
    "SAME_LOWER": "same_lower",
    "VALID": "valid",
}
_AUTO_PADS = get_args(AutoPad)

_ATTRIBUTES = {"stride": "strides", "padding": "pads", "dilation": "dilations", "groups": "group"}
_CONV = Names(x_shape="x_shape", w_shape="w_shape")._replace(**_ATTRIBUTES)
_CONV_TRANSPOSE = TRANSPOSED._replace(y_shape="x_shape", w_shape="w_shape", **_ATTRIBUTES)
_CONV_CALLED = Called(("x", "w", "b"), tensors=_CONV)
_CONV_TRANSPOSE_CALLED = Called(("w", "x", "b"), tensors=_CONV_TRANSPOSE)


@overload
def conv(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    b: NDArray[Scalar] | None = None,
    **attributes: Unpack[_Conv],
) -> NDArray[Scalar]: ...
@overload
def conv(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    b: CuPyArray | None = None,
    **attributes: Unpack[_Conv],
) -> CuPyArray: ...
@overload
def conv(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    b: Exporter | None = None,
    **attributes: Unpack[_Conv],
) -> Any: ...
def conv(
    x: Any,
    w: Any,
    b: Any = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Any:
    """The operator Conv.

    Args:
        x: (N, C, [[D,] H,] W).
        w: (M, C / group, spatial); or what ``cupyconv.prepare`` made of it.
        b: (M,).
        auto_pad: "NOTSET", "SAME_UPPER", "SAME_LOWER" or "VALID".
        dilations, strides: one per spatial axis; 1 by default.
        group: C and M are split into this many independent convolutions.
        kernel_shape: the spatial sizes of w, if they are to be checked.
        pads: beginnings and then ends of the spatial axes; 0 by default.

    Returns:
        y, (N, M, spatial), of x's dtype and home.

    Raises:
        ConvError: no such convolution exists.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    x, w = arrays.take("x", x)[0], operations.take_filter(w)
    problem = conv_problem(
        x.shape,
        w.shape,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    given = (x, w) if b is None else (x, w, b)
    rules = tuple(problem.keywords.values())
    return operations.compute("forward", given, None, rules, None, called=_CONV_CALLED)


@overload
def conv_transpose(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    b: NDArray[Scalar] | None = None,
    **attributes: Unpack[_ConvTranspose],
) -> NDArray[Scalar]: ...
@overload
def conv_transpose(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    b: CuPyArray | None = None,
    **attributes: Unpack[_ConvTranspose],
) -> CuPyArray: ...
@overload
def conv_transpose(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    b: Exporter | None = None,
    **attributes: Unpack[_ConvTranspose],
) -> Any: ...
def conv_transpose(
    x: Any,
    w: Any,
    b: Any = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Any:
    """The operator ConvTranspose.

    Args:
        x: (N, C, spatial).
        w: (C, M / group, spatial); or what ``cupyconv.prepare`` made of it.
        b: (M,).
        output_padding: what is added to each spatial size at its end; less than the stride or the
            dilation.
        output_shape: the spatial sizes of the result; the padding follows from them.  At most the
            stride - 1 beyond what the windows reach.
        auto_pad, dilations, group, kernel_shape, pads, strides: as for ``conv``.

    Returns:
        y, (N, M, spatial), of x's dtype and home.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv``.
    """
    x, w = arrays.take("x", x)[0], operations.take_filter(w)
    problem = conv_transpose_problem(
        x.shape,
        w.shape,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        output_shape=output_shape,
        pads=pads,
        strides=strides,
    )
    sizes = zip(problem.axes, problem.input_sizes, x.shape[2:], strict=True)
    beyond = [size - axis.first_input_size_for(count) for axis, size, count in sizes]
    given = (w, x) if b is None else (w, x, b)
    rules, asked = tuple(problem.keywords.values()), (None, beyond)
    return operations.compute("transpose", given, asked, rules, None, called=_CONV_TRANSPOSE_CALLED)


def conv_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
    dtype: Dtype = "float32",
) -> ConvProblem:
    """The convolution that a Conv with these attributes is.

    Raises:
        ConvError: there is none.
        ConvTypeError: an attribute is of another type.
    """
    mode = _auto_pad(auto_pad)
    _require_lists(dilations=dilations, kernel_shape=kernel_shape, pads=pads, strides=strides)
    rank = spatial_rank(_CONV, integers("x_shape", x_shape), integers("w_shape", w_shape))
    _require_kernel_shape(kernel_shape, w_shape)
    return named_problem(
        _CONV,
        x_shape,
        w_shape,
        stride=_per_axis("strides", strides, rank),
        dilation=_per_axis("dilations", dilations, rank),
        padding=_PADDING.get(mode) or _pairs(pads, rank),
        groups=group,
        data_format=None,
        filter_format=None,
        dtype=dtype,
    )


def conv_transpose_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
    dtype: Dtype = "float32",
) -> ConvProblem:
    """The convolution that a ConvTranspose with these attributes is the transpose of.

    Its input has the shape of the operator's result, and its output has ``x_shape``; more, where
    an output_padding is not less than the stride.

    Raises:
        ConvError: there is none.
        ConvTypeError: an attribute is of another type.
    """
    mode = _auto_pad(auto_pad)
    _require_lists(
        dilations=dilations,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        output_shape=output_shape,
        pads=pads,
        strides=strides,
    )
    called = _CONV_TRANSPOSE._replace(x="x")  # while only x and w are known
    rank = spatial_rank(called, integers("x_shape", x_shape), integers("w_shape", w_shape))
    _require_kernel_shape(kernel_shape, w_shape)
    stride = _per_axis("strides", strides, rank)
    layer: dict[str, Any] = {
        "stride": stride,
        "dilation": _per_axis("dilations", dilations, rank),
        "groups": group,
        "data_format": None,
        "filter_format": None,
        "dtype": dtype,
    }
    extra = _per_axis("output_padding", output_padding, rank, default=0)
    if output_shape is None and not mode.startswith("SAME"):
        padding: Padding = "valid" if mode == "VALID" else _pairs(pads, rank)
        return transposed_problem(
            _CONV_TRANSPOSE, x_shape, w_shape, None, extra, padding=padding, **layer
        )
    whole = transposed_problem(
        _CONV_TRANSPOSE, x_shape, w_shape, None, extra, padding="valid", **layer
    )
    if output_shape is None:
        sizes = [n * s for n, s in zip(x_shape[2:], stride, strict=True)]
    else:
        sizes = list(output_shape)[-rank:]  # older models have the batch and the channels too
        if len(sizes) != rank:
            raise _wrong_count("output_shape", len(sizes), rank)
    cropped = [max(had - wanted, 0) for had, wanted in zip(whole.input_sizes, sizes, strict=True)]
    beyond = [max(wanted - had, 0) for had, wanted in zip(whole.input_sizes, sizes, strict=True)]
    added = [more + far for more, far in zip(extra, beyond, strict=True)]
    halves = [(total // 2, total - total // 2) for total in cropped]
    layer["padding"] = halves if mode == "SAME_UPPER" else [(b, a) for a, b in halves]
    if any(far and all_ >= s for far, all_, s in zip(beyond, added, stride, strict=True)):
        # Has no output_padding that says it, and is refused with the sizes that would do.
        y_shape = (whole.N, whole.C, *sizes)
        return transposed_problem(_CONV_TRANSPOSE, x_shape, w_shape, y_shape, None, **layer)
    return transposed_problem(_CONV_TRANSPOSE, x_shape, w_shape, None, added, **layer)


def _auto_pad(word: str) -> str:
    require_word("auto_pad", word, _AUTO_PADS)
    return word


def _require_lists(**given: Any) -> None:
    for what, values in given.items():
        try:
            if values is not None:
                len(values)
                integers(what, values)
        except TypeError:
            raise ConvTypeError(
                f"{what} must be a list of integers: got {shown(values)}. "
                "Pass one integer for each spatial axis, for pads two"
            ) from None


def _require_kernel_shape(kernel_shape: Ints, w_shape: Sequence[int]) -> None:
    sizes = tuple(w_shape)[2:]
    if kernel_shape is not None and tuple(kernel_shape) != sizes:
        raise ConvError(
            "kernel_shape must be the spatial sizes of the filter",
            f"got {shape_text(kernel_shape)}, the filter is {shape_text(w_shape)}",
            f"Leave it out, or pass {list(sizes)}",
        )


def _per_axis(what: str, values: Ints, rank: int, *, default: int = 1) -> tuple[int, ...]:
    if values is None:
        return (default,) * rank
    if len(values) != rank:
        raise _wrong_count(what, len(values), rank)
    return tuple(values)


def _pairs(pads: Ints, rank: int) -> tuple[tuple[int, int], ...]:
    if pads is None:
        return ((0, 0),) * rank
    if len(pads) != 2 * rank:
        raise ConvError(
            "pads must have the beginning of every spatial axis and then the end of every one",
            f"got {len(pads)} values for {rank} spatial axes",
            f"Pass {2 * rank} integers",
        )
    numbers = tuple(pads)
    return tuple(zip(numbers[:rank], numbers[rank:], strict=True))


def _wrong_count(what: str, count: int, rank: int) -> ConvError:
    return ConvError(
        f"{what} must have one integer for each spatial axis",
        f"got {count} for {rank} spatial axes",
        f"Pass {rank}",
    )
