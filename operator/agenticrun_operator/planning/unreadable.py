"""A run whose spec this operator cannot read."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from agenticrun_api import ConditionType, Metadata, Phase, Reason
from agenticrun_api.load import damaged_control_fields, repair_status
from agenticrun_operator.planning import times
from agenticrun_operator.planning.result import Plan, Said, condition, in_order, text, warning
from agenticrun_operator.resources import Event, Manifest


def plan_unreadable(document: Manifest, faults: tuple[str, ...], now: datetime) -> Plan:
    """Return a plan for a run whose spec this operator cannot read.

    A run that has not started fails: the CRD cannot express every rule. One that has started was
    readable then, so the CRD is of another version than the operator, or its status was
    damaged. It may be healthy; the plan reports what is wrong and touches nothing until an operator
    can read it.
    """
    metadata = Metadata.model_validate(document["metadata"])
    stored = document.get("status") or {}
    known = repair_status(stored)
    if metadata.deletion_timestamp or known.phase.finished:
        return Plan()
    message = "; ".join(faults)
    fields: dict[str, Any] = {}
    started = stored.get("phase", "Pending") != "Pending" or bool(
        {"job", "startTime", "nextRetryTime"} & stored.keys()
    )
    if damaged_control_fields(stored):
        event = Event(Reason.INVALID_CONFIG, f"status is damaged: {message}"[:1024], "Warning")
        return Plan(events=(event,))  # a write would delete the readable rest of these fields
    if not started:
        fields = {"phase": Phase.FAILED, "completion_time": times.format_time(now)}
        fields["observed_generation"] = metadata.generation
        said = {
            ConditionType.PROGRESSING: Said("False", Reason.INVALID_CONFIG, message),
            ConditionType.FAILED: Said("True", Reason.INVALID_CONFIG, message),
            ConditionType.COMPLETE: Said("False", Reason.INVALID_CONFIG, message),
        }
    else:
        message = f"this version of the operator cannot read the spec: {message}"
        said = {
            ConditionType.ACCEPTED: Said("False", Reason.INVALID_CONFIG, message),
            ConditionType.PROGRESSING: Said("Unknown", Reason.INVALID_CONFIG, message),
        }
    before = {item.type: item for item in known.conditions}
    after = before | {
        kind.value: condition(kind, each, now, metadata.generation, before.get(kind.value))
        for kind, each in said.items()
    }
    if before == after:
        return Plan()
    fields |= {"message": text(message), "conditions": in_order(after.values())}
    fields["last_update_time"] = times.format_time(now)
    return Plan(
        status=known.model_copy(update=fields),
        events=(warning(Reason.INVALID_CONFIG, message),),
    )
