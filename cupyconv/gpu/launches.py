"""The launches of a planned pass, by the module of its kernel family."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from cupyconv.gpu.launch import FilterForm, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ConvProblem


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches that compute a planned pass, one after the other.

    Args:
        pass_plan: what was planned.
        problem: its configuration.
        strides: of the tensors in the problem's formats.
        activation: of the results, but for those of backprop_filter; None for none.
        device: that the pass was planned for.
    """
    module = _module(pass_plan.family.kernels)
    found: tuple[Launch, ...] = module.prepare(
        pass_plan, problem.reduced, strides, activation, device
    )
    return found


def filter_form(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> FilterForm | None:
    """What a planned pass makes of w before all else; None where it reads w as it lies."""
    find = getattr(_module(pass_plan.family.kernels), "filter_form", None)
    return find and find(pass_plan, problem.reduced, strides)


@cache
def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
