"""Obstacles: what prevents the run's children from being created, seen before or while trying."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from agenticrun_api import AgenticRun, Condition, ConditionType, Phase, Reason, Role
from agenticrun_api.names import KIND
from agenticrun_operator.errors import (
    ClusterError,
    KubeUnavailable,
    NamespaceGone,
    NotServed,
    Refused,
    TooLarge,
    WebhookUnavailable,
)
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.times import parse_time
from agenticrun_operator.resources import (
    CLAIM_KIND,
    Child,
    Manifest,
    WorkerImages,
    claim_name,
    controller_uid,
    is_deleting,
    is_retained,
    made_by,
    unbound,
    unsuitable,
)

WAIT_SECONDS = 1.5
"""Seconds between checks of an earlier run's objects: their deletion may send no event that belongs
to the new run."""
MAX_WAIT_SECONDS = 5.0
MAX_RETRY_SECONDS = 30.0
"""Longest time between checks of an obstacle that a person must remove."""


@dataclass(frozen=True)
class Obstacle:
    """A reason the run's children cannot be created now."""

    reason: Reason
    message: str
    final: bool = False
    """True if no retry helps, so that the run fails."""
    rebuild: bool = False
    """True if the RayCluster must be deleted first, because its pods hold what is in the way."""

    @property
    def needs_people(self) -> bool:
        """True if waiting does not help and a person must act."""
        return self.reason is not Reason.WAITING_FOR_PREVIOUS_RUN


_BY_ERROR: dict[type[ClusterError], Reason] = {
    TooLarge: Reason.TOO_LARGE,
    WebhookUnavailable: Reason.WEBHOOK_UNAVAILABLE,
    KubeUnavailable: Reason.APISERVER_UNAVAILABLE,
}
_RETRIED = frozenset({Reason.WEBHOOK_UNAVAILABLE, Reason.APISERVER_UNAVAILABLE})
"""Reasons that may be over at any time: the status is to be true within 10 s."""
MIN_KUBERAY = "1.6"
KUBERAY_MISSING = Obstacle(
    Reason.KUBERAY_MISSING,
    "the Kubernetes cluster does not serve RayClusters (ray.io/v1): "
    f"install KubeRay {MIN_KUBERAY} or newer with its CRDs; the run goes on by itself then",
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


def find_obstacle(
    run: AgenticRun, observed: Observed, images: WorkerImages, now: datetime
) -> Obstacle | None:
    """Return the first obstacle that can be seen before anything is created, or None.

    An obstacle is a worker image that is not configured, KubeRay that is missing, a claim that gets
    no volume, or an object that has the name of a child but belongs to another owner or an earlier
    run. The operator takes over only the claim that an earlier run left for the next one.
    """
    engine = images.missing_engine(run)
    if engine:
        message = (
            f"no worker image with {engine} is configured: "
            f"set the chart's value images.workers.{engine}, or set spec.image"
        )
        return Obstacle(Reason.NO_ENGINE_IMAGE, message)
    if observed.kuberay_missing:
        return KUBERAY_MISSING
    if deleted := _deleted_claim(run, observed):
        return deleted
    for child, manifest in sorted(observed.children.items()):
        if manifest is None:
            continue
        found = _object_in_the_way(run, child, manifest)
        if found is None and child.kind == CLAIM_KIND:
            found = _in_claim(run, manifest, observed, now)
        if found:
            return found
    for pod in observed.pods:
        # A started run waited for such pods before; what appears later must not hold it.
        if pod.run_uid != run.metadata.uid and run.status.job is None:
            return Obstacle(
                Reason.WAITING_FOR_PREVIOUS_RUN,
                f"waiting until pod {pod.name} of an earlier run is deleted",
            )
    return None


def _object_in_the_way(run: AgenticRun, child: Child, manifest: Manifest) -> Obstacle | None:
    shown = f"{child.kind} {child.name}"
    if is_deleting(manifest) and made_by(run, manifest):
        return Obstacle(
            Reason.WAITING_FOR_PREVIOUS_RUN, f"waiting until {shown} is deleted, to create it"
        )
    if is_deleting(manifest) or _of_earlier_run(run, manifest):
        return Obstacle(
            Reason.WAITING_FOR_PREVIOUS_RUN,
            f"waiting until {shown} of an earlier run is deleted",
        )
    if not is_retained(run, manifest) and controller_uid(manifest) != run.metadata.uid:
        return Obstacle(
            Reason.NAME_CONFLICT,
            f"{shown} exists and does not belong to this run: "
            "delete it, or create the run under another name",
        )
    return None


def _in_claim(
    run: AgenticRun, manifest: Manifest, observed: Observed, now: datetime
) -> Obstacle | None:
    if why := unsuitable(run, manifest):
        return Obstacle(Reason.CLAIM_UNSUITABLE, why)
    problems = [pod.problem.message for pod in observed.pods if pod.problem]
    if why := unbound(manifest, problems, now):
        return Obstacle(Reason.CLAIM_PENDING, why)
    return None


def obstacle_met(run: AgenticRun, error: ClusterError) -> Obstacle:
    """Return the obstacle that an attempt to create the children met.

    What the apiserver rejects as invalid is final, unless KubeRay is too old, or the run has
    trained: the apiserver accepted the same objects then.
    """
    message = str(error)
    if isinstance(error, NotServed):
        return KUBERAY_MISSING
    if isinstance(error, NamespaceGone):
        return Obstacle(
            Reason.NAMESPACE_GONE,
            f"nothing can be created in namespace {run.metadata.namespace}, because it is being "
            f"deleted or does not exist: apply the run in another namespace ({message})",
        )
    for kind, reason in _BY_ERROR.items():
        if isinstance(error, kind):
            # The apiserver has accepted the objects of a run that has trained.
            final = kind is TooLarge and run.status.job is None
            return Obstacle(reason, message, final=final)
    if not isinstance(error, Refused):
        return Obstacle(Reason.DENIED, message)
    if unknown := _fields_unknown_to_kuberay(run, message):
        return Obstacle(
            Reason.KUBERAY_TOO_OLD,
            f"this version of KubeRay does not know {', '.join(unknown[:3])}: upgrade KubeRay and "
            f"its CRDs to {MIN_KUBERAY} or newer; the run goes on by itself then",
        )
    if run.status.job:
        return Obstacle(Reason.DENIED, message)
    return Obstacle(Reason.INVALID_CONFIG, message, final=True)


def report(draft: Draft, obstacle: Obstacle) -> None:
    """Show the obstacle in the status, once as an event, and look again later."""
    before = draft.find(ConditionType.CLUSTER_PROVISIONED)
    if before is None or before.reason != obstacle.reason.value:
        # The message does not count: that of a quota changes with what others use.
        draft.event(obstacle.reason, obstacle.message, warning=obstacle.needs_people)
    draft.condition(ConditionType.CLUSTER_PROVISIONED, "False", obstacle.reason, obstacle.message)
    if draft.status.phase is not Phase.RUNNING and not draft.status.phase.finished:
        waits = Phase.PENDING if draft.status.job is None else draft.status.phase
        draft.phase(waits, obstacle.message)
    retried = obstacle.reason in _RETRIED or not obstacle.needs_people
    longest = MAX_WAIT_SECONDS if retried else MAX_RETRY_SECONDS
    draft.look_again(min(_retry_seconds(draft, before), longest))


def _retry_seconds(draft: Draft, before: Condition | None) -> float:
    """Return half the age of the obstacle, so that the looks become rare as it stays."""
    now = draft.find(ConditionType.CLUSTER_PROVISIONED)
    if now is None or before is None or before.reason != now.reason:
        return WAIT_SECONDS
    age = (draft.now - parse_time(now.last_transition_time)).total_seconds()
    return min(max(age / 2, WAIT_SECONDS), MAX_RETRY_SECONDS)


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


def _deleted_claim(run: AgenticRun, observed: Observed) -> Obstacle | None:
    """Return the obstacle if the volume claim that the run uses was deleted.

    Kubernetes keeps a deleted claim until no pod uses it, and no new pod can use it. A new claim is
    empty: with checkpoints in the old one, the run would silently begin again at step 0.
    """
    claim = Child(CLAIM_KIND, claim_name(run))
    manifest, saved = observed.children.get(claim), run.status.checkpoint
    gone = claim in observed.children and manifest is None
    if not gone and (manifest is None or not is_deleting(manifest)):
        return None
    if run.status.phase is Phase.RUNNING:
        message = f"volume claim {claim.name} was deleted: it is lost when the pods of the run end"
        return Obstacle(Reason.CHECKPOINTS_LOST, message)
    if saved:
        return Obstacle(
            Reason.CHECKPOINTS_LOST,
            f"volume claim {claim.name} was deleted, and with it the checkpoint of step "
            f"{saved.step}: apply the run again to begin at step 0",
            final=True,
        )
    if gone or observed.own_cluster(run) is None:
        return None
    return Obstacle(
        Reason.WAITING_FOR_PREVIOUS_RUN,
        f"waiting until volume claim {claim.name} is deleted, to create it: it holds no checkpoint",
        rebuild=True,
    )


def _of_earlier_run(run: AgenticRun, manifest: Manifest) -> bool:
    owners = manifest["metadata"].get("ownerReferences", ())
    return any(
        owner["kind"] == KIND
        and owner["name"] == run.metadata.name
        and owner["uid"] != run.metadata.uid
        for owner in owners
    )
