"""The public functions: validate, plan, run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

import cupyconv
from cupyconv import arrays, backends, foreign, formats, measuring
from cupyconv.backends import Backend, Run, Tensors
from cupyconv.errors import ConvError, ConvTypeError, require_word, unknown_word, words_of
from cupyconv.formats import DataFormat, FilterFormat
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
    from typing import Unpack

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
    """Gradients of a layer; None for gradients that were not requested."""

    dx: _G
    dw: _G
    db: _G


# What type checkers know of the functions below: an array of NumPy's gives one of NumPy's, of the
# same dtype, one of CuPy's one of CuPy's; what comes in by its protocols is either.


@overload
def conv_forward(
    x: NDArray[Scalar],
    w: NDArray[Scalar] | PreparedFilter[NDArray[Scalar]],
    bias: NDArray[Scalar] | None = None,
    *,
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_Forward],
) -> NDArray[Scalar]: ...
@overload
def conv_forward(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    bias: CuPyArray | None = None,
    *,
    out: CuPyArray | None = None,
    **how: Unpack[_Forward],
) -> CuPyArray: ...
@overload
def conv_forward(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    *,
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
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
) -> Any:
    """Compute y = activation(bias + x correlated with w).

    y[n, k, p, q] = sum over c, r, s of x[n, c, h, w] * w[k, c, r, s], where
    h = p * stride - pad + r * dilation, and likewise w from q and s.

    Args:
        x: input, (N, C, [[D,] H,] W) in ``data_format`` order; NumPy, CuPy, or exporting DLPack or
            ``__cuda_array_interface__``.
        w: filter, (K, C / groups, [[T,] R,] S) in ``filter_format`` order, of x's dtype and device;
            or what ``prepare`` made of it.
        bias: (K,), of x's dtype and device.
        stride, padding, dilation, groups, data_format, filter_format: as for ConvProblem.
        activation: None, "relu", "silu" or "gelu" (the exact one, with erf).  Complex dtypes take
            None only.  Gradient functions take no activation; dy is the gradient before it.
            "silu" is v / (1 + exp(-v)) in the dtype of the sums, as in PyTorch: it is -0 where
            exp(-v) overflows (below -88.7 in float32, -709.7 in float64), and NaN at -infinity.
        precision: "ieee" keeps float32 arithmetic float32: a value changes only the results that
            read it, subnormals stay, and errors are at most twice those of a plain sum, whatever
            the magnitudes.  "tf32" permits tensor cores to round float32 operands to 10 bits of
            mantissa, "bf16x6" to multiply them as planes of bfloat16, which loses bits of numbers
            below 2^-110 and may make NaN of infinity, where an implementation does.
        impl: "auto", an implementation's name as ``cupyconv.plan`` prints it, or the Plan of this
            problem to carry out.
        out: array for the result, of its shape and dtype, sharing no memory with the inputs.

    Returns:
        y, (N, K, [[Z,] P,] Q) in ``data_format`` order, of x's dtype and device: ``out`` if given.
        16-bit types are summed in float32 and rounded once.  Nothing is conjugated: a complex
        product is four real ones, (a + bi)(c + di) = (ac - bd) + (ad + bc)i, and "ieee" holds for
        each part.  NaN and infinity propagate; where a complex number has an infinite part, a
        result that reads it has parts that are infinite or NaN.  One in w may also reach outputs
        where it lies over padding, since it is multiplied by a zero there.
        With NumPy a pass takes at most 64 MB of memory beside its operands and result, as long as
        a window has no more than a million values; a thread keeps it for its next pass.

    Raises:
        ConvError: no such convolution exists, or ``out`` does not fit it.
        ConvTypeError: arrays of different or unsupported dtypes or homes.
        DeviceError: CuPy or a GPU is needed and missing.
    """
    rules = (stride, padding, dilation, groups, data_format, filter_format)
    given = (x, w) if bias is None else (x, w, bias)
    return compute("forward", given, None, rules, out, impl, precision, activation)


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
) -> Any:
    """Compute dx, the gradient with respect to the input, from the output gradient dy.

    dx[n, c, h, w] = sum over k, r, s of dy[n, k, p, q] * w[k, c, r, s], where
    p = (h + pad - r * dilation) / stride, over the taps for which this is a whole number and the
    output exists; likewise q from w and s.  Of complex numbers w is conjugated, as in PyTorch's
    gradients: for a real loss L, dy is dL/d(re y) + i dL/d(im y), and dx likewise.  JAX's is the
    conjugate of that, so that jax.vjp gives conj(dx) for conj(dy).

    Args:
        input_shape: shape of x.  It has to be given: with stride s, s sizes per axis share one
            output size (``ConvProblem.valid_input_sizes``).
        w: filter, in ``filter_format`` order, or what ``prepare`` made of it.
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order, of w's dtype and device.
        stride, padding, dilation, groups, data_format, filter_format: of the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dx, of shape ``input_shape``.  NaN and infinity propagate; one in w may also reach elements
        where it lies over padding, or between the elements of dy that a stride sets apart, since
        it is multiplied by a zero there.

    Raises:
        ConvError: ``dy`` does not belong to ``input_shape`` and ``w``; the message has the
            interval of input sizes that it would belong to.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    rules = (stride, padding, dilation, groups, data_format, filter_format)
    return compute("backprop_input", (w, dy), input_shape, rules, out, impl, precision)


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
) -> Any:
    """Compute dw, the gradient with respect to the filter, from the output gradient dy.

    dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, h, w], where
    h = p * stride - pad + r * dilation, and likewise w from q and s.  Of complex numbers x is
    conjugated, as in PyTorch's gradients (``conv_backprop_input`` has more about them).

    Args:
        x: input, in ``data_format`` order.
        filter_shape: shape of w, in ``filter_format`` order.
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order, of x's dtype and device.
        stride, padding, dilation, groups, data_format, filter_format: of the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dw, of shape ``filter_shape``.  NaN and infinity propagate; one in dy may also reach taps
        that lie over padding there, since it is multiplied by a zero.

    Raises:
        ConvError: ``dy`` does not belong to ``x`` and ``filter_shape``.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    rules = (stride, padding, dilation, groups, data_format, filter_format)
    return compute("backprop_filter", (x, dy), filter_shape, rules, out, impl, precision)


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


def conv_backprop_bias(dy: Any, *, data_format: DataFormat | None = None, out: Any = None) -> Any:
    """Compute db, the gradient with respect to the bias: dy summed over all axes but the channels.

    Args:
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order.
        out: as for ``conv_forward``.

    Returns:
        db, (K,).

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_forward``.
    """
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
    x: Exporter, w: Exporter | PreparedFilter[Any], dy: Exporter, **how: Unpack[_How]
) -> ConvGradients[Any]: ...
@overload
def conv_backward(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    dy: Exporter,
    *,
    needs: Gradient | Iterable[Gradient],
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
) -> ConvGradients[Any]:
    """Return the gradients of a layer; only those in ``needs`` are computed.

    Args:
        x, w, dy: as for the other passes.
        needs: any of "input", "filter" and "bias".
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``conv_forward``.

    Returns:
        ConvGradients with ``dx``, ``dw`` and ``db``; None for those that were not asked for.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for the single passes.
    """
    wanted = words_of("needs", "gradient in needs", needs, GRADIENTS)
    rules = (stride, padding, dilation, groups, data_format, filter_format)
    held = w if isinstance(w, PreparedFilter) else None
    (x, w, dy), _, backend = _take(("x", "w", "dy"), (x, w if held is None else held.array, dy))
    if wanted in ((), ("bias",)) or not x.dtype == w.dtype == dy.dtype:
        # No pass would check all of the layer.
        require_words(None, precision, impl, backend.device)
        layouts = {"x": _Layout.of(x), "w": _Layout.of(w), "dy": _Layout.of(dy)}
        problem_of("backprop_filter", layouts, None, rules, _BACKWARD["backprop_filter"])
    how = (rules, None, impl, precision)
    dx = dw = db = None
    if "input" in wanted:
        called = _BACKWARD["backprop_input"]
        dx = compute("backprop_input", (held or w, dy), x.shape, *how, called=called, later=True)
    if "filter" in wanted:
        called = _BACKWARD["backprop_filter"]
        dw = compute("backprop_filter", (x, dy), w.shape, *how, called=called, later=True)
    if "bias" in wanted:
        db = sum_bias(dy, data_format, None, later=True)
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
    out: NDArray[Scalar] | None = None,
    **how: Unpack[_Transpose],
) -> NDArray[Scalar]: ...
@overload
def conv_transpose(
    x: CuPyArray,
    w: CuPyArray | PreparedFilter[CuPyArray],
    bias: CuPyArray | None = None,
    *,
    out: CuPyArray | None = None,
    **how: Unpack[_Transpose],
) -> CuPyArray: ...
@overload
def conv_transpose(
    x: Exporter,
    w: Exporter | PreparedFilter[Any],
    bias: Exporter | None = None,
    *,
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
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    out: Any = None,
) -> Any:
    """Compute the transposed convolution: activation(bias + conv_backprop_input of x).

    Args:
        x: (N, K, [[Z,] P,] Q), the output side of the convolution that is transposed.
        w: the filter of that convolution, so its O goes with x's channels and its I with the
            result's: PyTorch's (in_channels, out_channels / groups, ...) in "OIHW", Keras's
            (..., out_channels, in_channels) in "HWIO".  Or what ``prepare`` made of it.
        bias: (C,), of x's dtype and device; C are the result's channels.
        output_shape: shape of the result.
        output_padding: instead, how far the result lies above the smallest of the ``stride`` sizes
            per axis that fit.  By default 0 as in PyTorch, and stride - 1 under "same" and
            "same_lower", which makes the result stride times as large, as in Keras and JAX.  Less
            than the stride or, unless under these two, the dilation; from the stride on x is
            copied, with zeros after it.
        stride, padding, dilation, groups, data_format, filter_format: of the convolution.
        activation, precision, impl, out: as for ``conv_forward``.

    Returns:
        The result, (N, C, [[D,] H,] W) in ``data_format`` order.  16-bit types are rounded once,
        after bias and activation.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_backprop_input``.
    """
    rules = (stride, padding, dilation, groups, data_format, filter_format)
    asked = (output_shape, output_padding)
    given = (w, x) if bias is None else (w, x, bias)
    return compute("transpose", given, asked, rules, out, impl, precision, activation)


def prepare(
    w: _Array,
    problem: ConvProblem,
    *,
    passes: str | Iterable[str] = FILTER_PASSES,
    precision: Precision = "ieee",
    impl: str | Plan = "auto",
) -> PreparedFilter[_Array]:
    """Return a filter for many calls, in which the GPU need not arrange it any more.

    Some kernels read w in another order than it may lie in, or as planes of bfloat16, and would
    copy it at every call: one with its spatial axes last is copied with its channels last, always
    on compute capability 9.0 and in large layers elsewhere.  Here it is copied once.  Kernels and
    results are the same bits as without.

    Args:
        w: filter, in the problem's format, as ``conv_forward`` takes it.  It is kept, and must not
            be changed as long as what is given back is used: prepare it again after that.  A CUDA
            graph uses it too: keep what is given back as long as a graph that captured its calls.
        problem: the layer.  The inputs of the calls may be of other sizes and batches; where other
            kernels are planned for these, they may have to copy w as ever.
        passes: that it is for, "forward" and "backprop_input", which transposed convolutions are.
        precision, impl: of the calls, as for ``conv_forward``.

    Returns:
        What the functions that read a filter take in the place of w, those of ``cupyconv.onnx`` and
        ``cupyconv.cudnn`` too.  Of a NumPy array it holds that array alone.

    Raises:
        ConvError: w is not the problem's filter; a word is unknown; a graph is being captured; or
            as for ``plan``.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    require_problem("prepare", problem)
    require_words(None, precision, impl)
    wanted = words_of("passes", "pass that reads a filter", passes, FILTER_PASSES)
    (array,), _, backend = _take(("w",), (w,))
    if backend.is_capturing():
        raise ConvError(
            "a filter must be prepared before a graph is captured",
            "the current stream captures one, which would arrange the filter at its launch only",
            "Call cupyconv.prepare before the capture, and keep its result as long as the graph",
        )
    layout = _Layout.of(array)
    dtype = _common_dtype({"w": layout})
    if (layout.shape, dtype) != (problem.filter_shape, problem.dtype):
        raise ConvError(
            "a filter must be that of the problem which it is prepared for",
            f"w is {shape_text(layout.shape) or 'a scalar'} {dtype}, the problem's is "
            f"{shape_text(problem.filter_shape)} {problem.dtype}",
            "Pass the filter of this problem, or problem.replace(filter_shape=..., dtype=...)",
        )
    strides = replace(
        Strides.contiguous(problem),
        w=_elements("w", layout),
        alignment=backend.alignment((array,)),
    )
    limit, forms = cupyconv.workspace_limit, {}
    for word in wanted:
        request = Request(problem, word, backend.device, precision, limit, strides)
        form = backend.filter_form(chosen(request, impl), problem, strides)
        if form is not None and form.name not in forms:
            forms[form.name] = backend.arrange(form, array)
    return PreparedFilter(array, forms, problem, backend.device, wanted, precision)


def plan(
    problem: ConvProblem,
    device: str | Device | None = None,
    impl: Impl = "auto",
    precision: Precision = "ieee",
    workspace_limit: int | None = None,
    measure: bool = False,
) -> Plan:
    """Choose an implementation for each pass of a problem; needs no data and no GPU.

    The functions above take the plan, or one that came back from JSON, as ``impl``.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device; by default the current GPU,
            or the CPU where there is none.
        impl: "auto", or the name of the one implementation to plan all three passes with.
        precision: "ieee", or "tf32" or "bf16x6" to permit what they permit ``conv_forward``.
        workspace_limit: bytes of device memory that a pass may use beside its tensors, 0 for none;
            by default ``cupyconv.workspace_limit``.
        measure: time the most promising kernels on the current GPU, unless that is remembered, and
            plan with the fastest, instead of the one with the shortest estimate.

    Raises:
        ConvError: the device or implementation is unknown, or cannot take the problem; or it is to
            be measured on another device than the current GPU.
        DeviceError: it is to be measured and there is no GPU.
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
            "only the current GPU can be measured",
            f"that is {here.name} ({here.architecture}), asked for is {Device.of(device).name}",
            "Leave the device out, or plan without measure",
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

# What an operation takes as x, w and y of its pass.
_ROLES = {
    "forward": ("x", "w", "out"),
    "backprop_input": ("out", "w", "dy"),
    "backprop_filter": ("x", "out", "dy"),
    "transpose": ("out", "w", "x"),
}
_GIVEN = {
    "forward": ("x", "w", "bias"),  # a bias need not be there
    "backprop_input": ("w", "dy"),
    "backprop_filter": ("x", "dy"),
    "transpose": ("w", "x", "bias"),
}
"""Arrays of an operation; all but the bias in the order of the pass's x, w, y."""


class Called(NamedTuple):
    """Names of an operation's arrays in errors.

    Attributes:
        given: names of the arrays of _GIVEN.
        out: name of the array for the result.
        tensors: names of the problem's tensors.
        sizes: names of tensors that the caller passes as sizes; by default those of _SIZES.
    """

    given: tuple[str, ...]
    out: str = "out"
    tensors: Names = Names()
    sizes: tuple[str, ...] | None = None


_CALLED = {operation: Called(given) for operation, given in _GIVEN.items()}
_BACKWARD = {operation: called._replace(sizes=()) for operation, called in _CALLED.items()}
"""The same for ``conv_backward``, which has all tensors as arrays."""

_CALLED["transpose"] = Called(_GIVEN["transpose"], tensors=TRANSPOSED)

_SIZES = {
    "forward": (),
    "backprop_input": ("input_shape",),
    "backprop_filter": ("filter_shape",),
    "transpose": ("input_shape",),
}
"""Tensors that an operation takes as sizes, by their names in ConvProblem."""

_FILTERS = {"forward": 1, "backprop_input": 0, "backprop_filter": None, "transpose": 0}
"""Index of the filter among the arrays of each operation."""

_PLAIN = frozenset((int, str, type(None)))
"""Types whose equal values have equal text."""


class _Layout(NamedTuple):
    """An array without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @staticmethod
    def of(array: Any) -> _Layout:
        return _Layout(array.shape, array.strides, array.dtype)


class _Call(NamedTuple):
    """Prepared call of an operation; ``run(tensors)`` computes it."""

    run: Run
    tensors: Tensors
    result: Any


@dataclass
class _Ready:
    """A prepared call, shared by all calls that differ only in addresses.

    Attributes:
        problem: the configuration.
        shape: shape of the result.
        run: function that computes the planned pass.
        measure: function that finds the fastest plan on these tensors.
        measured: the fastest plan, once it was measured.
    """

    problem: ConvProblem
    shape: tuple[int, ...]
    run: Run
    measure: Callable[[Tensors], Run]
    measured: Run | None = None

    def fastest(self, tensors: Tensors) -> Run:
        """Return the way that is the fastest, measured on these tensors unless it is known."""
        if self.measured is None:
            self.measured = self.measure(tensors)
        return self.measured


def compute(
    operation: str,
    given: tuple[Any, ...],
    shape: Any,
    rules: tuple[Any, ...],
    out: Any,
    impl: Impl | Plan = "auto",
    precision: str = "ieee",
    activation: str | None = None,
    measure: bool | None = None,
    conjugates: bool = False,
    called: Called | None = None,
    later: bool = False,
) -> Any:
    """Carry out an operation, for the functions above and for other names of theirs.

    A call is mostly a repeated one, and its Python should not take longer than its launch: what it
    comes to is looked up under all that it depends on, and everything slow is in ``_ready``.

    Args:
        operation: one of _GIVEN.
        given: its arrays.
        shape: of the tensor that is not given; for "transpose", what is known of it.
        rules: stride, padding, dilation, groups, data_format, filter_format, as the user put them.
        out, impl, precision, activation: as for ``conv_forward``.
        measure: whether the fastest kernels of a GPU are found by timing them; by default what
            ``cupyconv.benchmark`` says.
        conjugates: whether a transposed convolution conjugates its filter, as a gradient does.
        called: what errors call the arrays; by default as _GIVEN does, and ``out``.
        later: give a _Call instead of the result.
    """
    called = called or _CALLED[operation]
    names = called.given
    place, held = _FILTERS[operation], None
    if place is not None and type(given[place]) is PreparedFilter:
        held = given[place]
        given = (*given[:place], held.array, *given[place + 1 :])
    given, home, backend = _take(names, given)
    operands, result, out_layout = given[:2], None, None
    layouts = [(array.shape, array.strides, array.dtype) for array in given]
    turned = operation == "transpose" and given[0].dtype.kind == "c" and not conjugates
    if turned:
        # The pass conjugates the filter, which a transposed convolution does not: of a conjugate.
        operands = given[1:2]
        layouts[0] = _of_a_new_array(*layouts[0])
    if out is not None:
        result = _take_out(called.out, out, names, given, home, backend)
        operands += (result,)
        out_layout = (result.shape, result.strides, result.dtype)
    call: tuple[Any, ...] = (
        operation,
        called,
        tuple(layouts),
        out_layout,
        backend.alignment(operands),
        shape,
        rules,
        _spelling(shape, rules),
        impl,
        precision,
        activation,
        backend,
        cupyconv.workspace_limit,
        held and held.belonging,
        not turned,
    )
    ready: _Ready = _from_cache(_ready, call)
    asked = cupyconv.benchmark if measure is None else measure
    measured = asked and backend.device.is_gpu and not isinstance(impl, Plan)
    if measured and ready.measured is None and backend.is_capturing():
        ready.fastest(Tensors(None, None, None))  # remembered, or refused before anything is done
    if result is None:
        result = backend.empty(ready.shape, ready.problem.dtype)
    if held is not None and place is not None and not turned:
        given = (*given[:place], held, *given[place + 1 :])
    if operation == "transpose" and (turned or given[1].shape != ready.problem.output_shape):
        _transpose(ready, given, result, turned, measured, backend)
        return result if out is None or type(out) in arrays.HOMES else _written_to(out)
    if operation == "forward":
        x, w, *bias = given
        tensors = Tensors(x, w, result, *bias)
    elif operation == "backprop_filter":
        tensors = Tensors(given[0], result, given[1])
    else:
        tensors = Tensors(result, *given)
    run = ready.fastest(tensors) if measured else ready.run
    if later:
        return _Call(run, tensors, result)
    run(tensors)
    return result if out is None or type(out) in arrays.HOMES else _written_to(out)


def _transpose(
    ready: _Ready,
    given: tuple[Any, ...],
    result: Any,
    turned: bool,
    measured: bool,
    backend: Backend,
) -> None:
    """Compute a transposed convolution, with copies of arrays that its pass cannot use.

    Args:
        ready: what the call comes to.
        given: the arrays of the call.
        result: the array for the result.
        turned: whether the pass conjugates the filter and the call does not.
        measured: whether the fastest way is found by timing.
        backend: that computes.
    """

    def compute_from_copies() -> None:
        w, y, *bias = given
        if turned:
            conjugate = backend.conjugate(w)
            w = w if conjugate is None else conjugate
        if y.shape != ready.problem.output_shape:
            # Its output_padding reaches over windows that x has no numbers for.
            y = backend.extended(y, ready.problem.output_shape)
        tensors = Tensors(result, w, y, *bias)
        run = ready.fastest(tensors) if measured else ready.run
        run(tensors)

    try:
        compute_from_copies()
    except BaseException as error:
        # The caller may keep the error. A graph's copies must end before its capture.
        traceback.clear_frames(error.__traceback__)
        raise


def _of_a_new_array(shape: tuple[int, ...], strides: Any, dtype: Any) -> tuple[Any, ...]:
    """Return the layout of a contiguous array of this shape."""
    steps = contiguous_strides(shape)
    return shape, tuple(step * dtype.itemsize for step in steps), dtype


def _spelling(shape: Any, rules: tuple[Any, ...]) -> Any:
    """Return the types of arguments, which distinguish True (rejected) from 1 in a cache key.

    Return a list, which disables caching, if there are other values than integers and strings:
    these may be mutable, like arrays.
    """
    types, values = [], [shape, *rules]
    for value in values:
        if type(value) is tuple:
            values += value
        elif type(value) not in _PLAIN:
            if not isinstance(value, Integral):
                return []
            types.append(type(value))
    return tuple(types)


@lru_cache(maxsize=4096, typed=True)  # a limit of True or 1.0 is none of 1
def _ready(
    operation: str,
    called: Called,
    given: tuple[tuple[Any, ...], ...],
    out: tuple[Any, ...] | None,
    alignment: int,
    shape: Any,
    rules: tuple[Any, ...],
    spelling: tuple[type, ...],
    impl: Impl | Plan,
    precision: str,
    activation: str | None,
    backend: Backend,
    workspace_limit: int | None,
    held: Belonging | None = None,
    conjugates: bool = True,
) -> _Ready:
    """Prepare a call from the layouts of its arrays.

    Args:
        conjugates: whether backprop_input conjugates the filter, if its numbers are complex.

    Raises:
        ConvError, ConvTypeError: the call is invalid, apart from the devices of its arrays.
    """
    require_words(activation, precision, impl, backend.device)
    layouts = dict(zip(_GIVEN[operation], map(_Layout._make, given), strict=False))
    if out is not None:
        layouts["out"] = _Layout._make(out)
    problem = problem_of(operation, layouts, shape, rules, called)
    require_activation(activation, problem)
    pass_ = "backprop_input" if operation == "transpose" else operation
    written = _written(operation, problem)
    if operation == "transpose" and layouts["x"].shape != problem.output_shape:
        # What the pass is given is a copy that has the missing windows too.
        x_layout = _of_a_new_array(problem.output_shape, None, layouts["x"].dtype)
        layouts["x"] = _Layout._make(x_layout)
    strides = None
    if backend.device.is_gpu:
        strides = _strides(operation, problem, layouts, alignment, _said(operation, called))
    request = Request(problem, pass_, backend.device, precision, workspace_limit, strides)
    if held is not None:
        held.require(request)
    planned = chosen(request, impl)

    def prepare(planned: PassPlan) -> Run:
        if held is None:
            return backend.prepare(planned, problem, strides, activation, None, conjugates)
        form = backend.filter_form(planned, problem, strides)
        if form is not None and form.name not in held.forms:
            form = None  # w is arranged at each call, as without
        name = None if form is None else form.name
        run = backend.prepare(planned, problem, strides, activation, form, conjugates)
        return lambda tensors: run(tensors._replace(w=_read_as(name, tensors.w)))

    def measure(tensors: Tensors) -> Run:
        assert isinstance(impl, str)
        return prepare(_fastest(request, impl, backend, prepare, tensors))

    return _Ready(problem, written, prepare(planned), measure)


def chosen(request: Request, impl: str | Plan) -> PassPlan:
    """Return the way that is planned, or that a plan has."""
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


def _read_as(form: str | None, w: Any) -> Any:
    """Return the array that a pass reads for a filter, which may be a prepared one."""
    return w.read_as(form) if type(w) is PreparedFilter else w


def _fastest(
    request: Request,
    impl: str,
    backend: Backend,
    prepare: Callable[[PassPlan], Run],
    tensors: Tensors,
) -> PassPlan:
    """Return the fastest candidate of a pass, each prepared once and measured."""
    run_of = cache(prepare)
    return measuring.fastest(
        request,
        impl,
        lambda planned: run_of(planned)(tensors),
        lambda candidates: backend.load(map(run_of, candidates)),
    )


def sum_bias(
    dy: Any, data_format: str | None, out: Any, called: str = "dy", later: bool = False
) -> Any:
    """``conv_backprop_bias``, for other names of it: what errors call dy is ``called``.

    Args:
        later: give the call, prepared, and not its result.
    """
    (dy,), home, backend = _take((called,), (dy,))
    result = None if out is None else _take_out("out", out, (called,), (dy,), home, backend)
    out_layout = None if result is None else _Layout.of(result)
    place = backend, backend.alignment((dy,)), cupyconv.workspace_limit
    call = (called, _Layout.of(dy), out_layout, data_format, *place)
    shape, dtype, run = _from_cache(_ready_bias, call)
    if result is None:
        result = backend.empty(shape, dtype)
    tensors = Tensors(None, None, dy, result)
    if later:
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
    """Return the shape and dtype of db, and what computes it."""
    require_limit(workspace_limit)
    problem = bias_problem(called, dy.shape, data_format, _common_dtype({called: dy}))
    if out is not None:
        _require_out("out", out, problem.bias_shape, problem.dtype)
    strides = None
    if backend.device.is_gpu:  # NumPy takes any
        step = 1 if out is None else _elements("out", out)[0]
        strides = Strides.of_sum(_elements(called, dy), step, alignment)
    run = backend.prepare_bias(problem, strides, workspace_limit)
    return problem.bias_shape, problem.dtype, run


def _from_cache(function: Any, call: tuple[Any, ...]) -> Any:
    """Call a cached function; with a list among its arguments, call it without the cache."""
    try:
        return function(*call)
    except ConvTypeError:
        raise
    except TypeError:
        return function.__wrapped__(*call)


def _said(operation: str, called: Called) -> dict[str, str]:
    """Return the names of the arrays in errors, keyed by their names here."""
    return {**dict(zip(_GIVEN[operation], called.given, strict=False)), "out": called.out}


def problem_of(
    operation: str,
    layouts: Mapping[str, Any],
    shape: Any,
    rules: tuple[Any, ...],
    called: Called | None = None,
) -> ConvProblem:
    """Return the problem of a call, whose arrays fit it.

    Args:
        operation, shape, rules, called: as for ``compute``.
        layouts: arrays of _GIVEN by their names there, and ``out``; anything with shape and dtype.
    """
    called = called or _CALLED[operation]
    said, names = _said(operation, called), called.tensors
    stride, padding, dilation, groups, data_format, filter_format = rules
    arguments = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "data_format": data_format,
        "filter_format": filter_format,
        "dtype": _common_dtype(
            {said.get(name, name): one for name, one in layouts.items() if name != "out"}
        ),
    }
    transposed = operation == "transpose"
    shapes = {name: one.shape for name, one in layouts.items()}
    given = {
        "input_shape": shapes.get("x", shape),
        "filter_shape": shapes.get("w", shape),
        "output_shape": shapes.get("dy"),
        "bias_shape": shapes.get("bias"),
        **arguments,
    }
    if transposed:
        given |= {"output_shape": shapes["x"], "input_shape": shape[0], "output_padding": shape[1]}

    def require(bias_shape: tuple[int, ...] | None, output_shape: Any, **layer: Any) -> ConvProblem:
        if transposed:
            problem = transposed_problem(names, output_shape, **layer)
        else:
            problem = named_problem(names, **layer)
            if output_shape is not None:
                require_output(names, problem, output_shape)
        if bias_shape is not None:
            channels, owner = (problem.C, names.x) if transposed else (problem.K, names.w)
            require_bias(said["bias"], bias_shape, channels, owner)
        if "out" in layouts:
            _require_out(called.out, layouts["out"], _written(operation, problem), problem.dtype)
        return problem

    sizes = _SIZES[operation] if called.sizes is None else called.sizes
    return offering(require, names, given, sizes)


def _written(operation: str, problem: ConvProblem) -> tuple[int, ...]:
    """Return the shape of an operation's result."""
    return {
        "forward": problem.output_shape,
        "backprop_filter": problem.filter_gradient_shape,
    }.get(operation, problem.input_gradient_shape)


def _strides(
    operation: str,
    problem: ConvProblem,
    layouts: Mapping[str, _Layout],
    alignment: int,
    said: Mapping[str, str],
) -> Strides:
    """Return the strides of a pass's tensors; a new result is contiguous."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    x, w, y = (
        _elements(said[name], layouts[name]) if name in layouts else contiguous_strides(shape)
        for name, shape in zip(_ROLES[operation], shapes, strict=True)
    )
    bias = _elements(said["bias"], layouts["bias"])[0] if "bias" in layouts else 1
    return Strides(x, w, y, bias, alignment)


def _elements(name: str, layout: _Layout) -> tuple[int, ...]:
    try:
        return element_strides(layout)
    except ValueError as error:
        raise ConvTypeError(f"{name}: {error}. Pass a contiguous copy of it") from None


def bias_problem(
    called: str, dy_shape: tuple[int, ...], data_format: DataFormat | None, dtype: Any
) -> ConvProblem:
    """Return a 1x1 depthwise layer with this output: db depends on nothing else of the layer."""
    rank = len(dy_shape) - 2
    layout = data_format
    if rank in formats.SPATIAL_AXES:
        layout = formats.resolve_data_format(data_format, rank)
        channels = dy_shape[formats.data_axes(layout)[1]]
        for letter, size in zip(layout, dy_shape, strict=True):
            if letter != "N" and size < 1:
                raise ConvError(
                    "every size but the batch must be at least 1",
                    f"{called} has {letter} = {size}",
                    f"Give positive sizes: {called} {shape_text(dy_shape)} was read as {layout}",
                )
    else:
        channels = 1  # the problem reports the rank
    return named_problem(
        Names(x=called),
        dy_shape,
        (channels, 1, *[1] * rank),
        stride=1,
        padding=0,
        dilation=1,
        groups=channels,
        data_format=layout,
        filter_format=formats.filter_formats(rank)[0] if rank in formats.SPATIAL_AXES else None,
        dtype=dtype,
    )


# -- checking --------------------------------------------------------------------------------------


def require_words(
    activation: str | None, precision: str, impl: str | Plan, device: Device | None = None
) -> None:
    """Check that the words are known, and that ``impl`` is a word or a plan.

    Args:
        device: that computes, for the error; None if it is not known yet.
    """
    require_word("activation", activation, ACTIVATIONS)
    require_word("precision", precision, PRECISIONS)
    if not isinstance(impl, (str, Plan)):
        known = get_args(Impl) if device is None else implementations(device.is_gpu)
        raise unknown_word("impl", impl, known)


def require_activation(activation: str | None, problem: ConvProblem) -> None:
    """Check that the problem's numbers have activations, if one is asked for."""
    if problem.is_complex and activation is not None:
        raise ConvError(
            "activations are of real numbers",
            f"got {activation!r} with {problem.dtype}",
            "Apply it to what it is meant for, such as the magnitude: numpy.abs(y)",
        )


def _take(
    names: Sequence[str], given: tuple[Any, ...]
) -> tuple[tuple[Any, ...], arrays.Home, Backend]:
    """Return the arrays on the current device, that device, and its backend."""
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
    """Return a filter as an array, or a prepared filter unchanged; both have shape and dtype."""
    return w if isinstance(w, PreparedFilter) else arrays.take("w", w)[0]


def _take_all(names: Sequence[str], given: tuple[Any, ...]) -> tuple[tuple[Any, ...], arrays.Home]:
    """Return objects of any kind as arrays, and the one home that they share."""
    taken = [arrays.take(name, value) for name, value in zip(names, given, strict=False)]
    homes = [home for _, home in taken]
    if homes.count(homes[0]) < len(homes):
        where = ", ".join(
            f"{name} is a {home.value} array" for name, home in zip(names, homes, strict=False)
        )
        raise ConvTypeError(
            f"all arrays must be in one memory: {where}. "
            "Move them with cupy.asarray(...) or cupy.asnumpy(...)"
        )
    values = dict(zip(names, given, strict=False))
    dtypes = {name: array.dtype for name, (array, _) in zip(names, taken, strict=False)}
    # Only here is it known of which libraries they are, whose conversions differ.
    shared_dtype(dtypes, lambda name, dtype: foreign.conversion(name, values[name], dtype))
    return tuple([array for array, _ in taken]), homes[0]


def _common_dtype(layouts: Mapping[str, Any]) -> str:
    return shared_dtype({name: layout.dtype for name, layout in layouts.items()})


def require_bias(name: str, shape: tuple[int, ...], channels: int, owner: str) -> None:
    """Check the shape of a bias.

    Args:
        name: what errors call the bias.
        channels, owner: number of values, and the name of the tensor with this many channels.

    Raises:
        ConvError: the shape is another one.
    """
    if shape != (channels,):
        raise ConvError(
            "the bias must have one value for each output channel",
            f"{name} is {shape_text(shape) or 'a scalar'}, {owner} has {channels} output channels",
            f"Pass a bias of shape ({channels},)",
            candidates=[Fix({"bias_shape": (channels,)}, (f"pass a bias of shape ({channels},)",))],
        )


def _require_current_device(names: Sequence[str], given: Sequence[Any], current: int) -> None:
    for position, array in enumerate(given):
        device = array.data.device_id
        if device != current:
            raise ConvTypeError(
                f"all arrays must be on the current device: {names[position]} is on device "
                f"{device}, current is {current}. "
                f"Compute under `with cupy.cuda.Device({device}):`"
            )


def _take_out(
    called: str,
    out: Any,
    names: Sequence[str],
    given: Sequence[Any],
    home: arrays.Home,
    backend: Backend,
) -> Any:
    """``out`` as an array over its own memory, which may be written without harm to the others."""
    array, out_home = arrays.take_out(called, out)
    if out_home is not home:
        raise ConvTypeError(
            f"{called} must be where the inputs are: {called} is a {out_home.value} array, they "
            f"are {home.value} arrays. Pass a {home.value} array"
        )
    if backend.ordinal is not None:
        _require_current_device((called,), (array,), backend.ordinal)
    for name, other in zip(names, given, strict=False):
        if arrays.overlap(array, other, home):
            raise ConvError(
                f"{called} must not share memory with an input",
                f"it overlaps {name}",
                f"Pass a new array, or a copy of {name}",
            )
    return array


def _written_to(out: Any) -> Any:
    """``out``, another library's array, once that library has learned of the write."""
    foreign.record_write(out)
    return out


def _require_out(name: str, out: _Layout, shape: tuple[int, ...], dtype: str) -> None:
    one = f"an {name}" if name == "out" else f"a {name}"
    if out.dtype != arrays.numpy_dtype(dtype):
        raise ConvTypeError(
            f"{name} must have the inputs' dtype: {name} is {out.dtype}, they are {dtype}. "
            f"Pass {one} of dtype {dtype}"
        )
    if out.shape != shape:
        raise ConvError(
            f"{name} must have the result's shape",
            f"{name} is {shape_text(out.shape) or 'a scalar'}, the result is {shape_text(shape)}",
            f"Pass {one} of shape {shape}",
        )
    if arrays.overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ConvError(
            f"{name} must have memory of its own for each element",
            f"elements of a {shape_text(out.shape)} with strides of {out.strides} bytes overlap",
            "Pass a new array, and copy from it",
        )
