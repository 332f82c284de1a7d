"""Starting actors: the interface that the driver uses, on Ray or inside one process."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
        """Keep a value that is an argument of several calls, so that it is sent only once.

        It travels as one block, as the arguments of `packed` methods do.
        """
        ...

    def offers(self, node_id: str) -> Collection[str]:
        """Return the roles whose actors may run on a node; none for an unknown node."""
        ...
