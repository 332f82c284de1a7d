"""A volume claim, or the run itself, that is deleted while the run trains."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, Role
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.planning.times import format_time
from operator_world import NAME, Operator, World, condition, happened

CLAIM = ("PersistentVolumeClaim", f"{NAME}-checkpoints")


@pytest.fixture
def world() -> World:
    world = World()
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.failurePolicy", {"maxRestarts": 2, "backoffSeconds": 10}),
    )
    return world


async def training(operator: Operator, saved: int | None = None) -> None:
    world = operator.world
    await operator.settle()
    checkpoint = (
        CheckpointStatus(step=saved, uri="/checkpoints/1", time=format_time(world.now))
        if saved
        else None
    )
    world.drive(1, checkpoint=checkpoint)
    await operator.settle(2)
    assert phase(world) is Phase.RUNNING


def phase(world: World) -> Phase:
    return world.status.phase


async def test_a_claim_that_was_deleted_with_its_checkpoints_ends_the_run_at_its_next_restart(
    world: World, operator: Operator
) -> None:
    await training(operator, saved=1)
    world.delete_claim()
    world.drive(1)
    await operator.settle(3)
    assert phase(world) is Phase.RUNNING, "the pods still have it"
    world.delete_pod(Role.TRAINER)
    world.end_driver(Outcome.FAILED)
    await operator.settle(4)
    assert phase(world) is Phase.RESTARTING, "its head is the last way to the data"
    kept = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (kept.status, kept.reason) == ("False", "CheckpointsLost")
    assert "Copy them now" in kept.message
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(4)
    assert phase(world) is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert failed.reason == "CheckpointsLost"
    assert "lake-checkpoints was deleted, and with it the checkpoint of step 1" in failed.message
    assert len(world.jobs) == 1, "a second attempt would begin at step 0"


async def test_a_claim_that_vanished_is_not_made_again_empty(
    world: World, operator: Operator
) -> None:
    await training(operator, saved=1)
    world.delete_cluster()
    world.collect_garbage()
    del world.objects[CLAIM]
    await operator.settle(6)
    assert CLAIM not in world.objects
    assert condition(world, ConditionType.FAILED).reason == "CheckpointsLost"


async def test_a_claim_without_checkpoints_is_made_again(world: World, operator: Operator) -> None:
    await training(operator)
    before = world.objects[CLAIM]["metadata"]["uid"]
    world.delete_claim()
    world.delete_pod(Role.TRAINER)
    world.end_driver(Outcome.FAILED)
    for _ in range(40):
        await operator.settle(1)
        world.now += timedelta(seconds=1)
    assert world.objects[CLAIM]["metadata"]["uid"] != before
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_claim_that_is_deleted_while_the_run_starts_is_made_again(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods(ready=False)
    world.delete_claim()
    assert CLAIM in world.objects, "its pods use it"
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == [1]


async def test_a_deleted_run_that_a_finalizer_holds_trains_no_longer(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.run["metadata"]["finalizers"] = ["backup.example/archive"]
    world.delete_run()
    await operator.settle(4)
    assert ("RayCluster", NAME) not in world.objects
    assert world.live_jobs() == []
    assert phase(world) is Phase.RUNNING, "no alert takes it for a failure"
    summary = condition(world, ConditionType.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", "RunDeleted")
    assert "backup.example/archive still holds it" in (world.status.message or "")
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "ClusterDeleted"
    assert {role.ready for role in world.status.roles} == {0}
    assert happened(world).count("RunDeleted") == 1


async def test_a_finished_run_that_keeps_its_pods_loses_them_when_it_is_deleted(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["cleanup"] = {"onSuccess": "Keep"}
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert ("RayCluster", NAME) in world.objects
    world.run["metadata"]["finalizers"] = ["backup.example/archive"]
    world.delete_run()
    await operator.settle(3)
    assert ("RayCluster", NAME) not in world.objects
    assert phase(world) is Phase.SUCCEEDED


async def test_a_run_that_is_deleted_without_its_children_leaves_them_alone(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.run["metadata"]["finalizers"] = ["orphan"]
    world.delete_run()
    await operator.settle(4)
    assert len(world.live_jobs()) == 1
    assert phase(world) is Phase.RUNNING


async def test_a_driver_that_hangs_after_its_final_report_is_stopped_in_a_cluster_that_is_kept(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["cleanup"] = {"onSuccess": "Keep"}
    await training(operator)
    (job,) = world.jobs
    world.end_driver(Outcome.SUCCEEDED)
    job.status = "RUNNING"
    await operator.settle(20)
    assert job.status == "RUNNING"
    await operator.settle(20)
    assert job.status == "STOPPED"
    assert phase(world) is Phase.SUCCEEDED
    assert ("RayCluster", NAME) in world.objects


async def test_a_claim_that_is_deleted_while_the_run_trains_is_reported_at_once(
    world: World, operator: Operator
) -> None:
    await training(operator, saved=1)
    world.delete_claim()
    world.drive(1)
    await operator.reconcile()
    lost = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (lost.status, lost.reason) == ("False", "CheckpointsLost")
    assert "Copy them now" in (world.status.message or "")
    assert [event.type for event in world.events if event.reason == "CheckpointsLost"] == [
        "Warning"
    ]
    assert phase(world) is Phase.RUNNING
    assert world.live_jobs()


@pytest.mark.parametrize("change", [("suspend", True), ("roles", {"env": {"replicas": 3}})])
async def test_pods_that_are_the_last_way_to_the_checkpoints_are_not_ended(
    world: World, operator: Operator, change: tuple[str, Any]
) -> None:
    await training(operator, saved=1)
    world.delete_claim()
    world.change_run(change)
    for _ in range(20):
        world.drive(2)
        await operator.settle(2)
        world.now += timedelta(seconds=30)
    assert world.stop_requests == 0
    assert world.pods()
    assert phase(world) is Phase.RUNNING
    if change[0] == "suspend":
        refused = condition(world, ConditionType.SUSPENDED)
        assert (refused.status, refused.reason) == ("False", "CheckpointsLost")
        assert "keeps its pods" in (world.status.message or "")


async def test_a_suspended_run_says_that_its_claim_was_deleted(
    world: World, operator: Operator
) -> None:
    await training(operator, saved=1)
    world.change_run(("suspend", True))
    await operator.settle(2)
    world.end_driver(Outcome.STOPPED)
    await operator.settle(3)
    assert phase(world) is Phase.SUSPENDED
    world.delete_claim()
    world.now += timedelta(seconds=10)
    await operator.settle(2)
    assert "lake-checkpoints was deleted" in (world.status.message or "")


@pytest.mark.parametrize("change", [("suspend", True), ("roles.env.replicas", 3), None])
async def test_pods_that_are_the_last_way_to_the_checkpoints_outlive_their_attempt(
    world: World, operator: Operator, change: tuple[str, Any] | None
) -> None:
    world.run["spec"]["failurePolicy"]["startupDeadlineSeconds"] = 120
    await training(operator, saved=1)
    world.delete_claim()
    await operator.settle(2)
    if change:
        world.change_run(change)
        await operator.settle(2)
    world.delete_pod(Role.TRAINER)
    world.end_driver(Outcome.FAILED)
    for _ in range(20):
        await operator.settle(2)
        world.now += timedelta(seconds=30)
    assert CLAIM in world.objects
    assert world.pods(Role.DRIVER)
    assert phase(world) is Phase.RESTARTING
    assert "Copy them now" in (world.status.message or "")


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
async def test_a_run_that_ends_while_its_claim_is_deleted_keeps_its_pods(
    world: World, operator: Operator, outcome: Outcome
) -> None:
    await training(operator, saved=1)
    world.delete_claim()
    world.drive(1)
    await operator.settle(2)
    world.end_driver(outcome, retryable=False)
    await operator.settle(3)
    world.now += timedelta(seconds=60)
    await operator.settle(3)
    assert world.status.phase.finished
    assert world.pods()
    kept = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (kept.status, kept.reason) == ("False", "CheckpointsLost")
    assert "Copy them, then delete the run" in kept.message
