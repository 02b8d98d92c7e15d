"""PyTorch's signatures, and how their arguments are said to the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyconv import formats
from cupyconv.errors import ConvError, ConvTypeError, shown
from cupyconv.problem import ITEMSIZE, ConvAxis, ConvProblem, Names, integer, integers, is_sequence
from cupyconv.torch import derivatives, operators
from cupyconv.torch.operators import DTYPES

IntOrInts = int | Sequence[int]
Padding = Literal["valid", "same"] | IntOrInts

_DEVICES = ("cpu", "cuda", "meta")

_CONVOLUTION = Names(w="the weight", y="the output")
_TRANSPOSED = Names("the result", "the weight", "the input")
_GRADIENT = Names(w="the weight", y="grad_output", x_shape="input_size", w_shape="weight_size")


# -- torch.nn.functional ---------------------------------------------------------------------------


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv1d``.

    Args:
        input: (N, C, W), or (C, W) without a batch.
        weight: (K, C / groups, S).
        bias: (K,).
        stride, dilation: an int, or one per spatial axis.
        padding: an int, one per spatial axis, "valid", or with a stride of 1 "same".
        groups: C and K are split into this many independent convolutions.

    Returns:
        (N, K, Q), or (K, Q).

    Raises:
        ConvError: no such convolution exists.
        ConvTypeError: a tensor's dtype, device or kind is not supported, or two differ.
        DeviceError: a CUDA tensor, and CuPy is not installed.
    """
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv2d``: as ``conv1d``, with (H, W), (R, S) and (P, Q).

    The result is channels_last in memory if the input or the weight is.
    """
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.functional.conv3d``: as ``conv1d``, with (D, H, W), (T, R, S) and (Z, P, Q).

    The result is channels_last_3d in memory if the input or the weight is.
    """
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """``torch.nn.functional.conv_transpose1d``.

    Args:
        input: (N, K, Q), or (K, Q) without a batch.
        weight: (K, C / groups, S).
        bias: (C,).
        stride, padding, dilation, groups: of the convolution that is transposed.
        output_padding: how many pixels the result has beyond the least that go with ``input``;
            less than the stride, or than the dilation.

    Returns:
        (N, C, W), or (C, W).

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv1d``.
    """
    return _transposed(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """``torch.nn.functional.conv_transpose2d``: as ``conv_transpose1d``, from (P, Q) to (H, W)."""
    return _transposed(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """``torch.nn.functional.conv_transpose3d``: from (Z, P, Q) to (D, H, W)."""
    return _transposed(3, input, weight, bias, stride, padding, output_padding, groups, dilation)


# -- torch.nn.grad ---------------------------------------------------------------------------------


def conv1d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv1d_input``: the gradient of ``conv1d`` with respect to its input.

    Args:
        input_size: shape of the input, (N, C, W).
        weight: (K, C / groups, S).
        grad_output: (N, K, Q), the gradient with respect to the output.
        stride, padding, dilation, groups: of the convolution.

    Returns:
        A tensor of shape ``input_size``, which can be differentiated further.

    Raises:
        ConvError: ``grad_output`` does not belong to this input; others as for ``conv1d``.
    """
    return _input_gradient(1, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv2d_input``: as ``conv1d_input``."""
    return _input_gradient(2, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv3d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv3d_input``: as ``conv1d_input``."""
    return _input_gradient(3, input_size, weight, grad_output, stride, padding, dilation, groups)


def conv1d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv1d_weight``: the gradient of ``conv1d`` with respect to its weight.

    Args:
        input: (N, C, W).
        weight_size: shape of the weight, (K, C / groups, S).
        grad_output: (N, K, Q), the gradient with respect to the output.
        stride, padding, dilation, groups: of the convolution.

    Returns:
        A tensor of shape ``weight_size``, which can be differentiated further.

    Raises:
        ConvError: ``grad_output`` does not belong to this input; others as for ``conv1d``.
    """
    return _weight_gradient(1, input, weight_size, grad_output, stride, padding, dilation, groups)


def conv2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv2d_weight``: as ``conv1d_weight``."""
    return _weight_gradient(2, input, weight_size, grad_output, stride, padding, dilation, groups)


def conv3d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: IntOrInts = 1,
    padding: Padding = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.nn.grad.conv3d_weight``: as ``conv1d_weight``."""
    return _weight_gradient(3, input, weight_size, grad_output, stride, padding, dilation, groups)


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
    """``torch.convolution``: ``conv1d`` or ``conv_transpose1d`` and their like, by the weight.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for these.
    """
    rank = weight.dim() - 2 if isinstance(weight, Tensor) else 1
    if transposed:
        more = (stride, padding, output_padding, groups, dilation)
        return _transposed(rank, input, weight, bias, *more)
    return _convolution(rank, input, weight, bias, stride, padding, dilation, groups)


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
    """``torch.ops.aten.convolution_backward``, which the functions of ``torch.nn.grad`` call.

    Args:
        grad_output: (N, K, spatial), the gradient with respect to the output.
        input, weight: of the convolution; of one whose counterpart is wanted, only the shape.
        bias_sizes: of no account.
        stride, padding, dilation, groups: of the convolution.
        transposed, output_padding: for a transposed one, which is refused.
        output_mask: which of the gradients with respect to input, weight and bias are computed.

    Returns:
        These gradients; None for those that were not asked for.

    Raises:
        ConvError: the convolution is transposed; others as for ``conv1d``.
    """
    window = (stride, padding, dilation, groups)
    return _gradients(grad_output, input, weight, window, transposed, output_mask)


# -- from PyTorch's arguments to the operators -----------------------------------------------------


class _RefusedCall(ConvError, RuntimeError):
    """A ConvError for programs that expect PyTorch's errors."""


class _RefusedTensor(ConvTypeError, RuntimeError):
    """A ConvTypeError for programs that expect PyTorch's errors."""


def _refusing_as_pytorch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors are RuntimeErrors too."""

    @wraps(function)
    def refusing(*given: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*given)
        try:
            return function(*given)
        except ConvError as error:
            words = (error.rule, error.values, error.remedy)
            raise _RefusedCall(*words, axis=error.axis) from None
        except ConvTypeError as error:
            raise _RefusedTensor(*error.args) from None

    return refusing


@_refusing_as_pytorch
def _convolution(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: Padding,
    dilation: IntOrInts,
    groups: int,
) -> Tensor:
    (x, w, b), batched = _operands(rank, "input", input, weight, bias)
    strides, pads, dilations = _window(rank, w.shape[2:], stride, padding, dilation)
    groups = _groups(groups)
    if _has_no_channels(x, w):
        y = _without_channels(x, w, b, strides, pads, dilations)
    else:
        _require_bias(b, w.shape[0], "the weight")
        given = (x, w, b, strides, pads, dilations, groups)
        y = _computed("forward", given, _CONVOLUTION, (x.shape, w.shape, None))
    return y if batched else y.squeeze(0)


@_refusing_as_pytorch
def _transposed(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
) -> Tensor:
    if isinstance(padding, str):
        raise ConvError(
            "the padding of a transposed convolution is a number",
            f"got {shown(padding)}",
            "Pass an integer, or one for each spatial axis",
        )
    (x, w, b), batched = _operands(rank, "input", input, weight, bias)
    strides, pads, dilations = _window(rank, w.shape[2:], stride, padding, dilation)
    extra, groups = _per_axis("output_padding", output_padding, rank), _groups(groups)
    sizes, missing = [], []
    for i in range(rank):
        if extra[i] < 0 or extra[i] >= max(strides[i], dilations[i]):
            raise ConvError(
                "output_padding must be at least 0 and less than the stride or the dilation",
                f"got {extra[i]} with stride {strides[i]} and dilation {dilations[i]}",
                f"Use 0 to {max(strides[i], dilations[i]) - 1}",
                axis=formats.SPATIAL_AXES[rank][i],
            )
        size, taps, before = x.shape[2 + i], w.shape[2 + i], pads[2 * i]
        axis = ConvAxis("", 0, taps, strides[i], dilations[i], before, before, "explicit")
        sizes.append(axis.first_input_size_for(size) + extra[i])
        # From the stride on, the result has more windows than x has pixels: these would be zero.
        missing.append(extra[i] // strides[i])
    if any(missing):
        x = torch.nn.functional.pad(x, [n for last in reversed(missing) for n in (0, last)])
    shape = [x.shape[0], w.shape[1] * groups, *sizes]
    _require_bias(b, shape[1], "the result")
    if w.is_complex():
        # What the operator multiplies by is its conjugate; a lazy one has no forward mode.
        w = torch.conj_physical(w)
    given = (shape, w, x, b, strides, pads, dilations, groups)
    y = _computed("backprop_input", given, _TRANSPOSED, (shape, w.shape, x.shape))
    return y if batched else y.squeeze(0)


@_refusing_as_pytorch
def _input_gradient(
    rank: int,
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: IntOrInts,
    padding: Padding,
    dilation: IntOrInts,
    groups: int,
) -> Tensor:
    (dy, w, _), batched = _operands(rank, "grad_output", grad_output, weight, None)
    strides, pads, dilations = _window(rank, w.shape[2:], stride, padding, dilation)
    sizes, groups = _sizes("input_size", input_size), _groups(groups)
    shape = sizes if batched else [1, *sizes]
    given = (shape, w, dy, None, strides, pads, dilations, groups)
    dx = _computed("backprop_input", given, _GRADIENT, (shape, w.shape, dy.shape))
    return dx if batched else dx.squeeze(0)


@_refusing_as_pytorch
def _weight_gradient(
    rank: int,
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: IntOrInts,
    padding: Padding,
    dilation: IntOrInts,
    groups: int,
) -> Tensor:
    shape = _sizes("weight_size", weight_size)
    if len(shape) != rank + 2:
        raise ConvError(
            f"the weight of a {rank}-D convolution has {rank + 2} axes",
            f"weight_size is {shown(shape)}",
            f"Pass {rank + 2} sizes",
        )
    x, dy = _cast("input", input, "grad_output", grad_output)
    x, _ = _batched(rank, "input", x)
    dy, _ = _batched(rank, "grad_output", dy)
    strides, pads, dilations = _window(rank, shape[2:], stride, padding, dilation)
    groups = _groups(groups)
    given = (x, shape, dy, strides, pads, dilations, groups)
    return _computed("backprop_filter", given, _GRADIENT, (x.shape, shape, dy.shape))


@_refusing_as_pytorch
def _gradients(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    window: tuple[Any, ...],
    transposed: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if transposed:
        raise ConvError(
            "these are gradients of a convolution",
            "it is a transposed one",
            "Differentiate cupyconv.torch.conv_transpose2d or its like",
        )
    stride, padding, dilation, groups = window
    rank = weight.dim() - 2
    dy, x, w = _cast("grad_output", grad_output, "input", input, "weight", weight)
    layer = (*_window(rank, w.shape[2:], stride, padding, dilation), _groups(groups))
    shapes = (x.shape, w.shape, dy.shape)
    of_x, of_w = (list(x.shape), w, dy, None, *layer), (x, list(w.shape), dy, *layer)
    return (
        _computed("backprop_input", of_x, _GRADIENT, shapes) if wanted[0] else None,
        _computed("backprop_filter", of_w, _GRADIENT, shapes) if wanted[1] else None,
        operators.sum_pixels(dy) if wanted[2] else None,
    )


def _computed(operator: str, given: tuple[Any, ...], names: Names, shapes: tuple[Any, ...]) -> Any:
    """What an operator gives; what it refuses is said in the caller's words.

    Args:
        operator: its name.
        given: its arguments, the last four of them the layer's.
        names: what the caller calls the layer's tensors.
        shapes: theirs.
    """
    if torch.compiler.is_compiling():
        return getattr(operators, operator)(*given)
    # While a transform is active, operators that it can look into.
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    try:
        return getattr(derivatives if transformed else operators, operator)(*given)
    except (ConvError, RuntimeError):  # PyTorch's own of sizes that it does not count
        operators.require_layer(names, shapes, given[-4:])
        raise


def _require_bias(bias: Tensor | None, channels: int, owner: str) -> None:
    if bias is not None and bias.shape != (channels,):
        raise ConvError(
            "the bias must have one value for each output channel",
            f"bias is {_shape_text(bias)}, {owner} has {channels} output channels",
            f"Pass a bias of shape ({channels},)",
        )


def _has_no_channels(x: Tensor, w: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.shape[1] == 0 == w.shape[1] and w.shape[0] > 0


def _without_channels(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
) -> Tensor:
    """What PyTorch makes of no input channels: no output channels, and gradients of zero."""
    shape = [x.shape[0], 0]
    for i, size in enumerate(x.shape[2:]):
        before, after = pads[2 * i : 2 * i + 2]
        # With one channel, to be refused as any other.
        axis = ConvProblem(
            (1, 1, size),
            (1, 1, w.shape[2 + i]),
            stride=strides[i],
            padding=((before, after),),
            dilation=dilations[i],
        ).axes[0]
        shape.append(axis.output)
    operands = (x, w) if bias is None else (x, w, bias)
    total = sum(one.sum() for one in operands)
    return total.expand(shape).clone(memory_format=torch.contiguous_format)


def _operands(
    rank: int, name: str, data: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor | None], bool]:
    """The tensors of a call, with a batch; and whether the caller's had one."""
    if bias is None:
        data, weight = _cast(name, data, "weight", weight)
    else:
        data, weight, bias = _cast(name, data, "weight", weight, "bias", bias)
    if weight.dim() != rank + 2:
        raise ConvError(
            f"the weight of a {rank}-D convolution has {rank + 2} axes",
            f"got {_shape_text(weight)}",
            f"Use the function for {weight.dim() - 2} spatial axes"
            if weight.dim() - 2 in formats.SPATIAL_AXES
            else "Reshape it",
        )
    data, batched = _batched(rank, name, data)
    return (data, weight, bias), batched


def _batched(rank: int, name: str, data: Tensor) -> tuple[Tensor, bool]:
    """The tensor with a batch axis, and whether it had one."""
    if data.dim() == rank + 2:
        return data, True
    if data.dim() == rank + 1:
        return data.unsqueeze(0), False
    raise ConvError(
        f"the {name} of a {rank}-D convolution has {rank + 2} axes, or {rank + 1} without a batch",
        f"got {_shape_text(data)}",
        "Reshape it, or use the function for another number of spatial axes",
    )


def _cast(*named: Any) -> list[Tensor]:
    """The tensors of a call, as autocast wants them; all of one dtype on one device.

    Args:
        named: names, each followed by its tensor.
    """
    names, tensors = named[::2], list(named[1::2])
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise ConvTypeError(
                f"{name} must be a tensor: got {type(tensor).__name__}. "
                "Convert it with torch.from_dlpack, or call cupyconv.conv_forward and its like"
            )
        if getattr(tensor, "is_nested", False):
            raise ConvTypeError(
                f"{name} is a nested tensor, whose parts differ in size. Convolve them one by one, "
                f"as {name}.unbind() gives them, or pad them to one size"
            )
        if tensor.layout is not torch.strided:
            raise ConvTypeError(
                f"{name} must be a dense tensor: its layout is {tensor.layout}. "
                f"Pass {name}.to_dense()"
            )
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
        # What PyTorch does for its own convolutions: all but float64 are computed in this dtype.
        wanted = torch.get_autocast_dtype(device.type)
        tensors = [
            t.to(wanted) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in tensors
        ]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != device:
            raise ConvTypeError(
                f"all tensors must be on one device: {names[0]} is on {device}, {name} on "
                f"{tensor.device}. Move one, for example {name}.to({str(device)!r})"
            )
        if tensor.dtype not in DTYPES:
            raise ConvTypeError(
                f"dtype must be one of {', '.join(ITEMSIZE)}: {name} is {tensor.dtype}. Convert "
                f"it, for example {name}.{'cfloat' if tensor.is_complex() else 'float'}()"
            )
        if tensor.dtype != tensors[0].dtype:
            raise ConvTypeError(
                f"all tensors must have one dtype: {names[0]} is {tensors[0].dtype}, {name} is "
                f"{tensor.dtype}. Convert one, for example {name}.to({tensors[0].dtype})"
            )
    return tensors


def _window(
    rank: int,
    taps: Sequence[int],
    stride: IntOrInts,
    padding: Padding,
    dilation: IntOrInts,
) -> tuple[list[int], list[int], list[int]]:
    """Strides, paddings (before and after of each axis in turn) and dilations."""
    strides = _per_axis("stride", stride, rank)
    dilations = _per_axis("dilation", dilation, rank)
    if not isinstance(padding, str):
        return strides, [p for p in _per_axis("padding", padding, rank) for _ in "ba"], dilations
    if padding == "valid":
        return strides, [0] * (2 * rank), dilations
    if padding != "same":
        raise ConvError(
            "padding must be a number, 'same' or 'valid'",
            f"got {shown(padding)}",
            "Use one of them",
        )
    if any(s != 1 for s in strides):
        raise ConvError(
            "PyTorch's padding='same' goes with a stride of 1",
            f"got a stride of {strides}",
            "Pass the padding as numbers; cupyconv.conv_forward has TensorFlow's 'same'",
        )
    totals = [(taps[i] - 1) * dilations[i] for i in range(rank)]
    return strides, [p for t in totals for p in (t // 2, t - t // 2)], dilations


def _per_axis(what: str, value: IntOrInts, rank: int) -> list[int]:
    """One integer for each spatial axis, of which PyTorch also takes a list of one for all."""
    given: Any = value if is_sequence(value) else [value]
    values = [_index(what, one) for one in given]
    if len(values) == 1:
        values = values * rank
    if len(values) != rank:
        raise ConvError(
            f"{what} must be one integer, or one for each spatial axis",
            f"got {len(values)} values for {rank} spatial axes",
            f"Pass one integer, or {rank}",
        )
    return values


def _sizes(what: str, value: Any) -> list[int]:
    """A shape, whose sizes a compiler may have left open."""
    given = value if is_sequence(value) else integers(what, value)
    return [_index(what, one) for one in given]


def _groups(value: Any) -> int:
    groups = _index("groups", value)
    if groups < 1:
        raise ConvError("groups must be at least 1", f"got {groups}", "Use groups=1")
    return groups


def _index(what: str, value: Any) -> int:
    """An integer, of whatever library; one that a compiler has left open stays so."""
    is_open = torch.compiler.is_compiling() or isinstance(value, torch.SymInt)
    return value if is_open and isinstance(value, (int, torch.SymInt)) else integer(what, value)


def _shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
