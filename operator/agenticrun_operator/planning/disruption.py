"""Acts of the platform on an attempt: its head was replaced, a pod was taken.

The operator itself deletes only whole RayClusters, so a pod that goes alone was taken by others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from agenticrun_api import Reason, Role
from agenticrun_api.roles import SAVES
from agenticrun_operator import resources
from agenticrun_operator.observed import Job, Pod
from agenticrun_operator.planning import times
from agenticrun_operator.planning.state import State


def disruption_fields(state: State) -> dict[str, Any]:
    """Return the fields of the attempt's status that say who has ended its pods.

    A disruption is remembered, because the watch drops deleted pods, until the attempt trains with
    all of its pods again. A pod that was ended by its own fault is remembered for good.
    """
    job, disruption, known = state.job, _find_disruption(state), state.job.disruption
    if known and not disruption and _has_recovered(state):
        known = ""
    # KubeRay replaces a pod that ends by its own fault at once, and then it looks deleted.
    ended = next((pod for pod in state.savers if pod.own_end), None)
    failed = job.failed_pod
    if ended and not known and not failed:
        failed = f"{ended.role.value} pod {ended.name} was ended by its node: {ended.own_end}"
    return {
        "failed_pod": failed[:256],
        "disruption": "" if failed else (known or disruption)[:256],
    }


def head_replaced(state: State) -> bool:
    """Return True if the head that the attempt was submitted to was replaced or restarted.

    Ray keeps its jobs in the head's memory, so the attempt is lost with it.
    """
    head = state.head
    if head is None:
        return not _head_is_hidden(state)
    return not head.was_given(state.job) or _restarted(state, head)


def _restarted(state: State, head: Pod) -> bool:
    return head.incarnation is not None and str(head.incarnation) != state.job.incarnation


def _head_is_hidden(state: State) -> bool:
    """Return True if the attempt's head runs, but another pod looks the same.

    While the RayCluster names no head, a second pod that claims to be it hides the real one.
    """
    return any(
        pod.was_given(state.job) and not pod.deleting and not pod.ended for pod in state.savers
    )


def _find_disruption(state: State) -> str:
    """Return which pod the platform has taken from the attempt, and how; empty if none.

    A pod is never replaced under the same uid: a head or trainer pod that is new, or is being
    deleted, was deleted by another client.
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
    for pod in state.savers:
        if taken := _taken(state, pod):
            return taken
    return _replaced(state)


def _has_recovered(state: State) -> bool:
    """Return True if the attempt, whose pods nothing disrupts now, trains with all of them.

    Kubernetes may take a disruption back: a preemption that does not happen, for example.
    """
    seen, progress = state.observed.job, state.progress
    if not isinstance(seen, Job) or not seen.live or seen.start_time is None:
        return False
    if progress is None or progress.final or state.is_silent:
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


def _replaced(state: State) -> str:
    """Return which pod is newer than the attempt that needs it, or has rebooted; empty: none."""
    head, newest = state.head, state.job.newest_pod_time
    if head is None:
        return "" if _head_is_hidden(state) else "the head pod was deleted"
    if not head.was_given(state.job):
        return f"the head pod was replaced by {head.name}"
    if head.rebooted and _restarted(state, head):
        return f"node {head.node} of head pod {head.name} restarted"
    for pod in state.savers:
        if newest is None or pod.role is Role.DRIVER or not pod.created_at:
            continue
        if times.parse_time(pod.created_at) > times.parse_time(newest):
            return f"a {pod.role.value} pod was replaced by {pod.name}"
    return ""


def _is_leaving(pod: Pod) -> bool:
    """Return True if the platform takes the pod, or its node no longer answers."""
    node_lost = pod.problem is not None and pod.problem.reason is Reason.NODE_LOST
    return pod.deleting or bool(pod.disruption) or node_lost
