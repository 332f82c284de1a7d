"""Runs that release their pods: suspended, rescaled, given back, ended, deleted.

A driver that is asked to stop ends its step, saves a checkpoint and exits. Its time runs from the
moment at which its reporter took the request, not from when it was first wanted: an operator that
was away, or a reporter that does not answer, must not cost a step.

An attempt that ends for a stop is no restart and no failure. It is over like one that waits for
its next restart, so that a run that is resumed, at any moment, continues as after a restart.

Kubernetes places pods one by one. So two runs can each hold a part of the GPUs that both need, and
wait for the rest forever. At the startup deadline, or after holdSeconds, a run gives its pods back
and queues: it tries again after a wait that doubles each time. The wait differs between runs
(jitter by the run's uid), so that one run finds all GPUs free.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from agenticrun_api import Activity, ConditionType, Phase, Reason, Role, names
from agenticrun_api.status import StopCause
from agenticrun_operator import resources
from agenticrun_operator.observed import Job, NoJob
from agenticrun_operator.planning import attempt, children, queueing, times
from agenticrun_operator.planning.attempt import Continues, Over, Succeeded
from agenticrun_operator.planning.result import (
    Delete,
    RequestStop,
    Result,
    Said,
    note,
    text,
    warning,
)
from agenticrun_operator.planning.situation import Cause
from agenticrun_operator.planning.state import State
from agenticrun_operator.resources import Child

MAX_STEP_SECONDS = 1800.0
"""Longest time that a driver gets to end its step, or to save, before its grace period begins."""
SAVE_SILENCE_SECONDS = 300.0
"""Time without a snapshot that a driver may spend on saving a checkpoint."""
_SAVES = (Activity.STOPPING, Activity.CHECKPOINT, Activity.VALIDATION)
FIRST_WAIT_SECONDS = 60.0
"""Longer than the pods of another run need to be placed, and shorter than people are patient."""
MAX_WAIT_SECONDS = 900.0
_ERRORS_OF_THE_RUN = (
    Reason.IMAGE_PULL_FAILED,
    Reason.CONTAINER_CRASHED,
    Reason.CODE_UNAVAILABLE,
)
"""Problems that a run has on every node, so that another try does not help."""


# -- stop an attempt -------------------------------------------------------------------------------


def stop(state: State, cause: Cause) -> Result:
    """Let the driver save a checkpoint, then release the pods.

    What the driver reports in between counts: the run may succeed, or fail for good.
    """
    known = Result(fields={"stopping": cause.status})
    state = state.with_fields(dict(known.fields))
    if isinstance(state.observed.job, NoJob) and not state.job.status:  # Ray has not got it
        return known | _release(state, cause, Over(cause.done, "the attempt has not begun"))
    match attempt.follow(state):
        case Succeeded(message):
            return succeed(state, message)
        case Over(retryable=False) as over:
            return fail(state, over.reason, over.message) | attempt.log_tail(state)
        case Over() as over:
            released = _release(state, cause, over)
            if not (over.stopped or over.disruption):
                released |= Result(events=(warning(over.reason, attempt.summarize(state, over)),))
            return known | released
        case Continues(result):
            if _is_given_up(state, cause):
                late = "the driver has not stopped in time; its pods are deleted"
                event = Result(events=(warning(cause.done, late),))
                return known | event | _release(state, cause, Over(cause.done, late))
            asked = Result()
            if state.job.report is None:
                asked = attempt.request(state, RequestStop(state.job.submission_id), cause.since)
            if cause.kind is StopCause.DEADLINE:
                message = f"{cause.text}: the driver saves a checkpoint"
                shown = Result(fields={"message": message}, look_after=attempt.POLL_SECONDS)
            else:
                saves = "the driver saves a checkpoint, then the pods go"
                shown = _being_suspended(cause, saves)
            return known | result | asked | shown


def _release(state: State, cause: Cause, over: Over) -> Result:
    """End the attempt, and release its pods."""
    ended = attempt.end(state, over)
    begun = state.job.status or not isinstance(state.observed.job, NoJob)
    if cause.kind is StopCause.QUEUE and begun:
        ended |= Result(fields={"disruptions": state.status.disruptions + 1})
    released = without_pods(state.with_fields(dict(ended.fields)), cause)
    return ended | released if "completion_time" in released.fields else released | ended


def _being_suspended(cause: Cause, message: str) -> Result:
    message = f"{cause.text}: {message}"
    return Result(
        fields={"phase": Phase.SUSPENDING, "message": text(message)},
        conditions={
            ConditionType.SUSPENDED: Said("Unknown", cause.reason, message, event="Normal")
        },
        look_after=attempt.POLL_SECONDS,
    )


def _is_given_up(state: State, cause: Cause) -> bool:
    """Return True if the driver has had the time to stop, or cannot be asked.

    It gets the time to end its step, and then its grace period to save a checkpoint. The deadline
    is extended while the driver reports that it is saving one. A driver that stops for other
    replicas is never given up: no other work needs its pods. One that Kueue has evicted gets
    spec.queue.preemption.graceSeconds: other work waits for its quota.
    """
    if cause.kind is StopCause.RESCALE:
        return False
    asked = state.job.stop_requested_time
    if cause.kind is StopCause.QUEUE:
        # Its time begins when it has taken the request.
        began = max(cause.since, times.parse_time(asked)) if asked else cause.since
        return state.seconds_since(began) >= queueing.grace_seconds(state)
    if asked is None or times.parse_time(asked) < cause.since:
        trouble = state.observed.job_trouble
        if trouble is None or not isinstance(trouble.action, RequestStop):
            return False
        return state.seconds_since(max(trouble.since, cause.since)) >= attempt.UNREACHABLE_SECONDS
    waited, progress = state.seconds_since(asked), state.progress
    grace = state.run.spec.grace_seconds(Role.DRIVER)
    if progress is None:
        unknown = state.seconds_since(state.job.unknown_since)
        return waited > grace and unknown >= attempt.UNREACHABLE_SECONDS
    step = progress.seconds_per_step or 0.0
    if progress.activity in _SAVES and (progress.silent_seconds or 0.0) <= SAVE_SILENCE_SECONDS:
        step = MAX_STEP_SECONDS
    return waited > grace + min(step, MAX_STEP_SECONDS)


# -- without pods ----------------------------------------------------------------------------------


def without_pods(state: State, cause: Cause) -> Result:
    """Release the pods of a run that has no attempt, and wait until it is resumed."""
    if cause.kind is StopCause.DEADLINE:
        return exceed_deadline(state)
    fields: dict[str, Any] = {"stopping": cause.status, "obstacle": None}
    if cause.kind is not StopCause.QUEUE:
        fields["startup_timeouts"] = 0
    known = Result(fields=fields)
    said = Said("False", cause.done, cause.text, optional=True, keep_reason=True)
    known |= Result(conditions=dict.fromkeys((ConditionType.TRAINING, ConditionType.STALLED), said))
    if cause.kind is not StopCause.RESCALE:
        known |= Result(fields={"start_time": None})
    ways_out = {
        StopCause.RESCALE: "with new pods,",
        StopCause.CLUSTER_SUSPENDED: "when it is released,",
        StopCause.SUSPEND: "set it to false, and",
        StopCause.QUEUE: "when Kueue admits it,",
    }
    message = f"{cause.text}; {ways_out[cause.kind]} the run {way_on(state)}"
    if cause.kind is not StopCause.QUEUE:
        known |= queueing.not_queued(cause.done, cause.text)
    released = _no_pods(state, cause.done, cause.text)
    if cause.kind is not StopCause.CLUSTER_SUSPENDED:
        released |= children.delete_cluster(state)
    uid = state.run.metadata.uid
    there = state.cluster and cause.kind is not StopCause.CLUSTER_SUSPENDED
    if there or any(pod.run_uid == uid for pod in state.observed.pods):
        return known | released | _being_suspended(cause, f"the pods are being deleted; {message}")
    if cause.kind is StopCause.QUEUE:
        obstacle = queueing.find_obstacle(state)
        if obstacle and obstacle.final:
            return fail(state, obstacle.reason, obstacle.message)
        return known | released | queueing.wait(state, obstacle, way_on(state))
    return (
        known
        | released
        | (queueing.leave(state) if cause.kind is StopCause.SUSPEND else Result())
        | Result(
            fields={"phase": Phase.SUSPENDED, "message": text(message)},
            conditions={ConditionType.SUSPENDED: Said("True", cause.done, message, event="Normal")},
        )
    )


def way_on(state: State) -> str:
    """Return from where the run continues, as a predicate."""
    saved = state.status.checkpoint
    if state.status.job is None:
        return "starts from the beginning"
    if saved and state.claim_lost:
        claim = resources.claim_name(state.run)
        return f"cannot continue: volume claim {claim} was deleted, and its checkpoints with it"
    if saved:
        return f"resumes from the checkpoint of step {saved.step}"
    if resources.storage_of(state.run) is None:
        return "starts again at step 0: it saves no checkpoints"
    return "starts again: it has saved no checkpoint yet"


def _no_pods(state: State, reason: Reason, message: str) -> Result:
    """Report that the run holds no pods."""
    nothing = {"ready": 0, "joining": 0, "leaving": 0, "message": ""}
    said = Said("False", reason, message)
    fields: dict[str, Any] = {
        "roles": [item.model_copy(update=nothing) for item in state.status.roles]
    }
    if state.status.env_replicas is not None:
        fields["env_replicas"] = 0
    return Result(
        fields=fields,
        conditions={ConditionType.CLUSTER_PROVISIONED: said, ConditionType.ROLES_READY: said},
    )


def is_stopped(state: State) -> bool:
    """Return True if the run is stopped, or about to be."""
    return bool(state.status.stopping) or state.status.phase in (Phase.SUSPENDING, Phase.SUSPENDED)


def resume(state: State) -> Result:
    """Let a run continue that no longer has to release its pods."""
    before, job = state.status.stopping, state.status.job
    fields: dict[str, Any] = {"stopping": None, "pods": None, "message": None}
    admitted = queueing.admitted_by(state)
    if before and before.cause is StopCause.DEADLINE:  # it was extended
        return Result(fields=fields | {"pods": state.status.pods})
    if state.has_attempt:
        running = job is not None and job.status == "RUNNING"
        fields |= {"phase": Phase.RUNNING if running else Phase.STARTING, "pods": state.status.pods}
        message = "the attempt continues; if its driver has begun to stop, it is restarted"
    else:
        now = times.format_time(state.now)
        fields |= {
            "phase": Phase.STARTING if job else Phase.PENDING,
            "next_retry_time": now if job else None,
        }
        message = f"the run {way_on(state)}"
    resumed = Said("False", Reason.RESUMED, "", optional=bool(admitted))
    reason = Reason.ADMITTED if admitted else Reason.RESUMED
    words = f"{admitted}: {message}" if admitted else message
    return Result(
        fields=fields,
        conditions={ConditionType.SUSPENDED: resumed},
        events=(note(reason, words),),
    ) | (queueing.not_queued(Reason.ADMITTED, admitted) if admitted else Result())


# -- the startup deadline --------------------------------------------------------------------------


def check_startup(state: State) -> Result:
    """Give the pods back or fail the run if its pods are not ready in time.

    Pods whose head does not answer are given back, too: another head may be on another node, and
    a network that stays closed must not hold GPUs. A run that has trained before never fails here:
    its images and containers did work.
    """
    if state.has_enough_pods:
        return _check_head(state)
    since, problem = state.waiting_since, state.roles.problem
    if since is None or problem is None:
        return Result()
    policy, problems = state.run.spec.failure_policy, [pod.problem for pod in state.pods]
    limit = policy.startup_deadline_seconds
    unplaced = any(found and found.reason is Reason.UNSCHEDULABLE for found in problems)
    if policy.hold_seconds and unplaced and any(pod.node for pod in state.pods):
        # Some hold what another run may wait for, and others find no node.
        limit = min(policy.hold_seconds, limit)
    left = limit - state.seconds_since(since)
    if left > 0:
        return Result(look_after=left)
    late = f"the pods were not ready within {times.format_span(limit)}: {problem.message}"
    of_the_run = problem.reason in _ERRORS_OF_THE_RUN and not problem.on_one_node
    if state.status.job is None and of_the_run:
        return fail(state, Reason.STARTUP_DEADLINE_EXCEEDED, late)
    return _give_back(state, Reason.STARTUP_DEADLINE_EXCEEDED, late)


def _check_head(state: State) -> Result:
    """Give the pods back if all are ready, but the head does not answer for long."""
    silent = attempt.report_unreachable(state)
    if silent is None:
        return Result()
    left = attempt.UNREACHABLE_SECONDS - state.seconds_since(state.unreachable_since)
    if left > 0:
        return Result(look_after=left)
    waited = times.format_span(attempt.UNREACHABLE_SECONDS)
    late = f"the pods wait for {waited}: {silent.fields['message']}"
    return _give_back(state, Reason.PROGRESS_UNAVAILABLE, late)


def _give_back(state: State, reason: Reason, late: str) -> Result:
    timeouts = state.status.startup_timeouts + 1
    wait = times.backoff_seconds(timeouts - 1, FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS)
    wait *= random.Random(f"{state.run.metadata.uid}/{timeouts}").uniform(0.5, 1.5)
    message = f"{late}; they are given back, and the run tries again (time {timeouts + 1})"
    event = warning(reason, f"{message} in {times.format_span(wait)}")
    fields = {
        "phase": Phase.PENDING,
        "message": text(message),
        "startup_timeouts": timeouts,
        "next_retry_time": times.format_time(state.now + timedelta(seconds=wait)),
        "obstacle": None,
    }
    if state.status.job is None:
        fields["start_time"] = None
    return (
        Result(fields=fields, events=(event,), look_after=wait)
        | _no_pods(state, reason, message)
        | children.delete_cluster(state)
    )


def wait_in_queue(state: State) -> Result:
    """Delete the RayCluster, should it still be there, leave the queue, and wait."""
    left = children.delete_cluster(state) | queueing.leave(state)
    return left | Result(look_after=-state.seconds_since(state.retry_at))


# -- the end ---------------------------------------------------------------------------------------


def conclude(state: State, over: Over) -> Result:
    """Restart a run whose attempt is over, or fail it."""
    if not over.retryable:
        return fail(state, over.reason, over.message) | attempt.log_tail(state)
    result, failure = attempt.restart(state, over)
    if failure:
        return result | fail(state, failure.reason, failure.message) | attempt.log_tail(state)
    if over.rebuild:
        result |= children.delete_cluster(state, f"the RayCluster is built again: {over.rebuild}")
    return result


def succeed(state: State, message: str) -> Result:
    """End the run as succeeded."""
    reason = Reason.RUN_SUCCEEDED
    return _finish(state, Phase.SUCCEEDED, reason, message) | Result(
        conditions={
            ConditionType.COMPLETE: Said("True", reason, message),
            ConditionType.FAILED: Said("False", reason),
        },
        events=(note(reason, message),),
    )


def fail(state: State, reason: Reason | str, message: str) -> Result:
    """End the run as failed."""
    return _finish(state, Phase.FAILED, reason, message) | Result(
        fields={"activity": None},
        conditions={
            ConditionType.FAILED: Said("True", reason, message),
            ConditionType.COMPLETE: Said("False", reason),
        },
        events=(warning(reason, message),),
    )


def _finish(state: State, phase: Phase, reason: Reason | str, message: str) -> Result:
    said = {
        ConditionType.TRAINING: Said("False", reason),
        ConditionType.STALLED: Said("False", reason, optional=True),
        ConditionType.SUSPENDED: Said("False", reason, "the run has ended", optional=True),
        ConditionType.QUEUED: Said("False", reason, "the run has ended", optional=True),
    }
    if state.cluster is None:
        gone = Said("False", Reason.CLUSTER_DELETED, "the run has ended")
        said |= {ConditionType.CLUSTER_PROVISIONED: gone, ConditionType.ROLES_READY: gone}
    return Result(
        fields={
            "phase": phase,
            "message": text(message),
            "completion_time": times.format_time(state.now),
            "eta": None,
            "estimated_completion_time": None,
            "next_retry_time": None,
            "stopping": None,
            "obstacle": None,
        },
        conditions=said,
        look_after=1.0,
    )


def exceed_deadline(state: State) -> Result:
    """End the run because it has been active for too long."""
    limit = times.format_span(state.run.spec.active_deadline_seconds or 0)
    saved = state.status.checkpoint
    kept = f"the newest checkpoint is of step {saved.step}" if saved else "there is no checkpoint"
    message = f"the run was active for longer than {limit} (activeDeadlineSeconds); {kept}"
    return fail(state, Reason.DEADLINE_EXCEEDED, message)


def clean_up(state: State) -> Result:
    """Delete a finished run's RayCluster if spec.cleanup says so, and the run after its TTL."""
    run, status = state.run, state.status
    assert status.completion_time is not None
    ended = state.seconds_since(status.completion_time)
    cleanup = run.spec.cleanup
    policy = cleanup.on_success if status.phase is Phase.SUCCEEDED else cleanup.on_failure
    result = _follow_exit(state, ended)
    if state.observed.kuberay_missing:
        # The RayCluster may be there when KubeRay's CRDs are back.
        result |= Result(look_after=10.0)
    elif state.keeps_pods:
        message = (
            "the run has ended and keeps its pods: volume claim "
            f"{resources.claim_name(run)} was deleted, and its checkpoints are lost when they "
            "end. Copy them, then delete the run"
        )
        said = Said("False", Reason.CHECKPOINTS_LOST, message, event="Warning")
        kept = Result(conditions={ConditionType.CLUSTER_PROVISIONED: said}, look_after=30.0)
        return result | kept
    elif policy == "Delete":
        result |= _cluster_deleted(state, "the run has finished")
        exiting = isinstance(state.observed.job, Job) and state.observed.job.live
        if not exiting or ended >= attempt.EXIT_SECONDS:
            result |= children.delete_cluster(state)
    if (ttl := run.spec.ttl_seconds_after_finished) is None:
        return result
    if ttl > ended:
        return result | Result(look_after=ttl - ended)
    return result | children.ask_to_delete(
        state, Delete(Child(names.KIND, run.metadata.name), run.metadata.uid)
    )


def end_deleted(state: State) -> Result:
    """Release the pods of a deleted run that a finalizer holds.

    With `--cascade=foreground`, garbage collection deletes the RayCluster first and the run last.
    With `--cascade=orphan`, the user wants to keep the children. With a finalizer of others,
    garbage collection would delete the pods only after the run, which no longer needs them.
    """
    finalizers = state.run.metadata.finalizers
    if "orphan" in finalizers:
        return Result()
    held = ", ".join(finalizers) or "the apiserver"
    message = f"the run is being deleted, and its pods with it; {held} still holds it"
    result = Result(
        fields={"message": text(message)},
        conditions={
            ConditionType.TRAINING: Said("False", Reason.RUN_DELETED, message),
            ConditionType.PROGRESSING: Said("False", Reason.RUN_DELETED, message, event="Normal"),
        },
    )
    if "foregroundDeletion" in finalizers:
        return result
    return (
        result
        | children.delete_cluster(state)
        | _cluster_deleted(state, "the run is being deleted")
    )


def _follow_exit(state: State, ended: float) -> Result:
    """Follow the driver's job to its end after the final report, which has ended the run."""
    seen = state.observed.job
    if state.status.job is None or not isinstance(seen, Job):
        return Result()
    if seen.live:
        late = ended >= attempt.EXIT_SECONDS
        stopped = attempt.stop_job(state, state.job.submission_id) if late else Result()
        return stopped | Result(look_after=2.0)
    return attempt.log_tail(state) if state.status.phase is Phase.FAILED else Result()


def _cluster_deleted(state: State, why: str) -> Result:
    """Report that the RayCluster is gone, once it is."""
    cluster = state.observed.child("RayCluster", state.name)
    if cluster is not None and not resources.is_deleting(cluster):
        return Result()
    gone = Said("False", Reason.CLUSTER_DELETED, why)
    words = f"deleted RayCluster {state.name}: {why}"
    deleted = Said("False", Reason.CLUSTER_DELETED, why, event="Normal", event_text=words)
    return _no_pods(state, Reason.CLUSTER_DELETED, why) | Result(
        conditions={ConditionType.CLUSTER_PROVISIONED: deleted, ConditionType.ROLES_READY: gone}
    )


def refuse_stop(state: State) -> Result:
    """Report that the pods stay although spec.suspend is true: they hold the only copy of data."""
    if not (state.run.spec.suspend and state.keeps_pods):
        return Result()
    message = (
        "spec.suspend is true, but the run keeps its pods: volume claim "
        f"{resources.claim_name(state.run)} ({resources.CLAIM_KIND}) was deleted, and its "
        "checkpoints are lost when they end. Copy them first, then delete the run"
    )
    said = Said("False", Reason.CHECKPOINTS_LOST, message, event="Warning")
    return Result(fields={"message": message}, conditions={ConditionType.SUSPENDED: said})
