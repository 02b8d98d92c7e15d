"""Context manager that runs the PyTorch convolutions of models through cupyconv."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from cupyconv.errors import CupyconvError
from cupyconv.torch.derivatives import transforms_active
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
"""Layer name in a PatchReport for calls in a compiled or exported graph."""

SCRIPTED = "by PyTorch: calls in TorchScript cannot be replaced"
"""Reason in a PatchReport for a scripted module, with or without convolutions."""

EXPORTED = "by PyTorch: torch.onnx.export only converts PyTorch's convolutions"
"""Reason in a PatchReport for a call while a model is exported to ONNX."""

TRANSFORMED = "by PyTorch: torch.func transforms of cupyconv cannot be compiled or exported"
"""Reason in a PatchReport for a call in a transform that is compiled or exported."""


@dataclass
class PatchReport:
    """Record of every convolution called inside ``patch``.

    Attributes:
        calls: number of calls, keyed by (layer, function, reason).  The reason says why PyTorch
            computed the call; it is None if cupyconv computed the call.  The layer is the name that
            the innermost called module has in the outermost called module's ``named_modules``, or
            its class name if both are the same module.  The layer is "" for a call outside of any
            module, and COMPILED in a graph of ``torch.compile`` or ``torch.export``.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU())
    >>> with ct.patch() as report:
    ...     y = model(torch.ones(1, 2, 4, 4))
    >>> report.taken, report.left
    (('0',), {})
    >>> print(report)
    0: conv2d, 1 call, by cupyconv
    """

    calls: dict[tuple[str, str, str | None], int] = field(default_factory=dict)

    @property
    def _total(self) -> int:
        return sum(self.calls.values())

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the layers with a call that cupyconv computed."""
        return tuple(dict.fromkeys(layer for layer, _, why in self.calls if why is None))

    @property
    def left(self) -> dict[str, str]:
        """Reason why PyTorch computed a call, by layer name; the last reason of each layer."""
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
    """Run models through cupyconv: replace PyTorch's convolutions in this block and thread.

    The functions of ``torch``, ``torch.nn.functional``, ``torch.nn.grad`` and ``torch.ops.aten``
    that have a counterpart in ``cupyconv.torch`` are replaced, also in layers that call them, such
    as ``torch.nn.Conv2d``.  Unsupported calls, and all calls during ``torch.onnx.export``, are left
    to PyTorch and reported.  The model is not modified.  cupyconv computes the gradients of the
    results, even after the block.  ``torch.compile`` recompiles a model for the block, with
    cupyconv's operators in its graph.

    Yields:
        A PatchReport, filled as the block runs.

    >>> model = torch.nn.Conv2d(2, 3, 3)
    >>> with ct.patch() as report:
    ...     y = model(torch.ones(1, 2, 4, 4))
    >>> print(report)
    Conv2d: conv2d, 1 call, by cupyconv
    """
    report = PatchReport()
    with _scripts_reported(), _Patch(report):
        yield report


_FUNCTIONS = (conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d)


def _replacements() -> dict[Callable, Callable]:
    replaced: dict[Callable, Callable] = {}
    for function in (*_FUNCTIONS, convolution, convolution_backward):
        name = function.__name__
        operator = getattr(torch.ops.aten, name)
        replaced[operator] = function
        for overload in operator.overloads():
            if overload != "out":
                replaced[getattr(operator, overload)] = function
        if hasattr(torch, name):
            replaced[getattr(torch, name)] = function
    return replaced


REPLACED = _replacements()
"""cupyconv's replacement of each PyTorch function and operator."""


class _Patch(TorchFunctionMode):
    """Mode that intercepts calls of PyTorch's functions and computes the convolutions."""

    def __init__(self, report: PatchReport) -> None:
        super().__init__()
        self._report = report
        self._names: dict[Module, dict[Module, str]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = REPLACED.get(func)
        if ours is None:
            visible = _VISIBLE.get(func)
            if visible is None:
                return func(*args, **kwargs)
            with self:  # PyTorch disables a mode during its __torch_function__
                return visible(*args, **kwargs)
        reason = _reason_to_leave(args, kwargs)
        if reason is not None:
            self.report(ours.__name__, reason)
            return func(*args, **kwargs)
        if types:
            return self._delegate(func, types, args, kwargs)
        try:
            return ours(*args, **kwargs)
        except CupyconvError as error:
            reason = str(error)
            return func(*args, **kwargs)
        finally:
            # Also count calls that a checkpoint stops early with an exception.
            self.report(ours.__name__, reason)

    def _delegate(self, func, types, args, kwargs):
        """Let the arguments' classes compute a call, as PyTorch does, with the mode enabled."""
        owners = {type(argument): argument for argument in (*args, *kwargs.values())}
        before = self._report._total
        try:
            with self:
                for kind in types:
                    # Older classes define __torch_function__ as an instance method.
                    owner = owners.get(kind, kind)
                    result = owner.__torch_function__(func, types, args, kwargs)
                    if result is not NotImplemented:
                        return result
            return func(*args, **kwargs)  # PyTorch raises its own error
        finally:
            if self._report._total == before:
                self.report(
                    REPLACED[func].__name__,
                    f"by PyTorch: {types[0].__name__}.__torch_function__ calls no convolution",
                )

    def report(self, function: str, reason: str | None, *called: Module) -> None:
        """Count a call of ``function`` for ``called``, or else for the innermost running module."""
        key = (self._layer_name(*called), function, reason)
        self._report.calls[key] = self._report.calls.get(key, 0) + 1

    def _layer_name(self, *called: Module) -> str:
        if torch.compiler.is_compiling():
            return COMPILED
        modules = [*called, *_called_modules(sys._getframe(1))]
        if not modules:
            return ""
        module, root = modules[0], modules[-1]
        names = self._names.get(root, {})
        if module not in names:  # a new root, or a module added later
            names = {inner: name for name, inner in root.named_modules()}
            names.setdefault(module, "")
            self._names[root] = names
        return names[module] or type(module).__name__


def _called_modules(frame: FrameType | None) -> list[Module]:
    """Return the modules whose calls enclose a frame, innermost first."""
    modules = []
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, Module):
                modules.append(module)
        frame = frame.f_back
    return modules


def _reason_to_leave(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why PyTorch must compute a call, whatever its sizes; None if cupyconv may try."""
    if torch.compiler.is_compiling() and transforms_active():
        return TRANSFORMED
    if torch.compiler.is_dynamo_compiling():
        return None
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        return EXPORTED
    if "out" in kwargs:
        return "by PyTorch: the call has an out argument"
    for argument in (*args, *kwargs.values()):
        if _has_own_operators(argument):
            return f"by PyTorch: {type(argument).__name__} computes its operators itself"
    return None


def _has_own_operators(argument: Any) -> bool:
    """Return whether an argument is a tensor whose class computes PyTorch's operators itself."""
    return (
        isinstance(argument, torch.Tensor)
        and type(argument).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not isinstance(argument, (FakeTensor, FunctionalTensor))
    )


def _without_mode_check(function: Callable) -> Callable:
    """Copy a Python function of PyTorch, without its check for modes."""
    checks = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary")}
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **checks},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_VISIBLE = {
    function: _without_mode_check(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
"""Replacements of functions that may run convolutions, for example to recompute a checkpoint.

The mode remains enabled inside the replacements.
"""

_scripts_lock = threading.Lock()
_script_patches = 0
"""Number of active patches in all threads."""


@contextmanager
def _scripts_reported() -> Iterator[None]:
    """Report calls of scripted modules, whose convolutions no mode can intercept."""
    global _script_patches
    with _scripts_lock:
        if _script_patches == 0:
            torch.jit.ScriptModule.__call__ = _call_script
        _script_patches += 1
    try:
        yield
    finally:
        with _scripts_lock:
            _script_patches -= 1
            if _script_patches == 0:
                del torch.jit.ScriptModule.__call__


def _call_script(module: Module, *args: Any, **kwargs: Any) -> Any:
    """Report the call of a scripted module inside a patch, then run it."""
    patches = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Patch)]
    if patches and not torch.compiler.is_compiling():
        patches[-1].report("its TorchScript", SCRIPTED, module)
    return Module.__call__(module, *args, **kwargs)
