"""The operator saves requests with what its watches saw, and acts only on what it has read."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import Phase, Role
from agenticrun_api.names import LABEL_ROLE, LABEL_RUN
from agenticrun_operator.watch_cache import WatchedObjects, cluster_summary, workload_summary
from operator_world import NAME, NAMESPACE, Operator, World

HEAD = ["get job", "get progress"]


async def train(operator: Operator) -> None:
    await operator.settle()
    operator.world.drive(1)
    await operator.settle(2)
    operator.world.now += timedelta(seconds=30)
    await operator.reconcile()
    assert operator.world.status.phase is Phase.RUNNING
    operator.world.requests.clear()


def pod(name: str, run: str = NAME) -> dict[str, Any]:
    owner = {"kind": "RayCluster", "name": run, "uid": f"uid-of-{run}", "controller": True}
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": f"uid-of-{name}",
        "labels": {LABEL_RUN: run, LABEL_ROLE: Role.ENV.value},
        "ownerReferences": [owner],
        "managedFields": ["many"],
        "resourceVersion": "7",
    }
    containers = [{"name": "ray", "image": "worker:1", "env": ["much"]}]
    return {
        "metadata": metadata,
        "spec": {"containers": containers, "volumes": [], "nodeName": "node-1"},
        "status": {"podIP": "10.0.0.1"},
    }


@pytest.mark.parametrize("changed", [True, False], ids=["after an event", "by time"])
async def test_an_idle_look_asks_the_apiserver_for_nothing(
    world: World, operator: Operator, changed: bool
) -> None:
    await train(operator)
    world.now += timedelta(seconds=60)
    await operator.reconcile(changed)
    assert world.requests == HEAD


async def test_without_watches_everything_is_read(world: World, operator: Operator) -> None:
    await train(operator)
    world.watches_hang = True
    for cache in (world.watched.runs, world.watched.clusters, world.watched.pods):
        cache.lost(None)
    await operator.reconcile()
    assert world.requests == ["get AgenticRun", "list pods", "get RayCluster", *HEAD]


async def test_a_watch_that_is_behind_decides_nothing(world: World, operator: Operator) -> None:
    """The pods in the cache are gone: the attempt is lost, but the next head must be a real one."""
    await train(operator)
    world.watches_hang = True
    world.delete_pod(Role.DRIVER)
    await operator.reconcile()
    assert world.status.phase is Phase.RUNNING, "the old head does not answer; nothing is decided"
    world.watches_hang = False
    for _ in range(3):
        world.make_pods()
        world.now += timedelta(seconds=30)
        await operator.reconcile()
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.jobs[-1].incarnation == world.incarnation()


async def test_a_head_that_only_the_watch_still_has_gets_no_attempt(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods()
    world.let_watches_catch_up()
    world.watches_hang = True
    world.restart_head_container()
    world.requests.clear()
    await operator.reconcile()
    (job,) = world.jobs
    assert job.incarnation == world.incarnation(), "its incarnation was read, not remembered"
    assert world.status.job is not None
    assert world.status.job.incarnation == world.incarnation()


async def test_children_that_are_in_order_are_not_read_at_each_look_while_pods_start(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods(ready=False)
    await operator.reconcile()
    await operator.reconcile()
    world.requests.clear()
    await operator.reconcile()
    assert world.requests == []
    world.now += timedelta(seconds=21)
    await operator.reconcile()
    assert "get ConfigMap" in world.requests


async def test_a_run_without_an_image_for_its_engine_is_not_read_about(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["actorInfer"]["strategy"]["name"] = "vllm"
    await operator.reconcile()
    assert world.status.phase is Phase.PENDING
    world.requests.clear()
    await operator.reconcile()
    assert world.requests == []


def test_a_raycluster_is_kept_without_what_nobody_reads(world: World) -> None:
    template = {"spec": {"containers": [{"name": "ray", "image": "worker:1", "env": ["much"]}]}}
    summary = {"template": {"spec": {"containers": [{"name": "ray", "image": "worker:1"}]}}}
    cluster = {
        "metadata": {"name": NAME, "labels": {}, "managedFields": ["many"], "annotations": {}},
        "spec": {
            "suspend": False,
            "headGroupSpec": {"rayStartParams": {}, "template": template},
            "workerGroupSpecs": [{"groupName": "env", "replicas": 2, "template": template}],
        },
        "status": {"conditions": []},
    }
    assert cluster_summary(cluster) == {
        "metadata": {"name": NAME, "labels": {}},
        "spec": {
            "suspend": False,
            "headGroupSpec": {"rayStartParams": {}, **summary},
            "workerGroupSpecs": [{"groupName": "env", "replicas": 2, **summary}],
        },
        "status": {"conditions": []},
    }


def test_the_objects_of_a_run_are_the_same_until_one_changes() -> None:
    watched = WatchedObjects(lambda _: None, lambda _: None)
    watched.pods.listed(None, [pod("a"), pod("b"), pod("c", run="river")])
    before = watched.pods.of_run((NAMESPACE, NAME))
    changed = pod("c", run="river")
    changed["metadata"]["resourceVersion"] = "8"
    watched.pods.put(changed)
    assert watched.pods.of_run((NAMESPACE, NAME)) is before
    watched.pods.deleted(pod("a"))
    after = watched.pods.of_run((NAMESPACE, NAME))
    assert before is not None
    assert after == before[1:]


def test_a_pod_that_moves_to_another_run_reports_both() -> None:
    changed: list[tuple[str, str]] = []
    watched = WatchedObjects(changed.append, changed.append)
    watched.pods.listed(None, [pod("a")])
    moved = copy.deepcopy(pod("a", run="river"))
    watched.pods.put(moved)
    assert changed == [(NAMESPACE, NAME), (NAMESPACE, NAME), (NAMESPACE, "river")]
    assert watched.pods.of_run((NAMESPACE, NAME)) == ()
    assert len(watched.pods.of_run((NAMESPACE, "river")) or ()) == 1


def test_of_a_workload_the_templates_are_not_kept() -> None:
    pod_set = {"name": "env", "count": 2, "template": {"spec": {"containers": ["much"]}}}
    workload = {
        "metadata": {"name": "agenticrun-lake", "managedFields": ["many"]},
        "spec": {"queueName": "research", "podSets": [pod_set]},
        "status": {"conditions": []},
    }
    assert workload_summary(workload) == {
        "metadata": {"name": "agenticrun-lake"},
        "spec": {"queueName": "research", "podSets": [{"name": "env", "count": 2}]},
        "status": {"conditions": []},
    }
