"""The public functions: they validate their arguments, plan the passes and run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

from cupyconv import arrays, backends, calls, settings
from cupyconv.binding import ARGUMENT_NAMES, problem_of, require_words
from cupyconv.calls import compute
from cupyconv.errors import ConvError, naming_arguments, unknown_arguments, words_of
from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.operands import Layout, common_dtype, take
from cupyconv.planning import Activation, Device, Impl, PassPlan, Plan, Precision, require_limit
from cupyconv.planning import plan as _plan
from cupyconv.prepared import PreparedFilter
from cupyconv.problem import (
    PASSES,
    ConvOptions,
    ConvProblem,
    Padding,
    Rules,
    Size,
    require_problem,
    shape_text,
)

if TYPE_CHECKING:
    from typing import Never, TypeAlias, Unpack

    from numpy.typing import NDArray

    from cupyconv.arrays import CuPyArray, Exporter, Scalar

    class _How(Rules, total=False):
        precision: Precision
        impl: Impl | Plan

    _A = TypeVar("_A")

    _Filter: TypeAlias = _A | PreparedFilter[_A]

    class _Pass(_How, Generic[_A], total=False):
        out: _A | None

    class _Forward(_Pass[_A], total=False):
        activation: Activation | None
        add: _A | None

    class _Transpose(_Forward[_A], total=False):
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
    w: _Filter[NDArray[Scalar]],
    bias: NDArray[Scalar] | None = None,
    **how: Unpack[_Forward[NDArray[Scalar]]],
) -> NDArray[Scalar]: ...
@overload
def conv_forward(
    x: CuPyArray,
    w: _Filter[CuPyArray],
    bias: CuPyArray | None = None,
    **how: Unpack[_Forward[CuPyArray]],
) -> CuPyArray: ...
@overload
def conv_forward(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    **how: Unpack[_Forward[Exporter]],
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
            operands to 10 bits of mantissa for the tensor cores.  Magnitudes above 3.4019e38 may
            then become infinite.  "bf16x6" permits implementations to split each float32 operand
            into a sum of three bfloat16 arrays ("planes") for the tensor cores.  This loses bits of
            values below 2^-110 and may turn infinity into NaN.  With both, in every dtype,
            gradients may multiply elements by zeros that extend the other operand, so that results
            that do not read an infinite or NaN element may be NaN.
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
    how = stride, padding, dilation, groups, data_format, filter_format, activation, precision, impl
    return compute("forward", x, w, bias, add, out, (None, *how))


@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: _Filter[NDArray[Scalar]],
    dy: NDArray[Scalar],
    **how: Unpack[_Pass[NDArray[Scalar]]],
) -> NDArray[Scalar]: ...
@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: _Filter[CuPyArray],
    dy: CuPyArray,
    **how: Unpack[_Pass[CuPyArray]],
) -> CuPyArray: ...
@overload
def conv_backprop_input(
    input_shape: Iterable[int],
    w: Exporter | PreparedFilter[Any],
    dy: Exporter,
    **how: Unpack[_Pass[Exporter]],
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
    how = stride, padding, dilation, groups, data_format, filter_format, None, precision, impl
    return compute("backprop_input", w, dy, None, None, out, (input_shape, *how))


@overload
def conv_backprop_filter(
    x: NDArray[Scalar],
    filter_shape: Iterable[int],
    dy: NDArray[Scalar],
    **how: Unpack[_Pass[NDArray[Scalar]]],
) -> NDArray[Scalar]: ...
@overload
def conv_backprop_filter(
    x: CuPyArray, filter_shape: Iterable[int], dy: CuPyArray, **how: Unpack[_Pass[CuPyArray]]
) -> CuPyArray: ...
@overload
def conv_backprop_filter(
    x: Exporter, filter_shape: Iterable[int], dy: Exporter, **how: Unpack[_Pass[Exporter]]
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
    how = stride, padding, dilation, groups, data_format, filter_format, None, precision, impl
    return compute("backprop_filter", x, dy, None, None, out, (filter_shape, *how))


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
    options = (None, 1, 0, 1, 1, data_format, None, None, "ieee", "auto")
    return compute("backprop_bias", dy, None, None, None, out, options)


@overload
def conv_backward(
    x: NDArray[Scalar], w: _Filter[NDArray[Scalar]], dy: NDArray[Scalar], **how: Unpack[_How]
) -> ConvGradients[NDArray[Scalar]]: ...
@overload
def conv_backward(
    x: NDArray[Scalar],
    w: _Filter[NDArray[Scalar]],
    dy: NDArray[Scalar],
    *,
    needs: Gradient | Iterable[Gradient],
    **how: Unpack[_How],
) -> ConvGradients[NDArray[Scalar] | None]: ...
@overload
def conv_backward(
    x: CuPyArray, w: _Filter[CuPyArray], dy: CuPyArray, **how: Unpack[_How]
) -> ConvGradients[CuPyArray]: ...
@overload
def conv_backward(
    x: CuPyArray,
    w: _Filter[CuPyArray],
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
    layer = (stride, padding, dilation, groups, data_format, filter_format, None, precision, impl)
    prepared_filter = w if isinstance(w, PreparedFilter) else None
    plain = w if prepared_filter is None else prepared_filter.array
    (x, w, dy), backend = take(("x", "w", "dy"), (x, plain, dy))
    is_number = x.dtype.kind in "fcV"  # V is the kind of bfloat16
    if needed in ((), ("bias",)) or not (is_number and x.dtype == w.dtype == dy.dtype):
        # The calls below do not check that x, w and dy fit together.
        require_words(None, precision, impl, backend.device)
        layouts = {"x": Layout.of(x), "w": Layout.of(w), "dy": Layout.of(dy)}
        layer_options = ConvOptions._make(layer[:6])
        problem_of("backprop_filter", layouts, None, layer_options, _BACKWARD["backprop_filter"])

    def call(operation: str, first: Any, second: Any, shape: Any, options: Any) -> Any:
        argument_names, given = _BACKWARD[operation], (first, second, None, None, None)
        return compute(operation, *given, (shape, *options), argument_names, deferred=True)

    found: dict[str, Any] = {}
    if "input" in needed:
        found["input"] = call("backprop_input", prepared_filter or w, dy, x.shape, layer)
    if "filter" in needed:
        found["filter"] = call("backprop_filter", x, dy, w.shape, layer)
    if "bias" in needed:
        bias_layer = (1, 0, 1, 1, data_format, None, None, "ieee", "auto")
        found["bias"] = call("backprop_bias", dy, None, None, bias_layer)
    results = dict(zip(found, calls.run_together(list(found.values())), strict=True))
    return ConvGradients(*map(results.get, GRADIENTS))


_BACKWARD = {
    name: argument_names._replace(sizes=()) for name, argument_names in ARGUMENT_NAMES.items()
}
"""Names of the arrays of ``conv_backward``, which takes no tensor as a shape."""


@overload
def conv_transpose(
    x: NDArray[Scalar],
    w: _Filter[NDArray[Scalar]],
    bias: NDArray[Scalar] | None = None,
    **how: Unpack[_Transpose[NDArray[Scalar]]],
) -> NDArray[Scalar]: ...
@overload
def conv_transpose(
    x: CuPyArray,
    w: _Filter[CuPyArray],
    bias: CuPyArray | None = None,
    **how: Unpack[_Transpose[CuPyArray]],
) -> CuPyArray: ...
@overload
def conv_transpose(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    **how: Unpack[_Transpose[Exporter]],
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
    how = stride, padding, dilation, groups, data_format, filter_format, activation, precision, impl
    return compute("transpose", w, x, bias, add, out, ((output_shape, output_padding), *how))


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
    (array,), backend = take(("w",), (w,))
    calls.require_no_capture(backend, "cupyconv.prepare")
    layout = Layout.of(array)
    dtype = common_dtype({"w": layout})
    if (layout.shape, dtype) != (problem.filter_shape, problem.dtype):
        raise ConvError(
            "w must have the shape and dtype of the problem's filter",
            f"w is {shape_text(layout.shape) or 'a scalar'} {dtype}, the problem's filter is "
            f"{shape_text(problem.filter_shape)} {problem.dtype}",
            "Pass the filter of this problem, or problem.replace(filter_shape=..., dtype=...)",
        )
    how = backend, impl, precision, settings.workspace_limit, array
    found = [calls.of_problem(name, problem, *how).filter_form for name in names]
    forms: dict[str, Any] = {}
    for form in found:
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
    limit = settings.workspace_limit if workspace_limit is None else workspace_limit
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

    def fastest(pass_: str) -> PassPlan:
        call = calls.of_problem(pass_, problem, backend, impl, precision, workspace_limit)
        planned = call.fastest().plan
        assert planned is not None
        return planned

    return Plan(problem, here, tuple(map(fastest, PASSES)))
