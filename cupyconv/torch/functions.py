"""Functions with PyTorch's signatures, which translate their arguments for the operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from cupyconv import foreign, formats
from cupyconv.errors import ConvError, ConvTypeError, Names, any_padding, shown
from cupyconv.generated import describe, require_arguments
from cupyconv.operands import require_add, require_bias
from cupyconv.problem import (
    ITEMSIZE,
    ConvAxis,
    ConvOptions,
    ConvProblem,
    count_text,
    integer,
    integers,
    is_sequence,
    offering,
    transposed_problem,
    unknown_padding,
)
from cupyconv.torch import derivatives, operators
from cupyconv.torch.operators import DTYPES

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

IntOrInts = int | Sequence[int]
Padding = Literal["valid", "same"] | IntOrInts

_DEVICES = ("cpu", "cuda", "meta")

_CONVOLUTION = Names(
    w="the weight",
    y="the output",
    absent=frozenset(("data_format", "filter_format", "padding")),
    pad=lambda value: None if isinstance(value, str) else any_padding(value),
)
_TRANSPOSED = _CONVOLUTION._replace(x="the result", y="the input")
_GRADIENT = _CONVOLUTION._replace(y="grad_output", x_shape="input_size", w_shape="weight_size")


def _ranks(
    names: str, function: Callable[Concatenate[int, _P], Tensor]
) -> tuple[Callable[_P, Tensor], Callable[_P, Tensor], Callable[_P, Tensor]]:
    """Return the functions of one to three spatial axes that a function of the rank computes.

    The functions follow the ``__torch_function__`` protocol, as PyTorch's functions do: a tensor
    subclass may replace them, and ``torch.fx.symbolic_trace`` records their calls.

    Args:
        names: name of the functions, with a field {} for the rank.
        function: function whose docstring has the fields of ``_words``.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters}

    def of_rank(rank: int) -> Callable[_P, Tensor]:
        def overridable(*args: Any, **kwargs: Any) -> Any:
            is_compiling = torch.compiler.is_compiling()
            if kwargs and not is_compiling and not kwargs.keys() <= known:
                require_arguments(overridable, args, kwargs)
            arguments = (*args, *kwargs.values())
            if has_torch_function(arguments):
                return handle_torch_function(overridable, arguments, *args, **kwargs)
            if is_compiling:
                return function(rank, *args, **kwargs)
            try:
                return function(rank, *args, **kwargs)
            except TypeError:
                require_arguments(overridable, args, kwargs)  # the error here counts the rank
                raise

        describe(overridable, names.format(rank), parameters, function, **_words(rank))
        return overridable

    return of_rank(1), of_rank(2), of_rank(3)


def _words(rank: int) -> dict[str, Any]:
    """Return the texts of the fields in docstrings of functions of a rank."""
    memory = ("", "channels_last", "channels_last_3d")[rank - 1]
    return {
        "rank": rank,
        "x": ("W", "H, W", "D, H, W")[rank - 1],
        "w": ("S", "R, S", "T, R, S")[rank - 1],
        "y": ("Q", "P, Q", "Z, P, Q")[rank - 1],
        "memory": memory and f"; {memory} in memory if the input or the weight is",
        **{f"n{n}": ", ".join([n] * rank) for n in "23456"},
    }


# -- translation of arguments ---------------------------------------------------------------------


class _RuntimeConvError(ConvError, RuntimeError):
    """ConvError that is also a RuntimeError, like PyTorch's errors."""


class _RuntimeConvTypeError(ConvTypeError, RuntimeError):
    """ConvTypeError that is also a RuntimeError, like PyTorch's errors."""


def _with_runtime_errors(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Wrap a function so that its errors are also RuntimeErrors."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except ConvError as error:
            converted = _RuntimeConvError(error.rule, error.values, error.remedy, axis=error.axis)
            converted.fixes = error.fixes
            raise converted from None
        except ConvTypeError as error:
            raise _RuntimeConvTypeError(*error.args) from None

    return wrapped


@_with_runtime_errors
def _convolution(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    *,
    add: Tensor | None = None,
) -> Tensor:
    """Compute ``torch.nn.functional.{name}``, plus ``add``.

    Args:
        input: (N, C, {x}), or (C, {x}) without a batch.
        weight: (K, C / groups, {w}).
        bias: (K,).
        stride, dilation: an int, or one per spatial axis.
        padding: an int, one per spatial axis, "valid", or "same" with a stride of 1.
        groups: number of independent convolutions into which C and K are divided.
        add: tensor of the result's shape that the same kernel adds to the result, such as the
            shortcut of a residual block; PyTorch's function has no such argument.  The gradient
            with respect to ``add`` is that of the result.

    Returns:
        (N, K, {y}), or (K, {y}){memory}.

    Raises:
        ConvError: the convolution is invalid, or ``add`` has another shape than the result.
        ConvTypeError: a tensor's dtype, device or layout is unsupported, or tensors differ in dtype
            or device.
        DeviceError: a tensor is on a CUDA device, and CuPy is not installed.

    >>> x, w = torch.ones(1, 2, {n4}), torch.ones(3, 2, {n3}, requires_grad=True)
    >>> y = ct.{name}(x, w, stride=2, padding=1)
    >>> y.sum().backward()
    >>> y.shape, w.grad.shape
    (torch.Size([1, 3, {n2}]), torch.Size([3, 2, {n3}]))
    """
    (x, w, b), batched = _operands(rank, "input", input, weight, bias)
    layer = _layer(rank, w.shape[2:], stride, padding, dilation, groups)
    if add is not None:
        _, add = _cast("input", x, "add", add)
    if _has_no_channels(x, w):
        y = _without_channels(x, w, b, layer)
        y = y if add is None else y + _batched_addend(add, tuple(y.shape), batched)
    else:
        if add is not None:
            shape = operators.result_shape(x.shape, w.shape, *layer)
            add = _batched_addend(add, shape, batched)
        if b is not None:
            require_bias("bias", tuple(b.shape), w.shape[0], "the weight")
        shapes = (x.shape, w.shape, None)
        y = _compute("forward", (x, w, b, *layer), _CONVOLUTION, shapes, batched, add)
    return y if batched else y.squeeze(0)


@_with_runtime_errors
def _transposed(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """Compute ``torch.nn.functional.{name}``.

    Args:
        input: (N, K, {y}), or (K, {y}) without a batch.
        weight: (K, C / groups, {w}).
        bias: (C,).
        stride, padding, dilation, groups: parameters of the convolution that is transposed.
        output_padding: pixels added to the smallest result size that matches ``input``; it must be
            less than the stride or the dilation.

    Returns:
        (N, C, {x}), or (C, {x}).

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv1d``.

    >>> x, w = torch.ones(1, 3, {n2}), torch.ones(3, 2, {n3})
    >>> ct.{name}(x, w, stride=2).shape
    torch.Size([1, 2, {n5}])
    >>> ct.{name}(x, w, stride=2, output_padding=1).shape
    torch.Size([1, 2, {n6}])
    """
    if isinstance(padding, str):
        raise ConvError(
            "the padding of a transposed convolution must be one or more integers",
            f"got {shown(padding)}",
            "Pass an integer, or one for each spatial axis, or call cupyconv.conv_transpose, which "
            "has Keras's 'same'",
        )
    (x, w, b), batched = _operands(rank, "input", input, weight, bias)
    layer = _layer(rank, w.shape[2:], stride, padding, dilation, groups)
    strides, pads, dilations, groups = layer
    extra = _per_axis("output_padding", output_padding, rank)
    sizes, missing = [], []
    for i in range(rank):
        if strides[i] < 1 or extra[i] < 0 or extra[i] >= max(strides[i], dilations[i]):
            _require_result(x, w, extra, layer)
        size, taps, before = x.shape[2 + i], w.shape[2 + i], pads[2 * i]
        axis = ConvAxis("", 0, taps, strides[i], dilations[i], before, before, "explicit")
        sizes.append(axis.first_input_size_for(size) + extra[i])
        # With output_padding >= stride, the result has more windows than x has pixels: pad x.
        missing.append(extra[i] // strides[i])
    if not torch.compiler.is_compiling() and min(sizes) < 1:
        _require_result(x, w, extra, layer)
    if any(missing):
        x = torch.nn.functional.pad(x, [n for last in reversed(missing) for n in (0, last)])
    shape = [x.shape[0], w.shape[1] * groups, *sizes]
    if b is not None:
        require_bias("bias", tuple(b.shape), shape[1], "the result")
    if w.is_complex():
        # The operator conjugates w, so pass the conjugate; forward mode rejects a lazy conjugate.
        w = torch.conj_physical(w)
    shapes = (shape, w.shape, x.shape)
    y = _compute("backprop_input", (shape, w, x, b, *layer), _TRANSPOSED, shapes)
    return y if batched else y.squeeze(0)


@_with_runtime_errors
def _input_gradient(
    rank: int,
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``torch.nn.grad.{name}``: the gradient of ``conv{rank}d`` with respect to its input.

    Args:
        input_size: shape of the input, (N, C, {x}).
        weight: (K, C / groups, {w}).
        grad_output: (N, K, {y}), the gradient with respect to the output.
        stride, padding, dilation, groups: parameters of the convolution.

    Returns:
        A tensor of shape ``input_size``, which is differentiable.

    Raises:
        ConvError: the convolution is invalid, or its output does not have the shape of
            ``grad_output``.
        ConvTypeError, DeviceError: as for ``conv1d``.

    >>> w, dy = torch.ones(3, 2, {n3}), torch.ones(1, 3, {n2})
    >>> ct.{name}((1, 2, {n4}), w, dy).shape
    torch.Size([1, 2, {n4}])
    """
    (dy, w, _), batched = _operands(rank, "grad_output", grad_output, weight, None)
    layer = _layer(rank, w.shape[2:], stride, padding, dilation, groups)
    sizes = _sizes("input_size", input_size)
    shape = sizes if batched else [1, *sizes]
    shapes = (shape, w.shape, dy.shape)
    dx = _compute("backprop_input", (shape, w, dy, None, *layer), _GRADIENT, shapes)
    return dx if batched else dx.squeeze(0)


@_with_runtime_errors
def _weight_gradient(
    rank: int,
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``torch.nn.grad.{name}``: the gradient of ``conv{rank}d`` with respect to weight.

    Args:
        input: (N, C, {x}).
        weight_size: shape of the weight, (K, C / groups, {w}).
        grad_output: (N, K, {y}), the gradient with respect to the output.
        stride, padding, dilation, groups: parameters of the convolution.

    Returns:
        A tensor of shape ``weight_size``, which is differentiable.

    Raises:
        ConvError: the convolution is invalid, or its output does not have the shape of
            ``grad_output``.
        ConvTypeError, DeviceError: as for ``conv1d``.

    >>> x, dy = torch.ones(1, 2, {n4}), torch.ones(1, 3, {n2})
    >>> ct.{name}(x, (3, 2, {n3}), dy).shape
    torch.Size([3, 2, {n3}])
    """
    shape = _sizes("weight_size", weight_size)
    if len(shape) != rank + 2:
        raise ConvError(
            f"the weight of a {rank}-D convolution must have {rank + 2} axes",
            f"weight_size is {shown(shape)}",
            f"Pass {rank + 2} sizes",
        )
    x, dy = _cast("input", input, "grad_output", grad_output)
    x, _ = _batched(rank, "input", x)
    dy, _ = _batched(rank, "grad_output", dy)
    layer = _layer(rank, shape[2:], stride, padding, dilation, groups)
    shapes = (x.shape, shape, dy.shape)
    return _compute("backprop_filter", (x, shape, dy, *layer), _GRADIENT, shapes)


# -- the functions ---------------------------------------------------------------------------------

conv1d, conv2d, conv3d = _ranks("conv{}d", _convolution)
conv_transpose1d, conv_transpose2d, conv_transpose3d = _ranks("conv_transpose{}d", _transposed)
conv1d_input, conv2d_input, conv3d_input = _ranks("conv{}d_input", _input_gradient)
conv1d_weight, conv2d_weight, conv3d_weight = _ranks("conv{}d_weight", _weight_gradient)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    dilation: IntOrInts,
    transposed: bool,
    output_padding: IntOrInts,
    groups: int,
) -> Tensor:
    """Compute ``torch.convolution``; the weight determines the number of spatial axes.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv1d`` and ``conv_transpose1d``.
    """
    rank = weight.dim() - 2 if isinstance(weight, Tensor) else 1
    if transposed:
        layer = (stride, padding, output_padding, groups, dilation)
        return _transposed(rank, input, weight, bias, *layer)
    return _convolution(rank, input, weight, bias, stride, padding, dilation, groups)


@_with_runtime_errors
def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: IntOrInts,
    padding: IntOrInts,
    dilation: IntOrInts,
    transposed: bool,
    output_padding: IntOrInts,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute ``torch.ops.aten.convolution_backward``, which ``torch.nn.grad`` calls.

    Args:
        grad_output: (N, K, spatial), the gradient with respect to the output.
        input, weight: operands of the convolution; only the shape of an operand is used for its own
            gradient.
        bias_sizes: ignored.
        stride, padding, dilation, groups: parameters of the convolution.
        transposed: must be False.
        output_padding: ignored.
        output_mask: whether to compute the gradients with respect to input, weight and bias.

    Returns:
        The three gradients; None for each gradient that is not computed.

    Raises:
        ConvError: the convolution is transposed, or is invalid.
        ConvTypeError, DeviceError: as for ``conv1d``.
    """
    if transposed:
        raise ConvError(
            "the convolution of convolution_backward must not be transposed",
            "got transposed=True",
            "Differentiate cupyconv.torch.conv_transpose1d, conv_transpose2d or conv_transpose3d",
        )
    dy, x, w = _cast("grad_output", grad_output, "input", input, "weight", weight)
    layer = _layer(weight.dim() - 2, w.shape[2:], stride, padding, dilation, groups)
    shapes = (x.shape, w.shape, dy.shape)
    dx_arguments = (list(x.shape), w, dy, None, *layer)
    dw_arguments = (x, list(w.shape), dy, *layer)
    return (
        _compute("backprop_input", dx_arguments, _GRADIENT, shapes) if output_mask[0] else None,
        _compute("backprop_filter", dw_arguments, _GRADIENT, shapes) if output_mask[1] else None,
        operators.sum_pixels(dy) if output_mask[2] else None,
    )


# -- operands and rules ----------------------------------------------------------------------------


def _compute(
    operator: str,
    arguments: tuple[Any, ...],
    names: Names,
    shapes: tuple[Any, ...],
    batched: bool = True,
    add: Tensor | None = None,
) -> Any:
    """Compute an operator, using the caller's tensor names in errors.

    Args:
        operator: name of the operator.
        arguments: its arguments; the last four are stride, padding, dilation and groups.
        names: the caller's names of the layer's tensors.
        shapes: shapes of x, w and y.
        batched: whether the caller's x has the batch axis.
        add: tensor that "forward" adds to its result.
    """
    optional = {} if add is None else {"add": add}
    if torch.compiler.is_dynamo_compiling():
        return getattr(derivatives, operator)(*arguments, **optional)
    try:
        return getattr(derivatives, operator)(*arguments, **optional)
    except (ConvError, RuntimeError):  # PyTorch raises RuntimeError for sizes that overflow
        sizes = ("filter_shape",) if operator == "backprop_filter" else ()
        if operator == "backprop_input" and names is _GRADIENT:
            sizes = ("input_shape",)
        bias = {"forward": arguments[2], "backprop_input": arguments[3]}.get(operator)
        bias_shape = None if bias is None else tuple(bias.shape)
        call = arguments[-4:], names, sizes, bias_shape
        try:
            operators.require_layer(shapes, *call)
        except ConvError as error:
            shape = (*shapes[0][1:2], 1, *shapes[0][2:])
            if not batched and _fits((shape, *shapes[1:]), *call):
                text = f"add the channel axis: {'x'.join(map(str, shape))}"
                error.offer([(text,), *error.fixes])
            raise
        raise


def _fits(shapes: tuple[Any, ...], *call: Any) -> bool:
    """Return whether a call with these shapes is valid."""
    try:
        operators.require_layer(shapes, *call)
    except ConvError:
        return False
    return True


def _require_result(x: Tensor, w: Tensor, extra: list[int], layer: _Layer) -> None:
    """Check the sizes of a transposed convolution's result, as ``cupyconv.conv_transpose`` does."""
    strides, pads, dilations, groups = layer
    sides = tuple(zip(pads[::2], pads[1::2], strict=True))
    options = ConvOptions(tuple(strides), sides, tuple(dilations), groups)
    given: dict[str, Any] = {
        "output_shape": tuple(x.shape),
        "filter_shape": tuple(w.shape),
        "input_shape": None,
        "output_padding": tuple(extra),
        **options._asdict(),
        "dtype": "float32",
    }
    offering(partial(transposed_problem, _TRANSPOSED), _TRANSPOSED, given)


def _has_no_channels(x: Tensor, w: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.shape[1] == 0 == w.shape[1] and w.shape[0] > 0


def _without_channels(x: Tensor, w: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
    """Return PyTorch's result for no input channels: no output channels, and zero gradients."""
    strides, pads, dilations, _ = layer
    shape = [x.shape[0], 0]
    for i, size in enumerate(x.shape[2:]):
        # Build a problem of one channel and this axis, to raise the usual errors for invalid sizes.
        window: dict[str, Any] = {"stride": strides[i], "dilation": dilations[i]}
        sides = tuple(pads[2 * i : 2 * i + 2])
        problem = ConvProblem((1, 1, size), (1, 1, w.shape[2 + i]), padding=(sides,), **window)
        shape += problem.output_sizes
    operands = (x, w) if bias is None else (x, w, bias)
    total = sum(operand.sum() for operand in operands)
    return total.expand(shape).clone(memory_format=torch.contiguous_format)


def _operands(
    rank: int, name: str, data: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor | None], bool]:
    """Return the tensors of a call with a batch axis, and whether the input had a batch axis."""
    if bias is None:
        data, weight = _cast(name, data, "weight", weight)
    else:
        data, weight, bias = _cast(name, data, "weight", weight, "bias", bias)
    if weight.dim() != rank + 2:
        raise ConvError(
            f"the weight of a {rank}-D convolution must have {rank + 2} axes",
            f"got {_shape_text(weight)}",
            f"Use the function for {weight.dim() - 2} spatial axes"
            if weight.dim() - 2 in formats.SPATIAL_AXES
            else "Reshape it",
        )
    data, batched = _batched(rank, name, data)
    return (data, weight, bias), batched


def _batched_addend(add: Tensor, result: tuple[int, ...] | None, batched: bool) -> Tensor:
    """Return the addend with a batch axis.

    Args:
        result: shape of the result, with a batch axis, which the addend must have; None for no
            check.
        batched: whether the caller's tensors have a batch axis.
    """
    if result is not None:
        require_add("add", tuple(add.shape), result if batched else result[1:])
    return add if batched else add.unsqueeze(0)


def _batched(rank: int, name: str, data: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor with a batch axis, and whether it had a batch axis before."""
    if data.dim() == rank + 2:
        return data, True
    if data.dim() == rank + 1:
        return data.unsqueeze(0), False
    raise ConvError(
        f"the {name} of a {rank}-D convolution must have {rank + 2} axes, or {rank + 1} without a "
        "batch",
        f"got {_shape_text(data)}",
        "Reshape it, or use the function for another number of spatial axes",
    )


def _cast(*named: Any) -> list[Tensor]:
    """Cast the tensors of a call as autocast does; require one dtype and one device.

    Args:
        named: names, each followed by its tensor.
    """
    names, tensors = named[::2], list(named[1::2])
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            text = f"{name} must be a tensor: got {type(tensor).__name__}"
            if hasattr(tensor, "__dlpack__"):
                text += (
                    ". Convert it with torch.from_dlpack, or call a function of cupyconv such as "
                    "conv_forward"
                )
            raise ConvTypeError(text)
        foreign.require_dense(name, tensor, torch)
    if torch.jit.is_tracing():
        raise ConvTypeError(
            "torch.jit.trace does not see custom operators' arguments: use torch.export or "
            "torch.compile, or trace PyTorch's own convolutions"
        )
    device = tensors[0].device
    if device.type not in _DEVICES:
        raise ConvTypeError(
            f"tensors must be on the CPU or on a CUDA device: {names[0]} is on {device}. "
            f"Move them, for example {names[0]}.cpu()"
        )
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        # As for PyTorch's own convolutions, autocast converts all floating-point dtypes but
        # float64.
        dtype = torch.get_autocast_dtype(device.type)
        tensors = [
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in tensors
        ]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != device:
            raise ConvTypeError(
                f"all tensors must be on one device: {names[0]} is on {device}, {name} on "
                f"{tensor.device}. Move one, for example {name}.to({str(device)!r})"
            )
        if tensor.dtype not in DTYPES or tensor.dtype != tensors[0].dtype:
            raise _dtype_error(dict(zip(names, tensors, strict=True)))
    return tensors


def _dtype_error(tensors: dict[str, Tensor]) -> ConvTypeError:
    """Return the error for unsupported or different dtypes."""
    words = {name: DTYPES.get(tensor.dtype) for name, tensor in tensors.items()}
    known = [t.dtype for t in tensors.values() if t.dtype in DTYPES]
    is_complex = any(tensor.is_complex() for tensor in tensors.values())
    default = torch.complex64 if is_complex else (known or [torch.float32])[0]
    target = next((dtype for dtype in known if dtype.is_complex), default)
    steps = [f"{name}.to({target})" for name, t in tensors.items() if t.dtype != target]
    way_out = f"for example {' and '.join(steps)}"
    for name, word in words.items():
        if word is None:
            return ConvTypeError(
                f"dtype must be one of {', '.join(ITEMSIZE)}: {name} is {tensors[name].dtype}. "
                f"Convert it, {way_out}"
            )
    (first, tensor), *others = tensors.items()
    name, other = next(entry for entry in others if entry[1].dtype != tensor.dtype)
    return ConvTypeError(
        f"all tensors must have one dtype: {first} is {tensor.dtype}, {name} is {other.dtype}. "
        f"Convert one, {way_out}"
    )


_Layer = tuple[list[int], list[int], list[int], int]
"""Strides, paddings (before and after each axis), dilations and groups."""


def _layer(
    rank: int,
    taps: Sequence[int],
    stride: IntOrInts,
    padding: Padding,
    dilation: IntOrInts,
    groups: Any,
) -> _Layer:
    """Return the arguments of a layer in the operators' form; ``taps`` are the filter's sizes."""
    strides = _per_axis("stride", stride, rank)
    dilations = _per_axis("dilation", dilation, rank)
    if not isinstance(padding, str):
        pads = [p for p in _per_axis("padding", padding, rank) for _ in "ba"]
    elif padding == "valid":
        pads = [0] * (2 * rank)
    else:
        pads = _same_pads(padding, [(taps[i] - 1) * dilations[i] for i in range(rank)], strides)
    count = _index("groups", groups)
    if count < 1:
        raise ConvError("groups must be at least 1", f"got {count}", "Use 1 or more")
    return strides, pads, dilations, count


def _same_pads(padding: str, spans: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the paddings of PyTorch's "same"; ``spans`` is as for ``unknown_padding``."""
    if padding != "same":
        raise unknown_padding(_CONVOLUTION, padding, ("valid", "same"), spans, _own_values)
    if any(s != 1 for s in strides):
        raise ConvError(
            "the stride must be 1 with PyTorch's padding='same'",
            f"got a stride of {strides}",
            "Pass integers, or call cupyconv.conv_forward, which has TensorFlow's 'same'",
        )
    return [p for span in spans for p in (span // 2, span - span // 2)]


def _own_values(mode: str) -> str | None:
    """Return code that pads the input with its own values, as ``problem.numpy_pad`` does."""
    own = {"circular": "circular", "wrap": "circular", "reflect": "reflect"}
    own |= dict.fromkeys(("replicate", "edge"), "replicate")
    return own.get(mode) and f"torch.nn.functional.pad(input, ..., mode={own[mode]!r})"


def _per_axis(what: str, value: IntOrInts, rank: int) -> list[int]:
    """Return one integer per spatial axis; like PyTorch, accept a list with one value for all."""
    items: Any = value if is_sequence(value) else [value]
    values = [_index(what, item) for item in items]
    if len(values) == 1:
        values = values * rank
    if len(values) != rank:
        raise ConvError(
            f"{what} must be one integer, or one for each spatial axis",
            count_text(len(values), rank),
            f"Pass one integer, or {rank}",
        )
    return values


def _sizes(what: str, value: Any) -> list[int]:
    """Return a shape, whose sizes may be symbolic during compilation."""
    sizes = value if is_sequence(value) else integers(what, value)
    return [_index(what, size) for size in sizes]


def _index(what: str, value: Any) -> int:
    """Return a value as an int; keep an integer that is symbolic during compilation."""
    keeps = torch.compiler.is_compiling() or isinstance(value, torch.SymInt)
    return value if keeps and isinstance(value, (int, torch.SymInt)) else integer(what, value)


def _shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
