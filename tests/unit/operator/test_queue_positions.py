"""Positions in queues: a look never waits for Kueue's visibility API."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from agenticrun_operator import queue_positions
from agenticrun_operator.cluster import Kube
from agenticrun_operator.errors import ClusterError, Denied, Unanswered
from agenticrun_operator.queue_positions import QueuePositions

RUN = "agenticrun-lake-12345678"


class Api:
    """Kueue's visibility API."""

    def __init__(self) -> None:
        self.answer: dict[str, int] | BaseException = {RUN: 3}
        self.hangs = False
        self.asked: Counter[str] = Counter()
        self.open = 0
        """Questions that are not answered yet."""

    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        assert namespace == "team"
        self.asked[queue] += 1
        self.open += 1
        if self.hangs:
            await asyncio.Event().wait()
        self.open -= 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return dict(self.answer)


class Looks:
    """Looks at runs that wait, on a fake clock."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.api = Api()
        self.positions = QueuePositions(cast(Kube, self.api), lambda: self.now)

    async def look(self, queue: str = "research", name: str = RUN) -> int | None:
        """Look at a run, and let the background work."""
        found = self.positions.of("team", queue, name)
        await asyncio.sleep(0.01)
        return found

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
async def looks() -> AsyncIterator[Looks]:
    made = Looks()
    yield made
    await made.positions.stop()


def others() -> int:
    """Return the number of tasks beside this one."""
    return len(asyncio.all_tasks()) - 1


async def test_the_look_after_the_answer_has_the_position(looks: Looks) -> None:
    assert await looks.look() is None
    assert await looks.look() == 3


async def test_a_queue_that_does_not_answer_is_asked_once_and_no_look_waits(looks: Looks) -> None:
    looks.api.hangs = True
    for _ in range(5):
        assert await looks.look() is None
        looks.wait(60)
    assert looks.api.asked == {"research": 1}


async def test_few_questions_are_open_at_the_same_time(looks: Looks) -> None:
    looks.api.hangs = True
    for number in range(50):
        await looks.look(f"queue-{number}")
    assert looks.api.open == queue_positions.QUESTIONS


async def test_an_answer_serves_for_20_seconds(looks: Looks) -> None:
    for _ in range(60):
        await looks.look()
        looks.wait(1)
    assert looks.api.asked == {"research": 3}


@pytest.mark.parametrize(("seconds", "shown"), [(39, 3), (41, None)])
async def test_a_position_is_shown_for_40_seconds_while_the_api_fails(
    looks: Looks, seconds: int, shown: int | None
) -> None:
    await looks.look()
    looks.api.answer = Unanswered("no answer")
    looks.wait(seconds)
    assert await looks.look() == shown
    assert await looks.look() == shown
    looks.api.answer = {RUN: 2}
    looks.wait(31)
    await looks.look()
    assert await looks.look() == 2


async def test_an_api_that_fails_is_left_alone_for_all_queues(looks: Looks) -> None:
    looks.api.answer = Unanswered("no answer")
    await looks.look("one")
    await looks.look("two")
    assert looks.api.asked == {"one": 1}
    looks.wait(31)
    await looks.look("two")
    assert looks.api.asked == {"one": 1, "two": 1}


async def test_a_queue_that_may_not_be_read_delays_no_other(looks: Looks) -> None:
    looks.api.answer = Denied("forbidden")
    await looks.look("one")
    looks.api.answer = {RUN: 3}
    await looks.look("two")
    assert await looks.look("two") == 3


async def test_only_positions_of_runs_are_kept(looks: Looks) -> None:
    looks.api.answer = {"job-of-someone-else": 1, RUN: 2}
    await looks.look()
    assert await looks.look() == 2
    assert await looks.look(name="job-of-someone-else") is None


async def test_a_queue_is_followed_between_two_looks_and_forgotten_without_any(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_positions, "REFRESH_SECONDS", 0.02)
    await looks.look()
    await asyncio.sleep(0.1)
    assert looks.api.asked["research"] > 1
    looks.wait(300)
    await asyncio.sleep(0.1)
    assert others() == 0
    assert await looks.look() is None, "the old answer is gone"


async def test_a_bug_ends_one_task_and_the_next_look_begins_again(
    looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    looks.api.answer = KeyError("metadata")
    await looks.look()
    assert "research" in caplog.text
    looks.api.answer = {RUN: 3}
    await looks.look()
    assert await looks.look() == 3


@pytest.mark.parametrize("error", [None, ClusterError("broken")])
async def test_nothing_runs_after_the_operator_has_stopped(
    looks: Looks, error: ClusterError | None
) -> None:
    looks.api.hangs = error is None
    looks.api.answer = error or {}
    for number in range(20):
        await looks.look(f"queue-{number}")
    await looks.positions.stop()
    assert others() == 0


async def test_a_task_that_is_due_ends_when_it_is_stopped(looks: Looks) -> None:
    await looks.look()
    looks.wait(30)
    looks.positions.of("team", "research", RUN)
    async with asyncio.timeout(5):
        await looks.positions.stop()
    assert others() == 0
