"""Suspension: the driver saves a checkpoint, the pods go, and the run waits until it is resumed.

`spec.suspend` asks for it, and so does a change of replicas that cannot take effect while the run
trains (`scaling`), until the old RayCluster is gone.

The condition Suspended is Unknown from the first look at the request on, which times the driver's
grace, and True once no pod is left. An attempt that ends for a suspension counts neither as a
restart nor as a failure (`attempts.stop`). It is over like one that waits for its next restart, so
that a run that is resumed, at any moment, goes on as after a restart. Everything is decided from
what is there: a RayCluster that appears while the run is suspended is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.errors import ClusterError, RightMissing
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import attempts, roles, scaling, startup
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.resources import WorkerImages, storage_of


@dataclass(frozen=True)
class Cause:
    """Why a run has to release its pods."""

    reason: Reason
    """While the pods are there."""
    done: Reason
    """Once they are gone."""
    text: str

    @property
    def rescales(self) -> bool:
        """True if the run goes on at once, with other pods."""
        return self.reason is Reason.RESCALING


def find_cause(
    draft: Draft, observed: Observed, scaling_error: ClusterError | None = None
) -> Cause | None:
    """Return why the run has to release its pods, or None.

    Other replicas need other pods. If they cannot take effect while the driver runs (`scaling`),
    the run is suspended until its RayCluster has been deleted.

    Args:
        draft: the draft.
        observed: the observed state.
        scaling_error: why the apiserver has not let the operator change the RayCluster.
    """
    if draft.run.spec.suspend:
        return Cause(Reason.SUSPENDING, Reason.SUSPENDED, "spec.suspend is true")
    cluster = observed.own_cluster(draft.run)
    if cluster is None:
        return None
    changes = scaling.changed_replicas(draft.run, cluster)
    before = draft.find(ConditionType.SUSPENDED)
    if not changes:
        if before and before.reason == Reason.NOT_RESCALED:
            done = "the run has the pods that spec.roles asks for"
            draft.condition(ConditionType.SUSPENDED, "False", Reason.RESUMED, done)
        return None
    if before and (before.reason, before.status) == (Reason.RESCALING, "Unknown"):
        return Cause(Reason.RESCALING, Reason.RESCALING, scaling.describe(changes))
    text, kept = scaling.describe(changes), None
    if scaling_error is not None and not isinstance(scaling_error, RightMissing):
        # What denies or refuses this RayCluster would do so with a new one, too.
        kept = str(scaling_error)
    else:
        why = str(scaling_error or "") or scaling.why_not(draft, observed, list(changes))
        if why is None:
            return None
        text, kept = f"{text} ({why})", _keeps_its_pods(draft)
    if kept:
        message = f"{text}, but the run keeps its pods: {kept}"
        if before is None or before.message != message:
            draft.event(Reason.NOT_RESCALED, message)
        draft.condition(ConditionType.SUSPENDED, "False", Reason.NOT_RESCALED, message)
        return None
    return Cause(Reason.RESCALING, Reason.RESCALING, text)


def _keeps_its_pods(draft: Draft) -> str | None:
    """Return why a run that trains is not rescaled, or None: it would lose what it has learnt."""
    job = draft.status.job
    if job is None or not attempts.has_attempt(draft):
        return None
    if storage_of(draft.run) is None:
        return "it saves no checkpoints"
    if not draft.status.step:
        return "it has made no step yet that could be saved"
    return None


def suspend(draft: Draft, observed: Observed, images: WorkerImages, cause: Cause) -> None:
    """Let the driver save a checkpoint, release the pods, and create nothing.

    What the driver reports meanwhile counts: the run may succeed, or fail for good. Nobody needs
    the pods of a run that is rescaled, so its driver may take as long as it likes.
    """
    draft.suspending = True
    if attempts.has_attempt(draft):
        roles.report(draft, observed, images)
        since = _requested_at(draft)
        saves = attempts.stop(draft, observed, since, cause.done, force=not cause.rescales)
        if draft.status.phase.finished:
            _report_end(draft)
            return
        if saves:
            _report_progress(draft, cause, "the driver saves a checkpoint, then the pods go")
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


def _requested_at(draft: Draft) -> datetime:
    """Return when the operator first saw that the run is to be suspended."""
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status != "Unknown":
        return draft.now.replace(microsecond=0)
    return parse_time(before.last_transition_time)


def _wait_without_pods(draft: Draft, observed: Observed, cause: Cause) -> None:
    if cause.rescales:
        message = f"{cause.text}: with new pods, the run {_way_on(draft)}"
    else:
        message = f"{cause.text}; set it to false, and the run {_way_on(draft)}"
        startup.reset_start_time(draft)
    startup.give_pods_back(draft, observed, cause.done, cause.text)
    draft.set(startup_timeouts=0)
    for kind in (ConditionType.TRAINING, ConditionType.STALLED):
        found = draft.find(kind)
        if found and (found.status != "False" or found.reason == Reason.PROGRESSING):
            draft.condition(kind, "False", cause.done, cause.text)
    uid = draft.run.metadata.uid
    if observed.own_cluster(draft.run) or any(pod.run_uid == uid for pod in observed.pods):
        _report_progress(draft, cause, f"the pods are being deleted; {message}")
        return
    if not draft.is_true(ConditionType.SUSPENDED):
        draft.event(cause.done, message)
    draft.phase(Phase.SUSPENDED, message)
    draft.condition(ConditionType.SUSPENDED, "True", cause.done, message)


def _report_progress(draft: Draft, cause: Cause, message: str) -> None:
    before = draft.find(ConditionType.SUSPENDED)
    if before is None or before.status == "False":
        draft.event(cause.reason, f"{cause.text}: {message}")
    draft.phase(Phase.SUSPENDING, message)
    draft.condition(ConditionType.SUSPENDED, "Unknown", cause.reason, message)
    draft.look_again(attempts.POLL_SECONDS)


def _report_end(draft: Draft) -> None:
    """Say that the run has ended before it was suspended."""
    ended = draft.find(ConditionType.FAILED)
    assert ended is not None
    if draft.find(ConditionType.SUSPENDED):
        draft.condition(ConditionType.SUSPENDED, "False", ended.reason, "the run has ended before")


def _way_on(draft: Draft) -> str:
    """Return from where the run goes on, as a predicate."""
    saved = draft.status.checkpoint
    if draft.status.job is None:
        return "starts from the beginning"
    if saved:
        return f"resumes from the checkpoint of step {saved.step}"
    if storage_of(draft.run) is None:
        return "starts again at step 0: it saves no checkpoints"
    return "starts again: it has saved no checkpoint yet"
