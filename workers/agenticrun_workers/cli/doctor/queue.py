"""Checks of Kueue, and of the queue that one run names in spec.queue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import GROUP, KIND, PLURAL, VERSION
from agenticrun_api.quantities import quantity
from agenticrun_api.roles import REPORTER_RESOURCES
from agenticrun_workers.cli.doctor.placement import (
    Amounts,
    Objects,
    matches,
    requests_of,
    shown,
)
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Finding, failed, not_checked, ok, warning

KUEUE_VERSION = "v1beta2"
KUEUE_API = f"{KUEUE_VERSION}.kueue.x-k8s.io"
"""Version and group, as kubectl takes them after a kind."""
FRAMEWORK = f"{KIND}.{VERSION}.{GROUP}"
"""The name of runs in `integrations.externalFrameworks` of Kueue's configuration."""
SET_UP = "docs/queues.md#what-the-administrator-sets"


# -- Kueue -----------------------------------------------------------------------------------------


def serves_workloads(crds: Objects) -> Finding | None:
    """Return what is wrong with the version of Kueue's CRDs; None: nothing.

    Args:
        crds: the CRD of Workloads, if there is one.
    """
    if not crds:
        return failed(
            "the cluster does not serve Workloads (kueue.x-k8s.io)",
            "an administrator installs Kueue 0.15 or newer; or apply the run without spec.queue",
        )
    served = [item["name"] for item in crds[0]["spec"]["versions"] if item["served"]]
    if KUEUE_VERSION not in served:
        return failed(
            f"it serves Workloads {', '.join(served)}, and not {KUEUE_VERSION}",
            "an administrator upgrades Kueue to 0.15 or newer",
        )
    return None


def leaves_rayclusters(configuration: str) -> Finding | None:
    """Return a finding if Kueue would also queue the RayClusters of runs; None: it would not.

    Args:
        configuration: its own, as YAML.
    """
    parsed = yaml.safe_load(configuration) or {}
    integrations = parsed.get("integrations") or {}
    queues = "ray.io/raycluster" in (integrations.get("frameworks") or [])
    if not queues or FRAMEWORK in (integrations.get("externalFrameworks") or []):
        return None
    return failed(
        "its configuration does not name AgenticRuns, so that it may queue their RayClusters, too",
        f"an administrator adds {FRAMEWORK} to integrations.externalFrameworks: {SET_UP}",
    )


def rights_for_queues(kubectl: Kubectl, kueue: Objects, operators: Objects) -> Finding | None:
    """Return the first right that Kueue or the operator lacks; None: none, as far as is known.

    Args:
        kubectl: asks the apiserver, which needs the right to impersonate.
        kueue: Kueue's deployments.
        operators: the deployments of AgenticRun's operator.
    """
    for item in kueue:
        account = _account(item)
        if _may(kubectl, account, "list", f"{PLURAL}.{GROUP}") is False:
            return failed(
                f"{account} may not read AgenticRuns, which own the RayClusters",
                f"an administrator gives it the right: {SET_UP}",
            )
    needed = (
        ("create", ("workloads.kueue.x-k8s.io",)),
        ("update", ("workloads.kueue.x-k8s.io", "--subresource=status")),
        ("get", ("resourceflavors.kueue.x-k8s.io",)),
    )
    for item in operators:
        account = _account(item)
        for verb, resource in needed:
            if _may(kubectl, account, verb, *resource) is False:
                return failed(
                    f"the operator ({account}) may not {verb} {resource[0]}",
                    "an administrator runs helm upgrade with --set kueue.enabled=true",
                )
    return None


def _account(deployment: Mapping[str, Any]) -> str:
    name = deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
    return f"system:serviceaccount:{deployment['metadata']['namespace']}:{name}"


def _may(kubectl: Kubectl, account: str, verb: str, *resource: str) -> bool | None:
    """Return whether an account has a right; None if yours may not ask."""
    try:
        answer = kubectl.run("auth", "can-i", verb, *resource, f"--as={account}")
    except SourceError as error:  # kubectl ends with 1 after a no
        return None if "error" in str(error).lower() else False
    return answer.strip() == b"yes"


# -- the queue of a run ----------------------------------------------------------------------------


def queue_is_open(
    run: AgenticRun,
    local_queues: Objects,
    cluster_queues: Objects,
    priorities: Objects,
    namespaces: Objects,
) -> Finding:
    """Return whether the queue that a run names leads to a ClusterQueue that admits runs.

    Args:
        run: the run.
        local_queues: those of its namespace.
        cluster_queues: all.
        priorities: all WorkloadPriorityClasses.
        namespaces: as far as they can be read.
    """
    queue = run.spec.queue
    assert queue is not None
    local = _named(local_queues, queue.name)
    if local is None:
        names = ", ".join(item["metadata"]["name"] for item in local_queues)
        choice = f"name one of these in spec.queue.name: {names}" if names else f"see {SET_UP}"
        return failed(
            f"LocalQueue {queue.name} does not exist in the namespace",
            f"an administrator creates it; or {choice}",
        )
    target = local["spec"]["clusterQueue"]
    cluster = _named(cluster_queues, target)
    if cluster is None:
        return failed(
            f"LocalQueue {queue.name} leads to ClusterQueue {target}, which does not exist",
            "an administrator creates it, or the LocalQueue again with another one",
        )
    if queue.priority_class and _named(priorities, queue.priority_class) is None:
        names = ", ".join(item["metadata"]["name"] for item in priorities) or "none exists"
        return failed(
            f"WorkloadPriorityClass {queue.priority_class} does not exist",
            f"correct spec.queue.priorityClass ({names}), or an administrator creates it",
        )
    for kind, item in (("LocalQueue", local), ("ClusterQueue", cluster)):
        shown_as = f"{kind} {item['metadata']['name']}"
        policy = item["spec"].get("stopPolicy", "None")
        if policy != "None":
            return failed(
                f"{shown_as} is stopped (stopPolicy {policy}): it admits no run",
                f"its administrator sets spec.stopPolicy of the {kind} to None",
            )
        active = next(
            (
                c
                for c in (item.get("status") or {}).get("conditions") or []
                if c["type"] == "Active"
            ),
            None,
        )
        if active and active["status"] == "False":
            return failed(
                f"{shown_as} admits no run: {active.get('message', '')}",
                f"its administrator corrects it: kubectl describe {kind.lower()} "
                f"{item['metadata']['name']}",
            )
    selector, namespace = cluster["spec"].get("namespaceSelector"), local["metadata"]["namespace"]
    if selector is None:
        return failed(
            f"ClusterQueue {target} takes runs of no namespace",
            "its administrator sets spec.namespaceSelector ({}: all namespaces)",
        )
    there = _named(namespaces, namespace)
    if there and not _selects(selector, there["metadata"].get("labels") or {}):
        return failed(
            f"ClusterQueue {target} takes no runs of namespace {namespace}",
            "its administrator changes spec.namespaceSelector, or the labels of the namespace",
        )
    waiting = (local.get("status") or {}).get("pendingWorkloads", 0)
    return ok(f"{queue.name} leads to ClusterQueue {target}; {waiting} wait in it")


def queue_has_quota(
    run: AgenticRun,
    local_queues: Objects,
    cluster_queues: Objects,
    flavors: Objects,
    configuration: str,
    topologies: Objects | None = None,
) -> Finding:
    """Return whether the ClusterQueue can ever admit a run, and whether it can now.

    Kueue places all pods of a role on one flavor of each resource group.

    Args:
        run: the run.
        local_queues: those of its namespace.
        cluster_queues: all.
        flavors: all.
        configuration: Kueue's, as YAML; empty if it cannot be read.
        topologies: all; None: they are not read.
    """
    assert run.spec.queue is not None
    local = _named(local_queues, run.spec.queue.name)
    cluster = _named(cluster_queues, local["spec"]["clusterQueue"]) if local else None
    if cluster is None:
        return failed("there is no ClusterQueue", "see the row queue")
    name, groups = cluster["metadata"]["name"], cluster["spec"].get("resourceGroups") or []
    needed = dict(_asked(run))
    settings = (yaml.safe_load(configuration) or {}).get("resources") or {}
    changed = {item["input"] for item in settings.get("transformations") or []}
    if found := sorted(changed & {name for amounts in needed.values() for name in amounts}):
        return not_checked(f"Kueue counts {found[0]} in its own way (resources.transformations)")
    covered = {resource for group in groups for resource in group["coveredResources"]}
    ignores = settings.get("quotaCheckStrategy") == "IgnoreUndeclared"
    excluded = tuple(settings.get("excludeResourcePrefixes") or ())
    needed = {
        role: {
            name: amount
            for name, amount in amounts.items()
            if not name.startswith(excluded) and (name in covered or not ignores)
        }
        for role, amounts in needed.items()
    }
    unless = "" if configuration else ", unless Kueue's settings, which cannot be read, ignore it"
    for role, amounts in needed.items():
        if lacking := sorted(amounts.keys() - covered):
            return failed(
                f"ClusterQueue {name} has no quota for {lacking[0]}, which {role.value} pods ask "
                "for",
                f"its administrator adds {', '.join(lacking)} to spec.resourceGroups{unless}",
            )
    known = {item["metadata"]["name"]: item.get("spec") or {} for item in flavors}
    used, short = _reserved(cluster), ""
    for group in groups:
        names = [item["name"] for item in group["flavors"]]
        if missing := [flavor for flavor in names if flavor not in known]:
            return failed(
                f"ResourceFlavor {missing[0]} of ClusterQueue {name} does not exist",
                "its administrator creates it",
            )
        limits = [_limits(flavor, cluster) for flavor in group["flavors"]]
        of_group = {
            role: {name: amounts[name] for name in group["coveredResources"] if name in amounts}
            for role, amounts in needed.items()
        }
        pairs = [(known[flavor], limit) for flavor, limit in zip(names, limits, strict=True)]
        for role, amounts in of_group.items():
            if trouble_near := _lacks_topology(run, role, amounts, pairs, topologies, name):
                return trouble_near
        if trouble := _too_large(of_group, limits):
            return failed(
                f"{trouble} of ClusterQueue {name} has less",
                "lower spec.roles, choose another queue, or its administrator raises the quota",
            )
        for resource, total, limit in _totals(of_group, limits):
            left = limit - used.get(resource, 0.0)
            if left < total:
                short = (
                    short
                    or f"{shown(resource, total)} needed, {shown(resource, max(left, 0.0))} left"
                )
    if short:
        return warning(
            f"ClusterQueue {name}: {short}",
            "the run waits (Queued) until other runs end, or preempts runs of lower priority",
        )
    return ok(f"ClusterQueue {name} has quota for all pods now")


def _lacks_topology(
    run: AgenticRun,
    role: Role,
    amounts: Amounts,
    flavors: list[tuple[Mapping[str, Any], Amounts]],
    topologies: Objects | None,
    queue: str,
) -> Finding | None:
    """Return why no flavor of a resource group suits a role with a topology; None: one does.

    Args:
        run: the run.
        role: the role.
        amounts: what its pods ask for of the group's resources.
        flavors: the spec and the limits of each.
        topologies: as in `queue_has_quota`.
        queue: the name of the ClusterQueue.
    """
    asked = run.spec.roles.topology(role)
    if asked is None or not amounts:
        return None
    level, path = asked.required or asked.preferred, f"spec.roles.{role.value}.topology"
    place = f"ResourceFlavor of ClusterQueue {queue} for {min(amounts)}"
    near = [(spec["topologyName"], limits) for spec, limits in flavors if spec.get("topologyName")]
    if not near:
        return failed(
            f"no {place} has a Topology, which {role.value} pods ask for",
            f"leave {path} out, or an administrator sets topologyName of a ResourceFlavor",
        )
    if topologies is not None:
        levels = {
            item["metadata"]["name"]: [one["nodeLabel"] for one in item["spec"]["levels"]]
            for item in topologies
        }
        known = sorted({one for name, _ in near for one in levels.get(name, ())})
        near = [(name, limits) for name, limits in near if level in levels.get(name, ())]
        if not near:
            return failed(
                f"no {place} has a Topology with level {level}, which {role.value} pods ask for",
                f"name another level in {path} ({', '.join(known) or 'there is none'}), or an "
                "administrator adds it to the Topology",
            )
    if trouble := _too_large({role: amounts}, [limits for _, limits in near]):
        return failed(
            f"{trouble} with level {level} of ClusterQueue {queue} has less",
            f"lower spec.roles, leave {path} out, or its administrator raises the quota",
        )
    return None


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects what has these labels."""
    exact = (selector.get("matchLabels") or {}).items() <= labels.items()
    return exact and all(matches(one, labels) for one in selector.get("matchExpressions") or [])


def _named(items: Objects, name: str) -> dict[str, Any] | None:
    return next((item for item in items if item["metadata"]["name"] == name), None)


def _asked(run: AgenticRun) -> Iterator[tuple[Role, Amounts]]:
    """Yield what the pods of each role request at least for the run to be admitted."""
    roles, fewest = run.spec.roles, run.spec.roles.fewest_in_a_queue
    for role in (Role.DRIVER, *roles.workers):
        number = fewest.get(role.value, roles.replicas(role))
        amounts = {
            name: amount * number for name, amount in requests_of(roles.of(role)).items() if amount
        }
        if role is Role.DRIVER:
            for name, asked in REPORTER_RESOURCES.requests.items():
                amounts[name] = amounts.get(name, 0.0) + quantity(asked)
        yield role, amounts


def _limits(flavor: Mapping[str, Any], cluster_queue: Mapping[str, Any]) -> Amounts:
    """Return the most that a run can get of a flavor, with what its ClusterQueue may borrow.

    Without a borrowing limit, that is what the whole cohort has, which is not read.
    """
    in_cohort = bool(cluster_queue["spec"].get("cohortName"))
    limits = {}
    for item in flavor["resources"]:
        borrowed = math.inf if in_cohort else 0.0
        if item.get("borrowingLimit") is not None:
            borrowed = quantity(str(item["borrowingLimit"]))
        limits[item["name"]] = quantity(str(item["nominalQuota"])) + borrowed
    return limits


def _too_large(needed: Mapping[Role, Amounts], limits: list[Amounts]) -> str:
    """Return what is larger than the quota of a resource group; empty: nothing.

    Args:
        needed: what the pods of each role ask for of its resources.
        limits: of each of its flavors.
    """
    for role, amounts in needed.items():
        if any(all(one.get(n, 0.0) >= amount for n, amount in amounts.items()) for one in limits):
            continue
        most = {name: max((one.get(name, 0.0) for one in limits), default=0.0) for name in amounts}
        name = max(amounts, key=lambda name: amounts[name] / max(most[name], 1e-9))
        return f"{role.value} pods ask for {shown(name, amounts[name])}, and each flavor"
    for name, total, limit in _totals(needed, limits):
        if total > limit:
            return f"the run asks for {shown(name, total)}, and the quota"
    return ""


def _totals(
    needed: Mapping[Role, Amounts], limits: list[Amounts]
) -> Iterator[tuple[str, float, float]]:
    """Yield each resource of a group with what the run asks for, and what all flavors have."""
    for name in {name: None for amounts in needed.values() for name in amounts}:
        total = math.fsum(amounts.get(name, 0.0) for amounts in needed.values())
        yield name, total, sum(one.get(name, 0.0) for one in limits)


def _reserved(cluster_queue: Mapping[str, Any]) -> Amounts:
    """Return what the runs in a ClusterQueue hold of each resource."""
    total: Amounts = {}
    for flavor in (cluster_queue.get("status") or {}).get("flavorsReservation") or []:
        for item in flavor.get("resources") or []:
            total[item["name"]] = total.get(item["name"], 0.0) + quantity(str(item["total"]))
    return total
