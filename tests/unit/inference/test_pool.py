"""Engines that die or freeze are replaced, wherever the pool waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agenticrun_api import Role
from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.inference import pool as pool_module
from agenticrun_workers.inference.pool import MAX_DEATHS, EnginePool
from agenticrun_workers.launch import ActorDied, liveness
from agenticrun_workers.placement import Placement
from agenticrun_workers.weights.sync import SyncReport
from agenticrun_workers.weights.transports import Transport
from rollout_fakes import Mute, Remote
from waiting import eventually_in_loop


@pytest.fixture(autouse=True)
def a_short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 3)


class Engine:
    """Answers, until the test freezes it or lets it fail."""

    def __init__(self) -> None:
        self.frozen = False
        self.failure: Exception | None = None
        self.version: int | None = None

    async def placement(self) -> Placement:
        return Placement("engine", Role.INFERENCE, "node", "pod", 1)

    async def health(self) -> None:
        await asyncio.sleep(0.01)
        await self._answer()

    async def sleep(self) -> None:
        await self._answer()

    async def wake(self) -> None:
        await self._answer()

    async def stats(self) -> str:
        await self._answer()
        return "stats"

    async def load(self, version: int) -> None:
        await self._answer()
        self.version = version

    async def _answer(self) -> None:
        if self.frozen:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure


class Weights:
    """A `WeightSync` that tells each engine the version."""

    version: int | None = None

    async def update(self, receivers: Any, version: int, handover: Any = None) -> SyncReport:
        outcomes = await asyncio.gather(
            *(each.handle.call(lambda engine: engine.load(version)) for each in receivers.values()),
            return_exceptions=True,
        )
        self.version = version
        failed = {
            name: error
            for name, error in zip(receivers, outcomes, strict=True)
            if isinstance(error, BaseException)
        }
        return SyncReport(Transport.SHARED_MEMORY, 0, 1.0, failed)

    async def join(self, name: str, receiver: Any) -> None:
        await receiver.handle.call(lambda engine: engine.load(self.version))


class World:
    """A pool of two engines. `make` makes the engine of a number."""

    def __init__(self, make: Callable[[int], Any] = lambda number: Engine()) -> None:
        self._make = make
        self.handles: list[Remote] = []
        self.engines: list[Any] = []
        self.seen: list[str] = []
        self.pool = EnginePool(self._spawn, 2, self._changed)
        self.weights: Any = Weights()

    async def _spawn(self, engine_id: str, slot: int) -> Remote:
        self.engines.append(self._make(len(self.engines)))
        self.handles.append(Remote(self.engines[-1]))
        return self.handles[-1]

    async def _changed(self, engines: dict[str, Any]) -> None:
        self.seen = sorted(engines)

    async def until_serving(self, *names: str) -> None:
        await eventually_in_loop(lambda: self.seen == list(names), 20, f"{names} serve")


@pytest.fixture
async def started() -> AsyncIterator[World]:
    world = World()
    await world.pool.start()
    yield world
    await world.pool.stop()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "failed"])
async def test_an_engine_that_serves_no_more_is_killed_and_replaced(
    started: World, frozen: bool
) -> None:
    await started.pool.update_weights(started.weights, 3)
    started.engines[0].frozen = frozen
    started.engines[0].failure = RuntimeError("out of memory")
    await started.until_serving("engine-1", "engine-2")
    assert [handle.killed for handle in started.handles] == [True, False, False]
    assert started.engines[2].version == 3


async def test_a_frozen_engine_fails_its_part_of_a_weight_sync_only(started: World) -> None:
    started.engines[1].frozen = True
    report = await asyncio.wait_for(started.pool.update_weights(started.weights, 4), 20)
    assert list(report.failed) == ["engine-1"]
    assert started.engines[0].version == 4
    await started.until_serving("engine-0", "engine-2")
    assert started.engines[2].version == 4


async def test_a_frozen_engine_does_not_hold_up_the_statistics(
    started: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads them around each sync, and hears no stop request meanwhile."""
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 1000)
    monkeypatch.setattr(pool_module, "STATS_SECONDS", 0.1)
    await asyncio.sleep(0.1)  # polls begin that have the longer limit
    started.engines[0].frozen = True
    assert list(await asyncio.wait_for(started.pool.stats(), 10)) == ["engine-1"]


async def test_a_frozen_engine_does_not_hold_up_a_handover(started: World) -> None:
    started.engines[0].frozen = True
    await asyncio.wait_for(started.pool.sleep(), 20)
    await asyncio.wait_for(started.pool.wake(), 20)
    await started.until_serving("engine-1", "engine-2")


@pytest.mark.parametrize("broken", [Mute, lambda: Dying()], ids=["freezes", "dies"])
async def test_a_replacement_that_never_serves_is_replaced_too(broken: Callable[[], Any]) -> None:
    world = World(lambda number: broken() if number == 2 else Engine())
    await world.pool.start()
    await world.pool.update_weights(world.weights, 1)
    world.engines[0].frozen = True
    await world.until_serving("engine-1", "engine-3")
    assert world.handles[2].killed
    assert world.engines[3].version == 1
    await asyncio.wait_for(world.pool.update_weights(world.weights, 2), 20)
    await world.pool.stop()


class Dying(Engine):
    """Dies when it gets weights."""

    async def load(self, version: int) -> None:
        raise ActorDied("killed for memory")


async def test_engines_that_only_die_end_the_attempt() -> None:
    world = World(lambda number: Engine() if number < 2 else Dying())
    await world.pool.start()
    await world.pool.update_weights(world.weights, 1)
    world.engines[0].frozen = True
    with pytest.raises(RolloutFailed, match=f"{MAX_DEATHS} engines died in a row"):
        await asyncio.wait_for(asyncio.shield(world.pool.failure), 20)
    await world.pool.stop()
