"""`spec.network`: who may reach the pods of a run, and what these may reach."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agenticrun_api.base import Model, Name, Rule, unique
from agenticrun_api.names import Role
from agenticrun_api.roles import Labels

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
CIDR_PATTERN = (
    rf"^(({_BYTE}\.){{3}}{_BYTE}/(3[0-2]|[12]?[0-9])"
    r"|[0-9a-fA-F:]*:[0-9a-fA-F:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
"""Ranges of addresses of IPv4, and a superset of those of IPv6, which the apiserver checks."""

Cidr = Annotated[str, Field(max_length=43, pattern=CIDR_PATTERN)]
Port = Annotated[int, Field(ge=1, le=65_535)]


class NetworkPeer(Model):
    """Pods of the Kubernetes cluster (`namespace`, `podLabels`), or addresses (`cidr`)."""

    RULES = (
        Rule(
            "!has(self.cidr) || (!has(self.namespace) && size(self.podLabels) == 0)",
            "cidr names addresses, namespace and podLabels name pods: write two entries",
            ".cidr",
            lambda peer: peer.cidr is None or (peer.namespace is None and not peer.pod_labels),
        ),
        Rule(
            "has(self.cidr) || has(self.namespace) || size(self.podLabels) > 0",
            "set podLabels, namespace or cidr: this entry names no one",
            ".podLabels",
            lambda peer: bool(peer.cidr or peer.namespace or peer.pod_labels),
        ),
    )

    namespace: Name | None = None
    """Namespace of the pods. Default: that of the run."""
    pod_labels: Labels = {}
    """Labels that the pods have. Empty: all pods of `namespace`."""
    cidr: Cidr | None = None
    """Range of addresses, such as 203.0.113.0/24."""
    ports: Annotated[list[Port], Field(max_length=16)] = []
    """TCP and UDP ports. Empty: all ports."""


class NetworkClient(NetworkPeer):
    """A peer that may connect to pods of the run."""

    role: Role | None = None
    """The role of the pods that it may reach. Default: the pods of all roles."""


class RoleEgress(Model):
    """Destinations that the pods of one role may reach."""

    role: Role
    """The role of the pods."""
    to: Annotated[list[NetworkPeer], Field(max_length=16)] = []
    """Destinations besides the run's own pods and DNS inside the Kubernetes cluster."""


class Network(Model):
    """Connections of the run's pods, as NetworkPolicies that the operator makes before the pods
    and keeps. Always let in: pods of the same run at all ports, and the operator at ports 8265 and
    8787 of the head. It may change at any time. The network plug-in of the Kubernetes cluster must
    enforce NetworkPolicies: `agenticrun doctor --network` tries it.
    """

    RULES = (unique("egress", "role", message="egress names a role twice: write one entry for it"),)

    allow_from: Annotated[list[NetworkClient], Field(max_length=16)] = []
    """Others that may connect to pods of the run, such as agents in other pods or Prometheus."""
    egress: Annotated[list[RoleEgress], Field(max_length=len(Role))] = []
    """The roles with pods that may not connect to everything."""
