"""The situation of a run, computed once from its stored status and what was observed.

`record` first copies what was seen of the attempt into the status, so that all decisions are
functions of one status. Then `find_situation` says which of a few situations the run is in, and
`plan` decides by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from agenticrun_api import Phase, Reason
from agenticrun_api.status import StopCause, StopStatus
from agenticrun_operator.observed import Job
from agenticrun_operator.planning import queueing, times
from agenticrun_operator.planning.disruption import disruption_fields, head_replaced
from agenticrun_operator.planning.result import RequestStop
from agenticrun_operator.planning.snapshot import snapshot_fields
from agenticrun_operator.planning.state import State

_REASONS = {
    StopCause.SUSPEND: (Reason.SUSPENDING, Reason.SUSPENDED),
    StopCause.CLUSTER_SUSPENDED: (Reason.CLUSTER_SUSPENDED, Reason.CLUSTER_SUSPENDED),
    StopCause.RESCALE: (Reason.RESCALING, Reason.RESCALING),
    StopCause.QUEUE: (Reason.EVICTED, Reason.QUEUED),
    StopCause.DEADLINE: (Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
}
"""The reason of a stop while the pods are there, and once they are gone."""


class Situation(Enum):
    """The state of a run that need not release its pods."""

    DELETED = "it is being deleted, and a finalizer holds it"
    ENDED = "it has succeeded or failed"
    WAITING = "it has given its pods back and waits until it tries again"
    STARTING = "it has no attempt: the first one, or the next one, follows"
    RUNNING = "an attempt was submitted, or is about to be"


@dataclass(frozen=True)
class Cause:
    """Why a run has to release its pods."""

    kind: StopCause
    reason: Reason
    """While the pods are there."""
    done: Reason
    """Once they are gone."""
    text: str
    since: datetime
    """When the operator first saw it."""

    @classmethod
    def of(cls, state: State, kind: StopCause, text: str) -> Cause:
        """Return the cause, which began when the status says so, or now."""
        known, since = state.status.stopping, state.now.replace(microsecond=0)
        if kind is StopCause.DEADLINE:
            since = state.deadline or since
        elif known and known.cause is kind:
            since = times.parse_time(known.since)
        reason, done = _REASONS[kind]
        if kind is StopCause.QUEUE and state.has_attempt:
            done = reason
        return cls(kind, reason, done, text, since)

    @property
    def status(self) -> StopStatus:
        """The stop as the status remembers it."""
        return StopStatus(cause=self.kind, since=times.format_time(self.since))


def find_situation(state: State, restart: str) -> Situation | Cause:
    """Return the situation of the run: the cause, if it has to release its pods.

    While the volume claim of its checkpoints is being deleted, its pods are the last way to them:
    neither spec.suspend nor other replicas end them then (`State.keeps_pods`). An eviction does: a
    user who deletes a claim must not keep quota that others have a right to.

    Args:
        state: the state.
        restart: why the driver has to continue with other pods; empty: it need not.
    """
    if state.run.metadata.deletion_timestamp:
        return Situation.DELETED
    if state.status.phase.finished:
        return Situation.ENDED
    found: tuple[StopCause, str] | None = None
    if state.run.spec.suspend and not state.keeps_pods:
        found = StopCause.SUSPEND, "spec.suspend is true"
    elif (text := queueing.why_not_admitted(state)) is not None:
        found = StopCause.QUEUE, text
    elif state.cluster and state.observed.cluster_suspended:
        text = f"another controller has suspended RayCluster {state.name} (a queue, for example)"
        found = StopCause.CLUSTER_SUSPENDED, text
    elif state.deadline and state.deadline <= state.now:
        found = StopCause.DEADLINE, "activeDeadlineSeconds is over"
    elif restart and not state.keeps_pods:
        found = StopCause.RESCALE, restart
    if found:
        return Cause.of(state, *found)
    if state.retry_at:
        return Situation.WAITING
    return Situation.RUNNING if state.has_attempt else Situation.STARTING


# -- recording -------------------------------------------------------------------------------------


def record(state: State) -> State:
    """Return the state with a status that has what was seen of the attempt.

    The status keeps a copy of the final report: the reporter may be lost between the report and the
    exit of the driver. A phase that another client has ended is put back.
    """
    if state.is_damaged:
        # Another client wrote that the run has ended.
        phase = Phase.PENDING
        if state.status.job:
            phase = Phase.RESTARTING if state.status.next_retry_time else Phase.STARTING
        state = state.with_fields({"phase": phase, "message": None})
    if state.status.job is None or state.run.metadata.deletion_timestamp:
        return state
    fields: dict[str, Any] = {}
    job, seen, progress = state.job, state.observed.job, state.progress
    changes: dict[str, Any] = {}
    if isinstance(seen, Job):
        changes["status"] = seen.status
    if state.status.phase.finished:
        return state.with_fields({"job": job.model_copy(update=changes)})
    if progress:
        fields |= snapshot_fields(progress)
        changes["version"] = progress.version or job.version
    report = (progress.final if progress else None) or job.report
    changes["report"] = report
    if not state.has_attempt:
        return state.with_fields(fields | {"job": job.model_copy(update=changes)})
    if not (job.status or isinstance(seen, Job)):  # what is replaced before it began is no loss
        changes["newest_pod_time"] = state.newest_pod_time or job.newest_pod_time
    job_ended = isinstance(seen, Job) and not seen.live
    if job.end_time is None and (report or job_ended or head_replaced(state)):
        changes["end_time"] = state.observed.end_time or times.format_time(state.now)
    if progress and not state.is_silent:
        changes["unknown_since"] = None
    else:
        changes["unknown_since"] = job.unknown_since or times.format_time(state.now)
    changes |= disruption_fields(state)
    last, sent_at = state.observed.last_action or (None, None)
    stopping, asked = state.status.stopping, job.stop_requested_time
    if stopping and sent_at is not None and last == RequestStop(job.submission_id):
        # The first request counts: it is repeated in case the reporter has lost it.
        since = times.parse_time(stopping.since)
        if sent_at >= since and (asked is None or times.parse_time(asked) < since):
            changes["stop_requested_time"] = times.format_time(sent_at)
    return state.with_fields(fields | {"job": job.model_copy(update=changes)})
