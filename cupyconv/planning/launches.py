"""The launches of a planned pass."""

from __future__ import annotations

from cupyconv.kernels.device import Device
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides
from cupyconv.launch import FilterForm, Launch
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ConvProblem


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    device: Device,
    epilogue: Epilogue = PLAIN,
) -> tuple[Launch, ...]:
    """Return the launches that compute a planned pass, in order.

    Args:
        pass_plan: plan of the pass.
        problem: configuration of the pass.
        strides: strides of the tensors in the problem's formats.
        device: device that the pass was planned for.
        epilogue: addend and activation, which forward and backprop_input apply after the bias.
    """
    request = Request(problem, pass_plan.pass_, device, strides=strides).reduced
    return pass_plan.family.launches(request, pass_plan, epilogue)


def filter_form(
    pass_plan: PassPlan, problem: ConvProblem, strides: Strides, device: Device
) -> FilterForm | None:
    """Return the copy of w that a planned pass writes first; None if the pass reads w itself."""
    request = Request(problem, pass_plan.pass_, device, strides=strides).reduced
    return pass_plan.family.filter_form(request, pass_plan)
