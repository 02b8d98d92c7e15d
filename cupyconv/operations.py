"""The public functions: they validate their arguments, plan the passes and run them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

import cupyconv
from cupyconv import arrays, backends, foreign, formats, measuring
from cupyconv.backends import Backend, Run, Tensors
from cupyconv.errors import (
    ConvError,
    ConvTypeError,
    naming_arguments,
    require_word,
    unknown_arguments,
    unknown_word,
    words_of,
)
from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.kernels.request import Epilogue
from cupyconv.kernels.strides import Strides, contiguous_strides, element_strides
from cupyconv.planning import (
    ACTIVATIONS,
    PRECISIONS,
    Activation,
    Device,
    Impl,
    PassPlan,
    Plan,
    Precision,
    Request,
    implementations,
    plan_pass,
    require_limit,
)
from cupyconv.planning import (
    plan as _plan,
)
from cupyconv.prepared import Belonging, PreparedFilter
from cupyconv.problem import (
    PASSES,
    TRANSPOSED,
    ConvOptions,
    ConvProblem,
    Padding,
    Rules,
    Size,
    named_problem,
    require_output,
    require_problem,
    shape_text,
    shared_dtype,
    transposed_problem,
)
from cupyconv.remedies import Fix, Names, offering

if TYPE_CHECKING:
    from typing import Never, Unpack

    from numpy.typing import NDArray

    from cupyconv.arrays import CuPyArray, Exporter, Scalar

    class _How(Rules, total=False):
        precision: Precision
        impl: Impl | Plan

    class _Forward(_How, total=False):
        activation: Activation | None

    class _Transpose(_Forward, total=False):
        output_shape: Iterable[int] | None
        output_padding: Size | None


Gradient = Literal["input", "filter", "bias"]

GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)

FILTER_PASSES = ("forward", "backprop_input")
"""The passes that read a filter."""

_G = TypeVar("_G")
_Array = TypeVar("_Array")


class ConvGradients(NamedTuple, Generic[_G]):
    """Gradients of a layer; None for gradients that were not requested.

    Attributes:
        dx: gradient with respect to the input, with the shape of x.
        dw: gradient with respect to the filter, with the shape of w.
        db: gradient with respect to the bias, of shape (K,).

    >>> x, w, dy = np.ones((1, 2, 4)), np.ones((3, 2, 3)), np.ones((1, 3, 2))
    >>> gradients = cupyconv.conv_backward(x, w, dy, needs=("filter", "bias"))
    >>> gradients.dw.shape, gradients.db.tolist(), gradients.dx
    ((3, 2, 3), [2.0, 2.0, 2.0], None)
    """

    dx: _G
    dw: _G
    db: _G


# The overloads below tell type checkers the type of the result: a NumPy array of the same dtype for
# NumPy arrays, and a CuPy array for CuPy arrays.  For other arrays, the result may be either.


@overload
def conv_forward(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    bias: NDArray[Scalar] | None = None,
    *,
    add: NDArray[Scalar] | None = None,
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_Forward],
) -> NDArray[Scalar]: ...
@overload
def conv_forward(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    bias: CuPyArray | None = None,
    *,
    add: CuPyArray | None = None,
    out: CuPyArray | None = None,
    **how: Unpack[_Forward],
) -> CuPyArray: ...
@overload
def conv_forward(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    *,
    add: Exporter | None = None,
    out: Exporter | None = None,
    **how: Unpack[_Forward],
) -> Any: ...
def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    activation: Activation | None = None,
    add: Any = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
    **others: Never,
) -> Any:
    """Compute y = activation(t + bias + add), where t is the cross-correlation of x and w.

    In 2-D with one group, t[n, k, p, q] = sum over c, r, s of x[n, c, i, j] * w[k, c, r, s], where
    i = p * stride - pad + r * dilation, and j follows from q and s in the same way.

    Args:
        x: input, (N, C, [[D,] H,] W) in ``data_format`` order; a NumPy or CuPy array, or an object
            that exports DLPack or ``__cuda_array_interface__``.
        w: filter, (K, C / groups, [[T,] R,] S) in ``filter_format`` order, with x's dtype and
            device; or a filter from ``prepare``.
        bias: vector of shape (K,) with x's dtype and device.
        stride, padding, dilation, groups, data_format, filter_format: as for ConvProblem.
        activation: None, "relu", "silu" or "gelu" (the exact GELU, with erf).  Complex dtypes
            support only None.  Gradient functions take no activation: their dy is the gradient
            with respect to the activation's input.  "silu" of v is v / (1 + exp(-v)) in the dtype
            of the sums, as in PyTorch: it is -0 where exp(-v) overflows (v below -88.7 in float32,
            -709.7 in float64), and NaN at -infinity.
        add: array with the shape, dtype and device of y, such as the shortcut of a residual block;
            it is added before the activation.  It may be ``out`` itself, but must not overlap
            ``out`` in another way.  On a GPU, ``add`` is copied first if its strides differ from
            those of the result.  On the CPU, it is copied first if it is ``out``.  The gradient
            with respect to ``add`` is dy.
        precision: "ieee" computes float32 in float32: an element affects only the results that read
            it, subnormals are kept, and errors are at most twice those of adding one term after
            another, whatever the magnitudes.  "tf32" permits implementations to round float32
            operands to 10 bits of mantissa for the tensor cores.  "bf16x6" permits implementations
            to split each float32 operand into a sum of three bfloat16 arrays ("planes") for the
            tensor cores.  This loses bits of values below 2^-110 and may turn infinity into NaN.
        impl: "auto", the name of an implementation as ``cupyconv.plan`` prints it, or a Plan of
            this problem.
        out: array for the result, with the result's shape and dtype; it must not share memory with
            the inputs, except as described for ``add``.

    Returns:
        y, (N, K, [[Z,] P,] Q) in ``data_format`` order, with x's dtype and device; or ``out``, if
        passed.  16-bit types are summed in float32 and rounded once.  Nothing is conjugated: a
        complex product is four real products, (a + bi)(c + di) = (ac - bd) + (ad + bc)i, and the
        guarantees of "ieee" hold for the real and the imaginary part.

        NaN and infinity propagate.  If the real or imaginary part of an element is infinite,
        results that read the element have an infinite or NaN part.  Implementations may multiply
        elements of w by the zeros of the padding.  Where an infinite or NaN element of w meets
        padding, y may therefore be NaN.

        If an element of y sums at most a million products, the pass on NumPy arrays takes at most
        64 MB of memory besides its operands, its result and a copy of an ``add`` that is ``out``.
        Each thread keeps this memory for its next pass.

    Raises:
        ConvError: the arguments describe no valid convolution, or ``out`` does not fit the result.
        ConvTypeError: the arrays differ in dtype or device, or have an unsupported dtype or type.
        DeviceError: CuPy or a GPU is required and missing.

    >>> x, w = np.arange(9.0).reshape(1, 1, 3, 3), np.ones((1, 1, 2, 2))
    >>> cupyconv.conv_forward(x, w).tolist()
    [[[[8.0, 12.0], [20.0, 24.0]]]]
    >>> cupyconv.conv_forward(x, w, stride=2, padding="same").shape
    (1, 1, 2, 2)
    >>> shortcut = np.full((1, 1, 2, 2), -20.0)
    >>> cupyconv.conv_forward(x, w, add=shortcut, activation="relu").tolist()
    [[[[0.0, 0.0], [0.0, 4.0]]]]
    """
    if others:
        raise unknown_arguments(conv_forward, others)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    given = (x, w, bias, add)
    return compute("forward", given, None, options, out, impl, precision, activation)


@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    dy: NDArray[Scalar],
    *,
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_How],
) -> NDArray[Scalar]: ...
@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: CuPyArray | PreparedFilter[CuPyArray],
    dy: CuPyArray,
    *,
    out: CuPyArray | None = None,
    **how: Unpack[_How],
) -> CuPyArray: ...
@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: Exporter | PreparedFilter[Any],
    dy: Exporter,
    *,
    out: Exporter | None = None,
    **how: Unpack[_How],
) -> Any: ...
def conv_backprop_input(
    input_shape: Iterable[int],
    w: Any,
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
    **others: Never,
) -> Any:
    """Compute dx, the gradient with respect to the input, from the output gradient dy.

    In 2-D with one group, dx[n, c, i, j] = sum over k, r, s of dy[n, k, p, q] * w[k, c, r, s],
    where p = (i + pad - r * dilation) / stride, and q follows from j and s in the same way.  Terms
    whose p or q is not an integer, or is outside the output, are left out.

    A complex w is conjugated, as in PyTorch's gradients.  For a real loss L, dy is
    dL/d(re y) + i dL/d(im y), and dx is dL/d(re x) + i dL/d(im x).  JAX's gradients are the
    conjugates of these: jax.vjp gives conj(dx) for conj(dy).

    Args:
        input_shape: shape of x.  The shape of dy does not determine it: with stride s, s input
            sizes per axis have the same output size (``ConvProblem.valid_input_sizes``).
        w: filter, in ``filter_format`` order, or a filter from ``prepare``.
        dy: output gradient, (N, K, [[Z,] P,] Q) in ``data_format`` order, with w's dtype and
            device.
        stride, padding, dilation, groups, data_format, filter_format: as in the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dx, of shape ``input_shape``.  NaN and infinity propagate.  Implementations may extend dy by
        zeros, at its borders and in the gaps that the stride leaves between its elements, and
        multiply elements of w by these zeros.  Where an infinite or NaN element of w meets such a
        zero, dx may therefore be NaN.

    Raises:
        ConvError: ``dy`` does not fit ``input_shape`` and ``w``; the message states which input
            sizes fit.
        ConvTypeError, DeviceError: as for ``conv_forward``.

    >>> w, dy = np.ones((1, 1, 2)), np.array([[[1.0, 2.0]]])
    >>> cupyconv.conv_backprop_input((1, 1, 4), w, dy, stride=2).tolist()
    [[[1.0, 1.0, 2.0, 2.0]]]
    >>> cupyconv.conv_backprop_input((1, 1, 5), w, dy, stride=2).tolist()
    [[[1.0, 1.0, 2.0, 2.0, 0.0]]]
    """
    if others:
        raise unknown_arguments(conv_backprop_input, others)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    return compute("backprop_input", (w, dy), input_shape, options, out, impl, precision)


@overload
def conv_backprop_filter(
    x: NDArray[Scalar],
    filter_shape: Iterable[int],
    dy: NDArray[Scalar],
    *,
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_How],
) -> NDArray[Scalar]: ...
@overload
def conv_backprop_filter(
    x: CuPyArray,
    filter_shape: Iterable[int],
    dy: CuPyArray,
    *,
    out: CuPyArray | None = None,
    **how: Unpack[_How],
) -> CuPyArray: ...
@overload
def conv_backprop_filter(
    x: Exporter,
    filter_shape: Iterable[int],
    dy: Exporter,
    *,
    out: Exporter | None = None,
    **how: Unpack[_How],
) -> Any: ...
def conv_backprop_filter(
    x: Any,
    filter_shape: Iterable[int],
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
    **others: Never,
) -> Any:
    """Compute dw, the gradient with respect to the filter, from the output gradient dy.

    In 2-D with one group, dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, i, j],
    where i = p * stride - pad + r * dilation, and j follows from q and s in the same way.
    A complex x is conjugated, as in PyTorch's gradients; see ``conv_backprop_input``.

    Args:
        x: input, in ``data_format`` order.
        filter_shape: shape of w, in ``filter_format`` order.
        dy: output gradient, (N, K, [[Z,] P,] Q) in ``data_format`` order, with x's dtype and
            device.
        stride, padding, dilation, groups, data_format, filter_format: as in the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dw, of shape ``filter_shape``.  NaN and infinity propagate.  Implementations may multiply
        elements of dy by the zeros of the padding.  dw may therefore be NaN at a tap that reads
        padding for an infinite or NaN element of dy.

    Raises:
        ConvError: ``dy`` does not fit ``x`` and ``filter_shape``.
        ConvTypeError, DeviceError: as for ``conv_forward``.

    >>> x, dy = np.array([[[1.0, 2.0, 3.0]]]), np.array([[[1.0, 10.0]]])
    >>> cupyconv.conv_backprop_filter(x, (1, 1, 2), dy).tolist()
    [[[21.0, 32.0]]]
    """
    if others:
        raise unknown_arguments(conv_backprop_filter, others)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    return compute("backprop_filter", (x, dy), filter_shape, options, out, impl, precision)


@overload
def conv_backprop_bias(
    dy: NDArray[Scalar],
    *,
    data_format: DataFormat | None = None,
    out: NDArray[Scalar] | None = None,
) -> NDArray[Scalar]: ...
@overload
def conv_backprop_bias(
    dy: CuPyArray, *, data_format: DataFormat | None = None, out: CuPyArray | None = None
) -> CuPyArray: ...
@overload
def conv_backprop_bias(
    dy: Exporter, *, data_format: DataFormat | None = None, out: Exporter | None = None
) -> Any: ...


def conv_backprop_bias(
    dy: Any, *, data_format: DataFormat | None = None, out: Any = None, **others: Never
) -> Any:
    """Compute db, the gradient with respect to the bias: dy summed over all axes but the channels.

    Args:
        dy: output gradient, (N, K, [[Z,] P,] Q) in ``data_format`` order.
        data_format: as for ConvProblem.
        out: array for the result, of shape (K,), as for ``conv_forward``.

    Returns:
        db, of shape (K,), with dy's dtype and device; or ``out``, if passed.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_forward``.

    >>> cupyconv.conv_backprop_bias(np.ones((2, 3, 4))).tolist()
    [8.0, 8.0, 8.0]
    """
    if others:
        raise unknown_arguments(conv_backprop_bias, others)
    return sum_bias(dy, data_format, out)


@overload
def conv_backward(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    dy: NDArray[Scalar],
    **how: Unpack[_How],
) -> ConvGradients[NDArray[Scalar]]: ...
@overload
def conv_backward(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    dy: NDArray[Scalar],
    *,
    needs: Gradient | Iterable[Gradient],
    **how: Unpack[_How],
) -> ConvGradients[NDArray[Scalar] | None]: ...
@overload
def conv_backward(
    x: CuPyArray, w: CuPyArray | PreparedFilter[CuPyArray], dy: CuPyArray, **how: Unpack[_How]
) -> ConvGradients[CuPyArray]: ...
@overload
def conv_backward(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    dy: CuPyArray,
    *,
    needs: Gradient | Iterable[Gradient],
    **how: Unpack[_How],
) -> ConvGradients[CuPyArray | None]: ...
@overload
def conv_backward(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    dy: Exporter,
    *,
    needs: Gradient | Iterable[Gradient] = ...,
    **how: Unpack[_How],
) -> ConvGradients[Any]: ...
def conv_backward(
    x: Any,
    w: Any,
    dy: Any,
    *,
    needs: Gradient | Iterable[Gradient] = GRADIENTS,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    **others: Never,
) -> ConvGradients[Any]:
    """Compute several gradients of a layer: those in ``needs``, by default all.

    Args:
        x, w: input and filter, as for ``conv_forward``.
        dy: output gradient, as for ``conv_backprop_input``.
        needs: the gradients to compute: one or several of "input", "filter" and "bias".
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``conv_forward``.

    Returns:
        ConvGradients with ``dx``, ``dw`` and ``db``; None for each gradient not in ``needs``.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for the functions that compute one gradient.

    >>> x, w, dy = np.ones((1, 2, 4, 4)), np.ones((3, 2, 3, 3)), np.ones((1, 3, 2, 2))
    >>> dx, dw, db = cupyconv.conv_backward(x, w, dy)
    >>> dx.shape, dw.shape, db.shape
    ((1, 2, 4, 4), (3, 2, 3, 3), (3,))
    """
    if others:
        raise unknown_arguments(conv_backward, others)
    needed = words_of("needs", "gradient in needs", needs, GRADIENTS)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    prepared_filter = w if isinstance(w, PreparedFilter) else None
    plain = w if prepared_filter is None else prepared_filter.array
    (x, w, dy), _, backend = _take(("x", "w", "dy"), (x, plain, dy))
    is_number = x.dtype.kind in "fcV"  # V is the kind of bfloat16
    if needed in ((), ("bias",)) or not (is_number and x.dtype == w.dtype == dy.dtype):
        # The calls below do not check that x, w and dy fit together.
        require_words(None, precision, impl, backend.device)
        layouts = {"x": _Layout.of(x), "w": _Layout.of(w), "dy": _Layout.of(dy)}
        problem_of("backprop_filter", layouts, None, options, _BACKWARD["backprop_filter"])

    def gradient(operation: str, given: tuple[Any, Any], shape: tuple[int, ...]) -> _Call:
        called = _BACKWARD[operation]
        return compute(
            operation, given, shape, options, None, impl, precision, called=called, deferred=True
        )

    dx = dw = db = None
    if "input" in needed:
        dx = gradient("backprop_input", (prepared_filter or w, dy), x.shape)
    if "filter" in needed:
        dw = gradient("backprop_filter", (x, dy), w.shape)
    if "bias" in needed:
        db = sum_bias(dy, data_format, None, deferred=True)
    calls = [call for call in (dx, dw, db) if call is not None]
    backend.load(call.run for call in calls)
    for call in calls:
        call.run(call.tensors)
    return ConvGradients(*(None if call is None else call.result for call in (dx, dw, db)))


@overload
def conv_transpose(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    bias: NDArray[Scalar] | None = None,
    *,
    add: NDArray[Scalar] | None = None,
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_Transpose],
) -> NDArray[Scalar]: ...
@overload
def conv_transpose(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    bias: CuPyArray | None = None,
    *,
    add: CuPyArray | None = None,
    out: CuPyArray | None = None,
    **how: Unpack[_Transpose],
) -> CuPyArray: ...
@overload
def conv_transpose(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    *,
    add: Exporter | None = None,
    out: Exporter | None = None,
    **how: Unpack[_Transpose],
) -> Any: ...
def conv_transpose(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    output_shape: Iterable[int] | None = None,
    output_padding: Size | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    activation: Activation | None = None,
    add: Any = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
    **others: Never,
) -> Any:
    """Compute activation(t + bias + add), where t is the transposed convolution of x with w.

    The underlying convolution maps arrays of the result's shape to arrays of x's shape.  t is what
    ``conv_backprop_input`` returns for this convolution and dy = x, except that a complex w is not
    conjugated.

    Args:
        x: array with the shape of the underlying convolution's output, (N, K, [[Z,] P,] Q) in
            ``data_format`` order.
        w: filter of the underlying convolution, or a filter from ``prepare``.  Its O axis has x's
            channels, and its I axis has the result's channels divided by groups.  The order "OIHW"
            is PyTorch's (in_channels, out_channels / groups, ...), and "HWIO" is Keras's
            (..., out_channels, in_channels).
        bias: vector with one value per channel of the result, of shape (C,), with x's dtype and
            device.
        output_shape: shape of the result.
        output_padding: alternative to ``output_shape``: size of the result minus the smallest size
            that fits x, per spatial axis.  With a stride above 1, several sizes fit.  The default
            is 0, as in PyTorch.  With padding "same" or "same_lower", the default is stride - 1,
            which makes the result ``stride`` times as large as x, as in Keras and JAX.
            output_padding must be less than the stride or the dilation; with these two paddings, it
            must be less than the stride.  If output_padding is at least the stride, x is copied and
            extended by zeros.  With padding "valid" and a filter smaller than the
            stride, JAX and Keras return ``stride`` times x's size; to get this size, pass the
            stride minus the filter's size.
        stride, padding, dilation, groups, data_format, filter_format: parameters of the underlying
            convolution.
        activation, add, precision, impl, out: as for ``conv_forward``.

    Returns:
        The result, (N, C, [[D,] H,] W) in ``data_format`` order; or ``out``, if passed.  Results of
        16-bit types are rounded once, after bias, ``add`` and activation.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_backprop_input``.

    >>> x, w = np.array([[[1.0, 2.0]]]), np.array([[[1.0, 10.0]]])
    >>> cupyconv.conv_transpose(x, w, stride=2).tolist()
    [[[1.0, 10.0, 2.0, 20.0]]]
    >>> cupyconv.conv_transpose(x, w, stride=2, output_padding=1).tolist()
    [[[1.0, 10.0, 2.0, 20.0, 0.0]]]
    """
    if others:
        raise unknown_arguments(conv_transpose, others)
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    sizes = (output_shape, output_padding)
    given = (w, x, bias, add)
    return compute("transpose", given, sizes, options, out, impl, precision, activation)


@naming_arguments
def prepare(
    w: _Array,
    problem: ConvProblem,
    *,
    passes: str | Iterable[str] = FILTER_PASSES,
    precision: Precision = "ieee",
    impl: str | Plan = "auto",
) -> PreparedFilter[_Array]:
    """Copy a filter once to the memory order that GPU kernels read, for use in many calls.

    Some kernels read w with its channels last, or as three bfloat16 arrays (precision "bf16x6").
    Without ``prepare``, they copy w at every call.  In large layers of 16-bit types, or with
    precision "tf32", GPUs of compute capability 9.0 copy a filter with its spatial axes last, such
    as OIHW; other GPUs do so in some large layers.  The calls run the same kernels as without
    ``prepare`` and return the same bits.

    Args:
        w: filter in the problem's format, as for ``conv_forward``.  The PreparedFilter refers to w:
            do not change w while the PreparedFilter is in use, and call ``prepare`` again after a
            change.  Keep the PreparedFilter as long as a CUDA graph exists that captured a call
            with it.
        problem: the layer.  The calls may have inputs of other sizes and batches.  If other kernels
            are planned for these inputs, they may copy w at every call.
        passes: "forward", "backprop_input" or both; ``conv_transpose`` uses "backprop_input".
        precision, impl: arguments of the calls, as for ``conv_forward``.

    Returns:
        PreparedFilter, which the functions of cupyconv, ``cupyconv.onnx`` and ``cupyconv.cudnn``
        accept as w.  A NumPy array is not copied.

    Raises:
        ConvError: w does not have the shape and dtype of the problem's filter; an option value is
            unknown; a graph is being captured; or as for ``plan``.
        ConvTypeError, DeviceError: as for ``conv_forward``.

    >>> problem = cupyconv.ConvProblem((1, 2, 4, 4), (3, 2, 3, 3))
    >>> prepared = cupyconv.prepare(np.ones(problem.filter_shape, "float32"), problem)
    >>> cupyconv.conv_forward(np.ones(problem.input_shape, "float32"), prepared).shape
    (1, 3, 2, 2)
    """
    require_problem("prepare", problem)
    require_words(None, precision, impl)
    names = words_of("passes", "pass that reads a filter", passes, FILTER_PASSES)
    (array,), _, backend = _take(("w",), (w,))
    if backend.is_capturing():
        raise ConvError(
            "a filter must be prepared before a graph is captured",
            "the current stream is capturing a graph, which copies the filter only when launched",
            "Call cupyconv.prepare before the capture, and keep its result while the graph exists",
        )
    layout = _Layout.of(array)
    dtype = _common_dtype({"w": layout})
    if (layout.shape, dtype) != (problem.filter_shape, problem.dtype):
        raise ConvError(
            "w must have the shape and dtype of the problem's filter",
            f"w is {shape_text(layout.shape) or 'a scalar'} {dtype}, the problem's filter is "
            f"{shape_text(problem.filter_shape)} {problem.dtype}",
            "Pass the filter of this problem, or problem.replace(filter_shape=..., dtype=...)",
        )
    strides = replace(
        Strides.contiguous(problem),
        w=_elements("w", layout),
        alignment=backend.alignment((array,)),
    )
    limit, forms = cupyconv.workspace_limit, {}
    for pass_ in names:
        request = Request(problem, pass_, backend.device, precision, limit, strides)
        form = backend.filter_form(chosen(request, impl), problem, strides)
        if form is not None and form.name not in forms:
            forms[form.name] = backend.arrange(form, array)
    return PreparedFilter(array, forms, problem, backend.device, names, precision)


@naming_arguments
def plan(
    problem: ConvProblem,
    device: str | Device | None = None,
    impl: Impl = "auto",
    precision: Precision = "ieee",
    workspace_limit: int | None = None,
    measure: bool = False,
) -> Plan:
    """Choose an implementation for each pass of a problem; needs no data and no GPU.

    Pass the result, or a plan from ``Plan.from_json``, to other functions as ``impl``.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device; by default the current GPU,
            or the CPU if there is no GPU.
        impl: "auto", or the name of the implementation to use for all three passes.
        precision: permitted precision: "ieee", "tf32" or "bf16x6", as for ``conv_forward``.
        workspace_limit: largest number of bytes of device memory that a pass may use besides its
            tensors; by default ``cupyconv.workspace_limit``.
        measure: whether to time the most promising kernels on the current GPU and choose the
            fastest, instead of the kernel with the shortest estimated time.  Stored measurements
            are reused.

    Raises:
        ConvError: the device or implementation is unknown; the implementation does not support the
            problem; or ``measure`` is true and the device is not the current GPU.
        DeviceError: ``measure`` is true and there is no GPU.

    >>> problem = cupyconv.ConvProblem((32, 64, 56, 56), (64, 64, 3, 3))
    >>> plan = cupyconv.plan(problem, "sm_80", impl="cuda-generic")
    >>> plan["forward"].implementation, [p.pass_ for p in plan]
    ('cuda-generic', ['forward', 'backprop_input', 'backprop_filter'])
    """
    require_problem("plan", problem)
    require_words(None, precision, impl)
    limit = cupyconv.workspace_limit if workspace_limit is None else workspace_limit
    require_limit(limit)
    if measure:
        return _measured_plan(problem, device, impl, precision, limit)
    chosen = backends.current_device() if device is None else device
    return _plan(problem, chosen, impl, precision, limit)


def _measured_plan(
    problem: ConvProblem,
    device: str | Device | None,
    impl: str,
    precision: str,
    workspace_limit: int | None,
) -> Plan:
    backend = backends.of(arrays.Home.GPU)
    here = backend.device
    if device is not None and Device.of(device).architecture != here.architecture:
        raise ConvError(
            "the measured device must be the current GPU",
            f"the current GPU is {here.name} ({here.architecture}), the requested device is "
            f"{Device.of(device).name}",
            "Leave out device, or use measure=False",
        )
    if backend.is_capturing():
        raise ConvError(
            "nothing can be measured while a graph is captured",
            "plan was called with measure=True",
            "Call it before the capture",
        )
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    tensors = Tensors(*(backend.empty(shape, problem.dtype) for shape in shapes))
    for array in (tensors.x, tensors.w, tensors.y):
        array.fill(1)
    strides = Strides.contiguous(problem)

    def prepare(planned: PassPlan) -> Run:
        return backend.prepare(planned, problem, strides)

    def fastest(pass_: str) -> PassPlan:
        request = Request(problem, pass_, here, precision, workspace_limit, strides)
        return _fastest(request, impl, backend, prepare, tensors)

    return Plan(problem, here, tuple(fastest(pass_) for pass_ in PASSES))


# -- running ---------------------------------------------------------------------------------------

# Arrays of each operation that have the roles of x, w and y in its pass; "out" is the result.  The
# pass has the operation's name, except that "transpose" runs the pass "backprop_input".
_ROLES = {
    "forward": ("x", "w", "out"),
    "backprop_input": ("out", "w", "dy"),
    "backprop_filter": ("x", "out", "dy"),
    "transpose": ("out", "w", "x"),
}
_ARRAYS = {
    "forward": ("x", "w", "bias", "add"),
    "backprop_input": ("w", "dy"),
    "backprop_filter": ("x", "dy"),
    "transpose": ("w", "x", "bias", "add"),
}
"""Arrays that each operation takes, keyed by operation."""

_OPTIONAL = ("bias", "add")
"""Arrays that a call may leave out."""


class Called(NamedTuple):
    """Names that errors use for an operation's arrays.

    Attributes:
        given: names of the arrays, in the order of _ARRAYS.
        out: name of the array for the result.
        tensors: names of the problem's tensors and arguments.
        sizes: tensors that the caller passes as shapes instead of arrays; None for those in _SIZES.
    """

    given: tuple[str, ...]
    out: str = "out"
    tensors: Names = Names()
    sizes: tuple[str, ...] | None = None


_CALLED = {operation: Called(given) for operation, given in _ARRAYS.items()}
_BACKWARD = {operation: called._replace(sizes=()) for operation, called in _CALLED.items()}
"""Names of the arrays of ``conv_backward``, which takes no tensor as a shape."""

_CALLED["transpose"] = Called(_ARRAYS["transpose"], tensors=TRANSPOSED)

_SIZES = {
    "forward": (),
    "backprop_input": ("input_shape",),
    "backprop_filter": ("filter_shape",),
    "transpose": ("input_shape",),
}
"""Tensors that each operation takes as shapes, not arrays, by their names in ConvProblem."""

_PLAIN = frozenset((int, str, type(None)))
"""Types of argument values that a cache key contains without their type.

For a value of another type, the key also contains the type: True equals 1, but is not valid
wherever 1 is.
"""


class _Layout(NamedTuple):
    """Shape, strides and dtype of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @staticmethod
    def of(array: Any) -> _Layout:
        return _Layout(array.shape, array.strides, array.dtype)


class _CallKey(NamedTuple):
    """Everything that a _Ready depends on; the addresses of the arrays are not part of it.

    Attributes:
        operation, called, shape, options, impl, precision, activation: as for ``compute``.
        given: pairs of an array's name in _ARRAYS and its (shape, strides, dtype).
        out: (shape, strides, dtype) of the array for the result; None if it is not passed.
        alignment: largest power of two, up to 16, that divides the arrays' addresses in bytes.
        argument_types: types of the values in shape and options, from ``_argument_types``.
        choice_types: types of impl, precision, activation and workspace_limit.
        backend: backend of the arrays' device.
        workspace_limit: largest workspace in bytes; None for no limit.
        prepared_filter: calls that the filter from ``prepare`` supports; None for a plain filter.
        conjugates: whether backprop_input conjugates a complex filter.
    """

    operation: str
    called: Called
    given: tuple[tuple[str, tuple[Any, ...]], ...]
    out: tuple[Any, ...] | None
    alignment: int
    shape: Any
    options: ConvOptions
    argument_types: Any
    choice_types: tuple[type, ...]
    impl: Impl | Plan
    precision: str
    activation: str | None
    backend: Backend
    workspace_limit: int | None
    prepared_filter: Belonging | None
    conjugates: bool


class _Call(NamedTuple):
    """A validated and planned call with its arrays; ``run(tensors)`` computes ``result``."""

    run: Run
    tensors: Tensors
    result: Any


@dataclass
class _Ready:
    """A validated and planned call without its arrays.

    Calls that differ only in the addresses of their arrays share a _Ready.

    Attributes:
        problem: the configuration.
        shape: shape of the result.
        run: function that computes the pass with the planned kernels.
        measure: function that times the candidate kernels on tensors and returns a function that
            computes the pass with the fastest.
        measured: the function that ``measure`` returned; None before the measurement.
    """

    problem: ConvProblem
    shape: tuple[int, ...]
    run: Run
    measure: Callable[[Tensors], Run]
    measured: Run | None = None

    def fastest(self, tensors: Tensors) -> Run:
        """Return the function that runs the fastest candidate, after the measurement if needed."""
        if self.measured is None:
            self.measured = self.measure(tensors)
        return self.measured


def compute(
    operation: str,
    given: tuple[Any, ...],
    shape: Any,
    options: ConvOptions,
    out: Any,
    impl: Impl | Plan = "auto",
    precision: str = "ieee",
    activation: str | None = None,
    measure: bool | None = None,
    conjugates: bool = False,
    called: Called | None = None,
    deferred: bool = False,
) -> Any:
    """Run an operation, for this module's functions and other interfaces such as ``raw_ops``.

    Most calls repeat an earlier call with other data.  To keep the Python code of such a call as
    fast as the kernel launch, all slow steps are in ``_ready``, and its results are cached.

    Args:
        operation: name of the operation, a key of _ARRAYS.
        given: arrays of the operation, in the order of _ARRAYS; None for a missing optional array.
        shape: shape of the tensor that is not passed as an array, such as ``input_shape`` of
            ``conv_backprop_input``; for "transpose", the pair of output_shape and output_padding.
        options: stride, padding, dilation, groups and formats, as the user passed them.
        out, impl, precision, activation: as for ``conv_forward``.
        measure: whether to time the candidate kernels on a GPU and use the fastest; by default
            ``cupyconv.benchmark``.
        conjugates: whether a transposed convolution conjugates its filter, as a gradient does.
        called: names of the arrays in errors; by default those in _ARRAYS, and ``out``.
        deferred: whether to return a _Call that the caller runs, instead of the result.
    """
    called = called or _CALLED[operation]
    prepared_filter = None
    roles: list[str] = []
    names: list[str] = []
    passed: list[Any] = []
    for role, name, array in zip(_ARRAYS[operation], called.given, given, strict=False):
        if array is None and role in _OPTIONAL:
            continue
        if role == "w" and type(array) is PreparedFilter:
            prepared_filter, array = array, array.array
        roles.append(role)
        names.append(name)
        passed.append(array)
    taken, home, backend = _take(names, tuple(passed))
    tensors = dict(zip(roles, taken, strict=True))
    # A transposed convolution does not conjugate its filter, but backprop_input does.  The pass
    # therefore gets the conjugate of w, a new array.
    unconjugated = operation == "transpose" and tensors["w"].dtype.kind == "c" and not conjugates
    layouts, addressed = [], []
    for role, array in tensors.items():
        layout = (array.shape, array.strides, array.dtype)
        if role == "w" and unconjugated:
            layout = _contiguous_layout(*layout)
        elif role != "bias":
            addressed.append(array)
        layouts.append((role, layout))
    result = out_layout = None
    if out is not None:
        inputs = dict(zip(names, taken, strict=True))
        add_name = names[roles.index("add")] if "add" in tensors else ""
        inputs.pop(add_name, None)
        result = _take_out(called.out, out, inputs, home, backend)
        if add_name:
            tensors["add"] = _take_add(add_name, tensors["add"], called.out, result, home)
        addressed.append(result)
        out_layout = (result.shape, result.strides, result.dtype)
    argument_types = _argument_types(shape, options)
    key = (  # the fields of a _CallKey; a plain tuple is faster to construct
        operation,
        called,
        tuple(layouts),
        out_layout,
        backend.alignment(addressed),
        shape,
        options,
        argument_types,
        tuple(map(type, (impl, precision, activation, cupyconv.workspace_limit))),
        impl,
        precision,
        activation,
        backend,
        cupyconv.workspace_limit,
        None if prepared_filter is None else prepared_filter.belonging,
        not unconjugated,
    )
    ready = _ready_from_lists(key) if argument_types == [] else _from_cache(_ready, key)
    measure = cupyconv.benchmark if measure is None else measure
    measured = measure and backend.device.is_gpu and not isinstance(impl, Plan)
    if measured and ready.measured is None and backend.is_capturing():
        ready.fastest(Tensors(None, None, None))  # raises an error if no measurement is stored
    if result is None:
        result = backend.empty(ready.shape, ready.problem.dtype)
    if "add" in tensors:
        tensors["add"] = backend.addend(tensors["add"], result)
    if prepared_filter is not None and not unconjugated:
        tensors["w"] = prepared_filter
    tensors["out"] = result
    if operation == "transpose" and (
        unconjugated or tensors["x"].shape != ready.problem.output_shape
    ):
        _transpose(ready, tensors, unconjugated, measured, backend)
    else:
        operands = _operands(operation, tensors)
        run = ready.fastest(operands) if measured else ready.run
        if deferred:
            return _Call(run, operands, result)
        run(operands)
    return result if out is None or type(out) in arrays.HOMES else _written_to(out)


def _operands(operation: str, tensors: Mapping[str, Any]) -> Tensors:
    """Return an operation's arrays, keyed by name, in the roles that they have in its pass."""
    x, w, y = _ROLES[operation]
    return Tensors(tensors[x], tensors[w], tensors[y], tensors.get("bias"), tensors.get("add"))


def _transpose(
    ready: _Ready,
    tensors: dict[str, Any],
    unconjugated: bool,
    measured: bool,
    backend: Backend,
) -> None:
    """Compute a transposed convolution, copying the arrays that its pass cannot use directly.

    Args:
        ready: the validated and planned call.
        tensors: arrays of the call, keyed by name, with the result as "out".
        unconjugated: whether to pass the conjugate of the filter to the pass, which conjugates it
            again.
        measured: whether to time the candidate kernels and use the fastest.
        backend: backend that computes.
    """

    def compute_from_copies() -> None:
        w, x = tensors["w"], tensors["x"]
        if unconjugated:
            conjugate = backend.conjugate(w)
            w = w if conjugate is None else conjugate
        if x.shape != ready.problem.output_shape:
            # output_padding adds windows that have no element of x; they get zeros.
            x = backend.extended(x, ready.problem.output_shape)
        operands = _operands("transpose", {**tensors, "w": w, "x": x})
        run = ready.fastest(operands) if measured else ready.run
        run(operands)

    try:
        compute_from_copies()
    except BaseException as error:
        # The error's traceback keeps this call's frames, which keep the copies.  Copies made during
        # a graph capture must be freed before the capture ends.
        traceback.clear_frames(error.__traceback__)
        raise


def _contiguous_layout(shape: tuple[int, ...], strides: Any, dtype: Any) -> tuple[Any, ...]:
    """Return the layout of a contiguous array of this shape."""
    steps = contiguous_strides(shape)
    return shape, tuple(step * dtype.itemsize for step in steps), dtype


def _argument_types(shape: Any, options: ConvOptions) -> Any:
    """Return the types of integers other than int, such as bool, in the arguments of a call.

    In a cache key, these types distinguish True, which is rejected, from 1, which equals it.

    Returns:
        A tuple of types; or an empty list if an argument, or an item of a tuple, is not an integer,
        a string or None.  Such a value, for example an array, may be mutable and must not be part
        of a key.
    """
    types, values = [], [shape, *options]
    for value in values:
        if type(value) is tuple:
            values += value
        elif type(value) not in _PLAIN:
            if not isinstance(value, Integral):
                return []
            types.append(type(value))
    return tuple(types)


def _ready_from_lists(call: tuple[Any, ...]) -> _Ready:
    """Look up a call in the cache with its lists replaced by tuples, which are hashable."""
    key = _CallKey._make(call)

    def frozen(value: Any, depth: int = 2) -> Any:  # no argument contains more levels of lists
        if depth and isinstance(value, list | tuple):
            return tuple(frozen(item, depth - 1) for item in value)
        return value

    shape, options = frozen(key.shape), ConvOptions._make(map(frozen, key.options))
    types = _argument_types(shape, options)
    if types != []:
        with suppress(ConvError, ConvTypeError):
            changed = key._replace(shape=shape, options=options, argument_types=types)
            return _from_cache(_ready, changed)
    return _ready.__wrapped__(key)  # errors then show the lists, as the caller wrote them


@lru_cache(maxsize=4096)
def _ready(call: tuple[Any, ...]) -> _Ready:
    """Validate and prepare a call; the result is cached.

    Args:
        call: fields of a _CallKey.

    Raises:
        ConvError, ConvTypeError: the call is invalid.  The caller has checked the arrays' devices.
    """
    key = _CallKey._make(call)
    operation, called, impl, backend = key.operation, key.called, key.impl, key.backend
    require_words(key.activation, key.precision, impl, backend.device)
    layouts = {role: _Layout._make(layout) for role, layout in key.given}
    if key.out is not None:
        layouts["out"] = _Layout._make(key.out)
    problem = problem_of(operation, layouts, key.shape, key.options, called)
    require_activation(key.activation, problem)
    pass_ = "backprop_input" if operation == "transpose" else operation
    result_shape = _result_shape(operation, problem)
    if operation == "transpose" and layouts["x"].shape != problem.output_shape:
        # The pass reads a copy of x, extended by zeros for the windows that output_padding adds.
        x_layout = _contiguous_layout(problem.output_shape, None, layouts["x"].dtype)
        layouts["x"] = _Layout._make(x_layout)
    strides = None
    if backend.device.is_gpu:
        error_names = _error_names(operation, called)
        strides = _strides(operation, problem, layouts, key.alignment, error_names)
    request = Request(problem, pass_, backend.device, key.precision, key.workspace_limit, strides)
    prepared_filter = key.prepared_filter
    if prepared_filter is not None:
        prepared_filter.require(request)
    planned = chosen(request, impl)
    epilogue = Epilogue(key.activation, "add" in layouts)

    def prepare(planned: PassPlan) -> Run:
        if prepared_filter is None:
            return backend.prepare(planned, problem, strides, epilogue, None, key.conjugates)
        form = backend.filter_form(planned, problem, strides)
        if form is not None and form.name not in prepared_filter.forms:
            form = None  # the pass copies w at each call, as without ``prepare``
        name = None if form is None else form.name
        run = backend.prepare(planned, problem, strides, epilogue, form, key.conjugates)

        def run_on_copy(tensors: Tensors) -> None:
            w = tensors.w.read_as(name) if type(tensors.w) is PreparedFilter else tensors.w
            run(tensors._replace(w=w))

        return run_on_copy

    def measure(tensors: Tensors) -> Run:
        assert isinstance(impl, str)
        result = tensors[_ROLES[operation].index("out")]
        if tensors.add is not result or result is None:
            return prepare(_fastest(request, impl, backend, prepare, tensors))
        original = backend.empty(result.shape, problem.dtype)  # timed calls overwrite add (= out)
        backend.copy(original, result)
        try:
            return prepare(_fastest(request, impl, backend, prepare, tensors))
        finally:
            backend.copy(result, original)

    return _Ready(problem, result_shape, prepare(planned), measure)


def chosen(request: Request, impl: str | Plan) -> PassPlan:
    """Return the plan of a pass, from the planner or from a Plan that is passed as ``impl``."""
    if isinstance(impl, Plan):
        return impl.replay(request)
    return plan_pass(
        request.problem,
        request.pass_,
        request.device,
        impl,
        request.precision,
        request.workspace_limit,
        request.strides,
    )


def _fastest(
    request: Request,
    impl: str,
    backend: Backend,
    prepare: Callable[[PassPlan], Run],
    tensors: Tensors,
) -> PassPlan:
    """Time the candidates for a pass, each prepared once, and return the plan of the fastest."""
    run_of = cache(prepare)
    return measuring.fastest(
        request,
        impl,
        lambda planned: run_of(planned)(tensors),
        lambda candidates: backend.load(map(run_of, candidates)),
    )


def sum_bias(
    dy: Any, data_format: str | None, out: Any, called: str = "dy", deferred: bool = False
) -> Any:
    """Compute ``conv_backprop_bias``, also for other interfaces such as ``raw_ops``.

    Args:
        dy, data_format, out: as for ``conv_backprop_bias``.
        called: name of dy in errors.
        deferred: whether to return a _Call that the caller runs, instead of the result.
    """
    (dy,), home, backend = _take((called,), (dy,))
    result = None if out is None else _take_out("out", out, {called: dy}, home, backend)
    out_layout = None if result is None else _Layout.of(result)
    place = backend, backend.alignment((dy,)), cupyconv.workspace_limit
    call = (called, _Layout.of(dy), out_layout, data_format, *place)
    shape, dtype, run = _from_cache(_ready_bias, *call)
    if result is None:
        result = backend.empty(shape, dtype)
    tensors = Tensors(None, None, dy, result)
    if deferred:
        return _Call(run, tensors, result)
    run(tensors)
    return result if out is None or type(out) in arrays.HOMES else _written_to(out)


@lru_cache(maxsize=4096, typed=True)
def _ready_bias(
    called: str,
    dy: _Layout,
    out: _Layout | None,
    data_format: DataFormat | None,
    backend: Backend,
    alignment: int,
    workspace_limit: int | None,
) -> tuple[tuple[int, ...], str, Run]:
    """Return the shape and dtype of db, and the function that computes it."""
    require_limit(workspace_limit)
    problem = bias_problem(called, dy.shape, data_format, _common_dtype({called: dy}))
    if out is not None:
        _require_out("out", out, problem.bias_shape, problem.dtype)
    strides = None
    if backend.device.is_gpu:  # NumPy supports any strides
        step = 1 if out is None else _elements("out", out)[0]
        strides = Strides.of_sum(_elements(called, dy), step, alignment)
    run = backend.prepare_bias(problem, strides, workspace_limit)
    return problem.bias_shape, problem.dtype, run


def _from_cache(function: Any, *arguments: Any) -> Any:
    """Call a cached function; bypass the cache if an argument is not hashable, such as a list."""
    try:
        return function(*arguments)
    except ConvTypeError:
        raise
    except TypeError:
        return function.__wrapped__(*arguments)


def _error_names(operation: str, called: Called) -> dict[str, str]:
    """Return the names of the arrays in errors, keyed by their names in _ARRAYS."""
    return {**dict(zip(_ARRAYS[operation], called.given, strict=False)), "out": called.out}


def problem_of(
    operation: str,
    layouts: Mapping[str, Any],
    shape: Any,
    options: ConvOptions,
    called: Called | None = None,
) -> ConvProblem:
    """Return the problem of a call, after checking that the arrays fit it.

    Args:
        operation, shape, options, called: as for ``compute``.
        layouts: arrays, or other objects with shape and dtype, keyed by their names in _ARRAYS; and
            the array for the result as ``out``.
    """
    called = called or _CALLED[operation]
    error_names, names = _error_names(operation, called), called.tensors
    dtype = _common_dtype(
        {error_names.get(name, name): array for name, array in layouts.items() if name != "out"}
    )
    transposed = operation == "transpose"
    shapes = {name: array.shape for name, array in layouts.items()}
    call = {
        "input_shape": shapes.get("x", shape),
        "filter_shape": shapes.get("w", shape),
        "output_shape": shapes.get("dy"),
        "bias_shape": shapes.get("bias"),
        **options._asdict(),
        "dtype": dtype,
    }
    if transposed:
        call |= {"output_shape": shapes["x"], "input_shape": shape[0], "output_padding": shape[1]}

    def require(bias_shape: tuple[int, ...] | None, output_shape: Any, **layer: Any) -> ConvProblem:
        if transposed:
            problem = transposed_problem(names, output_shape, **layer)
        else:
            problem = named_problem(names, **layer)
            if output_shape is not None:
                require_output(names, problem, output_shape)
        if bias_shape is not None:
            channels, owner = (problem.C, names.x) if transposed else (problem.K, names.w)
            require_bias(error_names["bias"], bias_shape, channels, owner)
        return problem

    def require_results(problem: ConvProblem) -> None:
        result_shape = _result_shape(operation, problem)
        if "add" in layouts:
            require_add(error_names["add"], layouts["add"].shape, result_shape)
        if "out" in layouts:
            _require_out(called.out, layouts["out"], result_shape, problem.dtype)

    sizes = _SIZES[operation] if called.sizes is None else called.sizes
    try:
        problem = offering(require, names, call, sizes, require_results)
    except ConvError as error:
        if error.fixes or called.out != "out" or not {"add", "out"} & layouts.keys():
            raise
        problem = None
    if problem is None:  # no fix fits add and out, so offer fixes that require another add or out
        problem = offering(require, names, call, sizes)
    require_results(problem)
    return problem


def _result_shape(operation: str, problem: ConvProblem) -> tuple[int, ...]:
    """Return the shape of an operation's result."""
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    return shapes[_ROLES[operation].index("out")]


def _strides(
    operation: str,
    problem: ConvProblem,
    layouts: Mapping[str, _Layout],
    alignment: int,
    error_names: Mapping[str, str],
) -> Strides:
    """Return the element strides of a pass's tensors; a result without ``out`` is contiguous."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    x, w, y = (
        _elements(error_names[name], layouts[name])
        if name in layouts
        else contiguous_strides(shape)
        for name, shape in zip(_ROLES[operation], shapes, strict=True)
    )
    bias = _elements(error_names["bias"], layouts["bias"])[0] if "bias" in layouts else 1
    return Strides(x, w, y, bias, alignment)


def _elements(name: str, layout: _Layout) -> tuple[int, ...]:
    try:
        return element_strides(layout)
    except ValueError as error:
        raise ConvTypeError(f"{name}: {error}. Pass a contiguous copy of it") from None


def bias_problem(
    called: str, dy_shape: tuple[int, ...], data_format: DataFormat | None, dtype: Any
) -> ConvProblem:
    """Return a 1x1 depthwise layer whose output has the shape of dy.

    Every layer with this output has the same db.
    """
    rank = len(dy_shape) - 2
    options = ConvOptions(data_format=data_format)
    if rank in formats.SPATIAL_AXES:  # else, named_problem raises an error
        layout = formats.resolve_data_format(data_format, rank)
        for letter, size in zip(layout, dy_shape, strict=True):
            if letter != "N" and size < 1:
                raise ConvError(
                    "every size but the batch must be at least 1",
                    f"{called} has {letter} = {size}",
                    f"Use positive sizes: {called} {shape_text(dy_shape)} was read as {layout}",
                )
        channels = dy_shape[formats.data_axes(layout)[1]]
        options = ConvOptions(1, 0, 1, channels, layout, formats.filter_formats(rank)[0])
    w_shape = (options.groups, 1, *[1] * rank)
    return named_problem(Names(x=called), dy_shape, w_shape, dtype=dtype, **options._asdict())


# -- checking --------------------------------------------------------------------------------------


def require_words(
    activation: str | None, precision: str, impl: str | Plan, device: Device | None = None
) -> None:
    """Check that activation and precision are valid, and that ``impl`` is a string or a Plan.

    Args:
        activation, precision, impl: as for ``conv_forward``.
        device: device whose implementations the error lists; None if it is not known yet.
    """
    require_word("activation", activation, ACTIVATIONS)
    require_word("precision", precision, PRECISIONS)
    if not isinstance(impl, (str, Plan)):
        known = get_args(Impl) if device is None else implementations(device.is_gpu)
        raise unknown_word("impl", impl, known)


def require_activation(activation: str | None, problem: ConvProblem) -> None:
    """Check that a problem with a complex dtype has no activation."""
    if problem.is_complex and activation is not None:
        raise ConvError(
            "an activation must be applied to real numbers",
            f"got {activation!r} with {problem.dtype}",
            "Apply it to a real array, such as the magnitude: numpy.abs(y)",
        )


def _take(
    names: Sequence[str], given: tuple[Any, ...]
) -> tuple[tuple[Any, ...], arrays.Home, Backend]:
    """Return the arguments as arrays, their kind of device, and its backend.

    Raises:
        ConvTypeError: an argument is not an array, or is on another device than the first argument
            or the current GPU.
    """
    kind = type(given[0])
    home = arrays.HOMES.get(kind)
    for value in given:
        if home is None or type(value) is not kind:
            given, home = _take_all(names, given)
            break
    assert home is not None
    backend = backends.of(home)
    if backend.ordinal is not None:
        _require_current_device(names, given, backend.ordinal)
    return given, home, backend


def take_filter(w: Any) -> Any:
    """Return a filter as an array; a prepared filter, which also has shape and dtype, unchanged."""
    return w if isinstance(w, PreparedFilter) else arrays.take("w", w)[0]


def _take_all(names: Sequence[str], given: tuple[Any, ...]) -> tuple[tuple[Any, ...], arrays.Home]:
    """Return objects of any supported type as arrays, and their common kind of device."""
    converted = [arrays.take(name, value) for name, value in zip(names, given, strict=False)]
    homes = [home for _, home in converted]
    if homes.count(homes[0]) < len(homes):
        where = ", ".join(
            f"{name} is a {home.value} array" for name, home in zip(names, homes, strict=False)
        )
        raise ConvTypeError(
            f"all arrays must be on one device: {where}. "
            "Move them with cupy.asarray(...) or cupy.asnumpy(...)"
        )
    values = dict(zip(names, given, strict=False))
    dtypes = {name: array.dtype for name, (array, _) in zip(names, converted, strict=False)}
    # The conversion that an error suggests depends on the array's library, known only here.
    shared_dtype(dtypes, lambda name, dtype: foreign.conversion(name, values[name], dtype))
    return tuple([array for array, _ in converted]), homes[0]


def _common_dtype(layouts: Mapping[str, Any]) -> str:
    return shared_dtype({name: layout.dtype for name, layout in layouts.items()})


def require_bias(name: str, shape: tuple[int, ...], channels: int, owner: str) -> None:
    """Check the shape of a bias.

    Args:
        name: name of the bias in errors.
        shape: shape of the bias.
        channels: number of output channels, which the bias must have.
        owner: name of the tensor that determines ``channels``, in errors.

    Raises:
        ConvError: the bias has another shape.
    """
    if shape != (channels,):
        raise ConvError(
            "the bias must have one value for each output channel",
            f"{name} has shape {shape}, {owner} has {channels} output channels",
            f"Pass a bias of shape ({channels},)",
            candidates=[Fix({"bias_shape": (channels,)}, (f"pass a bias of shape ({channels},)",))],
        )


def require_add(name: str, shape: tuple[int, ...], result: tuple[int, ...]) -> None:
    """Check that an addend, called ``name`` in errors, has the shape of the result.

    Raises:
        ConvError: the addend has another shape.
    """
    if shape != result:
        raise ConvError(
            f"{name} must have the result's shape",
            f"{name} is {shape_text(shape) or 'a scalar'}, the result is {shape_text(result)}",
            f"Pass {name} with shape {result}",
        )


def _take_add(name: str, add: Any, called: str, out: Any, home: arrays.Home) -> Any:
    """Return ``out`` if the addend is the same array, else the addend.

    Raises:
        ConvError: the addend is another array, but shares memory with ``out``.
    """
    if arrays.are_same(add, out, home):
        return out
    if arrays.overlap(add, out, home):
        raise ConvError(
            f"{name} must be {called} itself or share no memory with it",
            f"{name} shares memory with {called}, but has another address, shape or strides",
            f"Pass a copy of {name}",
        )
    return add


def _require_current_device(names: Sequence[str], given: Sequence[Any], current: int) -> None:
    for position, array in enumerate(given):
        device = array.data.device_id
        if device != current:
            raise ConvTypeError(
                f"all arrays must be on the current device: {names[position]} is on device "
                f"{device}, the current device is {current}. "
                f"Compute under `with cupy.cuda.Device({device}):`"
            )


def _take_out(
    called: str,
    out: Any,
    inputs: Mapping[str, Any],
    home: arrays.Home,
    backend: Backend,
) -> Any:
    """Return ``out`` as a NumPy or CuPy array, after checking that the result may be written to it.

    Args:
        inputs: arrays that must not share memory with ``out``, by their names in errors.
    """
    array, out_home = arrays.take_out(called, out)
    if out_home is not home:
        raise ConvTypeError(
            f"{called} must be on the inputs' device: {called} is a {out_home.value} array, the "
            f"inputs are {home.value} arrays. Pass a {home.value} array"
        )
    if backend.ordinal is not None:
        _require_current_device((called,), (array,), backend.ordinal)
    for name, other in inputs.items():
        if arrays.overlap(array, other, home):
            raise ConvError(
                f"{called} must not share memory with an input",
                f"{called} overlaps {name}",
                f"Pass a new array as {called}, or a copy of {name}",
            )
    return array


def _written_to(out: Any) -> Any:
    """Report to PyTorch that ``out`` was written, if it is a tensor, and return ``out``."""
    foreign.record_write(out)
    return out


def _require_out(name: str, out: _Layout, shape: tuple[int, ...], dtype: str) -> None:
    if out.dtype != arrays.numpy_dtype(dtype):
        raise ConvTypeError(
            f"{name} must have the inputs' dtype: {name} is {out.dtype}, the inputs are {dtype}. "
            f"Pass an array of dtype {dtype}"
        )
    if out.shape != shape:
        raise ConvError(
            f"{name} must have the result's shape",
            f"{name} is {shape_text(out.shape) or 'a scalar'}, the result is {shape_text(shape)}",
            f"Pass an array of shape {shape}",
        )
    if arrays.overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ConvError(
            f"the elements of {name} must not overlap in memory",
            f"{name} has shape {out.shape} and strides of {out.strides} bytes",
            "Pass a new array, and copy the result from it",
        )
