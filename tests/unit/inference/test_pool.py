"""Engines that die or freeze are replaced. More may join, and those not wanted any more leave."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agenticrun_api import Role
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.inference import (
    EngineError,
    EngineStartError,
    EngineStats,
    UnusableModel,
)
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

    def __init__(self, node: str = "node") -> None:
        self.node = node
        self.frozen = False
        self.failure: Exception | None = None
        self.version: int | None = None

    async def start(self) -> None: ...

    async def placement(self) -> Placement:
        return Placement("engine", Role.INFERENCE, self.node, "pod", 1)

    async def health(self) -> EngineStats:
        await asyncio.sleep(0.01)
        await self._answer()
        return EngineStats(0, 0, 0, 0, 0, 0.0)

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
        self.pool = EnginePool(self._spawn, 2, self._changed, self._start)
        self.weights: Any = Weights()

    async def _spawn(self, engine_id: str, slot: int) -> Remote:
        self.engines.append(self._make(len(self.engines)))
        self.handles.append(Remote(self.engines[-1]))
        return self.handles[-1]

    async def _start(self, engine: Any, slot: int) -> None:
        await engine.call(lambda actor: actor.start())

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


async def test_an_engine_that_did_not_load_the_weights_is_asked_no_more(started: World) -> None:
    """Ray ends its process some time later, and until then it answers with the old weights."""

    async def lost(version: int) -> None:
        raise ActorDied("the copy of the weights on its node is lost")

    started.engines[1].load = lost
    report = await asyncio.wait_for(started.pool.update_weights(started.weights, 4), 20)
    assert list(report.failed) == ["engine-1"]
    assert started.seen == list(started.pool.engines) == ["engine-0"]
    assert started.pool.joining == 1
    await started.until_serving("engine-0", "engine-2")
    assert started.engines[2].version == 4


async def test_an_engine_that_does_not_answer_is_waited_for_once(
    started: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads the statistics three times."""
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 1000)
    monkeypatch.setattr(pool_module, "STATS_SECONDS", 0.1)
    answers, asked = asyncio.Event(), 0

    async def slow() -> str:
        nonlocal asked
        asked += 1
        await answers.wait()
        return "late"

    monkeypatch.setattr(started.engines[0], "stats", slow)
    assert list(await asyncio.wait_for(started.pool.stats(), 10)) == ["engine-1"]
    monkeypatch.setattr(pool_module, "STATS_SECONDS", 1000.0)
    for _ in range(2):
        assert list(await asyncio.wait_for(started.pool.stats(), 10)) == ["engine-1"]
    assert asked == 1
    answers.set()
    await eventually_in_loop(lambda: not started.pool._asked, 20, "it has answered")
    assert list(await asyncio.wait_for(started.pool.stats(), 10)) == ["engine-0", "engine-1"]
    assert asked == 2


async def test_engines_that_were_all_slow_are_asked_again(
    started: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "STATS_SECONDS", 0.1)
    answers = asyncio.Event()

    async def slow() -> str:
        await answers.wait()
        return "late"

    async def failing() -> str:
        await answers.wait()
        raise RuntimeError("no statistics")

    monkeypatch.setattr(started.engines[0], "stats", slow)
    monkeypatch.setattr(started.engines[1], "stats", failing)
    assert await started.pool.stats() == {}
    answers.set()
    await eventually_in_loop(lambda: not started.pool._asked, 20, "they have answered")
    monkeypatch.setattr(pool_module, "STATS_SECONDS", 1000.0)
    assert list(await asyncio.wait_for(started.pool.stats(), 10)) == ["engine-0"]
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_engines_fall_asleep_though_a_replacement_finds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = World()
    await started.pool.start()
    searching = asyncio.Event()
    spawn = started.pool._spawn

    async def no_place(engine_id: str, slot: int) -> Any:
        searching.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(started.pool, "_spawn", no_place)
    started.handles[0].kill()
    await asyncio.wait_for(searching.wait(), 20)
    await asyncio.wait_for(started.pool.sleep(), 20)
    monkeypatch.setattr(started.pool, "_spawn", spawn)
    await started.pool.wake()
    await started.pool.stop()


async def test_engines_that_start_on_the_devices_end_that_before_they_sleep() -> None:
    goes_on, starts = asyncio.Event(), asyncio.Event()
    started: list[int] = []

    async def start(engine: Any, slot: int) -> None:
        if len(world.handles) > 2:
            starts.set()
            await goes_on.wait()
        started.append(slot)

    world = World()
    world.pool = EnginePool(world._spawn, 2, world._changed, start)
    await world.pool.start()
    world.handles[0].kill()
    await asyncio.wait_for(starts.wait(), 20)
    sleeping = asyncio.create_task(world.pool.sleep())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not sleeping.done()
    goes_on.set()
    await asyncio.wait_for(sleeping, 20)
    assert sorted(started) == [0, 0, 1]
    world.handles[1].kill()
    await eventually_in_loop(lambda: len(world.handles) == 4, 20, "it has a place")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(started) == 3, "the trainers have the devices"
    await world.pool.wake()
    await world.until_serving("engine-2", "engine-3")
    await world.pool.stop()


async def test_a_frozen_engine_does_not_hold_up_a_handover(started: World) -> None:
    started.engines[0].frozen = True
    await asyncio.wait_for(started.pool.sleep(), 20)
    await asyncio.wait_for(started.pool.wake(), 20)
    await started.until_serving("engine-1", "engine-2")


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Freezing(),
        lambda: Failing(ActorDied("killed for memory")),
        lambda: Failing(EngineError("the update was not answered in 600 s")),
        lambda: Failing(EngineStartError("vllm was killed")),
        lambda: Failing(InvalidConfig("spec.model.path", "the hub does not answer")),
    ],
    ids=["freezes", "dies", "cannot load", "cannot start", "cannot fetch the model"],
)
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


class Freezing(Mute):
    """Starts, and answers nothing more."""

    async def start(self) -> None: ...


class Failing(Engine):
    """Fails when it starts, or when it gets weights."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def start(self) -> None:
        if isinstance(self._error, EngineStartError | InvalidConfig):
            raise self._error

    async def load(self, version: int) -> None:
        raise self._error


async def test_engines_that_only_die_end_the_attempt() -> None:
    world = World(lambda number: Engine() if number < 2 else Failing(ActorDied("no memory")))
    await world.pool.start()
    await world.pool.update_weights(world.weights, 1)
    world.engines[0].frozen = True
    with pytest.raises(RolloutFailed, match=f"{MAX_DEATHS} engines died in a row"):
        await asyncio.wait_for(asyncio.shield(world.pool.failure), 20)
    await world.pool.stop()


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (UnusableModel("no config.json"), "spec.model.path"),
        (EngineStartError("unknown option"), "spec.pipeline.actorInfer.strategy"),
    ],
)
async def test_a_first_engine_that_cannot_start_names_its_field(
    error: Exception, path: str
) -> None:
    world = World(lambda number: Failing(error))
    with pytest.raises(InvalidConfig, match=f"{path}: {error}"):
        await world.pool.start()
    await world.pool.stop()


async def test_an_engine_that_joins_has_the_weights_before_it_serves(started: World) -> None:
    await started.pool.update_weights(started.weights, 3)
    started.pool.resize(3)
    assert (started.pool.joining, started.pool.leaving) == (1, 0)
    await started.until_serving("engine-0", "engine-1", "engine-2")
    assert started.engines[2].version == 3
    assert (started.pool.joining, started.pool.leaving) == (0, 0)


async def test_an_engine_that_leaves_is_ended_when_nobody_knows_it_any_more(
    started: World,
) -> None:
    seen_at_the_end: list[list[str]] = []
    started.handles[1].kill = lambda: seen_at_the_end.append(list(started.seen))  # type: ignore[method-assign]
    started.pool.resize(1)
    assert started.pool.leaving == 1
    await eventually_in_loop(lambda: bool(seen_at_the_end), 20, "it is ended")
    assert seen_at_the_end == [["engine-0"]]
    assert started.pool.retired == {"engine-1"}
    assert started.pool.leaving == 0


async def test_engines_leave_between_two_weight_updates(started: World) -> None:
    loading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Weights):
        async def update(self, receivers: Any, version: int, handover: Any = None) -> SyncReport:
            loading.set()
            await go_on.wait()
            return await super().update(receivers, version, handover)

    updating = asyncio.create_task(started.pool.update_weights(Slow(), 1))  # type: ignore[arg-type]
    await loading.wait()
    started.pool.resize(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert started.pool.leaving == 1
    go_on.set()
    assert not (await updating).failed
    await started.until_serving("engine-0")


async def test_an_engine_that_has_no_pod_yet_is_the_first_to_be_given_up(started: World) -> None:
    waiting = asyncio.Event()

    class WithoutPod(Engine):
        async def placement(self) -> Placement:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

    started._make = lambda number: WithoutPod()
    started.pool.resize(3)
    await waiting.wait()
    started.pool.resize(2)
    await eventually_in_loop(lambda: started.handles[2].killed, 20, "it is given up")
    await eventually_in_loop(lambda: not started.pool.leaving, 20, "two are left")
    assert started.seen == ["engine-0", "engine-1"]
    assert not started.pool.retired


async def test_the_engines_of_one_node_leave_together() -> None:
    world = World(lambda number: Engine("ab"[number % 2]))
    await world.pool.start()
    world.pool.resize(4)
    await eventually_in_loop(lambda: len(world.seen) == 4, 20, "four serve")
    world.pool.resize(2)
    await eventually_in_loop(lambda: len(world.seen) == 2, 20, "two are left")
    left = [world.engines[number] for number in range(4) if f"engine-{number}" in world.seen]
    assert len({engine.node for engine in left}) == 1
    await world.pool.stop()


@pytest.mark.parametrize("seed", range(20))
async def test_joins_leaves_deaths_and_updates_at_any_time_end_with_the_wanted_engines(
    seed: int,
) -> None:
    rng = random.Random(seed)
    world = World(lambda number: Engine(f"node-{number % 3}"))
    before = asyncio.all_tasks()
    await world.pool.start()
    version = 0
    for _ in range(25):
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        match rng.choice(["resize", "resize", "die", "update"]):
            case "resize":
                world.pool.resize(rng.randrange(1, 6))
            case "die":
                rng.choice(world.handles).kill()
            case "update":
                version += 1
                await asyncio.wait_for(world.pool.update_weights(world.weights, version), 20)
    wanted = rng.randrange(1, 6)
    world.pool.resize(wanted)
    await eventually_in_loop(
        lambda: (
            world.pool.failure.done()
            or (len(world.seen) == wanted and not world.pool.joining and not world.pool.leaving)
        ),
        20,
        f"{wanted} engines serve",
    )
    if world.pool.failure.done():
        with pytest.raises(RolloutFailed, match="died in a row"):
            world.pool.failure.result()
    else:
        await asyncio.wait_for(world.pool.update_weights(world.weights, version + 1), 20)
        alive = [
            engine
            for engine, handle in zip(world.engines, world.handles, strict=True)
            if not handle.killed
        ]
        assert [engine.version for engine in alive] == [version + 1] * wanted
        assert sorted(world.pool.engines) == world.seen
    await world.pool.stop()
    for handle in world.handles:
        handle.kill()
    await eventually_in_loop(
        lambda: not [task for task in asyncio.all_tasks() - before if not task.done()],
        20,
        "no task is left",
    )


async def test_engines_serve_while_another_one_has_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "JOIN_SECONDS", 0.05)
    room = asyncio.Event()
    world = World()
    spawn = world._spawn

    async def placed(engine_id: str, slot: int) -> Remote:
        if slot == 1:
            await room.wait()
        return await spawn(engine_id, slot)

    world.pool._spawn = placed
    async with asyncio.timeout(60):
        await world.pool.start(needed=1)
        assert (len(world.pool.engines), world.pool.joining) == (1, 1)
        room.set()
        while world.pool.joining:
            await asyncio.sleep(0.01)
    assert len(world.pool.engines) == 2
    assert not world.pool.failure.done()
    await world.pool.stop()
