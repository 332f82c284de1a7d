"""The situation of a run, computed once from its stored status and what was observed.

`State` holds the inputs of one plan. `record` first copies what was seen of the attempt into the
status, so that all decisions are functions of one status. Then `find_situation` says which of a few
situations the run is in, and `plan` decides by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from agenticrun_api import (
    AgenticRun,
    AgenticRunStatus,
    Phase,
    Progress,
    Reason,
    Role,
)
from agenticrun_api.roles import SAVES
from agenticrun_api.status import JobStatus, PodsStatus, StopCause, StopStatus
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import (
    Edit,
    Incarnation,
    Job,
    Observed,
    Pod,
    Unreachable,
)
from agenticrun_operator.planning import times
from agenticrun_operator.planning.pods import RolesReport, report_roles
from agenticrun_operator.planning.result import RequestStop
from agenticrun_operator.planning.snapshot import own_progress, snapshot_fields
from agenticrun_operator.resources import (
    Child,
    Manifest,
    OperatorKey,
    WorkerImages,
    workloads,
)

REPEAT_SECONDS = 30.0
"""Time after which a request without effect is repeated."""
SILENT_SECONDS = 7.0
"""Time without a snapshot after which the driver is said to be silent. It posts every second. With
a poll every 3 s at most, the status shows it within 10 s."""


@dataclass(frozen=True)
class State:
    """Everything that one plan is made from."""

    run: AgenticRun
    """The run. Its status also has what was seen of its attempt (`record`)."""
    applied: AgenticRun
    """The run as it was read: with all pods that its user wants, and the status of the last write.
    """
    observed: Observed
    now: datetime
    images: WorkerImages
    key: OperatorKey
    creation_error: errors.ClusterError | None = None
    scaling_error: errors.ClusterError | None = None

    @property
    def name(self) -> str:
        """Name of the run and of its RayCluster."""
        return self.run.metadata.name

    @property
    def status(self) -> AgenticRunStatus:
        """The status, with what was seen of the attempt."""
        return self.run.status

    @property
    def job(self) -> JobStatus:
        """The newest attempt. Only for a run that has one."""
        assert self.status.job is not None
        return self.status.job

    @property
    def has_attempt(self) -> bool:
        """True if there is an attempt that is not over."""
        status = self.status
        return (
            status.job is not None and status.next_retry_time is None and not status.phase.finished
        )

    @cached_property
    def progress(self) -> Progress | None:
        """The newest attempt's own snapshot."""
        return own_progress(self.run, self.observed.progress)

    @cached_property
    def cluster(self) -> Manifest | None:
        """The run's own RayCluster."""
        return self.observed.own_cluster(self.run)

    @cached_property
    def workload(self) -> Manifest | None:
        """The run's own Workload, if it waits in a queue."""
        return self.observed.workload(self.run)

    @property
    def holds_pods(self) -> bool:
        """True if the run has a RayCluster, or pods of an earlier one, as far as is known."""
        uid, observed = self.run.metadata.uid, self.observed
        pods = any(pod.run_uid == uid for pod in observed.pods)
        return self.cluster is not None or observed.kuberay_missing or pods

    @property
    def wanted_pods(self) -> dict[str, int]:
        """The number of pods of each role in the spec."""
        roles = self.applied.spec.roles
        workers = {role.value: roles.replicas(role) for role in roles.workers}
        return {Role.DRIVER.value: 1} | workers

    @property
    def retry_at(self) -> datetime | None:
        """When a run that has given its pods back tries to get some again; None: it has not."""
        retry = self.status.next_retry_time
        given_back = self.status.phase is Phase.PENDING and retry is not None
        later = times.parse_time(retry) if given_back and retry else None
        return later if later and later > self.now else None

    @cached_property
    def head(self) -> Pod | None:
        """The run's own head pod."""
        return self.observed.head(self.run.metadata.uid)

    @cached_property
    def pods(self) -> list[Pod]:
        """The pods of the run's own RayCluster."""
        return self.observed.own_pods(self.run.metadata.uid)

    @cached_property
    def savers(self) -> list[Pod]:
        """The pods that save checkpoints. An attempt that loses one of them ends."""
        return [pod for pod in self.pods if pod.role in SAVES]

    @property
    def newest_pod_time(self) -> str | None:
        """When the apiserver stored the newest pod that saves checkpoints.

        Compared with other such times only: the clocks of nodes differ.
        """
        moments = [times.parse_time(pod.created_at) for pod in self.savers if pod.created_at]
        return times.format_time(max(moments)) if moments else None

    @cached_property
    def roles(self) -> RolesReport:
        """The pods of each role, and what is wrong with them."""
        return report_roles(self.run, self.observed, self.images, self.now)

    @cached_property
    def edits(self) -> list[Edit]:
        """The changes of others in the run's RayCluster and pods."""
        return self.observed.edits(self.run)

    @cached_property
    def pods_since(self) -> PodsStatus:
        """Return if all pods are ready, and since when."""
        known, ready = self.status.pods, self.roles.ready
        if known and known.ready is ready:
            return known
        return PodsStatus(ready=ready, since=times.format_time(self.now))

    @cached_property
    def waiting_since(self) -> datetime | None:
        """Return when the run began to wait for its pods; None if all are ready or it has none."""
        if self.cluster is None or self.roles.ready:
            return None
        moments = [
            self.cluster["metadata"].get("creationTimestamp"),
            self.pods_since.since,
            self.status.next_retry_time,
        ]
        return max(times.parse_time(time) for time in moments if time)

    @property
    def has_enough_pods(self) -> bool:
        """True if an attempt can begin. The first one also waits some time for all pods.

        Not longer than until the startup deadline: then it begins with what it has.
        """
        policy = self.run.spec.failure_policy
        waits = min(policy.wait_seconds, policy.startup_deadline_seconds)
        waits = waits if self.status.job is None else 0
        return self.roles.ready or (
            self.roles.enough and self.seconds_since(self.waiting_since) >= waits
        )

    @cached_property
    def unreachable(self) -> Unreachable | None:
        """The missing answer of a head that is ready; None if it answers, or is not ready.

        Nothing is wrong with its pod, as far as its node can tell: a NetworkPolicy may keep the
        operator out, or Ray's dashboard may be dead.
        """
        head, seen = self.head, self.observed.job
        if head is None or not head.ready or head.deleting:
            return None
        return seen if isinstance(seen, Unreachable) and not seen.tokens else None

    @property
    def unreachable_since(self) -> datetime | None:
        """When the operator first saw that the head is ready and does not answer."""
        if self.unreachable is None:
            return None
        known = self.applied.status.obstacle
        if known and known.reason == Reason.PROGRESS_UNAVAILABLE:
            return times.parse_time(known.since)
        return self.now

    @cached_property
    def claim_lost(self) -> bool:
        """True if the volume claim of the checkpoints was deleted, or is being deleted."""
        child = Child(resources.CLAIM_KIND, resources.claim_name(self.run))
        claim = self.observed.children.get(child)
        gone = child in self.observed.children and claim is None
        return gone or (claim is not None and resources.is_deleting(claim))

    def with_fields(self, fields: dict[str, Any]) -> State:
        """Return the state with other fields of the status."""
        status = self.status.model_copy(update=fields)
        return replace(self, run=self.run.model_copy(update={"status": status}))

    def seconds_since(self, time: str | datetime | None) -> float:
        """Return the age of a time in seconds; 0 if there is none."""
        moment = times.parse_time(time) if isinstance(time, str) else time
        return (self.now - moment).total_seconds() if moment else 0.0

    def wait_to_repeat(self, asked: datetime | None) -> float:
        """Return the seconds until a request may be sent again; 0 or less: now.

        Args:
            asked: the time at which it was sent last; None: never.
        """
        return REPEAT_SECONDS - self.seconds_since(asked) if asked else 0.0


# -- situations ------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Deleted:
    """The run is being deleted, and a finalizer holds it."""


@dataclass(frozen=True)
class Ended:
    """The run has succeeded or failed."""


@dataclass(frozen=True)
class Waiting:
    """The run has given its pods back and waits until it tries again."""

    until: datetime


@dataclass(frozen=True)
class Starting:
    """The run has no attempt yet."""


@dataclass(frozen=True)
class Running:
    """An attempt was submitted, or is about to be."""


@dataclass(frozen=True)
class Restarting:
    """The newest attempt is over, and another one follows."""


@dataclass(frozen=True)
class Stopping:
    """The attempt has to end, and no restart follows."""

    cause: Cause


@dataclass(frozen=True)
class WithoutPods:
    """The run has no attempt, and must have no pods."""

    cause: Cause


Situation = Deleted | Ended | Waiting | Starting | Running | Restarting | Stopping | WithoutPods


def find_situation(state: State, rescaling: Rescaling) -> Situation:
    """Return the situation of the run."""
    if state.run.metadata.deletion_timestamp:
        return Deleted()
    if state.status.phase.finished:
        return Ended()
    if cause := find_cause(state, rescaling):
        return Stopping(cause) if state.has_attempt else WithoutPods(cause)
    if retry := state.retry_at:
        return Waiting(retry)
    if state.has_attempt:
        return Running()
    return Starting() if state.status.job is None else Restarting()


def find_cause(state: State, rescaling: Rescaling) -> Cause | None:
    """Return why the run has to release its pods, or None.

    While the volume claim of its checkpoints is being deleted, its pods are the last way to them:
    neither spec.suspend nor other replicas end them then (`kept_pods`). An eviction does: a user
    who deletes a claim must not keep quota that others have a right to.
    """
    kinds, run = StopCause, state.run
    cluster = state.cluster
    if run.spec.suspend and not kept_pods(state):
        return _cause(state, kinds.SUSPEND, "spec.suspend is true")
    if (text := _why_not_admitted(state)) is not None:
        return _cause(state, kinds.QUEUE, text)
    if cluster and state.observed.cluster_suspended:
        return _cause(
            state,
            kinds.CLUSTER_SUSPENDED,
            f"another controller has suspended RayCluster {state.name} (a queue, for example)",
        )
    limit, start = run.spec.active_deadline_seconds, state.status.start_time
    if limit is not None and start is not None:
        end = times.parse_time(start) + timedelta(seconds=limit)
        if end <= state.now:
            return _cause(state, kinds.DEADLINE, "activeDeadlineSeconds is over", end)
    if rescaling.restart and not kept_pods(state):
        return _cause(state, kinds.RESCALE, rescaling.text)
    return None


def _why_not_admitted(state: State) -> str | None:
    """Return why the run may have no pods now, if it waits in a queue; None: it may.

    While nothing is known of the queue, pods that exist stay, and no others are made. A run that
    has given its pods back has left the queue until it tries again.
    """
    queue, found = state.run.spec.queue, state.workload
    if queue is None or state.retry_at:
        return None
    if state.observed.queue.error and (state.cluster or state.has_attempt):
        return None
    if found is None or workloads.is_finished(found) or resources.is_deleting(found):
        return f"the run has no place in queue {queue.name}"
    if not workloads.is_active(found):
        return f"Workload {workloads.name_of(state.run)} is deactivated"
    if workloads.is_evicted(found) and (state.has_attempt or workloads.holds_quota(found)):
        evicted = workloads.condition_of(found, "Evicted")
        return f"Kueue has evicted the run ({evicted.get('reason')}): {evicted.get('message')}"
    if not workloads.is_admitted(found):
        return f"Kueue has not admitted the run in queue {queue.name}"
    if state.cluster or is_covered(state, found):
        return None
    return f"the run asks queue {queue.name} for more pods"


def is_covered(state: State, workload: Manifest) -> bool:
    """Return True if a Workload asks for all pods that the spec has now."""
    asked = workloads.pod_counts(workload)
    return all(asked.get(role, 0) >= number for role, number in state.wanted_pods.items())


_REASONS = {
    StopCause.SUSPEND: (Reason.SUSPENDING, Reason.SUSPENDED),
    StopCause.CLUSTER_SUSPENDED: (Reason.CLUSTER_SUSPENDED, Reason.CLUSTER_SUSPENDED),
    StopCause.RESCALE: (Reason.RESCALING, Reason.RESCALING),
    StopCause.QUEUE: (Reason.EVICTED, Reason.QUEUED),
    StopCause.DEADLINE: (Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
}


def _cause(state: State, kind: StopCause, text: str, since: datetime | None = None) -> Cause:
    known = state.status.stopping
    if since is None:
        known_since = times.parse_time(known.since) if known and known.cause is kind else None
        since = known_since or state.now.replace(microsecond=0)
    reason, done = _REASONS[kind]
    if kind is StopCause.QUEUE and state.has_attempt:
        done = reason
    return Cause(kind, reason, done, text, since)


def stop_status(cause: Cause) -> StopStatus:
    """Return what the status remembers of a stop."""
    return StopStatus(cause=cause.kind, since=times.format_time(cause.since))


def kept_pods(state: State) -> bool:
    """Return True if the run's pods are the last way to its checkpoints."""
    if not state.claim_lost or state.has_attempt:
        return state.claim_lost
    gone = state.observed.child(resources.CLAIM_KIND, resources.claim_name(state.run)) is None
    goes = state.cluster is None or resources.is_deleting(state.cluster)
    return bool(state.status.checkpoint and state.pods) and not gone and not goes


# -- other replicas --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rescaling:
    """The consequence of different replicas in the spec and in the RayCluster."""

    changes: dict[Role, tuple[int, int]]
    """Replicas that the RayCluster was made for and those in the spec, by role."""
    restart: bool = False
    """True if the driver has to stop and continue with other pods."""
    text: str = ""
    kept: str = ""
    """Why the run keeps its pods although it would have to restart; empty: it need not."""


def find_rescaling(state: State) -> Rescaling:
    """Compare the replicas in the spec with the numbers that the RayCluster was made for.

    Other replicas take effect while the driver runs (`children.scale`) if it can follow them.
    Otherwise the run is stopped until its RayCluster has been deleted, unless it would lose what it
    has learnt.
    """
    run = state.run
    made = resources.replicas_in(state.run, state.cluster) if state.cluster else {}
    # Quota that is given back may count only after the user wants the pods again.
    admitted = workloads.admitted_pods(state.workload) if state.workload else {}
    changes = {
        Role(name): (made[name], wanted)
        for name, wanted in run.spec.roles.elastic.items()
        if name in made and (made[name] != wanted or admitted.get(name, wanted) < wanted)
    }
    if not changes:
        return Rescaling({})
    begun, text, quota = state.status.stopping, describe(changes), beyond_quota(state, changes)
    if begun and begun.cause is StopCause.RESCALE:
        return Rescaling(changes, restart=True, text=f"{text} ({quota})" if quota else text)
    error = state.scaling_error
    if error is not None and not isinstance(error, errors.RightMissing):
        # What denies or refuses this RayCluster would do so with a new one, too.
        return Rescaling(changes, text=text, kept=str(error))
    why: str | None = str(error or "") or quota
    why = why or _why_driver_cannot_follow(state, changes)
    if why is None:
        return Rescaling(changes, text=text)
    text = f"{text} ({why})"
    # A restart would cost a run that trains what it has learnt.
    if state.has_attempt and resources.storage_of(run) is None:
        return Rescaling(changes, text=text, kept="it saves no checkpoints")
    if state.has_attempt and not state.status.step:
        kept = "it has made no step yet that could be saved"
        return Rescaling(changes, text=text, kept=kept)
    return Rescaling(changes, restart=True, text=text)


def beyond_quota(state: State, changes: dict[Role, tuple[int, int]]) -> str:
    """Return which new replicas a queue has to admit first; empty: none."""
    queue, found = state.run.spec.queue, state.workload
    if queue is None or found is None:
        return ""
    admitted = workloads.admitted_pods(found)
    for role, (_, wanted) in changes.items():
        if wanted > admitted.get(role.value, 0):
            return f"queue {queue.name} has admitted {admitted.get(role.value, 0)}"
    return ""


def as_admitted(run: AgenticRun, observed: Observed) -> AgenticRun:
    """Return the run with no more pods than its queue has admitted.

    A run that asks for more pods than its Workload does is returned as it is: it goes through the
    queue again. While nothing is known of the queue, no pods are added.
    """
    if run.spec.queue is None:
        return run
    found, cluster = observed.workload(run), observed.own_cluster(run)
    asked = workloads.pod_counts(found) if found else {}
    admitted = workloads.admitted_pods(found) if found else {}
    if not admitted and cluster:
        asked, admitted = {}, resources.replicas_in(run, cluster)
    fewer = {
        role: admitted[role]
        for role, wanted in run.spec.roles.elastic.items()
        if admitted.get(role, wanted) < wanted <= asked.get(role, wanted)
    }
    return run.with_replicas(fewer) if fewer else run


def describe(changes: dict[Role, tuple[int, int]]) -> str:
    """Return changes of replicas as a clause."""
    return " and ".join(
        f"roles.{role.value}.replicas changed from {made} to {wanted}"
        if made != wanted
        else f"roles.{role.value} has {made} pods"
        for role, (made, wanted) in changes.items()
    )


def _why_driver_cannot_follow(state: State, roles: Iterable[Role]) -> str | None:
    """Return why replicas of these roles cannot change while the driver runs; None if they can.

    Also None while the driver is starting or has not reported yet.
    """
    if not state.has_attempt:
        return "no driver runs"
    progress = state.progress
    if progress is None or progress.activity == "starting" or progress.final:
        return None
    if progress.pools is None:
        return "its driver cannot change them while it runs"
    found = [progress.pools.get(role) for role in roles]
    return next((pool.fixed for pool in found if pool and pool.fixed), None)


# -- recording -------------------------------------------------------------------------------------


def record(state: State) -> State:
    """Return the state with a status that has what was seen of the attempt.

    The status keeps a copy of the final report: the reporter may be lost between the report and the
    exit of the driver. It also keeps which pods the platform took, because the watch drops deleted
    pods.
    """
    state = _repaired(state)
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
    if job.end_time is None and (report or _has_ended(state)):
        changes["end_time"] = state.observed.end_time or times.format_time(state.now)
    if progress and not is_silent(progress):
        changes["unknown_since"] = None
    else:
        changes["unknown_since"] = job.unknown_since or times.format_time(state.now)
    disruption, known = _disruption_now(state), job.disruption
    if known and not disruption and _has_recovered(state):
        known = ""
    # KubeRay replaces a pod that ends by its own fault at once, and then it looks deleted.
    ended = next((pod for pod in state.savers if pod.own_end), None)
    failed = job.failed_pod
    if ended and not known and not failed:
        failed = f"{ended.role.value} pod {ended.name} was ended by its node: {ended.own_end}"
    changes["failed_pod"] = failed[:256]
    changes["disruption"] = "" if failed else (known or disruption)[:256]
    last, sent_at = state.observed.last_action or (None, None)
    stopping, asked = state.status.stopping, job.stop_requested_time
    if stopping and sent_at is not None and last == RequestStop(job.submission_id):
        # The first request counts: it is repeated in case the reporter has lost it.
        since = times.parse_time(stopping.since)
        if sent_at >= since and (asked is None or times.parse_time(asked) < since):
            changes["stop_requested_time"] = times.format_time(sent_at)
    return state.with_fields(fields | {"job": job.model_copy(update=changes)})


def is_damaged(status: AgenticRunStatus) -> bool:
    """Return True if the phase says that the run has ended, but the operator has not ended it."""
    return status.phase.finished and status.completion_time is None


def _repaired(state: State) -> State:
    """Return the state with another phase if another client wrote that the run has ended."""
    status = state.status
    if not is_damaged(status):
        return state
    if status.job is None:
        phase = Phase.PENDING
    else:
        phase = Phase.RESTARTING if status.next_retry_time else Phase.STARTING
    return state.with_fields({"phase": phase, "message": None})


def is_silent(progress: Progress) -> bool:
    """Return True if the driver has sent no snapshot for some seconds."""
    return (progress.silent_seconds or 0.0) > SILENT_SECONDS


def _has_ended(state: State) -> bool:
    """Return True if the attempt's job has ended, or its head has restarted."""
    seen = state.observed.job
    return (isinstance(seen, Job) and not seen.live) or head_replaced(state)


def head_replaced(state: State) -> bool:
    """Return True if the head that the attempt was submitted to was replaced or restarted.

    Ray keeps its jobs in the head's memory, so the attempt is lost with it.
    """
    head = state.head
    if head is None:
        return not _head_is_hidden(state)
    if not is_pod_of(head, state.job):
        return True
    return head.incarnation is not None and str(head.incarnation) != state.job.incarnation


def _head_is_hidden(state: State) -> bool:
    """Return True if the attempt's head runs, but another pod looks the same.

    While the RayCluster names no head, a second pod that claims to be it hides the real one.
    """
    return any(
        is_pod_of(pod, state.job) and not pod.deleting and not pod.ended for pod in state.savers
    )


def is_pod_of(head: Pod, job: JobStatus) -> bool:
    """Return True if the attempt was submitted to this pod, whichever start of it."""
    incarnation = Incarnation.parse(job.incarnation)
    return incarnation is not None and incarnation.pod_uid == head.uid


def _disruption_now(state: State) -> str:
    """Return which pod the platform has taken from the attempt, and how; empty if none.

    A pod is never replaced under the same uid: a head or trainer pod that is new, or is being
    deleted, was deleted by another client: the operator deletes only whole RayClusters.
    """
    if state.observed.kuberay_missing:
        return "" if state.head else "KubeRay was removed, and the pods with it"
    if state.cluster is None:
        return f"RayCluster {state.name} was deleted"
    if state.cluster["metadata"]["uid"] in state.observed.deletions:
        return ""
    if state.observed.cluster_suspended:
        return f"RayCluster {state.name} was suspended"
    if resources.is_deleting(state.cluster):
        return f"RayCluster {state.name} was deleted"
    taken = (_taken(state, pod) for pod in state.savers)
    return next(filter(None, taken), "") or _rebooted(state) or _replaced(state)


def _has_recovered(state: State) -> bool:
    """Return True if the attempt, whose pods nothing disrupts now, trains with all of them.

    Kubernetes may take a disruption back: a preemption that does not happen, for example.
    """
    seen, progress = state.observed.job, state.progress
    if not isinstance(seen, Job) or not seen.live or seen.start_time is None:
        return False
    if progress is None or progress.final or is_silent(progress):
        return False
    ready = Counter(pod.role for pod in state.savers if pod.ready and not pod.deleting)
    roles = state.run.spec.roles
    return all(ready[role] >= roles.replicas(role) for role in SAVES if roles.has(role))


def _taken(state: State, pod: Pod) -> str:
    """Return what the platform does to a pod without which the attempt ends; empty: nothing."""
    if not _is_leaving(pod) or pod.uid in state.observed.deletions:
        return ""
    what = f"{pod.role.value} pod {pod.name}"
    # A pod of an earlier attempt may be slow to end, but then another one has replaced it.
    staying = sum(other.role is pod.role and not _is_leaving(other) for other in state.savers)
    if staying >= state.run.spec.roles.replicas(pod.role):
        return ""
    if pod.disruption:
        return f"{what} was disrupted ({pod.disruption})"
    if pod.deleting:
        return f"{what} was deleted"
    return f"{what} was on node {pod.node}, which no longer answered"


def _is_leaving(pod: Pod) -> bool:
    """Return True if the platform takes the pod, or its node no longer answers."""
    node_lost = pod.problem is not None and pod.problem.reason is Reason.NODE_LOST
    return pod.deleting or bool(pod.disruption) or node_lost


def _rebooted(state: State) -> str:
    """Return a sentence if the node of the attempt's head has rebooted; else ""."""
    head = state.head
    if head is None or not head.rebooted or not is_pod_of(head, state.job):
        return ""
    restarted = head.incarnation is not None and str(head.incarnation) != state.job.incarnation
    return f"node {head.node} of head pod {head.name} restarted" if restarted else ""


def _replaced(state: State) -> str:
    """Return which pod is newer than the attempt that needs it; empty if none."""
    if state.head is None:
        return "" if _head_is_hidden(state) else "the head pod was deleted"
    if not is_pod_of(state.head, state.job):
        return f"the head pod was replaced by {state.head.name}"
    newest = state.job.newest_pod_time
    for pod in state.savers:
        if newest is None or pod.role is Role.DRIVER or not pod.created_at:
            continue
        if times.parse_time(pod.created_at) > times.parse_time(newest):
            return f"a {pod.role.value} pod was replaced by {pod.name}"
    return ""
