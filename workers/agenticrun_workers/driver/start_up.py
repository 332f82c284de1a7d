"""Starts the actors of an attempt in order, and ends them.

All processes start at once, because their imports take seconds. Then each waits for what it needs:

    env workers     build the environments      -> their texts
    trainer ranks   have places                 -> Colocated: engines start on their GPUs
                    make the initial model      <- the texts, if its weights are random
                    check that it fits          -> engines and env workers continue with the model
                    load the models             <- Colocated: the engines sleep
    stores          on the trainers' nodes
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from agenticrun_api import AgenticRun, Role
from agenticrun_api.quantities import quantity
from agenticrun_workers.driver.actors import ActorStarter
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.pools import MANY_CALLS, ActorPools
from agenticrun_workers.driver.rank_handles import RankHandles, check_fit, load_models, locate
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.inference.pool import colocated_slots
from agenticrun_workers.launch import ActorHandle, ActorOptions, Launcher
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.trajectory_store import Stores, TrajectoryStore
from agenticrun_workers.tracing import EPISODES_RUNNING, Traced
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import RankActor
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.buckets import Bucket, MergePlan
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import WeightSync
from agenticrun_workers.weights.transports import NODE_CALLS


class RunActors:
    """The actors of an attempt, all of which have started.

    Args:
        trainers: the ranks, called together.
        pools: engines and env workers.
        stores: the trajectory stores.
        ranks: the same as `trainers`, by name.
        watchers: each fails when a store dies.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        pools: ActorPools,
        stores: Stores,
        ranks: Mapping[str, ActorHandle[RankActor]],
        watchers: Sequence[asyncio.Future[None]],
    ) -> None:
        self.trainers = trainers
        self.pools = pools
        self.stores = stores
        self._ranks = ranks
        self._watchers = watchers
        self._reported: Metrics = {}
        """Spilled and lost trajectories and episodes at the last call of `metrics`."""

    @property
    def failures(self) -> list[asyncio.Future[None]]:
        """Futures that fail when actors die and cannot be replaced."""
        return [self.pools.engines.failure, *self._watchers]

    @property
    def idle_seconds(self) -> float:
        """Time so far without an episode in flight."""
        return self.pools.envs.idle_seconds

    def traced(self) -> dict[str, ActorHandle[Traced]]:
        """Return the current actors to record in a trace, by name."""
        envs = self.pools.envs.workers.items()
        workers = {f"env worker {number}": actor for number, actor in envs}
        return {**self._ranks, **self.pools.engines.engines, **workers}

    def counters(self) -> dict[str, float]:
        """Return the counters of the driver for a trace."""
        return {EPISODES_RUNNING: float(self.pools.envs.running)}

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
        """Return the numbers of engines and env workers, and the use of the stores.

        What was spilled and lost counts since the last call.
        """
        sizes = self.pools.sizes
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
                "rollout/lost_episodes": float(self.pools.envs.lost_episodes),
            },
        )
        since = {name: value - before.get(name, 0.0) for name, value in self._reported.items()}
        held = float(sum(use.memory_bytes for use in uses))
        return {**sizes, "rollout/store_bytes": held, **since}


@asynccontextmanager
async def running_actors(
    run: AgenticRun, launcher: Launcher, on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[RunActors]:
    """Start all actors of an attempt. They end with the `with` block, or if their start fails.

    Args:
        run: the run.
        launcher: starts the actors.
        on_change: called when engines or env workers join, die or leave.

    Raises:
        InvalidConfig: names the field of the run that cannot work.
    """
    starter = ActorStarter(run.spec, launcher)
    pools = ActorPools(run, starter, on_change)
    async with AsyncExitStack() as ends:
        # Pushed first, so that it runs last: the other callbacks still call actors.
        ends.callback(starter.kill_all)
        try:
            # Engines, env workers and ranks start side by side: each may wait minutes for its pod.
            async with together() as starts:
                starting = starts.create_task(_start_all(run, starter, pools, starts, ends))
            actors = starting.result()
            await pools.connect(actors.stores)
            yield actors
        finally:
            await pools.stop()  # first: an engine that joins would use the nodes of weights


@asynccontextmanager
async def playing_actors(run: AgenticRun, launcher: Launcher) -> AsyncIterator[ActorPools]:
    """Start only engines and env workers: the engines load the weights of `spec.model`.

    Raises:
        InvalidConfig: names the field of the run that cannot work.
    """
    starter = ActorStarter(run.spec, launcher)
    pools = ActorPools(run, starter)
    pools.source.set_result(ModelSource.of(run.spec.model))
    try:
        async with together() as starts:
            starts.create_task(pools.start_env_workers())
            starts.create_task(pools.start_engines())
        await pools.connect(())
        yield pools
    finally:
        await pools.stop()
        starter.kill_all()


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Wait for tasks. The first error cancels the others, and is raised as it is."""
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    if first is not None:
        raise first


async def _start_all(
    run: AgenticRun,
    starter: ActorStarter,
    pools: ActorPools,
    starts: asyncio.TaskGroup,
    ends: AsyncExitStack,
) -> RunActors:
    """Start the actors in the order of the module's docstring; `ends` stops what needs to be."""
    spec, pipeline = run.spec, run.spec.pipeline
    ranks = RankHandles.start(run, starter)
    starts.create_task(pools.start_env_workers())
    if not spec.colocated:
        engines = starts.create_task(pools.start_engines())
    # Ray places a rank only when its pod is there; engines that share its GPUs need to know where.
    places = await locate(starter, ranks.trainers)
    if spec.colocated:
        # Ray's fractional GPUs do not work here: they could put two ranks on one GPU, and cannot
        # express an engine on several GPUs.
        carried = spec.actors_per_pod(Role.TRAINER)
        slots = colocated_slots(places, carried[Role.TRAINER] // carried[Role.INFERENCE])
        engines = starts.create_task(pools.start_engines(slots))

    source = ModelSource.of(spec.model)
    if (initialize := spec.model.initialize) is not None:
        # The tokenizer of a new model is made of the environments' texts.
        texts = await pools.texts
        source = source.with_files(
            await ranks.trainers[0].call(lambda rank: rank.make_model(initialize, texts))
        )
    sources = ModelSources.of(source, pipeline)
    # Before weights are loaded: a run that cannot fit should fail in seconds.
    await check_fit(run, ranks.trainers[0], sources)
    pools.source.set_result(source)

    if spec.colocated:
        await engines  # asleep: the trainers may use the devices
    shares = await load_models(run, starter, ranks, places, sources)

    weights = weight_sync(run, starter, ranks.trainers, places[0].node_id, source)
    ends.push_async_callback(weights.stop)
    stores = [
        # One per node of trainers, because they read what is stored.
        starter.start(ActorOptions(node_id=node, max_concurrency=MANY_CALLS), TrajectoryStore)
        for node in dict.fromkeys(place.node_id for place in places)
    ]
    # A store that dies takes trajectories along: the attempt must end and not wait for them.
    watchers = [asyncio.create_task(until_death(store), name="store") for store in stores]
    ends.push_async_callback(_cancel, watchers)
    await asyncio.gather(
        *(actor.call(lambda rank: rank.set_stores(stores)) for actor in ranks.by_name.values())
    )
    trainers = TrainerGroup(
        starter.launcher, pipeline, ranks.trainers, shares, ranks.references, ranks.critics, weights
    )
    return RunActors(trainers, pools, stores, ranks.by_name, watchers)


def weight_sync(
    run: AgenticRun,
    starter: ActorStarter,
    trainers: Sequence[ActorHandle[TrainerActor]],
    home: str,
    source: ModelSource,
) -> WeightSync:
    """Make the weight sync from the trainers, the first of which runs on node `home`."""
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
        trainers,
        home,
        spawn,
        spawn_merger if pipeline.actor_train.lora else None,
    )


async def until_death(store: ActorHandle[TrajectoryStore]) -> None:
    """Raise `ActorDied` when a store dies. It takes trajectories along that the run counts on."""
    await store.call(lambda keeper: keeper.health())  # it may take any time to start
    while True:
        await store.poll(lambda keeper: keeper.health())


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
