"""Models that call PyTorch's own convolutions, run through ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch.overrides import TorchFunctionMode

from cupyconv.errors import CupyconvError
from cupyconv.torch.functions import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    convolution,
    convolution_backward,
)

COMPILED = "in a compiled graph"
"""What a PatchReport calls the layers of a graph."""

SCRIPTED = "by PyTorch: TorchScript does not show what it calls"
"""What a PatchReport says of a scripted module, convolutions in it or not."""


@dataclass
class PatchReport:
    """What ``patch`` did with every convolution that was called.

    Attributes:
        calls: how often, by (layer, function, reason); the reason is why cupyconv did not take
            it, or None where it did.  A layer is named as ``named_modules`` of the outermost
            module that was called names it, "" if the function was called outside of any, and
            COMPILED in a graph of ``torch.compile``, which has no modules any more.
    """

    calls: dict[tuple[str, str, str | None], int] = field(default_factory=dict)

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the layers that ran through cupyconv."""
        return tuple(dict.fromkeys(layer for layer, _, why in self.calls if why is None))

    @property
    def left(self) -> dict[str, str]:
        """Why PyTorch computed a layer itself, by the layer's name."""
        return {layer: why for layer, _, why in self.calls if why is not None}

    def __str__(self) -> str:
        lines = [
            f"{layer or 'outside of any module'}: {function}, "
            f"{count} call{'s' if count > 1 else ''}, {why or 'by cupyconv'}"
            for (layer, function, why), count in self.calls.items()
        ]
        return "\n".join(lines) or "no convolution was called"


@contextmanager
def patch() -> Iterator[PatchReport]:
    """Run models through cupyconv: in this block and thread, PyTorch's convolutions are ours.

    The functions of ``torch``, ``torch.nn.functional`` and ``torch.nn.grad`` named as those here
    are replaced, and so are the layers that call them, such as ``torch.nn.Conv2d``.  A call that
    cupyconv does not support is left to PyTorch and reported.  Nothing in the model is changed;
    what was computed in the block is differentiated by cupyconv after it too.  A model that is
    compiled by ``torch.compile`` is compiled anew for the block, with cupyconv's operators in its
    graph.

    Yields:
        A PatchReport, filled as the block runs.
    """
    report = PatchReport()
    with _called_modules(report) as current_layer, _Patch(report, current_layer):
        yield report


REPLACED: dict[Callable, Callable] = {
    getattr(torch, function.__name__): function
    for function in (
        conv1d,
        conv2d,
        conv3d,
        conv_transpose1d,
        conv_transpose2d,
        conv_transpose3d,
    )
}
REPLACED[torch.convolution] = REPLACED[torch.ops.aten.convolution] = convolution
REPLACED[torch.ops.aten.convolution_backward] = convolution_backward
"""What is replaced in the block, and by what."""


class _Patch(TorchFunctionMode):
    """Sees every call of PyTorch's functions, and answers those of convolutions."""

    def __init__(self, report: PatchReport, current_layer: Callable[[], str]) -> None:
        super().__init__()
        self._report, self._current_layer = report, current_layer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        ours = REPLACED.get(func)
        if ours is None:
            seeing = _SEEING.get(func)
            if seeing is None:
                return func(*args, **(kwargs or {}))
            with self:  # which is off while it answers a call
                return seeing(*args, **(kwargs or {}))
        reason = None
        try:
            return ours(*args, **(kwargs or {}))
        except CupyconvError as error:
            reason = str(error)
            return func(*args, **(kwargs or {}))
        finally:
            # A call that a checkpoint ends, because it has computed enough again, is one too.
            key = (self._current_layer(), ours.__name__, reason)
            self._report.calls[key] = self._report.calls.get(key, 0) + 1


def _unasking(function: Callable) -> Callable:
    """A Python function of PyTorch's that does not ask whether a mode answers for it."""
    asks = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary")}
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **asks},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_SEEING = {
    function: _unasking(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
"""Functions that run convolutions themselves, such as those that a checkpoint computes again."""


@contextmanager
def _called_modules(report: PatchReport) -> Iterator[Callable[[], str]]:
    """Follow which module of this thread is being called; yields what tells its name."""
    modules, is_compiling = torch.nn.modules.module, torch.compiler.is_compiling
    thread = threading.get_ident()
    stack: list[torch.nn.Module] = []
    names: dict[torch.nn.Module, dict[torch.nn.Module, str]] = {}

    def enter(module, _inputs):
        if not is_compiling() and threading.get_ident() == thread:
            stack.append(module)
            if isinstance(module, torch.jit.ScriptModule):
                report.calls.setdefault((current(), "its TorchScript", SCRIPTED), 0)
                report.calls[current(), "its TorchScript", SCRIPTED] += 1

    def leave(_module, _inputs, _output):
        if not is_compiling() and threading.get_ident() == thread:
            stack.pop()

    def current() -> str:
        if is_compiling():
            return COMPILED
        if not stack:
            return ""
        root, module = stack[0], stack[-1]
        if root not in names:
            names[root] = {inner: name for name, inner in root.named_modules()}
        return names[root].get(module) or type(module).__name__

    before = modules.register_module_forward_pre_hook(enter)
    after = modules.register_module_forward_hook(leave, always_call=True)
    try:
        yield current
    finally:
        before.remove()
        after.remove()
