"""The tokens of a run: derived, never read, and created again where they are missing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from agenticrun_api import Condition, ConditionType, Outcome, Phase, Role
from agenticrun_operator.errors import Denied
from agenticrun_operator.resources import OperatorKey
from operator_world import NAME, Operator, World, happened, training

SECRETS = ("create Secret", "get Secret")


def told(world: World) -> Condition:
    kind = ConditionType.TRAINING.value
    return next(item for item in world.status.conditions if item.type == kind)


def requests(world: World) -> list[str]:
    return [request for request in world.requests if request in SECRETS]


def with_another_key(operator: Operator) -> Operator:
    """Return an operator that replaces this one and has lost its key."""
    operator.key = OperatorKey("another key, also of 32 characters")
    operator.upgrade(operator.images)
    return operator


async def test_a_whole_run_creates_one_secret_and_reads_none(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    assert world.status.phase is Phase.SUCCEEDED
    assert requests(world) == ["create Secret"]


async def test_an_operator_that_starts_anew_talks_to_the_head_without_any_request_for_tokens(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.requests.clear()
    again = Operator(world)
    world.drive(2)
    await again.settle(3)
    assert world.status.step == 2
    assert requests(world) == []


async def test_the_status_goes_on_after_the_secret_is_deleted(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_secret()
    world.drive(2)
    await operator.settle(3)
    assert (world.status.step, told(world).reason) == (2, "DriverRunning")


@pytest.mark.parametrize("role", [Role.DRIVER, Role.TRAINER])
async def test_pods_that_miss_the_secret_get_it_again(
    world: World, operator: Operator, role: Role
) -> None:
    await training(operator)
    world.delete_secret()
    world.now += timedelta(seconds=60)
    world.delete_pod(role)
    await operator.settle(60)
    assert world.secret in world.objects
    assert all(pod["status"]["conditions"][0]["status"] == "True" for pod in world.pods())
    world.drive(2)
    await operator.settle(3)
    assert world.status.step == 2


async def test_a_rebuilt_cluster_gets_a_deleted_secret_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_secret()
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(60)
    assert world.secret in world.objects
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_pods_that_stay_unready_do_not_cost_a_request_each_look(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    for _ in range(300):
        world.make_pods(ready=False)
        await operator.reconcile()
        world.now += timedelta(seconds=1)
    assert 1 <= requests(world).count("create Secret") <= 11


async def test_a_pod_that_cannot_be_scheduled_needs_no_secret(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    for _ in range(100):
        world.make_pods(ready=False)
        for pod in world.pods():
            pod["status"]["conditions"].append(
                {"type": "PodScheduled", "status": "False", "message": "no GPU"}
            )
        await operator.reconcile()
        world.now += timedelta(seconds=1)
    assert requests(world) == ["create Secret"]


async def test_a_quota_on_secrets_that_is_full_does_not_hide_a_secret_that_exists(
    world: World, operator: Operator
) -> None:
    """A quota denies the creation of an object that exists, too."""
    await training(operator)
    world.create_errors["Secret"] = Denied("exceeded quota: secrets")
    world.now += timedelta(seconds=60)
    world.delete_pod(Role.TRAINER)
    world.make_pods(ready=False)
    await operator.reconcile()
    assert requests(world)[-1] == "create Secret"
    assert "Denied" not in happened(world)
    await operator.settle()
    assert world.status.phase is Phase.RUNNING


async def test_the_next_run_of_the_same_name_gets_a_secret_of_its_own(
    world: World, operator: Operator
) -> None:
    await training(operator)
    first = world.secret
    world.delete_run()
    world.apply_run()
    await operator.settle(3)
    world.collect_garbage()
    await operator.settle()
    assert world.secret != first
    assert first not in world.objects
    assert world.live_jobs()


async def test_an_operator_with_another_key_says_so_and_touches_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator)
    other = with_another_key(operator)
    before = set(world.objects)
    world.now += timedelta(hours=3)
    world.delete_pod(Role.TRAINER)
    world.make_pods(ready=False)
    await other.settle(3)
    world.now += timedelta(hours=3)
    await other.settle(3)
    assert world.status.phase is Phase.RUNNING
    assert (told(world).status, told(world).reason) == ("Unknown", "TokensUnknown")
    assert "give it that key again. If that is not possible" in told(world).message
    assert happened(world).count("TokensUnknown") == 1
    assert before - set(world.objects) == {key for key in before if key[0] == "Pod"} - set(
        world.objects
    )
    assert requests(world) == ["create Secret"]


async def test_a_run_goes_on_when_the_operator_has_its_key_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    await with_another_key(operator).settle(3)
    world.drive(2)
    await Operator(world).settle(3)
    assert (world.status.step, told(world).reason) == (2, "DriverRunning")
    assert world.status.restarts == 0


async def test_a_rebuilt_cluster_gets_tokens_of_the_new_key(
    world: World, operator: Operator
) -> None:
    await training(operator)
    other = with_another_key(operator)
    await other.settle(3)
    world.delete_cluster()
    world.collect_garbage()
    await other.settle(60)
    world.drive(2)
    await other.settle(3)
    assert world.status.step == 2
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_no_attempt_begins_on_a_head_with_tokens_of_another_key(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods()
    await with_another_key(operator).settle(3)
    assert world.jobs == []
    assert (world.status.job, told(world).reason) == (None, "TokensUnknown")


async def test_a_head_that_refuses_our_token_is_named_and_not_rebuilt(
    world: World, operator: Operator
) -> None:
    """Someone has created the Secret before the operator, with other tokens."""
    await operator.reconcile()
    world.objects[world.secret]["data"] = {"auth_token": "dGhlaXJz", "token": "dGhlaXJz"}
    await operator.settle(3)
    world.now += timedelta(hours=1)
    await operator.settle(3)
    assert (told(world).status, told(world).reason) == ("Unknown", "TokensRefused")
    assert f"delete Secret {world.secret[1]} and RayCluster {NAME}" in told(world).message
    assert not world.status.phase.finished
    del world.objects[world.secret]
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(60)
    assert world.live_jobs()


async def test_a_cluster_with_the_secret_of_someone_else_is_named_and_not_rebuilt(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.objects["RayCluster", NAME]["spec"]["authOptions"]["secretName"] = "theirs"
    before = set(world.objects)
    for _ in range(5):
        await operator.settle(3)
        world.now += timedelta(minutes=30)
    assert (told(world).status, told(world).reason) == ("Unknown", "TokensUnknown")
    assert "Secret theirs" in told(world).message
    assert set(world.objects) == before
