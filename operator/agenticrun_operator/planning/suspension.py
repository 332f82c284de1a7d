"""Suspension: the driver saves a checkpoint, the pods go, and the run waits until it is resumed.

`spec.suspend` asks for it, and so does a change of replicas, until the old RayCluster is gone.

The condition Suspended is Unknown from the first look at the request on, which times the driver's
grace, and True once no pod is left. An attempt that ends for a suspension counts neither as a
restart nor as a failure (`attempts.stop`). It is over like one that waits for its next restart, so
that a run that is resumed, at any moment, goes on as after a restart. Everything is decided from
what is there: a RayCluster that appears while the run is suspended is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempts, roles, startup
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.provisioning import has_cluster
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.resources import WorkerImages, replicas_in, storage_of

POLL_SECONDS = 2.0
"""Seconds between looks at pods that are being deleted."""


@dataclass(frozen=True)
class Cause:
    """Why a run has to give its pods back."""

    reason: Reason
    """While the pods are there."""
    gone: Reason
    """Afterwards."""
    text: str


def find_cause(draft: Draft, observed: Observed) -> Cause | None:
    """Return why the run has to give its pods back, or None.

    Other numbers of replicas need other pods. A RayCluster is never changed, so the run is
    suspended until it has been deleted.
    """
    if draft.run.spec.suspend:
        return Cause(Reason.SUSPENDING, Reason.SUSPENDED, "spec.suspend is true")
    cluster = observed.child("RayCluster", draft.run.metadata.name)
    if cluster is None or not has_cluster(draft, observed):
        return None
    wanted, found = draft.run.spec.roles.elastic, replicas_in(cluster)
    changes = [
        f"roles.{role}.replicas is {number} and was {found[role]}"
        for role, number in wanted.items()
        if found.get(role, number) != number
    ]
    text = " and ".join(changes)
    return Cause(Reason.RESCALING, Reason.RESCALING, text) if changes else None


def suspend(draft: Draft, observed: Observed, images: WorkerImages, cause: Cause) -> None:
    """Let the driver save a checkpoint, give the pods back, and create nothing.

    What the driver reports meanwhile counts: the run may succeed, or fail for good.
    """
    draft.suspending = True
    if attempts.has_attempt(draft):
        roles.report(draft, observed, images)
        stopping = attempts.stop(draft, observed, _seconds_since_request(draft))
        if draft.status.phase.finished:
            _end(draft)
            return
        if stopping:
            _report(draft, cause, "the driver saves a checkpoint, then the pods go")
            return
    _wait_without_pods(draft, observed, cause)


def resume(draft: Draft) -> None:
    """Let a run go on that is no longer suspended, or was about to be."""
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status == "False":
        return
    job = draft.status.job
    if attempts.has_attempt(draft):
        draft.phase(Phase.RUNNING if job and job.status == "RUNNING" else Phase.STARTING)
        message = "the attempt goes on; if its driver has begun to stop, it is restarted"
    else:
        now = format_time(draft.now)
        draft.phase(Phase.STARTING if job else Phase.PENDING)
        draft.set(next_retry_time=now if job else None)
        if draft.status.start_time and before.reason != Reason.RESCALING:
            draft.set(start_time=now)
        message = _way_on(draft)
    draft.condition(ConditionType.SUSPENDED, "False", Reason.RESUMED, message)
    draft.event(Reason.RESUMED, message)


def _seconds_since_request(draft: Draft) -> float:
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status != "Unknown":
        return 0.0
    return (draft.now - parse_time(before.last_transition_time)).total_seconds()


def _wait_without_pods(draft: Draft, observed: Observed, cause: Cause) -> None:
    rescaling = cause.reason is Reason.RESCALING
    way_on = f"; then {_way_on(draft)}" if rescaling else f". With false, {_way_on(draft)}"
    message = f"{cause.text}{way_on}"
    startup.give_pods_back(draft, observed, cause.gone, cause.text)
    if not rescaling:
        startup.reset_start_time(draft)
    draft.set(startup_timeouts=0)
    for kind in (ConditionType.TRAINING, ConditionType.STALLED):
        found = draft.find(kind)
        if found and found.status != "False":
            draft.condition(kind, "False", cause.gone, cause.text)
    uid = draft.run.metadata.uid
    if has_cluster(draft, observed) or any(pod.run_uid == uid for pod in observed.pods):
        _report(draft, cause, f"the pods are being deleted: {message}")
        return
    if not draft.is_true(ConditionType.SUSPENDED):
        draft.event(cause.gone, message)
    draft.phase(Phase.SUSPENDED, message)
    draft.condition(ConditionType.SUSPENDED, "True", cause.gone, message)


def _report(draft: Draft, cause: Cause, message: str) -> None:
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status == "False":
        draft.event(cause.reason, f"{cause.text}: {message}")
    draft.phase(Phase.SUSPENDING, message)
    draft.condition(ConditionType.SUSPENDED, "Unknown", cause.reason, message)
    draft.look_again(POLL_SECONDS)


def _end(draft: Draft) -> None:
    """Say that the run has ended before it was suspended."""
    ended = draft.find(ConditionType.FAILED)
    assert ended is not None
    if draft.find(ConditionType.SUSPENDED):
        draft.condition(ConditionType.SUSPENDED, "False", ended.reason, "the run has ended before")


def _way_on(draft: Draft) -> str:
    """Return from where the run goes on, as a clause."""
    saved = draft.status.checkpoint
    if draft.status.job is None:
        return "it starts: it has not trained yet"
    if saved:
        return f"it resumes from the checkpoint of step {saved.step}"
    if storage_of(draft.run) is None:
        return "it starts again at step 0: it saves no checkpoints"
    return "it starts again: there is no checkpoint of it yet"
