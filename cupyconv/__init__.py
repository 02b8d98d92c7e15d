"""Multi-channel convolutions for CuPy and NumPy arrays: forward, and both gradients.

Everything is loaded when first used: importing cupyconv imports neither NumPy nor CuPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ConvProblem": "problem",
    "ConvAxis": "problem",
    "CupyconvError": "errors",
    "ConvError": "errors",
    "ConvTypeError": "errors",
    "DeviceError": "errors",
    "KernelCompileError": "errors",
    "Device": "planning",
    "Plan": "planning",
    "Explanation": "explaining.explanation",
    "explain": "explaining.explanation",
    "ConvGradients": "operations",
    "conv_forward": "operations",
    "conv_backprop_input": "operations",
    "conv_backprop_filter": "operations",
    "conv_backprop_bias": "operations",
    "conv_backward": "operations",
    "conv_transpose": "operations",
    "plan": "operations",
    "raw_ops": "",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cupyconv' has no attribute {name!r}")
    home = _HOMES[name]
    module = import_module(f"cupyconv.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:  # the names of _HOMES, for type checkers
    from cupyconv import raw_ops
    from cupyconv.errors import (
        ConvError,
        ConvTypeError,
        CupyconvError,
        DeviceError,
        KernelCompileError,
    )
    from cupyconv.explaining.explanation import Explanation, explain
    from cupyconv.operations import (
        ConvGradients,
        conv_backprop_bias,
        conv_backprop_filter,
        conv_backprop_input,
        conv_backward,
        conv_forward,
        conv_transpose,
        plan,
    )
    from cupyconv.planning import Device, Plan
    from cupyconv.problem import ConvAxis, ConvProblem
