"""Nodes that no longer answer: the run says so, resumes elsewhere, and never runs twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, Role
from agenticrun_api.names import KIND
from agenticrun_operator.errors import Denied
from agenticrun_operator.observed import Incarnation, Pod
from agenticrun_operator.planning.pods import joined_earlier_head
from operator_world import NAME, Operator, World, condition, happened, training


async def pass_time(operator: Operator, seconds: int) -> None:
    for _ in range(seconds // 5):
        await operator.settle(1)
        operator.world.now += timedelta(seconds=4)


def cluster_uid(world: World) -> str:
    return str(world.objects["RayCluster", NAME]["metadata"]["uid"])


async def test_a_run_whose_head_is_on_a_lost_node_says_so_at_once_and_resumes_on_another(
    world: World, operator: Operator
) -> None:
    await training(operator)
    first = cluster_uid(world)
    world.lose_node(Role.DRIVER)
    await operator.settle(1)
    told = condition(world, ConditionType.TRAINING)
    assert (told.status, told.reason) == ("Unknown", "NodeLost")
    assert "which no longer answers" in told.message
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("False", "NodeLost")
    await pass_time(operator, 110)
    assert (world.status.phase, cluster_uid(world)) == (Phase.RUNNING, first), "it may come back"
    await pass_time(operator, 20)
    assert world.status.phase is Phase.RESTARTING
    await pass_time(operator, 120)
    assert cluster_uid(world) != first
    assert [job.attempt for job in world.jobs] == [1, 2]
    world.drive(2)
    await operator.settle(2)
    assert (world.status.phase, world.status.disruptions) == (Phase.RUNNING, 1)
    assert happened(world).count("Disrupted") == 1, "the attempt is lost"
    assert happened(world).count("NodeLost") == 1, "the pod is removed"


async def test_a_node_that_comes_back_in_time_costs_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.lose_node(Role.DRIVER, partition=True)
    await pass_time(operator, 100)
    world.lost.clear()
    world.drive(2)
    await operator.settle(2)
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 2)
    assert condition(world, ConditionType.TRAINING).status == "True"
    assert [job.attempt for job in world.jobs] == [1]


async def test_a_silent_head_that_is_ready_is_never_restarted(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.reporter_down = world.ray_down = True
    await pass_time(operator, 1000)
    assert world.status.phase is Phase.RUNNING
    assert condition(world, ConditionType.TRAINING).status == "Unknown"
    assert len(world.live_jobs()) == 1


async def test_a_driver_behind_a_broken_network_may_write_until_its_grace_period_is_over(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (first,) = world.jobs
    world.lose_node(Role.DRIVER, partition=True)
    while len(world.jobs) == 1:
        await pass_time(operator, 5)
        waited = (world.now - world.lost_at).total_seconds()
        assert waited < 600
    assert waited > 120 + 30 + 60, "until the head is lost, its grace period, and a minute"
    assert first.live


async def test_the_crash_of_the_operator_between_the_decision_and_the_deletion_changes_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator)
    first = cluster_uid(world)
    world.lose_node(Role.DRIVER)
    await operator.reconcile()
    world.now += timedelta(seconds=130)
    world.interruption = ("wrote status", world.crash)
    await operator.reconcile()
    assert (world.status.phase, cluster_uid(world)) == (Phase.RESTARTING, first)
    await pass_time(operator, 150)
    assert cluster_uid(world) != first
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_worker_on_a_lost_node_is_named_and_replaced(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (old,) = world.pods(Role.TRAINER)
    world.lose_node(Role.TRAINER)
    await operator.settle(1)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("False", "NodeLost")
    assert f"trainer: pod {old['metadata']['name']} is on node" in ready.message
    world.evict_lost_pods()
    await operator.settle(1)
    trainer = next(role for role in world.status.roles if role.name == "trainer")
    assert (trainer.ready, trainer.desired) == (0, 1)
    assert f"pod {old['metadata']['name']} is being deleted" in trainer.message
    await pass_time(operator, 120)
    (new,) = world.pods(Role.TRAINER)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert condition(world, ConditionType.ROLES_READY).status == "True"
    assert [job.attempt for job in world.jobs] == [1], "what a lost worker means, the driver says"


async def test_a_pod_of_an_earlier_run_on_a_lost_node_does_not_hold_the_next_run_for_ever(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.lose_node(Role.DRIVER)
    world.delete_run()
    for _ in range(3):
        world.collect_garbage()
    world.apply_run()
    await operator.settle(2)
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "WaitingForPreviousRun"
    await pass_time(operator, 120)
    assert [job.attempt for job in world.jobs] == [1, 1]


async def test_an_operator_without_the_right_to_delete_pods_goes_on(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.lose_node(Role.TRAINER)
    world.evict_lost_pods()
    world.delete_errors["Pod"] = Denied("pods is forbidden")
    await pass_time(operator, 200)
    assert 2 <= world.requests.count("delete Pod") <= 12, "the waits grow to half a minute"
    assert sum("is removed" in event.message for event in world.events) == 1
    world.drive(2)
    await operator.settle(2)
    assert world.status.step == 2


async def test_a_deleted_head_is_not_replaced_by_a_second_driver_before_it_has_ended(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (head,) = world.pods(Role.DRIVER)
    head["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"  # a long grace period
    world.delete_cluster()
    for key in [key for key in world.objects if key[0] == "Pod"]:
        if world.objects[key] is not head:
            del world.objects[key]
    await pass_time(operator, 100)
    assert len(world.jobs) == 1
    head["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    world.jobs[0].status = "FAILED"
    del world.objects["Pod", head["metadata"]["name"]]
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert (KIND, NAME) in world.objects


async def test_a_refused_deletion_of_a_finished_runs_cluster_is_requested_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_errors["RayCluster"] = Denied("rayclusters is forbidden")
    world.end_driver(Outcome.SUCCEEDED)
    delay: float | None = 0.0
    for _ in range(60):
        assert delay is not None, "nothing else would look at the run"
        world.now += timedelta(seconds=delay)
        delay = await operator.reconcile(changed=False)
        if world.requests.count("delete RayCluster") == 2:
            world.delete_errors.clear()
        if ("RayCluster", NAME) not in world.objects:
            break
    assert world.requests.count("delete RayCluster") == 3


async def test_no_attempt_is_submitted_to_a_new_head_before_the_workers_have_left_the_old_one(
    world: World, operator: Operator
) -> None:
    world.rejoin_seconds = 27
    await training(operator)
    world.now += timedelta(seconds=5)
    world.delete_pod(Role.DRIVER)
    await pass_time(operator, 20)
    assert [job.attempt for job in world.jobs] == [1]
    told = condition(world, ConditionType.TRAINING)
    assert told.reason == "ClusterLost"
    assert told.message.endswith("joins the new head")
    await pass_time(operator, 25)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_worker_whose_clock_is_behind_that_of_the_head_delays_an_attempt_for_a_minute(
    world: World, operator: Operator
) -> None:
    world.rejoin_seconds = 10_000
    await training(operator)
    world.now += timedelta(seconds=5)
    world.delete_pod(Role.DRIVER)
    await pass_time(operator, 100)
    assert [job.attempt for job in world.jobs] == [1, 2]


def pod(role: Role, created: int, started: int, **fields: Any) -> Pod:
    at = "2026-01-01T00:00:{:02}Z".format
    common = {
        "run_uid": "r",
        "role": role,
        "ready": True,
        "incarnation": Incarnation(role.value, 0),
    }
    named = {"name": role.value, "uid": role.value}
    return Pod(
        **{**named, **common, "created_at": at(created), "started_at": at(started), **fields}
    )


@pytest.mark.parametrize(
    ("worker", "head", "joined_earlier"),
    [
        (pod(Role.ENV, 0, 5), pod(Role.DRIVER, 20, 25), True),
        (pod(Role.ENV, 0, 27), pod(Role.DRIVER, 20, 25), False),  # it has started again
        (pod(Role.ENV, 21, 15), pod(Role.DRIVER, 20, 25), False),  # its node's clock is behind
        (pod(Role.ENV, 1, 5), pod(Role.DRIVER, 0, 25, incarnation=Incarnation("driver", 1)), True),
        (pod(Role.ENV, 0, 5, gone_by="x"), pod(Role.DRIVER, 20, 25), False),
        (pod(Role.DRIVER, 0, 5), pod(Role.DRIVER, 20, 25), False),
    ],
)
def test_a_worker_that_is_older_than_the_head_has_joined_an_earlier_one(
    worker: Pod, head: Pod, joined_earlier: bool
) -> None:
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    assert joined_earlier_head(worker, head, now) == joined_earlier
    assert not joined_earlier_head(worker, head, now + timedelta(minutes=2))
