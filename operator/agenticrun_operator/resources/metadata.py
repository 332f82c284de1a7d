"""Metadata that every child of a run carries, and how to read whose child an object is."""

from __future__ import annotations

from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import API_VERSION, KIND, LABEL_ROLE, LABEL_RUN, LABEL_RUN_UID

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""


def child_metadata(run: AgenticRun, name: str) -> Manifest:
    """Name, namespace, labels and the ownerReference through which garbage collection deletes the child with its run."""
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
    """The labels of a child, or of a pod of one role."""
    labels = {LABEL_RUN: run.metadata.name, LABEL_RUN_UID: run.metadata.uid}
    return labels if role is None else labels | {LABEL_ROLE: role.value}


def controller_uid(manifest: Manifest) -> str | None:
    """The uid of the object's controlling owner."""
    for owner in manifest["metadata"].get("ownerReferences", ()):
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def is_deleting(manifest: Manifest) -> bool:
    """Whether the apiserver has accepted the object's deletion."""
    return "deletionTimestamp" in manifest["metadata"]
