"""All decisions of the operator, as pure functions: no I/O, no clock, no client."""

from agenticrun_operator.planning.plan import plan, plan_unreadable
from agenticrun_operator.planning.result import (
    Configure,
    Delete,
    JobAction,
    Plan,
    RequestStop,
    Stop,
    Submit,
)

__all__ = [
    "Configure",
    "Delete",
    "JobAction",
    "Plan",
    "RequestStop",
    "Stop",
    "Submit",
    "plan",
    "plan_unreadable",
]
