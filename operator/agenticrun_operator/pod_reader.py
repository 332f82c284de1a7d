"""Reads the pods of RayClusters as the apiserver returns them: readiness, problems, ends.

A pod counts for a run if a RayCluster of that run controls it, and is the head only if the
RayCluster's status names it: users who may create pods may also write their labels and owner.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from agenticrun_api import AgenticRun, Reason, Role, names
from agenticrun_api.base import one_line
from agenticrun_operator import resources
from agenticrun_operator.observed import Incarnation, PassingProblem, Pod, Problem
from agenticrun_operator.resources import Manifest

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
    # The label is only a claim; `resolve_pod` checks it against the run.
    named = (manifest["metadata"].get("labels") or {}).get(_CLUSTER, "")
    cluster = (owner["name"], owner["uid"]) if owner else (named, "")
    return LabelledPod(cluster, read_pod(manifest))


@dataclass(frozen=True, slots=True)
class ResolvedPods:
    """The pods of a run at its last look."""

    owner: tuple[object, bool]
    """The state of the RayCluster that this was observed for."""
    head: tuple[str | None, str | None]
    """The names by which the head was chosen."""
    labelled: tuple[LabelledPod, ...]
    by_labelled: dict[LabelledPod, Pod | None]
    pods: tuple[Pod, ...]


def resolve_pods(
    labelled: tuple[LabelledPod, ...],
    run: AgenticRun,
    cluster: Manifest | None,
    cluster_known: bool,
    before: ResolvedPods | None,
) -> ResolvedPods:
    """Return the pods of RayClusters of the run's name, with the head marked.

    A pod that is the same as at the last look is not resolved again: a look after an event of
    one of a thousand pods costs as much as after one of ten.

    Args:
        labelled: the pods that were selected by their labels.
        run: the run.
        cluster: its RayCluster; None if there is none.
        cluster_known: as in `resolve_pod`.
        before: the answer of the last look.
    """
    owner = cluster and (
        cluster["metadata"]["uid"],
        resources.controller_uid(cluster),
        resources.is_own(run, cluster),
    )
    job = run.status.job if cluster is None else None
    submitted_to = Incarnation.parse(job.incarnation) if job else None
    head = (head_name(cluster), submitted_to.pod_uid if submitted_to else None)
    # Which run a pod belongs to depends on its RayCluster: if that changes, all are resolved again.
    if before is None or before.owner != (owner, cluster_known):
        before = ResolvedPods((owner, cluster_known), head, (), {}, ())
    # The same tuple: no pod has changed since the last look.
    if before.labelled is labelled and before.head == head:
        return before
    found = {
        item: before.by_labelled[item]
        if item in before.by_labelled
        else resolve_pod(item, run, cluster, cluster_known)
        for item in labelled
    }
    pods = tuple(with_head([pod for pod in found.values() if pod], *head))
    return ResolvedPods(before.owner, head, labelled, found, pods)


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
    # Its pods are orphans only if the RayCluster is known to be gone.
    if cluster is None:
        return replace(pod, orphan=True) if cluster_known else pod
    metadata = cluster["metadata"]
    made_at = metadata.get("creationTimestamp", "")
    # For a pod without an owner, age decides: it cannot be older than its RayCluster.
    current = uid == metadata["uid"] if uid else pod.created_at >= made_at
    if not current:
        return replace(pod, orphan=True)
    # A user may have removed the pod's label; the RayCluster's owner is what counts.
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
    # The old pod of a replaced head still exists while it is deleted.
    live = [pod for pod in claimants if not pod.deleting] or claimants
    if named:
        head = next((pod for pod in claimants if pod.name == named), None)
    elif submitted_to and len(live) > 1:
        head = next((pod for pod in claimants if pod.uid == submitted_to), None)
    else:
        head = live[0] if len(live) == 1 else None
    if head is None:
        # None of them may be trusted with the run's tokens.
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
    # It began under this head, so the loss of an earlier head did not end it.
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
    # Pods without an owner may be the RayCluster's, too.
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
    # Only KubeRay's label makes a pod the head, whatever the run's own label says.
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
    # By name: users may add containers, in any order.
    found = (
        item for item in status.get("containerStatuses", ()) if item["name"] == names.RAY_CONTAINER
    )
    ray: Manifest = next(found, {})
    last_end = ray.get("lastState", {}).get("terminated")
    ended = status.get("phase") in ("Succeeded", "Failed")
    incarnation = None
    if ray.get("containerID"):
        incarnation = Incarnation(metadata["uid"], ray["restartCount"])
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        run_uid=labels.get(names.LABEL_RUN_UID, ""),
        role=role,
        ready=ready,
        node=manifest.get("spec", {}).get("nodeName", ""),
        ip=status.get("podIP"),
        incarnation=incarnation,
        created_at=metadata.get("creationTimestamp", ""),
        started_at=ray.get("state", {}).get("running", {}).get("startedAt"),
        problem=problem if isinstance(problem, Problem) else None,
        passing=problem if isinstance(problem, PassingProblem) else None,
        preparing_since=None if ready else _preparing_since(manifest),
        unready_since=None if ready else readiness.get("lastTransitionTime"),
        gone_by=metadata.get("deletionTimestamp"),
        ended=ended or "terminated" in ray.get("state", {}),
        finalizers=tuple(metadata.get("finalizers") or ()),
        commit=_commit(status),
        ownerless=not resources.controller(manifest),
        lacks=tuple(name for name in _POD_LABELS if name not in labels),
        disruption=_disruption(status),
        own_end=_own_end(status),
        rebooted=(last_end or {}).get("reason") in _UNKNOWN_ENDS,
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
    # An eviction by the node's pressure is no fault of the run; one by its own limits is.
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


def _problem(pod: Manifest) -> Problem | PassingProblem | None:
    status = pod.get("status", {})
    # The pod's own reason first: its containers only say that they were killed.
    if status.get("phase") == "Failed" and status.get("reason"):
        if own := _own_end(status):
            return Problem(Reason.CONTAINER_CRASHED, f"was ended by its node: {own}")
        words = _one_line(f"{status['reason']}: {status.get('message') or ''}").rstrip(": ")
        return Problem(Reason.PODS_PENDING, f"was ended by its node: {words}")
    scheduled = str(pod["metadata"].get("creationTimestamp", ""))
    for condition in status.get("conditions", ()):
        if condition["type"] != "PodScheduled":
            continue
        scheduled = condition.get("lastTransitionTime") or scheduled
        if condition["status"] == "False":
            message = _one_line(condition.get("message", ""))
            found = Problem(Reason.UNSCHEDULABLE, f"cannot be scheduled: {message}")
            gates = [item["name"] for item in pod.get("spec", {}).get("schedulingGates") or ()]
            if gates:
                words = f"waits for scheduling gate {gates[0]}, which its controller has to remove"
                found = Problem(Reason.UNSCHEDULABLE, words)
            if gates or _VOLUME_COMES.search(message):
                return PassingProblem(found, _later(scheduled, PASSING_SECONDS))
            return found
    images = _images(pod)
    for container in _container_statuses(pod):
        if problem := _container_problem(container, images[container["name"]]):
            if _KUBELET_TRIES_AGAIN.search(problem.message) and not problem.ended:
                return PassingProblem(problem, _later(scheduled, PASSING_SECONDS))
            return problem
    return _node_problem(pod) or _unready(pod)


def _later(time: str, seconds: float) -> str:
    return (_moment(time) + timedelta(seconds=seconds)).isoformat()


def _node_problem(pod: Manifest) -> Problem | None:
    """Return the problem of a pod whose kubelet no longer reports.

    The node controller then sets only the pod's condition. A kubelet that reports sets the
    readiness of containers and sidecars, too.
    """
    containers = tuple(_container_statuses(pod))
    conditions = pod.get("status", {}).get("conditions", ())
    unready = any(item["type"] == "Ready" and item["status"] != "True" for item in conditions)
    # A closed gate explains the condition as well.
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
            # The newest: a pod that was ready before gets the whole time again.
            since.append(condition.get("lastTransitionTime") or "")
    if not any(since):
        return None
    if unready:
        named = []
        for item in unready:
            restarts = item.get("restartCount", 0)
            often = "once" if restarts == 1 else f"{restarts} times"
            named.append(f"{item['name']} (restarted {often})" if restarts else item["name"])
        message = f"container {', '.join(named)} is not ready"
        problem = Problem(Reason.CONTAINER_NOT_READY, message)
    elif running and (gates := _closed_gates(pod)):
        problem = Problem(
            Reason.CONTAINER_NOT_READY,
            f"readiness gate {gates[0]} is not true: its controller has not set it",
        )
    else:
        return None
    return PassingProblem(problem, _later(max(since), UNREADY_SECONDS))


def _preparing_since(pod: Manifest) -> str | None:
    # A pod without a node waits for the scheduler, which reports its own reason.
    if not pod.get("spec", {}).get("nodeName"):
        return None
    conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", ())}
    if conditions.get("PodReadyToStartContainers", {}).get("status") == "True":
        return None
    for container in _container_statuses(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        # Any other reason says what is wrong.
        if waiting.get("reason") not in _PLAIN_WAITING:
            return None
    since: str | None = conditions.get("PodScheduled", {}).get("lastTransitionTime")
    return since or pod["metadata"].get("creationTimestamp")


def problem_of_warnings(events: Sequence[Manifest]) -> Problem | None:
    """Return the problem of a pod that does not start its containers, from its warning events.

    Those of the scheduler are old: the pod has a node.
    """
    current = (event for event in events if event.get("reason") != "FailedScheduling")
    newest = max(
        current,
        key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "",
        default=None,
    )
    if newest is None:
        return None
    message = _one_line(newest.get("message", ""))
    if newest.get("reason") in _MOUNT_FAILURES:
        return Problem(Reason.MOUNT_FAILED, f"cannot mount its volumes: {message}")
    return Problem(Reason.PODS_PENDING, f"cannot start its containers: {message}")


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
    # While it waits for a restart, the last end is the reason.
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    if ended and ended.get("exitCode", 0) != 0:
        detail = _one_line(ended.get("message", "")) or _one_line(ended.get("reason", ""))
        # The user can repair it: the message names the field of the run.
        if failed := _CODE_CONTAINERS.get(container["name"]):
            return Problem(Reason.CODE_UNAVAILABLE, f"{failed}: {detail}")
        # A process that the kernel killed for its memory has not ended on its own account.
        killed = ended.get("reason") == "OOMKilled"
        return Problem(
            Reason.CONTAINER_CRASHED,
            f"container {container['name']} ended with exit code {ended['exitCode']}: {detail}",
            began=""
            if killed or container["name"] != names.RAY_CONTAINER
            else ended.get("startedAt") or "",
            ended=ended.get("finishedAt") or "",
        )
    if reason and reason not in _PLAIN_WAITING:
        return Problem(
            Reason.PODS_PENDING, f"container {container['name']} waits: {message or reason}"
        )
    return None


def _one_line(text: str, limit: int = 400) -> str:
    return one_line(text, limit)
