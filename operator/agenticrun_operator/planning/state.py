"""The inputs of one plan, and what follows from them at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from agenticrun_api import AgenticRun, AgenticRunStatus, Phase, Progress, Reason, Role
from agenticrun_api.roles import SAVES
from agenticrun_api.status import JobStatus, PodsStatus
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import Edit, Observed, Pod, Unreachable
from agenticrun_operator.planning import times
from agenticrun_operator.planning.pods import RolesReport, report_roles
from agenticrun_operator.resources import Child, Manifest, OperatorKey, WorkerImages

REPEAT_SECONDS = 30.0
"""Time after which a request without effect is repeated."""
SILENT_SECONDS = 7.0
"""Time without a snapshot after which the driver is said to be silent. It posts every second. With
looks every 3 s at most, the status shows it within 10 s."""


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
        return self.observed.own_progress(self.run)

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

    @property
    def keeps_pods(self) -> bool:
        """True if the run's pods are the last way to its checkpoints."""
        if not self.claim_lost or self.has_attempt:
            return self.claim_lost
        claim = self.observed.child(resources.CLAIM_KIND, resources.claim_name(self.run))
        goes = self.cluster is None or resources.is_deleting(self.cluster)
        return bool(self.status.checkpoint and self.pods) and claim is not None and not goes

    @property
    def is_damaged(self) -> bool:
        """True if another client wrote the phase of a run that has ended."""
        stored = self.applied.status
        return stored.phase.finished and stored.completion_time is None

    @property
    def is_silent(self) -> bool:
        """True if the driver has sent no snapshot for some seconds."""
        progress = self.progress
        return progress is not None and (progress.silent_seconds or 0.0) > SILENT_SECONDS

    @property
    def seconds_to_deadline(self) -> float | None:
        """Time until `deadline`; 0 if it is over."""
        return max(0.0, -self.seconds_since(self.deadline)) if self.deadline else None

    @property
    def deadline(self) -> datetime | None:
        """The end of spec.activeDeadlineSeconds, from the start of the run; None if it has none."""
        limit, start = self.run.spec.active_deadline_seconds, self.status.start_time
        if limit is None or start is None:
            return None
        return times.parse_time(start) + timedelta(seconds=limit)

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
