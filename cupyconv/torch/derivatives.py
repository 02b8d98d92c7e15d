"""Operators under PyTorch's function transforms: forward mode, torch.func and vmap.

A custom operator only supports reverse mode, so these classes replace the operators while a
transform is active.  Each operator is linear in every operand.  The tangent of its result is
therefore a sum with one term per operand: the result with this operand replaced by its tangent.

An example is one slice of the tensors along the axis that vmap maps over.  One call computes all
examples: as more images if they share the filters and the bias, otherwise as more groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add as add_tensors
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyconv.errors import ConvTypeError
from cupyconv.operands import require_add
from cupyconv.torch import operators


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(x, w, bias, *layer):
        return operators.forward(x, w, bias, *layer)

    @staticmethod
    def setup_context(ctx, inputs, output):
        operators.set_up_forward(ctx, inputs, output)
        ctx.shape = output.shape
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):
        return operators.gradients_of_forward(_OPERATORS, ctx, dy)

    @staticmethod
    def jvp(ctx, tx, tw, tbias, *_):
        x, w = ctx.saved_tensors
        return _tangent(forward, (x, w, None, *ctx.layer), {0: tx, 1: tw}, tbias, ctx.shape)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch, (x, w, bias, *window, groups) = info.batch_size, arguments
        if batch == 0:
            return _without_examples(forward, in_dims, *arguments)
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
        operators.set_up_backprop_input(ctx, inputs, output)
        ctx.shape = inputs[0]
        ctx.save_for_forward(inputs[2], inputs[1])

    @staticmethod
    def backward(ctx, ddx):
        return operators.gradients_of_backprop_input(_OPERATORS, ctx, ddx)

    @staticmethod
    def jvp(ctx, _shape, tw, tdy, tbias, *_):
        dy, w = ctx.saved_tensors
        arguments = (ctx.shape, w, dy, None, *ctx.layer)
        return _tangent(backprop_input, arguments, {1: tw, 2: tdy}, tbias, ctx.shape)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch, (input_shape, w, dy, bias, *window, groups) = info.batch_size, arguments
        images, channels, *sizes = input_shape
        if batch == 0:
            return _without_examples(backprop_input, in_dims, *arguments)
        if in_dims[1] is None and in_dims[3] is None:
            shape = [batch * images, channels, *sizes]
            dx = backprop_input(shape, w, _as_images(dy, in_dims[2]), bias, *window, groups)
            return dx.unflatten(0, (batch, images)), 0
        dx = backprop_input(
            [images, batch * channels, *sizes],
            _as_filters(w, in_dims[1], batch),
            _as_channels(dy, in_dims[2], batch),
            None if bias is None else _as_filters(bias, in_dims[3], batch),
            *(*window, groups * batch),
        )
        return dx.unflatten(1, (batch, channels)), 1


class _BackpropFilter(torch.autograd.Function):
    @staticmethod
    def forward(x, filter_shape, dy, *layer):
        return operators.backprop_filter(x, filter_shape, dy, *layer)

    @staticmethod
    def setup_context(ctx, inputs, output):
        operators.set_up_backprop_filter(ctx, inputs, output)
        ctx.filter_shape = inputs[1]
        ctx.save_for_forward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx, ddw):
        return operators.gradients_of_backprop_filter(_OPERATORS, ctx, ddw)

    @staticmethod
    def jvp(ctx, tx, _shape, tdy, *_):
        x, dy = ctx.saved_tensors
        return _tangent(backprop_filter, (x, ctx.filter_shape, dy, *ctx.layer), {0: tx, 2: tdy})

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch, (x, filter_shape, dy, *window, groups) = info.batch_size, arguments
        filters, *rest = filter_shape
        if batch == 0:
            return _without_examples(backprop_filter, in_dims, *arguments)
        dw = backprop_filter(
            _as_channels(x, in_dims[0], batch),
            [batch * filters, *rest],
            _as_channels(dy, in_dims[2], batch),
            *(*window, groups * batch),
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


_OPERATORS = operators.Operators(forward, backprop_input, backprop_filter)


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


def _tangent(
    operator: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    tangents: dict[int, Tensor | None],
    tbias: Tensor | None = None,
    shape: Sequence[int] = (),
) -> Tensor:
    """Return the tangent of a result: the sum of the terms of all operands that have a tangent.

    Args:
        operator: function that computes the result.
        arguments: its arguments, with None as the bias.
        tangents: tangents of the operands, keyed by their positions in ``arguments``.
        tbias: tangent of the bias, which is broadcast to all pixels.
        shape: shape of the result.
    """
    terms = [
        operator(*arguments[:position], tangent, *arguments[position + 1 :])
        for position, tangent in tangents.items()
        if tangent is not None
    ]
    if tbias is not None:
        terms.append(tbias.reshape(-1, *[1] * (len(shape) - 2)).expand(shape))
    return reduce(add_tensors, terms)


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
