"""Decisions. Pure: `plan(run, observed, now)` has no I/O, no clock and no client."""

from agenticrun_operator.planning.observed import (
    Job,
    NoJob,
    NoReport,
    Observed,
    Pod,
    Problem,
    Unreachable,
)
from agenticrun_operator.planning.plan import Delete, Event, Plan, Stop, Submit, TokenToMake
from agenticrun_operator.planning.planner import plan, plan_denied, plan_refused, plan_unreadable
from agenticrun_operator.planning.pods import read_pod

__all__ = [
    "Delete",
    "Event",
    "Job",
    "NoJob",
    "NoReport",
    "Observed",
    "Plan",
    "Pod",
    "Problem",
    "Stop",
    "Submit",
    "TokenToMake",
    "Unreachable",
    "plan",
    "plan_denied",
    "plan_refused",
    "plan_unreadable",
    "read_pod",
]
