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
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from agenticrun_api import AgenticRun, Role
from agenticrun_workers.driver.actors import ActorStarter
from agenticrun_workers.driver.pools import ActorPools
from agenticrun_workers.driver.rank_handles import RankHandles
from agenticrun_workers.driver.run_actors import RunActors, start_stores
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.inference.pool import colocated_slots
from agenticrun_workers.launch import Launcher
from agenticrun_workers.models.source import ModelSource, ModelSources


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
    places = await ranks.locate(ranks.trainers)
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
    await ranks.check_fit(sources)
    pools.source.set_result(source)

    if spec.colocated:
        await engines  # asleep: the trainers may use the devices
    shares = await ranks.load_models(places, sources)

    weights = ranks.weight_sync(places[0].node_id, source)
    ends.push_async_callback(weights.stop)
    stores = start_stores(starter, [place.node_id for place in places])
    await asyncio.gather(
        *(actor.call(lambda rank: rank.set_stores(stores)) for actor in ranks.by_name.values())
    )
    trainers = TrainerGroup(
        starter.launcher, pipeline, ranks.trainers, shares, ranks.references, ranks.critics, weights
    )
    actors = RunActors(trainers, pools, stores, ranks.by_name)
    ends.push_async_callback(actors.stop_watching)
    return actors
