"""Whether the pods of one run fit on the nodes of a cluster and into the quotas of a namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import RAY_CONTAINER
from agenticrun_api.quantities import quantity
from agenticrun_api.roles import PodRole, Resources
from agenticrun_workers.findings import Finding, failed, ok, warning

Objects = list[dict[str, Any]]
Amounts = dict[str, float]
"""By resource, as pods request it."""


@dataclass(frozen=True)
class Node:
    """A node that takes pods."""

    name: str
    labels: Mapping[str, str]
    taints: Objects
    total: Amounts
    free: Amounts

    def takes(self, settings: PodRole) -> bool:
        """Return whether node selector and tolerations allow a pod here. Affinity is not read."""
        selected = all(
            self.labels.get(name) == value for name, value in settings.node_selector.items()
        )
        return selected and all(
            taint.get("effect") == "PreferNoSchedule"
            or any(_tolerates(item, taint) for item in settings.tolerations)
            for taint in self.taints
        )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (
        (toleration.get("value") or "") == (taint.get("value") or "")
    )


def requests_of(settings: PodRole) -> Amounts:
    """Return what a role's pod requests: its Ray container and what podTemplate adds."""
    given = settings.resources or Resources()
    asked = {"cpu": settings.cpus, "memory": settings.memory}
    if settings.gpus:
        asked[settings.gpu_resource_name] = str(settings.gpus)
    ray = {"resources": {"requests": asked | given.limits | given.requests}}
    added = settings.overlay.spec
    merged = [box for box in added.get("containers") or [] if box["name"] == RAY_CONTAINER]
    beside = [box for box in added.get("containers") or [] if box["name"] != RAY_CONTAINER]
    for box in merged:
        ray["resources"]["requests"] |= (box.get("resources") or {}).get("requests") or {}
    return pod_requests({**added, "containers": [ray, *beside]})


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Return what a pod spec requests, by Kubernetes' rule.

    Containers and native sidecars (init containers that restart Always) add up. Another init
    container runs before the containers, beside the sidecars that are listed before it, so the
    largest sum counts.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    sidecars: Amounts = {}
    largest: Amounts = {}
    for container in spec.get("initContainers") or []:
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, asked)
            asked = {}
        _add(asked, sidecars)
        largest = _max(largest, asked)
    running = dict(sidecars)
    for container in spec["containers"]:
        _add(running, _requests(container))
    of_the_pod = (spec.get("resources") or {}).get("requests")
    found = _max(largest, running) | _amounts(of_the_pod)
    _add(found, _amounts(spec.get("overhead")))
    return found


def _requests(container: Mapping[str, Any]) -> Amounts:
    """Return the requests of a container. A limit without a request is the request."""
    resources = container.get("resources") or {}
    return _amounts(resources.get("limits")) | _amounts(resources.get("requests"))


def _amounts(quantities: Mapping[str, str | int] | None) -> Amounts:
    return {name: quantity(str(given)) for name, given in (quantities or {}).items()}


def _add(total: Amounts, amounts: Amounts, times: float = 1.0) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0.0) + times * amount


def _max(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def usable_nodes(nodes: Objects, pods: Objects) -> list[Node]:
    """Return the nodes that are ready, with what pods have left of them."""
    found = []
    for item in nodes:
        spec, status = item["spec"], item["status"]
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or []
        )
        if not ready or spec.get("unschedulable"):
            continue
        total = _amounts(status.get("allocatable"))
        metadata = item["metadata"]
        here = [pod for pod in pods if pod["spec"].get("nodeName") == metadata["name"]]
        free = dict(total)
        for pod in here:
            _add(free, {**pod_requests(pod["spec"]), "pods": 1.0}, -1)
        labels, taints = metadata.get("labels") or {}, spec.get("taints") or []
        found.append(Node(metadata["name"], labels, taints, total, free))
    return found


def _lacks(has: Amounts, asked: Amounts) -> str | None:
    """Return the first resource that is not enough."""
    return next((name for name, amount in asked.items() if has.get(name, 0.0) < amount), None)


def _too_large(role: Role, nodes: list[Node], settings: PodRole, asked: Amounts) -> Finding | None:
    """Return the finding if a pod of a role fits on no node, even on an empty one."""
    takes = [node for node in nodes if node.takes(settings)]
    if not takes:
        return failed(
            f"none of {len(nodes)} ready nodes takes pods of role {role.value}",
            f"correct roles.{role.value}.nodeSelector and tolerations: kubectl describe nodes",
        )
    lacking = [name for node in takes if (name := _lacks(node.total, asked)) is not None]
    if len(lacking) < len(takes):
        return None
    name = lacking[0]
    most = max(node.total.get(name, 0.0) for node in takes)
    return failed(
        f"a pod of role {role.value} asks for {shown(name, asked[name])}; "
        f"the largest node offers {shown(name, most)}",
        f"lower it in spec.roles.{role.value}, or add larger nodes",
    )


def pods_fit(run: AgenticRun, nodes: list[Node]) -> Finding:
    """Place the pods of a run on nodes, the largest first, as a scheduler might.

    FAILED: a pod fits on no node, even on an empty one. Warning: they do not fit beside the pods
    that are there now.
    """
    roles = (Role.DRIVER, *run.spec.roles.workers)
    asked = {role: requests_of(run.spec.roles.of(role)) for role in roles}
    for role in roles:
        if found := _too_large(role, nodes, run.spec.roles.of(role), asked[role]):
            return found
    wanted = [role for role in roles for _ in range(run.spec.roles.replicas(role))]
    wanted.sort(key=lambda role: (-run.spec.roles.of(role).gpus, -asked[role]["memory"]))
    left = {node.name: dict(node.free) for node in nodes}
    waiting: Counter[Role] = Counter()
    for role in wanted:
        for node in nodes:
            pod = {**asked[role], "pods": 1.0}
            if node.takes(run.spec.roles.of(role)) and _lacks(left[node.name], pod) is None:
                _add(left[node.name], pod, -1)
                break
        else:
            waiting[role] += 1
    if waiting:
        named = ", ".join(f"{count} {role.value}" for role, count in waiting.items())
        return warning(
            f"{len(wanted) - waiting.total()} of {len(wanted)} pods fit now; no room for {named}",
            "the run waits (Unschedulable) until other pods end: make room, add nodes, or lower "
            "spec.roles",
        )
    return ok(f"all {len(wanted)} pods fit on {len(nodes)} nodes now")


def shown(resource: str, amount: float) -> str:
    """Return an amount of a resource for people."""
    if resource.endswith(("memory", "storage")):  # also limits.memory, requests.storage
        return f"{amount / 2**30:.4g} GiB {resource}"
    return f"{amount:g} {resource}"


def fits_quotas(run: AgenticRun, quotas: Objects) -> Finding:
    """Compare what all pods of a run request with the quotas of the namespace.

    FAILED: a quota never allows it. Warning: not beside what is used now.
    """
    needed = _needed(run)
    never, not_now = [], []
    for quota in quotas:
        status = quota.get("status") or {}
        for name, hard in (status.get("hard") or {}).items():
            if name not in needed:
                continue
            used = (status.get("used") or {}).get(name, "0")
            line = f"{quota['metadata']['name']}: {shown(name, needed[name])} of {hard}"
            if needed[name] > quantity(hard):
                never.append(line)
            elif needed[name] > quantity(hard) - quantity(used):
                not_now.append(f"{line}, {used} used")
    if never:
        return failed(", ".join(never), "lower spec.roles, or raise the quota")
    if not_now:
        return warning(", ".join(not_now), "wait until other pods end, or raise the quota")
    return ok(f"{len(quotas)} in the namespace, with room" if quotas else "none in the namespace")


def _needed(run: AgenticRun) -> Amounts:
    """Return what the run uses of the resources that a quota can name."""
    total: Amounts = {}
    roles = (Role.DRIVER, *run.spec.roles.workers)
    for role in roles:
        _add(total, requests_of(run.spec.roles.of(role)), run.spec.roles.replicas(role))
    pods = float(sum(run.spec.roles.replicas(role) for role in roles))
    found = {f"requests.{name}": amount for name, amount in total.items()}
    found |= {name: total[name] for name in ("cpu", "memory")}
    found |= {"limits.memory": total["memory"], "pods": pods, "count/pods": pods}
    claim = run.spec.storage.volume_claim if run.spec.storage else None
    if claim and claim.size:
        found |= {"requests.storage": quantity(claim.size), "persistentvolumeclaims": 1.0}
    return found
