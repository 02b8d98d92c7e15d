"""The shipped kernels on the CPU, under a checker.  README.md beside this file is the guide."""

from .convolutions import (
    conv_backprop_bias,
    conv_backprop_filter,
    conv_backprop_input,
    conv_forward,
    conv_transpose,
)
from .module import EmulatedKernel, EmulatedModule, Outcome
from .reports import CheckerError, Report
from .runtime import SCHEDULES, Settings, settings

__all__ = [
    "SCHEDULES",
    "CheckerError",
    "EmulatedKernel",
    "EmulatedModule",
    "Outcome",
    "Report",
    "Settings",
    "conv_backprop_bias",
    "conv_backprop_filter",
    "conv_backprop_input",
    "conv_forward",
    "conv_transpose",
    "settings",
]
