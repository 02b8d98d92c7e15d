"""Numbers shown with a plan: rates, roofline, runner-up, and plans with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cupyconv import formats
from cupyconv.errors import ConvError
from cupyconv.kernels.calibration import prices
from cupyconv.kernels.cost import moving, plain_rate, tensor_rate
from cupyconv.kernels.device import Device
from cupyconv.kernels.family import mma_refuses
from cupyconv.kernels.request import Request
from cupyconv.planning.plan import AUTO, PassPlan, Plan, plan_of, plan_pass, ranked_candidates
from cupyconv.problem import ConvProblem

BF16X6_PRODUCTS = 6
"""bfloat16 products per float32 product with precision "bf16x6"."""


@dataclass(frozen=True)
class Roofline:
    """Lower bound of a pass's time, computed from the data sheet.

    The bound is the longer of the time of the arithmetic and the time to move each tensor once.

    Attributes:
        microseconds: the lower bound in µs.
        bound: limiting resource: "memory", or the arithmetic units, such as "tensor cores".
    """

    microseconds: float
    bound: str


@dataclass(frozen=True)
class Estimate:
    """Numbers shown with the plan of a pass.

    Attributes:
        planned: the plan of the pass.
        teraflops: TFLOP/s, from ``ConvProblem.flops``; None for a plan without a time.
        roofline: lower bound of the time; None on the CPU, whose rates are unknown.
        share: roofline / time of the plan; None if one of the times is unknown.
        bound: limit of the pass: "memory", the arithmetic units, or "launches" if starting the
            kernels takes longer than the roofline; "" without a roofline.
        runner_up: plan with the second-best implementation, or on the CPU the second-best method;
            None if no second implementation or method supports the pass.
    """

    planned: PassPlan
    teraflops: float | None
    roofline: Roofline | None
    share: float | None
    bound: str
    runner_up: PassPlan | None


def estimate(plan: Plan, pass_: str) -> Estimate:
    """Return the numbers that are shown with the plan of a pass.

    Args:
        plan: a plan for contiguous tensors.
        pass_: "forward", "backprop_input" or "backprop_filter".

    >>> planned = cupyconv.plan(cupyconv.ConvProblem((8, 64, 56, 56), (64, 64, 3, 3)), "L4")
    >>> estimate(planned, "forward").bound
    'float32 units'
    """
    planned = plan[pass_]
    request = Request(plan.problem, pass_, plan.device, planned.precision)
    time, least = planned.microseconds, roofline(request) if plan.device.is_gpu else None
    bound = least.bound if least else ""
    if least:
        priced = prices(request, planned.implementation)
        further = len(planned.family.launches(request.reduced, planned)) - 1
        if priced.launches + further * priced.further > least.microseconds:
            bound = "launches"
    return Estimate(
        planned,
        plan.problem.flops / time / 1e6 if time else None,
        least,
        least.microseconds / time if least and time else None,
        bound,
        _runner_up(request, planned),
    )


def roofline(request: Request) -> Roofline:
    """Return the roofline of a pass on a GPU, from the data sheet of its card or nominal chip.

    Products with padding do not count, since kernels may skip them.
    """
    figures = request.device.figures
    own = replace(request, figures=figures).reduced
    is_double = own.problem.dtype in ("float64", "complex128")
    rate, units = plain_rate(own), "float64 units" if is_double else "float32 units"
    tensor = max(_tensor_rates(own), default=0.0)
    if tensor > rate:
        rate, units = tensor, "tensor cores"
    multiplying, moved = own.problem.useful_flops / rate / 1e6, moving(figures, own.problem.bytes)
    return Roofline(moved, "memory") if moved >= multiplying else Roofline(multiplying, units)


def _tensor_rates(request: Request) -> list[float]:
    """Return the TFLOP/s of each tensor-core instruction that the request permits."""
    groups = request.chip.group_tensor_rate
    if request.precision == "bf16x6" and request.problem.dtype == "float32":
        return [groups / BF16X6_PRODUCTS]
    if mma_refuses(request) is not None:
        return []
    is_16bit = request.operands in ("float16", "bfloat16")
    return [tensor_rate(request), *([groups] if is_16bit else [])]


def _runner_up(request: Request, planned: PassPlan) -> PassPlan | None:
    """Return the best plan with another implementation (on the CPU, another method), or None."""
    for candidate in ranked_candidates(request, AUTO):
        other = plan_of(request, candidate)
        if other.microseconds is not None and other.kernel != planned.kernel:
            return other
    return None


def instead(
    problem: ConvProblem, pass_: str, device: Device, precision: str = "ieee"
) -> Mapping[str, PassPlan]:
    """Return plans of a pass with one setting changed, keyed by the name of the new setting.

    "tf32" and "bf16x6" apply to float32 with precision "ieee" on a GPU, "channels last" to problems
    with channels first, and "float16" to float32 and float64 on a GPU.  Settings that no
    implementation supports are left out.
    """
    settings: dict[str, tuple[ConvProblem, str]] = {}
    if device.is_gpu and problem.dtype == "float32" and precision == "ieee":
        settings |= {"tf32": (problem, "tf32"), "bf16x6": (problem, "bf16x6")}
    if not problem.data_format.endswith("C"):
        settings["channels last"] = (_channels_last(problem), precision)
    if device.is_gpu and problem.dtype in ("float32", "float64"):
        settings["float16"] = (problem.replace(dtype="float16"), "ieee")
    plans: dict[str, PassPlan] = {}
    for name, (changed, permitted) in settings.items():
        try:
            plans[name] = plan_pass(Request(changed, pass_, device, permitted))
        except ConvError:  # no implementation supports tensors this large
            continue
    return plans


def _channels_last(problem: ConvProblem) -> ConvProblem:
    """Return the problem with x, w and y in channels-last order."""
    rank = problem.spatial_rank
    return problem.replace(
        input_shape=(problem.N, *problem.input_sizes, problem.C),
        filter_shape=(problem.K, *problem.filter_sizes, problem.C // problem.groups),
        data_format=formats.data_formats(rank)[1],
        filter_format=formats.filter_formats(rank)[2],
    )
