"""Placement of actors on the pods of their role, and the cores that they have there.

Only those pods offer the Ray resource of the role's name.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agenticrun_api import Role
from agenticrun_api.names import ENV_NODE
from agenticrun_workers.launch import current_node

Member = TypeVar("Member")


class MisplacedActor(Exception):
    """An actor runs on a node that does not offer its role."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The node, pod and GPUs of an actor."""

    actor: str
    role: Role
    node_id: str
    pod: str
    pid: int
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that are reserved for it."""
    cores: int = 1
    """CPU cores that its process may use."""


def current_placement(actor: str, role: Role) -> Placement:
    """Return the placement of the calling actor."""
    node = current_node()
    return Placement(actor, role, node.node_id, pod_name(), os.getpid(), node.gpus, usable_cores())


def pod_name() -> str:
    """Return the name of this pod, or of this machine."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def node_name() -> str:
    """Return the name of this pod's Kubernetes node; "" outside of Kubernetes."""
    return os.environ.get(ENV_NODE, "")


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the CPU cores that this process may use: the machine's, or its pod's CPU limit.

    Args:
        root: where the control groups are mounted, version 1 or 2.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
    except OSError:  # not in a container
        return cores
    if quota in {"max", "-1"}:
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def check_placement(placement: Placement, roles: Collection[str]) -> None:
    """Raise `MisplacedActor` unless the actor's node offers its role."""
    if placement.role.value not in roles:
        raise MisplacedActor(
            f"{placement.actor} runs on {placement.pod}, which is not a {placement.role.value} pod"
        )


def in_leaving_order(nodes: Mapping[Member, str]) -> list[Member]:
    """Return actors in the order in which they should leave: nodes become empty one by one.

    Those with the fewest actors come first, and among these the newest.

    Args:
        nodes: the node of each actor, the oldest actor first.
    """
    by_node: dict[str, list[Member]] = defaultdict(list)
    for member in reversed(list(nodes)):
        by_node[nodes[member]].append(member)
    return [member for members in sorted(by_node.values(), key=len) for member in members]
