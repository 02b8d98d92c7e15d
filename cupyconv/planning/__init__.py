"""The planner, which chooses an implementation for each pass; it needs no data and no GPU."""

from cupyconv.kernels.device import Device
from cupyconv.kernels.request import (
    ACTIVATIONS,
    PRECISIONS,
    Activation,
    Impl,
    Implementation,
    Precision,
    Request,
    require_limit,
)
from cupyconv.planning.plan import PassPlan, Plan, implementations, plan, plan_pass

__all__ = [
    "ACTIVATIONS",
    "PRECISIONS",
    "Activation",
    "Device",
    "Impl",
    "Implementation",
    "PassPlan",
    "Plan",
    "Precision",
    "Request",
    "implementations",
    "plan",
    "plan_pass",
    "require_limit",
]
