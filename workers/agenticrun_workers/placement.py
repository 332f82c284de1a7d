"""Placement of actors on the pods of their role.

Only those pods offer the Ray resource of the role's name.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray

from agenticrun_api import Role


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
    """Ids of the GPUs that Ray assigned to it."""


def options_for(role: Role, gpus: float = 0, share: float = 1.0) -> dict[str, Any]:
    """Return the Ray options of an actor of this role.

    It takes none of Ray's CPUs, because Kubernetes sizes the pods. Ray does not restart it: the
    driver replaces actors, because a new one needs its settings and weights first.
    """
    return {"num_cpus": 0, "num_gpus": gpus, "resources": {role.value: share}, "max_restarts": 0}


def current_placement(actor: str, role: Role) -> Placement:
    """Return the placement of the calling actor."""
    pod = os.environ.get("POD_NAME") or socket.gethostname()
    context = ray.get_runtime_context()
    return Placement(
        actor,
        role,
        context.get_node_id(),
        pod,
        os.getpid(),
        tuple(context.get_accelerator_ids().get("GPU", ())),
    )


def check_placement(placement: Placement) -> None:
    """Raise `MisplacedActor` unless the actor's node offers its role."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    resources = {node["NodeID"]: node.get("Resources", {}) for node in nodes}
    if not resources.get(placement.node_id, {}).get(placement.role.value):
        raise MisplacedActor(
            f"{placement.actor} runs on {placement.pod}, which is not a {placement.role.value} pod"
        )
