"""Every decision of the operator about one run, as a pure function."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from agenticrun_api import AgenticRun, ConditionType, Phase, Reason, Role
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempt, children, queueing, scaling, stopping
from agenticrun_operator.planning.attempt import Continues, Succeeded
from agenticrun_operator.planning.result import Plan, Result, finish, text, warning
from agenticrun_operator.planning.situation import Cause, Situation, find_situation, record
from agenticrun_operator.planning.state import State
from agenticrun_operator.resources import OperatorKey, WorkerImages

SAFETY_NET_SECONDS = 30.0
"""Seconds between looks at a run that only waits for watch events, in case one is lost."""


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
    admitted = queueing.as_admitted(run, observed)
    state = State(admitted, run, observed, now, images, key, creation_error, scaling_error)
    refusal = observed.scaling_refusal
    if refusal and not scaling_error and state.wait_to_repeat(refusal[1]) > 0:
        # It is too early to try again: the last refusal of other replicas still counts.
        state = replace(state, scaling_error=refusal[0])
    state = record(state)
    stored = dict(run.status)
    recorded = {name: value for name, value in state.status if value is not stored[name]}
    result = Result(fields=recorded)
    if state.is_damaged:
        message = "the phase of an ended run was written by another client: the run continues"
        result |= Result(events=(warning(Reason.STATUS_REPAIRED, message),))
    rescaling = scaling.find_rescaling(state)
    current = find_situation(state, rescaling.restart)
    continues = current in (Situation.WAITING, Situation.STARTING, Situation.RUNNING)
    if continues and stopping.is_stopped(state):
        resumed = stopping.resume(state)
        result |= resumed
        state = state.with_fields(dict(resumed.fields))
        current = find_situation(state, rescaling.restart)
    result |= _decide(state, current, rescaling)
    result |= children.report_undeleted(state, result) | children.record_cluster(state, result)
    return finish(run.status, result, run.metadata.generation, now, observed.last_status_write)


def _decide(state: State, current: Situation | Cause, rescaling: scaling.Rescaling) -> Result:
    """Return what follows from the situation."""
    match current:
        case Situation.DELETED if "orphan" in state.run.metadata.finalizers:
            return stopping.end_deleted(state)
        case Situation.DELETED:
            return _keep_own(state, stopping.end_deleted(state))
        case Situation.ENDED:
            ended = (
                stopping.clean_up(state)
                | children.remove_budget(state)
                | children.remove_ownerless(state)
                | queueing.finish(state)
            )
            return _keep_own(state, ended)
    always = Result(look_after=SAFETY_NET_SECONDS) | attempt.report_version(state)
    always |= children.remove_stuck(state) | children.remove_ownerless(state)
    match current:
        case Cause() if state.has_attempt:
            stopped = always | _report_pods(state) | stopping.stop(state, current)
            return _keep_own(state, stopped, numbers=True)
        case Cause():
            return _keep_own(state, always | stopping.without_pods(state, current))
        case Situation.WAITING:
            return _keep_own(state, always | stopping.wait_in_queue(state))
        case Situation.RUNNING:
            return always | _run(state, rescaling) | queueing.report_pods(state)
        case Situation.STARTING:
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


def _run(state: State, rescaling: scaling.Rescaling) -> Result:
    """Follow an attempt, and keep its objects in order."""
    result = _report_pods(state)
    obstacle = children.find_obstacle(state)
    result |= (
        children.provision(state) | children.correct_policies(state)
        if obstacle is None
        else children.report_obstacle(state, obstacle)
    )
    result |= Result(look_after=state.seconds_to_deadline)
    match attempt.follow(state):
        case Succeeded(message):
            return result | stopping.succeed(state, message)
        case Continues(continued):
            result |= continued
            if obstacle is None:
                result |= children.repair(state) | scaling.scale(state, rescaling)
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
    result = Result(look_after=state.seconds_to_deadline)
    if obstacle is None:
        result |= children.provision(state) | children.repair(state)
        result |= children.correct_policies(state)
        state = state.with_fields(dict(result.fields))
    if obstacle is None or state.status.job or state.cluster:
        result |= _report_pods(state)
    lost = obstacle is not None and obstacle.reason is Reason.CHECKPOINTS_LOST
    if obstacle is None or (state.status.job and not lost):
        result |= attempt.begin(state)
    if not state.keeps_pods:
        checked = stopping.check_startup(state)
        if checked.delete:  # the run gives its pods back, and waits
            return result | checked
        result |= checked
    if obstacle and "completion_time" not in result.fields:
        result |= children.report_obstacle(state, obstacle)
        if obstacle.rebuild:
            result |= children.delete_cluster(state)
    return result


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
    if state.status.phase is Phase.STARTING:
        fields["message"] = text(roles.problem.message) if roles.problem else None
    said = roles.summary(state.edits if roles.ready else ())
    return Result(fields=fields, conditions={ConditionType.ROLES_READY: said})
