"""Emulator that runs the shipped kernels on the CPU under a checker; see README.md."""

from .convolutions import (
    conv_backprop_bias,
    conv_backprop_filter,
    conv_backprop_input,
    conv_forward,
    conv_transpose,
    device,
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
    "device",
    "settings",
]
