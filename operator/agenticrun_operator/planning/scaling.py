"""Scaling: other replicas of inference or env take effect while the run trains.

The driver follows the numbers in its settings (`LiveConfig.replicas`) and reports what it has
(`Progress.pools`). The RayCluster gets more pods at once. It loses pods when the driver has emptied
as many: before that, their engines and env workers would be lost with them, which the driver
survives, but which costs time. All this is decided from the spec, the RayCluster and the newest
snapshot, so that it goes on after a restart of the operator or of the driver.

Where the driver cannot do that, it is stopped, and goes on with other pods: see `suspension`.
"""

from __future__ import annotations

from agenticrun_api import Activity, AgenticRun, PoolStatus, Reason, Role
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.attempts import has_attempt
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.snapshot import own_progress
from agenticrun_operator.resources import Manifest, is_deleting, replicas_in, rescaled


def changed_replicas(run: AgenticRun, cluster: Manifest) -> dict[Role, tuple[int, int]]:
    """Return the replicas that the RayCluster was made for and those in the spec, if they differ.

    By role.
    """
    made = replicas_in(cluster)
    return {
        Role(name): (made[name], wanted)
        for name, wanted in run.spec.roles.elastic.items()
        if made.get(name, wanted) != wanted
    }


def describe(changes: dict[Role, tuple[int, int]]) -> str:
    """Return the changes as a clause."""
    return " and ".join(
        f"roles.{role.value}.replicas changed from {made} to {wanted}"
        for role, (made, wanted) in changes.items()
    )


def why_not(draft: Draft, observed: Observed, roles: list[Role]) -> str | None:
    """Return why replicas of these roles cannot change while the driver runs; None if they can.

    None also until a driver that starts or does not answer has told it.
    """
    if not has_attempt(draft):
        return "no driver runs"
    progress = own_progress(draft.run, observed.progress)
    if progress is None or progress.activity is Activity.STARTING or progress.final:
        return None
    if progress.pools is None:
        return "its driver cannot change them while it runs"
    found = [progress.pools.get(role) for role in roles]
    return next((pool.fixed for pool in found if pool and pool.fixed), None)


def scale(draft: Draft, observed: Observed) -> None:
    """Change the RayCluster where it has to get more pods, or may lose some."""
    cluster = observed.own_cluster(draft.run)
    progress = own_progress(draft.run, observed.progress)
    if cluster is None or is_deleting(cluster) or progress is None or not has_attempt(draft):
        return
    due = {
        role: (made, wanted)
        for role, (made, wanted) in changed_replicas(draft.run, cluster).items()
        if (pool := (progress.pools or {}).get(role)) and not pool.fixed
        # While one starts, its pod seems to be vacant.
        if wanted > made or (pool.replicas == wanted and not (pool.leaving or pool.joining))
    }
    if not due:
        return
    surplus = [
        pod
        for role, (_, wanted) in due.items()
        for pod in _surplus(draft, observed, role, wanted, (progress.pools or {})[role])
    ]
    draft.cluster = rescaled(cluster, {role: wanted for role, (_, wanted) in due.items()}, surplus)
    removed = f"; these pods are removed: {', '.join(surplus)}" if surplus else ""
    draft.event(Reason.SCALED, f"{describe(due)}, and the run goes on{removed}")


def _surplus(
    draft: Draft, observed: Observed, role: Role, wanted: int, pool: PoolStatus
) -> list[str]:
    """Return the pods of a role to remove: those that the driver has emptied, then the newest."""
    pods = [
        pod
        for pod in observed.own_pods(draft.run.metadata.uid)
        if pod.role is role and not pod.deleting
    ]
    newest = sorted(pods, key=lambda pod: (pod.created_at, pod.name), reverse=True)
    emptied = sorted(newest, key=lambda pod: (pod.name not in pool.vacant, pod.ready))
    return [pod.name for pod in emptied[: max(0, len(pods) - wanted)]]
