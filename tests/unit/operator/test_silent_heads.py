"""Heads that are ready and that the operator cannot reach: the run says so and holds no GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, Role
from agenticrun_operator.planning.times import format_time
from operator_world import NAME, Operator, World, condition, copied, happened, training

C = ConditionType


def a_run(**policy: Any) -> Operator:
    world = World()
    world.apply_run(("spec.failurePolicy", {"backoffSeconds": 10, **policy}))
    return Operator(world)


def cut_off(world: World, down: bool = True) -> None:
    """A NetworkPolicy stops the operator's requests to the head."""
    world.ray_down = world.reporter_down = world.submit_down = down


async def watched(operator: Operator, seconds: int, step: int = 10) -> list[tuple[str, str, bool]]:
    """Let time pass. Return Progressing, its reason, and if there were pods, at each look."""
    world = operator.world
    seen: list[tuple[str, str, bool]] = []
    for _ in range(seconds // step):
        world.make_pods()
        await operator.reconcile()
        said = condition(world, C.PROGRESSING)
        seen.append((said.status, said.reason, bool(world.pods())))
        world.now += timedelta(seconds=step)
    return seen


async def lose_the_driver_and_the_network(operator: Operator) -> None:
    await training(operator)
    operator.world.end_driver(None)
    await operator.settle(1)
    assert operator.world.status.phase is Phase.RESTARTING
    cut_off(operator.world)


async def the_first_attempt(operator: Operator) -> None:
    cut_off(operator.world)


BEFORE = pytest.mark.parametrize("before", [the_first_attempt, lose_the_driver_and_the_network])


@BEFORE
async def test_a_head_out_of_reach_is_named_with_its_ports(before: Any) -> None:
    operator = a_run()
    world = operator.world
    await before(operator)
    await watched(operator, 60)
    said = condition(world, C.TRAINING)
    assert (said.status, said.reason) == ("False", "ProgressUnavailable")
    (head,) = (pod["metadata"]["name"] for pod in world.pods(Role.DRIVER))
    for words in (head, "8265", "8787", "NetworkPolicy", "no answer"):
        assert words in said.message
    assert world.status.message == said.message
    summary = condition(world, C.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", "ProgressUnavailable")


@BEFORE
async def test_a_head_out_of_reach_holds_its_gpus_for_minutes_and_costs_no_failure(
    before: Any,
) -> None:
    operator = a_run(maxRestarts=1)
    world = operator.world
    await before(operator)
    failures, uids = world.status.failures_without_progress, set()
    jobs, began = len(world.jobs), len(world.events)
    seen = []
    for _ in range(72):
        seen += await watched(operator, 300)
        cluster = world.objects.get(("RayCluster", NAME))
        uids |= {cluster["metadata"]["uid"]} if cluster else set()
    late = seen[len(seen) // 6 :]
    assert sum(pods for *_, pods in late) < 0.3 * len(late), "its GPUs are free most of the time"
    assert {(status, reason) for status, reason, _ in late} == {("False", "ProgressUnavailable")}
    told = [str(event.reason) for event in world.events[began:]]
    assert 15 <= told.count("ProgressUnavailable") <= 40, "one for each try, in six hours"
    assert "ClusterLost" not in told
    assert world.status.failures_without_progress == failures
    assert len(world.jobs) == jobs
    cut_off(world, down=False)
    await watched(operator, 1800)
    assert len(world.jobs) == jobs + 1
    world.drive(2)
    await operator.settle(2)
    assert world.status.phase is Phase.RUNNING
    assert condition(world, C.PROGRESSING).status == "True"
    assert (world.status.startup_timeouts, world.status.obstacle) == (0, None)


@BEFORE
async def test_a_network_that_recovers_in_time_costs_nothing(before: Any) -> None:
    operator = a_run()
    world = operator.world
    await before(operator)
    await watched(operator, 100)
    cut_off(world, down=False)
    uid = world.objects["RayCluster", NAME]["metadata"]["uid"]
    jobs = len(world.jobs)
    await watched(operator, 60)
    assert len(world.jobs) == jobs + 1
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] == uid
    assert world.status.message is None or "NetworkPolicy" not in world.status.message
    assert condition(world, C.PROGRESSING).status == "True"


async def test_a_wait_for_something_else_does_not_count_as_silence() -> None:
    """The head has answered all the time until a moment ago."""
    operator = a_run()
    world = operator.world
    await training(operator)
    world.end_driver(None)
    await operator.settle(1)
    leaving = copied(world.pods(Role.DRIVER)[0])
    end = format_time(world.now + timedelta(seconds=3600))
    leaving["metadata"] |= {"deletionTimestamp": end, "name": "leaving", "uid": "leaving"}
    world.objects = {("Pod", "leaving"): leaving, **world.objects}
    await watched(operator, 600)
    assert len(world.jobs) == 1
    cut_off(world)
    await watched(operator, 100)
    assert "ProgressUnavailable" not in happened(world)
    await watched(operator, 60)
    assert happened(world).count("ProgressUnavailable") == 1


async def test_a_submission_whose_answer_was_lost_is_given_up_at_the_startup_deadline() -> None:
    """Its driver may train, so it has more time than a head without an attempt."""
    operator = a_run(startupDeadlineSeconds=1200)
    world = operator.world
    await operator.settle(1)
    world.interruption = ("submitted", lambda: cut_off(world))
    await operator.settle(3)
    assert len(world.live_jobs()) == 1
    cut_off(world)
    await watched(operator, 900)
    said = condition(world, C.TRAINING)
    assert (said.status, said.reason) == ("Unknown", "ProgressUnavailable")
    assert "NetworkPolicy" in said.message
    assert condition(world, C.PROGRESSING).status == "Unknown"
    assert len(world.live_jobs()) == 1
    await watched(operator, 420)
    assert world.live_jobs() == []
    assert (world.status.restarts, world.status.failures_without_progress) == (1, 1)
    await watched(operator, 3600)
    assert (world.status.restarts, world.status.failures_without_progress) == (1, 1)


async def test_a_driver_that_was_seen_is_never_given_up_for_the_network() -> None:
    operator = a_run(startupDeadlineSeconds=60)
    world = operator.world
    await training(operator)
    cut_off(world)
    await watched(operator, 6 * 3600, step=60)
    assert len(world.live_jobs()) == 1
    said = condition(world, C.PROGRESSING)
    assert (said.status, said.reason) == ("Unknown", "ProgressUnavailable")
    assert "8265" in said.message
    assert "8787" in (world.status.message or "")
    cut_off(world, down=False)
    world.drive(2)
    await operator.settle(2)
    assert world.status.message is None
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    assert world.status.phase is Phase.SUCCEEDED
