"""Computes the plan from the desired and the observed state of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from agenticrun_api import AgenticRun, ConditionType, Metadata, Phase, Reason
from agenticrun_api.load import damaged_control_fields, repair_status
from agenticrun_api.version import __version__, is_supported
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempts, ending, provisioning, roles
from agenticrun_operator.planning.draft import MAX_TEXT, ConditionStatus, Draft, new_condition
from agenticrun_operator.planning.plan import Plan
from agenticrun_operator.planning.snapshot import own_progress
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Event, Manifest, WorkerImages

DENIED_SECONDS = 10.0
"""Seconds between attempts to create a child that the apiserver denies."""
WAIT_SECONDS = 1.5
"""Seconds between checks of an obstacle: the deletion of an earlier run's objects may send no event
    that belongs to the new run."""
SAFETY_NET_SECONDS = 30.0
"""Seconds between looks at a run that only waits for watch events, in case one is lost."""


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
    _accept(draft, observed)
    obstacle = provisioning.find_obstacle(run, observed, images)
    if obstacle:
        if _is_new(draft, obstacle):
            draft.event(obstacle.reason, obstacle.message, warning=obstacle.needs_people)
        draft.condition(
            ConditionType.CLUSTER_PROVISIONED, "False", obstacle.reason, obstacle.message
        )
        draft.look_again(DENIED_SECONDS if observed.kuberay_missing else WAIT_SECONDS)
        if run.status.phase is not Phase.RUNNING:
            draft.phase(run.status.phase, obstacle.message)
    else:
        provisioning.provision(draft, observed, images)
    if obstacle and run.status.job is None:
        draft.phase(Phase.PENDING, obstacle.message)
        return draft.finish(observed.last_status_write)
    ready = roles.report(draft, observed, images)
    attempts.advance(draft, observed, ready)
    return draft.finish(observed.last_status_write)


def _accept(draft: Draft, observed: Observed) -> None:
    """Say whether this operator supports the version of the worker image.

    Another version may still train well, so it is only reported.
    """
    progress, before = (
        own_progress(draft.run, observed.progress),
        draft.find(ConditionType.ACCEPTED),
    )
    job = draft.run.status.job
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


def _is_new(draft: Draft, obstacle: provisioning.Obstacle) -> bool:
    """Return True if the condition does not show this reason yet.

    Messages do not count: that of a quota changes with what others use.
    """
    before = draft.find(ConditionType.CLUSTER_PROVISIONED)
    return before is None or before.reason != obstacle.reason.value


def plan_refused(run: AgenticRun, tried: Plan, message: str, now: datetime) -> Plan:
    """Return a plan for a child that the apiserver refuses as invalid.

    If KubeRay is too old, the run waits. Else no retry helps, so the run fails, unless the plan
    ended it already, or it trains and its RayCluster exists: pods that run no longer need the
    child.
    """
    outdated = provisioning.outdated_kuberay(message)
    if outdated:
        return plan_blocked(run, tried, outdated, now)
    ended = tried.status is not None and tried.status.phase.finished
    has_cluster = all(item["kind"] != "RayCluster" for item in tried.create)
    if ended or (run.status.job is not None and has_cluster):
        return plan_denied(run, tried, message, now)
    draft = Draft(run, now)
    ending.fail(draft, Reason.INVALID_CONFIG, message)
    return draft.finish(None)


def plan_denied(run: AgenticRun, tried: Plan, message: str, now: datetime) -> Plan:
    """Return the plan for a child that a quota, an admission policy or missing rights prevent."""
    return plan_blocked(run, tried, provisioning.Obstacle(Reason.DENIED, message), now)


def plan_kuberay_missing(run: AgenticRun, tried: Plan, now: datetime) -> Plan:
    """Return the plan for a RayCluster that the apiserver does not serve any more."""
    return plan_blocked(run, tried, provisioning.KUBERAY_MISSING, now)


def plan_namespace_gone(run: AgenticRun, tried: Plan, message: str, now: datetime) -> Plan:
    """Return the plan for a child of a run in a namespace that is missing or being deleted."""
    return plan_blocked(run, tried, provisioning.gone_namespace(run, message), now)


def plan_blocked(
    run: AgenticRun, tried: Plan, obstacle: provisioning.Obstacle, now: datetime
) -> Plan:
    """Return the plan together with what prevented a child, and a time to retry.

    What else was decided stays: a failed attempt is counted, and a success is kept.
    """
    draft = Draft(run, now)
    message, is_new = obstacle.message, _is_new(draft, obstacle)
    denied = new_condition(
        ConditionType.CLUSTER_PROVISIONED,
        "False",
        obstacle.reason,
        message,
        now,
        run.metadata.generation,
        draft.find(ConditionType.CLUSTER_PROVISIONED),
    )
    draft.set(**dict(tried.status or run.status))
    others = [item for item in draft.status.conditions if item.type != denied.type]
    draft.set(conditions=[denied, *others])
    if not draft.status.phase.finished:
        never_started = draft.status.job is None and obstacle.reason is not Reason.DENIED
        draft.phase(Phase.PENDING if never_started else draft.status.phase, message)
    if is_new:
        draft.event(obstacle.reason, message, warning=True)
    draft.look_again(min(tried.requeue_after or DENIED_SECONDS, DENIED_SECONDS))
    plan_ = draft.finish(None)
    events = tuple(item for item in tried.events if item.reason is not Reason.CLUSTER_CREATED)
    return replace(plan_, job=tried.job, delete=tried.delete, events=(*events, *plan_.events))


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
    started = stored.get("phase", "Pending") != "Pending" or {"job", "startTime"} & stored.keys()
    if damaged_control_fields(stored):
        event = Event(Reason.INVALID_CONFIG, f"status is damaged: {message}"[:1024], "Warning")
        return Plan(events=(event,))  # a write would lose what is left of these fields
    if not started:
        fields = {"phase": Phase.FAILED, "completion_time": format_time(now)}
        fields["observed_generation"] = metadata.generation
        wanted = {ConditionType.FAILED: "True", ConditionType.COMPLETE: "False"}
    else:
        message = f"this version of the operator cannot read the spec: {message}"
        wanted = {ConditionType.ACCEPTED: "False"}
    before = {item.type: item for item in known.conditions}
    after = before | {
        kind: new_condition(
            kind, status, Reason.INVALID_CONFIG, message, now, metadata.generation, before.get(kind)
        )
        for kind, status in wanted.items()
    }
    if before == after:
        return Plan()
    fields |= {"message": message[:MAX_TEXT], "conditions": list(after.values())}
    return Plan(
        status=known.model_copy(update=fields),
        events=(Event(Reason.INVALID_CONFIG, message[:1024], "Warning"),),
    )
