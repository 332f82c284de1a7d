"""The volume claim of a run's checkpoints. It outlives the run, unless the run says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from agenticrun_api import AgenticRun
from agenticrun_api.names import LABEL_RUN, LABEL_RUN_UID
from agenticrun_api.placement import access_modes, unsuitable_modes
from agenticrun_api.quantities import whole_number
from agenticrun_api.spec import VolumeClaim
from agenticrun_operator.resources.metadata import (
    Manifest,
    child_metadata,
    controller_uid,
)
from agenticrun_operator.resources.volumes import claim_name, storage_of

CLAIM_KIND = "PersistentVolumeClaim"


def created_claim(run: AgenticRun) -> VolumeClaim | None:
    """Return the settings of the claim that is created for the run; None if there is none."""
    storage = storage_of(run)
    claim = storage.volume_claim if storage else None
    return claim if claim and claim.size else None


def checkpoint_claim_name(run: AgenticRun) -> str | None:
    """Return the name of the claim that the run mounts; None if there is none."""
    storage = storage_of(run)
    if storage is None or storage.volume_claim is None:
        return None
    return claim_name(run)


def checkpoint_claim(run: AgenticRun, claim: VolumeClaim) -> Manifest:
    """Return the claim to create.

    A retained claim has labels that name its run, but no owner, so that garbage collection leaves
    it alone.
    """
    metadata = child_metadata(run, claim_name(run))
    if claim.retain:
        del metadata["ownerReferences"]
    spec: Manifest = {
        "accessModes": [claim.access_mode],
        "resources": {"requests": {"storage": claim.size}},
    }
    if claim.storage_class_name:
        spec["storageClassName"] = claim.storage_class_name
    return {"apiVersion": "v1", "kind": CLAIM_KIND, "metadata": metadata, "spec": spec}


def is_retained(run: AgenticRun, manifest: Manifest) -> bool:
    """Return True for a retained claim of this run or of an earlier run of the same name."""
    labels = manifest["metadata"].get("labels") or {}
    return (
        manifest["kind"] == CLAIM_KIND
        and controller_uid(manifest) is None
        and labels.get(LABEL_RUN) == run.metadata.name
    )


def made_by(run: AgenticRun, manifest: Manifest) -> bool:
    """Return True if the object was created for this run and not for an earlier one."""
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get(LABEL_RUN_UID) == run.metadata.uid)


def unsuitable(run: AgenticRun, manifest: Manifest) -> str | None:
    """Return why the run cannot use a claim; None if it can.

    Args:
        run: the run.
        manifest: the user's own claim, or the claim that an earlier run of this name left.
    """
    claim = created_claim(run)
    if claim is None:
        return unsuitable_modes(run, manifest)
    if claim.size is None or made_by(run, manifest):
        return None
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    has = spec.get("resources", {}).get("requests", {}).get("storage", "0")
    modes, storage_class = access_modes(manifest), spec.get("storageClassName")
    if whole_number(has) < whole_number(claim.size):
        problem = f"has {has}, and this run asks for size {claim.size}"
    elif claim.access_mode not in modes:
        problem = f"has {' and '.join(modes)}, and this run asks for {claim.access_mode}"
    elif claim.storage_class_name not in (None, storage_class):
        problem = (
            f"has StorageClass {storage_class}, and this run asks for {claim.storage_class_name}"
        )
    else:
        return None
    return (
        f"{CLAIM_KIND} {name} of an earlier run {problem}: apply the run with what the claim has, "
        f"expand the claim, use another name, or delete the claim with the checkpoints in it "
        f"(kubectl delete pvc {name})"
    )


PROVISIONING_SECONDS = 15.0
"""Time in which a volume may be found for a claim."""


def unbound(manifest: Manifest, problems: Iterable[str], now: datetime) -> str | None:
    """Return why pods wait for the claim's volume, with what to do; None if they do not.

    Args:
        manifest: the claim.
        problems: why pods of the run are not ready.
        now: the current time.
    """
    if manifest.get("status", {}).get("phase") != "Pending":
        return None
    name, storage_class = manifest["metadata"]["name"], manifest["spec"].get("storageClassName")
    created = datetime.fromisoformat(manifest["metadata"]["creationTimestamp"])
    if (now - created).total_seconds() < PROVISIONING_SECONDS:
        return None
    if storage_class:
        # With WaitForFirstConsumer a claim is Pending until its pod is scheduled.
        if not any("persistentvolumeclaim" in problem.lower() for problem in problems):
            return None
        return (
            f"{CLAIM_KIND} {name} has no volume yet: StorageClass {storage_class} provides none. "
            f"kubectl describe pvc {name} says why"
        )
    return (
        f"{CLAIM_KIND} {name} has no volume: the Kubernetes cluster has no default StorageClass. "
        "Mark one as the default; or delete the run and the claim, and apply the run with "
        "checkpoint.volumeClaim (size and storageClassName), with checkpoint.uri: "
        "s3://bucket/prefix, or with checkpoint: {none: true} to save nothing"
    )
