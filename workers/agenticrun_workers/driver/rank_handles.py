"""The ranks of policy, reference and critic, from their processes to loaded models and weights."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from agenticrun_api import AgenticRun, Pipeline, Role
from agenticrun_api.quantities import quantity
from agenticrun_workers.driver.actors import ActorStarter, torch_threads
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.placement import Placement
from agenticrun_workers.sizing.gpus import recognize
from agenticrun_workers.sizing.plan import Kind, plan_run
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import CRITIC, REFERENCE, RankActor
from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor
from agenticrun_workers.weights.buckets import Bucket, MergePlan
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import WeightSync
from agenticrun_workers.weights.transports import NODE_CALLS

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class RankHandles:
    """The ranks of policy, reference and critic; the latter two only on pods of their own."""

    run: AgenticRun
    starter: ActorStarter
    trainers: list[ActorHandle[TrainerActor]]
    references: list[ActorHandle[ReferenceActor]]
    critics: list[ActorHandle[CriticActor]]

    @staticmethod
    def start(run: AgenticRun, starter: ActorStarter) -> RankHandles:
        """Start the processes, which load nothing yet."""
        spec, pipeline = run.spec, run.spec.pipeline
        uses = {
            Role.CRITIC: (CRITIC, pipeline.uses_critic),
            Role.REFERENCE: (REFERENCE, pipeline.uses_reference),
        }
        hosted = frozenset(
            module for role, (module, used) in uses.items() if used and not spec.roles.has(role)
        )

        def scoring(cls: Callable[[int, int, Pipeline], A], role: Role) -> list[ActorHandle[A]]:
            world = spec.actors(role) if spec.roles.has(role) else 0
            return [
                starter.start(starter.options(role), cls, rank, world, pipeline)
                for rank in range(world)
            ]

        world, options = spec.actors(Role.TRAINER), starter.options(Role.TRAINER)
        return RankHandles(
            run,
            starter,
            [
                starter.start(options, TrainerActor, rank, world, pipeline, hosted)
                for rank in range(world)
            ],
            scoring(ReferenceActor, Role.REFERENCE),
            scoring(CriticActor, Role.CRITIC),
        )

    @property
    def by_name(self) -> dict[str, ActorHandle[RankActor]]:
        """All of them, by role and rank."""
        ranks: dict[Role, Sequence[ActorHandle[RankActor]]] = {
            Role.TRAINER: self.trainers,
            Role.REFERENCE: self.references,
            Role.CRITIC: self.critics,
        }
        return {
            f"{role}-{rank}": actor
            for role, actors in ranks.items()
            for rank, actor in enumerate(actors)
        }

    async def locate(self, ranks: Sequence[ActorHandle[RankActor]]) -> list[Placement]:
        """Wait until some of the ranks run, and return where. Raises `MisplacedActor`."""
        places = await asyncio.gather(
            *(actor.call(lambda rank: rank.placement()) for actor in ranks)
        )
        return [self.starter.check(place) for place in places]

    async def check_fit(self, sources: ModelSources) -> None:
        """Refuse a run that cannot fit on the GPU of its first rank, before weights are loaded.

        Raises:
            InvalidConfig: it cannot, or its engines cannot.
        """
        # On CPUs there is no device memory that could be too small.
        if not self.run.spec.roles.of(Role.TRAINER).gpus:
            return
        found = await self.trainers[0].call(lambda rank: rank.describe(sources))
        if found is None:
            return
        name, memory, shapes = found
        plan = plan_run(self.run, shapes, recognize(name, memory))
        log.info("plan for %s: %s", name, plan.estimate)
        for place in plan.too_large(Kind.GPU):
            nearest = [f"; with {c.why}: {' '.join(c.settings)}" for c in plan.changes[:1]]
            raise InvalidConfig(place.field, place.sum + "".join(nearest))

    async def load_models(self, places: Sequence[Placement], sources: ModelSources) -> list[int]:
        """Load policy, reference and critic at the same time.

        Args:
            places: of the policy's ranks.

        Returns:
            the share of each batch that each of the policy's ranks gets.
        """

        async def load_scoring(
            role: Role, actors: Sequence[ActorHandle[ReferenceActor] | ActorHandle[CriticActor]]
        ) -> None:
            # Without pods of its own the module is loaded by the trainers.
            if actors:
                place, *_ = await self.locate(actors)
                await load_on(actors, sources, torch_threads(self.run, role, place.cores))

        threads = torch_threads(self.run, Role.TRAINER, places[0].cores)
        shares, *_ = await asyncio.gather(
            load_on(self.trainers, sources, threads),
            load_scoring(Role.REFERENCE, self.references),
            load_scoring(Role.CRITIC, self.critics),
        )
        return shares

    def weight_sync(self, home: str, source: ModelSource) -> WeightSync:
        """Make the weight sync from the trainers, the first of which runs on node `home`."""
        run, starter = self.run, self.starter
        spec, pipeline = run.spec, run.spec.pipeline

        def on_node(node_id: str) -> ActorOptions:
            return ActorOptions(node_id=node_id, max_concurrency=NODE_CALLS)

        def spawn(node_id: str, name: str, buckets: tuple[Bucket, ...]) -> ActorHandle[NodeWeights]:
            return starter.start(on_node(node_id), NodeWeights, name, buckets)

        def spawn_merger(
            node_id: str, name: str, buckets: tuple[Bucket, ...], plan: MergePlan
        ) -> ActorHandle[AdapterNode]:
            # It may use all CPUs of the pod: the engines wait for it.
            threads = max(1, int(quantity(spec.roles.of(spec.engine_role).cpus)))
            size = pipeline.weight_sync.bucket_bytes
            return starter.start(
                on_node(node_id), AdapterNode, name, buckets, plan, source, size, threads
            )

        return WeightSync(
            pipeline.weight_sync,
            f"{run.metadata.name}-{run.metadata.uid or 'local'}",
            self.trainers,
            home,
            spawn,
            spawn_merger if pipeline.actor_train.lora else None,
        )


class _LoadsModels(Protocol[T_co]):
    """A rank that has not loaded its models yet."""

    def rendezvous(self) -> tuple[str, int]: ...

    def setup(
        self, sources: ModelSources, rendezvous: tuple[str, int], threads: int, /
    ) -> T_co: ...

    def warnings(self, driver: int, /) -> list[str]: ...


async def load_on(
    actors: Sequence[ActorHandle[_LoadsModels[T]]], sources: ModelSources, threads: int
) -> list[T]:
    """Let ranks meet and load their models. Repeats the warnings of the first: all load the same.

    Returns:
        what their `setup` returned.
    """
    # The first rank chooses a free port on its own node, where it will listen.
    meeting = await actors[0].call(lambda rank: rank.rendezvous())
    loaded = await asyncio.gather(
        *(actor.call(lambda rank: rank.setup(sources, meeting, threads)) for actor in actors)
    )
    here = os.getpid()
    for message in await actors[0].call(lambda rank: rank.warnings(here)):
        log.warning("%s", message)
    return loaded
