"""The end of a run and the cleanup after it."""

from __future__ import annotations

from datetime import datetime, timedelta

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_api.names import KIND
from agenticrun_operator.observed import Job, Observed
from agenticrun_operator.planning.draft import MAX_TEXT, Draft
from agenticrun_operator.planning.lost_pods import delete_cluster
from agenticrun_operator.planning.plan import Delete, Stop
from agenticrun_operator.planning.times import format_span, format_time, parse_time
from agenticrun_operator.resources import Child, is_deleting

EXIT_SECONDS = 30.0
"""Time a driver has to exit after its final report before its job or RayCluster is removed."""


def succeed(draft: Draft, message: str) -> None:
    """End the run as succeeded."""
    draft.phase(Phase.SUCCEEDED, message)
    draft.condition(ConditionType.COMPLETE, "True", Reason.RUN_SUCCEEDED, message)
    draft.condition(ConditionType.FAILED, "False", Reason.RUN_SUCCEEDED)
    draft.condition(ConditionType.TRAINING, "False", Reason.RUN_SUCCEEDED)
    end_stall(draft, Reason.RUN_SUCCEEDED)
    draft.event(Reason.RUN_SUCCEEDED, message)
    _finish(draft)


def fail(draft: Draft, reason: Reason | str, message: str) -> None:
    """End the run as failed."""
    draft.phase(Phase.FAILED, message)
    draft.condition(ConditionType.FAILED, "True", reason, message)
    draft.condition(ConditionType.COMPLETE, "False", reason)
    draft.condition(ConditionType.TRAINING, "False", reason)
    end_stall(draft, reason)
    draft.set(activity=None)
    draft.event(reason, message, warning=True)
    _finish(draft)


def end_stall(draft: Draft, reason: Reason | str, message: str = "") -> None:
    """Say that nothing stalls, because nothing trains any more."""
    if draft.find(ConditionType.STALLED):
        draft.condition(ConditionType.STALLED, "False", reason, message)


def deadline(draft: Draft) -> datetime | None:
    """Return when the run has been active for long enough, and look again then; None: no limit."""
    limit, start = draft.run.spec.active_deadline_seconds, draft.status.start_time
    if limit is None or start is None:
        return None
    end = parse_time(start) + timedelta(seconds=limit)
    if end > draft.now:
        draft.look_again((end - draft.now).total_seconds())
    return end


def exceed_deadline(draft: Draft) -> None:
    """End the run because it has been active for too long."""
    limit = format_span(draft.run.spec.active_deadline_seconds or 0)
    saved = draft.status.checkpoint
    kept = f"the newest checkpoint is of step {saved.step}" if saved else "there is no checkpoint"
    fail(
        draft,
        Reason.DEADLINE_EXCEEDED,
        f"the run was active for longer than {limit} (activeDeadlineSeconds); {kept}",
    )


def _finish(draft: Draft) -> None:
    draft.set(
        completion_time=format_time(draft.now),
        eta=None,
        estimated_completion_time=None,
        next_retry_time=None,
    )
    draft.look_again(1.0)


def clean_up(draft: Draft, observed: Observed) -> None:
    """Delete a finished run's RayCluster if spec.cleanup says so, and the run after its TTL."""
    run = draft.run
    ended = parse_time(run.status.completion_time) if run.status.completion_time else draft.now
    policy = (
        run.spec.cleanup.on_success
        if run.status.phase is Phase.SUCCEEDED
        else run.spec.cleanup.on_failure
    )
    _follow_exit(draft, observed, ended)
    if observed.kuberay_missing:
        draft.look_again(10.0)  # the RayCluster may be there when KubeRay's CRDs are back
    elif policy == "Delete":
        _delete_cluster(draft, observed, ended)
    if run.spec.ttl_seconds_after_finished is not None:
        left = (
            ended + timedelta(seconds=run.spec.ttl_seconds_after_finished) - draft.now
        ).total_seconds()
        if left <= 0:
            draft.delete.append(Delete(Child(KIND, run.metadata.name), run.metadata.uid))
        else:
            draft.look_again(left)


def end_deleted(draft: Draft, observed: Observed) -> None:
    """End a deleted run that a finalizer holds.

    Garbage collection would delete its pods only after the run, which no longer needs them.
    """
    finalizers = draft.run.metadata.finalizers
    if "orphan" in finalizers:
        return  # `kubectl delete --cascade=orphan`: the user wants to keep the children
    if not draft.status.phase.finished:
        held = ", ".join(finalizers) or "the apiserver"
        fail(
            draft,
            Reason.RUN_DELETED,
            f"the run is being deleted, and its pods with it; {held} still holds it",
        )
    delete_cluster(draft, observed)
    _report_deleted_cluster(draft, observed, "the run is being deleted")


def _follow_exit(draft: Draft, observed: Observed, ended: datetime) -> None:
    """Record how the driver's job ends after the final report, which has ended the run."""
    job, seen = draft.status.job, observed.job
    if job is None or not isinstance(seen, Job):
        return
    draft.update_job(status=seen.status)
    if seen.live:
        draft.look_again(2.0)
        if (draft.now - ended).total_seconds() >= EXIT_SECONDS:
            draft.job = Stop(job.submission_id)
    if draft.status.phase is Phase.FAILED and seen.log_tail and not draft.status.log_tail:
        draft.set(log_tail=seen.log_tail[-MAX_TEXT:])


def _delete_cluster(draft: Draft, observed: Observed, ended: datetime) -> None:
    _report_deleted_cluster(draft, observed, "the run has finished")
    exiting = isinstance(observed.job, Job) and observed.job.live
    if exiting and (draft.now - ended).total_seconds() < EXIT_SECONDS:
        return
    delete_cluster(draft, observed)


def _report_deleted_cluster(draft: Draft, observed: Observed, why: str) -> None:
    name = draft.run.metadata.name
    cluster = observed.child("RayCluster", name)
    exists = cluster is not None and not is_deleting(cluster)
    if exists or not draft.is_true(ConditionType.CLUSTER_PROVISIONED):
        return
    for kind in (ConditionType.CLUSTER_PROVISIONED, ConditionType.ROLES_READY):
        draft.condition(kind, "False", Reason.CLUSTER_DELETED, why)
    draft.no_pods()
    draft.event(Reason.CLUSTER_DELETED, f"deleted RayCluster {name}: {why}")
