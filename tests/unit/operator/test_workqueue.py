"""Keys wait once, are handled serially, and are queued again if added in the meantime."""

from __future__ import annotations

import asyncio

from agenticrun_operator.planning.times import backoff_seconds
from agenticrun_operator.workqueue import Item, WorkQueue

A, B = ("team", "a"), ("team", "b")


async def drained(queue: WorkQueue) -> list[Item]:
    """Everything that waits now."""
    items = []
    while len(queue):
        items.append(await queue.get())
        queue.done(items[-1].key)
    return items


async def test_a_key_waits_once_however_often_it_is_added() -> None:
    queue = WorkQueue()
    for key in (A, B, A, A):
        queue.add(key)
    assert [item.key for item in await drained(queue)] == [A, B]


async def test_a_key_that_is_added_while_it_is_handled_is_handled_again_afterwards() -> None:
    queue = WorkQueue()
    queue.add(A)
    await queue.get()
    queue.add(A)
    assert len(queue) == 0, "two workers must not have the same key"
    queue.done(A)
    assert await drained(queue) == [Item(A, changed=True)]


async def test_the_earliest_look_wins_and_is_no_change() -> None:
    queue = WorkQueue()
    queue.add_after(A, 3600)
    queue.add_after(A, 0.01)
    queue.add_after(A, 3600)
    assert await asyncio.wait_for(queue.get(), 60) == Item(A, changed=False)
    queue.done(A)
    await asyncio.sleep(0.03)
    assert len(queue) == 0


async def test_a_change_comes_before_a_later_look() -> None:
    queue = WorkQueue()
    queue.add_after(A, 0.02)
    queue.add(A)
    assert await drained(queue) == [Item(A, changed=True)]
    await asyncio.sleep(0.04)
    assert len(queue) == 0, "the later look is part of the change's"


def test_delays_double_up_to_the_longest_and_failures_may_go_on_for_days() -> None:
    assert [backoff_seconds(failures, 0.5, 8.0) for failures in (0, 1, 2, 4, 5, 100_000)] == [
        0.5,
        1.0,
        2.0,
        8.0,
        8.0,
        8.0,
    ]


async def test_the_age_of_the_first_key_is_that_of_its_report() -> None:
    now = 100.0
    queue = WorkQueue(clock=lambda: now)
    assert queue.oldest_seconds == 0
    queue.add(A)
    now += 5
    queue.add(B)
    queue.add(A)
    assert queue.oldest_seconds == 5, "a second report changes nothing"
    assert (await queue.get()).key == A
    now += 1
    assert queue.oldest_seconds == 1, "now B is the first"
    await queue.get()
    assert queue.oldest_seconds == 0


async def test_of_many_changes_the_first_is_handled_at_once_and_the_others_together() -> None:
    queue = WorkQueue()

    def change() -> int:
        for _ in range(100):
            queue.add_throttled(A, 0.2)
        return len(queue)

    assert change() == 1
    queue.done((await queue.get()).key)
    assert change() == 0, "not yet"
    assert await asyncio.wait_for(queue.get(), 60) == Item(A, changed=True)
    queue.done(A)
    await asyncio.sleep(0.5)
    assert len(queue) == 0, "nothing is left"
    assert change() == 1, "the first one after a pause is handled at once"
