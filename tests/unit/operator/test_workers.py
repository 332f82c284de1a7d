"""Reconcile workers survive any error, wait for leadership and back off per run."""

from __future__ import annotations

import asyncio

from agenticrun_operator.cluster import KubeUnavailable
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.workqueue import Item, WorkQueue

GOOD, BAD = ("team", "good"), ("team", "bad")


async def test_one_runs_trouble_does_not_stop_the_others() -> None:
    queue, leading, seen = WorkQueue(), asyncio.Event(), asyncio.Queue[Item]()
    leading.set()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        if item.key == BAD:
            raise (KubeUnavailable("down") if item.changed else ZeroDivisionError("bug"))
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, count=1)
    workers.start()
    queue.add(BAD)
    queue.add(GOOD)
    first = [await asyncio.wait_for(seen.get(), 60) for _ in range(3)]
    assert [item.key for item in first] == [BAD, GOOD, BAD], "the bad one comes again"
    assert workers.alive == 1
    await workers.stop()
    assert workers.alive == 0


async def test_nothing_is_reconciled_without_the_lease() -> None:
    queue, leading, seen = WorkQueue(), asyncio.Event(), asyncio.Queue[Item]()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, count=2)
    workers.start()
    queue.add(GOOD)
    await asyncio.sleep(0.05)
    assert seen.empty()
    leading.set()
    assert (await asyncio.wait_for(seen.get(), 60)).key == GOOD
    await workers.stop()
