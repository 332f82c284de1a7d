"""Reconcile workers survive any error, wait for leadership and back off per run."""

from __future__ import annotations

import asyncio

import pytest

from agenticrun_operator.cluster import kube as kube_client
from agenticrun_operator.errors import KubeUnavailable
from agenticrun_operator.reconcile_workers import (
    JITTER,
    MAX_UNAVAILABLE_SECONDS,
    ReconcileWorkers,
)
from agenticrun_operator.workqueue import Item, WorkQueue
from waiting import eventually_in_loop

GOOD, BAD = ("team", "good"), ("team", "bad")


async def test_one_runs_trouble_does_not_stop_the_others() -> None:
    queue, leading, seen = WorkQueue(), asyncio.Event(), asyncio.Queue[Item]()
    leading.set()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        if item.key == BAD:
            raise (KubeUnavailable("down") if item.changed else ZeroDivisionError("bug"))
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore(1))
    workers.start()
    queue.add(BAD)
    queue.add(GOOD)
    first = [await asyncio.wait_for(seen.get(), 60) for _ in range(3)]
    assert [item.key for item in first] == [BAD, GOOD, BAD], "the bad one comes again"
    assert workers.alive
    await workers.stop()
    assert not workers.alive


async def test_nothing_is_reconciled_without_the_lease() -> None:
    queue, leading, seen = WorkQueue(), asyncio.Event(), asyncio.Queue[Item]()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore(2))
    workers.start()
    queue.add(GOOD)
    await asyncio.sleep(0.05)
    assert seen.empty()
    leading.set()
    assert (await asyncio.wait_for(seen.get(), 60)).key == GOOD
    await workers.stop()


async def test_a_reconciliation_that_does_not_end_is_seen() -> None:
    queue, leading, began = WorkQueue(), asyncio.Event(), asyncio.Event()
    release = asyncio.Event()

    async def reconcile(item: Item) -> float | None:
        began.set()
        await release.wait()
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore(1))
    workers.start()
    queue.add(GOOD)
    await asyncio.sleep(0)
    assert workers.longest_seconds == 0, "without the Lease nothing is reconciled"
    leading.set()
    await asyncio.wait_for(began.wait(), 60)
    assert workers.longest_seconds > 0
    release.set()
    await eventually_in_loop(lambda: workers.longest_seconds == 0, 60, "it ends")
    await workers.stop()


@pytest.mark.parametrize(
    ("error", "longest"), [(KubeUnavailable("down"), 4.0), (ZeroDivisionError("bug"), 60.0)]
)
def test_after_an_outage_no_run_waits_for_long(error: Exception, longest: float) -> None:
    workers = ReconcileWorkers(
        WorkQueue(),
        None,  # type: ignore[arg-type]
        asyncio.Event(),
        asyncio.Semaphore(),
    )
    delays = [workers._back_off(BAD, error) for _ in range(20)]
    assert delays[:3] == [1, 2, 4]
    assert max(delays) == longest
    request = kube_client.TIMEOUT_SECONDS
    assert request + MAX_UNAVAILABLE_SECONDS * (1 + JITTER) < 10, "it is true within ten seconds"


async def test_runs_that_wait_after_a_failure_can_be_retried_at_once() -> None:
    queue, leading, seen = WorkQueue(), asyncio.Event(), asyncio.Queue[Item]()
    leading.set()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        if item.key == BAD:
            raise KubeUnavailable("down")
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore(1))
    workers.start()
    queue.add(GOOD)
    queue.add(BAD)
    for _ in range(4):  # the last one waits for 4 s
        await asyncio.wait_for(seen.get(), 60)
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(0)
    workers.retry_failed()
    assert (await asyncio.wait_for(seen.get(), 60)).key == BAD, "not the one that is well"
    assert asyncio.get_running_loop().time() - began < 3
    await workers.stop()


async def test_any_number_of_runs_waits_for_heads_at_the_same_time() -> None:
    queue, leading, slots = WorkQueue(), asyncio.Event(), asyncio.Semaphore(1)
    leading.set()
    waiting = 0

    async def reconcile(item: Item) -> float | None:
        nonlocal waiting
        async with slots:
            waiting += item.key != GOOD
        if item.key != GOOD:
            await asyncio.Event().wait()
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, slots)
    workers.start()
    for number in range(1000):
        queue.add(("team", f"hung-{number}"))
    queue.add(GOOD)
    await eventually_in_loop(lambda: waiting == 1000 == workers.busy, 60, "the good one is done")
    await workers.stop()


async def test_runs_wait_in_the_queue_while_no_slot_is_free() -> None:
    queue, leading, slots = WorkQueue(), asyncio.Event(), asyncio.Semaphore(1)
    leading.set()
    seen = asyncio.Queue[Item]()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, slots)
    workers.start()
    async with slots:
        for number in range(10):
            queue.add(("team", f"run-{number}"))
        await asyncio.sleep(0.05)
        assert (len(queue), workers.busy) == (10, 0)
    for _ in range(10):
        await asyncio.wait_for(seen.get(), 60)
    await workers.stop()


async def test_a_bug_in_a_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, leading = WorkQueue(), asyncio.Event()
    leading.set()

    async def reconcile(_item: Item) -> float | None:
        return None

    monkeypatch.setattr(queue, "done", lambda _key: 1 / 0)
    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore())
    workers.start()
    assert workers.alive
    queue.add(GOOD)
    await eventually_in_loop(lambda: not workers.alive, 60, "the liveness probe fails")
    await workers.stop()
