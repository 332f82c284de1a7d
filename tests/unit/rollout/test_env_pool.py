"""The pool finds the group that kills its workers and gives up that group only.

Every other episode is played to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.launch import ActorDied, ActorUnavailable, OtherActorDied, liveness
from agenticrun_workers.rollout.env_pool import MAX_DEATHS, EnvPool
from agenticrun_workers.rollout.env_worker import ResultMailbox
from agenticrun_workers.rollout.groups import (
    Endpoints,
    EpisodeResult,
    GroupTask,
    VersionBounds,
)
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory
from rollout_fakes import Mute, Remote, result

Kills = Callable[[GroupTask], bool]


class MortalWorker:
    """Plays each member in some ticks of the loop, and dies of the groups that `kills` says."""

    def __init__(self, kills: Kills) -> None:
        self._kills = kills
        self._outbox: ResultMailbox[EpisodeResult] = ResultMailbox(0.0)
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def abort(self, episodes: Any) -> None: ...

    async def set_bounds(self, bounds: VersionBounds) -> None:
        self.bounds = bounds

    async def submit(self, tasks: bytes) -> None:
        for task in unpack(tasks):
            for member in task.members:
                asyncio.get_running_loop().create_task(self._play_one(task, member))

    async def collect(self) -> bytes:
        taking = asyncio.ensure_future(self._outbox.take(5.0))
        either: set[asyncio.Future[Any]] = {taking, self._death}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise ActorDied("killed")
        return pack(taking.result())

    async def _play_one(self, task: GroupTask, member: int) -> None:
        for _ in range(3 + (7 * task.group + member) % 5):
            await asyncio.sleep(0)
        if self._kills(task) and member == task.members[-1] and not self._death.done():
            self._death.set_result(None)
        if not self._death.done():
            self._outbox.put(result(task.group, member, attempt=task.attempt))


class World:
    def __init__(self, kills: Kills, workers: int) -> None:
        self.kills = kills
        self.made = 0
        self.pool = EnvPool(self._spawn, workers)
        self._workers = workers

    @property
    def deaths(self) -> int:
        return self.made - self._workers

    async def _spawn(self) -> Remote:
        self.made += 1
        return Remote(MortalWorker(self.kills))

    async def play(self, *tasks: GroupTask) -> list[list[EpisodeResult]]:
        await self.pool.start()
        try:
            return await asyncio.wait_for(asyncio.gather(*map(self.pool.run, tasks)), 20)
        finally:
            await self.pool.stop()


def groups(count: int, members: int = 2) -> list[GroupTask]:
    return [GroupTask(Stream.TRAIN, group, "A", tuple(range(members))) for group in range(count)]


def reasons(played: list[list[EpisodeResult]]) -> list[set[StopReason]]:
    return [{member.stop_reason for member in members} for members in played]


def alone(tasks: list[GroupTask]) -> list[GroupTask]:
    """A task for each member, as training groups have."""
    return [replace(task, members=(member,)) for task in tasks for member in task.members]


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 12), st.booleans(), st.data())
def test_guilty_groups_are_given_up_and_all_others_play_to_their_end(
    workers: int, count: int, single: bool, data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    world = World(lambda task: task.group in guilty, workers)
    tasks = groups(count)
    results = asyncio.run(world.play(*(alone(tasks) if single else tasks)))
    played = [results[n] + results[n + 1] for n in range(0, 2 * count, 2)] if single else results
    for group, members in enumerate(played):
        assert [member.key.member for member in members] == [0, 1]
        if group not in guilty:
            assert {member.stop_reason for member in members} == {StopReason.COMPLETED}
        else:
            assert members[-1].stop_reason is StopReason.ENV_ERROR
            assert (
                "3 env workers died while they played it: the environment 'A' may end its process; "
                "set isolated: true" in members[-1].error
            )
    assert world.deaths <= 3 * len(guilty)


async def test_the_members_of_a_group_share_a_worker() -> None:
    """So that a group that kills its workers kills three, and not three for each member."""
    world = World(lambda task: False, 3)
    await world.pool.start()
    running = [asyncio.create_task(world.pool.run(task)) for task in alone(groups(6, members=4))]
    await asyncio.sleep(0)
    homes = [set(worker.open) for worker in world.pool._workers]
    assert sorted(map(len, homes)) == [2, 2, 2]
    assert len(set.union(*homes)) == 6
    await asyncio.gather(*running)
    assert [worker.open for worker in world.pool._workers] == [{}, {}, {}]
    await world.pool.stop()


async def test_an_aborted_group_does_not_run_again_when_its_worker_dies() -> None:
    death = asyncio.Event()
    world = World(lambda task: False, 1)
    aborted: list[tuple[EpisodeKey, int]] = []

    class Slow(MortalWorker):
        async def abort(self, episodes: Any) -> None:
            aborted.extend(episodes)

        async def _play_one(self, task: GroupTask, member: int) -> None:
            await death.wait()
            await super()._play_one(task, member)

    async def spawn() -> Remote:
        world.made += 1
        return Remote(Slow(lambda task: world.made == 1))

    world.pool = EnvPool(spawn, 1)
    await world.pool.start()
    running = [asyncio.create_task(world.pool.run(task)) for task in alone(groups(2))]
    await asyncio.sleep(0.01)
    world.pool.abort(1)
    death.set()
    results = await asyncio.wait_for(asyncio.gather(*running), 20)
    assert [[r.key.group for r in each] for each in results] == [[0], [0], [], []]
    assert aborted == [(EpisodeKey(Stream.TRAIN, 1, member), 0) for member in (0, 1)]
    await world.pool.stop()


async def test_a_group_that_was_given_up_is_a_suspect_when_it_is_rerolled() -> None:
    world = World(lambda task: task.group == 1, 1)
    again = [GroupTask(Stream.TRAIN, 1, "A", (0, 1), attempt) for attempt in (1, 2)]
    await world.pool.start()
    first = await asyncio.gather(*map(world.pool.run, groups(3)))
    assert world.made == 4
    rerolled = [await world.pool.run(task) for task in again]
    async with asyncio.timeout(60):
        while world.made < 6:
            await asyncio.sleep(0.01)
    await world.pool.stop()
    assert world.made == 6
    assert [r[-1].stop_reason for r in (first[1], *rerolled)] == [StopReason.ENV_ERROR] * 3


async def test_a_worker_that_dies_of_something_else_costs_no_episode() -> None:
    spent: list[int] = []

    def once_each(task: GroupTask) -> bool:
        """Two deaths, of two groups."""
        if task.group in (2, 5) and task.group not in spent:
            spent.append(task.group)
            return True
        return False

    assert reasons(await World(once_each, 2).play(*groups(8))) == [{StopReason.COMPLETED}] * 8


async def test_a_worker_that_replaces_a_dead_one_hears_which_tokens_are_too_old() -> None:
    made: list[MortalWorker] = []

    async def spawn() -> Remote:
        made.append(MortalWorker(lambda task: len(made) == 1))
        return Remote(made[-1])

    pool = EnvPool(spawn, 1)
    await pool.start()
    pool.set_bounds(VersionBounds(2, 3))
    await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert [worker.bounds for worker in made] == [VersionBounds(2, 3)] * 2


async def test_workers_that_only_die_end_the_run() -> None:
    world = World(lambda task: True, 2)
    words = f"{MAX_DEATHS} env workers died in a row.*{MAX_DEATHS} of them while they ran 'A'"
    with pytest.raises(RolloutFailed, match=f"{words}.*set isolated: true.*: killed"):
        await world.play(*groups(MAX_DEATHS, members=1))


async def test_the_environment_in_most_of_the_dead_workers_is_named() -> None:
    world = World(lambda task: task.tag == "bad", 2)
    tasks = [
        GroupTask(Stream.TRAIN, group, "bad" if group else "good", (0,))
        for group in range(3 * MAX_DEATHS)
    ]
    await world.pool.start()
    playing = [asyncio.create_task(world.pool.run(task)) for task in tasks]
    async with asyncio.timeout(20):
        await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
        failures = {str(task.exception()) for task in playing if task.done() and task.exception()}
    await world.pool.stop()
    (failure,) = failures
    assert "while they ran 'bad'." in failure


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("a mistake of ours"), "a mistake of ours"),
        (OtherActorDied("its store is gone"), "its store is gone"),
    ],
)
async def test_a_worker_that_fails_and_lives_ends_the_run_with_its_own_words(
    error: Exception, words: str
) -> None:
    class Failing(MortalWorker):
        async def collect(self) -> bytes:
            raise error

    async def spawn() -> Remote:
        return Remote(Failing(lambda task: False))

    pool = EnvPool(spawn, 1)
    await pool.start()
    with pytest.raises(type(error), match=words):
        await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    with pytest.raises(type(error), match=words):
        await pool.run(groups(1)[0])
    await pool.stop()


async def test_a_worker_that_ray_cannot_reach_is_ended_before_others_play_its_groups() -> None:
    class OutOfReach(MortalWorker):
        async def collect(self) -> bytes:
            raise ActorUnavailable("the network is slow")

    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote((MortalWorker if made else OutOfReach)(lambda task: False)))
        return made[-1]

    pool = EnvPool(spawn, 1)
    await pool.start()
    played = await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert reasons([played]) == [{StopReason.COMPLETED}]
    assert [worker.killed for worker in made] == [True, False]


async def test_a_frozen_worker_is_killed_and_others_play_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its `collect` would never fail."""
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.05)
    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote(MortalWorker(lambda task: False) if made else Mute()))
        return made[-1]

    pool = EnvPool(spawn, 1)
    await pool.start()
    played = await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert reasons([played]) == [{StopReason.COMPLETED}]
    assert [worker.killed for worker in made] == [True, False]


async def test_a_replacement_that_dies_before_it_is_ready_is_replaced_too() -> None:
    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote(MortalWorker(lambda task: len(made) == 1)))
        if len(made) in (2, 3):
            raise ActorDied("its node was drained")
        return made[-1]

    pool = EnvPool(spawn, 1)
    await pool.start()
    played = await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert reasons([played]) == [{StopReason.COMPLETED}]
    assert len(made) == 4


async def test_replacements_that_only_die_end_the_run() -> None:
    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote(MortalWorker(lambda task: True)))
        if len(made) > 1:
            raise ActorDied("its node was drained")
        return made[-1]

    pool = EnvPool(spawn, 1)
    await pool.start()
    with pytest.raises(RolloutFailed, match=f"{MAX_DEATHS} env workers died in a row"):
        await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert len(made) == MAX_DEATHS


async def test_a_replaced_worker_that_goes_on_stores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its trajectory would replace the one of which the driver has the rewards."""
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.05)
    numbers: list[int] = []

    class Numbered(MortalWorker):
        async def set_endpoints(self, endpoints: Endpoints) -> None:
            numbers.append(endpoints.worker)

    class Frozen(Numbered):
        async def collect(self) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

    async def spawn() -> Remote:
        return Remote((Numbered if numbers else Frozen)(lambda task: False))

    store, key = TrajectoryStore(), EpisodeKey(Stream.TRAIN, 0, 0)
    pool = EnvPool(spawn, 1)
    await pool.start()
    await pool.set_endpoints({}, [Remote(store)])
    await asyncio.wait_for(pool.run(groups(1)[0]), 20)
    await pool.stop()
    assert numbers == [1, 2]
    late, rerun = (
        Trajectory(key, "A", (), StopReason.COMPLETED, {"success": success})
        for success in (0.0, 1.0)
    )
    await store.put(pack([rerun]), 2)
    with pytest.raises(PermissionError, match="env worker 1 was replaced"):
        await store.put(pack([late]), 1)
    (kept,) = unpack(await store.get([key]))
    assert kept.metrics == {"success": 1.0}
