"""The objects of a run: the missing ones, obstacles to them, and objects to delete."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from agenticrun_api import AgenticRun, ConditionType, Phase, Reason, Role, names
from agenticrun_api.status import ObstacleStatus, RayClusterStatus
from agenticrun_operator import errors, resources
from agenticrun_operator.observed import Edit
from agenticrun_operator.planning import times
from agenticrun_operator.planning.pods import is_stuck
from agenticrun_operator.planning.result import (
    Delete,
    Result,
    Said,
    Undeleted,
    note,
    text,
    warning,
)
from agenticrun_operator.planning.state import State
from agenticrun_operator.resources import Child, Manifest, workloads

_WAITS_FOR_SECRET = (Reason.CONTAINER_CRASHED, Reason.PODS_PENDING)
TOKENS_SECONDS = 30.0
"""Minimum interval between two creations of the Secret with a run's tokens."""
WAIT_SECONDS = 1.5
"""Seconds between checks of an earlier run's objects: their deletion may send no event that belongs
to the new run."""
MAX_WAIT_SECONDS = 5.0
MAX_RETRY_SECONDS = 30.0
"""Longest time between checks of an obstacle that needs human action."""
STUCK_SECONDS = 300.0
"""Time after which a deletion that is not complete needs human action."""
DELETED_SECONDS = 2.0
"""Time after the request to delete a RayCluster at which to look whether it is being deleted."""


# -- obstacles -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """A reason the run's children cannot be created now."""

    reason: Reason
    message: str
    final: bool = False
    """True if no retry helps, so that the run fails."""
    rebuild: bool = False
    """True if the RayCluster must be deleted first, because its pods hold the obstacle."""

    @property
    def needs_action(self) -> bool:
        """True if waiting does not help."""
        return self.reason is not Reason.WAITING_FOR_PREVIOUS_RUN


_BY_ERROR: dict[type[errors.ClusterError], Reason] = {
    errors.TooLarge: Reason.TOO_LARGE,
    errors.WebhookUnavailable: Reason.WEBHOOK_UNAVAILABLE,
    errors.KubeUnavailable: Reason.APISERVER_UNAVAILABLE,
}
_RETRIED = frozenset({Reason.WEBHOOK_UNAVAILABLE, Reason.APISERVER_UNAVAILABLE})
"""Reasons that may be over at any time: the status is to be true within 10 s."""
MIN_KUBERAY = "1.6"
KUBERAY_MISSING = Obstacle(
    Reason.KUBERAY_MISSING,
    "the Kubernetes cluster does not serve RayClusters (ray.io/v1): "
    f"install KubeRay {MIN_KUBERAY} or newer with its CRDs; the run then continues",
)
KUEUE_MISSING = Obstacle(
    Reason.KUEUE_MISSING,
    f"the Kubernetes cluster does not serve Workloads ({workloads.KUEUE_GROUP}/"
    f"{workloads.KUEUE_VERSION}): an administrator must install Kueue {workloads.MIN_KUEUE} or "
    "newer. Or apply the run without spec.queue",
)
_UNKNOWN_FIELDS = re.compile(
    r'unknown field "(spec\.[^"]+)"'
    r"|\.?(spec\.[\w.\[\]]+): field not declared in schema"
    r"|(spec\.authOptions[\w.]*): (?:Unsupported|Invalid) value"
)
_OF_THE_USER = re.compile(
    r"\.template\.spec\.(tolerations|affinity|nodeSelector|volumes"
    r"|(containers|initContainers)\[\d+\]\.(env|envFrom|volumeMounts))\b"
)


def find_obstacle(state: State) -> Obstacle | None:
    """Return the first obstacle to the run's children, or None.

    An obstacle is an error that the last creation met, a worker image that is not configured,
    KubeRay that is missing, a claim that does not exist, is deleted or gets no volume, or objects
    that have the names of children but belong to another owner or an earlier run. The operator
    takes over only the claim that an earlier run left for the next one.
    """
    run, observed = state.run, state.observed
    if state.creation_error:
        return obstacle_met(run, state.creation_error)
    engine = state.images.missing_engine(run)
    if engine:
        message = (
            f"no worker image with {engine} is configured: "
            f"set the chart's value images.workers.{engine}, or set spec.image"
        )
        return Obstacle(Reason.NO_ENGINE_IMAGE, message)
    if observed.kuberay_missing:
        return KUBERAY_MISSING
    if observed.policy_error and not (state.status.job and state.cluster):
        # What trains already stays. No new pods without their NetworkPolicies.
        return _policies_unavailable(observed.policy_error)
    return (
        _queue_obstacle(state)
        or _deleted_claim(state)
        or _objects_in_the_way(state)
        or _unusable_claim(state)
        or _earlier_pod(state)
    )


def _queue_obstacle(state: State) -> Obstacle | None:
    """Return what a queue lacks for the creation of the run's RayCluster."""
    found, known = state.workload, state.observed.queue
    if state.run.spec.queue is None or state.observed.child("RayCluster", state.name):
        return None
    if known.error:
        missing = isinstance(known.error, errors.NotServed)
        return KUEUE_MISSING if missing else obstacle_met(state.run, known.error)
    if found is None or not workloads.is_admitted(found):
        return None
    if lacking := sorted(workloads.flavors_of(found) - known.flavors.keys()):
        message = f"ResourceFlavor {lacking[0]}, which Kueue has assigned, does not exist"
        return Obstacle(Reason.INADMISSIBLE, message)
    return None


def _earlier_pod(state: State) -> Obstacle | None:
    """Return the obstacle of a pod of an earlier run.

    A started run waited for such pods before; what appears later must not hold it.
    """
    if state.status.job:
        return None
    uid = state.run.metadata.uid
    pod = next((pod for pod in state.observed.pods if pod.run_uid != uid), None)
    if pod is None:
        return None
    message = f"waiting until pod {pod.name} of an earlier run is deleted"
    return _waits(state, message, pod.gone_by, pod.finalizers)


def _objects_in_the_way(state: State) -> Obstacle | None:
    """Return the obstacle of the objects that have names of children and belong to others."""
    foreign: list[str] = []
    # The RayCluster first: who deletes the others before it loses what trains there.
    found = sorted(state.observed.children.items(), key=lambda item: item[0].kind != "RayCluster")
    for child, manifest in found:
        if manifest is None or child == resources.users_claim_of(state.run):
            continue
        if waits := _waits_for(state.run, child, manifest):
            metadata = manifest["metadata"]
            finalizers = metadata.get("finalizers") or ()
            return _waits(state, waits, metadata.get("deletionTimestamp"), finalizers)
        if not resources.is_retained(state.run, manifest) and not resources.is_own(
            state.run, manifest
        ):
            foreign.append(f"{child.kind} {child.name}")
    if not foreign:
        return None
    exist = "exists and does" if len(foreign) == 1 else "exist and do"
    return Obstacle(
        Reason.NAME_CONFLICT,
        f"{', '.join(foreign)} {exist} not belong to this run. Create this run under another name. "
        "Or suspend or end what runs there, delete these objects in this order, and delete their "
        "Secrets",
    )


def _waits_for(run: AgenticRun, child: Child, manifest: Manifest) -> str | None:
    """Return what the run waits for if an object has to go first, or None."""
    shown = f"{child.kind} {child.name}"
    if resources.is_deleting(manifest) and resources.made_by(run, manifest):
        return f"waiting until {shown} is deleted, to create it"
    of_earlier_run = any(
        owner["kind"] == names.KIND
        and owner["name"] == run.metadata.name
        and owner["uid"] != run.metadata.uid
        for owner in manifest["metadata"].get("ownerReferences", ())
    )
    if resources.is_deleting(manifest) or of_earlier_run:
        return f"waiting until {shown} of an earlier run is deleted"
    return None


def _waits(
    state: State, message: str, deleted_at: str | None, finalizers: Collection[str]
) -> Obstacle:
    """Return the obstacle of an object that has to go first.

    Args:
        state: the state.
        message: what the run waits for.
        deleted_at: the time of its deletion; None: it is not being deleted.
        finalizers: what keeps it.
    """
    before, stuck = state.status.obstacle, Reason.DELETION_STUCK
    if deleted_at:
        message += _held(deleted_at, finalizers)
        waited = state.seconds_since(deleted_at)
    elif before and before.reason == stuck:
        waited = STUCK_SECONDS
    else:  # garbage collection is to delete it
        same = before and before.reason == Reason.WAITING_FOR_PREVIOUS_RUN
        waited = state.seconds_since(before.since) if before and same else 0.0
    is_stuck = waited >= STUCK_SECONDS
    return Obstacle(stuck if is_stuck else Reason.WAITING_FOR_PREVIOUS_RUN, message)


def _held(deleted_at: str, finalizers: Collection[str]) -> str:
    """Return what keeps an object that was deleted, as the end of a sentence."""
    keeps = f"; its finalizers keep it: {', '.join(finalizers)}" if finalizers else ""
    return f" (deleted at {deleted_at}{keeps})"


def _unusable_claim(state: State) -> Obstacle | None:
    """Return the obstacle of a claim that not all pods can mount, or that gets no volume."""
    claim = state.observed.child(resources.CLAIM_KIND, resources.claim_name(state.run))
    if claim is None:
        return None
    if why := resources.unsuitable(state.run, claim):
        return Obstacle(Reason.CLAIM_UNSUITABLE, why)
    problems = [pod.problem.message for pod in state.observed.pods if pod.problem]
    if resources.created_claim(state.run) and (
        why := resources.unbound(claim, problems, state.now)
    ):
        return Obstacle(Reason.CLAIM_PENDING, why)
    return None


def _deleted_claim(state: State) -> Obstacle | None:
    """Return the obstacle if the volume claim that the run uses was deleted or never created.

    Kubernetes keeps a deleted claim until no pod uses it, and no new pod can use it. A new claim is
    empty: with checkpoints in the old one, the run would silently begin again at step 0.

    The run waits for the user's own claim, whose access modes decide where its pods go. Its volume
    may outlive it, so that the next claim of that name may have the checkpoints again.
    """
    if not state.claim_lost:
        return None
    name, saved = resources.claim_name(state.run), state.status.checkpoint
    gone = state.observed.child(resources.CLAIM_KIND, name) is None
    if state.keeps_pods or (saved and state.pods and not gone):
        # The pods still mount it: they are the last way to the data.
        mounting = [pod.name for pod in (state.head, *state.pods) if pod]
        saver = next(iter(mounting), "of the run")
        return Obstacle(
            Reason.CHECKPOINTS_LOST,
            f"volume claim {name} was deleted: its checkpoints are lost when the pods of the run "
            f"end. Copy them now (kubectl cp from pod {saver}, folder /checkpoints)",
        )
    if resources.users_claim_of(state.run):
        lacks = "does not exist" if gone else "is being deleted"
        waits = f"waiting for volume claim {name} (checkpoint.volumeClaim), which {lacks}: create"
        if saved is None:
            return Obstacle(Reason.CLAIM_PENDING, f"{waits} it", rebuild=True)
        message = (
            f"{waits} it with the volume that has the checkpoint of step {saved.step}, and the run "
            "resumes. With an empty volume it begins at step 0"
        )
        return Obstacle(Reason.CHECKPOINTS_LOST, message, rebuild=True)
    if saved:
        return Obstacle(
            Reason.CHECKPOINTS_LOST,
            f"volume claim {name} was deleted, and with it the checkpoint of step "
            f"{saved.step}: apply the run again to begin at step 0",
            final=True,
        )
    if gone or state.cluster is None:
        return None
    return Obstacle(
        Reason.WAITING_FOR_PREVIOUS_RUN,
        f"waiting until volume claim {name} is deleted, to create it: it holds no checkpoint",
        rebuild=True,
    )


def _policies_unavailable(error: errors.ClusterError) -> Obstacle:
    """Return the obstacle of NetworkPolicies that the operator cannot make."""
    if isinstance(error, errors.NotServed):
        why = "the Kubernetes cluster does not serve them (networking.k8s.io/v1): its administrator"
        do = "turns them on"
    else:
        why = f"{error}: the administrator of the operator's release"
        do = "runs helm upgrade, which gives it the right"
    return Obstacle(
        Reason.NETWORK_POLICIES_UNAVAILABLE,
        f"no NetworkPolicies for the run: {why} {do}, or sets the chart's value "
        "networkPolicy.enabled to false",
    )


def obstacle_met(run: AgenticRun, error: errors.ClusterError) -> Obstacle:
    """Return the obstacle that an attempt to create the children met.

    What the apiserver rejects as invalid is final, unless KubeRay is too old, or the run has
    trained: the apiserver accepted the same objects then.
    """
    message = str(error)
    if isinstance(error, errors.RightMissing) and '"networkpolicies"' in message:
        return _policies_unavailable(error)
    if isinstance(error, errors.NotServed):
        return KUBERAY_MISSING
    if isinstance(error, errors.NamespaceGone):
        return Obstacle(
            Reason.NAMESPACE_GONE,
            f"nothing can be created in namespace {run.metadata.namespace}, because it is being "
            f"deleted or does not exist: apply the run in another namespace ({message})",
        )
    if not isinstance(error, errors.Refused):
        # The apiserver has accepted the objects of a run that has trained.
        final = isinstance(error, errors.TooLarge) and run.status.job is None
        return Obstacle(_reason_of(error), message, final=final)
    if unknown := _fields_unknown_to_kuberay(run, message):
        return Obstacle(
            Reason.KUBERAY_TOO_OLD,
            f"this version of KubeRay does not know {', '.join(unknown[:3])}: upgrade KubeRay and "
            f"its CRDs to {MIN_KUBERAY} or newer; the run then continues",
        )
    if run.status.job:
        return Obstacle(Reason.DENIED, message)
    return Obstacle(Reason.INVALID_CONFIG, message, final=True)


def _reason_of(error: errors.ClusterError) -> Reason:
    found = (reason for kind, reason in _BY_ERROR.items() if isinstance(error, kind))
    return next(found, Reason.DENIED)


def _fields_unknown_to_kuberay(run: AgenticRun, refusal: str) -> list[str]:
    """Return the fields of ours that a refusal of the RayCluster calls unknown.

    A field that the user wrote in spec.roles is the user's error, and not meant here.
    """
    fields = [next(filter(None, found)) for found in _UNKNOWN_FIELDS.findall(refusal)]
    overlays = str(
        [run.spec.roles.of(role).overlay.spec for role in Role if run.spec.roles.has(role)]
    )
    return [
        field
        for field in fields
        if not _OF_THE_USER.search(field) and f"'{field.rsplit('.', 1)[1]}'" not in overlays
    ]


def report_obstacle(state: State, obstacle: Obstacle) -> Result:
    """Show the obstacle in the status, once as an event, and look again later."""
    before = state.status.obstacle
    same = before is not None and before.reason == obstacle.reason
    since = before.since if before and same else times.format_time(state.now)
    age = state.seconds_since(since) if same else 0.0
    retried = obstacle.reason in _RETRIED or not obstacle.needs_action
    result = Result(
        fields={"obstacle": ObstacleStatus(reason=obstacle.reason.value, since=since)},
        conditions={
            ConditionType.CLUSTER_PROVISIONED: Said(
                "False",
                obstacle.reason,
                obstacle.message,
                event="Warning" if obstacle.needs_action else "Normal",
            )
        },
        look_after=_pause(age, soon=retried),
    )
    if state.status.phase is not Phase.RUNNING:
        waits = Phase.PENDING if state.status.job is None else state.status.phase
        result |= Result(fields={"phase": waits})
    return result | Result(fields={"message": text(obstacle.message)})


def _pause(age: float, *, soon: bool) -> float:
    """Return the seconds until the next try: they grow with the age of the obstacle.

    Args:
        age: seconds since the first failure.
        soon: True if the obstacle may be over at any time.
    """
    return min(max(age / 2, WAIT_SECONDS), MAX_WAIT_SECONDS if soon else MAX_RETRY_SECONDS)


# -- creation --------------------------------------------------------------------------------------


def provision(state: State) -> Result:
    """Create missing children.

    Existing ones stay as they are: no field that may change in a run reaches them, and what others
    changed (an expanded claim) or what a newer operator would write (an image) must not reach
    pods that are training.
    """
    run, children = state.run, state.observed.children
    result = Result(fields={"obstacle": None})
    if _needs_tokens(state):
        result |= Result(tokens=resources.tokens_secret(run, state.key))
    if any(found is None for found in children.values()):
        tokens = resources.tokens_name(run, state.key.id)
        claim = state.observed.child(resources.CLAIM_KIND, resources.claim_name(run))
        placed = None
        if state.workload and state.observed.child("RayCluster", state.name) is None:
            flavors = state.observed.queue.flavors
            placed = workloads.placements(run, state.workload, flavors, claim)
        desired = resources.desired_children(run, state.images, tokens, claim, placed)
        missing = {child for child, found in children.items() if found is None}
        create = tuple(manifest for manifest in desired if Child.of(manifest) in missing)
        result |= Result(create=create)
    if state.status.start_time is None:
        result |= Result(fields={"start_time": times.format_time(state.now)})
        if run.status.job is None:
            result |= _begin(state)
    if state.status.phase is Phase.PENDING:
        result |= Result(fields={"phase": Phase.STARTING, "message": None})
    elif state.status.obstacle and state.status.phase is not Phase.RUNNING:
        result |= Result(fields={"message": None})
    return result | _report_cluster(state)


def _begin(state: State) -> Result:
    """Report what is known of a run that has no attempt yet, and a claim that is used again."""
    run, steps = state.run, state.run.spec.pipeline.max_steps
    storage = resources.storage_of(run)
    result = Result(
        fields={
            "max_steps": steps,
            "progress": f"0/{steps}",
            "volume_claim": resources.checkpoint_claim_name(run),
        },
        conditions={
            ConditionType.COMPLETE: Said("False", Reason.NOT_FINISHED),
            ConditionType.FAILED: Said("False", Reason.NOT_FINISHED),
        },
    )
    for child, manifest in state.observed.children.items():
        if storage is None or manifest is None or not resources.is_retained(run, manifest):
            continue
        if resources.made_by(run, manifest):
            continue
        start = f"resumes: {storage.resume}"
        if storage.resume in ("Auto", "Never"):
            other = "checkpoint.resume: FromPreviousRun continues from their newest one"
            start = f"starts at step 0 ({other})"
        message = (
            f"{child} holds checkpoints of earlier runs of this name; this run has a folder of its "
            f"own there and {start}"
        )
        result |= Result(events=(note(Reason.CLAIM_REUSED, message),))
    return result


def _needs_tokens(state: State) -> bool:
    """Return True if the Secret with the tokens may be missing.

    The operator cannot read it. Pods that need a Secret that was deleted wait for it.
    """
    cluster, sent = state.observed.child("RayCluster", state.name), state.observed.tokens_sent_at
    if cluster is None:
        return sent is None
    waits = any(
        not pod.ready
        and not pod.deleting
        and (pod.problem is None or pod.problem.reason in _WAITS_FOR_SECRET)
        for pod in state.pods
    )
    due = sent is None or state.seconds_since(sent) >= TOKENS_SECONDS
    return waits and due and resources.key_id_of(state.run, cluster) == state.key.id


def _report_cluster(state: State) -> Result:
    name = state.name
    if state.observed.child("RayCluster", name) is None:
        said = Said("False", Reason.CLUSTER_CREATING, f"creating RayCluster {name}")
        return Result(conditions={ConditionType.CLUSTER_PROVISIONED: said}, look_after=5.0)
    said = Said("True", Reason.CLUSTER_CREATED, f"RayCluster {name} exists", event="Normal")
    for edit in state.edits:
        if edit.object.kind == "RayCluster" and (edit.repair or state.scaling_error):
            message = str(replace(edit, by=""))  # the watches do not keep who it was
            if not edit.repair:
                message += f"; the operator cannot put it back: {state.scaling_error}"
            said = Said("True", Reason.CLUSTER_EDITED, message, "Warning", each_message=True)
    return Result(conditions={ConditionType.CLUSTER_PROVISIONED: said})


# -- what others changed ---------------------------------------------------------------------------


def repair(state: State, *, numbers: bool = True) -> Result:
    """Put back what someone else has changed in the RayCluster, and name the client in an event.

    A client that keeps changing it is answered every half minute only. Labels and owner matter as
    long as there is a RayCluster: admission policies and garbage collection go by them.

    Args:
        state: the state.
        numbers: False to leave the numbers of pods as they are: no attempt needs them.
    """
    cluster = state.cluster
    if cluster is None or resources.is_deleting(cluster) or state.scaling_error:
        return Result()
    changes = resources.changes_by_others(state.run, cluster, numbers=numbers)
    if not changes:
        return Result()
    wait = state.wait_to_repeat(state.observed.cluster_changed_at)
    if wait > 0:
        return Result(look_after=wait)
    edit = Edit(Child("RayCluster", state.name), changes, resources.editor_of(cluster))
    return Result(
        cluster=resources.repaired(state.run, cluster, numbers=numbers),
        events=(warning(Reason.CLUSTER_REPAIRED, f"{edit}. The operator puts it back"),),
    )


def correct_policies(state: State) -> Result:
    """Make the NetworkPolicies as spec.network says, and delete the ones that it drops.

    `provision` creates missing ones.
    """
    run, namespace = state.run, state.images.operator_namespace
    found = [
        manifest
        for child, manifest in state.observed.children.items()
        if child.kind == resources.POLICY_KIND
        and manifest is not None
        and resources.is_own(run, manifest)
        and not resources.is_deleting(manifest)
    ]
    policies = resources.network_policies(run, namespace)
    wanted = {Child.of(policy) for policy in policies}
    result = Result()
    for policy in found:
        if (child := Child.of(policy)) not in wanted:
            result |= ask_to_delete(state, Delete(child, policy["metadata"]["uid"]))
    corrected = tuple(resources.corrected_policies(policies, found))
    if not corrected:
        return result
    wait = state.wait_to_repeat(state.observed.policies_changed_at)
    if wait > 0:
        return result | Result(look_after=wait)
    changed = ", ".join(policy["metadata"]["name"] for policy in corrected)
    message = f"NetworkPolicy {changed} was not as spec.network says: the operator replaces it"
    return result | Result(
        update=corrected, events=(note(Reason.NETWORK_POLICIES_CHANGED, message),)
    )


# -- deletion --------------------------------------------------------------------------------------


def ask_to_delete(state: State, delete: Delete) -> Result:
    """Ask the apiserver to delete an object, and report if it has not done so.

    A request without effect is repeated after a while; one that failed after a wait that grows.
    """
    trouble = state.observed.deletion_troubles.get(delete.uid)
    if trouble is None:
        wait = state.wait_to_repeat(state.observed.deletions.get(delete.uid))
        return Result(look_after=wait) if wait > 0 else Result(delete=(delete,))
    reason, child = _reason_of(trouble.error), delete.child
    age = (trouble.asked_at - trouble.since).total_seconds()
    pause = _pause(age, soon=reason in _RETRIED)
    wait = pause - state.seconds_since(trouble.asked_at)
    # A request that is under way is not sent again: this reads its answer.
    due = wait <= 0 or isinstance(trouble.error, errors.Unanswered)
    message = f"{child.kind} {child.name} cannot be deleted: {trouble.error}"
    return Result(
        delete=(delete,) if due else (),
        undeleted=(Undeleted(child, reason, message),),
        look_after=pause if due else wait,
    )


def report_undeleted(state: State, result: Result) -> Result:
    """Show the first object that stays although it has to go.

    Args:
        state: the state.
        result: all decisions.
    """
    if not result.undeleted:
        return Result()
    # What owns the pods comes before the pods.
    first = min(result.undeleted, key=lambda item: item.child.kind == "Pod")
    kinds, (reason, message) = ConditionType, (first.reason, first.message)
    about = kinds.ROLES_READY if first.child.kind == "Pod" else kinds.CLUSTER_PROVISIONED
    conditions = {about: Said("False", reason, message, event="Warning")}
    stops = result.conditions.get(kinds.SUSPENDED)
    if stops and stops.status == "Unknown" and not state.has_attempt:
        conditions[kinds.SUSPENDED] = Said("Unknown", reason, message)
    phase = result.fields.get("phase", state.status.phase)
    trains = phase is Phase.RUNNING or phase.finished
    return Result(fields={} if trains else {"message": text(message)}, conditions=conditions)


def record_cluster(state: State, result: Result) -> Result:
    """Remember which RayCluster is the run's own, and the replicas that it was given.

    Both are in the RayCluster, too, but there others can change them.
    """
    cluster = result.cluster or state.cluster
    if cluster is None or state.status.phase.finished:
        return Result()
    replicas = resources.replicas_in(state.run, cluster)
    uid, known = cluster["metadata"]["uid"], state.status.ray_cluster
    if known is None or (known.name, known.uid, known.replicas) != (state.name, uid, replicas):
        known = RayClusterStatus(name=state.name, uid=uid, replicas=replicas)
    return Result(fields={"ray_cluster": known})


def delete_cluster(state: State, why: str = "") -> Result:
    """Delete the run's own RayCluster.

    Args:
        state: the state.
        why: text of a Warning event with the first request; empty: no event.
    """
    cluster = state.cluster
    if cluster is None:
        return Result()
    child, metadata = Child("RayCluster", state.name), cluster["metadata"]
    if resources.is_deleting(cluster):
        finalizers = metadata.get("finalizers") or ()
        return _still_there(state, child, metadata["deletionTimestamp"], finalizers)
    uid = metadata["uid"]
    is_run_deleted = state.run.metadata.deletion_timestamp is not None
    # A deleted run that a finalizer holds is gone only when its pods are.
    delete = Delete(child, uid, foreground=is_run_deleted)
    asked = ask_to_delete(state, delete)
    if not asked.delete:
        return asked
    first = (warning(Reason.CLUSTER_LOST, why),) if why and not _was_asked(state, uid) else ()
    return asked | Result(events=first, look_after=DELETED_SECONDS)


def remove_budget(state: State) -> Result:
    """Delete the PodDisruptionBudget of a run that has ended: its pods may be evicted.

    Unless they are the last way to its checkpoints.
    """
    child = resources.budget_of(state.run)
    found = state.observed.children.get(child) if child else None
    if (
        child is None
        or found is None
        or resources.is_deleting(found)
        or not resources.is_own(state.run, found)
    ):
        return Result()
    if state.keeps_pods:
        return Result()
    return ask_to_delete(state, Delete(child, found["metadata"]["uid"]))


def remove_ownerless(state: State) -> Result:
    """Delete pods that a deleted RayCluster has left without an owner: nothing else does."""
    result = Result()
    for pod in state.observed.pods:
        if not pod.deleting and pod.orphan and pod.ownerless:
            result |= ask_to_delete(state, Delete(Child("Pod", pod.name), pod.uid))
    return result


def remove_stuck(state: State) -> Result:
    """Remove by force the run's pods that are long past their grace period."""
    result = Result()
    for pod in state.observed.pods:
        if pod.gone_by is None or (pod.ended and not pod.finalizers):
            continue
        result |= Result(look_after=30.0)
        mine = pod.orphan or pod.run_uid == state.run.metadata.uid
        if not mine or not is_stuck(pod, state.now):
            continue
        child = Child("Pod", pod.name)
        if pod.finalizers and (pod.ended or _was_asked(state, pod.uid)):  # force does not help
            result |= _still_there(state, child, pod.gone_by, pod.finalizers)
            continue
        result |= ask_to_delete(state, Delete(child, pod.uid, force=True))
        if not _was_asked(state, pod.uid):
            message = (
                f"pod {pod.name} is removed: node {pod.node} has not ended it "
                f"{times.format_span(60)} after its grace period"
            )
            result |= Result(events=(warning(Reason.NODE_LOST, message),))
    return result


def _still_there(
    state: State, child: Child, deleted_at: str, finalizers: Collection[str]
) -> Result:
    """Report an object that was deleted minutes ago, and is still there."""
    left = STUCK_SECONDS - state.seconds_since(deleted_at)
    if left > 0:
        return Result(look_after=left)
    message = f"{child.kind} {child.name} is still there{_held(deleted_at, finalizers)}"
    return Result(undeleted=(Undeleted(child, Reason.DELETION_STUCK, message),), look_after=30.0)


def _was_asked(state: State, uid: str) -> bool:
    """Return True if the operator has asked for the deletion of an object before."""
    return uid in state.observed.deletions or uid in state.observed.deletion_troubles
