"""Other replicas than the RayCluster was made for: who follows them, and when pods come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agenticrun_api import ConditionType, PoolStatus, Reason, Role
from agenticrun_api.status import StopCause
from agenticrun_operator import errors, resources
from agenticrun_operator.planning import queueing
from agenticrun_operator.planning.result import Result, Said, note
from agenticrun_operator.planning.state import State
from agenticrun_operator.resources import workloads


@dataclass(frozen=True)
class Rescaling:
    """The consequence of different replicas in the spec and in the RayCluster."""

    changes: dict[Role, tuple[int, int]]
    """Replicas that the RayCluster was made for and those in the spec, by role."""
    restart: str = ""
    """Why the driver has to stop and continue with other pods; empty: it need not."""
    kept: str = ""
    """Why the run keeps its pods although it would have to restart; empty: it need not."""


def find_rescaling(state: State) -> Rescaling:
    """Compare the replicas in the spec with the numbers that the RayCluster was made for.

    Other replicas take effect while the driver runs (`scale`) if it can follow them.
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
    begun, text = state.status.stopping, _describe(changes)
    quota = queueing.beyond_quota(state, changes)
    if begun and begun.cause is StopCause.RESCALE:
        return Rescaling(changes, restart=f"{text} ({quota})" if quota else text)
    kept = "but the run keeps its pods"
    error = state.scaling_error
    if error is not None and not isinstance(error, errors.RightMissing):
        # What denies or refuses this RayCluster would do so with a new one, too.
        return Rescaling(changes, kept=f"{text}, {kept}: {error}")
    why: str | None = str(error or "") or quota
    why = why or _why_driver_cannot_follow(state, changes)
    if why is None:
        return Rescaling(changes)
    text = f"{text} ({why})"
    # A restart would cost a run that trains what it has learnt.
    if state.has_attempt and resources.storage_of(run) is None:
        return Rescaling(changes, kept=f"{text}, {kept}: it saves no checkpoints")
    if state.has_attempt and not state.status.step:
        no_step = "it has made no step yet that could be saved"
        return Rescaling(changes, kept=f"{text}, {kept}: {no_step}")
    return Rescaling(changes, restart=text)


def _describe(changes: dict[Role, tuple[int, int]]) -> str:
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


def scale(state: State, rescaling: Rescaling) -> Result:
    """Change the RayCluster where it has to get more pods, or may lose some.

    The driver follows the numbers in its settings (`LiveConfig.replicas`) and reports what it has
    (`Progress.pools`). The RayCluster gets more pods at once. It loses pods when the driver has
    emptied as many: before that, their engines and env workers would be lost with them, which the
    driver survives, but which costs time. All this is decided from the spec, the RayCluster and the
    newest snapshot, so that it continues after a restart of the operator or of the driver.
    """
    said = Said("False", Reason.RESUMED, optional=True)
    if kept := rescaling.kept:
        said = Said("False", Reason.NOT_RESCALED, kept, event="Normal", each_message=True)
    result = Result(conditions={ConditionType.SUSPENDED: said})
    cluster, progress = state.cluster, state.progress
    if cluster is None or resources.is_deleting(cluster) or progress is None or state.scaling_error:
        return result
    pools = progress.pools or {}
    due = {
        role: (made, wanted)
        for role, (made, wanted) in rescaling.changes.items()
        if (pool := pools.get(role)) and not pool.fixed
        if (wanted > made and not queueing.beyond_quota(state, {role: (made, wanted)}))
        # While one starts, its pod seems to be vacant.
        or (pool.replicas == wanted < made and not (pool.leaving or pool.joining))
    }
    if not due:
        return result
    surplus = [
        name
        for role, (_, wanted) in due.items()
        for name in _surplus(state, role, wanted, pools[role])
    ]
    removed = f"; these pods are removed: {', '.join(surplus)}" if surplus else ""
    message = f"{_describe(due)}, and the run continues{removed}"
    numbers = {role: wanted for role, (_, wanted) in due.items()}
    return result | Result(
        cluster=resources.rescaled(cluster, numbers, surplus),
        events=(note(Reason.SCALED, message),),
    )


def _surplus(state: State, role: Role, wanted: int, pool: PoolStatus) -> list[str]:
    """Return the pods of a role to remove: first the pods that the driver has emptied."""
    pods = [pod for pod in state.pods if pod.role is role and not pod.deleting]
    newest = sorted(pods, key=lambda pod: (pod.created_at, pod.name), reverse=True)
    emptied = sorted(newest, key=lambda pod: (pod.name not in pool.vacant, pod.ready))
    return [pod.name for pod in emptied[: max(0, len(pods) - wanted)]]
