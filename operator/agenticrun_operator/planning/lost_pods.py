"""Pods on nodes that no longer answer: give up the head, remove stuck pods by force.

Kubernetes marks the pods of a silent node as not ready, and after minutes as being deleted. It
keeps them until the node answers or an administrator acts, because their processes may still run
behind a broken network. KubeRay counts them meanwhile and replaces none of them. So after a wait
the operator removes them by force.

The processes behind a broken network are not fenced. A driver there can still write to object
storage or to a volume that several nodes mount, and so can the next attempt. That is why it waits
until the old pod's grace period is over (`may_run`). What limits the damage: an attempt needs its
trainer pods on other nodes, which Kubernetes does delete; a checkpoint is complete only with its
manifest, which is written last; a ReadWriteOnce volume is attached to one node. To fence a node,
set the taint node.kubernetes.io/out-of-service or shut it down.
"""

from __future__ import annotations

from datetime import datetime

from agenticrun_api import Reason, Role
from agenticrun_api.status import JobStatus
from agenticrun_operator.observed import Incarnation, Observed, Pod, Unreachable
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.plan import Delete
from agenticrun_operator.planning.times import format_span, parse_time
from agenticrun_operator.resources import Child, is_deleting

HEAD_LOST_SECONDS = 120.0
"""Time that a head may be not ready and silent before it is given up."""
DELETED_SECONDS = 2.0
"""Time after the request to delete a RayCluster at which to look whether it is being deleted."""
REJOIN_SECONDS = 60.0
"""Time in which worker pods join the new head after the loss of one."""
STUCK_SECONDS = 60.0
"""Time after its grace period at which a pod that is still there is said to be stuck."""


def joined_earlier_head(pod: Pod, head: Pod, now: datetime) -> bool:
    """Return True if the Ray process of a worker pod is older than that of the head.

    It belongs to an earlier head, notices after half a minute that this one is lost, and starts
    again. It is ready until then. The clocks of nodes may differ: so only the first minute of a
    head counts, and only pods that are older than the head's, unless its container has restarted.
    """
    if pod.role is Role.DRIVER or pod.deleting or not (pod.started_at and head.started_at):
        return False
    restarted = head.incarnation is not None and head.incarnation.restarts > 0
    if pod.created_at >= head.created_at and not restarted:
        return False
    start = parse_time(head.started_at)
    return parse_time(pod.started_at) < start and (now - start).total_seconds() < REJOIN_SECONDS


def may_run(pod: Pod, now: datetime) -> bool:
    """Return True if a process of the pod may still run, as far as waiting can tell."""
    return not pod.ended and not _is_stuck(pod, now)


def _is_stuck(pod: Pod, now: datetime) -> bool:
    return pod.gone_by is not None and (now - parse_time(pod.gone_by)).total_seconds() > (
        STUCK_SECONDS
    )


def remove_stuck(draft: Draft, observed: Observed) -> None:
    """Remove the run's pods that are long past their grace period."""
    for pod in observed.pods:
        if pod.deleting and not pod.ended:
            draft.look_again(STUCK_SECONDS / 2)
        mine = pod.orphan or pod.run_uid == draft.run.metadata.uid
        if not mine or pod.ended or not _is_stuck(pod, draft.now):
            continue
        if draft.may_repeat(observed.deletions.get(pod.uid)):
            draft.delete.append(Delete(Child("Pod", pod.name), pod.uid, force=True))
        if pod.uid not in observed.deletions:
            draft.event(
                Reason.NODE_LOST,
                f"pod {pod.name} is removed: node {pod.node} has not ended it "
                f"{format_span(STUCK_SECONDS)} after its grace period",
                warning=True,
            )


def was_replaced(head: Pod | None, job: JobStatus) -> bool:
    """Return True if the head that the attempt was submitted to was replaced or restarted.

    Ray keeps its jobs in the head's memory, so the attempt is lost with it.
    """
    if head is None or not _is_pod_of(head, job):
        return True
    return head.incarnation is not None and str(head.incarnation) != job.incarnation


def _is_pod_of(head: Pod, job: JobStatus) -> bool:
    """Return True if the attempt was submitted to this pod, whichever start of it."""
    incarnation = Incarnation.parse(job.incarnation)
    return incarnation is not None and incarnation.pod_uid == head.uid


def lost_head(draft: Draft, observed: Observed, job: JobStatus) -> str | None:
    """Return a sentence if the head that the attempt was submitted to is lost, else None.

    A head is lost if it is silent and the kubelet or the node controller has long said that it is
    not ready. A silent head that is ready is a problem of the network to the operator.

    Args:
        draft: the draft.
        observed: the observed state.
        job: the attempt.
    """
    head = observed.head(draft.run.metadata.uid)
    if head is None or not _is_pod_of(head, job):
        return None
    seen = (observed.job, observed.progress)
    silent = all(isinstance(item, Unreachable) and not item.tokens for item in seen)
    if not silent or head.unready_since is None:
        return None
    if (draft.now - parse_time(head.unready_since)).total_seconds() < HEAD_LOST_SECONDS:
        return None
    return f"head pod {head.name} on node {head.node} has not answered or been ready for " + (
        f"{format_span(HEAD_LOST_SECONDS)}"
    )


def delete_cluster(draft: Draft, observed: Observed) -> bool:
    """Delete the run's own RayCluster. Return True if there is one, for the first request."""
    cluster = observed.own_cluster(draft.run)
    if cluster is None:
        return False
    uid = cluster["metadata"]["uid"]
    if is_deleting(cluster) or not draft.may_repeat(observed.deletions.get(uid)):
        return False
    draft.delete.append(Delete(Child("RayCluster", draft.run.metadata.name), uid))
    draft.look_again(DELETED_SECONDS)
    return uid not in observed.deletions
