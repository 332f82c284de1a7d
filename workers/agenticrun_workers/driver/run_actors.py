"""The actors of an attempt, once all have started: what the loop and a trace want of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from agenticrun_workers.driver.actors import ActorStarter
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.pools import MANY_CALLS, ActorPools
from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.trajectory_store import Stores, TrajectoryStore
from agenticrun_workers.tracing import EPISODES_RUNNING, Traced
from agenticrun_workers.trainer.rank import RankActor
from agenticrun_workers.types import EpisodeKey


class RunActors:
    """The actors of an attempt, all of which have started.

    Args:
        trainers: the ranks, called together.
        pools: engines and env workers.
        stores: the trajectory stores.
        ranks: the same as `trainers`, by name.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        pools: ActorPools,
        stores: Stores,
        ranks: Mapping[str, ActorHandle[RankActor]],
    ) -> None:
        self.trainers = trainers
        self.pools = pools
        self.stores = stores
        self._ranks = ranks
        # A store that dies takes trajectories along: the attempt must end and not wait for them.
        self._watchers = [asyncio.create_task(until_death(store), name="store") for store in stores]
        self._reported: Metrics = {}
        """Spilled and lost trajectories and episodes at the last call of `metrics`."""

    @property
    def failures(self) -> list[asyncio.Future[None]]:
        """Futures that fail when actors die and cannot be replaced."""
        return [self.pools.engines.failure, *self._watchers]

    async def stop_watching(self) -> None:
        """Stop watching the stores; call it before they end."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

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


def start_stores(starter: ActorStarter, nodes: Iterable[str]) -> Stores:
    """Start a trajectory store on each of these nodes.

    Args:
        nodes: those of the trainers, because trainers read what is stored.
    """
    return [
        starter.start(ActorOptions(node_id=node, max_concurrency=MANY_CALLS), TrajectoryStore)
        for node in dict.fromkeys(nodes)
    ]


async def until_death(store: ActorHandle[TrajectoryStore]) -> None:
    """Raise `ActorDied` when a store dies. It takes trajectories along that the run counts on."""
    await store.call(lambda keeper: keeper.health())  # it may take any time to start
    while True:
        await store.poll(lambda keeper: keeper.health())
