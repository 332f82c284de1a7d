"""The pool finds the group that kills its workers and gives up that group only.

Every other episode is played to its end. Workers join and leave meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.launch import ActorDied, ActorUnavailable, OtherActorDied, liveness
from agenticrun_workers.launch.liveness import FROZEN_POLLS, POLL_SECONDS
from agenticrun_workers.rollout import env_pool
from agenticrun_workers.rollout.env_pool import MAX_DEATHS, EnvPool
from agenticrun_workers.rollout.env_worker import ResultMailbox
from agenticrun_workers.rollout.groups import (
    Endpoints,
    EpisodeResult,
    EpisodeTask,
    VersionBounds,
)
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory
from rollout_fakes import Mute, Remote, result
from virtual_clock import on_virtual_clock
from waiting import eventually_in_loop

FROZEN_SECONDS = FROZEN_POLLS * POLL_SECONDS

Kills = Callable[[EpisodeTask], bool]


class MortalWorker:
    """Plays each member in some ticks of the loop, and dies of the groups that `kills` says."""

    def __init__(self, kills: Kills) -> None:
        self._kills = kills
        self._outbox: ResultMailbox[EpisodeResult] = ResultMailbox(0.0)
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    async def abort(self, episodes: Any) -> None: ...

    async def set_endpoints(self, endpoints: Endpoints) -> None: ...

    async def set_bounds(self, bounds: VersionBounds) -> None:
        self.bounds = bounds

    async def submit(self, tasks: list[EpisodeTask]) -> None:
        for task in tasks:
            asyncio.get_running_loop().create_task(self._play_one(task))

    async def collect(self) -> list[EpisodeResult]:
        taking = asyncio.ensure_future(self._outbox.take(5.0))
        either: set[asyncio.Future[Any]] = {taking, self._death}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise ActorDied("killed")
        return taking.result()

    async def _play_one(self, task: EpisodeTask) -> None:
        group, member = task.key.group, task.key.member
        for _ in range(3 + (7 * group + member) % 5):
            await asyncio.sleep(0)
        if self._kills(task) and not self._death.done():
            self._death.set_result(None)
        if not self._death.done():
            self._outbox.put(result(group, member, attempt=task.attempt))


class World:
    def __init__(self, kills: Kills, workers: int) -> None:
        self.kills = kills
        self.made = 0
        self._another = asyncio.Event()
        self.pool = EnvPool(self._spawn, workers)
        self._workers = workers

    @property
    def deaths(self) -> int:
        return self.made - self._workers

    async def _spawn(self) -> Remote:
        self.made += 1
        self._another.set()
        return Remote(MortalWorker(self.kills))

    async def until_made(self, workers: int) -> None:
        async with asyncio.timeout(60):
            while self.made < workers:
                self._another.clear()
                await self._another.wait()

    async def play(self, *tasks: EpisodeTask) -> list[EpisodeResult]:
        await self.pool.start()
        try:
            return await asyncio.wait_for(asyncio.gather(*map(self.pool.run, tasks)), 20)
        finally:
            await self.pool.stop()


def episode(group: int, member: int = 0, tag: str = "A", attempt: int = 0) -> EpisodeTask:
    return EpisodeTask(EpisodeKey(Stream.TRAIN, group, member), tag, attempt)


def groups(count: int, members: int = 2) -> list[EpisodeTask]:
    return [episode(group, member) for group in range(count) for member in range(members)]


def reasons(played: list[EpisodeResult]) -> set[StopReason]:
    return {result.stop_reason for result in played}


@given(st.integers(1, 3), st.integers(1, 12), st.data())
def test_guilty_groups_are_given_up_and_all_others_play_to_their_end(
    workers: int, count: int, data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    tasks = groups(count)

    async def play() -> tuple[World, list[EpisodeResult]]:
        world = World(lambda task: task.key.group in guilty, workers)
        return world, await world.play(*tasks)

    world, played = asyncio.run(play())
    assert [result.key for result in played] == [task.key for task in tasks]
    for ended in played:
        if ended.key.group not in guilty:
            assert ended.stop_reason is StopReason.COMPLETED
        else:
            assert ended.stop_reason is StopReason.ENV_ERROR
            assert (
                "3 env workers died while they played it: the environment 'A' may end its process; "
                "set isolated: true" in ended.error
            )
    assert world.deaths <= 3 * len(guilty)


async def test_the_members_of_a_group_share_a_worker() -> None:
    """So that a group that kills its workers kills three, and not three for each member."""
    world = World(lambda task: False, 3)
    await world.pool.start()
    running = [asyncio.create_task(world.pool.run(task)) for task in groups(6, members=4)]
    await asyncio.sleep(0)
    homes = [set(worker.open) for worker in world.pool._workers]
    assert sorted(map(len, homes)) == [2, 2, 2]
    assert len(set.union(*homes)) == 6
    await asyncio.gather(*running)
    assert [worker.open for worker in world.pool._workers] == [{}, {}, {}]
    await world.pool.stop()


async def test_an_aborted_group_does_not_run_again_when_its_worker_dies() -> None:
    death, begun = asyncio.Event(), asyncio.Semaphore(0)
    world = World(lambda task: False, 1)
    aborted: list[tuple[EpisodeKey, int]] = []

    class Slow(MortalWorker):
        async def abort(self, episodes: Any) -> None:
            aborted.extend(episodes)

        async def _play_one(self, task: EpisodeTask) -> None:
            begun.release()
            await death.wait()
            await super()._play_one(task)

    async def spawn() -> Remote:
        world.made += 1
        return Remote(Slow(lambda task: world.made == 1))

    world.pool = EnvPool(spawn, 1)
    await world.pool.start()
    running = [asyncio.create_task(world.pool.run(task)) for task in groups(2)]
    for _ in running:
        await asyncio.wait_for(begun.acquire(), 60)
    world.pool.abort(1)
    death.set()
    results = await asyncio.wait_for(asyncio.gather(*running), 20)
    assert [(r.key.group, r.stop_reason) for r in results] == [
        (0, StopReason.COMPLETED),
        (0, StopReason.COMPLETED),
        (1, StopReason.ABORTED),
        (1, StopReason.ABORTED),
    ]
    assert world.made == 2
    assert aborted == [(EpisodeKey(Stream.TRAIN, 1, member), 0) for member in (0, 1)]
    await world.pool.stop()


async def test_an_abort_while_the_stores_hear_of_a_death_is_not_lost() -> None:
    """The tasks of a worker that is gone belong to no worker until the stores refuse it."""
    asked, heard = asyncio.Event(), asyncio.Event()

    class SlowStore(TrajectoryStore):
        async def refuse(self, worker: int, lost: Collection[EpisodeKey] = ()) -> None:
            asked.set()
            await heard.wait()

    world = Elastic(1, held=True)
    playing = await world.play(2)
    await world.pool.set_endpoints({}, [Remote(SlowStore())])
    world.workers[0].die()
    await asyncio.wait_for(asked.wait(), 20)
    world.pool.abort(1)
    heard.set()
    await world.until_played(6)
    world.released.set()
    results = await asyncio.wait_for(asyncio.gather(*playing), 20)
    assert [r.stop_reason for r in results] == [StopReason.COMPLETED] * 2 + [StopReason.ABORTED] * 2
    assert [group for _, group in world.played[4:]] == [0, 0], "an aborted group runs again"
    assert world.pool.lost_episodes == 4
    await world.pool.stop()


async def test_a_failure_also_ends_the_tasks_of_a_worker_that_is_just_gone() -> None:
    asked = asyncio.Event()

    class SilentStore(TrajectoryStore):
        async def refuse(self, worker: int, lost: Collection[EpisodeKey] = ()) -> None:
            asked.set()
            await asyncio.Event().wait()

    class Failing(MortalWorker):
        async def collect(self) -> list[EpisodeResult]:
            await asked.wait()
            raise ZeroDivisionError("a mistake of ours")

    made: list[MortalWorker] = []

    async def spawn() -> Remote:
        made.append((Failing if made else MortalWorker)(lambda task: False))
        return Remote(made[-1])

    pool = EnvPool(spawn, 2)
    await pool.start()
    await pool.set_endpoints({}, [Remote(SilentStore())])
    playing = asyncio.create_task(pool.run(episode(0)))
    await asyncio.sleep(0)
    made[0].die()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(playing, 20)
    await pool.stop()


async def test_an_abort_does_not_overtake_its_episode() -> None:
    """Ray promises no order: a worker ignores the abort of an episode that it does not know."""
    calls: list[str] = []
    came = asyncio.Event()

    class SlowToHear(MortalWorker):
        async def submit(self, tasks: list[EpisodeTask]) -> None:
            await came.wait()
            calls.append("submit")

        async def abort(self, episodes: Any) -> None:
            calls.append("abort")
            self._outbox.put(result(0, stop=StopReason.ABORTED))

    async def spawn() -> Remote:
        return Remote(SlowToHear(lambda task: False))

    pool = EnvPool(spawn, 1)
    await pool.start()
    playing = asyncio.create_task(pool.run(episode(0)))
    for _ in range(5):
        await asyncio.sleep(0)
    pool.abort(0)
    for _ in range(5):
        await asyncio.sleep(0)
    came.set()
    await asyncio.wait_for(playing, 20)
    assert calls == ["submit", "abort"]
    await pool.stop()


async def test_an_episode_that_is_aborted_before_it_is_sent_is_not_sent() -> None:
    world = Elastic(1)
    await world.pool.start()
    playing = [asyncio.create_task(world.pool.run(task)) for task in groups(2)]
    asyncio.get_running_loop().call_soon(world.pool.abort, 1)
    results = await asyncio.wait_for(asyncio.gather(*playing), 20)
    assert [r.stop_reason for r in results] == [StopReason.COMPLETED] * 2 + [StopReason.ABORTED] * 2
    assert world.played == [(0, 0), (0, 0)]
    assert world.pool._workers[0].episodes == 0
    await world.pool.stop()


async def test_a_group_that_was_given_up_is_a_suspect_when_it_is_rerolled() -> None:
    world = World(lambda task: task.key.group == 1, 1)
    again = [episode(1, attempt=attempt) for attempt in (1, 2)]
    await world.pool.start()
    first = await asyncio.gather(*map(world.pool.run, groups(3)))
    assert world.made == 4
    rerolled = [await world.pool.run(task) for task in again]
    await world.until_made(6)
    await world.pool.stop()
    assert world.made == 6
    assert reasons([r for r in first if r.key.group == 1]) == {StopReason.ENV_ERROR}
    assert reasons(rerolled) == {StopReason.ENV_ERROR}


async def test_a_worker_that_dies_of_something_else_costs_no_episode() -> None:
    spent: list[int] = []

    def once_each(task: EpisodeTask) -> bool:
        """Two deaths, of two groups."""
        if task.key.group in (2, 5) and task.key.group not in spent:
            spent.append(task.key.group)
            return True
        return False

    assert reasons(await World(once_each, 2).play(*groups(8))) == {StopReason.COMPLETED}


async def test_a_worker_that_replaces_a_dead_one_hears_which_tokens_are_too_old() -> None:
    made: list[MortalWorker] = []

    async def spawn() -> Remote:
        made.append(MortalWorker(lambda task: len(made) == 1))
        return Remote(made[-1])

    pool = EnvPool(spawn, 1)
    await pool.start()
    pool.set_bounds(VersionBounds(2, 3))
    await asyncio.wait_for(pool.run(episode(0)), 20)
    await pool.stop()
    assert [worker.bounds for worker in made] == [VersionBounds(2, 3)] * 2


async def test_a_stopped_worker_hears_of_the_newest_bounds_only_when_it_goes_on() -> None:
    heard: list[int] = []
    going_on = asyncio.Event()

    class Stopped(MortalWorker):
        async def set_bounds(self, bounds: VersionBounds) -> None:
            heard.append(bounds.oldest)
            await going_on.wait()

    async def spawn() -> Remote:
        return Remote(Stopped(lambda _: False))

    pool = EnvPool(spawn, 1)
    await pool.start()
    for oldest in range(1, 100):
        pool.set_bounds(VersionBounds(oldest))
        await asyncio.sleep(0)
    assert heard == [1]
    going_on.set()
    await eventually_in_loop(lambda: heard == [1, 99], 20, "the newest bounds")
    pool.set_bounds(VersionBounds(100))
    await eventually_in_loop(lambda: heard == [1, 99, 100], 20, "later bounds")
    await pool.stop()


async def test_an_error_of_a_worker_that_hears_of_bounds_ends_the_run() -> None:
    class Broken(MortalWorker):
        async def set_bounds(self, bounds: VersionBounds) -> None:
            raise ZeroDivisionError("broken")

    async def spawn() -> Remote:
        return Remote(Broken(lambda _: False))

    pool = EnvPool(spawn, 1)
    await pool.start()
    pool.set_bounds(VersionBounds(1))
    with pytest.raises(ZeroDivisionError, match="broken"):
        await asyncio.wait_for(pool.run(episode(0)), 20)
    await pool.stop()


async def test_workers_that_only_die_end_the_run() -> None:
    world = World(lambda task: True, 2)
    words = f"{MAX_DEATHS} env workers died in a row.*{MAX_DEATHS} of them while they ran 'A'"
    with pytest.raises(RolloutFailed, match=f"{words}.*set isolated: true.*: killed"):
        await world.play(*groups(MAX_DEATHS, members=1))


async def test_the_environment_in_most_of_the_dead_workers_is_named() -> None:
    world = World(lambda task: task.tag == "bad", 2)
    tasks = [episode(group, tag="bad" if group else "good") for group in range(3 * MAX_DEATHS)]
    await world.pool.start()
    playing = [asyncio.create_task(world.pool.run(task)) for task in tasks]
    async with asyncio.timeout(20):
        await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
        failures = {str(task.exception()) for task in playing if task.done() and task.exception()}
    await world.pool.stop()
    (failure,) = failures
    assert "while they ran 'bad':" in failure


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
        async def collect(self) -> list[EpisodeResult]:
            raise error

    async def spawn() -> Remote:
        return Remote(Failing(lambda task: False))

    pool = EnvPool(spawn, 1)
    await pool.start()
    with pytest.raises(type(error), match=words):
        await asyncio.wait_for(pool.run(episode(0)), 20)
    with pytest.raises(type(error), match=words):
        await pool.run(episode(0))
    await pool.stop()


async def test_a_worker_that_ray_cannot_reach_is_ended_before_others_play_its_groups() -> None:
    class OutOfReach(MortalWorker):
        async def collect(self) -> list[EpisodeResult]:
            raise ActorUnavailable("the network is slow")

    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote((MortalWorker if made else OutOfReach)(lambda task: False)))
        return made[-1]

    pool = EnvPool(spawn, 1)
    await pool.start()
    played = await asyncio.wait_for(pool.run(episode(0)), 20)
    await pool.stop()
    assert played.stop_reason is StopReason.COMPLETED
    assert [worker.killed for worker in made] == [True, False]


def test_a_frozen_worker_is_killed_and_others_play_its_groups() -> None:
    """Its `collect` would never fail."""
    made: list[Remote] = []

    async def spawn() -> Remote:
        made.append(Remote(MortalWorker(lambda task: False) if made else Mute()))
        return made[-1]

    async def play() -> EpisodeResult:
        pool = EnvPool(spawn, 1)
        await pool.start()
        played = await asyncio.wait_for(pool.run(episode(0)), 2 * FROZEN_SECONDS)
        await pool.stop()
        return played

    assert on_virtual_clock(play()).stop_reason is StopReason.COMPLETED
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
    played = await asyncio.wait_for(pool.run(episode(0)), 20)
    await pool.stop()
    assert played.stop_reason is StopReason.COMPLETED
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
        await asyncio.wait_for(pool.run(episode(0)), 20)
    await pool.stop()
    assert len(made) == MAX_DEATHS


def test_a_replaced_worker_that_goes_on_stores_nothing() -> None:
    """Its trajectory would replace the one of which the driver has the rewards."""
    numbers: list[int] = []

    class Numbered(MortalWorker):
        async def set_endpoints(self, endpoints: Endpoints) -> None:
            numbers.append(endpoints.worker)

    class Frozen(Numbered):
        async def collect(self) -> list[EpisodeResult]:
            await asyncio.Event().wait()
            raise AssertionError

    async def spawn() -> Remote:
        return Remote((Numbered if numbers else Frozen)(lambda task: False))

    store, key = TrajectoryStore(), EpisodeKey(Stream.TRAIN, 0, 0)

    async def play() -> dict[str, float]:
        pool = EnvPool(spawn, 1)
        await pool.start()
        await pool.set_endpoints({}, [Remote(store)])
        await asyncio.wait_for(pool.run(episode(0)), 2 * FROZEN_SECONDS)
        await pool.stop()
        late, rerun = (
            Trajectory(key, "A", (), StopReason.COMPLETED, {"success": success})
            for success in (0.0, 1.0)
        )
        await store.put([rerun], 2)
        with pytest.raises(PermissionError, match="env worker 1 was replaced"):
            await store.put([late], 1)
        (kept,) = await store.get([key])
        return dict(kept.metrics)

    assert on_virtual_clock(play()) == {"success": 1.0}
    assert numbers == [1, 2]


async def test_a_stored_trajectory_whose_worker_died_before_its_result_came_is_not_kept() -> None:
    """Nobody would ask for it: its episode is aborted, or played again and then aborted."""
    world, store = Elastic(1, held=True), TrajectoryStore()
    playing = await world.play(2)
    await world.pool.set_endpoints({}, [Remote(store)])
    worker = world.pool._workers[0]
    keys = [opened.task.key for opened in worker.tasks]
    for key in keys:
        for branch in (0, 1):
            stored = Trajectory(replace(key, branch=branch), "A", (), StopReason.COMPLETED)
            await store.put([stored], 1)
    world.pool.abort(1)
    world.pool._deliver(worker, result(0))
    await world.pool._refuse(worker)
    delivered = [keys[0], replace(keys[0], branch=1)]
    assert [each.key for each in await store.get(delivered)] == delivered
    assert await store.size() == len(delivered)
    world.workers[0].die()
    world.released.set()
    ended = await asyncio.wait_for(asyncio.gather(*playing), 20)
    assert [each.stop_reason for each in ended[2:]] == [StopReason.ABORTED] * 2
    await world.pool.stop()


class Elastic:
    """A pool whose workers play each episode until `release`, or at once."""

    def __init__(self, workers: int, *, held: bool = False) -> None:
        self.released = asyncio.Event()
        if not held:
            self.released.set()
        self.workers: list[MortalWorker] = []
        self.handles: list[Remote] = []
        self.played: list[tuple[int, int]] = []
        """Number of the worker and the group of each episode that began."""
        self.pool = EnvPool(self._spawn, workers)

    async def _spawn(self) -> Remote:
        world, number = self, len(self.workers)

        class Worker(MortalWorker):
            async def _play_one(self, task: EpisodeTask) -> None:
                world.played.append((number, task.key.group))
                await world.released.wait()
                await super()._play_one(task)

        self.workers.append(Worker(lambda task: False))
        self.handles.append(Remote(self.workers[-1]))
        return self.handles[-1]

    async def play(self, number: int) -> list[asyncio.Task[EpisodeResult]]:
        """Start the workers and this many groups of two; return when all episodes are played."""
        await self.pool.start()
        playing = [asyncio.create_task(self.pool.run(task)) for task in groups(number)]
        await self.until_played(2 * number)
        return playing

    async def until_played(self, episodes: int) -> None:
        await eventually_in_loop(
            lambda: len(self.played) == episodes, 20, f"{episodes} episodes have begun"
        )

    @property
    def settled(self) -> bool:
        pool = self.pool
        sizes = (len(pool.workers), pool.joining, pool.leaving)
        return sizes == (pool.count, 0, 0)


async def test_a_worker_that_joins_gets_new_groups() -> None:
    world = Elastic(1, held=True)
    first = await world.play(3)
    world.pool.resize(2)
    assert world.pool.joining == 1
    await eventually_in_loop(lambda: world.settled, 20, "it has joined")
    second = [asyncio.create_task(world.pool.run(task)) for task in groups(5)[6:]]
    await world.until_played(10)
    assert set(world.played[6:]) == {(1, 3), (1, 4)}
    world.released.set()
    assert reasons(await asyncio.gather(*first, *second)) == {StopReason.COMPLETED}
    await world.pool.stop()


async def test_a_worker_that_leaves_gets_no_new_group_and_ends_with_its_last() -> None:
    world = Elastic(2, held=True)
    first = await world.play(2)
    world.pool.resize(1)
    assert world.pool.leaving == 1
    second = [asyncio.create_task(world.pool.run(task)) for task in groups(4)[4:]]
    await world.until_played(8)
    assert {number for number, _ in world.played[4:]} == {0}
    assert not world.handles[1].killed, "its episodes go on"
    world.released.set()
    assert reasons(await asyncio.gather(*first, *second)) == {StopReason.COMPLETED}
    await eventually_in_loop(lambda: world.settled, 20, "it has left")
    assert [handle.killed for handle in world.handles] == [False, True]
    assert len(world.played) == 8, "no episode was played twice"
    assert world.pool.lost_episodes == 0
    await world.pool.stop()


async def test_others_play_the_groups_of_a_worker_that_takes_too_long_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_pool, "DRAIN_SECONDS", 0.01)
    world = Elastic(2, held=True)
    store = TrajectoryStore()
    playing = await world.play(2)
    await world.pool.set_endpoints({}, [Remote(store)])
    world.pool.resize(1)
    await world.until_played(6)
    world.released.set()
    assert reasons(await asyncio.gather(*playing)) == {StopReason.COMPLETED}
    assert world.pool.lost_episodes == 2
    with pytest.raises(PermissionError):
        await store.put([], 2)
    await world.pool.stop()


async def test_a_worker_that_dies_while_it_leaves_is_not_replaced() -> None:
    world = Elastic(2, held=True)
    playing = await world.play(2)
    world.pool.resize(1)
    world.workers[1].die()
    world.released.set()
    assert reasons(await asyncio.wait_for(asyncio.gather(*playing), 20)) == {StopReason.COMPLETED}
    await eventually_in_loop(lambda: world.settled, 20, "one is left")
    assert len(world.workers) == 2
    await world.pool.stop()


async def test_a_worker_without_a_pod_is_the_first_to_be_given_up() -> None:
    given_up = asyncio.Event()

    async def spawn() -> Remote:
        if made:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                given_up.set()
                raise
        made.append(Remote(MortalWorker(lambda task: False)))
        return made[-1]

    made: list[Remote] = []
    pool = EnvPool(spawn, 1)
    await pool.start()
    pool.resize(2)
    await asyncio.sleep(0)
    pool.resize(1)
    await asyncio.wait_for(given_up.wait(), 20)
    assert (pool.joining, pool.leaving, made[0].killed) == (0, 0, False)
    await pool.stop()


events = st.lists(
    st.tuples(st.integers(0, 8), st.one_of(st.integers(1, 4), st.none())), max_size=20
)


@given(st.integers(1, 12), events)
def test_joins_leaves_and_deaths_at_any_time_lose_and_repeat_no_group(
    count: int, script: list[tuple[int, int | None]]
) -> None:
    """`script`: after so many ticks, so many workers are wanted, or one dies if it is None."""

    async def play() -> None:
        world = Elastic(2)
        deaths = 0
        await world.pool.start()
        playing = [asyncio.create_task(world.pool.run(task)) for task in groups(count)]
        for ticks, wanted in script:
            for _ in range(ticks):
                await asyncio.sleep(0)
            if wanted is not None:
                world.pool.resize(wanted)
            elif deaths < 2:  # three may have one culprit
                deaths += 1
                world.workers[-1].die()
        played = await asyncio.wait_for(asyncio.gather(*playing), 20)
        assert [each.key for each in played] == [task.key for task in groups(count)]
        assert reasons(played) == {StopReason.COMPLETED}
        await eventually_in_loop(lambda: world.settled, 20, "the wanted workers are there")
        await world.pool.stop()
        for handle in world.handles:
            handle.kill()
        await eventually_in_loop(
            lambda: (
                not [
                    task for task in asyncio.all_tasks() if task.get_name().startswith("env-worker")
                ]
            ),
            20,
            "no task is left",
        )

    asyncio.run(play())


async def test_episodes_begin_without_a_worker_whose_pod_cannot_be_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "JOIN_SECONDS", 0.05)
    room = asyncio.Event()
    world = World(lambda task: False, 3)
    spawn = world._spawn

    async def placed() -> Remote:
        if world.made == 2:
            await room.wait()
        return await spawn()

    world.pool._spawn = placed
    async with asyncio.timeout(60):
        await world.pool.start(needed=2)
        assert (len(world.pool.workers), world.pool.joining) == (2, 1)
        assert await world.pool.run(episode(0))
        room.set()
        while world.pool.joining:
            await asyncio.sleep(0.01)
    assert len(world.pool.workers) == 3
    await world.pool.stop()


async def test_a_start_waits_for_the_workers_that_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "JOIN_SECONDS", 0.01)

    async def never() -> Remote:
        await asyncio.Event().wait()
        raise AssertionError

    pool = EnvPool(never, 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.start(needed=1), 0.2)
    assert not pool.workers
