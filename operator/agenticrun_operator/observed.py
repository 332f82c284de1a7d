"""Frozen values that describe the observed state of a run: input of planning, output of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from agenticrun_api import AgenticRun, Progress, Reason, Role
from agenticrun_api.status import JobStatus
from agenticrun_operator import errors, resources
from agenticrun_operator.resources import Child, Manifest, workloads

LIVE_JOB = frozenset({"PENDING", "RUNNING"})


@dataclass(frozen=True)
class Problem:
    """The reason a pod is not ready, in one line."""

    reason: Reason
    message: str
    began: str = ""
    """Start of the process that has ended, if that is the problem."""
    ended: str = ""
    """End of that process."""
    image: str = ""
    """The image that cannot be pulled, if that is the problem."""
    on_one_node: bool = False
    """True if other pods of the run do not have the problem, so that another node may help."""


@dataclass(frozen=True, slots=True)
class PassingProblem:
    """A problem that often passes without help. It counts if it does not."""

    problem: Problem
    counts_from: str
    """Time at which it begins to count, RFC 3339."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a pod's Ray container."""

    pod_uid: str
    restarts: int
    """Number of starts of the container before this one."""

    def __str__(self) -> str:
        return f"{self.pod_uid}/{self.restarts}"

    @classmethod
    def parse(cls, text: str) -> Incarnation | None:
        """Read what `str` has written; None if it is something else."""
        uid, _, restarts = text.partition("/")
        return cls(uid, int(restarts)) if restarts.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a run."""

    name: str
    uid: str
    run_uid: str
    role: Role
    ready: bool
    node: str = ""
    ip: str | None = None
    incarnation: Incarnation | None = None
    """The newest start of the Ray container, once it has started."""
    created_at: str = ""
    """Time at which the apiserver stored the pod."""
    started_at: str | None = None
    """Time at which the Ray container last started, by the clock of its node; None if it does not
    run."""
    problem: Problem | None = None
    passing: PassingProblem | None = None
    """A problem that is not yet one; `Observer.look` turns it into `problem` when it counts."""
    preparing_since: str | None = None
    """Time at which the pod got a node, while its volumes and its network are not there; else None.
    Only an event says what they wait for."""
    unready_since: str | None = None
    """Time at which the pod was last reported to be not ready; None if it is ready."""
    gone_by: str | None = None
    """End of the grace period of a pod that is being deleted; else None."""
    ended: bool = False
    """True if the kubelet has reported the end of the Ray container."""
    finalizers: tuple[str, ...] = ()
    """Finalizers, which keep a deleted pod until their controllers remove them."""
    commit: str = ""
    """The commit of spec.code.git that the pod has fetched."""
    orphan: bool = False
    """True if the pod's RayCluster no longer exists. The garbage collector deletes the pod, unless
    it is `ownerless`."""
    ownerless: bool = False
    """True if someone has removed the pod's owner, as a deletion of the RayCluster with
    --cascade=orphan does. No garbage collector will delete the pod."""
    lacks: tuple[str, ...] = ()
    """The labels of the run that someone has removed. The watches do not see a pod without them."""
    is_head: bool = False
    """True if this is the run's head: the pod that the RayCluster names, or its only head while it
    names none."""
    disruption: str = ""
    """The reason in one word if Kubernetes has ended the pod, or is about to, for a cause outside
    the run: a drain, an eviction, a preemption, a taint or a shutdown of its node."""

    own_end: str = ""
    """Why its node has ended the pod, if that is the pod's own fault."""
    rebooted: bool = False
    """True if the kubelet does not know how the Ray container's last start ended: its node has
    rebooted under it."""
    images: tuple[str, ...] = ()
    """The images of a ready pod."""

    @property
    def deleting(self) -> bool:
        """True if the pod is being deleted."""
        return self.gone_by is not None

    def was_given(self, job: JobStatus) -> bool:
        """Return True if the attempt was submitted to this pod, whichever start of it."""
        incarnation = Incarnation.parse(job.incarnation)
        return incarnation is not None and incarnation.pod_uid == self.uid


@dataclass(frozen=True)
class Job:
    """A Ray job, as the head reports it."""

    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str = ""
    exit_code: int | None = None
    log_tail: str = ""
    """The end of the log of a job that failed or was stopped; else empty."""
    start_time: float | None = None
    """When it was submitted, in seconds since the epoch; None if Ray does not say."""

    @property
    def live(self) -> bool:
        """True if the job has not ended."""
        return self.status in LIVE_JOB


@dataclass(frozen=True)
class NoJob:
    """The head answered: there is no such job."""


@dataclass(frozen=True)
class NoReport:
    """The reporter answered: no driver has sent it a progress snapshot."""


@dataclass(frozen=True)
class Unreachable:
    """The head did not answer, or its answer is unusable."""

    why: str
    reason: Reason = Reason.PROGRESS_UNAVAILABLE

    @property
    def tokens(self) -> bool:
        """True if the head may be well, and only its tokens are not those of the operator."""
        return self.reason is not Reason.PROGRESS_UNAVAILABLE


@dataclass(frozen=True)
class JobTrouble:
    """An action on an attempt (submit, configure, stop) that its head has not accepted so far."""

    submission_id: str
    action: object
    """The action, of `planning.plan`."""
    message: str
    """The last error."""
    count: int
    """Failures in a row."""
    since: datetime
    """Time of the first one."""
    retry_at: datetime
    """Time before which it is not repeated."""


@dataclass(frozen=True)
class DeletionTrouble:
    """A deletion that the apiserver has not carried out so far."""

    error: errors.ClusterError
    """The last answer."""
    since: datetime
    """Time of the first failure."""
    asked_at: datetime
    """Time of the last request."""


@dataclass(frozen=True)
class Edit:
    """A change of an object of the run that someone else has made, and that is to be undone."""

    object: Child
    changes: tuple[str, ...]
    """The changes, as clauses."""
    by: str = ""
    """The name with which the client has made them; empty if the apiserver does not know it."""
    repair: str = ""
    """The command for the user; empty if the operator undoes the changes."""

    def __str__(self) -> str:
        editor = f" by {self.by}" if self.by else ""
        what = f"{self.object.kind} {self.object.name} was changed{editor}: "
        return what + ", ".join(self.changes) + (f"; {self.repair}" if self.repair else "")


@dataclass(frozen=True)
class QueueObjects:
    """The objects of Kueue that a run with a queue needs, beside its Workload."""

    error: errors.ClusterError | None = None
    """Why they cannot be read: Kueue is missing or too old, or a right is missing."""
    flavors: Mapping[str, Manifest] = field(default_factory=dict)
    """The ResourceFlavors that Kueue has assigned, by name, while there is no RayCluster."""
    priority: Manifest | None = None
    """The WorkloadPriorityClass of the run, while there is no Workload."""
    position: int | None = None
    """Position of the run among all that wait in its ClusterQueue, from 1; None: it does not wait,
    or Kueue does not say."""


@dataclass(frozen=True)
class Observed:
    """Everything that one reconciliation has read."""

    children: Mapping[Child, Manifest | None] = field(default_factory=dict)
    """The children that were read, with any owner, and the user's own claim for checkpoints; None:
    the object does not exist. While a run trains or is suspended, only the RayCluster, its
    NetworkPolicies and a claim that was deleted are read; of a run with a queue always the
    Workload, too."""
    pods: tuple[Pod, ...] = ()
    """The pods of the run's RayCluster, and orphans of a deleted RayCluster."""
    job: Job | NoJob | Unreachable = Unreachable("there is no head pod to ask")
    """The job of `status.job.submissionId`."""
    progress: Progress | NoReport | Unreachable = Unreachable("there is no head pod to ask")
    progress_watched: bool = False
    """True if the operator looks at the run again as soon as the reporter has news."""
    kuberay_missing: bool = False
    """True if the apiserver does not serve RayClusters, so that nothing is known about the run's
    own. Its pods may still be there."""
    policy_error: errors.ClusterError | None = None
    """Why the run's NetworkPolicies, which are among the children otherwise, cannot be read."""
    missing_code: str | None = None
    """The name in spec.code.configMap if that ConfigMap does not exist."""
    job_trouble: JobTrouble | None = None
    """Set if the last action on the newest attempt failed."""
    last_status_write: datetime | None = None
    """Time of this operator's last write of the run's status."""
    tokens_sent_at: datetime | None = None
    """Time at which this operator last asked the apiserver to create the Secret with the tokens."""
    last_action: tuple[object, datetime] | None = None
    """The last action on the job that this operator carried out, and when."""
    deletions: Mapping[str, datetime] = field(default_factory=dict)
    """When this operator last asked to delete an object, by uid."""
    deletion_troubles: Mapping[str, DeletionTrouble] = field(default_factory=dict)
    """The deletions that failed, by the uid of the object."""
    cluster_changed_at: datetime | None = None
    """When this operator last changed the RayCluster."""
    policies_changed_at: datetime | None = None
    """When this operator last changed NetworkPolicies of the run."""
    scaling_refusal: tuple[errors.ClusterError, datetime] | None = None
    """Why and when the apiserver refused to give the RayCluster the replicas of this spec."""
    queue: QueueObjects = QueueObjects()
    workload_trouble: tuple[errors.ClusterError, datetime] | None = None
    """Why and when the last change of the Workload failed."""
    end_time: str | None = None
    """`status.job.endTime` as this operator set it, for a CRD that does not have the field yet."""

    def child(self, kind: str, name: str) -> Manifest | None:
        """Return a child that was read and exists, else None."""
        return self.children.get(Child(kind, name))

    def own_progress(self, run: AgenticRun) -> Progress | None:
        """Return the progress snapshot if it is from the run's newest attempt, else None."""
        job, seen = run.status.job, self.progress
        if not isinstance(seen, Progress) or job is None:
            return None
        mine = (run.metadata.uid, job.submission_id, job.attempt)
        return seen if (seen.run_uid, seen.submission_id, seen.attempt) == mine else None

    def own_cluster(self, run: AgenticRun) -> Manifest | None:
        """Return the RayCluster, if it exists and is this run's own."""
        cluster = self.child("RayCluster", run.metadata.name)
        return cluster if cluster and resources.is_own(run, cluster) else None

    def workload(self, run: AgenticRun) -> Manifest | None:
        """Return the run's own Workload, if it exists."""
        found = self.child(workloads.WORKLOAD_KIND, workloads.name_of(run))
        return found if found and resources.is_own(run, found) else None

    def edits(self, run: AgenticRun) -> list[Edit]:
        """Return what others have changed in the run's RayCluster and pods.

        `resources.repaired` undoes the changes of a RayCluster. The operator has no right to change
        pods, so a user must.
        """
        found = []
        cluster = self.own_cluster(run)
        if cluster is not None and (changes := resources.changes_by_others(run, cluster)):
            child = Child("RayCluster", run.metadata.name)
            found.append(Edit(child, changes, resources.editor_of(cluster)))
        if cluster is not None and (changes := resources.groups_of_others(run, cluster)):
            undo = f"undo it: kubectl edit raycluster {run.metadata.name}"
            found.append(Edit(Child("RayCluster", run.metadata.name), changes, repair=undo))
        for pod in self.own_pods(run.metadata.uid):
            if pod.lacks and not pod.deleting:
                changes = tuple(f"label {name} is missing" for name in pod.lacks)
                wanted = resources.run_labels(run, pod.role)
                labels = " ".join(f"{name}={wanted[name]}" for name in pod.lacks)
                command = f"set it: kubectl label pod {pod.name} {labels}"
                found.append(Edit(Child("Pod", pod.name), changes, repair=command))
        return found

    @property
    def cluster_suspended(self) -> bool:
        """True if the RayCluster is suspended, or is being suspended: KubeRay deletes its pods.

        The operator never does that: a queue or an administrator has.
        """
        clusters = [item for child, item in self.children.items() if child.kind == "RayCluster"]
        return any(
            cluster["spec"].get("suspend")
            or any(
                condition["type"] in ("RayClusterSuspending", "RayClusterSuspended")
                and condition["status"] == "True"
                for condition in cluster.get("status", {}).get("conditions") or ()
            )
            for cluster in clusters
            if cluster is not None
        )

    def head(self, run_uid: str) -> Pod | None:
        """Return the run's head pod; None if there is none, or if two pods claim to be it."""
        return next((pod for pod in self.own_pods(run_uid) if pod.is_head), None)

    def own_pods(self, run_uid: str) -> list[Pod]:
        """Return the pods of the RayCluster that the run has now."""
        found = self._own_pods.get(run_uid)
        if found is None:
            found = [pod for pod in self.pods if pod.run_uid == run_uid and not pod.orphan]
            self._own_pods[run_uid] = found
        return found

    @cached_property
    def _own_pods(self) -> dict[str, list[Pod]]:
        """The answers of `own_pods`."""
        return {}
