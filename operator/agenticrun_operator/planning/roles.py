"""The number of ready pods of each role, and the problem of one that is not ready."""

from __future__ import annotations

from agenticrun_api import ConditionType, Phase, Reason, Role
from agenticrun_api.status import RoleStatus
from agenticrun_operator.observed import Observed, Pod, Problem
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.snapshot import own_progress
from agenticrun_operator.resources import WorkerImages, images_in

_WORTH_AN_EVENT = frozenset(
    {
        Reason.IMAGE_PULL_FAILED,
        Reason.MOUNT_FAILED,
        Reason.UNSCHEDULABLE,
        Reason.CONTAINER_CRASHED,
        Reason.CODE_UNAVAILABLE,
        Reason.PODS_DENIED,
    }
)


def report(draft: Draft, observed: Observed, images: WorkerImages) -> bool:
    """Set `status.roles` and RolesReady. Return True if all pods of all roles are ready."""
    run = draft.run
    cluster = observed.own_cluster(run)
    in_use = images_in(cluster) if cluster else {}
    ours = [pod for pod in observed.pods if pod.orphan or pod.run_uid == run.metadata.uid]
    progress = own_progress(run, observed.progress)
    pools = (progress.pools if progress else None) or {}
    statuses, first = [], None
    for role in (Role.DRIVER, *run.spec.roles.workers):
        pods = [pod for pod in ours if pod.role is role]
        image = in_use.get(role.value) or images.of(run, role)
        status, problem = _role(draft, role, pods, image)
        if pool := pools.get(role):
            moves = {"joining": pool.joining, "leaving": pool.leaving}
            status = status.model_copy(update=moves)
        statuses.append(status)
        if problem and (
            first is None
            or (first.reason is Reason.PODS_PENDING and problem.reason is not Reason.PODS_PENDING)
        ):
            first = Problem(problem.reason, f"{role.value}: {problem.message}")
    draft.set(roles=statuses)
    if first is None:
        if not draft.is_true(ConditionType.ROLES_READY):
            draft.event(
                Reason.PODS_READY, f"all {sum(item.desired for item in statuses)} pods are ready"
            )
        warning = _different_commits(draft, ours)
        draft.condition(ConditionType.ROLES_READY, "True", Reason.PODS_READY, warning)
        if draft.status.phase is Phase.STARTING:
            draft.phase(Phase.STARTING)
        return True
    cause = _cluster_problem(draft, observed) or first
    before = draft.find(ConditionType.ROLES_READY)
    if cause.reason in _WORTH_AN_EVENT and (before is None or before.reason != cause.reason):
        draft.event(cause.reason, cause.message, warning=True)
    draft.condition(ConditionType.ROLES_READY, "False", cause.reason, cause.message)
    if draft.status.phase is Phase.STARTING:
        draft.phase(Phase.STARTING, cause.message)
    return False


def _different_commits(draft: Draft, pods: list[Pod]) -> str:
    """Return a warning, with an event, if a branch has moved while the pods started; else ""."""
    first: dict[str, str] = {}
    for pod in sorted(pods, key=lambda pod: pod.created_at):
        if pod.commit and not pod.orphan:
            first.setdefault(pod.commit, pod.name)
    if len(first) < 2:
        return ""
    found = ", ".join(f"{commit[:12]} ({name})" for commit, name in first.items())
    message = f"pods have different commits of spec.code.git: {found}; name a commit as ref"[:1024]
    before = draft.find(ConditionType.ROLES_READY)
    if before is None or before.message != message:
        draft.event(Reason.CODE_DIFFERS, message, warning=True)
    return message


def _role(
    draft: Draft, role: Role, pods: list[Pod], image: str
) -> tuple[RoleStatus, Problem | None]:
    roles = draft.run.spec.roles
    desired = roles.replicas(role)
    staying = [pod for pod in pods if not pod.deleting and not pod.orphan]
    ready = sum(pod.ready for pod in staying)
    problem: Problem | None = None
    if ready < desired:
        stuck = next((pod for pod in staying if pod.problem), None)
        leaving = next((pod for pod in pods if pod.deleting), None)
        if stuck and stuck.problem:
            problem = Problem(stuck.problem.reason, f"pod {stuck.name} {stuck.problem.message}")
        else:
            told = f"; pod {leaving.name} is being deleted" if leaving else ""
            problem = Problem(Reason.PODS_PENDING, f"{ready} of {desired} pods ready{told}")
    message = problem.message[:256] if problem else ""
    status = RoleStatus(
        name=role.value,
        desired=desired,
        ready=ready,
        gpus=roles.total_gpus(role),
        image=image,
        message=message,
    )
    return status, problem


def _cluster_problem(draft: Draft, observed: Observed) -> Problem | None:
    """Return the problem that prevents the creation of pods, if there is one.

    This is a missing ConfigMap of the user, a quota or an admission policy.
    """
    if observed.missing_code:
        return Problem(
            Reason.PODS_PENDING,
            f"ConfigMap {observed.missing_code} (spec.code.configMap) does not exist: create it",
        )
    cluster = observed.child("RayCluster", draft.run.metadata.name) or {}
    for condition in cluster.get("status", {}).get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return Problem(
                Reason.PODS_DENIED,
                f"pods cannot be created: {' '.join(condition.get('message', '').split())}",
            )
    return None
