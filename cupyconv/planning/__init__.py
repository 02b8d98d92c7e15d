"""Which implementation computes a pass, and why: pure, and needs neither data nor a GPU."""

from cupyconv.planning.device import Device
from cupyconv.planning.plan import PassPlan, Plan, plan, plan_pass
from cupyconv.planning.request import (
    ACTIVATIONS,
    PRECISIONS,
    Activation,
    Impl,
    Implementation,
    Precision,
    Request,
    require_limit,
)

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
    "plan",
    "plan_pass",
    "require_limit",
]
