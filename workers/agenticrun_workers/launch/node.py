"""The machine that an actor runs on."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """The machine that the calling actor runs on, as its launcher knows it."""

    node_id: str
    address: str
    """IP address at which other actors reach this one."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that are reserved for this actor."""


shared_node: ContextVar[Node | None] = ContextVar("shared_node", default=None)
"""Set in the threads of actors that share a process; elsewhere Ray knows the node."""


def current_node() -> Node:
    """Return the node of the calling actor."""
    shared = shared_node.get()
    if shared is not None:
        return shared
    import ray  # takes a second, which processes without Ray do not have to wait

    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    if not ray.is_initialized():
        return Node("", address)
    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Node(context.get_node_id(), address, gpus)
