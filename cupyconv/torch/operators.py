"""The three passes as custom operators of PyTorch: their kernels, shapes and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cupyconv import arrays, operations
from cupyconv.problem import (
    ITEMSIZE,
    ConvAxis,
    ConvProblem,
    Names,
    dtype_name,
    named_problem,
    require_output,
)

_PLAIN = Names()

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ITEMSIZE}
"""PyTorch's dtypes that are computed, with their names."""

_LAYER = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_SCHEMAS = (
    f"forward(Tensor x, Tensor w, Tensor? bias, {_LAYER}) -> Tensor",
    f"backprop_input(SymInt[] input_shape, Tensor w, Tensor dy, Tensor? bias, {_LAYER}) -> Tensor",
    f"backprop_filter(Tensor x, SymInt[] filter_shape, Tensor dy, {_LAYER}) -> Tensor",
)
"""``padding`` has two entries for each spatial axis: before and after.  With a bias,
``backprop_input`` is a transposed convolution."""

_library = torch.library.Library("cupyconv", "DEF")
for _schema in _SCHEMAS:
    # The result's memory order follows the operands', so a compiler must keep theirs.
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))

forward = torch.ops.cupyconv.forward.default
backprop_input = torch.ops.cupyconv.backprop_input.default
backprop_filter = torch.ops.cupyconv.backprop_filter.default


def _run_forward(x, w, bias, stride, padding, dilation, groups):
    problem, layer = _layer((x.shape, w.shape, None), x.dtype, (stride, padding, dilation, groups))
    y = _empty(problem.output_shape, x, w)
    with _place(x.device):
        b = None if bias is None else _memory(bias)
        operations.conv_forward(_memory(x), _memory(w), b, out=_memory(y), **layer)
    return y


def _run_backprop_input(input_shape, w, dy, bias, stride, padding, dilation, groups):
    window = (stride, padding, dilation, groups)
    _, layer = _layer((input_shape, w.shape, dy.shape), w.dtype, window)
    dx, shape = _empty(input_shape, dy, w), tuple(input_shape)
    with _place(w.device):
        given = (_memory(w), _memory(dy))
        if bias is None:
            operations.conv_backprop_input(shape, *given, out=_memory(dx), **layer)
        else:
            w_memory, dy_memory = given
            if w.is_complex():  # which conv_transpose does not conjugate
                w_memory = _memory(w.conj())
            arguments = {**layer, "output_shape": shape, "out": _memory(dx)}
            operations.conv_transpose(dy_memory, w_memory, _memory(bias), **arguments)
    return dx


def _run_backprop_filter(x, filter_shape, dy, stride, padding, dilation, groups):
    window = (stride, padding, dilation, groups)
    _, layer = _layer((x.shape, filter_shape, dy.shape), x.dtype, window)
    dw = _empty(filter_shape, x, dy)
    with _place(x.device):
        operations.conv_backprop_filter(
            _memory(x), tuple(filter_shape), _memory(dy), out=_memory(dw), **layer
        )
    return dw


def require_layer(names: Names, shapes: tuple[Any, ...], layer: tuple[Any, ...]) -> None:
    """Check a call whose tensors are called by these names, unless sizes of it are left open.

    Args:
        shapes: of x, w and y; None for a y that is not given.
        layer: stride, padding, dilation and groups, as the operators take them.

    Raises:
        ConvError: no such convolution exists, or it does not have this y.
    """
    *window, groups = layer
    if not _is_symbolic(*(shape or () for shape in shapes), *window, (groups,)):
        _layer(shapes, torch.float32, layer, names)


def _layer(
    shapes: tuple[Any, ...],
    dtype: torch.dtype,
    layer: tuple[Any, ...],
    names: Names = _PLAIN,
) -> tuple[ConvProblem, dict[str, Any]]:
    """The problem of a call, which dy fits if there is one, and the library's keywords for it."""
    x, w, dy = (None if shape is None else tuple(shape) for shape in shapes)
    *window, groups = layer
    stride, padding, dilation = map(tuple, window)
    assert x is not None
    assert w is not None
    return _checked_layer(x, w, dy, dtype, stride, padding, dilation, groups, names)


@lru_cache(maxsize=4096)
def _checked_layer(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    dy_shape: tuple[int, ...] | None,
    dtype: torch.dtype,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    names: Names,
) -> tuple[ConvProblem, dict[str, Any]]:
    layer: dict[str, Any] = {
        "stride": stride,
        "padding": tuple(zip(padding[::2], padding[1::2], strict=True)),
        "dilation": dilation,
        "groups": groups,
    }
    plain = {"data_format": None, "filter_format": None}
    name = dtype_name(DTYPES.get(dtype, dtype))
    problem = named_problem(names, x_shape, w_shape, dtype=name, **plain, **layer)
    if dy_shape is not None:
        require_output(names, problem, dy_shape)
    return problem, layer


def _memory(tensor: Tensor) -> Any:
    """The tensor's memory as what the library takes.

    Of CPU tensors an array, which takes a tenth of the time of the exchange through DLPack.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return tensor
    if tensor.dtype is torch.bfloat16:  # which NumPy itself does not have
        return tensor.view(torch.uint16).numpy().view(arrays.numpy_dtype("bfloat16"))
    return tensor.numpy()


@contextmanager
def _on_cuda(device: torch.device) -> Iterator[None]:
    """CuPy on the device, and on the stream that PyTorch uses there."""
    cupy = arrays.require_gpu()
    stream = torch.cuda.current_stream(device).cuda_stream
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream, device.index):
        yield


def _place(device: torch.device) -> AbstractContextManager[None]:
    return _on_cuda(device) if device.type == "cuda" else nullcontext()


def _empty(shape: Sequence[int], *operands: Tensor) -> Tensor:
    """A result of this shape, in the memory order that PyTorch's convolutions would give it.

    Channels last if one of the operands is, else contiguous.
    """
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    last = order is not None and any(map(_is_channels_last, operands))
    return torch.empty(
        shape,
        dtype=operands[0].dtype,
        device=operands[0].device,
        memory_format=order if last else torch.contiguous_format,
    )


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor's strides are those of channels last.

    One of a single channel or of a single pixel may be in both orders; then its strides tell what
    it was made as, but for those that are 1 of the channels and of the batch.
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


# -- their shapes without data ---------------------------------------------------------------------


def _forward_shape(x, w, bias, stride, padding, dilation, groups):
    if not _is_symbolic(x.shape, w.shape, stride, padding, dilation, (groups,)):
        problem, _ = _layer((x.shape, w.shape, None), x.dtype, (stride, padding, dilation, groups))
        return _empty(problem.output_shape, x, w)
    sizes = [
        ConvAxis("", size, taps, s, d, before, after, "explicit").output
        for size, taps, s, d, before, after in zip(
            x.shape[2:], w.shape[2:], stride, dilation, padding[::2], padding[1::2], strict=True
        )
    ]
    return _empty((x.shape[0], w.shape[0], *sizes), x, w)


def _backprop_input_shape(input_shape, w, dy, bias, stride, padding, dilation, groups):
    if not _is_symbolic(input_shape, w.shape, dy.shape, stride, padding, dilation, (groups,)):
        window = (stride, padding, dilation, groups)
        _layer((input_shape, w.shape, dy.shape), w.dtype, window)
    return _empty(input_shape, dy, w)


def _backprop_filter_shape(x, filter_shape, dy, stride, padding, dilation, groups):
    if not _is_symbolic(x.shape, filter_shape, dy.shape, stride, padding, dilation, (groups,)):
        window = (stride, padding, dilation, groups)
        _layer((x.shape, filter_shape, dy.shape), x.dtype, window)
    return _empty(filter_shape, x, dy)


def _is_symbolic(*shapes: Sequence[int]) -> bool:
    """Whether a compiler has left some of the sizes open; the rules are checked when it runs."""
    return any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)


# -- their gradients -------------------------------------------------------------------------------


def sum_pixels(dy: Tensor) -> Tensor:
    """The gradient of a bias."""
    return dy.sum([0, *range(2, dy.dim())])


def _forward_setup(ctx, inputs, output):
    x, w, _bias, *ctx.layer = inputs
    ctx.save_for_backward(x, w)


def _forward_backward(ctx, dy):
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    dx = backprop_input(x.shape, w, dy, None, *ctx.layer) if needs_x else None
    dw = backprop_filter(x, w.shape, dy, *ctx.layer) if needs_w else None
    db = sum_pixels(dy) if needs_bias else None
    return dx, dw, db, None, None, None, None


def _backprop_input_setup(ctx, inputs, output):
    _, w, dy, _bias, *ctx.layer = inputs
    # In the order of PyTorch's own: what a checkpoint computes again may be computed by either.
    ctx.save_for_backward(dy, w)


def _backprop_input_backward(ctx, ddx):
    dy, w = ctx.saved_tensors
    _, needs_w, needs_dy, needs_bias, *_ = ctx.needs_input_grad
    dw = backprop_filter(ddx, w.shape, dy, *ctx.layer) if needs_w else None
    ddy = forward(ddx, w, None, *ctx.layer) if needs_dy else None
    db = sum_pixels(ddx) if needs_bias else None
    return None, dw, ddy, db, None, None, None, None


def _backprop_filter_setup(ctx, inputs, output):
    x, _, dy, *ctx.layer = inputs
    ctx.save_for_backward(x, dy)


def _backprop_filter_backward(ctx, ddw):
    x, dy = ctx.saved_tensors
    needs_x, _, needs_dy, *_ = ctx.needs_input_grad
    dx = backprop_input(x.shape, ddw, dy, None, *ctx.layer) if needs_x else None
    ddy = forward(x, ddw, None, *ctx.layer) if needs_dy else None
    return dx, None, ddy, None, None, None, None


for _name, _kernel, _shape, _backward, _setup in (
    ("forward", _run_forward, _forward_shape, _forward_backward, _forward_setup),
    (
        "backprop_input",
        _run_backprop_input,
        _backprop_input_shape,
        _backprop_input_backward,
        _backprop_input_setup,
    ),
    (
        "backprop_filter",
        _run_backprop_filter,
        _backprop_filter_shape,
        _backprop_filter_backward,
        _backprop_filter_setup,
    ),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cupyconv::{_name}", _shape, lib=_library)
    torch.library.register_autograd(
        f"cupyconv::{_name}", _backward, setup_context=_setup, lib=_library
    )
