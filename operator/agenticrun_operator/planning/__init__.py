"""All decisions of the operator, as pure functions: no I/O, no clock, no client."""

from agenticrun_operator.planning.plan import plan
from agenticrun_operator.planning.result import (
    Configure,
    Delete,
    JobAction,
    Plan,
    RequestStop,
    Stop,
    Submit,
)
from agenticrun_operator.planning.unreadable import plan_unreadable

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
