"""The nodes that a run's pods may be scheduled on: node selector, tolerations, affinity.

A volume that one node can mount (ReadWriteOnce) binds the pods that write checkpoints to one node.
The scheduler does not see where such a volume is attached, so the pods must say it. The trainer's
pod chooses the node, because not every node has its GPUs, and the other pods follow it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agenticrun_api.names import LABEL_ROLE, LABEL_RUN_UID, LABEL_SAVES, Role
from agenticrun_api.roles import SAVES, PodRole
from agenticrun_api.run import AgenticRun

ARCHITECTURE = "kubernetes.io/arch"
"""Label of nodes with their architecture, set by the kubelet."""
HOSTNAME = "kubernetes.io/hostname"

Manifest = dict[str, Any]


def on_one_node(run: AgenticRun, claim: Manifest | None = None) -> bool:
    """Return True if the pods that write checkpoints mount a claim that only one node can mount.

    Args:
        run: the run.
        claim: the user's own claim (checkpoint.volumeClaim.claimName), if it was read.
    """
    storage = run.spec.storage
    settings = storage.volume_claim if storage else None
    # The spec has the access mode of our own claim; only the apiserver has that of the user's.
    if settings is None or settings.claim_name is None:
        return run.spec.claims_one_node
    return claim is not None and "ReadWriteMany" not in access_modes(claim)


def access_modes(claim: Manifest) -> list[str]:
    """Return the access modes of a claim."""
    modes: list[str] = claim["spec"].get("accessModes") or []
    return modes


def unsuitable_modes(run: AgenticRun, claim: Manifest) -> str | None:
    """Return why the pods that write checkpoints cannot all mount the user's claim, else None."""
    storage, modes = run.spec.storage, access_modes(claim)
    settings = storage.volume_claim if storage else None
    if settings is None or settings.claim_name is None or "ReadWriteMany" in modes or not modes:
        return None
    # ReadWriteOnce is about nodes: several pods of one node may mount it.
    several_pods = "ReadWriteOnce" in modes
    named = f"{claim['kind']} {claim['metadata']['name']} has {' and '.join(modes)}"
    if several_pods and run.spec.roles.savers_have_topology:
        return (
            f"{named}, which allows one node, and Kueue does not know it: delete the run and apply "
            "it without topology of roles trainer, reference and critic, or with a claim that has "
            "ReadWriteMany"
        )
    if several_pods and (settings.one_node or not run.spec.savers_need_several_nodes):
        return None
    needs = (
        "several trainer pods with GPUs, or reference and critic pods with GPUs of their own, need "
        "several nodes"
        if several_pods
        else "head and trainer pods must write to it"
    )
    one_node = ", or set checkpoint.volumeClaim.oneNode: true if one node has room for all"
    return (
        f"{named}, and {needs}: "
        "delete the run and apply it with a claim that has ReadWriteMany, or with checkpoint.uri: "
        f"s3://bucket/prefix{one_node if several_pods else ''}"
    )


def placement(
    run: AgenticRun, role: Role, architectures: Sequence[str], claim: Manifest | None = None
) -> Manifest:
    """Return nodeSelector, tolerations and affinity of a role's pods; what the user gives wins.

    Args:
        run: the run.
        role: the role.
        architectures: of the worker images. Empty: pods may go to any node.
        claim: the user's own claim for checkpoints, if it was read.
    """
    settings, trainer = run.spec.roles.of(role), run.spec.roles.trainer
    bound = role in SAVES and on_one_node(run, claim)
    # Pods that must share the trainer's node have to tolerate and select what it does.
    sharing = [trainer, settings] if bound and role is not Role.TRAINER else [settings]
    selector: dict[str, Any] = {}
    tolerations: list[Any] = []
    # The trainer first, so that the role's own selector wins.
    for shared in sharing:
        overlay = shared.overlay.spec.get("nodeSelector")
        selector |= shared.node_selector | (overlay if isinstance(overlay, dict) else {})
        tolerations += [item for item in _tolerations(shared) if item not in tolerations]
    affinity = dict(settings.affinity)
    if bound:
        # Before the user's, which replaces it as a whole.
        affinity = {"podAffinity": _with_the_savers(run, role)} | affinity
    # If one of the pods that share a node chooses an architecture, it holds for all of them.
    given = [[shared.affinity, shared.overlay.spec.get("affinity")] for shared in sharing]
    if ARCHITECTURE not in json.dumps(given, default=str):
        if len(architectures) == 1:
            selector = {ARCHITECTURE: architectures[0]} | selector
        elif architectures:
            allowed = {"key": ARCHITECTURE, "operator": "In", "values": list(architectures)}
            terms = {"nodeSelectorTerms": [{"matchExpressions": [allowed]}]}
            required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
            affinity = {"nodeAffinity": required} | affinity
    return {"nodeSelector": selector, "tolerations": tolerations, "affinity": affinity}


def _tolerations(settings: PodRole) -> list[Any]:
    """Return the role's tolerations, and one for a taint that is named after its GPUs.

    GKE and EKS add the latter at admission to pods that request GPUs, but not to a head that must
    share the node of such a pod.
    """
    overlay = settings.overlay.spec.get("tolerations")
    given = overlay if isinstance(overlay, list) else settings.tolerations
    if not settings.gpus:
        return list(given)
    gpus = {"key": settings.gpu_resource_name, "operator": "Exists", "effect": "NoSchedule"}
    return [*given, *([] if gpus in given else [gpus])]


def _with_the_savers(run: AgenticRun, role: Role) -> Manifest:
    """Return the affinity to the node of the run's other pods that write checkpoints.

    A pod that matches its own term may be the first one anywhere. If the trainer needs a special
    node, it must be the first: a head that came first could take a node without GPUs.
    """
    trainer = run.spec.roles.trainer
    given = trainer.resources
    requested = {**given.requests, **given.limits} if given else {}
    # Devices are extended resources, whose names have a domain: rdma/hca, nvidia.com/gpu.
    devices = any("/" in name for name in requested)
    special = trainer.gpus or devices or trainer.affinity or "affinity" in trainer.overlay.spec
    follows = role is not Role.TRAINER and special
    others = {LABEL_ROLE: Role.TRAINER.value} if follows else {LABEL_SAVES: "true"}
    term = {
        "topologyKey": HOSTNAME,
        "labelSelector": {"matchLabels": {LABEL_RUN_UID: run.metadata.uid} | others},
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
