"""Places the pods of one run on the nodes of a cluster and into the quotas of a namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import RAY_CONTAINER
from agenticrun_api.placement import placement, unsuitable_modes
from agenticrun_api.pods import merged
from agenticrun_api.quantities import quantity
from agenticrun_api.roles import SAVES, PodRole, Resources
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

    def takes(self, pod: Mapping[str, Any]) -> bool:
        """Return whether selector, tolerations and node affinity of a pod spec allow it here."""
        affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        return (
            all(self.labels.get(name) == v for name, v in (pod.get("nodeSelector") or {}).items())
            and all(
                # The scheduler may still choose such a node.
                taint.get("effect") == "PreferNoSchedule"
                or any(_tolerates(item, taint) for item in pod.get("tolerations") or [])
                for taint in self.taints
            )
            and (required is None or self.is_selected_by(required))
        )

    def is_selected_by(self, selector: Mapping[str, Any]) -> bool:
        """Return whether one term of a node selector matches, as in node affinity and volumes."""
        return any(
            all(matches(item, self.labels) for item in term.get("matchExpressions") or [])
            and all(
                matches(item, {"metadata.name": self.name})
                for item in term.get("matchFields") or []
            )
            for term in selector.get("nodeSelectorTerms") or []
            if term.get("matchExpressions") or term.get("matchFields")
        )


_OPERATORS: Mapping[str, Callable[[str | None, list[str]], bool]] = {
    "In": lambda value, wanted: value in wanted,
    "NotIn": lambda value, wanted: value not in wanted,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, wanted: value is not None and int(value) > int(wanted[0]),
    "Lt": lambda value, wanted: value is not None and int(value) < int(wanted[0]),
}


def matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether labels satisfy an expression. An unknown operator counts as satisfied."""
    satisfied = _OPERATORS.get(str(expression.get("operator")))
    value, wanted = labels.get(str(expression.get("key"))), expression.get("values") or []
    return satisfied is None or satisfied(value, wanted)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    # Without a key it tolerates every taint.
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


@dataclass(frozen=True)
class WantedPod:
    """A pod of a run that a scheduler has to place."""

    role: Role
    asked: Amounts
    spec: Mapping[str, Any]
    """nodeSelector, tolerations and affinity, as in its pod spec."""
    gpus: int


@dataclass(frozen=True)
class Wanted:
    """Pods that go to one node: a single pod, or all that share a volume of one node."""

    pods: tuple[WantedPod, ...]

    @property
    def asked(self) -> Amounts:
        """The requests of all pods, added up."""
        total: Amounts = {}
        for pod in self.pods:
            _add(total, pod.asked)
        return total

    @property
    def size(self) -> tuple[float, float]:
        """A sort key that has the largest first."""
        return -sum(pod.gpus for pod in self.pods), -self.asked["memory"]

    def may_go_to(self, node: Node) -> bool:
        """Return whether all pods may go to a node, if it has room."""
        return all(node.takes(pod.spec) for pod in self.pods)


def wanted_pods(
    run: AgenticRun, architectures: Sequence[str] = (), claim: Mapping[str, Any] | None = None
) -> list[Wanted]:
    """Return what a scheduler has to place: first the pods that write checkpoints.

    Args:
        run: the run.
        architectures: of the operator's worker images. Empty: pods may go to any node.
        claim: the user's own claim for checkpoints, if there is one.
    """
    alone: list[WantedPod] = []
    bound: list[WantedPod] = []
    for role in _roles(run):
        settings = run.spec.roles.of(role)
        ours = placement(run, role, architectures, dict(claim) if claim else None)
        given = {key: settings.overlay.spec[key] for key in ours if key in settings.overlay.spec}
        spec = merged(ours, given)
        pod = WantedPod(role, {**requests_of(settings), "pods": 1.0}, spec, settings.gpus)
        to_pods = (spec.get("affinity") or {}).get("podAffinity") or {}
        shares = "requiredDuringSchedulingIgnoredDuringExecution" in to_pods
        (bound if shares else alone).extend([pod] * run.spec.roles.replicas(role))
    together = [Wanted(tuple(bound))] if bound else []
    return [*together, *(Wanted((pod,)) for pod in alone)]


def _too_large(wanted: Wanted, nodes: list[Node]) -> Finding | None:
    """Return the finding if pods fit on no node, even on an empty one."""
    for pod in wanted.pods if len(wanted.pods) > 1 else ():
        if found := _too_large(Wanted((pod,)), nodes):
            return found
    counted = Counter(pod.role.value for pod in wanted.pods)
    roles = " and ".join(counted)
    takes = [node for node in nodes if wanted.may_go_to(node)]
    if not takes:
        return failed(
            f"none of {len(nodes)} ready nodes takes pods of role {roles}",
            f"correct nodeSelector, tolerations and affinity in spec.roles ({roles}), or the "
            "chart's value architectures: kubectl describe nodes",
        )
    lacking = [name for node in takes if (name := _lacks(node.total, wanted.asked)) is not None]
    if len(lacking) < len(takes):
        return None
    name = lacking[0]
    asked = shown(name, wanted.asked[name])
    offered = f"the largest node offers {shown(name, max(n.total.get(name, 0.0) for n in takes))}"
    if len(wanted.pods) == 1:
        return failed(
            f"a pod of role {roles} asks for {asked}; {offered}",
            f"lower it in spec.roles.{roles}, or add larger nodes",
        )
    pods = ", ".join(f"{count} {role}" for role, count in counted.items())
    return failed(
        f"a ReadWriteOnce claim puts {pods} on one node, and they ask for {asked}; {offered}",
        "set checkpoint.volumeClaim.accessMode: ReadWriteMany or use object storage, lower "
        "spec.roles, or add larger nodes",
    )


def pods_fit(
    run: AgenticRun,
    nodes: list[Node],
    architectures: Sequence[str] = (),
    claim: Mapping[str, Any] | None = None,
) -> Finding:
    """Place the pods of a run on nodes, the largest first, as a scheduler might.

    FAILED: a pod fits on no node, even on an empty one. Warning: they do not fit beside the pods
    that are there now. See `wanted_pods` for the arguments.
    """
    wanted = wanted_pods(run, architectures, claim)
    for group in wanted:
        if found := _too_large(group, nodes):
            return found
    left = {node.name: dict(node.free) for node in nodes}
    waiting: Counter[Role] = Counter()
    for group in sorted(wanted, key=lambda group: group.size):
        for node in nodes:
            if group.may_go_to(node) and _lacks(left[node.name], group.asked) is None:
                _add(left[node.name], group.asked, -1)
                break
        else:
            waiting.update(pod.role for pod in group.pods)
    total = sum(len(group.pods) for group in wanted)
    if waiting:
        named = ", ".join(f"{count} {role.value}" for role, count in waiting.items())
        return warning(
            f"{total - waiting.total()} of {total} pods fit now; no room for {named}",
            "the run waits (Unschedulable) until other pods end: make room, add nodes, or lower "
            "spec.roles",
        )
    return ok(f"all {total} pods fit on {len(nodes)} nodes now")


ZONE = "topology.kubernetes.io/zone"


def volume_reaches(
    run: AgenticRun,
    nodes: list[Node],
    *,
    claim: Mapping[str, Any] | None,
    volume: Mapping[str, Any] | None,
    classes: Iterable[Mapping[str, Any]],
    architectures: Sequence[str] = (),
) -> Finding:
    """Return whether the volume of the run's checkpoints can be mounted where its pods can run.

    Args:
        run: the run.
        nodes: the usable nodes.
        claim: the claim of the checkpoints, if it exists.
        volume: the claim's volume, if it has one.
        classes: the StorageClasses.
        architectures: as in `wanted_pods`.
    """
    if claim is not None and (why := unsuitable_modes(run, dict(claim))):
        found, _, advice = why.partition(": ")
        return failed(found, advice)
    groups = wanted_pods(run, architectures, claim)
    savers = [pod for group in groups for pod in group.pods if pod.role in SAVES]
    able = [node for node in nodes if all(node.takes(pod.spec) for pod in savers)]
    required = ((volume or {}).get("spec", {}).get("nodeAffinity") or {}).get("required")
    if required and able and not any(node.is_selected_by(required) for node in able):
        assert volume is not None
        return failed(
            f"volume {volume['metadata']['name']} is in a zone or on a node where the head and "
            "trainer pods cannot run",
            "use a claim in the zone of their nodes, or correct nodeSelector and tolerations in "
            "spec.roles; a claim of an earlier run keeps its zone: choose another name for the run",
        )
    if claim is None and (storage_class := _class_of(run, classes)):
        zones = {node.labels[ZONE] for node in nodes if ZONE in node.labels}
        reached = {node.labels[ZONE] for node in able if ZONE in node.labels}
        if storage_class.get("volumeBindingMode") != "WaitForFirstConsumer" and zones - reached:
            others = ", ".join(sorted(zones - reached))
            return warning(
                f"StorageClass {storage_class['metadata']['name']} makes volumes before pods are "
                f"placed, and head and trainer pods cannot run in {others}",
                "choose a class with volumeBindingMode: WaitForFirstConsumer in "
                "checkpoint.volumeClaim.storageClassName",
            )
    return ok("where head and trainer pods can run")


def _class_of(run: AgenticRun, classes: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the StorageClass of the claim that is made for the run."""
    claim = run.spec.storage.volume_claim if run.spec.storage else None
    named = claim.storage_class_name if claim else None
    default = "storageclass.kubernetes.io/is-default-class"
    for item in classes:
        annotations = item["metadata"].get("annotations") or {}
        if item["metadata"]["name"] == named or (not named and annotations.get(default) == "true"):
            return item
    return None


def shown(resource: str, amount: float) -> str:
    """Return an amount of a resource in its usual unit."""
    if resource.endswith(("memory", "storage")):  # also limits.memory, requests.storage
        return f"{amount / 2**30:.4g} GiB {resource}"
    return f"{amount:g} {resource}"


def fits_quotas(run: AgenticRun, quotas: Objects) -> Finding:
    """Compare what all pods of a run request with the quotas of the namespace.

    FAILED: a quota never allows it. Warning: not beside what is used now.
    """
    needed = _needed(run)
    unlimited = [role.value for role in _roles(run) if not _has_cpu_limit(run.spec.roles.of(role))]
    never, not_now = [], []
    for quota in quotas:
        status = quota.get("status") or {}
        if "limits.cpu" in (status.get("hard") or {}) and unlimited:
            return failed(
                f"{quota['metadata']['name']} limits limits.cpu, and the pods of "
                f"{', '.join(unlimited)} have no CPU limit",
                "set resources: {limits: {cpu: ...}} in spec.roles for each of them",
            )
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


def _roles(run: AgenticRun) -> tuple[Role, ...]:
    return (Role.DRIVER, *run.spec.roles.workers)


def _has_cpu_limit(settings: PodRole) -> bool:
    given = settings.resources.limits if settings.resources else {}
    return "cpu" in given or any(
        "cpu" in ((box.get("resources") or {}).get("limits") or {})
        for box in settings.overlay.spec.get("containers") or []
        if box["name"] == RAY_CONTAINER
    )


def _needed(run: AgenticRun) -> Amounts:
    """Return what the run uses of the resources that a quota can name."""
    total: Amounts = {}
    roles = _roles(run)
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
