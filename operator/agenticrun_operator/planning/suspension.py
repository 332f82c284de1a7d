"""spec.suspend: the driver saves a checkpoint, the pods go, and the run waits until it is resumed.

The condition Suspended is Unknown from the first look at the request on, which times the driver's
grace, and True once no pod is left. An attempt that ends for a suspension counts neither as a
restart nor as a failure (`attempts.stop`). It is over like one that waits for its next restart, so
that a run that is resumed, at any moment, goes on as after a restart. Everything is decided from
what is there: a RayCluster that appears while the run is suspended is deleted.
"""

from __future__ import annotations

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempts, roles, startup
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.provisioning import has_cluster
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.resources import WorkerImages, storage_of

POLL_SECONDS = 2.0
"""Seconds between looks at pods that are being deleted."""


def suspend(draft: Draft, observed: Observed, images: WorkerImages) -> None:
    """Let the driver save a checkpoint, give the pods back, and create nothing.

    What the driver reports meanwhile counts: the run may succeed, or fail for good.
    """
    if attempts.has_attempt(draft):
        roles.report(draft, observed, images)
        stopping = attempts.stop(draft, observed, _seconds_since_request(draft))
        if draft.status.phase.finished:
            _end(draft)
            return
        if stopping:
            _report(draft, Phase.SUSPENDING, "the driver saves a checkpoint, then the pods go")
            return
    _wait_without_pods(draft, observed)


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
        if draft.status.start_time:
            draft.set(start_time=now)
        message = _way_on(draft)
    draft.condition(ConditionType.SUSPENDED, "False", Reason.RESUMED, message)
    draft.event(Reason.RESUMED, message)


def _seconds_since_request(draft: Draft) -> float:
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status != "Unknown":
        return 0.0
    return (draft.now - parse_time(before.last_transition_time)).total_seconds()


def _wait_without_pods(draft: Draft, observed: Observed) -> None:
    message = f"spec.suspend is true. With false, {_way_on(draft)}"
    startup.give_pods_back(draft, observed, Reason.SUSPENDED, "the run is suspended")
    startup.reset_start_time(draft)
    draft.set(startup_timeouts=0)
    for kind in (ConditionType.TRAINING, ConditionType.STALLED):
        found = draft.find(kind)
        if found and found.status != "False":
            draft.condition(kind, "False", Reason.SUSPENDED, "the run is suspended")
    uid = draft.run.metadata.uid
    if has_cluster(draft, observed) or any(pod.run_uid == uid for pod in observed.pods):
        _report(draft, Phase.SUSPENDING, f"the pods are being deleted; {message}")
        return
    if not draft.is_true(ConditionType.SUSPENDED):
        draft.event(Reason.SUSPENDED, message)
    draft.phase(Phase.SUSPENDED, message)
    draft.condition(ConditionType.SUSPENDED, "True", Reason.SUSPENDED, message)


def _report(draft: Draft, phase: Phase, message: str) -> None:
    draft.phase(phase, message)
    draft.condition(ConditionType.SUSPENDED, "Unknown", Reason.SUSPENDING, message)
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
