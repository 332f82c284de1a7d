"""The actors of one attempt, each on the pods of its role, started concurrently."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agenticrun_api import AgenticRun, Role
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.pool import ColocatedSlot, EnginePool, colocated_slots
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.models.tokenizer import TokenizerCorpus
from agenticrun_workers.placement import Placement, check_placement, options_for
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import CRITIC, REFERENCE
from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.buckets import Bucket, MergePlan
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import WeightSync

log = logging.getLogger(__name__)

OWN_PODS = {REFERENCE: Role.REFERENCE, CRITIC: Role.CRITIC}
SCORING_ACTORS: dict[str, type] = {REFERENCE: ReferenceActor, CRITIC: CriticActor}
"""Models that live on the trainer's pods unless the run has pods for their role."""

MANY_CALLS = 10_000
"""Concurrent calls of an async actor."""


class RunActors:
    """Starts and stops all actors of an attempt on an initialised Ray."""

    def __init__(self, run: AgenticRun) -> None:
        self._run = run
        self._pipeline = run.spec.pipeline
        loop = asyncio.get_running_loop()
        self._texts: asyncio.Future[TokenizerCorpus] = loop.create_future()
        self._source: asyncio.Future[ModelSource] = loop.create_future()
        self._trainer_places: asyncio.Future[list[Placement]] = loop.create_future()
        self._devices_free = asyncio.Event()
        """Set when trainers may use their devices: no engine is starting on them."""
        self._env_workers_made = 0
        self._watchers: list[asyncio.Task[None]] = []
        self.weights: WeightSync | None = None
        self._actors: list[Any] = []
        self.placements: list[Placement] = []
        """Placements of all actors, replaced ones included."""
        self.stores: list[Any] = []
        self.engines = EnginePool(
            self._spawn_engine, self._count(Role.INFERENCE), self._engines_changed
        )
        self.envs = EnvPool(self._spawn_env_worker, self._count(Role.ENV))

    async def start(self) -> None:
        """Start all actors.

        Raises:
            InvalidConfig: names the field of the run that cannot work.
        """
        starts = [
            asyncio.create_task(start)
            for start in (self.envs.start(), self._start_engines(), self._start_trainers())
        ]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        await self._engines_changed(self.engines.engines)

    @property
    def failures(self) -> list[asyncio.Future[None]]:
        """Futures that fail when actors die and cannot be replaced."""
        return [self.engines.failure, *self._watchers]

    async def discard(self, results: list[EpisodeResult]) -> None:
        """Delete these trajectories from the stores."""
        by_store: dict[int, list[EpisodeKey]] = {}
        for result in results:
            if result.store >= 0:
                by_store.setdefault(result.store, []).append(result.key)
        await asyncio.gather(
            *(self.stores[store].discard.remote(keys) for store, keys in by_store.items())
        )

    async def stop(self) -> None:
        """End all actors, after a failed `start` too."""
        await self.envs.stop()
        await self.engines.stop()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self.weights is not None:
            await self.weights.stop()
        for actor in self._actors:
            ray.kill(actor)

    def _count(self, role: Role) -> int:
        return self._run.spec.actors(role)

    def _actor(self, cls: type, role: Role, *arguments: Any, **options: Any) -> Any:
        gpus = self._gpus(role)
        actor: Any = (
            ray.remote(cls).options(**options_for(role, gpus), **options).remote(*arguments)
        )
        self._actors.append(actor)
        return actor

    def _gpus(self, role: Role) -> int:
        """Return the GPUs that Ray reserves for one actor.

        Colocated engines reserve none: they share those of the ranks on their pod.
        """
        spec = self._run.spec
        if role is Role.INFERENCE and spec.colocated:
            return 0
        per_actor = spec.pipeline.actor_infer.strategy.gpus if role is Role.INFERENCE else 1
        return per_actor if spec.roles.of(role).gpus else 0

    @property
    def _gpus_of_engine(self) -> int:
        """GPUs that one engine computes on, its own or shared with trainer ranks."""
        spec = self._run.spec
        return (
            spec.pipeline.actor_infer.strategy.gpus if spec.roles.of(spec.engine_role).gpus else 0
        )

    def _threads(self, role: Role) -> int:
        """Return the torch threads of one actor: the CPU request of its pod, divided by its actors.

        The cores of the machine do not count, because pods share them: threads that wait for each
        other on busy cores are several times slower than one. Ray's default would be one thread,
        because our actors reserve no CPU.
        """
        spec = self._run.spec
        pods = spec.engine_role if role is Role.INFERENCE else role
        return max(1, int(cpus(spec.roles.of(pods).cpus)) // spec.actors_per_pod(pods)[role])

    async def _place(self, actor: Any) -> Placement:
        """Return where the actor runs.

        Raises:
            MisplacedActor: it is not on a pod of its role.
        """
        placement: Placement = await actor.placement.remote()
        check_placement(placement)
        self.placements.append(placement)
        log.info(
            "%s runs on %s (node %s, pid %d)",
            placement.actor,
            placement.pod,
            placement.node_id[:8],
            placement.pid,
        )
        return placement

    async def _start_engines(self) -> None:
        """Start the engines; colocated ones before trainers load models, then put them to sleep."""
        if not self._run.spec.colocated:
            self._devices_free.set()
        await self.engines.start()
        if self._run.spec.colocated:
            await self.engines.sleep()
            self._devices_free.set()

    async def _start_trainers(self) -> None:
        own = {part: role for part, role in OWN_PODS.items() if self._run.spec.roles.has(role)}
        used = {CRITIC} if self._pipeline.uses_critic else set()
        used |= {REFERENCE} if self._pipeline.uses_reference else set()
        trainers = self._ranks(TrainerActor, Role.TRAINER, frozenset(used - own.keys()))
        others = {part: self._ranks(SCORING_ACTORS[part], role) for part, role in own.items()}
        placements = await asyncio.gather(*(self._place(actor) for actor in trainers))
        self._trainer_places.set_result(placements)
        self._source.set_result(await self._make_source(trainers[0]))
        sources = ModelSources.of(self._source.result(), self._pipeline)
        await self._devices_free.wait()
        parts, *_ = await asyncio.gather(
            self._set_up(trainers, Role.TRAINER, sources),
            *(self._set_up(actors, OWN_PODS[part], sources) for part, actors in others.items()),
            *(self._place(actor) for actors in others.values() for actor in actors),
        )
        for node_id in dict.fromkeys(placement.node_id for placement in placements):
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            store = ray.remote(TrajectoryStore).options(
                num_cpus=0, max_concurrency=MANY_CALLS, scheduling_strategy=here
            )
            self.stores.append(store.remote())
        self._actors += self.stores
        self._watchers = [
            asyncio.create_task(_until_death(store), name="store") for store in self.stores
        ]
        ranks = [*trainers, *(actor for actors in others.values() for actor in actors)]
        await asyncio.gather(*(actor.set_stores.remote(self.stores) for actor in ranks))
        metadata = self._run.metadata
        name = f"{metadata.name}-{metadata.uid or 'local'}"
        expanding = self._spawn_adapter_node if self._pipeline.actor_train.lora else None
        home = placements[0].node_id
        self.weights = WeightSync(
            self._pipeline.weight_sync, name, trainers, home, self._spawn_node_weights, expanding
        )
        self.trainers = TrainerGroup(self._pipeline, trainers, parts, others, self.weights)

    def _ranks(self, cls: type, role: Role, *arguments: Any) -> list[Any]:
        world = self._count(role)
        return [
            self._actor(cls, role, rank, world, self._pipeline, *arguments) for rank in range(world)
        ]

    async def _set_up(self, actors: list[Any], role: Role, sources: ModelSources) -> list[Any]:
        """Call `setup` on all ranks of one model and return the answers."""
        meeting = await actors[0].rendezvous.remote()
        return await asyncio.gather(
            *(actor.setup.remote(sources, meeting, self._threads(role)) for actor in actors)
        )

    async def _make_source(self, trainer: Any) -> ModelSource:
        """Return the initial model; random weights are made on the first trainer pod."""
        model = self._run.spec.model
        source = ModelSource.of(model)
        if model.initialize is None:
            return source
        return source.with_files(
            await trainer.make_model.remote(model.initialize, await self._texts)
        )

    async def _spawn_engine(self, engine_id: str, slot: int) -> Any:
        shared = await self._colocated_slot(slot) if self._run.spec.colocated else None
        there = (
            {"scheduling_strategy": NodeAffinitySchedulingStrategy(shared.node_id, soft=False)}
            if shared
            else {}
        )
        actor = self._actor(
            EngineActor, Role.INFERENCE, engine_id, max_concurrency=MANY_CALLS, **there
        )
        await self._place(actor)
        if shared:
            await actor.use_gpus.remote(shared.gpus)
        source = await asyncio.shield(self._source)
        await actor.start.remote(
            self._pipeline, source, self._gpus_of_engine, self._threads(Role.INFERENCE)
        )
        return actor

    async def _colocated_slot(self, number: int) -> ColocatedSlot:
        """Return the node and GPUs of a colocated engine.

        Ray's fractional GPUs do not work here: they could put two ranks on one GPU, and cannot
        express an engine on several GPUs.
        """
        carried = self._run.spec.actors_per_pod(Role.TRAINER)
        slots = colocated_slots(
            await asyncio.shield(self._trainer_places),
            carried[Role.TRAINER] // carried[Role.INFERENCE],
        )
        return slots[number]

    async def _spawn_env_worker(self) -> Any:
        name = f"env-worker-{self._env_workers_made}"
        self._env_workers_made += 1
        actor = self._actor(EnvWorker, Role.ENV, name, self._pipeline, max_concurrency=MANY_CALLS)
        await self._place(actor)
        texts = await actor.describe.remote()
        if not self._texts.done():
            self._texts.set_result(texts)
        source = await asyncio.shield(self._source)
        await actor.setup.remote(source.tokenizer())
        return actor

    def _spawn_node_weights(self, node_id: str, run: str, buckets: tuple[Bucket, ...]) -> Any:
        return self._memory_of_node(NodeWeights, node_id, run, buckets)

    def _spawn_adapter_node(
        self, node_id: str, run: str, buckets: tuple[Bucket, ...], plan: MergePlan
    ) -> Any:
        """Spawn the node's LoRA merger. It may use all CPUs of the pod: the engines wait for it."""
        spec = self._run.spec
        threads = max(1, int(cpus(spec.roles.of(spec.engine_role).cpus)))
        arguments = (
            run,
            buckets,
            plan,
            self._source.result(),
            self._pipeline.weight_sync.bucket_bytes,
            threads,
        )
        return self._memory_of_node(AdapterNode, node_id, *arguments)

    def _memory_of_node(self, cls: type, node_id: str, *arguments: Any) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor: Any = (
            ray.remote(cls)
            .options(num_cpus=0, max_concurrency=4, scheduling_strategy=there)
            .remote(*arguments)
        )
        self._actors.append(actor)
        return actor

    async def _engines_changed(self, engines: dict[str, Any]) -> None:
        await self.envs.set_endpoints(engines, self.stores)


def cpus(quantity: str) -> float:
    """Parse a CPU quantity of Kubernetes: `500m` -> 0.5, `2` -> 2.0."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


async def _until_death(store: Any) -> None:
    await store.until_death.remote()
