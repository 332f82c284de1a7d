"""An environment that always fails is left out, and comes back when it works again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from agenticrun_workers.rollout.controller import (
    MAX_DROPPED_SHARE,
    MAX_FAILED,
    Batch,
    EnvBreaker,
    RolloutController,
    StalenessGate,
    TooManyDropped,
)
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask, GroupPlan
from agenticrun_workers.types import RolloutPosition, StopReason
from rollout_fakes import FakeBackend, result

GOOD, BAD = StopReason.COMPLETED, StopReason.ENV_ERROR


def broken(tag: str, *, others: tuple[str, ...] = ("A",)) -> EnvBreaker:
    """A breaker that has just evicted `tag`."""
    breaker = EnvBreaker([tag, *others])
    for _ in range(MAX_FAILED):
        assert not breaker.leaves_out(tag)
        breaker.failed(tag, "env_error: no")
    return breaker


def test_an_environment_is_left_out_after_some_dropped_groups_in_a_row() -> None:
    breaker = broken("B")
    assert (breaker.leaves_out("B"), breaker.leaves_out("A")) == (True, False)
    assert breaker.evicted == {"B": "env_error: no"}


def test_a_group_that_works_begins_the_count_again() -> None:
    breaker = EnvBreaker("AB")
    for _ in range(MAX_FAILED):
        for _ in range(MAX_FAILED - 1):
            breaker.failed("B", "")
        breaker.succeeded("B")
    assert not breaker.evicted


def test_one_group_of_a_step_tries_again_and_brings_it_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = broken("B")
    breaker.next_step()
    assert [breaker.leaves_out("B") for _ in range(3)] == [False, True, True]
    breaker.failed("B", "timeout: slow")
    assert breaker.evicted == {"B": "timeout: slow"}
    breaker.next_step()
    assert not breaker.leaves_out("B")
    with caplog.at_level(logging.WARNING, EnvBreaker.__module__):
        breaker.succeeded("B")
    assert "'B' works again" in caplog.text
    assert not breaker.evicted
    assert [breaker.leaves_out("B") for _ in range(3)] == [False] * 3


def test_the_last_environment_is_never_evicted() -> None:
    breaker = broken("B")
    for _ in range(2 * MAX_FAILED):
        breaker.failed("A", "env_error: no")
    assert set(breaker.evicted) == {"B"}


class Mixed:
    """A controller of environments A and B, of which `broken` ones fail."""

    def __init__(
        self,
        *,
        evicts: bool = True,
        broken: str = "B",
        size: int = 4,
        staleness: int = 0,
        backend: type[FakeBackend] = FakeBackend,
    ) -> None:
        self.broken = set(broken)
        self.backend = backend(self._fate)
        self.controller = RolloutController(
            self.backend,
            StalenessGate(size, 64, staleness),
            GroupPlan(("A", "B"), 2, evicts=evicts),
            discard=self._discard,
            position=RolloutPosition(),
        )

    def _fate(self, task: EpisodeTask) -> StopReason:
        return StopReason.ENV_ERROR if task.tag in self.broken else StopReason.COMPLETED

    async def _discard(self, results: list[EpisodeResult]) -> None: ...

    async def step(self, version: int) -> tuple[Batch, Counter[str]]:
        """Return the batch, and the number of groups that were tried for it, by tag."""
        tried = {task.key.group for task in self.backend.tasks}
        self.backend.version = version
        self.controller.advance(version, version)
        batch = await asyncio.wait_for(self.controller.batch(), 60)
        tags = {task.key.group: task.tag for task in self.backend.tasks}
        new = {group: tag for group, tag in tags.items() if group not in tried}
        return batch, Counter(new.values())


async def test_a_run_goes_on_with_the_other_environments() -> None:
    run = Mixed()
    await run.step(0)
    for version in range(1, 4):
        batch, tried = await run.step(version)
        assert [group.tag for group in batch.groups] == ["A"] * 4
        assert tried == {"A": 4, "B": 1}
        assert list(batch.evicted) == ["B"]
    run.broken.clear()
    await run.step(4)
    batch, tried = await run.step(5)
    assert not batch.evicted
    assert tried == {"A": 2, "B": 2}


async def test_groups_keep_their_own_numbers_and_so_their_data_items() -> None:
    run = Mixed()
    for version in range(3):
        await run.step(version)
    assert all(task.tag == "AB"[task.key.group % 2] for task in run.backend.tasks)


async def test_a_deterministic_run_evicts_nothing() -> None:
    run = Mixed(evicts=False)
    for version in range(3):
        batch, tried = await run.step(version)
        assert not batch.evicted
        assert tried["B"] >= 3


async def test_groups_in_flight_of_an_evicted_environment_do_not_end_the_run() -> None:
    """Many of them fail at once, and the first three evict it."""

    class Slow(FakeBackend):
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            if task.tag == "A":
                await asyncio.sleep(0.05)
            return await super().run(task)

    run = Mixed(staleness=8, backend=Slow)
    batch, _ = await run.step(0)
    assert [group.tag for group in batch.groups] == ["A"] * 4
    assert batch.counts.dropped > MAX_DROPPED_SHARE * 4


async def test_what_was_dropped_before_an_environment_was_evicted_is_forgotten_when_it_works() -> (
    None
):
    class OneWorks(FakeBackend):
        """Groups end in order; of the many of B that are in flight one works."""

        async def run(self, task: EpisodeTask) -> EpisodeResult:
            works, group = task.tag == "A" or task.key.group == 41, task.key.group
            await asyncio.sleep(1.0 if task.tag == "A" else 0.01 * group)
            return result(group, task.key.member, tag=task.tag, stop=GOOD if works else BAD)

    run = Mixed(staleness=16, backend=OneWorks)
    batch, _ = await run.step(0)
    assert batch.counts.dropped > MAX_DROPPED_SHARE * 4
    await run.controller.stop()


async def test_a_run_whose_environments_all_fail_still_ends() -> None:
    run = Mixed(broken="AB")
    with pytest.raises(TooManyDropped, match="env_error"):
        await run.step(0)
