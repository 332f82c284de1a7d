"""A run with the real pools, env workers and controller in one process, without a trainer."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

from agenticrun_api import Pipeline
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.pool import EnginePool
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.rollout.controller import (
    Batch,
    RolloutController,
    StalenessGate,
)
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import EpisodeResult, GroupPlan
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.types import RolloutPosition, StopReason, Trajectory
from rollout_fakes import Remote


class World(ABC):
    """The run. What differs is the engines, and what happens to them.

    Args:
        folder: has the tokenizer.
        rng: seeds the names of env workers; `strike` may use it, too.
        pipeline: of the run. Staleness is 1, and a batch has `trainEnvs.groups` groups.
    """

    def __init__(self, folder: Path, rng: random.Random, pipeline: Pipeline) -> None:
        self.rng = rng
        self.version = 0
        """Completed steps."""
        self._pipeline = pipeline
        self._groups = pipeline.train_envs.groups
        self._folder = folder
        self.seconds: list[float] = []
        """Time of each step, from the sync to its batch."""
        self._trained: list[int] = []
        self._rerolled = 0
        self._actors: list[EngineActor] = []
        self._workers: list[EnvWorker] = []
        self._store = TrajectoryStore()
        self._stores = [Remote(self._store)]
        self.env_pool = EnvPool(self._env_worker, 2)
        self.engine_pool = EnginePool(self._engine, 2, self._changed)

    @abstractmethod
    async def engine(self, name: str) -> EngineActor:
        """Return the actor of an engine that serves."""

    @abstractmethod
    async def sync(self) -> None:
        """Load weights of `version` into the engines."""

    @abstractmethod
    async def strike(self) -> None:
        """Do harm while a batch is made."""

    @abstractmethod
    def check(self, trajectory: Trajectory) -> None:
        """Fail if a trainer must not see it."""

    async def start(self) -> None:
        await asyncio.gather(self.env_pool.start(), self.engine_pool.start())

    async def close(self) -> None:
        await self.engine_pool.stop()
        await self.env_pool.set_endpoints({}, self._stores)
        await self.env_pool.stop()
        for worker in self.env_pool._workers:
            for task in worker.handle._target._tasks:  # type: ignore[attr-defined]
                task.cancel()
        for actor in self._actors:
            await actor.close()
        for env_worker in self._workers:
            await env_worker.close()

    async def train(self, steps: int, seconds: float = 60) -> RolloutPosition:
        """Make so many batches, each within `seconds`."""
        controller = RolloutController(
            self.env_pool,
            StalenessGate(self._groups, 2 * self._groups, 1),
            GroupPlan.of(self._pipeline),
            discard=self._discard,
            position=RolloutPosition(),
        )
        for self.version in range(steps):
            began = asyncio.get_running_loop().time()
            await self.sync()
            controller.advance(self.version, self.version)
            striking = asyncio.create_task(self.strike())
            batch = await asyncio.wait_for(controller.batch(), seconds)
            self.seconds.append(asyncio.get_running_loop().time() - began)
            await self._check(batch)
            await striking
        position = controller.position
        await controller.stop()
        return position

    def lost_nothing(self, position: RolloutPosition) -> bool:
        """Each group was trained on once, or is still to come; no episode had to begin again."""
        numbers = Counter([*self._trained, *position.pending_groups])
        return numbers == Counter(range(position.next_group)) and not self._rerolled

    async def _changed(self, engines: Any) -> None:
        await self.env_pool.set_endpoints(engines, self._stores)

    async def _engine(self, name: str, _: int) -> Any:
        actor = await self.engine(name)
        self._actors.append(actor)
        return Remote(actor)

    async def _env_worker(self) -> Any:
        worker = EnvWorker(f"w{self.rng.random()}", self._pipeline)
        self._workers.append(worker)
        await worker.describe()
        await worker.setup(TokenizerSource(str(self._folder)))
        return Remote(worker)

    async def _discard(self, results: list[EpisodeResult]) -> None:
        await self._store.discard([result.key for result in results])

    async def _check(self, batch: Batch) -> None:
        self._trained += [group.number for group in batch.groups]
        self._rerolled += batch.counts.rerolled
        for trajectory in await self._store.get([result.key for result in batch.results]):
            self.check(trajectory)
        assert {result.stop_reason for result in batch.results} <= {
            StopReason.COMPLETED,
            StopReason.MAX_TURNS,
        }
        await self._discard(batch.results)
