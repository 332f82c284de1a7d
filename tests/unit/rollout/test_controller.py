"""The controller: which groups begin, which count, and in which order they are served."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from agenticrun_workers.rollout.controller import (
    Group,
    GroupState,
    RolloutController,
    StalenessGate,
    TooManyDropped,
    TooManyRejected,
)
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    GroupFilter,
    GroupPlan,
    VersionBounds,
    zero_variance,
)
from agenticrun_workers.types import RolloutPosition, StopReason
from rollout_fakes import FakeBackend


class Run:
    """A controller with its fakes."""

    def __init__(
        self,
        backend: FakeBackend,
        *,
        size: int = 2,
        staleness: float = 0,
        group_size: int = 2,
        position: RolloutPosition | None = None,
        **plan: Any,
    ) -> None:
        self.backend = backend
        self.discarded: list[EpisodeResult] = []
        self.controller = RolloutController(
            backend,
            StalenessGate(size, 16, staleness),
            GroupPlan(("A",), group_size, **plan),
            discard=self._discard,
            position=position or RolloutPosition(),
        )

    async def _discard(self, results: list[EpisodeResult]) -> None:
        self.discarded += results

    def advance(self, version: int, engine_version: int | None = None) -> None:
        self.backend.version = version if engine_version is None else engine_version
        self.controller.advance(version, self.backend.version)

    @property
    def begun(self) -> set[int]:
        """The groups that have begun."""
        return {task.key.group for task in self.backend.tasks}

    async def batch(self) -> list[int]:
        batch = await asyncio.wait_for(self.controller.batch(), 60)
        assert {group.state for group in batch.groups} == {GroupState.SERVED}
        return [group.number for group in batch.groups]


def runs_of(backend: FakeBackend, group: int) -> list[tuple[int, int]]:
    """Member and attempt of each episode of a group, in the order in which they began."""
    return [(task.key.member, task.attempt) for task in backend.tasks if task.key.group == group]


async def settled() -> None:
    """Run everything that needs no clock.

    Episodes of `FakeBackend` take some ticks of the loop.
    """
    for _ in range(400):
        await asyncio.sleep(0)


async def test_without_staleness_batches_are_the_groups_in_order() -> None:
    run = Run(FakeBackend())
    served = []
    for version in range(3):
        run.advance(version)
        served.append(await run.batch())
    assert served == [[0, 1], [2, 3], [4, 5]]
    assert run.begun == set(range(6))
    assert len(run.backend.tasks) == 12


async def test_nothing_begins_before_the_weights_of_the_next_version_are_there() -> None:
    run = Run(FakeBackend())
    run.advance(0)
    await run.batch()
    await settled()
    assert run.begun == {0, 1}


async def test_finished_groups_do_not_wait_for_an_older_one_that_is_slow() -> None:
    backend = FakeBackend()
    backend.hold(0)
    run = Run(backend, staleness=1)
    run.advance(0)
    assert await run.batch() == [1, 2]
    backend.held[0].set()
    await settled()
    run.advance(1)
    assert await run.batch() == [0, 3]


async def test_a_group_that_grows_too_old_is_stopped_and_runs_again_under_its_number() -> None:
    backend = FakeBackend()
    backend.hold(0)
    run = Run(backend, staleness=1)
    run.advance(0)
    assert await run.batch() == [1, 2]
    run.advance(1)
    assert await run.batch() == [3, 4]
    await settled()
    assert runs_of(backend, 0) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert 0 in run.controller.position.pending_groups
    backend.held[0].set()
    run.advance(2)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [group.number for group in batch.groups] == [0, 5]
    assert all(2 - group.oldest_version <= 1 for group in batch.groups)
    assert (batch.counts.stale, len(batch.counts.stale_episodes)) == (1, 2)
    assert run.discarded == [], "nothing was stored of the stopped members"


async def test_a_batch_waits_for_a_group_that_would_grow_too_old_again() -> None:
    """Else no episode that is slower than the trainer would ever be trained on."""
    backend = FakeBackend()
    backend.hold(0)
    run = Run(backend, staleness=1)
    for version, served in [(0, [1, 2]), (1, [3, 4])]:
        run.advance(version)
        assert await run.batch() == served
        await settled()
    run.advance(2)
    waiting = asyncio.create_task(run.batch())
    await settled()
    assert not waiting.done()
    backend.held[0].set()
    assert await waiting == [0, 5]


async def test_batches_wait_for_a_group_that_ran_again_also_after_a_resume() -> None:
    """Else no slow episode is trained on in a run that restarts often."""
    backend = FakeBackend()
    backend.hold(0)
    run = Run(backend, staleness=1)
    for version in range(2):
        run.advance(version)
        await run.batch()
    await settled()
    position = run.controller.position
    await run.controller.stop()
    assert position == RolloutPosition(6, pending_groups=(0, 5), requeued_groups=(0,))

    resumed = Run(backend, staleness=1, position=position)
    assert resumed.controller.position == position
    resumed.advance(0)
    assert await resumed.batch() == [5, 6]
    resumed.advance(1)
    waiting = asyncio.create_task(resumed.batch())
    await settled()
    assert not waiting.done()
    backend.held[0].set()
    assert await waiting == [0, 7]


async def test_a_batch_does_not_wait_for_a_group_that_cannot_begin_before_it() -> None:
    """A run may resume with a smaller `staleness.max`, and so with more groups than may begin."""
    position = RolloutPosition(10, pending_groups=tuple(range(10)), requeued_groups=(9,))
    run = Run(FakeBackend(), staleness=0, position=position)
    run.advance(0)
    waiting = asyncio.create_task(run.batch())
    await settled()
    assert waiting.done()
    assert await waiting == [0, 1]


async def test_a_member_that_ends_before_it_hears_that_it_is_too_old_is_discarded() -> None:
    class Deaf(FakeBackend):
        def set_bounds(self, bounds: VersionBounds) -> None: ...

    backend = Deaf()
    backend.hold(0)
    run = Run(backend, staleness=1)
    for version in range(2):
        run.advance(version)
        await run.batch()
    backend.held[0].set()
    await settled()
    run.advance(2)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert 0 in [group.number for group in batch.groups]
    assert all(2 - group.oldest_version <= 1 for group in batch.groups)
    assert [(r.key.group, r.key.member, r.attempt) for r in run.discarded] == [(0, 0, 0), (0, 1, 0)]
    assert (batch.counts.stale, batch.counts.stale_episodes) == (1, run.discarded)


class Scripted(FakeBackend):
    """Member m ends its run number n as `script[m][n]`, a stop reason and a policy version."""

    def __init__(self, *script: list[tuple[StopReason, int]]) -> None:
        super().__init__()
        self.script = script

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        stop, version = self.script[task.key.member][task.attempt]
        played = await super().run(task)
        return replace(played, stop_reason=stop, oldest_version=version)


GOOD = StopReason.COMPLETED


async def no_drop(stale: list[EpisodeResult]) -> None:
    raise AssertionError(f"{stale} run again")


async def any_drop(stale: list[EpisodeResult]) -> None: ...


async def test_only_the_members_that_are_too_old_run_again() -> None:
    backend = Scripted([(GOOD, 0), (GOOD, 2)], [(GOOD, 1)], [(StopReason.STALE, 0), (GOOD, 2)])
    backend.set_bounds(VersionBounds(oldest=1, newest=2))
    dropped: list[tuple[int, int]] = []

    async def drop(stale: list[EpisodeResult]) -> None:
        await asyncio.sleep(0)
        again = [task.key.member for task in backend.tasks if task.attempt]
        assert not {result.key.member for result in stale} & {*again}, "the keys are the same"
        dropped.extend((result.key.member, result.attempt) for result in stale)

    group = Group.of(GroupPlan(("A",), 3), 0)
    await group.run(backend, backend.bounds, drop)
    assert sorted(runs_of(backend, 0)) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert [r.oldest_version for r in group.results] == [2, 1, 2]
    assert dropped == [(0, 0), (2, 0)]
    assert (group.rerolled, group.untrainable) == (0, [])


@pytest.mark.parametrize("reason", [StopReason.STALE, StopReason.ENV_ERROR])
async def test_a_member_starts_again_at_once_while_the_others_still_run(reason: StopReason) -> None:
    slow = asyncio.Event()

    class Uneven(Scripted):
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            if task.key.member == 1:
                await slow.wait()
            return await super().run(task)

    backend = Uneven([(reason, 0), (reason, 0), (GOOD, 0)], [(GOOD, 0)])
    group = Group.of(GroupPlan(("A",), 2), 0)

    running = asyncio.create_task(group.run(backend, VersionBounds(), any_drop))
    await settled()
    assert [result.key.member for result in group.kept] == [0]
    slow.set()
    await running
    assert [(r.key.member, r.attempt) for r in group.untrainable] == [
        (0, attempt) for attempt in range(2) if reason is StopReason.ENV_ERROR
    ]
    assert [r.attempt for r in group.results] == [2, 0]


async def test_a_finished_member_that_grows_too_old_starts_again_while_the_others_still_run() -> (
    None
):
    class OneIsSlow(FakeBackend):
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            if task.key.member == 1:
                await asyncio.Event().wait()
            return await super().run(task)

    backend = OneIsSlow()
    discarded: list[int] = []

    async def drop(stale: list[EpisodeResult]) -> None:
        discarded.extend(result.key.member for result in stale)

    group = Group.of(GroupPlan(("A",), 2), 0)
    running = asyncio.create_task(group.run(backend, VersionBounds(), drop))
    await settled()
    backend.version = 1
    group.set_bounds(VersionBounds(oldest=1, newest=1))
    await settled()
    assert discarded == [0]
    assert [(r.key.member, r.attempt, r.oldest_version) for r in group.kept] == [(0, 1, 1)]
    assert group.requeued
    running.cancel()


async def test_the_seed_of_a_member_does_not_depend_on_the_others() -> None:
    """The attempt is a part of the seed, and other members may fail or grow too old at any time."""
    stale, error = StopReason.STALE, StopReason.ENV_ERROR
    backend = Scripted([(stale, 0), (stale, 0), (GOOD, 0)], [(error, 0), (GOOD, 0)], [(GOOD, 0)])

    group = Group.of(GroupPlan(("A",), 3), 0)
    await group.run(backend, VersionBounds(), any_drop)
    assert [r.attempt for r in group.results] == [2, 1, 0]


async def test_an_error_of_the_backend_leaves_no_episode_running() -> None:
    ended: list[int] = []

    class Broken(FakeBackend):
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            try:
                await asyncio.sleep(0)
                if task.key.member == 1:
                    raise RuntimeError("no backend left")
                await asyncio.Event().wait()
                raise AssertionError
            finally:
                ended.append(task.key.member)

    with pytest.raises(RuntimeError, match="no backend left"):
        await Group.of(GroupPlan(("A",), 3), 0).run(Broken(), VersionBounds(), no_drop)
    assert sorted(ended) == [0, 1, 2]


async def test_an_episode_that_nobody_needed_to_stop_and_yet_was_aborted_uses_up_a_reroll() -> None:
    """Else an engine that aborts everything would keep a run busy forever."""
    backend = Scripted([(GOOD, 0)], [(StopReason.ABORTED, 0)] * 3)
    group = Group.of(GroupPlan(("A",), 2, max_rerolls=2), 0)
    await group.run(backend, VersionBounds(), no_drop)
    assert sorted(runs_of(backend, 0)) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert (group.results, group.rerolled, len(group.untrainable)) == ((), 2, 3)


async def test_growing_too_old_uses_up_no_reroll() -> None:
    script = [(StopReason.STALE, 0), (StopReason.TIMEOUT, 0)] * 2
    backend = Scripted([(GOOD, 0)], script, [(GOOD, 0)])

    group = Group.of(GroupPlan(("A",), 3, max_rerolls=1), 0)
    await group.run(backend, VersionBounds(), any_drop)
    assert sorted(runs_of(backend, 0)) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert group.rerolled == 1
    assert [r.key.member for r in group.results] == [0, 2]


@pytest.mark.parametrize(("frequency", "staleness"), [(2, 1), (3, 2), (3, 4), (2, 1.5)])
async def test_engines_that_lag_behind_cost_no_group(frequency: int, staleness: float) -> None:
    run = Run(FakeBackend(), staleness=staleness)
    served: list[int] = []
    for version in range(24):
        run.advance(version, version - version % frequency)
        await settled()
        batch = await asyncio.wait_for(run.controller.batch(), 60)
        assert batch.counts.stale == 0
        assert all(version - g.oldest_version <= math.ceil(staleness) for g in batch.groups)
        served += [group.number for group in batch.groups]
    assert served == list(range(48)), "no group number is lost"


async def test_an_episode_that_fails_is_played_again_with_another_seed() -> None:
    def first_try_fails(task: EpisodeTask) -> StopReason:
        return (
            StopReason.ENV_ERROR
            if (task.key.group, task.key.member, task.attempt) == (0, 1, 0)
            else StopReason.COMPLETED
        )

    run = Run(FakeBackend(first_try_fails))
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [(r.key.group, r.key.member, r.attempt) for r in batch.results] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert batch.counts.rerolled == 1
    assert [r.stop_reason for r in batch.counts.untrainable] == [StopReason.ENV_ERROR]


async def test_a_group_trains_with_fewer_members_after_the_last_reroll() -> None:
    run = Run(
        FakeBackend(
            lambda task: StopReason.TIMEOUT if task.key.member == 0 else StopReason.COMPLETED
        ),
        group_size=3,
    )
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [(r.key.group, r.key.member) for r in batch.results] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert sorted(runs_of(run.backend, 0)) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]


@pytest.mark.parametrize("rerolls", [0, 1, 5])
async def test_an_episode_is_played_again_at_most_max_rerolls_times(rerolls: int) -> None:
    backend = FakeBackend(
        lambda task: StopReason.TIMEOUT if task.key.member == 0 else StopReason.COMPLETED
    )
    run = Run(backend, size=1, group_size=3, max_rerolls=rerolls)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert batch.counts.rerolled == rerolls
    assert len(batch.counts.untrainable) == rerolls + 1
    again = [(0, attempt) for attempt in range(1, rerolls + 1)]
    assert sorted(runs_of(backend, 0)) == [(0, 0), *again, (1, 0), (2, 0)]


async def test_the_first_members_to_finish_make_a_redundant_group_and_the_others_are_stopped() -> (
    None
):
    run = Run(FakeBackend(), size=1, group_size=2, redundancy=2)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [r.key.member for r in batch.results] == [0, 1]
    assert runs_of(run.backend, 0) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert batch.counts.untrainable == []
    assert batch.counts.rerolled == 0
    kept, stopped = batch.results[0].response_tokens, 2
    assert batch.counts.aborted_tokens == 2 * stopped
    assert batch.counts.length_bias == kept - (2 * kept + 2 * stopped) / 4


@pytest.mark.parametrize("slow", [0, 2])
async def test_a_redundant_member_that_grows_too_old_is_not_run_again(slow: int) -> None:
    script = [[(GOOD, 1)], [(GOOD, 1)], [(GOOD, 1)]]
    script[slow] = [(StopReason.STALE, 0)]
    backend = Scripted(*script)
    group = Group.of(GroupPlan(("A",), 2, redundancy=1), 0)
    await group.run(backend, VersionBounds(oldest=1, newest=1), no_drop)
    assert not group.requeued, "batches have nothing to wait for"
    assert [r.key.member for r in group.results] == [m for m in range(3) if m != slow]
    kept = group.results[0].response_tokens
    stopped = group.aborted_tokens
    assert stopped > 0
    assert group.length_bias == kept - (2 * kept + stopped) / 3


async def test_redundant_members_stand_in_for_failed_ones_and_unneeded_ones_are_discarded() -> None:
    class LatePlayers(FakeBackend):
        """All of them finish before the word to stop arrives."""

        def abort(self, group: int) -> None: ...

    run = Run(
        LatePlayers(
            lambda task: StopReason.ENV_ERROR if task.key.member == 0 else StopReason.COMPLETED
        ),
        size=1,
        redundancy=2,
    )
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [r.key.member for r in batch.results] == [1, 2]
    assert [r.key.member for r in run.discarded] == [3]
    assert batch.counts.aborted_tokens == run.discarded[0].response_tokens > 0
    assert [r.key.member for r in batch.counts.untrainable] == [0]
    assert (batch.counts.rerolled, batch.counts.length_bias) == (0, 0.0)


async def test_a_redundant_group_with_too_few_members_rerolls_only_as_many_as_it_needs() -> None:
    def fate(task: EpisodeTask) -> StopReason:
        return (
            StopReason.COMPLETED if task.key.member == 0 or task.attempt else StopReason.ENV_ERROR
        )

    run = Run(FakeBackend(fate), size=1, group_size=2, redundancy=2)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert runs_of(run.backend, 0) == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1)]
    assert [r.key.member for r in batch.results] == [0, 1]


def refusing(count: int, rejections: int) -> Any:
    """Refuses the first `rejections` groups it sees."""
    seen = itertools.count()
    return GroupFilter("mine:picky", lambda scores: next(seen) < rejections, count)


async def test_groups_that_the_filter_refuses_are_replaced_and_counted() -> None:
    def scores(task: EpisodeTask) -> float:
        return float(task.key.member) if task.key.group % 2 else 1.0

    run = Run(FakeBackend(scores=scores), filter=GroupFilter("zero_variance", zero_variance, 8))
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [group.number for group in batch.groups] == [1, 3]
    assert batch.counts.filtered == 2
    assert {r.key.group for r in run.discarded} == {0, 2}
    assert run.controller.position == RolloutPosition(next_group=4)


async def test_a_filter_may_refuse_max_rejected_groups_for_each_batch() -> None:
    run = Run(FakeBackend(), filter=refusing(4, rejections=4))
    run.advance(0)
    assert await run.batch() == [4, 5]


async def test_a_filter_that_refuses_more_ends_in_an_error_that_says_what_to_change() -> None:
    run = Run(FakeBackend(), filter=refusing(4, rejections=5))
    run.advance(0)
    with pytest.raises(
        TooManyRejected,
        match=r"groupFilter mine:picky refused 5 groups.*maxRejected is 4.*groupSize",
    ):
        await run.batch()


async def test_a_filter_that_fails_reaches_whoever_waits_for_a_batch() -> None:
    run = Run(FakeBackend(), filter=GroupFilter("mine:broken", lambda scores: bool(1 / 0), 4))
    run.advance(0)
    with pytest.raises(ZeroDivisionError):
        await run.batch()


@pytest.mark.parametrize(
    ("staleness", "begun"),
    [(0.0, [4, 8, 12]), (0.25, [5, 9, 13]), (0.5, [6, 10, 14]), (1.5, [10, 14, 18])],
)
async def test_fractional_staleness_begins_a_part_of_the_next_batch_ahead_and_wastes_nothing(
    staleness: float, begun: list[int]
) -> None:
    run = Run(FakeBackend(), size=4, staleness=staleness)
    served: list[int] = []
    seen: list[int] = []
    for version in range(3):
        run.advance(version)
        batch = await asyncio.wait_for(run.controller.batch(), 60)
        served += [group.number for group in batch.groups]
        assert batch.counts.stale == 0
        assert all(version - group.oldest_version <= math.ceil(staleness) for group in batch.groups)
        await settled()
        seen.append(len(run.begun))
    assert served == list(range(12))
    assert seen == begun


async def test_an_environment_s_error_is_told_once_however_often_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(
        FakeBackend(
            lambda task: StopReason.ENV_ERROR if task.attempt == 0 else StopReason.COMPLETED
        ),
        size=8,
    )
    run.advance(0)
    with caplog.at_level(logging.WARNING):
        await run.batch()
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name == RolloutController.__module__
    ]
    assert told == ["episodes of 'A' end with env_error: "]


@pytest.mark.parametrize("first_try", [StopReason.ENV_ERROR, StopReason.STALE])
async def test_transcripts_and_frames_are_of_so_many_groups_of_each_batch_until_one_is_kept(
    first_try: StopReason,
) -> None:
    """Else slow episodes, which run again more often than others, would be missing in samples."""

    class Telling(FakeBackend):
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            played = await super().run(task)
            return replace(played, transcript="once" if task.transcript else "")

    def fate(task: EpisodeTask) -> StopReason:
        fails = task.attempt == 0 or (task.attempt == 1 and task.key.member == 1)
        return first_try if fails else StopReason.COMPLETED

    run = Run(Telling(fate), transcripts=1, frames=True)
    for version in range(2):
        run.advance(version)
        batch = await asyncio.wait_for(run.controller.batch(), 60)
        assert [result.transcript for result in batch.results] == ["once", "", "", ""]
    told = [(task.key.group, task.attempt) for task in run.backend.tasks if task.transcript]
    assert (
        sorted(told)
        == [(0, 0), (0, 1), (2, 0), (2, 1)]
        == sorted((task.key.group, task.attempt) for task in run.backend.tasks if task.frames)
    )
    assert max(task.attempt for task in run.backend.tasks) == 2


async def test_a_group_with_one_good_member_is_dropped_and_another_begins() -> None:
    def group_zero_fails(task: EpisodeTask) -> StopReason:
        return (
            StopReason.ENV_ERROR
            if task.key.group == 0 and task.key.member
            else StopReason.COMPLETED
        )

    run = Run(FakeBackend(group_zero_fails), group_size=3)
    run.advance(0)
    batch = await asyncio.wait_for(run.controller.batch(), 60)
    assert [group.number for group in batch.groups] == [1, 2]
    assert batch.counts.dropped == 1
    assert [(r.key.group, r.key.member) for r in run.discarded] == [(0, 0)]


async def test_an_environment_that_always_fails_ends_in_an_error_that_says_why() -> None:
    run = Run(FakeBackend(lambda task: StopReason.ENV_ERROR))
    run.advance(0)
    with pytest.raises(TooManyDropped, match="env_error"):
        await run.batch()


async def test_what_the_players_raise_reaches_whoever_waits_for_a_batch() -> None:
    def broken(task: EpisodeTask) -> StopReason:
        raise RuntimeError("no backend left")

    run = Run(FakeBackend(broken))
    run.advance(0)
    with pytest.raises(RuntimeError, match="no backend left"):
        await run.batch()


async def test_a_resumed_controller_plays_again_what_was_begun_and_not_trained_on() -> None:
    backend = FakeBackend()
    backend.hold(0)
    run = Run(backend, staleness=1)
    run.advance(0)
    await run.batch()
    await settled()
    position = run.controller.position
    await run.controller.stop()
    assert position == RolloutPosition(next_group=4, pending_groups=(0, 3))

    resumed = Run(FakeBackend(), position=position)
    assert resumed.controller.position == position
    resumed.advance(0)
    assert await resumed.batch() == [0, 3]
    resumed.advance(1)
    assert await resumed.batch() == [4, 5]
