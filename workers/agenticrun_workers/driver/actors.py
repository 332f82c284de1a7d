"""The actors of one attempt, each on the pods of its role, started concurrently."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from agenticrun_api import AgenticRun, AgenticRunSpec, Pipeline, PoolStatus, Role
from agenticrun_api.progress import MAX_VACANT_PODS
from agenticrun_api.quantities import quantity
from agenticrun_api.roles import ELASTIC
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.pool import ColocatedSlot, EnginePool, colocated_slots
from agenticrun_workers.launch import ActorHandle, ActorOptions, Launcher
from agenticrun_workers.models.source import ModelSource, ModelSources, TokenizerCorpus
from agenticrun_workers.placement import Placement, check_placement
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.sizing.gpus import recognize
from agenticrun_workers.sizing.plan import Kind, plan_run
from agenticrun_workers.tracing import Traced
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import CRITIC, REFERENCE, RankActor
from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.buckets import Bucket, MergePlan
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import WeightSync
from agenticrun_workers.weights.transports import NODE_CALLS, Transport

log = logging.getLogger(__name__)

A = TypeVar("A")
P = ParamSpec("P")

MANY_CALLS = 10_000
"""Concurrent calls of an async actor."""


class RunActors:
    """Starts and stops all actors of an attempt.

    Args:
        run: the run.
        launcher: starts the actors.
        on_change: called when engines or env workers join, die or leave.
    """

    def __init__(
        self,
        run: AgenticRun,
        launcher: Launcher,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._launcher = launcher
        self._on_change = on_change
        self._pipeline = run.spec.pipeline
        loop = asyncio.get_running_loop()
        self._texts: asyncio.Future[TokenizerCorpus] = loop.create_future()
        self._source: asyncio.Future[ModelSource] = loop.create_future()
        self._trainer_places: asyncio.Future[list[Placement]] = loop.create_future()
        self._devices_free = asyncio.Event()
        """Set when trainers may use their devices: no engine is starting on them."""
        self._env_workers_made = 0
        self._watchers: list[asyncio.Task[None]] = []
        self._ranks: dict[str, ActorHandle[RankActor]] = {}
        self.weights: WeightSync | None = None
        self._actors: WeakSet[ActorHandle[object]] = WeakSet()
        """Handles that are in use: those of replaced actors are gone."""
        self._places: WeakKeyDictionary[ActorHandle[Any], Placement] = WeakKeyDictionary()
        """The places of engines and env workers."""
        self._pods: dict[Role, dict[str, None]] = {}
        """The pods where such actors have run, by role, the newest last."""
        self._fixed = _fixed_pools(run.spec)
        self.stores: list[ActorHandle[TrajectoryStore]] = []
        self._reported: Metrics = {}
        """Spilled and lost trajectories and episodes at the last call of `metrics`."""
        self.engines = EnginePool(
            self._spawn_engine,
            self._count(Role.INFERENCE),
            self._engines_changed,
            self._start_engine,
        )
        self.envs = EnvPool(
            self._spawn_env_worker,
            self._count(Role.ENV),
            node_of=lambda worker: self._places[worker].node_id,
            on_change=on_change,
        )

    async def start(self) -> None:
        """Start all actors.

        Raises:
            InvalidConfig: names the field of the run that cannot work.
        """
        starts = [
            asyncio.create_task(start)
            for start in (
                self.envs.start(self._needed(Role.ENV)),
                self._start_engines(),
                self._start_trainers(),
            )
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

    @property
    def traced(self) -> dict[str, ActorHandle[Traced]]:
        """Currently running actors to record in a trace, by name."""
        workers = {f"env worker {number}": actor for number, actor in self.envs.workers.items()}
        return {**self._ranks, **self.engines.engines, **workers}

    def resize(self, replicas: Mapping[Role, int]) -> None:
        """Follow other numbers of pods, by role, in the background.

        Roles that cannot change while they run keep theirs; `pools` says why.
        """
        for role, pool in self._pools.items():
            if role in replicas and not self._fixed.get(role):
                self._run = self._run.with_replicas({role.value: replicas[role]})
                pool.resize(self._count(role))

    @property
    def pools(self) -> dict[Role, PoolStatus]:
        """Counts of the current engines and env workers, by the role of their pods."""
        live: dict[Role, Collection[ActorHandle[Any]]] = {
            Role.INFERENCE: self.engines.engines.values(),
            Role.ENV: self.envs.workers.values(),
        }
        return {
            role: PoolStatus(
                replicas=self._run.spec.roles.replicas(role),
                serving=len(live[role]),
                joining=pool.joining,
                leaving=pool.leaving,
                vacant=self._vacant(role, live[role]),
                fixed=self._fixed.get(role, ""),
            )
            for role, pool in self._pools.items()
        }

    @property
    def sizes(self) -> Metrics:
        """Return the numbers of engines and env workers at work, as metrics."""
        return {
            "system/engines": float(len(self.engines.serving)),
            "system/env_workers": float(len(self.envs.workers)),
        }

    @property
    def _pools(self) -> dict[Role, EnginePool | EnvPool]:
        """The pools with pods of their own."""
        pools: dict[Role, EnginePool | EnvPool] = {
            Role.INFERENCE: self.engines,
            Role.ENV: self.envs,
        }
        return {role: pool for role, pool in pools.items() if self._run.spec.roles.has(role)}

    def _vacant(self, role: Role, live: Collection[ActorHandle[Any]]) -> list[str]:
        """Return the pods where actors of a role have run and none runs now, the newest last."""
        used = {self._places[actor].pod for actor in live}
        known = self._pods.get(role, {})
        return [pod for pod in known if pod not in used][-MAX_VACANT_PODS:]

    async def discard(self, results: list[EpisodeResult]) -> None:
        """Delete these trajectories from the stores."""
        by_store: dict[int, list[EpisodeKey]] = {}
        for result in results:
            if result.store >= 0:
                by_store.setdefault(result.store, []).append(result.key)
        await asyncio.gather(
            *(
                self.stores[store].call(lambda keeper: keeper.discard(keys))
                for store, keys in by_store.items()
            )
        )

    async def metrics(self) -> Metrics:
        """Return what the stores have in memory; what was spilled and lost since the last call."""
        uses = await asyncio.gather(
            *(store.call(lambda keeper: keeper.use()) for store in self.stores)
        )
        before, self._reported = (
            self._reported,
            {
                "rollout/spilled_bytes": float(sum(use.spilled_bytes for use in uses)),
                "rollout/spilled_trajectories": float(
                    sum(use.spilled_trajectories for use in uses)
                ),
                "rollout/unspilled_trajectories": float(
                    sum(use.unspilled_trajectories for use in uses)
                ),
                "rollout/lost_episodes": float(self.envs.lost_episodes),
            },
        )
        since = {name: value - before.get(name, 0.0) for name, value in self._reported.items()}
        return {"rollout/store_bytes": float(sum(use.memory_bytes for use in uses)), **since}

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
            actor.kill()

    def _count(self, role: Role) -> int:
        return self._run.spec.actors(role)

    def _needed(self, role: Role) -> int:
        """Return the number of actors of a role on its minReplicas: the others join later."""
        spec = self._run.spec
        if role in self._fixed or (role is Role.INFERENCE and spec.colocated):
            return self._count(role)
        return spec.roles.min_replicas(role) * spec.actors_per_pod(role)[role]

    def _start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        actor = self._launcher.start(options, cls, *args, **kwargs)
        self._actors.add(actor)
        return actor

    def _options(self, role: Role) -> ActorOptions:
        return ActorOptions(role, gpus=self._gpus(role))

    def _gpus(self, role: Role) -> int:
        """Return the GPUs that one actor reserves.

        Colocated engines reserve none: they share those of the ranks on their pod.
        """
        spec = self._run.spec
        if role is Role.INFERENCE and spec.colocated:
            return 0
        per_actor = spec.pipeline.actor_infer.strategy.gpus if role is Role.INFERENCE else 1
        return per_actor if spec.roles.of(role).gpus else 0

    def _threads(self, role: Role, place: Placement) -> int:
        """Return the torch threads of one actor. Ray's default would be one."""
        return torch_threads(self._run, role, place.cores)

    def _check(self, placement: Placement) -> Placement:
        """Note where an actor runs.

        Raises:
            MisplacedActor: it is not on a pod of its role.
        """
        check_placement(placement, self._launcher.offers(placement.node_id))
        log.info(
            "%s runs on %s (node %s, pid %d)",
            placement.actor,
            placement.pod,
            placement.node_id[:8],
            placement.pid,
        )
        return placement

    async def _note_place(self, actor: ActorHandle[EngineActor] | ActorHandle[EnvWorker]) -> None:
        """Wait until an engine or env worker has a place."""
        place = self._check(await actor.call(lambda placed: placed.placement()))
        self._places[actor] = place
        self._pods.setdefault(place.role, {})[place.pod] = None

    async def _start_engines(self) -> None:
        """Start the engines; colocated ones before trainers load models, then put them to sleep."""
        if not self._run.spec.colocated:
            self._devices_free.set()
        await self.engines.start(self._needed(Role.INFERENCE))
        if self._run.spec.colocated:
            await self.engines.sleep()
            self._devices_free.set()

    async def _start_trainers(self) -> None:
        pipeline = self._pipeline
        roles = self._run.spec.roles
        hosted = frozenset(
            part
            for part, used, role in (
                (CRITIC, self._pipeline.uses_critic, Role.CRITIC),
                (REFERENCE, self._pipeline.uses_reference, Role.REFERENCE),
            )
            if used and not roles.has(role)
        )
        world = self._count(Role.TRAINER)
        trainers = [
            self._start(self._options(Role.TRAINER), TrainerActor, rank, world, pipeline, hosted)
            for rank in range(world)
        ]
        references = self._scoring_ranks(ReferenceActor, Role.REFERENCE)
        critics = self._scoring_ranks(CriticActor, Role.CRITIC)
        for role, actors in (
            (Role.TRAINER, trainers),
            (Role.REFERENCE, references),
            (Role.CRITIC, critics),
        ):
            self._ranks |= {f"{role}-{rank}": actor for rank, actor in enumerate(actors)}
        placements = await self._place(trainers)
        self._trainer_places.set_result(placements)
        source = await self._make_source(trainers[0])
        sources = ModelSources.of(source, pipeline)
        await self._check_fit(trainers[0], sources)
        self._source.set_result(source)
        await self._devices_free.wait()
        others: list[ActorHandle[ReferenceActor] | ActorHandle[CriticActor]] = [
            *references,
            *critics,
        ]
        parts, *_ = await asyncio.gather(
            self._set_up(trainers, placements, sources),
            self._set_up_scoring(references, Role.REFERENCE, sources),
            self._set_up_scoring(critics, Role.CRITIC, sources),
        )
        for node_id in dict.fromkeys(placement.node_id for placement in placements):
            here = ActorOptions(node_id=node_id, max_concurrency=MANY_CALLS)
            self.stores.append(self._start(here, TrajectoryStore))
        self._watchers = [
            asyncio.create_task(_until_death(store), name="store") for store in self.stores
        ]
        ranks: list[ActorHandle[RankActor]] = [*trainers, *others]
        await asyncio.gather(
            *(actor.call(lambda rank: rank.set_stores(self.stores)) for actor in ranks)
        )
        metadata = self._run.metadata
        name = f"{metadata.name}-{metadata.uid or 'local'}"
        expanding = self._spawn_adapter_node if self._pipeline.actor_train.lora else None
        home = placements[0].node_id
        self.weights = WeightSync(
            pipeline.weight_sync, name, trainers, home, self._spawn_node_weights, expanding
        )
        self.trainers = TrainerGroup(
            self._launcher, pipeline, trainers, parts, references, critics, self.weights
        )

    async def _check_fit(self, trainer: ActorHandle[TrainerActor], sources: ModelSources) -> None:
        """Refuse a run that cannot fit on the GPU of its first rank, before weights are loaded.

        Raises:
            InvalidConfig: it cannot, or its engines cannot.
        """
        if not self._run.spec.roles.of(Role.TRAINER).gpus:
            return
        found = await trainer.call(lambda rank: rank.describe(sources))
        if found is None:
            return
        name, memory, shapes = found
        plan = plan_run(self._run, shapes, recognize(name, memory))
        log.info("plan for %s: %s", name, plan.estimate)
        for place in plan.too_large(Kind.GPU):
            nearest = [f"; with {c.why}: {' '.join(c.settings)}" for c in plan.changes[:1]]
            raise InvalidConfig(place.field, place.sum + "".join(nearest))

    def _scoring_ranks(
        self, cls: Callable[[int, int, Pipeline], A], role: Role
    ) -> list[ActorHandle[A]]:
        """Start the ranks of reference or critic; none without pods of their own."""
        world = self._count(role) if self._run.spec.roles.has(role) else 0
        return [
            self._start(self._options(role), cls, rank, world, self._pipeline)
            for rank in range(world)
        ]

    async def _place(self, ranks: Sequence[ActorHandle[RankActor]]) -> list[Placement]:
        """Return where ranks run."""
        placements = await asyncio.gather(
            *(actor.call(lambda rank: rank.placement()) for actor in ranks)
        )
        return [self._check(placement) for placement in placements]

    async def _set_up(
        self,
        trainers: list[ActorHandle[TrainerActor]],
        places: list[Placement],
        sources: ModelSources,
    ) -> list[int]:
        """Load the policy, and return the share of each batch that each rank gets."""
        threads = self._threads(Role.TRAINER, places[0])
        meeting = await trainers[0].call(lambda rank: rank.rendezvous())
        parts = await asyncio.gather(
            *(actor.call(lambda rank: rank.setup(sources, meeting, threads)) for actor in trainers)
        )
        await _repeat_warnings(trainers[0])
        return parts

    async def _set_up_scoring(
        self,
        actors: Sequence[ActorHandle[ReferenceActor] | ActorHandle[CriticActor]],
        role: Role,
        sources: ModelSources,
    ) -> None:
        """Load reference or critic, if it has ranks of its own."""
        if not actors:
            return
        threads = self._threads(role, (await self._place(actors))[0])
        meeting = await actors[0].call(lambda rank: rank.rendezvous())
        await asyncio.gather(
            *(actor.call(lambda rank: rank.setup(sources, meeting, threads)) for actor in actors)
        )
        await _repeat_warnings(actors[0])

    async def _make_source(self, trainer: ActorHandle[TrainerActor]) -> ModelSource:
        """Return the initial model; random weights are made on the first trainer pod."""
        model = self._run.spec.model
        source = ModelSource.of(model)
        initialize = model.initialize
        if initialize is None:
            return source
        texts = await self._texts
        return source.with_files(
            await trainer.call(lambda rank: rank.make_model(initialize, texts))
        )

    async def _spawn_engine(self, engine_id: str, slot: int) -> ActorHandle[EngineActor]:
        shared = await self._colocated_slot(slot) if self._run.spec.colocated else None
        options = replace(
            self._options(Role.INFERENCE),
            node_id=shared.node_id if shared else None,
            max_concurrency=MANY_CALLS,
        )
        actor = self._start(options, EngineActor, engine_id)
        try:
            await self._note_place(actor)
        except BaseException:
            actor.kill()  # it may live, and would keep its place on the pod
            raise
        return actor

    async def _start_engine(self, actor: ActorHandle[EngineActor], slot: int) -> None:
        if self._run.spec.colocated:
            gpus = (await self._colocated_slot(slot)).gpus
            await actor.call(lambda engine: engine.use_gpus(gpus))
        source = await asyncio.shield(self._source)
        await actor.call(
            lambda engine: engine.start(
                self._pipeline,
                source,
                self._threads(Role.INFERENCE, self._places[actor]),
            )
        )

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

    async def _spawn_env_worker(self) -> ActorHandle[EnvWorker]:
        name = f"env-worker-{self._env_workers_made}"
        self._env_workers_made += 1
        options = replace(self._options(Role.ENV), max_concurrency=MANY_CALLS)
        actor = self._start(options, EnvWorker, name, self._pipeline)
        try:
            await self._note_place(actor)
            texts = await actor.call(lambda worker: worker.describe())
            if not self._texts.done():
                self._texts.set_result(texts)
            source = await asyncio.shield(self._source)
            await actor.call(lambda worker: worker.setup(source.tokenizer()))
        except BaseException:
            actor.kill()  # as in `_spawn_engine`
            raise
        return actor

    def _spawn_node_weights(
        self, node_id: str, run: str, buckets: tuple[Bucket, ...]
    ) -> ActorHandle[NodeWeights]:
        return self._start(_memory_of(node_id), NodeWeights, run, buckets)

    def _spawn_adapter_node(
        self, node_id: str, run: str, buckets: tuple[Bucket, ...], plan: MergePlan
    ) -> ActorHandle[AdapterNode]:
        """Spawn the node's LoRA merger. It may use all CPUs of the pod: the engines wait for it."""
        spec = self._run.spec
        threads = max(1, int(quantity(spec.roles.of(spec.engine_role).cpus)))
        return self._start(
            _memory_of(node_id),
            AdapterNode,
            run,
            buckets,
            plan,
            self._source.result(),
            self._pipeline.weight_sync.bucket_bytes,
            threads,
        )

    async def _engines_changed(self, engines: dict[str, ActorHandle[EngineActor]]) -> None:
        await self.envs.set_endpoints(engines, self.stores, self.engines.retired)
        self._on_change()


def torch_threads(run: AgenticRun, role: Role, cores: int) -> int:
    """Return the torch threads of one rank or engine: the CPU request of its pod, divided.

    On a laptop, roles without `cpus` share the machine. In a synchronous run, trainers and engines
    wait for each other. Idle threads sleep, so each side has threads for all cores, and nothing
    changes when the other side takes over. With staleness both compute at once, and have equal
    shares.

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


def _fixed_pools(spec: AgenticRunSpec) -> dict[Role, str]:
    """Return the roles with a number of actors that cannot change while they run, and why."""
    if spec.pipeline.deterministic:
        return dict.fromkeys(ELASTIC, "a deterministic run has one set of processes from its start")
    if spec.pipeline.weight_sync.transport == Transport.BROADCAST.value:
        return {Role.INFERENCE: "engines of weightSync.transport Broadcast form one group"}
    return {}


def _memory_of(node_id: str) -> ActorOptions:
    return ActorOptions(node_id=node_id, max_concurrency=NODE_CALLS)


async def _until_death(store: ActorHandle[TrajectoryStore]) -> None:
    """Raise `ActorDied` when a store dies. It takes trajectories along that the run counts on."""
    await store.call(lambda keeper: keeper.health())  # it may take any time to start
    while True:
        await store.poll(lambda keeper: keeper.health())


async def _repeat_warnings(first: ActorHandle[RankActor]) -> None:
    """Log what the first rank has warned of while it loaded its model; all ranks load the same."""
    here = os.getpid()
    for message in await first.call(lambda rank: rank.warnings(here)):
        log.warning("%s", message)
