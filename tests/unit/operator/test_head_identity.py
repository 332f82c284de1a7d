"""The head of a run is the pod that its RayCluster names, whatever other pods claim."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta

import pytest

from agenticrun_api import Phase, Role
from agenticrun_api.load import parse_served
from agenticrun_operator.observed import Observed, Pod
from agenticrun_operator.observing import Observer
from agenticrun_operator.resources import Manifest
from agenticrun_operator.watch_cache import WatchedObjects
from operator_world import KEY, NAME, Operator, World, training


def forged_head(world: World, **labels: str) -> Manifest:
    """Return a pod that names the RayCluster as its owner. A sorted list has it first."""
    real = world.pods(Role.DRIVER)[0]
    forged = copy.deepcopy(real)
    forged["metadata"] |= {"name": "aaa-evil", "uid": "evil", "resourceVersion": "1"}
    forged["metadata"]["labels"] = {
        "agenticrun.dev/run": NAME,
        "agenticrun.dev/role": "driver",
        **labels,
    }
    forged["status"]["podIP"] = "10.66.6.6"
    return forged


FULL = {"ray.io/node-type": "head", "ray.io/cluster": NAME}
"""Labels of a pod that KubeRay, too, takes for a head."""


async def seen(world: World, pods: Sequence[Manifest], known: bool = True) -> tuple[Observed, str]:
    """Return what the operator makes of these pods, and the uid of the run."""
    run = parse_served(world.run)
    others = {key: item for key, item in world.objects.items() if key[0] != "Pod"}
    apiserver = World(
        objects={**{("Pod", pod["metadata"]["name"]): pod for pod in pods}, **others},
        kuberay_missing=not known,
    )
    observer = Observer(apiserver, world, apiserver.watched, KEY, lambda: world.now)
    objects = await observer.read_objects(run, fresh=True)
    return Observed(objects.children, objects.pods), run.metadata.uid


async def head_of(world: World, pods: Sequence[Manifest], known: bool = True) -> str | None:
    observed, uid = await seen(world, pods, known)
    head = observed.head(uid)
    return head.name if head else None


@pytest.fixture
async def world() -> World:
    world = World()
    world.apply_run()
    await training(Operator(world))
    return world


@pytest.mark.parametrize("labels", [{}, FULL], ids=["owner-alone", "labels-of-KubeRay"])
async def test_a_pod_that_forges_its_owner_is_not_the_head(
    world: World, labels: dict[str, str]
) -> None:
    (real,) = world.pods(Role.DRIVER)
    forged = forged_head(world, **labels)
    assert await head_of(world, [forged, real]) == real["metadata"]["name"]
    observed, _ = await seen(world, [forged, real])
    assert [pod.name for pod in observed.pods] == [real["metadata"]["name"]], "it does not count"


async def test_the_only_claimant_is_the_head_until_the_ray_cluster_names_one(world: World) -> None:
    (real,) = world.pods(Role.DRIVER)
    world.objects["RayCluster", NAME]["status"] = {}
    assert await head_of(world, [real]) == real["metadata"]["name"]
    assert await head_of(world, [forged_head(world), real]) == real["metadata"]["name"]


async def test_of_two_claimants_none_is_the_head_while_none_is_named(world: World) -> None:
    (real,) = world.pods(Role.DRIVER)
    world.objects["RayCluster", NAME]["status"] = {"head": {"podName": ""}}
    observed, uid = await seen(world, [forged_head(world, **FULL), real])
    assert observed.head(uid) is None
    assert not any(pod.ready for pod in observed.pods)
    told = [pod.problem.message for pod in observed.pods if pod.problem]
    assert told[0] == (
        f"claims to be the head, as {real['metadata']['name']} does: delete the one that is not"
    )


async def test_a_new_head_counts_once_the_old_one_is_being_deleted(world: World) -> None:
    (real,) = world.pods(Role.DRIVER)
    new = forged_head(world, **FULL)
    world.objects["RayCluster", NAME]["status"] = {}
    real["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    assert await head_of(world, [real, new]) == "aaa-evil"
    world.name_the_head()
    observed, uid = await seen(world, [real, new])
    head = observed.head(uid)
    assert head is not None
    assert (head.name, head.deleting) == (real["metadata"]["name"], True)


async def test_an_old_head_that_is_being_deleted_still_counts_as_a_pod(world: World) -> None:
    """Its driver may write checkpoints until it has ended."""
    (real,) = world.pods(Role.DRIVER)
    new = forged_head(world, **FULL)
    real["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    world.objects["RayCluster", NAME]["status"]["head"] = {"podName": "aaa-evil"}
    observed, _ = await seen(world, [real, new])
    assert sorted(pod.name for pod in observed.pods) == ["aaa-evil", real["metadata"]["name"]]


async def test_no_other_pod_takes_the_place_of_the_named_head(world: World) -> None:
    assert await head_of(world, [forged_head(world, **FULL)]) is None


async def test_without_the_ray_cluster_the_head_is_the_pod_of_the_attempt(world: World) -> None:
    """KubeRay's CRD is missing: nothing names a head."""
    (real,) = world.pods(Role.DRIVER)
    forged = forged_head(world, **FULL)
    assert await head_of(world, [forged, real], known=False) == real["metadata"]["name"]
    world.run["status"].pop("job")
    assert await head_of(world, [forged, real], known=False) is None
    assert await head_of(world, [real], known=False) == real["metadata"]["name"]


async def test_a_forged_head_changes_nothing_for_a_run(world: World) -> None:
    operator = Operator(world)
    forged = forged_head(world)
    # First, as in a list of the apiserver, which is sorted by name.
    world.objects = {("Pod", "aaa-evil"): forged, **world.objects}
    world.watched = WatchedObjects(lambda _: None, lambda _: None)
    operator.use_head(world)  # a new process
    for step in range(2, 12):
        world.drive(step, max_steps=100)
        await operator.reconcile()
        world.now += timedelta(seconds=3)
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 11)
    assert world.status.failures_without_progress == 0
    assert [item.ready for item in world.status.roles if item.name == "driver"] == [1]


def orphans(observed: Observed) -> list[Pod]:
    return [pod for pod in observed.pods if pod.orphan]


async def test_pods_of_a_ray_cluster_that_was_deleted_without_them_are_orphans(
    world: World,
) -> None:
    """`kubectl delete raycluster --cascade=orphan`; KubeRay takes them over by their labels."""
    for pod in world.pods():
        del pod["metadata"]["ownerReferences"]
    pods = [item for (kind, _), item in world.objects.items() if kind == "Pod"]
    cluster = world.objects.pop(("RayCluster", NAME))
    observed, uid = await seen(world, pods)
    assert len(orphans(observed)) == len(pods) > 1
    assert all(pod.ownerless for pod in observed.pods)
    assert observed.head(uid) is None
    cluster["metadata"] |= {"uid": "new", "creationTimestamp": "2026-01-01T01:00:00Z"}
    world.objects["RayCluster", NAME] = cluster
    observed, uid = await seen(world, pods)
    assert len(orphans(observed)) == len(pods)
    assert observed.head(uid) is None, "although the new RayCluster names it"


async def test_a_pod_whose_owner_was_removed_still_belongs_to_its_ray_cluster(
    world: World,
) -> None:
    (real,) = world.pods(Role.DRIVER)
    del real["metadata"]["ownerReferences"]
    observed, uid = await seen(world, [real])
    head = observed.head(uid)
    assert head is not None
    assert (head.ownerless, head.orphan) == (True, False)


@pytest.mark.parametrize("change", ["run-uid", "cluster"])
async def test_a_pod_without_owner_that_is_not_of_this_run_never_counts(
    world: World, change: str
) -> None:
    (real,) = world.pods(Role.DRIVER)
    del real["metadata"]["ownerReferences"]
    key = {"run-uid": "agenticrun.dev/run-uid", "cluster": "ray.io/cluster"}[change]
    real["metadata"]["labels"][key] = "another"
    assert (await seen(world, [real]))[0].pods == ()


async def test_a_suspended_ray_cluster_is_seen(world: World) -> None:
    cluster = world.objects["RayCluster", NAME]
    assert not (await seen(world, []))[0].cluster_suspended
    cluster["spec"]["suspend"] = True
    assert (await seen(world, []))[0].cluster_suspended
    cluster["spec"]["suspend"] = False
    for kind, status, suspended in (
        ("RayClusterSuspending", "True", True),
        ("RayClusterSuspended", "True", True),
        ("RayClusterSuspended", "False", False),
        ("RayClusterProvisioned", "True", False),
    ):
        cluster["status"]["conditions"] = [{"type": kind, "status": status}]
        assert (await seen(world, []))[0].cluster_suspended is suspended
    assert not Observed().cluster_suspended
