"""Metadata of a run's children, and functions to read an object's owner and quantities."""

from __future__ import annotations

from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import API_VERSION, KIND, LABEL_ROLE, LABEL_RUN, LABEL_RUN_UID

LABEL_CLUSTER = "ray.io/cluster"
"""Label that KubeRay gives to each pod: the name of its RayCluster."""

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""


def child_metadata(run: AgenticRun, name: str) -> Manifest:
    """Return name, namespace, labels and ownerReference of a child.

    The ownerReference makes garbage collection delete the child together with its run.
    """
    return {
        "name": name,
        "namespace": run.metadata.namespace,
        "labels": run_labels(run),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": run.metadata.name,
                "uid": run.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def run_labels(run: AgenticRun, role: Role | None = None) -> dict[str, str]:
    """Return the labels of a child or, with a role, of a pod of that role."""
    labels = {LABEL_RUN: run.metadata.name, LABEL_RUN_UID: run.metadata.uid}
    return labels if role is None else labels | {LABEL_ROLE: role.value}


def controller(manifest: Manifest) -> Manifest:
    """Return the owner reference of the object's controller; empty without one."""
    owners: list[Manifest] = manifest["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def controller_uid(manifest: Manifest) -> str | None:
    """Return the uid of the object's controlling owner, or None."""
    return controller(manifest).get("uid")


def is_own(run: AgenticRun, manifest: Manifest) -> bool:
    """Return True if the object is the run's own, even if someone has removed its owner.

    Without an owner, the label of the run shows it, or its uid in the run's status.
    """
    metadata = manifest["metadata"]
    if owner := controller(manifest):
        return bool(owner.get("uid") == run.metadata.uid)
    cluster = run.status.ray_cluster
    labelled = (metadata.get("labels") or {}).get(LABEL_RUN_UID) == run.metadata.uid
    return labelled or bool(cluster and cluster.uid and cluster.uid == metadata.get("uid"))


def is_deleting(manifest: Manifest) -> bool:
    """Return True if the object is being deleted."""
    return "deletionTimestamp" in manifest["metadata"]
