"""Starts the actors of an attempt, each on a pod of its role, and knows where they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from agenticrun_api import AgenticRun, AgenticRunSpec, Role
from agenticrun_api.progress import MAX_VACANT_PODS
from agenticrun_api.quantities import quantity
from agenticrun_workers.launch import ActorHandle, ActorOptions, Launcher
from agenticrun_workers.placement import Placement, check_placement

log = logging.getLogger(__name__)

A = TypeVar("A")
P = ParamSpec("P")


class ActorStarter:
    """Starts actors, and ends them all at the end of the attempt.

    Args:
        spec: says what the pods of each role have.
        launcher: starts the actors.
    """

    def __init__(self, spec: AgenticRunSpec, launcher: Launcher) -> None:
        self.launcher = launcher
        self._spec = spec
        self._actors: WeakSet[ActorHandle[object]] = WeakSet()
        """Handles that are in use: those of replaced actors are gone."""
        self._places: WeakKeyDictionary[ActorHandle[Any], Placement] = WeakKeyDictionary()
        """The places of actors that were noted."""
        self._pods: dict[Role, dict[str, None]] = {}
        """The pods where such actors have run, by role, the newest last."""

    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        """Start an actor, as `Launcher.start` does."""
        actor = self.launcher.start(options, cls, *args, **kwargs)
        self._actors.add(actor)
        return actor

    def options(self, role: Role) -> ActorOptions:
        """Return the options of an actor on the pods of a role, with the GPUs that it reserves.

        Colocated engines reserve none: they share those of the ranks on their pod.
        """
        spec = self._spec
        # Reserved GPUs would be counted twice, and Ray would never place the engine.
        if (role is Role.INFERENCE and spec.colocated) or not spec.roles.of(role).gpus:
            return ActorOptions(role)
        per_engine = spec.pipeline.actor_infer.strategy.gpus
        return ActorOptions(role, gpus=per_engine if role is Role.INFERENCE else 1)

    def check(self, placement: Placement) -> Placement:
        """Log where an actor runs.

        Raises:
            MisplacedActor: it is not on a pod of its role.
        """
        # Ray places by resources, which users can set on any pod; only the pod itself knows its
        # role.
        check_placement(placement, self.launcher.offers(placement.node_id))
        log.info(
            "%s runs on %s (node %s, pid %d)",
            placement.actor,
            placement.pod,
            placement.node_id[:8],
            placement.pid,
        )
        return placement

    def note(self, actor: ActorHandle[Any], placement: Placement) -> None:
        """Remember where an actor runs. Raises `MisplacedActor`."""
        self._places[actor] = self.check(placement)
        self._pods.setdefault(placement.role, {})[placement.pod] = None

    def place_of(self, actor: ActorHandle[Any]) -> Placement:
        """Return the place of an actor that was noted."""
        return self._places[actor]

    def vacant_pods(self, role: Role, live: Collection[ActorHandle[Any]]) -> list[str]:
        """Return the pods where actors of a role have run and none runs now, the newest last."""
        # One pod may hold several actors: it is vacant when none is left.
        used = {self._places[actor].pod for actor in live}
        return [pod for pod in self._pods.get(role, {}) if pod not in used][-MAX_VACANT_PODS:]

    def kill_all(self) -> None:
        """End all actors."""
        for actor in self._actors:
            actor.kill()


def torch_threads(run: AgenticRun, role: Role, cores: int) -> int:
    """Return the torch threads of one rank or engine: the CPU request of its pod, divided.

    Ray's default would be one. On a laptop, roles without `cpus` share the machine. In a
    synchronous run, trainers and engines wait for each other. Idle threads sleep, so each side has
    threads for all cores, and nothing changes when the other side takes over. With staleness both
    compute at once, and have equal shares.

    Args:
        role: what the actor does.
        cores: CPU cores that its process may use.
    """
    spec, pipeline = run.spec, run.spec.pipeline
    pods = spec.engine_role if role is Role.INFERENCE else role
    settings = spec.roles.of(pods)
    # Threads that wait for each other on busy cores are slow: on two cores that other programs
    # used, a step of examples/frozen-lake.yaml took 8.5 s with two threads and 1.9 s with one. So
    # pods, which share their node, keep to their requests. GPUs leave the cores to other
    # processes, servers poll while they are idle, and the bits of a deterministic run depend on
    # the number of threads.
    if (
        run.metadata.uid
        or "cpus" in settings.model_fields_set
        or settings.gpus
        or pipeline.actor_infer.strategy.name != "transformers"
        or pipeline.deterministic
    ):
        return max(1, int(quantity(settings.cpus)) // spec.actors_per_pod(pods)[role])
    engines = spec.actors(Role.INFERENCE)
    ranks = sum(
        spec.actors(each)
        for each in (Role.TRAINER, Role.REFERENCE, Role.CRITIC)
        if spec.roles.has(each)
    )
    if pipeline.staleness.max:
        return max(1, cores // (engines + ranks))
    return max(1, cores // (engines if role is Role.INFERENCE else ranks))
