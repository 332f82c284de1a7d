"""Actors land on the pods of their role, because only those pods offer the Ray resource of that name."""

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
    """Where an actor runs, as it says itself."""

    actor: str
    role: Role
    node_id: str
    pod: str
    pid: int
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that Ray gave it."""


def options_for(role: Role, gpus: float = 0, share: float = 1.0) -> dict[str, Any]:
    """Ray options of an actor of this role. It takes no CPU of Ray's count: pods are sized by Kubernetes.

    No restarts by Ray: the driver replaces actors itself, because a new one needs its settings and weights first.
    """
    return {"num_cpus": 0, "num_gpus": gpus, "resources": {role.value: share}, "max_restarts": 0}


def here(actor: str, role: Role) -> Placement:
    """The placement of the calling actor."""
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
    nodes = {node["NodeID"]: node.get("Resources", {}) for node in ray.nodes()}  # type: ignore[no-untyped-call]
    if not nodes.get(placement.node_id, {}).get(placement.role.value):
        raise MisplacedActor(
            f"{placement.actor} runs on {placement.pod}, which is not a {placement.role.value} pod"
        )
