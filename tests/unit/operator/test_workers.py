"""Reconcile workers survive any error, wait for leadership and back off per run."""

from __future__ import annotations

import asyncio

import pytest

from agenticrun_operator.cluster import KubeUnavailable
from agenticrun_operator.cluster import kube as kube_client
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


async def test_a_reconciliation_that_does_not_end_is_seen() -> None:
    queue, leading, began = WorkQueue(), asyncio.Event(), asyncio.Event()
    release = asyncio.Event()

    async def reconcile(item: Item) -> float | None:
        began.set()
        await release.wait()
        return None

    workers = ReconcileWorkers(queue, reconcile, leading, count=1)
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
    workers = ReconcileWorkers(WorkQueue(), None, asyncio.Event())  # type: ignore[arg-type]
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

    workers = ReconcileWorkers(queue, reconcile, leading, count=1)
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
