"""Every decision of the operator about one run, as a pure function."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from agenticrun_api import AgenticRun, ConditionType, Metadata, Phase, Reason, Role
from agenticrun_api.load import damaged_control_fields, repair_status
from agenticrun_api.status import RayClusterStatus
from agenticrun_api.version import __version__, is_supported
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import (
    attempt,
    children,
    queueing,
    situation,
    stopping,
    times,
)
from agenticrun_operator.planning.attempt import Continues, Succeeded
from agenticrun_operator.planning.result import (
    Plan,
    Result,
    Said,
    condition,
    finish,
    in_order,
    text,
    warning,
)
from agenticrun_operator.planning.situation import State
from agenticrun_operator.resources import Event, Manifest, OperatorKey, WorkerImages

SAFETY_NET_SECONDS = 30.0
"""Seconds between looks at a run that only waits for watch events, in case one is lost."""
_PROBLEM_EVENTS = frozenset(
    {
        Reason.IMAGE_PULL_FAILED,
        Reason.MOUNT_FAILED,
        Reason.UNSCHEDULABLE,
        Reason.CONTAINER_CRASHED,
        Reason.CODE_UNAVAILABLE,
        Reason.PODS_DENIED,
        Reason.PODS_NOT_CREATED,
    }
)


def plan(
    run: AgenticRun,
    observed: Observed,
    now: datetime,
    images: WorkerImages,
    key: OperatorKey,
    creation_error: errors.ClusterError | None = None,
    scaling_error: errors.ClusterError | None = None,
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
    admitted = situation.as_admitted(run, observed)
    state = State(admitted, run, observed, now, images, key, creation_error, scaling_error)
    refusal = observed.scaling_refusal
    if refusal and not scaling_error and state.wait_to_repeat(refusal[1]) > 0:
        # It is too early to try again: the last refusal of other replicas still counts.
        state = replace(state, scaling_error=refusal[0])
    state = situation.record(state)
    result = Result(fields=_changed(run, state))
    if situation.is_damaged(run.status):
        message = "the phase of an ended run was written by another client: the run continues"
        result |= Result(events=(warning(Reason.STATUS_REPAIRED, message),))
    rescaling = situation.find_rescaling(state)
    current = situation.find_situation(state, rescaling)
    if stopping.is_stopped(state) and not isinstance(
        current, situation.Deleted | situation.Ended | situation.Stopping | situation.WithoutPods
    ):
        resumed = stopping.resume(state)
        result |= resumed
        state = state.with_fields(dict(resumed.fields))
        current = situation.find_situation(state, rescaling)
    result |= _decide(state, current, rescaling)
    result |= children.report_undeleted(state, result) | _record_cluster(state, result)
    return finish(run.status, result, run.metadata.generation, now, observed.last_status_write)


def _changed(run: AgenticRun, state: State) -> dict[str, Any]:
    """Return the fields of the status that recording has changed."""
    before = dict(run.status)
    return {name: value for name, value in state.status if value is not before[name]}


def _record_cluster(state: State, result: Result) -> Result:
    """Remember which RayCluster is the run's own, and the replicas that it was given.

    Both are in the RayCluster, too, but there others can change them.
    """
    cluster = result.cluster or state.cluster
    if cluster is None or state.status.phase.finished:
        return Result()
    replicas = resources.replicas_in(state.run, cluster)
    uid, known = cluster["metadata"]["uid"], state.status.ray_cluster
    if known is None or (known.name, known.uid, known.replicas) != (state.name, uid, replicas):
        known = RayClusterStatus(name=state.name, uid=uid, replicas=replicas)
    return Result(fields={"ray_cluster": known})


def _decide(state: State, current: situation.Situation, rescaling: situation.Rescaling) -> Result:
    """Return what follows from the situation."""
    match current:
        case situation.Deleted() if "orphan" in state.run.metadata.finalizers:
            return stopping.end_deleted(state)
        case situation.Deleted():
            return _keep_own(state, stopping.end_deleted(state))
        case situation.Ended():
            ended = (
                stopping.clean_up(state)
                | children.remove_budget(state)
                | children.remove_ownerless(state)
                | queueing.finish(state)
            )
            return _keep_own(state, ended)
    always = Result(look_after=SAFETY_NET_SECONDS) | _accept(state)
    always |= children.remove_stuck(state) | children.remove_ownerless(state)
    match current:
        case situation.Stopping(cause):
            stopped = always | _report_pods(state) | stopping.stop(state, cause)
            return _keep_own(state, stopped, numbers=True)
        case situation.WithoutPods(cause):
            return _keep_own(state, always | stopping.without_pods(state, cause))
        case situation.Waiting(until):
            return _keep_own(state, always | stopping.wait_in_queue(state, until))
        case situation.Running():
            return always | _run(state, rescaling) | queueing.report_pods(state)
        case situation.Starting() | situation.Restarting():
            return always | _start(state) | queueing.report_pods(state)


def _keep_own(state: State, result: Result, *, numbers: bool = False) -> Result:
    """Put back labels and owner of a RayCluster that has to go later, or goes with the run.

    Args:
        state: the state.
        result: what follows from the situation.
        numbers: True to put back the numbers of its pods, too.
    """
    goes_now = any(delete.child.kind == "RayCluster" for delete in result.delete)
    return result if goes_now else result | children.repair(state, numbers=numbers)


def _run(state: State, rescaling: situation.Rescaling) -> Result:
    """Follow an attempt, and keep its objects in order."""
    result = _report_pods(state)
    obstacle = children.find_obstacle(state)
    result |= (
        children.provision(state) | children.correct_policies(state)
        if obstacle is None
        else children.report_obstacle(state, obstacle)
    )
    result |= _next_deadline(state)
    match attempt.follow(state):
        case Succeeded(message):
            return result | stopping.succeed(state, message)
        case Continues(continued):
            result |= continued
            if obstacle is None:
                result |= children.repair(state) | children.scale(state, rescaling)
        case over:
            result |= stopping.conclude(state, over)
            if "completion_time" in result.fields:
                return result
    shown = {"message": text(obstacle.message)} if obstacle else {}
    return result | Result(fields=shown) | stopping.refuse_stop(state)


def _start(state: State) -> Result:
    """Make the run's objects, and begin an attempt when its pods are ready."""
    obstacle = children.find_obstacle(state)
    if obstacle and obstacle.final:
        return stopping.fail(state, obstacle.reason, obstacle.message)
    result = _next_deadline(state)
    if obstacle is None:
        result |= children.provision(state) | children.repair(state)
        result |= children.correct_policies(state)
        state = state.with_fields(dict(result.fields))
    if obstacle is None or state.status.job or state.cluster:
        result |= _report_pods(state)
    lost = obstacle is not None and obstacle.reason is Reason.CHECKPOINTS_LOST
    if obstacle is None or (state.status.job and not lost):
        result |= attempt.begin(state)
    if not situation.kept_pods(state):
        checked = stopping.check_startup(state)
        if checked.delete:  # the run gives its pods back, and waits
            return result | checked
        result |= checked
    if obstacle and "completion_time" not in result.fields:
        result |= children.report_obstacle(state, obstacle)
        if obstacle.rebuild:
            result |= children.delete_cluster(state)
    return result


def _next_deadline(state: State) -> Result:
    limit, start = state.run.spec.active_deadline_seconds, state.status.start_time
    if limit is None or start is None:
        return Result()
    return Result(look_after=max(0.0, limit - state.seconds_since(start)))


def _report_pods(state: State) -> Result:
    """Show the pods of each role, and why not all are ready."""
    roles = state.roles
    labels = resources.run_labels(state.run, Role.ENV)
    fields: dict[str, Any] = {
        "roles": roles.statuses,
        "pods": state.pods_since,
        "env_replicas": next((r.ready for r in roles.statuses if r.name == Role.ENV.value), 0),
        "env_selector": ",".join(f"{name}={value}" for name, value in labels.items()),
    }
    problem = roles.problem
    starting = state.status.phase is Phase.STARTING
    if problem is None:
        number = sum(item.desired for item in roles.statuses)
        ready = Said("True", Reason.PODS_READY, "", "Normal", f"all {number} pods are ready")
        edited = (edit for edit in state.edits if edit.object.kind == "Pod")
        if roles.warning:
            ready = Said("True", Reason.CODE_DIFFERS, roles.warning, "Warning", each_message=True)
        elif edit := next(edited, None):
            ready = Said("True", Reason.LABELS_MISSING, str(edit), "Warning", each_message=True)
        result = Result(fields=fields, conditions={ConditionType.ROLES_READY: ready})
        return result | Result(fields={"message": None} if starting else {})
    said = Said(
        "False",
        problem.reason,
        problem.message,
        event="Warning" if problem.reason in _PROBLEM_EVENTS else None,
    )
    shown = {"message": text(problem.message)} if starting else {}
    return Result(fields=fields | shown, conditions={ConditionType.ROLES_READY: said})


def _accept(state: State) -> Result:
    """Report if this operator supports the version of the worker image.

    Another version may still train well, so it is only reported.
    """
    job = state.status.job
    version = job.version if job else None
    if version is None or is_supported(version):
        said = Said("True", Reason.SPEC_READ, optional=True)
        return Result(conditions={ConditionType.ACCEPTED: said})
    message = (
        f"the worker image has AgenticRun {version}, which operator {__version__} does not "
        "support: they may be one minor version apart"
    )
    said = Said("Unknown", Reason.VERSION_SKEW, message, event="Warning")
    return Result(conditions={ConditionType.ACCEPTED: said})


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
