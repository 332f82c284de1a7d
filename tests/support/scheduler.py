"""A small model of the Kubernetes scheduler, for the pods of a RayCluster.

It filters nodes by taints, node selector, resources and required pod affinity, places one pod after
the other, and tries those again that found no node. Of several nodes it takes the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agenticrun_api.quantities import quantity

Manifest = dict[str, Any]


@dataclass
class Machine:
    """A node with what is free on it."""

    name: str
    free: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[Manifest] = field(default_factory=list)
    pods: list[Manifest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/arch": "amd64"} | (
            self.labels
        )


def pods_of(cluster: Manifest) -> list[Manifest]:
    """Return the pods of a RayCluster in the order in which KubeRay creates them."""
    spec = cluster["spec"]
    found = [spec["headGroupSpec"]["template"]]
    for group in spec["workerGroupSpecs"]:
        found += [group["template"]] * group["replicas"]
    return found


def schedule(pods: list[Manifest], nodes: list[Machine]) -> dict[str, list[str]]:
    """Place pods; return the nodes of each role's pods, with "" for a pod that found none."""
    waiting, placed = list(enumerate(pods)), dict.fromkeys(range(len(pods)), "")
    while waiting:
        left = []
        for number, pod in waiting:
            node = next((node for node in nodes if _takes(node, pod, nodes)), None)
            if node is None:
                left.append((number, pod))
                continue
            node.pods.append(pod)
            for name, amount in _requests(pod).items():
                node.free[name] = node.free.get(name, 0.0) - amount
            placed[number] = node.name
        if len(left) == len(waiting):
            break
        waiting = left
    found: dict[str, list[str]] = {}
    for number, pod in enumerate(pods):
        role = pod["metadata"]["labels"]["agenticrun.dev/role"]
        found.setdefault(role, []).append(placed[number])
    return found


def _requests(pod: Manifest) -> dict[str, float]:
    total: dict[str, float] = {}
    sidecars = [
        box for box in pod["spec"].get("initContainers", []) if box.get("restartPolicy") == "Always"
    ]
    for container in [*pod["spec"]["containers"], *sidecars]:
        for name, amount in container["resources"]["requests"].items():
            if name != "ephemeral-storage":
                total[name] = total.get(name, 0.0) + quantity(str(amount))
    return total


def _takes(node: Machine, pod: Manifest, nodes: list[Machine]) -> bool:
    spec = pod["spec"]
    return (
        all(node.labels.get(k) == v for k, v in spec.get("nodeSelector", {}).items())
        and all(_tolerated(taint, spec.get("tolerations", [])) for taint in node.taints)
        and all(node.free.get(name, 0.0) >= amount for name, amount in _requests(pod).items())
        and all(
            _near(node, term, pod, nodes)
            for term in spec.get("affinity", {})
            .get("podAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", [])
        )
    )


def _tolerated(taint: Manifest, tolerations: list[Manifest]) -> bool:
    return any(
        item.get("effect") in (None, "", taint["effect"])
        and (
            item.get("key") in (None, taint["key"])
            if item.get("operator") == "Exists"
            else (item.get("key"), item.get("value")) == (taint["key"], taint.get("value"))
        )
        for item in tolerations
    )


def _near(node: Machine, term: Manifest, pod: Manifest, nodes: list[Machine]) -> bool:
    wanted = term["labelSelector"]["matchLabels"].items()

    def matches(other: Manifest) -> bool:
        return bool(wanted <= other["metadata"]["labels"].items())

    if not any(matches(other) for one in nodes for other in one.pods):
        return matches(pod)  # the first pod of those that want each other goes anywhere
    value = node.labels[term["topologyKey"]]
    return any(
        matches(other)
        for one in nodes
        if one.labels[term["topologyKey"]] == value
        for other in one.pods
    )
