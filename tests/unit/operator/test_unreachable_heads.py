"""Heads that do not answer are asked less and less often, and delay no other run."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import REGISTRY

from agenticrun_api import Phase, Role
from agenticrun_operator import observing
from agenticrun_operator.cluster import DirectTransport, head_session
from agenticrun_operator.cluster.kube import Response
from agenticrun_operator.cluster.transports import PodAddress, allow_many_connections
from agenticrun_operator.observed import Unreachable
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.workqueue import Item, WorkQueue
from fleet import Fleet, own_time
from operator_world import Operator, World
from waiting import eventually_in_loop

HEALTHY, UNREACHABLE = 5, 20


class FrozenHead:
    """Takes requests and never answers."""

    async def job(self, *_: Any) -> Unreachable:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def progress(self, *_: Any) -> Unreachable:
        return await self.job()

    async def submit(self, *_: Any) -> None:
        raise AssertionError("nothing is submitted to it")

    async def configure(self, *_: Any) -> None:
        raise AssertionError("nothing is configured there")

    async def request_stop(self, *_: Any) -> None:
        raise AssertionError("nothing is stopped there")

    async def stop(self, *_: Any) -> None:
        raise AssertionError("nothing is stopped there")


async def training(slots: asyncio.Semaphore | None = None) -> Operator:
    """Return the operator of a run that trains."""
    world = World()
    world.apply_run()
    operator = Operator(world, slots)
    await operator.settle()
    world.drive(1)
    await operator.settle(2)
    assert world.status.phase is Phase.RUNNING
    world.requests.clear()
    return operator


async def test_twenty_heads_that_never_answer_do_not_delay_healthy_runs() -> None:
    slots = asyncio.Semaphore(4)
    runs = {("team", f"run-{n}"): await training(slots) for n in range(HEALTHY + UNREACHABLE)}
    healthy = [f"run-{n}" for n in range(HEALTHY)]
    for (_, name), operator in runs.items():
        if name not in healthy:
            operator.use_head(FrozenHead())
    queue, looks = WorkQueue(), Counter[str]()
    leading, done = asyncio.Event(), asyncio.Event()
    leading.set()

    async def reconcile(item: Item) -> float | None:
        operator = runs[item.key]
        delay = await operator.reconcile(item.changed)
        assert delay is not None
        operator.world.now += timedelta(seconds=delay)
        looks[item.key[1]] += 1
        if min(looks[name] for name in healthy) == 10:
            done.set()
        return delay / 100

    workers = ReconcileWorkers(queue, reconcile, leading, slots)
    workers.start()
    for key in runs:
        queue.add(key)
    await asyncio.wait_for(done.wait(), 60)
    await workers.stop()
    assert set(looks) == set(healthy), "the others still wait for their heads"


async def test_an_action_that_a_head_does_not_answer_delays_no_other_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = asyncio.Semaphore(1)
    frozen, healthy = await training(slots), await training(slots)
    reached = asyncio.Event()

    async def never(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(frozen.world, "submit", never)
    frozen.world.end_driver(None, exit_code=-9)
    look = asyncio.create_task(follow(frozen, 120))
    await asyncio.wait_for(reached.wait(), 10)
    await asyncio.wait_for(follow(healthy, 10), 10)
    look.cancel()


async def follow(operator: Operator, seconds: float) -> None:
    """Look whenever the operator asks for it, without events."""
    end = operator.world.now + timedelta(seconds=seconds)
    while operator.world.now < end:
        delay = await operator.reconcile(changed=False)
        assert delay is not None
        operator.world.now += timedelta(seconds=delay)


async def test_a_head_that_does_not_answer_is_asked_every_half_minute_at_last() -> None:
    operator = await training()
    world = operator.world
    world.ray_down = world.reporter_down = True
    await follow(operator, 120)
    world.requests.clear()
    await follow(operator, 600)
    assert 18 <= world.requests.count("get job") <= 30
    assert 18 <= world.requests.count("get progress") <= 30


async def test_a_reporter_is_asked_although_ray_does_not_answer() -> None:
    operator = await training()
    world = operator.world
    world.ray_down = True
    await follow(operator, 120)
    world.requests.clear()
    await follow(operator, 60)
    assert world.requests.count("get progress") >= 20
    assert world.requests.count("get job") <= 3


async def test_an_event_makes_the_operator_ask_again_at_once() -> None:
    operator = await training()
    world = operator.world
    world.ray_down = world.reporter_down = True
    await follow(operator, 120)
    world.ray_down = world.reporter_down = False
    world.requests.clear()
    await operator.reconcile(changed=True)
    assert world.requests.count("get progress") == 1


async def test_a_head_that_answers_again_without_an_event_is_noticed_within_half_a_minute() -> None:
    operator = await training()
    world = operator.world
    world.ray_down = world.reporter_down = True
    await follow(operator, 120)
    world.ray_down = world.reporter_down = False
    world.drive(2)
    await follow(operator, 33)
    assert world.status.step == 2


async def test_a_pod_that_changes_while_a_head_takes_its_time_shows_in_the_same_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = await training()
    world = operator.world

    async def slowly(*_: Any) -> Unreachable:
        world.delete_pod(Role.ENV)
        world.let_watches_catch_up()
        return Unreachable("no answer")

    monkeypatch.setattr(world, "progress", slowly)
    await operator.reconcile(changed=False)
    ready = {item.name: item.ready for item in world.status.roles}
    assert ready == {"driver": 1, "trainer": 1, "inference": 1, "env": 0}


async def test_five_hundred_heads_that_never_answer_delay_no_healthy_run() -> None:
    """They accept connections, on real sockets. All hang at once, and were healthy until then."""
    allow_many_connections()
    fleet = Fleet()
    healthy, hung = await fleet.add_training(5), await fleet.add_training(500)
    fleet.hung = {fleet.address(run) for run in hung}
    async with fleet.reconciled():
        began = own_time()
        await asyncio.sleep(12)
        ended = own_time()
    assert fleet.longest_gap(healthy, began, ended) <= 5
    assert all(fleet.looks[run] for run in hung), "they are looked at, too"


async def test_hundreds_of_connections_that_hang_leave_one_for_a_healthy_head() -> None:
    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hanging.append(writer)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    hanging: list[asyncio.StreamWriter] = []
    servers = [
        await asyncio.start_server(each, "0.0.0.0", 0, backlog=4096) for each in (hang, answer)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    async with head_session() as session:
        transport = DirectTransport(session)

        async def ask(port: int, address: str) -> Response:
            pod = PodAddress("team", "head", address)
            return await transport.request("GET", pod, port, "/", headers={}, limit=10, timeout=60)

        asked = [
            asyncio.create_task(ask(ports[0], f"127.1.{number // 200}.{number % 200 + 1}"))
            for number in range(600)
        ]
        await eventually_in_loop(lambda: len(hanging) == 600, 60, "all are connected")
        assert (await ask(ports[1], "127.0.0.1")).status == 204
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    for writer in hanging:
        writer.close()
    for server in servers:
        server.close()


async def test_heads_that_hung_before_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them are not asked, and keep no connections, until their next look."""
    monkeypatch.setattr(observing, "SUSPICIOUS_QUESTIONS", 1)
    operator = await training()
    world = operator.world
    world.ray_down = world.reporter_down = True
    operator.use_head(world)
    await operator.reconcile()
    asking, release = asyncio.Event(), asyncio.Event()

    async def slowly(*_: Any) -> Unreachable:
        asking.set()
        await release.wait()
        return Unreachable("no answer")

    monkeypatch.setattr(world, "job", slowly)
    world.requests.clear()
    look = asyncio.create_task(operator.reconcile())
    await asyncio.wait_for(asking.wait(), 60)
    await asyncio.sleep(0)
    assert "get progress" not in world.requests, "the only question is the one to Ray"
    release.set()
    await look
    await operator.reconcile()
    assert world.status.phase is Phase.RUNNING


async def test_a_run_that_is_made_again_under_its_name_leaves_no_unreachable_head() -> None:
    operator = await training()
    world = operator.world
    world.reporter_down = True
    await operator.reconcile()
    assert unreachable_heads() == 1
    world.delete_run()
    world.collect_garbage()
    world.apply_run()
    await operator.reconcile()
    assert unreachable_heads() == 0


async def test_a_suspended_run_has_no_unreachable_head() -> None:
    operator = await training()
    world = operator.world
    world.reporter_down = world.ray_down = True
    await operator.reconcile()
    assert unreachable_heads() == 1
    world.change_run(("suspend", True))
    await follow(operator, 300)
    assert world.status.phase is Phase.SUSPENDED
    assert unreachable_heads() == 0


async def test_a_run_that_gave_its_pods_back_still_has_an_unreachable_head() -> None:
    """Its alert would begin again with each try."""
    world = World()
    world.apply_run()
    operator = Operator(world)
    world.reporter_down = world.ray_down = True
    for _ in range(60):
        await operator.settle(1)
        world.now += timedelta(seconds=9)
        if world.status.phase is Phase.PENDING and world.status.startup_timeouts:
            break
    assert world.pods() == []
    assert unreachable_heads() == 1


def unreachable_heads() -> float | None:
    return REGISTRY.get_sample_value("agenticrun_operator_unreachable_heads")


def test_the_operator_may_open_as_many_connections_as_the_container_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    allow_many_connections()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert REGISTRY.get_sample_value("process_max_fds") == hard
