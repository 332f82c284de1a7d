"""Computes the plan from the desired and the observed state of a run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from agenticrun_api import AgenticRun, ConditionType, Metadata, Phase, Reason
from agenticrun_api.load import damaged_control_fields, repair_status
from agenticrun_api.version import __version__, is_supported
from agenticrun_operator.errors import ClusterError
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import (
    attempts,
    ending,
    lost_pods,
    obstacles,
    provisioning,
    roles,
    scaling,
    startup,
    suspension,
)
from agenticrun_operator.planning.draft import (
    MAX_TEXT,
    ConditionStatus,
    Draft,
    in_order,
    new_condition,
)
from agenticrun_operator.planning.plan import Plan
from agenticrun_operator.planning.snapshot import own_progress
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import (
    Event,
    Manifest,
    OperatorKey,
    WorkerImages,
)

SAFETY_NET_SECONDS = 30.0
"""Seconds between looks at a run that only waits for watch events, in case one is lost."""


def plan(
    run: AgenticRun,
    observed: Observed,
    now: datetime,
    images: WorkerImages,
    key: OperatorKey,
    creation_error: ClusterError | None = None,
    scaling_error: ClusterError | None = None,
) -> Plan:
    """Return the plan for one run.

    Args:
        run: the desired state and the last written status.
        observed: the observed state.
        now: the current time.
        images: the worker images of this installation.
        key: the key of this installation.
        creation_error: the error that the plan for the same state met when its children were
            created. The new plan creates nothing.
        scaling_error: the same for the change of the RayCluster. The new plan does not change it.
    """
    draft = Draft(run, now)
    if run.metadata.deletion_timestamp:
        ending.end_deleted(draft, observed)
        return draft.finish(observed.last_status_write)
    if run.status.phase.finished:
        ending.clean_up(draft, observed)
        return draft.finish(observed.last_status_write)
    draft.look_again(SAFETY_NET_SECONDS)
    _accept(draft, observed)
    lost_pods.remove_stuck(draft, observed)
    if observed.scaling_refusal and scaling_error is None:
        refused, asked = observed.scaling_refusal
        scaling_error = None if draft.may_repeat(asked) else refused
    if cause := suspension.find_cause(draft, observed, scaling_error):
        suspension.suspend(draft, observed, images, cause)
        return draft.finish(observed.last_status_write)
    suspension.resume(draft)
    if attempts.ends_at_deadline(draft, observed):
        ending.exceed_deadline(draft)
        return draft.finish(observed.last_status_write)
    if startup.is_queued(draft):
        startup.wait_in_queue(draft, observed)
        return draft.finish(observed.last_status_write)
    obstacle = (
        obstacles.obstacle_met(run, creation_error)
        if creation_error
        else obstacles.find_obstacle(run, observed, images, now)
    )
    if obstacle and obstacle.final:
        ending.fail(draft, obstacle.reason, obstacle.message)
        return draft.finish(observed.last_status_write)
    if obstacle is None:
        provisioning.provision(draft, observed, images, key)
    if obstacle is None or run.status.job:
        ready = roles.report(draft, observed, images)
        attempts.advance(draft, observed, ready)
        if obstacle is None and scaling_error is None:
            scaling.scale(draft, observed)
    elif observed.own_cluster(run):  # its pods hold resources meanwhile
        roles.report(draft, observed, images)
        startup.check_deadline(draft, observed)
    if obstacle:
        obstacles.report(draft, obstacle)
        if obstacle.rebuild:
            lost_pods.delete_cluster(draft, observed)
    return draft.finish(observed.last_status_write)


def _accept(draft: Draft, observed: Observed) -> None:
    """Say whether this operator supports the version of the worker image.

    Another version may still train well, so it is only reported.
    """
    before, job = draft.find(ConditionType.ACCEPTED), draft.run.status.job
    progress = own_progress(draft.run, observed.progress)
    version = progress.version if progress else job.version if job else None
    if version is None or is_supported(version):
        if before:
            draft.condition(ConditionType.ACCEPTED, "True", Reason.SPEC_READ)
        return
    message = (
        f"the worker image has AgenticRun {version}, which operator {__version__} does not "
        "support: they may be one minor version apart"
    )
    if before is None or before.reason != Reason.VERSION_SKEW:
        draft.event(Reason.VERSION_SKEW, message, warning=True)
    draft.condition(ConditionType.ACCEPTED, "Unknown", Reason.VERSION_SKEW, message)


def plan_unreadable(document: Manifest, errors: tuple[str, ...], now: datetime) -> Plan:
    """Return a plan for a run whose spec this operator cannot read.

    A run that has not started fails: the CRD cannot express every rule. One that has started was
    readable then, so the CRD is of another version than the operator, or its status was
    damaged. It may be healthy; the plan says what is wrong and touches nothing until an operator
    can read it.
    """
    metadata = Metadata.model_validate(document["metadata"])
    stored = document.get("status") or {}
    known = repair_status(stored)
    if metadata.deletion_timestamp or known.phase.finished:
        return Plan()
    message = "; ".join(errors)
    fields: dict[str, Any] = {}
    wanted: dict[ConditionType, ConditionStatus]
    started = stored.get("phase", "Pending") != "Pending" or bool(
        {"job", "startTime", "nextRetryTime"} & stored.keys()
    )
    if damaged_control_fields(stored):
        event = Event(Reason.INVALID_CONFIG, f"status is damaged: {message}"[:1024], "Warning")
        return Plan(events=(event,))  # a write would lose what is left of these fields
    if not started:
        fields = {"phase": Phase.FAILED, "completion_time": format_time(now)}
        fields["observed_generation"] = metadata.generation
        wanted = {
            ConditionType.PROGRESSING: "False",
            ConditionType.FAILED: "True",
            ConditionType.COMPLETE: "False",
        }
    else:
        message = f"this version of the operator cannot read the spec: {message}"
        wanted = {ConditionType.ACCEPTED: "False", ConditionType.PROGRESSING: "Unknown"}
    before = {item.type: item for item in known.conditions}
    after = before | {
        kind: new_condition(
            kind, status, Reason.INVALID_CONFIG, message, now, metadata.generation, before.get(kind)
        )
        for kind, status in wanted.items()
    }
    if before == after:
        return Plan()
    fields |= {"message": message[:MAX_TEXT], "conditions": in_order(after.values())}
    fields["last_update_time"] = format_time(now)
    return Plan(
        status=known.model_copy(update=fields),
        events=(Event(Reason.INVALID_CONFIG, message[:1024], "Warning"),),
    )
