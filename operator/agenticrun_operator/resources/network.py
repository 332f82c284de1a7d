"""The NetworkPolicies of a run.

Policies add up: pods that one of them selects accept what any of them allows, and nothing else. One
policy selects all pods of the run; a role has one more if more, or less, is allowed to its pods.
They exist before the RayCluster, so that no pod is open until they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import DASHBOARD_PORT, LABEL_ROLE, LABEL_RUN_UID, REPORTER_PORT
from agenticrun_api.network import Network, NetworkPeer, RoleEgress
from agenticrun_operator.resources.metadata import (
    Manifest,
    child_metadata,
    controller,
    controller_uid,
)

POLICY_KIND = "NetworkPolicy"
OPERATOR_LABELS = {
    "app.kubernetes.io/name": "agenticrun",
    "app.kubernetes.io/component": "operator",
}
"""Labels of the operator's pods, of any release."""
LABEL_NAMESPACE = "kubernetes.io/metadata.name"
"""Label that Kubernetes gives to each namespace: its name."""
DNS_PORTS = (53, 5353)
"""The second one is the port of OpenShift's DNS pods. Rules see the port of the pod, not that of
its Service."""
NODE_LOCAL = "169.254.0.0/16"
"""Addresses of DNS caches on the pod's own node."""


def network_policies(run: AgenticRun, operator_namespace: str) -> tuple[Manifest, ...]:
    """Return the policies of a run.

    Args:
        run: the run.
        operator_namespace: the namespace of the operator's pods; empty: runs get no policies.
    """
    roles = (Role.DRIVER, *run.spec.roles.workers)
    # Plug-ins see a pod with the address of its node as a stranger: the run would lock it out.
    on_nodes = any(run.spec.roles.of(role).overlay.spec.get("hostNetwork") for role in roles)
    if not operator_namespace or on_nodes:
        return ()
    network = run.spec.network or Network()

    def clients(role: Role | None) -> list[Manifest]:
        return [
            _rule("from", [_peer(client)], client.ports)
            for client in network.allow_from
            if client.role is role
        ]

    found = [_policy(run, None, [{"from": [_own_pods(run)]}, *clients(None)], None)]
    for role in roles:
        ingress = clients(role)
        egress = next((limit for limit in network.egress if limit.role is role), None)
        if role is Role.DRIVER:
            operator = {
                "namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: operator_namespace}},
                "podSelector": {"matchLabels": OPERATOR_LABELS},
            }
            ports = [{"protocol": "TCP", "port": port} for port in (DASHBOARD_PORT, REPORTER_PORT)]
            ingress.insert(0, {"from": [operator], "ports": ports})
        if ingress or egress:
            found.append(_policy(run, role, ingress, egress))
    return tuple(found)


def _policy(
    run: AgenticRun, role: Role | None, ingress: list[Manifest], egress: RoleEgress | None
) -> Manifest:
    """Return one policy.

    It has no field with an empty list: the apiserver leaves such fields out, and what it has stored
    is compared with this.
    """
    suffix = f"-{role.value}" if role else ""
    labels = {LABEL_RUN_UID: run.metadata.uid} | ({LABEL_ROLE: role.value} if role else {})
    spec: Manifest = {"podSelector": {"matchLabels": labels}, "policyTypes": []}
    if ingress:
        spec["policyTypes"].append("Ingress")
        spec["ingress"] = ingress
    if egress:
        spec["policyTypes"].append("Egress")
        spec["egress"] = [
            {"to": [_own_pods(run)]},
            _rule("to", [{"namespaceSelector": {}}, _block(NODE_LOCAL)], DNS_PORTS),
            *(_rule("to", [_peer(peer)], peer.ports) for peer in egress.to),
        ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": POLICY_KIND,
        "metadata": child_metadata(run, f"{run.metadata.name}-network{suffix}"),
        "spec": spec,
    }


def _own_pods(run: AgenticRun) -> Manifest:
    return {"podSelector": {"matchLabels": {LABEL_RUN_UID: run.metadata.uid}}}


def _rule(direction: str, peers: list[Manifest], ports: Iterable[int]) -> Manifest:
    open_ports = [
        {"protocol": protocol, "port": port} for port in ports for protocol in ("TCP", "UDP")
    ]
    return {direction: peers} | ({"ports": open_ports} if open_ports else {})


def _peer(peer: NetworkPeer) -> Manifest:
    if peer.cidr:
        return _block(peer.cidr)
    found: Manifest = {}
    if peer.namespace:
        found["namespaceSelector"] = {"matchLabels": {LABEL_NAMESPACE: peer.namespace}}
    if peer.pod_labels:
        found["podSelector"] = {"matchLabels": dict(peer.pod_labels)}
    return found


def _block(cidr: str) -> Manifest:
    return {"ipBlock": {"cidr": cidr}}


def policy_summary(policy: Manifest) -> Manifest:
    """Return a policy without bookkeeping, with its kind, which objects of a list do not name.

    What is written back was read from the apiserver.
    """
    metadata = {key: item for key, item in policy["metadata"].items() if key in _METADATA}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": POLICY_KIND}
    return {**kind, "metadata": metadata, "spec": policy["spec"]}


_METADATA = frozenset(
    {
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "labels",
        "ownerReferences",
        "finalizers",
        "deletionTimestamp",
    }
)


def is_policy_of(run: AgenticRun, policy: Manifest) -> bool:
    """Return True if the policy was made for this run. Users may label policies of their own."""
    return controller_uid(policy) == run.metadata.uid


def corrected_policies(wanted: Iterable[Manifest], found: Iterable[Manifest]) -> Iterator[Manifest]:
    """Yield the policies that are not as they must be, corrected and with their version.

    Args:
        wanted: the `network_policies` of a run.
        found: its policies, as they were read.
    """
    by_name = {policy["metadata"]["name"]: policy for policy in wanted}
    for policy in found:
        right = by_name.get(policy["metadata"]["name"])
        if right is None:
            continue
        metadata = dict(policy["metadata"])
        metadata["labels"] = (metadata.get("labels") or {}) | right["metadata"]["labels"]
        if not controller(policy):
            owners = metadata.get("ownerReferences") or []
            metadata["ownerReferences"] = owners + right["metadata"]["ownerReferences"]
        if metadata != policy["metadata"] or policy["spec"] != right["spec"]:
            yield {**right, "metadata": metadata}
