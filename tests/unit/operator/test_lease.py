"""Of several operators one leads; another takes over when it goes or falls silent."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agenticrun_operator import lease as module
from agenticrun_operator.errors import AlreadyExists, Conflict, KubeUnavailable
from agenticrun_operator.lease import Leadership
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.workqueue import Item, WorkQueue
from operator_world import Operator, World, training
from waiting import eventually_in_loop


class Store:
    """One lease, with a resourceVersion."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.down = self.frozen = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.frozen:
            await asyncio.Event().wait()
        if self.down:
            raise KubeUnavailable("down")
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> None:
        if self.lease:
            raise AlreadyExists
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = "1"

    async def put(self, manifest: dict[str, Any]) -> dict[str, Any]:
        assert self.lease
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] += "1"
        return self.lease


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of one second."""
    monkeypatch.setattr(module, "DURATION_SECONDS", 1)


def leader(store: Store, name: str) -> Leadership:
    return Leadership(store, "system", "agenticrun-operator", name)


async def attempt(candidate: Leadership) -> bool:
    return await candidate.attempt(datetime.now(UTC))


async def test_one_of_two_leads(store: Store) -> None:
    first, second = leader(store, "a"), leader(store, "b")
    assert [await attempt(first), await attempt(second), await attempt(first)] == [
        True,
        False,
        True,
    ]
    assert first.held.is_set()
    assert not second.held.is_set()


async def test_a_released_lease_is_taken_at_once(store: Store) -> None:
    first, second = leader(store, "a"), leader(store, "b")
    await attempt(first)
    await first.release()
    assert not first.held.is_set()
    assert await attempt(second)


@pytest.mark.usefixtures("quick")
async def test_a_silent_leader_is_replaced_and_learns_of_it(store: Store) -> None:
    first, second = leader(store, "a"), leader(store, "b")
    await attempt(first)
    assert not await attempt(second)
    await asyncio.sleep(1.1)
    assert await attempt(second)
    assert not await attempt(first)
    assert not first.held.is_set()


async def test_a_lease_that_was_left_long_ago_is_taken_at_once(store: Store) -> None:
    """Its holder had no time to release it: the release was uninstalled, or the node lost."""
    left = datetime(2026, 1, 1, tzinfo=UTC)
    assert await leader(store, "a").attempt(left)
    assert not await leader(store, "b").attempt(left + timedelta(seconds=19))
    assert await leader(store, "b").attempt(left + timedelta(seconds=21))


async def test_a_short_outage_of_the_apiserver_does_not_end_leadership(store: Store) -> None:
    first = leader(store, "a")
    await attempt(first)
    store.down = True
    assert await attempt(first)


@pytest.mark.parametrize("trouble", ["refuses", "never answers"])
async def test_without_the_apiserver_nobody_leads_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(module, "RENEW_DEADLINE_SECONDS", 0.5)
    first = leader(store, "a")
    await attempt(first)
    store.down, store.frozen = trouble == "refuses", trouble == "never answers"
    renewal = asyncio.create_task(attempt(first))
    await eventually_in_loop(lambda: not first.held.is_set(), 60, "it leads no more")
    renewal.cancel()


async def test_an_attempt_that_gets_no_answer_is_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.01)
    first = leader(store, "a")
    store.frozen = True
    assert not await attempt(first)
    store.frozen = False
    assert await attempt(first)


async def test_it_tells_when_the_apiserver_answers_again(store: Store) -> None:
    told = []
    first = Leadership(store, "system", "agenticrun-operator", "a", lambda: told.append(store.down))
    await attempt(first)
    await attempt(first)
    assert not told, "it has always answered"
    store.down = True
    await attempt(first)
    await attempt(first)
    store.down = False
    await attempt(first)
    await attempt(first)
    assert told == [False], "once"


def test_a_renewal_that_gets_no_answer_can_be_repeated_before_the_deadline() -> None:
    second = module.RENEW_SECONDS + module.REQUEST_SECONDS + module.RETRY_SECONDS
    assert second + module.REQUEST_SECONDS <= module.RENEW_DEADLINE_SECONDS
    assert module.RENEW_DEADLINE_SECONDS < module.DURATION_SECONDS


async def test_an_operator_that_was_stopped_for_too_long_begins_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process got SIGSTOP, or its node froze: timers and events are due together then."""
    monkeypatch.setattr(module, "RENEW_DEADLINE_SECONDS", 0.3)
    first, queue, seen = leader(store, "a"), WorkQueue(), asyncio.Queue[Item]()

    async def reconcile(item: Item) -> float | None:
        seen.put_nowait(item)
        return None

    workers = ReconcileWorkers(queue, reconcile, first.held, asyncio.Semaphore(4))
    workers.start()
    assert await attempt(first)
    queue.add_after(("team", "due"), 0.1)
    asyncio.get_running_loop().call_later(0.2, queue.add, ("team", "changed"))
    await asyncio.sleep(0)
    time.sleep(0.5)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.held.is_set()
    assert seen.empty()
    assert await attempt(first), "no one else has taken the lease"
    assert {(await asyncio.wait_for(seen.get(), 60)).key[1] for _ in range(2)} == {"due", "changed"}
    await workers.stop()


@pytest.mark.parametrize("point", range(14))
@pytest.mark.parametrize("trouble", ["none", "driver", "head", "suspend"])
async def test_an_operator_that_was_stopped_in_a_look_does_nothing_twice(
    point: int, trouble: str
) -> None:
    """Another one led for a minute; then the first one continues where it was stopped."""
    world = World()
    world.apply_run()
    first, second = Operator(world), Operator(world)
    if trouble == "none":
        await first.reconcile()
        world.make_pods()
    else:
        await training(first)
        await second.reconcile()
    if trouble == "driver":
        world.end_driver(None)
    elif trouble == "head":
        world.restart_head_container()
    elif trouble == "suspend":
        world.change_run(("suspend", True))

    def other_leads() -> None:
        async def lead() -> None:
            for _ in range(12):
                await second.settle(1)
                world.drive(1 + world.status.step if world.status.step else 1, max_steps=1000)
                world.now += timedelta(seconds=4)

        thread = threading.Thread(target=lambda: asyncio.run(lead()))
        thread.start()
        thread.join()

    attempts, events = len(world.jobs), len(world.events)
    world.interruption = (point, other_leads)
    await first.reconcile()
    world.interruption = None
    await first.settle(3)
    attempt_numbers = [job.attempt for job in world.jobs]
    assert attempt_numbers == sorted(set(attempt_numbers)), "no attempt is submitted twice"
    assert len(world.jobs) - attempts <= 1
    assert len(world.live_jobs()) <= 1
    told = [(event.reason, event.message) for event in world.events[events:]]
    assert len(told) == len(set(told))
