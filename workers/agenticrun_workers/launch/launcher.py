"""Starting actors: the interface that the driver uses, on Ray or inside one process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from agenticrun_api import Role
from agenticrun_workers.launch.handle import ActorHandle, Result

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """The place and the resources of a new actor."""

    role: Role | None = None
    """Start it on a pod of this role; it counts as one of the actors that the pod has room for."""
    node_id: str | None = None
    """Start it on this node only."""
    gpus: int = 0
    """GPUs that are reserved for this actor alone. Needs a role."""
    max_concurrency: int | None = None
    """Calls that run at the same time. Default: 1 for a class without async methods, else 1000."""


class Launcher(Protocol):
    """Starts actors."""

    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        """Start an actor, an instance of class `cls`, and return at once.

        An actor that dies is not restarted: the caller replaces it, because a new one needs its
        settings and weights first. So a constructor only keeps its arguments: its errors arrive as
        the death of the actor, which is retried. An error that the user must fix (`InvalidConfig`)
        belongs into a method.
        """
        ...

    def put(self, value: T) -> Result[T]:
        """Keep a value that is an argument of several calls, so that it is copied only once."""
        ...

    def offers(self, node_id: str) -> Collection[str]:
        """Return the roles whose actors may run on a node; none for an unknown node."""
        ...


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
    node = shared_node.get()
    if node is None:
        from agenticrun_workers.launch.ray_launcher import ray_node

        node = ray_node()
    return node
