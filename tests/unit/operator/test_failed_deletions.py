"""Deletions that a policy, a webhook or the apiserver holds up: shown, and tried again."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from agenticrun_api import Condition, ConditionType, Outcome, Phase, Role
from agenticrun_api.names import KIND
from agenticrun_operator.errors import (
    ClusterError,
    Denied,
    KubeUnavailable,
    RightMissing,
    WebhookUnavailable,
)
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.slow_writes import SlowWrites
from operator_world import NAME, START, Operator, World, condition, happened, training
from virtual_clock import on_virtual_clock

WEBHOOK = WebhookUnavailable('failed calling webhook "guard.example.com": no endpoints available')
DENIED = Denied('admission webhook "guard.example.com" denied the request: keep RayClusters')
CLUSTER = ("RayCluster", NAME)


async def follow(operator: Operator, seconds: float) -> None:
    """Look whenever the operator asks for it."""
    world = operator.world
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        delay = await operator.reconcile(changed=False)
        world.now += timedelta(seconds=max(0.1, delay or 1))


def provisioned(world: World) -> tuple[str, str]:
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    return found.status, found.reason


def suspended(world: World) -> Condition:
    return condition(world, ConditionType.SUSPENDED)


async def suspend(operator: Operator) -> None:
    """Suspend a run that trains; its driver stops."""
    operator.world.change_run(("suspend", True))
    await operator.settle(2)
    operator.world.end_driver(Outcome.STOPPED)
    await operator.settle(2)


@pytest.mark.parametrize(
    ("error", "reason", "longest"),
    [
        (DENIED, "Denied", 30),
        (RightMissing("rayclusters.ray.io is forbidden"), "Denied", 30),
        (WEBHOOK, "WebhookUnavailable", 5),
        (KubeUnavailable("status 504"), "ApiserverUnavailable", 5),
    ],
)
async def test_a_suspended_run_says_why_its_pods_stay_until_they_go(
    world: World, operator: Operator, error: ClusterError, reason: str, longest: int
) -> None:
    await training(operator)
    world.delete_errors["RayCluster"] = error
    await suspend(operator)
    assert world.status.phase is Phase.SUSPENDING
    message = f"RayCluster {NAME} cannot be deleted: {error}"
    assert (provisioned(world), world.status.message) == (("False", reason), message)
    assert (suspended(world).status, suspended(world).reason) == ("Unknown", reason)
    assert suspended(world).message == message
    summary = condition(world, ConditionType.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", reason)
    world.requests.clear()
    await follow(operator, 600)
    tries = world.requests.count("delete RayCluster")
    assert 600 / longest / 1.3 <= tries <= 600 / longest + 8, "the waits grow"
    assert happened(world).count(reason) == 1, "one event, not one for each try"
    world.delete_errors.clear()
    await follow(operator, longest + 5)
    assert world.status.phase.value == "Suspended"
    assert world.pods() == []


@pytest.mark.parametrize("error", [DENIED, WEBHOOK])
async def test_a_run_that_has_ended_says_why_its_pods_stay(
    world: World, operator: Operator, error: ClusterError
) -> None:
    await training(operator)
    world.delete_errors["RayCluster"] = error
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(4)
    assert world.status.phase is Phase.SUCCEEDED
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.status, found.message) == (
        "False",
        f"RayCluster {NAME} cannot be deleted: {error}",
    )
    assert (world.status.message or "").startswith("the driver's words"), "the end stays named"
    await follow(operator, 300)
    assert happened(world).count(found.reason) == 1
    world.delete_errors.clear()
    await follow(operator, 40)
    assert provisioned(world) == ("False", "ClusterDeleted")


async def test_a_failing_webhook_holds_up_no_other_action_of_the_plan(
    world: World, operator: Operator
) -> None:
    await operator.settle(1)
    world.delete_errors["RayCluster"] = WEBHOOK
    await follow(operator, 3620)
    assert "StartupDeadlineExceeded" in happened(world)
    assert provisioned(world) == ("False", "WebhookUnavailable")


async def test_a_denied_deletion_of_the_run_itself_is_shown_once() -> None:
    world = World()
    world.apply_run(("spec.ttlSecondsAfterFinished", 60))
    operator = Operator(world)
    await training(operator)
    world.delete_errors[KIND] = DENIED
    world.end_driver(Outcome.SUCCEEDED)
    await follow(operator, 600)
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).message == (
        f"AgenticRun {NAME} cannot be deleted: {DENIED}"
    )
    assert happened(world).count("Denied") == happened(world).count("ClusterDeleted") == 1
    assert world.requests.count(f"delete {KIND}") < 30
    world.delete_errors.clear()
    await follow(operator, 60)
    assert (KIND, NAME) not in world.objects


async def test_a_pod_that_cannot_be_removed_is_named_while_the_run_trains(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.lose_node(Role.ENV)
    world.evict_lost_pods()
    world.delete_errors["Pod"] = DENIED
    (lost,) = world.pods(Role.ENV)
    await follow(operator, 300)
    found = condition(world, ConditionType.ROLES_READY)
    assert (found.status, found.reason) == ("False", "Denied")
    assert found.message == f"Pod {lost['metadata']['name']} cannot be deleted: {DENIED}"
    assert provisioned(world) == ("True", "ClusterCreated")


async def test_a_run_that_is_resumed_forgets_the_deletion_that_was_denied(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_errors["RayCluster"] = DENIED
    await suspend(operator)
    world.change_run(("suspend", False))
    await operator.settle(4)
    assert provisioned(world) == ("True", "ClusterCreated")
    world.drive(2)
    await operator.settle(3)
    assert world.status.phase is Phase.RUNNING
    world.delete_pod(Role.TRAINER)
    world.end_driver(None)
    await operator.settle(4)
    assert world.status.disruptions == 1, "the operator has deleted nothing"


# -- finalizers ------------------------------------------------------------------------------------


def hold(world: World, kind: str, name: str) -> None:
    """A finalizer of others holds a deleted object."""
    found = world.objects[kind, name]
    found["metadata"]["finalizers"] = ["example.com/slow"]
    world._mark_deleted(found, grace_seconds=0)


async def test_a_run_says_which_finalizer_holds_the_raycluster_of_an_earlier_run(
    world: World, operator: Operator
) -> None:
    await training(operator)
    deleted = format_time(world.now)
    hold(world, *CLUSTER)
    world.delete_run()
    world.apply_run()
    await follow(operator, 120)
    message = (
        f"waiting until RayCluster {NAME} of an earlier run is deleted (deleted at {deleted}; "
        "its finalizers keep it: example.com/slow)"
    )
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.reason, found.message) == ("WaitingForPreviousRun", message)
    assert condition(world, ConditionType.PROGRESSING).status == "True"
    await follow(operator, 300)
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.reason, found.message) == ("DeletionStuck", message)
    summary = condition(world, ConditionType.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", "DeletionStuck")
    await follow(operator, 3600)
    assert happened(world).count("DeletionStuck") == 1
    del world.objects[CLUSTER]
    world.collect_garbage()
    await follow(operator, 40)
    assert world.status.phase is Phase.STARTING


async def test_an_earlier_raycluster_that_no_one_deletes_needs_help_after_some_minutes(
    world: World, operator: Operator
) -> None:
    """As while Kubernetes' garbage collector is down."""
    await training(operator)
    world.delete_run()
    world.apply_run()
    await follow(operator, 250)
    assert provisioned(world) == ("False", "WaitingForPreviousRun")
    await follow(operator, 600)
    assert provisioned(world) == ("False", "DeletionStuck")
    assert happened(world).count("DeletionStuck") == 1


async def test_a_suspended_run_says_which_finalizer_holds_its_raycluster(
    world: World, operator: Operator
) -> None:
    await training(operator)
    hold(world, *CLUSTER)
    world.change_run(("suspend", True))
    world.end_driver(Outcome.STOPPED)
    await follow(operator, 120)
    assert suspended(world).reason == "Suspending"
    await follow(operator, 300)
    assert (suspended(world).status, suspended(world).reason) == ("Unknown", "DeletionStuck")
    assert "its finalizers keep it: example.com/slow" in suspended(world).message


@pytest.mark.parametrize("ended", [True, False])
async def test_a_pod_that_a_finalizer_holds_is_named(
    world: World, operator: Operator, ended: bool
) -> None:
    await training(operator)
    (pod,) = world.pods(Role.ENV)
    hold(world, "Pod", pod["metadata"]["name"])
    world.lost[pod["metadata"]["uid"]] = False  # force does not remove it, either
    if ended:
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    world.delete_errors["Pod"] = KubeUnavailable("not this one") if ended else DENIED
    await follow(operator, 500)
    found = condition(world, ConditionType.ROLES_READY)
    assert (found.status, found.reason) == ("False", "DeletionStuck")
    name = pod["metadata"]["name"]
    assert found.message.startswith(f"Pod {name} is still there (deleted at ")
    assert found.message.endswith("its finalizers keep it: example.com/slow)")
    assert happened(world).count("DeletionStuck") == 1


def in_time(operator: Operator) -> Operator:
    """Let the world follow the clock of the event loop."""
    operator.world.now = START + timedelta(seconds=100 + asyncio.get_running_loop().time())
    return operator


def test_a_deletion_that_hangs_is_shown_within_10_s_and_succeeds_at_last(world: World) -> None:
    async def scenario() -> None:
        ended: list[tuple[str, str]] = []
        operator = Operator(world, slow_writes=SlowWrites(ended.append))
        await training(operator)
        world.delete_seconds["RayCluster"] = 30.0
        world.change_run(("suspend", True))
        await in_time(operator).reconcile()
        world.end_driver(Outcome.STOPPED)
        await in_time(operator).reconcile()
        await in_time(operator).reconcile()
        assert asyncio.get_running_loop().time() <= 6
        found = condition(world, ConditionType.CLUSTER_PROVISIONED)
        assert (found.status, found.reason) == ("False", "ApiserverUnavailable")
        assert f"has not answered the deletion of RayCluster {NAME}" in found.message
        for _ in range(5):
            await asyncio.sleep(4)
            await in_time(operator).reconcile()
        assert asyncio.get_running_loop().time() <= 26, "later looks do not wait"
        await asyncio.sleep(10)
        assert ended, "its end causes a look"
        await in_time(operator).settle(2)
        assert world.status.phase is Phase.SUSPENDED
        assert world.requests.count("delete RayCluster") == 1

    on_virtual_clock(scenario())


def test_a_webhook_that_denies_a_deletion_after_a_while_is_named(world: World) -> None:
    async def scenario() -> None:
        operator = Operator(world)
        await training(operator)
        world.delete_seconds["RayCluster"], world.delete_errors["RayCluster"] = 20.0, DENIED
        world.end_driver(Outcome.SUCCEEDED)
        for _ in range(10):
            await asyncio.sleep(3)
            await in_time(operator).reconcile()
        assert provisioned(world) == ("False", "Denied")

    on_virtual_clock(scenario())


def test_a_deletion_that_hangs_is_given_up_when_the_run_is_resumed(world: World) -> None:
    async def scenario() -> None:
        operator = Operator(world)
        await training(operator)
        world.delete_seconds["RayCluster"] = 30.0
        world.change_run(("suspend", True))
        await in_time(operator).reconcile()
        world.end_driver(Outcome.STOPPED)
        await in_time(operator).reconcile()
        world.change_run(("suspend", False))
        await in_time(operator).reconcile()
        await asyncio.sleep(60)
        assert CLUSTER in world.objects

    on_virtual_clock(scenario())
