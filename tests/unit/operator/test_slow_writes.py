"""Webhooks and an apiserver that fail, hang or refuse: what the status says, and who waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import REGISTRY

from agenticrun_api import AgenticRunStatus, ConditionType, Phase
from agenticrun_api.status import CheckpointStatus, JobStatus
from agenticrun_operator.errors import (
    ClusterError,
    Conflict,
    Denied,
    KubeUnavailable,
    Refused,
    TooLarge,
    Unanswered,
    WebhookUnavailable,
)
from agenticrun_operator.planning import Plan
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.slow_writes import PATIENCE_SECONDS, Budget, SlowWrites
from agenticrun_operator.workqueue import Item, WorkQueue
from operator_world import NAME, START, Operator, World, condition, happened, training
from virtual_clock import on_virtual_clock

WEBHOOK = WebhookUnavailable(
    'Internal error occurred: failed calling webhook "mraycluster.kb.io": no endpoints available'
)
RUN, OTHER = ("team", NAME), ("team", "other")


def provisioned(world: World) -> tuple[str, str, str]:
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    return found.status, found.reason, found.message


async def follow(operator: Operator, seconds: float) -> int:
    """Look whenever the operator asks for it, with KubeRay at work. Returns the looks."""
    world, looks = operator.world, 0
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        world.make_pods()
        world.now += timedelta(seconds=await operator.reconcile(changed=False) or 1)
        looks += 1
    return looks


# -- errors of creations ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "PersistentVolumeClaim", "RayCluster"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WEBHOOK, "WebhookUnavailable"),
        (KubeUnavailable("status 429: too many requests"), "ApiserverUnavailable"),
    ],
)
async def test_a_creation_that_fails_is_in_the_status_at_once_until_it_succeeds(
    world: World, operator: Operator, kind: str, error: ClusterError, reason: str
) -> None:
    world.create_errors[kind] = error
    await operator.reconcile()
    assert (world.status.phase, provisioned(world)) == (
        Phase.PENDING,
        ("False", reason, str(error)),
    )
    assert condition(world, ConditionType.PROGRESSING).status == "False"
    assert await follow(operator, 60) >= 60 / 5.5, "it may be over at any time"
    assert happened(world) == [reason], "one event, not one for each look"
    world.create_errors.clear()
    await follow(operator, 10)
    assert world.status.phase is Phase.STARTING


async def test_a_run_that_builds_its_cluster_again_shows_what_holds_it_up(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.create_errors["RayCluster"] = WEBHOOK
    world.delete_cluster()
    world.collect_garbage()
    await follow(operator, 30)
    assert (world.status.phase, world.status.message) == (Phase.RESTARTING, str(WEBHOOK))
    assert provisioned(world) == ("False", "WebhookUnavailable", str(WEBHOOK))
    world.create_errors.clear()
    await follow(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_an_object_that_is_too_large_fails_the_run(world: World, operator: Operator) -> None:
    world.create_errors["ConfigMap"] = TooLarge("limit is 3145728")
    await operator.settle(2)
    assert world.status.phase is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert (failed.reason, "limit is 3145728" in failed.message) == ("TooLarge", True)


# -- creations that hang ---------------------------------------------------------------------------


def in_time(operator: Operator) -> Operator:
    """Let the world follow the clock of the event loop."""
    loop = asyncio.get_running_loop()
    operator.world.now = START + timedelta(seconds=loop.time())
    return operator


def test_a_creation_that_hangs_is_shown_and_succeeds_at_last(world: World) -> None:
    async def scenario() -> None:
        ended: list[tuple[str, str]] = []
        operator = Operator(world, slow_writes=SlowWrites(ended.append))
        world.create_seconds["RayCluster"] = 30.0
        await operator.reconcile()
        assert asyncio.get_running_loop().time() == PATIENCE_SECONDS
        status, reason, message = provisioned(in_time(operator).world)
        assert (status, reason) == ("False", "ApiserverUnavailable")
        assert f"has not answered the creation of RayCluster {NAME}" in message
        await operator.reconcile()
        assert asyncio.get_running_loop().time() == PATIENCE_SECONDS, "later looks do not wait"
        assert not ended
        await asyncio.sleep(26)
        assert ended == [RUN], "its end causes a look"
        await in_time(operator).settle(2)
        assert world.status.phase is Phase.STARTING
        assert world.requests.count("create RayCluster") == 1

    on_virtual_clock(scenario())


def test_the_webhook_that_fails_after_a_while_is_named(world: World) -> None:
    async def scenario() -> None:
        operator = Operator(world)
        world.create_seconds["RayCluster"], world.create_errors["RayCluster"] = 10.0, WEBHOOK
        await operator.reconcile()
        await asyncio.sleep(6)
        await in_time(operator).reconcile()
        assert provisioned(world) == ("False", "WebhookUnavailable", str(WEBHOOK))

    on_virtual_clock(scenario())


def test_a_run_is_suspended_and_deleted_while_a_creation_hangs(world: World) -> None:
    async def scenario() -> None:
        operator = Operator(world)
        world.create_seconds["RayCluster"] = 30.0
        await operator.reconcile()
        world.change_run(("suspend", True))
        await operator.reconcile()
        assert world.status.phase is Phase.SUSPENDED
        await asyncio.sleep(60)
        assert ("RayCluster", NAME) not in world.objects, "it was given up"
        world.change_run(("suspend", False))
        await operator.reconcile()
        world.delete_run()
        await operator.reconcile()
        await asyncio.sleep(60)
        assert ("RayCluster", NAME) not in world.objects

    on_virtual_clock(scenario())


def test_a_changed_spec_replaces_the_creation_that_hangs(world: World) -> None:
    async def scenario() -> None:
        operator = Operator(world)
        world.create_seconds["RayCluster"] = 30.0
        await operator.reconcile()
        world.change_run(("roles.env", {"replicas": 7}))
        world.create_seconds.clear()
        await operator.reconcile()
        groups = world.objects["RayCluster", NAME]["spec"]["workerGroupSpecs"]
        assert 7 in [group["replicas"] for group in groups]

    on_virtual_clock(scenario())


def test_fifty_creations_that_hang_delay_no_look_at_a_healthy_run() -> None:
    healthy, blocked, seconds = 3, 50, 42.0

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        queue, leading = WorkQueue(), asyncio.Event()
        slots, budget = asyncio.Semaphore(16), Budget(64, 16)
        operators: dict[tuple[str, str], Operator] = {}
        for number in range(healthy + blocked):
            world, key = World(), ("team", f"run-{number}")
            world.apply_run()

            def again(_: tuple[str, str], key: tuple[str, str] = key) -> None:
                queue.add(key)

            operators[key] = operator = Operator(world, slots, SlowWrites(again, budget))
            if number < healthy:
                await training(operator)
            else:
                world.create_seconds["RayCluster"] = 30.0
                world.create_errors["RayCluster"] = WEBHOOK
        looks: dict[tuple[str, str], list[float]] = {key: [0.0] for key in operators}
        reasons: dict[tuple[str, str], dict[str, float]] = {key: {} for key in operators}

        async def reconcile(item: Item) -> float | None:
            operator = in_time(operators[item.key])
            delay = await operator.reconcile(item.changed)
            looks[item.key].append(loop.time())
            reason = provisioned(operator.world)[1]
            reasons[item.key].setdefault(reason, loop.time())
            return delay

        workers = ReconcileWorkers(queue, reconcile, leading, slots)
        workers.start()
        leading.set()
        for key in operators:
            queue.add(key)
        await asyncio.sleep(seconds)
        await workers.stop()
        for key in list(operators)[:healthy]:
            times = [*looks[key], seconds]
            gap = max(later - earlier for earlier, later in pairwise(times))
            assert gap <= 5, f"{key} was not looked at for {gap:.1f} s"
        shown = [reasons[key] for key in list(operators)[healthy:]]
        assert all(found["ApiserverUnavailable"] < 10 for found in shown)
        named = Counter("WebhookUnavailable" in found for found in shown)
        assert named[True] >= 16
        assert all(found.get("WebhookUnavailable", 30) <= 40 for found in shown)
        for operator in operators.values():
            await operator.slow_writes.stop()

    on_virtual_clock(scenario())


def test_one_namespace_does_not_use_the_whole_budget() -> None:
    async def scenario() -> None:
        budget, release = Budget(4, 2), asyncio.Event()
        held: Counter[str] = Counter()

        async def hold(namespace: str) -> None:
            async with budget.place(namespace):
                held[namespace] += 1
                await release.wait()

        tasks = [asyncio.create_task(hold("greedy")) for _ in range(10)]
        await asyncio.sleep(1)
        tasks += [asyncio.create_task(hold("modest")) for _ in range(2)]
        await asyncio.sleep(1)
        assert held == {"greedy": 2, "modest": 2}
        release.set()
        await asyncio.gather(*tasks)
        assert held["greedy"] == 10
        assert not budget._namespaces

    on_virtual_clock(scenario())


def test_a_write_that_fails_between_two_looks_is_reported_by_the_next_one() -> None:
    async def scenario() -> None:
        ended: list[tuple[str, str]] = []
        writes = SlowWrites(ended.append)

        async def fail() -> None:
            await asyncio.sleep(3)
            raise Refused("no")

        with pytest.raises(Unanswered):
            await writes.finish(RUN, "creation", 1, 2.0, fail)
        await asyncio.sleep(5)
        assert ended == [RUN]
        with pytest.raises(Refused):
            await writes.finish(RUN, "creation", 1, 0.0, fail)
        with pytest.raises(Unanswered):
            await writes.finish(OTHER, "creation", 1, 0.0, fail)
        await writes.stop()
        assert ended == [RUN], "what is cancelled needs no look"

    on_virtual_clock(scenario())


# -- a status that is refused ----------------------------------------------------------------------

Refusal = Callable[[dict[str, Any]], bool]


def has_checkpoint(status: dict[str, Any]) -> bool:
    """As a time that the CRD's format does not allow."""
    return "checkpoint" in status


def has_emoji(status: dict[str, Any]) -> bool:
    return "\U0001f917" in json.dumps(status, ensure_ascii=False)


async def hostile(world: World, operator: Operator) -> None:
    """Bring the run to a driver whose snapshot the CRD refuses."""
    await training(operator)
    world.refuse_status = has_checkpoint
    world.drive(2, checkpoint=CheckpointStatus(step=2, uri="/c", time="2026-01-01T00:00:00Z"))
    await operator.settle(3)


def refused_statuses() -> float:
    return REGISTRY.get_sample_value("agenticrun_operator_refused_status_writes_total") or 0.0


async def test_what_a_driver_reports_cannot_stop_the_status(
    world: World, operator: Operator
) -> None:
    before = refused_statuses()
    await hostile(world, operator)
    assert (world.status.phase, world.status.step, world.status.checkpoint) == (
        Phase.RUNNING,
        1,
        None,
    )
    await follow(operator, 120)
    assert happened(world).count("StatusRefused") == 1
    assert refused_statuses() == before, "the run is steered: no critical alert"
    world.refuse_status = lambda _: False
    world.drive(3)
    await follow(operator, 30)
    assert (world.status.step, world.status.checkpoint and world.status.checkpoint.step) == (3, 2)
    world.refuse_status = lambda status: status["step"] > 3
    world.drive(4)
    await follow(operator, 30)
    assert world.status.step == 3
    assert happened(world).count("StatusRefused") == 2


async def test_a_run_whose_status_is_refused_is_suspended(world: World, operator: Operator) -> None:
    await hostile(world, operator)
    world.change_run(("suspend", True))
    await operator.settle(3)
    assert (world.status.phase, world.stop_requests) == (Phase.SUSPENDING, 1)
    await follow(operator, 900)  # the driver ignores the request
    assert (world.status.phase, world.pods()) == (Phase.SUSPENDED, [])


async def test_a_run_whose_status_is_refused_ends_at_its_deadline(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["activeDeadlineSeconds"] = 120
    await hostile(world, operator)
    await follow(operator, 1200)
    assert (world.status.phase, world.pods()) == (Phase.FAILED, [])
    assert condition(world, ConditionType.FAILED).reason == "DeadlineExceeded"


async def test_texts_that_the_apiserver_refuses_are_replaced(
    world: World, operator: Operator
) -> None:
    world.refuse_status = has_emoji
    world.create_errors["RayCluster"] = WebhookUnavailable("\U0001f917 not today")
    await operator.settle(3)
    assert (world.status.phase, provisioned(world)[:2]) == (
        Phase.PENDING,
        ("False", "WebhookUnavailable"),
    )
    assert "StatusRefused" in provisioned(world)[2]
    world.create_errors.clear()
    await training(operator)


async def test_nothing_follows_a_status_that_is_refused_without_reports_too(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.refuse_status = lambda _: True
    world.change_run(("suspend", True))
    for _ in range(3):
        with pytest.raises(Refused):
            await operator.reconcile()
    assert (world.stop_requests, happened(world).count("StatusRefused")) == (0, 1)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (Refused("bad"), 1),
        (TooLarge("large"), 1),
        (Denied("a policy denied the request"), 1),
        (Conflict("the run has changed"), 0),
        (KubeUnavailable("no answer"), 0),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_statuses_that_cannot_be_stored_at_all_are_counted(
    world: World,
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
    error: ClusterError,
    counted: int,
) -> None:
    await training(operator)

    async def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(world, "write_status", refuse)
    world.change_run(("suspend", True))
    before = refused_statuses()
    with contextlib.suppress(ClusterError):  # a conflict is handled
        await operator.reconcile()
    assert refused_statuses() - before == counted


def test_what_decides_survives_without_the_texts() -> None:
    job = JobStatus(attempt=2, submission_id="s-2", status="\U0001f917", disruption="\U0001f917")
    status = AgenticRunStatus(phase=Phase.RUNNING, job=job, disruptions=3, log_tail="\U0001f917")
    stored = AgenticRunStatus(step=4, job=JobStatus(attempt=1, submission_id="s-1", version="1"))
    reduced = Plan(status=status).without_reports(stored)
    assert not has_emoji(reduced.to_dict())
    assert reduced.job
    assert (reduced.job.attempt, reduced.job.submission_id, reduced.job.version) == (2, "s-2", None)
    assert reduced.job.status, "empty means that Ray has not got the job"
    assert reduced.job.disruption, "such an attempt is no failure"
    assert (reduced.phase, reduced.disruptions, reduced.step) == (Phase.RUNNING, 3, 4)


@pytest.mark.parametrize("restarted", [False, True])
async def test_no_driver_is_submitted_twice_although_parts_of_its_status_are_refused(
    world: World, operator: Operator, restarted: bool
) -> None:
    await hostile(world, operator)
    if restarted:
        operator._start()
    world.end_driver(None, exit_code=1)
    await follow(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]
