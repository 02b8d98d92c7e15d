"""Which implementation computes a pass, and why: pure, and needs neither data nor a GPU."""

from cupyconv.planning.device import Device
from cupyconv.planning.plan import PassPlan, Plan, plan, plan_pass

__all__ = ["Device", "PassPlan", "Plan", "plan", "plan_pass"]
