"""The startup deadline, the deadline of a whole run, and two runs that hold each other's GPUs."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Outcome, Phase, Role
from agenticrun_operator.resources import Manifest
from fake_ray import ready_condition
from operator_world import NAME, Gpus, Operator, World, condition, happened, training


def a_run(*changes: tuple[str, Any], **policy: Any) -> Operator:
    """Return an operator on a run with this failure policy."""
    world = World()
    world.apply_run(("spec.failurePolicy", policy), *changes)
    return Operator(world)


async def pass_time(operator: Operator, seconds: int, step: int = 10, ready: bool = True) -> None:
    for _ in range(seconds // step):
        operator.world.make_pods(ready)
        await operator.reconcile()
        operator.world.now += timedelta(seconds=step)


def phase(world: World) -> Phase:
    return world.status.phase


def waits(world: World, reason: str) -> None:
    """Let the image pull of every pod fail, or its container crash."""
    for pod in world.pods():
        state: Manifest = {"waiting": {"reason": reason, "message": "no such image"}}
        pod["status"]["containerStatuses"][0] |= {"state": state, "ready": False}


async def test_two_runs_that_hold_each_others_gpus_resolve() -> None:
    gpus = Gpus(total=4)
    operators = []
    for place in range(2):
        world = World(gpus=gpus)
        world._ids = itertools.count(1000 * (place + 1))
        world.apply_run(
            ("spec.roles.trainer", {"replicas": 3, "gpus": 1}),
            ("spec.checkpoint.none", True),
            ("spec.failurePolicy", {"startupDeadlineSeconds": 300}),
        )
        gpus.worlds.append(world)
        operators.append(Operator(world))
    held: list[int] = []
    for _ in range(2000):
        for operator in operators:
            operator.world.make_pods()
            await operator.reconcile()
            operator.world.drive(1)
            operator.world.now += timedelta(seconds=5)
        if not held:
            trainers = [[p for p in w.pods() if "nodeName" in p["spec"]] for w in gpus.worlds]
            if sum(map(len, trainers)) >= 8:
                held = [len(pods) for pods in trainers]
        if any(phase(world) is Phase.RUNNING for world in gpus.worlds):
            break
    assert held[0] == held[1], "each had got half of the GPUs"
    winner, loser = sorted(gpus.worlds, key=lambda world: phase(world) is not Phase.RUNNING)
    assert "StartupDeadlineExceeded" in happened(loser)
    winner.end_driver(Outcome.SUCCEEDED)
    for _ in range(1000):
        for operator in operators:
            operator.world.make_pods()
            await operator.reconcile()
            operator.world.drive(1)
            operator.world.now += timedelta(seconds=5)
        if phase(loser) is Phase.RUNNING:
            break
    assert phase(loser) is Phase.RUNNING
    assert loser.status.startup_timeouts == 0


async def test_a_gang_that_cannot_be_placed_gives_its_pods_back_and_queues() -> None:
    operator = a_run(
        ("spec.roles.trainer", {"replicas": 2, "gpus": 1}),
        ("spec.checkpoint.none", True),
        startupDeadlineSeconds=300,
    )
    world = operator.world
    world.gpus = Gpus(1, [world])
    await pass_time(operator, 290)
    assert phase(world) is Phase.STARTING
    first = world.status.start_time
    await pass_time(operator, 30)
    assert phase(world) is Phase.PENDING
    assert ("RayCluster", NAME) not in world.objects
    assert world.pods() == []
    assert {role.ready for role in world.status.roles} == {0}
    told = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert told.reason == "StartupDeadlineExceeded"
    assert "Insufficient nvidia.com/gpu" in told.message
    assert happened(world).count("StartupDeadlineExceeded") == 1
    assert world.status.start_time is None
    queued_at = world.now
    while ("RayCluster", NAME) not in world.objects:
        await pass_time(operator, 10)
    assert 20 <= (world.now - queued_at).total_seconds() <= 100
    assert phase(world) is Phase.STARTING
    assert world.status.start_time not in (None, first)
    world.gpus = None
    await pass_time(operator, 30)
    assert len(world.jobs) == 1
    assert world.status.startup_timeouts == 0


async def test_the_wait_in_the_queue_doubles_and_survives_a_restart_of_the_operator() -> None:
    operator = a_run(("spec.roles.trainer", {"gpus": 1}), startupDeadlineSeconds=60)
    world = operator.world
    world.gpus = Gpus(0, [world])
    waited: list[float] = []
    for _ in range(4):
        while phase(world) is not Phase.PENDING or world.status.next_retry_time is None:
            await pass_time(Operator(world), 5, 5)
        began = world.now
        while ("RayCluster", NAME) not in world.objects:
            await pass_time(Operator(world), 5, 5)
        waited.append((world.now - began).total_seconds())
    assert waited[3] > 2 * waited[0]
    assert world.status.startup_timeouts == 4


async def test_a_crash_after_the_decision_to_queue_still_frees_the_pods() -> None:
    operator = a_run(("spec.roles.trainer", {"gpus": 1}), startupDeadlineSeconds=60)
    world = operator.world
    world.gpus = Gpus(0, [world])
    await pass_time(operator, 60)
    world.interruption = ("wrote status", world.crash)
    await operator.reconcile()
    assert phase(world) is Phase.PENDING
    assert ("RayCluster", NAME) in world.objects
    await operator.reconcile()
    assert ("RayCluster", NAME) not in world.objects


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "CreateContainerConfigError"])
async def test_a_run_that_never_trained_fails_if_its_containers_cannot_start(reason: str) -> None:
    operator = a_run(startupDeadlineSeconds=120)
    world = operator.world
    world.make_pods()
    for _ in range(14):
        world.make_pods(ready=False)
        waits(world, reason)
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert phase(world) is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert failed.reason == "StartupDeadlineExceeded"
    assert "no such image" in failed.message


@pytest.mark.parametrize("same_image", [True, False])
async def test_a_run_is_tried_on_other_nodes_if_one_cannot_pull_what_others_have(
    same_image: bool,
) -> None:
    operator = a_run(startupDeadlineSeconds=120)
    world = operator.world
    for _ in range(13):
        world.make_pods()
        for pod in world.pods(Role.ENV):
            pod["spec"]["nodeName"] = "node-7"
            if not same_image:
                pod["spec"]["containers"][0]["image"] = "env:1"
            container = pod["status"]["containerStatuses"][0]
            waiting = {"reason": "ImagePullBackOff", "message": "x509"}
            container |= {"state": {"waiting": waiting}, "ready": False}
            pod["status"]["conditions"] = [ready_condition(False, world.now)]
        await operator.reconcile()
        if world.pods() and phase(world) is Phase.STARTING:
            said = condition(world, ConditionType.ROLES_READY).message
            assert ("other pods have this image: look at node node-7" in said) is same_image
        world.now += timedelta(seconds=10)
    assert phase(world) is (Phase.PENDING if same_image else Phase.FAILED)
    assert "x509" in (world.status.message or "")
    await pass_time(operator, 200)
    assert len(world.jobs) == same_image


async def test_code_that_never_arrives_is_said_at_once_and_fails_the_run_at_the_deadline() -> None:
    git = ("spec.code", {"git": {"url": "https://host.example/mine", "ref": "nope"}})
    operator = a_run(git, startupDeadlineSeconds=120)
    world = operator.world
    for _ in range(14):
        world.make_pods(ready=False)
        for pod in world.pods():
            pod["spec"]["initContainers"] = [{"name": "fetch-code", "image": "worker:1"}]
            ended = {"exitCode": 1, "message": "cannot fetch nope"}
            state = {"name": "fetch-code", "restartCount": 0, "state": {"terminated": ended}}
            pod["status"]["initContainerStatuses"] = [state]
        await operator.reconcile()
        if phase(world) is Phase.STARTING and world.pods():
            ready = condition(world, ConditionType.ROLES_READY)
            assert (ready.status, ready.reason) == ("False", "CodeUnavailable")
            assert "cannot fetch spec.code: cannot fetch nope" in ready.message
            assert happened(world).count("CodeUnavailable") == 1
        world.now += timedelta(seconds=10)
    assert phase(world) is Phase.FAILED
    assert "cannot fetch nope" in condition(world, ConditionType.FAILED).message


async def test_a_run_that_has_trained_queues_while_an_image_cannot_be_pulled() -> None:
    operator = a_run(startupDeadlineSeconds=120)
    world = operator.world
    await training(operator)
    world.delete_cluster()
    world.collect_garbage()
    for _ in range(16):
        world.make_pods(ready=False)
        if world.pods():
            waits(world, "ImagePullBackOff")
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert phase(world) is Phase.PENDING
    assert "no such image" in (world.status.message or "")
    await pass_time(operator, 200)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_long_degraded_attempt_does_not_use_up_the_time_of_the_next_start() -> None:
    operator = a_run(startupDeadlineSeconds=300)
    world = operator.world
    await training(operator)
    await pass_time(operator, 1000, ready=False)
    assert phase(world) is Phase.RUNNING
    world.end_driver(None)
    await pass_time(operator, 100, ready=False)
    assert "StartupDeadlineExceeded" not in happened(world)
    await pass_time(operator, 300, ready=False)
    assert happened(world).count("StartupDeadlineExceeded") == 1


async def test_no_other_owners_cluster_is_deleted_at_the_deadline() -> None:
    operator = a_run(startupDeadlineSeconds=60)
    world = operator.world
    await training(operator)
    world.delete_cluster()
    world.collect_garbage()
    theirs = {"kind": "RayCluster", "metadata": {"name": NAME, "namespace": "team"}, "spec": {}}
    await world.create({**theirs, "spec": {"headGroupSpec": {}, "workerGroupSpecs": []}})
    for _ in range(30):
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert ("RayCluster", NAME) in world.objects


async def test_at_the_deadline_the_driver_is_asked_to_save_and_the_run_fails() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100))
    world = operator.world
    await training(operator)
    await pass_time(operator, 80)
    assert world.stop_requests == 0
    await pass_time(operator, 30)
    assert world.stop_requests > 0
    assert phase(world) is Phase.RUNNING
    assert "saves a checkpoint" in (world.status.message or "")
    world.end_driver(Outcome.STOPPED)
    await operator.settle(3)
    assert phase(world) is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert failed.reason == "DeadlineExceeded"
    assert "longer than 1m40s (activeDeadlineSeconds)" in failed.message
    assert world.status.restarts == 0
    assert ("RayCluster", NAME) not in world.objects


async def test_a_driver_that_does_not_stop_at_the_deadline_is_stopped() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100), ("spec.cleanup", {"onFailure": "Keep"}))
    world = operator.world
    await training(operator)
    await pass_time(operator, 230)
    assert phase(world) is Phase.FAILED
    assert [job.status for job in world.jobs] == ["STOPPED"]
    assert ("RayCluster", NAME) in world.objects


async def test_a_success_just_after_the_deadline_is_a_success() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100))
    world = operator.world
    await training(operator)
    await pass_time(operator, 100)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED


@pytest.mark.parametrize("waits_for", ["pods", "retry"])
async def test_a_run_without_an_attempt_fails_at_the_deadline(waits_for: str) -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100), backoffSeconds=600)
    world = operator.world
    if waits_for == "retry":
        await training(operator)
        world.end_driver(None)
    await pass_time(operator, 120, ready=False)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "DeadlineExceeded"
    assert world.stop_requests == 0


async def test_a_longer_deadline_while_the_driver_stops_lets_the_run_go_on() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100), backoffSeconds=1)
    world = operator.world
    await training(operator)
    await pass_time(operator, 110)
    assert world.stop_requests > 0
    world.run["spec"]["activeDeadlineSeconds"] = 10_000
    world.run["metadata"] |= {"generation": 2, "resourceVersion": "changed"}
    world.end_driver(Outcome.STOPPED)
    await pass_time(operator, 60)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_pods_that_wait_for_a_claim_are_given_back_at_the_deadline() -> None:
    operator = a_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi", "storageClassName": "slow"}}),
        startupDeadlineSeconds=300,
    )
    world = operator.world
    world.storage_down = True
    await operator.reconcile()
    world.make_pods(ready=False)
    for pod in world.pods():
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "pod has unbound immediate PersistentVolumeClaims",
            }
        ]
    for _ in range(40):
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert "ClaimPending" in happened(world)
    assert "StartupDeadlineExceeded" in happened(world)
    assert ("RayCluster", NAME) not in world.objects or world.status.startup_timeouts > 0


async def test_the_deadline_ends_a_driver_that_stops_for_other_replicas_and_does_not_end() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 600))
    world = operator.world
    await training(operator)
    world.change_run(("roles.env.replicas", 3))
    await operator.settle(3)
    for _ in range(60):
        world.drive(1)
        await operator.reconcile()
        world.now += timedelta(seconds=60)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "DeadlineExceeded"
    assert world.status.next_retry_time is None
    assert world.status.stopping is None
