"""ONNX's convolution operators on NumPy and CuPy arrays.

``conv`` and ``conv_transpose`` take the attributes of the operators Conv and ConvTranspose
(opset 11 and later) under ONNX's names.  ``conv_problem`` and ``conv_transpose_problem`` return the
equivalent ConvProblem.  The onnx package is not needed.  In shapes, "..." stands for the spatial
sizes.  Examples assume ``from cupyconv import onnx`` and ``import numpy as np``.

The formulas are those of https://onnx.ai/onnx/operators/onnx__Conv.html and
onnx__ConvTranspose.html, with these clarifications:

* ``pads`` has the padding at the beginning of every spatial axis, then the padding at the end of
  every axis.  It is accepted only with ``auto_pad="NOTSET"``.
* If the total padding of an axis is odd, SAME_UPPER adds the larger half at the end, and SAME_LOWER
  adds it at the beginning.
* The spatial sizes of a ConvTranspose's result are ``output_shape`` if that is passed.  Otherwise,
  with SAME_UPPER and SAME_LOWER they are the input's sizes times the strides, and without these
  they follow from the other attributes.
* With ``output_shape``, SAME_UPPER or SAME_LOWER, pixels beyond the result's size are cropped on
  both sides.  If their number is odd, the larger half is cropped at the end with SAME_UPPER, and at
  the beginning with any other ``auto_pad``.
* Pixels of a ConvTranspose's result that no window reaches have the value of the bias, or zero
  without a bias.
* On an axis with n inputs and k taps, the windows of a ConvTranspose span
  (n - 1) * stride + (k - 1) * dilation + 1 pixels.  An ``output_shape`` that exceeds this span by a
  stride or more is rejected.  A Conv with an input of this size would need negative padding to
  return ``x``'s size, which the specification does not define.  ONNX's reference evaluator and ONNX
  Runtime (in its pull request 29446) reject such shapes, too, except with SAME_UPPER and
  SAME_LOWER.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, overload

from cupyconv import arrays, operands
from cupyconv.binding import ArgumentNames
from cupyconv.calls import compute
from cupyconv.errors import (
    ConvError,
    ConvTypeError,
    Fix,
    Names,
    naming_arguments,
    require_word,
    shown,
)
from cupyconv.problem import (
    TRANSPOSED,
    ConvOptions,
    ConvProblem,
    Dtype,
    Padding,
    PaddingWord,
    count_text,
    counted,
    integers,
    named_problem,
    offering,
    shape_text,
    spatial_rank,
    transposed_problem,
)

__all__ = ["conv", "conv_problem", "conv_transpose", "conv_transpose_problem"]


def __dir__() -> list[str]:
    return sorted(__all__)


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


_Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
"""Shapes of x, w and b; None without a bias."""


class _Attributes(NamedTuple):
    """Attributes of an operator; only ConvTranspose has the last two."""

    auto_pad: AutoPad
    dilations: Ints
    group: int
    kernel_shape: Ints
    pads: Ints
    strides: Ints
    output_padding: Ints = None
    output_shape: Ints = None

    @property
    def layer(self) -> dict[str, Any]:
        """Strides, dilations and group under the names of ConvProblem."""
        return {"stride": self.strides, "dilation": self.dilations, "groups": self.group}


ATTRIBUTES = {
    "Conv": tuple(sorted(_Attributes._fields[:-2])),
    "ConvTranspose": tuple(sorted(_Attributes._fields)),
}
"""Names of the attributes, keyed by operator; they are the same in all opsets."""

_PADDING: dict[str, PaddingWord] = {
    "SAME_UPPER": "same",
    "SAME_LOWER": "same_lower",
    "VALID": "valid",
}
_AUTO_PADS = get_args(AutoPad)

_CONV = Names(
    x_shape="x_shape",
    w_shape="w_shape",
    stride="strides",
    padding="pads",
    dilation="dilations",
    groups="group",
    absent=frozenset(("data_format", "filter_format")),
    entries="spatial",
    pad=lambda value: None if isinstance(value, str) else ("pads", [*value, *value]),
)
_CONV_TRANSPOSE = _CONV._replace(
    x=TRANSPOSED.x, y=TRANSPOSED.y, x_shape=TRANSPOSED.x_shape, y_shape="x_shape"
)
_CONV_ARGUMENTS = ArgumentNames(("x", "w", "b"), tensors=_CONV)
_CONV_TRANSPOSE_ARGUMENTS = ArgumentNames(("w", "x", "b"), tensors=_CONV_TRANSPOSE)


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
@naming_arguments
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
    """Compute the operator Conv.

    Args:
        x: input, (N, C, [[D,] H,] W).
        w: filter, (M, C / group, ...), or a filter from ``cupyconv.prepare``.
        b: bias, (M,); None for no bias.
        auto_pad: "NOTSET", "SAME_UPPER", "SAME_LOWER" or "VALID".
        dilations, strides: one integer per spatial axis; 1 by default.
        group: number of independent convolutions into which C and M are divided.
        kernel_shape: expected spatial sizes of w; not checked by default.
        pads: padding at the beginning of each spatial axis, then at the end of each; 0 by default.
            Only with ``auto_pad="NOTSET"``.

    Returns:
        y, (N, M, ...), with x's dtype and device.

    Raises:
        ConvError: the convolution is invalid.
        ConvTypeError, DeviceError: as for ``conv_forward``.

    >>> x, w = np.ones((1, 2, 5, 5)), np.ones((4, 2, 3, 3))
    >>> onnx.conv(x, w, strides=[2, 2], pads=[1, 1, 1, 1]).shape
    (1, 4, 3, 3)
    >>> onnx.conv(x, w, auto_pad="SAME_UPPER").shape
    (1, 4, 5, 5)
    """
    x, w = arrays.take("x", x)[0], operands.take_filter(w)
    b = None if b is None else arrays.take("b", b)[0]
    attributes = _Attributes(auto_pad, dilations, group, kernel_shape, pads, strides)
    shapes = x.shape, w.shape, None if b is None else b.shape
    options = _from_cache(_conv_options, shapes, attributes)
    call_options = (None, *options, None, "ieee", "auto")
    return compute("forward", x, w, b, None, None, call_options, _CONV_ARGUMENTS)


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
@naming_arguments
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
    """Compute the operator ConvTranspose.

    Args:
        x: input, (N, C, ...).
        w: filter, (C, M / group, ...), or a filter from ``cupyconv.prepare``.
        b: bias, (M,); None for no bias.
        output_padding: pixels added at the end of each spatial axis, less than the stride or the
            dilation of the axis; 0 by default.
        output_shape: spatial sizes of the result, which determine the padding.  A size may exceed
            the span of the windows, (size of x - 1) * stride + (size of w - 1) * dilation + 1, by
            at most stride - 1.
        auto_pad, dilations, group, kernel_shape, pads, strides: as for ``conv``.

    Returns:
        y, (N, M, ...), with x's dtype and device.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv``.

    >>> x, w = np.ones((1, 4, 3, 3)), np.ones((4, 2, 3, 3))
    >>> onnx.conv_transpose(x, w, strides=[2, 2]).shape
    (1, 2, 7, 7)
    >>> onnx.conv_transpose(x, w, strides=[2, 2], output_shape=[6, 6]).shape
    (1, 2, 6, 6)
    """
    x, w = arrays.take("x", x)[0], operands.take_filter(w)
    b = None if b is None else arrays.take("b", b)[0]
    attributes = _Attributes(
        auto_pad, dilations, group, kernel_shape, pads, strides, output_padding, output_shape
    )
    shapes = x.shape, w.shape, None if b is None else b.shape
    options, extra = _from_cache(_conv_transpose_options, shapes, attributes)
    call_options = ((None, extra), *options, None, "ieee", "auto")
    return compute("transpose", w, x, b, None, None, call_options, _CONV_TRANSPOSE_ARGUMENTS)


@lru_cache(maxsize=4096)
def _conv_options(shapes: _Shapes, attributes: _Attributes) -> ConvOptions:
    """Check a call of ``conv``, and return its options in cupyconv's form; the result is cached."""
    return _conv_problem(*shapes, attributes).options


@lru_cache(maxsize=4096)
def _conv_transpose_options(
    shapes: _Shapes, attributes: _Attributes
) -> tuple[ConvOptions, tuple[int, ...]]:
    """Check a call of ``conv_transpose``, and return its options and output_padding.

    The options have cupyconv's form.  The output_padding gives the size of the result.  The return
    value is cached.
    """
    problem = _conv_transpose_problem(*shapes, attributes)
    axes = zip(problem.axes, problem.input_sizes, shapes[0][2:], strict=True)
    extra = (size - axis.first_input_size_for(count) for axis, size, count in axes)
    return problem.options, tuple(extra)


def _from_cache(function: Any, shapes: _Shapes, attributes: _Attributes) -> Any:
    """Call a cached function; bypass the cache if an attribute is not a safe key.

    Keys are safe if they consist of integers, strings, None and lists of integers.  An array can
    change, and True equals 1 as a key but is invalid as an attribute.
    """
    keys: dict[str, Any] = {}
    for name, value in attributes._asdict().items():
        if type(value) in (list, tuple) and name not in ("auto_pad", "group"):
            keys[name] = tuple(value)
            types = set(map(type, value)) - {int}
        else:
            keys[name] = value
            types = {type(value)} - {int, str, NoneType}
        if types:
            return function.__wrapped__(shapes, attributes)
    return function(shapes, _Attributes(**keys))


@naming_arguments
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
    """Return the convolution that a Conv with these attributes computes.

    Args:
        x_shape: shape of the input, (N, C, [[D,] H,] W).
        w_shape: shape of the filter, (M, C / group, ...).
        auto_pad, dilations, group, kernel_shape, pads, strides: as for ``conv``.
        dtype: as for ConvProblem.

    Raises:
        ConvError: the convolution is invalid.
        ConvTypeError: an attribute has the wrong type.

    >>> problem = onnx.conv_problem((1, 2, 5, 5), (4, 2, 3, 3), pads=[1, 1, 1, 1])
    >>> problem.output_shape, problem.padding
    ((1, 4, 5, 5), ((1, 1), (1, 1)))
    """
    attributes = _Attributes(auto_pad, dilations, group, kernel_shape, pads, strides)
    sizes = ("input_shape", "filter_shape")
    return _conv_problem(x_shape, w_shape, None, attributes, dtype, sizes)


def _conv_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    b_shape: tuple[int, ...] | None,
    attributes: _Attributes,
    dtype: Dtype = "float32",
    sizes: tuple[str, ...] = (),
) -> ConvProblem:
    """Return the result of ``conv_problem``; check the shape of a bias, too, if there is one.

    Args:
        sizes: tensors that the caller passes as shapes, not arrays; as for ``remedies.offering``.
    """
    _require_types(attributes)
    pads = attributes.pads
    x_shape, w_shape = integers("x_shape", x_shape), integers("w_shape", w_shape)
    padding: Padding | None = _PADDING.get(attributes.auto_pad)
    if padding is None and len(x_shape) == len(w_shape) > 2:
        padding = _pairs(pads, len(x_shape) - 2)

    def require(
        input_shape: Any, filter_shape: Any, bias_shape: Any, padding: Any, **layer: Any
    ) -> ConvProblem:
        rank = spatial_rank(_CONV, input_shape, filter_shape)
        _require_kernel_shape(attributes.kernel_shape, filter_shape)
        options = ConvOptions(
            _per_axis("strides", layer["stride"], rank),
            _pairs(pads, rank) if padding is None else padding,
            _per_axis("dilations", layer["dilation"], rank),
            layer["groups"],
        )
        problem = named_problem(_CONV, input_shape, filter_shape, dtype=dtype, **options._asdict())
        if bias_shape is not None:
            operands.require_bias("b", bias_shape, problem.K, _CONV.w)
        return problem

    given = {
        "input_shape": x_shape,
        "filter_shape": w_shape,
        "bias_shape": b_shape,
        **attributes.layer,
        "padding": padding,
    }
    return offering(require, _CONV, given, sizes)


@naming_arguments
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
    """Return the convolution whose transpose a ConvTranspose with these attributes computes.

    The input of this convolution has the shape of the operator's result.  Its output has
    ``x_shape``, or a larger shape if an output_padding is at least the stride.

    Args:
        x_shape: shape of the operator's input, (N, C, ...).
        w_shape: shape of the filter, (C, M / group, ...).
        output_padding, output_shape: as for ``conv_transpose``.
        auto_pad, dilations, group, kernel_shape, pads, strides: as for ``conv``.
        dtype: as for ConvProblem.

    Raises:
        ConvError: the convolution is invalid.
        ConvTypeError: an attribute has the wrong type.

    >>> problem = onnx.conv_transpose_problem((1, 4, 3, 3), (4, 2, 3, 3), strides=[2, 2])
    >>> problem.input_shape, problem.output_shape
    ((1, 2, 7, 7), (1, 4, 3, 3))
    """
    attributes = _Attributes(
        auto_pad, dilations, group, kernel_shape, pads, strides, output_padding, output_shape
    )
    sizes = ("output_shape", "filter_shape")
    return _conv_transpose_problem(x_shape, w_shape, None, attributes, dtype, sizes)


def _conv_transpose_problem(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    b_shape: tuple[int, ...] | None,
    attributes: _Attributes,
    dtype: Dtype = "float32",
    sizes: tuple[str, ...] = (),
) -> ConvProblem:
    """Return the result of ``conv_transpose_problem``; check the shape of a bias, too, if any.

    Args:
        sizes: as for ``_conv_problem``.
    """

    def require(output_shape: Any, filter_shape: Any, bias_shape: Any, **layer: Any) -> ConvProblem:
        changed = attributes._replace(
            strides=layer["stride"],
            dilations=layer["dilation"],
            group=layer["groups"],
            output_padding=layer["output_padding"],
            output_shape=layer["sizes"],
        )
        problem = _transposed(output_shape, filter_shape, changed, dtype)
        if bias_shape is not None:
            operands.require_bias("b", bias_shape, problem.C, _CONV_TRANSPOSE.x)
        return problem

    given = {
        "output_shape": x_shape,
        "filter_shape": w_shape,
        "bias_shape": b_shape,
        **attributes.layer,
        "output_padding": attributes.output_padding,
        "sizes": attributes.output_shape,
    }
    return offering(require, _CONV_TRANSPOSE, given, sizes)


def _transposed(
    x_shape: Sequence[int], w_shape: Sequence[int], attributes: _Attributes, dtype: Dtype
) -> ConvProblem:
    _require_types(attributes)
    mode, output_shape = attributes.auto_pad, attributes.output_shape
    names = _CONV_TRANSPOSE._replace(x="x")  # here, the first shape is that of the operator's x
    rank = spatial_rank(names, integers("x_shape", x_shape), integers("w_shape", w_shape))
    _require_kernel_shape(attributes.kernel_shape, w_shape)
    stride = _per_axis("strides", attributes.strides, rank)
    dilation = _per_axis("dilations", attributes.dilations, rank)
    extra = _per_axis("output_padding", attributes.output_padding, rank, default=0)

    def problem(
        padding: Padding, added: Sequence[int] | None, y_shape: Sequence[int] | None = None
    ) -> ConvProblem:
        options = ConvOptions(stride, padding, dilation, attributes.group)._asdict()
        return transposed_problem(
            _CONV_TRANSPOSE, x_shape, w_shape, y_shape, added, dtype=dtype, **options
        )

    if output_shape is None and not mode.startswith("SAME"):
        return problem("valid" if mode == "VALID" else _pairs(attributes.pads, rank), extra)
    uncropped = problem("valid", extra)
    if output_shape is None:
        sizes = [n * s for n, s in zip(x_shape[2:], stride, strict=True)]
    else:
        sizes = list(output_shape)[-rank:]  # in older models, it includes batch and channels
        if len(sizes) != rank:
            raise _wrong_count("output_shape", len(sizes), rank)
    full = uncropped.input_sizes
    missing = [max(size - n, 0) for n, size in zip(full, sizes, strict=True)]
    added = [pixels + more for pixels, more in zip(extra, missing, strict=True)]
    cropped = [max(n - size, 0) for n, size in zip(full, sizes, strict=True)]
    padding = [(total // 2, total - total // 2) for total in cropped]
    if mode != "SAME_UPPER":
        padding = [(after, before) for before, after in padding]
    if not any(more and total >= s for more, total, s in zip(missing, added, stride, strict=True)):
        return problem(padding, added)
    try:  # no output_padding gives this size; the error lists the possible sizes
        return problem(padding, None, (uncropped.N, uncropped.C, *sizes))
    except ConvError as error:
        if output_shape is not None:
            limits = zip(full, extra, stride, strict=True)
            most = [n + max(s - 1 - pixels, 0) for n, pixels, s in limits]
            largest = list(map(min, sizes, most))
            error.candidates = [Fix({"sizes": largest}, (("output_shape", largest),))]
        raise


def require_attributes(operator: str, names: Iterable[str]) -> None:
    """Check that an operator has attributes with these names, and that no name occurs twice.

    Raises:
        ConvError: a name is unknown or repeated.
    """
    for name, count in Counter(names).items():
        require_word(f"attribute of {operator}", name, ATTRIBUTES[operator])
        if count > 1:
            raise ConvError(
                f"an attribute of {operator} must be given only once",
                f"{name} is given {count} times",
                "Remove all but one",
            )


def require_padding(auto_pad: object = "NOTSET", pads: object = None) -> None:
    """Check that auto_pad is known, and that pads are passed only with NOTSET.

    Raises:
        ConvError: auto_pad is unknown, or pads are passed with another auto_pad.
    """
    require_word("auto_pad", auto_pad, _AUTO_PADS)
    if auto_pad != "NOTSET" and pads is not None:
        raise ConvError(
            "pads must not be combined with an auto_pad other than NOTSET",
            f"got auto_pad={auto_pad!r} and pads={shown(pads)}",
            "Remove one of them",
        )


def _require_types(attributes: _Attributes) -> None:
    """Check auto_pad and pads, and that attributes with several integers are lists."""
    require_padding(attributes.auto_pad, attributes.pads)
    for what in ATTRIBUTES["ConvTranspose"]:
        values = getattr(attributes, what)
        if what in ("auto_pad", "group") or values is None:
            continue
        try:
            len(values)
            integers(what, values)
        except TypeError:
            count = "two integers" if what == "pads" else "one integer"
            raise ConvTypeError(
                f"{what} must be a list of integers: got {shown(values)}. "
                f"Pass {count} for each spatial axis"
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
            "pads must have two integers for each spatial axis",
            count_text(len(pads), rank),
            f"Pass {2 * rank} integers: the padding at the beginning of each axis, then at the end",
        )
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


def _wrong_count(what: str, count: int, rank: int) -> ConvError:
    return ConvError(
        f"{what} must have one integer for each spatial axis",
        count_text(count, rank),
        f"Pass {counted(rank, 'integer')}",
        candidates=(),
    )
