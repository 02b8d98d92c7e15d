"""The operators for PyTorch's function transforms: forward-mode derivatives, torch.func, vmap.

A custom operator has reverse-mode gradients only, so while a transform is active these classes
stand for the operators.  Each is linear in every operand, so its tangent is the sum of itself with
one operand after the other replaced by its tangent; and examples are vectorised by one call for all
of them, as more images where only images differ, else as more groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupyconv.torch import operators

_LAYER = (None, None, None, None)  # stride, padding, dilation and groups are constants


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
        batch = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:
            y = forward(_as_images(x, in_dims[0]), w, bias, stride, padding, dilation, groups)
            return y.unflatten(0, (batch, len(y) // batch)), 0
        window = (stride, padding, dilation, groups * batch)
        y = forward(
            _as_channels(x, in_dims[0], batch),
            _as_filters(w, in_dims[1], batch),
            None if bias is None else _as_filters(bias, in_dims[2], batch),
            *window,
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
        dw = backprop_filter(
            _as_channels(x, in_dims[0], batch),
            [batch * filters, *rest],
            _as_channels(dy, in_dims[2], batch),
            *(stride, padding, dilation, groups * batch),
        )
        return dw.unflatten(0, (batch, filters)), 0


def forward(x: Tensor, w: Tensor, bias: Tensor | None, *layer: Any) -> Tensor:
    """``operators.forward``, and likewise the others."""
    return _Forward.apply(x, w, bias, *layer)


def backprop_input(
    input_shape: Sequence[int], w: Tensor, dy: Tensor, bias: Tensor | None, *layer: Any
) -> Tensor:
    return _BackpropInput.apply(input_shape, w, dy, bias, *layer)


def backprop_filter(x: Tensor, filter_shape: Sequence[int], dy: Tensor, *layer: Any) -> Tensor:
    return _BackpropFilter.apply(x, filter_shape, dy, *layer)


def _sum(terms: list[Tensor | None], tbias: Tensor | None = None, ctx: Any = None) -> Tensor:
    """The tangents that there are, added up; that of a bias is one of every pixel."""
    there = [term for term in terms if term is not None]
    if tbias is not None:
        there.append(tbias.reshape(-1, *[1] * (len(ctx.shape) - 2)).expand(ctx.shape))
    total, *others = there
    for term in others:
        total = total + term
    return total


def _as_images(tensor: Tensor, dim: int) -> Tensor:
    """(examples, N, C, ...) as (examples * N, C, ...)."""
    return tensor.movedim(dim, 0).flatten(0, 1)


def _as_channels(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """(examples, N, C, ...) as (N, examples * C, ...)."""
    return _first(tensor, dim, batch).transpose(0, 1).flatten(1, 2)


def _as_filters(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """(examples, K, ...) as (examples * K, ...)."""
    return _first(tensor, dim, batch).flatten(0, 1)


def _first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    """With the examples on the first axis; what all of them share, repeated."""
    return tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
