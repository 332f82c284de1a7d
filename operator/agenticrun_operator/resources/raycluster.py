"""The RayCluster of a run: the driver on the head and one worker group for each other role."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import (
    DASHBOARD_PORT,
    ENV_POD_UID,
    GROUP,
    REPORTER_CONTAINER,
    REPORTER_PORT,
)
from agenticrun_api.quantities import whole_number
from agenticrun_api.roles import LABEL_GANG, LABEL_GANG_PRIORITY
from agenticrun_operator.resources.images import WorkerImages
from agenticrun_operator.resources.metadata import (
    Manifest,
    child_metadata,
    controller,
    run_labels,
)
from agenticrun_operator.resources.pods import (
    POD_IP_VARIABLE,
    PodContext,
    cpus_of,
    head_pod,
    worker_pod,
)

HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": DASHBOARD_PORT,
    "client": 10001,
    "metrics": 8080,
    "reporter": REPORTER_PORT,
}
"""All ports of the head container. KubeRay copies them to the head service, and omits its default
ports if any port is declared."""

_EVERY_ADDRESS = f"$(case ${POD_IP_VARIABLE} in *:*) echo ::;; *) echo 0.0.0.0;; esac)"
"""The address of all interfaces, of the family of the pod's IP, for the shell into which KubeRay
pastes it. Ray can listen on only one family, and the operator uses that of the pod's IP."""
_HEAD_PARAMS = {"dashboard-host": _EVERY_ADDRESS, "no-monitor": "true"}
"""Ray's job API listens for the operator. Ray's autoscaler would be a process without work."""

_NUMBERS = ("replicas", "minReplicas", "maxReplicas")

OBJECT_STORE_SHARE = 0.3
"""Share of /dev/shm for Ray's object store. It is small: large tensors do not pass through it."""
MIN_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray requires at least 75 MiB."""


@dataclass(frozen=True)
class Placement:
    """The nodes that a queue has chosen for the pods of a role, beside what the user asks for."""

    node_selector: Mapping[str, str]
    tolerations: tuple[Manifest, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    gates: tuple[str, ...] = ()
    """Scheduling gates, which the queue removes when it has chosen the node of a pod."""


def ray_cluster(
    run: AgenticRun,
    images: WorkerImages,
    tokens: str,
    claim: Manifest | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> Manifest:
    """Return the RayCluster. It has the name of the run.

    Args:
        run: the run.
        images: the worker images of this installation.
        tokens: the name of the Secret with the run's tokens.
        claim: the user's own claim for checkpoints, if it was read.
        placements: where a queue has placed the pods, by role.
    """
    context, placed = PodContext(images, tokens, claim), placements or {}
    metadata = child_metadata(run, run.metadata.name)
    made_for = {_replicas_label(role): str(n) for role, n in run.spec.roles.elastic.items()}
    metadata["labels"] = run.spec.labels | gang_labels(run) | metadata["labels"] | made_for
    if run.spec.annotations:
        metadata["annotations"] = dict(run.spec.annotations)
    worker_groups = []
    for role in run.spec.roles.workers:
        replicas = run.spec.roles.replicas(role)
        group = {
            "groupName": role.value,
            "replicas": replicas,
            "minReplicas": replicas,
            "maxReplicas": replicas,
            "rayStartParams": _ray_start_params(run, role),
            "template": _placed(worker_pod(run, role, context), placed.get(role.value)),
        }
        worker_groups.append(group)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata,
        "spec": {
            "rayVersion": run.spec.ray_version,
            "authOptions": {"mode": "token", "secretName": tokens},
            "headGroupSpec": {
                "rayStartParams": _ray_start_params(run, Role.DRIVER) | _HEAD_PARAMS,
                "template": _placed(
                    head_pod(run, context, HEAD_PORTS), placed.get(Role.DRIVER.value)
                ),
            },
            "workerGroupSpecs": worker_groups,
        },
    }


def gang_labels(run: AgenticRun) -> dict[str, str]:
    """Return the labels of a RayCluster that KubeRay's batch schedulers read."""
    if run.spec.scheduling is None or not run.spec.scheduling.gang:
        return {}
    priority = run.spec.priority_class_name
    return {LABEL_GANG: "true"} | ({LABEL_GANG_PRIORITY: priority} if priority else {})


def _placed(template: Manifest, placement: Placement | None) -> Manifest:
    """Return a pod template for the nodes on which a queue has found quota."""
    if placement is None:
        return template
    metadata, pod = dict(template["metadata"]), dict(template["spec"])
    metadata["labels"] = dict(placement.labels) | metadata["labels"]
    if annotations := dict(placement.annotations) | metadata.get("annotations", {}):
        metadata["annotations"] = annotations
    if selector := pod.get("nodeSelector", {}) | dict(placement.node_selector):
        pod["nodeSelector"] = selector
    tolerations = list(pod.get("tolerations", ()))
    tolerations += [item for item in placement.tolerations if item not in tolerations]
    if tolerations:
        pod["tolerations"] = tolerations
    if placement.gates:
        gates = [{"name": name} for name in placement.gates]
        pod["schedulingGates"] = list(pod.get("schedulingGates", ())) + gates
    return {"metadata": metadata, "spec": pod}


def images_in(cluster: Manifest) -> dict[str, str]:
    """Return the image of each role's pods in a RayCluster that exists."""
    spec = cluster["spec"]
    groups = {Role.DRIVER.value: spec["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in spec.get("workerGroupSpecs", ())}
    return {
        role: group["template"]["spec"]["containers"][0].get("image", "")
        for role, group in groups.items()
    }


def answers_challenges(cluster: Manifest) -> bool:
    """Return True if the reporter in the head of a RayCluster can prove which pod it is in.

    It cannot in a RayCluster that an operator of version 0.1 made.
    """
    pod = cluster["spec"]["headGroupSpec"].get("template", {}).get("spec", {})
    return any(
        variable.get("name") == ENV_POD_UID
        for container in pod.get("initContainers", ())
        if container.get("name") == REPORTER_CONTAINER
        for variable in container.get("env") or ()
    )


def replicas_in(run: AgenticRun, cluster: Manifest) -> dict[str, int]:
    """Return the replicas that the operator gave last to the roles that can have other ones.

    Others can change labels and numbers of the RayCluster, so the run's status counts. It lags in
    two cases. If label and numbers are those of the spec, an operator has ended between this change
    and the status. And nothing is recorded of a RayCluster that is new, or while the CRD is older:
    then its label counts.
    """
    labels, known = cluster["metadata"].get("labels") or {}, run.status.ray_cluster
    recorded: Mapping[str, int] = {}
    if known and known.uid == cluster["metadata"].get("uid"):
        recorded = known.replicas
    numbers = {
        group["groupName"]: {group.get(field) for field in _NUMBERS}
        for group in cluster["spec"].get("workerGroupSpecs", ())
    }
    found = {}
    for role, wanted in run.spec.roles.elastic.items():
        label, record = labels.get(_replicas_label(role), ""), recorded.get(role)
        is_wanted = numbers.get(role) == {wanted}
        if is_wanted and (record is None or label == str(wanted)):
            found[role] = wanted
        elif record is not None:
            found[role] = record
        elif label.isdigit():
            found[role] = int(label)
    return found


def rescaled(cluster: Manifest, replicas: Mapping[Role, int], surplus: Collection[str]) -> Manifest:
    """Return a RayCluster with other numbers of pods.

    Args:
        cluster: as it was read.
        replicas: the new numbers, by role.
        surplus: the pods to remove. KubeRay chooses the others if these are too few.
    """
    changed = copy.deepcopy(cluster)
    numbers = {role.value: number for role, number in replicas.items()}
    for group in changed["spec"]["workerGroupSpecs"]:
        if (number := numbers.get(group["groupName"])) is None:
            continue
        changed["metadata"]["labels"][_replicas_label(group["groupName"])] = str(number)
        group.update({"replicas": number, "minReplicas": number, "maxReplicas": number})
        group["scaleStrategy"] = {"workersToDelete": list(surplus)}
    return changed


def changes_by_others(
    run: AgenticRun, cluster: Manifest, *, numbers: bool = True
) -> tuple[str, ...]:
    """Return what others have changed in a RayCluster that the operator made, as clauses.

    Only what the operator may put back: the numbers of pods, the labels and the owner. What a
    queue changes (spec.suspend) and the pods that KubeRay is to delete are not among it.

    Args:
        run: the run.
        cluster: its RayCluster.
        numbers: False to leave out the numbers of pods.
    """
    metadata, wanted = cluster["metadata"], _wanted_replicas(run, cluster)
    found = []
    for group in cluster["spec"].get("workerGroupSpecs", ()) if numbers else ():
        name, number = group["groupName"], wanted.get(group["groupName"])
        found += [
            f"{field} of worker group {name} is {group.get(field)} instead of {number}"
            for field in _NUMBERS
            if number is not None and group.get(field) != number
        ]
    labels = metadata.get("labels") or {}
    found += [
        f"label {name} is {labels[name]} instead of {value}"
        if name in labels
        else f"label {name} is missing"
        for name, value in _wanted_labels(run, cluster, wanted).items()
        if labels.get(name) != value
    ]
    if not controller(cluster):
        found.append("the reference to its owner is missing")
    return tuple(found)


def groups_of_others(run: AgenticRun, cluster: Manifest) -> tuple[str, ...]:
    """Return the worker groups that others have added or removed, as clauses.

    The operator cannot put them back: a group defines pods, and the chart's admission policy lets
    the operator define pods of new RayClusters only.
    """
    there = {group["groupName"] for group in cluster["spec"].get("workerGroupSpecs", ())}
    ours = {role.value for role in run.spec.roles.workers}
    added = (f"worker group {name} was added" for name in sorted(there - ours))
    return (*added, *(f"worker group {name} was removed" for name in sorted(ours - there)))


def repaired(run: AgenticRun, cluster: Manifest, *, numbers: bool = True) -> Manifest:
    """Return a RayCluster without `changes_by_others`.

    Args:
        run: the run.
        cluster: as it was read from the apiserver.
        numbers: False to leave the numbers of pods as they are.
    """
    changed, wanted = copy.deepcopy(cluster), _wanted_replicas(run, cluster)
    for group in changed["spec"].get("workerGroupSpecs", ()) if numbers else ():
        if (number := wanted.get(group["groupName"])) is not None:
            group.update(dict.fromkeys(_NUMBERS, number))
    metadata = changed["metadata"]
    metadata["labels"] = (metadata.get("labels") or {}) | _wanted_labels(run, cluster, wanted)
    if not controller(cluster):
        owners = metadata.get("ownerReferences") or []
        others = [owner for owner in owners if owner.get("uid") != run.metadata.uid]
        mine = child_metadata(run, run.metadata.name)["ownerReferences"]
        metadata["ownerReferences"] = others + mine
    return changed


def editor_of(cluster: Manifest) -> str:
    """Return the name with which a client last changed the worker groups; empty if unknown.

    The watches do not keep it. A client that has only removed something leaves no name.
    """
    entries = [
        entry
        for entry in cluster["metadata"].get("managedFields") or ()
        if not entry.get("subresource")
        and "f:workerGroupSpecs" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    ]
    newest: Manifest = max(entries, key=lambda entry: entry.get("time") or "", default={})
    return str(newest.get("manager", ""))


def _wanted_replicas(run: AgenticRun, cluster: Manifest) -> dict[str, int]:
    """Return the number of pods of each worker group that the operator has asked for last."""
    made = replicas_in(run, cluster)
    return {
        role.value: made.get(role.value, run.spec.roles.replicas(role))
        for role in run.spec.roles.workers
    }


def _wanted_labels(
    run: AgenticRun, cluster: Manifest, replicas: Mapping[str, int]
) -> dict[str, str]:
    """Return the labels that a RayCluster must have.

    Those of the user come back when they are missing; a queue may have changed them.
    """
    present = cluster["metadata"].get("labels") or {}
    made_for = {
        _replicas_label(role): str(replicas[role])
        for role in run.spec.roles.elastic
        if role in replicas
    }
    return run.spec.labels | gang_labels(run) | present | run_labels(run) | made_for


def _replicas_label(role: str) -> str:
    return f"{GROUP}/{role}-replicas"


def _ray_start_params(run: AgenticRun, role: Role) -> dict[str, str]:
    """Return the flags of `ray start`.

    Custom resources bind actors to pods: for each role, a pod offers as many units as it runs
    actors of that role. The head offers no CPUs, so that only the driver runs there.
    """
    settings = run.spec.roles.of(role)
    store = max(MIN_OBJECT_STORE_BYTES, int(whole_number(settings.shm_size) * OBJECT_STORE_SHARE))
    units = {carried.value: actors for carried, actors in run.spec.actors_per_pod(role).items()}
    resources = json.dumps(units, separators=(",", ":"))
    return {
        "num-cpus": "0" if role is Role.DRIVER else str(max(1, whole_number(cpus_of(run, role)))),
        "num-gpus": str(settings.gpus),
        "resources": json.dumps(
            resources
        ),  # quoted once more: KubeRay pastes it into a shell command
        "object-store-memory": str(store),
    }
