"""Runs that wait in a queue of Kueue: asked for, admitted, evicted, given back.

A run with a queue has pods only while Kueue admits its Workload (`why_not_admitted`): one that
is not admitted is stopped, if it trains, and waits without pods. The Workload is made when nothing
is in the way of the run but quota, and its quota is given back only when no pod of the run is left.
An eviction keeps the Workload, and so the place in the queue. A run that is suspended, or that has
given back pods which could not start, leaves the queue: it gets a new place when it comes back.

Kueue may admit a run with fewer elastic pods than it asks for (`as_admitted`), and a run
that gets smaller while it trains gives the quota of these pods back when they are gone.
"""

from __future__ import annotations

from collections import Counter

from agenticrun_api import AgenticRun, ConditionType, Phase, Reason, Role
from agenticrun_api.status import StopCause
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import children, times
from agenticrun_operator.planning.children import Obstacle
from agenticrun_operator.planning.result import Delete, Result, Said, text
from agenticrun_operator.planning.state import State
from agenticrun_operator.resources import CLAIM_KIND, Child, Manifest, workloads

ANSWER_SECONDS = 30.0
"""Time in which Kueue answers a new Workload. After it, its controller may be stopped."""
_NEEDS_A_USER = frozenset(
    {"ExceedsMaxQuota", "Inadmissible", "Misconfigured", "NoMatchingFlavor", "Suspended"}
)
"""Reasons of Kueue for which no run that ends makes room."""
_NEVER_FITS = "maximum capacity"
"""Words of Kueue about a request that is larger than the quota of the ClusterQueue."""


def as_admitted(run: AgenticRun, observed: Observed) -> AgenticRun:
    """Return the run with no more pods than its queue has admitted.

    A run that asks for more pods than its Workload does is returned as it is: it goes through the
    queue again. While nothing is known of the queue, no pods are added.
    """
    if run.spec.queue is None:
        return run
    found, cluster = observed.workload(run), observed.own_cluster(run)
    asked = workloads.pod_counts(found) if found else {}
    admitted = workloads.admitted_pods(found) if found else {}
    if not admitted and cluster:
        asked, admitted = {}, resources.replicas_in(run, cluster)
    fewer = {
        role: admitted[role]
        for role, wanted in run.spec.roles.elastic.items()
        if admitted.get(role, wanted) < wanted <= asked.get(role, wanted)
    }
    return run.with_replicas(fewer) if fewer else run


def why_not_admitted(state: State) -> str | None:
    """Return why the run may have no pods now, if it waits in a queue; None: it may.

    While nothing is known of the queue, pods that exist stay, and no others are made. A run that
    has given its pods back has left the queue until it tries again.
    """
    queue, found = state.run.spec.queue, state.workload
    if queue is None or state.retry_at:
        return None
    if state.observed.queue.error and (state.cluster or state.has_attempt):
        return None
    if found is None or workloads.is_finished(found) or resources.is_deleting(found):
        return f"the run has no place in queue {queue.name}"
    if not workloads.is_active(found):
        return f"Workload {workloads.name_of(state.run)} is deactivated"
    if workloads.is_evicted(found) and (state.has_attempt or workloads.holds_quota(found)):
        evicted = workloads.condition_of(found, "Evicted")
        return f"Kueue has evicted the run ({evicted.get('reason')}): {evicted.get('message')}"
    if not workloads.is_admitted(found):
        return f"Kueue has not admitted the run in queue {queue.name}"
    if state.cluster or _is_covered(state, found):
        return None
    return f"the run asks queue {queue.name} for more pods"


def _is_covered(state: State, workload: Manifest) -> bool:
    """Return True if a Workload asks for all pods that the spec has now."""
    asked = workloads.pod_counts(workload)
    return all(asked.get(role, 0) >= number for role, number in state.wanted_pods.items())


def beyond_quota(state: State, changes: dict[Role, tuple[int, int]]) -> str:
    """Return which new replicas a queue has to admit first; empty: none."""
    queue, found = state.run.spec.queue, state.workload
    if queue is None or found is None:
        return ""
    admitted = workloads.admitted_pods(found)
    for role, (_, wanted) in changes.items():
        if wanted > admitted.get(role.value, 0):
            return f"queue {queue.name} has admitted {admitted.get(role.value, 0)}"
    return ""


def grace_seconds(state: State) -> int:
    """Return the time from an eviction until the pods are deleted, in seconds."""
    queue = state.run.spec.queue
    return queue.preemption.grace_seconds if queue else 0


def find_obstacle(state: State) -> Obstacle | None:
    """Return what keeps a run without a place in its queue from getting one, or None."""
    queue, error = state.run.spec.queue, state.creation_error
    if isinstance(error, errors.NotServed):
        return children.KUEUE_MISSING
    if state.workload and not state.observed.queue.error:
        return None
    if obstacle := children.find_obstacle(state):
        return obstacle
    name = queue.priority_class if queue else None
    if name and state.observed.queue.priority is None:
        message = f"WorkloadPriorityClass {name} does not exist: an administrator must create it"
        return Obstacle(Reason.INADMISSIBLE, message)
    return None


def wait(state: State, obstacle: Obstacle | None, way_on: str) -> Result:
    """Wait in the queue. The run has no pods.

    Args:
        state: the state.
        obstacle: what keeps the run out of its queue.
        way_on: from where the run continues, as a predicate.
    """
    if obstacle:
        result = children.report_obstacle(state, obstacle)
        phase = Phase.QUEUED if state.status.job else Phase.PENDING
        said = Said("True", obstacle.reason, obstacle.message)
        return result | Result(fields={"phase": phase}, conditions={ConditionType.QUEUED: said})
    found = state.workload
    if found is None:
        return _ask(state) | _report(state, Reason.QUEUED, "Kueue is asked for quota", way_on)
    if resources.is_deleting(found):
        why = f"waiting until Workload {workloads.name_of(state.run)} is deleted"
        return _report(state, Reason.QUEUED, why, way_on)
    if workloads.is_finished(found) or _is_outdated(state, found):
        why = f"a new Workload takes the place of {workloads.name_of(state.run)}"
        return leave(state) | _report(state, Reason.QUEUED, why, way_on)
    gives_back = Result()
    if workloads.is_evicted(found) and workloads.holds_quota(found) and not state.holds_pods:
        gives_back = _change(state, workloads.released(found, times.format_time(state.now)))
    return gives_back | _report(state, *_words(state, found), way_on)


def _is_outdated(state: State, found: Manifest) -> bool:
    """Return True if a Workload does not ask for the pods, or the fewest pods, of the spec.

    One that holds quota for more pods than these is kept.
    """
    if workloads.holds_quota(found) and not workloads.is_evicted(found):
        return not _is_covered(state, found)
    wanted = state.wanted_pods
    fewest = wanted | state.applied.spec.roles.fewest_in_a_queue
    return workloads.pod_counts(found) != wanted or workloads.fewest_pods(found) != fewest


def _ask(state: State) -> Result:
    """Create the Workload."""
    run, priority = state.run, state.observed.queue.priority
    claim = state.observed.child(CLAIM_KIND, resources.claim_name(run))
    value = int(priority.get("value", 0)) if priority else None
    return Result(create=(workloads.build(run, state.images, value, claim),), look_after=2.0)


def _report(state: State, reason: Reason, words: str, way_on: str) -> Result:
    """Show why the run waits, in the words of Kueue, and at which position if Kueue says so."""
    assert state.run.spec.queue is not None
    position = state.observed.queue.position if reason is Reason.QUEUED else None
    place = f", position {position}" if position else ""
    message = f"queue {state.run.spec.queue.name}{place}: {words}"
    if trouble := state.observed.workload_trouble:
        message = f"{message}; the Workload cannot be changed: {trouble[0]}"
    if state.status.job:
        message = f"{message}; once admitted, the run {way_on}"
    if reason is Reason.DEACTIVATED:
        said = Said("True", reason, message, event="Warning")
        shown = {"phase": Phase.SUSPENDED, "message": text(message)}
        conditions = {ConditionType.SUSPENDED: said}
        return not_queued(reason, words) | Result(fields=shown, conditions=conditions)
    waits = Said("True", reason, message, "Normal" if reason is Reason.QUEUED else "Warning")
    gone = Said("False", Reason.QUEUED, "", optional=True)
    return Result(
        fields={"phase": Phase.QUEUED, "message": text(message)},
        conditions={ConditionType.QUEUED: waits, ConditionType.SUSPENDED: gone},
    )


def _words(state: State, found: Manifest) -> tuple[Reason, str]:
    """Return why a Workload is not admitted: a reason, and what Kueue says."""
    name = workloads.name_of(state.run)
    if not workloads.is_active(found):
        return (
            Reason.DEACTIVATED,
            f"Workload {name} is deactivated: an administrator must set its spec.active to true",
        )
    if workloads.is_evicted(found) and workloads.holds_quota(found):
        return Reason.QUEUED, str(workloads.condition_of(found, "Evicted").get("message", ""))
    reserved = workloads.condition_of(found, "QuotaReserved")
    if not reserved:
        waited = state.seconds_since(found["metadata"].get("creationTimestamp"))
        stopped = "; its controller may be stopped" if waited > ANSWER_SECONDS else ""
        return Reason.QUEUED, f"Kueue has not answered Workload {name} yet{stopped}"
    if workloads.holds_quota(found):
        checks = found.get("status", {}).get("admissionChecks") or ()
        open_ones = [
            f"{check['name']} is {check['state']} ({check.get('message', '')})"
            for check in checks
            if check["state"] != "Ready"
        ]
        awaited = f"; admission check {open_ones[0]}" if open_ones else ""
        return Reason.QUEUED, f"{reserved.get('message', '')}{awaited}"
    message = reserved.get("message", "")
    if reserved.get("reason") in _NEEDS_A_USER or _NEVER_FITS in message:
        move = "make the run smaller, choose another queue, or ask its administrator"
        return Reason.INADMISSIBLE, f"{message} ({move})"
    return Reason.QUEUED, message


def admitted_by(state: State) -> str:
    """Return who has admitted a run that has waited in a queue; empty if it has not waited."""
    found, stopped = state.workload, state.status.stopping
    if found is None or stopped is None or stopped.cause is not StopCause.QUEUE:
        return ""
    admission = found.get("status", {}).get("admission") or {}
    asked, admitted = workloads.pod_counts(found), workloads.admitted_pods(found)
    fewer = [
        f"{admitted[role]} of {number} {role} pods"
        for role, number in asked.items()
        if admitted.get(role, number) < number
    ]
    given = f" with {' and '.join(fewer)}" if fewer else ""
    return f"admitted by ClusterQueue {admission.get('clusterQueue', '')}{given}"


def not_queued(reason: Reason, message: str) -> Result:
    """Report that a run with a queue does not wait for Kueue."""
    said = Said("False", reason, message, optional=True)
    return Result(conditions={ConditionType.QUEUED: said})


def report_pods(state: State) -> Result:
    """Report to Kueue once that the run has the pods to train, and that it needs fewer of them."""
    found = state.workload
    if found is None or not workloads.is_admitted(found):
        return Result()
    changed: Manifest | None = None
    # A run that trains with a part of its elastic pods must not be evicted for the others.
    if state.has_enough_pods:
        changed = workloads.with_ready_pods(found, times.format_time(state.now))
    if numbers := _smaller_roles(state, found):
        changed = workloads.with_fewer_pods(changed or found, numbers)
    return _change(state, changed) if changed else Result()


def _smaller_roles(state: State, found: Manifest) -> dict[str, int]:
    """Return the numbers of pods of the roles that are smaller than what Kueue has admitted.

    A pod that is being deleted still counts, and so do the pods that someone else has asked for.
    """
    cluster = state.cluster
    if cluster is None or resources.is_deleting(cluster):
        return {}
    if resources.changes_by_others(state.run, cluster):
        return {}
    made, wanted = resources.replicas_in(state.run, cluster), state.run.spec.roles.elastic
    uid, admitted = state.run.metadata.uid, workloads.admitted_pods(found)
    existing = Counter(pod.role.value for pod in state.observed.pods if pod.run_uid == uid)
    numbers = {role: max(number, wanted[role]) for role, number in made.items()}
    return {
        role: number
        for role, number in numbers.items()
        if existing[role] <= number < admitted.get(role, number)
    }


def leave(state: State) -> Result:
    """Delete the Workload of a run that has no pods, and its place in the queue with it."""
    found = state.workload
    if found is None or resources.is_deleting(found) or state.holds_pods:
        return Result()
    child = Child(workloads.WORKLOAD_KIND, workloads.name_of(state.run))
    return children.ask_to_delete(state, Delete(child, found["metadata"]["uid"]))


def finish(state: State) -> Result:
    """Report the end of the run to Kueue when no pod of it is left."""
    found = state.workload
    if found is None or workloads.is_finished(found) or resources.is_deleting(found):
        return Result()
    if state.holds_pods:
        # No event may come after the last pod, and the Workload would hold its quota for ever.
        return Result(look_after=5.0)
    succeeded = state.status.phase is Phase.SUCCEEDED
    message = state.status.message or state.status.phase.value
    now = times.format_time(state.now)
    return _change(state, workloads.finished(found, now, succeeded=succeeded, message=message))


def _change(state: State, changed: Manifest) -> Result:
    """Store the Workload with other conditions, unless the last change failed a moment ago.

    A change that is under way is not sent again: this reads its answer.
    """
    trouble = state.observed.workload_trouble
    failed = trouble is not None and not isinstance(trouble[0], errors.Unanswered)
    wait = state.wait_to_repeat(trouble[1]) if trouble and failed else 0.0
    return Result(look_after=wait) if wait > 0 else Result(workload=changed, look_after=2.0)
