"""Computes the plan from the desired and the observed state of a run."""

from __future__ import annotations

from datetime import datetime

from agenticrun_api import AgenticRun, AgenticRunStatus, ConditionType, Metadata, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempts, ending, provisioning, roles
from agenticrun_operator.planning.draft import MAX_TEXT, ConditionStatus, Draft, new_condition
from agenticrun_operator.planning.plan import Delete, Plan
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import (
    Child,
    Event,
    Manifest,
    WorkerImages,
    controller_uid,
)

DENIED_SECONDS = 10.0
"""Seconds between attempts to create a child that the apiserver denies."""
WAIT_SECONDS = 1.5
"""Seconds between checks of an obstacle: the deletion of an earlier run's objects may send no event
    that belongs to the new run."""
SAFETY_NET_SECONDS = 30.0
"""Seconds between looks at a run that only waits for watch events, in case one is lost."""
ENDED_BADLY: tuple[tuple[ConditionType, ConditionStatus], ...] = (
    (ConditionType.COMPLETE, "False"),
    (ConditionType.FAILED, "True"),
)


def plan(run: AgenticRun, observed: Observed, now: datetime, images: WorkerImages) -> Plan:
    """Return the plan for one run.

    Args:
        run: the desired state and the last written status.
        observed: the observed state.
        now: the current time.
        images: the worker images of this installation.
    """
    if run.metadata.deletion_timestamp:
        return Plan()  # garbage collection follows the owner references
    draft = Draft(run, now)
    if run.status.phase.finished:
        ending.clean_up(draft, observed)
        return draft.finish(observed.last_status_write)
    draft.look_again(SAFETY_NET_SECONDS)
    obstacle = provisioning.find_obstacle(run, observed, images)
    if obstacle:
        draft.condition(
            ConditionType.CLUSTER_PROVISIONED, "False", obstacle.reason, obstacle.message
        )
        draft.look_again(WAIT_SECONDS)
    else:
        provisioning.provision(draft, observed, images)
    if obstacle and run.status.job is None:
        draft.phase(Phase.PENDING, obstacle.message)
        if run.status.message != obstacle.message:
            draft.event(obstacle.reason, obstacle.message, warning=obstacle.needs_people)
        return draft.finish(observed.last_status_write)
    ready = roles.report(draft, observed)
    attempts.advance(draft, observed, ready)
    return draft.finish(observed.last_status_write)


def plan_refused(run: AgenticRun, message: str, now: datetime) -> Plan:
    """Return a plan that fails the run: a child is invalid for the apiserver, so no retry helps."""
    draft = Draft(run, now)
    ending.fail(draft, Reason.INVALID_CONFIG, message)
    return draft.finish(None)


def plan_denied(run: AgenticRun, message: str, now: datetime) -> Plan:
    """Return a plan that waits: a quota, an admission policy or missing rights prevent a child."""
    draft = Draft(run, now)
    draft.phase(run.status.phase, message)
    draft.condition(ConditionType.CLUSTER_PROVISIONED, "False", Reason.CLUSTER_CREATING, message)
    draft.look_again(DENIED_SECONDS)
    return draft.finish(None)


def plan_unreadable(
    document: Manifest, errors: tuple[str, ...], cluster: Manifest | None, now: datetime
) -> Plan:
    """Return a plan that fails a run with a spec that the operator cannot parse.

    The CRD accepted the spec, so the versions of the CRD and the operator do not match. The run's
    RayCluster is deleted unless spec.cleanup.onFailure is Keep.
    """
    metadata = Metadata.model_validate(document["metadata"])
    known = AgenticRunStatus.model_validate(
        document.get("status") or {"conditions": [], "metrics": [], "roles": []}
    )
    if metadata.deletion_timestamp:
        return Plan()
    keep = document["spec"].get("cleanup", {}).get("onFailure") == "Keep"
    ours = cluster is not None and controller_uid(cluster) == metadata.uid
    delete = (
        (Delete(Child.of(cluster), cluster["metadata"]["uid"]),)
        if cluster and ours and not keep
        else ()
    )
    if known.phase.finished:
        return Plan(delete=delete)
    message = "; ".join(errors)[:MAX_TEXT]
    conditions = [
        item
        for item in known.conditions
        if item.type not in (ConditionType.FAILED, ConditionType.COMPLETE)
    ]
    status = known.model_copy(
        update={
            "phase": Phase.FAILED,
            "observed_generation": metadata.generation,
            "completion_time": format_time(now),
            "message": message,
            "conditions": [
                *conditions,
                *(
                    new_condition(
                        kind, status, Reason.INVALID_CONFIG, message, now, metadata.generation
                    )
                    for kind, status in ENDED_BADLY
                ),
            ],
        }
    )
    return Plan(
        status=status,
        delete=delete,
        events=(Event(Reason.INVALID_CONFIG, message[:1024], "Warning"),),
    )
