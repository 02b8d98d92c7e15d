"""Multi-channel convolutions for CuPy and NumPy arrays: the forward pass and both gradients.

A problem (``ConvProblem``) is the configuration of a layer.  A pass computes the output (forward),
the input gradient or the filter gradient of a problem.

Modules are loaded at first use: importing cupyconv imports neither NumPy nor CuPy.

Examples assume ``import cupyconv`` and ``import numpy as np``.

Attributes:
    benchmark: whether the first call of a pass with a new problem on a GPU times the most promising
        kernels; False by default.  The fastest kernel is stored for this chip, driver and problem,
        so that later processes with ``benchmark`` use it, too.  The same kernel gives the same bits
        on every run; another kernel may round differently.
    workspace_limit: largest number of bytes of GPU memory that a pass or the bias gradient may use
        besides its tensors; 0 permits no workspace, and None, the default, sets no limit.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cupyconv import settings as _settings

__version__ = "0.1.0"

_NAMES = {
    "problem": ("ConvProblem", "ConvAxis"),
    "errors": (
        *("CupyconvError", "ConvError", "ConvTypeError", "DeviceError", "KernelCompileError"),
        "WorkerError",
    ),
    "planning": ("Device", "Plan"),
    "explaining.explanation": ("Explanation", "explain"),
    "explaining.diagnosis": ("Diagnosis", "diagnose"),
    "calls": ("Call", "bind"),
    "operations": (
        *("ConvGradients", "conv_forward", "conv_backprop_input", "conv_backprop_filter"),
        *("conv_backprop_bias", "conv_backward", "conv_transpose", "prepare", "plan"),
    ),
    "prepared": ("PreparedFilter",),
    "warming": ("warm",),
    "arrays": ("as_kind_of",),
    "gpu.sources": ("kernel_sources",),
    "": ("raw_ops", "onnx", "cudnn", "typing"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""Defining module of each public name; empty if the name is itself a module."""

_OPTIONAL_MODULES = ("dask", "torch")
"""Public modules that import optional packages; __all__ omits them, because ``from cupyconv import
*`` would fail if a package is missing."""

benchmark: bool
workspace_limit: int | None

__all__ = [*_MODULES, "__version__"]


if TYPE_CHECKING:  # the names in _MODULES and _OPTIONAL_MODULES
    from cupyconv import (
        cudnn as cudnn,
        dask as dask,
        onnx as onnx,
        raw_ops as raw_ops,
        torch as torch,
        typing as typing,
    )
    from cupyconv.arrays import as_kind_of as as_kind_of
    from cupyconv.calls import Call as Call, bind as bind
    from cupyconv.errors import (
        ConvError as ConvError,
        ConvTypeError as ConvTypeError,
        CupyconvError as CupyconvError,
        DeviceError as DeviceError,
        KernelCompileError as KernelCompileError,
        WorkerError as WorkerError,
    )
    from cupyconv.explaining.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
    from cupyconv.explaining.explanation import Explanation as Explanation, explain as explain
    from cupyconv.gpu.sources import kernel_sources as kernel_sources
    from cupyconv.operations import (
        ConvGradients as ConvGradients,
        conv_backprop_bias as conv_backprop_bias,
        conv_backprop_filter as conv_backprop_filter,
        conv_backprop_input as conv_backprop_input,
        conv_backward as conv_backward,
        conv_forward as conv_forward,
        conv_transpose as conv_transpose,
        plan as plan,
        prepare as prepare,
    )
    from cupyconv.planning import Device as Device, Plan as Plan
    from cupyconv.prepared import PreparedFilter as PreparedFilter
    from cupyconv.problem import ConvAxis as ConvAxis, ConvProblem as ConvProblem
    from cupyconv.warming import warm as warm
else:

    def __getattr__(name: str) -> Any:
        if name in _settings.DEFAULTS:
            return getattr(_settings, name)
        if name in _OPTIONAL_MODULES:
            return import_module(f"cupyconv.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'cupyconv' has no attribute {name!r}")
        owner = _MODULES[name]
        module = import_module(f"cupyconv.{owner or name}")
        value = getattr(module, name) if owner else module
        globals()[name] = value
        return value

    class _Package(ModuleType):
        """The package, whose settings are those of ``cupyconv.settings``."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _settings.DEFAULTS:
                setattr(_settings, name, value)
            else:
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            if name in _settings.DEFAULTS:  # deleting a setting restores its default
                setattr(_settings, name, _settings.DEFAULTS[name])
            else:
                super().__delattr__(name)

    sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*__all__, "benchmark", "workspace_limit"])
