"""Runs while KubeRay or their namespace is missing: they wait, say why, and go on by themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import Condition, ConditionType, Outcome, Phase, Role
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.errors import NamespaceGone, NotFound, NotServed, Refused
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest
from operator_world import NAME, Operator, World, condition, happened, training

TOO_OLD = (
    'RayCluster in version "v1" cannot be handled as a RayCluster: strict decoding error: '
    'unknown field "spec.authOptions"'
)


def provisioned(world: World) -> Condition:
    kind = ConditionType.CLUSTER_PROVISIONED.value
    return next(item for item in world.status.conditions if item.type == kind)


async def train(operator: Operator, step: int = 1) -> None:
    await operator.settle()
    operator.world.drive(step)
    await operator.settle(2)
    assert operator.world.status.phase is Phase.RUNNING


async def test_a_run_waits_for_kuberay_and_starts_when_it_is_installed(
    world: World, operator: Operator
) -> None:
    world.kuberay_missing = True
    await operator.settle(5)
    assert world.status.phase is Phase.PENDING
    assert provisioned(world).reason == "KubeRayMissing"
    assert "install KubeRay" in (world.status.message or "")
    assert happened(world) == ["KubeRayMissing"]
    assert world.status_writes == 1
    world.kuberay_missing = False
    await train(operator)
    assert world.status.message is None


async def test_kuberay_that_disappears_between_read_and_write_is_no_lost_run(
    world: World, operator: Operator
) -> None:
    world.create_errors["RayCluster"] = NotServed("create not allowed while terminating")
    await operator.settle(3)
    assert (world.status.phase, provisioned(world).reason) == (Phase.PENDING, "KubeRayMissing")
    assert happened(world) == ["KubeRayMissing"]
    writes = world.status_writes
    await operator.settle(3)
    assert world.status_writes == writes
    world.create_errors.clear()
    await train(operator)


async def test_training_goes_on_while_kuberay_is_missing_and_its_pods_live(
    world: World, operator: Operator
) -> None:
    await train(operator)
    world.kuberay_missing = True
    world.drive(2)
    await operator.settle(30)
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 2)
    assert provisioned(world).reason == "KubeRayMissing"
    world.kuberay_missing = False
    await operator.settle(3)
    assert provisioned(world).status == "True"
    assert [job.attempt for job in world.jobs] == [1]


async def test_a_run_whose_cluster_went_with_the_crd_resumes_when_the_crd_is_back(
    world: World, operator: Operator
) -> None:
    await train(operator)
    world.kuberay_missing = True
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(20)
    assert (world.status.phase, world.status.disruptions) == (Phase.RESTARTING, 1)
    assert "install KubeRay" in (world.status.message or "")
    world.kuberay_missing = False
    world.now += timedelta(seconds=20)
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_finished_runs_cluster_is_deleted_once_kuberay_is_back(
    world: World, operator: Operator
) -> None:
    await train(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(1)
    assert world.status.phase is Phase.SUCCEEDED
    world.kuberay_missing = True
    await operator.settle(3)
    assert ("RayCluster", NAME) in world.objects
    assert provisioned(world).reason != "ClusterDeleted"
    world.kuberay_missing = False
    await operator.settle(3)
    assert ("RayCluster", NAME) not in world.objects


@pytest.mark.parametrize(
    "refusal",
    [
        TOO_OLD,
        ".spec.authOptions: field not declared in schema",
        'RayCluster.ray.io "lake" is invalid: spec.authOptions.mode: Unsupported value: "token"',
        'strict decoding error: unknown field "spec.authOptions", unknown field '
        '"spec.headGroupSpec.template.spec.tolerations[0].kee"',
    ],
)
async def test_a_kuberay_that_is_too_old_makes_the_run_wait(
    world: World, operator: Operator, refusal: str
) -> None:
    world.create_errors["RayCluster"] = Refused(refusal)
    await operator.settle(4)
    assert (world.status.phase, provisioned(world).reason) == (Phase.PENDING, "KubeRayTooOld")
    assert "spec.authOptions" in provisioned(world).message
    assert "upgrade KubeRay" in (world.status.message or "")
    assert happened(world) == ["KubeRayTooOld"]
    world.create_errors.clear()
    await train(operator)


@pytest.mark.parametrize(
    "field",
    [
        "spec.headGroupSpec.template.spec.tolerations[0].kee",
        "spec.workerGroupSpecs[0].template.spec.containers[0].env[3].valuex",
        "spec.workerGroupSpecs[1].template.spec.volumes[4].nsf",
    ],
)
async def test_a_field_that_the_user_wrote_wrong_is_not_blamed_on_kuberay(
    world: World, operator: Operator, field: str
) -> None:
    world.create_errors["RayCluster"] = Refused(f'strict decoding error: unknown field "{field}"')
    await operator.settle(2)
    assert world.status.phase is Phase.FAILED


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "RayCluster"])
async def test_a_run_in_a_namespace_that_is_being_deleted_says_so(
    world: World, operator: Operator, kind: str
) -> None:
    world.create_errors[kind] = NamespaceGone('namespaces "team" not found')
    await operator.settle(4)
    assert (world.status.phase, provisioned(world).reason) == (Phase.PENDING, "NamespaceGone")
    assert happened(world) == ["NamespaceGone"]
    world.create_errors.clear()
    await train(operator)


async def test_a_404_on_create_does_not_mean_that_the_run_is_gone(
    world: World, operator: Operator
) -> None:
    world.create_errors["RayCluster"] = NotFound("what, it does not say")
    await operator.settle(2)
    assert (world.status.phase, provisioned(world).reason) == (
        Phase.PENDING,
        "ApiserverUnavailable",
    )
    assert provisioned(world).message.startswith("cannot create RayCluster")
    world.create_errors.clear()
    await train(operator)


async def test_an_event_that_cannot_be_posted_stops_nothing(
    world: World, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(*_: object) -> None:
        raise NamespaceGone("being terminated")

    monkeypatch.setattr(world, "post_event", denied)
    await train(operator)


def node_waits_for_a_secret(world: World) -> None:
    """As the kubelet: the env pod has a node, and no volume of it."""
    world.make_pods()
    for pod in world.pods():
        if pod["metadata"]["labels"]["agenticrun.dev/role"] != "env":
            continue
        creating: Manifest = {"waiting": {"reason": "ContainerCreating"}}
        pod["status"]["containerStatuses"][0] |= {"state": creating, "ready": False}
        pod["metadata"].setdefault("creationTimestamp", format_time(world.now))
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": pod["metadata"]["creationTimestamp"],
            },
            {"type": "PodReadyToStartContainers", "status": "False"},
            {"type": "Ready", "status": "False"},
        ]
        world.pod_warnings[pod["metadata"]["uid"]] = [
            {
                "reason": "FailedMount",
                "message": 'MountVolume.SetUp failed for volume "mine" : secret "keys" not found',
                "lastTimestamp": "2026-01-01T00:00:02Z",
            }
        ]


async def test_a_pod_whose_node_waits_for_a_secret_says_so_within_a_minute(
    world: World, operator: Operator
) -> None:
    for _ in range(6):
        node_waits_for_a_secret(world)
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("False", "MountFailed")
    assert ready.message.startswith("env: pod ")
    assert ready.message.endswith(
        'cannot mount its volumes: MountVolume.SetUp failed for volume "mine" : '
        'secret "keys" not found'
    )
    assert happened(world).count("MountFailed") == 1
    world.pod_warnings.clear()
    for pod in world.pods():
        pod["status"]["containerStatuses"][0]["state"] = {}
    await train(operator)


async def test_pods_that_start_in_time_or_whose_events_are_denied_cost_nothing(
    world: World, operator: Operator
) -> None:
    node_waits_for_a_secret(world)
    await operator.reconcile()
    node_waits_for_a_secret(world)
    await operator.reconcile()
    assert "list events" not in world.requests
    world.events_denied = True
    world.now += timedelta(seconds=60)
    node_waits_for_a_secret(world)
    await operator.reconcile()
    assert "list events" in world.requests
    assert condition(world, ConditionType.ROLES_READY).reason == "PodsPending"


async def test_events_that_are_denied_are_asked_for_again_after_a_while_only(
    world: World, operator: Operator
) -> None:
    world.events_denied = True
    node_waits_for_a_secret(world)
    await operator.reconcile()
    world.now += timedelta(seconds=60)

    async def look_once_a_second(seconds: int) -> None:
        for _ in range(seconds):
            node_waits_for_a_secret(world)
            await operator.reconcile()
            world.now += timedelta(seconds=1)

    await look_once_a_second(30)
    assert world.requests.count("list events") == 1
    await look_once_a_second(60)
    assert world.requests.count("list events") == 3
    world.events_denied = False
    await look_once_a_second(31)
    assert condition(world, ConditionType.ROLES_READY).reason == "MountFailed"


async def test_a_suspended_run_has_no_obstacle(world: World, operator: Operator) -> None:
    world.kuberay_missing = True
    await operator.settle(2)
    assert world.status.obstacle is not None
    world.change_run(("suspend", True))
    await operator.settle(2)
    assert world.status.phase is Phase.SUSPENDED
    assert world.status.obstacle is None


async def test_pods_that_kuberay_does_not_create_need_a_user(
    world: World, operator: Operator
) -> None:
    """KubeRay's operator is stopped, or watches other namespaces."""
    await look_without_kuberay(operator, 50)
    waits = condition(world, ConditionType.ROLES_READY)
    assert (waits.status, waits.reason) == ("False", "PodsPending")
    await look_without_kuberay(operator, 20)
    waits = condition(world, ConditionType.ROLES_READY)
    assert (waits.status, waits.reason) == ("False", "PodsNotCreated")
    assert "KubeRay has created 0 of 4 pods" in waits.message
    assert "namespace team" in waits.message
    assert world.status.message == waits.message
    summary = condition(world, ConditionType.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", "PodsNotCreated")
    assert happened(world).count("PodsNotCreated") == 1
    await operator.settle()
    assert condition(world, ConditionType.PROGRESSING).status == "True"
    assert len(world.jobs) == 1


async def test_a_pod_that_kuberay_does_not_replace_is_named_while_the_run_trains(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.now += timedelta(minutes=5)
    world.delete_pod(Role.ENV)
    await look_without_kuberay(operator, 30)
    assert condition(world, ConditionType.ROLES_READY).reason == "PodsPending"
    await look_without_kuberay(operator, 60)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.reason, "3 of 4 pods" in ready.message) == ("PodsNotCreated", True)


async def test_what_keeps_kuberay_from_creating_pods_is_said_instead(
    world: World, operator: Operator
) -> None:
    world.pods_denied = "exceeded quota"
    for _ in range(20):
        await operator.settle(1)
        world.now += timedelta(seconds=9)
    assert condition(world, ConditionType.ROLES_READY).reason == "PodsDenied"


async def look_without_kuberay(operator: Operator, seconds: int) -> None:
    for _ in range(seconds // 10):
        await operator.reconcile()
        operator.world.now += timedelta(seconds=10)


BUDGET = ("PodDisruptionBudget", NAME)


async def with_a_budget(*changes: tuple[str, Any]) -> Operator:
    world = World()
    world.apply_run(("spec.disruptionBudget", "Block"), *changes)
    operator = Operator(world)
    await training(operator)
    assert BUDGET in world.objects
    return operator


async def look_for(operator: Operator, seconds: int, step: int) -> None:
    """Look at a run that trains once in a second."""
    for _ in range(seconds):
        operator.world.drive(step)
        await operator.reconcile(changed=False)
        operator.world.now += timedelta(seconds=1)


async def test_a_budget_that_was_removed_comes_back_while_the_run_trains() -> None:
    operator = await with_a_budget()
    world = operator.world
    await look_for(operator, 30, 1)
    world.requests.clear()
    await look_for(operator, 60, 1)
    assert world.requests.count("get PodDisruptionBudget") <= 4, "not with each look"
    del world.objects[BUDGET]
    await look_for(operator, 30, 1)
    assert BUDGET in world.objects
    assert world.status.phase is Phase.RUNNING
    assert len(world.jobs) == 1


@pytest.mark.parametrize("cleanup", ["Keep", "Delete"])
async def test_the_budget_goes_when_the_run_ends(cleanup: str) -> None:
    """Pods that are kept to look at must not hold up a drain."""
    operator = await with_a_budget(("spec.cleanup", {"onFailure": cleanup}))
    world = operator.world
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(4)
    assert world.status.phase is Phase.FAILED
    assert BUDGET not in world.objects
    assert bool(world.pods()) is (cleanup == "Keep")


async def test_the_budget_stays_with_pods_that_are_the_last_way_to_the_checkpoints() -> None:
    operator = await with_a_budget(("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}))
    world = operator.world
    saved = CheckpointStatus(step=1, uri="/checkpoints/1", time=format_time(world.now))
    world.drive(1, checkpoint=saved)
    await operator.settle(2)
    world.delete_claim()
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(4)
    assert world.status.phase is Phase.FAILED
    assert world.pods()
    assert BUDGET in world.objects
