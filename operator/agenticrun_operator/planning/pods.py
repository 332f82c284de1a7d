"""The pods of a run: how many of each role are ready, what is wrong, and which may still run.

Kubernetes marks the pods of a silent node as not ready, and after minutes as being deleted. It
keeps them until the node answers or an administrator acts, because their processes may still run
behind a broken network. KubeRay counts these pods and replaces none of them. So after a wait the
operator removes them by force (`children.remove_stuck`).

The processes behind a broken network are not fenced. A driver there can still write to object
storage or to a volume that several nodes mount, and so can the next attempt. That is why it waits
until the old pod's grace period is over (`may_run`). What limits the damage: an attempt needs its
trainer pods on other nodes, which Kubernetes does delete; a checkpoint is complete only with its
manifest, which is written last; a ReadWriteOnce volume is attached to one node. To fence a node,
set the taint node.kubernetes.io/out-of-service or shut it down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from agenticrun_api import AgenticRun, Reason, Role
from agenticrun_api.base import one_line
from agenticrun_api.status import RoleStatus
from agenticrun_operator import resources
from agenticrun_operator.observed import Edit, Observed, Pod, Problem
from agenticrun_operator.planning import times
from agenticrun_operator.planning.result import Said
from agenticrun_operator.resources import WorkerImages

REJOIN_SECONDS = 60.0
"""Time in which worker pods join the new head after the loss of one."""
CREATION_SECONDS = 60.0
"""Time in which KubeRay creates the pods of a RayCluster, or replaces one."""
STUCK_SECONDS = 60.0
"""Time after its grace period at which a pod that is still there is said to be stuck."""
_PROBLEM_EVENTS = frozenset(
    {
        Reason.IMAGE_PULL_FAILED,
        Reason.MOUNT_FAILED,
        Reason.UNSCHEDULABLE,
        Reason.CONTAINER_CRASHED,
        Reason.CODE_UNAVAILABLE,
        Reason.PODS_DENIED,
        Reason.PODS_NOT_CREATED,
    }
)


@dataclass(frozen=True)
class RolesReport:
    """The pods of all roles."""

    statuses: list[RoleStatus]
    problem: Problem | None
    """Why not all pods are ready; None if they are."""
    enough: bool
    """True if an attempt can begin: all pods are ready, of env and inference `minReplicas`."""
    warning: str
    """Set if the pods run different commits of the user's code."""

    @property
    def ready(self) -> bool:
        """True if all pods of all roles are ready."""
        return self.problem is None

    def summary(self, edits: Iterable[Edit]) -> Said:
        """Return the condition RolesReady.

        Args:
            edits: what others have changed, if all pods are ready.
        """
        if problem := self.problem:
            event = problem.reason in _PROBLEM_EVENTS
            return Said("False", problem.reason, problem.message, "Warning" if event else None)
        if self.warning:
            return Said("True", Reason.CODE_DIFFERS, self.warning, "Warning", each_message=True)
        for edit in edits:
            if edit.object.kind == "Pod":
                return Said("True", Reason.LABELS_MISSING, str(edit), "Warning", each_message=True)
        number = sum(item.desired for item in self.statuses)
        return Said("True", Reason.PODS_READY, "", "Normal", f"all {number} pods are ready")


def report_roles(
    run: AgenticRun, observed: Observed, images: WorkerImages, now: datetime
) -> RolesReport:
    """Return what is known of the pods of each role.

    Args:
        run: the run.
        observed: the observed state.
        images: the worker images of this installation, for roles without a pod.
        now: the current time.
    """
    cluster = observed.own_cluster(run)
    in_use = resources.images_in(cluster) if cluster else {}
    ours = [pod for pod in observed.pods if pod.orphan or pod.run_uid == run.metadata.uid]
    progress = observed.own_progress(run)
    pools = (progress.pools if progress else None) or {}
    statuses: list[RoleStatus] = []
    problems: list[Problem] = []
    enough = True
    for role in (Role.DRIVER, *run.spec.roles.workers):
        pods = [pod for pod in ours if pod.role is role]
        status, problem = _report_role(run, role, pods, ours)
        moves = {}
        if pool := pools.get(role):
            moves = {"joining": pool.joining, "leaving": pool.leaving}
        image = in_use.get(role.value) or images.of(run, role)
        statuses.append(status.model_copy(update={**moves, "image": image}))
        if problem:
            problems.append(replace(problem, message=f"{role.value}: {problem.message}"))
        enough &= status.ready >= _needed(run, role)
    cause = None
    if problems:
        # A pod that only waits says less than one with a problem.
        named = (item for item in problems if item.reason is not Reason.PODS_PENDING)
        default = _not_created(run, observed, now) or problems[0]
        first = min(named, key=lambda item: item.on_one_node, default=default)
        cause = _cluster_problem(run, observed) or first
    return RolesReport(statuses, cause, enough, _different_commits(ours) if not problems else "")


def _needed(run: AgenticRun, role: Role) -> int:
    """Return the number of pods of a role without which no attempt begins.

    A deterministic run has one set of processes from its start: it needs all.
    """
    roles = run.spec.roles
    return roles.replicas(role) if run.spec.pipeline.deterministic else roles.min_replicas(role)


def _report_role(
    run: AgenticRun, role: Role, pods: list[Pod], every: list[Pod]
) -> tuple[RoleStatus, Problem | None]:
    """Return the status of a role, and why not all of its pods are ready.

    Args:
        run: the run.
        role: the role.
        pods: its pods.
        every: the pods of all roles.
    """
    roles = run.spec.roles
    desired = roles.replicas(role)
    staying = [pod for pod in pods if not pod.deleting and not pod.orphan]
    ready = sum(pod.ready for pod in staying)
    problem: Problem | None = None
    if ready < desired:
        stuck = next((pod for pod in staying if pod.problem), None)
        leaving = next((pod for pod in pods if pod.deleting), None)
        if stuck and stuck.problem:
            message = f"pod {stuck.name} {stuck.problem.message}"
            image, ready_pods = stuck.problem.image, (pod for pod in every if pod.ready)
            one_node = bool(image) and any(image in pod.images for pod in ready_pods)
            if one_node:
                message = f"{message}; other pods have this image: look at node {stuck.node}"
            problem = Problem(stuck.problem.reason, message, on_one_node=one_node)
        else:
            ends = f"; pod {leaving.name} is being deleted" if leaving else ""
            problem = Problem(Reason.PODS_PENDING, f"{ready} of {desired} pods ready{ends}")
    status = RoleStatus(
        name=role.value,
        desired=desired,
        ready=ready,
        gpus=roles.total_gpus(role),
        message=problem.message[:256] if problem else "",
    )
    return status, problem


def _different_commits(pods: list[Pod]) -> str:
    """Return a warning if a branch has moved while the pods started; else ""."""
    first: dict[str, str] = {}
    for pod in sorted(pods, key=lambda pod: pod.created_at):
        if pod.commit and not pod.orphan:
            first.setdefault(pod.commit, pod.name)
    if len(first) < 2:
        return ""
    found = ", ".join(f"{commit[:12]} ({name})" for commit, name in first.items())
    return f"pods have different commits of spec.code.git: {found}; name a commit as ref"[:1024]


def _cluster_problem(run: AgenticRun, observed: Observed) -> Problem | None:
    """Return the problem that prevents the creation of pods, if there is one.

    This is a missing ConfigMap of the user, a quota or an admission policy.
    """
    if observed.missing_code:
        return Problem(
            Reason.PODS_PENDING,
            f"ConfigMap {observed.missing_code} (spec.code.configMap) does not exist: create it",
        )
    cluster = observed.child("RayCluster", run.metadata.name) or {}
    for condition in cluster.get("status", {}).get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return Problem(
                Reason.PODS_DENIED,
                f"pods cannot be created: {one_line(condition.get('message', ''), 1024)}",
            )
    return None


def _not_created(run: AgenticRun, observed: Observed, now: datetime) -> Problem | None:
    """Return the problem of pods that KubeRay should have created long ago; None if there is none.

    KubeRay creates all pods of a RayCluster at once, and counts pods that are being deleted.
    """
    cluster, existing = observed.own_cluster(run), len(observed.own_pods(run.metadata.uid))
    wanted = 1 + sum(run.spec.roles.replicas(role) for role in run.spec.roles.workers)
    if cluster is None or existing >= wanted:
        return None
    known = run.status.pods
    moments = [cluster["metadata"].get("creationTimestamp"), known.since if known else None]
    missing_since = max((times.parse_time(time) for time in moments if time), default=now)
    if (known and known.ready) or (now - missing_since).total_seconds() < CREATION_SECONDS:
        return None
    return Problem(
        Reason.PODS_NOT_CREATED,
        f"KubeRay has created {existing} of {wanted} pods: its operator may be stopped, or may not "
        f"watch namespace {run.metadata.namespace}",
    )


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
    start = times.parse_time(head.started_at)
    return (
        times.parse_time(pod.started_at) < start and (now - start).total_seconds() < REJOIN_SECONDS
    )


def may_run(pod: Pod, now: datetime) -> bool:
    """Return True if a process of the pod may still run, as far as waiting can tell."""
    return not pod.ended and not is_stuck(pod, now)


def is_stuck(pod: Pod, now: datetime) -> bool:
    """Return True if the pod is long past its grace period."""
    return pod.gone_by is not None and (now - times.parse_time(pod.gone_by)).total_seconds() > (
        STUCK_SECONDS
    )
