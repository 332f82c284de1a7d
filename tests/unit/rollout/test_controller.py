"""The controller: which groups begin, which count, and in which order they are served."""

from __future__ import annotations

import asyncio

import pytest

from agenticrun_workers.rollout.controller import RolloutController, RolloutPosition, TooManyDropped
from agenticrun_workers.rollout.gate import StalenessGate
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask
from agenticrun_workers.types import StopReason
from rollout_fakes import FakePlayers


class Run:
    """A controller with its fakes."""

    def __init__(
        self, players: FakePlayers, *, size: int = 2, staleness: float = 0, group_size: int = 2, position: RolloutPosition | None = None
    ) -> None:
        self.players = players
        self.discarded: list[EpisodeResult] = []
        self.controller = RolloutController(
            players,
            StalenessGate(size, 16, staleness),
            tags=("A",),
            group_size=group_size,
            discard=self._discard,
            position=position or RolloutPosition(),
        )

    async def _discard(self, results: list[EpisodeResult]) -> None:
        self.discarded += results

    def advance(self, version: int) -> None:
        self.players.version = version
        self.controller.advance(version)

    async def batch(self) -> list[int]:
        batch = await asyncio.wait_for(self.controller.batch(), 5)
        return [group.group for group in batch.groups]


async def test_without_staleness_batches_are_the_groups_in_order() -> None:
    run = Run(FakePlayers())
    served = []
    for version in range(3):
        run.advance(version)
        served.append(await run.batch())
    assert served == [[0, 1], [2, 3], [4, 5]]
    assert len(run.players.tasks) == 6


async def test_nothing_begins_before_the_weights_of_the_next_version_are_there() -> None:
    run = Run(FakePlayers())
    run.advance(0)
    await run.batch()
    await asyncio.sleep(0.01)
    assert len(run.players.tasks) == 2


async def test_finished_groups_do_not_wait_for_an_older_one_that_is_slow() -> None:
    players = FakePlayers()
    players.hold(0)
    run = Run(players, staleness=1)
    run.advance(0)
    assert await run.batch() == [1, 2]
    players.held[0].set()
    run.advance(1)
    assert await run.batch() == [0, 3]


async def test_a_group_that_grew_too_old_is_thrown_away_and_replaced() -> None:
    players = FakePlayers()
    players.hold(0)
    run = Run(players, staleness=1)
    run.advance(0)
    await run.batch()
    run.advance(1)
    await run.batch()
    players.held[0].set()
    await asyncio.sleep(0.01)
    run.advance(2)
    batch = await asyncio.wait_for(run.controller.batch(), 5)
    assert 0 not in [group.group for group in batch.groups]
    assert batch.counts.stale == 1
    assert {result.key.group for result in run.discarded} == {0}
    assert all(2 - group.oldest_version <= 1 for group in batch.groups)


async def test_an_episode_that_fails_is_played_again_with_another_seed() -> None:
    def first_try_fails(task: GroupTask, member: int) -> StopReason:
        return StopReason.ENV_ERROR if (task.group, member, task.attempt) == (0, 1, 0) else StopReason.COMPLETED

    run = Run(FakePlayers(first_try_fails))
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 5)
    assert [(r.key.group, r.key.member, r.attempt) for r in batch.results] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)]
    assert batch.counts.rerolled == 1
    assert [r.stop_reason for r in batch.counts.untrainable] == [StopReason.ENV_ERROR]


async def test_a_group_trains_with_fewer_members_after_the_last_reroll() -> None:
    run = Run(FakePlayers(lambda task, member: StopReason.TIMEOUT if member == 0 else StopReason.COMPLETED), group_size=3)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 5)
    assert [(r.key.group, r.key.member) for r in batch.results] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [task.attempt for task in run.players.tasks if task.group == 0] == [0, 1, 2]


async def test_a_group_with_one_good_member_is_dropped_and_another_begins() -> None:
    def group_zero_fails(task: GroupTask, member: int) -> StopReason:
        return StopReason.ENV_ERROR if task.group == 0 and member else StopReason.COMPLETED

    run = Run(FakePlayers(group_zero_fails), group_size=3)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 5)
    assert [group.group for group in batch.groups] == [1, 2]
    assert batch.counts.dropped == 1
    assert [(r.key.group, r.key.member) for r in run.discarded] == [(0, 0)]


async def test_an_environment_that_always_fails_ends_in_an_error_that_says_why() -> None:
    run = Run(FakePlayers(lambda task, member: StopReason.ENV_ERROR))
    run.advance(0)
    with pytest.raises(TooManyDropped, match="env_error"):
        await run.batch()


async def test_what_the_players_raise_reaches_whoever_waits_for_a_batch() -> None:
    def broken(task: GroupTask, member: int) -> StopReason:
        raise RuntimeError("no players left")

    run = Run(FakePlayers(broken))
    run.advance(0)
    with pytest.raises(RuntimeError, match="no players left"):
        await run.batch()


async def test_a_resumed_controller_plays_again_what_was_begun_and_not_trained_on() -> None:
    players = FakePlayers()
    players.hold(0)
    run = Run(players, staleness=1)
    run.advance(0)
    await run.batch()
    await asyncio.sleep(0.01)
    position = run.controller.position
    await run.controller.stop()
    assert position == RolloutPosition(next_group=4, again=(0, 3))

    resumed = Run(FakePlayers(), position=position)
    resumed.advance(0)
    assert await resumed.batch() == [0, 3]
    resumed.advance(1)
    assert await resumed.batch() == [4, 5]
