"""The Workload of a run: its place in a queue of Kueue, and the quota that it holds.

The run owns the Workload, and its RayCluster is never queued itself. So the operator stops the pods
of an evicted run, after its driver has saved, and not Kueue, which would delete them at once. The
Workload stays until the run ends or is suspended: a run that was evicted keeps its place.

Kueue admits and evicts. The operator gives the quota back when no pod is left (`released`), and
reports the end (`finished`), as the controller of a job does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import GROUP
from agenticrun_api.placement import on_one_node
from agenticrun_api.roles import SAVES
from agenticrun_operator.resources.images import WorkerImages
from agenticrun_operator.resources.metadata import Manifest, child_metadata, is_deleting
from agenticrun_operator.resources.raycluster import Placement, ray_cluster

WORKLOAD_KIND = "Workload"
FLAVOR_KIND = "ResourceFlavor"
PRIORITY_KIND = "WorkloadPriorityClass"
KINDS = (WORKLOAD_KIND, FLAVOR_KIND, PRIORITY_KIND)
KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSION = "v1beta2"
MIN_KUEUE = "0.15"
"""The first release of Kueue that serves `KUEUE_VERSION`."""

_PREFIX = "agenticrun-"
_ANNOTATION_FEWEST = f"{GROUP}/fewest-pods"
"""The `minCount` that was asked for, as role=number. With its feature gate PartialAdmission off,
Kueue drops the field itself."""
_READ_BY_KUEUE = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "overhead",
    "resources",
)
_OF_CONTAINERS = ("name", "image", "resources", "restartPolicy")
_WAIT_FOR_HEAD: Manifest = {
    "name": "wait-gcs-ready",
    "resources": {"requests": {"cpu": "200m", "memory": "256Mi"}},
}
"""The init container that KubeRay adds to each worker pod. It counts for tiny pods only."""
_TOPOLOGY_GATE = f"{KUEUE_GROUP}/topology"
_LABEL_POD_SET = f"{KUEUE_GROUP}/podset"
_ANNOTATION_WORKLOAD = f"{KUEUE_GROUP}/workload"
_REQUEUED = frozenset({"Preempted", "NodeFailures"})
"""Reasons of an eviction after which the job's controller requeues the Workload. After others,
Kueue does: at the end of its backoff, or when the queue is started again."""


def name_of(run: AgenticRun) -> str:
    """Return the name of the run's Workload. It is of this run only, and not of a later one."""
    return f"{_PREFIX}{run.metadata.name}-{run.metadata.uid[:8]}"


def is_of_a_run(name: str) -> bool:
    """Return True if a Workload has a name as `name_of` makes them."""
    return name.startswith(_PREFIX)


def build(
    run: AgenticRun, images: WorkerImages, priority: int | None, claim: Manifest | None = None
) -> Manifest:
    """Return the Workload of a run with a queue: one pod set for each role.

    Users of Kueue may read Workloads, so that the pod sets have only what decides about quota and
    flavors: no commands and no variables.

    Args:
        run: the run.
        images: the worker images of this installation.
        priority: the value of its WorkloadPriorityClass; None: it names none.
        claim: the user's own claim for checkpoints, if it was read.
    """
    queue = run.spec.queue
    assert queue is not None
    cluster = ray_cluster(run, images, "", claim)["spec"]
    groups: dict[str, tuple[int, Manifest, list[Manifest]]] = {
        Role.DRIVER.value: (1, cluster["headGroupSpec"], [])
    }
    groups |= {
        group["groupName"]: (group["replicas"], group, [_WAIT_FOR_HEAD])
        for group in cluster["workerGroupSpecs"]
    }
    fewest, topology = run.spec.roles.fewest_in_a_queue, run.spec.roles.topology
    spec: Manifest = {
        "queueName": queue.name,
        "podSets": [
            {"name": name, "count": count, "template": _accounted(group["template"], extra)}
            | ({"minCount": fewest[name]} if name in fewest else {})
            | ({"topologyRequest": asked.to_dict()} if (asked := topology(Role(name))) else {})
            for name, (count, group, extra) in groups.items()
        ],
    }
    if queue.priority_class:
        reference = {"group": KUEUE_GROUP, "kind": PRIORITY_KIND, "name": queue.priority_class}
        spec |= {"priorityClassRef": reference, "priority": priority}
    smallest = ",".join(f"{name}={number}" for name, number in fewest.items())
    return {
        "apiVersion": f"{KUEUE_GROUP}/{KUEUE_VERSION}",
        "kind": WORKLOAD_KIND,
        "metadata": child_metadata(run, name_of(run))
        | {"annotations": {_ANNOTATION_FEWEST: smallest}},
        "spec": spec,
    }


def _accounted(template: Manifest, extra: list[Manifest]) -> Manifest:
    """Return the part of a pod template that Kueue reads.

    Args:
        template: the template.
        extra: init containers that KubeRay adds.
    """
    pod = template["spec"]
    spec: Manifest = {key: pod[key] for key in _READ_BY_KUEUE if key in pod}
    for kind, added in (("initContainers", extra), ("containers", [])):
        kept = [
            {key: item[key] for key in _OF_CONTAINERS if key in item} for item in pod.get(kind, ())
        ]
        if kept or added:
            spec[kind] = added + kept
    return {"metadata": {"labels": template["metadata"]["labels"]}, "spec": spec}


# -- read ------------------------------------------------------------------------------------------


def condition_of(found: Manifest, kind: str) -> Mapping[str, Any]:
    """Return a condition of a Workload; empty if it has none of this type."""
    conditions = found.get("status", {}).get("conditions") or ()
    return next((item for item in conditions if item["type"] == kind), {})


def _is_true(found: Manifest, kind: str) -> bool:
    return condition_of(found, kind).get("status") == "True"


def is_active(found: Manifest) -> bool:
    """Return False if an administrator or Kueue has deactivated the Workload."""
    return found["spec"].get("active") is not False


def is_finished(found: Manifest) -> bool:
    """Return True if the Workload has ended, so that it can hold no quota any longer."""
    return _is_true(found, "Finished")


def is_evicted(found: Manifest) -> bool:
    """Return True if Kueue wants back the quota that the Workload holds."""
    return _is_true(found, "Evicted") or not is_active(found)


def holds_quota(found: Manifest) -> bool:
    """Return True if quota is reserved for the Workload."""
    return _is_true(found, "QuotaReserved") and not is_finished(found)


def waits_for_quota(found: Manifest) -> bool:
    """Return True if Kueue has looked for quota for the Workload and has found none."""
    looked = condition_of(found, "QuotaReserved").get("status") == "False"
    return looked and is_active(found) and not is_finished(found)


def is_admitted(found: Manifest) -> bool:
    """Return True if the pods of the run may exist."""
    gone = is_deleting(found) or is_finished(found) or is_evicted(found)
    return holds_quota(found) and _is_true(found, "Admitted") and not gone


def pod_counts(found: Manifest) -> dict[str, int]:
    """Return the number of pods of each role that a Workload asks for.

    Pods whose quota was given back do not count.
    """
    given_back = {
        item["name"]: item["count"] for item in found.get("status", {}).get("reclaimablePods") or ()
    }
    return {
        item["name"]: item.get("count", 1) - given_back.get(item["name"], 0)
        for item in found["spec"].get("podSets", ())
    }


def fewest_pods(found: Manifest) -> dict[str, int]:
    """Return the fewest pods of each role with which Kueue was asked to admit a Workload."""
    annotations = found["metadata"].get("annotations") or {}
    role, _, number = annotations.get(_ANNOTATION_FEWEST, "").partition("=")
    asked = {role: int(number)} if number.isdecimal() else {}
    return {name: min(asked.get(name, count), count) for name, count in pod_counts(found).items()}


def admitted_pods(found: Manifest) -> dict[str, int]:
    """Return the number of pods of each role that Kueue has reserved quota for.

    It may be smaller than what the Workload asks for. Empty without a reservation.
    """
    asked = pod_counts(found)
    return {
        item["name"]: min(item.get("count", asked[item["name"]]), asked[item["name"]])
        for item in _assignments(found)
        if item["name"] in asked
    }


def flavors_of(found: Manifest) -> set[str]:
    """Return the names of the ResourceFlavors that Kueue has assigned."""
    return {name for item in _assignments(found) for name in item.get("flavors", {}).values()}


def _assignments(found: Manifest) -> list[Manifest]:
    admission = found.get("status", {}).get("admission") or {}
    return admission.get("podSetAssignments") or []


def placements(
    run: AgenticRun,
    found: Manifest,
    flavors: Mapping[str, Manifest],
    claim: Manifest | None = None,
) -> dict[str, Placement]:
    """Return where Kueue has placed the pods of each role.

    That is the nodes of the flavors, what admission checks have added, and the gate of pods whose
    nodes a Topology decides: Kueue gives each of them its node and opens the gate.

    Args:
        run: the run.
        found: the Workload, which is admitted.
        flavors: its ResourceFlavors by name.
        claim: the user's own claim for checkpoints, if it was read.
    """
    # Kueue knows nothing of the node of a volume. It may choose others, and no pod could start.
    by_volume = SAVES if on_one_node(run, claim) else frozenset()
    placed = {}
    for assigned in _assignments(found):
        name = assigned["name"]
        parts = [
            {
                "nodeSelector": flavors[flavor]["spec"].get("nodeLabels") or {},
                "tolerations": flavors[flavor]["spec"].get("tolerations") or [],
            }
            for flavor in sorted(set(assigned.get("flavors", {}).values()))
        ]
        parts += [
            update
            for check in found.get("status", {}).get("admissionChecks") or ()
            for update in check.get("podSetUpdates") or ()
            if update["name"] == name
        ]
        gated = bool(assigned.get("topologyAssignment")) and name not in by_volume
        if gated:
            parts.append(_for_ungating(found, name))
        maps: dict[str, dict[str, str]] = {
            key: {} for key in ("nodeSelector", "labels", "annotations")
        }
        for part in parts:
            for key, known in maps.items():
                known.update(part.get(key) or {})
        placed[name] = Placement(
            maps["nodeSelector"],
            tuple(item for part in parts for item in part.get("tolerations") or ()),
            maps["labels"],
            maps["annotations"],
            (_TOPOLOGY_GATE,) if gated else (),
        )
    return placed


def _for_ungating(found: Manifest, name: str) -> Manifest:
    """Return the metadata by which Kueue finds the gated pods of a pod set."""
    pod_sets = {item["name"]: item for item in found["spec"]["podSets"]}
    asked = pod_sets[name].get("topologyRequest") or {}
    # Where all flavors have a Topology, Kueue places pods by it that have not asked.
    kind = next((kind for kind in ("required", "preferred") if kind in asked), "unconstrained")
    return {
        "labels": {_LABEL_POD_SET: name},
        "annotations": {
            _ANNOTATION_WORKLOAD: found["metadata"]["name"],
            f"{KUEUE_GROUP}/podset-{kind}-topology": asked.get(kind, "true"),
        },
    }


# -- change ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """The new content of a condition of a Workload."""

    kind: str
    status: str
    reason: str
    message: str


def released(found: Manifest, now: str) -> Manifest:
    """Return a Workload that was evicted, without its quota.

    This is what Kueue expects of the controller of a job once no pod is left.

    Args:
        found: the Workload as it was read.
        now: the current time, RFC 3339.
    """
    evicted = condition_of(found, "Evicted") if _is_true(found, "Evicted") else {}
    reason = evicted.get("reason", "Deactivated")
    message = evicted.get("message", "The workload is deactivated")
    changes = [
        _Change("QuotaReserved", "False", "Pending", message),
        _Change("Admitted", "False", "NoReservation", "The workload has no reservation"),
        _Change("Requeued", "True" if reason in _REQUEUED else "False", reason, message),
    ]
    if condition_of(found, "PodsReady"):
        changes.append(_Change("PodsReady", "False", "WaitForStart", "The pods were deleted"))
    changed = _changed(found, now, *changes)
    changed["status"].pop("admission", None)
    return changed


def with_fewer_pods(found: Manifest, numbers: Mapping[str, int]) -> Manifest:
    """Return an admitted Workload that gives the quota of single pods back.

    Kueue takes no such number back while the Workload holds quota.

    Args:
        found: the Workload as it was read.
        numbers: the pods that are left, by role.
    """
    before = {item["name"]: item for item in found.get("status", {}).get("reclaimablePods") or ()}
    given_back = {
        item["name"]: {"name": item["name"], "count": item.get("count", 1) - numbers[item["name"]]}
        for item in found["spec"]["podSets"]
        if item["name"] in numbers
    }
    return found | {
        "status": found.get("status", {})
        | {"reclaimablePods": list((before | given_back).values())}
    }


def finished(found: Manifest, now: str, *, succeeded: bool, message: str) -> Manifest:
    """Return the Workload of a run that has ended, which gives its quota back for good."""
    reason = "Succeeded" if succeeded else "Failed"
    return _changed(found, now, _Change("Finished", "True", reason, message[:1024]))


def with_ready_pods(found: Manifest, now: str) -> Manifest | None:
    """Return the Workload with the news that its pods are ready; None if it has them.

    With Kueue's `waitForPodsReady`, a Workload without this condition is evicted.
    """
    if _is_true(found, "PodsReady"):
        return None
    return _changed(found, now, _Change("PodsReady", "True", "Started", "All pods were ready"))


def _changed(found: Manifest, now: str, *changes: _Change) -> Manifest:
    """Return a Workload with other conditions."""
    status = dict(found.get("status", {}))
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    for change in changes:
        before = conditions.get(change.kind, {})
        same = before.get("status") == change.status
        conditions[change.kind] = {
            "type": change.kind,
            "status": change.status,
            "reason": change.reason,
            "message": change.message,
            "lastTransitionTime": before["lastTransitionTime"] if same else now,
            "observedGeneration": found["metadata"].get("generation", 0),
        }
    return found | {"status": status | {"conditions": list(conditions.values())}}
