"""The objects of a run, except the Secret with its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from agenticrun_api import AgenticRun, Reason
from agenticrun_api.names import LABEL_RUN_UID, LABEL_SAVES, RUN_FILE
from agenticrun_api.roles import SAVES
from agenticrun_api.yaml_text import write_yaml
from agenticrun_operator.resources.claims import CLAIM_KIND, checkpoint_claim, created_claim
from agenticrun_operator.resources.images import WorkerImages
from agenticrun_operator.resources.metadata import Manifest, child_metadata
from agenticrun_operator.resources.network import network_policies
from agenticrun_operator.resources.raycluster import Placement, ray_cluster
from agenticrun_operator.resources.volumes import (
    claim_name,
    run_config_name,
    storage_of,
)

BUDGET_KIND = "PodDisruptionBudget"


@dataclass(frozen=True, order=True)
class Child:
    """Kind and name of an object in the run's namespace."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @classmethod
    def of(cls, manifest: Manifest) -> Child:
        """Return the kind and name of a manifest."""
        return cls(manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on the run, as `kubectl describe` shows it."""

    reason: Reason | str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"


def desired_children(
    run: AgenticRun,
    images: WorkerImages,
    tokens: str,
    claim: Manifest | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> tuple[Manifest, ...]:
    """Return all children except the Secret.

    The NetworkPolicies come first, so that no pod is ever open. The RayCluster comes last, because
    its pods mount the others.

    Args:
        run: the run.
        images: the worker images of this installation.
        tokens: the name of the Secret with the run's tokens.
        claim: the user's own claim for checkpoints, if it was read.
        placements: where a queue has placed the pods, by role.
    """
    return (
        *network_policies(run, images.operator_namespace),
        *mounted_children(run),
        ray_cluster(run, images, tokens, claim, placements),
    )


def mounted_children(run: AgenticRun) -> tuple[Manifest, ...]:
    """Return the children that are created before the pods, without the Secret.

    The pods mount them, except the PodDisruptionBudget.
    """
    claim = created_claim(run)
    storage = (checkpoint_claim(run, claim),) if claim else ()
    budget = (disruption_budget(run),) if budget_of(run) else ()
    return (run_config(run), *storage, *budget)


def mounted_names(run: AgenticRun) -> tuple[Child, ...]:
    """Return the names of `mounted_children`, which are needed more often than the manifests."""
    claim = (Child(CLAIM_KIND, claim_name(run)),) if created_claim(run) else ()
    budget = filter(None, (budget_of(run),))
    return (Child("ConfigMap", run_config_name(run)), *claim, *budget)


def disruption_budget(run: AgenticRun) -> Manifest:
    """Return the PodDisruptionBudget that refuses evictions of pods that write checkpoints.

    It counts pods, because a percentage or maxUnavailable needs a scale subresource, which a
    RayCluster does not have. Pods that are not ready may be evicted: they train nothing.
    """
    roles = run.spec.roles
    labels = {LABEL_RUN_UID: run.metadata.uid, LABEL_SAVES: "true"}
    return {
        "apiVersion": "policy/v1",
        "kind": BUDGET_KIND,
        "metadata": child_metadata(run, run.metadata.name),
        "spec": {
            "minAvailable": sum(roles.replicas(role) for role in SAVES if roles.has(role)),
            "selector": {"matchLabels": labels},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def budget_of(run: AgenticRun) -> Child | None:
    """Return the PodDisruptionBudget that the run has until it ends, if it has one."""
    return Child(BUDGET_KIND, run.metadata.name) if run.spec.disruption_budget == "Block" else None


def run_config(run: AgenticRun) -> Manifest:
    """Return the ConfigMap for the head pod: the run as the user wrote it, with its uid.

    It names the storage of its checkpoints, so that the driver need not know the default.
    """
    storage = storage_of(run)
    if storage:
        run = run.model_copy(update={"spec": run.spec.model_copy(update={"checkpoint": storage})})
    text = write_yaml(run.document(), ascii_only=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(run, run_config_name(run)),
        "data": {RUN_FILE.rsplit("/", 1)[1]: text},
    }


def code_config_map(run: AgenticRun) -> Child | None:
    """Return the ConfigMap with the user's modules. It belongs to the user and is never written."""
    name = run.spec.code.config_map if run.spec.code else None
    return Child("ConfigMap", name) if name else None


def users_claim_of(run: AgenticRun) -> Child | None:
    """Return the claim for checkpoints that belongs to the user and is never written."""
    storage = run.spec.storage
    users = storage and storage.volume_claim and storage.volume_claim.claim_name
    return Child(CLAIM_KIND, claim_name(run)) if users else None
