"""Other replicas of inference or env take effect while the run trains, if its driver can."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import ConditionType, Phase, PoolStatus, Role
from agenticrun_api.load import parse_served
from agenticrun_api.status import CheckpointStatus, RoleStatus
from agenticrun_api.version import __version__
from agenticrun_operator.errors import (
    ClusterError,
    Denied,
    KubeUnavailable,
    Refused,
    RightMissing,
    TooLarge,
    WebhookUnavailable,
)
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest, replicas_in
from operator_world import NAME, Operator, World, condition, happened, training


def pools(env: int = 1, inference: int = 1, **env_fields: Any) -> dict[Role, PoolStatus]:
    """Return what a driver reports that follows these numbers of pods."""
    return {
        Role.INFERENCE: PoolStatus(replicas=inference, serving=inference),
        Role.ENV: PoolStatus(replicas=env, **{"serving": env, **env_fields}),
    }


def report(operator: Operator, **fields: Any) -> None:
    world = operator.world
    saved = CheckpointStatus(step=1, uri="/checkpoints/1", time=format_time(world.now))
    world.drive(1, checkpoint=saved, version=__version__, **fields)


async def a_run_that_trains(**fields: Any) -> Operator:
    world = World()
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.roles", {"env": {"replicas": 2}}),
    )
    operator = Operator(world)
    await training(operator)
    report(operator, observed_generation=1, **({"pools": pools(2)} | fields))
    await operator.settle(2)
    return operator


def want(world: World, env: int) -> None:
    world.change_run(("roles", {"env": {"replicas": env}}))


def cluster_of(world: World) -> Manifest:
    return world.objects["RayCluster", NAME]


def group(world: World, role: Role) -> Manifest:
    groups: list[Manifest] = cluster_of(world)["spec"]["workerGroupSpecs"]
    return next(each for each in groups if each["groupName"] == role.value)


def env_status(world: World) -> RoleStatus:
    return next(role for role in world.status.roles if role.name == "env")


def is_undisturbed(world: World) -> bool:
    """True if it is the same attempt that goes on, and nobody has asked it to stop."""
    return (len(world.jobs), len(world.live_jobs()), world.stop_requests, world.status.phase) == (
        (1, 1, 0, Phase.RUNNING)
    )


async def test_a_run_gets_more_pods_while_it_trains() -> None:
    operator = await a_run_that_trains()
    world = operator.world
    before = cluster_of(world)["metadata"]["uid"]
    want(world, 3)
    await operator.settle(2)
    assert len(world.pods(Role.ENV)) == 3
    numbers = [group(world, Role.ENV)[key] for key in ("replicas", "minReplicas", "maxReplicas")]
    assert numbers == [3, 3, 3]
    assert group(world, Role.INFERENCE)["replicas"] == 1
    assert [config.replicas for config in world.configs.values()] == [
        {Role.INFERENCE: 1, Role.ENV: 3}
    ]
    report(operator, pools=pools(3, serving=2, joining=1))
    await operator.settle(2)
    assert (env_status(world).desired, env_status(world).joining) == (3, 1)
    report(operator, pools=pools(3))
    await operator.settle(2)
    assert (env_status(world).ready, env_status(world).joining) == (3, 0)
    assert happened(world).count("Scaled") == 1
    assert cluster_of(world)["metadata"]["uid"] == before
    assert is_undisturbed(world)
    assert world.status.env_replicas == 3
    selected = dict(pair.split("=") for pair in (world.status.env_selector or "").split(","))
    assert all(
        selected.items() <= pod["metadata"]["labels"].items() for pod in world.pods(Role.ENV)
    )
    assert not any(
        selected.items() <= pod["metadata"]["labels"].items() for pod in world.pods(Role.INFERENCE)
    )


async def test_pods_go_only_when_the_driver_has_emptied_them() -> None:
    operator = await a_run_that_trains()
    world = operator.world
    emptied, kept = [pod["metadata"]["name"] for pod in world.pods(Role.ENV)]
    want(world, 1)
    await operator.settle(3)
    assert len(world.pods(Role.ENV)) == 2, "the driver has not answered yet"
    report(operator, pools=pools(1, serving=2, leaving=1))
    await operator.settle(3)
    assert len(world.pods(Role.ENV)) == 2, "its episodes go on"
    assert env_status(world).leaving == 1
    report(operator, pools=pools(1, vacant=["of-long-ago", emptied]))
    await operator.settle(2)
    assert [pod["metadata"]["name"] for pod in world.pods(Role.ENV)] == [kept]
    assert group(world, Role.ENV)["scaleStrategy"] == {"workersToDelete": [emptied]}
    (told,) = [event.message for event in world.events if event.reason == "Scaled"]
    assert told == (
        "roles.env.replicas changed from 2 to 1, and the run continues; these pods are removed: "
        f"{emptied}"
    )
    assert is_undisturbed(world)


async def test_without_an_emptied_pod_one_that_is_not_ready_goes_first() -> None:
    """The driver has never used the newest: it was wanted for a moment only."""
    operator = await a_run_that_trains()
    world = operator.world
    used = {pod["metadata"]["name"] for pod in world.pods(Role.ENV)}
    want(world, 3)
    await operator.reconcile()
    world.make_pods(ready=False)
    want(world, 2)
    await operator.settle(2)
    assert {pod["metadata"]["name"] for pod in world.pods(Role.ENV)} == used


@pytest.mark.parametrize("role", ["env", "inference"])
async def test_a_driver_that_cannot_scale_a_role_is_stopped_and_says_why(role: str) -> None:
    fixed = PoolStatus(replicas=1, serving=1, fixed="engines form one group")
    operator = await a_run_that_trains(pools=pools(2) | {Role(role): fixed})
    world = operator.world
    world.change_run(("roles", {"env": {"replicas": 2}, role: {"replicas": 3}}))
    await operator.settle(3)
    told = condition(world, ConditionType.SUSPENDED)
    assert (told.status, told.reason, world.stop_requests) == ("Unknown", "Rescaling", 1)
    (event,) = [event.message for event in world.events if event.reason == "Rescaling"]
    assert "(engines form one group)" in event
    assert "Scaled" not in happened(world)


async def test_the_driver_of_an_older_image_is_stopped() -> None:
    operator = await a_run_that_trains(pools=None)
    world = operator.world
    want(world, 3)
    await operator.settle(3)
    assert condition(world, ConditionType.SUSPENDED).reason == "Rescaling"
    (event,) = [event.message for event in world.events if event.reason == "Rescaling"]
    assert "its driver cannot change them while it runs" in event


async def test_nothing_is_decided_while_the_driver_does_not_answer() -> None:
    operator = await a_run_that_trains()
    world = operator.world
    world.reporter_down = True
    want(world, 3)
    await operator.settle(5)
    assert (len(world.pods(Role.ENV)), world.stop_requests) == (2, 0)
    world.reporter_down = False
    await operator.settle(3)
    assert len(world.pods(Role.ENV)) == 3
    assert is_undisturbed(world)


async def test_an_operator_that_may_not_change_rayclusters_stops_the_driver() -> None:
    """As with the chart of an older release."""
    operator = await a_run_that_trains()
    world = operator.world
    world.put_error = RightMissing("rayclusters.ray.io is forbidden: cannot update")
    want(world, 3)
    await operator.settle(4)
    told = condition(world, ConditionType.SUSPENDED)
    assert (told.status, told.reason, world.stop_requests) == ("Unknown", "Rescaling", 1)
    (event,) = [event.message for event in world.events if event.reason == "Rescaling"]
    assert "cannot update" in event


async def pass_time(operator: Operator, seconds: int, step: int) -> None:
    """Let the operator look at a run that trains once in a second."""
    for _ in range(seconds):
        operator.world.drive(step, version=__version__, observed_generation=1, pools=pools(2))
        await operator.reconcile()
        operator.world.now += timedelta(seconds=1)


async def test_a_denied_change_of_a_raycluster_is_tried_again_after_a_while_only() -> None:
    world = World()
    world.apply_run(("spec.checkpoint", {"none": True}), ("spec.roles", {"env": {"replicas": 2}}))
    operator = Operator(world)
    await training(operator)
    await pass_time(operator, 2, 1)
    world.put_error = Denied("rayclusters.ray.io is forbidden: at most 2 replicas")

    def tries() -> int:
        return world.requests.count("put RayCluster")

    want(world, 3)
    await pass_time(operator, 30, 1)
    told = condition(world, ConditionType.SUSPENDED)
    assert (tries(), told.reason) == (1, "NotRescaled")
    await pass_time(operator, 45, 1)
    assert tries() == 3
    assert happened(world).count("NotRescaled") == 1
    want(world, 4)
    await pass_time(operator, 2, 1)
    assert tries() == 4, "another number is another question"
    world.put_error = None
    await pass_time(operator, 31, 1)
    assert (tries(), group(world, Role.ENV)["replicas"]) == (5, 4)
    assert condition(world, ConditionType.SUSPENDED).reason == "Resumed"
    assert is_undisturbed(world)


@pytest.mark.parametrize(
    "error",
    [
        Denied("exceeded quota: team"),
        Refused("spec: Invalid value"),
        TooLarge("etcdserver: request is too large"),
        WebhookUnavailable('failed calling webhook "mraycluster.kb.io": EOF'),
        KubeUnavailable("status 504: Timeout"),
    ],
)
async def test_a_run_keeps_its_pods_if_new_ones_would_be_denied_as_well(
    error: ClusterError,
) -> None:
    operator = await a_run_that_trains()
    world = operator.world
    world.put_error = error
    want(world, 3)
    await operator.settle(4)
    told = condition(world, ConditionType.SUSPENDED)
    assert (told.status, told.reason, world.stop_requests) == ("False", "NotRescaled", 0)
    assert told.message.endswith(f"but the run keeps its pods: {error}")
    assert len(world.pods(Role.ENV)) == 2
    assert is_undisturbed(world)


async def test_a_refused_change_still_restarts_the_driver_once_it_has_saved_something() -> None:
    world = World()
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.roles", {"env": {"replicas": 2}}),
    )
    operator = Operator(world)
    await training(operator, step=0)
    world.put_error = RightMissing("rayclusters.ray.io is forbidden: cannot update")
    want(world, 3)
    await pass_time(operator, 3, 0)
    told = condition(world, ConditionType.SUSPENDED)
    assert (told.reason, "no step yet" in told.message) == ("NotRescaled", True)
    await pass_time(operator, 3, 1)
    assert condition(world, ConditionType.SUSPENDED).reason == "Rescaling"
    assert world.requests.count("put RayCluster") == 1


@pytest.mark.parametrize("when", ["put RayCluster", "put", "write status", "configure"])
async def test_a_crash_of_the_operator_leaves_no_half_scaled_run(when: str) -> None:
    operator = await a_run_that_trains()
    world = operator.world
    want(world, 3)
    world.interruption = (when, world.crash)
    await operator.settle(4)
    assert operator.crashes == 1
    assert len(world.pods(Role.ENV)) == 3
    assert replicas_in(parse_served(world.run), cluster_of(world)) == {"inference": 1, "env": 3}
    assert [config.replicas[Role.ENV] for config in world.configs.values()] == [3]
    assert is_undisturbed(world)


async def test_a_driver_that_restarts_meanwhile_starts_with_the_wanted_numbers() -> None:
    operator = await a_run_that_trains()
    world = operator.world
    want(world, 3)
    await operator.settle(2)
    world.end_driver(None)
    world.now += timedelta(seconds=60)
    await operator.settle(6)
    world.now += timedelta(seconds=600)
    await operator.settle(4)
    assert [job.replicas for job in world.jobs] == [{}, {"inference": 1, "env": 3}]
    assert len(world.pods(Role.ENV)) == 3
