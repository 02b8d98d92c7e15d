"""The passes as custom operators of PyTorch, with kernels, fake kernels and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyconv import arrays, foreign, operations
from cupyconv.errors import ConvError, Names
from cupyconv.gpu.capture import LastingAllocator
from cupyconv.operands import require_add, require_bias
from cupyconv.problem import (
    ITEMSIZE,
    ConvAxis,
    ConvProblem,
    dtype_name,
    named_problem,
    offering,
    require_output,
)

try:
    from torch.utils import flop_counter
except ImportError:  # some PyTorch builds lack it
    flop_counter = None

_PLAIN = Names()

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ITEMSIZE}
"""Names of the supported PyTorch dtypes."""

_LAYER = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_SCHEMAS = (
    f"forward(Tensor x, Tensor w, Tensor? bias, {_LAYER}, Tensor? add=None) -> Tensor",
    f"backprop_input(SymInt[] input_shape, Tensor w, Tensor dy, Tensor? bias, {_LAYER}) -> Tensor",
    f"backprop_filter(Tensor x, SymInt[] filter_shape, Tensor dy, {_LAYER}) -> Tensor",
)
"""Schemas of the operators.

``padding`` has two entries per spatial axis: before and after.  ``add`` has the result's shape and
is added to it.  With a bias, ``backprop_input`` is a transposed convolution.
"""

_library = torch.library.Library("cupyconv", "DEF")
for _schema in _SCHEMAS:
    # The result's memory order follows the operands, so a compiler must keep their strides.
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))

forward = torch.ops.cupyconv.forward.default
backprop_input = torch.ops.cupyconv.backprop_input.default
backprop_filter = torch.ops.cupyconv.backprop_filter.default


def _run_forward(x, w, bias, stride, padding, dilation, groups, add=None):
    problem, layer = _layer((x.shape, w.shape, None), x.dtype, (stride, padding, dilation, groups))
    y = _empty(problem.output_shape, x, w)
    with _place(x.device):
        b, a = (None if tensor is None else _memory(tensor) for tensor in (bias, add))
        operations.conv_forward(_memory(x), _memory(w), b, add=a, out=_memory(y), **layer)
    return y


def _run_backprop_input(input_shape, w, dy, bias, *window):
    _, layer = _layer((input_shape, w.shape, dy.shape), w.dtype, window)
    dx, shape = _empty(input_shape, dy, w), tuple(input_shape)
    with _place(w.device):
        operands = (_memory(w), _memory(dy))
        if bias is None:
            operations.conv_backprop_input(shape, *operands, out=_memory(dx), **layer)
        else:
            w_memory, dy_memory = operands
            if w.is_complex():  # conv_transpose does not conjugate w
                w_memory = _memory(w.conj())
            arguments = {**layer, "output_shape": shape, "out": _memory(dx)}
            operations.conv_transpose(dy_memory, w_memory, _memory(bias), **arguments)
    return dx


def _run_backprop_filter(x, filter_shape, dy, *window):
    _, layer = _layer((x.shape, filter_shape, dy.shape), x.dtype, window)
    dw = _empty(filter_shape, x, dy)
    with _place(x.device):
        operations.conv_backprop_filter(
            _memory(x), tuple(filter_shape), _memory(dy), out=_memory(dw), **layer
        )
    return dw


def require_layer(
    shapes: tuple[Any, ...],
    layer: tuple[Any, ...],
    names: Names = _PLAIN,
    sizes: tuple[str, ...] = (),
    bias_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check the shapes of a call, unless some are symbolic.

    Args:
        shapes: shapes of x, w and y; None if y is not an argument.
        layer: stride, padding, dilation and groups, as the operators take them.
        names: the caller's names of the tensors.
        sizes: names of the shapes that are arguments of the call: "input_shape", "filter_shape".
        bias_shape: shape of the bias over y's channels, or over x's channels if y is an argument.
        dtype: dtype of the tensors.

    Raises:
        ConvError: the convolution is invalid, or its output does not have y's shape.
    """
    *window, groups = layer
    if not _is_symbolic(*(shape or () for shape in shapes), *window, (groups,)):
        _layer(shapes, dtype, layer, names, sizes, bias_shape)


def result_shape(
    x_shape: Sequence[int], w_shape: Sequence[int], *layer: Any
) -> tuple[int, ...] | None:
    """Return the shape of ``forward``'s result.

    Return None if the layer is invalid, and during compilation, when sizes may be symbolic.

    Args:
        layer: stride, padding, dilation and groups, as the operators take them.
    """
    if torch.compiler.is_compiling() or _is_symbolic(x_shape, w_shape, *layer[:3], layer[3:]):
        return None
    try:
        problem, _ = _layer((x_shape, w_shape, None), torch.float32, layer)
    except ConvError:
        return None
    return problem.output_shape


def _layer(
    shapes: tuple[Any, ...],
    dtype: torch.dtype,
    layer: tuple[Any, ...],
    names: Names = _PLAIN,
    sizes: tuple[str, ...] = (),
    bias_shape: tuple[int, ...] | None = None,
) -> tuple[ConvProblem, dict[str, Any]]:
    """Check a call; return its problem and the keyword arguments of cupyconv's functions.

    The arguments are those of ``require_layer``.
    """
    *window, groups = layer
    plain = tuple(None if shape is None else tuple(shape) for shape in shapes)
    plain_layer = (*map(tuple, window), groups)
    return _checked_layer(plain, dtype, plain_layer, names, sizes, bias_shape)


@lru_cache(maxsize=4096)
def _checked_layer(
    shapes: tuple[tuple[int, ...] | None, ...],
    dtype: torch.dtype,
    window: tuple[Any, ...],
    names: Names,
    sizes: tuple[str, ...],
    bias_shape: tuple[int, ...] | None,
) -> tuple[ConvProblem, dict[str, Any]]:
    stride, padding, dilation, groups = window
    layer: dict[str, Any] = {
        "stride": stride,
        "padding": tuple(zip(padding[::2], padding[1::2], strict=True)),
        "dilation": dilation,
        "groups": groups,
    }
    remedy = "Convert the tensors, for example x.to(torch.float32)"
    name = dtype_name(DTYPES.get(dtype, dtype), remedy)
    plain: dict[str, Any] = {"data_format": None, "filter_format": None, "dtype": name}
    tensors = dict(zip(("input_shape", "filter_shape", "output_shape"), shapes, strict=True))

    def require(output_shape: tuple[int, ...] | None, **layer: Any) -> ConvProblem:
        problem = named_problem(names, **layer)
        if output_shape is not None:
            require_output(names, problem, output_shape)
        if bias_shape is not None:
            forward = output_shape is None
            channels, owner = (problem.K, names.w) if forward else (problem.C, names.x)
            require_bias("bias", bias_shape, channels, owner)
        return problem

    problem = offering(require, names, {**tensors, **plain, **layer}, sizes)
    return problem, layer


def _memory(tensor: Tensor) -> Any:
    """Return a NumPy or CuPy array over the memory of a tensor that PyTorch passed to an operator.

    PyTorch passes the functions above no tensor that ``arrays.take`` would reject, except dual
    tensors in direct calls of the operator.

    Raises:
        ConvTypeError: the tensor is dual.
    """
    foreign.require_no_tangent("tensor", tensor, torch)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return arrays.cupy().from_dlpack(tensor)
    return arrays.tensor_memory(tensor)


def allocate(size: int, device: torch.device) -> Tensor:
    """Allocate ``size`` bytes from PyTorch's caching allocator, for PyTorch's current stream."""
    return torch.empty(size, dtype=torch.uint8, device=device)


@cache
def _allocator(device: torch.device) -> LastingAllocator:
    return LastingAllocator(lambda size: allocate(size, device))


class _Stream(NamedTuple):
    """PyTorch stream, exported through the CUDA stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer  # protocol version, pointer


@lru_cache(maxsize=256)
def _stream(pointer: int, ordinal: int) -> Any:
    """Return a stream of the current device, whose number is ``ordinal``, as a CuPy stream."""
    return arrays.cupy().cuda.Stream.from_external(_Stream(pointer))


@contextmanager
def _on_cuda(device: torch.device) -> Iterator[None]:
    """Make CuPy use the device, PyTorch's current stream there and PyTorch's allocator."""
    cuda = arrays.require_gpu().cuda
    pointer = torch.cuda.current_stream(device).cuda_stream
    with (
        cuda.Device(device.index),
        _stream(pointer, device.index),
        cuda.using_allocator(_allocator(device)),
    ):
        yield


def _place(device: torch.device) -> AbstractContextManager[None]:
    return _on_cuda(device) if device.type == "cuda" else nullcontext()


def _empty(shape: Sequence[int], *operands: Tensor) -> Tensor:
    """Return an uninitialised result in the memory order of PyTorch's convolutions.

    The order is channels last if an operand is channels last, otherwise contiguous.
    """
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    is_last = order is not None and any(map(_is_channels_last, operands))
    return torch.empty(
        shape,
        dtype=operands[0].dtype,
        device=operands[0].device,
        memory_format=order if is_last else torch.contiguous_format,
    )


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor's strides are channels last, by PyTorch's rules.

    A tensor with one channel or one pixel may match both orders; then the strides of its axes of
    size 1 decide.  If the channel and all spatial axes have equal strides, the tensor counts as
    contiguous.
    """
    if tensor.stride(1) == 0 or 0 in tensor.shape:
        return False
    least = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride, size = tensor.stride(axis), tensor.shape[axis]
        if stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * size if size > 1 else stride
    return True


# -- fake kernels: shapes without data -------------------------------------------------------------


def _forward_shape(x, w, bias, stride, padding, dilation, groups, add=None):
    if not _is_symbolic(x.shape, w.shape, stride, padding, dilation, (groups,)):
        problem, _ = _layer((x.shape, w.shape, None), x.dtype, (stride, padding, dilation, groups))
        if add is not None and not _is_symbolic(add.shape):
            require_add("add", tuple(add.shape), problem.output_shape)
        return _empty(problem.output_shape, x, w)
    sizes = [
        ConvAxis("", size, taps, s, d, before, after, "explicit").output
        for size, taps, s, d, before, after in zip(
            x.shape[2:], w.shape[2:], stride, dilation, padding[::2], padding[1::2], strict=True
        )
    ]
    return _empty((x.shape[0], w.shape[0], *sizes), x, w)


def _backprop_input_shape(input_shape, w, dy, bias, *window):
    require_layer((input_shape, w.shape, dy.shape), window, dtype=w.dtype)
    return _empty(input_shape, dy, w)


def _backprop_filter_shape(x, filter_shape, dy, *window):
    require_layer((x.shape, filter_shape, dy.shape), window, dtype=x.dtype)
    return _empty(filter_shape, x, dy)


def _is_symbolic(*shapes: Sequence[int]) -> bool:
    """Return whether a compiler has made sizes symbolic; symbolic sizes are checked at run time."""
    return any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)


# -- gradients -------------------------------------------------------------------------------------


def sum_pixels(dy: Tensor) -> Tensor:
    """Return the gradient of a bias: dy, summed over all axes but the channels."""
    return dy.sum([0, *range(2, dy.dim())])


class Operators(NamedTuple):
    """The three operators, or functions that compute them under transforms."""

    forward: Callable[..., Tensor]
    backprop_input: Callable[..., Tensor]
    backprop_filter: Callable[..., Tensor]


_OPERATORS = Operators(forward, backprop_input, backprop_filter)
_LAYER_GRADIENTS = (None, None, None, None)  # stride, padding, dilation and groups have none


def set_up_forward(ctx, inputs, output):
    x, w, _bias, *ctx.layer = inputs[:7]  # without add
    ctx.save_for_backward(x, w)


def gradients_of_forward(ops, ctx, dy):
    """Return the gradients with respect to the arguments of ``forward`` without ``add``."""
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    dx = ops.backprop_input(x.shape, w, dy, None, *ctx.layer) if needs_x else None
    dw = ops.backprop_filter(x, w.shape, dy, *ctx.layer) if needs_w else None
    return dx, dw, sum_pixels(dy) if needs_bias else None, *_LAYER_GRADIENTS


def set_up_backprop_input(ctx, inputs, output):
    _, w, dy, _bias, *ctx.layer = inputs
    # Save in PyTorch's order: a checkpoint may recompute the call with PyTorch or with cupyconv.
    ctx.save_for_backward(dy, w)


def gradients_of_backprop_input(ops, ctx, ddx):
    dy, w = ctx.saved_tensors
    _, needs_w, needs_dy, needs_bias, *_ = ctx.needs_input_grad
    dw = ops.backprop_filter(ddx, w.shape, dy, *ctx.layer) if needs_w else None
    ddy = ops.forward(ddx, w, None, *ctx.layer) if needs_dy else None
    return None, dw, ddy, sum_pixels(ddx) if needs_bias else None, *_LAYER_GRADIENTS


def set_up_backprop_filter(ctx, inputs, output):
    x, _, dy, *ctx.layer = inputs
    ctx.save_for_backward(x, dy)


def gradients_of_backprop_filter(ops, ctx, ddw):
    x, dy = ctx.saved_tensors
    needs_x, _, needs_dy, *_ = ctx.needs_input_grad
    dx = ops.backprop_input(x.shape, ddw, dy, None, *ctx.layer) if needs_x else None
    ddy = ops.forward(x, ddw, None, *ctx.layer) if needs_dy else None
    return dx, None, ddy, *_LAYER_GRADIENTS


def _gradients_of_call(ctx, dy):
    """Return the gradients with respect to the arguments of ``forward``, which include ``add``."""
    return *gradients_of_forward(_OPERATORS, ctx, dy), dy if ctx.needs_input_grad[-1] else None


for _name, _kernel, _shape, _gradients, _set_up in (
    ("forward", _run_forward, _forward_shape, _gradients_of_call, set_up_forward),
    (
        *("backprop_input", _run_backprop_input, _backprop_input_shape),
        *(partial(gradients_of_backprop_input, _OPERATORS), set_up_backprop_input),
    ),
    (
        *("backprop_filter", _run_backprop_filter, _backprop_filter_shape),
        *(partial(gradients_of_backprop_filter, _OPERATORS), set_up_backprop_filter),
    ),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cupyconv::{_name}", _shape, lib=_library)
    torch.library.register_autograd(
        f"cupyconv::{_name}", _gradients, setup_context=_set_up, lib=_library
    )


# -- FLOPs -----------------------------------------------------------------------------------------


def _forward_flops(x, w, *_, out_val, **__):
    return _flops(x.shape, w.shape, out_val.shape, w)


def _backprop_input_flops(_shape, w, dy, *_, out_val, **__):
    return _flops(dy.shape, w.shape, out_val.shape, w, transposed=True)


def _backprop_filter_flops(x, _shape, dy, *_, out_val, **__):
    swapped = ((shape[1], shape[0], *shape[2:]) for shape in (x.shape, dy.shape, out_val.shape))
    return _flops(*swapped, x)


def _flops(x_shape, w_shape, y_shape, operand, transposed=False):
    """Return the FLOPs as PyTorch counts them; a complex convolution is three real convolutions."""
    count = flop_counter.conv_flop_count(x_shape, w_shape, y_shape, transposed=transposed)
    return 3 * count if operand.is_complex() else count


if flop_counter is not None:
    for _operator, _formula in (
        (forward, _forward_flops),
        (backprop_input, _backprop_input_flops),
        (backprop_filter, _backprop_filter_flops),
    ):
        flop_counter.register_flop_formula(_operator.overloadpacket, get_raw=True)(_formula)
