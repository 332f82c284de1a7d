"""Frozen values that describe the observed state of a run: input of planning, output of clients."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property

from agenticrun_api import AgenticRun, Progress, Reason, Role, names
from agenticrun_api.base import one_line
from agenticrun_operator import errors, resources
from agenticrun_operator.resources import Child, Manifest

_PULL_FAILURES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
    }
)
_CONFIG_FAILURES = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_CODE_CONTAINERS = {
    names.FETCH_CONTAINER: "cannot fetch spec.code",
    names.INSTALL_CONTAINER: "cannot install spec.code.pip",
}
_COMMIT = re.compile("[0-9a-f]{40,64}")
_PLAIN_WAITING = frozenset({"ContainerCreating", "PodInitializing"})
_MOUNT_FAILURES = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_ROLES = frozenset(role.value for role in Role)
_NODE_TYPE, _GROUP, _CLUSTER = "ray.io/node-type", "ray.io/group", resources.LABEL_CLUSTER
"""Labels that KubeRay gives to each pod that it creates."""
_POD_LABELS = (names.LABEL_RUN, names.LABEL_RUN_UID, names.LABEL_ROLE)
_DISRUPTED = frozenset(
    {
        "Evicted",
        "NodeAffinity",
        "NodeLost",
        "NodeShutdown",
        "OutOfcpu",
        "OutOfmemory",
        "OutOfpods",
        "Preempted",
        "Preempting",
        "Shutdown",
        "Terminated",
        "UnexpectedAdmissionError",
    }
)
"""Reasons in the status of a pod that its node has ended or does not take back."""
_VOLUME_COMES = re.compile(
    r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim \S+ not found"
    r"|waiting for \S+ volume controller"
)
"""The scheduler's words for claims that have no volume yet."""
_KUBELET_TRIES_AGAIN = re.compile(
    r"failed to sync \w+ cache|timed out waiting for the condition|context deadline exceeded"
    r"|failed to reserve container name"
)
"""The kubelet's words for what it repeats with success as a rule."""
PASSING_SECONDS = 10.0
"""Time after which what often passes without help is a problem."""
UNREADY_SECONDS = 20.0
"""Time that a running container has to become ready, before it is named."""
FOLLOWING_SECONDS = 30.0
"""Time that a worker has to start again after its head was lost."""
_OWN_LIMIT = re.compile(r"\bexceed(s|ed) (the|its)\b")
"""The kubelet's words for a pod that it evicts because its containers use more storage than their
own limits allow. Another attempt would end the same way."""
_UNKNOWN_ENDS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The words of the kubelet and of containerd for a container whose end no one has seen."""
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
class Observed:
    """Everything that one reconciliation has read."""

    children: Mapping[Child, Manifest | None] = field(default_factory=dict)
    """The children that were read, with any owner, and the user's own claim for checkpoints; None:
    the object does not exist. While a run trains or is suspended, only the RayCluster is read, and
    a claim that was deleted."""
    pods: tuple[Pod, ...] = ()
    """The pods of the run's RayCluster, and orphans of a deleted RayCluster."""
    job: Job | NoJob | Unreachable = Unreachable("there is no head pod to ask")
    """The job of `status.job.submissionId`."""
    progress: Progress | NoReport | Unreachable = Unreachable("there is no head pod to ask")
    kuberay_missing: bool = False
    """True if the apiserver does not serve RayClusters, so that nothing is known about the run's
    own. Its pods may still be there."""
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
    scaling_refusal: tuple[errors.ClusterError, datetime] | None = None
    """Why and when the apiserver refused to give the RayCluster the replicas of this spec."""
    end_time: str | None = None
    """`status.job.endTime` as this operator set it, for a CRD that does not have the field yet."""

    def child(self, kind: str, name: str) -> Manifest | None:
        """Return a child that was read and exists, else None."""
        return self.children.get(Child(kind, name))

    def own_cluster(self, run: AgenticRun) -> Manifest | None:
        """Return the RayCluster, if it exists and is this run's own."""
        cluster = self.child("RayCluster", run.metadata.name)
        return cluster if cluster and resources.is_own(run, cluster) else None

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
        clusters = (item for child, item in self.children.items() if child.kind == "RayCluster")
        return any(cluster is not None and _is_suspended(cluster) for cluster in clusters)

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


def _is_suspended(cluster: Manifest) -> bool:
    conditions = cluster.get("status", {}).get("conditions") or ()
    return bool(cluster["spec"].get("suspend")) or any(
        item["type"] in ("RayClusterSuspending", "RayClusterSuspended") and item["status"] == "True"
        for item in conditions
    )


@dataclass(frozen=True, slots=True, eq=False)
class LabelledPod:
    """One version of a pod that was selected by a label.

    The label only selects, because anyone may label a pod: a pod counts if a RayCluster controls
    it, or did until someone removed its owner.
    """

    cluster: tuple[str, str]
    """Name and uid of the RayCluster that controls the pod; the uid is empty if the pod has no
    owner."""
    pod: Pod


def read_labelled_pod(manifest: Manifest) -> LabelledPod | None:
    """Read a pod that was selected by a label; None if it is not a pod of a RayCluster."""
    owner = resources.controller(manifest)
    if role_of(manifest) is None or (owner and owner["kind"] != "RayCluster"):
        return None
    named = (manifest["metadata"].get("labels") or {}).get(_CLUSTER, "")
    cluster = (owner["name"], owner["uid"]) if owner else (named, "")
    return LabelledPod(cluster, read_pod(manifest))


def resolve_pod(
    labelled: LabelledPod, run: AgenticRun, cluster: Manifest | None, cluster_known: bool
) -> Pod | None:
    """Return a pod with what the run's RayCluster says about it; None if it is not the run's.

    If another RayCluster than the current one controls it, the pod is an orphan. So is one
    without an owner that is older than the RayCluster.

    Args:
        labelled: the pod.
        run: the run.
        cluster: its RayCluster; None if there is none.
        cluster_known: False if the RayCluster could not be read; then no pod is an orphan.
    """
    pod, (name, uid) = labelled.pod, labelled.cluster
    mine = uid or pod.run_uid == run.metadata.uid
    if name != run.metadata.name or not mine:
        return None
    if cluster is None:
        return replace(pod, orphan=True) if cluster_known else pod
    metadata = cluster["metadata"]
    made_at = metadata.get("creationTimestamp", "")
    current = uid == metadata["uid"] if uid else pod.created_at >= made_at
    if not current:
        return replace(pod, orphan=True)
    run_uid = (
        run.metadata.uid
        if resources.is_own(run, cluster)
        else resources.controller(cluster).get("uid", "")
    )
    return pod if pod.run_uid == run_uid else replace(pod, run_uid=run_uid)


def with_head(pods: Sequence[Pod], named: str | None, submitted_to: str | None) -> list[Pod]:
    """Return the pods of a run, with the head marked.

    Users who may create pods may also write their labels and owner. So a pod is the head only if
    the RayCluster's status names it, which KubeRay writes. Other pods that claim to be the head
    are then left out, unless they are being deleted. Until the status names one, the only claimant
    is the head.

    Args:
        pods: the pods.
        named: the head in the status of the RayCluster.
        submitted_to: uid of the pod that the newest attempt was submitted to, if there is no
            RayCluster to name one.
    """
    driver = Role.DRIVER  # a look-up in the enum for each of a thousand pods takes a while
    claimants = [pod for pod in pods if pod.role is driver and not pod.orphan]
    live = [pod for pod in claimants if not pod.deleting] or claimants
    if named:
        head = next((pod for pod in claimants if pod.name == named), None)
    elif submitted_to and len(live) > 1:
        head = next((pod for pod in claimants if pod.uid == submitted_to), None)
    else:
        head = live[0] if len(live) == 1 else None
    if head is None:
        if not named and len(live) > 1:
            return [_as_claimant(pod, live) for pod in pods]
        return [_with_its_head(pod, None) for pod in pods]
    marked = (replace(pod, is_head=True) if pod is head else pod for pod in pods)
    return [
        pod if pod.problem is None else _with_its_head(pod, head)
        for pod in marked
        if pod.role is not driver or pod.is_head or pod.orphan or pod.deleting
    ]


def _with_its_head(pod: Pod, head: Pod | None) -> Pod:
    """Return a worker pod that has not crashed if its Ray process ended with an earlier head.

    Such a process notices after half a minute that its head is lost, and ends with an error.
    """
    problem = pod.problem
    if problem is None or not problem.began or not problem.ended or pod.role is Role.DRIVER:
        return pod
    if head and head.started_at and _moment(problem.began) >= _moment(head.started_at):
        return pod
    follows = Problem(
        Reason.PODS_PENDING, f"starts again after the loss of its head: {problem.message}"
    )
    passing = PassingProblem(follows, _later(problem.ended, FOLLOWING_SECONDS))
    return replace(pod, problem=None, passing=passing)


def _moment(time: str) -> datetime:
    return datetime.fromisoformat(time)


def seems_incomplete(pods: Sequence[LabelledPod], cluster: Manifest) -> bool:
    """Return True if a RayCluster has pods that are not among these.

    It names its head and counts its ready workers. A pod without the run's labels, or one that was
    just deleted, is missing.
    """
    driver, owners = Role.DRIVER, {"", cluster["metadata"]["uid"]}
    head, ready = head_name(cluster), cluster.get("status", {}).get("readyWorkerReplicas") or 0
    own = [item.pod for item in pods if item.cluster[1] in owners]
    heads = [pod.name for pod in own if pod.role is driver]
    return len(own) - len(heads) < ready or bool(head and head not in heads)


def head_name(cluster: Manifest | None) -> str | None:
    """Return the name of the head pod that the status of a RayCluster has, if it has one."""
    name: str | None = ((cluster or {}).get("status", {}).get("head") or {}).get("podName")
    return name


def _as_claimant(pod: Pod, claimants: list[Pod]) -> Pod:
    """Mark the pod as not ready if other pods claim to be the head, too."""
    if pod not in claimants:
        return pod
    others = ", ".join(other.name for other in claimants if other is not pod)
    problem = Problem(
        Reason.PODS_PENDING,
        f"claims to be the head, as {others} does: delete the one that is not",
    )
    return replace(pod, ready=False, problem=problem)


def role_of(manifest: Manifest) -> Role | None:
    """Return the role of a pod of a RayCluster; None if it has none.

    KubeRay's labels say it, too, and only they make a pod the head.
    """
    labels = manifest["metadata"].get("labels") or {}
    if labels.get(_NODE_TYPE) == "head":
        return Role.DRIVER
    named = labels.get(names.LABEL_ROLE) or labels.get(_GROUP)
    return Role(named) if named in _ROLES and named != Role.DRIVER.value else None


def read_pod(manifest: Manifest) -> Pod:
    """Read one pod of a RayCluster, which has a role."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    role = role_of(manifest)
    assert role is not None, metadata["name"]
    readiness: Manifest = next(
        (item for item in status.get("conditions", ()) if item["type"] == "Ready"), {}
    )
    ready = readiness.get("status") == "True"
    problem = None if ready else _problem(manifest)
    labels = metadata.get("labels") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        run_uid=labels.get(names.LABEL_RUN_UID, ""),
        role=role,
        ready=ready,
        node=manifest.get("spec", {}).get("nodeName", ""),
        ip=status.get("podIP"),
        incarnation=_incarnation(metadata["uid"], status),
        created_at=metadata.get("creationTimestamp", ""),
        started_at=_started_at(status),
        problem=problem if isinstance(problem, Problem) else None,
        passing=problem if isinstance(problem, PassingProblem) else None,
        preparing_since=None if ready else _preparing_since(manifest),
        unready_since=None if ready else readiness.get("lastTransitionTime"),
        gone_by=metadata.get("deletionTimestamp"),
        ended=_has_ended(status),
        finalizers=tuple(metadata.get("finalizers") or ()),
        commit=_commit(status),
        ownerless=not resources.controller(manifest),
        lacks=tuple(name for name in _POD_LABELS if name not in labels),
        disruption=_disruption(status),
        own_end=_own_end(status),
        rebooted=_last_end(status).get("reason") in _UNKNOWN_ENDS,
        images=tuple(_images(manifest).values()) if ready else (),
    )


def _images(pod: Manifest) -> dict[str, str]:
    """Return the images of a pod by container. Most pods of a run have the same."""
    return {
        item["name"]: sys.intern(item["image"])
        for key in ("initContainers", "containers")
        for item in pod.get("spec", {}).get(key, ())
    }


def _disruption(status: Manifest) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return condition.get("reason") or "DisruptionTarget"
    reason: str = status.get("reason") or ""
    own_fault = reason == "Evicted" and _OWN_LIMIT.search(status.get("message") or "")
    return reason if reason in _DISRUPTED and not own_fault else ""


def _own_end(status: Manifest) -> str:
    if status.get("phase") != "Failed" or not status.get("reason") or _disruption(status):
        return ""
    return _one_line(f"{status['reason']}: {status.get('message') or ''}").rstrip(": ")


def _commit(status: Manifest) -> str:
    """Return what the container that fetches has said at its end, if it is a commit."""
    for container in status.get("initContainerStatuses", ()):
        said: str = container.get("state", {}).get("terminated", {}).get("message", "")
        if container["name"] == names.FETCH_CONTAINER and _COMMIT.fullmatch(said):
            return said
    return ""


def _has_ended(status: Manifest) -> bool:
    ended = "terminated" in _ray_container(status).get("state", {})
    return status.get("phase") in ("Succeeded", "Failed") or ended


def _incarnation(uid: str, status: Manifest) -> Incarnation | None:
    container = _ray_container(status)
    return Incarnation(uid, container["restartCount"]) if container.get("containerID") else None


def _started_at(status: Manifest) -> str | None:
    started: str | None = (
        _ray_container(status).get("state", {}).get("running", {}).get("startedAt")
    )
    return started


def _last_end(status: Manifest) -> Manifest:
    ended: Manifest = _ray_container(status).get("lastState", {}).get("terminated") or {}
    return ended


def _ray_container(status: Manifest) -> Manifest:
    found = (
        item for item in status.get("containerStatuses", ()) if item["name"] == names.RAY_CONTAINER
    )
    return next(found, {})


def _problem(pod: Manifest) -> Problem | PassingProblem | None:
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        if own := _own_end(status):
            return Problem(Reason.CONTAINER_CRASHED, f"was ended by its node: {own}")
        words = _one_line(f"{status['reason']}: {status.get('message') or ''}").rstrip(": ")
        return Problem(Reason.PODS_PENDING, f"was ended by its node: {words}")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = _one_line(condition.get("message", ""))
            found = Problem(Reason.UNSCHEDULABLE, f"cannot be scheduled: {message}")
            if _VOLUME_COMES.search(message):
                since = condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
                return PassingProblem(found, _later(since, PASSING_SECONDS))
            return found
    images = _images(pod)
    for container in _container_statuses(pod):
        if problem := _container_problem(container, images[container["name"]]):
            if _KUBELET_TRIES_AGAIN.search(problem.message) and not problem.ended:
                return PassingProblem(problem, _later(_scheduled_at(pod), PASSING_SECONDS))
            return problem
    return _node_problem(pod) or _unready(pod)


def _later(time: str, seconds: float) -> str:
    return (_moment(time) + timedelta(seconds=seconds)).isoformat()


def _scheduled_at(pod: Manifest) -> str:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition.get("lastTransitionTime"):
            return str(condition["lastTransitionTime"])
    return str(pod["metadata"]["creationTimestamp"])


def _node_problem(pod: Manifest) -> Problem | None:
    """Return the problem of a pod whose kubelet no longer reports.

    The node controller then sets only the pod's condition. A kubelet that reports sets the
    readiness of containers and sidecars, too.
    """
    containers = tuple(_container_statuses(pod))
    conditions = pod.get("status", {}).get("conditions", ())
    unready = any(item["type"] == "Ready" and item["status"] != "True" for item in conditions)
    if not unready or not containers or _closed_gates(pod):
        return None
    if not all(item.get("ready") for item in containers):
        return None
    node = pod.get("spec", {}).get("nodeName", "")
    return Problem(Reason.NODE_LOST, f"is on node {node}, which no longer answers")


def _closed_gates(pod: Manifest) -> list[str]:
    """Return the readiness gates of a pod that are not true: another controller sets them."""
    gates = [item["conditionType"] for item in pod.get("spec", {}).get("readinessGates") or ()]
    conditions = pod.get("status", {}).get("conditions", ())
    true = {item["type"] for item in conditions if item["status"] == "True"}
    return [gate for gate in gates if gate not in true]


def _unready(pod: Manifest) -> PassingProblem | None:
    """Return the containers that run and are not ready, or the gates that keep the pod unready."""
    spec = pod.get("spec", {})
    prepare = {
        item["name"]
        for item in spec.get("initContainers", ())
        if item.get("restartPolicy") != "Always"
    }
    running = [
        item
        for item in _container_statuses(pod)
        if item.get("state", {}).get("running") is not None and item["name"] not in prepare
    ]
    unready = [item for item in running if not item.get("ready")]
    since = [item["state"]["running"].get("startedAt", "") for item in unready]
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready":
            since.append(condition.get("lastTransitionTime") or "")
    if not any(since):
        return None
    if unready:
        named = ", ".join(map(_with_restarts, unready))
        problem = Problem(Reason.CONTAINER_NOT_READY, f"container {named} is not ready")
    elif running and (gates := _closed_gates(pod)):
        problem = Problem(
            Reason.CONTAINER_NOT_READY,
            f"readiness gate {gates[0]} is not true: its controller has not set it",
        )
    else:
        return None
    return PassingProblem(problem, _later(max(since), UNREADY_SECONDS))


def _with_restarts(container: Manifest) -> str:
    restarts = container.get("restartCount", 0)
    times = "once" if restarts == 1 else f"{restarts} times"
    return f"{container['name']} (restarted {times})" if restarts else str(container["name"])


def _preparing_since(pod: Manifest) -> str | None:
    if not pod.get("spec", {}).get("nodeName"):
        return None
    conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", ())}
    if conditions.get("PodReadyToStartContainers", {}).get("status") == "True":
        return None
    for container in _container_statuses(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in _PLAIN_WAITING:
            return None
    since: str | None = conditions.get("PodScheduled", {}).get("lastTransitionTime")
    return since or pod["metadata"].get("creationTimestamp")


def problem_of_warnings(events: Sequence[Manifest]) -> Problem | None:
    """Return the problem of a pod that does not start its containers, from its warning events.

    Those of the scheduler are old: the pod has a node.
    """
    current = (event for event in events if event.get("reason") != "FailedScheduling")
    newest = max(current, key=_time_of, default=None)
    if newest is None:
        return None
    message = _one_line(newest.get("message", ""))
    if newest.get("reason") in _MOUNT_FAILURES:
        return Problem(Reason.MOUNT_FAILED, f"cannot mount its volumes: {message}")
    return Problem(Reason.PODS_PENDING, f"cannot start its containers: {message}")


def _time_of(event: Manifest) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _container_statuses(pod: Manifest) -> Iterator[Manifest]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _container_problem(container: Manifest, image: str) -> Problem | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), _one_line(waiting.get("message", ""))
    if reason in _PULL_FAILURES:
        return Problem(
            Reason.IMAGE_PULL_FAILED,
            f"cannot pull image {image}: {message or reason}",
            image=image,
        )
    if reason in _CONFIG_FAILURES:
        if _KUBELET_TRIES_AGAIN.search(message):  # it says nothing about the container
            return Problem(
                Reason.PODS_PENDING, f"container {container['name']} waits: {message or reason}"
            )
        return Problem(
            Reason.CONTAINER_CRASHED,
            f"container {container['name']} cannot start: {message or reason}",
        )
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    if ended and ended.get("exitCode", 0) != 0:
        detail = _one_line(ended.get("message", "")) or _one_line(ended.get("reason", ""))
        if failed := _CODE_CONTAINERS.get(container["name"]):
            return Problem(Reason.CODE_UNAVAILABLE, f"{failed}: {detail}")
        return Problem(
            Reason.CONTAINER_CRASHED,
            f"container {container['name']} ended with exit code {ended['exitCode']}: {detail}",
            began=_start_of_ray(container, ended),
            ended=ended.get("finishedAt") or "",
        )
    if reason and reason not in _PLAIN_WAITING:
        return Problem(
            Reason.PODS_PENDING, f"container {container['name']} waits: {message or reason}"
        )
    return None


def _start_of_ray(container: Manifest, ended: Manifest) -> str:
    """Return the start of a Ray process that has ended on its own account, else an empty text."""
    killed = ended.get("reason") == "OOMKilled"
    return (
        "" if killed or container["name"] != names.RAY_CONTAINER else ended.get("startedAt") or ""
    )


def _one_line(text: str, limit: int = 400) -> str:
    return one_line(text, limit)
