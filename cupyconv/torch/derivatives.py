"""Operators under PyTorch's function transforms: forward mode, torch.func and vmap.

A custom operator only supports reverse mode, so these classes replace the operators while a
transform is active.  Each operator is linear in every operand.  The tangent of its result is
therefore a sum with one term per operand: the result with this operand replaced by its tangent.

An example is one slice of the tensors along the axis that vmap maps over.  One call computes all
examples: as more images if they share the filters and the bias, otherwise as more groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyconv.errors import ConvTypeError
from cupyconv.operands import require_add
from cupyconv.torch import operators

_LAYER = (None, None, None, None)  # gradients of stride, padding, dilation and groups


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(x, w, bias, *layer):
        return operators.forward(x, w, bias, *layer)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _bias, *ctx.layer = inputs
        ctx.shape = output.shape
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        dx = backprop_input(x.shape, w, dy, None, *ctx.layer) if needs_x else None
        dw = backprop_filter(x, w.shape, dy, *ctx.layer) if needs_w else None
        return dx, dw, operators.sum_pixels(dy) if needs_bias else None, *_LAYER

    @staticmethod
    def jvp(ctx, tx, tw, tbias, *_):
        x, w = ctx.saved_tensors
        terms = [
            None if tx is None else forward(tx, w, None, *ctx.layer),
            None if tw is None else forward(x, tw, None, *ctx.layer),
        ]
        return _sum(terms, tbias, ctx)

    @staticmethod
    def vmap(info, in_dims, x, w, bias, stride, padding, dilation, groups):
        batch, window = info.batch_size, (stride, padding, dilation)
        if batch == 0:
            return _without_examples(forward, in_dims, x, w, bias, *window, groups)
        if in_dims[1] is None and in_dims[2] is None:
            y = forward(_as_images(x, in_dims[0]), w, bias, *window, groups)
            return y.unflatten(0, (batch, len(y) // batch)), 0
        y = forward(
            _as_channels(x, in_dims[0], batch),
            _as_filters(w, in_dims[1], batch),
            None if bias is None else _as_filters(bias, in_dims[2], batch),
            *(*window, groups * batch),
        )
        return y.unflatten(1, (batch, y.shape[1] // batch)), 1


class _BackpropInput(torch.autograd.Function):
    @staticmethod
    def forward(input_shape, w, dy, bias, *layer):
        return operators.backprop_input(input_shape, w, dy, bias, *layer)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape, w, dy, _bias, *ctx.layer = inputs
        ctx.save_for_backward(dy, w)
        ctx.save_for_forward(dy, w)

    @staticmethod
    def backward(ctx, ddx):
        dy, w = ctx.saved_tensors
        _, needs_w, needs_dy, needs_bias, *_ = ctx.needs_input_grad
        dw = backprop_filter(ddx, w.shape, dy, *ctx.layer) if needs_w else None
        ddy = forward(ddx, w, None, *ctx.layer) if needs_dy else None
        return None, dw, ddy, operators.sum_pixels(ddx) if needs_bias else None, *_LAYER

    @staticmethod
    def jvp(ctx, _shape, tw, tdy, tbias, *_):
        dy, w = ctx.saved_tensors
        terms = [
            None if tw is None else backprop_input(ctx.shape, tw, dy, None, *ctx.layer),
            None if tdy is None else backprop_input(ctx.shape, w, tdy, None, *ctx.layer),
        ]
        return _sum(terms, tbias, ctx)

    @staticmethod
    def vmap(info, in_dims, input_shape, w, dy, bias, stride, padding, dilation, groups):
        batch, (images, channels, *sizes) = info.batch_size, input_shape
        if batch == 0:
            layer = (stride, padding, dilation, groups)
            return _without_examples(backprop_input, in_dims, input_shape, w, dy, bias, *layer)
        if in_dims[1] is None and in_dims[3] is None:
            shape = [batch * images, channels, *sizes]
            dy = _as_images(dy, in_dims[2])
            dx = backprop_input(shape, w, dy, bias, stride, padding, dilation, groups)
            return dx.unflatten(0, (batch, images)), 0
        dx = backprop_input(
            [images, batch * channels, *sizes],
            _as_filters(w, in_dims[1], batch),
            _as_channels(dy, in_dims[2], batch),
            None if bias is None else _as_filters(bias, in_dims[3], batch),
            *(stride, padding, dilation, groups * batch),
        )
        return dx.unflatten(1, (batch, channels)), 1


class _BackpropFilter(torch.autograd.Function):
    @staticmethod
    def forward(x, filter_shape, dy, *layer):
        return operators.backprop_filter(x, filter_shape, dy, *layer)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.filter_shape, dy, *ctx.layer = inputs
        ctx.save_for_backward(x, dy)
        ctx.save_for_forward(x, dy)

    @staticmethod
    def backward(ctx, ddw):
        x, dy = ctx.saved_tensors
        needs_x, _, needs_dy, *_ = ctx.needs_input_grad
        dx = backprop_input(x.shape, ddw, dy, None, *ctx.layer) if needs_x else None
        ddy = forward(x, ddw, None, *ctx.layer) if needs_dy else None
        return dx, None, ddy, *_LAYER

    @staticmethod
    def jvp(ctx, tx, _shape, tdy, *_):
        x, dy = ctx.saved_tensors
        terms = [
            None if tx is None else backprop_filter(tx, ctx.filter_shape, dy, *ctx.layer),
            None if tdy is None else backprop_filter(x, ctx.filter_shape, tdy, *ctx.layer),
        ]
        return _sum(terms)

    @staticmethod
    def vmap(info, in_dims, x, filter_shape, dy, stride, padding, dilation, groups):
        batch, (filters, *rest) = info.batch_size, filter_shape
        if batch == 0:
            layer = (stride, padding, dilation, groups)
            return _without_examples(backprop_filter, in_dims, x, filter_shape, dy, *layer)
        dw = backprop_filter(
            _as_channels(x, in_dims[0], batch),
            [batch * filters, *rest],
            _as_channels(dy, in_dims[2], batch),
            *(stride, padding, dilation, groups * batch),
        )
        return dw.unflatten(0, (batch, filters)), 0


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, *layer: Any, add: Tensor | None = None
) -> Tensor:
    """Compute ``operators.forward``, differentiable in every mode.

    Under a transform, ``add`` is added to the rounded result.
    """
    if transforms_active():
        y = _apply(_Forward, x, w, bias, *layer)
        if add is None:
            return y
        require_add("add", tuple(add.shape), tuple(y.shape))
        return y + add
    return operators.forward(x, w, bias, *layer, add)


def backprop_input(
    input_shape: Sequence[int], w: Tensor, dy: Tensor, bias: Tensor | None, *layer: Any
) -> Tensor:
    """Compute ``operators.backprop_input``, differentiable in every mode."""
    if transforms_active():
        return _apply(_BackpropInput, input_shape, w, dy, bias, *layer)
    return operators.backprop_input(input_shape, w, dy, bias, *layer)


def backprop_filter(x: Tensor, filter_shape: Sequence[int], dy: Tensor, *layer: Any) -> Tensor:
    """Compute ``operators.backprop_filter``, differentiable in every mode."""
    if transforms_active():
        return _apply(_BackpropFilter, x, filter_shape, dy, *layer)
    return operators.backprop_filter(x, filter_shape, dy, *layer)


def transforms_active() -> bool:
    """Return whether forward mode or a transform of ``torch.func`` is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply a function that compiled graphs do not support; torch.compile breaks its graph here."""
    if torch.compiler.is_dynamo_compiling():
        return _apply_untraced(function, *arguments)
    if torch.compiler.is_compiling():
        raise ConvTypeError(
            "torch.export does not support transforms of torch.func, or forward mode, around "
            "cupyconv. Export PyTorch's own convolutions, or export without the transform"
        )
    functionalize = torch._C._functorch.TransformType.Functionalize
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() == functionalize for level in stack):
        raise ConvTypeError(
            "torch.func.functionalize does not support functions with custom derivatives. "
            "Call cupyconv outside of functionalize, or use PyTorch's own convolutions inside"
        )
    return function.apply(*arguments)


_apply_untraced = torch._disable_dynamo(_apply)  # torch.compiler.disable would import dynamo


def _sum(terms: list[Tensor | None], tbias: Tensor | None = None, ctx: Any = None) -> Tensor:
    """Add the tangents that are not None; the bias's tangent is broadcast to all pixels."""
    present = [term for term in terms if term is not None]
    if tbias is not None:
        present.append(tbias.reshape(-1, *[1] * (len(ctx.shape) - 2)).expand(ctx.shape))
    total, *remaining = present
    for term in remaining:
        total = total + term
    return total


def _without_examples(
    operator: Callable[..., Tensor], in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[Tensor, int]:
    """Return the empty result of vmap over no examples.

    The operator is called with each argument's sum over the examples, and its result gets a batch
    axis of size 0.  The sums are zeros that depend on the arguments, so that every argument has a
    gradient.
    """
    sums = [
        argument.sum(dim) if isinstance(dim, int) else argument
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
    result = operator(*sums)
    return result.expand(0, *result.shape), 0


def _as_images(tensor: Tensor, dim: int) -> Tensor:
    """Reshape (examples, N, C, ...) to (examples * N, C, ...); the examples are on axis ``dim``."""
    return tensor.movedim(dim, 0).flatten(0, 1)


def _as_channels(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """Reshape (examples of vmap, N, C, ...) to (N, examples * C, ...)."""
    return _first(tensor, dim, batch).transpose(0, 1).flatten(1, 2)


def _as_filters(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """Reshape (examples of vmap, K, ...) to (examples * K, ...)."""
    return _first(tensor, dim, batch).flatten(0, 1)


def _first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """Move the examples from axis ``dim`` to the first; if ``dim`` is None, repeat the tensor."""
    return tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
