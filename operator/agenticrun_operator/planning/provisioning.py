"""Creates and updates the run's children, and finds obstacles to that."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agenticrun_api import AgenticRun, ConditionType, Phase, Reason
from agenticrun_api.names import KIND
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.plan import TokenToMake
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import (
    Child,
    Manifest,
    WorkerImages,
    controller_uid,
    desired_children,
    is_deleting,
    token_secrets,
)


@dataclass(frozen=True)
class Obstacle:
    """A reason the run's children cannot be created now."""

    reason: Reason
    message: str

    @property
    def needs_people(self) -> bool:
        """True if waiting does not help and a person must act."""
        return self.reason is not Reason.WAITING_FOR_PREVIOUS_RUN


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


def outdated_kuberay(refusal: str) -> Obstacle | None:
    """Return the obstacle if a refused RayCluster has fields of ours that KubeRay does not know.

    A field that the user wrote in spec.roles is the user's error, and not meant here.

    Args:
        refusal: the apiserver's words.
    """
    fields = [next(filter(None, found)) for found in _UNKNOWN_FIELDS.findall(refusal)]
    ours = [field for field in fields if not _OF_THE_USER.search(field)]
    if not ours:
        return None
    return Obstacle(
        Reason.KUBERAY_TOO_OLD,
        f"this version of KubeRay does not know {', '.join(ours[:3])}: upgrade KubeRay and its "
        f"CRDs to {MIN_KUBERAY} or newer; the run goes on by itself then",
    )


def gone_namespace(run: AgenticRun, why: str) -> Obstacle:
    """Return the obstacle of a run in a namespace that is missing or being deleted.

    Args:
        run: the run.
        why: the apiserver's words.
    """
    return Obstacle(
        Reason.NAMESPACE_GONE,
        f"nothing can be created in namespace {run.metadata.namespace}, because it is being "
        f"deleted or does not exist: apply the run in another namespace ({why})",
    )


def find_obstacle(run: AgenticRun, observed: Observed, images: WorkerImages) -> Obstacle | None:
    """Return the first obstacle, or None.

    An obstacle is a worker image that is not configured, KubeRay that is missing, or an object that
    has the name of a child but belongs to another owner or an earlier run. The operator never takes
    over such an object.
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
    for child, manifest in sorted(observed.children.items()):
        if manifest is None:
            continue
        shown = f"{child.kind} {child.name}"
        if is_deleting(manifest) and controller_uid(manifest) == run.metadata.uid:
            return Obstacle(
                Reason.WAITING_FOR_PREVIOUS_RUN, f"waiting until {shown} is deleted, to create it"
            )
        if is_deleting(manifest) or _of_earlier_run(run, manifest):
            return Obstacle(
                Reason.WAITING_FOR_PREVIOUS_RUN,
                f"waiting until {shown} of an earlier run is deleted",
            )
        if controller_uid(manifest) != run.metadata.uid:
            return Obstacle(
                Reason.NAME_CONFLICT,
                f"{shown} exists and does not belong to this run: "
                "delete it, or create the run under another name",
            )
    for pod in observed.pods:
        # A started run waited for such pods before; what appears later must not hold it.
        if pod.run_uid != run.metadata.uid and run.status.job is None:
            return Obstacle(
                Reason.WAITING_FOR_PREVIOUS_RUN,
                f"waiting until pod {pod.name} of an earlier run is deleted",
            )
    return None


def _of_earlier_run(run: AgenticRun, manifest: Manifest) -> bool:
    owners = manifest["metadata"].get("ownerReferences", ())
    return any(
        owner["kind"] == KIND
        and owner["name"] == run.metadata.name
        and owner["uid"] != run.metadata.uid
        for owner in owners
    )


def provision(draft: Draft, observed: Observed, images: WorkerImages) -> None:
    """Create missing children.

    Existing ones stay as they are: no field that may change in a run reaches them, and what others
    changed (an expanded claim) or what a newer operator would write (an image) must not reach
    pods that are training.
    """
    run = draft.run
    for secret, key in token_secrets(run):
        if _is_missing(observed, secret):
            draft.tokens.append(TokenToMake(secret.name, key))
    for manifest in desired_children(run, images):
        child = Child.of(manifest)
        if _is_missing(observed, child):
            draft.create.append(manifest)
    if run.status.start_time is None:
        draft.set(
            start_time=format_time(draft.now),
            max_steps=run.spec.pipeline.max_steps,
            progress=f"0/{run.spec.pipeline.max_steps}",
        )
        draft.condition(ConditionType.COMPLETE, "False", Reason.NOT_FINISHED)
        draft.condition(ConditionType.FAILED, "False", Reason.NOT_FINISHED)
    if draft.status.phase is Phase.PENDING:
        draft.phase(Phase.STARTING)
    _report_cluster(draft, observed)


def _report_cluster(draft: Draft, observed: Observed) -> None:
    name, before = draft.run.metadata.name, draft.find(ConditionType.CLUSTER_PROVISIONED)
    if before and before.status == "False" and before.message == draft.status.message:
        draft.set(message=None)  # the obstacle that it names is gone
    if observed.child("RayCluster", name) is None:
        draft.condition(
            ConditionType.CLUSTER_PROVISIONED,
            "False",
            Reason.CLUSTER_CREATING,
            f"creating RayCluster {name}",
        )
        draft.look_again(5.0)
        return
    if not draft.is_true(ConditionType.CLUSTER_PROVISIONED):
        draft.event(Reason.CLUSTER_CREATED, f"created RayCluster {name}")
    draft.condition(
        ConditionType.CLUSTER_PROVISIONED,
        "True",
        Reason.CLUSTER_CREATED,
        f"RayCluster {name} exists",
    )


def _is_missing(observed: Observed, child: Child) -> bool:
    return child in observed.children and observed.children[child] is None
