"""Decides by NetworkPolicies if a pod can connect to another one, as Kubernetes documents it.

Written from the API's documentation and not from the operator's code, so that tests of the policies
do not repeat what they test. A real network plug-in is `docs/security.md`, Network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Policy = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """A pod; without a namespace, an address outside of the Kubernetes cluster."""

    ip: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def can_connect(
    policies: Iterable[Policy], source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP"
) -> bool:
    """Return True if the policies let one endpoint connect to a port of another one."""
    every = list(policies)
    leaves = _allowed(every, "Egress", source, target, port, protocol)
    return leaves and _allowed(every, "Ingress", target, source, port, protocol)


def _allowed(
    policies: list[Policy], direction: str, pod: Endpoint, peer: Endpoint, port: int, protocol: str
) -> bool:
    """Return True if a pod may have this connection: no policy isolates it, or one allows it."""
    isolating = [item for item in policies if _isolates(item, direction, pod)]
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    rules = [
        (rule, policy["metadata"]["namespace"])
        for policy in isolating
        for rule in policy["spec"].get(key, ())
    ]
    return not isolating or any(
        _is_among(rule.get(peers), peer, namespace) and _has_port(rule.get("ports"), port, protocol)
        for rule, namespace in rules
    )


def _isolates(policy: Policy, direction: str, pod: Endpoint) -> bool:
    spec = policy["spec"]
    implied = ["Ingress"] + (["Egress"] if spec.get("egress") else [])
    return (
        pod.namespace == policy["metadata"]["namespace"]
        and direction in spec.get("policyTypes", implied)
        and _selects(spec["podSelector"], pod.labels)
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert not selector.keys() - {"matchLabels"}, "not known to this evaluator"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _is_among(peers: list[dict[str, Any]] | None, endpoint: Endpoint, own_namespace: str) -> bool:
    """Return True if an endpoint is one of the peers. No peers, or an empty list: everyone is."""
    return not peers or any(_is_peer(peer, endpoint, own_namespace) for peer in peers)


def _is_peer(peer: Mapping[str, Any], endpoint: Endpoint, own_namespace: str) -> bool:
    if "ipBlock" in peer:
        assert (list(peer), list(peer["ipBlock"])) == (["ipBlock"], ["cidr"])
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"], strict=False)
        return ipaddress.ip_address(endpoint.ip) in network
    if endpoint.namespace is None:
        return False
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": endpoint.namespace}
        in_namespace = _selects(peer["namespaceSelector"], labels)
    else:
        in_namespace = endpoint.namespace == own_namespace
    return in_namespace and _selects(peer.get("podSelector", {}), endpoint.labels)


def _has_port(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        item.get("protocol", "TCP") == protocol
        and item.get("port", port) <= port <= item.get("endPort", item.get("port", port))
        for item in ports
    )
